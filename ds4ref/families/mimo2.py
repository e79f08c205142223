"""MiMo-V2.6-Flash: wide query/key heads over narrow value heads, sliding layers with learned sinks, routed experts.

One layer in six sees everything (few key/value heads, plain softmax); the others see a window of keys, their own included,
and share their softmax with one learned sink logit per head. Rotation touches the first channels of a head only, with a base
per layer kind. Values are scaled. A block is dense where it has no router. The main file also holds predictor blocks.
Sources: the MiMo-V2-Flash model report and the layout of the published GGUF files.

Letters: D hidden, H heads, G key/value heads, d key width, v value width, E experts, F feed-forward width, V vocabulary.
Knows nothing about the DFlash sidecar (``mimo2_dflash.py``) or the media projector.
"""

from dataclasses import dataclass

import numpy as np

from .. import moe, nextn
from ..attention import attend
from ..gguf import Keys
from ..ops import rms_norm, rope_frequencies, rotate_head
from ..state import Ring, Rows

ARCHITECTURES = ("mimo2",)
OPTIONS = {}

LONGEST_DRAFT = 1  # of a single block; several draft one token each


@dataclass(frozen=True)
class Config:
    layers: int
    predictors: int
    context: int
    width: int
    vocabulary: int
    heads: int
    kv_heads: tuple[int, ...]
    sliding: tuple[bool, ...]
    key_width: int
    value_width: int
    value_scale: float
    window: int
    norm_eps: float
    rotary: int
    rope_base: float
    rope_base_sliding: float
    dense_width: int
    routed: tuple[bool, ...]
    experts: int
    experts_used: int
    expert_width: int
    predictor_norm: str

    @classmethod
    def from_metadata(cls, artifact):
        """Read and validate every key the model relies on. ArtifactError names the key that is missing or off.

        Per-block tuples cover the predictors too. Which blocks have experts only the tensors tell, unless the (optional)
        ``leading_dense_block_count`` does.
        """
        k = Keys(artifact, "mimo2.")
        blocks = k.int("block_count", lo=1, hi=1024)
        predictors = k.int("nextn_predict_layers", default=0, lo=0, hi=blocks - 1)
        layers = blocks - predictors
        pattern = k.ints("attention.sliding_window_pattern", n=blocks, lo=0, hi=1)
        dense = k.int("leading_dense_block_count", default=None, lo=0, hi=layers)
        routers = [f"blk.{i}.ffn_gate_inp.weight" in artifact.tensors if dense is None else i >= dense for i in range(layers)]
        config = cls(
            layers=layers,
            predictors=predictors,
            context=k.int("context_length", lo=1),
            width=k.int("embedding_length", lo=1),
            vocabulary=k.int("vocab_size", default=len(artifact.metadata.get("tokenizer.ggml.tokens", ())), lo=1),
            heads=k.int("attention.head_count", lo=1),
            kv_heads=k.ints("attention.head_count_kv", n=blocks, lo=1),
            sliding=tuple(map(bool, pattern)),
            key_width=k.int("attention.key_length", lo=2),
            value_width=k.int("attention.value_length", lo=1),
            value_scale=k.float("attention.value_scale"),
            window=k.int("attention.sliding_window", lo=1),
            norm_eps=k.float("attention.layer_norm_rms_epsilon", lo=0.0),
            rotary=k.int("rope.dimension_count", lo=2),
            rope_base=k.float("rope.freq_base", lo=1.0),
            rope_base_sliding=k.float("rope.freq_base_swa", lo=1.0),
            dense_width=k.int("feed_forward_length", lo=1),
            routed=(*routers, *[False] * predictors),
            experts=k.int("expert_count", lo=1),
            experts_used=k.int("expert_used_count", lo=1, hi=k.int("expert_count")),
            expert_width=k.int("expert_feed_forward_length", lo=1),
            predictor_norm=_predictor_norm(artifact, layers),
        )
        k.int("expert_group_count", default=1, lo=0, hi=1)
        k.int("expert_group_used_count", default=1, lo=0, hi=1)
        k.int("expert_gating_func", default=2, lo=2, hi=2)
        if not all(pattern[layers:]):
            raise k.error("attention.sliding_window_pattern", 0, "1 (sliding) for the predictor blocks")
        if odd := [n for n in config.kv_heads if config.heads % n]:
            raise k.error("attention.head_count_kv", odd[0], f"divisors of {config.heads} heads")
        if config.rotary % 2 or config.rotary > config.key_width:
            raise k.error("rope.dimension_count", config.rotary, f"an even number up to {config.key_width}")
        return config


def _predictor_norm(artifact, layers):
    """What the file calls the last norm of a predictor: ``layer_output_norm``, or the name that may stand in for it."""
    stand_in = "nextn.shared_head_norm"
    return stand_in if f"blk.{layers}.{stand_in}.weight" in artifact.tensors else "layer_output_norm"


