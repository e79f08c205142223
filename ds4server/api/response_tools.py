"""Tools of the Responses API: how they are offered to the model, and what a call by their name is for the client.

The model knows functions only. Those of a namespace carry its name in front of theirs; a custom tool, which takes free text,
is a function with one string parameter ``input``, of which the text is given back (a grammar for it is shown to the model, not
enforced); a tool search is a function of that name that the client executes. Types that this server would have to execute
itself are left out.
"""

import logging
from dataclasses import dataclass

import regex

from ..grammar import Choice
from .chat_messages import TOOL_NAME, kind, string
from .errors import bad_request
from .toolchoice import openai_choice

log = logging.getLogger("ds4server")
SEARCH = "tool_search"
FREE_TEXT = {
    "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False,
}  # fmt: skip


@dataclass(frozen=True)
class Origin:
    """The client's tool behind a function. kind: "function", "custom" or "tool_search"."""

    kind: str
    name: str
    namespace: str | None = None


class Toolbox:
    """The functions of one request. definitions: in Chat Completions form, in order; origins: function name → Origin."""

    def __init__(self):
        self.definitions, self.origins = [], {}

    def origin(self, name):
        """What the client calls the function ``name``; a model may also invent one."""
        return self.origins.get(name) or Origin("function", name)

    def add(self, value, path, repeated=False):
        """Take in the tools ``value``. repeated: whether names that are known already are passed over, not refused. Returns the
        names of the functions. ApiError 400 naming the field."""
        if value is None:
            return []
        if not isinstance(value, list):
            raise bad_request(f"{path} must be an array, got {kind(value)}", path)
        names, dropped = [], set()
        for i, tool in enumerate(value):
            at = f"{path}[{i}]"
            if not isinstance(tool, dict):
                raise bad_request(f"{at} must be an object, got {kind(tool)}", at)
            what = tool.get("type", "function")
            if what == "namespace":
                names += self._namespace(tool, at, repeated, dropped)
            else:
                names += self._tool(tool, what, at, None, repeated, dropped)
        if dropped:
            log.info("tools of type %s are not offered to the model", ", ".join(sorted(dropped)))
        return names

    def _namespace(self, tool, path, repeated, dropped):
        space, inner = _name(tool, path), tool.get("tools")
        if not isinstance(inner, list) or not all(isinstance(item, dict) for item in inner):
            raise bad_request(f"{path}.tools must be an array of objects, got {kind(inner)}", f"{path}.tools")
        names = []
        for i, item in enumerate(inner):
            names += self._tool(item, item.get("type", "function"), f"{path}.tools[{i}]", space, repeated, dropped)
        return names

    def _tool(self, tool, what, path, space, repeated, dropped):
        if what == "function":
            function = _function(tool, path)
        elif what == "custom":
            function = _custom(tool, path)
        elif what == SEARCH and tool.get("execution") != "server":
            function = {"name": SEARCH} | _described(tool, path, ("description", "parameters"))
        else:
            dropped.add(repr(what)[:40])
            return []
        origin = Origin(what, function["name"], space)
        name = function["name"] = (space or "") + origin.name
        if not TOOL_NAME.fullmatch(name):
            found = f"{path}.name must have at most 128 characters with its namespace, got {len(name)}"
            raise bad_request(found, f"{path}.name")
        if name not in self.origins:
            self.origins[name] = origin
            self.definitions.append({"type": "function", "function": function})
        elif not repeated:
            raise bad_request(f"{path}.name {name!r} is defined twice", f"{path}.name")
        return [name]


def _name(tool, path):
    name = tool.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise bad_request(f"{path}.name must be 1 to 128 of letters, digits and _ . : / -, got {name!r}", f"{path}.name")
    return name


def _function(tool, path):
    strict = tool.get("strict")
    if not isinstance(strict, bool | None):
        raise bad_request(f"{path}.strict must be true or false, got {kind(strict)}", f"{path}.strict")
    function = {"name": _name(tool, path)} | _described(tool, path, ("description", "parameters"))
    return function | ({"strict": True} if strict else {})


def _described(tool, path, names):
    """Members of a tool that the model reads, in the client's order, which is that of the prompt."""
    found = {name: value for name, value in tool.items() if name in names and value is not None}
    string(found.get("description", ""), f"{path}.description")
    if not isinstance(found.get("parameters", {}), dict):
        raise bad_request(f"{path}.parameters must be an object, got {kind(found['parameters'])}", f"{path}.parameters")
    return found


