"""dots3-note: latent attention in two geometries, full layers that read an indexer's selection, gated heads, experts.

Every layer keeps one latent row and one rotated key per token, shared by all heads. Full layers attend to the keys that a
small indexer selects; sliding layers have fewer heads, a wider latent and a window of keys, their own included. Every head's
output is scaled by a sigmoid of the layer's input. Sources: DeepSeek-V2 (latent attention) and DeepSeek-V3.2 (indexer)
reports, the model's own code, and both layouts of its GGUF files: the published one, and llama.cpp's.

The published layout leaves much to the tensors' shapes and stores latent norms plain; llama.cpp's has keys for everything
and multiplies those norms by √(D / rank) beforehand.

Letters: D hidden, H heads (by kind), r latent rank, R rotated channels, I indexer heads, E experts, V vocabulary.
Knows nothing about images and sound, which the published files lack.
"""

from dataclasses import dataclass

import numpy as np

from .. import moe, nextn
from ..attention import attend_latent
from ..gguf import ArtifactError, Keys
from ..indexer import select_by_latent
from ..ops import rms_norm, rope_frequencies, rotate_pairs, sigmoid
from ..state import Ring, Rows

ARCHITECTURES = ("dots3note", "dots3-note")
OPTIONS = {}

LONGEST_DRAFT = 3
INDEX_NORM_EPS = 1e-6  # the model code's constant: no key carries it
INDEXER = ("q.weight", "k.weight", "k_norm.weight", "k_norm.bias", "w.weight")  # in the order of select_by_latent

# Tensors that the two layouts call differently: our name → (published, llama.cpp).
NAMES = {
    "rope_norm.weight": ("attn_k_rope_norm.weight", "attn_k_norm.weight"),
    "index_q.weight": ("attn_idx_q_b.weight", "indexer.attn_q_b.weight"),
    "index_k.weight": ("attn_idx_k.weight", "indexer.attn_k.weight"),
    "index_k_norm.weight": ("attn_idx_k_norm.weight", "indexer.k_norm.weight"),
    "index_k_norm.bias": ("attn_idx_k_norm.bias", "indexer.k_norm.bias"),
    "index_w.weight": ("attn_idx_w.weight", "indexer.proj.weight"),
    "eh_proj.weight": ("eh_proj.weight", "nextn.eh_proj.weight"),
    "enorm.weight": ("enorm.weight", "nextn.enorm.weight"),
    "hnorm.weight": ("hnorm.weight", "nextn.hnorm.weight"),
    "shared_head_norm.weight": ("shared_head_norm.weight", "nextn.shared_head_norm.weight"),
}


@dataclass(frozen=True)
class Geometry:
    """Attention shapes of one layer kind: unrotated channels ``nope`` and values are per head."""

    heads: int
    rank: int
    nope: int
    value_width: int
    rope_base: float


