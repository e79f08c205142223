"""What a request of any surface asks for, in one form, and the jobs that it becomes.

A surface reads its own wire format into an :class:`Ask`; from there on all of them are the same: the prompt is rendered and
tokenised (on the HTTP thread), whatever can be wrong is said, and each choice becomes a ``Job`` for the engine. Knows nothing
about wire formats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ds4ref.chat import Block, ChatError, Options, Prompt, with_systems_first
from ds4ref.sampling import SamplingParams
from ds4ref.stop import eos_policy

from .. import grammar
from ..grammar import Choice, Grammar
from ..jobs import Job, Mailbox
from ..lanes import Needs
from .errors import ApiError, bad_request, unknown_model

RETRIED = "the first answer held a tool call that could not be read; it was asked for again"


@dataclass
class Ask:
    """One request.

    Either ``messages`` (Chat Completions form, validated, with ``tools`` in the same form or None) or ``prompts`` (token ids,
    continued as raw text) is given. controls: the thinking controls in Chat Completions spelling. budget: tokens per choice,
    None for the server's default. form: None for free text, "json_object", or a JSON schema that the visible text must satisfy.
    field, form_field: what the surface calls the prompt and the form, for errors.
    """

    surface: str
    sampling: SamplingParams
    field: str
    model: str | None = None
    stream: bool = False
    messages: list[dict] | None = None
    prompts: list[list[int]] = field(default_factory=list)
    tools: list[dict] | None = None
    choice: Choice = Choice()
    parallel: bool = True
    controls: Mapping[str, Any] = field(default_factory=dict)
    thinking_budget: int | None = None
    budget: int | None = None
    stops: tuple[str, ...] = ()
    n: int = 1
    ignore_eos: bool = False
    token_ids: bool = False
    frontier: str | None = None
    """Whose live state it goes on from where it brings only the results of a turn: "serial" or "bank"."""
    form: str | Mapping | None = None
    form_field: str = "response_format"
    scored: bool = False
    """Whether the log-probabilities of the prompt's tokens are wanted too."""

    @property
    def rendered_tools(self):
        """The tools that the prompt shows: none where none may be called."""
        return None if self.choice.mode == "none" else self.tools

    @property
    def callable_tools(self):
        """The tools that may be called."""
        return self.choice.among(self.rendered_tools)

    @property
    def several(self):
        """Whether an answer may hold several calls."""
        return self.parallel and not self.choice.single

    @property
    def schema(self):
        """The JSON schema of the visible text, or None."""
        return {"type": "object"} if self.form == "json_object" else self.form


class Rendered(NamedTuple):
    """A prompt, its token ids, and the messages, options and call blocks that it was rendered from."""

    prompt: Prompt
    ids: list[int]
    messages: list[dict]
    options: Options
    blocks: Mapping[str, Block]


def prompt_of(service, ask):
    """The :class:`Rendered` messages of a request. ApiError 400."""
    conversation = service.conversation
    try:
        options = conversation.options_of(ask.controls, service.context, service.alias(ask.model))
        options = replace(options, response_format=ask.schema)
        messages = with_systems_first(conversation.chat.protocol, ask.messages)
        blocks = service.tools.blocks(messages, ask.rendered_tools)
        prompt = conversation.render(messages, ask.rendered_tools, options, blocks)
    except ChatError as error:
        # Only Chat Completions number the messages as they are rendered.
        named = error.field and (ask.surface == "openai_chat" or not error.field.startswith("messages"))
        raise bad_request(str(error), error.field if named else ask.field) from None
    ids = conversation.encode(prompt)
    if not ids:
        raise bad_request(f"{ask.field} render to an empty prompt; at least one message is needed", ask.field)
    return Rendered(prompt, ids, messages, options, blocks)


def check_length(service, ids, name):
    """ApiError 400 where a prompt leaves no room for an answer."""
    if len(ids) >= service.context:
        raise bad_request(
            f"{name} holds {len(ids)} tokens, and at most {service.context - 1} fit the context of {service.context}",
            name, "context_length_exceeded", n_prompt_tokens=len(ids), n_ctx=service.context,
        )  # fmt: skip


def _check_model(service, name):
    """ApiError 404 for the name of a model that is not the one here, where names are taken at their word."""
    if service.strict_model and name is not None and name not in service.names:
        raise unknown_model(service, name)


def jobs_of(service, ask, request_id):
    """The jobs of a request, prompt by prompt and choice by choice, all with one mailbox. ApiError 400 for what is wrong."""
    _check_model(service, ask.model)
    mailbox = Mailbox()
    if ask.messages is None:
        return _raw(service, ask, request_id, mailbox)
    return _rendered(service, ask, request_id, mailbox, range(ask.n))


