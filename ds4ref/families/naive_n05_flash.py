"""Naive-N0.5-Flash: grouped-query attention whose full layers read only the keys that an indexer selects.

Sliding layers see a window of keys, their own included, with one learned sink logit per head. The others (DSA) keep every
key and value and attend to the best few by a small indexer, whose queries and keys are rounded to E4M3 on purpose. Values
are scaled; rotation touches the first channels of a head only, with a base per layer kind. Sources: the authors' model code
and the layout of the published GGUF files.

Letters: D hidden, H heads, G key/value heads, d key width, v value width, I indexer heads, E experts, V vocabulary.
Knows nothing about drafting: the DSpark predictor lives in a sidecar (``naive_n05_flash_dspark.py``).
"""

from dataclasses import dataclass

import numpy as np

from .. import moe
from ..attention import attend
from ..gguf import Keys
from ..indexer import index_scores, select
from ..ops import layer_norm, rms_norm, rope_frequencies, rotate_head
from ..rounding import round_blocks, round_e4m3
from ..state import Ring, Rows

ARCHITECTURES = ("naive_n05_flash",)
OPTIONS = {}

INDEX_NORM_EPS = 1e-6  # the model code's constant: no key carries it


@dataclass(frozen=True)
class Config:
    layers: int
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
    index_heads: int
    index_width: int
    index_top_k: int
    norm_eps: float
    rotary: int
    rope_base: float
    rope_base_sliding: float
    routed: tuple[bool, ...]
    dense_widths: tuple[int, ...]
    experts: int
    experts_used: int
    expert_width: int

    @classmethod
    def from_metadata(cls, artifact):
        """Read and validate every key the model relies on. ArtifactError names the key that is missing or off."""
        k = Keys(artifact, "naive_n05_flash.")
        layers = k.int("block_count", lo=1, hi=1024)
        config = cls(
            layers=layers,
            context=k.int("context_length", lo=1),
            width=k.int("embedding_length", lo=1),
            vocabulary=k.int("vocab_size", default=len(artifact.metadata.get("tokenizer.ggml.tokens", ())), lo=1),
            heads=k.int("attention.head_count", lo=1),
            kv_heads=k.ints("attention.head_count_kv", n=layers, lo=1),
            sliding=tuple(map(bool, k.ints("attention.hybrid_layer_pattern", n=layers, lo=0, hi=1))),
            key_width=k.int("attention.key_length", lo=2),
            value_width=k.int("attention.value_length", lo=1),
            value_scale=k.float("attention.value_scale"),
            window=k.int("attention.sliding_window", lo=1),
            index_heads=k.int("index_n_heads", lo=1),
            index_width=k.int("index_head_dim", lo=2),
            index_top_k=k.int("index_top_k", lo=1),
            norm_eps=k.float("attention.layer_norm_rms_epsilon", lo=0.0),
            rotary=k.int("rope.dimension_count", lo=2),
            rope_base=k.float("rope.freq_base", lo=1.0),
            rope_base_sliding=k.float("rope.freq_base_swa", lo=1.0),
            routed=tuple(map(bool, k.ints("expert.layer_pattern", n=layers, lo=0, hi=1))),
            dense_widths=k.ints("feed_forward_length", n=layers, lo=1),
            experts=k.int("expert_count", lo=1),
            experts_used=k.int("expert_used_count", lo=1, hi=k.int("expert_count")),
            expert_width=k.int("expert_feed_forward_length", lo=1),
        )
        config._check(k)
        return config

    def _check(self, k):
        """Refuse what fixes another variant of the model than the one written here."""
        k.str("attention.projection_layout", choices=("split",))
        k.str("rope.pairing", choices=("split-half / GPT-NeoX",))
        k.str("indexer_activation_dtype", choices=("fp8_e4m3",))
        k.str("moe.topk_method", choices=("noaux_tc",))
        k.str("moe.scoring_func", choices=("sigmoid",))
        k.int("index_n_kv_heads", lo=1, hi=1)
        k.int("expert_gating_func", lo=2, hi=2)
        k.int("expert_group_count", default=1, lo=1, hi=1)
        k.int("expert_group_used_count", default=1, lo=1, hi=1)
        k.int("rope.dimension_count_swa", default=self.rotary, lo=self.rotary, hi=self.rotary)
        switches = {"attention.dsa_enabled": True, "attention.add_swa_sink": True, "attention.add_full_sink": False}
        for name, wanted in (switches | {"expert_weights_norm": True}).items():
            if k.bool(name) != wanted:
                raise k.error(name, not wanted, str(wanted).lower())
        indexed = [i for i, sliding in enumerate(self.sliding) if not sliding]
        if (found := list(k.ints("attention.dsa_layers"))) != indexed:
            raise k.error("attention.dsa_layers", found, f"{indexed}, as the layer pattern has it")
        if odd := [n for n in self.kv_heads if self.heads % n]:
            raise k.error("attention.head_count_kv", odd[0], f"divisors of {self.heads} heads")
        widest = min(self.key_width, self.index_width)
        if self.rotary % 2 or self.rotary > widest:
            raise k.error("rope.dimension_count", self.rotary, f"an even number up to {widest}")
        factor = k.float("rope.partial_rotary_factor", default=self.rotary / self.key_width)
        if int(factor * self.key_width) != self.rotary:
            raise k.error("rope.partial_rotary_factor", factor, f"a part of {self.key_width} that truncates to {self.rotary}")


