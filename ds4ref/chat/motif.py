"""The chat format of Motif-3.

A prompt is

    <|beginoftext|><|startofturn|><|system|>{tools}{system}<|endofturn|><|startofturn|><|user|>…<|startofturn|><|assistant|><think>

without newlines between turns. Past reasoning stands before the content; a turn without reasoning has no think tags. A call
is a newline and `<tool_call>{"name": …, "arguments": {…}, "id": …}</tool_call>`; a result is a JSON object with the call's
id. A conversation rendered without a generation prompt ends in `<|endoftext|>`.

History-stable point: everything, except that a new turn replaces the closed think block of an answer given with thinking
off (`<think></think>`) by nothing.

Not certain, and chosen here: several calls each on their own line, calls directly behind the text, and a system turn of the
tools alone where there is no system message. Source: the family's page and renderings of the published template. Knows
nothing about token ids.
"""
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ds4ref.chat import NO_SPECIALS, Block, Options, Prompt, Specials, grammars, jsontext, split_reasoning, turns
from ds4ref.chat.framed import Answer, Format
from ds4ref.chat.guard import Guard
from ds4ref.chat.jsoncalls import JsonCall

BOS, EOS = "<|beginoftext|>", "<|endoftext|>"
START, END = "<|startofturn|>", "<|endofturn|>"
THINK, END_THINK = REASONING = ("<think>", "</think>")

FORMAT = Format((THINK,), (END_THINK,), "<tool_call>", lambda first, schemas: JsonCall("</tool_call>"),
                inside=("</tool_call>",))
Parser = partial(Answer, FORMAT)

STOPS = (END, EOS)
MARKERS = FORMAT.markers
CALLS = grammars.Calls("<tool_call>", grammars.json_call("", "</tool_call>", ids=True))

_LITERALS = frozenset({BOS, START, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<tool_response>",
                       "</tool_response>", *STOPS, *MARKERS})

_TOOLS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:

<tools>
{schemas}
</tools>

For each function call, output in JSON within <tool_call> tags:

<tool_call>{example}</tool_call>"""


def refuse_template(template: str) -> str | None:
    """Why an embedded template is none of Motif's, None if it is one."""
    return None if "<|startofturn|>" in template and "<tool_call>" in template else "it does not write <|startofturn|> turns"


def render(messages: Sequence[Mapping], tools: Sequence[Mapping] | None, options: Options, *,
           template: str | None = None, specials: Specials = NO_SPECIALS,
           blocks: Mapping[str, Block] | None = None) -> Prompt:
    """Render a conversation: with the template, or by the rules written here. Thinking is on unless the options say off.
    Raises ChatError."""
    thinking = turns.effort(options) != "none"
    extra = options.template_kwargs
    guard = turns.guard_for(_LITERALS, specials, messages, tools, options, blocks, template)
    prepared = _prepare(messages, guard, blocks)
    functions = [guard.data(tool) for tool in tools or ()]
    if template is None:
        text = encode(prepared, functions)
        generation = START + "<|assistant|>" + THINK + ("" if thinking else END_THINK)
        text += generation if extra.get("add_generation_prompt", True) else EOS
    else:
        text = turns.through_template(template, prepared, functions, options, specials, guard, enable_thinking=thinking)
    return turns.finished(text, guard, (THINK,))


def _prepare(messages: Sequence[Mapping], guard: Guard, blocks: Mapping[str, Block] | None) -> list[dict[str, Any]]:
    """Prepared messages; a result that is an object stays one."""
    objects = [m["content"] if m.get("role") in ("tool", "function") and isinstance(m.get("content"), Mapping) else None
               for m in messages]
    plain = [m if found is None else {**m, "content": ""} for m, found in zip(messages, objects, strict=True)]
    prepared = turns.prepare(plain, guard, blocks, MARKERS, split=split_reasoning)
    for message, found in zip(prepared, objects, strict=True):
        if found is not None:
            message["content"] = guard.data(found)
        if "tool_call_id" in message:
            message["tool_call_id"] = guard.data(message["tool_call_id"])
    return prepared


def encode(messages: Sequence[Mapping], tools: Sequence[Mapping]) -> str:
    """Prepared messages as text."""
    messages = list(messages)
    system = [messages.pop(0)["content"]] if messages and messages[0]["role"] == "system" else []
    if tools:
        system.insert(0, _declaration([tool.get("function") or tool for tool in tools]))
    out = [BOS] + ([_turn("system", "\n\n".join(system))] if system else [])
    for message in messages:
        role, content = message["role"], message["content"]
        match role:
            case "assistant":
                reasoning = message["reasoning_content"]
                thought = f"{THINK}{reasoning}{END_THINK}" if reasoning else ""
                calls = "".join(map(_call, message.get("tool_calls") or ()))
                out.append(_turn(role, thought + content + message.get("block", "") + calls))
            case "tool":
                ids = {"tool_call_id": message["tool_call_id"]} if "tool_call_id" in message else {}
                result = jsontext.dumps({**ids, "content": content})
                out.append(_turn(role, f"<tool_response>{result}</tool_response>"))
            case _:
                out.append(_turn(role, content))
    return "".join(out)


def _turn(role: str, body: str) -> str:
    return f"{START}<|{role}|>{body}{END}"


def _declaration(functions: Sequence[Mapping]) -> str:
    """The tools' block, with the first tool as the example of a call."""
    lines = (jsontext.dumps({k: f[k] for k in ("name", "description", "parameters") if k in f}) for f in functions)
    properties = (functions[0].get("parameters") or {}).get("properties") or {}
    arguments = {name: jsontext.Encoded(f"<{name}>") for name in properties}
    example = jsontext.dumps({"name": functions[0].get("name"), "arguments": arguments})
    return _TOOLS.replace("{example}", example).replace("{schemas}", "\n".join(lines))


def _call(call: Mapping) -> str:
    ids = {"id": call["id"]} if "id" in call else {}
    return f"\n<tool_call>{jsontext.dumps({**call['function'], **ids})}</tool_call>"
