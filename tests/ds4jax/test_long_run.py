"""A long, mixed run over few banks: answers are the reference's whatever came before, programs stay few, state is donated."""

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ds4jax.model import Model
from ds4ref import tiny
from ds4ref.model import Model as Reference

CLOSE = {"rtol": 0, "atol": 5e-4}
CONTEXT, BANKS = 96, 3
TOKENS = st.lists(st.integers(0, 255), min_size=1, max_size=24)
OPENED = {}


def models(architecture, folder):
    """The device model and the reference, kept: programs compiled in one example serve the next."""
    if architecture not in OPENED:
        tiny.write(architecture, folder / "tiny.gguf", seed=4)
        device = Model.open(folder / "tiny.gguf", context=CONTEXT, banks=BANKS, chunk=16, sizes=(1, 16), least_bucket=CONTEXT)
        OPENED[architecture] = device, Reference.open(folder / "tiny.gguf")
    return OPENED[architecture]


class Serving(RuleBasedStateMachine):
    """Sequences come and go in any bank, each with a state of the reference that takes the same tokens."""

    architecture, folder = None, None

    @initialize()
    def open(self):
        self.device, self.reference = models(self.architecture, self.folder)
        self.pairs = []

    def teardown(self):
        for bank, _ in getattr(self, "pairs", []):
            bank.release()

    def room(self, index):
        return CONTEXT - self.pairs[index][0].length

    def pick(self, data):
        return data.draw(st.integers(0, len(self.pairs) - 1))

    @precondition(lambda self: len(self.pairs) < BANKS)
    @rule()
    def begin(self):
        self.pairs.append((self.device.new_state(), self.reference.new_state()))

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def end(self, data):
        self.pairs.pop(self.pick(data))[0].release()

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), tokens=TOKENS, every=st.booleans())
    def prefill(self, data, tokens, every):
        bank, state = self.pairs[index := self.pick(data)]
        tokens = tokens[: self.room(index)]
        if not tokens:
            return
        expected = self.reference.verify(state, tokens)
        got = self.device.verify(bank, tokens) if every else self.device.prefill(bank, tokens)
        assert np.allclose(got, expected if every else expected[-1], **CLOSE)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def decode(self, data):
        """One token for any of the banks, in any order, in one program."""
        free = [i for i in range(len(self.pairs)) if self.room(i)]
        chosen = data.draw(st.permutations(free).map(lambda order: order[: max(1, len(order) - 1)]))
        if not chosen:
            return
        tokens = data.draw(st.lists(st.integers(0, 255), min_size=len(chosen), max_size=len(chosen)))
        got = self.device.decode([self.pairs[i][0] for i in chosen], tokens)
        for i, token, row in zip(chosen, tokens, got, strict=True):
            assert np.allclose(row, self.reference.step(self.pairs[i][1], token), **CLOSE)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def truncate(self, data):
        bank, state = self.pairs[self.pick(data)]
        n = data.draw(st.integers(0, bank.length))
        assert bank.can_truncate(n) == state.can_truncate(n)
        if bank.can_truncate(n):
            bank.truncate(n)
            state.truncate(n)

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(data=st.data())
    def fork(self, data):
        """A copy goes on elsewhere; its source stays as it was."""
        (source, origin), (target, state) = data.draw(st.permutations(self.pairs).map(lambda pairs: pairs[:2]))
        target.restore(source.snapshot())
        state.restore(origin.snapshot())

    @invariant()
    def programs_are_few(self):
        if hasattr(self, "device"):
            assert self.device.compiled <= self.device.most_programs


@pytest.mark.parametrize(
    "architecture", ["qwen35", *(pytest.param(name, marks=pytest.mark.slow) for name in ("step35", "deepseek4"))]
)
def test_any_interleaving_gives_the_same(architecture, tmp_path_factory):
    from hypothesis import settings
    from hypothesis.stateful import run_state_machine_as_test

    name = f"Serving_{architecture}"
    machine = type(name, (Serving,), {"architecture": architecture, "folder": tmp_path_factory.mktemp(architecture)})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=40))


def test_state_is_donated(tmp_path):
    device, _ = models("step35", tmp_path)
    bank = device.new_state()
    before = jax.tree.leaves(device._arrays)
    device.prefill(bank, [1, 2, 3])
    assert all(array.is_deleted() for array in before)
    bank.release()
