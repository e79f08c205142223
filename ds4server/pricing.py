"""What the parts of a process cost, in bytes: the quote's budgets from a family's state layout and an artifact's tensors.

The amounts follow what the backends allocate, so that a quote cannot drift from it: docs/memory.md says what counts as use.
Knows nothing about requests or hosts.
"""

from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np

from ds4ref.quants import BLOCK, PLAIN, TensorType
from ds4ref.state import Compressed, Recurrent, Ring, Rows

LEAST_ROWS = 16  # what the reference's growing arrays begin with; then they double


@dataclass(frozen=True)
class Price:
    """per_bank: one sequence at full context; checkpoint: one snapshot of what cannot be cut."""

    per_bank: int
    checkpoint: int

    def pool(self, slots):
        """Bytes of a checkpoint pool."""
        return slots * self.checkpoint


def price(layout, context, *, vocabulary, native=0, itemsize=4, drafts=None, grown=False):
    """The :class:`Price` of a layout (component name → kind, :mod:`ds4ref.state`) at ``context`` tokens, as the reference
    keeps it.

    vocabulary: numbers of the logits row that a sequence keeps; native: rows of one forward pass, which a ring holds beyond
    its window; itemsize: bytes of a number; drafts: draft length where drafting is on, which takes drafts + 1 checkpoints of
    the trial (``ds4ref.speculative.Stepwise``); grown: arrays double as they grow, as the reference's do.
    """
    held = _doubled if grown else lambda rows: rows
    uncut = sum(_uncut(kind, context, native) for kind in layout.values()) * itemsize
    cut = sum(_cut(kind, context, held) for kind in layout.values()) * itemsize
    logits = vocabulary * itemsize
    rollback = 0 if drafts is None else (drafts + 1) * (uncut + logits + 8 * context)
    return Price(cut + uncut + logits + rollback, _checkpoint(layout, context, vocabulary))


def drafter(layouts, context, itemsize=4):
    """Bytes that a drafter of the reference keeps of one sequence at full context: the rows of its blocks, which grow as a
    state's do. layouts: of each block. The one hidden row of each that waits for its next token is left out."""
    return sum(price(layout, context, vocabulary=0, itemsize=itemsize, grown=True).per_bank for layout in layouts)


def price_on_device(layout, context, *, vocabulary, itemsize=4, trial=0):
    """The :class:`Price` of a layout as ds4jax allocates it (``ds4jax.state.allocate``), all at the start: rows in numbers of
    ``itemsize`` bytes, what every token changes and the logits in float32. trial: tokens of one where drafting is on, each with
    its logits and a copy of what is not written before it is judged (``ds4jax.trials``)."""
    held = sum(_allocated(kind, context, itemsize) for kind in layout.values())
    token = sum(_on_trial(kind, itemsize) for kind in layout.values()) + 4 * vocabulary
    return Price(held + 4 * vocabulary + trial * token, _checkpoint(layout, context, vocabulary))


def _on_trial(kind, itemsize):
    """Bytes that one token of a trial takes."""
    match kind:
        case Ring(_, shape):
            return prod(shape) * itemsize
        case Recurrent(shape):
            return 4 * prod(shape)
        case Compressed(_, _, pending, _):
            return prod(pending) * itemsize
    return 0


def _checkpoint(layout, context, vocabulary):
    """Bytes of a checkpoint, which is on the host in float32 on every backend, with logits and int64 tokens; 0 where none is
    needed."""
    uncut = 4 * sum(_uncut(kind, context, 0) for kind in layout.values())
    return uncut + 4 * vocabulary + 8 * context if uncut else 0


def _allocated(kind, context, itemsize):
    match kind:
        case Rows(shape):
            return context * prod(shape) * itemsize
        case Ring(window, shape):
            return min(window, context) * prod(shape) * itemsize
        case Recurrent(shape):
            return 4 * prod(shape)
        case Compressed(ratio, shape, pending, span):
            return (max(1, context // ratio) * prod(shape) + span * prod(pending)) * itemsize
    raise TypeError(f"unknown component kind {kind!r}")


def _doubled(rows):
    capacity = LEAST_ROWS
    while capacity < rows:
        capacity *= 2
    return capacity


def _cut(kind, context, held):
    """Numbers of the part that can be cut anywhere, or that a longer sequence still holds."""
    match kind:
        case Rows(shape):
            return held(context) * prod(shape)
        case Compressed(ratio, shape, _, _):
            return held(-(-context // ratio)) * prod(shape)
    return 0


def _uncut(kind, context, native):
    """Numbers of the part that only a checkpoint brings back."""
    match kind:
        case Ring(window, shape):
            return min(context, window + native) * prod(shape)
        case Recurrent(shape):
            return prod(shape)
        case Compressed(_, _, pending, span):
            return min(context, span) * prod(pending)
    return 0


def weights(tensors):
    """Bytes of tensors as they lie in the file, which is where the reference reads them."""
    return sum(tensor.nbytes for tensor in tensors)


def packed(tensors, layout):
    """Bytes of tensors as ds4jax packs them in one of its layouts (``ds4jax.weights.pack``), from shapes and types alone."""
    return sum(_packed(tensor, layout) for tensor in tensors)


def _packed(tensor, layout):
    *lead, rows, columns = (1, *tensor.shape)
    if tensor.type in PLAIN and PLAIN[tensor.type].kind == "i":
        return min(4, PLAIN[tensor.type].itemsize) * prod(tensor.shape)
    if len(tensor.shape) == 1:
        return 4 * prod(tensor.shape)
    unit = BLOCK[tensor.type][0]
    if unit == 1:  # plain floats are put into blocks of a divisor of the columns
        unit = max(b for b in range(1, 33) if columns % b == 0)
    return prod(lead) * (columns // unit) * _planes(tensor.type, rows, unit, layout)


@cache
def _planes(type, rows, columns, layout):
    """Bytes of the planes of [rows, columns], one block wide: those of a matrix are as many times more as it has blocks."""
    from ds4jax import blocks, packing

    block, size = BLOCK[type]
    data = np.zeros(rows * columns // block * size, np.uint8)
    if layout == "gpu":
        return sum(plane.nbytes for _, plane in blocks.planes(data, type, (rows, columns)))
    return sum(plane.nbytes for plane in packing.planes(data, type, (rows, columns), layout).values())


def dequantized(tensors, limit):
    """Bytes of the reference's cache of dequantised tensors: all of them in float32, up to ``limit``. Numbers that the file
    holds as they are computed with are read where they lie."""
    lie = (TensorType.F32, *(type for type, dtype in PLAIN.items() if dtype.kind == "i"))
    return min(limit, sum(4 * prod(tensor.shape) for tensor in tensors if tensor.type not in lie))


def activations(tensors, rows, itemsize=4):
    """An estimate of the activations of one forward pass over ``rows`` tokens: every output of the widest layer, held at once.
    Stacked matrices (experts) count once, as a token runs few of them."""
    widths = {}
    for tensor in tensors:
        if len(tensor.shape) >= 2:
            layer = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else tensor.name
            widths[layer] = widths.get(layer, 0) + tensor.shape[-2]
    return rows * itemsize * max(widths.values(), default=0)
