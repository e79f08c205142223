"""``tool_choice`` as each surface spells it, and whether what it names is defined."""

from ..grammar import Choice
from .chat_messages import kind
from .errors import bad_request

ACCEPTED = "auto, none, required, a function or allowed_tools"


def openai_choice(value, tools, nested=True):
    """The :class:`Choice` of a Chat (``nested``: a name stands inside ``function``) or Responses request. ApiError 400."""
    if value is None or value == "auto":
        return Choice()
    if value == "none":
        return Choice("none")
    if value == "required":
        return _checked("required", None, tools, "tool_choice")
    if isinstance(value, dict):
        what = value.get("type")
        if what in ("function", "custom"):
            return _checked("required", (_name(value, what, nested, "tool_choice"),), tools, "tool_choice", single=True)
        if what == "allowed_tools":
            return _allowed(value, tools, nested)
        raise bad_request(f"tool_choice.type must be function or allowed_tools, got {what!r}", "tool_choice.type")
    found = repr(value)[:40] if isinstance(value, str) else kind(value)
    raise bad_request(f"tool_choice must be {ACCEPTED}, got {found}", "tool_choice")


def _allowed(value, tools, nested):
    spec = value.get("allowed_tools") if nested and isinstance(value.get("allowed_tools"), dict) else value
    mode, listed = spec.get("mode", "auto"), spec.get("tools")
    if mode not in ("auto", "required"):
        raise bad_request(f"tool_choice.mode must be auto or required, got {mode!r}", "tool_choice.mode")
    if not isinstance(listed, list) or not listed or not all(isinstance(item, dict) for item in listed):
        raise bad_request("tool_choice.tools must be an array of at least one object", "tool_choice.tools")
    names = tuple(_name(item, item.get("type", "function"), nested, f"tool_choice.tools[{i}]") for i, item in enumerate(listed))
    return _checked(mode, names, tools, "tool_choice")


def _name(value, what, nested, path):
    holder = value.get(what) if nested else value
    name = holder.get("name") if isinstance(holder, dict) else None
    if not isinstance(name, str):
        raise bad_request(f"{path} must name a function, got {kind(name)}", path)
    return name


def anthropic_choice(value, tools):
    """(:class:`Choice`, whether several calls are allowed) of a Messages request. ApiError 400."""
    if value is None:
        return Choice(), True
    if not isinstance(value, dict):
        raise bad_request(f"tool_choice must be an object, got {kind(value)}", "tool_choice")
    single = value.get("disable_parallel_tool_use")
    if not isinstance(single, bool | None):
        found = kind(single)
        raise bad_request(f"tool_choice.disable_parallel_tool_use must be true or false, got {found}",
                          "tool_choice.disable_parallel_tool_use")  # fmt: skip
    what = value.get("type")
    if what in ("auto", "none"):
        choice = Choice(what)
    elif what == "any":
        choice = _checked("required", None, tools, "tool_choice")
    elif what == "tool":
        choice = _checked("required", (_name(value, what, False, "tool_choice"),), tools, "tool_choice", single=True)
    else:
        raise bad_request(f"tool_choice.type must be auto, any, tool or none, got {what!r}", "tool_choice.type")
    return choice, not single


def _checked(mode, names, tools, path, single=False):
    defined = [tool["function"]["name"] for tool in tools or ()]
    if mode == "required" and not defined:
        raise bad_request(f"{path} forces a call and there are no tools", path)
    for name in names or ():
        if name not in defined:
            raise bad_request(f"{path} names {name!r}, which is not among the tools", path)
    return Choice(mode, names, single)
