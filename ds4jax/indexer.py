"""Sparse attention's indexer for a chunk of queries: scores and the mask of what each query keeps.

Ties go to the lowest index, as in :mod:`ds4ref.indexer`. Letters: B banks, T queries, S rows, H heads, d width.
"""

import jax.numpy as jnp

from . import primitives
from .ops import layer_norm, rotate_head, rotate_pairs
from .state import visible
from .weights import linear


def index_scores(q, keys, weights):
    """``Σ_h weights_h · relu(q_h · keys_s)``. q: [B, T, H, d], keys: [B, S, d], weights: [B, T, H] → [B, T, S]."""
    return jnp.einsum("bths,bth->bts", jnp.maximum(jnp.einsum("bthd,bsd->bths", q, keys), 0), weights)


def select(scores, mask, k):
    """The mask [B, T, S] narrowed to each query's k best visible rows (all of them when S ≤ k)."""
    if scores.shape[-1] <= k:
        return mask
    # XLA ranks −0.0 below +0.0, which would break the tie order of scores that are zero.
    scores = jnp.where(scores == 0, 0.0, scores)
    return mask & primitives.largest(jnp.where(mask, scores, -jnp.inf), k)


def select_by_latent(component, h, latent, tensors, theta, eps, k):
    """Append the tokens' indexer keys to their ``Rows`` and choose each query's best k positions: bool [B, T, S].

    h: [B, T, D], latent: [B, T, r], theta: [B, T, n/2]; tensors and eps as in :func:`ds4ref.indexer.select_by_latent`.
    """
    queries, key, gain, bias, mix = tensors
    component.append(rotate_head(layer_norm(linear(key, h), gain, bias, eps), theta, rotate_pairs))
    q = linear(queries, latent).reshape(*h.shape[:2], mix.shape[-2], -1)
    q = rotate_head(q, theta[:, :, None, :], rotate_pairs)
    keys = component.rows()
    scores = index_scores(q, keys.rows, linear(mix, h) / queries.shape[-2] ** 0.5)
    return select(scores, visible(keys, component.chunk.positions), k)
