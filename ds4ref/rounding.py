"""Rounding to the small float formats that some models apply to cached rows on purpose (quantisation-aware training).

Values go to the format and straight back; nothing is stored packed. Sources: OCP 8-bit floating point (E4M3) and OCP
microscaling (E2M1) specifications. Ties go to the even code.
"""

import numpy as np


def round_e4m3(x):
    """Nearest E4M3 value (4 exponent bits, 3 mantissa bits, largest 448, subnormals below 2⁻⁶); |x| ≤ 448 is assumed."""
    return _round_float(x, mantissa_bits=3, min_exponent=-6)


def round_e2m1(x):
    """Nearest E2M1 value: ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}; |x| ≤ 6 is assumed."""
    return _round_float(x, mantissa_bits=1, min_exponent=0)


def _round_float(x, mantissa_bits, min_exponent):
    exponent = np.maximum(np.frexp(x)[1] - 1, min_exponent)
    step = np.ldexp(x.dtype.type(1), exponent - mantissa_bits)
    return np.rint(x / step) * step


def round_blocks(x, block, largest, floor, round_value, power_of_two=True):
    """Round the last axis of ``x`` in blocks of ``block`` values that share one scale, ``s = max(|x|max, floor) / largest``.

    ``power_of_two`` raises the scale to the next power of two, as DeepSeek V4's kernels do (ue8m0 scales).
    """
    blocks = x.reshape(*x.shape[:-1], -1, block)
    scale = np.maximum(np.max(np.abs(blocks), axis=-1, keepdims=True), x.dtype.type(floor)) / x.dtype.type(largest)
    if power_of_two:
        mantissa, exponent = np.frexp(scale)
        scale = np.ldexp(x.dtype.type(1), exponent - (mantissa == 0.5))
    bounded = np.clip(blocks / scale, -largest, largest)
    return (round_value(bounded) * scale).reshape(x.shape).astype(x.dtype)


def hadamard(x):
    """Normalised Walsh–Hadamard transform of the last axis (Sylvester order, width a power of two): its own inverse."""
    width = x.shape[-1]
    y = x.reshape(-1, width)
    step = 1
    while step < width:
        pairs = y.reshape(len(y), -1, 2, step)
        y = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(len(y), width)
        step *= 2
    return (y / x.dtype.type(np.sqrt(width))).reshape(x.shape)
