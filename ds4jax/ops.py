"""The elementary operations of :mod:`ds4ref.ops` in JAX, over any leading axes (banks, tokens, heads).

Function by function the same names and definitions; only the arithmetic is written again. Angles come as float32 here:
positions are split into exact float32 parts before they meet a frequency (see :func:`angles`).
"""

import jax.numpy as jnp
import numpy as np
from jax import lax, nn

from ds4ref.ops import rope_frequencies, yarn_frequencies, yarn_ramp

from . import primitives

__all__ = [
    "angles", "divided_angles", "layer_norm", "rms_norm", "rope_frequencies", "rotate_halves", "rotate_head",
    "rotate_pairs", "rotate_tail", "sigmoid", "silu", "softmax", "softplus", "swiglu_activation", "top_k", "unit_norm",
    "yarn_frequencies", "yarn_ramp",
]  # fmt: skip

sigmoid, softmax = nn.sigmoid, nn.softmax


def rms_norm(x, weight=None, eps=1e-6):
    """``x / sqrt(mean(x²) + eps) · weight`` over the last axis."""
    y = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return y if weight is None else y * weight


def layer_norm(x, weight, bias=None, eps=1e-6):
    """Layer normalisation over the last axis, with gain and optional bias."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    y = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps) * weight
    return y if bias is None else y + bias


def unit_norm(x, eps=1e-6):
    """``x / sqrt(Σx² + eps)`` over the last axis."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def top_k(scores, k):
    """Indices of the k largest along the last axis, best first; equal scores keep the lower index first."""
    return primitives.top_k(scores, k)[1]


def swiglu_activation(g, u, limit=0.0, clamp="gate"):
    """The elementwise part of :func:`ds4ref.ops.swiglu`: ``silu(g) · u`` with the optional limit."""
    if limit and clamp == "gate":
        g = jnp.minimum(g, limit)
    a = silu(g)
    if limit and clamp == "activation":
        a = jnp.minimum(a, limit)
    return a * (jnp.clip(u, -limit, limit) if limit else u)


def angles(positions, frequencies):
    """Rotation angles modulo a turn: positions int32 [...] < 2²⁴, frequencies float64 NumPy [n/2] → float32 [..., n/2].

    A float32 product loses the angle beyond some 100,000 positions. So the turns per position (a NumPy float64 constant)
    are split into parts of 12, 12 and the remaining bits, and the position into two halves of 12 bits: every product with
    the first part is exact, and whole turns are dropped as they arise.
    """
    turns = np.asarray(frequencies, np.float64) / (2 * np.pi)
    total = jnp.zeros((*positions.shape, len(turns)), jnp.float32)
    for half, weight in ((positions & 0xFFF, 1), (positions >> 12, 4096)):
        rest = turns * weight
        rest = rest - np.floor(rest)  # a whole number of turns per step of an integer is no rotation
        for bits in (12, 24, None):
            part = rest if bits is None else np.floor(rest * 2.0**bits) / 2.0**bits
            product = half[..., None].astype(jnp.float32) * jnp.asarray(part, jnp.float32)
            total = total + (product - jnp.floor(product))
            rest = rest - part
    return (total - jnp.floor(total)) * jnp.float32(2 * np.pi)


def divided_angles(positions, frequencies, divisors):
    """:func:`angles` of ``frequencies / divisors``, for divisors float32 [n/2] > 0 that only the device knows.

    An undivided angle is whole turns plus what :func:`angles` keeps; whole turns modulo a divisor are exact in float32.
    """
    turn = 2 * np.pi
    kept = angles(positions, frequencies) / jnp.float32(turn)
    per_position = jnp.asarray(np.asarray(frequencies, np.float64) / turn, jnp.float32)
    whole = jnp.round(positions[..., None] * per_position - kept)
    turns = (jnp.fmod(whole, divisors) + kept) / divisors
    return (turns - jnp.floor(turns)) * jnp.float32(turn)


def rotate_pairs(x, theta, scale=1.0):
    """Rotate neighbouring channels (2k, 2k+1) of x [..., n] by theta [..., n/2] (same leading axes, or broadcastable)."""
    cos, sin = jnp.cos(theta) * scale, jnp.sin(theta) * scale
    u, v = x[..., 0::2], x[..., 1::2]
    return jnp.stack([u * cos - v * sin, u * sin + v * cos], axis=-1).reshape(x.shape)


def rotate_halves(x, theta, scale=1.0):
    """Rotate channels (k, k + n/2) of x [..., n] by theta [..., n/2]."""
    cos, sin = jnp.cos(theta) * scale, jnp.sin(theta) * scale
    u, v = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([u * cos - v * sin, u * sin + v * cos], axis=-1)


def rotate_head(x, theta, rotate=rotate_halves, scale=1.0):
    """Rotate the first 2·theta.shape[-1] channels of x [..., d]; the rest passes through."""
    n = 2 * theta.shape[-1]
    return jnp.concatenate([rotate(x[..., :n], theta, scale), x[..., n:]], axis=-1)


def rotate_tail(x, theta, rotate=rotate_pairs, scale=1.0):
    """Rotate the last 2·theta.shape[-1] channels of x [..., d]; the rest passes through."""
    n = x.shape[-1] - 2 * theta.shape[-1]
    return jnp.concatenate([x[..., :n], rotate(x[..., n:], theta, scale)], axis=-1)
