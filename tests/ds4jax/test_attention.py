"""Attention and indexer against ds4ref's, one query at a time over the rows that it sees, in blocks so small that all occur."""

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax
import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from ds4jax import attention, indexer
from ds4jax.attention import Seen, attend, attend_latent
from ds4jax.indexer import choose, nothing
from ds4jax.state import Chunk, Sequences, allocate, from_snapshot
from ds4ref import attention as reference
from ds4ref import indexer as reference_indexer
from ds4ref.state import Compressed, Ring, Rows

SLOTS, CONTEXT, D, V = 3, 40, 4, 3
CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Blocks and tiles of a few rows and queries; nothing is small enough to be taken whole but one block."""
    for module in (attention, indexer):
        monkeypatch.setattr(module, "BLOCK", 8)
        monkeypatch.setattr(module, "TILE", 4)
    monkeypatch.setattr(attention, "SMALL", 0)


class Case:
    """Random banks with a past each, and the chunk that follows: as device state, and as all rows in NumPy."""

    def __init__(self, rng, layout, size, banks):
        self.rng, self.layout, self.size = rng, layout, size
        self.slots = rng.permutation(SLOTS)[:banks]
        self.valid = rng.integers(1 if banks == 1 else 0, size + 1, banks)
        self.lengths = np.array([rng.integers(0, CONTEXT - n + 1) for n in self.valid])
        self.rows = {
            name: rng.standard_normal((banks, CONTEXT + size, *kind.shape), np.float32) for name, kind in layout.items()
        }
        self.chunk = Chunk(
            *(jnp.asarray(x, jnp.int32) for x in (self.lengths, self.valid)), size, CONTEXT, jnp.asarray(self.slots)
        )
        arrays = {
            name: {key: rng.standard_normal(a.shape).astype(np.float32) for key, a in allocate(kind, 2, SLOTS, CONTEXT).items()}
            for name, kind in layout.items()
        }
        for at, (slot, length) in enumerate(zip(self.slots, self.lengths, strict=True)):
            for name, kind in layout.items():
                past = self.rows[name][at, :length]
                held = past[-kind.window :] if isinstance(kind, Ring) else past
                filled = from_snapshot({name: kind}, {name: {"rows": held}}, length, CONTEXT)[name]["rows"]
                where = filled != 0  # what holds nothing keeps the junk
                arrays[name]["rows"][1, slot][where] = filled[where]
        self.arrays = jax.tree.map(jnp.asarray, arrays)

    def queries(self):
        """(bank, column, position) of the real ones."""
        for b, (length, valid) in enumerate(zip(self.lengths, self.valid, strict=True)):
            yield from ((b, t, length + t) for t in range(valid))

    def run(self, program, *inputs):
        """What ``program`` made by :func:`traced` gives for the chunk and these inputs."""
        own = {
            name: np.stack([r[n : n + self.size] for r, n in zip(rows, self.lengths, strict=True)])
            for name, rows in self.rows.items()
        }
        out = np.asarray(program(self.arrays, own, (self.chunk.lengths, self.chunk.valid, self.chunk.banks), *inputs))
        assert np.isfinite(out).all()
        return out


def traced(layout, size, compute):
    """One program: append the chunk's rows, then compute(sequences, *inputs)."""

    @jax.jit
    def program(arrays, own, chunk, *inputs):
        sequences = Sequences(layout, arrays, Chunk(*chunk[:2], size, CONTEXT, chunk[2]), 1)
        for name, rows in own.items():
            sequences[name].append(rows)
        return compute(sequences, *inputs)

    return program


def examples(check, count=25):
    """Hold ``check`` to random numbers, pasts, banks and numbers of real tokens; its program is compiled once."""
    settings(max_examples=count, deadline=None)(given(st.integers(0, 2**32 - 1))(check))()


