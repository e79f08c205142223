"""What the renderings of several families share: guarded messages of one shape, the order of results, the two ways to text.

A protocol calls `guard_for` and `prepare`, writes the prepared messages by its own rules or passes them to the artifact's
template (`through_template`), and hands the text to `finished`. Knows nothing about any family's markers.
"""
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ds4ref.chat import Block, Options, Prompt, Specials, call_arguments, flatten, jinja, jsontext, replayed
from ds4ref.chat.errors import ChatError
from ds4ref.chat.guard import Guard

WORDS = ("none", "off", "minimal", "low", "medium", "high", "xhigh", "max")

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
          "function": "tool"}
_IMAGES = ("image", "image_url", "input_image")


def effort(options: Options) -> str | None:
    """The effort a request names, "none" if it switches thinking off, None if it names none. ChatError for other words."""
    word = options.effort
    if word is not None and word not in WORDS:
        raise ChatError(f"effort {word!r} is not known; accepted are {', '.join(WORDS)}")
    return "none" if options.thinking is False or word == "off" else word


def choice(extra: Mapping[str, Any], name: str, accepted: Sequence[str], default: str) -> str:
    """A template variable that is one of a few words. ChatError for anything else."""
    value = extra.get(name)
    if value is None:
        return default
    if value not in accepted:
        raise ChatError(f"chat_template_kwargs.{name} is {value!r}; accepted are {', '.join(accepted)}")
    return value


def guard_for(literals: Iterable[str], specials: Specials, messages: Sequence[Mapping], tools: Sequence[Mapping] | None,
              options: Options, blocks: Mapping[str, Block] | None, template: str | None) -> Guard:
    """A guard of a family's literals and the tokenizer's, aware of everything that will be rendered."""
    return Guard(frozenset(literals) | specials.literals, messages, tools or (), options.response_format or (),
                 options.template_kwargs, [b.text for b in (blocks or {}).values()], template or "")


def contents(content: Any, guard: Guard, joiner: str = "\n\n", image: str = "") -> str:
    """Guarded content: text parts joined, and `image` where a part is one. ChatError for media that cannot be placed."""
    if image and isinstance(content, (list, tuple)):
        pieces = [image if isinstance(p, Mapping) and p.get("type") in _IMAGES else guard.text(flatten([p], joiner))
                  for p in content]
        return joiner.join(pieces)
    return guard.text(flatten(content, joiner))


def prepare(messages: Sequence[Mapping], guard: Guard, blocks: Mapping[str, Block] | None = None,
            markers: Collection[str] = (), *, joiner: str = "\n\n", image: str = "", refused: Collection[str] = (),
            split: Callable[[str], tuple[str, str] | None] = lambda content: None,
            arguments: Callable[[Mapping], Any] = call_arguments) -> list[dict[str, Any]]:
    """The messages with users' text guarded: `role` (system, user, assistant or tool) and `content` (a string) always;
    of an assistant `reasoning_content`, and `tool_calls` [{id, type, function: {name, arguments}}] or `block`, a kept call
    block whose `markers` are unguarded; of a result its `tool_call_id`.

    joiner: between text parts. image: what stands for an image in users' messages. refused: roles that are an error.
    split: (reasoning, content) of content with inline reasoning, where no reasoning is given. arguments: reads a call's."""
    prepared = []
    for message in messages:
        role = message.get("role")
        if role not in _ROLES or role in refused:
            accepted = ", ".join(r for r in _ROLES if r not in (*refused, "function"))
            raise ChatError(f"message role {role!r} is not known; accepted are {accepted}")
        role = _ROLES[role]
        out = {"role": role, "content": contents(message.get("content"), guard, joiner, image if role == "user" else "")}
        if role == "tool" and message.get("tool_call_id") is not None:
            out["tool_call_id"] = message["tool_call_id"]
        if role == "assistant":
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            parts = None if reasoning else split(flatten(message.get("content"), joiner))
            if parts:
                reasoning, out["content"] = parts[0], guard.text(parts[1])
            out["reasoning_content"] = guard.text(reasoning)
            block = replayed(message, blocks or {})
            if block is not None:
                out["block"] = guard.text(block, keep=markers)
            elif message.get("tool_calls"):
                out["tool_calls"] = [_call(call, guard, arguments) for call in message["tool_calls"]]
        prepared.append(out)
    return prepared


def _call(call: Mapping, guard: Guard, arguments: Callable[[Mapping], Any]) -> dict[str, Any]:
    name = guard.text(str((call.get("function") or {}).get("name") or ""))
    out = {"type": "function", "function": {"name": name, "arguments": guard.data(arguments(call))}}
    return {"id": guard.text(str(call["id"])), **out} if call.get("id") is not None else out


def in_call_order(messages: Sequence[Mapping]) -> list[Mapping]:
    """The messages with each run of results in the order of the calls before it, if every id of the run is given, unique
    and one of theirs; other runs as they are."""
    out: list[Mapping] = []
    place: dict[Any, int] = {}
    start = 0
    for message in [*messages, {"role": None}]:
        if message.get("role") not in ("tool", "function"):
            ids = [m.get("tool_call_id") for m in out[start:]]
            if len(set(ids)) == len(ids) and all(i in place for i in ids):
                out[start:] = sorted(out[start:], key=lambda m: place[m.get("tool_call_id")])
            place = {c.get("id"): i for i, c in enumerate(message.get("tool_calls") or ()) if c.get("id") is not None}
            start = len(out) + 1
        out.append(message)
    return out[:-1]


def last_user(messages: Sequence[Mapping]) -> int:
    """The index of the last user message, -1 if there is none."""
    return max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)


def through_template(template: str, prepared: Sequence[Mapping], tools: Sequence[Mapping], options: Options,
                     specials: Specials, guard: Guard, **variables: Any) -> str:
    """Prepared messages and guarded tools through the artifact's template. A kept block becomes the end of its message's
    content. The request's own template variables come first, `variables` win; those that are None are not defined."""
    messages = []
    for message in prepared:
        message = dict(message)
        message["content"] += message.pop("block", "")
        messages.append(message)
    given = {"add_generation_prompt": True, **guard.data(options.template_kwargs), "messages": messages,
             "tools": list(tools) or None, "bos_token": specials.bos, "eos_token": specials.eos, **variables}
    return jinja.render(template, {k: v for k, v in given.items() if v is not None})


def finished(text: str, guard: Guard, openings: Collection[str], fallback: str | None = None) -> Prompt:
    """The prompt of a rendered text. openings: how it ends when reasoning is open."""
    text, plain = guard.mend(text)
    end = max((len(o) for o in openings if text.endswith(o)), default=0)
    is_open = bool(end) and not (plain and plain[-1][1] > len(text) - end)
    return Prompt(text, plain, is_open, fallback)


def plain_numbers(value: Any) -> Any:
    """A copy of JSON-like data whose floats print as Python prints them, not as they were written."""
    if isinstance(value, Mapping):
        return {k: plain_numbers(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_numbers(v) for v in value]
    if isinstance(value, jsontext.WrittenFloat) and abs(value) != float("inf"):
        return float(value)
    return value
