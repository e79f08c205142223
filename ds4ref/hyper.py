"""Hyper-connections: a residual of N parallel streams, mixed around every block by small learned matrices.

Sources: Hyper-Connections (Zhu et al. 2024); manifold-constrained form with Sinkhorn normalisation (mHC, Xie et al. 2025)
as DeepSeek V4 and GLM 5.3 use it. Letters: N streams, D width.
"""

import numpy as np

from .ops import rms_norm, sigmoid, softmax


def sinkhorn(logits, iterations, eps):
    """Nearly doubly stochastic [N, N] from ``logits`` [N, N]: softmax over columns, + eps, then alternating normalisation.

    One column step, then (iterations − 1) pairs of row step and column step; every divisor carries + eps.
    """
    eps = logits.dtype.type(eps)
    c = softmax(logits, axis=1) + eps
    c = c / (np.sum(c, axis=0, keepdims=True) + eps)
    for _ in range(iterations - 1):
        c = c / (np.sum(c, axis=1, keepdims=True) + eps)
        c = c / (np.sum(c, axis=0, keepdims=True) + eps)
    return c


def sinkhorn_exp(logits, iterations, bound=20.0, floor=1e-8):
    """Sinkhorn normalisation as Motif-3 has it. logits: [N, N] → [N, N], columns sum to 1, rows nearly.

    ``exp`` of the logits clipped to ±bound, then ``iterations`` pairs of row step and column step; every divisor is
    max(sum, floor).
    """
    floor = logits.dtype.type(floor)
    m = np.exp(np.clip(logits, -bound, bound))
    for _ in range(iterations):
        m = m / np.maximum(np.sum(m, axis=1, keepdims=True), floor)
        m = m / np.maximum(np.sum(m, axis=0, keepdims=True), floor)
    return m


def connect(streams, fn, base, scale, iterations, eps, norm_eps):
    """The mixing weights of one site. streams: [N, D], fn: [2N + N², N·D], base: [2N + N²], scale: [3].

    → (x [D] the block's input, post [N], comb [N, N]). All N·D values are normalised together, stream-major.
    """
    n = streams.shape[0]
    f = fn @ rms_norm(streams.reshape(-1), eps=norm_eps)
    pre = sigmoid(scale[0] * f[:n] + base[:n]) + f.dtype.type(eps)
    post = 2 * sigmoid(scale[1] * f[n : 2 * n] + base[n : 2 * n])
    comb = sinkhorn((scale[2] * f[2 * n :] + base[2 * n :]).reshape(n, n), iterations, eps)
    return pre @ streams, post, comb


def expand(streams, y, post, comb):
    """Write a block's output back: ``X'_j = post_j · y + Σ_i comb[i, j] X_i`` (the summed index is the softmaxed row)."""
    return post[:, None] * y + comb.T @ streams


def head(streams, fn, base, scale, eps, norm_eps):
    """The closing mix of DeepSeek V4: ``Σ_i g_i X_i``, ``g = σ(scale · fn rms(X) + base) + eps``, no Sinkhorn. → [D]."""
    f = fn @ rms_norm(streams.reshape(-1), eps=norm_eps)
    return (sigmoid(scale * f + base) + f.dtype.type(eps)) @ streams
