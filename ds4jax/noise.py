"""Block drafters of plain transformer layers (DSpark of Naive, DFlash of MiMo): :mod:`ds4ref.noise` for several banks.

c: :class:`ds4ref.noise.Layers`; top: the weights around the layers; w: a list of each layer's by their name without its prefix.
Letters as there; B banks, T committed positions, N rows of a block.
"""

import jax.numpy as jnp

from . import moe
from .attention import attend_rows
from .layers import block_number, layer_tensors
from .ops import angles, rms_norm, rope_frequencies, rotate_head
from .weights import linear


def draft_tensors(c, artifact):
    """(what is around the layers, each layer's tensors)."""
    ends = {name: tensor for name, tensor in artifact.tensors.items() if block_number(name) < 0}
    return ends, [layer_tensors(artifact.tensors, "blk.{i}.", i) for i in range(c.count)]


def commit(c, top, w, state, outputs):
    """Keep the positions of a chunk. outputs: of the target layers, each [B, T, D]."""
    joint = linear(top["fc.weight"], jnp.concatenate(outputs, axis=-1))
    features, theta = rms_norm(joint, top["enc.output_norm.weight"], c.norm_eps), _angles(c, state.positions)
    for i, layer in enumerate(w):
        keys, values = _keys_values(c, layer, features, theta)
        state[f"{i}.k"].append(keys)
        state[f"{i}.v"].append(values)


def _angles(c, positions):
    return angles(positions, rope_frequencies(c.rotary, c.rope_base))[:, :, None, :]


def _keys_values(c, w, n, theta):
    """Keys and values [B, T, G, d] of a layer from features or from normalised block rows n [B, T, D]."""
    k, v = (linear(w[f"attn_{part}.weight"], n).reshape(*n.shape[:2], c.kv_heads, c.head_width) for part in "kv")
    return rotate_head(rms_norm(k, w["attn_k_norm.weight"], c.norm_eps), theta), v * c.value_scale


def committed(ring):
    """What a ring holds before a chunk of no real tokens: (rows [B, …, W, d], their positions [B, W], negative for none)."""
    view = ring.rows()
    return view.rows(), view.positions(jnp.arange(view.count, dtype=jnp.int32))


def block_rows(c, top, w, state, rows, count):
    """Run the layers on the rows [B, N, D] of blocks that begin after what ``state`` holds → [B, N, D], normalised.

    count: [B], how many rows each block has; what comes after them is computed, but not seen.
    """
    within = jnp.arange(rows.shape[1], dtype=jnp.int32)
    theta, exists = _angles(c, state.positions[:, :1] + within), within < count[:, None]
    places = state.chunk.lengths[:, None] + within
    for i, layer in enumerate(w):
        rows = _layer(c, layer, committed(state[f"{i}.k"]), committed(state[f"{i}.v"]), rows, theta, places, exists)
    return rms_norm(rows, top["output_norm.weight"], c.norm_eps)


def _layer(c, w, keys, values, rows, theta, places, exists):
    """One layer. keys, values: what is committed; places: [B, N] of the rows, which all see those that exist, bool [B, N]."""
    n = rms_norm(rows, w["attn_norm.weight"], c.norm_eps)
    q = rms_norm(linear(w["attn_q.weight"], n).reshape(*n.shape[:2], c.heads, -1), w["attn_q_norm.weight"], c.norm_eps)
    own = (jnp.moveaxis(part, 1, 2) for part in _keys_values(c, w, n, theta))
    (keys, seats), (values, _) = keys, values
    keys, values = (jnp.concatenate(parts, axis=2) for parts in zip((keys, values), own, strict=True))
    exists = jnp.concatenate([seats >= 0, exists], axis=1)
    seats = jnp.concatenate([seats, places], axis=1)
    near = exists[:, None, :] & (jnp.abs(seats[:, None, :] - places[:, :, None]) < c.window)
    sinks = w["attn_sinks.weight"] if c.sinks else None
    read = attend_rows(rotate_head(q, theta), keys, values, near, c.head_width**-0.5, sinks)
    rows = rows + linear(w["attn_output.weight"], read.reshape(*n.shape[:2], -1))
    return rows + moe.dense(rms_norm(rows, w["ffn_norm.weight"], c.norm_eps), w)
