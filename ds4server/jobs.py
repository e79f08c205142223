"""A request on its way through the engine, and the events by which its HTTP thread hears of it.

A job's life is

    queued → running → ended            (ended: completed, failed or canceled)

Only the engine thread moves a job forward, and it tells about it through the job's mailbox: ``Admitted``, any
number of ``Produced``, then exactly one of ``Ended`` and ``Failed``. An HTTP thread may ask for cancellation at any time.
Every decision about a job is written into it where it is taken; :meth:`Job.record` reads them out.
"""

import queue
import threading
import time
from dataclasses import dataclass, field

from ds4ref.chat import CallArguments, CallBegin, CallEnd, Reasoning, Text
from ds4ref.generation import Generation, Step
from ds4ref.reuse import Decision

from .lanes import SERIAL, Needs

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
    """The engine could not finish the job. The message says nothing about the prompt or the code. status, code: of an HTTP
    answer that has not begun; retry: seconds after which another attempt makes sense."""

    message: str
    status: int = 500
    code: str | None = None
    retry: int | None = None


class QueueFull(Exception):
    """No place in the queue."""


class Stopping(Exception):
    """The server is shutting down."""


class Mailbox:
    """Where the events of one or several jobs arrive, for one reader."""

    def __init__(self):
        self._events = queue.SimpleQueue()

    def put(self, job, event):
        self._events.put((job, event))

    def next(self, timeout):
        """The next (job, event), or None when ``timeout`` seconds passed without one."""
        try:
            job, event = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        job.taken(event)
        return job, event


