"""Step 3.7 (and 3.5) Flash: grouped-query attention gated per head, sliding and full layers, a late clamp on experts.

One layer in four sees everything and rotates half of each head, with stored frequency divisors; the others see a window of
keys, their own included, have more query heads and rotate whole heads. Every head's output is scaled by a sigmoid of the
layer's input. Experts clamp SiLU's result, not its argument. The architecture string is the text model's earlier name.
Sources: the Step 3.5 and 3.7 Flash model reports and the layout of the published GGUF files.

Letters: D hidden, H heads (by layer), G key/value heads, d head width, E experts, F feed-forward width, V vocabulary.
Predictor blocks are in the main file or in a sidecar (``step35_mtp.py``). Knows nothing about images.
"""

from dataclasses import dataclass

import numpy as np

from .. import moe, nextn
from ..attention import attend
from ..gguf import ArtifactError, Keys
from ..ops import rms_norm, rope_frequencies, rotate_head, sigmoid
from ..state import Ring, Rows

ARCHITECTURES = ("step35",)
OPTIONS = {}

LONGEST_DRAFT = 1  # of a single block; several draft one token each


@dataclass(frozen=True)
class Config:
    layers: int
    predictors: int
    context: int
    width: int
    vocabulary: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_width: int
    sliding: tuple[bool, ...]
    window: int
    norm_eps: float
    rope_base: float
    rope_base_sliding: float
    dense_layers: int
    dense_width: int
    experts: int
    experts_used: int
    expert_width: int
    shared_width: int
    expert_scale: float
    clamp_routed: tuple[float, ...]
    clamp_shared: tuple[float, ...]

    @classmethod
    def from_metadata(cls, artifact):
        """Read and validate every key the model relies on. ArtifactError names the key that is missing or off.

        Per-block tuples cover predictor blocks too, where the file has any.
        """
        if is_sidecar(artifact):
            layers, predictors = _block_counts(Keys(artifact, "step35."))
            raise ArtifactError(
                f"{artifact.path.name}: a step35 predictor sidecar (blocks {layers} to {layers + predictors - 1} only), not a "
                "model; open the main file"
            )
        return cls.of_blocks(artifact)

    @classmethod
    def of_blocks(cls, artifact):
        """:meth:`from_metadata` of a model or of its predictors' sidecar, which repeats the keys."""
        k = Keys(artifact, "step35.")
        layers, predictors = _block_counts(k)
        blocks = layers + predictors
        config = cls(
            layers=layers,
            predictors=predictors,
            context=k.int("context_length", lo=1),
            width=k.int("embedding_length", lo=1),
            vocabulary=k.int("vocab_size", default=len(artifact.metadata.get("tokenizer.ggml.tokens", ())), lo=1),
            heads=k.ints("attention.head_count", n=blocks, lo=1),
            kv_heads=k.ints("attention.head_count_kv", n=blocks, lo=1),
            head_width=k.int("attention.key_length", lo=4),
            sliding=k.bools("attention.sliding_window_pattern", n=blocks),
            window=k.int("attention.sliding_window", lo=1),
            norm_eps=k.float("attention.layer_norm_rms_epsilon", lo=0.0),
            rope_base=k.float("rope.freq_base", lo=1.0),
            rope_base_sliding=k.float("rope.freq_base_swa", lo=1.0),
            dense_layers=k.int("leading_dense_block_count", lo=0, hi=layers),
            dense_width=k.int("feed_forward_length", lo=1),
            experts=k.int("expert_count", lo=1),
            experts_used=k.int("expert_used_count", lo=1, hi=k.int("expert_count")),
            expert_width=k.int("expert_feed_forward_length", lo=1),
            shared_width=k.int("expert_shared_feed_forward_length", lo=1),
            expert_scale=k.float("expert_weights_scale"),
            clamp_routed=k.floats("swiglu_clamp_exp", n=blocks, default=(0.0,) * blocks, lo=0.0),
            clamp_shared=k.floats("swiglu_clamp_shexp", n=blocks, default=(0.0,) * blocks, lo=0.0),
        )
        k.int("attention.value_length", lo=config.head_width, hi=config.head_width)
        k.int("rope.dimension_count", default=config.head_width, lo=config.head_width, hi=config.head_width)
        k.int("moe_every_n_layers", default=1, lo=1, hi=1)
        moe.require_sigmoid(k)
        if config.head_width % 4:
            raise k.error("attention.key_length", config.head_width, "a multiple of 4, since full layers rotate half a head")
        if odd := [g for h, g in zip(config.heads, config.kv_heads, strict=True) if h % g]:
            raise k.error("attention.head_count_kv", odd[0], "divisors of attention.head_count, entry by entry")
        if not all(config.sliding[layers:]):
            raise k.error("attention.sliding_window_pattern", False, "true for the predictor blocks")
        return config


def _block_counts(k):
    """(blocks of the trunk, predictor blocks)."""
    blocks = k.int("block_count", lo=1, hi=1024)
    predictors = k.int("nextn_predict_layers", default=0, lo=0, hi=blocks - 1)
    return blocks - predictors, predictors


def is_sidecar(artifact):
    """Whether a file has predictor blocks and no trunk."""
    predictor = any(name.endswith(".nextn.eh_proj.weight") for name in artifact.tensors)
    return predictor and "blk.0.attn_norm.weight" not in artifact.tensors


