"""The chat format of K2-Horizon.

A prompt is `<|ifm|begin_of_text|>` and messages of `<|ifm|im_start|>role`, a newline, the body and `<|ifm|im_end|>`, with
nothing between messages. How long the model thinks is chosen by the tag that opens its answer:
high `<ifm|think>` (the default), medium `<ifm|think_fast>`, low `<ifm|think_faster>`. There is no "off": none, minimal and
requests that switch thinking off get low, and are told so; xhigh and max get high.

All calls of an answer stand in one block, each in one of three forms that the request's template variable
`tool_call_format` asks for ("xml", the default, "json" or "xml_typed"); the parser reads any of them. The model often closes
`<ifm|think_fast>` with `</ifm|think>`, so any closing tag ends reasoning.

History-stable point: everything, if the client replays reasoning in the field of its tag (`think_fast`, `think_faster`);
`reasoning_content` is rendered in `<ifm|think>`, so answers at other efforts diverge at the beginning of their turn.

Source: the family's page, renderings of the published template, and for `k2tools` public ports of it. Knows nothing about
token ids.
"""
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ds4ref.chat import NO_SPECIALS, Block, Options, Prompt, Specials, argkeys, grammars, jsontext, k2tools, schema, turns
from ds4ref.chat.argkeys import ArgKeys, Tags
from ds4ref.chat.errors import ChatError
from ds4ref.chat.framed import Answer, Body, Format
from ds4ref.chat.guard import Guard
from ds4ref.chat.jsoncalls import JsonCall
from ds4ref.chat.xmlcalls import value_text

BOS = "<|ifm|begin_of_text|>"
START, END = "<|ifm|im_start|>", "<|ifm|im_end|>"
_NAMES = {"high": "think", "medium": "think_fast", "low": "think_faster"}
THINK = tuple(f"<ifm|{name}>" for name in _NAMES.values())
END_THINK = tuple(f"</ifm|{name}>" for name in _NAMES.values())
REASONING = (THINK, END_THINK)
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}

TAGS = Tags(
    call=("<ifm|tool_call>", "</ifm|tool_call>"), key=("<ifm|arg_key>", "</ifm|arg_key>"),
    value=("<ifm|arg_value>", "</ifm|arg_value>"), type=("<ifm|arg_type>", "</ifm|arg_type>"),
    block_end="</ifm|tool_calls>",
)  # fmt: skip


def _body(first: str, schemas: Mapping[str, Mapping]) -> Body:
    return JsonCall(TAGS.call[1]) if first == "{" else ArgKeys(TAGS, schemas)


FORMAT = Format(THINK, END_THINK, TAGS.call[0], _body, block=("<ifm|tool_calls>", TAGS.block_end), inside=TAGS.inside)
Parser = partial(Answer, FORMAT)

STOPS = (END, "<|ifm|endoftext|>")
MARKERS = FORMAT.markers
_BLOCK = ("\n", "\n", TAGS.block_end)
_CALLS = {
    "xml": argkeys.call(TAGS, f"{TAGS.call[0]}{{name}}\n", "\n", "\n", ""),
    "json": grammars.json_call(*TAGS.call),
}

_LITERALS = frozenset({BOS, START, "<ifm|tools>", "</ifm|tools>", *STOPS, *MARKERS})

_DECLARATION = """\
# Tools
You may call one or more tools to assist with the user query.

Available tools are:

<ifm|tools>
{tools}
</ifm|tools>

When calling tools, you MUST follow the tool-call format below:

Wrap all tool calls in a single <ifm|tool_calls></ifm|tool_calls> block. For each call, """
_FORMATS = {
    "xml": """\
write the function name at the start of <ifm|tool_call>, followed by paired <ifm|arg_key> and <ifm|arg_value> tags for each \
argument:

<ifm|tool_calls>
<ifm|tool_call>$FUNCTION_NAME
<ifm|arg_key>$PARAMETER_NAME</ifm|arg_key>
<ifm|arg_value>$PARAMETER_VALUE</ifm|arg_value>
...
</ifm|tool_call>
</ifm|tool_calls>

String and scalar parameters should be written as plain text. Array and object parameters should be written as JSON \
literals.""",
    "xml_typed": """\
write the function name at the start of <ifm|tool_call>, followed by <ifm|arg_key>, <ifm|arg_type>, and <ifm|arg_value> tags \
for each argument:

<ifm|tool_calls>
<ifm|tool_call>$FUNCTION_NAME
<ifm|arg_key>$PARAMETER_NAME</ifm|arg_key>
<ifm|arg_type>$ARGUMENT_TYPE</ifm|arg_type>
<ifm|arg_value>$PARAMETER_VALUE</ifm|arg_value>
...
</ifm|tool_call>
</ifm|tool_calls>

Use the parameter type shown in the tool definition. If that type contains anyOf or oneOf, use the actual argument value \
type instead. String and scalar parameters should be written as plain text. Array and object parameters should be written \
as JSON literals.""",
    "json": """\
emit one JSON object with the function name and arguments on the same line inside <ifm|tool_call></ifm|tool_call> tags:

<ifm|tool_calls>
<ifm|tool_call>{"name": <function-name>, "arguments": <args-json-object>}</ifm|tool_call>
</ifm|tool_calls>""",
}


