"""Predictor blocks over any leading axes: :mod:`ds4ref.nextn` in JAX. w: a block's weights by their name without its prefix."""

import jax.numpy as jnp

from .layers import embed
from .ops import rms_norm
from .weights import linear


def join(hidden, embedding, enorm, hnorm, projection, eps):
    """A block's input: ``projection [rms(embedding; enorm) ; rms(hidden; hnorm)]``, rows [..., D] → [..., D]."""
    both = rms_norm(embedding, enorm, eps), rms_norm(hidden, hnorm, eps)
    return linear(projection, jnp.concatenate(both, axis=-1))


def joined(top, w, hidden, tokens, eps):
    """:func:`join` with the tensors ``nextn.*``, and an embedding of the block's own where it has one; tokens: int32 [...]."""
    embedding = embed(w.get("nextn.embed_tokens.weight", top["token_embd.weight"]), tokens)
    norms = (w[f"nextn.{name}.weight"] for name in ("enorm", "hnorm", "eh_proj"))
    return join(hidden, embedding, *norms, eps)


def logits(top, w, row):
    """Draft logits [..., V] of a normalised row [..., D]: the block's own head where it has one, else the trunk's."""
    return linear(w.get("nextn.shared_head_head.weight", top["output.weight"]), row)
