"""Server-sent events framing and the reading end of jobs."""

import json
import time

from ..jobs import Ended, Failed

KEEP_ALIVE = b": keep-alive\n"
QUEUED = b": queued\n"
DONE = b"data: [DONE]\n\n"
POLL = 0.25  # seconds between two looks at whether the client is still there


def data(payload):
    """One unnamed event."""
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def event(name, payload):
    """One named event."""
    return f"event: {name}\n".encode() + data(payload)


class ClientGone(Exception):
    """Nobody reads this answer any more."""


class Stream:
    """A response body: the frames of a request's answers. Closing it, even before the first frame, is leaving them."""

    def __init__(self, answers, frames):
        self._answers, self._frames = answers, frames

    def __iter__(self):
        return self._frames

    def close(self):
        self._frames.close()
        self._answers.leave()


def events(jobs, gone, silence=None):
    """(job, event) of jobs with one mailbox as they come, and (None, None) whenever ``silence`` seconds passed without one;
    until every job has ended or one has failed.

    gone: a function that says whether the client has left; then :class:`ClientGone` is raised. Leaving the iteration early is
    leaving the jobs (``Job.leave``).
    """
    heard = looked = time.monotonic()
    running = len(jobs)
    try:
        while running:
            found = jobs[0].mailbox.next(POLL)
            now = time.monotonic()
            if now - looked >= POLL or found is None:
                looked = now
                if gone():
                    raise ClientGone
            if found is not None:
                heard = now
                yield found
                if isinstance(found[1], Failed):
                    return
                running -= isinstance(found[1], Ended)
            elif silence is not None and now - heard >= silence:
                heard = now
                yield None, None
    finally:
        for job in jobs:
            job.leave()
