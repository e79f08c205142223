"""The chat format of Inkling.

A message is a role token, an optional name, a token for the kind of its content, text, and `<|end_message|>`; nothing is
trimmed and nothing stands between messages:

    <|message_system|>tool_declare<|content_xml|>[…]<|end_message|><|message_system|><|content_text|>{system}<|end_message|>
    <|message_system|><|content_text|>Thinking effort level: 0.9<|end_message|><|message_user|><|content_text|>…<|end_message|>
    <|message_model|><|content_thinking|>…<|end_message|><|message_model|><|content_text|>…<|end_message|>
    <|message_model|>NAME<|content_invoke_tool_json|>{"name":"NAME","args":{…}}<|end_message|><|content_model_end_sampling|>

(in one line). The effort is a number; a history turn ends in `<|content_model_end_sampling|>`.

History-stable point: everything, for the same effort, tools and leading system messages. A call rendered again has its
arguments sorted, so only a kept block repeats it exactly.

Theory of the parser
--------------------
The channel is switched by tokens only, given to `mark`; text that spells a marker stays text.

    state      text is                                   mark → state
    HEADER     the name of a tool, perhaps               a content kind → THINKING, TEXT or CALL
    THINKING   reasoning                                 <|end_message|> → BETWEEN
    TEXT       visible text                              <|end_message|> → BETWEEN
    CALL       a call's JSON object                      <|end_message|> → BETWEEN
    BETWEEN    visible text, except white space          <|message_model|> → HEADER; a content kind as in HEADER
    DROP       nothing: the call given up was announced  –
    END        nothing: the turn is over                 –

Text in a header that cannot be a tool's name is visible text. A call that cannot be read becomes visible text if it was
not announced, as does a call without declared tools, or with free text for arguments, whose form is not known.

Not certain, and chosen here: system messages behind the first other message stay in place; an effort of minimal is 0.1, of
medium 0.7, of xhigh that of high. Source: the family's page and renderings of the published template. Knows nothing about
token ids and nothing about media.
"""
from collections.abc import Mapping, Sequence
from typing import Any

from ds4ref.chat import NO_SPECIALS, Block, Options, Prompt, Specials, grammars, jsontext, turns
from ds4ref.chat.events import CallArguments, CallBegin, CallEnd, Event, Reasoning, Text
from ds4ref.chat.framed import WHITE
from ds4ref.chat.jsoncalls import NAME, JsonCall

USER, MODEL, SYSTEM, TOOL = "<|message_user|>", "<|message_model|>", "<|message_system|>", "<|message_tool|>"
TEXT, THINKING, CALL_JSON = "<|content_text|>", "<|content_thinking|>", "<|content_invoke_tool_json|>"
CALL_TEXT, XML = "<|content_invoke_tool_text|>", "<|content_xml|>"
END_MESSAGE, END = "<|end_message|>", "<|content_model_end_sampling|>"

STOPS = (END,)
MARKERS = (MODEL, USER, SYSTEM, TOOL, TEXT, THINKING, CALL_JSON, CALL_TEXT, END_MESSAGE)
REASONING = (THINKING, END_MESSAGE)
CALLS = grammars.Calls(CALL_JSON, grammars.json_call("", END_MESSAGE, "args", (",", ":"), named=CALL_JSON, ordered=True),
                       turn=MODEL, text=(TEXT, END_MESSAGE))

_LITERALS = frozenset({XML, "<|content_image|>", "<|content_audio_input|>", "<|content_tool_error|>", "<|audio|>",
                       "<|audio_end|>", "<|begin_of_text|>", "<|endoftext|>", *STOPS, *MARKERS})
_EFFORTS = {"none": "0", "minimal": "0.1", "low": "0.2", "medium": "0.7", "high": "0.9", "xhigh": "0.9", "max": "0.99"}
_COMPACT = (",", ":")


# --- rendering ------------------------------------------------------------------------------------------------------


def refuse_template(template: str) -> str | None:
    """Why an embedded template is none of Inkling's, None if it is one."""
    return None if CALL_JSON in template and END_MESSAGE in template else f"it does not write {CALL_JSON} messages"


