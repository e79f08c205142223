"""The engine thread: the only place that touches the model.

Theory of operation. HTTP threads parse, render and tokenise, then submit a :class:`Job`; one thread takes jobs in arrival
order and runs each to its end. A job's life is

    queued → running → ended            (ended: finished, failed or cancelled)

Only the engine thread moves a job forward, and it tells about it through the job's own event queue: ``Admitted``, any
number of ``Produced``, then exactly one of ``Ended`` and ``Failed``. An HTTP thread may ask for cancellation at any time;
the engine looks before every token, in prefill and in decoding, so a job ends within one token of the request.
No lock is held while computing.
"""

import logging
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from ds4ref.chat import CallArguments, Reasoning, Text
from ds4ref.generation import Generation, Step
from ds4ref.reuse import Decision
from ds4ref.stop import Finish

log = logging.getLogger("ds4server")

SURFACES = ("openai_chat",)
COUNTERS = (
    "started", "completed", "failed", "canceled", "prefill_computed", "prefill_cached", "decoded",
    "shed.queue_full", "shed.slow_reader", "shed.shutdown", *(f"route.{surface}_serial" for surface in SURFACES),
)  # fmt: skip
BACKLOG = 1 << 20  # characters of undelivered text at which a reader counts as too slow


@dataclass(frozen=True)
class Admitted:
    """The job has left the queue; its prompt is being computed."""


@dataclass(frozen=True)
class Produced:
    step: Step


@dataclass(frozen=True)
class Ended:
    """The answer is complete: the reason is ``generation.finish``."""

    timings: dict


@dataclass(frozen=True)
class Failed:
    """The engine could not finish the job. The message says nothing about the prompt or the code."""

    message: str


class QueueFull(Exception):
    """No place in the queue."""


class Stopping(Exception):
    """The server is shutting down."""


@dataclass
class Job:
    """One request on its way through the engine. ``surface`` and ``request_id`` are for the log and the stats."""

    generation: Generation
    surface: str
    request_id: str
    fallback_reason: str | None = None
    marks: tuple[int, ...] = ()
    """Positions of the prompt that the next turn's prompt is expected to share (``Conversation.marks``)."""
    decision: Decision | None = None
    """What of the prompt was reused: set by the engine when the job is admitted."""
    arrived: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None
    first_token_at: float | None = None

    def __post_init__(self):
        self._events = queue.SimpleQueue()
        self._cancel = threading.Event()
        self.admitted = threading.Event()
        self._backlog = 0
        self._lock = threading.Lock()

    def next(self, timeout):
        """The next event, or None when ``timeout`` seconds passed without one."""
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        with self._lock:
            self._backlog -= _size(event)
        return event

    def cancel(self):
        """Ask the engine to stop; harmless when the job has ended."""
        self._cancel.set()

    @property
    def cancelled(self):
        return self._cancel.is_set()

    def tell(self, event):
        """Called by the engine alone. Returns whether the reader still keeps up."""
        with self._lock:
            self._backlog += _size(event)
            keeps_up = self._backlog <= BACKLOG
        self._events.put(event)
        return keeps_up


def _size(event):
    if not isinstance(event, Produced):
        return 0
    return sum(len(e.fragment if isinstance(e, CallArguments) else e.text) for e in event.step.events
               if isinstance(e, (Text, Reasoning, CallArguments)))  # fmt: skip


