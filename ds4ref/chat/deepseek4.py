"""The chat format of DeepSeek V4 (Flash and PRO): rendering, and the grammar of calls. `Parser`, from `dsml`, reads
the answers.

A prompt is

    BOS {effort prefix}{system}<｜User｜>{user and results}<｜Assistant｜><think>{reasoning}</think>{text}{calls}EOS …

Two descriptions of it exist: the Jinja templates (first release, and 0731 with another ladder of efforts), used when the
artifact carries one, and the vendor's encoder (`encoding_dsv4`, shipped with the weights), written out in `encode` for
artifacts without. They differ at the edges only. Before either, `prepare` brings the messages of the API into the one
shape both expect, and escapes the few strings that would break the markup.

Knows nothing about token ids.
"""
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ds4ref.chat import (
    NO_SPECIALS,
    Block,
    Options,
    Prompt,
    Specials,
    call_arguments,
    constraints,
    flatten,
    grammars,
    jinja,
    jsontext,
    lark,
    replayed,
)
from ds4ref.chat.dsml import DSML, END_THINK, THINK, Parser
from ds4ref.chat.errors import ChatError
from ds4ref.chat.guard import Guard
from ds4ref.chat.lark import Writer

__all__ = ["CALLS", "MARKERS", "REASONING", "STOPS", "Parser", "encode", "prepare", "refuse_template", "render", "settings"]

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"

STOPS = (EOS, USER, ASSISTANT, BOS)
MARKERS = (THINK, END_THINK, DSML)
REASONING = (THINK, END_THINK)

MAX_EFFORT_CONTEXT = 393_216
"""Tokens of context below which `max` is ordinary thinking."""

_LITERALS = frozenset({BOS, EOS, USER, ASSISTANT, REMINDER, THINK, END_THINK, DSML})

_ABSOLUTE_MAXIMUM = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""
_BEYOND_MAXIMUM = """\
Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the \
problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause \
rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no \
assumption remains unchecked and no error remains undiscovered.

"""
EFFORT_PREFIXES: dict[str, dict[str, str]] = {
    "first": {"max": _ABSOLUTE_MAXIMUM},
    "0731": {"high": _ABSOLUTE_MAXIMUM, "max": _BEYOND_MAXIMUM},
}
"""Release → effort → the text after BOS."""

_TOOLS = """\
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"

_WORDS = ("minimal", "low", "medium", "high", "xhigh", "max")
_OFF_WORDS = ("none", "off")
_OWN_VARIABLES = frozenset({"messages", "tools", "reasoning_effort", "response_format"})
"""Template variables that only the request's own fields set."""


# --- what the artifact decides --------------------------------------------------------------------------------------


def settings(metadata: Mapping[str, Any], name: str = "") -> dict[str, str]:
    """Which release's ladder of efforts `encode` follows: 0731 if the artifact says so (DSpark keys, or 0731 in
    `general.name` or in its file name), else the first release's."""
    dspark = any(key.startswith("deepseek4.dspark.") for key in metadata)
    named = "0731" in str(metadata.get("general.name", "")) or "0731" in name
    return {"release": "0731" if dspark or named else "first"}


def refuse_template(template: str) -> str | None:
    """Why an embedded template is none of V4's, None if it is one."""
    if "function_calls" in template:
        return "it writes function_calls blocks, which are an older DeepSeek's"
    if "tool_calls" not in template or not (DSML in template or "dsml_token" in template):
        return "it does not write ｜DSML｜tool_calls blocks"
    return None


# --- rendering ------------------------------------------------------------------------------------------------------


def render(messages: Sequence[Mapping], tools: Sequence[Mapping] | None, options: Options, *,
           template: str | None = None, specials: Specials = NO_SPECIALS, blocks: Mapping[str, Block] | None = None,
           release: str = "first") -> Prompt:
    """Render a conversation: with the template, or without one by the encoder's rules in the ladder of `release`
    ("first" or "0731"). Thinking is on unless the options say off. Raises ChatError."""
    thinking, effort, fallback = _effort(options)
    extra = options.template_kwargs
    guard = Guard(_LITERALS | specials.literals, messages, tools or (), options.response_format or (), extra,
                  [b.text for b in (blocks or {}).values()], template or "")
    prepared = prepare(messages, guard, blocks or {})
    functions = [guard.data(tool) for tool in tools or ()]
    schema = None if options.response_format is None else guard.data(options.response_format)
    generation = bool(extra.get("add_generation_prompt", True))
    drop_thinking = bool(extra.get("drop_thinking", True))
    if template is None:
        text = encode(prepared, functions, thinking=thinking, prefix=EFFORT_PREFIXES[release].get(effort or "", ""),
                      drop_thinking=drop_thinking, response_format=schema)
        if generation and not (prepared and prepared[-1]["role"] in ("user", "tool")):
            text += ASSISTANT + (THINK if thinking else END_THINK)
    else:
        others = {k: v for k, v in extra.items() if k not in _OWN_VARIABLES}
        variables = {**guard.data(others), "messages": prepared, "bos_token": specials.bos or BOS,
                     "eos_token": specials.eos or EOS, "thinking": thinking, "enable_thinking": thinking,
                     "drop_thinking": drop_thinking, "add_generation_prompt": generation}
        variables |= {"tools": functions} if functions else {}
        variables |= {"reasoning_effort": effort} if effort else {}
        variables |= {"response_format": schema} if schema is not None else {}
        text = jinja.render(template, variables)
    text, plain = guard.mend(text)
    is_open = text.endswith(THINK) and not (plain and plain[-1][1] == len(text))
    return Prompt(text, plain, is_open, fallback)


