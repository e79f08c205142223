"""The device's state against ds4ref's: what is appended to many banks in chunks reads, and is taken as a snapshot, alike."""

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax
import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.state import Chunk, Sequences, allocate, allocate_shapes, from_snapshot, to_snapshot
from ds4ref.state import Compressed, Recurrent, Ring, Rows, State

CONTEXT, SLOTS = 24, 3
LAYOUT = {
    "pairs": Rows((2, 3)),
    "rows": Rows((4,)),
    "ring": Ring(5, (2, 3)),
    "conv": Ring(3, (4,)),
    "value": Recurrent((2, 3)),
    "blocks": Compressed(4, (3,), (2, 3), 8),
}


def compress(rows):
    """A block's row from token rows [span, 2, 3]: any function in which the order of the rows counts."""
    return sum((j + 1) * row[0] + row[1] for j, row in enumerate(rows))


def append(sequences, rows):
    """Append one array per component, the block's row made of those token rows that exist. → the values that were replaced"""
    for name in ("pairs", "rows", "ring", "conv"):
        sequences[name].append(rows[name])
    replaced = sequences["value"].update(
        lambda value, new, real: (jnp.where(real[:, None, None], new, value), value), rows["value"], sequences.chunk.valid > 0
    )

    def block(tokens, held, number):
        tokens = jnp.where(held[..., None, None], tokens, 0)
        missing = jnp.sum(~held, axis=-1)[..., None, None, None]
        order = jnp.arange(1, tokens.shape[2] + 1)[:, None, None]
        return jnp.sum(jnp.where(held[..., None, None], (order - missing) * tokens[..., :1, :], 0) + tokens[..., 1:, :], (2, 3))

    sequences["blocks"].append(rows["blocks"], block)
    return replaced


@jax.jit
def advance(arrays, layer, lengths, valid, banks, rows):
    """One call: append the chunk and read everything that a family may read."""
    chunk = Chunk(lengths, valid, rows["rows"].shape[1], CONTEXT, banks)
    sequences = Sequences(LAYOUT, arrays, chunk, layer)
    seen = {"replaced": append(sequences, rows)}
    for name in ("pairs", "rows", "ring", "blocks"):
        view = sequences[name].rows()
        seen[name] = jnp.moveaxis(view.rows(), -2, 1), view.positions(jnp.arange(view.count))
    seen["history"] = sequences["conv"].history(2)
    return sequences.arrays, seen


def drawn(rng, *leading):
    """Rows of whole numbers: their sums are exact."""
    shapes = {"pairs": (2, 3), "rows": (4,), "ring": (2, 3), "conv": (4,), "blocks": (2, 3)}
    return {name: rng.integers(-9, 9, (*leading, *shape)).astype(np.float32) for name, shape in shapes.items()}


def snapshot(arrays, layer, bank, length):
    return to_snapshot(LAYOUT, jax.tree.map(lambda a: np.asarray(a)[layer], arrays), bank, length)


def test_the_rows_come_second_to_last():
    shapes = {name: tuple(a.shape for a in allocate(kind, 2, 3, CONTEXT).values()) for name, kind in LAYOUT.items()}
    assert shapes["pairs"] == ((2, 3, 2, CONTEXT, 3),) and shapes["rows"] == ((2, 3, CONTEXT, 4),)
    assert shapes["blocks"] == ((2, 3, 6, 3), (2, 3, 2, 8, 3)) and shapes["value"] == ((2, 3, 2, 3),)
    assert allocate_shapes(LAYOUT["ring"], 3)["rows"].shape == (1, 1, 2, 3, 3)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(1, 1), (1, 3), (4, 2), (7, 1), (7, None)]))
