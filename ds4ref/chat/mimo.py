"""The chat format of MiMo-V2.5 and V2.6, and of the older MiMo-VL (architecture `mimo2`).

V2, no newline between turns, and the system block always there:

    <|im_start|>system
    {system text or a default, tools}<|im_end|><|im_start|>user
    {text}<|im_end|><|im_start|>assistant
    <think>{reasoning}</think>{text}<tool_call>
    <function=NAME>
    <parameter=KEY>VALUE</parameter>
    </function>
    </tool_call><|im_end|>

With thinking on the prompt ends behind the assistant's header and the model writes `<think>` itself; with thinking off
it ends in `<think></think>`. There are no levels. `keep_all_reasoning` (true unless the request says no) keeps the
reasoning of turns before the last user message. VL has newlines between turns, JSON calls, no reasoning in history and no
switch for thinking; with thinking off the same closed pair of tags is put in front of the answer here.

History-stable point: V2 renders a sampled answer again as it was, so everything stays; with keep_all_reasoning false a
prompt is stable up to the first assistant turn behind the previous user message. VL drops all reasoning: stable up to the
header of the turn being sampled.

Source: the family's page and its renderings of the published templates. Knows nothing about token ids.
"""
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ds4ref.chat import NO_SPECIALS, Block, Options, Prompt, Specials, chatml, grammars, jsontext, turns
from ds4ref.chat.chatml import END, END_RESPONSE, END_THINK, REASONING, RESPONSE, START, THINK
from ds4ref.chat.framed import Answer, Body, Format
from ds4ref.chat.jsoncalls import JsonCall
from ds4ref.chat.xmlcalls import FUNCTION, PARAMETER, Syntax, XmlCall, value_text, write

__all__ = ["MARKERS", "REASONING", "STOPS", "Parser", "encode", "encode_vl", "refuse_template", "render", "settings"]

SYNTAX = Syntax("<tool_call>", "</tool_call>", FUNCTION, PARAMETER, own_lines=False, words=True)


def _body(first: str, schemas: Mapping[str, Mapping]) -> Body:
    return JsonCall(SYNTAX.closing) if first == "{" else XmlCall(SYNTAX, schemas)


FORMAT = Format((THINK,), (END_THINK,), SYNTAX.opening, _body, inside=(SYNTAX.closing,))
Parser = partial(Answer, FORMAT)

STOPS = (END, "<|endoftext|>", "<|mimo_audio_eod|>")
MARKERS = FORMAT.markers
CALLS = chatml.calls(SYNTAX)
CALLS_VL = grammars.Calls(SYNTAX.opening, grammars.json_call("\n", "\n" + SYNTAX.closing))

_PADS = {"image": "<|vision_start|><|image_pad|><|vision_end|>", "video": "<|vision_start|><|video_pad|><|vision_end|>",
         "audio": "<|mimo_audio_start|><|audio_pad|><|mimo_audio_end|>"}
_LITERALS = frozenset({START, RESPONSE, END_RESPONSE, *STOPS, *MARKERS, *re.findall(r"<\|\w+\|>", "".join(_PADS.values()))})

_DEFAULT = "You are MiMo, a helpful AI assistant engineered by Xiaomi."
_DEFAULT_VL = "You are MiMo, an AI assistant developed by Xiaomi."

_TOOLS = """

# Tools

You may call one or more functions to assist with the user query.

You have access to the following functions:

<tools>{functions}
</tools>

For each function call, output the function name and arguments in the following format:
<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>value_1</parameter>
<parameter=example_parameter_2>This is the value for the second parameter
that can span
multiple lines</parameter>
</function>
</tool_call>

<IMPORTANT>
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within \
<tool_call></tool_call> XML tags
- DO NOT use function calls inside <think></think> tags.
- The value enclosed between parameter tags is preserved exactly as-is, including newlines and spaces.
</IMPORTANT>"""

