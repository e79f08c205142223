"""``POST /v1/responses`` and ``/v1/responses/input_tokens``: read into an :class:`Ask`; an answer is a list of items.

Stateless: the client replays the conversation as input items. Only results that directly follow a call may come alone.
"""

import time
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from ds4ref.chat import Text
from ds4ref.chat.request import LEVELS
from ds4ref.stop import Finish

from . import answers, response_items, sse
from .answers import deliver
from .ask import Ask, prompt_of
from .body import read_object
from .chat import logprob
from .continuation import continued
from .errors import bad_request
from .formats import check_choice, response_format
from .requests import Budget, Common, Fields, Whole, check_effort, parse, stop_strings
from .response_output import Output, new_id
from .response_tools import Toolbox, tool_choice

SURFACE = "openai_responses"
CUT = (Finish.LENGTH, Finish.CONTEXT)
STATELESS = "is not supported; replay the full input"
REFUSED = {
    "previous_response_id": f"previous_response_id {STATELESS}",
    "conversation": f"conversation {STATELESS}",
    "prompt": "prompt, a stored prompt, is not supported; send its text as instructions or input",
    "functions": "functions is not supported; use tools",
    "function_call": "function_call is not supported; use tool_choice",
    "audio": "audio output is not supported",
}
HIDDEN, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
Summary = Literal["auto", "concise", "detailed"]


class ReasoningOptions(Fields):
    """``effort`` is validated in ``ask_of``; ``generate_summary`` is the old name of ``summary``."""

    effort: Any = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class TextOptions(Fields):
    format: Any = None
    verbosity: Any = None


class ResponsesRequest(Common):
    """The body. ``input`` and ``tools`` are validated in ``response_items`` and ``response_tools``. ``top_logprobs`` has a
    meaning only where ``include`` asks for log-probabilities."""

    input: Any = None
    instructions: str | None = None
    max_output_tokens: Budget | None = None
    stop: str | list[str] | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    text: TextOptions | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    background: bool | None = None
    modalities: list[Literal["text"]] | None = None
    metadata: Any = None

    @property
    def budget(self):
        return self.max_tokens if self.max_output_tokens is None else self.max_output_tokens

    @property
    def effort(self):
        """The client's word for its thinking, as the API names it, or None."""
        return LEVELS[self.reasoning.effort] if self.reasoning and self.reasoning.effort is not None else None

    @property
    def summary(self):
        return self.reasoning and (self.reasoning.summary or self.reasoning.generate_summary)

    def includes(self, what):
        return what in (self.include or ())


class Responses:
    """The resource. ``service`` is the running server's context (``app.Service``)."""

    def __init__(self, service):
        self._service = service

    def on_post(self, req, resp):
        request, box, ask = read(self._service, answers.read(self._service, req))
        deliver(self._service, req, resp, ask, lambda found: ResponsesWire(self._service, request, box, found))


class InputTokens:
    """The resource that counts the prompt of a request."""

    def __init__(self, service):
        self._service = service

    def on_post(self, req, resp):
        _, _, ask = read(self._service, read_object(req))
        ids = prompt_of(self._service, ask).ids
        resp.media = {"object": "response.input_tokens", "input_tokens": len(ids)}


def read(service, body):
    """(request, toolbox, :class:`Ask`) of a body. ApiError 400."""
    request = parse(ResponsesRequest, body, REFUSED)
    if request.background:
        raise bad_request("background must be false: nothing is stored here", "background")
    if request.input is None:
        raise bad_request("input is required: a string or an array of items", "input")
    box = Toolbox()
    box.add(request.tools, "tools")
    leading = [{"role": "system", "content": request.instructions}] if request.instructions else []
    messages, frontier = continued(service, leading + response_items.messages(request.input, box), "input")
    choice = tool_choice(request.tool_choice, box)
    form = response_format(request.text.format, "text.format", nested=False) if request.text else None
    check_choice(form, choice, "text.format")
    logprobs = request.includes(LOGPROBS)
    sampling = request.sampling(service, logprobs, (request.top_logprobs or 0) if logprobs else 0)
    return request, box, Ask(
        SURFACE, sampling, "input",
        model=request.model, stream=bool(request.stream), messages=messages, tools=box.definitions or None, choice=choice,
        parallel=request.parallel_tool_calls is not False, controls=_controls(body, request),
        thinking_budget=request.thinking_tokens(), budget=request.budget, stops=stop_strings(request.stop),
        ignore_eos=bool(request.ignore_eos), frontier=frontier, form=form, form_field="text.format",
    )  # fmt: skip


