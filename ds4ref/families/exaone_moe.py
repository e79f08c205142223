"""K-EXAONE 236B A23B: three sliding layers that rotate, then one full layer that does not, over routed experts.

Every head's queries and keys are normalised before anything else. Sliding layers rotate them and see a window of keys, their
own included; full layers see everything and have no position encoding at all (NoPE). The first blocks are dense, the others
add routed experts and one shared expert. The main file also holds a predictor block (NextN, a sliding dense one).
Sources: the K-EXAONE model report, DeepSeek-V3 (router) and the layout of the published GGUF files.

Letters: D hidden, H heads, G key/value heads, d head width, E experts, F feed-forward width, V vocabulary.
Knows no rotary divisors (``rope_freqs``), which this model does not have.
"""

from dataclasses import dataclass

import numpy as np

from .. import moe, nextn
from ..attention import attend
from ..gguf import Keys
from ..ops import rms_norm, rope_frequencies, rotate_halves
from ..state import Ring, Rows

ARCHITECTURES = ("exaone-moe",)
OPTIONS = {}

LONGEST_DRAFT = 8
PERIOD = 4  # of the layer kinds where the file does not list them: the last of each four is full


@dataclass(frozen=True)
class Config:
    layers: int
    predictors: int
    context: int
    width: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_width: int
    sliding: tuple[bool, ...]
    window: int
    norm_eps: float
    rope_base: float
    dense_layers: int
    dense_width: int
    experts: int
    experts_used: int
    expert_width: int
    shared_width: int
    expert_scale: float

    @classmethod
    def from_metadata(cls, artifact):
        """Read and validate every key the model relies on. ArtifactError names the key that is missing or off.

        ``sliding`` covers the predictor too.
        """
        k = Keys(artifact, "exaone-moe.")
        blocks = k.int("block_count", lo=1, hi=1024)
        predictors = k.int("nextn_predict_layers", default=0, lo=0, hi=min(1, blocks - 1))
        layers = blocks - predictors
        experts = k.int("expert_count", lo=1)
        expert_width = k.int("expert_feed_forward_length", lo=1)
        config = cls(
            layers=layers,
            predictors=predictors,
            context=k.int("context_length", lo=1),
            width=k.int("embedding_length", lo=1),
            vocabulary=k.int("vocab_size", lo=1),
            heads=k.int("attention.head_count", lo=1),
            kv_heads=k.int("attention.head_count_kv", lo=1),
            head_width=k.int("attention.key_length", lo=2),
            sliding=_sliding(k, layers, blocks),
            window=k.int("attention.sliding_window", lo=1),
            norm_eps=k.float("attention.layer_norm_rms_epsilon", lo=0.0),
            rope_base=k.float("rope.freq_base", lo=1.0),
            dense_layers=k.int("leading_dense_block_count", default=0, lo=0, hi=layers),
            dense_width=k.int("feed_forward_length", lo=1),
            experts=experts,
            experts_used=k.int("expert_used_count", lo=1, hi=experts),
            expert_width=expert_width,
            shared_width=k.int("expert_shared_feed_forward_length", default=expert_width, lo=1),
            expert_scale=k.float("expert_weights_scale", default=1.0),
        )
        d = config.head_width
        k.int("attention.value_length", lo=d, hi=d)
        k.int("rope.dimension_count", default=d, lo=d, hi=d)
        k.str("rope.scaling.type", default="none", choices=("none",))
        k.int("expert_shared_count", lo=1, hi=1)
        k.int("expert_group_count", default=1, lo=0, hi=1)
        k.int("expert_group_used_count", default=1, lo=0, hi=1)
        moe.require_sigmoid(k)
        if d % 2:
            raise k.error("attention.key_length", d, "an even number, since heads rotate in halves")
        if config.heads % config.kv_heads:
            raise k.error("attention.head_count_kv", config.kv_heads, f"a divisor of {config.heads} heads")
        return config


def _sliding(k, layers, blocks):
    """Which blocks slide: as the file lists them (converters may leave the predictor out), else by the period."""
    key = "attention.sliding_window_pattern"
    pattern = k.bools(key, default=tuple((i + 1) % PERIOD != 0 for i in range(layers)))
    if len(pattern) not in (layers, blocks):
        trunk = f", or of {layers} without the predictor" if layers < blocks else ""
        raise k.error(key, pattern, f"an array of {blocks} bools{trunk}")
    return pattern + (True,) * (blocks - len(pattern))


def tensors(c):
    """(required, optional): tensor name → shape. The predictor's block, where there is one, comes after the trunk."""
    D, d = c.width, c.head_width
    required = {"token_embd.weight": (c.vocabulary, D), "output.weight": (c.vocabulary, D), "output_norm.weight": (D,)}
    optional = {}
    for i in range(c.layers + c.predictors):
        p = f"blk.{i}."
        required |= {
            f"{p}attn_norm.weight": (D,),
            f"{p}attn_q.weight": (c.heads * d, D),
            f"{p}attn_k.weight": (c.kv_heads * d, D),
            f"{p}attn_v.weight": (c.kv_heads * d, D),
            f"{p}attn_q_norm.weight": (d,),
            f"{p}attn_k_norm.weight": (d,),
            f"{p}attn_output.weight": (D, c.heads * d),
            f"{p}ffn_norm.weight": (D,),
        }
        if i < c.dense_layers or i >= c.layers:
            required |= moe.dense_tensors(p, D, c.dense_width)
        else:
            required |= moe.router_tensors(p, c.experts, D) | moe.expert_tensors(p, c.experts, D, c.expert_width)
            required |= moe.shared_tensors(p, D, c.shared_width)
        if i >= c.layers:
            required |= nextn.joint_tensors(p, D) | {f"{p}nextn.shared_head_norm.weight": (D,)}
            optional |= nextn.own_ends(p, D, c.vocabulary)
    return required, optional


