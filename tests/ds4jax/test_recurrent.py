"""The delta rule over chunks equals ds4ref's token after token, whatever the decays, lengths and banks."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

from ds4jax import recurrent  # noqa: E402
from ds4jax.state import Chunk, Sequences  # noqa: E402
from ds4ref import recurrent as reference  # noqa: E402
from ds4ref.state import Recurrent, State  # noqa: E402

HEADS, WIDTH, VALUES = 2, 8, 5
LAYOUT = {"memory": Recurrent((HEADS, WIDTH, VALUES))}


@partial(jax.jit, static_argnames="layer")
def associate(states, banks, valid, inputs, layer):
    """states: [R, banks, H, d, v] → (states after, out [B, T, H, v])."""
    chunk = Chunk(jnp.zeros_like(valid), valid, inputs[0].shape[1], 256, banks)
    sequences = Sequences(LAYOUT, {"memory": {"value": states}}, chunk, layer)
    out = recurrent.associate(sequences["memory"], *inputs)
    return sequences.arrays["memory"]["value"], out


def token_by_token(state, inputs):
    """ds4ref in float64: (state after, out [T, H, v])."""
    memory = State(LAYOUT, np.float64)["memory"]
    memory.replace(state.astype(np.float64))
    out = [reference.associate(memory, *now) for now in zip(*(x.astype(np.float64) for x in inputs), strict=True)]
    return memory.value, np.array(out).reshape(-1, HEADS, VALUES)


def inputs_of(rng, banks, tokens, channels, strongest, most, repeated):
    """q, k, v, beta, decay; decays from 1 down to exp(−strongest), beta up to ``most``; the same key again and again."""
    q, k = rng.standard_normal((2, banks, tokens, HEADS, WIDTH))
    if repeated:
        k[:] = k[:, :1]
    v = rng.standard_normal((banks, tokens, HEADS, VALUES))
    beta = most * (1 - rng.random((banks, tokens, HEADS)) ** 4)
    decay = np.exp(-strongest * rng.random((banks, tokens, HEADS, WIDTH if channels else 1)) ** 3)
    return [x.astype(np.float32) for x in (q, k, v, beta, decay)]


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(1.0, np.abs(want).max()))


@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.sampled_from([1, 2, 5, 16, 33, 70]),
    channels=st.booleans(),
    strongest=st.sampled_from([0.0, 0.05, 5.0, 50.0, 1000.0]),
    most=st.sampled_from([0.1, 1.0, 2.0]),
    repeated=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_equals_the_reference_token_by_token(seed, tokens, channels, strongest, most, repeated, data):
    rng = np.random.default_rng(seed)
    valid = np.array(data.draw(st.lists(st.integers(0, tokens), min_size=3, max_size=3)), np.int32)
    slots = np.where(valid > 0, [3, 0, 2], 4).astype(np.int32)  # an idle row has a number beyond the end
    inputs = inputs_of(rng, 3, tokens, channels, strongest, most, repeated)
    states = rng.standard_normal((2, 4, HEADS, WIDTH, VALUES)).astype(np.float32)
    after, out = map(np.asarray, associate(states, slots, valid, inputs, 1))
    expected = states.copy()
    for b, (slot, count) in enumerate(zip(slots, valid, strict=True)):
        if count:
            expected[1, slot], rows = token_by_token(states[1, slot], [x[b, :count] for x in inputs])
            close(out[b, :count], rows)
    close(after, expected)
    untouched = np.setdiff1d(np.arange(4), slots)
    np.testing.assert_array_equal(after[0], states[0])
    np.testing.assert_array_equal(after[1, untouched], states[1, untouched])


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_decay_of_zero_forgets_and_nothing_else(tokens):
    rng = np.random.default_rng(0)
    inputs = inputs_of(rng, 1, tokens, False, 1.0, 1.0, False)
    inputs[4][:, tokens // 2] = 0
    states = rng.standard_normal((1, 1, HEADS, WIDTH, VALUES)).astype(np.float32)
    after, out = associate(states, np.zeros(1, np.int32), np.full(1, tokens, np.int32), inputs, 0)
    expected, rows = token_by_token(states[0, 0], [x[0] for x in inputs])
    close(np.asarray(out)[0], rows)
    close(np.asarray(after)[0, 0], expected)


@pytest.mark.parametrize("banks", [1, 3])
def test_one_token_works_on_the_states_in_place(banks):
    rng = np.random.default_rng(0)
    states = jnp.zeros((8, 3, HEADS, WIDTH, VALUES))
    inputs = inputs_of(rng, banks, 1, False, 1.0, 1.0, False)
    every = np.arange(banks, dtype=np.int32)
    step = jax.jit(lambda *args: associate(*args, 3), donate_argnums=0)
    compiled = step.lower(states, every, np.ones(banks, np.int32), inputs).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == states.nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < states.nbytes
