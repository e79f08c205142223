"""Recurrent mixers: the gated delta rule, with one decay per head or per key channel, and the short convolution before it.

Sources: Gated DeltaNet (Yang et al. 2024) and Kimi Delta Attention (Kimi Linear report 2025). State stays in the dtype of
the reference (float32 or better); bfloat16 state is known to degenerate.

Letters: H heads, d key width, v value width, C channels, K taps.
"""

import numpy as np

from .ops import sigmoid, silu, softplus, unit_norm


def short_conv(rows, taps):
    """Causal depthwise convolution at the newest row. rows: [≤ K, C] oldest first, taps: [C, K] → [C].

    The last tap meets the newest row; rows before the start of the sequence count as zero.
    """
    return np.sum(rows * taps.T[taps.shape[1] - len(rows) :], axis=0)


def delta_rule(state, q, k, v, beta, decay):
    """One step of the gated delta rule. state: [H, d, v], q and k: [H, d], v: [H, v], beta: [H] → (state, output [H, v]).

    ``decay`` is the factor itself: [H, 1] per head (Gated DeltaNet) or [H, d] per key channel (KDA).
    ``S ← decay · S;  δ = β (v − Sᵀk);  S ← S + k δᵀ;  o = Sᵀq``: decay first, then the read that forms δ, then the write.
    """
    state = decay[:, :, None] * state
    delta = beta[:, None] * (v - np.matmul(k[:, None, :], state)[:, 0])
    state = state + k[:, :, None] * delta[:, None, :]
    return state, np.matmul(q[:, None, :], state)[:, 0]


def bounded_decay(raw, rate, lower):
    """KDA's decay with a bounded exponent ("safe gate"): ``exp(lower · σ(rate · raw))``, in [exp(lower), 1].

    raw: [H, d] projected and biased; rate: [H] > 0, the exp(A_log) of the reports; lower < 0. → [H, d].
    """
    return np.exp(raw.dtype.type(lower) * sigmoid(rate[:, None] * raw))


def convolve(ring, row, taps):
    """Append a projected row [C] to its ``Ring(K)`` and return SiLU of the short convolution at it.

    taps: [C, K], with any axes of length 1 that a file adds.
    """
    ring.append(row)
    return silu(short_conv(ring.rows(), taps.reshape(len(row), -1)))


def associate(memory, q, k, v, beta, decay):
    """Write (k, v) into a ``Recurrent`` component by the delta rule and read it with q. Shapes as :func:`delta_rule`.

    q and k become unit vectors first (eps 1e-6 inside the root, a constant of the rule), q also carries 1/√d.
    """
    q = unit_norm(q) / q.dtype.type(np.sqrt(q.shape[-1]))
    state, out = delta_rule(memory.value, q, unit_norm(k), v, beta, decay)
    memory.replace(state)
    return out


def gated_delta(memory, qkv, a, b, rate, bias, key_head):
    """The heads of a Gated DeltaNet block at one token: from convolved channels to what the output norm takes. → [H, v].

    qkv: [2·G·d + H·v], channels of the queries and keys of G key heads, then of H values. a, b, rate, bias: [H];
    ``decay = exp(rate · softplus(a + bias))`` with rate < 0, ``beta = σ(b)``. key_head: int [H], which key head a value
    head reads.
    """
    heads, d, width = memory.kind.shape
    keys = (len(qkv) - heads * width) // 2
    q, k, v = np.split(qkv, (keys, 2 * keys))
    decay = np.exp(rate * softplus(a + bias))
    q, k = q.reshape(-1, d)[key_head], k.reshape(-1, d)[key_head]
    return associate(memory, q, k, v.reshape(heads, width), sigmoid(b), decay[:, None])
