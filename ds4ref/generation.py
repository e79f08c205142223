"""One answer in the making: logits in; tokens, events and at last a finish out.

Sans-IO: it never runs a model. Whoever does hands over the logits of the newest position and gets a :class:`Step` back:

    generation = Generation(tokenizer, prompt_ids, params, budget=…, context=…)
    logits = model.prefill(state, prompt_ids)
    while generation.finish is None:
        step = generation.accept(logits)
        if generation.finish is None:
            logits = model.step(state, step.token)

The order inside a step: masks of grammar and stop policy, sampler, end tokens; then bytes → text (never half a character)
→ the chat protocol's parser → stop strings on what is visible; then the budget. Serial, batched and speculative decoding
all drive this one object, so an answer does not depend on the lane that computed it. What a grammar or a budget of
reasoning does to the choice of tokens is ``guidance``'s.
"""

from dataclasses import dataclass, field

from .chat.events import CallArguments, CallBegin, CallEnd, Event, Reasoning, Text
from .guidance import Guidance, excluded
from .sampling import Counts, SamplingParams, logprobs, sample
from .stop import Finish, ReasoningTracker, StopPolicy, StopStrings
from .tokenizer import Detokenizer


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one sampled token, with the most likely alternatives (id, logprob), best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Step:
    """What one position produced. ``token`` is None when nothing was sampled (a budget of zero)."""

    token: int | None
    events: tuple[Event, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    """Of the tokens whose visible text is complete with this step's events."""


@dataclass
class Generation:
    """The state of one answer.

    prompt: token ids; budget: tokens to generate at most; context: tokens a sequence may hold. parser: a chat protocol's
    parser, or None for raw text. tracker: whether reasoning is open, for the policy that masks end tokens only there.
    ``params.seed`` must be set unless greedy.
    """

    tokenizer: object
    prompt: list[int]
    params: SamplingParams
    budget: int
    context: int
    policy: StopPolicy
    parser: object = None
    markers: frozenset[str] = frozenset()
    """Special tokens, by their text, that the parser reads."""
    stop_strings: tuple[str, ...] = ()
    tracker: ReasoningTracker | None = None
    choice: int = 0
    vocabulary: int | None = None
    guidance: Guidance | None = None
    """What constrains the choice of tokens beyond the policy: a grammar, a budget of reasoning."""
    generated: list[int] = field(default_factory=list)
    finish: Finish | None = None
    matched_stop: str | None = None
    reasoning_tokens: int = 0
    """Tokens sampled inside reasoning, or that the parser read as such."""

    def __post_init__(self):
        room = self.context - len(self.prompt)
        if room < 0:
            raise ValueError(f"a prompt of {len(self.prompt)} tokens exceeds the context of {self.context}")
        self._limit = min(self.budget, room)
        self._limit_reason = Finish.LENGTH if self.budget <= room else Finish.CONTEXT
        self._counts = Counts(self.vocabulary or self.tokenizer.vocab_size, self.prompt) if self.params.penalised else None
        self._detokenizer = Detokenizer(self.tokenizer)
        self._stops = StopStrings(self.stop_strings)
        self._calls = 0  # complete ones
        self._special = frozenset(self.tokenizer.specials.values())
        self._visible = 0  # characters of visible text produced, before stop strings hold any back
        self._delivered = 0
        self._unplaced = []  # logprobs of tokens whose text has not come out of the parser yet
        self._placed = []  # (end in visible text, logprob), not delivered yet

    @property
    def blocks(self):
        """The call blocks of a finished answer that may be replayed exactly, each as (text, index of its first call, number
        of calls): the text as sampled, from the white space before it to its closing tag. Calls that were repaired, or that
        have visible text behind them, are in none."""
        text = None if self.parser is None or self.finish is None else self.parser.block
        return [] if text is None else [(text, 0, self._calls)]

    @property
    def broken_call(self):
        """Why a call of a finished answer could not be read (one sentence), None if all could or the budget ended it."""
        ended = self.finish in (Finish.STOP, Finish.TOOL_CALLS, Finish.STOP_STRING)
        return self.parser.malformed if ended and self.parser is not None else None

    @property
    def forced(self):
        """The token that comes next whatever the logits are, None if they decide."""
        return None if self.guidance is None else self.guidance.forced(self.reasoning_tokens)

    def start(self):
        """Call once before the first token: a budget of zero ends here, with nothing sampled."""
        return self._end(self._limit_reason, None, []) if self._limit == 0 else Step(None)

    def accept(self, logits):
        """Choose the next token from ``logits`` [V] and say what it makes visible. Sets ``finish`` when it is the last."""
        if self.finish is not None:
            raise ValueError(f"the answer has ended ({self.finish})")
        masked = self.policy.masked(self.tracker is not None and self.tracker.is_open)
        position = len(self.prompt) + len(self.generated)
        token = self.forced
        if token is None:
            banned = self._banned(masked, len(logits))
            token = sample(logits, self.params, position, counts=self._counts, banned=banned, choice=self.choice)
        if self.policy.is_end(token):
            return self._end(Finish.STOP, token, [])
        if self.params.logprobs and not self.tokenizer.is_control(token):
            value, top = logprobs(logits, token, self.params.top_logprobs, masked=masked)
            self._unplaced.append(Logprob(token, value, tuple(top)))
        self.generated.append(token)
        if self._counts is not None:
            self._counts.add(token)
        if self.tracker is not None and not (self.guidance and self.guidance.in_answer):
            self.tracker = self.tracker.after(self.tokenizer.token_bytes(token))
        if self.guidance is not None:
            self.guidance.accept(token, self.tracker is not None and self.tracker.is_open)
        parsed = self._parse(token)
        self._calls += sum(isinstance(event, CallEnd) for event in parsed)
        if token in self._special and not any(isinstance(e, Text) and self.tokenizer.piece(token) in e.text for e in parsed):
            self._unplaced = [entry for entry in self._unplaced if entry.token != token]  # markup, not text
        thinks = self.tracker is not None and self.tracker.is_open  # a parser that holds a call back says nothing meanwhile
        self.reasoning_tokens += thinks or any(isinstance(event, Reasoning) for event in parsed)
        events = self._visible_events(parsed)
        if self.matched_stop is not None:
            return self._close(Finish.STOP_STRING, token, events)
        if self.parser is not None and self.parser.stopped:
            return self._end(Finish.STOP, token, events)
        if self.guidance is not None and self.guidance.complete:
            return self._end(Finish.STOP, token, events)
        if len(self.generated) >= self._limit:
            return self._end(self._limit_reason, token, events)
        return self._step(token, events)

    def _banned(self, masked, rows):
        """What the policy (``masked``) and the guidance exclude: ids, or bool [rows] under a grammar."""
        banned = () if self.guidance is None else self.guidance.banned(self.tracker.tail if self.tracker else b"")
        return excluded(masked, banned, rows)

    def _parse(self, token):
        """The parser's events for one token."""
        literal = self.tokenizer.piece(token)
        if token in self._special and literal in self.markers:
            # Vocabularies differ in whether they give such a token a text of its own; the parser needs it either way.
            text = self._detokenizer.feed_bytes(literal.encode())
            if not hasattr(self.parser, "mark"):
                return self.parser.feed(text)
            before = text.removesuffix(literal)
            return (self.parser.feed(before) if before else []) + self.parser.mark(literal)
        text = self._detokenizer.feed(token)
        if self.parser is None:
            return [Text(text)] if text else []
        return self.parser.feed(text) if text else []

    def _visible_events(self, events):
        """Run visible text through the stop strings; what follows a match is dropped."""
        out = []
        for event in events:
            if self.matched_stop is not None:
                break
            if isinstance(event, Text):
                self._place(event.text)
                text, self.matched_stop = self._stops.feed(event.text)
                self._deliver(text, out)
                continue
            if isinstance(event, CallBegin):
                self._release(out)
                self._stops = StopStrings(self.stop_strings)
            if self.matched_stop is None:
                self._unplaced.clear()
                if not isinstance(event, CallArguments) or event.fragment:
                    out.append(event)
        return out

    def _place(self, text):
        self._visible += len(text)
        self._placed += [(self._visible, entry) for entry in self._unplaced]
        self._unplaced.clear()

    def _deliver(self, text, out):
        self._delivered += len(text)
        if text:
            out.append(Text(text))

    def _release(self, out):
        """Deliver what the stop strings still hold back."""
        text, self.matched_stop = self._stops.flush()
        self._deliver(text, out)

    def _end(self, reason, token, events):
        """No further token: flush every stage and settle the reason."""
        ended = "stop" if reason is Finish.STOP else "length"
        if self.parser is not None:
            rest = self.parser.finish(ended)
            self._calls += sum(isinstance(event, CallEnd) for event in rest)
            events = events + self._visible_events(rest)
            reason = {"tool_calls": Finish.TOOL_CALLS, "length": Finish.LENGTH}.get(self.parser.outcome, Finish.STOP)
            if reason is Finish.LENGTH and ended == "length":
                reason = self._limit_reason
        if self.matched_stop is None:
            tail = []
            self._release(tail)
            events = events + tail
        return self._close(reason if self.matched_stop is None else Finish.STOP_STRING, token, events)

    def _close(self, reason, token, events):
        self.finish = reason
        return self._step(token, events)

    def _step(self, token, events):
        ready = [entry for end, entry in self._placed if end <= self._delivered]
        self._placed = self._placed[len(ready) :]
        return Step(token, tuple(events), tuple(ready))


def run(model, state, generation, prompt=None, progress=lambda done, total: None):
    """Drive ``generation`` on ``model`` from ``state`` to its end, yielding every :class:`Step`.

    prompt: the tokens still to be computed (default: the whole prompt). Stopping the iteration between two steps leaves
    a consistent state.
    """
    step = generation.start()
    tokens = generation.prompt if prompt is None else prompt
    for done, token in enumerate(tokens):
        progress(done, len(tokens))
        model.step(state, token)
    progress(len(tokens), len(tokens))
    if generation.finish is not None:
        yield step
        return
    while generation.finish is None:
        if state.logits is None:
            raise ValueError("an answer needs a prompt of at least one token")
        step = generation.accept(state.logits)
        yield step
        if generation.finish is None:
            model.step(state, step.token)
