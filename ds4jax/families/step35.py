"""Step 3.7 (and 3.5) Flash in JAX; read it beside ds4ref/families/step35.py."""

from ds4ref.families.step35 import ARCHITECTURES

from .. import moe, nextn
from ..attention import Seen, attend
from ..layers import embed
from ..ops import angles, divided_angles, rms_norm, rope_frequencies, rotate_head, sigmoid
from ..weights import linear, linears

__all__ = ["ARCHITECTURES", "draft_block", "draft_input", "draft_logits", "finish", "layer", "start", "uses"]


def uses(c, name):
    """Whether the forward pass reads this tensor: not those of the predictor blocks."""
    return not name.startswith(tuple(f"blk.{i}." for i in range(c.layers, c.layers + c.predictors)))


def start(c, top, tokens, chunk):
    """(embeddings [B, T, D], angles [B, T, d/4] of full layers): the stored divisors make those, and layers do not see them."""
    rotary = c.head_width // 2
    divisors = top["rope_freqs.weight"][: rotary // 2]
    theta = divided_angles(chunk.positions, rope_frequencies(rotary, c.rope_base), divisors)
    return embed(top["token_embd.weight"], tokens), theta


def finish(c, top, x):
    """Logits [..., V] of the last layer's output."""
    h, _ = x
    return linear(top["output.weight"], rms_norm(h, top["output_norm.weight"], c.norm_eps))


def layer(c, i, w, state, x):
    """One layer on (residual, angles of full layers)."""
    h, theta = x
    h = h + attention(c, i, w, state, rms_norm(h, w["attn_norm.weight"], c.norm_eps), theta)
    return h + feed_forward(c, i, w, rms_norm(h, w["ffn_norm.weight"], c.norm_eps)), theta


def attention(c, i, w, state, n, theta):
    """Gated grouped-query attention on the normalised input n [B, T, D]; theta: angles of full layers."""
    if c.sliding[i]:
        theta = angles(state.positions, rope_frequencies(c.head_width, c.rope_base_sliding))
    theta = theta[:, :, None, :]

    *heads, gate = linears([w[f"attn_{part}.weight"] for part in ("q", "k", "v", "gate")], n)
    q, k, v = (rows.reshape(*n.shape[:2], -1, c.head_width) for rows in heads)

    def rotated(part, x):
        return rotate_head(rms_norm(x, w[f"attn_{part}_norm.weight"], c.norm_eps), theta)

    state["k"].append(rotated("k", k))
    state["v"].append(v)
    seen = Seen(state["k"].rows(), state["v"].rows(), c.window if c.sliding[i] else None)
    out = attend(rotated("q", q), seen, scale=c.head_width**-0.5)
    return linear(w["attn_output.weight"], (sigmoid(gate)[..., None] * out).reshape(*n.shape[:2], -1))


def feed_forward(c, i, w, n):
    """Dense SwiGLU where the layer has one, else routed experts plus the shared one; limits after SiLU."""
    if "ffn_gate.weight" in w:
        return moe.dense(n, w, c.clamp_shared[i], "activation")
    routed = moe.sigmoid_experts(n, w, c.experts_used, c.expert_scale, c.clamp_routed[i], "activation", floor=0.0)
    return routed + moe.shared_expert(n, w, c.clamp_shared[i], "activation")


def draft_input(c, top, h):
    """Block 0's hidden rows: the trunk's last output h [B, T, D], not normalised."""
    return h


def draft_block(c, d, top, w, state, hidden, tokens):
    """Run predictor d on hidden rows and tokens → its output [B, T, D], not normalised: the hidden rows of block d + 1."""
    x, _ = layer(c, c.layers + d, w, state, (nextn.joined(top, w, hidden, tokens, c.norm_eps), None))
    return x


def draft_logits(c, d, top, w, hidden):
    """Draft logits [..., V] of outputs of predictor d: its own norm and head."""
    return nextn.logits(top, w, rms_norm(hidden, w["nextn.shared_head_norm.weight"], c.norm_eps))
