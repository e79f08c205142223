"""Tokens on trial: a sequence of which some were kept is one that had only those, and one of which none were, untouched.

The state kinds by themselves; then families that between them have every one of them.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

import jax.numpy as jnp  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from ds4jax import primitives, trials  # noqa: E402
from ds4jax.model import Model  # noqa: E402
from ds4jax.state import Chunk, Sequences, allocate  # noqa: E402
from ds4ref import tiny  # noqa: E402
from ds4ref.model import Model as Reference  # noqa: E402
from ds4ref.state import Compressed, Recurrent, Ring, Rows  # noqa: E402

CONTEXT, SLOTS, TOKENS, LAYERS = 24, 3, 7, 2
LAYOUT = {
    "pairs": Rows((2, 3)),
    "ring": Ring(5, (2, 3)),
    "conv": Ring(9, (4,)),
    "short": Ring(3, (4,)),
    "value": Recurrent((2, 3)),
    "blocks": Compressed(4, (3,), (3,), 8),
}


def append(sequences, rows):
    """Append a chunk to every component; the value is a running sum of its rows."""
    for name in ("pairs", "ring", "conv", "short"):
        sequences[name].append(rows[name])

    def add(value, new, live):
        sums = value[:, None] + jnp.cumsum(jnp.where(live[..., None, None], new, 0), axis=1)
        return sums[:, -1], sums

    sums = sequences["value"].update(add, rows["value"], sequences.chunk.live)
    sequences["blocks"].append(rows["blocks"], lambda tokens, held, number: jnp.sum(jnp.where(held[..., None], tokens, 0), 2))
    return sums


@jax.jit
def consumed(arrays, lengths, valid, banks, rows):
    chunk = Chunk(lengths, valid, TOKENS, CONTEXT, banks)
    for layer in range(LAYERS):
        sequences = Sequences(LAYOUT, arrays, chunk, layer)
        append(sequences, jax.tree.map(lambda a, layer=layer: a + layer, rows))
        arrays = sequences.arrays
    return arrays


@partial(jax.jit, static_argnums=0)
def tried(profile, arrays, lengths, valid, counts, banks, rows):
    """(state after the trial, after keeping ``counts`` of its tokens)"""
    chunk, layers, state = Chunk(lengths, valid, TOKENS, CONTEXT, banks), [], arrays
    for layer in range(LAYERS):
        sequences = Sequences(LAYOUT, state, chunk, layer, trial=True)
        append(sequences, jax.tree.map(lambda a, layer=layer: a + layer, rows))
        state = sequences.arrays
        layers.append(sequences.tried)
    left = [[jax.tree.map(lambda *parts: jnp.stack(parts), *layers)]]
    with primitives.using(profile):
        kept = trials.write(SimpleNamespace(layouts=((LAYOUT,),)), [[state]], left, lengths, counts, banks)
    return state, kept[0][0]


def meant(arrays, bank, length):
    """What a sequence of this length may read of a bank's arrays."""
    out = {}
    for name, kind in LAYOUT.items():
        for key, array in arrays[name].items():
            rows = np.asarray(array)[:, bank]
            if isinstance(kind, Rows) or key == "blocks":
                rows = rows[..., : length // 4 if key == "blocks" else length, :]
            out[name, key] = rows
    return out


def alike(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3]), st.sampled_from(["default", "metal"]))
def test_what_is_kept_is_what_would_have_been_written(seed, width, profile):
    """Bit for bit, for any number of tokens of any number of banks, of arrays that hold anything."""
    rng = np.random.default_rng(seed)
    arrays = {
        name: {
            key: jnp.asarray(rng.integers(-9, 9, a.shape), jnp.float32)
            for key, a in allocate(kind, LAYERS, SLOTS, CONTEXT).items()
        }
        for name, kind in LAYOUT.items()
    }
    banks = rng.permutation(SLOTS + (width > 1)).astype(np.int32)[:width]  # a number out of range: an idle bank
    lengths = rng.integers(0, CONTEXT - TOKENS + 1, width).astype(np.int32)
    valid = np.where(banks == SLOTS, 0, rng.integers(1, TOKENS + 1, width)).astype(np.int32)
    counts = np.array([rng.integers(width == 1, v + 1) for v in valid], np.int32)
    shapes = {"pairs": (2, 3), "ring": (2, 3), "conv": (4,), "short": (4,), "value": (2, 3), "blocks": (3,)}
    rows = {name: rng.integers(-9, 9, (width, TOKENS, *shape)).astype(np.float32) for name, shape in shapes.items()}
    expected = consumed(arrays, lengths, counts, banks, rows)
    on_trial, kept = tried(profile, arrays, lengths, valid, counts, banks, rows)
    for bank in range(SLOTS):
        at = np.flatnonzero(banks == bank)
        if len(at):
            before, after = lengths[at[0]], lengths[at[0]] + counts[at[0]]
            assert alike(meant(on_trial, bank, before), meant(arrays, bank, before))
            assert alike(meant(kept, bank, after), meant(expected, bank, after))
        else:
            assert alike(meant(kept, bank, CONTEXT), meant(arrays, bank, CONTEXT))


FAMILIES = [
    "qwen35",
    pytest.param("deepseek4", marks=pytest.mark.slow),
    pytest.param("exaone-moe", marks=pytest.mark.slow),
    pytest.param("glm5-next", marks=pytest.mark.slow),
    pytest.param("inkling", marks=pytest.mark.slow),
]
CLOSE = {"rtol": 0, "atol": 2e-4}


