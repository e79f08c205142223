"""State of many sequences on the device: the components of :mod:`ds4ref.state`, one bank axis in front, static shapes.

``allocate`` makes the arrays; :class:`Sequences` is what a family's ``forward`` sees while it is traced. A call advances
every bank by a chunk of T tokens, of which the first ``valid[b]`` are real; the rest is padding that changes nothing, and a
bank with none is idle. As in ds4ref a layer *appends* its rows and *then* reads. What it reads is a :class:`View`: rows and
the position of each, from which :func:`visible` makes the mask. A position of −1 marks a slot that holds nothing.

Layers of a kind are stacked: each array has a leading layer axis [R, B, …], and ``layer`` (a number or a traced index) says
which entry is meant.

Letters: R stacked layers, B banks, T tokens of a chunk, C context, S rows read, W window, r compression ratio.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ds4ref import state as kinds

from . import primitives


def allocate(kind, layers, banks, context, dtype=jnp.float32):
    """Zeroed arrays of one component for ``layers`` stacked layers and ``banks`` sequences of up to ``context`` tokens."""
    match kind:
        case kinds.Rows(shape):
            return {"rows": jnp.zeros((layers, banks, context, *shape), dtype)}
        case kinds.Ring(window, shape):
            return {"rows": jnp.zeros((layers, banks, min(window, context), *shape), dtype)}
        case kinds.Recurrent(shape):
            return {"value": jnp.zeros((layers, banks, *shape), dtype)}
        case kinds.Compressed(ratio, shape, pending, span):
            blocks = jnp.zeros((layers, banks, max(1, context // ratio), *shape), dtype)
            return {"blocks": blocks, "pending": jnp.zeros((layers, banks, span, *pending), dtype)}
    raise TypeError(f"unknown component kind {kind!r}")


class View(NamedTuple):
    """Rows that a layer may attend to: rows [B, S, …], positions int32 [B, S] (of a block: its last token's)."""

    rows: jnp.ndarray
    positions: jnp.ndarray


@dataclass(frozen=True)
class Chunk:
    """Which banks take part and where each stands: banks [B] (numbers of slots in the state), lengths [B] before this call,
    valid [B] ≤ size; bucket: how many rows of the past are read, at least the longest length after the call.

    ``banks`` None: all slots, in order.
    """

    lengths: jnp.ndarray
    valid: jnp.ndarray
    size: int
    bucket: int
    banks: jnp.ndarray | None = None

    @property
    def positions(self):
        """Position of every token of the chunk, int32 [B, T]."""
        return self.lengths[:, None] + jnp.arange(self.size, dtype=jnp.int32)

    @property
    def live(self):
        """Which tokens are real, bool [B, T]."""
        return jnp.arange(self.size, dtype=jnp.int32) < self.valid[:, None]


class Sequences:
    """The components during one traced call. ``state[name]`` is a component with ``append`` and ``rows`` as in ds4ref.

    arrays: component name → array name → [R, B, …]; ``layer`` as above. After the call ``arrays`` holds the new state.
    """

    def __init__(self, layout, arrays, chunk, layer=0):
        self.layout, self.arrays, self.chunk, self.layer = layout, dict(arrays), chunk, layer
        self.appended = {}  # of rings: (rows before this chunk, the chunk's own), by component name

    def __getitem__(self, name):
        return _COMPONENTS[type(self.layout[name])](self, name)

    @property
    def positions(self):
        return self.chunk.positions


class _Component:
    def __init__(self, owner, name):
        self._owner, self._name = owner, name
        self.kind, self.chunk = owner.layout[name], owner.chunk

    def _read(self, array, upto=None):
        """This layer's array for the banks of the chunk, [B, …]; of a long one only the first ``upto`` entries."""
        whole = self._owner.arrays[self._name][array]
        if upto is not None and upto < whole.shape[2]:
            starts = (self._owner.layer, *(0,) * (whole.ndim - 1))
            layer = lax.dynamic_slice(whole, starts, (1, whole.shape[1], upto, *whole.shape[3:]))[0]
        else:
            layer = lax.dynamic_index_in_dim(whole, self._owner.layer, 0, keepdims=False)
        return layer if self.chunk.banks is None else jnp.take(layer, self.chunk.banks, axis=0, mode="clip")

    def _banks(self):
        whole = next(iter(self._owner.arrays[self._name].values()))
        return jnp.arange(whole.shape[1]) if self.chunk.banks is None else self.chunk.banks

    def _write(self, array, index, rows):
        """Set rows [B, N, …] at ``index`` [B, N] of this layer; indices beyond the end are dropped."""
        whole = self._owner.arrays[self._name]
        written = primitives.put_rows(whole[array], self._owner.layer, self._banks(), index, rows)
        self._owner.arrays[self._name] = whole | {array: written}

    def _store(self, array, value):
        whole = self._owner.arrays[self._name]
        written = primitives.put_value(whole[array], self._owner.layer, self._banks(), value)
        self._owner.arrays[self._name] = whole | {array: written}


class _Rows(_Component):
    def append(self, rows):
        """rows: [B, T, *shape]."""
        beyond = self._owner.arrays[self._name]["rows"].shape[2]
        self._write("rows", jnp.where(self.chunk.live, self.chunk.positions, beyond), rows)

    def rows(self):
        """Everything so far, this chunk included (up to the chunk's bucket)."""
        rows = self._read("rows", self.chunk.bucket)
        positions = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32), rows.shape[:2])
        return View(rows, positions)


