"""``POST /v1/completions``: raw prompts, continued as they stand; their texts become one object or a stream of chunks."""

import secrets
import time
from typing import Annotated, Any

from pydantic import Field

from ds4ref.chat import ChatError, Text
from ds4ref.chat.request import thinking
from ds4ref.stop import Finish
from ds4ref.tokenizer import Detokenizer

from . import answers, sse
from .answers import deliver
from .ask import Ask
from .chat import CONTROLS, LEAST_LOGPROB, usage
from .chat_messages import kind
from .errors import bad_request, envelope
from .formats import response_format
from .requests import Common, StreamOptions, Whole, parse, stop_strings
from .tokens import token_ids

SURFACE = "openai_completion"
MAX_PROMPTS = 16
FINISH = {Finish.STOP: "stop", Finish.STOP_STRING: "stop", Finish.LENGTH: "length", Finish.CONTEXT: "length"}
REFUSED = {
    "tools": "tools is not supported on /v1/completions; use /v1/chat/completions",
    "functions": "functions is not supported on /v1/completions; use tools on /v1/chat/completions",
}
FORMS = "a string, an array of token ids, or an array of either"


class CompletionRequest(Common):
    """The body of a text completion."""

    prompt: Any = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    n: Annotated[Whole, Field(ge=1, le=16)] | None = None
    best_of: Whole | None = None
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    response_format: Any = None
    reasoning_effort: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class Completions:
    """The resource. ``service`` is the running server's context (``app.Service``)."""

    def __init__(self, service):
        self._service = service

    def on_post(self, req, resp):
        body = answers.read(self._service, req)
        request = parse(CompletionRequest, body, REFUSED)
        prompts = prompts_of(self._service, request.prompt)
        deliver(self._service, req, resp, ask_of(self._service, body, request, prompts),
                lambda found: CompletionWire(self._service, request, prompts, found))  # fmt: skip


def prompts_of(service, value):
    """[(text or None, token ids)] of the request's ``prompt``. ApiError 400."""
    if value is None:
        raise bad_request(f"prompt is required: {FORMS}", "prompt")
    if isinstance(value, str):
        return [_prompt(service, value, "prompt")]
    if not isinstance(value, list):
        raise bad_request(f"prompt must be {FORMS}, got {kind(value)}", "prompt")
    if not value or not isinstance(value[0], str | list):
        return [_prompt(service, value, "prompt")]
    if len(value) > MAX_PROMPTS:
        raise bad_request(f"prompt must have at most {MAX_PROMPTS} prompts, got {len(value)}", "prompt")
    return [_prompt(service, item, f"prompt[{i}]", type(value[0])) for i, item in enumerate(value)]


def _prompt(service, value, path, form=str | list):
    if not isinstance(value, form):
        raise bad_request(f"{path} must be of the same kind as the prompts before it, got {kind(value)}", path)
    tokenizer = service.conversation.tokenizer
    if isinstance(value, str):
        text, ids = value, service.conversation.encode_raw(value)
    else:
        text, ids = None, tokenizer.with_bos(token_ids(service, value, path))
    if not ids:
        raise bad_request(f"{path} is empty, and this model has no token that begins a text", path)
    return text, ids


def ask_of(service, body, request, prompts):
    """The :class:`Ask` of a completion request. ApiError 400."""
    n = request.n or 1
    if request.best_of not in (None, n):
        raise bad_request("best_of must be absent or equal to n", "best_of")
    if request.suffix:
        raise bad_request("suffix must be absent or empty: this server does not fill in the middle", "suffix")
    try:
        thinking({name: body.get(name) for name in CONTROLS})  # checked as everywhere; raw text has nothing to switch
    except ChatError as error:
        raise bad_request(str(error), error.field) from None
    request.thinking_tokens()
    sampling = request.sampling(service, request.logprobs is not None, request.logprobs or 0)
    return Ask(
        SURFACE, sampling, "prompt", model=request.model, stream=bool(request.stream), prompts=[ids for _, ids in prompts],
        budget=request.max_tokens, stops=stop_strings(request.stop), n=n, ignore_eos=bool(request.ignore_eos),
        token_ids=bool(request.return_token_ids), form=response_format(request.response_format, "response_format"),
        scored=bool(request.echo) and request.logprobs is not None,
    )  # fmt: skip


