"""Messages of the Anthropic API, their content blocks and tools: validated, and brought into Chat Completions form.

Every error names the field with its path. Knows nothing about templates.
"""

import json
import logging
from collections.abc import Mapping

from .chat_messages import TOOL_NAME, call_arguments, kind, string
from .errors import bad_request
from .opaque import opened

log = logging.getLogger("ds4server")
ROLES = ("user", "assistant", "system")
BILLING = "x-anthropic-"
"""Begins system texts that change with every request and are meant for the provider, not for the model."""
REFUSED = {
    "image": "an image, and the loaded model takes text only",
    "document": "a document, and only text is supported; send what it says as a text block",
    "container_upload": "a file in a container, and there are no containers here",
}
PLACES = {"tool_use": "assistant", "thinking": "assistant", "tool_result": "user"}
"""Blocks of which the meaning depends on who speaks: type → role."""


def messages(system, value):
    """The canonical messages of a request's ``system`` and ``messages``: role, content, reasoning_content, tool_calls, …

    A user message is split where it holds results: each becomes a message of role ``tool``, and what stands between them one of
    role ``user``, in order. ApiError 400.
    """
    if not isinstance(value, list):
        raise bad_request(f"messages must be an array, got {kind(value)}", "messages")
    text = _system(system)
    out = [{"role": "system", "content": text}] if text else []
    for i, item in enumerate(value):
        out += _message(item, f"messages[{i}]")
    return out


def _system(value):
    """The system text: a string as it is, text blocks joined by newlines, without billing headers and empty blocks."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad_request(f"system must be a string or an array of text blocks, got {kind(value)}", "system")
    texts = []
    for i, block in enumerate(value):
        path = f"system[{i}]"
        what = _type(block, path)
        if what != "text":
            raise bad_request(f"{path}.type must be text, got {what!r}", f"{path}.type")
        texts.append(string(block.get("text"), f"{path}.text"))
    return "\n".join(text for text in texts if text and not text.startswith(BILLING))


def _message(item, path):
    if not isinstance(item, dict):
        raise bad_request(f"{path} must be an object, got {kind(item)}", path)
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        found = repr(role)[:60] if isinstance(role, str) else kind(role)
        raise bad_request(f"{path}.role must be one of {', '.join(ROLES)}, got {found}", f"{path}.role")
    content, path = item.get("content"), f"{path}.content"
    if content is None or isinstance(content, str):
        return [{"role": role, "content": content or ""}]
    if not isinstance(content, list):
        raise bad_request(f"{path} must be a string, null or an array of blocks, got {kind(content)}", path)
    blocks = [_checked(block, role, f"{path}[{i}]") for i, block in enumerate(content)]
    return [_assistant(blocks, path)] if role == "assistant" else _said(blocks, role, path)


def _checked(block, role, path):
    what = _type(block, path)
    _refuse_media(what, path)
    if PLACES.get(what, role) != role:
        raise bad_request(f"{path} is a {what} block, which belongs into a message of role {PLACES[what]}", path)
    return block


def _type(block, path):
    if not isinstance(block, dict):
        raise bad_request(f"{path} must be an object, got {kind(block)}", path)
    return string(block.get("type"), f"{path}.type")


def _refuse_media(what, path):
    if what in REFUSED:
        raise bad_request(f"{path} is {REFUSED[what]}", path)


def _said(blocks, role, path):
    """A message of the user or the system: its texts joined, results as messages of their own. Types unknown are ignored."""
    out, texts = [], []
    for i, block in enumerate(blocks):
        if block["type"] == "text":
            texts.append(string(block.get("text"), f"{path}[{i}].text"))
        elif block["type"] == "tool_result":
            out += _text_message(role, texts)
            out.append(_result(block, f"{path}[{i}]"))
            texts = []
    return out + _text_message(role, texts) or [{"role": role, "content": ""}]


def _text_message(role, texts):
    text = "".join(texts)
    return [{"role": role, "content": text}] if text else []


def _result(block, path):
    """One result. ``is_error`` has no place in chat templates: what went wrong is what the text says, if it says anything."""
    failed = block.get("is_error")
    if not isinstance(failed, bool | None):
        raise bad_request(f"{path}.is_error must be true or false, got {kind(failed)}", f"{path}.is_error")
    text = _result_text(block.get("content"), f"{path}.content")
    call = string(block.get("tool_use_id"), f"{path}.tool_use_id")
    return {"role": "tool", "tool_call_id": call, "content": "error" if failed and not text else text}


def _result_text(value, path):
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise bad_request(f"{path} must be a string or an array of blocks, got {kind(value)}", path)
    return "".join(_result_part(part, f"{path}[{i}]") for i, part in enumerate(value))


def _result_part(part, path):
    what = _type(part, path)
    if what == "text":
        return string(part.get("text"), f"{path}.text")
    _refuse_media(what, path)
    # Where a client puts its cache marks changes from turn to turn; the text of the conversation must not.
    return json.dumps({name: value for name, value in part.items() if name != "cache_control"}, ensure_ascii=False)


def _assistant(blocks, path):
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        at = f"{path}[{i}]"
        match block["type"]:
            case "text":
                texts.append(string(block.get("text"), f"{at}.text"))
            case "thinking":
                thoughts.append(_thought(block, at))
            case "tool_use":
                calls.append(_call(block, at))
    message = {"role": "assistant", "content": "".join(texts)}
    if thought := "\n".join(text for text in thoughts if text):
        message["reasoning_content"] = thought
    return message | ({"tool_calls": calls} if calls else {})


def _thought(block, path):
    """The reasoning of a thinking block: where it was not shown, its signature holds it."""
    text = string("" if block.get("thinking") is None else block["thinking"], f"{path}.thinking")
    signature = string("" if block.get("signature") is None else block["signature"], f"{path}.signature")
    return text or opened(signature) or ""


def _call(block, path):
    name = string(block.get("name"), f"{path}.name")
    arguments = call_arguments(block.get("input"), f"{path}.input")
    identity = string(block.get("id"), f"{path}.id")
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def tools(value):
    """The request's ``tools`` in Chat Completions form. Tools that the provider runs or defines (dated types) are dropped. None
    when nothing is left. ApiError 400."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise bad_request(f"tools must be an array, got {kind(value)}", "tools")
    kept = {}
    for i, tool in enumerate(value):
        path = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise bad_request(f"{path} must be an object, got {kind(tool)}", path)
        if tool.get("type") not in (None, "custom"):
            log.info("%s of type %.60r is not offered to the model", path, tool["type"])
            continue
        function = _function(tool, path)
        if function["name"] in kept:
            raise bad_request(f"{path}.name {function['name']!r} is defined twice", f"{path}.name")
        kept[function["name"]] = {"type": "function", "function": function}
    return list(kept.values()) or None


def _function(tool, path):
    name = tool.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        found = repr(name)[:60] if isinstance(name, str) else kind(name)
        raise bad_request(f"{path}.name must be 1 to 128 of letters, digits and _ . : / -, got {found}", f"{path}.name")
    function = {"name": name}
    if tool.get("description") is not None:
        function["description"] = string(tool["description"], f"{path}.description")
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping | None):
        raise bad_request(f"{path}.input_schema must be an object, got {kind(schema)}", f"{path}.input_schema")
    if schema is not None:
        function["parameters"] = schema
    strict = tool.get("strict")
    if not isinstance(strict, bool | None):
        raise bad_request(f"{path}.strict must be true or false, got {kind(strict)}", f"{path}.strict")
    return function | ({"strict": True} if strict else {})
