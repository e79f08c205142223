"""Reuse never changes an answer: on every family, whatever happened before, its logits are a cold run's, bit for bit."""

import pickle
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from runs import reference, runs

from ds4ref import tiny
from ds4ref.conversation import Conversation
from ds4ref.generation import run
from ds4ref.model import Model
from ds4ref.reuse import CheckpointPool, Policy, Reuser, decide, needs_checkpoints
from ds4ref.sampling import SamplingParams
from ds4ref.snapshots import Identity, decode, encode

RUNS = [run for run in runs() if run.artifact == "model.gguf" and run.cases == "cases.npz"]
LONG_RUN = settings.default.max_examples > 50
ANY = Policy(minimum=1)


@pytest.fixture(scope="module", params=RUNS, ids=str)
def model(request):
    return reference(request.param)


@pytest.fixture(scope="module")
def cold(model):
    return Cold(model)


class Cold:
    """The logits of uninterrupted runs, kept per token sequence. A run goes on from copies of the memory of an earlier one,
    made without the code under test."""

    MOST = 1500  # states kept

    def __init__(self, model):
        self.model, self.kept = model, {}

    def __call__(self, tokens):
        return self._at(tuple(tokens))[1]

    def _at(self, tokens):
        """(the pickled state, logits) after ``tokens``."""
        if tokens in self.kept:
            return self.kept[tokens]
        start = next((n for n in range(len(tokens), 0, -1) if tokens[:n] in self.kept), 0)
        state = pickle.loads(self.kept[tokens[:start]][0]) if start else self.model.new_state()
        if len(self.kept) > self.MOST:
            self.kept.clear()
        for n in range(start + 1, len(tokens) + 1):
            logits = self.model.step(state, tokens[n - 1])
            self.kept[tokens[:n]] = pickle.dumps(state), logits
        return self.kept[tokens]

    def answer(self, tokens, n):
        """The greedy continuation by n tokens."""
        tokens = list(tokens)
        for _ in range(n):
            tokens.append(int(np.argmax(self(tokens))))
        return tokens[len(tokens) - n :] if n else []


@dataclass
class Request:
    """An admitted prompt on its way: the prompt's tokens, then ``length`` greedy ones, of which the last is not consumed."""

    model: object
    reuser: Reuser
    prompt: list[int]
    length: int
    marks: tuple[int, ...] = ()
    answer: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.admission = self.reuser.admit(self.prompt, marks=self.marks)
        if self.admission is not None:
            self.bank, self.decision = self.admission.bank, self.admission.decision
            self._remaining = list(reversed(self.admission.remaining))

    @property
    def prefilled(self):
        return not self._remaining

    def advance(self):
        """One token. False when there is nothing left to do."""
        if len(self.answer) == self.length and self.prefilled:
            return False
        self.admission.progress()
        if not self.prefilled:
            self.model.step(self.bank.state, self._remaining.pop())
            return True
        self.answer.append(int(np.argmax(self.bank.state.logits)))
        if len(self.answer) < self.length:
            self.model.step(self.bank.state, self.answer[-1])
        return True

    def run(self):
        while self.advance():
            pass
        self.reuser.retire(self.bank)
        return self


def longest_window(model):
    """Positions after which every window of the model has moved and, in models of small blocks, every block was closed."""
    sizes = [getattr(kind, "window", getattr(kind, "ratio", 1)) for kind in model.layout.values()]
    return max(sizes) + 4 if LONG_RUN else min(max(sizes) + 4, 40)


ENDINGS = st.sampled_from(["finished"] * 4 + ["cancelled in the prompt", "cancelled in the answer", "left running"])
PICK, TOKEN, FEW = st.integers(0, 99), st.integers(0, 99), st.lists(st.integers(0, 99), min_size=1, max_size=5)


