"""State of many sequences on the device: the components of :mod:`ds4ref.state`, one bank axis in front, static shapes.

``allocate`` makes the arrays; :class:`Sequences` is what a family's ``forward`` sees while it is traced. A call advances
every bank by a chunk of T tokens, of which the first ``valid[b]`` are real; the rest is padding that changes nothing, and a
bank with none is idle. As in ds4ref a layer *appends* its rows and *then* reads. What it reads is a :class:`View`, which
copies nothing until some of its rows are asked for, and knows the position of each; a negative one marks a row that holds
nothing.

Layers of a kind are stacked: each array has a leading layer axis [R, B, …], and ``layer`` (a number or a traced index) says
which entry is meant. The axis of the rows comes second to last, behind the heads': rows of shape [G, d] are [R, B, G, S, d].

Letters: R stacked layers, B banks, T tokens of a chunk, C context, S rows of a view, N rows read at once, G heads, W window,
r compression ratio.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ds4ref import state as kinds


def allocate(kind, layers, banks, context, dtype=jnp.float32):
    """Zeroed arrays of one component for ``layers`` stacked layers and ``banks`` sequences of up to ``context`` tokens.

    dtype: of rows, float32 or bfloat16; what every token changes is float32 always.
    """
    dtype = _stored(dtype)

    def rows(count, shape):
        return jnp.zeros((layers, banks, *shape[:-1], count, shape[-1]), dtype)

    match kind:
        case kinds.Rows(shape):
            return {"rows": rows(context, shape)}
        case kinds.Ring(window, shape):
            return {"rows": rows(min(window, context), shape)}
        case kinds.Recurrent(shape):
            return {"value": jnp.zeros((layers, banks, *shape), jnp.float32)}
        case kinds.Compressed(ratio, shape, pending, span):
            return {"blocks": rows(max(1, context // ratio), shape), "pending": rows(span, pending)}
    raise TypeError(f"unknown component kind {kind!r}")


@dataclass(frozen=True)
class Chunk:
    """Which banks take part and where each stands: banks [B] (numbers of slots in the state), lengths [B] before this call,
    valid [B] ≤ size; bucket: how many rows of the past are read, at least the longest length after the call.

    ``banks`` None: all slots, in order. A number out of range: an idle bank, whose reads mean nothing and writes are dropped;
    where there is one bank only, it is a real one. origin: position [B] of each sequence's first token, where that is not 0:
    a drafter's may begin midway. Rows, windows and masks count from there.
    """

    lengths: jnp.ndarray
    valid: jnp.ndarray
    size: int
    bucket: int
    banks: jnp.ndarray | None = None
    origin: jnp.ndarray | None = None

    @property
    def positions(self):
        """Number of every token of the chunk in its sequence, int32 [B, T]."""
        return self.lengths[:, None] + jnp.arange(self.size, dtype=jnp.int32)

    @property
    def live(self):
        """Which tokens are real, bool [B, T]."""
        return jnp.arange(self.size, dtype=jnp.int32) < self.valid[:, None]


@dataclass(frozen=True)
class View:
    """Rows 0 … count − 1 that a layer may attend to, in an array [R, B, …, ≥ count, d] that is only read when asked.

    Row j is of the ``step`` tokens up to position ``first[b] + step · (j + 1) − 1``; where ``positions_of`` is given, that
    function of row numbers [N] says each row's position [B, N] instead, and the rows are those of a ring.
    """

    array: jnp.ndarray
    layer: jnp.ndarray | int
    chunk: Chunk
    count: int
    first: jnp.ndarray | int = 0
    step: int = 1
    positions_of: Callable | None = None

    @property
    def shape(self):
        """[B, …, S, d], as if all rows were read."""
        return (len(self.chunk.lengths), *self.array.shape[2:-2], self.count, self.array.shape[-1])

    def read(self, start, count):
        """Rows start … start + count − 1 of every bank, float32 [B, …, N, d]."""
        return _widened(_slices(self.array, self.layer, self.chunk, start, count))

    def rows(self):
        """All rows, float32 [B, …, S, d]."""
        return self.read(0, self.count)

    def gather(self, index):
        """Rows of numbers index int32 [B, N] within range, float32 [B, …, N, d]."""
        banks = _banks(self.array, self.chunk)[:, None]
        middle = (slice(None),) * (self.array.ndim - 4)
        rows = self.array.at[(self.layer, banks, *middle, index)].get(mode="clip")  # [B, N, …, d]
        return _widened(jnp.moveaxis(rows, 1, -2))

    def positions(self, index):
        """Position of rows index [N] or [B, N] → int32 [B, N]."""
        if self.positions_of is not None:
            return self.positions_of(index)
        first = jnp.broadcast_to(jnp.asarray(self.first, jnp.int32), self.chunk.lengths.shape)
        return first[:, None] + self.step * (index + 1) - 1

    def reach(self, start, tokens, window=None):
        """Range of rows that hold all that any real one of the chunk's tokens start … start + tokens − 1 sees: (from, to)."""
        chunk, last = self.chunk, jnp.minimum(start + tokens, self.chunk.valid)
        if self.positions_of is not None:  # a ring, whose slots are first taken in order
            held = jnp.where(last > start, chunk.lengths + last, 0)
            return jnp.int32(0), jnp.minimum(jnp.max(held), self.count)
        end = jnp.where(last > start, (chunk.lengths + last - self.first) // self.step, 0)
        oldest = 0 if window is None else chunk.lengths + start + 1 - window - self.first
        begin = jnp.where(last > start, jnp.maximum(oldest, 0) // self.step, self.count)
        return jnp.min(begin), jnp.minimum(jnp.max(end), self.count)

    def grouped(self, size, make):
        """A view of every ``size`` rows made into one: make(rows [B, N, size, d], their numbers [N]) → [B, N, d']."""
        return Grouped(self, size, make)


@dataclass(frozen=True)
class Grouped:
    """What :meth:`View.grouped` gives: the complete groups of rows of a view of one row per position."""

    view: View
    step: int
    make: Callable

    @property
    def chunk(self):
        return self.view.chunk

    @property
    def count(self):
        return self.view.count // self.step

    def read(self, start, count):
        """Rows of groups start … start + count − 1, [B, N, d']."""
        rows = self.view.read(start * self.step, count * self.step)
        return self.make(rows.reshape(len(rows), count, self.step, -1), start + jnp.arange(count, dtype=jnp.int32))

    def positions(self, index):
        """Position of the last token of groups index [N] → int32 [B, N]."""
        return jnp.broadcast_to(self.step * (index + 1) - 1, (len(self.chunk.lengths), len(index)))

    def reach(self, start, tokens):
        begin, end = self.view.reach(start, tokens)
        return begin // self.step, jnp.minimum(end // self.step, self.count)


def visible(view, index, positions, window=None):
    """Which of the rows index [N] or [B, N] of a view each query sees: bool [B, T, N].

    positions: [B, T] of the queries; the window includes the query.
    """
    row, query = view.positions(index)[:, None, :], positions[:, :, None]
    mask = (row >= 0) & (row <= query)
    return mask if window is None else mask & (row > query - window)


class Sequences:
    """The components during one traced call. ``state[name]`` is a component with ``append`` and ``rows`` as in ds4ref.

    arrays: component name → array name → [R, B, …]; ``layer`` as above. After the call ``arrays`` holds the new state.

    On *trial* the tokens may be taken back: what cannot be truncated stays as it was, and ``tried`` holds, by component and
    array name, what :mod:`ds4jax.trials` needs to write it later: of rings the chunk's rows [B, …, T, d], of ``Recurrent`` the
    value after every token [T, B, …].
    """

    def __init__(self, layout, arrays, chunk, layer=0, trial=False):
        self.layout, self.arrays, self.chunk, self.layer, self.trial = layout, dict(arrays), chunk, layer, trial
        self.appended = {}  # of rings: (rows before this chunk, the chunk's own), by component name
        self.tried = {}

    def __getitem__(self, name):
        return _COMPONENTS[type(self.layout[name])](self, name)

    @property
    def positions(self):
        """Position of every token of the chunk, int32 [B, T]."""
        chunk = self.chunk
        return chunk.positions if chunk.origin is None else chunk.positions + chunk.origin[:, None]


class _Component:
    def __init__(self, owner, name):
        self._owner, self._name = owner, name
        self.kind, self.chunk = owner.layout[name], owner.chunk

    def _array(self, name):
        return self._owner.arrays[self._name][name]

    def _replace(self, name, array):
        self._owner.arrays[self._name] = self._owner.arrays[self._name] | {name: array}

    def _read(self, name):
        """All of this layer's array for the banks of the chunk, float32 [B, …]."""
        return _widened(_slices(self._array(name), self._owner.layer, self.chunk))

    def _held(self, name, rows):
        """A chunk's rows [B, T, *shape] as they will be read from the state later, float32 [B, …, T, d]."""
        return _widened(_narrowed(jnp.moveaxis(rows, 1, -2), self._array(name).dtype))

    def _view(self, name, count, **place):
        return View(self._array(name), self._owner.layer, self.chunk, count, **place)

    def _write(self, name, values, starts=None, kept=None):
        """Put values [B, …, N, d] at rows starts[b] … of every bank, but only those that ``kept`` [B, N] names.

        Without ``starts`` the values are whole arrays [B, …]. One slice a bank is written in place.
        """
        array, layer, banks = self._array(name), self._owner.layer, _banks(self._array(name), self.chunk)
        values = _narrowed(values, array.dtype)
        idle = None if self.chunk.banks is None or len(banks) == 1 else self.chunk.banks >= array.shape[1]

        def write(b, array):
            at = [layer, banks[b], *[0] * (array.ndim - 2)]
            if starts is not None:
                at[-2] = starts[b]
            value = values[b][None, None]
            keep = None if kept is None else kept[b][:, None]
            if idle is not None:
                keep = ~idle[b] & (True if keep is None else keep)
            if keep is not None:
                value = jnp.where(keep, value, lax.dynamic_slice(array, at, value.shape))
            return lax.dynamic_update_slice(array, value, at)

        # A loop, since XLA copies the whole array between unrolled slices of it that are read and written.
        self._replace(name, write(0, array) if len(banks) == 1 else lax.fori_loop(0, len(banks), write, array))

    def _write_ring(self, name, before, rows):
        """Put the chunk's rows [B, …, T, d] into their slots of a ring that held ``before`` [B, …, W, d]."""
        chunk, slots = self.chunk, before.shape[-2]
        if self._owner.trial:
            self._owner.tried[self._name] = {name: _narrowed(rows, self._array(name).dtype)}
            return None
        if chunk.size == 1:
            return self._write(name, rows, chunk.lengths % slots, chunk.live)
        column = ring_positions(chunk.lengths + chunk.valid, slots) - chunk.lengths[:, None]  # of the token that a slot holds
        own = _take(rows, jnp.clip(column, 0, chunk.size - 1))
        return self._write(name, jnp.where(_along(column >= 0, before), own, before))


class _Rows(_Component):
    def append(self, rows):
        """rows: [B, T, *shape]."""
        chunk, rows = self.chunk, jnp.moveaxis(rows, 1, -2)
        # A slice that would pass the end starts earlier, and its rows lie further back in it.
        starts = jnp.minimum(chunk.lengths, self._array("rows").shape[-2] - chunk.size)
        column = jnp.arange(chunk.size, dtype=jnp.int32) - (chunk.lengths - starts)[:, None]
        if chunk.size > 1:
            rows = _take(rows, jnp.maximum(column, 0))
        self._write("rows", rows, starts, (column >= 0) & (column < chunk.valid[:, None]))

    def rows(self):
        """Everything so far, this chunk included (up to the chunk's bucket)."""
        return self._view("rows", min(self.chunk.bucket, self._array("rows").shape[-2]))


class _Ring(_Component):
    def append(self, rows):
        """rows: [B, T, *shape]."""
        before, rows = self._read("rows"), self._held("rows", rows)
        self._owner.appended[self._name] = (before, rows)
        self._write_ring("rows", before, rows)

    def rows(self):
        """The window's rows before this chunk, then the chunk's own. One token's are all in the ring, in the order of slots."""
        chunk, slots = self.chunk, self._array("rows").shape[-2]
        if chunk.size == 1 and not self._owner.trial:
            held = chunk.lengths + chunk.valid
            return self._view("rows", slots, positions_of=lambda index: ring_positions(held, slots, index))
        rows = self._past(slots - 1)
        everything = Chunk(chunk.lengths, chunk.valid, chunk.size, chunk.bucket)
        return View(rows[None], 0, everything, rows.shape[-2], first=chunk.lengths - (slots - 1))

    def history(self, count):
        """The ``count`` rows before this chunk in position order, zero where there are none, then its own: [B, N, …]."""
        return jnp.moveaxis(self._past(count), -2, 1)

    def _past(self, count):
        before, rows = self._owner.appended[self._name]
        positions = self.chunk.lengths[:, None] + jnp.arange(-count, 0, dtype=jnp.int32)
        past = _take(before, positions % before.shape[-2])
        past = jnp.where(_along(positions >= 0, past), past, 0)
        return jnp.concatenate([past, rows], axis=-2)


class _Recurrent(_Component):
    def update(self, advance, *inputs):
        """Set every bank's value to what ``advance(value, *inputs)`` returns first, and return what it returns second.

        Everything has the banks as its first axis; ``advance`` gets one at a time, [1, …], so that its value is read and
        written where it lies. For an idle bank it must return the value that it got: a number beyond the end stands for the
        last bank. On trial it gets all banks and one token at a time, and the inputs have the tokens as their second axis.
        """
        if self._owner.trial:
            return self._try(advance, inputs)
        whole = self._array("value")
        banks = _banks(whole, self.chunk)
        places = self._owner.layer * whole.shape[1] + banks

        def row(b, values, *inputs):
            # With as many axes as the stack of a single bank has, XLA:CPU copies the value once for both its readers.
            value = lax.optimization_barrier(lax.dynamic_slice_in_dim(values, places[b], 1)[:, None])
            value, out = jax.vmap(advance)(value, *(x[None] for x in inputs))
            return lax.dynamic_update_slice_in_dim(values, value[:, 0], places[b], 0), out[0]

        def next_row(b, carry):
            values, outs = carry
            values, out = row(b, values, *(lax.dynamic_slice_in_dim(x, b, 1) for x in inputs))
            return values, lax.dynamic_update_slice_in_dim(outs, out, b, 0)

        values = whole.reshape(-1, *whole.shape[2:])
        if len(banks) == 1:
            values, outs = row(0, values, *inputs)
        else:
            made = jax.eval_shape(lambda: row(0, values, *(x[:1] for x in inputs))[1])
            outs = jnp.zeros((len(banks), *made.shape[1:]), made.dtype)
            values, outs = lax.fori_loop(0, len(banks), next_row, (values, outs))
        self._replace("value", values.reshape(whole.shape))
        return outs

    def _try(self, advance, inputs):
        def token(value, now):
            value, out = advance(value, *(x[:, None] for x in now))
            return value, (value, out[:, 0])

        _, (values, outs) = lax.scan(token, self._read("value"), [jnp.moveaxis(x, 1, 0) for x in inputs])
        self._owner.tried[self._name] = {"value": values}
        return jnp.moveaxis(outs, 0, 1)


class _Compressed(_Component):
    def append(self, rows, compress):
        """Take token rows [B, T, *pending]; store ``compress(token rows, held, block index)`` for every block they complete.

        compress gets the token rows [B, N, span, *pending] of N candidate blocks, which of them exist (bool [B, N, span])
        and the block numbers [B, N]; it returns [B, N, *shape].
        """
        r, span, chunk = self.kind.ratio, self.kind.span, self.chunk
        before, rows = self._read("pending"), self._held("pending", rows)
        slots = self._array("blocks").shape[-2]
        count = min(-(-chunk.size // r), slots)
        # As for Rows: a slice of the array of blocks must not pass its end.
        starts = jnp.minimum(chunk.lengths // r, slots - count)
        block = starts[:, None] + jnp.arange(count, dtype=jnp.int32)
        position = block[..., None] * r + jnp.arange(r - span, r, dtype=jnp.int32)
        start = chunk.lengths[:, None, None]
        index = jnp.where(position < start, position % span, span + position - start)
        both = jnp.concatenate([before, rows], axis=-2)
        flat = jnp.clip(index, 0, both.shape[-2] - 1).reshape(len(both), -1)
        tokens = jnp.moveaxis(_take(both, flat), -2, 1).reshape(*index.shape, *self.kind.pending)
        made = compress(tokens, position >= 0, block)
        done = ((block + 1) * r > chunk.lengths[:, None]) & ((block + 1) * r <= (chunk.lengths + chunk.valid)[:, None])
        self._write("blocks", jnp.moveaxis(made, 1, -2), starts, done)
        self._write_ring("pending", before, rows)

    def rows(self):
        """Rows of the blocks so far."""
        count = min(max(1, self.chunk.bucket // self.kind.ratio), self._array("blocks").shape[-2])
        return self._view("blocks", count, step=self.kind.ratio)


_COMPONENTS = {kinds.Rows: _Rows, kinds.Ring: _Ring, kinds.Recurrent: _Recurrent, kinds.Compressed: _Compressed}


def ring_positions(lengths, slots, index=None):
    """Position that each of ``slots``, or of those of ``index``, holds after ``lengths`` [B] tokens; negative where it holds
    none. → [B, slots]"""
    last = lengths[:, None] - 1
    return last - (last - (jnp.arange(slots, dtype=jnp.int32) if index is None else index)) % slots


def _banks(array, chunk):
    """Slots of the chunk's banks, those out of range clipped into it."""
    return jnp.arange(array.shape[1]) if chunk.banks is None else jnp.minimum(chunk.banks, array.shape[1] - 1)


def _slices(array, layer, chunk, start=0, count=None):
    """Of an array [R, B', …, S, d] one layer's rows start … start + count − 1 for every bank of a chunk: [B, …, N, d]."""
    size = list(array.shape[1:])
    at = [0] * len(size)
    if count is not None:
        size[-2], at[-2] = count, start
    if chunk.banks is None:
        return lax.dynamic_slice(array, (layer, *at), (1, *size))[0]
    parts = [lax.dynamic_slice(array, (layer, bank, *at[1:]), (1, 1, *size[1:]))[0] for bank in _banks(array, chunk)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


# XLA on CPUs computes with bfloat16 in float32, and so would widen a whole array to write or read one slice of it. As
# integers the bits are left alone.


def _stored(dtype):
    """The dtype of the arrays that hold rows of ``dtype``."""
    return jnp.dtype(jnp.uint16 if dtype == jnp.bfloat16 else dtype)


def _narrowed(values, stored):
    """Values as an array of dtype ``stored`` holds them."""
    return lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16) if stored == jnp.uint16 else values.astype(stored)


def _widened(held):
    """What an array of rows holds, as float32."""
    return lax.bitcast_convert_type(held.astype(jnp.uint32) << 16, jnp.float32) if held.dtype == jnp.uint16 else held


def _along(index, rows):
    """index [B, N] with axes of one so that it lies along the rows of [B, …, N, d]."""
    return index.reshape(len(index), *(1,) * (rows.ndim - 3), -1, 1)


def _take(rows, index):
    """Rows index [B, N] of rows [B, …, S, d] → [B, …, N, d]."""
    return jnp.take_along_axis(rows, _along(index, rows), axis=-2)


# Snapshots: the arrays of ds4ref.state for one bank, so that they cross backends.


def to_snapshot(layout, arrays, bank, length):
    """ds4ref's component arrays (NumPy) of one bank. arrays: component name → array name → [B, …] of one layer, all of a
    component's or some."""
    return {
        name: {key: _taken(kind, key, np.asarray(_widened(value[bank])), length) for key, value in arrays[name].items()}
        for name, kind in layout.items()
    }


def _taken(kind, key, held, length):
    if isinstance(kind, kinds.Recurrent):
        return held
    rows = np.moveaxis(held, -2, 0)
    if key == "blocks":
        return np.array(rows[: length // kind.ratio], order="C")
    if isinstance(kind, kinds.Rows):
        return np.array(rows[:length], order="C")
    most = kind.window if isinstance(kind, kinds.Ring) else kind.span
    return np.array(rows[np.arange(length - min(length, most), length) % len(rows)], order="C")


def from_snapshot(layout, components, length, context, dtype=np.float32):
    """What :func:`allocate` has for one bank and layer, in NumPy, from ds4ref's component arrays; the inverse of
    :func:`to_snapshot`. dtype: of rows, as there."""
    out = {}
    for name, kind in layout.items():
        held = components[name]
        filled = {key: np.zeros(value.shape[2:], value.dtype) for key, value in allocate_shapes(kind, context, dtype).items()}
        if isinstance(kind, kinds.Recurrent):
            filled["value"][...] = held["value"]
        else:
            for key, rows in held.items():
                into = np.moveaxis(filled[key], -2, 0)
                ring = isinstance(kind, kinds.Ring) or key == "pending"
                index = np.arange(length - len(rows), length) % len(into) if ring else np.arange(len(rows))
                into[index] = np.asarray(_narrowed(jnp.asarray(rows), into.dtype))
        out[name] = filled
    return out


@cache
def allocate_shapes(kind, context, dtype=np.float32):
    """Shapes that :func:`allocate` gives for one layer and one bank, without allocating: array name → ShapeDtypeStruct."""
    return jax.eval_shape(lambda: allocate(kind, 1, 1, context, dtype))
