"""Chat protocols: how messages become a prompt, and how sampled text becomes reasoning, text and tool calls.

One module per protocol, `ds4ref/chat/<protocol>.py`, with this surface:

    STOPS: tuple[str, ...]      special tokens that end generation, by their text ("<｜end▁of▁sentence｜>" …)
    MARKERS: tuple[str, ...]    control tokens whose sampling the parser must hear of through `mark` (mostly none)
    REASONING: tuple            the markers around reasoning, ("<think>", "</think>"), each one or several; ("", "") if none
    def settings(metadata, name) -> dict        optional: what the artifact fixes, as keywords of `render`
    def refuse_template(template) -> str | None optional: why an embedded template is not this protocol's
    SYSTEM_FIRST: bool          optional: whether system messages are refused behind the beginning
    def render(messages, tools, options, *, template=None, specials=NO_SPECIALS, blocks={}, **settings) -> Prompt
    CALLS: grammars.Calls       how calls are written, for constrained sampling; or, where the artifact or request decides,
    def calls(options, **settings) -> grammars.Calls
    class Parser:
        def __init__(self, thinking, tools=None, *, stream=True, single=False, tentative=True)
        def feed(self, text) -> list[Event]     sampled text, in pieces of any size
        def mark(self, literal) -> list[Event]  one sampled token of MARKERS (only if there are any)
        def finish(self, ended) -> list[Event]  ended: "stop" (an end token) or "length" (the budget)
        stopped: bool           generation is to end: the call block closed
        outcome: str | None     after finish: "stop", "length" or "tool_calls"
        malformed: str | None   why calls in the text could not be used (one sentence), for the one silent retry
        block: str | None       the call block exactly as sampled, if it may be replayed (`Block`)

Messages are those of Chat Completions after the server's validation: `role`, `content` (string, null or a list of
parts), `reasoning_content`, `tool_calls` [{id, type, function: {name, arguments: object or JSON text}}],
`tool_call_id`, `name`. Tools are [{type: "function", function: {name, description?, parameters?, …}}] or None;
`tool_choice: none` is None here.

`render` follows the artifact's own template if it has one of this protocol (`jinja.render`), else the protocol's
written rules. Text that users supply is guarded (`guard.Guard`) in both. With stream=True a call is announced as soon
as its name is known; with stream=False only when it is complete, so that a malformed or unfinished one can still become
visible text. single=True stops after the first call. tentative=False: call markup inside reasoning is reasoning.

Knows nothing about tokens beyond the text of the special ones, and nothing about HTTP.
"""
import importlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ds4ref.chat import jsontext
from ds4ref.chat.errors import ChatError
from ds4ref.chat.events import (
    Call,
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    Message,
    Reasoning,
    Text,
    collect,
    joined,
)