def render(messages: Sequence[Mapping], tools: Sequence[Mapping] | None, options: Options, *,
           template: str | None = None, specials: Specials = NO_SPECIALS,
           blocks: Mapping[str, Block] | None = None) -> Prompt:
    """Render a conversation: with the template, or by the rules written here. Raises ChatError, for media too."""
    word = turns.effort(options) or "high"
    guard = turns.guard_for(_LITERALS, specials, messages, tools, options, blocks, template)
    prepared = turns.prepare(messages, guard, blocks, MARKERS)
    functions = [guard.data(tool) for tool in tools or ()]
    if template is None:
        declared = guard.text(_declaration(tools)) if tools else ""
        calls = [_calls(message) for message in messages]
        for message, texts in zip(prepared, calls, strict=True):
            if "tool_calls" in message:
                message["tool_calls"] = [(guard.text(name), guard.text(text)) for name, text in texts]
        names = {key: guard.text(name) for key, name in _tool_names(messages).items()}
        text = encode(prepared, declared, _EFFORTS[word], names)
        if options.template_kwargs.get("add_generation_prompt", True):
            text += MODEL
    else:
        text = turns.through_template(template, prepared, functions, options, specials, guard, reasoning_effort=word)
    return turns.finished(text, guard, (THINKING,))


def _declaration(tools: Sequence[Mapping]) -> str:
    functions = [tool.get("function") or tool for tool in tools]
    shown = [{**{k: f[k] for k in ("description", "name", "parameters") if k in f}, "type": "function"} for f in functions]
    return jsontext.dumps(turns.plain_numbers(shown), separators=_COMPACT, sort_keys=True)


def _calls(message: Mapping) -> list[tuple[str, str]]:
    """(name, JSON text) of each call of a message."""
    out = []
    for call in message.get("tool_calls") or ():
        name = str((call.get("function") or {}).get("name") or "")
        arguments = turns.plain_numbers(turns.call_arguments(call))
        text = jsontext.dumps(arguments, separators=_COMPACT, sort_keys=True)
        out.append((name, f'{{"name":{jsontext.dumps(name)},"args":{text}}}'))
    return out


def _tool_names(messages: Sequence[Mapping]) -> dict[Any, str]:
    """Call id → the tool's name."""
    return {call["id"]: str((call.get("function") or {}).get("name") or "")
            for message in messages for call in message.get("tool_calls") or () if call.get("id") is not None}


def encode(messages: Sequence[Mapping], declaration: str, effort: str, names: Mapping[Any, str]) -> str:
    """Prepared messages as text, with `tool_calls` [(name, JSON text)]. declaration: the tools' JSON, "" for none.
    effort: the number. names: call id → the tool's name."""
    leading = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    out = [_message(SYSTEM, XML, declaration, "tool_declare")] if declaration else []
    out += [_message(SYSTEM, TEXT, m["content"]) for m in messages[:leading]]
    out.append(_message(SYSTEM, TEXT, f"Thinking effort level: {effort}"))
    for message in messages[leading:]:
        content = message["content"]
        match message["role"]:
            case "system":
                out.append(_message(SYSTEM, TEXT, content))
            case "user":
                out.append(_message(USER, TEXT, content))
            case "tool":
                out.append(_message(TOOL, TEXT, content, names.get(message.get("tool_call_id"), "")))
            case "assistant":
                calls = message.get("tool_calls") or ()
                if message["reasoning_content"]:
                    out.append(_message(MODEL, THINKING, message["reasoning_content"]))
                if content or not (calls or "block" in message):
                    out.append(_message(MODEL, TEXT, content))
                out += [_message(MODEL, CALL_JSON, text, name) for name, text in calls]
                out.append(message.get("block", "") + END)
    return "".join(out)


def _message(role: str, kind: str, text: str, name: str = "") -> str:
    return f"{role}{name}{kind}{text}{END_MESSAGE}"


# --- reading --------------------------------------------------------------------------------------------------------


