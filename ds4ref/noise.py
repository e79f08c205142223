"""Block drafters of plain transformer layers (DSpark of Naive, DFlash of MiMo): rows of noise that read committed features.

A feature row per committed position becomes one key and one value per layer, by the layer's own matrices. The rows of a block
are keyed the same way from their own inputs, and every row reads committed and block rows within the window, on both sides.

Knows no keys of files: a :class:`Layers` says what there is. Letters: D hidden, H heads, G key/value heads, d head width,
m target layers, F feed-forward width, W window.
"""

from dataclasses import dataclass

import numpy as np

from . import moe
from .attention import attend
from .ops import rms_norm, rope_frequencies, rotate_head
from .state import Ring


@dataclass(frozen=True)
class Layers:
    """The shapes and constants of the layers. sinks: whether each head has a learned sink logit."""

    count: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    feed_forward: int
    window: int
    norm_eps: float
    rotary: int
    rope_base: float
    targets: tuple[int, ...]
    value_scale: float = 1.0
    sinks: bool = False

    def check(self, k):
        """ArtifactError where the numbers do not go together. k: the keys they came from."""
        if self.heads % self.kv_heads:
            raise k.error("attention.head_count_kv", self.kv_heads, f"a divisor of {self.heads} heads")
        if self.rotary % 2 or self.rotary > self.head_width:
            raise k.error("rope.dimension_count", self.rotary, f"an even number up to {self.head_width}")


def tensors(c):
    """Shapes of the layers, of what makes features, and of the last norm."""
    D, d = c.width, c.head_width
    shapes = {
        "fc.weight": (D, len(c.targets) * D),
        "enc.output_norm.weight": (D,),
        "output_norm.weight": (D,),
    }
    for i in range(c.count):
        p = f"blk.{i}."
        shapes |= {f"{p}{name}.weight": (D,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"{p}{name}.weight": (d,) for name in ("attn_q_norm", "attn_k_norm")}
        shapes |= {f"{p}attn_q.weight": (c.heads * d, D), f"{p}attn_output.weight": (D, c.heads * d)}
        shapes |= {f"{p}attn_{name}.weight": (c.kv_heads * d, D) for name in "kv"}
        shapes |= moe.dense_tensors(p, D, c.feed_forward)
        if c.sinks:
            shapes[f"{p}attn_sinks.weight"] = (c.heads,)
    return shapes


def taps(c):
    """The traced outputs of the target layers."""
    return tuple(f"h_{i}" for i in c.targets)


def layout(c):
    """State: keys and values of the last positions, by layer."""
    row = (c.kv_heads, c.head_width)
    return {f"{i}.{part}": Ring(c.window, row) for i in range(c.count) for part in "kv"}


def commit(c, w, state, position, outputs):
    """Keep a committed position. outputs: of the target layers, each [D]."""
    feature = rms_norm(w["fc.weight"] @ np.concatenate(outputs), w["enc.output_norm.weight"], c.norm_eps)
    for i in range(c.count):
        key, value = _key_value(c, w, i, feature, position)
        state[f"{i}.k"].append(key)
        state[f"{i}.v"].append(value)


def _key_value(c, w, i, n, position):
    """Key and value [G, d] of layer i from a feature or from a normalised block row n [D]."""
    p = f"blk.{i}."
    k, v = ((w[f"{p}attn_{part}.weight"] @ n).reshape(c.kv_heads, c.head_width) for part in "kv")
    return _rotated(c, k, w[f"{p}attn_k_norm.weight"], position), v * v.dtype.type(c.value_scale)


def _rotated(c, x, gain, position):
    return rotate_head(rms_norm(x, gain, c.norm_eps), position * rope_frequencies(c.rotary, c.rope_base))


def block_rows(c, w, state, position, rows):
    """Run the layers on the rows [B, D] of a block that begins at ``position`` → [B, D], normalised."""
    for i in range(c.count):
        rows = _layer(c, w, i, state, position, rows)
    return rms_norm(rows, w["output_norm.weight"], c.norm_eps)


def _layer(c, w, i, state, position, rows):
    p, places = f"blk.{i}.", position + np.arange(len(rows))
    inputs = rms_norm(rows, w[f"{p}attn_norm.weight"], c.norm_eps)
    own = [_key_value(c, w, i, n, place) for n, place in zip(inputs, places, strict=True)]
    held = state[f"{i}.k"].rows()
    keys = np.concatenate([held, np.stack([key for key, _ in own])])
    values = np.concatenate([state[f"{i}.v"].rows(), np.stack([value for _, value in own])])
    seats = np.concatenate([position - len(held) + np.arange(len(held)), places])
    sinks = w[f"{p}attn_sinks.weight"] if c.sinks else None
    out = []
    for x, n, place in zip(rows, inputs, places, strict=True):
        near = np.abs(seats - place) < c.window
        q = _rotated(c, (w[f"{p}attn_q.weight"] @ n).reshape(c.heads, c.head_width), w[f"{p}attn_q_norm.weight"], place)
        read = attend(q, keys[near], values[near], c.head_width**-0.5, sinks)
        x = x + w[f"{p}attn_output.weight"] @ read.reshape(-1)
        out.append(x + moe.dense(rms_norm(x, w[f"{p}ffn_norm.weight"], c.norm_eps), w, p))
    return np.stack(out)
