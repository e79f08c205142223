"""Reads calls that write each argument as a pair of tags around bare text:
`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>`.

Theory of operation
-------------------
    state   reads                                                        goes to
    NAME    the tool's name, up to the first tag                         NEXT
    NEXT    white space                                                  KEY at an argument's tag; done at the call's end
    KEY     an argument's name                                           TYPE
    TYPE    white space; the argument's type, where a family writes it   VALUE
    VALUE   the value, up to a closing tag behind which the next         NEXT; done where the value's own closing tag is
            argument or the call's end stands                            missing

Nothing is escaped in this syntax, so a closing tag inside a value is told from the real one by what follows it. Values
are JSON except strings, which are bare text: the declared schema says which is which (`xmlcalls.json_value`).

Knows nothing about reasoning or visible text (`framed`).
"""
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import regex

from ds4ref.chat import grammars, jsontext, schema
from ds4ref.chat.framed import WHITE
from ds4ref.chat.lark import Writer, escape
from ds4ref.chat.xmlcalls import json_value

_NAME = re.compile(r"[ \t\r\n]*([A-Za-z0-9_.:/-]{0,129})([ \t\r\n]*)")
_MAX_NAME = 128
_MAX_KEY = 8192
_STRING = frozenset({"string"})


@dataclass(frozen=True)
class Tags:
    """The tags of a family, each as (opening, closing)."""

    call: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    """The opening is "" where the key's closing tag opens the value."""
    type: tuple[str, str] = ("", "")
    """Around the argument's type, between key and value, in families that may write it."""
    block_end: str = ""
    """Closes the block that holds all calls, where there is one."""

    @property
    def inside(self) -> tuple[str, ...]:
        """The tags inside a call, with its closing tag."""
        return (self.call[1], *self.key, *self.value, *self.type)


def call(tags: Tags, before: str, middle: str, between: str, after: str) -> Callable[[Writer, grammars.Function], str]:
    """The `grammars.Calls.call` of a family. before: "{name}" and what follows it; middle: between key and value; between:
    behind a value; after: in front of the call's closing tag."""
    bare = grammars.Bare(tags.value[1], f"{escape(tags.value[1])}|{escape(tags.call[1])}")
    key = (tags.key[0], tags.key[1] + middle + tags.value[0])
    return grammars.bare_call(before, after + tags.call[1], key, bare, between)