@dataclass(eq=False)
class Job:
    """One request. ``surface`` and ``request_id`` are for the log and the stats; ``nbytes``: of its body."""

    generation: Generation
    surface: str
    request_id: str
    fallback_reason: str | None = None
    marks: tuple[int, ...] = ()
    """Positions of the prompt that the next turn's prompt is expected to share (``Conversation.marks``)."""
    needs: Needs | None = None
    """What it asks of a lane (default: of a stream)."""
    nbytes: int = 0
    outlives_reader: bool = False
    """Whether it is computed to its end although its client has left."""
    opening: int | None = None
    """The position up to which the prompt is what every conversation with the same system prompt begins with."""
    blocks: dict[str, str] = field(default_factory=dict)
    """Id → text of the tool calls that are known in the conversation; the answer's are added when it has ended."""
    scores: list | None = None
    """Where those of the prompt are wanted: the ``Logprob`` of each of its tokens but the first, as far as it is computed."""
    index: int = 0
    """Which choice of its request it is."""
    mailbox: Mailbox = field(default_factory=Mailbox)
    think: str = "none"
    """The level of reasoning: none, low, high or max."""
    earlier: "Job | None" = None
    """The job in place of which it is."""

    lane: str = SERIAL
    route_reason: str = "cont_unavailable"
    decision: Decision | None = None
    """What of the prompt was reused: set by the engine when the job is admitted."""
    reuse_kind: str = "cold"
    reuse_miss: str | None = None
    cached: int = 0
    computed: int = 0
    """Prompt tokens that were computed, so far."""
    drafted: int = 0
    """Draft tokens that were judged."""
    accepted: int = 0
    passes: int = 0
    """Times that the model was asked for what comes next; ``sampled`` tokens came of them."""
    sampled: int = 0
    outcome: str | None = None
    """"completed", "failed" or "canceled", once it has ended."""
    calls: list = field(default_factory=list)
    """Events of the tool parser."""
    arrived: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None
    prefilled_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None

    def __post_init__(self):
        if self.needs is None:
            generation = self.generation
            self.needs = Needs(len(generation.prompt), generation.budget)
        self._cancel = threading.Event()
        self.admitted = threading.Event()
        self._backlog, self._unheard = 0, False
        self._lock = threading.Lock()
        self._clock = time.time() - time.monotonic()

    def next(self, timeout):
        """The next event of a job that shares its mailbox with none, or None when ``timeout`` seconds passed without one."""
        found = self.mailbox.next(timeout)
        return None if found is None else found[1]

    def taken(self, event):
        """The reader has taken an event out of the mailbox."""
        with self._lock:
            self._backlog -= _size(event)

    def cancel(self):
        """Ask the engine to stop; harmless when the job has ended."""
        self._cancel.set()

    def leave(self):
        """Nobody reads any further: the job is cancelled, or goes on unheard."""
        self._unheard = True
        if not self.outlives_reader:
            self.cancel()

    @property
    def cancelled(self):
        return self._cancel.is_set()

    def tell(self, event):
        """Called by the engine alone. Returns whether the reader still keeps up."""
        if isinstance(event, Produced):
            self.calls += [e for e in event.step.events if isinstance(e, (CallBegin, CallArguments, CallEnd))]
        if self._unheard:
            return True
        with self._lock:
            self._backlog += _size(event)
            keeps_up = self._backlog <= BACKLOG
        self.mailbox.put(self, event)
        return keeps_up

    @property
    def replayed(self):
        """Prompt tokens computed although some state once held them."""
        return self.decision.replayed if self.decision is not None else 0

    @property
    def speculated(self):
        """Whether drafts were verified for it."""
        return self.drafted > 0

    def summary(self):
        """``last_request``: what became of a job that has ended. No text of the prompt or the answer."""
        generation = self.generation
        said = {
            "request_id": self.request_id,
            "surface": self.surface,
            "effective_lane": self.lane,
            "reuse_kind": self.reuse_kind,
            "speculation_active": self.speculated,
            "fallback_reason": self.fallback_reason,
            "finish": str(generation.finish or self.outcome),
            "prompt_tokens": len(generation.prompt),
            "cached_tokens": self.cached,
            "computed_tokens": self.computed,
            "replayed_tokens": self.replayed,
            "completion_tokens": len(generation.generated),
            "seconds": round((self.ended_at or time.monotonic()) - self.arrived, 6),
        }
        return said | ({"reuse_miss": self.reuse_miss} if self.reuse_miss else {})

    def record(self):
        """Everything about the job that is not text, for traces: plain JSON. Times are seconds since 1970, None where it did
        not come so far."""
        generation = self.generation
        times = {"arrived": self.arrived, "admitted": self.admitted_at, "prefilled": self.prefilled_at,
                 "first_token": self.first_token_at, "ended": self.ended_at}  # fmt: skip
        return {
            "request_id": self.request_id, "surface": self.surface, "lane": self.lane, "route_reason": self.route_reason,
            "reuse_kind": self.reuse_kind, "cached": self.cached, "computed": self.computed, "replayed": self.replayed,
            "reuse_miss": self.reuse_miss, "fallback_reason": self.fallback_reason, "speculation_active": self.speculated,
            "drafted": self.drafted, "accepted": self.accepted,
            "outcome": self.outcome, "finish": str(generation.finish or self.outcome), "prompt_tokens": len(generation.prompt),
            "completion_tokens": len(generation.generated),
            **{name: None if at is None else round(self._clock + at, 6) for name, at in times.items()},
        }  # fmt: skip

    def timings(self):
        """The ``timings`` object of the API; what does not apply and rates that cannot be computed are left out."""
        end, out = time.monotonic(), len(self.generation.generated)
        timings = {"prefill_tokens": self.computed, "prefill_cached_tokens": self.cached, "effective_lane": self.lane,
                   "reuse_kind": self.reuse_kind, "speculation_active": self.speculated}  # fmt: skip
        if self.first_token_at is not None:
            timings["ttft_ms"] = round(1000 * (self.first_token_at - self.arrived), 3)
        if self.computed and self.prefilled_at > self.admitted_at:
            timings["prefill_tok_s"] = round(self.computed / (self.prefilled_at - self.admitted_at), 3)
        if out and end > self.prefilled_at:
            timings["decode_tok_s"] = round(out / (end - self.prefilled_at), 3)
            timings["tok_per_step"] = round(self.sampled / self.passes, 3)
        reasons = {"fallback_reason": self.fallback_reason, "reuse_miss": self.reuse_miss}
        return timings | {name: reason for name, reason in reasons.items() if reason}


def _size(event):
    if not isinstance(event, Produced):
        return 0
    return sum(len(e.fragment if isinstance(e, CallArguments) else e.text) for e in event.step.events
               if isinstance(e, (Text, Reasoning, CallArguments)))  # fmt: skip
