"""Sparse attention's indexer for a chunk of queries: what each query keeps of the rows that it could see.

Scores are taken block by block like attention's. For one query per bank the choice is a list of rows, which attention
gathers, where these are few among many; else it is one bit per query and row. Ties go to the lowest index, as in
:mod:`ds4ref.indexer`.

Letters: B banks, T queries, Q queries of a tile, S candidates, N of a block, H heads, d width.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from . import primitives
from .ops import layer_norm, rotate_head, rotate_pairs
from .state import visible
from .weights import linear

BLOCK = 256  # candidates scored at once
TILE = 64  # queries that are ranked at once
GATHER = 4  # a gathered row costs as much as so many rows read in order


@partial(jax.tree_util.register_dataclass, data_fields=["held"], meta_fields=["group"])
@dataclass(frozen=True)
class Chosen:
    """Groups of ``group`` rows that each query keeps; where a group is more than one row, also the rows of the incomplete one.

    held: numbers of groups, int32 [B, 1, k], −1 where there are fewer; or bits, uint8 [B, T, ⌈S/8⌉], the lowest first.
    """

    held: jnp.ndarray
    group: int = 1

    @property
    def indexed(self):
        return self.held.dtype == jnp.int32

    def mask(self, tile, index, positions):
        """From the bits: which of the rows index [N] the queries at positions [B, Q] keep, bool [B, Q, N].

        tile: function [B, T, …] → [B, Q, …] that cuts out these queries.
        """
        number = index // self.group
        kept = jnp.take(tile(self.held), number >> 3, axis=-1, mode="clip") >> (number & 7).astype(jnp.uint8) & 1 == 1
        return kept if self.group == 1 else kept | (index >= self._complete(positions))

    def rows(self, positions):
        """From the numbers: (rows kept by the query at positions [B, 1], int32 [B, N]; which of these exist, bool [B, N])."""
        number = self.held[:, 0]
        within = jnp.arange(self.group, dtype=jnp.int32)
        rows = (number[:, :, None] * self.group + within).reshape(len(number), -1)
        exists = jnp.repeat(number >= 0, self.group, axis=1)
        if self.group == 1:
            return rows, exists
        last = self._complete(positions)[:, 0] + within
        return jnp.concatenate([rows, last], axis=1), jnp.concatenate([exists, last <= positions], axis=1)

    def _complete(self, positions):
        """Tokens in complete groups, [B, Q, 1]."""
        return (positions[:, :, None] + 1) // self.group * self.group


def nothing(shape, candidates, k, group=1):
    """A :class:`Chosen` of the form that :func:`choose` gives for queries [B, T], without any row; None as there."""
    if candidates <= k:
        return None
    if _gathers(shape[1], candidates, k):
        return Chosen(jnp.full((*shape, k), -1, jnp.int32), group)
    return Chosen(jnp.zeros((*shape, -(-candidates // 8)), jnp.uint8), group)


def _gathers(tokens, candidates, k):
    return tokens == 1 and GATHER * k <= candidates and primitives.profile() == "default"


def index_scores(q, keys, weights):
    """``Σ_h weights_h · relu(q_h · keys_s)``. q: [B, T, H, d], keys: [B, S, d], weights: [B, T, H] → [B, T, S]."""
    return jnp.einsum("bths,bth->bts", jnp.maximum(jnp.einsum("bthd,bsd->bths", q, keys), 0), weights)


def choose(q, weights, keys, k, group=1):
    """Each query's k best visible candidates, as :class:`Chosen`; None, which means all, where there are no more than k.

    q: [B, T, H, d], weights: [B, T, H], keys: View of rows [d]; group: how many rows of what is attended to a candidate is.
    """
    tokens, chunk, empty = q.shape[1], keys.chunk, nothing(q.shape[:2], keys.count, k, group)
    if empty is None:
        return None
    if empty.indexed:
        values, best = lax.top_k(_scores(q, weights, keys, 0, 1), k)
        return Chosen(jnp.where(values > -jnp.inf, best, -1).astype(jnp.int32), group)
    size = min(TILE, tokens)

    def tile(i, bits):
        start = jnp.minimum(i * size, tokens - size)
        scores = _scores(q, weights, keys, start, size)
        kept = primitives.largest(scores, k) & (scores > -jnp.inf)
        return lax.dynamic_update_slice(bits, jnp.packbits(kept, axis=-1, bitorder="little"), (0, start, 0))

    return Chosen(lax.fori_loop(0, -(-jnp.max(chunk.valid) // size), tile, empty.held), group)


def _scores(q, weights, keys, start, tokens):
    """Scores of queries start … start + tokens − 1, −∞ for a candidate that a query does not see: [B, Q, S]."""
    q, weights, positions = (
        lax.dynamic_slice_in_dim(x, start, tokens, axis=1) for x in (q, weights, keys.chunk.positions)
    )  # fmt: skip
    size = min(BLOCK, keys.count)

    def block(i, scores):
        begin = jnp.minimum(i * size, keys.count - size)
        new = index_scores(q, keys.read(begin, size), weights)
        # Ranking has −0.0 below +0.0, which would break the order of scores that are zero.
        new = jnp.where(new == 0, 0.0, new)
        mask = visible(keys, begin + jnp.arange(size, dtype=jnp.int32), positions)
        return lax.dynamic_update_slice(scores, jnp.where(mask, new, -jnp.inf), (0, 0, begin))

    first, last = keys.reach(start, tokens)
    empty = jnp.full((*q.shape[:2], keys.count), -jnp.inf, jnp.float32)
    return lax.fori_loop(first // size, -(-last // size), block, empty)


def choose_by_latent(component, h, latent, tensors, theta, eps, k):
    """Append the tokens' indexer keys to their ``Rows`` and :func:`choose` each query's best k positions.

    h: [B, T, D], latent: [B, T, r], theta: [B, T, n/2]; tensors and eps as in :func:`ds4ref.indexer.select_by_latent`.
    """
    queries, key, gain, bias, mix = tensors
    component.append(rotate_head(layer_norm(linear(key, h), gain, bias, eps), theta, rotate_pairs))
    q = linear(queries, latent).reshape(*h.shape[:2], mix.shape[-2], -1)
    q = rotate_head(q, theta[:, :, None, :], rotate_pairs)
    return choose(q, linear(mix, h) / queries.shape[-2] ** 0.5, component.rows(), k)
