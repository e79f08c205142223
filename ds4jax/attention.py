"""Attention of a chunk of queries over the rows they may see: :mod:`ds4ref.attention` for T queries of B banks at once.

Rows are read in blocks, and the softmax is taken as they come: a running maximum, sum and weighted value per query (Milakov &
Gimelshein 2018; Rabe & Staats 2021; FlashAttention, Dao et al. 2022). So nothing of the size T · S is ever held, and blocks
that no real token of the chunk can see, behind its window or beyond its end, are not read. Where an indexer chose, for one
token, few rows of many, only those are read. Softmax in float32.

Letters: B banks, T queries, Q queries of a tile, S rows, N rows of a block, H query heads, G key/value heads, d key width, v
value width, r latent rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax

from .indexer import Chosen
from .state import View, visible
from .weights import batched_linear

HIDDEN = -1e30  # a score that takes no probability; finite, so that a row without any visible key stays finite
BLOCK = 256  # rows read at once: a block of keys and values stays in the cache of a core
TILE = 64  # queries at once
FEW = 16  # queries of a group that keys are multiplied by, instead of the other way round
SMALL = 1 << 20  # scores, B · T · H · S, that are not cut into blocks


@dataclass(frozen=True)
class Seen:
    """Rows to attend to and what decides which of them each query sees.

    keys, values: View of rows [G, d] and [G, v], or without G where all heads share one; keys may be a tuple, side by side.
    window: positions up to and with the query's that it sees, all of them by default. chosen: what an indexer keeps of these.
    bias: function (tile, distance [B, Q, N]) → [B, Q, H, N] added to the scaled scores, where tile(x) is the part of an
    array [B, T, …] that belongs to the queries, and distance how far before its query a row is.
    """

    keys: View | tuple
    values: View
    window: int | None = None
    chosen: Chosen | None = None
    bias: Callable | None = None

    @property
    def count(self):
        return self.values.count

    def read(self, read):
        """(keys [B, G, N, d], values [B, G, N, v]) as ``read`` takes them from a view."""
        views = self.keys if isinstance(self.keys, tuple) else (self.keys,)
        parts = [_grouped(read(view)) for view in views]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1), _grouped(read(self.values))


def attend(q, *seen, scale, sinks=None):
    """Grouped-query attention. q: [B, T, H, d] → [B, T, H, v].

    seen: one :class:`Seen` or more whose rows count as one list; sinks: [H] logits that take probability and have no value.
    """
    tokens = q.shape[1]
    if tokens <= TILE:
        return _attend(q, 0, tokens, seen, scale, sinks)
    chunk = seen[0].values.chunk

    def tile(i, out):
        # The last tile ends where the chunk does, and so begins before the one before it ended.
        start = jnp.minimum(i * TILE, tokens - TILE)
        return lax.dynamic_update_slice(out, _attend(q, start, TILE, seen, scale, sinks), (0, start, 0, 0))

    out = jnp.zeros((*q.shape[:-1], seen[0].values.shape[-1]), jnp.float32)
    return lax.fori_loop(0, -(-jnp.max(chunk.valid) // TILE), tile, out)


def attend_latent(q, q_rot, keys, values, k_b, v_b, scale, **seen):
    """Latent attention in absorbed form. q: [B, T, H, d], k_b: [H, r, d], v_b: [H, v, r] → [B, T, H, v].

    values: View of rows whose first r channels are the latent; keys: View of latent and rotated key beside each other (or a
    tuple of two views), which q_rot [B, T, H, n] meets; None where the family rotates nothing. seen: see :class:`Seen`.
    """
    query = batched_linear(k_b, q)
    if q_rot is not None:
        query = jnp.concatenate([query, q_rot], axis=-1)
    mixed = attend(query, Seen(keys, values, **seen), scale=scale)[..., : v_b.shape[-1]]
    return batched_linear(v_b, mixed)


def attend_rows(q, keys, values, mask, scale, sinks=None):
    """:func:`attend` over few rows at hand, of which a query sees any: q [B, T, H, d] → [B, T, H, v].

    keys: [B, G, N, d], values: [B, G, N, v], mask: [B, T, N], in which every query sees a row.
    """
    groups = keys.shape[1]
    grouped = (q * scale).reshape(*q.shape[:2], groups, -1, q.shape[-1])
    scores = jnp.where(mask[:, None, None], jnp.einsum("btgmd,bgnd->bgmtn", grouped, keys), HIDDEN)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.reshape(groups, -1, 1, 1)
        top = jnp.maximum(top, sinks)
    p = jnp.exp(scores - top)
    total = jnp.sum(p, axis=-1, keepdims=True) + (0 if sinks is None else jnp.exp(sinks - top))
    return jnp.einsum("bgmtn,bgnv->btgmv", p / total, values).reshape(*q.shape[:-1], -1)


def _attend(q, start, count, seen, scale, sinks):
    """The queries start … start + count − 1 of q [B, T, H, d] → [B, Q, H, v]."""

    def tile(x):
        return x if count == x.shape[1] else lax.dynamic_slice_in_dim(x, start, count, axis=1)

    chunk, groups = seen[0].values.chunk, _groups(seen[0].values)
    q, positions = tile(q), tile(chunk.positions)
    banks, _, heads, _ = q.shape

    def by_group(x):
        """[B, Q, H, n] → [B, G, H/G, Q, n]."""
        return jnp.moveaxis(x.reshape(banks, count, groups, heads // groups, -1), 1, 3)

    q = by_group(q * scale)
    top = jnp.full((*q.shape[:-1], 1), HIDDEN, jnp.float32)
    total = jnp.zeros_like(top)
    if sinks is not None:
        top, total = jnp.broadcast_to(sinks.reshape(groups, -1, 1, 1), top.shape).astype(jnp.float32), total + 1
    carry = (top, total, jnp.zeros((*q.shape[:-1], seen[0].values.shape[-1]), jnp.float32))

    def over(carry, part, keys, values, index, mask):
        """One block of rows of numbers index [N] or [B, N] and who sees them, mask [B, Q, N]."""
        top, total, mixed = carry
        flat = q.reshape(banks, groups, -1, q.shape[-1])
        scores = _scores(flat, keys).reshape(*q.shape[:-1], -1)
        if part.bias is not None:
            distance = positions[:, :, None] - part.values.positions(index)[:, None, :]
            scores = scores + by_group(part.bias(tile, distance))
        mask = mask[:, None, None]
        scores = jnp.where(mask, scores, HIDDEN)
        highest = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        p, kept = jnp.where(mask, jnp.exp(scores - highest), 0.0), jnp.exp(top - highest)
        read = jnp.einsum("bgmn,bgnv->bgmv", p.reshape(*flat.shape[:-1], -1), values).reshape(mixed.shape)
        return highest, kept * total + jnp.sum(p, axis=-1, keepdims=True), kept * mixed + read

    def block(i, carry, part, size):
        # The last block ends where the rows do; what it holds of the block before was seen already.
        begin = jnp.minimum(i * size, part.count - size)
        index = begin + jnp.arange(size, dtype=jnp.int32)
        mask = visible(part.values, index, positions, part.window) & (index >= i * size)
        if part.chosen is not None:
            mask = mask & part.chosen.mask(tile, index, positions)
        return over(carry, part, *part.read(lambda view: view.read(begin, size)), index, mask)

    for part in seen:
        if part.chosen is not None and part.chosen.indexed:
            index, mask = part.chosen.rows(positions)
            rows = jnp.clip(index, 0, part.count - 1)
            mask = mask[:, None] & visible(part.values, rows, positions, part.window)
            carry = over(carry, part, *part.read(lambda view, rows=rows: view.gather(rows)), rows, mask)
        elif part.count <= BLOCK or count > 1 and banks * count * heads * part.count <= SMALL:
            carry = block(0, carry, part, part.count)
        else:
            first, last = part.values.reach(start, count, part.window)
            step = lambda i, carry, part=part: block(i, carry, part, BLOCK)  # noqa: E731
            carry = lax.fori_loop(first // BLOCK, -(-last // BLOCK), step, carry)
    _, total, mixed = carry
    out = mixed / jnp.maximum(total, 1e-30)
    return jnp.moveaxis(out, 3, 1).reshape(banks, count, heads, -1)


def _scores(q, keys):
    """q [B, G, M, d], keys [B, G, N, d] → [B, G, M, N], in the orientation that suits M: XLA:CPU is slow at few rows."""
    if q.shape[2] > FEW:
        return jnp.einsum("bgmd,bgnd->bgmn", q, keys)
    return jnp.swapaxes(jnp.einsum("bgnd,bgdm->bgnm", keys, jnp.swapaxes(q, 2, 3)), 2, 3)


def _groups(view):
    return view.shape[1] if len(view.shape) == 4 else 1


def _grouped(rows):
    """Rows [B, N, d] that all heads share as [B, 1, N, d]."""
    return rows if rows.ndim == 4 else rows[:, None]
