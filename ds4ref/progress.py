"""A progress line on stderr for work that lasts longer than two seconds. Silent where stderr is no terminal."""

import sys
import time


class Progress:
    """``with Progress("prefill", total) as progress: … progress.advance()``. Nothing is shown in the first two seconds."""

    def __init__(self, what, total, stream=None, clock=time.monotonic):
        self.what, self.total, self.done = what, total, 0
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._shown = False

    def __enter__(self):
        self._start = self._last = self._clock()
        return self

    def __exit__(self, *_):
        if self._shown:
            print("\r\x1b[K", end="", file=self._stream, flush=True)

    def advance(self, n=1):
        """n more units are done."""
        self.done += n
        now = self._clock()
        if now - self._start < 2 or now - self._last < 0.2 or not self._stream.isatty():
            return
        self._shown, self._last = True, now
        rate = self.done / (now - self._start)
        left = (self.total - self.done) / rate
        bar = "█" * (30 * self.done // max(1, self.total))
        line = f"\r{self.what} {bar:░<30} {self.done}/{self.total}  {rate:.1f}/s  {left:.0f} s left\x1b[K"
        print(line, end="", file=self._stream, flush=True)
