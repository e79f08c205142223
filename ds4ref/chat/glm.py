"""The chat format of GLM-5.2 and GLM-5.3-Flash.

A prompt is

    [gMASK]<sop><|system|>Reasoning Effort: Max<|system|>{tools}<|system|>{system}<|user|>{user}<|assistant|><think>…

with no newline after role tokens. The releases differ in three points. 5.3: the effort is Low, High or Max, thinking cannot
be switched off, and past reasoning is kept. 5.2: High or Max, no effort line and a closed think block when thinking is
off, and reasoning before the last user message is dropped. `clear_thinking` of the request overrides what is kept.

History-stable point: 5.3 renders a sampled answer again as it was, so everything stays; 5.2 (and 5.3 with clear_thinking)
drops the reasoning of all turns before a new user message, so the prompt is stable up to the first assistant turn behind
the previous user message. A tool loop keeps all of its own.

Source: the families' pages; the published template of 5.3 and public descriptions of 5.2's. Knows nothing about token ids.
"""
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ds4ref.chat import NO_SPECIALS, Block, Options, Prompt, Specials, argkeys, grammars, jsontext, split_reasoning, turns
from ds4ref.chat.argkeys import ArgKeys, Tags
from ds4ref.chat.framed import Answer, Format
from ds4ref.chat.xmlcalls import value_text

START = "[gMASK]<sop>"
SYSTEM, USER, ASSISTANT, OBSERVATION = "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"
THINK, END_THINK = REASONING = ("<think>", "</think>")
IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"

TAGS = Tags(call=("<tool_call>", "</tool_call>"), key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>"))
FORMAT = Format((THINK,), (END_THINK,), "<tool_call>", lambda first, schemas: ArgKeys(TAGS, schemas), inside=TAGS.inside)
Parser = partial(Answer, FORMAT)

STOPS = ("<|endoftext|>", USER, OBSERVATION)
MARKERS = FORMAT.markers
CALLS = grammars.Calls(TAGS.call[0], argkeys.call(TAGS, "{name}", "", "", ""))

_LITERALS = frozenset({"[gMASK]", "<sop>", SYSTEM, ASSISTANT, "<tool_response>", "</tool_response>", "<|image|>",
                       "<|begin_of_image|>", "<|end_of_image|>", *STOPS, *MARKERS})

_TOOLS = """\

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>\
<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"""

_LINES = {"5.3": {"low": "Low", "high": "High"}, "5.2": {"high": "High"}}


def settings(metadata: Mapping[str, Any], name: str = "") -> dict[str, str]:
    """The release: 5.3 for `glm5-next`, 5.2 for `glm-dsa`."""
    return {"release": "5.3" if metadata.get("general.architecture") == "glm5-next" else "5.2"}


def refuse_template(template: str) -> str | None:
    """Why an embedded template is none of these, None if it is one."""
    return None if "[gMASK]" in template and "<arg_key>" in template else "it does not write [gMASK] and <arg_key> calls"


def render(messages: Sequence[Mapping], tools: Sequence[Mapping] | None, options: Options, *,
           template: str | None = None, specials: Specials = NO_SPECIALS, blocks: Mapping[str, Block] | None = None,
           release: str = "5.3") -> Prompt:
    """Render a conversation: with the template, or by the rules of `release` ("5.3" or "5.2"). Raises ChatError."""
    word, fallback = turns.effort(options), None
    thinking = word != "none"
    if not thinking and release == "5.3":
        thinking, fallback = True, 'this model always thinks; effort "low" is its shortest'
    guard = turns.guard_for(_LITERALS, specials, messages, tools, options, blocks, template)
    prepared = turns.prepare(turns.in_call_order(messages), guard, blocks, MARKERS, joiner="", image=IMAGE,
                             split=split_reasoning)
    functions = [guard.data(tool) for tool in tools or ()]
    extra = options.template_kwargs
    if template is None:
        text = encode(prepared, functions, effort=_LINES[release].get(word or "", "Max") if thinking else None,
                      clear=bool(extra.get("clear_thinking", release == "5.2")))
        if extra.get("add_generation_prompt", True):
            text += ASSISTANT + (THINK if thinking else THINK + END_THINK)
    else:
        named = word if word != "none" else None
        text = turns.through_template(template, prepared, functions, options, specials, guard,
                                      enable_thinking=thinking, reasoning_effort=named)
    return turns.finished(text, guard, (THINK,), fallback)


def encode(messages: Sequence[Mapping], tools: Sequence[Mapping], *, effort: str | None, clear: bool) -> str:
    """Prepared messages as text. effort: the word of the effort line, None for no line. clear: drop the reasoning of turns
    before the last user message."""
    out = [START] + ([f"{SYSTEM}Reasoning Effort: {effort}"] if effort else [])
    functions = [_signature(tool) for tool in tools]
    schemas = "\n".join(jsontext.dumps(f) for f in functions if f is not None)
    if schemas:
        out.append(SYSTEM + _TOOLS.replace("{schemas}", schemas))
    last_user, previous = turns.last_user(messages), ""
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        match role:
            case "system":
                out.append(SYSTEM + content)
            case "user":
                out.append(USER + content)
            case "assistant":
                reasoning = "" if clear and i < last_user else message["reasoning_content"]
                out.append(f"{ASSISTANT}{THINK}{reasoning}{END_THINK}{content.strip()}")
                out.append(message.get("block", ""))
                out += map(_call, message.get("tool_calls") or ())
            case "tool":
                out.append(OBSERVATION if previous != "tool" else "")
                out.append(f"<tool_response>{content}</tool_response>")
        previous = role
    return "".join(out)


def _signature(tool: Mapping) -> dict[str, Any] | None:
    """A tool's function as the prompt shows it, None if it is loaded later."""
    function = tool.get("function") or tool
    if tool.get("defer_loading") or function.get("defer_loading"):
        return None
    return {k: v for k, v in function.items() if k not in ("strict", "defer_loading")}


def _call(call: Mapping) -> str:
    function = call["function"]
    pairs = (f"<arg_key>{key}</arg_key><arg_value>{value_text(value, words=False)}</arg_value>"
             for key, value in function["arguments"].items())
    return f"<tool_call>{function['name']}{''.join(pairs)}</tool_call>"
