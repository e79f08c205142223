"""Reads what DeepSeek V4 samples: reasoning, visible text and DSML calls.

Theory of operation
-------------------
Text is appended to a buffer; `_advance` lets the current state consume from its front until it can go no further. A state
consumes only what no later character can change the meaning of, so any split of the text gives the same events up to
the borders of their pieces. White space is " ", tab, newline, carriage return.

    state      consumes                                  leaves on
    START      a repeated tag of the prompt              anything else → REASONING or TEXT
    REASONING  reasoning                                 </think> → TEXT; a block opening → BLOCK, tentatively
    TEXT       visible text; think tags and closing      a block opening → BLOCK
               tags without a block vanish
    BLOCK      white space                               <invoke …> → INVOKE; closing → END (TEXT if the block was empty)
    INVOKE     white space                               <parameter …> → VALUE; closing → BLOCK
    VALUE      one parameter's value                     </parameter>, or a nested parameter at its start → INVOKE
    CONFIRM    white space after a tentative block       </think> → END; anything else: rejected, → REASONING
    RAW        everything, as visible text               –
    DROP       everything, silently                      –
    END        everything, silently; generation stops    –

A block inside open reasoning is tentative: its events are held, and everything from its marker on stays available, until
CONFIRM accepts it or something rejects it; then the text it was made of is reasoning again (or, from the first </think>
in it, visible text). Without streaming the events of each call are held in the same way until the call is complete.
A block is written in one of three spellings throughout: <｜DSML｜tag>, <DSML｜tag> or <tag>.

Knows nothing about tokens. Source: the format's description in the vendor's encoder (`encoding_dsv4`) and the
deviations of the model that its users reported.
"""
from collections.abc import Mapping, Sequence

import regex

from ds4ref.chat import jsontext, schema
from ds4ref.chat.events import CallArguments, CallBegin, CallEnd, Event, Reasoning, Text

THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"
WHITE = " \t\r\n"

_MAX_TAG = 2048
_MAX_NESTING = 64

