"""The chat format of K-EXAONE.

A prompt is turns of `<|role|>`, a newline, the body and `<|endofturn|>` with a newline; tools come first, in a turn of their
own. An assistant's body always has a think block:

    <|assistant|>
    <think>
    R
    </think>

    text
    <tool_call>{"name": "f", "arguments": {…}}</tool_call><|endofturn|>

The newlines around the think tags belong to them. Arguments that came as JSON text are rendered as that text.

History-stable point: reasoning is emptied in every assistant turn before the last user message (in all with the request's
`skip_think`), so a new user message leaves the prompt stable up to the first assistant turn behind the previous one; a tool
loop keeps its own reasoning. Switching thinking off changes the end of the prompt only.

Source: the family's page and renderings of the published template. Knows nothing about token ids.
"""
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ds4ref.chat import (
    NO_SPECIALS,
    Block,
    Options,
    Prompt,
    Specials,
    call_arguments,
    grammars,
    jsontext,
    split_reasoning,
    turns,
)
from ds4ref.chat.framed import Answer, Format
from ds4ref.chat.jsoncalls import JsonCall

END = "<|endofturn|>"
THINK, END_THINK = REASONING = ("<think>", "</think>")

FORMAT = Format((THINK,), (END_THINK,), "<tool_call>", lambda first, schemas: JsonCall("</tool_call>"), own_lines=True,
                inside=("</tool_call>",))
Parser = partial(Answer, FORMAT)

STOPS = (END, "[EOS]")
MARKERS = FORMAT.markers
CALLS = grammars.Calls("<tool_call>", grammars.json_call("", "</tool_call>"), own_lines=True)

_LITERALS = frozenset({"<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tool_declare|>", "<tool_result>",
                       "</tool_result>", "<tool>", "</tool>", "[BOS]", *STOPS, *MARKERS})


def refuse_template(template: str) -> str | None:
    """Why an embedded template is none of K-EXAONE's, None if it is one."""
    known = "<|endofturn|>" in template and "<|tool_declare|>" in template
    return None if known else "it does not write <|endofturn|> turns and <|tool_declare|>"


def render(messages: Sequence[Mapping], tools: Sequence[Mapping] | None, options: Options, *,
           template: str | None = None, specials: Specials = NO_SPECIALS,
           blocks: Mapping[str, Block] | None = None) -> Prompt:
    """Render a conversation: with the template, or by the rules written here. Thinking is on unless the options say off.
    Raises ChatError, for a developer message too: the template knows no such role."""
    thinking = turns.effort(options) != "none"
    extra = options.template_kwargs
    guard = turns.guard_for(_LITERALS, specials, messages, tools, options, blocks, template)
    prepared = turns.prepare(messages, guard, blocks, MARKERS, refused=("developer",), split=_split, arguments=_arguments)
    functions = [guard.data(tool) for tool in tools or ()]
    if template is None:
        text = encode(prepared, functions, skip_think=bool(extra.get("skip_think")))
        if extra.get("add_generation_prompt", True):
            text += f"<|assistant|>\n{THINK}\n" + ("" if thinking else f"\n{END_THINK}\n\n")
    else:
        text = turns.through_template(template, prepared, functions, options, specials, guard, enable_thinking=thinking)
    return turns.finished(text, guard, (THINK + "\n",))


def _split(content: str) -> tuple[str, str] | None:
    """Inline reasoning as the template finds it: it strips the characters of the tag, not the tag."""
    if not split_reasoning(content):
        return None
    reasoning, _, rest = content.partition(END_THINK)
    return reasoning.lstrip(THINK).strip(), rest.strip()


def _arguments(call: Mapping) -> Any:
    """The arguments, checked to be a JSON object, as they came: an object or its text."""
    decoded = call_arguments(call)
    given = (call.get("function") or call).get("arguments")
    return given if isinstance(given, str) and given.strip() else decoded


def encode(messages: Sequence[Mapping], tools: Sequence[Mapping], *, skip_think: bool = False) -> str:
    """Prepared messages as text. skip_think: drop all reasoning."""
    out = []
    if tools:
        lines = (f"<tool>{jsontext.dumps(tool)}</tool>\n" for tool in tools)
        out.append(f"<|tool_declare|>\n# Tools\n{''.join(lines)}{END}\n")
    last_user = turns.last_user(messages)
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        match role:
            case "system" | "user":
                out.append(f"<|{role}|>\n{content}{END}\n")
            case "assistant":
                reasoning = message["reasoning_content"].strip() if i > last_user and not skip_think else ""
                body = [content.strip()] if content.strip() else []
                body += map(_call, message.get("tool_calls") or ())
                text = "\n".join(body) + message.get("block", "")
                out.append(f"<|assistant|>\n{THINK}\n{reasoning}\n{END_THINK}\n\n{text}{END}\n")
            case "tool":
                first = not i or messages[i - 1]["role"] != "tool"
                last = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
                out.append("<|tool|>\n" if first else "\n")
                out.append(f"<tool_result>{content}</tool_result>" + (f"{END}\n" if last else ""))
    return "".join(out)


def _call(call: Mapping) -> str:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else jsontext.dumps(arguments)
    return f'<tool_call>{{"name": {jsontext.dumps(function["name"])}, "arguments": {text}}}</tool_call>'
