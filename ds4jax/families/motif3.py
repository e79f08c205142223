"""Motif-3 in JAX; read it beside ds4ref/families/motif3.py."""

import jax.numpy as jnp

from ds4ref.families.motif3 import ARCHITECTURES, GATE_BOUND, HYPER_NORM_EPS, POLY_NORM_EPS, _frequencies, _score_scale

from .. import hyper, moe
from ..attention import Seen, attend
from ..layers import embed, layer_tensors
from ..ops import angles, rms_norm, rope_frequencies, rotate_halves, rotate_tail, sigmoid
from ..weights import dequantize, linear, linears

__all__ = ["ARCHITECTURES", "draft_block", "draft_input", "draft_logits", "draft_tensors", "finish", "layer", "start", "uses"]


def uses(c, name):
    """Whether the forward pass reads this tensor: all but the predictor's."""
    return not name.startswith("mtp.")


def start(c, top, tokens, chunk):
    """Streams [B, T, N, D]: N copies of the embeddings of the tokens [B, T]."""
    return jnp.repeat(embed(top["token_embd.weight"], tokens)[:, :, None, :], c.streams, axis=2)


def finish(c, top, streams):
    """Logits [..., V] of the streams [..., N, D] after the last layer."""
    return linear(top["output.weight"], rms_norm(jnp.mean(streams, axis=-2), top["output_norm.weight"], c.norm_eps))


def layer(c, i, w, state, streams):
    """One layer on the streams [B, T, N, D]."""
    streams = _site(c, w, "attn", streams, lambda a: attention(c, i, w, state, a))
    return _site(c, w, "ffn", streams, lambda a: feed_forward(c, w, a))


def _site(c, w, site, streams, block):
    """One hyper-connection around one block (attention or feed-forward), the block's norm included."""
    p, leading = f"mhc_{site}.", streams.shape[:2]
    n = rms_norm(streams.reshape(*leading, -1), w[f"{p}rms_norm.weight"], HYPER_NORM_EPS)
    pre, post, mix = (
        w[f"{p}alpha_{part}"] * linear(w[f"{p}proj_{part}.weight"], n) + bias.reshape(-1)
        for part, bias in (
            ("pre", w[f"{p}bias_pre"]),
            ("post", w[f"{p}bias_post"]),
            ("res", dequantize(w[f"{p}bias_res"])),
        )
    )
    pre, post = (sigmoid(jnp.clip(x, -GATE_BOUND, GATE_BOUND)) for x in (pre, post))
    mix = hyper.sinkhorn_exp(mix.reshape(*leading, c.streams, c.streams), c.sinkhorn)
    y = block(rms_norm(jnp.einsum("btn,btnd->btd", pre, streams), w[f"{site}_norm.weight"], c.norm_eps))
    return hyper.expand(streams, y, c.post_scale * post, mix.swapaxes(2, 3))


def attention(c, i, w, state, a):
    """Differential latent attention on the normalised input a [B, T, D]."""
    return _attend(c, w, state, a, _frequencies(c, i), _score_scale(c, i), c.window + 1 if c.sliding(i) else None)


def _attend(c, w, state, a, frequencies, scale, window):
    """The attention of one block, in absorbed form. window: keys that a query sees, its own included, or None: all."""
    leading, nope = a.shape[:2], c.key_width - c.rotary
    theta = angles(state.positions, frequencies)
    latent_q = rms_norm(linear(w["attn_q_a.weight"], a), w["attn_q_a_norm.weight"], c.norm_eps)
    q = linear(w["attn_q_b.weight"], latent_q).reshape(*leading, c.groups, -1, c.key_width)
    q = rotate_tail(q, theta[:, :, None, None, :], rotate_halves)
    latent, k_rot = jnp.split(linear(w["attn_kv_a.weight"], a), (c.kv_rank,), axis=-1)
    latent = rms_norm(latent, w["attn_kv_a_norm.weight"], c.norm_eps)
    state["latent"].append(jnp.concatenate([latent, rotate_halves(k_rot, theta)], axis=-1))
    rows = state["latent"].rows()
    k_b, v_b = jnp.split(dequantize(w["attn_kv_b.weight"]).reshape(c.groups, -1, c.kv_rank), (nope,), axis=1)
    absorbed = jnp.einsum("btghn,gnr->btghr", q[..., :nope], k_b)
    query = jnp.concatenate([absorbed, q[..., nope:]], axis=-1).reshape(*leading, c.heads, -1)
    read = attend(query, Seen(rows, rows, window), scale=scale)[..., : c.kv_rank]
    read = read.reshape(*leading, c.groups, -1, c.kv_rank)
    balance = sigmoid(linear(w["attn_lambda.weight"], a)).reshape(*leading, c.groups, -1, 1)
    difference = read[:, :, :, :-1] - balance * read[:, :, :, -1:]
    out = jnp.einsum("btghr,gvr->btghv", difference, v_b).reshape(*leading, -1)
    return linear(w["attn_output.weight"], out * sigmoid(linear(w["attn_q_gate.weight"], latent_q)))


