"""Calls whose arguments stand between tags, each value as bare text: reading one (`XmlCall`, a body of `framed`) and
writing one (`write`), by a `Syntax`.

    <tool_call>                              <dots_function_call>
    <function=NAME>                          <invoke name="NAME">
    <parameter=KEY>                          <parameter name="KEY">
    VALUE                                    VALUE
    </parameter>                             </parameter>
    </function>                              </invoke>
    </tool_call>                             </dots_function_call>

Theory of operation
-------------------
    state      consumes                             leaves on
    HEAD       white space                          <function=NAME> → PARAMETERS
    PARAMETERS white space                          <parameter=KEY> → VALUE; </function> → TAIL; </tool_call> → done
    VALUE      one value                            its end → PARAMETERS
    TAIL       white space                          </tool_call> → done; anything else → done, its tag supplied

Nothing in a value is escaped, so `</parameter>` ends it only where one of the tags that may come next follows; elsewhere
it is text of the value. `</function>` inside a value is text too if a `</parameter>` comes later; if none does, or if
the whole frame closes and another opens, the value's own closing tag was left out. A value that can only be a string is
told as it comes; any other when it is complete, since what it is decides how it is written. A parameter that comes
twice counts once, the first time.

Knows nothing about frames, reasoning or tokens. Source: the templates of the families that use it, as their pages
describe them.
"""
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import regex

from ds4ref.chat import jsontext, schema

WHITE = " \t\r\n"

_MAX_HEAD = 1024
"""Characters of a function's or parameter's name."""


@dataclass(frozen=True)
class Tag:
    """An element with a name: `<function=NAME>` … `</function>`."""

    before: str
    after: str
    closing: str


@dataclass(frozen=True)
class Syntax:
    """How a family writes a call."""

    opening: str
    closing: str
    call: Tag
    parameter: Tag
    own_lines: bool = True
    """Whether a value stands on lines of its own, so that it loses one newline at either end."""
    words: bool = False
    """Whether the family writes scalars as Python does: True, False, None."""


FUNCTION = Tag("<function=", ">", "</function>")
PARAMETER = Tag("<parameter=", ">", "</parameter>")


# --- writing --------------------------------------------------------------------------------------------------------


def write(syntax: Syntax, name: str, arguments: Mapping[str, Any], *, words: bool = False) -> str:
    """A call. Strings stand as they are, objects and arrays as JSON, other values as JSON too or, with words, as Python
    prints them."""
    newline = "\n" if syntax.own_lines else ""
    lines = [syntax.opening, f"{syntax.call.before}{name}{syntax.call.after}"]
    for key, value in arguments.items():
        head = f"{syntax.parameter.before}{key}{syntax.parameter.after}"
        lines.append(f"{head}{newline}{value_text(value, words)}{newline}{syntax.parameter.closing}")
    return "\n".join([*lines, syntax.call.closing, syntax.closing])


def value_text(value: Any, words: bool) -> str:
    """A value as bare text."""
    if isinstance(value, str):
        return value
    if words and not isinstance(value, (Mapping, list, tuple)):
        return str(value)
    return jsontext.dumps(value)


# --- reading --------------------------------------------------------------------------------------------------------

_WORDS = {"True": "true", "False": "false", "None": "null"}
_ZEROS = re.compile(r"([+-]?)0*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")


def json_value(text: str, types: frozenset[str] | None, words: bool = False) -> str:
    """The JSON text of a value that was written as bare text. types: what the schema admits (`schema.declared`).

    A declared string is the text as it stands. Otherwise text that spells a JSON value of an admitted type is that
    value, 02134 the number where a number is admitted, and anything else a string. words: True, False and None are
    values even where no type is declared."""
    string = f'"{jsontext.escape(text)}"'
    others = None if types is None else types - {"string"}
    if others is not None and not others:
        return string
    bare = text.strip(WHITE)
    if bare in _WORDS and (words or others):
        bare = _WORDS[bare]
    elif others and others & {"integer", "number"} and (number := _ZEROS.fullmatch(bare)):
        bare = number[1].replace("+", "") + number[2]
    try:
        value = jsontext.loads(bare)
    except ValueError:
        return string
    # A quoted text is quoted text: strings are written bare.
    return string if isinstance(value, str) or not schema.fits(value, others) else bare


