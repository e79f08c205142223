"""Recurrent mixers over a chunk: :mod:`ds4ref.recurrent` with a scan over its T tokens. Padding changes nothing.

Letters: B banks, T tokens, H heads, d key width, v value width, C channels, K taps.
"""

import jax.numpy as jnp
from jax import lax

from .ops import sigmoid, silu, softplus, unit_norm


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
    """One step of the gated delta rule for every bank; shapes as in ds4ref with B in front."""
    state = decay[..., None] * state
    delta = beta[..., None] * (v - jnp.einsum("bhd,bhdv->bhv", k, state))
    state = state + k[..., None] * delta[:, :, None, :]
    return state, jnp.einsum("bhd,bhdv->bhv", q, state)


def associate(memory, q, k, v, beta, decay):
    """Write (k, v) of every token into a ``Recurrent`` component and read it with q.

    q, k: [B, T, H, d], v: [B, T, H, v], beta: [B, T, H], decay: [B, T, H, 1 or d] → [B, T, H, v].
    """
    q = unit_norm(q) / jnp.sqrt(jnp.float32(q.shape[-1]))
    k = unit_norm(k)
    live = memory.chunk.live

    def step(state, now):
        *inputs, on = now
        new, out = delta_rule(state, *inputs)
        return jnp.where(on[:, None, None, None], new, state), out

    columns = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, beta, decay, live)]
    state, out = lax.scan(step, memory.value, columns)
    memory.replace(state)
    return jnp.moveaxis(out, 0, 1)


def gated_delta(memory, qkv, a, b, rate, bias, key_head):
    """The heads of a Gated DeltaNet block, see ds4ref. qkv: [B, T, C], a, b: [B, T, H], rate, bias: [H] → [B, T, H, v]."""
    heads, d, width = memory.kind.shape
    keys = (qkv.shape[-1] - heads * width) // 2
    q, k, v = jnp.split(qkv, (keys, 2 * keys), axis=-1)
    decay = jnp.exp(rate * softplus(a + bias))
    q, k = (part.reshape(*part.shape[:2], -1, d)[:, :, key_head] for part in (q, k))
    return associate(memory, q, k, v.reshape(*v.shape[:2], heads, width), sigmoid(b), decay[..., None])
