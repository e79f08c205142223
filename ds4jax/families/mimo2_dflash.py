"""MiMo-V2.6-Flash's DFlash in JAX; read it beside ds4ref/families/mimo2_dflash.py."""

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
    """Rows [B, block − 1, D], the first count [B] of which predict the tokens at the positions after the anchor's [B]."""
    masks = jnp.full((len(anchor), c.block - 1), c.mask, jnp.int32)
    rows = embed(top["token_embd.weight"], jnp.concatenate([anchor[:, None], masks], axis=1))
    return noise.block_rows(c.layers, top, w, state, rows, count + 1)[:, 1:]


def draft_logits(c, top, w, row, previous):
    """Draft logits [..., V] of rows [..., D], whatever token is chosen before them."""
    return linear(top["output.weight"], row)
