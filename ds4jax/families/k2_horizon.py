"""K2-Horizon in JAX; read it beside ds4ref/families/k2_horizon.py."""

from ds4ref.families.k2_horizon import ARCHITECTURES

from .. import moe
from ..attention import Seen, attend
from ..layers import embed
from ..ops import angles, rms_norm, rope_frequencies, rotate_head, sigmoid
from ..weights import linear, linears

__all__ = ["ARCHITECTURES", "finish", "layer", "start", "uses"]


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
    x = x + attention(c, w, state, rms_norm(x, w["attn_norm.weight"], c.norm_eps))
    return x + feed_forward(c, w, rms_norm(x, w["ffn_norm.weight"], c.norm_eps))


def attention(c, w, state, h):
    """Grouped-query attention over all tokens so far, on the normalised input h [B, T, D]."""
    theta = angles(state.positions, rope_frequencies(c.rotary, c.rope_base))[:, :, None, :]
    rows = linears([w[f"attn_{part}.weight"] for part in "qkv"], h)
    q, k, v = (part.reshape(*h.shape[:2], -1, c.head_width) for part in rows)
    state["k"].append(rotate_head(k, theta))
    state["v"].append(v)
    out = attend(rotate_head(q, theta), Seen(state["k"].rows(), state["v"].rows()), scale=c.head_width**-0.5)
    return linear(w["attn_output.weight"], out.reshape(*h.shape[:2], -1))


def feed_forward(c, w, h):
    """Dense SwiGLU where the layer has one, else routed experts plus the shared one."""
    if "ffn_gate.weight" in w:
        return moe.dense(h, w)
    affinity = sigmoid(linear(w["ffn_gate_inp.weight"], h))
    chosen, weights = moe.route(affinity, c.experts_used, w["exp_probs_b.bias"], c.expert_scale)
    return moe.experts(h, chosen, weights, w) + moe.shared_expert(h, w)