class ArgKeys:
    """The body (`framed.Body`) of one call. schemas: tool name → schema of its arguments."""

    def __init__(self, tags: Tags, schemas: Mapping[str, Mapping]):
        self.name: str | None = None
        self.pieces: list[str] = []
        self.done = self.repaired = False
        self.bad: str | None = None
        self._tags, self._schemas = tags, schemas
        self._state = "NAME"
        self._keys: set[str] = set()
        self._key = self._typed = ""
        self._scan = 0  # Up to here the unconsumed text holds no end of the value.

    def read(self, text: str, final: bool) -> int:
        """See `framed.Body`."""
        self._text, self._at, self._final = text, 0, final
        while not self.done and not self.bad and getattr(self, "_in_" + self._state.lower())():
            pass
        return self._at

    # --- tags --------------------------------------------------------------------------------------------------------

    def _front(self, at: int, *tags: str) -> str | None:
        """Which of the tags stands at a place; "" if one may begin there, None if none does."""
        for tag in tags:
            if tag and self._text.startswith(tag, at):
                return tag
        rest = self._text[at:at + max(map(len, tags))]
        return "" if any(tag.startswith(rest) for tag in tags) else None

    def _skip_white(self) -> None:
        while self._at < len(self._text) and self._text[self._at] in WHITE:
            self._at += 1

    def _fail(self, reason: str) -> bool:
        self.bad = reason
        return False

    # --- states ------------------------------------------------------------------------------------------------------

    def _in_name(self) -> bool:
        found = _NAME.match(self._text, self._at)
        name, end = found[1], found.end()
        tag = self._front(end, self._tags.key[0], self._tags.call[1])
        if len(name) > _MAX_NAME or tag is None or (not name and (tag or self._final)):
            return self._fail("a tool's name is expected at its beginning")
        if not tag:
            if not self._final:
                return False
            if name not in self._schemas:
                return self._fail("it ends in the tool's name")
        self.name, self._at, self._state = name, end, "NEXT"
        return True

    def _in_next(self) -> bool:
        self._skip_white()
        opening, closing = self._tags.key[0], self._tags.call[1]
        match self._front(self._at, opening, closing):
            case "":
                if self._final:
                    self._at, self.repaired = len(self._text), True
                    self._finish()
                return False
            case None:
                return self._fail("text stands where an argument belongs")
            case tag if tag == closing:
                self._at += len(closing)
                self._finish()
                return False
        self._at += len(opening)
        self._state = "KEY"
        return True

    def _in_key(self) -> bool:
        end = self._text.find(self._tags.key[1], self._at)
        if end < 0:
            if self._final or len(self._text) - self._at > _MAX_KEY:
                return self._fail("an argument's name does not end")
            return False
        self._key, self._typed = self._text[self._at:end].strip(WHITE), ""
        if not self._key:
            return self._fail("an argument has no name")
        self._at = end + len(self._tags.key[1])
        self._state = "TYPE"
        return True

    def _in_type(self) -> bool:
        opening = self._tags.value[0]
        if opening:
            self._skip_white()
            found = self._front(self._at, opening, self._tags.type[0])
            if not found:
                return self._fail("an argument has no value") if found is None or self._final else False
            if found != opening:
                return self._read_type()
            self._at += len(opening)
        self._begin_value()
        return True

    def _read_type(self) -> bool:
        opening, closing = self._tags.type
        end = self._text.find(closing, self._at)
        if end < 0:
            if self._final or len(self._text) - self._at > _MAX_KEY:
                return self._fail("an argument's type does not end")
            return False
        self._typed = self._text[self._at + len(opening):end].strip(WHITE)
        self._at = end + len(closing)
        return True

    def _begin_value(self) -> None:
        declared = schema.declared(schema.property_schema(self._schemas.get(self.name, {}), self._key))
        if declared is None and self._typed in schema.TYPES:
            declared = frozenset({self._typed})
        self._types = declared
        self._muted = self._key in self._keys
        self._streams = declared == _STRING and not self._muted
        if self._streams:
            self.pieces.append(self._pair() + '"')
        self._state, self._scan = "VALUE", 0
        self._doubted = False  # Whether the value holds a closing tag, taken for data.

    def _pair(self) -> str:
        """The beginning of the next pair of the object."""
        opening = ", " if self._keys else "{"
        self._keys.add(self._key)
        return f'{opening}"{jsontext.escape(self._key)}": '

    def _in_value(self) -> bool:
        pattern = _ends(self._tags, self._final)
        end = len(self._text)
        if self._final:  # A tag may be cut off at the end.
            end -= _overlap(self._text[self._at:], self._tags.key[0], self._tags.value[1], self._tags.call[1])
        found = pattern.search(self._text, self._at + self._scan, end, partial=not self._final)
        if found and not found.partial:
            if found["value"]:
                self._end_value(self._text[self._at:found.start()])
                self._at = found.end("value")
                self._state = "NEXT"
                return True
            self._end_value(self._text[self._at:found.start()].rstrip(WHITE))
            self._at, self.repaired = found.end("call"), True
            self._finish()
            return False
        if self._final:
            return self._close_value(self._text[self._at:end].rstrip(WHITE))
        sure = found.start() if found else len(self._text)
        self._scan = sure - self._at
        if self._streams:
            piece = self._text[self._at:sure].rstrip(WHITE)
            if piece:
                self.pieces.append(jsontext.escape(piece))
            self._at += len(piece)
            self._scan -= len(piece)
            self._doubted = self._doubted or self._tags.value[1] in piece
        return False

    def _close_value(self, text: str) -> bool:
        """No closing tag came: the value is the rest of the text, if that can be all of it."""
        as_text = json_value(text, self._types) == f'"{jsontext.escape(text)}"'
        misfit = self._types is not None and "string" not in self._types and as_text
        if misfit or self._doubted or self._tags.value[1] in text:
            return self._fail("a value is incomplete")
        self._end_value(text)
        self._at, self.repaired = len(self._text), True
        self._finish()
        return False

    def _end_value(self, text: str) -> None:
        if self._streams:
            self.pieces.append(jsontext.escape(text) + '"')
        elif not self._muted:
            self.pieces.append(self._pair() + json_value(text, self._types))

    def _finish(self) -> None:
        self.pieces.append("}" if self._keys else "{}")
        self.done = True


@functools.lru_cache(maxsize=32)
def _ends(tags: Tags, final: bool) -> regex.Pattern:
    """Where a value may end: its closing tag with an argument or the call's end behind it, or the call's closing tag with
    another call, the block's end or the end of the text behind it."""
    end = r"|\Z" if final else ""
    after_value = "|".join(map(regex.escape, (tags.key[0], tags.call[1])))
    after_call = "|".join(map(regex.escape, filter(None, (tags.call[0], tags.block_end))))
    return regex.compile(
        f"(?P<value>{regex.escape(tags.value[1])})[ \t\r\n]*(?:{after_value}{end})"
        f"|(?P<call>{regex.escape(tags.call[1])})[ \t\r\n]*(?:{after_call}{end})"
    )


def _overlap(text: str, *closers: str) -> int:
    """How many characters at the end of text are the beginning of a closing tag, at least three."""
    for length in range(max(map(len, closers)) - 1, 2, -1):
        if len(text) >= length and any(c.startswith(text[-length:]) for c in closers):
            return length
    return 0
