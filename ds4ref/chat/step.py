"""The chat format of Step 3.5 Flash and Step 3.7 Flash (architecture `step35`): ChatML with XML calls.

    <｜begin▁of▁sentence｜><|im_start|>system
    Reasoning: {effort}

    {system text, tools}<|im_end|>
    <|im_start|>assistant
    <think>
    {reasoning}
    </think>
    {text}<tool_call> …<|im_end|>
    <|im_start|>tool_response
    <tool_response>{result}</tool_response><tool_response>…</tool_response><|im_end|>

3.5 has no effort line, and no system block without system text or tools. The words of the API: none, low (also minimal,
medium, and nothing), high (also xhigh), max; `reasoning_effort` among the template variables is the template's own word.
Both releases always open reasoning; with thinking off it is closed again here, as history shows an empty one.
Contents are trimmed: white space around them is reported to drive the model into loops.

History-stable point: the reasoning of all turns before a new query (a user message that is not just tool results) is
dropped, so a prompt is stable up to the first assistant turn behind the previous query. A tool loop keeps its own.

Source: the family's page and its renderings of the published templates. Knows nothing about token ids.
"""
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ds4ref.chat import NO_SPECIALS, Block, Options, Prompt, Specials, chatml, jsontext, turns
from ds4ref.chat.chatml import END, END_RESPONSE, END_THINK, REASONING, RESPONSE, START, THINK
from ds4ref.chat.framed import Answer
from ds4ref.chat.xmlcalls import FUNCTION, PARAMETER, Syntax, write

__all__ = ["MARKERS", "REASONING", "STOPS", "Parser", "encode", "refuse_template", "render", "settings"]

BOS, IMAGE = "<｜begin▁of▁sentence｜>", "<im_patch>"

SYNTAX = Syntax("<tool_call>", "</tool_call>", FUNCTION, PARAMETER, words=True)
FORMAT = chatml.answers(SYNTAX)
Parser = partial(Answer, FORMAT)

STOPS = (END,)
MARKERS = FORMAT.markers
CALLS = chatml.calls(SYNTAX)

_LITERALS = frozenset({BOS, START, RESPONSE, END_RESPONSE, IMAGE, *STOPS, *MARKERS})
_LEVELS = {"high": "high", "xhigh": "high", "max": "max", "none": "none"}

_TOOLS = """\
# Tools

You have access to the following functions in JSONSchema format:

<tools>
{schemas}
</tools>

""" + chatml.CALL_EXAMPLE + """\
- Function calls MUST follow the specified format: an inner <function=...>
...
</function> block must be nested within <tool_call>
...
</tool_call> XML tags
- Required parameters MUST be specified
</IMPORTANT>"""


# --- what the artifact decides --------------------------------------------------------------------------------------


def settings(metadata: Mapping[str, Any], name: str = "") -> dict[str, str]:
    """The release: as the artifact's template tells; without one 3.5 if `general.name` or the file's name says so, else
    3.7."""
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template and refuse_template(template) is None:
        return {"release": "3.7" if "reasoning_effort" in template else "3.5"}
    names = f"{metadata.get('general.name', '')} {name}"
    return {"release": "3.5" if re.search(r"step[-_ ]?(fun[-_ ]?)?3\.5", names, re.IGNORECASE) else "3.7"}


def refuse_template(template: str) -> str | None:
    """Why an embedded template is none of these, None if it is one."""
    if START in template and "<function=" in template and "tool_response" in template:
        return None
    return "it does not write ChatML with <function=…> calls and tool_response turns"


# --- rendering ------------------------------------------------------------------------------------------------------


def render(messages: Sequence[Mapping], tools: Sequence[Mapping] | None, options: Options, *,
           template: str | None = None, specials: Specials = NO_SPECIALS, blocks: Mapping[str, Block] | None = None,
           release: str = "3.7") -> Prompt:
    """Render a conversation: with the template, or by the rules of `release` ("3.7" or "3.5"). Raises ChatError."""
    word = turns.effort(options)
    thinking = word != "none"
    effort = fallback = None
    if release == "3.7":
        effort = chatml.native_effort(options) or _LEVELS.get(word or "", "low")
    elif word in ("high", "xhigh", "max"):
        fallback = chatml.ONE_LEVEL
    guard = turns.guard_for(_LITERALS, specials, messages, tools, options, blocks, template)
    prepared = chatml.prepare(messages, guard, blocks, SYNTAX, place={"image": IMAGE}.get)
    for message, given in zip(prepared, messages, strict=True):
        message["content"] = message["content"].strip()
        if message["role"] == "system" and given.get("name") == "observation":
            message["name"] = "observation"
    functions = [guard.data(tool) for tool in tools or ()]
    effort = None if effort is None else guard.text(effort)
    if template is None:
        text = encode(prepared, functions, effort=effort, query=chatml.last_query(messages))
        text += f"{START}assistant\n{THINK}\n" if options.template_kwargs.get("add_generation_prompt", True) else ""
    else:
        text = turns.through_template(template, prepared, functions, options, specials, guard, enable_thinking=thinking,
                                      reasoning_effort=effort)
    prompt = turns.finished(text, guard, chatml.OPEN, fallback)
    if not thinking and prompt.thinking:
        prompt = turns.finished(text.removesuffix("\n") + f"\n\n{END_THINK}\n", guard, chatml.OPEN)
    return prompt


def encode(messages: Sequence[Mapping], tools: Sequence[Mapping], *, effort: str | None, query: int | None) -> str:
    """Prepared messages as text. effort: the word of the effort line, None for no line (3.5). query: the last query;
    reasoning stays behind it only."""
    line = "" if effort is None else f"Reasoning: {effort}\n\n"
    parts = []
    if messages and messages[0]["role"] == "system":
        parts.append(messages[0]["content"])
    if tools:
        parts.append(_TOOLS.replace("{schemas}", "\n".join(map(jsontext.dumps, tools))))
    out = [BOS, f"{START}system\n{line}" + "\n\n".join(parts) + f"{END}\n" if line or parts else ""]
    for i, (message, (after, before)) in enumerate(zip(messages, chatml.runs(messages), strict=True)):
        role, content = message["role"], message["content"]
        match role:
            case "system" | "user":
                if i or role == "user":
                    out.append(f"{START}{message.get('name', role)}\n{content}{END}\n")
            case "assistant":
                out.append(f"{START}assistant\n")
                if query is not None and i > query:
                    out.append(f"{THINK}\n{_trim(message['reasoning_content'])}\n{END_THINK}\n")
                out.append(content + message.get("block", ""))
                out += (write(SYNTAX, call["function"]["name"], call["function"]["arguments"], words=True)
                        for call in message.get("tool_calls") or ())
                out.append(f"{END}\n")
            case "tool":
                out.append("" if after else f"{START}tool_response\n")
                out.append(f"{RESPONSE}{content}{END_RESPONSE}" + ("" if before else f"{END}\n"))
    return "".join(out)


def _trim(reasoning: str) -> str:
    return reasoning.strip("\n")
