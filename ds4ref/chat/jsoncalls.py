"""Reads calls that are one JSON object between two markers: `<tool_call>{"name": NAME, "arguments": {…}}</tool_call>`.

Theory of operation
-------------------
One pass over the characters knows of each whether it is inside a string and how deep it is nested. On depth one it notes
keys and their values: the tool is known when the string behind "name" ends, and the arguments' text is passed on, as it
was generated, from the brace behind "arguments" to its partner, once the tool is known (before that it waits). Behind the
object only the closing marker may come; the object as a whole is then decoded strictly (RFC 8259).

    state    reads                                                   goes to
    OBJECT   up to the brace that closes the object                  TAIL
    TAIL     white space and the closing marker                      done

A last brace that is missing before the closing marker is supplied if the arguments are complete. Arguments that are a
JSON text in a string are decoded, null or none are {}.

Knows nothing about reasoning or visible text (`framed`).
"""
import re
from collections.abc import Mapping
from typing import Any

from ds4ref.chat import jsontext
from ds4ref.chat.framed import WHITE

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class JsonCall:
    """The body (`framed.Body`) of one call. close: the marker behind the object, "" if whoever feeds it knows the end.
    arguments: the key of the arguments. name: the tool if it is known before; the object's own "name" is then ignored."""

    def __init__(self, close: str, arguments: str = "arguments", name: str | None = None):
        self.name = name
        self.pieces: list[str] = []
        self.done = self.repaired = False
        self.bad: str | None = None
        self._close, self._arguments, self._given = close, arguments, name
        self._state = "OBJECT"
        self._json = ""  # The object's text so far.
        self._depth = 0
        self._quote = -1  # Where the open string begins in it, -1 if none is open.
        self._escaped = False
        self._key: str | None = None
        self._start = self._stop = -1  # The arguments' object in it.
        self._passed = 0  # Up to here it has been passed on.

    def read(self, text: str, final: bool) -> int:
        """See `framed.Body`."""
        at = 0
        if self._state == "OBJECT":
            at = self._scan(text)
            if self._state == "OBJECT" and final and not self.bad:
                self._state = "TAIL"
        if self._state == "TAIL" and not self.bad:
            at = self._read_tail(text, at, final)
        return at

    def _fail(self, reason: str) -> None:
        self.bad = reason

    # --- the object --------------------------------------------------------------------------------------------------

    def _scan(self, text: str) -> int:
        """Take text up to the end of the object; returns how much."""
        skipped = 0
        if not self._json:
            skipped = len(text) - len(text.lstrip(WHITE))
            text = text[skipped:]
            if text and text[0] != "{":
                self._fail("it is no JSON object")
                return skipped
        base = len(self._json) - skipped
        self._json += text
        for place in range(base + skipped, len(self._json)):
            char = self._json[place]
            if self._quote >= 0:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._end_string(place)
            elif char == '"':
                self._quote = place
            elif char in "{[":
                self._open(char, place)
            elif char in "}]":
                self._depth -= 1
                if self._depth == 1 and self._start >= 0 and self._stop < 0:
                    self._stop = place + 1
            elif char == "," and self._depth == 1:
                self._key = None
            if self.bad:
                self._json = self._json[:place + 1]
                self._pass_on()
                return place + 1 - base
            if self._depth == 0 or (char == "<" and self._quote < 0):
                end = place + (char != "<")
                self._json = self._json[:end]
                self._state = "TAIL"
                self._pass_on()
                return end - base
        self._pass_on()
        return skipped + len(text)

    def _open(self, char: str, place: int) -> None:
        self._depth += 1
        if self._depth == 2 and char == "{" and self._key == self._arguments and self._start < 0:
            self._start = self._passed = place

    def _end_string(self, place: int) -> None:
        start, self._quote = self._quote, -1
        if self._depth != 1:
            return
        try:
            text = jsontext.loads(self._json[start:place + 1])
        except ValueError:
            return self._fail("it is not JSON")
        if self._key is None:
            self._key = text
        elif self._key == "name" and self.name is None:
            if not NAME.fullmatch(text):
                return self._fail("its name cannot be a tool's")
            self.name = text

    def _pass_on(self) -> None:
        if self.name is None or self._start < 0:
            return
        stop = self._stop if self._stop >= 0 else len(self._json)
        if stop > self._passed:
            self.pieces.append(self._json[self._passed:stop])
            self._passed = stop

    # --- behind it ---------------------------------------------------------------------------------------------------

    def _read_tail(self, text: str, at: int, final: bool) -> int:
        while at < len(text) and text[at] in WHITE:
            at += 1
        rest = text[at:at + len(self._close)]
        if rest == self._close:
            at += len(self._close)
            if not self._close and text[at:]:
                self._fail("text stands behind the JSON object")
            elif self._close or final:
                self._finish()
        elif not self._close.startswith(rest):
            self._fail("text stands behind the JSON object" if self._depth == 0 else "it is not JSON")
        elif final:
            at, self.repaired = len(text), True
            self._finish()
        return at

    def _finish(self) -> None:
        if self._depth == 1 and self._quote < 0 and self._stop >= 0:
            self._json, self.repaired = self._json + "}", True
        try:
            call = jsontext.loads(self._json)
        except ValueError:
            return self._fail("it is not JSON")
        if not isinstance(call, Mapping):
            return self._fail("it is no JSON object")
        if self.name is None:
            return self._fail("it names no tool")
        if self._start < 0:
            text = _object(call.get(self._arguments))
            if text is None:
                return self._fail("its arguments are no JSON object")
            self.pieces.append(text)
        self.done = True


def _object(value: Any) -> str | None:
    """The JSON text of arguments that are not written as an object."""
    if value is None or value == "":
        return "{}"
    if isinstance(value, str):
        try:
            return value.strip(WHITE) if isinstance(jsontext.loads(value), Mapping) else None
        except ValueError:
            return None
    return None
