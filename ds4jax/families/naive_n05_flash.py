"""Naive-N0.5-Flash in JAX; read it beside ds4ref/families/naive_n05_flash.py."""

from ds4ref.families.naive_n05_flash import ARCHITECTURES, INDEX_NORM_EPS

from .. import moe
from ..attention import Seen, attend
from ..indexer import choose
from ..layers import embed
from ..ops import angles, layer_norm, rms_norm, rope_frequencies, rotate_head
from ..rounding import round_blocks, round_e4m3
from ..weights import linear, linears

__all__ = ["ARCHITECTURES", "finish", "layer", "start", "uses"]


def uses(c, name):
    """Whether the forward pass reads this tensor."""
    return True


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
    """Attention on the normalised input n [B, T, D]: the window with sinks, or the indexer's choice without."""
    sliding = c.sliding[i]
    theta = angles(state.positions, rope_frequencies(c.rotary, c.rope_base_sliding if sliding else c.rope_base))
    q, k, v = linears([w[f"attn_{part}.weight"] for part in "qkv"], n)
    q = rotate_head(q.reshape(*n.shape[:2], c.heads, c.key_width), theta[:, :, None, :])
    state["k"].append(rotate_head(k.reshape(*n.shape[:2], -1, c.key_width), theta[:, :, None, :]))
    state["v"].append(v.reshape(*n.shape[:2], -1, c.value_width) * c.value_scale)
    keys, values = state["k"].rows(), state["v"].rows()
    if sliding:
        seen, sinks = Seen(keys, values, window=c.window), w["attn_sinks.weight"]
    else:
        seen, sinks = Seen(keys, values, chosen=index(c, w, state, n, theta)), None
    out = attend(q, seen, scale=c.key_width**-0.5, sinks=sinks)
    return linear(w["attn_output.weight"], out.reshape(*n.shape[:2], -1))


def index(c, w, state, n, theta):
    """Append the tokens' indexer keys and choose each token's best ``top_k`` of the visible ones."""
    key = linear(w["indexer.k_proj.weight"], n)
    key = layer_norm(key, w["indexer.k_norm.weight"], w["indexer.k_norm.bias"], INDEX_NORM_EPS)
    state["index"].append(_round(rotate_head(key, theta)))
    q = linear(w["indexer.q_proj.weight"], n).reshape(*n.shape[:2], c.index_heads, c.index_width)
    weights = linear(w["indexer.proj.weight"], n) * c.index_heads**-0.5
    q = _round(rotate_head(q, theta[:, :, None, :]))
    return choose(q, weights, state["index"].rows(), c.index_top_k)


def _round(x):
    """The model's E4M3 round trip of indexer rows [..., width]."""
    return round_blocks(x, x.shape[-1], 448, 1e-4, round_e4m3, power_of_two=False)


def feed_forward(c, w, n):
    """Dense SwiGLU where the layer has one, else routed experts (no shared one)."""
    if "ffn_gate.weight" in w:
        return moe.dense(n, w)
    return moe.sigmoid_experts(n, w, c.experts_used)
