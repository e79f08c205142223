"""Hyper-connections over any leading axes: :mod:`ds4ref.hyper` in JAX. Letters: N streams, D width."""

import jax.numpy as jnp
from jax import lax

from .ops import rms_norm, sigmoid, softmax
from .weights import linear


def sinkhorn(logits, iterations, eps):
    """Nearly doubly stochastic [..., N, N]: softmax over columns, + eps, one column step, then row and column steps."""
    c = softmax(logits, axis=-1) + eps
    c = c / (jnp.sum(c, axis=-2, keepdims=True) + eps)

    def pair(_, c):
        c = c / (jnp.sum(c, axis=-1, keepdims=True) + eps)
        return c / (jnp.sum(c, axis=-2, keepdims=True) + eps)

    return lax.fori_loop(0, iterations - 1, pair, c)


def sinkhorn_exp(logits, iterations, bound=20.0, floor=1e-8):
    """Motif-3's form: ``exp`` of the clamped logits [..., N, N], then so many times rows and columns divided by their sums."""

    def pair(_, m):
        m = m / jnp.maximum(jnp.sum(m, axis=-1, keepdims=True), floor)
        return m / jnp.maximum(jnp.sum(m, axis=-2, keepdims=True), floor)

    return lax.fori_loop(0, iterations, pair, jnp.exp(jnp.clip(logits, -bound, bound)))


def connect(streams, fn, base, scale, iterations, eps, norm_eps):
    """The mixing weights of one site. streams: [..., N, D] → (x [..., D], post [..., N], comb [..., N, N])."""
    *leading, n, width = streams.shape
    f = linear(fn, rms_norm(streams.reshape(*leading, n * width), eps=norm_eps))
    pre = sigmoid(scale[0] * f[..., :n] + base[:n]) + eps
    post = 2 * sigmoid(scale[1] * f[..., n : 2 * n] + base[n : 2 * n])
    comb = sinkhorn((scale[2] * f[..., 2 * n :] + base[2 * n :]).reshape(*leading, n, n), iterations, eps)
    return jnp.einsum("...n,...nd->...d", pre, streams), post, comb


def expand(streams, y, post, comb):
    """``X'_j = post_j · y + Σ_i comb[i, j] X_i``."""
    return post[..., None] * y[..., None, :] + jnp.einsum("...ij,...id->...jd", comb, streams)


def head(streams, fn, base, scale, eps, norm_eps):
    """The closing mix of DeepSeek V4: ``Σ_i g_i X_i``, ``g = σ(scale · fn rms(X) + base) + eps``. → [..., D]."""
    *leading, n, width = streams.shape
    f = linear(fn, rms_norm(streams.reshape(*leading, n * width), eps=norm_eps))
    return jnp.einsum("...n,...nd->...d", sigmoid(scale * f + base) + eps, streams)
