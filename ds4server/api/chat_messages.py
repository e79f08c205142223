"""Chat Completions messages and tools: validated, and brought into the one form that chat protocols render.

Every error names the field with its path. Knows nothing about templates.
"""

import json
import re

from .errors import bad_request

ROLES = {name: name for name in ("system", "user", "assistant", "tool")} | {"developer": "system", "function": "tool"}
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def messages(value):
    """The request's ``messages`` as canonical dicts: role, content (text or None), reasoning_content, tool_calls, …"""
    if not isinstance(value, list):
        raise bad_request(f"messages must be an array, got {kind(value)}", "messages")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(value)]


def _message(item, path):
    if not isinstance(item, dict):
        raise bad_request(f"{path} must be an object, got {kind(item)}", path)
    role = "user" if item.get("role") is None else item["role"]
    if not isinstance(role, str) or role not in ROLES:
        found = repr(role) if isinstance(role, str) else kind(role)
        raise bad_request(f"{path}.role must be one of {', '.join(ROLES)}, got {found}", f"{path}.role")
    message = {"role": ROLES[role], "content": _content(item.get("content"), f"{path}.content")}
    for name in ("name", "tool_call_id"):
        if item.get(name) is not None:
            message[name] = string(item[name], f"{path}.{name}")
    if role == "assistant":
        for name in ("reasoning_content", "reasoning"):
            if item.get(name) is not None:
                message["reasoning_content"] = string(item[name], f"{path}.{name}")
                break
        if item.get("tool_calls"):
            message["tool_calls"] = _calls(item["tool_calls"], f"{path}.tool_calls")
    return message


def _content(value, path):
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad_request(f"{path} must be a string, null or an array of parts, got {kind(value)}", path)
    return "".join(_part(part, f"{path}[{i}]") for i, part in enumerate(value))


def _part(part, path):
    if not isinstance(part, dict):
        raise bad_request(f"{path} must be an object, got {kind(part)}", path)
    what = part.get("type")
    if what == "text":
        return string(part.get("text"), f"{path}.text")
    if what == "refusal":
        return string(part.get("refusal"), f"{path}.refusal")
    if what in ("image_url", "input_audio", "file"):
        raise bad_request(f"{path} is of type {what}, and the loaded model takes text only", path)
    raise bad_request(f"{path}.type must be text or refusal, got {what!r}", f"{path}.type")


def _calls(value, path):
    if not isinstance(value, list):
        raise bad_request(f"{path} must be an array, got {kind(value)}", path)
    calls = []
    for i, call in enumerate(value):
        at = f"{path}[{i}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise bad_request(f"{at}.function must be an object, got {kind(function)}", f"{at}.function")
        name = string(function.get("name"), f"{at}.function.name")
        arguments = call_arguments(function.get("arguments"), f"{at}.function.arguments")
        calls.append({"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def call_arguments(value, path):
    """Call arguments in history: an object, or text that is one ("" counts as {}). Text is kept: numbers keep their form."""
    if value is None or value == "":
        return "{}"
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        try:
            if isinstance(json.loads(value), dict):
                return value
        except (ValueError, RecursionError):
            pass
    found = repr(value[:40]) if isinstance(value, str) else kind(value)
    raise bad_request(f"{path} must be a JSON object or its text, got {found}", path)


def tools(value):
    """The request's ``tools``, functions only; hosted tool types are dropped. None when nothing is left."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise bad_request(f"tools must be an array, got {kind(value)}", "tools")
    kept, names = [], set()
    for i, tool in enumerate(value):
        path = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise bad_request(f"{path} must be an object, got {kind(tool)}", path)
        if tool.get("type", "function") != "function":
            continue
        function = tool.get("function")
        if not isinstance(function, dict):
            raise bad_request(f"{path}.function must be an object, got {kind(function)}", f"{path}.function")
        name = function.get("name")
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            accepted = "1 to 128 of letters, digits and _ . : / -"
            raise bad_request(f"{path}.function.name must be {accepted}, got {name!r}", f"{path}.function.name")
        if name in names:
            raise bad_request(f"{path}.function.name {name!r} is defined twice", f"{path}.function.name")
        names.add(name)
        if not isinstance(function.get("parameters", {}), dict | None):
            found = kind(function["parameters"])
            raise bad_request(f"{path}.function.parameters must be an object, got {found}", f"{path}.function.parameters")
        kept.append({"type": "function", "function": function})
    return kept or None


def string(value, path):
    if not isinstance(value, str):
        raise bad_request(f"{path} must be a string, got {kind(value)}", path)
    return value


def kind(value):
    """A JSON value's type in words."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