def _effort(options: Options) -> tuple[bool, str | None, str | None]:
    """(thinking, "high" or "max" or None for ordinary, why a level was not given). Words: minimal, low, medium and xhigh
    are ordinary thinking, none and off are off."""
    word = options.effort
    if word is not None and word not in _WORDS + _OFF_WORDS:
        raise ChatError(f"effort {word!r} is not known; accepted are {', '.join(_OFF_WORDS + _WORDS)}")
    if options.thinking is False or word in _OFF_WORDS:
        return False, None, None
    if word == "max" and options.context is not None and options.context < MAX_EFFORT_CONTEXT:
        return True, None, (f"max effort needs a context of at least {MAX_EFFORT_CONTEXT} tokens, and this one has "
                            f"{options.context}; ordinary thinking is used")
    return True, word if word in ("high", "max") else None, None


def prepare(messages: Sequence[Mapping], guard: Guard, blocks: Mapping[str, Block]) -> list[dict[str, Any]]:
    """The messages as the encoder and the templates expect them, with users' text guarded: one system message in front
    (if there is any system or developer text), string contents, results in the order of their calls, markup that would
    end early escaped, kept blocks in place of their calls."""
    systems = [flatten(m.get("content")) for m in messages if m.get("role") in ("system", "developer")]
    prepared: list[dict[str, Any]] = []
    if systems:
        prepared.append({"role": "system", "content": guard.text("\n\n".join(systems))})
    for message in _sort_results(messages):
        role, content = message.get("role"), flatten(message.get("content"))
        match role:
            case "system" | "developer":
                pass
            case "user" | "latest_reminder":
                prepared.append({"role": role, "content": guard.text(content)})
            case "tool":
                content = content.replace("</tool_result>", "&lt;/tool_result>")
                prepared.append({"role": role, "content": guard.text(content)})
            case "assistant":
                prepared.append(_prepare_assistant(message, content, guard, blocks))
            case _:
                raise ChatError(f"message role {role!r} is not known; accepted are system, developer, user, assistant "
                                f"and tool")
    return prepared


def _prepare_assistant(message: Mapping, content: str, guard: Guard, blocks: Mapping[str, Block]) -> dict[str, Any]:
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    out = {"role": "assistant", "content": guard.text(content), "reasoning_content": guard.text(reasoning)}
    block = replayed(message, blocks)
    if block is not None:
        out["content"] += guard.text(block, keep=(DSML,))
    elif message.get("tool_calls"):
        out["tool_calls"] = [_prepare_call(call, guard) for call in message["tool_calls"]]
    return out


def _prepare_call(call: Mapping, guard: Guard) -> dict[str, Any]:
    arguments = {guard.text(_attribute(key)): _value(value, guard) for key, value in call_arguments(call).items()}
    name = guard.text(_attribute(str((call.get("function") or {}).get("name") or "")))
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


_PARAMETER_END = f"</{DSML}parameter>"


def _value(value: Any, guard: Guard) -> Any:
    """An argument with the one tag escaped that would end it early: in a string as `&lt;…`, else as `\\u003c…`."""
    if isinstance(value, str):
        return guard.text(value.replace(_PARAMETER_END, "&lt;" + _PARAMETER_END[1:]))
    return jsontext.Encoded(guard.text(jsontext.dumps(value).replace(_PARAMETER_END, "\\u003c" + _PARAMETER_END[1:])))


def _attribute(text: str) -> str:
    """A text inside the quotes of a tag's attribute."""
    for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(char, entity)
    return text


def _sort_results(messages: Iterable[Mapping]) -> list[Mapping]:
    """The messages, the results of each run of user and tool messages in the order of the preceding assistant message's
    calls: stable, users' texts keeping their places, an unknown id counting as the first call. No id is rendered, so
    order is all that links a result to its call."""
    out, order, places = [], {}, []
    for message in [*messages, {"role": "assistant"}]:
        if message.get("role") == "tool":
            places.append(len(out))
        elif message.get("role") != "user":
            results = sorted((out[i] for i in places), key=lambda m: order.get(m.get("tool_call_id"), 0))
            for place, result in zip(places, results, strict=True):
                out[place] = result
            places = []
            if message.get("tool_calls"):
                order = {call.get("id"): i for i, call in enumerate(message["tool_calls"])}
        out.append(message)
    return out[:-1]


