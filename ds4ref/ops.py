"""The elementary operations every family is written in, one vector at a time.

Nothing here knows a model. Each function keeps the dtype of its input (float32, or float64 in the reference's exact
mode) and performs one fixed sequence of array operations, so equal inputs give equal bits.

Letters: D width, H heads, d head width, n rotated channels, S keys, E experts.
"""

import numpy as np


def rms_norm(x, weight=None, eps=1e-6):
    """Root-mean-square normalisation over the last axis (Zhang & Sennrich 2019): ``x / sqrt(mean(x²) + eps) · weight``."""
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps))
    return y if weight is None else y * weight


def layer_norm(x, weight, bias=None, eps=1e-6):
    """Layer normalisation over the last axis (Ba et al. 2016), with gain and optional bias."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    y = centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + x.dtype.type(eps)) * weight
    return y if bias is None else y + bias


def unit_norm(x, eps=1e-6):
    """``x / sqrt(Σx² + eps)`` over the last axis: the unit-length q and k of the delta rule (eps inside the root)."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + x.dtype.type(eps))


def sigmoid(x):
    """Logistic function, without overflow on either side."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def silu(x):
    """``x · sigmoid(x)`` (Elfwing et al. 2017)."""
    return x * sigmoid(x)


def softplus(x):
    """``log(1 + exp(x))``, stable for any x."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def softmax(x, axis=-1):
    """Softmax along ``axis``, shifted by the maximum."""
    e = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return e / np.sum(e, axis=axis, keepdims=True)


def top_k(scores, k):
    """Indices of the k largest of ``scores`` [E], best first; equal scores keep the lower index first."""
    return np.argsort(-scores, kind="stable")[:k]


def swiglu(x, gate, up, down, limit=0.0, clamp="gate"):
    """``down( silu(gate x) · (up x) )`` (Shazeer 2020) with the optional activation limit of newer models.

    ``limit`` 0 means none. Otherwise up is clipped to ±limit and the gate from above only: before SiLU where
    ``clamp`` is "gate" (DeepSeek V4, GLM 5.3), after SiLU where it is "activation" (Step 3.7, Ling 3).
    gate, up: [F, D]; down: [D, F].
    """
    g, u = gate @ x, up @ x
    if limit and clamp == "gate":
        g = np.minimum(g, g.dtype.type(limit))
    a = silu(g)
    if limit and clamp == "activation":
        a = np.minimum(a, a.dtype.type(limit))
    if limit:
        u = np.clip(u, -u.dtype.type(limit), u.dtype.type(limit))
    return down @ (a * u)


# Rotary position embedding (Su et al. 2021). Angles are float64 whatever the model's dtype: float32 angles lose
# accuracy beyond about 100,000 positions.


def rope_frequencies(n, base):
    """Inverse wavelengths ``base^(−2k/n)`` of n rotated channels: float64 [n/2]."""
    return float(base) ** (-np.arange(0, n, 2, dtype=np.float64) / n)


def yarn_ramp(n, base, original_context, beta_fast, beta_slow):
    """YaRN's interpolation ramp (Peng et al. 2023, "NTK-by-parts"): float64 [n/2], 0 keep the frequency, 1 divide it.

    ``c(β) = n ln(L / 2πβ) / (2 ln base)`` is the channel that turns β times over the original context L; the ramp runs
    from ⌊c(beta_fast)⌋ to ⌈c(beta_slow)⌉, clipped to 0 and n − 1, as the paper's code has it.
    """
    channel = [n * np.log(original_context / (2 * np.pi * beta)) / (2 * np.log(base)) for beta in (beta_fast, beta_slow)]
    low = max(np.floor(channel[0]), 0.0)
    high = min(np.ceil(channel[1]), n - 1.0)
    return np.clip((np.arange(n // 2) - low) / max(high - low, 0.001), 0.0, 1.0)


def yarn_frequencies(n, base, factor, original_context, beta_fast=32.0, beta_slow=1.0):
    """Frequencies of :func:`rope_frequencies` with YaRN by parts: kept, blended, or divided by ``factor``. float64 [n/2]."""
    ramp = yarn_ramp(n, base, original_context, beta_fast, beta_slow)
    return rope_frequencies(n, base) * ((1.0 - ramp) + ramp / factor)


def rotate_pairs(x, angles, scale=1.0):
    """Rotate neighbouring channels (2k, 2k+1) of ``x`` [..., n] by ``angles`` float64 [n/2] (GPT-J pairing)."""
    cos, sin = (np.cos(angles) * scale).astype(x.dtype), (np.sin(angles) * scale).astype(x.dtype)
    u, v = x[..., 0::2], x[..., 1::2]
    return np.stack([u * cos - v * sin, u * sin + v * cos], axis=-1).reshape(x.shape)


def rotate_halves(x, angles, scale=1.0):
    """Rotate channels (k, k + n/2) of ``x`` [..., n] by ``angles`` float64 [n/2] (GPT-NeoX pairing)."""
    cos, sin = (np.cos(angles) * scale).astype(x.dtype), (np.sin(angles) * scale).astype(x.dtype)
    u, v = np.split(x, 2, axis=-1)
    return np.concatenate([u * cos - v * sin, u * sin + v * cos], axis=-1)


def rotate_head(x, angles, rotate=rotate_halves, scale=1.0):
    """Rotate the first 2·len(angles) channels of ``x`` [..., d]; the rest passes through."""
    n = 2 * len(angles)
    return np.concatenate([rotate(x[..., :n], angles, scale), x[..., n:]], axis=-1)


def rotate_tail(x, angles, rotate=rotate_pairs, scale=1.0):
    """Rotate the last 2·len(angles) channels of ``x`` [..., d]; the rest passes through."""
    n = x.shape[-1] - 2 * len(angles)
    return np.concatenate([x[..., :n], rotate(x[..., n:], angles, scale)], axis=-1)
