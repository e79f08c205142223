"""DeepSeek V4's DSpark in JAX; read it beside ds4ref/families/deepseek4_dspark.py. w: a list of the stages' weights."""

import jax.numpy as jnp

from ..attention import attend_rows
from ..layers import embed, layer_tensors
from ..noise import committed
from ..ops import angles, rms_norm, rope_frequencies
from ..weights import linear, linears
from . import deepseek4

__all__ = ["commit", "draft_logits", "draft_rows", "draft_tensors"]


def draft_tensors(c, artifact):
    """(what is around the stages, each stage's tensors)."""
    found = deepseek4.tensors_of(c.trunk, artifact)
    stages = [layer_tensors(found, "dspark.{i}.", n) for n in range(len(c.stages))]
    return {name: t for name, t in found.items() if not name.split(".")[1].isdigit()}, stages


def commit(c, top, w, state, outputs):
    """Keep the positions of a chunk. outputs: streams of the target layers, each [B, T, N, D]."""
    t, theta = c.trunk, _angles(c, state.positions)
    joint = linear(top["dspark.main_proj.weight"], jnp.concatenate([jnp.mean(s, axis=-2) for s in outputs], axis=-1))
    rows = rms_norm(joint, top["dspark.main_norm.weight"], t.norm_eps)
    for i, stage in zip(c.stages, w, strict=True):
        state[f"{i}.raw"].append(deepseek4.raw_row(t, stage, linear(stage["attn_kv.weight"], rows), theta))


def _angles(c, positions):
    return angles(positions, rope_frequencies(c.trunk.rotary, c.trunk.rope_base))


def draft_rows(c, top, w, state, anchor, count):
    """Rows [B, block, D] before the last norm that predict the tokens at the positions after the anchor's [B], however many
    are asked for."""
    t, within = c.trunk, jnp.arange(c.block, dtype=jnp.int32)
    tokens = jnp.where(within == 0, anchor[:, None], c.noise)
    theta = _angles(c, state.positions[:, :1] + within)
    streams = jnp.repeat(embed(top["token_embd.weight"], tokens)[:, :, None, :], t.streams, axis=2)
    for i, stage in zip(c.stages, w, strict=True):
        rows, seats = committed(state[f"{i}.raw"])

        def attend(h, stage=stage, rows=rows, seats=seats):
            """The block's rows see the committed ones and each other."""
            latent, row = linears([stage["attn_q_a.weight"], stage["attn_kv.weight"]], h)
            seen = jnp.concatenate([rows, deepseek4.raw_row(t, stage, row, theta)], axis=1)[:, None]
            exists = jnp.concatenate([seats >= 0, jnp.ones(tokens.shape, bool)], axis=1)
            mask = jnp.broadcast_to(exists[:, None], (*tokens.shape, exists.shape[1]))
            q = deepseek4.queries(t, stage, latent, theta)[1]
            read = attend_rows(q, seen, seen, mask, t.head_width**-0.5, stage["attn_sinks.weight"])
            return deepseek4.projected(t, stage, read, theta)

        streams, _ = deepseek4.block(t, i, stage, (streams, tokens), attend)
    return deepseek4.mixed(t, top, "dspark.hc_head", streams)


def draft_logits(c, top, w, row, previous):
    """Draft logits [..., V] of rows [..., D], after the tokens ``previous`` [...]."""
    base = linear(top["output.weight"], rms_norm(row, top["dspark.norm.weight"], c.trunk.norm_eps))
    pair = embed(top["dspark.markov_w1.weight"], previous)
    return base + linear(top["dspark.markov_w2.weight"], pair)