@dataclass(frozen=True)
class Config:
    published: bool
    layers: int
    predictors: int
    context: int
    width: int
    vocabulary: int
    sliding: tuple[bool, ...]
    full: Geometry
    windowed: Geometry
    q_rank: int
    rotary: int
    window: int
    index_heads: int
    index_width: int
    index_top_k: int
    norm_eps: float
    dense_layers: int
    dense_width: int
    experts: int
    experts_used: int
    expert_width: int
    expert_scale: float

    @classmethod
    def from_metadata(cls, artifact):
        """Read and validate every key the model relies on, in either layout, under either prefix.

        ArtifactError names the key that is missing or off, or the tensor that should have told a shape.
        """
        k = Keys(artifact, ("dots3note.", "dots3-note."))
        published = k.has("swa_kv_lora_rank")
        if published == k.has("attention.kv_lora_rank_swa"):
            raise ArtifactError(
                f"{artifact.path.name}: the keys are of no known dots3note layout; expected either 'swa_kv_lora_rank' "
                "(published) or 'attention.kv_lora_rank_swa' (llama.cpp)"
            )
        fields = _published(k, artifact) if published else _llamacpp(k)
        config = cls(
            published=published,
            context=k.int("context_length", lo=1),
            width=k.int("embedding_length", lo=1),
            vocabulary=k.int("vocab_size", lo=1),
            norm_eps=k.float("attention.layer_norm_rms_epsilon", lo=0.0),
            dense_layers=k.int("leading_dense_block_count", lo=0, hi=fields["layers"]),
            dense_width=k.int("feed_forward_length", lo=1),
            experts=k.int("expert_count", lo=1),
            experts_used=k.int("expert_used_count", lo=1, hi=k.int("expert_count")),
            expert_width=k.int("expert_feed_forward_length", lo=1),
            expert_scale=k.float("expert_weights_scale", default=1.0),
            **fields,
        )
        k.int("expert_shared_count", lo=1, hi=1)
        k.int("expert_group_count", default=1, lo=0, hi=1)
        moe.require_sigmoid(k)
        if not k.bool("language_only", default=True):
            raise k.error("language_only", False, "true")
        if config.rotary % 2 or config.rotary > config.index_width:
            found = f"{artifact.path.name}: {config.rotary} rotated channels do not fit an indexer of {config.index_width}"
            raise ArtifactError(f"{found}; expected an even number, no larger")
        return config


def _published(k, artifact):
    """Config fields whose keys only the published layout has; the shapes without a key come from the tensors."""

    def rows(block, part):
        name = f"blk.{block}.{part}.weight"
        if name not in artifact.tensors:
            raise ArtifactError(f"{artifact.path.name}: tensor {name!r} is missing; it tells a shape that no key does")
        return artifact.tensors[name].shape[0]

    def geometry(block, rank, base):
        heads = rows(block, "attn_gate")
        nope = rows(block, "attn_q_b") // heads - rotary
        value = rows(block, "attn_kv_b") // heads - nope
        if nope < 1 or value < 1:
            found = f"{heads} heads of {nope} unrotated and {value} value channels in block {block}"
            raise ArtifactError(f"{artifact.path.name}: the shapes of attn_gate, attn_q_b and attn_kv_b give {found}")
        return Geometry(heads, rank, nope, value, base)

    predictors = int(k.bool("mtp.present"))
    blocks = k.int("block_count", lo=1 + predictors, hi=1024)
    sliding = tuple(f"blk.{i}.attn_idx_k.weight" not in artifact.tensors for i in range(blocks))
    if True not in sliding or False not in sliding or not all(sliding[blocks - predictors :]):
        raise ArtifactError(
            f"{artifact.path.name}: attn_idx_k.weight is in {sliding.count(False)} of {blocks} blocks; expected it in the "
            "full layers, and not in the sliding layers or the predictor"
        )
    k.int("full_attention_count", lo=sliding.count(False), hi=sliding.count(False))
    first = sliding.index(False)
    rotary = rows(first, "attn_k_rope_norm")
    full = geometry(first, k.int("kv_lora_rank", lo=1), k.float("rope.freq_base", lo=1.0))
    for name, value in (
        ("attention.head_count", full.heads),
        ("attention.head_count_kv", full.heads),
        ("attention.key_length", full.nope + rotary),
        ("attention.value_length", full.value_width),
    ):
        k.int(name, lo=value, hi=value)
    return {
        "layers": blocks - predictors,
        "predictors": predictors,
        "sliding": sliding,
        "full": full,
        "windowed": geometry(sliding.index(True), k.int("swa_kv_lora_rank", lo=1), k.float("rope.freq_base_swa", lo=1.0)),
        "q_rank": k.int("q_lora_rank", lo=1),
        "rotary": rotary,
        "window": k.int("sliding_window", lo=1),
        "index_heads": rows(first, "attn_idx_w"),
        "index_width": rows(first, "attn_idx_k"),
        "index_top_k": k.int("index_topk", lo=1),
    }


