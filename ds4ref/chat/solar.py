"""The chat format of Solar Open2.

A prompt is turns of `<|im:start|>role<|im:content|>body<|im:end|>` and a newline. The system turn has sections (system
text, tools); an assistant's body is `<|think:start|>R<|think:end|>text` and its calls; results share one turn.

Effort medium, high (the default) and xhigh leave the think block open (max is xhigh); at any other the template closes it
at once, so low and minimal do not think here.

History-stable point: reasoning is emptied in every assistant turn before the last user message (unless the request's
`think_render_option` is "preserved"), so a new user message leaves the prompt stable up to the first assistant turn behind
the previous one; a tool loop keeps its own reasoning.

Not certain, and chosen here: sections of one system turn are joined by a blank line, and later system messages stand in
place. The provider's own section is written by the artifact's template only. Source: the family's page and renderings of
the published template. Knows nothing about token ids.
"""
from collections.abc import Mapping, Sequence
from functools import partial

from ds4ref.chat import NO_SPECIALS, Block, Options, Prompt, Specials, argkeys, grammars, jsontext, turns
from ds4ref.chat.argkeys import ArgKeys, Tags
from ds4ref.chat.errors import ChatError
from ds4ref.chat.framed import Answer, Format
from ds4ref.chat.xmlcalls import value_text

START, CONTENT, END = "<|im:start|>", "<|im:content|>", "<|im:end|>"
THINK, END_THINK = REASONING = ("<|think:start|>", "<|think:end|>")

TAGS = Tags(call=("<|tool_call:start|>", "<|tool_call:end|>"), key=("<|tool_arg:start|>", "<|tool_arg:value|>"),
            value=("", "<|tool_arg:end|>"))
FORMAT = Format((THINK,), (END_THINK,), TAGS.call[0], lambda first, schemas: ArgKeys(TAGS, schemas), inside=TAGS.inside)
Parser = partial(Answer, FORMAT)

STOPS = (END, "<|endoftext|>")
MARKERS = FORMAT.markers
CALLS = grammars.Calls(TAGS.call[0], argkeys.call(TAGS, "{name}\n", "", "\n", ""))

_LITERALS = frozenset({START, CONTENT, "<|startoftext|>", "<|tool:start|>", "<|tool:end|>", "<|tool_response:start|>",
                       "<|tool_response:end|>", *STOPS, *MARKERS})

_TOOLS = """\
## Tools
- You may invoke one or more tools to assist with the user's query.

### Available Tools
{schemas}

### Tool Call Instruction
- If using a tool, any reasoning must strictly precede the call. Do not append any text after the tool call.
- If no tool is required, answer directly from your knowledge without ever mentioning the availability or absence of tools.
- Each tool call MUST use this following format: <|tool_call:start|>{example-tool-name}
<|tool_arg:start|>{example-key-name-1}<|tool_arg:value|>{example-value-1}<|tool_arg:end|>
<|tool_arg:start|>{example-key-name-2}<|tool_arg:value|>{example-value-2}<|tool_arg:end|>
<|tool_call:end|>
"""
_OPEN = ("medium", "high", "xhigh")


def refuse_template(template: str) -> str | None:
    """Why an embedded template is none of Solar's, None if it is one."""
    known = "tool_arg" in template and "im:content" in template
    return None if known else "it does not write tool_arg calls in im:content turns"


def render(messages: Sequence[Mapping], tools: Sequence[Mapping] | None, options: Options, *,
           template: str | None = None, specials: Specials = NO_SPECIALS,
           blocks: Mapping[str, Block] | None = None) -> Prompt:
    """Render a conversation: with the template, or by the rules written here. Raises ChatError."""
    word = turns.effort(options) or "high"
    word = "xhigh" if word == "max" else word
    fallback = f'this model does not think at effort "{word}"; "medium" is its shortest' if word in ("low", "minimal") else None
    extra = options.template_kwargs
    preserved = extra.get("think_render_option") == "preserved"
    guard = turns.guard_for(_LITERALS, specials, messages, tools, options, blocks, template)
    prepared = turns.prepare(turns.in_call_order(messages), guard, blocks, MARKERS)
    functions = [guard.data(tool) for tool in tools or ()]
    if template is None:
        if extra.get("provider_system_prompt"):
            raise ChatError("provider_system_prompt needs an artifact that carries its own chat template; this one does not")
        text = encode(prepared, functions, preserved)
        if extra.get("add_generation_prompt", True):
            text += f"{START}assistant{CONTENT}{THINK}" + ("" if word in _OPEN else END_THINK)
    else:
        text = turns.through_template(template, prepared, functions, options, specials, guard, reasoning_effort=word)
    return turns.finished(text, guard, (THINK,), fallback)


def encode(messages: Sequence[Mapping], tools: Sequence[Mapping], preserved: bool = False) -> str:
    """Prepared messages as text. preserved: keep all reasoning."""
    messages = list(messages)
    sections = []
    if messages and messages[0]["role"] == "system":
        sections.append("## System Prompt\n\n" + messages.pop(0)["content"])
    if tools:
        schemas = (f"<|tool:start|>{jsontext.dumps(tool.get('function') or tool)}<|tool:end|>" for tool in tools)
        sections.append(_TOOLS.replace("{schemas}", "\n".join(schemas)))
    out = [_turn("system", "\n\n".join(sections))] if sections else []
    last_user = turns.last_user(messages)
    for i, message in enumerate(messages):
        content = message["content"]
        match message["role"]:
            case "system":
                out.append(_turn("system", "## System Prompt\n\n" + content))
            case "user":
                out.append(_turn("user", content))
            case "assistant":
                reasoning = message["reasoning_content"] if preserved or i > last_user else ""
                calls = "".join(map(_call, message.get("tool_calls") or ()))
                out.append(_turn("assistant", f"{THINK}{reasoning}{END_THINK}{content}{message.get('block', '')}{calls}"))
            case "tool":
                first = not i or messages[i - 1]["role"] != "tool"
                last = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
                out.append(f"{START}tool{CONTENT}" if first else "")
                out.append(f"<|tool_response:start|>{content}<|tool_response:end|>\n" + (f"{END}\n" if last else ""))
    return "".join(out)


def _turn(role: str, body: str) -> str:
    return f"{START}{role}{CONTENT}{body}{END}\n"


def _call(call: Mapping) -> str:
    function = call["function"]
    pairs = (f"<|tool_arg:start|>{k}<|tool_arg:value|>{value_text(v, words=False)}<|tool_arg:end|>\n"
             for k, v in function["arguments"].items())
    return f"<|tool_call:start|>{function['name']}\n{''.join(pairs)}<|tool_call:end|>\n"