@pytest.mark.parametrize(
    "size, banks, groups, each, ring, window, sinks, biased",
    [
        (1, 1, 2, 2, False, None, False, False),
        (1, 3, 1, 3, False, 11, True, False),
        (1, 2, 2, 1, True, 13, False, True),
        (11, 1, 2, 2, False, None, True, True),
        (11, 3, 1, 2, False, 3, False, False),
        (6, 2, 2, 1, True, 1, False, False),
        (11, 2, 1, 3, True, 13, True, True),
    ],
)
def test_attend(size, banks, groups, each, ring, window, sinks, biased):
    """GQA ratios, windows over rings and over rows, sinks, biases, idle banks, pasts of any length."""
    kind, heads = (lambda shape: Ring(window, shape)) if ring else Rows, groups * each
    layout = {"k": kind((groups, D)), "v": kind((groups, V))}

    def compute(state, q, sink, table):
        def bias(tile, distance):
            at = jnp.broadcast_to((distance % 5)[:, :, None], (*distance.shape[:2], heads, distance.shape[2]))
            return jnp.take_along_axis(tile(table), at, axis=-1)

        seen = Seen(state["k"].rows(), state["v"].rows(), window, bias=bias if biased else None)
        return attend(q, seen, scale=0.7, sinks=sink if sinks else None)

    program = traced(layout, size, compute)

    def check(seed):
        case = Case(np.random.default_rng(seed), layout, size, banks)
        q, table = (case.rng.standard_normal((banks, size, heads, n), np.float32) for n in (D, 5))
        sink = case.rng.standard_normal(heads).astype(np.float32)
        out = case.run(program, q, sink, table)
        for b, t, position in case.queries():
            rows = np.arange(0 if window is None else max(0, position - window + 1), position + 1)
            k, v = case.rows["k"][b, rows], case.rows["v"][b, rows]
            added = table[b, t][:, (position - rows) % 5] if biased else None
            expected = reference.attend(q[b, t], k, v, 0.7, sink if sinks else None, added)
            assert np.allclose(out[b, t], expected, **CLOSE), (b, t, position)

    examples(check)


@pytest.mark.parametrize("size, banks, form", [(1, 2, "beside"), (6, 1, "two"), (6, 2, "none")])
def test_attend_latent(size, banks, form):
    """Without rotation, with the rotated key stored beside the latent, and in a component of its own."""
    rank, rotary, heads = 5, 2, 3
    width = rank + rotary if form == "beside" else rank
    layout = {"latent": Rows((width,))} | ({"rotated": Rows((rotary,))} if form == "two" else {})

    def compute(state, q, q_rot, k_b, v_b):
        latent = state["latent"].rows()
        keys = (latent, state["rotated"].rows()) if form == "two" else latent
        return attend_latent(q, None if form == "none" else q_rot, keys, latent, k_b, v_b, 0.3)

    program = traced(layout, size, compute)

    def check(seed):
        case = Case(np.random.default_rng(seed), layout, size, banks)
        q, q_rot = (case.rng.standard_normal((banks, size, heads, n), np.float32) for n in (D, rotary))
        k_b, v_b = (case.rng.standard_normal((heads, *shape), np.float32) for shape in ((rank, D), (V, rank)))
        out = case.run(program, q, q_rot, k_b, v_b)
        for b, t, position in case.queries():
            rows = case.rows["latent"][b, : position + 1]
            latent, rotated = rows[:, :rank], rows[:, rank:]
            if form == "two":
                rotated = case.rows["rotated"][b, : position + 1]
            parts = (q[b, t], None, latent, None) if form == "none" else (q[b, t], q_rot[b, t], latent, rotated)
            assert np.allclose(out[b, t], reference.attend_latent(*parts, k_b, v_b, 0.3), **CLOSE)

    examples(check, 10)