class _Ring(_Component):
    def __init__(self, owner, name):
        super().__init__(owner, name)
        self.slots = owner.arrays[name]["rows"].shape[2]

    def append(self, rows):
        """rows: [B, T, *shape]."""
        before = self._read("rows")
        self._owner.appended[self._name] = (before, rows)
        self._write("rows", ring_index(self.chunk, self.slots), rows)

    def rows(self):
        """The window's rows before this chunk (in slot order), then the chunk's own."""
        before, rows = self._owner.appended[self._name]
        chunk = self.chunk
        positions = jnp.concatenate([ring_positions(chunk.lengths, self.slots), chunk.positions], axis=1)
        return View(jnp.concatenate([before, rows.astype(before.dtype)], axis=1), positions)

    def history(self, count):
        """The ``count`` rows before this chunk in position order, zero where there are none, then the chunk's own."""
        before, rows = self._owner.appended[self._name]
        positions = self.chunk.lengths[:, None] + jnp.arange(-count, 0, dtype=jnp.int32)
        past = jnp.take_along_axis(before, _expand(positions % self.slots, before.ndim), axis=1)
        past = jnp.where(_expand(positions >= 0, past.ndim), past, 0)
        return jnp.concatenate([past, rows.astype(before.dtype)], axis=1)


class _Recurrent(_Component):
    @property
    def value(self):
        """[B, *shape]."""
        return self._read("value")

    def replace(self, value):
        self._store("value", value)