def _llamacpp(k):
    """The same fields from the keys that llama.cpp's converter writes."""
    blocks = k.int("block_count", lo=1, hi=1024)
    predictors = k.int("nextn_predict_layers", default=0, lo=0, hi=min(1, blocks - 1))
    layers = blocks - predictors
    sliding = k.bools("attention.sliding_window_pattern", n=layers) + (True,) * predictors
    if True not in sliding or False not in sliding:
        raise k.error("attention.sliding_window_pattern", list(sliding[:layers]), "full and sliding layers")
    indexed = k.bools("attention.indexer.types", n=layers)
    if indexed != tuple(not s for s in sliding[:layers]):
        raise k.error("attention.indexer.types", indexed, "true in exactly the layers that do not slide")
    heads = k.ints("attention.head_count", n=blocks, lo=1)
    rotary = k.int("rope.dimension_count", lo=2)

    def geometry(is_sliding, suffix, base):
        kind = {n for n, s in zip(heads, sliding, strict=True) if s == is_sliding}
        if len(kind) > 1:
            layers_of = "sliding layers" if is_sliding else "full layers"
            raise k.error("attention.head_count", sorted(kind), f"one number for all {layers_of}")
        rank = k.int(f"attention.kv_lora_rank{suffix}", lo=1)
        k.int(f"attention.key_length{suffix}", lo=rank + rotary, hi=rank + rotary)
        k.int(f"attention.value_length{suffix}", lo=rank, hi=rank)
        nope = k.int(f"attention.key_length_mla{suffix}", lo=rotary + 1) - rotary
        return Geometry(kind.pop(), rank, nope, k.int(f"attention.value_length_mla{suffix}", lo=1), k.float(base, lo=1.0))

    k.int("attention.head_count_kv", lo=1, hi=1)
    return {
        "layers": layers,
        "predictors": predictors,
        "sliding": sliding,
        "full": geometry(False, "", "rope.freq_base"),
        "windowed": geometry(True, "_swa", "rope.freq_base_swa"),
        "q_rank": k.int("attention.q_lora_rank", lo=1),
        "rotary": rotary,
        "window": k.int("attention.sliding_window", lo=1),
        "index_heads": k.int("attention.indexer.head_count", lo=1),
        "index_width": k.int("attention.indexer.key_length", lo=2),
        "index_top_k": k.int("attention.indexer.top_k", lo=1),
    }


def tensors(c):
    """(required, optional): tensor name of the file's layout → shape."""
    D, R = c.width, c.rotary
    required = {"token_embd.weight": (c.vocabulary, D), "output.weight": (c.vocabulary, D), "output_norm.weight": (D,)}
    for i in range(c.layers + c.predictors):
        p, g = f"blk.{i}.", _geometry(c, i)
        required |= {
            f"{p}attn_norm.weight": (D,),
            f"{p}attn_q_a.weight": (c.q_rank, D),
            f"{p}attn_q_a_norm.weight": (c.q_rank,),
            f"{p}attn_q_b.weight": (g.heads * (g.nope + R), c.q_rank),
            f"{p}attn_kv_a_mqa.weight": (g.rank + R, D),
            f"{p}attn_kv_a_norm.weight": (g.rank,),
            _name(c, i, "rope_norm.weight"): (R,),
            f"{p}attn_gate.weight": (g.heads, D),
            f"{p}attn_output.weight": (D, g.heads * g.value_width),
            f"{p}ffn_norm.weight": (D,),
        }
        if c.published:
            required[f"{p}attn_kv_b.weight"] = (g.heads * (g.nope + g.value_width), g.rank)
        else:
            required[f"{p}attn_k_b.weight"] = (g.heads, g.rank, g.nope)
            required[f"{p}attn_v_b.weight"] = (g.heads, g.value_width, g.rank)
        if not c.sliding[i]:
            required |= {
                _name(c, i, "index_q.weight"): (c.index_heads * c.index_width, c.q_rank),
                _name(c, i, "index_k.weight"): (c.index_width, D),
                _name(c, i, "index_k_norm.weight"): (c.index_width,),
                _name(c, i, "index_k_norm.bias"): (c.index_width,),
                _name(c, i, "index_w.weight"): (c.index_heads, D),
            }
        if _dense(c, i):
            required |= moe.dense_tensors(p, D, c.dense_width)
        else:
            required |= moe.router_tensors(p, c.experts, D) | moe.expert_tensors(p, c.experts, D, c.expert_width)
            required |= moe.shared_tensors(p, D, c.expert_width)
        if i >= c.layers:
            required |= {
                _name(c, i, "eh_proj.weight"): (D, 2 * D),
                _name(c, i, "enorm.weight"): (D,),
                _name(c, i, "hnorm.weight"): (D,),
                _name(c, i, "shared_head_norm.weight"): (D,),
                _draft_embedding(c): (c.vocabulary, D),
            }
    return required, {}


