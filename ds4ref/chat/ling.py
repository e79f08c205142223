"""The chat format of Ling-3.0-flash-VL (Bailing V3).

A prompt is

    <role>SYSTEM</role>{system}
    {tools}
    detailed thinking on<|role_end|><role>HUMAN</role>{user}<|role_end|><role>ASSISTANT</role>
    <think>…

The system block always comes first; its thinking line is left out where the system text says it itself. Thinking is on by
default; the request's template variable `thinking_option` ("on" or "off") counts like its thinking controls.

History-stable point: everything; past reasoning is kept, and a sampled answer is rendered again as it was, up to newlines
at the ends of its reasoning.

Source: the family's page and renderings of the template published for Ling-3.0-flash; where an image stands in this
text is not certain. Knows nothing about token ids.
"""
from collections.abc import Mapping, Sequence
from functools import partial

from ds4ref.chat import NO_SPECIALS, Block, Options, Prompt, Specials, argkeys, grammars, jsontext, split_reasoning, turns
from ds4ref.chat.argkeys import ArgKeys, Tags
from ds4ref.chat.framed import Answer, Format
from ds4ref.chat.xmlcalls import value_text

END = "<|role_end|>"
THINK, END_THINK = REASONING = ("<think>", "</think>")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"

TAGS = Tags(call=("<tool_call>", "</tool_call>"), key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>"))
FORMAT = Format((THINK,), (END_THINK,), "<tool_call>", lambda first, schemas: ArgKeys(TAGS, schemas), inside=TAGS.inside)
Parser = partial(Answer, FORMAT)

STOPS = (END, "<|endoftext|>")
MARKERS = FORMAT.markers
CALLS = grammars.Calls(TAGS.call[0], argkeys.call(TAGS, "{name}\n", "\n", "", "\n"))

_LITERALS = frozenset({"<role>", "</role>", "<tool_response>", "</tool_response>", "<|vision_start|>", "<|image_pad|>",
                       "<|vision_end|>", "<|startoftext|>", *STOPS, *MARKERS})

_TOOLS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

If none of the functions can be used, point it out. If the given question lacks the parameters required by the function, \
also point it out.
If you need to use a function, for each function call, output the function name and arguments within the following XML \
format:
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
<arg_key>{arg-key-2}</arg_key>
<arg_value>{arg-value-2}</arg_value>
...
</tool_call>"""
_PHRASES = ("detailed thinking on", "detailed thinking off")


def refuse_template(template: str) -> str | None:
    """Why an embedded template is none of Ling's, None if it is one."""
    return None if "<role>" in template and "<arg_key>" in template else "it does not write <role> turns and <arg_key> calls"


def render(messages: Sequence[Mapping], tools: Sequence[Mapping] | None, options: Options, *,
           template: str | None = None, specials: Specials = NO_SPECIALS,
           blocks: Mapping[str, Block] | None = None) -> Prompt:
    """Render a conversation: with the template, or by the rules written here. Raises ChatError."""
    extra = options.template_kwargs
    thinking = turns.effort(options) != "none" and turns.choice(extra, "thinking_option", ("on", "off"), "on") == "on"
    guard = turns.guard_for(_LITERALS, specials, messages, tools, options, blocks, template)
    prepared = turns.prepare(messages, guard, blocks, MARKERS, joiner="", image=IMAGE, split=_split)
    functions = [guard.data(tool) for tool in tools or ()]
    if template is None:
        text = encode(prepared, functions, thinking)
        if extra.get("add_generation_prompt", True):
            text += f"<role>ASSISTANT</role>\n{THINK}" + ("" if thinking else END_THINK)
    else:
        text = turns.through_template(template, prepared, functions, options, specials, guard, enable_thinking=thinking,
                                      thinking_option="on" if thinking else "off")
    return turns.finished(text, guard, (THINK,))


def _split(content: str) -> tuple[str, str] | None:
    parts = split_reasoning(content)
    return parts and (parts[0], parts[1].lstrip("\n"))


def encode(messages: Sequence[Mapping], tools: Sequence[Mapping], thinking: bool) -> str:
    """Prepared messages as text."""
    messages = list(messages)
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else ""
    parts = [system] if system else []
    if tools:
        parts.append(_TOOLS.replace("{schemas}", "\n".join(map(jsontext.dumps, tools))))
    if not any(phrase in system for phrase in _PHRASES):
        parts.append(_PHRASES[not thinking])
    out = ["<role>SYSTEM</role>", "\n".join(parts), END]
    for i, message in enumerate(messages):
        content = message["content"]
        match message["role"]:
            case "system":
                out.append(f"<role>SYSTEM</role>{content}{END}")
            case "user":
                out.append(f"<role>HUMAN</role>{content}{END}")
            case "assistant":
                reasoning = message["reasoning_content"].strip("\n")
                out.append(f"<role>ASSISTANT</role>\n{THINK}{reasoning}{END_THINK}{content}{message.get('block', '')}")
                calls = "\n".join(map(_call, message.get("tool_calls") or ()))
                out.append(("\n" if content and calls else "") + calls + END)
            case "tool":
                first = not i or messages[i - 1]["role"] != "tool"
                last = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
                out.append("<role>OBSERVATION</role>" if first else "")
                out.append(f"\n<tool_response>\n{content}\n</tool_response>" + (END if last else ""))
    return "".join(out)


def _call(call: Mapping) -> str:
    function = call["function"]
    pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{value_text(value, words=False)}</arg_value>"
             for key, value in function["arguments"].items())
    return f"<tool_call>{function['name']}\n{''.join(pairs)}\n</tool_call>"
