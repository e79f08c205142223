"""Solar Open2 in JAX; read it beside ds4ref/families/solar_open2.py."""

from dataclasses import replace

import jax.numpy as jnp

from ds4ref.families.solar_open2 import ARCHITECTURES, LEAST_LOG_DECAY

from .. import moe
from ..attention import Seen, attend
from ..layers import embed
from ..ops import rms_norm, sigmoid, softplus
from ..recurrent import associate, convolve
from ..weights import dequantize, linear, linears

__all__ = ["ARCHITECTURES", "finish", "layer", "start", "tensors_of", "uses"]


def tensors_of(c, artifact):
    """The artifact's tensors, without the axes of one that its short convolutions [C, K] and decay rates [H] come with."""
    shapes = {"ssm_a": (c.heads,)} | {f"ssm_conv1d_{part}.weight": (c.heads * c.kda_width, c.kda_taps) for part in "qkv"}
    kinds = {name: name.split(".", 2)[-1] for name in artifact.tensors}
    return {name: replace(t, shape=shapes.get(kinds[name], t.shape)) for name, t in artifact.tensors.items()}


def uses(c, name):
    """Whether the forward pass reads this tensor."""
    return True


def start(c, top, tokens, chunk):
    """Embeddings of the tokens [B, T] → [B, T, D]."""
    return embed(top["token_embd.weight"], tokens)


def finish(c, top, x):
    """Logits [..., V] of the last layer's output [..., D]."""
    return linear(top["output.weight"], rms_norm(x, top["output_norm.weight"], c.norm_eps))


def layer(c, i, w, state, x):
    """One layer on the residual x [B, T, D]."""
    mixer = attention if c.kv_heads[i] else kda
    x = x + mixer(c, w, state, rms_norm(x, w["attn_norm.weight"], c.norm_eps))
    return x + feed_forward(c, w, rms_norm(x, w["ffn_norm.weight"], c.norm_eps))


def attention(c, w, state, h):
    """Grouped-query attention over all tokens so far, gated per channel, on the normalised input h [B, T, D]."""
    *rows, gate = linears([w[f"attn_{part}.weight"] for part in ("q", "k", "v", "gate")], h)
    q, k, v = (part.reshape(*h.shape[:2], -1, c.head_width) for part in rows)
    state["k"].append(k)
    state["v"].append(v)
    out = attend(q, Seen(state["k"].rows(), state["v"].rows()), scale=c.head_width**-0.5)
    return linear(w["attn_output.weight"], out.reshape(*h.shape[:2], -1) * sigmoid(gate))


def kda(c, w, state, h):
    """Kimi Delta Attention on the normalised input h [B, T, D]. Decay and gate are low-rank projections."""
    heads = (*h.shape[:2], c.heads, c.kda_width)
    rows = linears([w[f"attn_{part}.weight"] for part in "qkv"], h)
    q, k, v = (
        convolve(state[part], own, dequantize(w[f"ssm_conv1d_{part}.weight"])).reshape(heads)
        for part, own in zip("qkv", rows, strict=True)
    )
    raw = linear(w["ssm_f_b.weight"], linear(w["ssm_f_a.weight"], h)) + w["ssm_dt.bias"]
    beta = 2 * sigmoid(linear(w["ssm_beta.weight"], h))
    decay = jnp.exp(log_decay(c, raw.reshape(heads), w["ssm_a"][:, None]))
    out = associate(state["memory"], q, k, v, beta, decay)
    gate = sigmoid(linear(w["ssm_g_b.weight"], linear(w["ssm_g_a.weight"], h)))
    return linear(w["attn_output.weight"], rms_norm(out, w["ssm_norm.weight"], c.norm_eps).reshape(*h.shape[:2], -1) * gate)


def log_decay(c, raw, rate):
    """``max(rate · softplus(raw), −5)`` [B, T, H, d], rate [H, 1]; without the maximum where ``unbounded``."""
    g = rate * softplus(raw)
    return g if c.unbounded else jnp.maximum(g, LEAST_LOG_DECAY)


def feed_forward(c, w, h):
    """Routed experts plus the shared one, on the normalised input h [B, T, D]."""
    return moe.sigmoid_experts(h, w, c.experts_used, c.expert_scale) + moe.shared_expert(h, w)