def calls(options: Options) -> grammars.Calls:
    """How calls are written: as XML or JSON, as the request asks; the types of typed XML are left out, since the parser knows
    them."""
    form = turns.choice(options.template_kwargs, "tool_call_format", tuple(_FORMATS), "xml")
    return grammars.Calls("<ifm|tool_calls>", _CALLS["json" if form == "json" else "xml"], _BLOCK,
                          spelled=r"<ifm\|tool_calls?>")


def refuse_template(template: str) -> str | None:
    """Why an embedded template is none of K2-Horizon's, None if it is one."""
    return None if "ifm|" in template and "tool_call" in template else "it does not write <ifm|…> markers"


def render(messages: Sequence[Mapping], tools: Sequence[Mapping] | None, options: Options, *,
           template: str | None = None, specials: Specials = NO_SPECIALS,
           blocks: Mapping[str, Block] | None = None) -> Prompt:
    """Render a conversation: with the template, or by the rules written here. Raises ChatError."""
    asked = turns.effort(options) or "high"
    word = _EFFORTS.get(asked, asked)
    fallback = 'this model always thinks; effort "low" is its shortest' if asked in ("none", "minimal") else None
    extra = options.template_kwargs
    calls = turns.choice(extra, "tool_call_format", tuple(_FORMATS), "xml")
    presentation = turns.choice(extra, "tool_presentation_format", ("markdown", "json"), "markdown")
    tools = [k2tools.checked(tool) for tool in tools or ()]
    guard = turns.guard_for(_LITERALS, specials, messages, tools, options, blocks, template)
    prepared = _prepare(messages, guard, blocks)
    functions = [guard.data(tool) for tool in tools]
    if template is None:
        text = encode(prepared, functions, calls, presentation)
        if extra.get("add_generation_prompt", True):
            text += f"{START}assistant\n<ifm|{_NAMES[word]}>\n"
    else:
        text = turns.through_template(template, prepared, functions, options, specials, guard, reasoning_effort=word)
    return turns.finished(text, guard, [f"{tag}\n" for tag in THINK], fallback)


def _prepare(messages: Sequence[Mapping], guard: Guard, blocks: Mapping[str, Block] | None) -> list[dict[str, Any]]:
    """Prepared messages; an assistant's reasoning stands in the field of its tag, an empty one if none is given."""
    plain = [{**m, "content": jsontext.dumps(m["content"])} if isinstance(m.get("content"), Mapping) else m for m in messages]
    prepared = turns.prepare(plain, guard, blocks, MARKERS, joiner="\n")
    for message, out in zip(messages, prepared, strict=True):
        field = next((name for name in _NAMES.values() if message.get(name) is not None), None)
        if out["role"] == "assistant" and field:
            if not isinstance(message[field], str):
                raise ChatError(f"{field} of an assistant message is no string")
            out[field] = guard.text(message[field])
            del out["reasoning_content"]
    return prepared


def encode(messages: Sequence[Mapping], tools: Sequence[Mapping], calls: str, presentation: str) -> str:
    """Prepared messages as text. calls and presentation: the formats of calls and of the list of tools."""
    messages = list(messages)
    system = [messages.pop(0)["content"]] if messages and messages[0]["role"] == "system" else []
    if tools:
        listed = k2tools.listing(tools, presentation)
        system = [_DECLARATION.replace("{tools}", listed) + _FORMATS[calls], *filter(None, system)]
    out = [BOS] + ([_message("system", "\n\n".join(system))] if system else [])
    for message in messages:
        body = message["content"]
        if message["role"] == "assistant":
            name = next((n for n in _NAMES.values() if n in message), "think")
            reasoning = message.get(name, message.get("reasoning_content", ""))
            body = f"<ifm|{name}>\n{reasoning}</ifm|{name}>{body}{message.get('block', '')}"
            if message.get("tool_calls"):
                lines = (_call(call["function"], calls, tools) for call in message["tool_calls"])
                body += "\n".join(["<ifm|tool_calls>", *lines, "</ifm|tool_calls>"])
        out.append(_message(message["role"], body))
    return "".join(out)


def _message(role: str, body: str) -> str:
    return f"{START}{role}\n{body}{END}"


def _call(function: Mapping, form: str, tools: Sequence[Mapping]) -> str:
    if form == "json":
        return f"<ifm|tool_call>{jsontext.dumps(function)}</ifm|tool_call>"
    declared = schema.parameters(tools).get(function["name"], {})
    lines = [f"<ifm|tool_call>{function['name']}"]
    for key, value in function["arguments"].items():
        lines.append(f"<ifm|arg_key>{key}</ifm|arg_key>")
        if form == "xml_typed":
            kind = k2tools.argument_type(schema.property_schema(declared, key), value)
            lines.append(f"<ifm|arg_type>{kind}</ifm|arg_type>")
        lines.append(f"<ifm|arg_value>{value_text(value, words=False)}</ifm|arg_value>")
    return "\n".join([*lines, "</ifm|tool_call>"])
