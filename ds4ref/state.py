"""What a sequence keeps between tokens: a token history and named components of four kinds.

A family declares its components once (``layout(config)``: name → kind); this module stores them. Everything that reuse,
rollback and snapshots need follows from the kinds, so no family writes code for it:

=================  ====================================  ================================  =====================
kind               keeps                                 truncate to n                     a prefix is copied
=================  ====================================  ================================  =====================
``Rows``           one row per position                  always                            always
``Ring(w)``        the last w rows                       while the w − 1 rows before n     with a checkpoint
                                                         are still held
``Recurrent``      one value that every token changes    never (only to nothing)           with a checkpoint
``Compressed(r)``  one row per r positions, and the      while the token rows that the     with a checkpoint
                   token rows of the open block          open block needs are still held
=================  ====================================  ================================  =====================

Whoever tries tokens that may have to be taken back (drafts) takes a checkpoint before them and rewinds to it.

A step appends its own row and then reads, so a window of w positions that includes the newest is a ``Ring(w)``, and a
convolution of K taps is a ``Ring(K)``. Dropping the newest token is therefore always possible except for ``Recurrent``.

Kinds are plain descriptions (shapes and sizes): another backend allocates its own arrays from them. The classes below
the kinds are the NumPy storage. Reads return freshly gathered or contiguous arrays in position order, so that what a
family computes does not depend on how the state came about.
"""

from dataclasses import dataclass, field
from math import prod

import numpy as np


@dataclass(frozen=True)
class Rows:
    """One row of ``shape`` per position."""

    shape: tuple[int, ...]

    def values(self, context):
        """Numbers held at ``context`` positions."""
        return context * prod(self.shape)

    def new(self, dtype):
        return _Rows(self, dtype)


@dataclass(frozen=True)
class Ring:
    """The rows of ``shape`` of the last ``window`` positions, the newest included."""

    window: int
    shape: tuple[int, ...]

    def values(self, context):
        return min(context, self.window) * prod(self.shape)

    def new(self, dtype):
        return _Ring(self, dtype)


@dataclass(frozen=True)
class Recurrent:
    """One array of ``shape``, zero at the start, replaced at every token."""

    shape: tuple[int, ...]

    def values(self, context):
        return prod(self.shape)

    def new(self, dtype):
        return _Recurrent(self, dtype)


@dataclass(frozen=True)
class Compressed:
    """One row of ``shape`` per complete block of ``ratio`` positions, made from token rows of ``pending``.

    ``span`` token rows are held (a multiple of ratio; more than one block where blocks overlap).
    """

    ratio: int
    shape: tuple[int, ...]
    pending: tuple[int, ...]
    span: int

    def values(self, context):
        return context // self.ratio * prod(self.shape) + min(context, self.span) * prod(self.pending)

    def new(self, dtype):
        return _Compressed(self, dtype)


class _Rows:
    def __init__(self, kind, dtype):
        self.kind = kind
        self.length = 0
        self._data = np.empty((0, *kind.shape), dtype)

    def append(self, row):
        if self.length == len(self._data):
            grown = np.empty((max(16, 2 * self.length), *self.kind.shape), self._data.dtype)
            grown[: self.length] = self._data
            self._data = grown
        self._data[self.length] = row
        self.length += 1

    def rows(self):
        """All rows, [length, *shape]."""
        return self._data[: self.length]

    def can_truncate(self, n):
        return n <= self.length

    def truncate(self, n):
        self.length = n

    def snapshot(self):
        return {"rows": self.rows().copy()}

    def restore(self, length, arrays):
        self._data = _checked(arrays, "rows", length, length, self.kind.shape, self._data.dtype)
        self.length = length

    def checkpoint(self):
        return {}

    def resume(self, length, arrays, source):
        self.restore(length, {"rows": source.rows()[:length]})

    def rewind(self, length, arrays):
        self.truncate(length)


class _Ring:
    def __init__(self, kind, dtype):
        self.kind = kind
        self.length = 0
        self._start = 0
        self._data = np.empty((0, *kind.shape), dtype)  # slots; grows up to the window

    def append(self, row):
        if self.length - self._start == len(self._data) < self.kind.window:
            self._fill(self.rows(), min(self.kind.window, max(16, 2 * len(self._data))))
        self._data[self.length % len(self._data)] = row
        self.length += 1
        self._start = max(self._start, self.length - self.kind.window)

    def _fill(self, rows, slots):
        """Hold ``rows``, which end at the current length, in so many slots."""
        self._data = np.empty((slots, *self.kind.shape), self._data.dtype)
        if slots:
            self._data[np.arange(self.length - len(rows), self.length) % slots] = rows

    def rows(self):
        """The held rows in position order, [≤ window, *shape]; the last is the newest."""
        return self._data[np.arange(self._start, self.length) % max(1, len(self._data))]

    def can_truncate(self, n):
        return n <= self.length and self._start <= max(0, n - self.kind.window + 1)

    def truncate(self, n):
        self.length = n
        self._start = min(self._start, n)

    def snapshot(self):
        return {"rows": self.rows()}

    def restore(self, length, arrays):
        # After a truncation one row fewer than the window may be held: that is a whole state too.
        self._restore(length, arrays, "rows", min(length, self.kind.window - 1))

    def checkpoint(self):
        return self.snapshot()

    def resume(self, length, arrays, source):
        self.restore(length, arrays)

    def rewind(self, length, arrays):
        self.restore(length, arrays)

    def _restore(self, length, arrays, name, least):
        rows = _checked(arrays, name, least, min(length, self.kind.window), self.kind.shape, self._data.dtype)
        self.length = length
        self._start = length - len(rows)
        self._fill(rows, len(rows))


