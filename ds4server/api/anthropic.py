"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: read into an :class:`Ask`; its events become a message or the events
of a stream."""

import hashlib
import json
import secrets
from typing import Any

from ds4ref.chat import CallArguments, CallBegin, CallEnd, Reasoning, Text, collect
from ds4ref.chat.request import LEVELS
from ds4ref.stop import Finish

from . import answers, anthropic_blocks, sse
from .answers import deliver
from .ask import Ask, prompt_of
from .body import read_object
from .chat_messages import kind
from .continuation import continued
from .errors import bad_request
from .formats import check_choice, response_format
from .opaque import sealed
from .requests import Common, Fields, check_effort, parse, stop_strings
from .toolchoice import anthropic_choice

SURFACE = "anthropic_messages"
STOP_REASON = {
    Finish.STOP: "end_turn",
    Finish.STOP_STRING: "stop_sequence",
    Finish.LENGTH: "max_tokens",
    Finish.CONTEXT: "model_context_window_exceeded",
    Finish.TOOL_CALLS: "tool_use",
}
CONTROLS = ("think", "enable_thinking", "thinking")
SHAPING = (
    "model", "messages", "system", "tools", "tool_choice", "output_config", "output_format", "reasoning_effort", *CONTROLS,
)  # fmt: skip
"""Fields that decide what the prompt is."""
DISPLAYS = ("summarized", "omitted")


class OutputConfig(Fields):
    effort: Any = None
    format: Any = None


class MessagesRequest(Common):
    """The body of a message. ``messages``, ``system`` and ``tools`` are validated in ``anthropic_blocks``."""

    messages: Any = None
    system: Any = None
    stop_sequences: list[str] | None = None
    tools: Any = None
    tool_choice: Any = None
    output_config: OutputConfig | None = None
    output_format: Any = None
    reasoning_effort: Any = None

    @property
    def omits_thinking(self):
        """Whether thinking blocks come without their text."""
        return isinstance(self.thinking, dict) and self.thinking.get("display") == "omitted"


class Messages:
    """The resource. ``service`` is the running server's context (``app.Service``)."""

    def __init__(self, service):
        self._service = service

    def on_post(self, req, resp):
        body = answers.read(self._service, req)
        request = parse(MessagesRequest, body)
        deliver(self._service, req, resp, ask_of(self._service, body, request),
                lambda found: MessagesWire(self._service, request, found))  # fmt: skip


class CountTokens:
    """The resource that says how many tokens the prompt of a message has. It never waits for the engine."""

    def __init__(self, service):
        self._service = service

    def on_post(self, req, resp):
        body = {name: value for name, value in read_object(req).items() if name in SHAPING}
        ask = ask_of(self._service, body, parse(MessagesRequest, body))
        ids = prompt_of(self._service, ask).ids
        resp.media = {"input_tokens": len(ids)}


def ask_of(service, body, request):
    """The :class:`Ask` of a Messages request. ApiError 400."""
    if request.messages is None:
        raise bad_request("messages is required: an array of messages", "messages")
    messages, frontier = continued(service, anthropic_blocks.messages(request.system, request.messages), "messages")
    tools = anthropic_blocks.tools(request.tools)
    choice, parallel = anthropic_choice(request.tool_choice, tools)
    form_field, form = _form(request)
    check_choice(form, choice, form_field)
    _check_display(request.thinking)
    return Ask(
        SURFACE, request.sampling(service), "messages", model=request.model, stream=bool(request.stream),
        messages=messages, tools=tools, choice=choice, parallel=parallel,
        controls={name: body.get(name) for name in CONTROLS} | {"reasoning_effort": _effort(request)},
        thinking_budget=request.thinking_tokens(), budget=request.max_tokens,
        stops=stop_strings(request.stop_sequences, "stop_sequences"), ignore_eos=bool(request.ignore_eos),
        frontier=frontier, form=form, form_field=form_field,
    )  # fmt: skip


def _form(request):
    """(field, form of the visible text): of ``output_config.format``, or ``output_format`` as it used to be called."""
    form = None if request.output_config is None else request.output_config.format
    field, value = ("output_config.format", form) if form is not None else ("output_format", request.output_format)
    return field, response_format(value, field, nested=False)


def _effort(request):
    """The level of thinking named by ``output_config.effort``, else by ``reasoning_effort``; either may say that it is off."""
    efforts = [("reasoning_effort", request.reasoning_effort)]
    if request.output_config is not None:
        efforts.insert(0, ("output_config.effort", request.output_config.effort))
    for path, effort in efforts:
        check_effort(effort, path)
    named = [effort for _, effort in efforts if effort is not None]
    return next((effort for effort in named if LEVELS[effort] == "none"), named[0] if named else None)


def _check_display(thinking):
    display = thinking.get("display") if isinstance(thinking, dict) else None
    if display is not None and display not in DISPLAYS:
        found = repr(display)[:60] if isinstance(display, str) else kind(display)
        raise bad_request(f"thinking.display must be one of {', '.join(DISPLAYS)}, got {found}", "thinking.display")