def feed_forward(c, w, a):
    """The dense feed-forward where the layer has one, else routed experts plus the shared one. a: [B, T, D] normalised."""
    if "ffn_gate.weight" in w:
        return _poly_unit(c, w, "", a)
    affinity = sigmoid(linear(w["ffn_gate_inp.weight"], a))
    chosen, weights = moe.route(affinity, c.experts_used, w["exp_probs_b.bias"], c.expert_scale)
    powers, bias = (dequantize(w[f"ffn_polynorm_exps.{part}"]) for part in ("weight", "bias"))
    own = powers, jnp.clip(bias, -c.poly_bias_bound, c.poly_bias_bound)

    def activation(gate, up, powers, bias):
        product = _poly_product(c, gate, up, powers, bias)
        return jnp.clip(product, -c.hidden_bound, c.hidden_bound) * c.poly_scale

    return moe.experts(a, chosen, weights, w, activation=activation, own=own) + _poly_unit(c, w, "_shexp", a)


def _poly_unit(c, w, kind, x):
    """``down( poly_norm(gate x) · (up x) · scale )`` of the dense or the shared unit."""
    gate, up = linears([w[f"ffn_{part}{kind}.weight"] for part in ("gate", "up")], x)
    product = _poly_product(c, gate, up, w[f"ffn_polynorm{kind}.weight"], w[f"ffn_polynorm{kind}.bias"])
    return linear(w[f"ffn_down{kind}.weight"], product * c.poly_scale)


def _poly_product(c, gate, up, powers, bias):
    """``poly_norm(gate) · up``, both bounded."""
    gate, up = (jnp.clip(x, -c.hidden_bound, c.hidden_bound) for x in (gate, up))
    return poly_norm(gate, powers, bias) * up


def poly_norm(x, powers, bias):
    """PolyNorm with sigmoid weights over the last axis; see ds4ref."""
    cube, square, line = (rms_norm(power, eps=POLY_NORM_EPS) for power in (x * x * x, x * x, x))
    w0, w1, w2 = sigmoid(powers)
    return w0 * cube + w1 * square + w2 * line + bias


def draft_tensors(c, artifact):
    """(nothing, the predictor's tensors)."""
    return {}, [layer_tensors(artifact.tensors, "mtp.{i}.", 0)]


def draft_input(c, top, h):
    """The predictor's hidden rows, from the trunk's last streams h [B, T, N, D]: what the head reads."""
    return rms_norm(jnp.mean(h, axis=-2), top["output_norm.weight"], c.norm_eps)


def draft_block(c, d, top, w, state, hidden, tokens):
    """Run the predictor on hidden rows and the tokens after them → the rows [B, T, D] that its head reads. Hidden first."""
    embedding = rms_norm(embed(top["token_embd.weight"], tokens), w["embed_norm.weight"], c.norm_eps)
    x = linear(w["input_proj.weight"], jnp.concatenate([hidden, embedding], axis=-1))
    a = rms_norm(x, w["input_layernorm.weight"], c.norm_eps)
    frequencies = rope_frequencies(c.rotary, c.rope_base_sliding)
    x = x + _attend(c, w, state, a, frequencies, c.key_width**-0.5, c.window + 1)
    x = x + feed_forward(c, w, rms_norm(x, w["post_attention_layernorm.weight"], c.norm_eps))
    return rms_norm(x, w["final_layernorm.weight"], c.norm_eps)


def draft_logits(c, d, top, w, hidden):
    """Draft logits [..., V] of the predictor's rows."""
    return linear(top["output.weight"], hidden)
