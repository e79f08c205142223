"""K-EXAONE in JAX; read it beside ds4ref/families/exaone_moe.py."""

from ds4ref.families.exaone_moe import ARCHITECTURES

from .. import moe, nextn
from ..attention import Seen, attend
from ..layers import embed
from ..ops import angles, rms_norm, rope_frequencies, rotate_halves
from ..weights import linear, linears

__all__ = ["ARCHITECTURES", "draft_block", "draft_input", "draft_logits", "finish", "layer", "start", "uses"]


def uses(c, name):
    """Whether the forward pass reads this tensor: not those of the predictor block."""
    return not name.startswith(tuple(f"blk.{i}." for i in range(c.layers, c.layers + c.predictors)))


def start(c, top, tokens, chunk):
    """Embeddings of the tokens [B, T] → [B, T, D]."""
    return embed(top["token_embd.weight"], tokens)


def finish(c, top, x):
    """Logits [..., V] of the last layer's output [..., D]."""
    return linear(top["output.weight"], rms_norm(x, top["output_norm.weight"], c.norm_eps))


def layer(c, i, w, state, x):
    """One layer on the residual x [B, T, D]."""
    x = x + attention(c, i, w, state, rms_norm(x, w["attn_norm.weight"], c.norm_eps))
    return x + feed_forward(c, w, rms_norm(x, w["ffn_norm.weight"], c.norm_eps))


def attention(c, i, w, state, h):
    """Grouped-query attention on the normalised input h [B, T, D]; rotation and window on sliding layers only."""
    rows = linears([w[f"attn_{part}.weight"] for part in "qkv"], h)
    q, k, v = (part.reshape(*h.shape[:2], -1, c.head_width) for part in rows)
    q = rms_norm(q, w["attn_q_norm.weight"], c.norm_eps)
    k = rms_norm(k, w["attn_k_norm.weight"], c.norm_eps)
    if c.sliding[i]:
        theta = angles(state.positions, rope_frequencies(c.head_width, c.rope_base))[:, :, None, :]
        q, k = rotate_halves(q, theta), rotate_halves(k, theta)
    state["k"].append(k)
    state["v"].append(v)
    seen = Seen(state["k"].rows(), state["v"].rows(), c.window if c.sliding[i] else None)
    out = attend(q, seen, scale=c.head_width**-0.5)
    return linear(w["attn_output.weight"], out.reshape(*h.shape[:2], -1))


def feed_forward(c, w, h):
    """Dense SwiGLU where the layer has one, else routed experts plus the shared one."""
    if "ffn_gate.weight" in w:
        return moe.dense(h, w)
    return moe.sigmoid_experts(h, w, c.experts_used, c.expert_scale) + moe.shared_expert(h, w)


def draft_input(c, top, h):
    """The predictor's hidden rows, from the trunk's last output h [B, T, D]: what the head reads."""
    return rms_norm(h, top["output_norm.weight"], c.norm_eps)


def draft_block(c, d, top, w, state, hidden, tokens):
    """Run the predictor on hidden rows [B, T, D] and the tokens [B, T] after them → rows for its head and its next step."""
    x = layer(c, c.layers + d, w, state, nextn.joined(top, w, hidden, tokens, c.norm_eps))
    return rms_norm(x, w["nextn.shared_head_norm.weight"], c.norm_eps)


def draft_logits(c, d, top, w, row):
    """Draft logits [..., V] of rows of the predictor."""
    return nextn.logits(top, w, row)