class MessagesWire:
    """How one answer looks: ids, envelope, usage, and the events of its stream."""

    def __init__(self, service, request, found):
        self._service, self._answers = service, found
        self._blocks = Blocks(request.omits_thinking)
        self._input = None  # of the usage, once the stream has told it
        self._envelope = {
            "id": f"msg_{secrets.token_hex(16)}",
            "type": "message",
            "role": "assistant",
            "model": request.model or service.model_id,
        }

    def whole(self, outcomes):
        """The complete message."""
        (found,) = outcomes
        content = blocks(found.events, self._blocks.omitted, lambda call: self._answers.call_id(found.job, call))
        if not any(block["type"] != "thinking" for block in content) and found.generation.budget:
            content.append({"type": "text", "text": ""})
        counts = self._counts()
        return self._envelope | {
            "content": content, **_stop(found.generation), "usage": _input(counts) | _output(counts), "timings": found.timings,
        }  # fmt: skip

    def silence(self):
        return sse.KEEP_ALIVE if self._input is None else sse.event("ping", {"type": "ping"})

    def begin(self, job):
        self._input = _input(self._counts())
        message = self._envelope | {
            "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._input | {"output_tokens": 0},
        }  # fmt: skip
        yield _event({"type": "message_start", "message": message})

    def step(self, job, step):
        for event in step.events:
            yield from map(_event, self._blocks.feed(event, lambda call: self._answers.call_id(job, call)))

    def end(self, job, timings):
        yield from map(_event, self._blocks.close(bool(job.generation.budget)))
        usage = self._input | _output(self._counts())
        yield _event({"type": "message_delta", "delta": _stop(job.generation), "usage": usage, "timings": timings})

    def close(self):
        yield _event({"type": "message_stop"})

    def failed(self, event):
        yield _event({"type": "error", "error": {"type": "api_error", "message": event.message}})

    def _counts(self):
        return answers.usage(self._service, self._answers.jobs)


def _event(payload):
    return sse.event(payload["type"], payload)


def _stop(generation):
    return {"stop_reason": STOP_REASON[generation.finish], "stop_sequence": generation.matched_stop}


def _input(counts):
    return {
        "input_tokens": counts.prompt - counts.cached - counts.written,
        "cache_read_input_tokens": counts.cached,
        "cache_creation_input_tokens": counts.written,
    }


def _output(counts):
    return {"output_tokens": counts.generated, "output_tokens_details": {"thinking_tokens": counts.reasoning}}


def blocks(events, omitted, call_id):
    """The content blocks of a complete answer: thinking, text, calls. omitted: whether thinking comes without its text;
    call_id: a call's number → its id."""
    found = collect(events)
    out = []
    if found.reasoning:
        shown = "" if omitted else found.reasoning
        out.append({"type": "thinking", "thinking": shown, "signature": signature(found.reasoning, omitted)})
    if found.text:
        out.append({"type": "text", "text": found.text})
    return out + [
        {"type": "tool_use", "id": call_id(i), "name": call.name, "input": call_input(call.arguments)}
        for i, call in enumerate(found.calls)
    ]


def signature(reasoning, omitted):
    """What a thinking block is signed with: nobody checks it, but where the block does not show its text, this holds it."""
    return sealed(reasoning) if omitted else hashlib.sha256(reasoning.encode()).hexdigest()


def call_input(arguments):
    """The arguments of a call as the object that a message holds. Half a surrogate pair, which no JSON in UTF-8 can carry,
    becomes U+FFFD, and a number beyond the range of floats the largest one."""
    value = json.loads(arguments, parse_float=lambda digits: max(-LARGEST, min(LARGEST, float(digits))))
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.loads(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
    return value


LARGEST = 1.7976931348623157e308


class Blocks:
    """The content blocks of a stream, from the events of an answer.

    Theory of operation. At most one block is open, and they are numbered as they open:

        closed → open(thinking | text | tool_use) → closed → …

    An event that belongs into the open block is a delta of it; any other one closes that block first and opens its own. A
    thinking block takes one more delta before it closes, its signature. Nothing reopens a block, so what comes after
    text or a call is in a new one.
    """

    def __init__(self, omitted=False):
        self.omitted = omitted
        self._index = -1
        self._open = None
        self._reasoning = []
        self._shown = False  # whether there is a block other than thinking

    def feed(self, event, call_id):
        """Payloads of the events that ``event`` becomes. call_id: a call's number → its id."""
        match event:
            case Reasoning(text):
                yield from self._into("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                self._reasoning.append(text)
                if not self.omitted:
                    yield self._delta({"type": "thinking_delta", "thinking": text})
            case Text(text):
                yield from self._into("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case CallBegin(call, name):
                yield from self._begin({"type": "tool_use", "id": call_id(call), "name": name, "input": {}})
            case CallArguments(_, fragment):
                yield self._delta({"type": "input_json_delta", "partial_json": fragment})
            case CallEnd(_):
                yield from self._end()

    def close(self, answered):
        """No event follows. answered: whether tokens were asked for; then there is a block that is seen."""
        if answered and not self._shown:
            yield from self._begin({"type": "text", "text": ""})
        yield from self._end()

    def _into(self, kind, block):
        if self._open != kind:
            yield from self._begin(block)

    def _begin(self, block):
        yield from self._end()
        self._index, self._open = self._index + 1, block["type"]
        self._shown = self._shown or self._open != "thinking"
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _end(self):
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": signature("".join(self._reasoning), self.omitted)})
            self._reasoning.clear()
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta):
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
