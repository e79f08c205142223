"""MiMo-V2.6-Flash in JAX; read it beside ds4ref/families/mimo2.py."""

import jax.numpy as jnp

from ds4ref.families.mimo2 import ARCHITECTURES

from .. import moe, nextn
from ..attention import Seen, attend
from ..layers import embed
from ..ops import angles, rms_norm, rope_frequencies, rotate_head
from ..weights import linear

__all__ = ["ARCHITECTURES", "draft_block", "draft_input", "draft_logits", "finish", "layer", "start", "uses"]


def uses(c, name):
    """Whether the forward pass reads this tensor: not those of the predictor blocks."""
    return not name.startswith(tuple(f"blk.{i}." for i in range(c.layers, c.layers + c.predictors)))


def start(c, top, tokens, chunk):
    """Embeddings of the tokens [B, T] → [B, T, D]."""
    return embed(top["token_embd.weight"], tokens)


def finish(c, top, h):
    """Logits [..., V] of the last layer's output [..., D]."""
    return linear(top["output.weight"], rms_norm(h, top["output_norm.weight"], c.norm_eps))


def layer(c, i, w, state, h):
    """One layer on the residual h [B, T, D]."""
    h = h + attention(c, i, w, state, rms_norm(h, w["attn_norm.weight"], c.norm_eps))
    return h + feed_forward(c, w, rms_norm(h, w["ffn_norm.weight"], c.norm_eps))


def attention(c, i, w, state, n):
    """Grouped-query attention on the normalised input n [B, T, D]; window and sinks on sliding layers only."""
    groups, sliding = c.kv_heads[i], c.sliding[i]
    rows = (c.heads * c.key_width, (c.heads + groups) * c.key_width)
    q, k, v = jnp.split(linear(w["attn_qkv.weight"], n), rows, axis=-1)
    base = c.rope_base_sliding if sliding else c.rope_base
    theta = angles(state.positions, rope_frequencies(c.rotary, base))[:, :, None, :]
    q = rotate_head(q.reshape(*n.shape[:2], c.heads, c.key_width), theta)
    state["k"].append(rotate_head(k.reshape(*n.shape[:2], groups, c.key_width), theta))
    state["v"].append(v.reshape(*n.shape[:2], groups, c.value_width) * c.value_scale)
    seen = Seen(state["k"].rows(), state["v"].rows(), c.window if sliding else None)
    sinks = w["attn_sinks.weight"] if sliding else None
    out = attend(q, seen, scale=c.key_width**-0.5, sinks=sinks)
    return linear(w["attn_output.weight"], out.reshape(*n.shape[:2], -1))


def feed_forward(c, w, n):
    """Dense SwiGLU where the layer has one, else routed experts (no shared one)."""
    if "ffn_gate.weight" in w:
        return moe.dense(n, w)
    return moe.sigmoid_experts(n, w, c.experts_used)


def draft_input(c, top, h):
    """Block 0's hidden rows: the trunk's last output h [B, T, D], not normalised."""
    return h


def draft_block(c, d, top, w, state, hidden, tokens):
    """Run predictor d on hidden rows and tokens → its output [B, T, D], not normalised: the hidden rows of block d + 1."""
    return layer(c, c.layers + d, w, state, nextn.joined(top, w, hidden, tokens, c.norm_eps))


def draft_logits(c, d, top, w, hidden):
    """Draft logits [..., V] of outputs of predictor d: its own norm, the trunk's head."""
    return linear(top["output.weight"], rms_norm(hidden, w[f"{c.predictor_norm}.weight"], c.norm_eps))