class Service(RuleBasedStateMachine):
    """Conversations over two processes of a few banks, that share stored snapshots. ``model`` and ``cold`` are set below."""

    model = cold = None

    @initialize(
        fork=st.booleans(),
        pin=st.sampled_from([0, 24]),
        slots=st.integers(1, 6),
        other=st.sampled_from(["exact", "partial", "off"]),
    )
    def start(self, fork, pin, slots, other):
        self.base = np.random.default_rng(5).integers(0, 100, longest_window(self.model)).tolist()
        self.identity = Identity.of(self.model)
        policies = Policy("partial", 4, fork, pin), Policy(other, 1, fork, pin)
        self.reusers = [Reuser(self.model.new_state, 1000, 3, policy, slots, every=16) for policy in policies]
        self.conversations, self.running, self.stored = [self.base[:]], [], []

    def _request(self, prompt, place, process, ending, length):
        """Ask for the answer to ``prompt``, whose conversation is number ``place``."""
        reuser, prompt = self.reusers[process], prompt[: len(self.base) + 24]
        foreseen = decide(prompt, reuser.banks, reuser.pool, reuser.policy)
        source = None if foreseen.source in (None, foreseen.target) else reuser.banks[foreseen.source].state
        before = source and encode(source.snapshot(), self.identity)
        request = Request(self.model, reuser, prompt, length)
        if request.admission is None:
            assert all(bank.protected for bank in reuser.banks)
            return
        found = request.decision
        assert (found.kind, found.source, found.target, found.cached) == (
            foreseen.kind, foreseen.source, foreseen.target, foreseen.cached,
        )  # fmt: skip
        assert source is None or encode(source.snapshot(), self.identity) == before
        assert request.bank.state.tokens == prompt[: found.cached] and found.cached + found.computed == len(prompt)
        assert request.admission.remaining == prompt[found.cached :]
        assert found.kind in {"off": ["cold"], "exact": ["cold", "exact", "fork"]}.get(reuser.policy.mode, [found.kind])
        self.running.append((request, place))
        if ending == "left running":
            return
        half = found.computed // 2 if ending == "cancelled in the prompt" else found.computed + length // 2
        self._proceed(request, half if ending.startswith("cancelled") else None)
        self._retire(len(self.running) - 1)

    def _proceed(self, request, tokens):
        """Advance by so many tokens, or to the end, comparing every position with the cold run."""
        while (tokens is None or tokens > 0) and request.advance():
            state, tokens = request.bank.state, None if tokens is None else tokens - 1
            assert np.array_equal(state.logits, self.cold(state.tokens))

    def _retire(self, i):
        request, place = self.running.pop(i)
        state, sequence = request.bank.state, [*request.prompt, *request.answer]
        assert state.tokens == sequence[: state.length]
        if request.prefilled:
            assert state.length >= len(sequence) - 1 and np.array_equal(state.logits, self.cold(state.tokens))
        request.reuser.retire(request.bank)
        self.conversations[place] = sequence

    def _place(self):
        """The number of a new conversation; there are six at most."""
        if len(self.conversations) < 6:
            self.conversations.append([])
        return len(self.conversations) - 1

    def _asked(self, which):
        """The number of a conversation that has been asked for."""
        begun = [i for i, tokens in enumerate(self.conversations) if tokens]
        return begun[which % len(begun)]

    how = {"process": st.integers(0, 1), "ending": ENDINGS, "length": st.integers(1, 4)}

    @rule(cut=PICK, more=FEW, **how)
    def new(self, cut, more, **how):
        self._request(self.base[: cut % len(self.base)] + more, self._place(), **how)

    @rule(which=PICK, more=FEW, **how)
    def append(self, which, more, **how):
        which = self._asked(which)
        self._request(self.conversations[which] + more, which, **how)

    @rule(which=PICK, at=PICK, **how)
    def edit(self, which, at, **how):
        which = self._asked(which)
        tokens = self.conversations[which][:]
        at %= len(tokens)
        tokens[at] = (tokens[at] + 1) % 100
        self._request(tokens, which, **how)

    @rule(which=PICK, dropped=st.integers(0, 12), **how)
    def regenerate(self, which, dropped, **how):
        which = self._asked(which)
        tokens = self.conversations[which]
        self._request(tokens[: max(1, len(tokens) - dropped)], which, **how)

    @rule(which=PICK, at=PICK, more=FEW, **how)
    def fork(self, which, at, more, **how):
        tokens = self.conversations[self._asked(which)]
        self._request(tokens[: at % len(tokens)] + more, self._place(), **how)

    @precondition(lambda self: self.running)
    @rule(which=PICK, tokens=st.integers(1, 20))
    def interleave(self, which, tokens):
        self._proceed(self.running[which % len(self.running)][0], tokens)

    @precondition(lambda self: self.running)
    @rule(which=PICK, cancel=st.booleans())
    def end(self, which, cancel):
        which %= len(self.running)
        if not cancel:
            self._proceed(self.running[which][0], None)
        self._retire(which)

    def _idle(self):
        return [(r, bank) for r in self.reusers for bank in r.banks if not bank.protected]

    @precondition(_idle)
    @rule(which=PICK)
    def evict(self, which):
        reuser, bank = self._idle()[which % len(self._idle())]
        reuser.clear(bank)

    @rule(process=st.integers(0, 1), which=st.integers(0, 2))
    def store(self, process, which):
        """Of a bank in use, too: between two steps it is as whole as any."""
        self.stored = [*self.stored[-3:], encode(self.reusers[process].banks[which].state.snapshot(), self.identity)]

    @precondition(lambda self: self.stored)
    @rule(process=st.integers(0, 1), which=PICK)
    def restore(self, process, which):
        snapshot = decode(self.stored[which % len(self.stored)], self.model.layout, self.identity)
        bank = self.reusers[process].adopt(snapshot)
        if bank is not None:
            assert bank.state.tokens == snapshot.tokens.tolist()

    @invariant()
    def every_bank_is_whole(self):
        for reuser in getattr(self, "reusers", ()):
            assert len(reuser.pool) <= reuser.pool.slots <= reuser.slots
            assert {bank for bank in reuser.banks if bank.protected} == {r.bank for r, _ in self.running if r.reuser is reuser}
            for state in (bank.state for bank in reuser.banks):
                assert {state[name].length for name in state.layout} == {state.length}
                assert state.logits is None or np.array_equal(state.logits, self.cold(state.tokens))

    def teardown(self):
        """Every conversation, answered once more, goes on as in a cold run; one is compared with a run from nothing."""
        if not hasattr(self, "reusers"):
            return
        while self.running:
            self._retire(0)
        for tokens in filter(None, self.conversations):
            for reuser in self.reusers[: 1 + LONG_RUN]:
                request = Request(self.model, reuser, tokens, 3).run()
                assert request.answer == self.cold.answer(tokens, 3)
                assert np.array_equal(request.bank.state.logits, self.cold([*tokens, *request.answer[:2]]))
        assert np.array_equal(self.model.verify(self.model.new_state(), tokens)[-1], self.cold(tokens))