def tensors(c):
    """(required, optional): tensor name → shape."""
    D = c.width
    required = {"token_embd.weight": (c.vocabulary, D), "output.weight": (c.vocabulary, D), "output_norm.weight": (D,)}
    for i, groups in enumerate(c.kv_heads):
        p = f"blk.{i}."
        required |= {
            f"{p}attn_norm.weight": (D,),
            f"{p}attn_qkv.weight": ((c.heads + groups) * c.key_width + groups * c.value_width, D),
            f"{p}attn_output.weight": (D, c.heads * c.value_width),
            f"{p}ffn_norm.weight": (D,),
        }
        if c.sliding[i]:
            required[f"{p}attn_sinks.weight"] = (c.heads,)
        if c.routed[i]:
            required |= moe.router_tensors(p, c.experts, D) | moe.expert_tensors(p, c.experts, D, c.expert_width)
        else:
            required |= moe.dense_tensors(p, D, c.dense_width)
        if i >= c.layers:
            required |= nextn.joint_tensors(p, D) | {f"{p}{c.predictor_norm}.weight": (D,)}
    return required, {}


def layout(c):
    """State components: rotated keys and scaled values, of every position or of the window, by layer."""
    return _layout(c, range(c.layers))


def _layout(c, blocks):
    components = {}
    for i in blocks:
        key, value = (c.kv_heads[i], c.key_width), (c.kv_heads[i], c.value_width)
        components[f"{i}.k"] = Ring(c.window, key) if c.sliding[i] else Rows(key)
        components[f"{i}.v"] = Ring(c.window, value) if c.sliding[i] else Rows(value)
    return components


def forward(c, w, state, token, trace):
    """Advance ``state`` by one token and return its logits [V]. ``trace(name, array)`` sees the parts by name."""
    position = state.length
    h = w.part("token_embd.weight", token)
    trace("embed", h)
    for i in range(c.layers):
        p = f"blk.{i}."
        a = attention(c, w, state, i, position, rms_norm(h, w[f"{p}attn_norm.weight"], c.norm_eps))
        h = h + a
        f = feed_forward(c, w, i, rms_norm(h, w[f"{p}ffn_norm.weight"], c.norm_eps))
        h = h + f
        trace(f"attn_{i}", a)
        trace(f"ffn_{i}", f)
        trace(f"h_{i}", h)
    return w["output.weight"] @ rms_norm(h, w["output_norm.weight"], c.norm_eps)


def attention(c, w, state, i, position, n):
    """Grouped-query attention of layer i on its normalised input n [D] → [D]; sinks on sliding layers only."""
    p, groups = f"blk.{i}.", c.kv_heads[i]
    rows = (c.heads * c.key_width, (c.heads + groups) * c.key_width)
    q, k, v = np.split(w[f"{p}attn_qkv.weight"] @ n, rows)
    angles = position * rope_frequencies(c.rotary, c.rope_base_sliding if c.sliding[i] else c.rope_base)
    q = rotate_head(q.reshape(c.heads, c.key_width), angles)
    state[f"{i}.k"].append(rotate_head(k.reshape(groups, c.key_width), angles))
    state[f"{i}.v"].append(v.reshape(groups, c.value_width) * c.value_scale)
    sinks = w[f"{p}attn_sinks.weight"] if c.sliding[i] else None
    out = attend(q, state[f"{i}.k"].rows(), state[f"{i}.v"].rows(), c.key_width**-0.5, sinks)
    return w[f"{p}attn_output.weight"] @ out.reshape(-1)


def feed_forward(c, w, i, n):
    """Dense SwiGLU or routed experts (no shared one) of layer i on its normalised input n [D] → [D]."""
    p = f"blk.{i}."
    if not c.routed[i]:
        return moe.dense(n, w, p)
    return moe.sigmoid_experts(n, w, p, c.experts_used)


def draft_layouts(c):
    """State of each predictor: what a sliding layer keeps."""
    return [_layout(c, [c.layers + d]) for d in range(c.predictors)]


def draft_input(c, w, h):
    """Block 0's hidden row of a position: the trunk's last output h [D] there, not normalised."""
    return h


def draft_block(c, w, state, d, position, hidden, token):
    """Run predictor d on a hidden row and a token → its output [D], not normalised: the hidden row of block d + 1."""
    i = c.layers + d
    p = f"blk.{i}."
    x = nextn.joined(w, p, hidden, token, c.norm_eps)
    x = x + attention(c, w, state, i, position, rms_norm(x, w[f"{p}attn_norm.weight"], c.norm_eps))
    return x + feed_forward(c, w, i, rms_norm(x, w[f"{p}ffn_norm.weight"], c.norm_eps))


def draft_logits(c, w, d, row):
    """Draft logits [V] of an output of predictor d: its own norm, the trunk's head."""
    return w["output.weight"] @ rms_norm(row, w[f"blk.{c.layers + d}.{c.predictor_norm}.weight"], c.norm_eps)


def tiny_metadata():
    """Metadata of a tiny model with every layer kind: full and sliding, dense and routed, and one predictor."""
    keys = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "context_length": 65536,
        "embedding_length": 64,
        "vocab_size": 512,
        "feed_forward_length": 96,
        "leading_dense_block_count": 1,
        "attention.head_count": 4,
        "attention.head_count_kv": np.array([1, 2, 2, 1, 2], np.int32),
        "attention.key_length": 24,
        "attention.value_length": 16,
        "attention.value_scale": 0.707,
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": np.array([0, 1, 1, 0, 1], np.int32),
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": 8,
        "rope.freq_base": 1e7,
        "rope.freq_base_swa": 1e4,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 16,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_gating_func": 2,
    }
    return {f"mimo2.{key}": value for key, value in keys.items()} | {"tokenizer.ggml.pre": "qwen2"}