def _controls(body, request):
    """The thinking controls in Chat Completions spelling."""
    effort = request.reasoning.effort if request.reasoning else None
    check_effort(effort, "reasoning.effort")
    return {name: body.get(name) for name in ("think", "enable_thinking", "thinking")} | {"reasoning_effort": effort}


class ResponsesWire:
    """How one answer looks: ids, envelope, usage, and numbered events."""

    def __init__(self, service, request, box, found):
        self._service, self._request, self._box, self._answers = service, request, box, found
        self._output = None  # once the answer has begun
        self._number = 0
        self._fixed = envelope(service, request)

    def whole(self, outcomes):
        """The complete ``response`` object."""
        (found,) = outcomes
        self._output = self._items_of(found.job)
        entries = self._entries(found.entries)
        for event in found.events:
            self._output.take(event, entries)
            if isinstance(event, Text):
                entries = []
        self._finish(found.job)
        return self._response(found.job, found.timings, self._output.ordered())

    def silence(self):
        return sse.KEEP_ALIVE if self._output is None else self._event("response.in_progress", {"response": self._fixed})

    def begin(self, job):
        self._output = self._items_of(job)
        yield self._event("response.created", {"response": self._fixed})
        yield self._event("response.in_progress", {"response": self._fixed})

    def step(self, job, step):
        last = max((i for i, event in enumerate(step.events) if isinstance(event, Text)), default=None)
        entries = self._entries(step.logprobs)
        for i, event in enumerate(step.events):
            yield from self._frames(self._output.take(event, entries if i == last else ()))

    def end(self, job, timings):
        yield from self._frames(self._finish(job))
        response = self._response(job, timings, self._output.items)
        yield self._event(f"response.{response['status']}", {"response": response})

    def close(self):
        return ()

    def failed(self, event):
        items, error = [], {"code": "server_error", "message": event.message}
        if self._output is not None:
            yield from self._frames(self._output.stop())
            items = self._output.items
        yield self._event("error", error | {"param": None})
        response = self._fixed | {"status": "failed", "output": items, "error": error, "usage": self._usage()}
        yield self._event("response.failed", {"response": response})

    def _items_of(self, job):
        summary, hidden = bool(self._request.summary), self._request.includes(HIDDEN)
        return Output(self._box, partial(self._answers.call_id, job), summary, hidden)

    def _finish(self, job):
        generation = job.generation
        thinks = generation.tracker is None or generation.tracker.is_open
        return self._output.finish(generation.finish in CUT, thinks)

    def _response(self, job, timings, items):
        cut = job.generation.finish in CUT
        return self._fixed | {
            "completed_at": None if cut else int(time.time()), "status": "incomplete" if cut else "completed",
            "output": items, "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": self._usage(), "timings": timings,
        }  # fmt: skip

    def _usage(self):
        return usage(answers.usage(self._service, self._answers.jobs))

    def _entries(self, found):
        return [logprob(self._service.conversation.tokenizer, entry) for entry in found]

    def _frames(self, events):
        for name, payload in events:
            yield self._event(name, payload)

    def _event(self, name, payload):
        number, self._number = self._number, self._number + 1
        return sse.event(name, {"type": name, "sequence_number": number} | payload)


def envelope(service, request):
    """The ``response`` of a request whose answer has only begun: what was asked for, and the defaults of what was not."""
    text, verbosity = request.text or TextOptions(), {}
    if text.verbosity in ("low", "medium", "high"):
        verbosity = {"verbosity": text.verbosity}
    return {
        "id": new_id("resp"), "object": "response", "created_at": int(time.time()), "completed_at": None,
        "status": "in_progress", "model": request.model or service.model_id, "output": [], "error": None,
        "incomplete_details": None, "instructions": request.instructions, "max_output_tokens": request.budget,
        "metadata": request.metadata if isinstance(request.metadata, dict) else {},
        "parallel_tool_calls": request.parallel_tool_calls is not False, "previous_response_id": None,
        "reasoning": {"effort": request.effort, "summary": request.summary}, "store": False,
        "temperature": request.heat(service),
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "text": {"format": text.format or {"type": "text"}} | verbosity,
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice, "tools": request.tools or [],
        "truncation": "disabled", "background": False, "service_tier": "default", "usage": None,
    }  # fmt: skip


def usage(counts):
    """``answers.Usage`` as Responses have it."""
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": counts.written},
        "output_tokens": counts.generated,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.generated,
    }