@pytest.mark.parametrize(
    "size, banks, group, k",
    [(1, 2, 1, 6), (1, 1, 4, 2), (1, 2, 1, 12), (1, 2, 4, 10), (6, 2, 1, 5), (6, 1, 4, 3), (3, 1, 2, 1)],
)
def test_choose_and_attend(size, banks, group, k):
    """What is chosen is ds4ref's choice, ties included, in every form; and attention reads that and nothing else."""
    layout, form = {"k": Rows((2, D)), "v": Rows((2, V)), "index": Rows((2,))}, []

    def compute(state, q, index_q, weights):
        keys = state["index"].rows()
        if group > 1:
            keys = keys.grouped(group, lambda rows, number: jnp.sum(rows, axis=2) + 0 * number[:, None])
        chosen = choose(index_q, weights, keys, k, group)
        form[:] = [chosen, nothing((banks, size), keys.count, k, group), keys.count]
        return attend(q, Seen(state["k"].rows(), state["v"].rows(), chosen=chosen), scale=0.7)

    program = traced(layout, size, compute)

    def check(seed):
        case = Case(np.random.default_rng(seed), layout, size, banks)
        case.rows["index"] = np.sign(case.rows["index"])  # few different scores
        case.arrays["index"]["rows"] = jnp.sign(case.arrays["index"]["rows"])
        index_q = case.rng.integers(-1, 2, (banks, size, 3, 2)).astype(np.float32)
        weights = case.rng.integers(-1, 2, (banks, size, 3)).astype(np.float32)
        q = case.rng.standard_normal((banks, size, 4, D), np.float32)
        out = case.run(program, q, index_q, weights)
        for b, t, position in case.queries():
            complete = (position + 1) // group
            keys = case.rows["index"][b, : complete * group].reshape(complete, group, 2).sum(1)
            best = reference_indexer.select(reference_indexer.index_scores(index_q[b, t], keys, weights[b, t]), k)
            rows = (best[:, None] * group + np.arange(group)).reshape(-1)
            rows = np.concatenate([rows, np.arange(complete * group, position + 1)])
            expected = reference.attend(q[b, t], case.rows["k"][b, rows], case.rows["v"][b, rows], 0.7)
            assert np.allclose(out[b, t], expected, **CLOSE), (b, t, position)

    examples(check)
    chosen, alike, candidates = form
    assert (chosen is None) == (candidates <= k)
    assert jax.tree.structure(alike) == jax.tree.structure(chosen)
    if chosen is not None:
        assert (alike.held.shape, alike.held.dtype) == (chosen.held.shape, chosen.held.dtype)
        assert chosen.indexed == (size == 1 and indexer.GATHER * k <= candidates)


@pytest.mark.parametrize("size", [1, 4])
def test_two_lists_of_rows_count_as_one(size):
    """A window beside compressed blocks, with sinks: as one list of all these rows."""
    rng = np.random.default_rng(size)
    layout = {"raw": Ring(6, (D,)), "blocks": Compressed(4, (D,), (D,), 4)}
    arrays = {name: allocate(kind, 1, 1, CONTEXT) for name, kind in layout.items()}
    rows, sinks = rng.standard_normal((1, CONTEXT, D), np.float32), rng.standard_normal(2).astype(np.float32)

    @jax.jit
    def step(arrays, rows, at, q):
        state = Sequences(layout, arrays, Chunk(at[None], jnp.array([size]), size, CONTEXT, jnp.array([0])))
        state["raw"].append(rows)
        state["blocks"].append(rows, lambda tokens, held, number: jnp.mean(tokens, axis=2))
        raw, blocks = state["raw"].rows(), state["blocks"].rows()
        return state.arrays, attend(q, Seen(raw, raw, 6), Seen(blocks, blocks), scale=0.5, sinks=sinks)

    for at in range(0, CONTEXT, size):
        q = rng.standard_normal((1, size, 2, D), np.float32)
        arrays, out = step(arrays, rows[:, at : at + size], jnp.int32(at), q)
        for t in range(size):
            n = at + t + 1
            older = rows[0, : n // 4 * 4].reshape(-1, 4, D).mean(1)
            both = np.concatenate([rows[0, max(0, n - 6) : n], older])[:, None]
            assert np.allclose(out[0, t], reference.attend(q[0, t], both, both, 0.5, sinks), **CLOSE)


def test_bfloat16_rows():
    """Scores and sums are float32: only the rows are rounded."""
    rng, layout = np.random.default_rng(0), {"k": Rows((2, D)), "v": Rows((2, V))}
    arrays = {name: allocate(kind, 1, 1, CONTEXT, jnp.bfloat16) for name, kind in layout.items()}
    k, v, q = (rng.standard_normal((1, 30, *shape), np.float32) for shape in ((2, D), (2, V), (4, D)))
    state = Sequences(layout, arrays, Chunk(jnp.array([0]), jnp.array([30]), 30, CONTEXT, jnp.array([0])))
    state["k"].append(k)
    state["v"].append(v)
    out = attend(q, Seen(state["k"].rows(), state["v"].rows()), scale=0.5)
    k, v = (np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32)) for x in (k, v))
    for t in range(30):
        assert np.allclose(out[0, t], reference.attend(q[0, t], k[0, : t + 1], v[0, : t + 1], 0.5), **CLOSE)