class _Recurrent:
    def __init__(self, kind, dtype):
        self.kind = kind
        self.length = 0
        self.value = np.zeros(kind.shape, dtype)

    def replace(self, value):
        self.value = value
        self.length += 1

    def can_truncate(self, n):
        return n in (0, self.length)

    def truncate(self, n):
        if n < self.length:
            self.value = np.zeros_like(self.value)
        self.length = n

    def snapshot(self):
        return {"value": self.value.copy()}

    def restore(self, length, arrays):
        rows, *shape = self.kind.shape
        self.value = _checked(arrays, "value", rows, rows, tuple(shape), self.value.dtype)
        self.length = length

    def checkpoint(self):
        return self.snapshot()

    def resume(self, length, arrays, source):
        self.restore(length, arrays)

    def rewind(self, length, arrays):
        self.restore(length, arrays)


class _Compressed:
    def __init__(self, kind, dtype):
        self.kind = kind
        self._blocks = _Rows(Rows(kind.shape), dtype)
        self._pending = _Ring(Ring(kind.span, kind.pending), dtype)

    @property
    def length(self):
        return self._pending.length

    def append(self, row, compress):
        """Take the token's row; when it completes a block, store ``compress(token rows, block index)``.

        The rows handed over are those of the block, preceded by earlier ones as far as ``span`` reaches.
        """
        self._pending.append(row)
        if self.length % self.kind.ratio == 0:
            self._blocks.append(compress(self._pending.rows(), self._blocks.length))

    def rows(self):
        """Rows of all complete blocks, [length // ratio, *shape]."""
        return self._blocks.rows()

    def pending(self):
        """The token rows of the open block, [length % ratio, *pending]."""
        rows = self._pending.rows()
        return rows[len(rows) - self.length % self.kind.ratio :]

    def can_truncate(self, n):
        return n <= self.length and self._pending._start <= self._first_needed(n)

    def _first_needed(self, n):
        """The oldest position whose token row a sequence of n tokens still needs."""
        return max(0, n // self.kind.ratio * self.kind.ratio - (self.kind.span - self.kind.ratio))

    def truncate(self, n):
        self._blocks.truncate(n // self.kind.ratio)
        self._pending.truncate(n)

    def snapshot(self):
        return {"blocks": self._blocks.snapshot()["rows"], "pending": self._pending.rows()}

    def restore(self, length, arrays):
        self._pending._restore(length, arrays, "pending", length - self._first_needed(length))
        blocks = length // self.kind.ratio
        self._blocks._data = _checked(arrays, "blocks", blocks, blocks, self.kind.shape, self._blocks._data.dtype)
        self._blocks.length = blocks

    def checkpoint(self):
        return {"pending": self._pending.rows()}

    def resume(self, length, arrays, source):
        # A block depends on its own and earlier tokens only, so a longer sequence holds those of every prefix.
        self.restore(length, {**arrays, "blocks": source.rows()[: length // self.kind.ratio]})

    def rewind(self, length, arrays):
        self._pending._restore(length, arrays, "pending", length - self._first_needed(length))
        self._blocks.truncate(length // self.kind.ratio)


def _checked(arrays, name, least, most, shape, dtype):
    """``arrays[name]`` as a private copy, after its shape and dtype were found to be those of the component."""
    array = arrays.get(name)
    if array is None:
        raise ValueError(f"snapshot has no array {name!r}")
    if array.dtype != dtype:
        raise ValueError(f"snapshot array {name!r} holds {array.dtype}, this state holds {np.dtype(dtype)}")
    if array.shape[1:] != shape or not least <= len(array) <= most:
        count = str(most) if least == most else f"{least} to {most}"
        raise ValueError(f"snapshot array {name!r} has shape {array.shape}, expected {count} rows of {shape}")
    return array.copy()


@dataclass(frozen=True)
class Snapshot:
    """Everything a sequence needs to go on, as arrays that share nothing with it.

    tokens: int64 [T]; components: component name → array name → array; logits: [V] of the last token, or None.
    A *checkpoint* is one without the arrays that a longer sequence still holds (``State.checkpoint``).
    """

    tokens: np.ndarray
    components: dict[str, dict[str, np.ndarray]]
    logits: np.ndarray | None = None

    @property
    def nbytes(self):
        """Bytes of all arrays."""
        arrays = [self.tokens, *(array for arrays in self.components.values() for array in arrays.values())]
        return sum(array.nbytes for array in arrays) + (0 if self.logits is None else self.logits.nbytes)


@dataclass
class State:
    """One sequence. ``layout`` maps component names to kinds; all components stand at the same length between steps."""

    layout: dict[str, Rows | Ring | Recurrent | Compressed]
    dtype: type = np.float32
    tokens: list[int] = field(default_factory=list)
    logits: np.ndarray | None = None

    def __post_init__(self):
        self._components = {name: kind.new(self.dtype) for name, kind in self.layout.items()}

    def __getitem__(self, name):
        return self._components[name]

    @property
    def length(self):
        """Tokens consumed."""
        return len(self.tokens)

    def can_truncate(self, n):
        """Whether the sequence can be cut back to its first n tokens without recomputing anything."""
        return 0 <= n <= self.length and (n == 0 or all(c.can_truncate(n) for c in self._components.values()))

    def truncate(self, n):
        """Cut back to the first n tokens. ValueError, and no change, where a component no longer holds what n needs."""
        if n == self.length:
            return
        if not self.can_truncate(n):
            held = [name for name, c in self._components.items() if not c.can_truncate(n)]
            raise ValueError(f"cannot truncate {self.length} tokens to {n}: {held[0] if held else 'the length'} forbids it")
        if n == 0:
            self._components = {name: kind.new(self.dtype) for name, kind in self.layout.items()}
        else:
            for component in self._components.values():
                component.truncate(n)
        del self.tokens[n:]
        self.logits = None

    def snapshot(self):
        """A :class:`Snapshot` of this moment."""
        return self._taken({name: c.snapshot() for name, c in self._components.items()})

    def checkpoint(self):
        """A :class:`Snapshot` of this moment without what every longer sequence still holds: the rows of ``Rows`` and the
        complete blocks of ``Compressed``. ``resume`` takes those from such a sequence."""
        return self._taken({name: c.checkpoint() for name, c in self._components.items()})

    def _taken(self, components):
        return Snapshot(np.array(self.tokens, np.int64), components, None if self.logits is None else self.logits.copy())

    def restore(self, snapshot):
        """Become ``snapshot``. ValueError, and no change, when it does not belong to this layout."""
        self._become(snapshot, lambda name, component, *past: component.restore(*past))

    def resume(self, checkpoint, source):
        """Become ``checkpoint`` with what it left out copied from ``source``: a state, this one too, of the same layout
        whose tokens begin with the checkpoint's. ValueError, and no change, when they do not or a component does not fit."""
        if source.tokens[: len(checkpoint.tokens)] != checkpoint.tokens.tolist():
            raise ValueError(f"the source's tokens do not begin with the {len(checkpoint.tokens)} of the checkpoint")
        self._become(checkpoint, lambda name, component, *past: component.resume(*past, source[name]))

    def rewind(self, checkpoint):
        """Go back to ``checkpoint``, taken of this sequence earlier: what it left out is cut in place, so that trying tokens
        and taking them back costs no copy of the past. ValueError, and no change, when the tokens are not its continuation."""
        n = len(checkpoint.tokens)
        if self.tokens[:n] != checkpoint.tokens.tolist():
            raise ValueError(f"the state's tokens do not begin with the {n} of the checkpoint")
        for name, component in self._components.items():
            component.rewind(n, checkpoint.components[name])
        del self.tokens[n:]
        self.logits = None if checkpoint.logits is None else checkpoint.logits.copy()

    def _become(self, snapshot, restore):
        if snapshot.components.keys() != self.layout.keys():
            odd = sorted(snapshot.components.keys() ^ self.layout.keys())
            raise ValueError(f"snapshot and layout differ in component {odd[0]!r}")
        components = {name: kind.new(self.dtype) for name, kind in self.layout.items()}
        for name, component in components.items():
            try:
                restore(name, component, len(snapshot.tokens), snapshot.components[name])
            except ValueError as error:
                raise ValueError(f"component {name!r}: {error}") from None
        self._components = components
        self.tokens = snapshot.tokens.tolist()
        self.logits = None if snapshot.logits is None else snapshot.logits.copy()

    def copy(self):
        """An independent sequence with the same past (a fork)."""
        twin = State(self.layout, self.dtype)
        twin.restore(self.snapshot())
        return twin


def memory(layout, itemsize=4):
    """Bytes of a sequence's state: (per component name → bytes at 1,000 tokens), growth per token in the long run."""
    at_1000 = {name: kind.values(1000) * itemsize for name, kind in layout.items()}
    far, step = 1 << 24, 1 << 20
    growth = sum(kind.values(far + step) - kind.values(far) for kind in layout.values()) * itemsize / step
    return at_1000, growth