__all__ = [
    "Block", "Call", "CallArguments", "CallBegin", "CallEnd", "Chat", "ChatError", "Event", "Message", "NO_SPECIALS",
    "Options", "Prompt", "Reasoning", "Specials", "Text", "call_arguments", "collect", "flatten", "for_artifact", "is_system",
    "joined", "one_system", "reasoning_tags", "replayed", "split_reasoning", "with_systems_first",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """What a request asks of the rendering."""

    thinking: bool | None = None
    """On, off, or the family's default."""
    effort: str | None = None
    """The client's word in lower case (none, off, minimal, low, medium, high, xhigh, max); each protocol says what it
    means."""
    context: int | None = None
    """Tokens of context the engine runs with; None when unknown (then no level is refused for it)."""
    response_format: Mapping | None = None
    """The JSON schema the visible text is to follow, for templates that state it."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further template variables of the request (add_generation_prompt, drop_thinking, clear_thinking …)."""


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt."""

    text: str
    plain: tuple[tuple[int, int], ...] = ()
    """Character spans [start, end), ascending, in which no special token may be matched: they came from users' text."""
    thinking: bool = False
    """Whether the text ends inside an open reasoning section (`Parser(thinking=…)`)."""
    fallback_reason: str | None = None
    """Why a level of thinking that was asked for is not in effect."""


@dataclass(frozen=True)
class Specials:
    """The tokenizer's special tokens by their text. literals: every control and user-defined token that is a marker."""

    literals: frozenset[str] = frozenset()
    bos: str = ""
    eos: str = ""


NO_SPECIALS = Specials()


@dataclass(frozen=True)
class Block:
    """A sampled call block kept for exact replay: its text, from the white space before it to its closing tag, and the
    ids given to its calls, in their order."""

    text: str
    ids: tuple[str, ...]


# general.architecture → module of this package.
PROTOCOLS: dict[str, str] = {
    "deepseek4": "deepseek4",
    "glm5-next": "glm",
    "glm-dsa": "glm",
    "bailingmoe3": "ling",
    "solar-open2": "solar",
    "exaone-moe": "exaone",
    "k2-horizon": "k2",
    "motif3": "motif",
    "inkling": "inkling",
    "qwen35": "qwen",
    "qwen4exp": "qwen",
    "mimo2": "mimo",
    "naive_n05_flash": "naive",
    "step35": "step",
    "dots3note": "dots",
    "dots3-note": "dots",
}


@dataclass(frozen=True)
class Chat:
    """A protocol bound to one artifact."""

    protocol: ModuleType
    template: str | None
    specials: Specials
    settings: Mapping[str, Any]

    def render(self, messages: Sequence[Mapping], tools: Sequence[Mapping] | None, options: Options,
               blocks: Mapping[str, Block] | None = None) -> Prompt:
        """Render with the artifact's template and settings. blocks: call id → the block kept for it. Raises ChatError."""
        _check(messages, tools)
        return self.protocol.render(messages, tools, options, template=self.template, specials=self.specials,
                                    blocks=blocks or {}, **self.settings)

    def parser(self, prompt: Prompt, tools: Sequence[Mapping] | None, *, stream: bool = True, single: bool = False,
               tentative: bool = True) -> Any:
        """A parser for what is sampled after prompt. single: stop after the first call. tentative: whether calls that stand
        inside open reasoning may be calls."""
        return self.protocol.Parser(prompt.thinking, list(tools) if tools else None, stream=stream, single=single,
                                    tentative=tentative)

    def calls(self, options: Options) -> Any:
        """How calls are written (`grammars.Calls`)."""
        decide = getattr(self.protocol, "calls", None)
        return self.protocol.CALLS if decide is None else decide(options, **self.settings)


def for_artifact(metadata: Mapping[str, Any], specials: Specials, name: str = "") -> Chat:
    """The protocol of an artifact: by `general.architecture`, with its own `tokenizer.chat_template`.

    metadata: the artifact's keys and values. name: its file name, which some protocols consult.
    Raises ChatError for an architecture without a protocol."""
    architecture = metadata.get("general.architecture")
    if architecture not in PROTOCOLS:
        known = ", ".join(sorted(PROTOCOLS))
        raise ChatError(f"general.architecture {architecture!r} has no chat protocol; known are {known}")
    protocol = importlib.import_module(f"ds4ref.chat.{PROTOCOLS[architecture]}")
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ChatError(f"tokenizer.chat_template is a {type(template).__name__}; a string is expected")
    refused = protocol.refuse_template(template) if template and hasattr(protocol, "refuse_template") else None
    if refused:
        _log.warning("tokenizer.chat_template is not used: %s", refused)
        template = None
    settings = protocol.settings(metadata, name) if hasattr(protocol, "settings") else {}
    return Chat(protocol, template or None, specials, settings)


def _check(messages: Any, tools: Any) -> None:
    """Refuse messages and tools whose shape no protocol can work with."""
    for name, values in (("messages", messages), ("tools", tools or ())):
        if not isinstance(values, (list, tuple)):
            raise ChatError(f"{name} must be an array, not {type(values).__name__}", name)
        for i, value in enumerate(values):
            if not isinstance(value, Mapping):
                raise ChatError(f"{name}[{i}] must be an object, not {type(value).__name__}", f"{name}[{i}]")
    for i, tool in enumerate(tools or ()):
        if tool.get("type") == "function" and not _named(tool):
            raise ChatError(f"tools[{i}].function must be an object with a name", f"tools[{i}].function")
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ChatError(f"messages[{i}].role must be a string", f"messages[{i}].role")
        for key in ("reasoning_content", "reasoning"):
            if not isinstance(message.get(key), (str, type(None))):
                raise ChatError(f"messages[{i}].{key} must be a string or null", f"messages[{i}].{key}")
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, (list, tuple)) and all(map(_named, calls))):
            field = f"messages[{i}].tool_calls"
            raise ChatError(f"{field} must be an array of objects whose function is an object with a name", field)


