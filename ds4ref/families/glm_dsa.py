"""GLM-5, 5.1 and 5.2 (``glm_moe_dsa``): latent attention over the tokens that a lightning indexer chooses.

Every layer caches one latent row per token (MLA). In *full* layers an indexer scores all earlier tokens and keeps the
best ``top_k``; *shared* layers reuse the choice of the nearest full layer below. Feed-forward: dense in the first layers,
then sigmoid-routed experts and a shared one. Sources: DeepSeek-V2 (MLA), DeepSeek-V3 (router), DeepSeek-V3.2 (indexer)
and GLM-5 reports, and the layout of the published GGUF files.

Letters: D hidden, H heads, r latent rank, n rotary width, d unrotated key width, v value width, E experts, V vocabulary.
The predictor (NextN) reads every position, as llama.cpp's graph does: its indexer is bound, not used.
"""

from dataclasses import dataclass

import numpy as np

from .. import moe, nextn
from ..attention import attend_latent
from ..gguf import Keys
from ..indexer import select_by_latent
from ..ops import rms_norm, rope_frequencies, rotate_pairs, rotate_tail
from ..state import Rows

ARCHITECTURES = ("glm-dsa",)
OPTIONS = {}

LONGEST_DRAFT = 8

# The indexer's tensors in the order of select_by_latent.
INDEXER = ("attn_q_b.weight", "attn_k.weight", "k_norm.weight", "k_norm.bias", "proj.weight")


@dataclass(frozen=True)
class Config:
    layers: int
    context: int
    width: int
    vocabulary: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rotary: int
    value_width: int
    full: tuple[bool, ...]
    index_heads: int
    index_width: int
    index_top_k: int
    index_eps: float
    norm_eps: float
    rope_base: float
    dense_layers: int
    dense_width: int
    experts: int
    experts_used: int
    expert_width: int
    expert_scale: float
    predictors: int

    @classmethod
    def from_metadata(cls, artifact):
        """Read and validate every key the model relies on. ArtifactError names the key that is missing or off."""
        k = Keys(artifact, "glm-dsa.")
        blocks = k.int("block_count", lo=1, hi=1024)
        predictors = k.int("nextn_predict_layers", default=0, lo=0, hi=min(1, blocks - 1))
        layers = blocks - predictors
        context = k.int("context_length", lo=1)
        rotary = k.int("rope.dimension_count", lo=2)
        key_width = k.int("attention.key_length_mla", lo=rotary + 1)
        experts = k.int("expert_count", lo=1)
        config = cls(
            layers=layers,
            context=context,
            width=k.int("embedding_length", lo=1),
            vocabulary=k.int("vocab_size", lo=1),
            heads=k.int("attention.head_count", lo=1),
            q_rank=k.int("attention.q_lora_rank", lo=1),
            kv_rank=k.int("attention.kv_lora_rank", lo=1),
            nope=key_width - rotary,
            rotary=rotary,
            value_width=k.int("attention.value_length_mla", lo=1),
            full=_full_layers(k, layers, context),
            index_heads=k.int("attention.indexer.head_count", lo=1),
            index_width=k.int("attention.indexer.key_length", lo=rotary),
            index_top_k=k.int("attention.indexer.top_k", lo=1),
            index_eps=k.float("attention.layer_norm_epsilon", default=1e-6, lo=0.0),
            norm_eps=k.float("attention.layer_norm_rms_epsilon", lo=0.0),
            rope_base=k.float("rope.freq_base", lo=1.0),
            dense_layers=k.int("leading_dense_block_count", default=0, lo=0, hi=layers),
            dense_width=k.int("feed_forward_length", lo=1),
            experts=experts,
            experts_used=k.int("expert_used_count", lo=1, hi=experts),
            expert_width=k.int("expert_feed_forward_length", lo=1),
            expert_scale=k.float("expert_weights_scale", default=1.0),
            predictors=predictors,
        )
        if rotary % 2:
            raise k.error("rope.dimension_count", rotary, "an even number")
        row = config.kv_rank + rotary
        k.int("attention.head_count_kv", default=1, lo=1, hi=1)
        k.int("attention.key_length", default=row, lo=row, hi=row)
        k.int("attention.value_length", default=config.kv_rank, lo=config.kv_rank, hi=config.kv_rank)
        k.int("expert_shared_count", lo=1, hi=1)
        k.int("expert_group_count", default=1, lo=0, hi=1)
        moe.require_sigmoid(k)
        k.str("rope.scaling.type", default="none", choices=("none",))
        return config


