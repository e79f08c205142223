"""Server-sent events framing and the reading end of a job."""

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
    """A response body: the frames of one job. Closing it, even before the first frame, is leaving the job."""

    def __init__(self, job, frames):
        self._job, self._frames = job, frames

    def __iter__(self):
        return self._frames

    def close(self):
        self._frames.close()
        self._job.leave()


def events(job, gone, silence=None):
    """The job's events as they come, and None whenever ``silence`` seconds passed without one.

    gone: a function that says whether the client has left; then :class:`ClientGone` is raised. Leaving the iteration early is
    leaving the job (``Job.leave``).
    """
    heard = looked = time.monotonic()
    try:
        while True:
            found = job.next(POLL)
            now = time.monotonic()
            if now - looked >= POLL or found is None:
                looked = now
                if gone():
                    raise ClientGone
            if found is not None:
                heard = now
                yield found
                if isinstance(found, (Ended, Failed)):
                    return
            elif silence is not None and now - heard >= silence:
                heard = now
                yield None
    finally:
        job.leave()