class Parser:
    """One answer's parser; see `ds4ref.chat` for the interface, and above for the states."""

    def __init__(self, thinking: bool = False, tools: Sequence[Mapping] | None = None, *, stream: bool = True,
                 single: bool = False, tentative: bool = True):
        self.stopped = False
        self.outcome: str | None = None
        self.malformed: str | None = None
        self.block: str | None = None
        self._tools, self._stream, self._single = bool(tools), stream, single
        self._state = "THINKING" if thinking else "HEADER"
        self._name = ""  # The header's text.
        self._space = ""  # White space between messages.
        self._unfinished = False  # Whether another's turn began inside reasoning.
        self._body: JsonCall | None = None
        self._raw = ""  # The call's text.
        self._held: list[Event] | None = None
        self._announced = False
        self._replayable = True
        self._calls = 0
        self._out: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        """Take text of the current channel; return what is certain now."""
        match self._state:
            case "HEADER":
                self._name += text
                if self._name and not NAME.fullmatch(self._name):
                    self._state = "TEXT"
                    self._say(self._name)
            case "THINKING":
                self._out += [Reasoning(text)] if text else []
            case "TEXT":
                self._say(text)
            case "BETWEEN":
                text = self._space + text
                kept = text.rstrip(WHITE)
                self._space = text[len(kept):]
                self._say(kept)
            case "CALL":
                self._raw += text
                self._read(text, final=False)
        return self._taken()

    def mark(self, literal: str) -> list[Event]:
        """Take one sampled token of MARKERS."""
        if self._state in ("DROP", "END"):
            return []
        if literal in (USER, SYSTEM, TOOL):  # Somebody else's turn.
            self._unfinished = self._state == "THINKING"
            self._leave()
            self._state, self.stopped = "END", True
        elif literal == MODEL:
            self._leave()
            self._state, self._name = self._state if self._state in ("DROP", "END") else "HEADER", ""
        elif literal == END_MESSAGE:
            self._leave()
        elif self._state in ("HEADER", "BETWEEN"):
            self._enter(literal)
        return self._taken()

    def finish(self, ended: str) -> list[Event]:
        """Generation ended: "stop" (an end token) or "length" (the budget). Return the rest and set `outcome`."""
        unfinished = self._unfinished or self._state == "THINKING"
        if self._state == "CALL" and ended == "length":
            self._give_up()
        elif self._state not in ("DROP", "END"):
            self._leave(closed=False)
        if self.stopped and self._calls:
            self.outcome = "tool_calls"
        elif ended == "length" or unfinished:
            self.outcome = "length"
        else:
            self.outcome = "tool_calls" if self._calls else "stop"
        return self._taken()

    def _taken(self) -> list[Event]:
        out, self._out = self._out, []
        return out

    def _say(self, text: str) -> None:
        if text:
            self._out.append(Text(text))
            if self._calls:
                self._replayable, self.block = False, None

    def _emit(self, event: Event) -> None:
        (self._out if self._held is None else self._held).append(event)

    def _enter(self, kind: str) -> None:
        """A channel opens."""
        name, self._name, self._space = self._name, "", ""
        if kind != CALL_JSON or not self._tools:
            self._state = "THINKING" if kind == THINKING else "TEXT"
            if kind == CALL_TEXT and self._tools:
                self.malformed = "the call could not be read: its arguments are free text"
            self._say(name)
            return
        self._state = "CALL"
        self._raw, self._header, self._announced = name, name, False
        self._held = None if self._stream else []
        self._body = JsonCall("", arguments="args", name=name or None)
        self._read("", final=False)

    def _read(self, text: str, final: bool) -> None:
        body = self._body
        body.read(text, final)
        if body.name is not None and not self._announced:
            self._announced = True
            self._emit(CallBegin(self._calls, body.name))
        if body.pieces:
            self._emit(CallArguments(self._calls, "".join(body.pieces)))
            body.pieces.clear()
        if body.bad:
            self.malformed = f"the call could not be read: {body.bad}"
            self._give_up()

    def _give_up(self) -> None:
        """The call is none: visible text, unless it was announced."""
        shown = self._held is not None or not self._announced
        self._held, self._body, self._replayable, self.block = None, None, False, None
        self._state = "TEXT" if shown else "DROP"
        if shown:
            self._say(self._raw)

    def _leave(self, closed: bool = True) -> None:
        """The channel ends: at a marker (closed), or with the answer."""
        if self._state == "HEADER":
            self._say(self._name)
        if self._state == "CALL":
            self._read("", final=True)
            if self._body is not None:
                self._end_call(closed)
        self._name = self._space = ""
        if self._state not in ("DROP", "END"):
            self._state = "BETWEEN"

    def _end_call(self, closed: bool) -> None:
        self._emit(CallEnd(self._calls))
        self._out += self._held or []
        self._held = None
        self._calls += 1
        self._replayable = self._replayable and closed and not self._body.repaired
        text = f"{MODEL}{self._header}{CALL_JSON}{self._raw.removeprefix(self._header)}{END_MESSAGE}"
        self.block = (self.block or "") + text if self._replayable else None
        self._body = None
        self._state = "BETWEEN"
        if self._single:
            self._state, self.stopped = "END", True