def tensors(c):
    """(required, optional): tensor name → shape."""
    D = c.width
    required = {"token_embd.weight": (c.vocabulary, D), "output.weight": (c.vocabulary, D), "output_norm.weight": (D,)}
    for i, groups in enumerate(c.kv_heads):
        p = f"blk.{i}."
        required |= {
            f"{p}attn_norm.weight": (D,),
            f"{p}attn_q.weight": (c.heads * c.key_width, D),
            f"{p}attn_k.weight": (groups * c.key_width, D),
            f"{p}attn_v.weight": (groups * c.value_width, D),
            f"{p}attn_output.weight": (D, c.heads * c.value_width),
            f"{p}ffn_norm.weight": (D,),
        }
        if c.sliding[i]:
            required[f"{p}attn_sinks.weight"] = (c.heads,)
        else:
            required |= {
                f"{p}indexer.q_proj.weight": (c.index_heads * c.index_width, D),
                f"{p}indexer.k_proj.weight": (c.index_width, D),
                f"{p}indexer.k_norm.weight": (c.index_width,),
                f"{p}indexer.k_norm.bias": (c.index_width,),
                f"{p}indexer.proj.weight": (c.index_heads, D),
            }
        if c.routed[i]:
            required |= moe.router_tensors(p, c.experts, D) | moe.expert_tensors(p, c.experts, D, c.expert_width)
        else:
            required |= moe.dense_tensors(p, D, c.dense_widths[i])
    return required, {}


def layout(c):
    """State components: rotated keys and scaled values, of every position or of the window; rounded indexer keys."""
    components = {}
    for i in range(c.layers):
        key, value = (c.kv_heads[i], c.key_width), (c.kv_heads[i], c.value_width)
        components[f"{i}.k"] = Ring(c.window, key) if c.sliding[i] else Rows(key)
        components[f"{i}.v"] = Ring(c.window, value) if c.sliding[i] else Rows(value)
        if not c.sliding[i]:
            components[f"{i}.index"] = Rows((c.index_width,))
    return components


def forward(c, w, state, token, trace):
    """Advance ``state`` by one token and return its logits [V]. ``trace(name, array)`` sees the parts by name."""
    position = state.length
    h = w.part("token_embd.weight", token)
    trace("embed", h)
    for i in range(c.layers):
        p = f"blk.{i}."
        a = attention(c, w, state, i, position, rms_norm(h, w[f"{p}attn_norm.weight"], c.norm_eps), trace)
        h = h + a
        f = feed_forward(c, w, i, rms_norm(h, w[f"{p}ffn_norm.weight"], c.norm_eps))
        h = h + f
        trace(f"attn_{i}", a)
        trace(f"ffn_{i}", f)
        trace(f"h_{i}", h)
    return w["output.weight"] @ rms_norm(h, w["output_norm.weight"], c.norm_eps)


