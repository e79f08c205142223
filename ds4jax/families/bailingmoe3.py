"""Ling 3.0 in JAX; read it beside ds4ref/families/bailingmoe3.py."""

import jax.numpy as jnp

from ds4ref.families.bailingmoe3 import ARCHITECTURES, YARN_SCALE, frequencies

from .. import moe
from ..attention import attend_latent
from ..layers import block_number, embed
from ..ops import angles, rms_norm, rotate_pairs, sigmoid
from ..recurrent import associate, bounded_decay, convolve
from ..weights import dequantize, linear, linears

__all__ = ["ARCHITECTURES", "finish", "layer", "start", "uses"]


def uses(c, name):
    """Whether the forward pass reads this tensor: not the predictor's."""
    return block_number(name) < c.layers


def start(c, top, tokens, chunk):
    """Embeddings of the tokens [B, T] → [B, T, D]."""
    return embed(top["token_embd.weight"], tokens)


def finish(c, top, x):
    """Logits [..., V] of the last layer's output [..., D]."""
    return linear(top["output.weight"], rms_norm(x, top["output_norm.weight"], c.norm_eps))


def layer(c, i, w, state, x):
    """One layer on the residual x [B, T, D]."""
    h = rms_norm(x, w["attn_norm.weight"], c.norm_eps)
    x = x + (attention if c.latent[i] else kda)(c, w, state, h)
    return x + feed_forward(c, i, w, rms_norm(x, w["ffn_norm.weight"], c.norm_eps))


def kda(c, w, state, h):
    """Kimi Delta Attention on the normalised input h [B, T, D]. Decay and gate are full-rank projections."""
    heads = (*h.shape[:2], c.heads, c.kda_width)
    rows = linears([w[f"attn_{part}.weight"] for part in "qkv"], h)
    q, k, v = (
        convolve(state[part], own, dequantize(w[f"ssm_conv1d_{part}.weight"])).reshape(heads)
        for part, own in zip("qkv", rows, strict=True)
    )
    raw = (linear(w["ssm_f_a.weight"], h) + w["ssm_dt.bias"]).reshape(heads)
    decay = bounded_decay(raw, dequantize(w["ssm_a"]).reshape(-1), c.kda_lower)  # ssm_a holds exp(A_log)
    out = associate(state["memory"], q, k, v, sigmoid(linear(w["ssm_beta.weight"], h)), decay)
    gate = sigmoid(linear(w["ssm_g_a.weight"], h))
    return linear(w["attn_output.weight"], rms_norm(out, w["ssm_norm.weight"], c.norm_eps).reshape(gate.shape) * gate)


def attention(c, w, state, h):
    """Gated latent attention over all tokens so far, on the normalised input h [B, T, D]."""
    theta, scale = angles(state.positions, frequencies(c)), YARN_SCALE if c.yarn else 1.0
    if c.q_rank:
        latent = rms_norm(linear(w["attn_q_a.weight"], h), w["attn_q_a_norm.weight"], c.norm_eps)
        q = linear(w["attn_q_b.weight"], latent)
    else:
        q = linear(w["attn_q.weight"], h)
    q, q_rot = jnp.split(q.reshape(*h.shape[:2], c.heads, -1), [c.nope], axis=-1)
    q_rot = rotate_pairs(q_rot, theta[:, :, None, :], scale)
    latent, key = jnp.split(linear(w["attn_kv_a_mqa.weight"], h), [c.kv_rank], axis=-1)
    latent = rms_norm(latent, w["attn_kv_a_norm.weight"], c.norm_eps)
    state["latent"].append(jnp.concatenate([latent, rotate_pairs(key, theta, scale)], axis=-1))
    rows, k_b, v_b = state["latent"].rows(), w["attn_k_b.weight"], w["attn_v_b.weight"]
    out = attend_latent(q, q_rot, rows, rows, k_b, v_b, (c.nope + c.rotary) ** -0.5)
    gate = sigmoid(linear(w["attn_gate.weight"], h))
    return linear(w["attn_output.weight"], (gate[..., None] * out).reshape(*h.shape[:2], -1))


def feed_forward(c, i, w, h):
    """Dense SwiGLU where the layer has one, else routed experts plus the shared one, clamped after SiLU."""
    if "ffn_gate.weight" in w:
        return moe.dense(h, w)
    affinity, bias = sigmoid(linear(w["ffn_gate_inp.weight"], h)), w["exp_probs_b.bias"]
    chosen, weights = moe.route_grouped(affinity, c.experts_used, c.groups, c.groups_used, bias, c.expert_scale)
    routed = moe.experts(h, chosen, weights, w, c.clamp_routed[i], clamp="activation")
    return routed + moe.shared_expert(h, w, c.clamp_shared[i], clamp="activation")
