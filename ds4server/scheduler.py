"""The bank driver: rows that share the banks of one model, advanced pass by pass.

Theory of operation. A *row* is a job that has a bank. It is

    prefilling → decoding → retired          failed, cancelled or too slow a reader: any → retired

One pass (:meth:`Scheduler.turn`) first advances prefills, then steps every decoding row once. With a live chunk V, prefills
together advance by exactly one chunk of one row, the row that has waited longest since its last chunk, new ones first; so
between two tokens of a row at most one chunk is computed. With V = 0 they are all drained first. Rows join and leave between
passes only. Every row samples, stops and ends by its own ``Generation``; whatever one row raises ends that row alone.

A row that drafts (:mod:`drafts`) makes one trial a pass instead of one step, so it may produce several tokens; the trials of a
pass are verified in one program where the model has one. Before a trial its state lacks the newest token of its answer, which
an ordinary row's state holds between two passes.

Jobs wait in order of arrival for one of three lanes (:mod:`lanes`). The continuous lane runs as many rows as there are banks
for it; beside it runs one serial job or one group of static rows. All lanes take banks from the same pool, so a
conversation may go from one to another. A job of another lane may pass one whose lane is taken; none passes one that waits for
a bank, but for the turn that a held bank owes (:mod:`holds`).

One thread calls everything here. Knows nothing about HTTP, queues between threads, or model families.
"""

import logging
import time
from collections import Counter
from dataclasses import dataclass, field

from ds4ref.generation import Logprob, Step
from ds4ref.reuse import Admission
from ds4ref.sampling import logprobs
from ds4ref.speculative import verify_together
from ds4ref.stop import Finish

from .banks import REFUSALS
from .holds import Holds
from .jobs import Admitted, Ended, Failed, Job, Produced
from .lanes import CONTINUOUS, FAILED, LANES, REASONS, REJECTED, SERIAL, STATIC, SURFACES, Environment, fallback, gather, route

log = logging.getLogger("ds4server")

COUNTERS = (
    "started", "completed", "failed", "canceled", "prefill_computed", "prefill_cached", "decoded",
    *(f"shed.{why}" for why in ("queue_full", "slow_reader", "shutdown", "memory")),
    *(f"route.{surface}_{lane}" for surface in SURFACES for lane in LANES),
    *(f"decision.{reason}" for reason in REASONS),
    *(f"admit.{kind}" for kind in ("cold", "exact", "partial", "fork")),
    "spec.drafted", "spec.accepted", "spec.quench",
    *(f"reject.{lane}.{reason}" for lane in LANES for reason in REFUSALS),
)  # fmt: skip

SCORED = 64  # prompt tokens whose logits are held at once where all of them are wanted
SHUTDOWN = Failed("the server is shutting down", 503, retry=5)
CANCELLED = Failed("cancelled")
TOO_OLD = Failed("the request waited too long; try again later", 429, "queue_full", retry=1)
BROKEN = Failed("the engine failed to compute this answer")
NO_MEMORY = Failed("the memory does not hold this request; try again later, or with a smaller budget", 503, retry=5)


@dataclass(frozen=True)
class Schedule:
    """Prompt tokens that are computed before the scheduler looks up. sched: while nobody decodes, 0 for all that is left; live:
    while somebody does, 0 for prefills that are never interleaved."""

    sched: int = 4096
    live: int = 512

    def width(self, remaining, decoding):
        """Of the next chunk of a row with ``remaining`` prompt tokens."""
        return min(remaining, (self.live if self.live and decoding else self.sched) or remaining)


@dataclass(eq=False)
class Row:
    """A job on its bank. begun: what the answer's start made visible; stops: where its chunks end; served: the pass of its last
    chunk; speculator: of a row that drafts, from where it begins to."""

    job: Job
    admission: Admission
    begun: Step
    stops: tuple[int, ...]
    served: int = -1
    speculator: object = None

    @property
    def bank(self):
        return self.admission.bank

    @property
    def state(self):
        return self.admission.bank.state

    @property
    def remaining(self):
        """Prompt tokens still to be computed; none: the row decodes."""
        return max(0, self.admission.decision.tokens - self.state.length)


