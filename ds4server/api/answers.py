"""The HTTP thread's side of a request that is under way: from the jobs' events to one object or a stream of frames.

A surface is a *wire*, an object that says how things look:

    whole(outcomes) -> dict          the buffered answer (:class:`Outcome` per choice, in order)
    silence() -> bytes               what breaks a silence of the keep-alive time
    begin(job), step(job, step), end(job, timings) -> frames of one choice as they come
    close() -> frames                after the last choice ended
    failed(event) -> frames          instead of anything further

What ``whole`` and the frames say follows from the same events.
"""

import secrets
import time
from dataclasses import dataclass, field

from ds4ref.chat import collect

from ..jobs import Admitted, Ended, Failed, Job, Produced
from ..lanes import SERIAL
from ..toolmemory import Pending
from . import sse
from .ask import again, jobs_of
from .body import read_object
from .errors import admission, failure


@dataclass
class Outcome:
    """What came of one choice. events: of the whole answer; entries: its ``Logprob`` list; ids: of its calls, so far."""

    job: Job
    ids: list = field(default_factory=list)
    events: list = field(default_factory=list)
    entries: list = field(default_factory=list)
    timings: dict = field(default_factory=dict)

    @property
    def generation(self):
        return self.job.generation


def read(service, req):
    """The body of a generating request as a dict; what the engine would refuse anyway is refused before it is parsed."""
    with admission():
        service.engine.check(req.content_length or 0, service.clients() > service.max_clients)
    return read_object(req)


CALL_PREFIX = {"anthropic_messages": "toolu"}
"""What the ids of calls begin with, where it is not ``call``."""


class Answers:
    """The choices of one request."""

    def __init__(self, service, ask, request_id, nbytes=0):
        self._service, self.ask = service, ask
        self.jobs = jobs_of(service, ask, request_id)
        for job in self.jobs:
            job.nbytes, job.outlives_reader = nbytes // len(self.jobs), not service.disconnect_abort
        self._outcomes = {job: Outcome(job) for job in self.jobs}

    def submit(self):
        self._submit(self.jobs)

    def _submit(self, jobs):
        with admission():
            self._service.engine.submit(*jobs)

    def leave(self):
        for job in self.jobs:
            job.leave()

    def events(self, gone, silence=None, jobs=None):
        """(job, event) as they come, and (None, None) whenever ``silence`` seconds passed without one; until every job has
        ended or one has failed. sse.ClientGone."""
        for job, event in sse.events(jobs or self.jobs, gone, silence):
            match event:
                case Produced(step):
                    self._outcomes[job].events += step.events
                    self._outcomes[job].entries += step.logprobs
                case Ended(timings):
                    self._outcomes[job].timings = timings
                    self._remember(self._outcomes[job])
            yield job, event

    def call_id(self, job, call):
        """The id of call number ``call`` of a choice, which nobody can guess."""
        ids = self._outcomes[job].ids
        while len(ids) <= call:
            ids.append(f"{CALL_PREFIX.get(self.ask.surface, 'call')}_{secrets.token_hex(16)}")
        return ids[call]

    def _remember(self, found):
        """Keep what a later request may refer to by the ids of an answer's calls."""
        if not found.job.calls:
            return
        answer = collect(found.events)
        if not answer.calls:  # the only one was cut
            return
        calls = [
            {"id": self.call_id(found.job, i), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for i, call in enumerate(answer.calls)
        ]
        message = {"role": "assistant", "content": answer.text or None, "tool_calls": calls}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        block = next((text for text, _, n in found.generation.blocks if n == len(calls)), None)
        frontier = SERIAL if found.job.lane == SERIAL else "bank"
        pending = Pending([*self.ask.messages, message], frontier, len(found.generation.prompt))
        found.job.blocks |= self._service.tools.remember([call["id"] for call in calls], block, pending)

    def collect(self, gone):
        """The :class:`Outcome` of every choice, in order. ApiError where the engine failed; sse.ClientGone."""
        self._finish(self.jobs, gone)
        if second := [job for job in map(self._again, self.jobs) if job is not None]:
            places = {job.earlier: job for job in second}
            self.jobs = [places.get(job, job) for job in self.jobs]
            self._outcomes |= {job: Outcome(job) for job in second}
            for job in second:
                self._submit([job])
                self._finish([job], gone)
        return [self._outcomes[job] for job in self.jobs]

    def _finish(self, jobs, gone):
        for _, event in self.events(gone, jobs=jobs):
            if isinstance(event, Failed):
                raise failure(event)

    def _again(self, job):
        """A second job in place of one whose call could not be read, or None."""
        if job.generation.broken_call is None:
            return None
        text = collect(self._outcomes[job].events).text
        return again(self._service, self.ask, job.request_id, job, text)

    def frames(self, wire, gone):
        """The body of a streamed answer, as ``wire`` words it. What is held back or left out is silence to the client."""
        keepalive, sent = self._service.keepalive, time.monotonic()
        try:
            if not self.jobs[0].admitted.wait(0.02):
                yield sse.QUEUED
            for job, event in self.events(gone, keepalive):
                frames = list(_worded(wire, job, event))
                if not frames and time.monotonic() - sent >= keepalive:
                    frames = [wire.silence()]
                yield from frames
                sent = time.monotonic() if frames else sent
                if isinstance(event, Failed):
                    return
            yield from wire.close()
        except sse.ClientGone:
            return


def _worded(wire, job, event):
    """The frames of one event."""
    match event:
        case None:
            return [wire.silence()]
        case Admitted():
            return wire.begin(job)
        case Produced(step):
            return wire.step(job, step)
        case Ended(timings):
            return wire.end(job, timings)
        case Failed():
            return wire.failed(event)


def sampled(job, step):
    """The ids that a step adds to a choice: none for the end token that finished it."""
    return [] if step.token is None or job.generation.policy.is_end(step.token) else [step.token]


@dataclass(frozen=True)
class Usage:
    """Token counts of a request. What was computed stays in the bank, so the rest of the prompt counts as newly kept."""

    prompt: int
    cached: int
    written: int
    generated: int
    reasoning: int


def usage(service, jobs):
    """The :class:`Usage` of a request's jobs: every prompt of the client counts once, every token that was sampled counts."""
    kept = service.plan.effective["prefix_reuse"] != "off"
    every = [*jobs, *(job.earlier for job in jobs if job.earlier is not None)]
    firsts = [job.earlier or job for job in jobs if job.generation.choice == 0]
    prompt = sum(len(job.generation.prompt) for job in firsts)
    cached = sum(job.cached for job in firsts)
    return Usage(
        prompt, cached, prompt - cached if kept else 0, sum(len(job.generation.generated) for job in every),
        sum(job.generation.reasoning_tokens for job in every),
    )  # fmt: skip


def deliver(service, req, resp, ask, wire_of):
    """Run ``ask`` and put its answer into ``resp``. wire_of: :class:`Answers` → the surface's wire."""
    answers = Answers(service, ask, req.context.request_id, req.content_length or 0)
    wire = wire_of(answers)
    gone = req.env.get("waitress.client_disconnected") if service.disconnect_abort else None
    gone = gone or (lambda: False)
    answers.submit()
    if ask.stream:
        resp.content_type = "text/event-stream; charset=utf-8"
        resp.set_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        resp.stream = sse.Stream(answers, answers.frames(wire, gone))
        return
    try:
        resp.media = wire.whole(answers.collect(gone))
    except sse.ClientGone:
        # Nobody reads this; the status is for the access log.
        resp.status = "499 Client Closed Request"