_TOOLS_VL = """

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


# --- what the artifact decides --------------------------------------------------------------------------------------


def settings(metadata: Mapping[str, Any], name: str = "") -> dict[str, str]:
    """The release: as the artifact's template tells; without one VL if `general.name` or the file's name says MiMo-VL,
    else V2."""
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template and refuse_template(template) is None:
        return {"release": "V2" if "<function=" in template else "VL"}
    names = f"{metadata.get('general.name', '')} {name}"
    return {"release": "VL" if re.search(r"mimo[-_ ]?vl", names, re.IGNORECASE) else "V2"}


def refuse_template(template: str) -> str | None:
    """Why an embedded template is none of these, None if it is one."""
    return None if START in template and SYNTAX.opening in template else "it does not write ChatML with <tool_call> calls"


def calls(options: Options, release: str = "V2") -> grammars.Calls:
    """How the release writes calls."""
    return CALLS_VL if release == "VL" else CALLS


# --- rendering ------------------------------------------------------------------------------------------------------


def render(messages: Sequence[Mapping], tools: Sequence[Mapping] | None, options: Options, *,
           template: str | None = None, specials: Specials = NO_SPECIALS, blocks: Mapping[str, Block] | None = None,
           release: str = "V2") -> Prompt:
    """Render a conversation: with the template, or by the rules of `release` ("V2" or "VL"). Raises ChatError."""
    word = turns.effort(options)
    thinking = word != "none"
    extra = options.template_kwargs
    guard = turns.guard_for(_LITERALS, specials, messages, tools, options, blocks, template)
    prepared = chatml.prepare(messages, guard, blocks, SYNTAX, place=_PADS.get, inline_reasoning=release == "V2")
    functions = [guard.data(tool) for tool in tools or ()]
    generation = bool(extra.get("add_generation_prompt", True))
    if template is not None:
        text = turns.through_template(template, prepared, functions, options, specials, guard, enable_thinking=thinking)
    elif release == "VL":
        text = encode_vl(prepared, functions) + (f"{START}assistant\n" if generation else "")
    else:
        text = encode(prepared, functions, default=_DEFAULT, keep=bool(extra.get("keep_all_reasoning", True)))
        text += opening(thinking) if generation else ""
    if release == "VL" and generation and not thinking:
        text += THINK + END_THINK
    return turns.finished(text, guard, chatml.OPEN, chatml.ONE_LEVEL if word in ("high", "xhigh", "max") else None)


def opening(thinking: bool) -> str:
    """The beginning of an answer."""
    return f"{START}assistant\n" + ("" if thinking else THINK + END_THINK)


def encode(messages: Sequence[Mapping], tools: Sequence[Mapping], *, default: str, keep: bool) -> str:
    """Prepared messages by the rules of V2. default: the system text where none is given. keep: the reasoning of all
    turns, not only of those behind the last user message."""
    system = default
    if messages and messages[0]["role"] == "system":
        system, messages = messages[0]["content"], messages[1:]
    if tools:
        system += _TOOLS.replace("{functions}", "".join(map(_signature, tools)))
    out = [f"{START}system\n{system}{END}"]
    last_user = turns.last_user(messages)
    for i, (message, (after, before)) in enumerate(zip(messages, chatml.runs(messages), strict=True)):
        role, content = message["role"], message["content"]
        match role:
            case "system" | "user":
                out.append(f"{START}{role}\n{content}{END}")
            case "assistant":
                reasoning = message["reasoning_content"] if keep or i > last_user else ""
                out.append(f"{START}assistant\n{THINK}{reasoning}{END_THINK}{content}{message.get('block', '')}")
                out += (write(SYNTAX, call["function"]["name"], call["function"]["arguments"], words=True)
                        for call in message.get("tool_calls") or ())
                out.append(END)
            case "tool":
                # The published template looks for a message in front, and leaves out the header where there is none.
                out.append("" if after or not i else f"{START}tool\n")
                out.append(f"{RESPONSE}\n{content}\n{END_RESPONSE}\n" + ("" if before else END))
    return "".join(out)


def _signature(tool: Mapping) -> str:
    """A tool as the system block lists it."""
    tool = tool.get("function") or tool
    lines = ["", "<function>", *_lines(tool, "name"), *_lines(tool, "description"), "<parameters>"]
    parameters = tool.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    for name, fields in properties.items() if isinstance(properties, Mapping) else ():
        lines += ["<parameter>", f"<name>{name}</name>"]
        if isinstance(fields, Mapping):
            lines += [*_lines(fields, "type"), *_lines(fields, "description"), *_others(fields, "name", "type", "description")]
        lines.append("</parameter>")
    lines += [*_others(parameters, "type", "properties"), "</parameters>"]
    return "\n".join([*lines, *_others(tool, "type", "name", "description", "parameters"), "</function>"])


def _lines(fields: Mapping, key: str) -> list[str]:
    """The line of a key that the list always knows; descriptions lose white space around them."""
    text = str(fields.get(key))
    return [f"<{key}>{text.strip() if key == 'description' else text}</{key}>"] if key in fields else []


def _others(fields: Any, *known: str) -> list[str]:
    """The lines of further keys: objects and arrays as JSON, the rest as Python prints it."""
    if not isinstance(fields, Mapping):
        return []
    return [f"<{key}>{value_text(value, True)}</{key}>" for key, value in fields.items() if key not in known]


def encode_vl(messages: Sequence[Mapping], tools: Sequence[Mapping]) -> str:
    """Prepared messages by the rules of VL."""
    system = _DEFAULT_VL
    if messages and messages[0]["role"] == "system":
        system, messages = messages[0]["content"], messages[1:]
    if tools:
        system += _TOOLS_VL.replace("{schemas}", "\n".join(map(jsontext.dumps, tools)))
    out = [f"{START}system\n{system}{END}\n"]
    for message, (after, before) in zip(messages, chatml.runs(messages), strict=True):
        role, content = message["role"], message["content"]
        match role:
            case "system" | "user":
                out.append(f"{START}{role}\n{content}{END}\n")
            case "assistant":
                calls = "".join(f"\n{SYNTAX.opening}\n{jsontext.dumps(_call(call))}\n{SYNTAX.closing}"
                                for call in message.get("tool_calls") or ())
                text = content + message.get("block", "")
                out.append(f"{START}assistant" + (f"\n{text}" if text or not calls else "") + calls + f"{END}\n")
            case "tool":
                out.append("" if after else f"{START}user")
                out.append(f"\n{RESPONSE}\n{content}\n{END_RESPONSE}" + ("" if before else f"{END}\n"))
    return "".join(out)


def _call(call: Mapping) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
