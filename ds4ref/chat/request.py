"""The thinking controls of a chat request, as clients of several servers spell them, resolved to one answer.

Pure: fields in, a choice out. The rules are those of the HTTP API (off if any control says off; else on if any says on or
names a level; else the model's alias; else the family's default), used by the command line and by every surface.
"""

from collections.abc import Mapping

from ds4ref.chat.errors import ChatError

LEVELS = {
    "none": "none", "off": "none", "minimal": "minimal", "low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh",
    "max": "max",
}  # fmt: skip
TYPES = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


def thinking(request, alias=None):
    """(thinking: bool | None, effort: str | None) of a request's fields. None: the family's default.

    alias: what the model name says (True, False or None). ChatError names the field, what was found and what is accepted.
    """
    says = []
    for field in ("think", "enable_thinking"):
        says.append(_bool(request.get(field), field))
    says.append(_thinking_field(request.get("thinking")))
    kwargs = request.get("chat_template_kwargs")
    if kwargs is not None:
        if not isinstance(kwargs, Mapping):
            raise ChatError(f"chat_template_kwargs must be an object, got {_kind(kwargs)}", "chat_template_kwargs")
        for field in ("enable_thinking", "thinking"):
            says.append(_bool(kwargs.get(field), f"chat_template_kwargs.{field}"))
    effort = request.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str) or effort not in LEVELS:
            found = repr(effort) if isinstance(effort, str) else _kind(effort)
            raise ChatError(f"reasoning_effort must be one of {', '.join(LEVELS)}, got {found}", "reasoning_effort")
        effort = LEVELS[effort]
        says.append(effort != "none")
    if False in says:
        return False, None
    return (True if True in says else alias), effort


def _thinking_field(value):
    if not isinstance(value, Mapping):
        return _bool(value, "thinking")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in TYPES:
        raise ChatError(f"thinking.type must be one of {', '.join(TYPES)}, got {kind!r}", "thinking.type")
    return TYPES[kind]


def _bool(value, field):
    if value is None or isinstance(value, bool):
        return value
    raise ChatError(f"{field} must be true or false, got {_kind(value)}", field)


def _kind(value):
    names = {str: "a string", int: "a number", float: "a number", bool: "a boolean", list: "an array", dict: "an object"}
    return names.get(type(value), type(value).__name__)
