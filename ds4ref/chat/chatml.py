"""What the families share that write ChatML turns and XML calls: Qwen, MiMo, Naive, Step, and in part dots.

Knows nothing about one family's order of things, and nothing about token ids.
"""
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ds4ref.chat import Block, Options, flatten, grammars, split_reasoning, turns
from ds4ref.chat.errors import ChatError
from ds4ref.chat.framed import Format
from ds4ref.chat.guard import Guard
from ds4ref.chat.lark import escape
from ds4ref.chat.xmlcalls import Syntax, XmlCall

START, END = "<|im_start|>", "<|im_end|>"
THINK, END_THINK = REASONING = ("<think>", "</think>")
RESPONSE, END_RESPONSE = "<tool_response>", "</tool_response>"
OPEN = (THINK + "\n", THINK)
"""How a prompt ends when reasoning is open."""

ONE_LEVEL = "this model has one level of thinking"

CALL_EXAMPLE = """\
If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
"""

_MEDIA = {"image": "image", "image_url": "image", "input_image": "image", "video": "video", "video_url": "video",
          "audio": "audio", "input_audio": "audio"}


def answers(syntax: Syntax) -> Format:
    """The format of answers with reasoning and calls of this syntax."""
    return Format((THINK,), (END_THINK,), syntax.opening, lambda first, schemas: XmlCall(syntax, schemas),
                  own_lines=syntax.own_lines, inside=(syntax.closing,))


def calls(syntax: Syntax) -> grammars.Calls:
    """How calls of this syntax are written."""
    newline = "\n" if syntax.own_lines else ""
    ends = escape(syntax.call.closing) + r"[ \t\r\n]*" + escape(syntax.closing)
    bare = grammars.Bare(newline + syntax.parameter.closing, f"{escape(syntax.parameter.closing)}|{ends}", syntax.words)
    before = f"\n{syntax.call.before}{{name}}{syntax.call.after}\n"
    key = (syntax.parameter.before, syntax.parameter.after + newline)
    after = f"{syntax.call.closing}\n{syntax.closing}"
    return grammars.Calls(syntax.opening, grammars.bare_call(before, after, key, bare, "\n"), own_lines=syntax.own_lines)


def native_effort(options: Options) -> str | None:
    """The effort that the request gives as a template variable, in the template's own words. ChatError if it is no
    string."""
    word = options.template_kwargs.get("reasoning_effort")
    if word is not None and not isinstance(word, str):
        raise ChatError(f"chat_template_kwargs.reasoning_effort is {word!r}; a string is expected")
    return word


def prepare(messages: Sequence[Mapping], guard: Guard, blocks: Mapping[str, Block] | None, syntax: Syntax, *,
            place: Callable[[str], str | None] = lambda kind: None, inline_reasoning: bool = True) -> list[dict[str, Any]]:
    """`turns.prepare`, one to one, with the parts of a content joined without a separator.

    place: what stands for an "image", "video" or "audio" in a user's message, None if the family has nothing for it.
    inline_reasoning: whether a `<think>` head of an answer's content is its reasoning, if none is given apart."""
    placed, bare = {}, []
    for i, message in enumerate(messages):
        content = message.get("content")
        if message.get("role") == "user" and isinstance(content, (list, tuple)):
            placed[i] = "".join(_part(part, guard, place) for part in content)
            message = {**message, "content": ""}
        bare.append(message)
    split = split_reasoning if inline_reasoning else (lambda content: None)
    prepared = turns.prepare(bare, guard, blocks, (syntax.opening, syntax.closing), joiner="", split=split)
    for i, content in placed.items():
        prepared[i]["content"] = content
    return prepared


def _part(part: Any, guard: Guard, place: Callable[[str], str | None]) -> str:
    kind = _MEDIA.get(part.get("type")) if isinstance(part, Mapping) else None
    marker = place(kind) if kind else None
    return guard.text(flatten([part], "")) if marker is None else marker


def last_query(messages: Sequence[Mapping]) -> int | None:
    """The index of the last user message that is more than tool results written out; None if there is none.

    The messages as the request has them: guarded text does not show its tags."""
    for i in range(len(messages) - 1, -1, -1):
        if messages[i].get("role") == "user" and not _is_response(messages[i].get("content")):
            return i
    return None


def _is_response(content: Any) -> bool:
    parts = content if isinstance(content, (list, tuple)) else ()
    if any(isinstance(part, Mapping) and part.get("type") in _MEDIA for part in parts):
        return False
    text = flatten(content, "").strip()
    return text.startswith(RESPONSE) and text.endswith(END_RESPONSE)


def runs(messages: Sequence[Mapping]) -> list[tuple[bool, bool]]:
    """For each message, whether the one before it and the one behind it is a tool's."""
    is_tool = [False, *(m["role"] == "tool" for m in messages), False]
    return list(zip(is_tool, is_tool[2:], strict=False))