def again(service, ask, request_id, job, text):
    """A second job in place of one whose call could not be read: the model sees its answer (``text``) and what is wrong with
    it, and has the rest of the budget. None where nothing is left of it, or no room for both."""
    generation = job.generation
    note = f"That tool call could not be read: {generation.broken_call} Write the call again, complete and well-formed."
    told = [{"role": "assistant", "content": text}, {"role": "user", "content": note}]
    second = replace(ask, messages=[*ask.messages, *told], budget=generation.budget - len(generation.generated))
    if second.budget <= 0:
        return None
    try:
        (found,) = _rendered(service, second, request_id, Mailbox(), [generation.choice])
    except ApiError:
        return None
    found.index, found.earlier, found.fallback_reason = job.index, job, RETRIED
    return found


@dataclass(frozen=True)
class _Source:
    """What a job starts from: token ids, and what is known of a rendered prompt."""

    ids: list[int]
    prompt: Prompt | None = None
    tools: list[dict] | None = None
    marks: tuple[int, ...] = ()
    opening: int | None = None
    blocks: Mapping[str, str] = field(default_factory=dict)
    think: str = "none"
    grammar: Grammar | None = None


def _rendered(service, ask, request_id, mailbox, choices):
    prompt, ids, messages, options, blocks = prompt_of(service, ask)
    check_length(service, ids, ask.field)
    conversation, tools = service.conversation, ask.rendered_tools
    marks = conversation.marks(messages, tools, options, ids, blocks)
    opening = None
    if service.plan.effective["disk"]:
        opening = conversation.opening(messages, tools, options, ids, blocks)
    source = _Source(
        ids, prompt, tools, marks, opening, {name: block.text for name, block in blocks.items()}, think_level(prompt, options),
        grammar_of(service, ask, options),
    )  # fmt: skip
    return [_job(service, ask, request_id, mailbox, source, choice, choice) for choice in choices]


def _raw(service, ask, request_id, mailbox):
    for ids in ask.prompts:
        check_length(service, ids, ask.field)
    constraint = grammar_of(service, ask)
    return [
        _job(service, ask, request_id, mailbox, _Source(ids, grammar=constraint), choice, i * ask.n + choice)
        for i, ids in enumerate(ask.prompts) for choice in range(ask.n)
    ]  # fmt: skip


def grammar_of(service, ask, options=None):
    """What the answer must follow: the :class:`Grammar`, or None where it is free. ApiError 400 for what cannot be enforced.
    options: of the rendering, None for raw text."""
    conversation, name = service.conversation, ask.form_field
    try:
        if ask.form is not None:
            return grammar.for_format(conversation, ask.schema, options is None, options, ask.callable_tools, ask.several)
        if options is None:
            return None
        name = "tools"
        return grammar.for_calls(conversation, ask.tools, ask.choice, ask.several, options)
    except grammar.GrammarError as error:
        raise bad_request(str(error), name) from None


LEVELS = {"high": "high", "xhigh": "high", "max": "max"}


def think_level(prompt, options):
    """The level of reasoning that is counted: what was asked for, as far as it is in effect. One that the family has not, or
    that its template takes for its ordinary reasoning, counts under its own name."""
    if not prompt.thinking:
        return "none"
    return "low" if prompt.fallback_reason else LEVELS.get(options.effort, "low")


def _job(service, ask, request_id, mailbox, source, choice, index):
    generation = service.conversation.generation(
        source.ids, ask.sampling, budget=service.default_budget if ask.budget is None else ask.budget,
        context=service.context, prompt=source.prompt, tools=source.tools, stop_strings=ask.stops,
        eos=eos_policy(service.ignore_eos or ask.ignore_eos, service.ignore_eos_in_reasoning),
        stream=ask.stream, choice=choice, vocabulary=service.vocabulary, single=not ask.several,
        grammar=source.grammar, thinking_budget=ask.thinking_budget,
    )  # fmt: skip
    prompt = source.prompt
    needs = Needs(
        len(source.ids), generation.budget, greedy=ask.sampling.temperature == 0, stream=ask.stream,
        thinks=prompt is not None and prompt.thinking, stops=bool(ask.stops), tools=bool(source.tools),
        token_ids=ask.token_ids, frontier=ask.frontier,
    )  # fmt: skip
    return Job(
        generation, ask.surface, request_id, None if prompt is None else prompt.fallback_reason, source.marks, needs,
        opening=source.opening, blocks=dict(source.blocks), scores=[] if ask.scored else None,
        index=index, mailbox=mailbox, think=source.think,
    )  # fmt: skip
