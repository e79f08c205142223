"""``POST /v1/chat/completions``: a request becomes a job; its events become one object or a stream of chunks.

The answer is assembled sans-IO by :class:`Chunks` (streamed) and :func:`message` (buffered) from the same events.
"""

import secrets
import time

from ds4ref.chat import CallArguments, CallBegin, CallEnd, ChatError, Reasoning, Text, collect
from ds4ref.sampling import SamplingParams, fresh_seed
from ds4ref.stop import Finish, eos_policy

from ..jobs import Admitted, Ended, Failed, Job, Produced
from ..lanes import Needs
from . import messages, sse
from .body import read_object
from .errors import admission, bad_request, envelope, failure
from .requests import parse

SURFACE = "openai_chat"
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
FINISH = {
    Finish.STOP: "stop",
    Finish.STOP_STRING: "stop",
    Finish.LENGTH: "length",
    Finish.CONTEXT: "length",
    Finish.TOOL_CALLS: "tool_calls",
}


class ChatCompletions:
    """The resource. ``service`` is the running server's context (``app.Service``)."""

    def __init__(self, service):
        self._service = service

    def on_post(self, req, resp):
        service = self._service
        nbytes = req.content_length or 0
        with admission():
            service.engine.check(nbytes)
        body = read_object(req)
        request = parse(body)
        job = self._job(body, request, req.context.request_id)
        job.nbytes, job.outlives_reader = nbytes, not service.disconnect_abort
        answer = Answer(service, request, job)
        gone = req.env.get("waitress.client_disconnected") if service.disconnect_abort else None
        gone = gone or (lambda: False)
        with admission():
            service.engine.submit(job)
        if request.stream:
            resp.content_type = "text/event-stream; charset=utf-8"
            resp.set_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
            resp.stream = sse.Stream(job, answer.stream(gone, service.keepalive))
        else:
            try:
                resp.media = answer.buffered(gone)
            except sse.ClientGone:
                # Nobody reads this; the status is for the access log.
                resp.status = "499 Client Closed Request"

    def _job(self, body, request, request_id):
        """Render and tokenise (on this HTTP thread) and say everything that can be wrong before the engine is asked."""
        service = self._service
        tools = messages.tools(request.tools)
        if request.tool_choice == "none":
            tools = None
        body = body | {"messages": messages.messages(request.messages), "tools": tools}
        conversation = service.conversation
        try:
            options = conversation.options_of(body, service.context, service.alias(request.model))
            prompt = conversation.render(body["messages"], tools, options)
        except ChatError as error:
            raise bad_request(str(error), error.field or "messages") from None
        ids = conversation.encode(prompt)
        if len(ids) >= service.context:
            raise bad_request(
                f"messages render to {len(ids)} tokens, and at most {service.context - 1} fit the context of {service.context}",
                "messages", "context_length_exceeded", n_prompt_tokens=len(ids), n_ctx=service.context,
            )  # fmt: skip
        if not ids:
            raise bad_request("messages render to an empty prompt; at least one message is needed", "messages")
        budget = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        generation = conversation.generation(
            ids, self._sampling(request), budget=service.default_budget if budget is None else budget,
            context=service.context, prompt=prompt, tools=tools, stop_strings=_stops(request.stop),
            eos=eos_policy(service.ignore_eos or bool(request.ignore_eos), service.ignore_eos_in_reasoning),
            stream=bool(request.stream), vocabulary=service.vocabulary, single=request.parallel_tool_calls is False,
        )  # fmt: skip
        needs = Needs(
            len(ids), generation.budget, greedy=generation.params.temperature == 0, stream=bool(request.stream),
            thinks=prompt.thinking, stops=bool(generation.stop_strings), tools=bool(tools),
            token_ids=bool(request.return_token_ids),
        )  # fmt: skip
        marks = conversation.marks(body["messages"], tools, options, ids)
        opening = conversation.opening(body["messages"], tools, options, ids) if service.plan.effective["disk"] else None
        return Job(generation, SURFACE, request_id, prompt.fallback_reason, marks, needs, opening=opening)

    def _sampling(self, request):
        chosen = {name: value for name in SAMPLING if (value := getattr(request, name)) is not None}
        try:
            params = SamplingParams(
                **chosen,
                seed=fresh_seed() if request.seed is None else request.seed,
                logit_bias=_biases(request.logit_bias),
                logprobs=bool(request.logprobs),
                top_logprobs=request.top_logprobs or 0,
            )
            params.check_vocabulary(self._service.vocabulary)
        except ValueError as error:
            raise bad_request(str(error), str(error).split()[0]) from None
        return params


def _stops(stop):
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > 16:
        raise bad_request(f"stop must have at most 16 strings, got {len(stops)}", "stop")
    return [text for text in stops if text]


def _biases(biases):
    out = {}
    for key, value in (biases or {}).items():
        if not key.isascii() or not key.isdigit():
            raise bad_request(f"logit_bias must have token ids as keys, got {key[:40]!r}", "logit_bias")
        out[int(key)] = value
    return out