def _name(c, i, part):
    """The name that the file's layout has for a tensor of block i; see NAMES."""
    return f"blk.{i}.{NAMES[part][0 if c.published else 1]}"


def _draft_embedding(c):
    return "token_embd_mtp.weight" if c.published else f"blk.{c.layers}.nextn.embed_tokens.weight"


def _geometry(c, i):
    return c.windowed if c.sliding[i] else c.full


def _dense(c, i):
    """Whether block i has no router: the leading ones and the predictor."""
    return i < c.dense_layers or i >= c.layers


def layout(c):
    """State components: normalised latents and rotated keys, of every position or of the window; indexer keys."""
    return _layout(c, range(c.layers))


def _layout(c, blocks):
    components = {}
    for i in blocks:
        for what, width in (("latent", _geometry(c, i).rank), ("rope", c.rotary)):
            components[f"{i}.{what}"] = Ring(c.window, (width,)) if c.sliding[i] else Rows((width,))
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
    """Gated latent attention of layer i on its normalised input n [D] → [D].

    The indexer rotates neighbouring pairs, as the model's own code does (llama.cpp's graph differs).
    """
    p, g = f"blk.{i}.", _geometry(c, i)
    angles = position * rope_frequencies(c.rotary, g.rope_base)
    q_latent = _latent_norm(c, w[f"{p}attn_q_a.weight"] @ n, w[f"{p}attn_q_a_norm.weight"])
    q = (w[f"{p}attn_q_b.weight"] @ q_latent).reshape(g.heads, g.nope + c.rotary)
    latent, key = np.split(w[f"{p}attn_kv_a_mqa.weight"] @ n, [g.rank])
    key = rms_norm(key, w[_name(c, i, "rope_norm.weight")], c.norm_eps)
    state[f"{i}.latent"].append(_latent_norm(c, latent, w[f"{p}attn_kv_a_norm.weight"]))
    state[f"{i}.rope"].append(rotate_pairs(key, angles))
    latents, keys = state[f"{i}.latent"].rows(), state[f"{i}.rope"].rows()
    if not c.sliding[i]:
        indexer = [w[_name(c, i, f"index_{part}")] for part in INDEXER]
        kept = select_by_latent(state[f"{i}.index"], n, q_latent, indexer, angles, INDEX_NORM_EPS, c.index_top_k)
        trace(f"topk_{i}", kept)
        latents, keys = latents[kept], keys[kept]
    q_rot = rotate_pairs(q[:, g.nope :], angles)
    out = attend_latent(q[:, : g.nope], q_rot, latents, keys, *_expansions(c, w, i), (g.nope + c.rotary) ** -0.5)
    gate = sigmoid(w[f"{p}attn_gate.weight"] @ n)
    return w[f"{p}attn_output.weight"] @ (gate[:, None] * out).reshape(-1)