def attention(c, w, state, i, position, n, trace):
    """Attention of layer i on its normalised input n [D] → [D]: the window with sinks, or the indexer's choice without."""
    p = f"blk.{i}."
    angles = position * rope_frequencies(c.rotary, c.rope_base_sliding if c.sliding[i] else c.rope_base)
    q, k, v = (w[f"{p}attn_{part}.weight"] @ n for part in "qkv")
    q = rotate_head(q.reshape(c.heads, c.key_width), angles)
    state[f"{i}.k"].append(rotate_head(k.reshape(-1, c.key_width), angles))
    state[f"{i}.v"].append(v.reshape(-1, c.value_width) * c.value_scale)
    keys, values = state[f"{i}.k"].rows(), state[f"{i}.v"].rows()
    if c.sliding[i]:
        sinks = w[f"{p}attn_sinks.weight"]
    else:
        kept = index(c, w, state[f"{i}.index"], p, n, angles)
        trace(f"topk_{i}", kept)
        keys, values, sinks = keys[kept], values[kept], None
    out = attend(q, keys, values, c.key_width**-0.5, sinks)
    return w[f"{p}attn_output.weight"] @ out.reshape(-1)


def index(c, w, component, p, n, angles):
    """Append the token's indexer key; → the positions that it attends to, ascending: the best ``top_k``, itself included."""
    key = layer_norm(
        w[f"{p}indexer.k_proj.weight"] @ n, w[f"{p}indexer.k_norm.weight"], w[f"{p}indexer.k_norm.bias"], INDEX_NORM_EPS
    )
    component.append(_round(rotate_head(key, angles)))
    q = (w[f"{p}indexer.q_proj.weight"] @ n).reshape(c.index_heads, c.index_width)
    weights = w[f"{p}indexer.proj.weight"] @ n * c.index_heads**-0.5
    return select(index_scores(_round(rotate_head(q, angles)), component.rows(), weights), c.index_top_k)


def _round(x):
    """The model's E4M3 round trip of indexer rows [..., width]: one scale per row, not limited to powers of two."""
    return round_blocks(x, x.shape[-1], 448, 1e-4, round_e4m3, power_of_two=False)


def feed_forward(c, w, i, n):
    """Dense SwiGLU or routed experts (no shared one) of layer i on its normalised input n [D] → [D]."""
    p = f"blk.{i}."
    if not c.routed[i]:
        return moe.dense(n, w, p)
    return moe.sigmoid_experts(n, w, p, c.experts_used)


def tiny_metadata():
    """Metadata of a tiny model with every layer kind: indexed and sliding, dense and routed."""
    keys = {
        "block_count": 4,
        "context_length": 65536,
        "embedding_length": 64,
        "vocab_size": 512,
        "feed_forward_length": np.array([96, 16, 16, 16], np.int32),
        "attention.head_count": 4,
        "attention.head_count_kv": np.array([1, 2, 2, 1], np.int32),
        "attention.key_length": 24,
        "attention.value_length": 16,
        "attention.value_scale": 0.707,
        "attention.sliding_window": 20,
        "attention.hybrid_layer_pattern": np.array([0, 1, 1, 0], np.int32),
        "attention.dsa_layers": np.array([0, 3], np.int32),
        "attention.dsa_enabled": True,
        "attention.projection_layout": "split",
        "attention.add_swa_sink": True,
        "attention.add_full_sink": False,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 8,
        "rope.dimension_count_swa": 8,
        "rope.partial_rotary_factor": 0.334,
        "rope.pairing": "split-half / GPT-NeoX",
        "rope.freq_base": 1e7,
        "rope.freq_base_swa": 1e4,
        "index_n_heads": 4,
        "index_n_kv_heads": 1,
        "index_head_dim": 16,
        "index_top_k": 32,
        "indexer_activation_dtype": "fp8_e4m3",
        "expert.layer_pattern": np.array([0, 1, 1, 1], np.int32),
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_feed_forward_length": 16,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "moe.topk_method": "noaux_tc",
        "moe.scoring_func": "sigmoid",
    }
    return {f"naive_n05_flash.{key}": value for key, value in keys.items()} | {"tokenizer.ggml.pre": "qwen2"}
