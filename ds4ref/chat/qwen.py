"""The chat format of Qwen 3.5, 3.6 and 3.8 (architectures `qwen35` and `qwen4exp`): ChatML with XML calls.

    <|im_start|>system
    {effort sentence, tools, system text}<|im_end|>
    <|im_start|>user
    {text}<|im_end|>
    <|im_start|>assistant
    <think>
    {reasoning}
    </think>

    {text}

    <tool_call> …<|im_end|>

Two releases. 3.8 (Qwen3.8 and what derives from it, Bonsai 2 included): an effort sentence at the head of the system
message ("xhigh", the default, or "low"; "medium" adds none), the reasoning of all turns stays. 3.5: no effort, reasoning
stays only behind the last query, `<think>…</think>` at the head of a content is its reasoning, scalars in arguments print
as in Python. `preserve_thinking` of the request overrides what stays. The words of the API: minimal, low and medium ask
for "low", all above for "xhigh"; `reasoning_effort` among the template variables is the template's own word.

There may be one system message, the first; several at the beginning are joined here. There must be a query: a user
message that is not just tool results.

History-stable point: 3.8 renders a sampled answer again as it was, so everything stays. 3.5 drops the reasoning of all
turns before a new query: a prompt is stable up to the first assistant turn behind the previous query. Contents are
trimmed in both, so white space around an answer is lost.

Source: the families' pages, which describe the two published templates. Knows nothing about token ids.
"""
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from ds4ref.chat import NO_SPECIALS, Block, Options, Prompt, Specials, chatml, is_system, jsontext, one_system, turns
from ds4ref.chat.chatml import END, END_RESPONSE, END_THINK, REASONING, RESPONSE, START, THINK
from ds4ref.chat.errors import ChatError
from ds4ref.chat.framed import Answer
from ds4ref.chat.xmlcalls import FUNCTION, PARAMETER, Syntax, write

__all__ = ["MARKERS", "REASONING", "STOPS", "Parser", "encode", "refuse_template", "render", "settings"]

SYNTAX = Syntax("<tool_call>", "</tool_call>", FUNCTION, PARAMETER, words=True)
FORMAT = chatml.answers(SYNTAX)
Parser = partial(Answer, FORMAT)

STOPS = (END, "<|endoftext|>")
MARKERS = FORMAT.markers
CALLS = chatml.calls(SYNTAX)

_VISION = ("<|vision_start|>", "<|vision_end|>")
_PADS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
_LITERALS = frozenset({START, RESPONSE, END_RESPONSE, *_VISION, *_PADS.values(), *STOPS, *MARKERS})

EFFORTS = {
    "xhigh": "Reasoning effort is set to xhigh. Please think carefully through the task, validate key assumptions, "
             "consider plausible alternatives, and prioritize correctness, consistency, and clarity in the final answer.",
    "medium": "",
    "low": "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly to the conclusion "
           "without unnecessary elaboration.",
}
"""Word of the 3.8 template → its sentence."""
_LEVELS = {"minimal": "low", "low": "low", "medium": "low"}

_TOOLS = """\
# Tools

You have access to the following functions:

<tools>
{schemas}
</tools>

""" + chatml.CALL_EXAMPLE + """\
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within \
<tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
</IMPORTANT>"""


# --- what the artifact decides --------------------------------------------------------------------------------------


def settings(metadata: Mapping[str, Any], name: str = "") -> dict[str, str]:
    """The release: as the artifact's template tells; without one 3.5 if `general.name` or the file's name says Qwen3.5 or
    Qwen3.6, else 3.8."""
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template and refuse_template(template) is None:
        return {"release": "3.8" if "reasoning_effort" in template else "3.5"}
    names = f"{metadata.get('general.name', '')} {name}"
    return {"release": "3.5" if re.search(r"qwen[-_ ]?3\.[56]", names, re.IGNORECASE) else "3.8"}


def refuse_template(template: str) -> str | None:
    """Why an embedded template is none of these, None if it is one."""
    return None if START in template and "<function=" in template else "it does not write ChatML with <function=…> calls"


# --- rendering ------------------------------------------------------------------------------------------------------


