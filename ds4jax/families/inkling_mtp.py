"""Inkling's draft blocks in JAX; read it beside ds4ref/families/inkling_mtp.py."""

import jax.numpy as jnp

from ..layers import layer_tensors
from ..ops import rms_norm
from ..weights import linear
from . import inkling

__all__ = ["draft_block", "draft_input", "draft_logits", "draft_tensors"]

BLOCK = "transformer_block."


def draft_tensors(c, artifact):
    """(nothing, each draft block's tensors by the names and in the shapes of the trunk's)."""
    found = inkling.tensors_of(c.trunk, artifact)
    return {}, [layer_tensors(found, "model.mtp.layers.{i}.", d) for d in range(len(c.local))]


def draft_input(c, top, h):
    """Block 0's hidden rows: the trunk's last output h [B, T, D], normalised."""
    return rms_norm(h, top["model.llm.norm.weight"], c.trunk.norm_eps)


def draft_block(c, d, top, w, state, hidden, tokens):
    """Run draft block d on the hidden rows of positions and the tokens d + 1 later → its output [B, T, D]."""
    t = c.trunk
    rows = rms_norm(hidden, w["hidden_norm.weight"], t.norm_eps)
    embedding = rms_norm(inkling.embedded(t, top, tokens), w["embed_norm.weight"], t.norm_eps)
    x = linear(w["input_proj.weight"], jnp.concatenate([rows, embedding], axis=-1))
    own = {name.removeprefix(BLOCK): tensor for name, tensor in w.items() if name.startswith(BLOCK)}
    return inkling.block(t, own, state, x, state.positions + d + 1, local=c.local[d], window=None)


def draft_logits(c, d, top, w, hidden):
    """Draft logits [..., V] of a block's output."""
    return inkling.head(c.trunk, top, hidden)
