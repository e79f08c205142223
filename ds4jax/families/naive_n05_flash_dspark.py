"""Naive-N0.5-Flash's DSpark in JAX; read it beside ds4ref/families/naive_n05_flash_dspark.py."""

import jax.numpy as jnp

from .. import noise
from ..layers import embed
from ..weights import linear

__all__ = ["commit", "draft_logits", "draft_rows", "draft_tensors"]


def draft_tensors(c, artifact):
    """(what is around the layers, each layer's tensors)."""
    return noise.draft_tensors(c.layers, artifact)


def commit(c, top, w, state, outputs):
    """Keep the positions of a chunk. outputs: of the target layers, each [B, T, D]."""
    noise.commit(c.layers, top, w, state, outputs)


def draft_rows(c, top, w, state, anchor, count):
    """Rows [B, proposals, D] that predict the tokens at the positions after the anchor's [B], however many are asked for."""
    noises = jnp.broadcast_to(top["mask_embedding.weight"], (len(anchor), c.block - 1, c.layers.width))
    rows = jnp.concatenate([embed(top["token_embd.weight"], anchor[:, None]), noises], axis=1)
    return noise.block_rows(c.layers, top, w, state, rows, jnp.full_like(count, c.block))[:, 1 : c.proposals + 1]


def draft_logits(c, top, w, row, previous):
    """Draft logits [..., V] of rows [..., D], after the tokens ``previous`` [...]."""
    return linear(top["output.weight"], row) + linear(top["markov_w2.weight"], embed(top["markov_w1.weight"], previous))