def test_no_history_changes_an_answer(model, cold):
    machine = type("Service", (Service,), {"model": model, "cold": cold})
    size = {"max_examples": 20, "stateful_step_count": 60} if LONG_RUN else {"max_examples": 2, "stateful_step_count": 20}
    run_state_machine_as_test(machine, settings=settings(**size))


def turns(model, cold, dropped, marks):
    """Turns 2 to 20 of an agent's conversation on two banks: a system prompt, then tool results that are appended.

    Every prompt ends with two tokens that open the reasoning. ``dropped``: the next turn's history lacks those two and the
    answer's first two; ``marks``: the end of what history repeats is marked. Yields (decision, tokens after the longest
    prefix that earlier turns computed).
    """
    rng = np.random.default_rng(9)
    reuser = Reuser(model.new_state, 1000, 2, ANY, every=8)
    history, shared = rng.integers(0, model.vocabulary, 12).tolist(), 0
    for turn in range(20):
        history += rng.integers(0, model.vocabulary, 3).tolist()
        prompt = history + [1, 2]
        request = Request(model, reuser, prompt, 4, (len(history),) if marks else ()).run()
        assert request.answer == cold.answer(prompt, 4)
        if turn:
            yield request.decision, len(prompt) - shared
        shared = len(history) if dropped else len(prompt) + 3  # the last token of an answer has not been consumed
        history = history + request.answer[2:] if dropped else prompt + request.answer