_MARKS_PLAIN = regex.compile(r"</?think>")
_MARKS = regex.compile(
    r"(?P<block><(?P<s>｜DSML｜|DSML｜)tool_calls>|<(?P<s>)tool_calls>(?=[ \t\r\n]*<invoke[ \t\r\n>]))"
    r"|(?P<bare><(?P<s>｜DSML｜)invoke(?=[ \t\r\n]))"
    r"|</?think>|</｜?DSML｜(?:parameter|invoke|tool_calls)>"
)
_ATTRIBUTE = regex.compile(r"""([^\s=>"']+)[ \t\r\n]*=[ \t\r\n]*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
_ENTITY = regex.compile("&(amp|lt|gt|quot|apos|#39);")
_ENTITIES = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'", "#39": "'"}


class Parser:
    """One answer's parser. thinking: whether the prompt ended in <think>. tools: the declared tools; None or empty, and
    markup is text. stream, single, tentative, and the attributes: see `ds4ref.chat`."""

    def __init__(self, thinking: bool, tools: Sequence[Mapping] | None = None, *, stream: bool = True,
                 single: bool = False, tentative: bool = True):
        self.stopped = False
        self.outcome: str | None = None
        self.malformed: str | None = None
        self.block: str | None = None
        self._schemas = schema.parameters(tools)
        self._marks = _MARKS if tools else _MARKS_PLAIN
        self._stream, self._single, self._thinking = stream, single, thinking
        self._state = "START"
        self._buffer = ""
        self._space = ""  # White space that is text only if no block follows.
        self._out: list[Event] = []
        self._held: list[Event] | None = None
        self._tentative = False
        self._looks = tentative  # Whether blocks in reasoning are looked into.
        self._final = False
        self._calls = 0  # Complete calls.

    # --- the interface -----------------------------------------------------------------------------------------------

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of sampled text; return what is certain now."""
        if text and self._state not in ("END", "DROP"):
            self._buffer += text
            self._advance()
        return self._taken()

    def finish(self, ended: str) -> list[Event]:
        """Generation ended: "stop" (an end token) or "length" (the budget). Return the rest and set `outcome`."""
        self._final = True
        if ended == "length" and self._state in ("BLOCK", "INVOKE", "VALUE", "CONFIRM"):
            self._cut()
        self._advance()
        while self._state in ("BLOCK", "INVOKE", "VALUE", "CONFIRM"):
            self._close()
            self._advance()
        unfinished = self._state == "REASONING" or (self._state == "START" and self._thinking)
        if self._state in ("REASONING", "TEXT"):
            self._say("", flush=True)
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
        """Reasoning or visible text, by the state. Trailing white space waits, since it belongs to a block that follows."""
        text = self._space + text
        kept = text if flush or self._marks is _MARKS_PLAIN else text.rstrip(WHITE)
        self._space = text[len(kept):]
        if kept:
            self._out.append(Reasoning(kept) if self._state == "REASONING" else Text(kept))

    def _arguments(self, fragment: str) -> None:
        if fragment and not any(level.muted for level in self._levels):
            self._emit(CallArguments(self._calls, fragment))

    # --- the machine -------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Let states consume until one needs more text."""
        while getattr(self, "_in_" + self._state.lower())():
            pass

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken

    def _in_start(self) -> bool:
        tag = THINK if self._thinking else END_THINK
        if not self._buffer or (not self._final and any(
                len(self._buffer) < len(t) and t.startswith(self._buffer) for t in (THINK, tag))):
            return False
        self._state = "REASONING" if self._thinking else "TEXT"
        if self._buffer.startswith(THINK):
            self._take(len(THINK))
            self._state = "REASONING"
        elif self._buffer.startswith(tag) and not self._thinking:
            self._take(len(tag))
        return True

    def _in_reasoning(self) -> bool:
        mark = self._find_mark()
        if mark is None:
            return False
        if mark[0] == END_THINK:
            self._say("", flush=True)
            self._take(mark.end())
            self._state = "TEXT"
        elif _opens(mark) and self._looks:
            self._tentative = True
            self._open(mark)
        else:
            self._say(self._take(mark.end()))
        return True

    def _in_text(self) -> bool:
        mark = self._find_mark()
        if mark is None:
            return False
        if _opens(mark):
            self._open(mark)
        else:
            self._take(mark.end())
        return True

    def _find_mark(self) -> regex.Match | None:
        """Say what stands before the next mark and return the mark, now at the front of the buffer; None if there is none
        yet, with a possible beginning of one left in the buffer."""
        at = self._buffer.find("<")
        while at >= 0:
            mark = self._marks.match(self._buffer, at, partial=not self._final)
            if mark:
                self._say(self._take(at))
                return None if mark.partial else self._marks.match(self._buffer)
            at = self._buffer.find("<", at + 1)
        self._say(self._take(len(self._buffer)))
        return None

    # --- blocks ------------------------------------------------------------------------------------------------------

    def _open(self, mark: regex.Match) -> None:
        spelling = mark["s"] or ""
        self._bare = bool(mark["bare"])
        self._names = {tag: f"<{spelling}{tag}" for tag in ("invoke", "parameter")}
        self._closers = {tag: f"</{spelling}{tag}>" for tag in ("tool_calls", "invoke", "parameter")}
        self._value_marks = regex.compile(
            "|".join(regex.escape(x) for x in (self._closers["parameter"], self._closers["invoke"], self._escape())))
        self._levels: list[_Level] = []
        self._in_call = self._repaired = False
        self._raw, self._raw_call = "", 0  # The block's text so far; where its current call begins in it.
        if self._tentative:
            self._held = []
        self._take_raw(0 if self._bare else mark.end())
        self._state = "BLOCK"

    def _escape(self) -> str:
        return "&lt;" + self._closers["parameter"][1:]

    def _take_raw(self, length: int) -> str:
        taken = self._take(length)
        self._raw += taken
        return taken

    def _skip_white(self) -> None:
        self._take_raw(len(self._buffer) - len(self._buffer.lstrip(WHITE)))

    def _at(self, *tags: str) -> str | None:
        """Which of the tags (whole closing tags, or the beginnings "<invoke", "<parameter") the buffer begins with; "" if
        it may still become one, None if it is none of them."""
        for tag in tags:
            if self._buffer.startswith(tag):
                return tag
        return "" if any(tag.startswith(self._buffer) for tag in tags) else None

    def _in_block(self) -> bool:
        self._skip_white()
        if not self._buffer:
            return False
        self._raw_call = len(self._raw)
        close, invoke = self._closers["tool_calls"], self._names["invoke"]
        match self._at(close, invoke):
            case "":
                return False
            case None:
                if self._bare and self._calls:
                    return self._end()
                return self._fail("text stands where a call belongs")
            case tag if tag == close:
                self._take_raw(len(close))
                return self._end(closed=True)
        attributes = self._read_tag(invoke)
        if attributes is None:
            return False
        if not attributes.get("name"):
            return self._fail("a call has no name")
        self._take_raw(self._tag_length)
        self._in_call = True
        self._levels = [_Level(self._schemas.get(attributes["name"], {}))]
        if self._held is None and not self._stream:
            self._held = []
        self._emit(CallBegin(self._calls, attributes["name"]))
        self._state = "INVOKE"
        return True

    def _read_tag(self, name: str) -> dict[str, str] | None:
        """The attributes of the opening tag at the front, {} if it is no well-formed tag, None if it is incomplete."""
        quote, at = "", len(name)
        for at in range(len(name), min(len(self._buffer), _MAX_TAG)):
            char = self._buffer[at]
            if at == len(name) and char not in WHITE + ">":
                return {}
            if quote:
                quote = "" if char == quote else quote
            elif char in "\"'":
                quote = char
            elif char == "<":
                return {}
            elif char == ">":
                break
        else:
            return {} if len(self._buffer) >= _MAX_TAG or self._final else None
        self._tag_length = at + 1
        found: dict[str, str] = {}
        for match in _ATTRIBUTE.finditer(self._buffer, len(name), at):
            value = next(v for v in match.groups()[1:] if v is not None)
            found.setdefault(match[1], _ENTITY.sub(lambda m: _ENTITIES[m[1]], value))
        return found

    def _in_invoke(self) -> bool:
        self._skip_white()
        if not self._buffer:
            return False
        parameter, closers = self._names["parameter"], self._closers
        match self._at(parameter, *closers.values(), self._names["invoke"]):
            case "":
                return False
            case None:
                return self._fail("text stands where a parameter belongs")
            case tag if tag == closers["invoke"]:
                self._take_raw(len(tag))
                return self._end_call()
            case tag if tag == closers["parameter"]:
                self._take_raw(len(tag))
                if len(self._levels) > 1:
                    self._end_nested()
                else:
                    self._repaired = True
                return True
            case tag if tag != parameter:  # The call's own closing tag is missing.
                self._repaired = True
                return self._end_call()
        attributes = self._read_tag(parameter)
        if attributes is None:
            return False
        if not attributes.get("name"):
            return self._fail("a parameter has no name")
        self._take_raw(self._tag_length)
        self._begin_value(attributes["name"], attributes.get("string", "").strip().lower())
        self._state = "VALUE"
        return True

    # --- values ------------------------------------------------------------------------------------------------------

    def _begin_value(self, name: str, marked: str) -> None:
        level = self._levels[-1]
        self._value_schema = schema.property_schema(level.schema, name)
        self._types = schema.declared(self._value_schema)
        self._marked = marked if marked in ("true", "false") else ""
        self._value_name = name
        self._value_muted = name in level.names
        self._value_at_start = not self._marked
        self._value = ""  # Text of the value that is held.
        self._value_scan = 0  # Up to here the buffer holds no mark of a value.
        self._suspended = False  # An invoke's closing tag was seen: data, or the parameter's own closing tag is missing.
        admits_string = self._types is None or "string" in self._types
        self._streaming = self._marked != "false" and admits_string and not self._value_muted
        if self._streaming and not self._value_at_start:
            self._begin_string()

    def _begin_string(self) -> None:
        self._arguments(self._key() + '"')

    def _key(self) -> str:
        """The opening of the next pair in the current object."""
        level = self._levels[-1]
        opening = ", " if level.names else "{"
        level.names.add(self._value_name)
        return f'{opening}"{jsontext.escape(self._value_name)}": '

    def _in_value(self) -> bool:
        if self._value_at_start:
            ahead = self._buffer.lstrip(WHITE)
            nested = self._names["parameter"]
            if ahead.startswith(nested) and (len(ahead) > len(nested) or self._final):
                if ahead[len(nested):len(nested) + 1] in (*WHITE, ">"):
                    return self._begin_nested()
            elif not self._final and (not ahead or nested.startswith(ahead)):
                return False
            self._value_at_start = False
            if self._streaming:
                self._begin_string()
        closer = self._closers["parameter"]
        while True:
            at = next((i for i in range(self._value_scan, len(self._buffer)) if self._buffer[i] in "<&"), -1)
            if at < 0:
                self._value_scan = len(self._buffer)
                break
            mark = self._value_marks.match(self._buffer, at, partial=not self._final)
            if mark is None:
                self._value_scan = at + 1
            elif mark.partial:
                self._value_scan = at
                break
            elif mark[0] == closer:
                text = self._take_raw(at)
                self._take_raw(len(closer))
                self._end_value(text)
                self._state = "INVOKE"
                return True
            elif mark[0] == self._closers["invoke"]:
                self._suspended = True
                self._value_scan = mark.end()
            else:
                self._value_scan = mark.end()
        if self._streaming and not self._suspended and not self._final:
            self._stream_value(self._buffer[:self._value_scan])
        return False

    def _stream_value(self, text: str) -> None:
        sure = text.rstrip(WHITE)
        self._take_raw(len(sure))
        self._value_scan -= len(sure)
        self._arguments(jsontext.escape(sure.replace(self._escape(), self._closers["parameter"])))

    def _end_value(self, text: str) -> None:
        """The value ends after `text`, all of it that has not been streamed."""
        text = text.replace(self._escape(), self._closers["parameter"])
        if self._streaming:
            self._arguments(jsontext.escape(text) + '"')
        elif not self._value_muted:
            self._arguments(self._key() + json_value(text, self._marked, self._types))

    def _begin_nested(self) -> bool:
        if len(self._levels) >= _MAX_NESTING:
            return self._fail("parameters are nested too deeply")
        self._skip_white()
        if not self._value_muted:
            self._arguments(self._key())
        self._levels.append(_Level(self._value_schema, muted=self._value_muted))
        self._state = "INVOKE"
        return True

    def _end_nested(self) -> None:
        if not self._levels[-1].names:
            self._arguments("{")
        self._arguments("}")
        self._levels.pop()

    def _end_call(self) -> bool:
        while self._levels:
            self._end_nested()
        self._emit(CallEnd(self._calls))
        self._calls += 1
        self._in_call = False
        if self._held is not None and not self._tentative:
            self._out += self._held
            self._held = None
        self._state = "BLOCK"
        return self._end() if self._single and not self._tentative else True

    # --- how a block ends --------------------------------------------------------------------------------------------

    def _end(self, closed: bool = False) -> bool:
        """The block is over: by its closing tag, or because nothing more can belong to it."""
        if self._tentative:
            if self._calls:
                self._state = "CONFIRM"
                return True
            return self._reject()
        if not self._calls:
            self._state = "TEXT"
            return True
        if (closed or self._single) and not self._bare and not self._repaired:
            # A block that was left after its first call is replayed with the ending that the model would have written.
            self.block = self._space + self._raw + ("" if closed else f"\n{self._closers['tool_calls']}")
        self._state, self._space, self._buffer = "END", "", ""
        self.stopped = True
        return False

    def _in_confirm(self) -> bool:
        self._skip_white()
        match self._at(END_THINK):
            case None:
                return self._reject()
            case "" if not self._final or self._buffer:
                return self._reject() if self._final else False
        self._accept()
        return False

    def _accept(self) -> None:
        calls = self._held or []
        self._out += [e for e in calls if e.index == 0] if self._single else calls
        self._held, self._tentative = None, False
        self._state, self._space, self._buffer = "END", "", ""
        self.stopped = True

    def _reject(self) -> bool:
        """A tentative block is none: its text is reasoning, up to a </think> in it."""
        self._held, self._tentative, self._calls = None, False, 0
        self._state = "REASONING"
        if not self._raw:
            self._take_raw(1)
        reasoning, closing, text = self._raw.partition(END_THINK)
        self._say(reasoning, flush=bool(closing))
        if closing:
            self._state, self._buffer = "TEXT", text + self._buffer
        return True

    def _fail(self, reason: str) -> bool:
        """Something stands in the block that does not belong there."""
        if self._tentative:
            return self._reject()
        self.malformed = f"the call block could not be read: {reason}"
        self._unravel()
        return True

    def _unravel(self) -> None:
        """Give up the current call: complete ones stay, and what was not announced is visible text."""
        announced = self._in_call and self._held is None
        if announced:
            self._state, self._buffer = "DROP", ""
            return
        self._held, self._in_call = None, False
        raw = self._raw[self._raw_call:] if self._calls else self._space + self._raw
        self._space, self._state = "", "RAW"
        self._buffer = raw + self._buffer

    def _cut(self) -> None:
        """The budget ended inside a block."""
        if self._tentative:
            self._reject_rest()
        elif self._calls and not self._in_call and (not self._buffer or self._buffer.startswith("</")):
            self._state, self._buffer = "DROP", ""
        else:
            self._unravel()

    def _reject_rest(self) -> None:
        self._held, self._tentative, self._calls = None, False, 0
        self._state = "REASONING"
        self._say(self._raw + self._take(len(self._buffer)))

    def _close(self) -> None:
        """The end token came inside a block: supply the closing tags that are missing."""
        self._repaired = True
        if self._tentative and self._bare and self._state == "BLOCK" and self._calls and not self._buffer:
            self._accept()
        elif self._tentative:
            self._reject()
        elif self._state == "BLOCK":
            if self._buffer and not self._buffer.startswith("</") and not (self._bare and self._calls):
                self._fail("a call is incomplete")
            else:
                self._take_raw(len(self._buffer))
                self._end()
        elif self._state == "INVOKE":
            if self._buffer and not self._buffer.startswith("</"):
                self._fail("a parameter is incomplete")
            else:
                self._take_raw(len(self._buffer))
                self._end_call()
        else:
            self._close_value()

    def _close_value(self) -> None:
        """The parameter's own closing tag is missing: the value ends before the call's, or at the end of the text."""
        at = self._buffer.find(self._closers["invoke"])
        if at < 0:
            at = len(self._buffer)
            text = self._buffer[:at - _overlap(self._buffer, self._closers["parameter"])]
        else:
            text = self._buffer[:at].rstrip(WHITE)
        if self._marked == "false" and not jsontext.is_valid(text):
            self._fail("a value is incomplete")
            return
        self._take_raw(at)
        self._end_value(text)
        self._state = "INVOKE"

    def _in_raw(self) -> bool:
        if self._buffer:
            self._out.append(Text(self._take(len(self._buffer))))
        return False

    def _in_drop(self) -> bool:
        self._buffer = ""
        return False

    _in_end = _in_drop


def _opens(mark: regex.Match) -> bool:
    """Whether a mark in text opens a block."""
    return mark.lastgroup is not None


class _Level:
    """An object of parameters being read: the call's own, or a nested one."""

    def __init__(self, schema: Mapping, muted: bool = False):
        self.schema, self.muted = schema, muted
        self.names: set[str] = set()


def json_value(text: str, marked: str, types: frozenset[str] | None) -> str:
    """The JSON text of a value. marked: its `string` attribute ("true", "false" or ""); types: what the schema admits.

    The attribute decides and the declared type corrects it: a "string" that the schema admits no string for is the JSON
    value it spells, if that fits; a "non-string" where a string is declared stays the text it is, a JSON string decoded.
    Text that is no JSON is a string."""
    string = f'"{jsontext.escape(text)}"'
    admits_string = types is None or "string" in types
    if marked != "false" and admits_string:
        return string
    try:
        value = jsontext.loads(text)
    except ValueError:
        return string
    if marked != "false":
        return text.strip(WHITE) if schema.fits(value, types) else string
    if types is not None and admits_string and not schema.fits(value, types):
        return string
    return text.strip(WHITE)


def _overlap(text: str, closer: str) -> int:
    """How many characters at the end of text are the beginning of closer, if they reach into the tag's name."""
    for length in range(min(len(text), len(closer) - 1), closer.rindex("parameter"), -1):
        if closer.startswith(text[-length:]):
            return length
    return 0