def _full_layers(k, layers, context):
    """Which layers choose tokens themselves: the file's list, else its schedule, else what the released models do.

    A schedule of frequency f and offset o makes layer i full where ``max(i − o + 1, 0) % f = 0``. Files without either
    are GLM-5.2 (frequency 4, offset 3) where the context is a million tokens; older models choose in every layer.
    """
    if k.has("attention.indexer.types"):
        full = k.bools("attention.indexer.types", n=layers, at_least=True)[:layers]
        if not full[0]:
            raise k.error("attention.indexer.types[0]", False, "true: the first layer has no choice to share")
        return full
    named = [key for key in ("attention.indexer.top_k_freq", "attention.indexer.top_k_frequency") if k.has(key)]
    if named:
        frequency = k.int(named[0], lo=1)
        offset = k.int("attention.indexer.skip_top_k_offset", lo=0)
        if frequency > 1 and offset < 1:
            raise k.error("attention.indexer.skip_top_k_offset", offset, "1 or more, so that the first layer is full")
    else:
        frequency, offset = (4, 3) if context >= 1 << 20 else (1, 1)
    return tuple(max(i - offset + 1, 0) % frequency == 0 for i in range(layers))


def tensors(c):
    """(required, optional): tensor name → shape. The predictor's block comes after the trunk, complete."""
    D = c.width
    required = {"token_embd.weight": (c.vocabulary, D), "output_norm.weight": (D,), "output.weight": (c.vocabulary, D)}
    optional = {}
    for i in range(c.layers + c.predictors):
        p = f"blk.{i}."
        required |= {
            f"{p}attn_norm.weight": (D,),
            f"{p}attn_q_a.weight": (c.q_rank, D),
            f"{p}attn_q_a_norm.weight": (c.q_rank,),
            f"{p}attn_q_b.weight": (c.heads * (c.nope + c.rotary), c.q_rank),
            f"{p}attn_kv_a_mqa.weight": (c.kv_rank + c.rotary, D),
            f"{p}attn_kv_a_norm.weight": (c.kv_rank,),
            f"{p}attn_k_b.weight": (c.heads, c.kv_rank, c.nope),
            f"{p}attn_v_b.weight": (c.heads, c.value_width, c.kv_rank),
            f"{p}attn_output.weight": (D, c.heads * c.value_width),
            f"{p}ffn_norm.weight": (D,),
        }
        # Files written before the schedule had a key carry an indexer in every block, used or not.
        (required if i >= c.layers or c.full[i] else optional).update(
            {
                f"{p}indexer.attn_q_b.weight": (c.index_heads * c.index_width, c.q_rank),
                f"{p}indexer.attn_k.weight": (c.index_width, D),
                f"{p}indexer.k_norm.weight": (c.index_width,),
                f"{p}indexer.k_norm.bias": (c.index_width,),
                f"{p}indexer.proj.weight": (c.index_heads, D),
            }
        )
        if i < c.dense_layers:
            required |= moe.dense_tensors(p, D, c.dense_width)
        else:
            required |= moe.router_tensors(p, c.experts, D) | moe.expert_tensors(p, c.experts, D, c.expert_width)
            required |= moe.shared_tensors(p, D, c.expert_width)
        if i >= c.layers:
            required |= nextn.joint_tensors(p, D) | {f"{p}nextn.shared_head_norm.weight": (D,)}
            optional |= nextn.own_ends(p, D, c.vocabulary)
    return required, optional


def layout(c):
    """State components: a latent row (c, then the rotated key) per layer, an indexer key per full layer."""
    components = {}
    for i, full in enumerate(c.full):
        components[f"{i}.latent"] = Rows((c.kv_rank + c.rotary,))
        if full:
            components[f"{i}.keys"] = Rows((c.index_width,))
    return components


def forward(c, w, state, token, trace):
    """Advance ``state`` by one token and return its logits [V]. ``trace(name, array)`` sees the parts by name."""
    angles = state.length * rope_frequencies(c.rotary, c.rope_base)
    x = w.part("token_embd.weight", token)
    trace("embed", x)
    chosen = None
    for i in range(c.layers):
        p = f"blk.{i}."
        y, chosen = attention(c, w, state, i, rms_norm(x, w[f"{p}attn_norm.weight"], c.norm_eps), angles, chosen)
        trace(f"attn_{i}", y)
        trace(f"topk_{i}", chosen)
        x = x + y
        y = feed_forward(c, w, i, rms_norm(x, w[f"{p}ffn_norm.weight"], c.norm_eps))
        trace(f"ffn_{i}", y)
        x = x + y
        trace(f"h_{i}", x)
    return w["output.weight"] @ rms_norm(x, w["output_norm.weight"], c.norm_eps)


