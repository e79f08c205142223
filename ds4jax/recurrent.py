"""Recurrent mixers over a chunk: :mod:`ds4ref.recurrent` many tokens at a time. Padding changes nothing.

One token is one step of the delta rule. More are taken ``TOKENS`` at a time in products of matrices, which give what the
steps would (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"; with decay
"Gated Delta Networks" and the Kimi Linear report): after token t of such a chunk the state is

    ``S_t = P_t S_0 + Σ_{s ≤ t} (R_ts k_s) δ_sᵀ``

with P_t the decay since before the chunk and R_ts that since token s. Both are products of decays, never quotients of them,
so that none overflows.

Letters: B banks, T tokens, H heads, d key width, v value width, C channels or tokens of a chunk, K taps.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax

from .ops import sigmoid, silu, softplus, unit_norm

TOKENS = {"head": 32, "channel": 8}
"""Tokens taken at a time, powers of two, by what has a decay of its own. Measured on two CPU cores; see :func:`_pairs`."""

_einsum = partial(jnp.einsum, precision="highest")  # the state would keep the errors of reduced products


def short_conv(rows, taps, dilation=1):
    """Causal depthwise convolution. rows: [B, dilation · (K − 1) + T, C] oldest first, taps: [C, K] → [B, T, C]."""
    tokens = rows.shape[1] - dilation * (taps.shape[1] - 1)
    return sum(rows[:, j * dilation : j * dilation + tokens] * taps[:, j] for j in range(taps.shape[1]))


def bounded_decay(raw, rate, lower):
    """KDA's decay with a bounded exponent: ``exp(lower · σ(rate · raw))``. raw: [..., H, d], rate: [H] > 0, lower < 0."""
    return jnp.exp(lower * sigmoid(rate[:, None] * raw))


def convolve(ring, rows, taps):
    """Append projected rows [B, T, C] to their ring and return SiLU of the short convolution at each of them.

    taps: [C, K], or with axes of one as files store them.
    """
    ring.append(rows)
    taps = taps.reshape(rows.shape[-1], -1)
    return silu(short_conv(ring.history(taps.shape[1] - 1), taps))


def delta_rule(state, q, k, v, beta, decay):
    """One step of the gated delta rule for every bank; shapes as in ds4ref with B in front.

    The state is read once: ``o = Sᵀq = (decay · S)ᵀq + (k·q) δ``.
    """
    read = _einsum("bhnd,bhdv->bhnv", jnp.stack([k, q], axis=2) * decay[:, :, None], state)
    # v − Sᵀk as a product, since XLA:CPU would compute it, and what led to v, anew for every element of the state
    delta = beta[..., None] * _einsum("n,nbhv->bhv", jnp.array([1.0, -1.0], v.dtype), jnp.stack([v, read[:, :, 0]]))
    out = read[:, :, 1] + jnp.sum(q * k, axis=-1, keepdims=True) * delta
    return decay[..., None] * state + k[..., None] * delta[:, :, None, :], out


def delta_chunk(state, q, k, v, beta, decay):
    """C steps of the gated delta rule at once, C a power of two.

    state: [B, H, d, v], q, k: [B, H, C, d], v: [B, H, C, v], beta: [B, H, C], decay: [B, H, C, 1 or d] → (state, [B, H, C, v]).
    """
    since, ratio = _decays(decay)
    own, read = _pairs(jnp.stack([k, q], axis=2), k, ratio)
    inverse = _unit_lower_inverse(beta[..., None] * jnp.tril(own, -1))
    held = _einsum("bhntd,bhdv->bhntv", jnp.stack([k, q], axis=2) * since[:, :, None], state)
    delta = _einsum("bhts,bhsv->bhtv", inverse, beta[..., None] * (v - held[:, :, 0]))
    out = held[:, :, 1] + _einsum("bhts,bhsv->bhtv", read, delta)
    last = since[:, :, -1, :, None]
    return last * state + _einsum("bhsd,bhsv->bhdv", k * ratio[:, :, -1], delta), out


