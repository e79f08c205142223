"""Reads answers in which markers frame the reasoning and every tool call: `<think>R</think>text<tool_call>…</tool_call>`.

What stands inside a call is read by a body (`argkeys.ArgKeys`, `jsoncalls.JsonCall`); this module finds the frames.

Theory of operation
-------------------
Text is appended to a buffer; `_advance` lets the current state consume from its front until it can go no further. A state
consumes only what no later character can change the meaning of, so any split of the text gives the same events up to
the borders of their pieces. White space is " ", tab, newline, carriage return.

    state      consumes                                  leaves on
    START      white space, and a repeated tag of the    anything else → REASONING or TEXT
               prompt after it
    REASONING  reasoning                                 closing tag → TEXT; an opening of calls → CALL, tentatively
    TEXT       visible text; reasoning tags vanish       an opening of calls → BLOCK or CALL
    BLOCK      white space between the calls of a        opening of a call → CALL; closing of the block → END (TEXT if it
               family that wraps its calls in a block    was empty, CONFIRM if it is tentative)
    CALL       one call                                  its end → BLOCK, or TEXT where there are no blocks; CONFIRM if it
                                                         is tentative and there is no block
    CONFIRM    white space after tentative calls         end of reasoning → TEXT or END; another call; else rejected
    RAW        everything, as visible text               –
    DROP       everything, silently                      –
    END        everything, silently; generation stops    –

Calls inside open reasoning are tentative: their events are held and their text stays available until CONFIRM accepts them
(reasoning ends, by its tag or with the answer, right after complete calls of declared tools) or something rejects them;
then the text is reasoning again. Without streaming the events of each call are held until the call is complete.

Knows nothing about tokens: control tokens that the detokenizer hides are to be given to `mark` as their text.
"""
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import regex

from ds4ref.chat import schema
from ds4ref.chat.events import CallArguments, CallBegin, CallEnd, Event, Reasoning, Text

WHITE = " \t\r\n"

_MAX_REJECTED = 32
"""Openings of calls inside reasoning that are looked into; each is read again when it turns out to be none."""


class Body(Protocol):
    """One call being read, from behind its opening marker to its closing marker."""

    name: str | None
    """The tool, as soon as it is certain."""
    pieces: list[str]
    """Text of the arguments that is certain and has not been taken; all of it is one JSON object at the end."""
    done: bool
    bad: str | None
    """Why this is no call (what stands there instead of what)."""
    repaired: bool
    """Whether something was missing that could be supplied."""

    def read(self, text: str, final: bool) -> int:
        """Go on with the text that was not consumed before, and what came after it; returns how much is consumed now.
        final: no more will come; then the body ends up done or bad."""


@dataclass(frozen=True)
class Format:
    """The markers of a family."""

    think: tuple[str, ...]
    """Each opens reasoning."""
    end_think: tuple[str, ...]
    """Each closes it, whichever opened it."""
    call: str
    """Opens a call."""
    body: Callable[[str, Mapping[str, Mapping]], Body]
    """Makes a call's body from its first character that is not white space and the tools' schemas by name."""
    block: tuple[str, str] = ("", "")
    """Opens and closes the block that holds all calls, where there is one."""
    own_lines: bool = False
    """Whether newlines around the closing reasoning tag belong to the tag."""
    inside: tuple[str, ...] = ()
    """Further markers, which the bodies know."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers, as a protocol's MARKERS lists them."""
        return tuple(dict.fromkeys(m for m in (*self.think, *self.end_think, *self.block, self.call, *self.inside) if m))


