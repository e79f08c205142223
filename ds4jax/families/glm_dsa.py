"""GLM-5, 5.1 and 5.2 in JAX; read it beside ds4ref/families/glm_dsa.py."""

import jax.numpy as jnp

from ds4ref.families.glm_dsa import ARCHITECTURES, INDEXER

from .. import moe, nextn
from ..attention import attend_latent
from ..indexer import choose_by_latent, nothing
from ..layers import block_number, embed
from ..ops import angles, rms_norm, rope_frequencies, rotate_pairs, rotate_tail
from ..weights import linear

__all__ = ["ARCHITECTURES", "draft_block", "draft_input", "draft_logits", "finish", "layer", "start", "uses"]


def uses(c, name):
    """Whether the forward pass reads this tensor: not the predictor's, nor an indexer where the choice is shared."""
    i = block_number(name)
    return i < c.layers and (".indexer." not in name or c.full[i])


def start(c, top, tokens, chunk):
    """(embeddings [B, T, D], the choice of the full layer below: nothing yet)."""
    return embed(top["token_embd.weight"], tokens), nothing(tokens.shape, chunk.bucket, c.index_top_k)


def finish(c, top, x):
    """Logits [..., V] after the last layer."""
    x, _ = x
    return linear(top["output.weight"], rms_norm(x, top["output_norm.weight"], c.norm_eps))


def layer(c, i, w, state, x):
    """One layer on (residual, choice)."""
    x, chosen = x
    y, chosen = attention(c, i, w, state, rms_norm(x, w["attn_norm.weight"], c.norm_eps), chosen)
    x = x + y
    return x + feed_forward(c, w, rms_norm(x, w["ffn_norm.weight"], c.norm_eps)), chosen


def attention(c, i, w, state, h, chosen):
    """Latent attention on the normalised input h [B, T, D] → (output [B, T, D], the choice).

    ``chosen``: what the full layer below chose; a full layer replaces it by its own, the predictor takes what it is given.
    """
    theta = angles(state.positions, rope_frequencies(c.rotary, c.rope_base))
    latent = rms_norm(linear(w["attn_q_a.weight"], h), w["attn_q_a_norm.weight"], c.norm_eps)
    q = linear(w["attn_q_b.weight"], latent).reshape(*h.shape[:2], c.heads, c.nope + c.rotary)
    q = rotate_tail(q, theta[:, :, None, :])
    content, key = jnp.split(linear(w["attn_kv_a_mqa.weight"], h), [c.kv_rank], axis=-1)
    content = rms_norm(content, w["attn_kv_a_norm.weight"], c.norm_eps)
    state["latent"].append(jnp.concatenate([content, rotate_pairs(key, theta)], axis=-1))
    if i < c.layers and c.full[i]:
        indexer = [w[f"indexer.{name}"] for name in INDEXER]
        chosen = choose_by_latent(state["keys"], h, latent, indexer, theta, c.index_eps, c.index_top_k)
    rows = state["latent"].rows()
    out = attend_latent(
        q[..., : c.nope],
        q[..., c.nope :],
        rows,
        rows,
        w["attn_k_b.weight"],
        w["attn_v_b.weight"],
        (c.nope + c.rotary) ** -0.5,
        chosen=chosen,
    )
    return linear(w["attn_output.weight"], out.reshape(*h.shape[:2], -1)), chosen


def feed_forward(c, w, h):
    """Dense SwiGLU where the layer has one, else routed experts plus the shared one."""
    if "ffn_gate.weight" in w:
        return moe.dense(h, w)
    return moe.sigmoid_experts(h, w, c.experts_used, c.expert_scale) + moe.shared_expert(h, w)


def draft_input(c, top, h):
    """The predictor's hidden rows, from the trunk's last output h [B, T, D]: what the head reads."""
    return rms_norm(h, top["output_norm.weight"], c.norm_eps)


def draft_block(c, d, top, w, state, hidden, tokens):
    """Run the predictor on hidden rows and the tokens after them → the rows [B, T, D] that head and next step read."""
    x, _ = layer(c, c.layers + d, w, state, (nextn.joined(top, w, hidden, tokens, c.norm_eps), None))
    return rms_norm(x, w["nextn.shared_head_norm.weight"], c.norm_eps)


def draft_logits(c, d, top, w, hidden):
    """Draft logits [..., V] of the predictor's rows."""
    return nextn.logits(top, w, hidden)