def test_a_growing_conversation_computes_what_is_new(model, cold):
    for decision, new in turns(model, cold, dropped=False, marks=False):
        assert (decision.kind, decision.computed, decision.replayed) == ("fork", new, 0) and new == 1 + 3 + 2


def test_a_turn_replays_no_more_than_the_gap_to_a_checkpoint(model, cold):
    replays = not all(cut_anywhere(kind) for kind in model.layout.values())
    found = list(turns(model, cold, dropped=True, marks=False))
    for decision, new in found:
        assert decision.kind == "partial" and new == 2 + 3 + 2
        assert new <= decision.computed <= new + (8 if replays else 0)
    assert any(decision.computed > new for decision, new in found) == replays


def cut_anywhere(kind):
    return type(kind).__name__ == "Rows"


def test_a_marked_history_is_not_replayed(model, cold):
    """Although every prompt departs, before its end, from what the bank holds."""
    for decision, new in turns(model, cold, dropped=True, marks=True):
        assert (decision.kind, decision.computed, decision.replayed) == ("partial", new, 0)


@pytest.mark.parametrize("width", [1, 2])
def test_the_same_prompt_again_computes_one_token_or_less_than_a_stride(model, cold, width):
    """Where every position can be cut, the last token, for its logits; else the checkpoint at the prompt's end has them."""
    prompt = np.random.default_rng(2).integers(0, model.vocabulary, 45).tolist()
    reuser = Reuser(model.new_state, 1000, width, ANY, every=16)
    assert Request(model, reuser, prompt, 5).run().decision.computed == 45
    for _ in range(3):
        again = Request(model, reuser, prompt, 5).run()
        assert again.decision.kind == "partial" and again.answer == cold.answer(prompt, 5)
        assert again.decision.computed == (0 if needs_checkpoints(model.layout) else 1)
    pool = CheckpointPool()
    for n in (16, 32):  # without the checkpoint of the prompt's end, the one a stride before serves
        pool.capture(model_at(model, prompt[:n]))
    assert 1 <= decide(prompt, reuser.banks, pool, ANY).computed <= 16


def model_at(model, tokens):
    state = model.new_state()
    model.prefill(state, tokens)
    return state


def test_the_generation_loop_captures_and_continues(tmp_path):
    """The engine's own loop drives an admission: the answer is that of a fresh state, sampled with the same seed."""
    tiny.write("deepseek4", tmp_path / "tiny.gguf", seed=5)
    model = Model.open(tmp_path / "tiny.gguf")
    conversation, params = Conversation(model.artifact), SamplingParams(seed=3)
    reuser = Reuser(model.new_state, 1000, policy=ANY, every=16)

    def answer(text, state, ids=None, progress=lambda done, total: None):
        prompt = conversation.encode(conversation.render([{"role": "user", "content": text}]))
        generation = conversation.generation(prompt, params, budget=6, context=999, eos="global")
        return [step.token for step in run(model, state, generation, ids, progress)]

    for text in ("Hello, how do you do?", "Hello, how do you dream?", "Hello, how do you dream?"):
        admission = reuser.admit(conversation.encode(conversation.render([{"role": "user", "content": text}])))
        found = answer(text, admission.bank.state, admission.remaining, admission.progress)
        reuser.retire(admission.bank)
        assert found == answer(text, model.new_state())
    assert admission.decision.computed <= 1 and {16} <= {len(checkpoint.tokens) for checkpoint in reuser.pool}
