"""The reference's law: logits depend on the token sequence alone, bit for bit.

For every golden artifact: the same tokens in one call, in calls split anywhere, through snapshots restored into other
states, through truncations and forks, give ``np.array_equal`` logits.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import reference, runs

from ds4ref.state import State

RUNS = [run for run in runs() if run.artifact == "model.gguf" and run.cases == "cases.npz" or run.options.get("qat")]


@pytest.fixture(scope="module", params=RUNS, ids=str)
def model(request):
    return reference(request.param)


@pytest.fixture(scope="module")
def cold(model):
    """Tokens that pass several windows and blocks, and their logits from one uninterrupted run."""
    tokens = np.random.default_rng(7).integers(0, model.vocabulary, 150).tolist()
    return tokens, model.verify(model.new_state(), tokens)


@given(data=st.data())
@settings(max_examples=5 if settings.default.max_examples <= 50 else 100)
def test_any_history_gives_the_same_bits(model, cold, data):
    tokens, expected = cold
    state, snapshots = model.new_state(), []
    for _ in range(data.draw(st.integers(1, 6), label="operations")):
        match data.draw(st.sampled_from(["call", "snapshot", "restore", "truncate", "fork"])):
            case "call":
                n = data.draw(st.integers(0, min(60, len(tokens) - state.length)), label="tokens")
                if n:
                    at = state.length
                    assert np.array_equal(model.verify(state, tokens[at : at + n]), expected[at : at + n])
            case "snapshot":
                snapshots.append(state.snapshot())
            case "restore" if snapshots:
                state = State(model.layout, model.dtype)
                state.restore(data.draw(st.sampled_from(snapshots)))
            case "truncate":
                n = data.draw(st.integers(max(0, state.length - 3), state.length), label="kept")
                if state.can_truncate(n):
                    state.truncate(n)
            case "fork":
                other = state.copy()
                if state.length < len(tokens):
                    model.step(state, (tokens[state.length] + 1) % model.vocabulary)
                state = other
    end = min(len(tokens), state.length + 3)
    if end > state.length:
        at = state.length
        assert np.array_equal(model.verify(state, tokens[at:end]), expected[at:end])


def test_every_position_restores(model, cold):
    """One pass that is snapshot and restored into a fresh state before every token."""
    tokens, expected = cold
    state = model.new_state()
    for token, row in zip(tokens[:48], expected, strict=False):
        fresh = model.new_state()
        fresh.restore(state.snapshot())
        assert np.array_equal(model.step(fresh, token), row)
        state = fresh


def test_decode_of_several_states_is_one_by_one(model, cold):
    tokens, expected = cold
    states = [model.new_state() for _ in range(3)]
    for n, state in enumerate(states):
        if n:
            model.prefill(state, tokens[:n])
    assert np.array_equal(model.decode(states, tokens[:3]), expected[:3])
