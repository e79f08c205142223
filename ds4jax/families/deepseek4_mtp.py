"""DeepSeek V4's predictor (MTP) in JAX; read it beside ds4ref/families/deepseek4_mtp.py."""

from ..layers import embed, layer_tensors
from ..ops import rms_norm
from ..weights import linear
from . import deepseek4

__all__ = ["draft_block", "draft_input", "draft_logits", "draft_tensors"]


def draft_tensors(c, artifact):
    """(nothing, the predictor's tensors)."""
    return {}, [layer_tensors(deepseek4.tensors_of(c, artifact), "mtp.{i}.", 0)]


def draft_input(c, top, h):
    """The predictor's streams: the trunk's last ones h [B, T, N, D]."""
    return h


def draft_block(c, d, top, w, state, hidden, tokens):
    """Run the predictor on streams [B, T, N, D] and the tokens after them → streams [B, T, N, D]."""
    embedding = rms_norm(embed(top["token_embd.weight"], tokens), w["enorm.weight"], c.norm_eps)
    streams = linear(w["h_proj.weight"], rms_norm(hidden, w["hnorm.weight"], c.norm_eps))
    streams = streams + linear(w["e_proj.weight"], embedding)[:, :, None, :]
    return deepseek4.layer(c, c.layers - 1, w, state, (streams, tokens))[0]


def draft_logits(c, d, top, w, hidden):
    """Draft logits [..., V] of the predictor's streams [..., N, D]."""
    row = deepseek4.mixed(c, w, "hc_head", hidden)
    return linear(top["output.weight"], rms_norm(row, w["norm.weight"], c.norm_eps))