# Memory: compiled for the real block sizes, never run.


@pytest.fixture
def real(monkeypatch):
    monkeypatch.undo()


def compiled(layout, compute, size, context, banks=1, dtype=jnp.float32, layers=4):
    """A loop over layers that hands each layer's result to the next, over donated state: (the program, bytes of the state)."""
    arrays = jax.eval_shape(lambda: {name: allocate(kind, layers, banks, context, dtype) for name, kind in layout.items()})

    def program(arrays, x, lengths, valid, slots):
        def layer(l, carry):
            x, arrays = carry
            state = Sequences(layout, arrays, Chunk(lengths, valid, size, context, slots), l)
            return compute(state, x), state.arrays

        return lax.fori_loop(0, layers, layer, (x, arrays))

    numbers = [jax.ShapeDtypeStruct((banks,), jnp.int32)] * 3
    x = jax.ShapeDtypeStruct((banks, size, 8, 64), jnp.float32)
    done = jax.jit(program, donate_argnums=0).lower(arrays, x, *numbers).compile()
    return done.memory_analysis(), sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(arrays))


def dense(window=None):
    def compute(state, x):
        state["k"].append(x[:, :, :2])
        state["v"].append(x[:, :, 2:4])
        return attend(x, Seen(state["k"].rows(), state["v"].rows(), window), scale=0.1)

    return compute


def sparse(state, x):
    state["k"].append(x[:, :, :2])
    state["v"].append(x[:, :, 2:4])
    state["index"].append(x[:, :, 0])
    chosen = choose(x, x[..., 0], state["index"].rows(), 512)
    return attend(x, Seen(state["k"].rows(), state["v"].rows(), chosen=chosen), scale=0.1)


PAIRS = {"k": Rows((2, 64)), "v": Rows((2, 64))}


@pytest.mark.parametrize("layout, compute", [(PAIRS, dense()), (PAIRS | {"index": Rows((64,))}, sparse)], ids=["all", "chosen"])
def test_prefill_holds_no_scores_of_all_rows(real, layout, compute):
    """1024 tokens over 32768: one float per query, row and head would be 1 GB, one byte per query and row 32 MB."""
    memory, held = compiled(layout, compute, 1024, 32768)
    assert memory.temp_size_in_bytes < 32 << 20 and memory.alias_size_in_bytes == held


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("banks", [1, 4])
def test_decode_copies_no_rows_but_a_block(real, banks, dtype):
    """A layer's rows of one bank are 16 MB; the state is written and read in place."""
    for layout, compute in ((PAIRS, dense()), (PAIRS | {"index": Rows((64,))}, sparse)):
        memory, held = compiled(layout, compute, 1, 32768, banks, dtype)
        assert memory.temp_size_in_bytes < banks * (4 << 20) and memory.alias_size_in_bytes == held


def test_a_window_is_all_that_is_read(real):
    """A ring's rows, and of the chunk's own only the blocks that the window reaches: no more memory at any size of context."""
    ring = {"k": Ring(128, (2, 64)), "v": Ring(128, (2, 64))}
    memory, held = compiled(ring, dense(128), 1024, 1 << 20)
    assert held == 2 * 4 * 128 * 128 * 4 and memory.temp_size_in_bytes < 24 << 20
