"""The chat format of dots3-note (architectures `dots3note` and, in older files, `dots3-note`).

    <|system|>{text or a default, tools}<|endofsystem|><|user|>{text}<|endofuser|><|assistant|><think>
    {reasoning}
    </think>

    {text}
    <dots_function_call>
    <invoke name="NAME">
    <parameter name="KEY">
    VALUE
    </parameter>
    </invoke>
    </dots_function_call><|endofassistant|><|user|>
    <dots_function_response>
    {result}
    </dots_function_response><|endofuser|>

With thinking on the prompt ends in `<|assistant|>` and the model writes `<think>` itself; with thinking off the last
user's text ends in `<no_think>` and the prompt in a closed pair of tags. There are no levels. `clear_thinking` of the
request empties the reasoning of turns before the last user message. Not confirmed by the family's page, and taken from how
engines that serve the model write it: consecutive results share one turn, each call has a block of its own, and an answer
without reasoning has no think tags.

History-stable point: with thinking on a sampled answer is rendered again as it was, so everything stays; with thinking off
`<no_think>` moves on with the last user message, so a prompt is stable up to the end of that message's own text. With
clear_thinking it is stable up to the first assistant turn behind the previous user message.

Source: the family's page and its renderings of the published template. Knows nothing about token ids.
"""
from collections.abc import Mapping, Sequence
from functools import partial

from ds4ref.chat import NO_SPECIALS, Block, Options, Prompt, Specials, chatml, jsontext, turns
from ds4ref.chat.chatml import END_THINK, REASONING, THINK
from ds4ref.chat.framed import Answer
from ds4ref.chat.xmlcalls import Syntax, Tag, write

__all__ = ["MARKERS", "REASONING", "STOPS", "Parser", "encode", "refuse_template", "render"]

SYSTEM, USER, ASSISTANT = (("<|system|>", "<|endofsystem|>"), ("<|user|>", "<|endofuser|>"),
                           ("<|assistant|>", "<|endofassistant|>"))
NO_THINK = "<no_think>"
RESPONSE = ("\n<dots_function_response>\n", "\n</dots_function_response>")

SYNTAX = Syntax("<dots_function_call>", "</dots_function_call>", Tag('<invoke name="', '">', "</invoke>"),
                Tag('<parameter name="', '">', "</parameter>"))
FORMAT = chatml.answers(SYNTAX)
Parser = partial(Answer, FORMAT)

STOPS = ("<|endoftext|>", ASSISTANT[1])
MARKERS = FORMAT.markers
CALLS = chatml.calls(SYNTAX)

_LITERALS = frozenset({*SYSTEM, *USER, *ASSISTANT, NO_THINK, *(tag.strip() for tag in RESPONSE), *STOPS, *MARKERS})
_DEFAULT = "You are a helpful assistant."

_TOOLS = """

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

When making tool calls, use XML format to invoke tools and pass parameters:

<dots_function_call>
<invoke name="tool-name-1">
<parameter name="param-key-1">
param-value-1
</parameter>
<parameter name="param-key-2">
param-value-2
</parameter>
...
</invoke>
</dots_function_call>"""


def refuse_template(template: str) -> str | None:
    """Why an embedded template is not this one, None if it is."""
    if USER[1] in template and SYNTAX.opening in template:
        return None
    return "it does not write <|endofuser|> turns and <dots_function_call> calls"


def render(messages: Sequence[Mapping], tools: Sequence[Mapping] | None, options: Options, *,
           template: str | None = None, specials: Specials = NO_SPECIALS,
           blocks: Mapping[str, Block] | None = None) -> Prompt:
    """Render a conversation: with the template, or by its written rules. Raises ChatError."""
    word = turns.effort(options)
    thinking = word != "none"
    extra = options.template_kwargs
    guard = turns.guard_for(_LITERALS, specials, messages, tools, options, blocks, template)
    prepared = chatml.prepare(messages, guard, blocks, SYNTAX)
    for message in prepared:
        # The newline before a call that follows reasoning at once was read as the end of the reasoning's tag.
        if message.get("block", "\n")[0] != "\n" and not message["content"]:
            message["block"] = "\n" + message["block"]
    functions = [guard.data(tool) for tool in tools or ()]
    if template is None:
        text = encode(prepared, functions, thinking=thinking, clear=bool(extra.get("clear_thinking", False)))
        if extra.get("add_generation_prompt", True):
            text += ASSISTANT[0] + ("" if thinking else f"{THINK}\n\n{END_THINK}\n\n")
    else:
        text = turns.through_template(template, prepared, functions, options, specials, guard, enable_thinking=thinking)
    return turns.finished(text, guard, chatml.OPEN, chatml.ONE_LEVEL if word in ("high", "xhigh", "max") else None)


def encode(messages: Sequence[Mapping], tools: Sequence[Mapping], *, thinking: bool, clear: bool) -> str:
    """Prepared messages as text. clear: empty the reasoning of turns before the last user message."""
    system = _DEFAULT
    if messages and messages[0]["role"] == "system":
        system, messages = messages[0]["content"], messages[1:]
    if tools:
        system += _TOOLS.replace("{schemas}", "\n".join(map(jsontext.dumps, tools)))
    out = [system.join(SYSTEM)]
    last_user = turns.last_user(messages)
    for i, (message, (after, before)) in enumerate(zip(messages, chatml.runs(messages), strict=True)):
        content = message["content"]
        match message["role"]:
            case "system":
                out.append(content.join(SYSTEM))
            case "user":
                out.append((content + (NO_THINK if i == last_user and not thinking else "")).join(USER))
            case "assistant":
                reasoning, cleared = message["reasoning_content"].strip("\n"), clear and i < last_user
                thought = "" if cleared else reasoning
                out.append(ASSISTANT[0] + (f"{THINK}\n{thought}\n{END_THINK}\n\n" if reasoning or cleared else ""))
                out.append(content + message.get("block", ""))
                out += ("\n" + write(SYNTAX, call["function"]["name"], call["function"]["arguments"])
                        for call in message.get("tool_calls") or ())
                out.append(ASSISTANT[1])
            case "tool":
                out.append(("" if after else USER[0]) + content.join(RESPONSE) + ("" if before else USER[1]))
    return "".join(out)