class Answer:
    """One answer's parser. thinking: whether the prompt ended in open reasoning. tools: the declared tools; None or empty,
    and markup is text. stream, single, tentative, and the attributes: see `ds4ref.chat`."""

    def __init__(self, format: Format, thinking: bool, tools: Sequence[Mapping] | None = None, *, stream: bool = True,
                 single: bool = False, tentative: bool = True):
        self.stopped = False
        self.outcome: str | None = None
        self.malformed: str | None = None
        self.block: str | None = None
        self._format, self._thinking, self._stream, self._single = format, thinking, stream, single
        self._schemas = schema.parameters(tools)
        self._tools = bool(tools)
        self._in_blocks = bool(format.block[0])
        self._openings = tuple(m for m in (format.call, format.block[0]) if m)
        marks = (*format.think, *format.end_think, *(self._openings if tools else ()))
        self._marks = regex.compile("|".join(map(regex.escape, marks)))
        self._state = "START"
        self._buffer = ""
        self._space = ""  # White space that is text only if no call follows.
        self._out: list[Event] = []
        self._held: list[Event] | None = None
        self._body: Body | None = None
        self._raw = ""  # The text of the calls being read, from their first opening.
        self._raw_call = 0  # Where the current call begins in it.
        self._tentative = False
        self._rejected = 0 if tentative else _MAX_REJECTED  # How often tentative calls were none.
        self._replayable = True  # Whether the calls so far stand together, complete and behind the text.
        self._fresh = False  # Newlines that come now belong to the closing tag of reasoning.
        self._after_call = False  # Whether nothing but white space came since the last call.
        self._final = self._closing = False
        self._calls = 0  # Complete calls.

    # --- the interface -----------------------------------------------------------------------------------------------

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of sampled text; return what is certain now."""
        if text and self._state not in ("END", "DROP"):
            self._buffer += text
            self._advance()
        return self._taken()

    mark = feed

    def finish(self, ended: str) -> list[Event]:
        """Generation ended: "stop" (an end token) or "length" (the budget). Return the rest and set `outcome`."""
        self._final = True
        self._closing = ended != "length"
        if not self._closing and self._state in ("BLOCK", "CALL", "CONFIRM"):
            self._cut()
        self._advance()
        while self._state in ("BLOCK", "CALL", "CONFIRM"):
            if self._closing:
                self._close()
            else:
                self._cut()
            self._advance()
        unfinished = self._state == "REASONING"
        if unfinished or (self._state == "TEXT" and not self._after_call):
            self._say("", flush=True)
        elif self.block and self._state == "TEXT":
            self.block += self._space  # As sampled, so that a replay continues it exactly.
        if self._state == "END":
            self.outcome = "tool_calls"
        elif ended == "length" or unfinished:
            self.outcome = "length"
        else:
            self.outcome = "tool_calls" if self._calls else "stop"
        return self._taken()

    # --- emitting ----------------------------------------------------------------------------------------------------

    def _taken(self) -> list[Event]:
        out, self._out = self._out, []
        return out

    def _emit(self, event: Event) -> None:
        (self._out if self._held is None else self._held).append(event)

    def _say(self, text: str, *, flush: bool = False) -> None:
        """Reasoning or visible text, by the state. Trailing white space waits, since it may belong to what follows."""
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        text = self._space + text
        waits = self._tools or (self._format.own_lines and self._state == "REASONING")
        kept = text.rstrip(WHITE) if waits and not flush else text
        self._space = text[len(kept):]
        if kept:
            self._out.append(Reasoning(kept) if self._state == "REASONING" else Text(kept))
            self._after_call = False
            if self._calls:
                self._replayable, self.block = False, None

    # --- the machine -------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Let states consume until one needs more text."""
        while getattr(self, "_in_" + self._state.lower())():
            pass

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken

    def _take_raw(self, length: int) -> None:
        self._raw += self._take(length)

    def _skip_white(self) -> bool:
        """Move white space to the raw text; whether anything is left."""
        self._take_raw(len(self._buffer) - len(self._buffer.lstrip(WHITE)))
        return bool(self._buffer)

    def _front(self, *markers: str) -> str | None:
        """Which of the markers the buffer begins with; "" if it may still become one, None if it is none of them."""
        for marker in markers:
            if marker and self._buffer.startswith(marker):
                return marker
        return "" if not self._final and any(m.startswith(self._buffer) for m in markers) else None

    def _in_start(self) -> bool:
        ahead = self._buffer.lstrip(WHITE)
        tags = self._format.think if self._thinking else (*self._format.think, *self._format.end_think)
        if not self._final and (not ahead or any(t != ahead and t.startswith(ahead) for t in tags)):
            return False
        tag = next((t for t in tags if ahead.startswith(t)), "")
        if tag:
            self._take(len(self._buffer) - len(ahead) + len(tag))
        opened = tag in self._format.think if tag else self._thinking
        self._state = "REASONING" if opened else "TEXT"
        return True

    def _in_reasoning(self) -> bool:
        mark = self._find_mark()
        if mark is None:
            return False
        if mark in self._format.end_think:
            if self._format.own_lines:
                self._space = self._space.rstrip("\n")
            self._say("", flush=True)
            self._take(len(mark))
            self._state, self._fresh = "TEXT", self._format.own_lines
        elif mark in self._openings and self._rejected < _MAX_REJECTED:
            self._tentative, self._held = True, []
            self._open(mark)
        else:
            self._say(self._take(len(mark)))
        return True

    def _in_text(self) -> bool:
        mark = self._find_mark()
        if mark is None:
            return False
        if mark in self._openings:
            self._open(mark)
        else:
            self._take(len(mark))
        return True

    def _find_mark(self) -> str | None:
        """Say what stands before the next marker and return the marker, now at the front of the buffer; None if there is
        none yet, with a possible beginning of one left in the buffer."""
        mark = self._marks.search(self._buffer, partial=not self._final)
        self._say(self._take(mark.start() if mark else len(self._buffer)))
        return None if mark is None or mark.partial else mark[0]

    # --- calls -------------------------------------------------------------------------------------------------------

    def _open(self, mark: str) -> None:
        self._fresh = False
        self._raw, self._raw_call = "", 0
        self._wrapped = mark == self._format.block[0]
        if self._wrapped:
            self._take_raw(len(mark))
            self._state = "BLOCK"
        else:
            self._begin_call()

    def _begin_call(self) -> None:
        self._raw_call = len(self._raw)
        self._take_raw(len(self._format.call))
        self._body, self._announced, self._state = None, False, "CALL"
        if self._held is None and not self._stream:
            self._held = []

    def _in_call(self) -> bool:
        if self._body is None:
            if not self._skip_white() and not self._closing:
                return False
            self._body = self._format.body(self._buffer[:1], self._schemas)
        body = self._body
        self._take_raw(body.read(self._buffer, self._closing))
        if body.name is not None and not self._announced:
            self._announced = True
            self._emit(CallBegin(self._calls, body.name))
        if body.pieces:
            self._emit(CallArguments(self._calls, "".join(body.pieces)))
            body.pieces.clear()
        if body.bad:
            return self._fail(body.bad)
        return self._end_call() if body.done else False

    def _end_call(self) -> bool:
        self._emit(CallEnd(self._calls))
        if self._tentative and (self._body.repaired or self._body.name not in self._schemas):
            return self._reject()
        self._calls += 1
        self._replayable = self._replayable and not self._tentative and not self._body.repaired
        wraps = self._in_blocks
        if self._tentative:
            self._state = "BLOCK" if wraps else "CONFIRM"
            return True
        if self._held is not None:
            self._out += self._held
            self._held = None
        self.block = (self.block or "") + self._space + self._raw if self._replayable and not wraps else None
        self._space = "" if not wraps else self._space
        self._state, self._after_call = "BLOCK" if wraps else "TEXT", True
        return self._end() if self._single else True

    def _in_block(self) -> bool:
        if not self._skip_white():
            return False
        self._raw_call = len(self._raw)
        close = self._format.block[1]
        match self._front(close, self._format.call):
            case "":
                return False
            case None if not self._wrapped and self._calls:
                if self._tentative:
                    self._state = "CONFIRM"
                else:
                    self._space = self._raw[len(self._raw.rstrip(WHITE)):]
                    self._state, self._replayable = "TEXT", False
                return True
            case None:
                return self._fail("text stands where a call belongs")
            case mark if mark == close:
                self._take_raw(len(close))
                return self._close_block()
        self._begin_call()
        return True

    def _close_block(self, repaired: bool = False) -> bool:
        if not self._calls:
            if self._tentative:
                return self._reject()
            self._state = "TEXT"
            return True
        if self._tentative:
            self._state = "CONFIRM"
            return True
        if self._replayable and self._wrapped and not repaired:
            self.block = self._space + self._raw
        return self._end()

    def _end(self) -> bool:
        self._state, self._space, self._buffer = "END", "", ""
        self.stopped = True
        return False

    def _in_confirm(self) -> bool:
        if not self._skip_white():
            return self._accept() if self._closing else False
        again = "" if self._wrapped else self._format.call
        match self._front(*self._format.end_think, again):
            case "":
                return False
            case None:
                return self._reject()
            case mark if mark == again:
                self._begin_call()
                return True
        return self._accept()

    def _accept(self) -> bool:
        held, self._held, self._tentative = self._held, None, False
        if self._single:
            self._out += [event for event in held if event.index == 0]
            return self._end()
        self._out += held
        self._space, self._after_call = "", True
        if self._wrapped:
            return self._end()
        self._state = "TEXT"
        return True

    def _reject(self) -> bool:
        """Tentative calls are none: their text is reasoning, and is looked through behind its first marker."""
        self._held, self._tentative, self._calls, self._replayable = None, False, 0, True
        self._rejected += 1
        self._state = "REASONING"
        length = len(self._format.block[0] if self._wrapped else self._format.call)
        self._say(self._raw[:length])
        self._buffer, self._raw = self._raw[length:] + self._buffer, ""
        return True

    def _fail(self, reason: str) -> bool:
        """Something stands in a call that does not belong there."""
        if self._tentative:
            return self._reject()
        self.malformed = f"the call could not be read: {reason}"
        self._unravel()
        return True

    def _unravel(self) -> None:
        """Give up the current call: complete ones stay, and what was not announced is visible text."""
        self._replayable, self.block = False, None
        if self._state == "CALL" and self._announced and self._held is None:
            self._state, self._buffer = "DROP", ""
            return
        self._held = None
        behind_calls = self._calls and self._in_blocks
        self._buffer = (self._raw[self._raw_call:] if behind_calls else self._space + self._raw) + self._buffer
        self._space, self._state = "", "RAW"

    def _cut(self) -> None:
        """The budget ended inside a call or a block."""
        if self._tentative:
            self._reject()
        elif self._state == "BLOCK" and self._calls and self._format.block[1].startswith(self._buffer):
            self._state = "DROP"
        else:
            self._unravel()

    def _close(self) -> None:
        """The end token came inside a block: supply its closing marker."""
        if self._buffer and not self._format.block[1].startswith(self._buffer):
            self._fail("a call is incomplete")
        else:
            self._take_raw(len(self._buffer))
            self._close_block(repaired=True)

    def _in_raw(self) -> bool:
        if self._buffer:
            self._out.append(Text(self._take(len(self._buffer))))
        return False

    def _in_drop(self) -> bool:
        self._buffer = ""
        return False

    _in_end = _in_drop
