"""Attention of a chunk of queries over the rows they may see: :mod:`ds4ref.attention` for T queries of B banks at once.

Masks come from :func:`ds4jax.state.visible` and from selections. Softmax in float32.

Letters: B banks, T queries, S rows, H query heads, G key/value heads, d key width, v value width, r latent rank.
"""

import jax.numpy as jnp

from .weights import dequantize

HIDDEN = -1e30  # a score that takes no probability; finite, so that a row without any visible key stays finite


def attend(q, k, v, mask, scale, sinks=None, bias=None):
    """Grouped-query attention. q: [B, T, H, d], k: [B, S, G, d], v: [B, S, G, v], mask: [B, T, S] → [B, T, H, v].

    sinks: [H] logits that take probability and have no value; bias: [B, T, H, S] added to the scaled scores.
    """
    banks, tokens, heads, width = q.shape
    groups = k.shape[2]
    q = q.reshape(banks, tokens, groups, heads // groups, width)
    scores = jnp.einsum("btgrd,bsgd->btgrs", q, k) * scale
    if bias is not None:
        scores = scores + bias.reshape(banks, tokens, groups, heads // groups, -1)
    p = _softmax(scores, mask[:, :, None, None, :], None if sinks is None else sinks.reshape(groups, heads // groups, 1))
    return jnp.einsum("btgrs,bsgv->btgrv", p, v).reshape(banks, tokens, heads, -1)


def attend_latent(q, q_rot, latent, k_rot, k_b, v_b, mask, scale):
    """Latent attention in absorbed form. q: [B, T, H, d], latent: [B, S, r], k_b: [H, r, d], v_b: [H, v, r] → [B, T, H, v].

    q_rot: [B, T, H, n] and k_rot: [B, S, n] are the rotated parts, or None.
    """
    absorbed = jnp.einsum("bthd,hrd->bthr", q, dequantize(k_b))
    scores = jnp.einsum("bthr,bsr->bths", absorbed, latent)
    if q_rot is not None:
        scores = scores + jnp.einsum("bthn,bsn->bths", q_rot, k_rot)
    p = _softmax(scores * scale, mask[:, :, None, :], None)
    return jnp.einsum("bthr,hvr->bthv", jnp.einsum("bths,bsr->bthr", p, latent), dequantize(v_b))


def _softmax(scores, mask, sinks):
    scores = jnp.where(mask, scores, HIDDEN)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    e = jnp.where(mask, jnp.exp(scores - top), 0.0)
    total = jnp.sum(e, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    return e / jnp.maximum(total, 1e-30)
