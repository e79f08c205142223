"""Rounding to small float formats: :mod:`ds4ref.rounding` in JAX, over any leading axes. Ties go to the even code."""

import jax.numpy as jnp
import numpy as np


def round_e4m3(x):
    """Nearest E4M3 value; |x| ≤ 448 is assumed."""
    return _round_float(x, 3, -6)


def round_e2m1(x):
    """Nearest E2M1 value; |x| ≤ 6 is assumed."""
    return _round_float(x, 1, 0)


def _round_float(x, mantissa_bits, min_exponent):
    exponent = jnp.maximum(jnp.frexp(x)[1] - 1, min_exponent)
    step = jnp.ldexp(jnp.ones_like(x), exponent - mantissa_bits)
    return jnp.round(x / step) * step


def round_blocks(x, block, largest, floor, round_value, power_of_two=True):
    """Round the last axis in blocks of ``block`` values with one scale each; see :func:`ds4ref.rounding.round_blocks`."""
    blocks = x.reshape(*x.shape[:-1], -1, block)
    scale = jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1, keepdims=True), floor) / largest
    if power_of_two:
        mantissa, exponent = jnp.frexp(scale)
        scale = jnp.ldexp(jnp.ones_like(scale), exponent - (mantissa == 0.5))
    return (round_value(jnp.clip(blocks / scale, -largest, largest)) * scale).reshape(x.shape)


def hadamard(x):
    """Normalised Walsh–Hadamard transform of the last axis (Sylvester order, width a power of two)."""
    width = x.shape[-1]
    y, step = x.reshape(-1, width), 1
    while step < width:
        pairs = y.reshape(len(y), -1, 2, step)
        y = jnp.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(len(y), width)
        step *= 2
    return (y / np.float32(np.sqrt(width))).reshape(x.shape)
