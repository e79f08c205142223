"""What the parts of a process cost, in bytes: the quote's budgets from a family's state layout and an artifact's tensors.

The amounts follow what the backends allocate, so that a quote cannot drift from it. Knows nothing about requests or hosts.
"""

from dataclasses import dataclass
from math import prod

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
    """The :class:`Price` of a layout (component name → kind, :mod:`ds4ref.state`) at ``context`` tokens.

    vocabulary: numbers of the logits row that a sequence keeps; native: rows of one forward pass, which a ring holds beyond
    its window; itemsize: bytes of a number; drafts: draft length where drafting is on, which takes drafts + 1 copies of what
    cannot be cut; grown: arrays double as they grow, as the reference's do.
    """
    held = _doubled if grown else lambda rows: rows
    uncut = sum(_uncut(kind, context, native) for kind in layout.values()) * itemsize
    cut = sum(_cut(kind, context, held) for kind in layout.values()) * itemsize
    logits = vocabulary * itemsize
    rollback = 0 if drafts is None else (drafts + 1) * uncut
    checkpoint = uncut + logits + 8 * context if uncut else 0  # its tokens are int64
    return Price(cut + uncut + logits + rollback, checkpoint)


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


def weights(artifact):
    """Bytes of an artifact's tensors as they lie in the file, which is how every backend keeps them."""
    return sum(tensor.nbytes for tensor in artifact.tensors.values())


def dequantized(artifact, limit):
    """Bytes of the reference's cache of dequantised tensors: all of them in float32, up to ``limit``."""
    return min(limit, sum(4 * prod(tensor.shape) for tensor in artifact.tensors.values()))


def activations(artifact, rows, itemsize=4):
    """An estimate of the activations of one forward pass over ``rows`` tokens: every output of the widest layer, held at once.
    Stacked matrices (experts) count once, as a token runs few of them."""
    widths = {}
    for name, tensor in artifact.tensors.items():
        if len(tensor.shape) >= 2:
            layer = name.split(".")[1] if name.startswith("blk.") else name
            widths[layer] = widths.get(layer, 0) + tensor.shape[-2]
    return rows * itemsize * max(widths.values(), default=0)