def layout(c):
    """State components: keys (normalised, rotated where the layer slides) and values, of the window or of every position."""
    return _layout(c, range(c.layers))


def _layout(c, blocks):
    row = (c.kv_heads, c.head_width)
    return {f"{i}.{part}": Ring(c.window, row) if c.sliding[i] else Rows(row) for i in blocks for part in "kv"}


def forward(c, w, state, token, trace):
    """Advance ``state`` by one token and return its logits [V]. ``trace(name, array)`` sees the parts by name."""
    angles = state.length * rope_frequencies(c.head_width, c.rope_base)
    x = w.part("token_embd.weight", token)
    trace("embed", x)
    for i in range(c.layers):
        p = f"blk.{i}."
        y = attention(c, w, state, i, angles, rms_norm(x, w[f"{p}attn_norm.weight"], c.norm_eps))
        trace(f"attn_{i}", y)
        x = x + y
        y = feed_forward(c, w, i, rms_norm(x, w[f"{p}ffn_norm.weight"], c.norm_eps))
        trace(f"ffn_{i}", y)
        x = x + y
        trace(f"h_{i}", x)
    return w["output.weight"] @ rms_norm(x, w["output_norm.weight"], c.norm_eps)


def attention(c, w, state, i, angles, h):
    """Grouped-query attention of layer i on its normalised input h [D] → [D]; rotation on sliding layers only."""
    p = f"blk.{i}."
    q, k, v = ((w[f"{p}attn_{part}.weight"] @ h).reshape(-1, c.head_width) for part in "qkv")
    q = rms_norm(q, w[f"{p}attn_q_norm.weight"], c.norm_eps)
    k = rms_norm(k, w[f"{p}attn_k_norm.weight"], c.norm_eps)
    if c.sliding[i]:
        q, k = rotate_halves(q, angles), rotate_halves(k, angles)
    state[f"{i}.k"].append(k)
    state[f"{i}.v"].append(v)
    out = attend(q, state[f"{i}.k"].rows(), state[f"{i}.v"].rows(), c.head_width**-0.5)
    return w[f"{p}attn_output.weight"] @ out.reshape(-1)


def feed_forward(c, w, i, h):
    """Dense SwiGLU in the first layers and the predictor, else routed experts plus the shared one. h [D] normalised → [D]."""
    p = f"blk.{i}."
    if i < c.dense_layers or i >= c.layers:
        return moe.dense(h, w, p)
    return moe.sigmoid_experts(h, w, p, c.experts_used, c.expert_scale) + moe.shared_expert(h, w, p)


def draft_layouts(c):
    """State of the predictor: what a layer of its kind keeps."""
    return [_layout(c, range(c.layers, c.layers + c.predictors))]


def draft_input(c, w, h):
    """The predictor's hidden row of a position, from the trunk's last output h [D] there: what the head reads."""
    return rms_norm(h, w["output_norm.weight"], c.norm_eps)


def draft_block(c, w, state, d, position, hidden, token):
    """Run the predictor on a hidden row and the token after it → the row [D] that its head and its next step read."""
    i = c.layers + d
    p, angles = f"blk.{i}.", position * rope_frequencies(c.head_width, c.rope_base)
    x = nextn.joined(w, p, hidden, token, c.norm_eps)
    x = x + attention(c, w, state, i, angles, rms_norm(x, w[f"{p}attn_norm.weight"], c.norm_eps))
    x = x + feed_forward(c, w, i, rms_norm(x, w[f"{p}ffn_norm.weight"], c.norm_eps))
    return rms_norm(x, w[f"{p}nextn.shared_head_norm.weight"], c.norm_eps)


def draft_logits(c, w, d, row):
    """Draft logits [V] of a row of the predictor."""
    return nextn.logits(w, f"blk.{c.layers + d}.", row)


def tiny_metadata():
    """Metadata of a tiny model with every layer kind: sliding and full, dense and routed, and the predictor."""
    keys = {
        "block_count": 6,
        "nextn_predict_layers": 1,
        "context_length": 65536,
        "embedding_length": 64,
        "vocab_size": 512,
        "feed_forward_length": 96,
        "leading_dense_block_count": 1,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": np.array([1, 1, 1, 0, 1, 1], np.bool_),
        "rope.freq_base": 1e6,
        "rope.dimension_count": 16,
        "rope.scaling.type": "none",
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_gating_func": 2,
        "expert_feed_forward_length": 16,
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": 16,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
    }
    return {f"exaone-moe.{key}": value for key, value in keys.items()} | {"tokenizer.ggml.pre": "exaone-moe"}