class Answer:
    """One answer on the wire: ids, envelope, usage."""

    def __init__(self, service, request, job):
        self._job = job
        self._tokenizer = service.conversation.tokenizer
        self._keeps = service.plan.effective["prefix_reuse"] != "off"
        self._include_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._logprobs = bool(request.logprobs)
        self._token_ids = bool(request.return_token_ids)
        self._envelope = {
            "id": f"chatcmpl-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": request.model or service.model_id,
            "system_fingerprint": service.fingerprint,
        }

    def buffered(self, gone):
        """The complete ``chat.completion`` object; waits for the engine."""
        found, entries = [], []
        for event in sse.events(self._job, gone):
            if isinstance(event, Produced):
                found += event.step.events
                entries += event.step.logprobs
            elif isinstance(event, Failed):
                raise failure(event)
            elif isinstance(event, Ended):
                timings = event.timings
        generation = self._job.generation
        choice = {
            "index": 0,
            "finish_reason": FINISH[generation.finish],
            "logprobs": self._logprob_list(entries),
            "message": message(found),
        }
        if self._token_ids:
            choice |= {"token_ids": generation.generated, "prompt_token_ids": generation.prompt}
        return self._envelope | {
            "object": "chat.completion", "choices": [choice], "usage": self._usage(), "timings": timings,
        }  # fmt: skip

    def stream(self, gone, keepalive):
        """The SSE frames of the answer."""
        chunks = Chunks(self._envelope, self._include_usage)
        try:
            if not self._job.admitted.wait(0.02):
                yield sse.QUEUED
            for event in sse.events(self._job, gone, keepalive):
                if event is None:
                    yield sse.KEEP_ALIVE
                elif isinstance(event, Admitted):
                    yield chunks.role()
                elif isinstance(event, Produced):
                    yield from self._deltas(chunks, event.step)
                elif isinstance(event, Failed):
                    yield sse.event("error", envelope(event.status, event.message, code=event.code))
                    return
                elif isinstance(event, Ended):
                    yield from self._closing(chunks, event.timings)
        except sse.ClientGone:
            return

    def _deltas(self, chunks, step):
        frames = [chunks.delta(event) for event in step.events]
        frames = [frame for frame in frames if frame is not None]
        if self._logprobs and step.logprobs and frames:
            frames[-1]["choices"][0]["logprobs"] = self._logprob_list(step.logprobs)
        if self._token_ids and step.token is not None:
            frames = frames or [chunks.chunk({})]
            frames[-1]["choices"][0]["token_ids"] = [step.token]
        yield from (sse.data(frame) for frame in frames)

    def _closing(self, chunks, timings):
        generation = self._job.generation
        finish = chunks.chunk({}, FINISH[generation.finish])
        if self._token_ids:
            finish["choices"][0]["prompt_token_ids"] = generation.prompt
        if self._include_usage:
            yield sse.data(finish)
            yield sse.data(chunks.bare() | {"choices": [], "usage": self._usage(), "timings": timings})
        else:
            yield sse.data(finish | {"timings": timings})
        yield sse.DONE

    def _usage(self):
        return usage(self._job.generation, self._job.decision, self._keeps)

    def _logprob_list(self, entries):
        if not self._logprobs:
            return None
        return {"content": [self._logprob(entry) for entry in entries], "refusal": None}

    def _logprob(self, entry):
        top = [self._token(token, value) for token, value in entry.top]
        return self._token(entry.token, entry.logprob) | {"top_logprobs": top}

    def _token(self, token, value):
        raw = self._tokenizer.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(value, -9999.0), "bytes": list(raw)}


class Chunks:
    """Builds the chunks of one stream: the first has the role, then one kind of delta each, one finish."""

    def __init__(self, shared, include_usage):
        self._shared = shared | {"object": "chat.completion.chunk"}
        self._nulls = {"usage": None} if include_usage else {}

    def bare(self):
        return dict(self._shared)

    def chunk(self, delta, finish=None):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._shared | {"choices": [choice]} | self._nulls

    def role(self):
        return sse.data(self.chunk({"role": "assistant", "content": ""}))

    def delta(self, event):
        """The chunk of one event, or None for events that have none."""
        match event:
            case Reasoning(text):
                return self.chunk({"reasoning_content": text})
            case Text(text):
                return self.chunk({"content": text})
            case CallBegin(index, name):
                function = {"name": name, "arguments": ""}
                return self.chunk({"tool_calls": [{"index": index, "id": call_id(), "type": "function", "function": function}]})
            case CallArguments(index, fragment):
                return self.chunk({"tool_calls": [{"index": index, "function": {"arguments": fragment}}]})
            case CallEnd(_):
                return None


def message(events):
    """The buffered assistant message."""
    found = collect(events)
    out = {"role": "assistant", "content": found.text if found.text or not found.calls else None}
    if found.reasoning:
        out["reasoning_content"] = found.reasoning
    if found.calls:
        out["tool_calls"] = [
            {"id": call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in found.calls
        ]
    return out


def call_id():
    """An id that cannot be guessed."""
    return f"call_{secrets.token_hex(16)}"


def usage(generation, decision, kept):
    """Token counts. What was computed stays in the bank, so the rest of the prompt counts as newly kept."""
    prompt, out, cached = len(generation.prompt), len(generation.generated), decision.cached
    return {
        "prompt_tokens": prompt,
        "completion_tokens": out,
        "total_tokens": prompt + out,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": prompt - cached if kept else 0},
        "completion_tokens_details": {"reasoning_tokens": generation.reasoning_tokens},
    }
