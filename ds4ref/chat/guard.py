"""Keeps text that users supply from being read as special tokens.

A prompt is tokenised with the literals of special tokens ("<think>", "<|im_end|>" …) matched where the *template*
wrote them. Text of messages, tool results, schemas, names and argument values is data. So before rendering, every
literal inside such text is broken by one Unicode noncharacter (U+FDD0 … U+FDEF, reserved for a program's own use by the
Unicode Standard, section 23.7), and after rendering the noncharacters are taken out again and the literals they broke
reported as `plain` spans of the text. What a template does in between (trim, split, join, JSON) is not disturbed, since
text without such literals is not touched. A string that begins with the end of a literal or ends with the beginning of
one is broken at that edge too, as long as that edge is not white space, so that no literal arises across the border of
two strings. Literals of one character, and those of white space only, are no markers and are left alone.

A consequence to know: a template that looks for "</think>" *inside* a message's content will not find it. Protocols
whose template does this split such content beforehand (`split_reasoning`).
"""
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ds4ref.chat.errors import ChatError

_NONCHARACTERS = [chr(c) for c in range(0xFDD0, 0xFDF0)]


class Guard:
    """Break the `literals` in data, and mend the rendered text. All `data` that will be rendered (and the template, if
    any) is looked through for noncharacters of its own, so that none of those is ever taken out."""

    def __init__(self, literals: Iterable[str], *data: Any):
        self.literals = sorted({x for x in literals if len(x) > 1 and not x.isspace()}, key=len, reverse=True)
        used = set()
        for text in _strings(data):
            used.update(_NON.findall(text))
        free = [c for c in _NONCHARACTERS if c not in used]
        if not free:
            raise ChatError("the messages use every Unicode noncharacter from U+FDD0 to U+FDEF; leave one unused")
        self.mark = free[0]
        # Lookahead, so that overlapping literals are all found.
        self._find = re.compile("(?=(" + "|".join(map(re.escape, self.literals)) + "))") if self.literals else None
        self._heads = {x[:n] for x in self.literals for n in range(1, len(x))}
        self._tails = {x[n:] for x in self.literals for n in range(1, len(x))}
        self._longest = max(map(len, self.literals), default=1) - 1

    def text(self, text: str, keep: Iterable[str] = ()) -> str:
        """Break every literal in text except those in `keep`."""
        if self._find is None or not text:
            return text
        keep = frozenset(keep)
        cuts = set()
        for match in self._find.finditer(text):
            # The longest literal at this place contains every shorter one that starts here, broken by the same cut.
            if match[1] not in keep:
                cuts.add(match.start() + 1)
        for n in range(min(self._longest, len(text)), 0, -1):
            if text[-n:] in self._heads and not text[-1].isspace():
                cuts.add(len(text))
            if text[:n] in self._tails and not text[0].isspace():
                cuts.add(0)
        pieces, last = [], 0
        for cut in sorted(cuts):
            pieces.append(text[last:cut])
            last = cut
        return self.mark.join([*pieces, text[last:]])

    def data(self, value: Any) -> Any:
        """A copy of JSON-like data (mappings, lists, strings …) with every string in it broken, keys too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.data(k): self.data(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.data(v) for v in value]
        return value

    def mend(self, rendered: str) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Take the marks out. Returns the text and the (start, end) spans, ascending and disjoint, in which no special
        token may be matched; they are the literals that a mark had broken."""
        pieces = rendered.split(self.mark)
        text = "".join(pieces)
        if len(pieces) == 1:
            return text, ()
        spans: list[tuple[int, int]] = []
        place = 0
        for piece in pieces[:-1]:
            place += len(piece)
            window = max(0, place - self._longest)
            for match in self._find.finditer(text, window, min(len(text), place + self._longest)):
                start = match.start()
                for literal in self.literals:
                    end = start + len(literal)
                    if start < place < end and text.startswith(literal, start):
                        spans.append((start, end))
        return text, tuple(_merge(spans))


_NON = re.compile("[\ufdd0-\ufdef]")


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from _strings(k)
            yield from _strings(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _strings(v)


def _merge(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if out and start < out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out
