"""A model whose logits are a function of all that its state keeps, and jobs for it. It computes nothing and is fast."""

import functools
from dataclasses import dataclass, field

import numpy as np

from ds4ref.generation import Generation
from ds4ref.gguf import Artifact
from ds4ref.reuse import Policy, Reuser
from ds4ref.sampling import SamplingParams
from ds4ref.speculative import Stepwise
from ds4ref.state import Recurrent, Ring, Rows, State
from ds4ref.stop import StopPolicy
from ds4ref.tokenizer import Tokenizer
from ds4server.jobs import Ended, Failed, Job, Produced
from ds4server.lanes import Needs

from .artifact import toy

LAYOUTS = {"rows": {"a": Rows((1,))}, "ring": {"a": Rows((1,)), "w": Ring(3, (1,))}, "matrix": {"m": Recurrent((1,))}}
CONTEXT = 4096


@functools.cache
def tokenizer():
    return Tokenizer.from_artifact(Artifact.open(toy()))


def text_of(tokens):
    return b"".join(map(tokenizer().token_bytes, tokens))


class Toy:
    """The verbs of a model. log: ("prefill", state, tokens) and ("token", states) in order; bad: tokens that cannot be
    computed; together: whether ``decode`` of several rows works."""

    dtype = np.float32

    def __init__(self, layout="rows", chunk=1, bad=(), together=True):
        self.layout, self.chunk, self.bad, self.together = LAYOUTS[layout], chunk, set(bad), together
        self.vocabulary = tokenizer().vocab_size
        self.log = []

    def new_state(self):
        return State(self.layout)

    def feed(self, state, token):
        if token in self.bad:
            raise RuntimeError(f"token {token} cannot be computed")
        total = float(token)
        for name, kind in state.layout.items():
            component = state[name]
            if isinstance(kind, Recurrent):
                component.replace(component.value * np.float32(0.5) + token)
                total += float(component.value.sum())
            else:
                component.append([token])
                total += float(component.rows().sum())
        state.tokens.append(token)
        state.logits = np.sin(np.arange(self.vocabulary) * (1 + total % 89)).astype(np.float32)

    def prefill(self, state, tokens):
        self.log.append(("prefill", id(state), len(tokens)))
        for token in tokens:
            self.feed(state, token)
        return state.logits

    def step(self, state, token, trace=lambda name, array: None):
        self.log.append(("token", (id(state),)))
        self.feed(state, token)
        trace("seen", np.array(state.tokens))
        return state.logits

    def verify(self, state, tokens):
        return np.stack([self.step(state, token) for token in tokens])

    def decode(self, states, tokens):
        if not self.together:
            raise RuntimeError("not together")
        self.log.append(("token", tuple(map(id, states))))
        for state, token in zip(states, tokens, strict=True):
            self.feed(state, token)


def reuser(model, width, mode="partial", **more):
    return Reuser(model.new_state, CONTEXT, width, Policy(mode, minimum=4, **more), slots=4, every=16)


def job(prompt, budget=5, surface="openai_chat", temperature=0, seed=1, marks=(), stops=(), repeats=False, **needs):
    params = SamplingParams(temperature=temperature, seed=seed, repeats=repeats)
    generation = Generation(tokenizer(), list(prompt), params, budget, CONTEXT, StopPolicy(frozenset()), stop_strings=stops)
    needs = Needs(len(prompt), budget, **{"greedy": temperature == 0} | needs)
    return Job(generation, surface, f"req_{len(prompt)}_{budget}", marks=marks, needs=needs)


def cold(layout, prompt, budget=5, **more):
    """The answer of a model that has never seen anything."""
    model, alone = Toy(layout), job(prompt, budget, **more)
    state, generation = model.new_state(), alone.generation
    generation.start()
    logits = model.prefill(state, prompt)
    while generation.finish is None:
        step = generation.accept(logits)
        if generation.finish is None:
            logits = model.step(state, step.token)
    return generation.generated


class Target(Stepwise):
    """What is drafted for on a toy. Its model may verify several trials in one call."""

    def prefill(self, tokens, names):
        self.model.log.append(("prefill", id(self.state), len(tokens)))
        taps = []
        for token in tokens:
            self.model.feed(self.state, token)
            taps.append({"seen": np.array(self.state.tokens)})
        return taps

    def tried(self, rows, names):
        self._marks = rows
        return [mark.logits for mark in rows], [{"seen": mark.tokens} for mark in rows]


class TrialToy(Toy):
    """A toy that verifies several trials in one call, where ``together``, or changes nothing."""

    def verify_rows(self, states, tokens):
        if not self.together or self.bad & {token for part in tokens for token in part}:
            raise RuntimeError("not together")
        marks = []
        for state, part in zip(states, tokens, strict=True):
            marks.append([])
            for token in part:
                self.step(state, token)
                marks[-1].append(state.checkpoint())
        return marks


@dataclass
class Notes:
    start: int
    tokens: list = field(default_factory=list)
    everything: list = field(default_factory=list)

    @property
    def length(self):
        return self.start + len(self.tokens)


class Drafter:
    """Knows the toy, and is right about the next token with probability ``right``. It checks that it is told every token."""

    taps, longest = ("seen",), 8

    def __init__(self, layout="rows", right=0.7):
        self.model, self.right, self.begun = Toy(layout), right, 0

    def new(self, start=0):
        self.begun += 1
        return Notes(start)

    def extend(self, draft, token, taps):
        draft.tokens.append(int(token))
        draft.everything = taps["seen"].tolist()
        assert draft.everything[draft.start :] == draft.tokens

    def propose(self, draft, token, count, choose):
        if not draft.everything:
            return []
        state, drafts = self.model.new_state(), []
        for known in [*draft.everything, token]:
            self.model.feed(state, known)
        for _ in range(count):
            lucky = np.random.default_rng(state.length).random() < self.right
            chosen = choose(state.logits if lucky else -state.logits)
            if chosen is None:
                break
            drafts.append(chosen)
            self.model.feed(state, chosen)
        return drafts


def heard(done):
    """(token ids, the last event) that the reader of a job got."""
    tokens, last = [], None
    while (event := done.next(0)) is not None:
        last = event
        if isinstance(event, Produced) and event.step.token is not None:
            tokens.append(event.step.token)
    assert last is None or isinstance(last, (Ended, Failed, Produced)) or not tokens
    return tokens, last