class Engine:
    """Owns ``model`` and the banks of ``reuser``, and runs jobs on them, one at a time, on its own thread."""

    def __init__(self, model, reuser, max_queue=64):
        self._model, self._reuser = model, reuser
        self._max_queue = max_queue
        self._jobs = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._stopping = threading.Event()
        self._busy = False
        # Every key exists from the start: the dictionary never changes size while another thread copies it.
        self.counts = Counter(dict.fromkeys(COUNTERS, 0))
        self.last_request = None
        self._thread = threading.Thread(target=self._run, name="ds4-engine", daemon=True)

    def start(self):
        self._thread.start()

    def submit(self, job):
        """Queue ``job``. QueueFull when it would wait behind too many others, Stopping when the server is going down."""
        with self._lock:
            if self._stopping.is_set():
                self.counts["shed.shutdown"] += 1
                raise Stopping
            if self._waiting >= self._max_queue + (not self._busy):
                self.counts["shed.queue_full"] += 1
                raise QueueFull
            self._waiting += 1
            self.counts["started"] += 1
            self.counts[f"route.{job.surface}_serial"] += 1
        self._jobs.put(job)

    def stop(self, grace=5.0):
        """Refuse new jobs, give the running one ``grace`` seconds, end the thread."""
        self._deadline = time.monotonic() + grace
        self._stopping.set()
        self._jobs.put(None)
        self._thread.join(grace + 5)

    @property
    def stopping(self):
        return self._stopping.is_set()

    def snapshot(self):
        """(counts, queue depth, busy, last request) at one moment; never waits for a computation."""
        with self._lock:
            return Counter(self.counts), self._waiting, self._busy, self.last_request

    def _run(self):
        while (job := self._jobs.get()) is not None:
            with self._lock:
                self._waiting -= 1
                self._busy = True
            try:
                self._serve(job)
            finally:
                with self._lock:
                    self._busy = False
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                with self._lock:
                    self._waiting -= 1
                self._settle(job, "failed", Failed("the server is shutting down"))

    def _serve(self, job):
        job.admitted_at = time.monotonic()
        job.admitted.set()
        outcome, event = "canceled", Failed("cancelled")
        if not self._gone(job):
            job.tell(Admitted())
            try:
                outcome, event = self._compute(job)
            except Exception:
                log.exception("request %s failed", job.request_id)
                outcome, event = "failed", Failed("the engine failed to compute this answer")
        self._settle(job, outcome, event)

    def _compute(self, job):
        """Admit the job to the bank that serves it best and run it there. The bank keeps what was computed, also when the
        job is cancelled; after a failure it is emptied."""
        admission = self._reuser.admit(job.generation.prompt, marks=job.marks)
        job.decision = admission.decision
        self.counts["prefill_cached"] += admission.decision.cached
        try:
            outcome = self._run_job(job, admission)
        except BaseException:
            self._reuser.clear(admission.bank)
            raise
        self._reuser.retire(admission.bank)
        return outcome

    def _run_job(self, job, admission):
        model, generation, state = self._model, job.generation, admission.bank.state
        produced = Produced(generation.start())
        for part in _parts(admission, model.chunk):
            if self._gone(job):
                return self._stopped(job)
            model.prefill(state, part)
            admission.progress()
            self.counts["prefill_computed"] += len(part)
        prefilled = time.monotonic()
        if generation.finish is not None:
            job.tell(produced)
        while generation.finish is None:
            if self._gone(job):
                return self._stopped(job)
            step = generation.accept(state.logits)
            if job.first_token_at is None:
                job.first_token_at = time.monotonic()
            self.counts["decoded"] += 1
            if not job.tell(Produced(step)):
                self.counts["shed.slow_reader"] += 1
                return self._stopped(job)
            if generation.finish is None:
                model.step(state, step.token)
        return "completed", Ended(_timings(job, prefilled, time.monotonic()))

    def _gone(self, job):
        return job.cancelled or (self.stopping and time.monotonic() > self._deadline)

    def _stopped(self, job):
        job.generation.finish = Finish.CANCELLED
        if self.stopping and not job.cancelled:
            return "failed", Failed("the server is shutting down")
        return "canceled", Failed("cancelled")

    def _settle(self, job, outcome, event):
        now = time.monotonic()
        generation = job.generation
        summary = {
            "request_id": job.request_id,
            "surface": job.surface,
            "effective_lane": "serial",
            "reuse_kind": job.decision.kind if job.decision else "cold",
            "speculation_active": False,
            "finish": str(generation.finish or outcome),
            "prompt_tokens": len(generation.prompt),
            "cached_tokens": job.decision.cached if job.decision else 0,
            "completion_tokens": len(generation.generated),
            "seconds": round(now - job.arrived, 6),
        }
        summary |= _reasons(job)
        with self._lock:
            self.counts[outcome] += 1
            self.last_request = summary
        ttft = "-" if job.first_token_at is None else f"{job.first_token_at - job.arrived:.3f}s"
        log.info(
            "%s prompt=%d cached=%d ttft=%s out=%d finish=%s total=%.3fs",
            job.surface, len(generation.prompt), summary["cached_tokens"], ttft, len(generation.generated),
            summary["finish"], now - job.arrived,
        )  # fmt: skip
        job.tell(event)


def _timings(job, prefilled, end):
    """The ``timings`` object of the API; rates that cannot be computed are left out."""
    prompt, out = job.decision.computed, len(job.generation.generated)
    timings = {"prefill_tokens": prompt, "prefill_cached_tokens": job.decision.cached, "effective_lane": "serial",
               "reuse_kind": job.decision.kind, "speculation_active": False}  # fmt: skip
    if job.first_token_at is not None:
        timings["ttft_ms"] = round(1000 * (job.first_token_at - job.arrived), 3)
    if prompt and prefilled > job.admitted_at:
        timings["prefill_tok_s"] = round(prompt / (prefilled - job.admitted_at), 3)
    if out and end > prefilled:
        timings["decode_tok_s"] = round(out / (end - prefilled), 3)
        timings["tok_per_step"] = 1.0
    return timings | _reasons(job)


def _reasons(job):
    """Why something asked for, or some state that was there, was not used."""
    reasons = {"fallback_reason": job.fallback_reason, "reuse_miss": job.decision.miss if job.decision else None}
    return {name: reason for name, reason in reasons.items() if reason}


def _parts(admission, chunk):
    """The remaining prompt in parts of at most ``chunk`` tokens that end at every position to capture a checkpoint at."""
    at = admission.decision.cached
    end = at + len(admission.remaining)
    start = at
    while at < end:
        stop = min([at + chunk, end, *(s for s in admission.stops if s > at)])
        yield admission.remaining[at - start : stop - start]
        at = stop