@dataclass
class Scheduler:
    """Rows on the banks of ``reuser``, and the jobs that wait for them.

    settle: (job, event) → None, told of every job that ends; stopped: () → bool, whether running rows are out of time;
    arriving: () → bool, whether a job arrived since the last pass, for which a long chunk ends early; grouped: whether the
    model decodes several rows in one program; memory: ``banks.Memory`` or None where states are allocated from the start;
    drafts: ``drafts.Drafts`` or None where nobody drafts.
    """

    model: object
    reuser: object
    keeper: object
    settle: object
    env: Environment = Environment()
    schedule: Schedule = Schedule()
    memory: object = None
    grouped: bool = False
    coalesce_ms: float = 0
    stopped: object = lambda: False
    arriving: object = lambda: False
    drafts: object = None
    holds: Holds = field(default_factory=Holds)
    counts: Counter = field(default_factory=lambda: Counter(dict.fromkeys(COUNTERS, 0)))
    rows: list[Row] = field(default_factory=list)
    waiting: list[Job] = field(default_factory=list)
    """In order of arrival."""

    def __post_init__(self):
        self._pass = 0

    # Waiting

    def route(self, job):
        """Decide a job's lane."""
        job.lane, job.route_reason = route(job.needs, job.surface, self.env)
        job.fallback_reason = job.fallback_reason or fallback(job.needs, self.env)
        self.counts[f"route.{job.surface}_{job.lane}"] += 1
        self.counts[f"decision.{job.route_reason}"] += 1

    def sweep(self, oldest):
        """End waiting jobs whose client left, or that arrived before ``oldest``."""
        for job in [job for job in self.waiting if job.cancelled or job.arrived < oldest]:
            self.waiting.remove(job)
            if job.cancelled:
                self._end(job, "canceled", CANCELLED)
            else:
                self.counts["shed.queue_full"] += 1
                self._end(job, "failed", TOO_OLD)

    def refuse(self):
        """End every waiting job: the server is shutting down."""
        while self.waiting:
            self._end(self.waiting.pop(0), "failed", SHUTDOWN)

    def refill(self):
        """Start the waiting jobs whose turn it is. Returns the milliseconds after which another look is worth it although
        nothing happened, or None."""
        closed = {CONTINUOUS} if self._of(CONTINUOUS) >= self.env.width else set()
        if len(self.rows) > self._of(CONTINUOUS):
            closed |= {SERIAL, STATIC}
        starved = next((job.arrived for job in self.waiting if job.lane not in closed), None) if not self._free() else None
        look = self.holds.expire(starved)
        for job in list(self.waiting):
            if job.lane in closed or job not in self.waiting:
                continue
            if not self.holds.answers(job.generation.prompt) and not self._free():
                continue
            begin = [job]
            if job.lane == STATIC:
                begin, gathering = self._gathered(job)
                look = min((ms for ms in (look, gathering) if ms is not None), default=None)
            for other in begin:
                lane = other.lane
                if not self._start(other):
                    return self.refill() if other.lane != lane else None
            if job.lane != CONTINUOUS:
                closed |= {SERIAL, STATIC}
            elif self._of(CONTINUOUS) >= self.env.width:
                closed.add(CONTINUOUS)
        return look

    def _gathered(self, first):
        """(the jobs of the static group that ``first`` begins, none while it waits for more; milliseconds to wait or None)."""
        rest = [job for job in self.waiting[self.waiting.index(first) :] if job.lane != CONTINUOUS]
        waited = 1000 * (time.monotonic() - first.arrived)
        n = gather([job.lane for job in rest], min(self.env.width, self._free()), waited, self.coalesce_ms)
        if n == 1:
            self._to_serial(first, first.fallback_reason)
        return rest[:n], None if n else self.coalesce_ms - waited

    def _of(self, lane):
        return sum(row.job.lane == lane for row in self.rows)

    def _free(self):
        return sum(not bank.protected for bank in self.reuser.banks)

    def _to_serial(self, job, why):
        job.lane, job.fallback_reason = SERIAL, why
        self.counts[f"route.{job.surface}_{SERIAL}"] += 1

    # Joining

    def _start(self, job):
        """Give a waiting job a bank, or end it; False where the memory makes it wait."""
        place = self.waiting.index(job)
        del self.waiting[place]
        try:
            if self._admit(job):
                return True
        except Exception:
            log.exception("request %s could not be admitted", job.request_id)
            self._end(job, "failed", BROKEN)
            return True
        self.waiting.insert(place, job)
        return False

    def _admit(self, job):
        """Whether a job got a bank, or has ended; not, where the memory does not hold it now."""
        prompt, reuser = job.generation.prompt, self.reuser
        text, serial = self.keeper.text_of(prompt), job.lane == SERIAL
        decision = reuser.decide(prompt, text, fresh=job.scores is not None)
        if (refusal := self._refusal(job, reuser.banks[decision.target])) is not None:
            return self._refused(job, refusal)
        restored, miss = (None, None)
        if decision.computed > 1 and job.scores is None:
            restored, miss = self.keeper.restore(prompt, text, decision.cached, bank=not serial)
        if restored is not None:
            decision = reuser.decide(prompt, text, restored)
        else:
            target = reuser.banks[decision.target]
            if target.state.length > (decision.cached if decision.target == decision.source else 0):
                self.keeper.displaced(target)
        source = None if decision.source is None else reuser.banks[decision.source]
        admission = reuser.admit(prompt, text, job.marks, decision)
        self.holds.forget(admission.bank)
        try:
            stops = self.keeper.begin(admission, source, serial, job.marks, job.opening, job.blocks)
            row = Row(job, admission, job.generation.start(), tuple(sorted({*stops, *admission.stops})))
            if job.scores is None:
                self._begin_drafts(row)
        except Exception:
            self._empty(admission.bank)
            raise
        if self.memory is not None:
            self.memory.hold(admission.bank, self._target(job))
        job.decision, job.cached = decision, row.state.length
        job.reuse_kind = decision.kind if job.cached else "cold"
        job.reuse_miss = None if job.cached else decision.miss or miss
        self.counts["prefill_cached"] += job.cached
        self.counts[f"admit.{job.reuse_kind}"] += 1
        self._joined(row)
        return True

    def _joined(self, row):
        self.rows.append(row)
        row.job.admitted_at = time.monotonic()
        if not row.job.admitted.is_set():
            row.job.admitted.set()
            row.job.tell(Admitted())
        if not row.remaining:
            self._prefilled(row)

    def _begin_drafts(self, row):
        """From here on the row's tokens are told to the drafter, where it drafts."""
        if self.drafts is not None:
            row.speculator = self.drafts.speculator(self.model, row.job, row.bank)

    def _target(self, job):
        """Tokens that a job's sequence may reach."""
        return min(len(job.generation.prompt) + job.generation.budget, job.generation.context)

    def _refusal(self, job, bank):
        return None if self.memory is None else self.memory.refusal(self.reuser.banks, bank, self._target(job))

    def _refused(self, job, why):
        """The memory does not hold a job now: it goes to the serial lane; there it waits until nothing else runs, then what is
        only kept for reuse is given up, and if that is not enough it ends."""
        if job.lane != SERIAL:
            self.counts[f"reject.{job.lane}.{why}"] += 1
            self._to_serial(job, REJECTED)
        elif not self.rows:
            for bank in self.reuser.banks:
                self.keeper.displaced(bank)
                self._empty(bank)
            if self._refusal(job, self.reuser.banks[0]) is None:
                return self._admit(job)
            self.counts[f"reject.{SERIAL}.{why}"] += 1
            self.counts["shed.memory"] += 1
            self._end(job, "failed", NO_MEMORY)
            return True
        return False

    # One pass

    def turn(self):
        """Advance prefills, then step every decoding row once."""
        self._pass += 1
        for row in list(self.rows):
            if self._gone(row):
                self._stop(row)
        self._prefill()
        self._decode()

    def _prefill(self):
        pending = [row for row in self.rows if row.remaining]
        if self.schedule.live and pending:
            self._chunk(min(pending, key=lambda row: row.served))
        elif not self.schedule.live:
            for row in pending:
                while row in self.rows and row.remaining:
                    self._chunk(row)

    def _chunk(self, row):
        """Compute one chunk of a row's prompt, which ends at a stop of the row at the latest."""
        row.served = self._pass
        state, begin, prompt = row.state, row.state.length, row.job.generation.prompt
        decoding = any(other.remaining == 0 for other in self.rows)
        end = begin + self.schedule.width(row.remaining, decoding)
        end = min([end, *(stop for stop in row.stops if stop > begin)])
        try:
            while state.length < end:
                at = state.length
                self._compute(row, prompt[at : min(end, at + self.model.chunk)])
                row.job.computed += state.length - at
                self.counts["prefill_computed"] += state.length - at
                if self._gone(row):
                    return self._stop(row)
                if 0 < self.schedule.live <= state.length - begin and self.arriving() and self._room():
                    break
            row.admission.progress()
            self.keeper.reached(row.bank)
            if row.remaining == 0 and row.job.scores is not None:
                self._begin_drafts(row)
        except Exception:
            return self._fail(row)
        if row.remaining == 0:
            self._prefilled(row)

    def _compute(self, row, tokens):
        """Advance by tokens of the prompt, and score them where that is asked for."""
        job, state = row.job, row.state
        if row.speculator is not None:
            return row.speculator.prefill(tokens)
        if job.scores is None:
            return self.model.prefill(state, tokens)
        prompt, top = job.generation.prompt, job.generation.params.top_logprobs
        for begin in range(0, len(tokens), SCORED):
            at = state.length + 1
            for following, logits in zip(prompt[at:], self.model.verify(state, tokens[begin : begin + SCORED]), strict=False):
                value, best = logprobs(logits, following, top)
                job.scores.append(Logprob(following, value, tuple(best)))

    def _room(self):
        """Whether one more job might run."""
        return self._free() > 0 and len(self.rows) < self.env.width

    def _prefilled(self, row):
        """The prompt has been computed; an answer without tokens ends here."""
        row.job.prefilled_at = time.monotonic()
        if row.job.generation.finish is not None:
            row.job.tell(Produced(row.begun))
            self._complete(row)

    def _decode(self):
        going, drafting = [], []
        for row in [row for row in self.rows if row.remaining == 0]:
            if self._gone(row):
                self._stop(row)
            elif row.speculator is not None and row.job.generation.generated:
                drafting.append(row)
            elif (token := self._sample(row)) is not None and row.speculator is None:
                going.append((row, token))
        self._step(going)
        if drafting:
            self._try(drafting)

    def _sample(self, row):
        """The row's next token; None when it has ended."""
        try:
            steps = [row.job.generation.accept(row.state.logits)]
        except Exception:
            return self._fail(row)
        return steps[0].token if self._produced(row, steps) else None

    def _produced(self, row, steps):
        """Tell what one pass of the model has let a row choose; whether the row goes on."""
        job = row.job
        if job.first_token_at is None:
            job.first_token_at = time.monotonic()
        job.passes += 1
        for step in steps:
            job.sampled += 1
            self.counts["decoded"] += 1
            if not job.tell(Produced(step)):
                self.counts["shed.slow_reader"] += 1
                self._stop(row)
                return False
        if job.generation.finish is None:
            return True
        self._complete(row)
        return False

    def _step(self, going):
        """Let rows consume their tokens, in one program where the model has one. What fails together is tried one by one."""
        if self.grouped and len(going) > 1:
            before = [row.state.length for row, _ in going]
            try:
                self.model.decode([row.state for row, _ in going], [token for _, token in going])
            except Exception:
                log.exception("decoding %d rows together failed", len(going))
            going_on = [pair for pair, n in zip(going, before, strict=True) if pair[0].state.length == n]
        else:
            going_on = going
        for row, token in going_on:
            try:
                self.model.step(row.state, token)
            except Exception:
                self._fail(row)
        for row, _ in going:
            if row in self.rows:
                self.keeper.reached(row.bank)

    def _try(self, rows):
        """One trial of each row."""
        ready, begin, cost = [], time.perf_counter(), self.drafts.cost
        compared = cost is not None and cost.due(len(rows))
        for row in rows:
            room = self.keeper.room(row.bank)  # the first token of a trial is no draft
            most = 0 if compared else None if room is None else room - 1
            try:
                ready.append((row, row.speculator.prepare(row.job.generation, most)))
            except Exception:
                self._fail(row)
        found = self._verified(ready)
        if cost is not None and len(found) == len(rows):
            cost.took([len(trial.drafts) for _, trial, _ in found], time.perf_counter() - begin)
        for row, trial, seen in found:
            try:
                steps = self._settled(row, trial, seen)
            except Exception:
                self._fail(row)
                continue
            if self._produced(row, steps):
                self.keeper.reached(row.bank)

    def _verified(self, ready):
        """(row, trial, what the model has computed for it) of each, in one program where the model has one. What fails together
        is tried one by one."""
        if self.grouped and len(ready) > 1:
            try:
                seen = verify_together([row.speculator for row, _ in ready], [trial for _, trial in ready])
                return [(row, trial, found) for (row, trial), found in zip(ready, seen, strict=True)]
            except Exception:
                log.exception("verifying the drafts of %d rows together failed", len(ready))
        found = []
        for row, trial in ready:
            try:
                found.append((row, trial, *verify_together([row.speculator], [trial])))
            except Exception:
                self._fail(row)
        return found

    def _settled(self, row, trial, seen):
        """Judge a row's trial. → its steps."""
        drafting, job = row.speculator, row.job
        paused = drafting.pace.paused
        steps = drafting.settle(job.generation, trial, *seen)
        self.counts["spec.drafted"] += drafting.drafted - job.drafted
        self.counts["spec.accepted"] += drafting.accepted - job.accepted
        self.counts["spec.quench"] += paused == 0 < drafting.pace.paused
        job.drafted, job.accepted = drafting.drafted, drafting.accepted
        return steps

    # Leaving

    def _gone(self, row):
        return row.job.cancelled or self.stopped()

    def _stop(self, row):
        """End a row before its answer is complete; what it has computed stays in the bank."""
        row.job.generation.finish = Finish.CANCELLED
        late = self.stopped() and not row.job.cancelled
        self._retire(row, *(("failed", SHUTDOWN) if late else ("canceled", CANCELLED)))

    def _complete(self, row):
        self._retire(row, "completed", Ended(row.job.timings()))

    def _retire(self, row, outcome, event):
        """The bank keeps what was computed; whoever asked is told before any of it is written."""
        self._leave(row)
        try:
            self.reuser.retire(row.bank, self.keeper.text_of(row.state.tokens))
            if row.speculator is not None:
                self.drafts.left(row.bank, row.speculator)
            self._end(row.job, outcome, event)
            self.keeper.retired(row.bank)
            if row.job.outcome == "completed" and row.job.calls:
                self.holds.hold(row.bank)
        except Exception:
            log.exception("a bank could not be kept")
            self._empty(row.bank)
            if row.job.outcome is None:
                self._end(row.job, outcome, event)

    def _fail(self, row):
        """A row has raised: its bank is emptied. Before its first token a batched attempt is made again, serially."""
        job = row.job
        log.exception("request %s failed on the %s lane", job.request_id, job.lane)
        self._leave(row)
        self.keeper.failed(row.bank)
        self._empty(row.bank)
        if job.lane == SERIAL or job.prefilled_at is not None:
            self._end(job, "failed", BROKEN)
            return
        self._to_serial(job, FAILED)
        job.cached = job.computed = 0
        if job.scores is not None:
            job.scores.clear()
        self.waiting.insert(0, job)

    def _leave(self, row):
        self.rows.remove(row)
        if self.memory is not None:
            self.memory.release(row.bank)

    def _empty(self, bank):
        self.keeper.forget(bank)
        self.holds.forget(bank)
        if self.drafts is not None:
            self.drafts.forget(bank)
        try:
            self.reuser.clear(bank)
        except Exception:
            log.exception("a bank could not be emptied")

    def _end(self, job, outcome, event):
        job.outcome, job.ended_at = outcome, time.monotonic()
        self.counts[outcome] += 1
        self.settle(job, event)