# --- the encoder's rules --------------------------------------------------------------------------------------------


def encode(messages: Sequence[Mapping], tools: Sequence[Mapping], *, thinking: bool, prefix: str = "",
           drop_thinking: bool = True, response_format: Any = None) -> str:
    """Prepared messages by the rules of the vendor's encoder. prefix: the effort text. tools and response_format stand
    after the leading system message, an empty one if there is none. A user block at the end opens the answer."""
    functions = [tool["function"] for tool in tools if tool.get("type") == "function"]
    messages = list(messages)
    if (functions or response_format is not None) and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": ""})
    last_user = max((i for i, m in enumerate(messages) if m["role"] in ("user", "tool")), default=-1)
    keep_all = thinking and (bool(functions) or not drop_thinking)
    out = [BOS, prefix if thinking and messages else ""]
    in_user = False
    for i, message in enumerate(messages):
        match message["role"]:
            case "system":
                out.append(message["content"])
                if i == 0 and functions:
                    schemas = "\n".join(map(jsontext.dumps, functions))
                    out.append("\n\n" + _TOOLS.replace("{schemas}", schemas))
                if i == 0 and response_format is not None:
                    out.append("\n\n" + _RESPONSE_FORMAT + jsontext.dumps(response_format))
            case "user" | "tool" as role:
                out.append("\n\n" if in_user else USER)
                out.append(message["content"] if role == "user" else f"<tool_result>{message['content']}</tool_result>")
                in_user = True
                if i + 1 == len(messages) or messages[i + 1]["role"] in ("assistant", "latest_reminder"):
                    out.append(ASSISTANT + (THINK if keep_all or (thinking and i >= last_user) else END_THINK))
                    in_user = False
            case "latest_reminder":
                out.append(REMINDER + message["content"])
            case "assistant":
                if keep_all or (thinking and i > last_user):
                    out.append(message.get("reasoning_content", "") + END_THINK)
                out += [message["content"], _calls(message.get("tool_calls") or ()), EOS]
    return "".join(out)


def _calls(calls: Sequence[Mapping]) -> str:
    """The canonical call block, "" if there is no call."""
    if not calls:
        return ""
    lines = ["", "", f"<{DSML}tool_calls>"]
    for call in calls:
        function = call["function"]
        lines.append(f'<{DSML}invoke name="{function["name"]}">')
        for key, value in function["arguments"].items():
            kind, text = ("true", value) if isinstance(value, str) else ("false", jsontext.dumps(value))
            lines.append(f'<{DSML}parameter name="{key}" string="{kind}">{text}</{DSML}parameter>')
        if not function["arguments"]:
            lines.append("")
        lines.append(f"</{DSML}invoke>")
    return "\n".join([*lines, f"</{DSML}tool_calls>"])


# --- the grammar of calls -------------------------------------------------------------------------------------------

TRUE, FALSE, NEWLINE = '" string="true">', '" string="false">', "\n"


def _call(writer: Writer, function: grammars.Function) -> str:
    """The expression of one call. An argument states whether it is a string, so the two are never mistaken."""
    closing = f"</{DSML}parameter>"
    head = f'<{DSML}parameter name="'
    bare = grammars.Bare(closing, DSML)

    def value(spec: Any, root: Any) -> str:
        if constraints.admits_all(spec, root):
            kinds = lark.choice(map(writer.literal, (TRUE, FALSE)))
            return f"{kinds} {writer.until(bare.text(), closing)} {writer.literal(NEWLINE)}"
        texts, found = grammars.parts(spec, root, bare)
        ways = [f"{writer.literal(TRUE)} {writer.until(lark.choice(texts), closing)}"] if texts else []
        ways += [f"{writer.literal(FALSE)} {lark.choice(found)} {writer.literal(closing)}"] if found else []
        if not ways:
            raise ChatError("no value fits its schema")
        return f"{lark.choice(ways)} {writer.literal(NEWLINE)}"

    def pair(name: str, spec: Any, root: Any) -> str:
        return f"{writer.literal(head + _attribute(name))} {value(spec, root)}"

    def others(names: Sequence[str] | None, spec: Any, root: Any) -> str:
        return f"{writer.literal(head)} {grammars.other_name(writer, names)} {value(spec, root)}"

    arguments = grammars.pairs(writer, function, pair, others, lambda name: bool(name) and "\n" not in name,
                               empty=NEWLINE)
    opening = writer.literal(f'<{DSML}invoke name="{_attribute(function.name)}">\n')
    return " ".join(filter(None, (opening, arguments, writer.literal(f"</{DSML}invoke>"))))


CALLS = grammars.Calls(f"<{DSML}tool_calls>", _call, ("\n", "\n", f"</{DSML}tool_calls>"),
                       spelled=f"<({DSML}|DSML｜)?(tool_calls|invoke)")