def _decays(decay):
    """(P [B, H, C, 1 or d], R [B, H, C, C, 1 or d]) of the decays of C ≤ 64 tokens; R_ts is only meant for s ≤ t.

    R is the exponential of a difference of running sums of logarithms. So that a weak decay behind a strong one is not lost in
    them, the logarithms are split: multiples of 2⁻¹⁰, whose sums are exact as long as they stay below 2¹⁴, and the rest.
    """
    logs = jnp.log(jnp.maximum(decay, jnp.finfo(decay.dtype).tiny))
    coarse = jnp.round(logs * 1024) / 1024
    until = jnp.asarray(np.tri(decay.shape[2]), decay.dtype)
    coarse, fine = (_einsum("tu,bhud->bhtd", until, part) for part in (coarse, logs - coarse))
    since = [part[:, :, :, None] - part[:, :, None] for part in (coarse, fine)]
    return jnp.exp(coarse + fine), jnp.exp(jnp.minimum(since[0] + since[1], 0))


def _pairs(x, k, ratio):
    """``Σ_d x_t R_ts k_s`` for s ≤ t, else 0. x: [B, H, N, C, d] → N arrays [B, H, C, C]."""
    if ratio.shape[-1] == 1:
        pairs = _einsum("bhntd,bhsd->nbhts", x, k) * ratio[..., 0]
    else:
        pairs = _einsum("bhntd,bhtsd->nbhts", x, k[:, :, None] * ratio)
    return jnp.tril(pairs)


def _unit_lower_inverse(lower):
    """(I + L)⁻¹ of strictly lower triangular L [..., C, C]: the inverses of diagonal blocks, doubled until one is left."""
    row = np.arange(lower.shape[-1])
    inverse = jnp.broadcast_to(jnp.eye(len(row), dtype=lower.dtype), lower.shape)
    size = 1
    while size < len(row):
        block = row // size
        below = (block[:, None] == block + 1) & (block % 2 == 0)  # what couples the two halves of a doubled block
        coupled = _einsum("...ij,...jk->...ik", inverse, jnp.where(below, lower, 0))
        inverse = inverse - _einsum("...ij,...jk->...ik", coupled, inverse)
        size *= 2
    return inverse


def associate(memory, q, k, v, beta, decay):
    """Write (k, v) of every token into a ``Recurrent`` component and read it with q.

    q, k: [B, T, H, d], v: [B, T, H, v], beta: [B, T, H], decay: [B, T, H, 1 or d] → [B, T, H, v].
    """
    q = unit_norm(q) / jnp.sqrt(jnp.float32(q.shape[-1]))
    k = unit_norm(k)
    live = memory.chunk.live[..., None]
    beta, decay = jnp.where(live, beta, 0), jnp.where(live[..., None], decay, 1)
    return memory.update(_advance, q, k, v, beta, decay)


def _advance(state, q, k, v, beta, decay):
    """Advance states [B, H, d, v] by T tokens; shapes as in :func:`associate`, beta 0 and decay 1 where nothing happens."""
    tokens = q.shape[1]
    if tokens == 1:
        state, out = delta_rule(state, *(x[:, 0] for x in (q, k, v, beta, decay)))
        return state, out[:, None]
    size = min(TOKENS["head" if decay.shape[-1] == 1 else "channel"], 1 << (tokens - 1).bit_length())
    chunks = -(-tokens // size)

    def cut(x, fill=0):
        """[B, T, H, …] → [chunks, B, H, size, …]"""
        x = jnp.pad(x, ((0, 0), (0, chunks * size - tokens), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
        return jnp.moveaxis(x.reshape(len(x), chunks, size, *x.shape[2:]), (1, 3), (0, 2))

    state, out = lax.scan(lambda state, now: delta_chunk(state, *now), state, (*map(cut, (q, k, v, beta)), cut(decay, 1)))
    out = jnp.moveaxis(out, (0, 3), (1, 2))
    return state, out.reshape(len(out), chunks * size, *out.shape[3:])[:, :tokens]


def gated_delta(memory, qkv, a, b, rate, bias, key_head):
    """The heads of a Gated DeltaNet block, see ds4ref. qkv: [B, T, C], a, b: [B, T, H], rate, bias: [H] → [B, T, H, v]."""
    heads, d, width = memory.kind.shape
    keys = (qkv.shape[-1] - heads * width) // 2
    q, k, v = jnp.split(qkv, (keys, 2 * keys), axis=-1)
    decay = jnp.exp(rate * softplus(a + bias))
    q, k = (part.reshape(*part.shape[:2], -1, d)[:, :, key_head] for part in (q, k))
    return associate(memory, q, k, v.reshape(*v.shape[:2], heads, width), sigmoid(b), decay[..., None])
