"""What ends an answer: end tokens and their masks, stop strings, and the names of the endings.

Three independent parts, all pure: tokens and text in, decisions out. ``StopPolicy`` says which token ids end generation
and which are masked at a position; ``ReasoningTracker`` says whether a reasoning block is open there; ``StopStrings``
searches visible text for the request's stop strings. Budgets, the context limit and tool calls belong to the loop that
generates; what is visible text belongs to the chat protocol.
"""

from collections import deque
from dataclasses import dataclass, replace
from enum import StrEnum

MAX_STOPS = 16
EOS_POLICIES = ("model", "reasoning", "global")


class Finish(StrEnum):
    """Why an answer ended; each surface has its own words for these."""

    STOP = "stop"  # an end token
    STOP_STRING = "stop_string"
    LENGTH = "length"  # the budget, or an end inside open reasoning
    CONTEXT = "context"  # the context was full before the budget
    TOOL_CALLS = "tool_calls"
    ERROR = "error"
    CANCELLED = "cancelled"


def eos_policy(ignore_eos=False, ignore_eos_in_reasoning=False):
    """The policy that two flags ask for; ignoring EOS everywhere takes precedence."""
    return "global" if ignore_eos else "reasoning" if ignore_eos_in_reasoning else "model"


@dataclass(frozen=True)
class StopPolicy:
    """Which tokens end generation, and where the model is kept from choosing them.

    ``end_ids``: EOS and every end-of-turn id that the chat protocol registers as a generation stop (M in the serving
    contract). ``other_ids``: further generation stops, which no policy masks. ``eos``: ``model`` masks nothing,
    ``reasoning`` masks M while a reasoning block is open, ``global`` masks M everywhere.
    """

    end_ids: frozenset[int]
    other_ids: frozenset[int] = frozenset()
    eos: str = "model"

    def __post_init__(self):
        if self.eos not in EOS_POLICIES:
            raise ValueError(f"the EOS policy must be one of {', '.join(EOS_POLICIES)}, got {self.eos!r}")

    def masked(self, reasoning_open):
        """The ids whose logits are −inf at a position, given whether reasoning is open *before* it."""
        everywhere = self.eos == "global"
        return self.end_ids if everywhere or (self.eos == "reasoning" and reasoning_open) else frozenset()

    def is_end(self, token):
        """Whether this sampled token ends generation."""
        return token in self.end_ids or token in self.other_ids


@dataclass(frozen=True)
class ReasoningTracker:
    """Whether a reasoning block is open after the text so far. A value: ``after`` returns the next one, so drafted
    tokens can be followed and forgotten.

    Feed it the prompt's generation suffix, then the bytes of each token, control tokens included. Any of ``openings``
    opens a block and any of ``closings`` closes it, at the marker's last byte, however tokens cut the marker.
    """

    openings: tuple[bytes, ...]
    closings: tuple[bytes, ...]
    is_open: bool = False
    tail: bytes = b""  # of the text so far, what may still become the beginning of a marker

    def __post_init__(self):
        if not (self.openings and self.closings and all(self.openings) and all(self.closings)):
            raise ValueError("a reasoning block needs non-empty opening and closing markers")

    def after(self, piece):
        """The tracker after ``piece`` (bytes) has been appended."""
        is_open, text = self.is_open, self.tail + piece
        while True:
            markers = self.closings if is_open else self.openings
            ends = [at + len(m) for m in markers if (at := text.find(m)) >= 0]
            if not ends:
                break
            is_open, text = not is_open, text[min(ends) :]
        held = max(map(len, markers)) - 1
        return replace(self, is_open=is_open, tail=text[max(0, len(text) - held) :])


class _Prefix:
    """How much of one string the text ends with: the automaton of Knuth, Morris & Pratt (1977).

    The failure table grows only as far as the text has matched, so a string far longer than the answer costs nothing.
    """

    def __init__(self, string):
        self.string, self.length = string, 0
        self.failure = [0, 0]  # of each prefix length: the longest proper border

    def feed(self, char):
        """Append one character; returns whether the whole string has just been matched."""
        string, failure = self.string, self.failure
        k = self.length
        if k == len(string):
            k = failure[k]
        while k and string[k] != char:
            k = failure[k]
        if string[k] == char:
            k += 1
            if k == len(failure):
                border = failure[k - 1]
                while border and string[border] != char:
                    border = failure[border]
                failure.append(border + (string[border] == char))
        self.length = k
        return k == len(string)


class StopStrings:
    """Incremental search for stop strings in visible text.

    The match that begins earliest wins, and of those that begin at one place the one listed first: exactly what a
    search of the whole text would find, however the text was cut. Two things follow. Text that may still become part of
    a match is held back, so no part of a match is ever delivered. And a match waits while one that would win over it
    (it began earlier, or there and is listed before) may still be completed.

    At most 16 strings; empty ones are dropped. Time is linear in the text for each string.
    """

    def __init__(self, stops=()):
        if len(stops) > MAX_STOPS:
            raise ValueError(f"stop must hold at most {MAX_STOPS} strings, got {len(stops)}")
        self._prefixes = [_Prefix(s) for s in stops if s]
        self._held = deque()  # pieces of text not delivered yet
        self._start = self._end = 0  # positions of the held text
        self._best = None  # (begin, index) of the best complete match so far
        self.matched = None

    def feed(self, text):
        """Append text; returns ``(deliverable text, matched string or None)``. After a match nothing is delivered."""
        if self.matched is not None:
            return "", self.matched
        if not (self._prefixes and text):
            return text, None
        self._held.append(text)
        for char in text:
            self._end += 1
            if self._advance(char):
                return self._finish()
        return self._deliver(min([self._end, *(begin for begin, _ in self._open())])), None

    def flush(self):
        """The text ends here: ``(the held text, None)``, or a match that was still waiting, as ``feed`` returns it."""
        if self.matched is not None:
            return "", self.matched
        return (self._deliver(self._end), None) if self._best is None else self._finish()

    def _advance(self, char):
        """One character; returns whether the best match is now certain."""
        for index, prefix in enumerate(self._prefixes):
            if prefix.feed(char):
                found = (self._end - len(prefix.string), index)
                self._best = found if self._best is None else min(self._best, found)
        return self._best is not None and min(self._open()) >= self._best

    def _open(self):
        """(begin, index) of what may still win: the best match and every string that the text ends inside of."""
        best = [] if self._best is None else [self._best]
        partial = ((self._end - p.length, i) for i, p in enumerate(self._prefixes) if p.length)
        return [*best, *partial]

    def _finish(self):
        begin, index = self._best
        self.matched = self._prefixes[index].string
        before = self._deliver(begin)
        self._held.clear()
        return before, self.matched

    def _deliver(self, upto):
        """Remove and return the held text before position ``upto``."""
        pieces = []
        while self._start < upto:
            piece = self._held.popleft()
            count = upto - self._start
            if len(piece) > count:
                self._held.appendleft(piece[count:])
            pieces.append(piece[:count])
            self._start += len(pieces[-1])
        return "".join(pieces)