def _named(value: Any) -> bool:
    function = value.get("function") if isinstance(value, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


# --- what several protocols need -----------------------------------------------------------------------------------


def with_systems_first(protocol: ModuleType, messages: Sequence[Mapping]) -> list[Mapping]:
    """The messages, and where a protocol takes system messages only at the beginning, all of them made one there."""
    if not getattr(protocol, "SYSTEM_FIRST", False) or not any(map(is_system, messages[1:])):
        return list(messages)
    return [one_system(filter(is_system, messages)), *(m for m in messages if not is_system(m))]


def is_system(message: Mapping) -> bool:
    return message.get("role") in ("system", "developer")


def one_system(messages: Iterable[Mapping]) -> dict[str, Any]:
    """One system message in place of several: their texts in order, without blank edges, separated by a blank line."""
    texts = (flatten(message.get("content"), "").strip() for message in messages)
    return {"role": "system", "content": "\n\n".join(filter(None, texts))}


def reasoning_tags(protocol: ModuleType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The opening and the closing tags of a protocol's reasoning; both empty where it has none."""
    opening, closing = (tuple(t for t in ((tags,) if isinstance(tags, str) else tags) if t) for tags in protocol.REASONING)
    return opening, closing


def flatten(content: Any, joiner: str = "\n\n") -> str:
    """A message's content as one string: null is "", text parts are joined, a part of an unknown type is its JSON
    text. Raises ChatError for media, which a protocol that can place them must handle before."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise ChatError(f"message content is a {type(content).__name__}; a string, null or a list of parts is expected")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in ("image", "image_url", "input_image", "audio", "input_audio", "video", "video_url"):
            raise ChatError(f"message content has a part of type {kind!r}; this model takes text only")
        else:
            texts.append(jsontext.dumps(part))
    return joiner.join(texts)


def call_arguments(call: Mapping) -> dict[str, Any]:
    """The arguments of a call in history as an object, decoded once if they came as JSON text ("" is {}). ChatError if
    they are no JSON object."""
    function = call.get("function") or call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = jsontext.loads(arguments) if arguments.strip() else {}
        except ValueError:
            name = function.get("name")
            raise ChatError(f"the arguments of call {name!r} are not JSON: {arguments[:60]!r}") from None
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        found = jsontext.dumps(arguments)[:60]
        raise ChatError(f"the arguments of call {function.get('name')!r} are {found}; a JSON object is expected")
    return dict(arguments)


def replayed(message: Mapping, blocks: Mapping[str, Block]) -> str | None:
    """The kept block to render in place of the message's calls: only if all their ids belong to one block, in its order
    and number. Else None, and the calls are rendered canonically."""
    ids = tuple(call.get("id") for call in message.get("tool_calls") or ())
    block = blocks.get(ids[0]) if ids else None
    return block.text if block is not None and block.ids == ids else None


def split_reasoning(content: str, opening: str = "<think>", closing: str = "</think>") -> tuple[str, str] | None:
    """(reasoning, rest) of an assistant's content that carries its reasoning inline, verbatim; None if it carries none.

    Many templates do this themselves when `reasoning_content` is missing. They cannot see the tags in guarded text, so a
    protocol with such a template calls this first and passes the two parts on as two fields. Reasoning is what stands
    before the first closing tag, after the last opening tag before it."""
    head, found, rest = content.partition(closing)
    return (head.rpartition(opening)[2], rest) if found else None


