"""Input items of the Responses API: validated, and brought into the messages that chat protocols render.

Items are finer than messages: reasoning, text and calls of one answer are items of their own, which join to one assistant
message here; a result ends it. Every error names the field with its path. Knows nothing about templates.
"""

import json

from .chat_messages import call_arguments, kind, string
from .errors import bad_request
from .opaque import opened
from .response_tools import SEARCH

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Type of a part → the member that holds its text."""
MEDIA = ("input_image", "input_audio", "input_file")
HOSTED = ("local_shell_call", "web_search_call", "image_generation_call", "tool_search_call")
CALLS = ("function_call", "custom_tool_call", *HOSTED)
UNANSWERED = ("web_search_call", "image_generation_call")
"""Calls whose results the items themselves do not bring."""
OUTPUTS = (
    "function_call_output", "custom_tool_call_output", "local_shell_call_output", "web_search_call_output",
    "image_generation_call_output", "tool_search_call_output", "tool_search_output",
)  # fmt: skip
IGNORED = ("compaction", "context_compaction")
ACCEPTED = ("message", "reasoning", *CALLS, *OUTPUTS)


def messages(value, box):
    """The canonical messages of ``input``, a string or an array of items. box: the ``Toolbox`` that takes in the tools which
    searches found. ApiError 400."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise bad_request(f"input must be a string or an array of items, got {kind(value)}", "input")
    reader = _Reader(box, {_named(item) for item in value if isinstance(item, dict) and item.get("type") in OUTPUTS})
    for i, item in enumerate(value):
        reader.take(item, f"input[{i}]")
    reader.close()
    return reader.messages


def _named(item):
    """The id of the call that an item is or answers, None for what is none."""
    found = item.get("id") if item.get("call_id") is None else item["call_id"]
    return found if isinstance(found, str) else None


class _Reader:
    """Turns items into messages, one after the other. answered: ids of calls whose results are among the items."""

    def __init__(self, box, answered):
        self.messages = []
        self._box, self._answered = box, answered
        self._answer = None  # the assistant message that further items of the same answer join
        self._reasoning = []  # of the assistant item to come
        self._calls = {}  # id of an item → id of its call: some results name the one, some the other

    def take(self, item, path):
        if not isinstance(item, dict):
            raise bad_request(f"{path} must be an object, got {kind(item)}", path)
        what = item.get("type")
        if what is None and "role" in item:
            what = "message"
        if what == "item_reference" or (what is None and "id" in item):
            raise bad_request(f"{path} is an item_reference, and no items are stored here; replay the item itself", path)
        if what in CALLS and item.get("status") == "incomplete" and _named(item) not in self._answered:
            return  # cut by a budget: a call that was never made
        match what:
            case "message":
                self._message(item, path)
            case "reasoning":
                self._reasoning += filter(None, [_reasoning(item, path)])
            case "function_call":
                self._call(item, path, _tool(item, path), call_arguments(item.get("arguments"), f"{path}.arguments"))
            case "custom_tool_call":
                text = string(item.get("input"), f"{path}.input")
                self._call(item, path, _tool(item, path), _json({"input": text}))
            case "tool_search_call":
                self._call(item, path, SEARCH, call_arguments(item.get("arguments"), f"{path}.arguments"))
            case _ if what in HOSTED:
                self._hosted(item, path, what.removesuffix("_call"))
            case _ if what in OUTPUTS:
                self._result(item, path)
            case _ if what not in IGNORED:
                found = repr(what)[:60] if isinstance(what, str) else kind(what)
                raise bad_request(f"{path}.type must be one of {', '.join(ACCEPTED)}, got {found}", f"{path}.type")

    def close(self):
        """No assistant item follows: reasoning that waits for one is an answer by itself."""
        if self._reasoning:
            self._joined()["content"] = ""
        self._answer = None

    def _message(self, item, path):
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            found = repr(role)[:60] if isinstance(role, str) else kind(role)
            raise bad_request(f"{path}.role must be one of {', '.join(ROLES)}, got {found}", f"{path}.role")
        text = _content(item.get("content"), f"{path}.content")
        if role != "assistant":
            self.close()
            self.messages.append({"role": ROLES[role], "content": text})
            return
        if self._answer and self._answer["content"] is not None and "tool_calls" not in self._answer:
            self._answer = None  # the text of another answer
        answer = self._joined()
        answer["content"] = text if answer["content"] is None else f"{answer['content']}\n{text}"

    def _joined(self):
        """The assistant message that the next item belongs to; reasoning begins a new one."""
        if self._answer is None or self._reasoning:
            self._answer = {"role": "assistant", "content": None}
            self.messages.append(self._answer)
        if self._reasoning:
            self._answer["reasoning_content"] = "\n\n".join(self._reasoning)
            self._reasoning = []
        return self._answer

    def _call(self, item, path, name, arguments):
        found = _id(item, path)
        if isinstance(item.get("id"), str):
            self._calls[item["id"]] = found
        call = {"id": found, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._joined().setdefault("tool_calls", []).append(call)

    def _hosted(self, item, path, name):
        """A call that a server would execute. Where its result is not an item, that it was made is all that can be told."""
        action = {"prompt": item.get("revised_prompt")} if name == "image_generation" else item.get("action") or {}
        self._call(item, path, name, call_arguments(action, f"{path}.action"))
        if item["type"] in UNANSWERED and _id(item, path) not in self._answered:
            self._append_result(_id(item, path), _json({"status": item.get("status") or "completed"}))

    def _result(self, item, path):
        if item["type"] in ("tool_search_output", "tool_search_call_output"):
            text = _json({"tools": self._box.add(item.get("tools"), f"{path}.tools", repeated=True)})
        else:
            text = _output(item.get("output"), f"{path}.output")
        found = _id(item, path)
        self._append_result(self._calls.get(found, found), text)

    def _append_result(self, call_id, text):
        self._answer = None
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})