def _custom(tool, path):
    said = _described(tool, path, ("description",)).get("description", "")
    form, at = tool.get("format"), f"{path}.format"
    if form is not None and (not isinstance(form, dict) or form.get("type") not in ("text", "grammar")):
        found = repr(form.get("type")) if isinstance(form, dict) else kind(form)
        raise bad_request(f"{at} must be an object of type text or grammar, got {found}", at)
    if form is not None and form["type"] == "grammar":
        syntax, definition = string(form.get("syntax"), f"{at}.syntax"), string(form.get("definition"), f"{at}.definition")
        said = f"{said}\n\nThe input must follow this {syntax} grammar:\n{definition}".strip()
    return {"name": _name(tool, path)} | ({"description": said} if said else {}) | {"parameters": FREE_TEXT}


def tool_choice(value, box):
    """The :class:`Choice` of a request, in the names of ``box``. ApiError 400."""
    tools = box.definitions or None
    if not isinstance(value, dict):
        return openai_choice(value, tools, nested=False)
    if value.get("type") != "allowed_tools":
        return openai_choice(_renamed(value, box), tools, nested=False)
    listed = value.get("tools")
    if isinstance(listed, list) and listed and all(isinstance(item, dict) for item in listed):
        listed = [item for tool in listed for item in _allowed(tool, box)]
        if not listed and value.get("mode", "auto") == "auto":
            return Choice("none")  # only tools that are not offered are allowed
    return openai_choice(value | {"tools": listed}, tools, nested=False)


def _allowed(item, box):
    """The functions that one entry of ``allowed_tools`` names: none for types that are not offered."""
    what = item.get("type", "function")
    if what in ("function", "custom"):
        return [_renamed(item, box)]
    space = item.get("name") if what == "namespace" else None
    return [
        {"type": "function", "name": name} for name, origin in box.origins.items()
        if (what == SEARCH and origin.kind == SEARCH) or (space is not None and origin.namespace == space)
    ]  # fmt: skip


def _renamed(item, box):
    """``item`` with the name of its function: of one in a namespace the name alone will do where it is the only one."""
    name, space = item.get("name"), item.get("namespace") or ""
    if not isinstance(name, str) or not isinstance(space, str):
        return item
    alike = [full for full, origin in box.origins.items() if origin.name == name]
    full = space + name
    return item | {"name": alike[0] if not space and full not in box.origins and len(alike) == 1 else full}


OPENING = regex.compile(r'\s*\{\s*"input"\s*:\s*"')
HIGH, LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
CHARACTERS = regex.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    rf"|{HIGH}{LOW}|{HIGH}(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])..))*+"
)
"""Whole characters of a JSON string. The first half of a surrogate pair waits until it is known what follows."""
ESCAPE = regex.compile(r"\\(?:u([dD][89abAB]..)\\u([dD][c-fC-F]..)|u(....)|(.))")
SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class FreeText:
    """The free text in a custom tool's streamed arguments, ``{"input": "…"}``, as it comes. Arguments of any other form, which
    a model may write, are the text themselves."""

    def __init__(self):
        self._state, self._rest = "opening", ""

    def feed(self, fragment):
        """The text that the next piece of the arguments makes certain."""
        self._rest += fragment
        if self._state == "opening":
            found = OPENING.match(self._rest)
            if found is None and OPENING.fullmatch(self._rest, partial=True):
                return ""
            self._state = "text" if found else "other"
            self._rest = self._rest[found.end() if found else 0 :]
        if self._state == "other":
            text, self._rest = self._rest, ""
            return text
        return self._characters() if self._state == "text" else ""

    def finish(self):
        """The arguments are complete: what of them is still held back."""
        return self._rest if self._state == "opening" else ""

    def _characters(self):
        raw = CHARACTERS.match(self._rest)[0]
        rest = self._rest[len(raw) :]
        self._state, self._rest = "done" if rest.startswith('"') else "text", rest
        return ESCAPE.sub(_character, raw)


def _character(escape):
    high, low, code, short = escape.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    if code:
        return "\ufffd" if 0xD800 <= int(code, 16) < 0xE000 else chr(int(code, 16))
    return SHORT.get(short, short)