def test_chunks_of_many_banks(seed, call):
    """Random calls until the banks are full: every view, history and snapshot is that of one ds4ref state per bank."""
    rng, (size, width) = np.random.default_rng(seed), call
    arrays = {
        name: {
            key: jnp.asarray(rng.standard_normal(a.shape), jnp.float32) for key, a in allocate(kind, 2, SLOTS, CONTEXT).items()
        }
        for name, kind in LAYOUT.items()
    }
    arrays["value"]["value"] = jnp.zeros_like(arrays["value"]["value"])  # the only one that starts from something
    states = [State(LAYOUT) for _ in range(SLOTS)]
    other = [snapshot(arrays, 0, bank, CONTEXT) for bank in range(SLOTS)]
    for _ in range(8):
        banks = np.arange(SLOTS) if width is None else rng.permutation(SLOTS)[:width]
        if width not in (1, None) and rng.random() < 0.3:
            banks[0] = SLOTS  # idle, out of range
        lengths = np.array([states[b].length if b < SLOTS else 0 for b in banks], np.int32)
        least = 1 if width == 1 else 0
        valid = np.array([0 if b == SLOTS else rng.integers(least, size + 1) for b in banks], np.int32)
        valid = np.minimum(valid, CONTEXT - lengths)
        rows = drawn(rng, len(banks), size)
        rows["value"] = rng.integers(-9, 9, (len(banks), 2, 3)).astype(np.float32)
        arrays, seen = advance(arrays, 1, lengths, valid, None if width is None else banks, rows)
        for at, bank in enumerate(banks):
            if bank == SLOTS:
                continue
            state = states[bank]
            before = state["conv"].rows()[-2:]
            assert np.array_equal(seen["replaced"][at], state["value"].value)
            for t in range(valid[at]):
                for name in ("pairs", "rows", "ring", "conv"):
                    state[name].append(rows[name][at, t])
                state["value"].replace(rows["value"][at])
                state["blocks"].append(rows["blocks"][at, t], lambda tokens, number: compress(tokens))
                state.tokens.append(0)
            past = np.zeros((2, 4), np.float32)
            past[2 - len(before) :] = before
            real = slice(0, 2 + valid[at])
            assert np.array_equal(seen["history"][at, real], np.concatenate([past, rows["conv"][at, : valid[at]]]))
            for name in ("pairs", "rows", "ring", "blocks"):
                got, positions = (np.asarray(x[at]) for x in seen[name])
                step = 4 if name == "blocks" else 1
                expected = state[name].rows()
                ends = (np.arange(state.length // step - len(expected), state.length // step) + 1) * step - 1
                if name == "ring":  # no more than what the chunk's first query sees
                    needed = ends > lengths[at] - 5
                    ends, expected = ends[needed], expected[needed]
                found = [np.flatnonzero(positions == end) for end in ends]
                assert all(len(f) == 1 for f in found), (name, positions)
                assert np.array_equal(got[[f[0] for f in found]].reshape(expected.shape), expected), name
    for bank, state in enumerate(states):
        taken = snapshot(arrays, 1, bank, state.length)
        for name, component in state.snapshot().components.items():
            for key, expected in component.items():
                got = taken[name][key]
                assert got.dtype == np.float32 and np.array_equal(got, expected), (name, key)
        for name, expected in other[bank].items():
            for key in expected:
                assert np.array_equal(snapshot(arrays, 0, bank, CONTEXT)[name][key], expected[key])  # the other layer


@pytest.mark.parametrize("length", [0, 3, 9, CONTEXT])
def test_snapshots_there_and_back(length):
    rng = np.random.default_rng(length)
    state = State(LAYOUT)
    for _ in range(length):
        rows = drawn(rng)
        for name in ("pairs", "rows", "ring", "conv"):
            state[name].append(rows[name])
        state["value"].replace(np.ones((2, 3), np.float32))
        state["blocks"].append(rows["blocks"], lambda tokens, number: compress(tokens))
    components = {name: component.snapshot() for name, component in state._components.items()}
    filled = from_snapshot(LAYOUT, components, length, CONTEXT)
    shapes = {name: allocate_shapes(kind, CONTEXT) for name, kind in LAYOUT.items()}
    assert all(filled[n][k].shape == shape.shape[2:] for n, held in shapes.items() for k, shape in held.items())
    back = to_snapshot(LAYOUT, jax.tree.map(lambda a: a[None], filled), 0, length)
    for name, component in components.items():
        for key, expected in component.items():
            assert np.array_equal(back[name][key], expected) and back[name][key].flags.c_contiguous


@pytest.mark.parametrize("size", [1, 4])
def test_bfloat16_rows_are_read_as_they_were_rounded(size):
    """Also the chunk's own, so that what a query reads does not depend on the chunks."""
    rng, kind = np.random.default_rng(size), Ring(5, (2, 3))
    layout = {"rows": Rows((2, 3)), "ring": kind}
    arrays = {name: allocate(kind, 1, 2, CONTEXT, jnp.bfloat16) for name, kind in layout.items()}
    values = rng.standard_normal((1, 12, 2, 3)).astype(np.float32)
    rounded = np.asarray(jnp.asarray(values).astype(jnp.bfloat16).astype(jnp.float32))
    assert not np.array_equal(rounded, values)

    @jax.jit
    def step(arrays, rows, at):
        sequences = Sequences(layout, arrays, Chunk(at[None], jnp.array([size]), size, CONTEXT, jnp.array([1])))
        seen = {}
        for name in layout:
            sequences[name].append(rows)
            view = sequences[name].rows()
            last = jnp.arange(view.count - 5, view.count)
            seen[name] = view.rows(), view.positions(jnp.arange(view.count)), view.gather(last[None])
        return sequences.arrays, seen

    for at in range(0, 12, size):
        arrays, seen = step(arrays, values[:, at : at + size], jnp.int32(at))
        for got, positions, gathered in seen.values():
            got, positions = np.moveaxis(np.asarray(got[0]), -2, 0), np.asarray(positions)[0]
            now = (positions >= 0) & (positions < at + size)
            assert got.dtype == np.float32 and now.sum() >= min(at + size, 5)
            assert np.array_equal(got[now], rounded[0, positions[now]])
            assert np.array_equal(np.moveaxis(np.asarray(gathered[0]), -2, 0), got[-5:])
    taken = to_snapshot(layout, jax.tree.map(lambda a: a[0], arrays), 1, 12)
    assert np.array_equal(taken["rows"]["rows"], rounded[0]) and np.array_equal(taken["ring"]["rows"], rounded[0, -5:])
    assert taken["rows"]["rows"].dtype == np.float32


def test_reach_is_what_real_tokens_see():
    """The rows between the two ends hold all visible ones, and the ends are no further out than a query's own."""
    for lengths, valid, start, window in [([9, 3], [4, 0], 0, None), ([9, 3], [4, 4], 2, 3), ([0, 0], [0, 0], 0, 2)]:
        lengths, valid = np.array(lengths), np.array(valid)
        chunk = Chunk(jnp.asarray(lengths), jnp.asarray(valid), 4, CONTEXT, None)
        arrays = {name: allocate(kind, 1, 2, CONTEXT) for name, kind in LAYOUT.items()}
        first, last = Sequences(LAYOUT, arrays, chunk)["rows"].rows().reach(start, 2, window)
        queries = [n + t for n, v in zip(lengths, valid, strict=True) for t in range(start, min(start + 2, v))]
        if not queries:
            assert int(last) <= int(first)
            continue
        assert int(last) == max(queries) + 1
        assert int(first) == (0 if window is None else max(0, min(queries) - window + 1))