def render(messages: Sequence[Mapping], tools: Sequence[Mapping] | None, options: Options, *,
           template: str | None = None, specials: Specials = NO_SPECIALS, blocks: Mapping[str, Block] | None = None,
           release: str = "3.8") -> Prompt:
    """Render a conversation: with the template, or by the rules of `release` ("3.8" or "3.5"). Raises ChatError."""
    thinking, effort, fallback = _effort(options, release)
    extra = options.template_kwargs
    guard = turns.guard_for(_LITERALS, specials, messages, tools, options, blocks, template)
    leading = list(takewhile(is_system, messages))
    if len(leading) > 1:
        messages = [one_system(leading), *messages[len(leading):]]
    query = _check(messages)
    prepared = chatml.prepare(messages, guard, blocks, SYNTAX, place=_numbering(bool(extra.get("add_vision_id"))),
                              inline_reasoning=release == "3.5")
    functions = [guard.data(tool) for tool in tools or ()]
    if template is None:
        keep = bool(extra.get("preserve_thinking", release == "3.8"))
        sentence = EFFORTS[effort] if effort else ""
        text = encode(prepared, functions, sentence=sentence, keep=keep, query=query, words=release == "3.5")
        if extra.get("add_generation_prompt", True):
            text += f"{START}assistant\n{THINK}\n" + ("" if thinking else f"\n{END_THINK}\n\n")
    else:
        text = turns.through_template(template, prepared, functions, options, specials, guard, enable_thinking=thinking,
                                      reasoning_effort=effort)
    return turns.finished(text, guard, chatml.OPEN, fallback)


def _effort(options: Options, release: str) -> tuple[bool, str | None, str | None]:
    """(thinking, the template's word, why a level is not in effect)."""
    word, native = turns.effort(options), chatml.native_effort(options)
    if word == "none":
        return False, None, None
    if release == "3.5":
        return True, None, chatml.ONE_LEVEL if word in ("high", "xhigh", "max") else None
    if native is not None:
        if native not in EFFORTS:
            raise ChatError(f"chat_template_kwargs.reasoning_effort is {native!r}; accepted are {', '.join(EFFORTS)}")
        return True, native, None
    return True, _LEVELS.get(word or "", "xhigh"), "this model has no effort above xhigh" if word == "max" else None


SYSTEM_FIRST = True


def _check(messages: Sequence[Mapping]) -> int:
    """The index of the last query. ChatError for what the templates refuse."""
    if not messages:
        raise ChatError("messages is empty; at least one user message is expected", "messages")
    for i, message in enumerate(messages):
        if i and is_system(message):
            raise ChatError(f"messages[{i}] is a system message; this model takes them only at the beginning",
                            f"messages[{i}].role")
    query = chatml.last_query(messages)
    if query is None:
        raise ChatError("messages hold no user query; at least one user message that is no tool result is expected",
                        "messages")
    return query


def _numbering(numbered: bool) -> Callable[[str], str | None]:
    """What stands for media, with a count of each kind in front if they are to be numbered."""
    counts = {"image": 0, "video": 0}

    def place(kind: str) -> str | None:
        if kind not in _PADS:
            return None
        counts[kind] += 1
        label = f"{'Picture' if kind == 'image' else 'Video'} {counts[kind]}: " if numbered else ""
        return label + _PADS[kind].join(_VISION)

    return place


def encode(messages: Sequence[Mapping], tools: Sequence[Mapping], *, sentence: str, keep: bool, query: int,
           words: bool) -> str:
    """Prepared messages as text. sentence: the effort's. keep: the reasoning of all turns, not only of those behind the
    message `query`. words: scalars as in Python (3.5)."""
    parts = [sentence] if sentence else []
    if tools:
        parts.append(_TOOLS.replace("{schemas}", "\n".join(map(jsontext.dumps, tools))))
    has_system = messages[0]["role"] == "system"
    if has_system and (system := messages[0]["content"].strip()):
        parts.append(system)
    out = [f"{START}system\n" + "\n\n".join(parts) + f"{END}\n"] if parts or (has_system and words) else []
    for i, (message, (after, before)) in enumerate(zip(messages, chatml.runs(messages), strict=True)):
        content = message["content"].strip()
        match message["role"]:
            case "user":
                out.append(f"{START}user\n{content}{END}\n")
            case "assistant":
                out.append(f"{START}assistant\n")
                if keep or i > query:
                    out.append(f"{THINK}\n{message['reasoning_content'].strip()}\n{END_THINK}\n\n")
                calls = (write(SYNTAX, call["function"]["name"], call["function"]["arguments"], words=words)
                         for call in message.get("tool_calls") or ())
                out.append(content + message.get("block", ""))
                for j, call in enumerate(calls):
                    out.append(("\n" if j else "\n\n" if content else "") + call)
                out.append(f"{END}\n")
            case "tool":
                # The published templates look for a message in front, and leave out the header where there is none.
                out.append("" if after or not i else f"{START}user")
                out.append(f"\n{RESPONSE}\n{content}\n{END_RESPONSE}" + ("" if before else f"{END}\n"))
    return "".join(out)
