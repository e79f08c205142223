"""``POST /v1/chat/completions``: read into an :class:`Ask`; its events become one object or a stream of chunks."""

import secrets
import time
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from ds4ref.chat import CallArguments, CallBegin, CallEnd, Reasoning, Text, collect
from ds4ref.stop import Finish

from . import answers, chat_messages, sse
from .answers import deliver
from .ask import Ask
from .errors import bad_request, envelope
from .formats import check_choice, response_format
from .requests import Budget, Common, StreamOptions, Whole, parse, stop_strings
from .toolchoice import openai_choice

SURFACE = "openai_chat"
FINISH = {
    Finish.STOP: "stop",
    Finish.STOP_STRING: "stop",
    Finish.LENGTH: "length",
    Finish.CONTEXT: "length",
    Finish.TOOL_CALLS: "tool_calls",
}
REFUSED = {
    "functions": "functions is not supported; use tools",
    "function_call": "function_call is not supported; use tool_choice",
    "audio": "audio output is not supported",
}
LEAST_LOGPROB = -9999.0
"""What stands for the logarithm of zero, which JSON does not have."""
CONTROLS = ("think", "enable_thinking", "thinking", "chat_template_kwargs", "reasoning_effort")


class ChatRequest(Common):
    """The body of a chat completion. ``messages`` and ``tools`` are validated in ``chat_messages``."""

    messages: Any = None
    max_completion_tokens: Budget | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    n: Annotated[Whole, Field(ge=1, le=16)] | None = None
    best_of: Whole | None = None
    return_token_ids: bool | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    reasoning_effort: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None


class ChatCompletions:
    """The resource. ``service`` is the running server's context (``app.Service``)."""

    def __init__(self, service):
        self._service = service

    def on_post(self, req, resp):
        body = answers.read(self._service, req)
        request = parse(ChatRequest, body, REFUSED)
        deliver(self._service, req, resp, ask_of(self._service, body, request),
                lambda found: ChatWire(self._service, request, found))  # fmt: skip


def ask_of(service, body, request):
    """The :class:`Ask` of a chat request. ApiError 400."""
    if request.messages is None:
        raise bad_request("messages is required: an array of messages", "messages")
    n = request.n or 1
    if request.best_of not in (None, n):
        raise bad_request("best_of must be absent or equal to n", "best_of")
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    tools = chat_messages.tools(request.tools)
    choice = openai_choice(request.tool_choice, tools)
    form = response_format(request.response_format, "response_format")
    check_choice(form, choice, "response_format")
    budget = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    return Ask(
        SURFACE, request.sampling(service, bool(request.logprobs), request.top_logprobs or 0), "messages",
        model=request.model, stream=bool(request.stream), messages=chat_messages.messages(request.messages), tools=tools,
        choice=choice, parallel=request.parallel_tool_calls is not False,
        controls={name: body.get(name) for name in CONTROLS}, thinking_budget=request.thinking_tokens(), budget=budget,
        stops=stop_strings(request.stop), n=n, ignore_eos=bool(request.ignore_eos),
        token_ids=bool(request.return_token_ids), form=form,
    )  # fmt: skip


