"""Output items of the Responses API: what an answer's events open, continue and close.

Theory of operation. An answer is a list of items, of which at most one is open. Reasoning and text open an item of their kind
if another or none is open; a call opens its own. Opening an item closes the one before it; the end of the answer closes the
last, so a call whose block is cut by the budget is unfinished even where its arguments are complete. Each transition yields
stream events as (type, payload); the items that were closed are the buffered answer, in its order. So both say the same.
"""

import json
import secrets

from ds4ref.chat import CallArguments, CallBegin, CallEnd, Reasoning, Text

from .opaque import sealed
from .response_tools import SEARCH, FreeText


def new_id(prefix):
    return f"{prefix}_{secrets.token_hex(12)}"


class Output:
    """The items of one answer.

    box: the request's ``Toolbox``; call_id: a call's number → its id; summary, hidden: whether reasoning is shown, and whether
    it is given as an opaque string.
    """

    def __init__(self, box, call_id, summary=False, hidden=False):
        self.items = []
        """The closed ones, in order."""
        self._box, self._call_id = box, call_id
        self._summary, self._hidden = summary, hidden
        self._open, self._complete = None, False  # the open item, and whether it is a call that has ended

    def take(self, event, entries=()):
        """The stream events of one event of the answer. entries: API objects of the log-probabilities that come with a text."""
        match event:
            case Reasoning(text) if self._summary or self._hidden:
                return self._within(_Reasoning, self._summary, self._hidden) + self._told(self._open.more(text))
            case Text(text):
                return self._within(_Message) + self._told(self._open.more(text, entries))
            case CallBegin(index, name):
                return self._begin(_call(self._box.origin(name), self._call_id(index)))
            case CallArguments(_, fragment):
                return self._told(self._open.more(fragment))
            case CallEnd():
                self._complete = True
                return self._told(self._open.last())
        return []

    def finish(self, cut, reasoning_open):
        """The answer has ended. cut: by the budget; reasoning_open: inside reasoning. An answer of nothing is an empty text."""
        frames = self.stop(_status(cut and (reasoning_open or not isinstance(self._open, _Reasoning))))
        if not any(item["type"] != "reasoning" for item in self.items):
            frames += self._begin(_Message()) + self.stop(_status(cut))
        return frames

    def stop(self, status="incomplete"):
        """Close what is open, if anything. A call that has no end yet is incomplete in any case."""
        if self._open is None:
            return []
        if isinstance(self._open, CALLS):
            return self._end(status if self._complete else "incomplete")
        return self._told(self._open.last()) + self._end(status)

    def ordered(self):
        """The closed items of a buffered answer: reasoning, one text, calls. A call that was cut has become text, and stands
        with what was said before the calls."""
        kinds = {"reasoning": [], "message": []}
        calls = []
        for item in self.items:
            kinds.get(item["type"], calls).append(item)
        return [*kinds["reasoning"], *_merged(kinds["message"]), *calls]

    def _within(self, what, *how):
        return [] if isinstance(self._open, what) else self._begin(what(*how))

    def _begin(self, item):
        frames = self.stop("completed")
        self._open, self._complete = item, False
        added = ("response.output_item.added", {"output_index": len(self.items), "item": item.as_json("in_progress")})
        return [*frames, added, *self._told(item.first())]

    def _end(self, status):
        item = self._open.as_json(status)
        self._open = None
        self.items.append(item)
        return [("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})]

    def _told(self, frames):
        place = {"item_id": self._open.id, "output_index": len(self.items)}
        return [(name, place | payload) for name, payload in frames]


def _merged(texts):
    """Message items as one, of the last one's status."""
    if len(texts) < 2:
        return texts
    parts = [item["content"][0] for item in texts]
    logprobs = [entry for part in parts for entry in part["logprobs"]]
    part = parts[0] | {"text": "".join(part["text"] for part in parts), "logprobs": logprobs}
    return [texts[-1] | {"content": [part]}]


def _status(cut):
    return "incomplete" if cut else "completed"


class _Reasoning:
    def __init__(self, summary, hidden):
        self.id, self._text = new_id("rs"), ""
        self._summary, self._hidden = summary, hidden

    def first(self):
        return self._shown("response.reasoning_summary_part.added", part={"type": "summary_text", "text": ""})

    def more(self, text):
        self._text += text
        return self._shown("response.reasoning_summary_text.delta", delta=text)

    def last(self):
        part = {"type": "summary_text", "text": self._text}
        return [
            *self._shown("response.reasoning_summary_text.done", text=self._text),
            *self._shown("response.reasoning_summary_part.done", part=part),
        ]

    def _shown(self, name, **payload):
        return [(name, {"summary_index": 0} | payload)] if self._summary else []

    def as_json(self, status):
        shown = self._summary and status != "in_progress"
        item = {"id": self.id, "type": "reasoning", "status": status}
        item["summary"] = [{"type": "summary_text", "text": self._text}] if shown else []
        return item | ({"encrypted_content": sealed(self._text)} if self._hidden else {})


class _Message:
    def __init__(self):
        self.id, self._text, self._entries = new_id("msg"), "", []

    def first(self):
        return [("response.content_part.added", {"content_index": 0, "part": self._part()})]

    def more(self, text, entries=()):
        self._text += text
        self._entries += entries
        return [("response.output_text.delta", {"content_index": 0, "delta": text, "logprobs": list(entries)})]

    def last(self):
        text = {"content_index": 0, "text": self._text, "logprobs": list(self._entries)}
        return [("response.output_text.done", text), ("response.content_part.done", {"content_index": 0, "part": self._part()})]

    def _part(self):
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": list(self._entries)}

    def as_json(self, status):
        content = [] if status == "in_progress" else [self._part()]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class _Function:
    def __init__(self, origin, call_id):
        self.id, self._origin, self._call_id, self._arguments = new_id("fc"), origin, call_id, ""

    def first(self):
        return []

    def more(self, fragment):
        self._arguments += fragment
        return [("response.function_call_arguments.delta", {"delta": fragment})]

    def last(self):
        return [("response.function_call_arguments.done", {"arguments": self._arguments, "name": self._origin.name})]

    def as_json(self, status):
        item = {"id": self.id, "type": "function_call", "status": status, "call_id": self._call_id}
        return item | _named(self._origin) | {"arguments": self._arguments}


class _Custom:
    def __init__(self, origin, call_id):
        self.id, self._origin, self._call_id = new_id("ctc"), origin, call_id
        self._reader, self._input = FreeText(), ""

    def first(self):
        return []

    def more(self, fragment):
        return self._grown(self._reader.feed(fragment))

    def _grown(self, text):
        self._input += text
        return [("response.custom_tool_call_input.delta", {"delta": text})] if text else []

    def last(self):
        rest = self._grown(self._reader.finish())
        return [*rest, ("response.custom_tool_call_input.done", {"input": self._input})]

    def as_json(self, status):
        item = {"id": self.id, "type": "custom_tool_call", "status": status, "call_id": self._call_id}
        return item | _named(self._origin) | {"input": self._input}


class _Search:
    """A tool search, which has no events of its own: its arguments come with the closed item."""

    def __init__(self, call_id):
        self.id, self._call_id, self._arguments = new_id("tsc"), call_id, ""

    def first(self):
        return []

    def more(self, fragment):
        self._arguments += fragment
        return []

    def last(self):
        return []

    def as_json(self, status):
        arguments = json.loads(self._arguments) if status == "completed" else {}
        return {
            "id": self.id, "type": "tool_search_call", "status": status, "call_id": self._call_id, "execution": "client",
            "arguments": arguments,
        }  # fmt: skip


CALLS = (_Function, _Custom, _Search)


def _call(origin, call_id):
    if origin.kind == SEARCH:
        return _Search(call_id)
    return (_Custom if origin.kind == "custom" else _Function)(origin, call_id)


def _named(origin):
    return {"name": origin.name} | ({} if origin.namespace is None else {"namespace": origin.namespace})