@pytest.fixture(scope="module", params=FAMILIES)
def opened(request, tmp_path_factory):
    """(device model with four banks, three streams of tokens, the reference's logits after each of their tokens)."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    tiny.write(request.param, path, seed=4)
    model = Model.open(path, context=64, banks=4, chunk=16, sizes=(1, 16), trial_sizes=(4, 16), least_bucket=64)
    reference = Reference.open(path)
    streams = np.random.default_rng(3).integers(0, model.vocabulary, (3, 60)).tolist()
    return model, streams, [reference.verify(reference.new_state(), stream) for stream in streams]


def same(a, b, **close):
    """Whether two snapshots are alike: bit for bit, or within a tolerance."""
    assert a.tokens.tolist() == b.tokens.tolist() and a.components.keys() == b.components.keys()
    for name, arrays in a.components.items():
        for key, array in arrays.items():
            other = b.components[name][key]
            assert array.shape == other.shape, (name, key)
            assert np.allclose(array, other, **close) if close else np.array_equal(array, other), (name, key)
    assert np.allclose(a.logits, b.logits, **close) if close else np.array_equal(a.logits, b.logits)


def test_any_trials_continue_as_if_there_had_been_none(opened):
    """Random trials of one bank or three at once, of tokens that are kept and others that are not, until the streams end."""
    model, streams, expected = opened
    rng, banks = np.random.default_rng(6), [model.new_state() for _ in streams]
    for bank, stream, n in zip(banks, streams, (1, 14, 30), strict=True):
        model.prefill(bank, stream[:n])
    for turn in range(24):
        chosen = [b for b in (range(3) if turn % 2 else [turn // 2 % 3]) if banks[b].length < len(streams[b])]
        if not chosen:
            break
        ats = {b: banks[b].length for b in chosen}
        counts = {b: min(int(rng.integers(1, 5)), len(streams[b]) - ats[b]) for b in chosen}
        parts = [streams[b][ats[b] : ats[b] + counts[b]] for b in chosen]
        parts = [part + rng.integers(0, model.vocabulary, 4 - len(part)).tolist() for part in parts]
        rows = model.verify_rows([banks[b] for b in chosen], parts)
        for b, got in zip(chosen, rows, strict=True):
            assert got.shape == (4, model.vocabulary) and banks[b].length == ats[b]
            assert np.allclose(got[: counts[b]], expected[b][ats[b] : ats[b] + counts[b]], **CLOSE)
        model.keep([banks[b] for b in chosen], [counts[b] for b in chosen])
        for b in chosen:
            n = banks[b].length
            assert banks[b].tokens == streams[b][:n] and n == ats[b] + counts[b]
            assert np.allclose(banks[b].logits, expected[b][n - 1], **CLOSE)
            if n < len(streams[b]) and rng.random() < 0.5:
                assert np.allclose(model.step(banks[b], streams[b][n]), expected[b][n], **CLOSE)
    plain = model.new_state()
    model.prefill(plain, banks[0].tokens)
    same(banks[0].snapshot(), plain.snapshot(), rtol=0, atol=1e-3)
    for bank in (*banks, plain):
        bank.release()
    assert model.compiled <= model.most_programs


def test_a_trial_leaves_no_trace_but_what_is_kept(opened):
    model, streams, expected = opened
    banks = [model.new_state() for _ in range(3)]
    for bank, stream in zip(banks, streams, strict=True):
        model.prefill(bank, stream[:21])
    before = [bank.snapshot() for bank in banks]
    model.verify_rows(banks[:1], [streams[1][:4]])
    same(banks[0].snapshot(), before[0])
    assert np.allclose(model.step(banks[0], streams[0][21]), expected[0][21], **CLOSE)
    with pytest.raises(ValueError, match="a bank with 0 tokens on trial cannot keep 1"):
        model.keep(banks[:1], [1])
    model.verify_rows(banks[:1], [streams[0][22:26]])
    with pytest.raises(ValueError, match="a bank with 4 tokens on trial cannot keep 5"):
        model.keep(banks[:1], [5])
    model.keep(banks[:1], [2])
    for bank, taken in zip(banks[1:], before[1:], strict=True):
        same(bank.snapshot(), taken)
    with pytest.raises(ValueError, match="a trial has 1 to 16 tokens for each bank, not 17"):
        model.verify_rows(banks[:1], [[0] * 17])
    model.prefill(banks[0], streams[0][24:50])
    with pytest.raises(ValueError, match="65 tokens exceed the context of 64"):
        model.verify_rows(banks[:1], [[0] * 15])
    for bank in banks:
        bank.release()


def test_what_is_watched_is_the_residual_of_the_reference(opened):
    """After any of the layers, in prefill and on trial."""
    model, streams, _ = opened
    reference = Reference.open(model.artifact.path)
    tokens, seen, state = streams[0][:20], [], reference.new_state()
    for token in tokens:
        reference.step(state, token, lambda name, array: seen.append(np.array(array)) if name.startswith("h_") else None)
    layers = model.config.layers
    expected = [np.stack(seen[layer::layers]) for layer in range(layers)]
    model.watch(range(layers))
    bank = model.new_state()
    model.prefill(bank, tokens[:16])
    first = [np.asarray(array)[bank.seen.row, :16] for array in bank.seen.arrays]
    model.verify_rows([bank], [tokens[16:]])
    second = [np.asarray(array)[bank.seen.row, :4] for array in bank.seen.arrays]
    model.watch(())
    bank.release()
    for a, b, rows in zip(first, second, expected, strict=True):
        assert np.allclose(np.concatenate([a, b]), rows, rtol=0, atol=1e-3)