class _Compressed(_Component):
    def append(self, rows, compress):
        """Take token rows [B, T, *pending]; store ``compress(token rows, held, block index)`` for every block they complete.

        compress gets the token rows [B, N, span, *pending] of N candidate blocks, which of them exist (bool [B, N, span])
        and the block numbers [B, N]; it returns [B, N, *shape].
        """
        r, span, chunk = self.kind.ratio, self.kind.span, self.chunk
        before = self._read("pending")
        count = -(-chunk.size // r)
        block = chunk.lengths[:, None] // r + jnp.arange(count, dtype=jnp.int32)
        position = block[..., None] * r + jnp.arange(r - span, r, dtype=jnp.int32)
        start = chunk.lengths[:, None, None]
        index = jnp.where(position < start, position % span, span + position - start)
        both = jnp.concatenate([before, rows.astype(before.dtype)], axis=1)
        flat = jnp.clip(index, 0, both.shape[1] - 1).reshape(len(both), -1)
        tokens = jnp.take_along_axis(both, _expand(flat, both.ndim), axis=1).reshape(*index.shape, *self.kind.pending)
        made = compress(tokens, position >= 0, block)
        done = (block + 1) * r <= (chunk.lengths + chunk.valid)[:, None]
        beyond = self._owner.arrays[self._name]["blocks"].shape[2]
        self._write("blocks", jnp.where(done, block, beyond), made)
        self._write("pending", ring_index(chunk, span), rows)

    def rows(self):
        """Rows of the blocks so far."""
        rows = self._read("blocks", max(1, self.chunk.bucket // self.kind.ratio))
        ends = (jnp.arange(rows.shape[1], dtype=jnp.int32) + 1) * self.kind.ratio - 1
        return View(rows, jnp.broadcast_to(ends, rows.shape[:2]))


_COMPONENTS = {kinds.Rows: _Rows, kinds.Ring: _Ring, kinds.Recurrent: _Recurrent, kinds.Compressed: _Compressed}


def ring_positions(lengths, slots):
    """Position that each of ``slots`` holds after ``lengths`` [B] tokens; negative where it holds none. → [B, slots]"""
    last = lengths[:, None] - 1
    return last - (last - jnp.arange(slots, dtype=jnp.int32)) % slots


def ring_index(chunk, slots):
    """Slot of every token of the chunk, or ``slots`` (dropped) for padding and for rows that a later one overwrites."""
    column = jnp.arange(chunk.size, dtype=jnp.int32)
    kept = chunk.live & (column >= chunk.valid[:, None] - slots)
    return jnp.where(kept, chunk.positions % slots, slots)


def visible(view, positions, window=None):
    """Which rows of a view each query sees: bool [B, T, S]. positions: [B, T] of the queries; window includes the query."""
    row, query = view.positions[:, None, :], positions[:, :, None]
    mask = (row >= 0) & (row <= query)
    return mask if window is None else mask & (row > query - window)


def _expand(index, ndim):
    return index.reshape(*index.shape, *(1,) * (ndim - index.ndim))


# Snapshots: the arrays of ds4ref.state for one bank, so that they cross backends.


def to_snapshot(layout, arrays, bank, length):
    """ds4ref's component arrays (NumPy) of one bank. arrays: component name → array name → [B, …] of one layer."""
    out = {}
    for name, kind in layout.items():
        held = {key: np.asarray(value[bank]) for key, value in arrays[name].items()}
        match kind:
            case kinds.Rows():
                out[name] = {"rows": held["rows"][:length]}
            case kinds.Ring(window):
                out[name] = {"rows": _in_order(held["rows"], length, min(length, window))}
            case kinds.Recurrent():
                out[name] = {"value": held["value"]}
            case kinds.Compressed(ratio, _, _, span):
                pending = _in_order(held["pending"], length, min(length, span))
                out[name] = {"blocks": held["blocks"][: length // ratio], "pending": pending}
    return out


def from_snapshot(layout, components, length, context, dtype=np.float32):
    """NumPy arrays [slots, …] of one bank and layer from ds4ref's component arrays; the inverse of :func:`to_snapshot`."""
    out = {}
    for name, kind in layout.items():
        held = components[name]
        shapes = {key: value.shape[2:] for key, value in allocate_shapes(kind, context).items()}
        filled = {key: np.zeros(shape, dtype) for key, shape in shapes.items()}
        if isinstance(kind, kinds.Recurrent):
            filled["value"][...] = held["value"]
        else:
            for key, rows in held.items():
                ring = isinstance(kind, kinds.Ring) or key == "pending"
                index = np.arange(length - len(rows), length) % len(filled[key]) if ring else np.arange(len(rows))
                filled[key][index] = rows
        out[name] = filled
    return out


def allocate_shapes(kind, context):
    """Shapes that :func:`allocate` gives for one layer and one bank, without allocating: array name → ShapeDtypeStruct."""
    import jax

    return jax.eval_shape(lambda: allocate(kind, 1, 1, context))


def _in_order(slots, length, count):
    return slots[np.arange(length - count, length) % len(slots)]