class ChatWire:
    """How one answer looks: ids, envelope, usage, and the deltas of its chunks."""

    def __init__(self, service, request, found):
        self._service, self._answers = service, found
        self._tokenizer = service.conversation.tokenizer
        self._include_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._logprobs = bool(request.logprobs)
        self._token_ids = bool(request.return_token_ids)
        self._timings, self._running = {}, len(found.jobs)
        self._envelope = {
            "id": f"chatcmpl-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": request.model or service.model_id,
            "system_fingerprint": service.fingerprint,
        }
        self._chunks = Chunks(self._envelope, self._include_usage)

    def whole(self, outcomes):
        """The complete ``chat.completion`` object."""
        return self._envelope | {
            "object": "chat.completion", "choices": [self._choice(found) for found in outcomes], "usage": self._usage(),
            "timings": outcomes[0].timings,
        }  # fmt: skip

    def _choice(self, found):
        generation = found.generation
        choice = {
            "index": found.job.index,
            "finish_reason": FINISH[generation.finish],
            "logprobs": self._logprob_list(found.entries),
            "message": message(found.events, partial(self._answers.call_id, found.job)),
        }
        if self._token_ids:
            choice |= {"token_ids": generation.generated, "prompt_token_ids": generation.prompt}
        return choice

    def silence(self):
        return sse.KEEP_ALIVE

    def begin(self, job):
        yield sse.data(self._chunks.chunk(job.index, {"role": "assistant", "content": ""}))

    def step(self, job, step):
        frames = [self._chunks.delta(job.index, event, partial(self._answers.call_id, job)) for event in step.events]
        frames = [frame for frame in frames if frame is not None]
        if self._logprobs and step.logprobs and frames:
            frames[-1]["choices"][0]["logprobs"] = self._logprob_list(step.logprobs)
        if self._token_ids and (ids := answers.sampled(job, step)):
            frames = frames or [self._chunks.chunk(job.index, {})]
            frames[-1]["choices"][0]["token_ids"] = ids
        yield from (sse.data(frame) for frame in frames)

    def end(self, job, timings):
        """The finish chunk of one choice; the last one has the timings where no usage chunk follows."""
        self._timings = self._timings or timings
        finish = self._chunks.chunk(job.index, {}, FINISH[job.generation.finish])
        if self._token_ids:
            finish["choices"][0]["prompt_token_ids"] = job.generation.prompt
        self._running -= 1
        yield sse.data(finish | ({} if self._running or self._include_usage else {"timings": self._timings}))

    def close(self):
        if self._include_usage:
            yield sse.data(self._chunks.bare() | {"choices": [], "usage": self._usage(), "timings": self._timings})
        yield sse.DONE

    def failed(self, event):
        yield sse.event("error", envelope(event.status, event.message, code=event.code))

    def _usage(self):
        return usage(answers.usage(self._service, self._answers.jobs))

    def _logprob_list(self, entries):
        if not self._logprobs:
            return None
        return {"content": [logprob(self._tokenizer, entry) for entry in entries], "refusal": None}


def logprob(tokenizer, entry):
    """The OpenAI object of one ``Logprob``."""
    top = [_token(tokenizer, token, value) for token, value in entry.top]
    return _token(tokenizer, entry.token, entry.logprob) | {"top_logprobs": top}


def _token(tokenizer, token, value):
    raw = tokenizer.token_bytes(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(value, LEAST_LOGPROB), "bytes": list(raw)}


class Chunks:
    """Builds the chunks of one stream: of each choice the first has the role, then one kind of delta each, one finish."""

    def __init__(self, shared, include_usage):
        self._shared = shared | {"object": "chat.completion.chunk"}
        self._nulls = {"usage": None} if include_usage else {}

    def bare(self):
        return dict(self._shared)

    def chunk(self, index, delta, finish=None):
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._shared | {"choices": [choice]} | self._nulls

    def delta(self, index, event, call_id):
        """The chunk of one event of a choice, or None for events that have none. call_id: a call's number → its id."""
        match event:
            case Reasoning(text):
                return self.chunk(index, {"reasoning_content": text})
            case Text(text):
                return self.chunk(index, {"content": text})
            case CallBegin(call, name):
                opened = {"index": call, "id": call_id(call), "type": "function", "function": {"name": name, "arguments": ""}}
                return self.chunk(index, {"tool_calls": [opened]})
            case CallArguments(call, fragment):
                return self.chunk(index, {"tool_calls": [{"index": call, "function": {"arguments": fragment}}]})
            case CallEnd(_):
                return None


def message(events, call_id):
    """The buffered assistant message. call_id: a call's number → its id."""
    found = collect(events)
    out = {"role": "assistant", "content": found.text if found.text or not found.calls else None}
    if found.reasoning:
        out["reasoning_content"] = found.reasoning
    if found.calls:
        out["tool_calls"] = [
            {"id": call_id(i), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for i, call in enumerate(found.calls)
        ]
    return out


def usage(counts):
    """``answers.Usage`` as Chat Completions and Completions have it."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.generated,
        "total_tokens": counts.prompt + counts.generated,
        "prompt_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": counts.written},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
    }