class XmlCall:
    """One call being read; see `framed.Body`. schemas: tool name → the schema of its arguments."""

    def __init__(self, syntax: Syntax, schemas: Mapping[str, Mapping]):
        self.name: str | None = None
        self.pieces: list[str] = []
        self.done = False
        self.bad: str | None = None
        self.repaired = False
        self._syntax, self._schemas = syntax, schemas
        self._state = "head"
        self._text, self._final, self._at = "", False, 0
        self._keys: set[str] = set()

    def read(self, text: str, final: bool) -> int:
        """Go on with the text not consumed before and what came after it; returns how much is consumed. final: no more
        will come."""
        self._text, self._final, self._at = text, final, 0
        while not self.done and self.bad is None and getattr(self, "_in_" + self._state)():
            pass
        return self._at

    # --- tags --------------------------------------------------------------------------------------------------------

    def _skip_white(self) -> None:
        while self._at < len(self._text) and self._text[self._at] in WHITE:
            self._at += 1

    def _front(self, *tags: str) -> str | None:
        """Which tag comes next; "" if that is not known yet, None if it is none of them. At the end of all text a
        closing tag that is cut, or missing, is None too."""
        for tag in tags:
            if self._text.startswith(tag, self._at):
                return tag
        rest = self._text[self._at:self._at + _MAX_HEAD]
        return "" if not self._final and any(tag.startswith(rest) for tag in tags) else None

    def _head(self, tag: Tag) -> str | None:
        """The name in the tag that begins here, consumed. None if it is not complete yet, or (then `bad` is set) none."""
        start = self._at + len(tag.before)
        end = self._text.find(tag.after, start, start + _MAX_HEAD)
        name = self._text[start:end if end >= 0 else start + _MAX_HEAD]
        cut = end < 0 and (self._final or len(name) == _MAX_HEAD)
        if cut or "\n" in name or "<" in name or (end >= 0 and not name.strip()):
            self.bad = f"{tag.before} is not followed by a name"
            return None
        if end < 0:
            return None
        self._at = end + len(tag.after)
        return name

    def _cut_off(self, *tags: str) -> bool:
        """Whether the text ends here, or inside one of these closing tags."""
        rest = self._text[self._at:]
        return self._final and (not rest or (len(rest) > 1 and any(tag.startswith(rest) for tag in tags)))

    # --- the states --------------------------------------------------------------------------------------------------

    def _in_head(self) -> bool:
        self._skip_white()
        match self._front(self._syntax.call.before):
            case "":
                return False
            case None:
                self.bad = f"text stands where {self._syntax.call.before} belongs"
                return False
        name = self._head(self._syntax.call)
        if name is None:
            return False
        self.name, self._state = name.strip(), "parameters"
        return True

    def _in_parameters(self) -> bool:
        self._skip_white()
        syntax = self._syntax
        closers = (syntax.call.closing, syntax.closing, syntax.parameter.closing)
        match self._front(syntax.parameter.before, *closers):
            case "":
                return False
            case None:
                if self._cut_off(*closers):
                    self._at = len(self._text)
                    return self._end(repaired=True)
                self.bad = "text stands where a parameter belongs"
                return False
            case tag if tag == syntax.parameter.before:
                return self._begin_value()
            case tag:
                self._at += len(tag)
        if tag == syntax.closing:
            return self._end(repaired=True)
        if tag == syntax.parameter.closing:
            self.repaired = True
            return True
        self._state = "tail"
        return True

    def _in_tail(self) -> bool:
        self._skip_white()
        tag = self._front(self._syntax.closing)
        if tag == "":
            return False
        if tag or self._cut_off(self._syntax.closing):
            self._at += len(tag or self._text[self._at:])
        return self._end(repaired=not tag)

    def _end(self, repaired: bool) -> bool:
        self.pieces.append("}" if self._keys else "{}")
        self.done, self.repaired = True, self.repaired or repaired
        return False

    # --- values ------------------------------------------------------------------------------------------------------

    def _begin_value(self) -> bool:
        key = self._head(self._syntax.parameter)
        if key is None:
            return False
        self._types = schema.declared(schema.property_schema(self._schemas.get(self.name, {}), key))
        self._counts = key not in self._keys
        self._opening = (", " if self._keys else "{") + f'"{jsontext.escape(key)}": '
        self._keys.add(key)
        self._string = self._counts and self._types == {"string"}
        if self._string:
            self.pieces.append(self._opening + '"')
        self._value: list[str] = []  # Its text that is certain, as far as it has not been told.
        self._begun = not self._syntax.own_lines  # Whether the newline before it is behind us.
        self._scan = 0  # How much behind `_at` is known to hold no end.
        self._suspended = False  # At `_at` stands a tag that ends the value, unless its own closing tag comes later.
        self._state = "value"
        return True

    def _in_value(self) -> bool:
        start, ends = self._at + self._scan, _ends(self._syntax, self._final)
        while True:
            mark = ends.search(self._text, start, partial=not self._final)
            if mark is not None and not mark.partial and mark["inner"]:
                if not self._suspended:
                    self._grow(mark.start())
                    self._suspended = True
                start = mark.end("inner")
                continue
            break
        if mark is not None and not mark.partial:
            if mark["end"]:
                self._grow(mark.start())
                self._at = mark.end("end")
            else:
                self._recover(mark.start())
            return self._end_value()
        if self._final:
            self._recover(len(self._text) - self._overlap())
            return self._end_value(cut=True)
        known = len(self._text) if mark is None else mark.start()
        if not self._suspended:
            self._grow(known)
        self._scan = known - self._at
        return False

    def _recover(self, end: int) -> None:
        """The value's closing tag is missing: it ends at the first tag that closes more, or else at `end`."""
        self.repaired = True
        if not self._suspended:
            self._grow(end)

    def _overlap(self) -> int:
        """How many characters at the end are the beginning of the value's closing tag."""
        closing = self._syntax.parameter.closing
        rest = self._text[max(self._at, len(self._text) - len(closing)):]
        return next((n for n in range(min(len(rest), len(closing) - 1), 2, -1) if rest.endswith(closing[:n])), 0)

    def _grow(self, end: int) -> None:
        """The text up to `end` belongs to the value."""
        text, self._at = self._text[self._at:end], end
        if text and not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
        self._value.append(text)
        if self._string and text:
            text = "".join(self._value)
            told = text.removesuffix("\n") if self._syntax.own_lines else text
            self.pieces.append(jsontext.escape(told))
            self._value = [text[len(told):]]

    def _end_value(self, cut: bool = False) -> bool:
        text = "".join(self._value)
        if self._syntax.own_lines:
            text = text.removesuffix("\n")
        if self._string:
            self.pieces.append(jsontext.escape(text) + '"')
        elif self._counts:
            value = json_value(text, self._types, self._syntax.words)
            if cut and self._types and "string" not in self._types and value.startswith('"'):
                self.bad = "a value is incomplete"
                return False
            self.pieces.append(self._opening + value)
        self._state = "parameters"
        return True


@functools.lru_cache(maxsize=16)
def _ends(syntax: Syntax, final: bool) -> regex.Pattern:
    """What may end a value. end: its closing tag. inner: a tag that closes more. Neither group: that tag again, with the
    end of the frame and the beginning of the next call behind it. final: no text will follow."""
    white = f"[{WHITE}]*"
    value, call, frame = (regex.escape(x) for x in (syntax.parameter.closing, syntax.call.closing, syntax.closing))
    following = "|".join(regex.escape(x) for x in (syntax.parameter.before, syntax.call.closing, syntax.closing))
    following += r"|\Z" if final else ""
    another = white.join(regex.escape(x) for x in (syntax.opening, syntax.call.before))
    return regex.compile(rf"(?P<end>{value}){white}(?:{following})|{call}{white}{frame}{white}{another}|(?P<inner>{call})")
