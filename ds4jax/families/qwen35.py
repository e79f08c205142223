"""Qwen3.5, 3.6, 3.8 dense and Bonsai 2 in JAX; read it beside ds4ref/families/qwen35.py."""

import jax.numpy as jnp
import numpy as np

from ds4ref.families.qwen35 import ARCHITECTURES

from .. import nextn, views
from ..attention import Seen, attend
from ..layers import embed as embed_rows
from ..ops import angles, rms_norm, rope_frequencies, rotate_head, sigmoid, silu
from ..recurrent import convolve, gated_delta
from ..rounding import hadamard
from ..weights import dequantize
from ..weights import linear as product
from ..weights import linears as products

__all__ = [
    "ARCHITECTURES", "draft_block", "draft_input", "draft_logits", "finish", "layer", "start", "tensors_of", "uses",
]  # fmt: skip


def tensors_of(c, artifact):
    """The file's tensors, and beside each that it holds rotated, ``X.weight``, the signs of its input: ``X.signs``."""
    if c.fold is None:
        return artifact.tensors
    folded = (*c.fold.weights, *["token_embd.weight"] * c.fold.embedding)
    return artifact.tensors | {tensor.name: tensor for tensor in (_signs(c, artifact, name) for name in folded)}


def _signs(c, artifact, name):
    width, signs = artifact.tensors[name].shape[-1], c.fold.sign_widths
    values = np.ones(width)
    if signs:
        start = sum(signs[: signs.index(width)])
        values = artifact.metadata["prism.hadamard.sign_values"][start : start + width]
    return views.made(name.removesuffix("weight") + "signs", values.astype(np.int8))


def uses(c, name):
    """Whether the forward pass reads this tensor: all but those of the NextN blocks."""
    return not name.startswith(tuple(f"blk.{i}." for i in range(c.layers, c.layers + c.predictors)))


def start(c, top, tokens, chunk):
    """Embeddings of the tokens [B, T] → [B, T, D]; a rotated row z becomes ``s ⊙ (H z)``."""
    rows = embed_rows(top["token_embd.weight"], tokens)
    signs = top.get("token_embd.signs")
    return rows if signs is None else _rotate(c, rows) * signs


def finish(c, top, x):
    """Logits [..., V] of the last layer's output [..., D]."""
    return linear(c, top, _head(top), rms_norm(x, top["output_norm.weight"], c.norm_eps))


def _head(top):
    return "output" if "output.weight" in top else "token_embd"


def layer(c, i, w, state, x):
    """One layer on the residual x [B, T, D]."""
    mixer = delta_net if c.recurrent[i] else attention
    x = x + mixer(c, w, state, rms_norm(x, w["attn_norm.weight"], c.norm_eps))
    return x + feed_forward(c, w, rms_norm(x, w["post_attention_norm.weight"], c.norm_eps))


def linear(c, w, name, x):
    """The product with matrix ``name``; where the file holds it rotated, with ``H (s ⊙ x)`` instead of x."""
    signs = w.get(f"{name}.signs")
    return product(w[f"{name}.weight"], x if signs is None else _rotate(c, x * signs))


def linears(c, w, names, x):
    """:func:`linear` of several matrices."""
    if any(f"{name}.signs" in w for name in names):
        return [linear(c, w, name, x) for name in names]
    return products([w[f"{name}.weight"] for name in names], x)


def _rotate(c, x):
    return hadamard(x.reshape(*x.shape[:-1], -1, c.fold.block)).reshape(x.shape)


def delta_net(c, w, state, x):
    """Gated DeltaNet block on its normalised input x [B, T, D]. Value head j reads key head j mod Hk (tiled)."""
    qkv, z = linears(c, w, ["attn_qkv", "attn_gate"], x)
    qkv = convolve(state["conv"], qkv, dequantize(w["ssm_conv1d.weight"]))
    a, b = linear(c, w, "ssm_alpha", x), linear(c, w, "ssm_beta", x)
    key_head = np.arange(c.value_heads) % c.key_heads
    out = gated_delta(state["memory"], qkv, a, b, w["ssm_a"], w["ssm_dt.bias"], key_head)
    out = rms_norm(out, w["ssm_norm.weight"], c.norm_eps) * silu(z.reshape(out.shape))
    if c.fold and c.fold.grouped:
        out = out.reshape(*x.shape[:2], -1, c.key_heads, c.delta_width).swapaxes(2, 3)
    return linear(c, w, "ssm_out", out.reshape(*x.shape[:2], -1))


def attention(c, w, state, x):
    """Gated attention block on its normalised input x [B, T, D]. ``attn_q`` holds d query rows, then d gate rows per head."""
    theta = angles(state.positions, rope_frequencies(c.rotary, c.rope_base))[:, :, None, :]
    q, *rows = linears(c, w, ["attn_q", "attn_k", "attn_v"], x)
    q, gate = jnp.split(q.reshape(*x.shape[:2], c.heads, -1), 2, axis=-1)
    k, v = (part.reshape(*x.shape[:2], c.kv_heads, c.head_width) for part in rows)
    q = rotate_head(rms_norm(q, w["attn_q_norm.weight"], c.norm_eps), theta)
    k = rotate_head(rms_norm(k, w["attn_k_norm.weight"], c.norm_eps), theta)
    state["k"].append(k)
    state["v"].append(v)
    out = attend(q, Seen(state["k"].rows(), state["v"].rows()), scale=c.head_width**-0.5)
    return linear(c, w, "attn_output", (out * sigmoid(gate)).reshape(*x.shape[:2], -1))


def feed_forward(c, w, x):
    """SwiGLU on the normalised input x [B, T, D]."""
    gate, up = linears(c, w, ["ffn_gate", "ffn_up"], x)
    return linear(c, w, "ffn_down", silu(gate) * up)


def draft_input(c, top, h):
    """The predictor's hidden rows, from the trunk's last output h [B, T, D]: what the head reads."""
    return rms_norm(h, top["output_norm.weight"], c.norm_eps)


def draft_block(c, d, top, w, state, hidden, tokens):
    """Run the predictor on hidden rows [B, T, D] and the tokens [B, T] after them → rows for its head and its next step."""
    own = "nextn.embed_tokens.weight"
    embedding = embed_rows(w[own], tokens) if own in w else start(c, top, tokens, state.chunk)
    norms = (w[f"nextn.{name}.weight"] for name in ("enorm", "hnorm", "eh_proj"))
    x = nextn.join(hidden, embedding, *norms, c.norm_eps)
    x = x + attention(c, w, state, rms_norm(x, w["attn_norm.weight"], c.norm_eps))
    x = x + feed_forward(c, w, rms_norm(x, w["post_attention_norm.weight"], c.norm_eps))
    return rms_norm(x, w.get("nextn.shared_head_norm.weight", top["output_norm.weight"]), c.norm_eps)


def draft_logits(c, d, top, w, row):
    """Draft logits [..., V] of rows of the predictor: its own head where it has one, else the trunk's."""
    own = "nextn.shared_head_head"
    return linear(c, w, own, row) if f"{own}.weight" in w else linear(c, top, _head(top), row)