def attention(c, w, state, i, h, angles, chosen):
    """Latent attention of layer i on its normalised input h [D] → (output [D], the positions it read, ascending).

    ``chosen`` are the positions of the full layer below; a full layer replaces them by its own, the predictor takes what it
    is given. Heads carry the rotated channels last, the indexer's queries and keys first.
    """
    p = f"blk.{i}."
    latent = rms_norm(w[f"{p}attn_q_a.weight"] @ h, w[f"{p}attn_q_a_norm.weight"], c.norm_eps)
    q = rotate_tail((w[f"{p}attn_q_b.weight"] @ latent).reshape(c.heads, c.nope + c.rotary), angles)
    row = w[f"{p}attn_kv_a_mqa.weight"] @ h
    content = rms_norm(row[: c.kv_rank], w[f"{p}attn_kv_a_norm.weight"], c.norm_eps)
    state[f"{i}.latent"].append(np.concatenate([content, rotate_pairs(row[c.kv_rank :], angles)]))
    if i < c.layers and c.full[i]:
        indexer = [w[f"{p}indexer.{name}"] for name in INDEXER]
        chosen = select_by_latent(state[f"{i}.keys"], h, latent, indexer, angles, c.index_eps, c.index_top_k)
    rows = state[f"{i}.latent"].rows()[chosen]
    out = attend_latent(
        q[:, : c.nope],
        q[:, c.nope :],
        rows[:, : c.kv_rank],
        rows[:, c.kv_rank :],
        w[f"{p}attn_k_b.weight"],
        w[f"{p}attn_v_b.weight"],
        (c.nope + c.rotary) ** -0.5,
    )
    return w[f"{p}attn_output.weight"] @ out.reshape(-1), chosen


def feed_forward(c, w, i, h):
    """Dense SwiGLU in the first layers, else routed experts plus the shared one. h [D] → [D]."""
    p = f"blk.{i}."
    if i < c.dense_layers:
        return moe.dense(h, w, p)
    return moe.sigmoid_experts(h, w, p, c.experts_used, c.expert_scale) + moe.shared_expert(h, w, p)


def draft_layouts(c):
    """State of the predictor: its latent rows."""
    return [{f"{c.layers}.latent": Rows((c.kv_rank + c.rotary,))}]


def draft_input(c, w, h):
    """The predictor's hidden row of a position, from the trunk's last output h [D] there: what the head reads."""
    return rms_norm(h, w["output_norm.weight"], c.norm_eps)


def draft_block(c, w, state, d, position, hidden, token):
    """Run the predictor on a hidden row and the token after it → the row [D] that its head and its next step read."""
    i = c.layers + d
    p, angles = f"blk.{i}.", position * rope_frequencies(c.rotary, c.rope_base)
    x = nextn.joined(w, p, hidden, token, c.norm_eps)
    every = slice(None)
    x = x + attention(c, w, state, i, rms_norm(x, w[f"{p}attn_norm.weight"], c.norm_eps), angles, every)[0]
    x = x + feed_forward(c, w, i, rms_norm(x, w[f"{p}ffn_norm.weight"], c.norm_eps))
    return rms_norm(x, w[f"{p}nextn.shared_head_norm.weight"], c.norm_eps)


def draft_logits(c, w, d, row):
    """Draft logits [V] of a row of the predictor."""
    return nextn.logits(w, f"blk.{c.layers + d}.", row)


def tiny_metadata():
    """Metadata of a tiny model with every layer kind: dense and routed, full and shared, and a predictor block."""
    keys = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "context_length": 65536,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "vocab_size": 512,
        "attention.head_count": 4,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.q_lora_rank": 32,
        "attention.kv_lora_rank": 32,
        "attention.key_length": 48,
        "attention.value_length": 32,
        "attention.key_length_mla": 32,
        "attention.value_length_mla": 24,
        "attention.indexer.head_count": 8,
        "attention.indexer.key_length": 32,
        "attention.indexer.top_k": 16,
        "attention.indexer.types": np.array([True, False, False, True]),
        "rope.dimension_count": 16,
        "rope.freq_base": 8e6,
        "leading_dense_block_count": 1,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 32,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
    }
    return {f"glm-dsa.{key}": value for key, value in keys.items()} | {"tokenizer.ggml.pre": "glm4"}