def _id(item, path):
    if (found := _named(item)) is None:
        raise bad_request(f"{path}.call_id must be a string, got {kind(item.get('call_id'))}", f"{path}.call_id")
    return found


def _tool(item, path):
    """The name under which the model knows the tool of a call."""
    space = item.get("namespace")
    name = string(item.get("name"), f"{path}.name")
    return name if space is None else string(space, f"{path}.namespace") + name


def _content(value, path):
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise bad_request(f"{path} must be a string or an array of parts, got {kind(value)}", path)
    return "".join(_part(part, f"{path}[{i}]") for i, part in enumerate(value))


def _part(part, path):
    what = _type(part, path)
    if what in TEXTS:
        return string(part.get(TEXTS[what]), f"{path}.{TEXTS[what]}")
    raise bad_request(f"{path}.type must be one of {', '.join(TEXTS)}, got {what!r}", f"{path}.type")


def _type(part, path):
    if not isinstance(part, dict):
        raise bad_request(f"{path} must be an object, got {kind(part)}", path)
    what = part.get("type")
    if what in MEDIA:
        raise bad_request(f"{path} is of type {what}, and the loaded model takes text only", path)
    return what if isinstance(what, str) else kind(what)


def _output(value, path):
    """The text of a result; parts of unknown type are their JSON text."""
    if not isinstance(value, list):
        return "" if value is None else string(value, path)
    return "".join(
        _part(part, f"{path}[{i}]") if _type(part, f"{path}[{i}]") in TEXTS else _json(part) for i, part in enumerate(value)
    )


def _reasoning(item, path):
    """The text of a reasoning item: what this server put away in it, else its content, else its summary."""
    hidden = item.get("encrypted_content")
    if hidden is not None and (text := opened(string(hidden, f"{path}.encrypted_content"))) is not None:
        return text
    for name, what in (("content", ("reasoning_text", "text")), ("summary", ("summary_text",))):
        if text := _thoughts(item.get(name), f"{path}.{name}", what):
            return text
    return ""


def _thoughts(value, path, accepted):
    if value is None:
        return ""
    if not isinstance(value, list):
        raise bad_request(f"{path} must be an array of parts, got {kind(value)}", path)
    texts = []
    for i, part in enumerate(value):
        at = f"{path}[{i}]"
        if _type(part, at) not in accepted:
            raise bad_request(f"{at}.type must be {' or '.join(accepted)}, got {part.get('type')!r}", f"{at}.type")
        texts.append(string(part.get("text"), f"{at}.text"))
    return "\n\n".join(texts)


def _json(value):
    return json.dumps(value, ensure_ascii=False)
