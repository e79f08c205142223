"""dots3-note in JAX; read it beside ds4ref/families/dots3note.py. Tensors go by that file's own names for both layouts."""

import jax.numpy as jnp

from ds4ref.families.dots3note import ARCHITECTURES, INDEX_NORM_EPS, INDEXER, NAMES, _geometry

from .. import moe, nextn
from ..attention import attend_latent
from ..indexer import choose_by_latent
from ..layers import block_number, embed, layer_tensors
from ..ops import angles, rms_norm, rope_frequencies, rotate_pairs, sigmoid
from ..weights import dequantize, linear

__all__ = [
    "ARCHITECTURES", "draft_block", "draft_input", "draft_logits", "draft_tensors", "finish", "layer", "start", "tensors_of",
    "uses",
]  # fmt: skip


def tensors_of(c, artifact):
    """The artifact's tensors by our names; see NAMES of ds4ref's file."""
    ours = {stored[0 if c.published else 1]: name for name, stored in NAMES.items()}
    return {_renamed(name, ours): tensor for name, tensor in artifact.tensors.items()}


def _renamed(name, names):
    prefix = f"blk.{block_number(name)}."
    part = name.removeprefix(prefix)
    return name if part == name else prefix + names.get(part, part)


def uses(c, name):
    """Whether the forward pass reads this tensor: not the predictor's."""
    return block_number(name) < c.layers and name != "token_embd_mtp.weight"


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


def attention(c, i, w, state, n):
    """Gated latent attention on the normalised input n [B, T, D]."""
    g = _geometry(c, i)
    theta = angles(state.positions, rope_frequencies(c.rotary, g.rope_base))
    q_latent = _latent_norm(c, linear(w["attn_q_a.weight"], n), w["attn_q_a_norm.weight"])
    q = linear(w["attn_q_b.weight"], q_latent).reshape(*n.shape[:2], g.heads, g.nope + c.rotary)
    latent, key = jnp.split(linear(w["attn_kv_a_mqa.weight"], n), [g.rank], axis=-1)
    key = rms_norm(key, w["rope_norm.weight"], c.norm_eps)
    state["latent"].append(_latent_norm(c, latent, w["attn_kv_a_norm.weight"]))
    state["rope"].append(rotate_pairs(key, theta))
    latents, keys = state["latent"].rows(), state["rope"].rows()
    if c.sliding[i]:
        seen = {"window": c.window}
    else:
        indexer = [w[f"index_{part}"] for part in INDEXER]
        seen = {"chosen": choose_by_latent(state["index"], n, q_latent, indexer, theta, INDEX_NORM_EPS, c.index_top_k)}
    q_rot = rotate_pairs(q[..., g.nope :], theta[:, :, None, :])
    k_b, v_b = _expansions(c, g, w)
    scale = (g.nope + c.rotary) ** -0.5
    out = attend_latent(q[..., : g.nope], q_rot, (latents, keys), latents, k_b, v_b, scale, **seen)
    gate = sigmoid(linear(w["attn_gate.weight"], n))
    return linear(w["attn_output.weight"], (gate[..., None] * out).reshape(*n.shape[:2], -1))


def _latent_norm(c, x, weight):
    """Normalise a latent and scale it by √(D / rank), a factor that llama.cpp's files hold in the weight already."""
    y = rms_norm(x, weight, c.norm_eps)
    return y * (c.width / x.shape[-1]) ** 0.5 if c.published else y


def _expansions(c, g, w):
    """What expands a latent into keys [H, r, nope] and values [H, v, r]: one stored matrix, or two."""
    if not c.published:
        return w["attn_k_b.weight"], w["attn_v_b.weight"]
    both = dequantize(w["attn_kv_b.weight"]).reshape(g.heads, g.nope + g.value_width, g.rank)
    return both[:, : g.nope].transpose(0, 2, 1), both[:, g.nope :]


def feed_forward(c, w, n):
    """Dense SwiGLU where the layer has one, else routed experts plus the shared one."""
    if "ffn_gate.weight" in w:
        return moe.dense(n, w)
    return moe.sigmoid_experts(n, w, c.experts_used, c.expert_scale) + moe.shared_expert(n, w)


def draft_tensors(c, artifact):
    """(the predictor's embedding where it lies beside the block, the block's tensors)."""
    found = tensors_of(c, artifact)
    ends = {name: tensor for name, tensor in found.items() if name == "token_embd_mtp.weight"}
    return ends, [layer_tensors(found, "blk.{i}.", c.layers)]


def draft_input(c, top, h):
    """The predictor's hidden rows, from the trunk's last output h [B, T, D]: what the head reads."""
    return rms_norm(h, top["output_norm.weight"], c.norm_eps)


def draft_block(c, d, top, w, state, hidden, tokens):
    """Run the predictor on hidden rows and the tokens after them → the rows [B, T, D] that head and next step read."""
    embedding = embed(top["token_embd_mtp.weight"] if c.published else w["nextn.embed_tokens.weight"], tokens)
    norms = (w[f"{part}.weight"] for part in ("enorm", "hnorm", "eh_proj"))
    x = layer(c, c.layers + d, w, state, nextn.join(hidden, embedding, *norms, c.norm_eps))
    return rms_norm(x, w["shared_head_norm.weight"], c.norm_eps)


def draft_logits(c, d, top, w, hidden):
    """Draft logits [..., V] of the predictor's rows: its embedding is its own, its head the trunk's."""
    return linear(top["output.weight"], hidden)