def tensors(c, first=0):
    """(required, optional): tensor name → shape, of the blocks from ``first`` on and what is shared by all."""
    D, d = c.width, c.head_width
    required = {
        "token_embd.weight": (c.vocabulary, D),
        "output.weight": (c.vocabulary, D),
        "output_norm.weight": (D,),
        "rope_freqs.weight": (d // 2,),
    }
    for i in range(first, len(c.heads)):
        p, heads, groups = f"blk.{i}.", c.heads[i], c.kv_heads[i]
        required |= {
            f"{p}attn_norm.weight": (D,),
            f"{p}attn_q.weight": (heads * d, D),
            f"{p}attn_k.weight": (groups * d, D),
            f"{p}attn_v.weight": (groups * d, D),
            f"{p}attn_q_norm.weight": (d,),
            f"{p}attn_k_norm.weight": (d,),
            f"{p}attn_gate.weight": (heads, D),
            f"{p}attn_output.weight": (D, heads * d),
            f"{p}ffn_norm.weight": (D,),
        }
        if _dense(c, i):
            required |= moe.dense_tensors(p, D, c.dense_width)
        else:
            required |= moe.router_tensors(p, c.experts, D) | moe.expert_tensors(p, c.experts, D, c.expert_width)
            required |= moe.shared_tensors(p, D, c.shared_width)
        if i >= c.layers:
            required |= nextn.joint_tensors(p, D) | {
                f"{p}nextn.shared_head_norm.weight": (D,),
                f"{p}nextn.shared_head_head.weight": (c.vocabulary, D),
            }
    return required, {}


def _dense(c, i):
    """Whether block i has no router: the leading ones and the predictors."""
    return i < c.dense_layers or i >= c.layers


def layout(c):
    """State components: normalised, rotated keys and values, of every position or of the window, by layer."""
    return _layout(c, range(c.layers))


def _layout(c, blocks):
    components = {}
    for i in blocks:
        row = (c.kv_heads[i], c.head_width)
        components[f"{i}.k"] = Ring(c.window, row) if c.sliding[i] else Rows(row)
        components[f"{i}.v"] = Ring(c.window, row) if c.sliding[i] else Rows(row)
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
    """Gated grouped-query attention of layer i on its normalised input n [D] → [D]."""
    p = f"blk.{i}."
    angles = position * _frequencies(c, w, i)

    def heads(part):
        return (w[f"{p}attn_{part}.weight"] @ n).reshape(-1, c.head_width)

    def rotated(part):
        return rotate_head(rms_norm(heads(part), w[f"{p}attn_{part}_norm.weight"], c.norm_eps), angles)

    state[f"{i}.k"].append(rotated("k"))
    state[f"{i}.v"].append(heads("v"))
    out = attend(rotated("q"), state[f"{i}.k"].rows(), state[f"{i}.v"].rows(), c.head_width**-0.5)
    gate = sigmoid(w[f"{p}attn_gate.weight"] @ n)
    return w[f"{p}attn_output.weight"] @ (gate[:, None] * out).reshape(-1)


def _frequencies(c, w, i):
    """Rotary frequencies of a layer: of the whole head in sliding layers, of half of it and divided as stored in full ones."""
    if c.sliding[i]:
        return rope_frequencies(c.head_width, c.rope_base_sliding)
    rotary = c.head_width // 2
    return rope_frequencies(rotary, c.rope_base) / w["rope_freqs.weight"][: rotary // 2].astype(np.float64)


def feed_forward(c, w, i, n):
    """Dense SwiGLU, or routed experts plus the shared one, of layer i on its normalised input n [D] → [D].

    The model's own code applies the shared expert's limit in dense layers too.
    """
    p = f"blk.{i}."
    if _dense(c, i):
        return moe.dense(n, w, p, c.clamp_shared[i], "activation")
    routed = moe.sigmoid_experts(n, w, p, c.experts_used, c.expert_scale, c.clamp_routed[i], "activation", floor=0.0)
    return routed + moe.shared_expert(n, w, p, c.clamp_shared[i], "activation")


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
    """Draft logits [V] of an output of predictor d: its own norm and head."""
    p = f"blk.{c.layers + d}."
    return nextn.logits(w, p, rms_norm(row, w[f"{p}nextn.shared_head_norm.weight"], c.norm_eps))


def tiny_metadata():
    """Metadata of a tiny model with every layer kind: full and sliding, dense and routed, clamped and not."""
    keys = {
        "block_count": 5,
        "context_length": 65536,
        "embedding_length": 64,
        "vocab_size": 512,
        "feed_forward_length": 96,
        "attention.head_count": np.array([4, 6, 6, 6, 4], np.int32),
        "attention.head_count_kv": np.full(5, 2, np.int32),
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.sliding_window": 24,
        "attention.sliding_window_pattern": [False, True, True, True, False],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5e6,
        "rope.freq_base_swa": 1e4,
        "leading_dense_block_count": 2,
        "moe_every_n_layers": 1,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 16,
        "expert_shared_feed_forward_length": 24,
        "expert_gating_func": 2,
        "expert_weights_scale": 3.0,
        "expert_weights_norm": True,
        "swiglu_clamp_exp": np.array([0, 0, 0, 0.5, 0.5], np.float32),
        "swiglu_clamp_shexp": np.array([0, 0, 0, 0, 0.7], np.float32),
    }
    return {f"step35.{key}": value for key, value in keys.items()} | {"tokenizer.ggml.pre": "deepseek-v3"}


def tiny_tensor(name, shape, rng):
    """The frequency divisors: between 1 and 2 on the channels that full layers rotate, 1 beyond."""
    if name != "rope_freqs.weight":
        return None
    half = shape[0] // 2
    return np.concatenate([np.linspace(1, 2, half), np.ones(shape[0] - half)]).astype(np.float32)