class CompletionWire:
    """How one answer looks: ids, envelope, usage, and its chunks. Choices are numbered prompt by prompt."""

    def __init__(self, service, request, prompts, found):
        self._service, self._answers = service, found
        self._include_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._token_ids = bool(request.return_token_ids)
        self._echoed = [_echo(service, *prompt) if request.echo else "" for prompt in prompts for _ in range(request.n or 1)]
        self._lists = None if request.logprobs is None else [LogprobLists(service.conversation.tokenizer) for _ in found.jobs]
        self._timings, self._running = {}, len(found.jobs)
        self._listed = set()  # choices whose prompt is among their log-probabilities
        self._envelope = {
            "id": f"cmpl-{secrets.token_hex(16)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model or service.model_id,
            "system_fingerprint": service.fingerprint,
        }

    def whole(self, outcomes):
        """The complete ``text_completion`` object."""
        return self._envelope | {
            "choices": [self._complete(found) for found in outcomes], "usage": self._usage(), "timings": outcomes[0].timings,
        }  # fmt: skip

    def _complete(self, found):
        index, generation = found.job.index, found.generation
        prompt = self._scored(found.job)
        choice = {
            "index": index,
            "text": self._echoed[index] + _text(found.events),
            "logprobs": self._logprobs(index, found.entries, prompt),
            "finish_reason": FINISH[generation.finish],
        }
        if self._token_ids:
            choice |= {"token_ids": generation.generated, "prompt_token_ids": generation.prompt}
        return choice

    def silence(self):
        return sse.KEEP_ALIVE

    def begin(self, job):
        """The prompt where it is echoed; else, and where its log-probabilities are still to come, a chunk without text, which
        tells that the request is under way."""
        yield self._chunk(job.index, self._echoed[job.index] if job.scores is None else "")

    def _echo_scored(self, job):
        """The prompt with its log-probabilities, once."""
        if (prompt := self._scored(job)) is not None:
            yield self._chunk(job.index, self._echoed[job.index], logprobs=self._logprobs(job.index, (), prompt))

    def _scored(self, job):
        """(token ids, their scores) of a prompt that is still to be listed, or None."""
        if job.scores is None or job.index in self._listed:
            return None
        self._listed.add(job.index)
        return job.generation.prompt, job.scores

    def step(self, job, step):
        yield from self._echo_scored(job)
        text, ids = _text(step.events), answers.sampled(job, step) if self._token_ids else []
        if text or ids or (self._lists is not None and step.logprobs):
            yield self._chunk(job.index, text, logprobs=self._logprobs(job.index, step.logprobs), ids=ids)

    def end(self, job, timings):
        """The finish chunk of one choice; the last one has the timings where no usage chunk follows."""
        yield from self._echo_scored(job)
        self._timings = self._timings or timings
        self._running -= 1
        more = {} if self._running or self._include_usage else {"timings": self._timings}
        yield self._chunk(job.index, "", FINISH[job.generation.finish], prompt=job.generation.prompt, **more)

    def close(self):
        if self._include_usage:
            yield sse.data(self._envelope | {"choices": [], "usage": self._usage(), "timings": self._timings})
        yield sse.DONE

    def failed(self, event):
        yield sse.event("error", envelope(event.status, event.message, code=event.code))

    def _chunk(self, index, text, finish=None, *, logprobs=None, ids=(), prompt=(), **more):
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        if self._token_ids:
            choice |= {"token_ids": list(ids)} | ({"prompt_token_ids": prompt} if prompt else {})
        return sse.data(self._envelope | {"choices": [choice]} | ({"usage": None} if self._include_usage else {}) | more)

    def _usage(self):
        return usage(answers.usage(self._service, self._answers.jobs))

    def _logprobs(self, index, entries, prompt=None):
        """The lists of further entries. prompt: (token ids, scores) of the prompt, which comes before them."""
        return None if self._lists is None else self._lists[index].add(entries, prompt)


def _text(events):
    return "".join(event.text for event in events if isinstance(event, Text))


def _echo(service, text, ids):
    """What a prompt looks like before its continuation."""
    return service.conversation.tokenizer.decode(ids) if text is None else text


class LogprobLists:
    """The parallel lists of one choice's ``logprobs``, and where in its text the next token begins: behind the characters
    that the tokens before it have completed."""

    def __init__(self, tokenizer):
        self._tokenizer, self._detokenizer = tokenizer, Detokenizer(tokenizer)
        self._offset = 0

    def add(self, entries, prompt=None):
        """The lists of further ``Logprob`` entries. The sampled token is always among the alternatives. prompt: (token ids, the
        entries of all but the first, which has null), listed before them."""
        out = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if prompt is not None:
            first, *_ = prompt[0]
            for name, item in zip(out, (token_text(self._tokenizer, first), None, None, self._offset), strict=True):
                out[name].append(item)
            self._offset += len(self._detokenizer.feed(first))
            entries = [*prompt[1], *entries]
        for entry in entries:
            value = max(entry.logprob, LEAST_LOGPROB)
            tops = {}
            for token, found in (*entry.top, (entry.token, value)):
                tops.setdefault(token_text(self._tokenizer, token), max(found, LEAST_LOGPROB))
            for name, item in zip(out, (token_text(self._tokenizer, entry.token), value, tops, self._offset), strict=True):
                out[name].append(item)
            self._offset += len(self._detokenizer.feed(entry.token))
        return out


def token_text(tokenizer, token):
    """A token's text; where it is no whole characters, its bytes as ``bytes:\\xf0\\x9f``."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
