"""Inkling in JAX; read it beside ds4ref/families/inkling.py."""

import jax.numpy as jnp

from ds4ref.families.inkling import ARCHITECTURES

from .. import moe, views
from ..attention import Seen, attend
from ..layers import embed
from ..ops import rms_norm, sigmoid, softmax, softplus, top_k
from ..recurrent import short_conv
from ..weights import dequantize, linear

__all__ = ["ARCHITECTURES", "LAYER_PREFIX", "finish", "layer", "start", "tensors_of", "uses"]

LAYER_PREFIX = "model.llm.layers.{i}."

# Feed-forward matrices of a layer by the names that moe reads; a w13 is gate and up, row by row.
MATRICES = {
    "mlp.w13_dn.weight": ("ffn_gate.weight", "ffn_up.weight"),
    "mlp.w2_md.weight": ("ffn_down.weight",),
    "mlp.experts.w13_weight": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.w2_weight": ("ffn_down_exps.weight",),
    "mlp.shared_experts.shared_w13_weight": ("shared.ffn_gate_exps.weight", "shared.ffn_up_exps.weight"),
    "mlp.shared_experts.shared_w2_weight": ("shared.ffn_down_exps.weight",),
}


def tensors_of(c, artifact):
    """The file's tensors with every w13 in its two halves, and convolution taps [C, 1, K] as [C, K]."""
    tensors = {}
    for name, tensor in artifact.tensors.items():
        stem, _, rest = name.partition("mlp.")
        if (made := MATRICES.get(f"mlp.{rest}")) is not None:
            for n, to in enumerate(made):
                tensors[stem + to] = views.rows(tensor, stem + to, slice(n, None, len(made)))
        elif name.endswith("_sconv.weight"):
            tensors[name] = views.reshaped(tensor, name, tensor.shape[::2])
        else:
            tensors[name] = tensor
    return tensors


def uses(c, name):
    """Whether the forward pass reads this tensor: all but the towers'."""
    return name.startswith("model.llm.")


def start(c, top, tokens, chunk):
    """Normalised embeddings of the tokens [B, T] → [B, T, D]."""
    return embedded(c, top, tokens)


def embedded(c, top, tokens):
    """The normalised embeddings [..., D] of tokens [...]."""
    return rms_norm(embed(top["model.llm.embed.weight"], tokens), top["model.llm.embed_norm.weight"], c.norm_eps)


def finish(c, top, x):
    """Logits [..., V] of the last layer's output [..., D]."""
    return head(c, top, rms_norm(x, top["model.llm.norm.weight"], c.norm_eps))


def head(c, top, h):
    """Logits [..., V] of rows [..., D], without the rows that pad the stored vocabulary."""
    return linear(top["model.llm.unembed.weight"], h / c.logit_divisor)[..., : c.vocabulary]


def layer(c, i, w, state, x):
    """One layer on the residual x [B, T, D]."""
    window = c.heads(i).extent if c.local[i] else None
    return block(c, w, state, x, state.positions, local=c.local[i], window=window)


def block(c, w, state, x, positions, *, local, window):
    """One block of either kind on x [B, T, D]. positions: [B, T], which sharpen a global block's scores."""
    a = rms_norm(x, w["attn_norm.weight"], c.norm_eps)
    y = attention(c, w, state, a, positions, local, window)
    x = x + _convolve(state["conv_attn"], y, w["attn_sconv.weight"])
    y = feed_forward(c, w, rms_norm(x, w["mlp_norm.weight"], c.norm_eps))
    return x + _convolve(state["conv_mlp"], y, w["mlp_sconv.weight"])


def _convolve(ring, rows, taps):
    """Append rows [B, T, C] to their ``Ring(K)`` and return them plus the short convolution at each. taps: [C, K]."""
    ring.append(rows)
    taps = dequantize(taps)
    return rows + short_conv(ring.history(taps.shape[1] - 1), taps)


def attention(c, w, state, a, positions, local, window):
    """Attention on the normalised input a [B, T, D], before the output convolution."""
    heads, leading = c.local_heads if local else c.global_heads, a.shape[:2]
    q = linear(w["attn.wq_du.weight"], a).reshape(*leading, heads.query, heads.width)
    k = _convolve(state["conv_k"], linear(w["attn.wk_dv.weight"], a), w["attn.k_sconv.weight"])
    v = _convolve(state["conv_v"], linear(w["attn.wv_dv.weight"], a), w["attn.v_sconv.weight"])
    r = linear(w["attn.wr_du.weight"], a).reshape(*leading, heads.query, c.relative)
    q = rms_norm(q, w["attn.q_norm.weight"], c.norm_eps)
    k = rms_norm(k.reshape(*leading, heads.kv, heads.width), w["attn.k_norm.weight"], c.norm_eps)
    state["k"].append(k)
    state["v"].append(v.reshape(*leading, heads.kv, heads.width))
    if not local:
        sharpness = 1 + c.log_alpha * jnp.log(jnp.maximum((positions + 1) / c.log_floor, 1.0))[:, :, None, None]
        q, r = q * sharpness, r * sharpness
    projection = dequantize(w["attn.rel_logits_proj.proj"])
    seen = Seen(
        state["k"].rows(),
        state["v"].rows(),
        window,
        bias=lambda tile, distance: relative_bias(tile(r), projection, distance),
    )
    out = attend(q, seen, scale=1 / heads.width)
    return linear(w["attn.wo_ud.weight"], out.reshape(*leading, -1))


def relative_bias(r, projection, distance):
    """Score bias ``r · projection[:, distance]``, 0 from the extent on.

    r: [B, T, H, R], projection: [R, X], distance: int [B, T, S] → [B, T, H, S].
    """
    logits, extent = r @ projection, projection.shape[1]
    bias = jnp.take_along_axis(logits, jnp.clip(distance, 0, extent - 1)[:, :, None, :], axis=-1)
    return jnp.where((distance < extent)[:, :, None, :], bias, 0.0)


def feed_forward(c, w, m):
    """The dense feed-forward where the layer has one, or the experts. m: [B, T, D] normalised, before the convolution."""
    if "ffn_gate.weight" in w:
        return w["mlp.global_scale"] * moe.dense(m, w)
    logits = linear(w["mlp.gate.weight"], m)
    chosen = top_k(sigmoid(logits[..., : c.experts]) + w["mlp.gate.bias"], c.experts_used)
    rivals = jnp.concatenate([jnp.take_along_axis(logits, chosen, axis=-1), logits[..., c.experts :]], axis=-1)
    weights = softmax(-softplus(-rivals), axis=-1) * c.route_scale * w["mlp.gate.global_scale"]
    routed, shared = jnp.split(weights, (c.experts_used,), axis=-1)
    stacks = {name.removeprefix("shared."): stack for name, stack in w.items() if name.startswith("shared.")}
    every = jnp.broadcast_to(jnp.arange(c.shared_experts), shared.shape)
    return moe.experts(m, chosen, routed, w) + moe.experts(m, every, shared, stacks)