def _latent_norm(c, x, weight):
    """Normalise a latent and scale it by √(D / rank), a factor that llama.cpp's files hold in the weight already."""
    y = rms_norm(x, weight, c.norm_eps)
    return y * (c.width / len(x)) ** 0.5 if c.published else y


def _expansions(c, w, i):
    """What expands a latent into keys [H, r, nope] and values [H, v, r]: one stored matrix, or two."""
    p, g = f"blk.{i}.", _geometry(c, i)
    if not c.published:
        return w[f"{p}attn_k_b.weight"], w[f"{p}attn_v_b.weight"]
    both = w[f"{p}attn_kv_b.weight"].reshape(g.heads, g.nope + g.value_width, g.rank)
    return both[:, : g.nope].transpose(0, 2, 1), both[:, g.nope :]


def feed_forward(c, w, i, n):
    """Dense SwiGLU, or routed experts plus the shared one, of layer i on its normalised input n [D] → [D]."""
    p = f"blk.{i}."
    if _dense(c, i):
        return moe.dense(n, w, p)
    return moe.sigmoid_experts(n, w, p, c.experts_used, c.expert_scale) + moe.shared_expert(n, w, p)


def draft_layouts(c):
    """State of the predictor: what a sliding layer keeps."""
    return [_layout(c, range(c.layers, c.layers + c.predictors))]


def draft_input(c, w, h):
    """The predictor's hidden row of a position, from the trunk's last output h [D] there: what the head reads."""
    return rms_norm(h, w["output_norm.weight"], c.norm_eps)


def draft_block(c, w, state, d, position, hidden, token):
    """Run the predictor on a hidden row and the token after it → the row [D] that its head and its next step read."""
    i = c.layers + d
    p = f"blk.{i}."
    norms = (w[_name(c, i, f"{part}.weight")] for part in ("enorm", "hnorm", "eh_proj"))
    x = nextn.join(hidden, w.part(_draft_embedding(c), token), *norms, c.norm_eps)
    n = rms_norm(x, w[f"{p}attn_norm.weight"], c.norm_eps)
    x = x + attention(c, w, state, i, position, n, lambda name, array: None)
    x = x + feed_forward(c, w, i, rms_norm(x, w[f"{p}ffn_norm.weight"], c.norm_eps))
    return rms_norm(x, w[_name(c, i, "shared_head_norm.weight")], c.norm_eps)


def draft_logits(c, w, d, row):
    """Draft logits [V] of a row of the predictor: its embedding is its own, its head the trunk's."""
    return w["output.weight"] @ row


def tiny_metadata():
    """Metadata of a tiny model with every layer kind, in llama.cpp's layout, whose keys describe it in full."""
    keys = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "context_length": 65536,
        "embedding_length": 64,
        "vocab_size": 512,
        "feed_forward_length": 64,
        "leading_dense_block_count": 1,
        "attention.head_count": np.array([4, 4, 2, 2, 2], np.int32),
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.q_lora_rank": 32,
        "attention.kv_lora_rank": 32,
        "attention.key_length": 40,
        "attention.value_length": 32,
        "attention.key_length_mla": 32,
        "attention.value_length_mla": 16,
        "attention.kv_lora_rank_swa": 48,
        "attention.key_length_swa": 56,
        "attention.value_length_swa": 48,
        "attention.key_length_mla_swa": 32,
        "attention.value_length_mla_swa": 16,
        "attention.sliding_window": 17,
        "attention.sliding_window_pattern": [False, False, True, True],
        "attention.indexer.types": [True, True, False, False],
        "attention.indexer.head_count": 8,
        "attention.indexer.key_length": 64,
        "attention.indexer.top_k": 24,
        "rope.dimension_count": 8,
        "rope.freq_base": 8e7,
        "rope.freq_base_swa": 5e4,
        "expert_count": 7,
        "expert_used_count": 3,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 16,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.0,
    }
    return {f"dots3note.{key}": value for key, value in keys.items()} | {"tokenizer.ggml.pre": "qwen2"}
