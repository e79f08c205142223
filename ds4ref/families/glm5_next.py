"""GLM-5.3-Flash (``glm5-next``): recurrent KDA layers, sparse latent attention in every fourth, a residual of N streams.

KDA layers keep one matrix per head, changed at every token by the gated delta rule. Latent-attention layers (MLA) keep a
row per token and read the tokens of the best *pools*: blocks of P tokens whose indexer keys are mixed into one. Nothing is
rotated: the text model has no positions but the order of the tokens. Sources: Kimi Linear (KDA), DeepSeek-V2 and V3.2
(MLA, indexer), mHC (hyper-connections) reports; the layout of the published GGUF files and of llama.cpp's converter.

Letters: D hidden, H heads, d head width, r latent rank, v value width, P pool size, N streams, E experts, V vocabulary.
Knows nothing about images (their encoder is another file).
"""

from dataclasses import dataclass

import numpy as np

from .. import hyper, moe, nextn
from ..attention import attend_latent
from ..gguf import ArtifactError, Keys
from ..indexer import index_scores, select
from ..ops import layer_norm, rms_norm, sigmoid, softmax
from ..recurrent import associate, bounded_decay, convolve
from ..state import Compressed, Recurrent, Ring, Rows

ARCHITECTURES = ("glm5-next",)
OPTIONS = {}

LONGEST_DRAFT = 3

# Names within a block: the published layout's, which this file uses throughout → llama.cpp's where they differ.
LLAMACPP_NAMES = {
    "kda_q.weight": "attn_q.weight",
    "kda_k.weight": "attn_k.weight",
    "kda_v.weight": "attn_v.weight",
    "kda_q_conv.weight": "ssm_conv1d_q.weight",
    "kda_k_conv.weight": "ssm_conv1d_k.weight",
    "kda_v_conv.weight": "ssm_conv1d_v.weight",
    "kda_f_a.weight": "ssm_f_a.weight",
    "kda_f_b.weight": "ssm_f_b.weight",
    "kda_dt_bias.weight": "ssm_dt.bias",
    "kda_a_log.weight": "ssm_a",
    "kda_beta.weight": "ssm_beta.weight",
    "kda_g_a.weight": "ssm_g_a.weight",
    "kda_g_b.weight": "ssm_g_b.weight",
    "kda_o_norm.weight": "ssm_norm.weight",
    "kda_output.weight": "attn_output.weight",
    "indexer.pool_ape.weight": "indexer_compressor_ape.weight",
    "indexer.pool_gate.weight": "indexer_compressor_gate.weight",
}


@dataclass(frozen=True)
class Config:
    layers: int
    context: int
    width: int
    vocabulary: int
    llamacpp: bool
    latent: tuple[bool, ...]
    full: tuple[bool, ...]
    kda_heads: int
    kda_width: int
    kda_taps: int
    kda_lower: float
    heads: int
    key_width: int
    value_width: int
    q_rank: int
    kv_rank: int
    index_heads: int
    index_width: int
    index_top_k: int
    index_eps: float
    pool: int
    norm_eps: float
    dense_layers: int
    dense_width: int
    experts: int
    experts_used: int
    expert_width: int
    expert_scale: float
    clamp_routed: tuple[float, ...]
    clamp_shared: tuple[float, ...]
    streams: int
    sinkhorn: int
    hyper_eps: float
    predictors: int

    @classmethod
    def from_metadata(cls, artifact):
        """Read and validate every key the model relies on. ArtifactError names the key that is missing or off."""
        k = Keys(artifact, "glm5-next.")
        blocks = k.int("block_count", lo=1, hi=1024)
        predictors = k.int("nextn_predict_layers", default=0, lo=0, hi=min(1, blocks - 1))
        layers = blocks - predictors
        heads = k.int("attention.head_count", lo=1)
        experts = k.int("expert_count", lo=1)
        if k.has("layer_types"):
            own = _published_keys(k, blocks, layers)
        elif k.has("attention.head_count_kv"):
            own = _llamacpp_keys(k, blocks, layers, heads)
        else:
            accepted = "'glm5-next.layer_types' (published layout) or 'glm5-next.attention.head_count_kv' (llama.cpp's layout)"
            raise ArtifactError(f"{artifact.path.name}: no key tells the layers' kinds; expected {accepted}")
        config = cls(
            **own,
            layers=layers,
            context=k.int("context_length", lo=1),
            width=k.int("embedding_length", lo=1),
            vocabulary=k.int("vocab_size", lo=1),
            heads=heads,
            q_rank=k.int("attention.q_lora_rank", lo=1),
            kv_rank=k.int("attention.kv_lora_rank", lo=1),
            index_heads=k.int("attention.indexer.head_count", lo=1),
            index_width=k.int("attention.indexer.key_length", lo=1),
            index_top_k=k.int("attention.indexer.top_k", lo=1),
            index_eps=k.float("attention.layer_norm_epsilon", default=1e-6, lo=0.0),
            norm_eps=k.float("attention.layer_norm_rms_epsilon", lo=0.0),
            dense_layers=k.int("leading_dense_block_count", default=0, lo=0, hi=layers),
            dense_width=k.int("feed_forward_length", lo=1),
            experts=experts,
            experts_used=k.int("expert_used_count", lo=1, hi=experts),
            expert_width=k.int("expert_feed_forward_length", lo=1),
            expert_scale=k.float("expert_weights_scale", default=1.0),
            streams=k.int("hyper_connection.count", lo=1),
            sinkhorn=k.int("hyper_connection.sinkhorn_iterations", lo=1),
            hyper_eps=k.float("hyper_connection.epsilon", lo=0.0),
            predictors=predictors,
        )
        k.int("expert_shared_count", lo=1, hi=1)
        k.int("expert_group_count", default=1, lo=0, hi=1)
        moe.require_sigmoid(k)
        if k.bool("native_fp8", default=False):
            raise k.error("native_fp8", True, "false (the FP8 variant of the weights is not read)")
        if config.index_top_k % config.pool:
            raise k.error("attention.indexer.top_k", config.index_top_k, f"a multiple of the pool size {config.pool}")
        if predictors and not config.latent[-1]:
            raise k.error("nextn_predict_layers", predictors, "a predictor block of the latent-attention kind")
        return config


def _published_keys(k, blocks, layers):
    """Fields whose keys only the published layout has."""
    kinds = k.ints("layer_types", n=blocks, lo=0, hi=1)  # 0 KDA, 1 latent attention
    limit = k.float("swiglu_limit", lo=0.0)
    k.int("trunk_block_count", default=layers, lo=layers, hi=layers)
    k.int("attention.rope_dimension_count", default=0, lo=0, hi=0)
    return {
        "llamacpp": False,
        "latent": tuple(kind == 1 for kind in kinds),
        "full": (True,) * layers,
        "kda_heads": k.int("linear_attention.head_count", lo=1),
        "kda_width": k.int("linear_attention.head_dimension", lo=1),
        "kda_taps": k.int("linear_attention.conv_kernel", lo=1, hi=64),
        "kda_lower": k.float("linear_attention.gate_lower_bound", hi=0.0),
        "key_width": k.int("attention.key_length", lo=1),
        "value_width": k.int("attention.value_length", lo=1),
        "pool": k.int("attention.indexer.pool_size", lo=1),
        "clamp_routed": (limit,) * blocks,
        "clamp_shared": (limit,) * blocks,
    }


def _llamacpp_keys(k, blocks, layers, heads):
    """Fields whose keys only llama.cpp's layout has. Its list of indexer kinds, true for full, is optional."""
    kinds = k.ints("attention.head_count_kv", n=blocks, lo=0, hi=1)  # 0 KDA, 1 latent attention
    full = (True,) * layers
    if k.has("attention.indexer.types"):
        full = k.bools("attention.indexer.types", n=layers, at_least=True)[:layers]
        if 1 in kinds[:layers] and not full[first := kinds.index(1)]:
            raise k.error(f"attention.indexer.types[{first}]", False, "true: no latent attention below has a choice to share")
    rank = k.int("attention.kv_lora_rank", lo=1)
    k.int("attention.key_length", default=rank, lo=rank, hi=rank)
    k.int("attention.value_length", default=rank, lo=rank, hi=rank)
    k.int("rope.dimension_count", default=0, lo=0, hi=0)
    if not k.bool("attention.indexer.kpool_select_tail", default=True):
        raise k.error("attention.indexer.kpool_select_tail", False, "true")
    clamp = k.floats("swiglu_clamp_exp", n=blocks, lo=0.0)
    return {
        "llamacpp": True,
        "latent": tuple(kind == 1 for kind in kinds),
        "full": full,
        "kda_heads": heads,
        "kda_width": k.int("kda.head_dim", lo=1),
        "kda_taps": k.int("ssm.conv_kernel", lo=1, hi=64),
        "kda_lower": k.float("kda.gate_lower_bound", hi=0.0),
        "key_width": k.int("attention.key_length_mla", lo=1),
        "value_width": k.int("attention.value_length_mla", lo=1),
        "pool": k.int("attention.indexer.kpool", lo=1),
        "clamp_routed": clamp,
        "clamp_shared": k.floats("swiglu_clamp_shexp", n=blocks, default=clamp, lo=0.0),
    }


def block_name(c, i, name):
    """The artifact's name of a tensor of block i, from its name in the published layout."""
    return f"blk.{i}.{LLAMACPP_NAMES.get(name, name) if c.llamacpp else name}"


def tensors(c):
    """(required, optional): tensor name → shape, in the artifact's layout. The predictor's block comes last, complete."""
    D = c.width
    required = {"token_embd.weight": (c.vocabulary, D), "output_norm.weight": (D,), "output.weight": (c.vocabulary, D)}
    optional = {}
    for i, latent in enumerate(c.latent):
        block = {"attn_norm.weight": (D,), "ffn_norm.weight": (D,)} | _feed_forward_tensors(c, i)
        block |= _latent_tensors(c) if latent else _kda_tensors(c)
        if i < c.layers:
            for site in ("attn", "ffn"):
                block[f"hc_{site}_fn.weight"] = (2 * c.streams + c.streams**2, c.streams * D)
                block[f"hc_{site}_base.weight"] = (2 * c.streams + c.streams**2,)
                block[f"hc_{site}_scale.weight"] = (3,)
        else:
            block |= nextn.joint_tensors("", D) | {"nextn.shared_head_norm.weight": (D,)}
        required |= {block_name(c, i, name): shape for name, shape in block.items()}
        if latent:
            shared = i < c.layers and not c.full[i]
            indexer = {block_name(c, i, name): shape for name, shape in _indexer_tensors(c).items()}
            (optional if shared else required).update(indexer)
    return required, optional


def _kda_tensors(c):
    D, d, channels = c.width, c.kda_width, c.kda_heads * c.kda_width
    convolution = ((channels, 1, c.kda_taps), (1, channels, 1, c.kda_taps))
    return {
        **{f"kda_{part}.weight": (channels, D) for part in "qkv"},
        **{f"kda_{part}_conv.weight": convolution for part in "qkv"},
        **{f"kda_{gate}_a.weight": (d, D) for gate in "fg"},
        **{f"kda_{gate}_b.weight": (channels, d) for gate in "fg"},
        "kda_beta.weight": (c.kda_heads, D),
        "kda_dt_bias.weight": (channels,),
        "kda_a_log.weight": ((c.kda_heads,), (c.kda_heads, 1)),
        "kda_o_norm.weight": (d,),
        "kda_output.weight": (D, channels),
    }


def _latent_tensors(c):
    return {
        "attn_q_a.weight": (c.q_rank, c.width),
        "attn_q_a_norm.weight": (c.q_rank,),
        "attn_q_b.weight": (c.heads * c.key_width, c.q_rank),
        "attn_kv_a_mqa.weight": (c.kv_rank, c.width),
        "attn_kv_a_norm.weight": (c.kv_rank,),
        "attn_k_b.weight": (c.heads, c.kv_rank, c.key_width),
        "attn_v_b.weight": (c.heads, c.value_width, c.kv_rank),
        "attn_output.weight": (c.width, c.heads * c.value_width),
    }


def _indexer_tensors(c):
    return {
        "indexer.attn_q_b.weight": (c.index_heads * c.index_width, c.q_rank),
        "indexer.attn_k.weight": (c.index_width, c.width),
        "indexer.k_norm.weight": (c.index_width,),
        "indexer.k_norm.bias": (c.index_width,),
        "indexer.proj.weight": (c.index_heads, c.width),
        "indexer.pool_gate.weight": (c.index_width, c.width),
        "indexer.pool_ape.weight": (c.pool, c.index_width),
    }


def _feed_forward_tensors(c, i):
    D, E, F = c.width, c.experts, c.expert_width
    if i < c.dense_layers:
        return moe.dense_tensors("", D, c.dense_width)
    return moe.router_tensors("", E, D) | moe.expert_tensors("", E, D, F) | moe.shared_tensors("", D, F)


def layout(c):
    """State components: per KDA layer the heads' matrices and the convolutions' last rows; per latent-attention layer a
    latent row per token and, where the layer has an indexer, a key per pool with the (key, gate) rows of the open pool."""
    components = {}
    for i in range(c.layers):
        if c.latent[i]:
            components |= _latent_components(c, i)
        else:
            components |= {f"{i}.{part}": Ring(c.kda_taps, (c.kda_heads * c.kda_width,)) for part in "qkv"}
            components[f"{i}.memory"] = Recurrent((c.kda_heads, c.kda_width, c.kda_width))
    return components


def _latent_components(c, i):
    components = {f"{i}.latent": Rows((c.kv_rank,))}
    if _chooses(c, i):
        components[f"{i}.pools"] = Compressed(c.pool, (c.index_width,), (2, c.index_width), c.pool)
    return components


def _chooses(c, i):
    """Whether block i, of the latent-attention kind, has an indexer: full layers and the predictor."""
    return i >= c.layers or c.full[i]


def forward(c, w, state, token, trace):
    """Advance ``state`` by one token and return its logits [V]. ``trace(name, array)`` sees the parts by name."""
    position = state.length
    streams = np.tile(w.part("token_embd.weight", token), (c.streams, 1))
    trace("embed", streams)
    chosen = None
    for i in range(c.layers):
        x, expand = _connect(c, w, i, "attn", streams)
        if c.latent[i]:
            y, chosen = attention(c, w, state, i, position, x, chosen)
            trace(f"topk_{i}", chosen)
        else:
            y = kda(c, w, state, i, x)
        trace(f"attn_{i}", y)
        x, expand = _connect(c, w, i, "ffn", expand(y))
        y = feed_forward(c, w, i, x)
        trace(f"ffn_{i}", y)
        streams = expand(y)
        trace(f"h_{i}", streams)
    return w["output.weight"] @ rms_norm(np.mean(streams, axis=0), w["output_norm.weight"], c.norm_eps)


def _connect(c, w, i, site, streams):
    """Enter block i's attention or feed-forward: (its normalised input [D], the function that writes its output back)."""
    fn, base, scale = (w[f"blk.{i}.hc_{site}_{part}.weight"] for part in ("fn", "base", "scale"))
    x, post, comb = hyper.connect(streams, fn, base, scale, c.sinkhorn, c.hyper_eps, c.norm_eps)
    return rms_norm(x, w[f"blk.{i}.{site}_norm.weight"], c.norm_eps), lambda y: hyper.expand(streams, y, post, comb)


def kda(c, w, state, i, h):
    """Kimi Delta Attention of layer i on its normalised input h [D] → [D]."""

    def tensor(name):
        return w[block_name(c, i, f"kda_{name}")]

    q, k, v = (
        convolve(state[f"{i}.{part}"], tensor(f"{part}.weight") @ h, tensor(f"{part}_conv.weight")).reshape(c.kda_heads, -1)
        for part in "qkv"
    )
    raw = tensor("f_b.weight") @ (tensor("f_a.weight") @ h) + tensor("dt_bias.weight")
    a = tensor("a_log.weight").reshape(-1)
    rate = -a if c.llamacpp else np.exp(a)  # llama.cpp's layout holds −exp(A_log), the published one A_log
    decay = bounded_decay(raw.reshape(c.kda_heads, c.kda_width), rate, c.kda_lower)
    out = associate(state[f"{i}.memory"], q, k, v, sigmoid(tensor("beta.weight") @ h), decay)
    gate = sigmoid(tensor("g_b.weight") @ (tensor("g_a.weight") @ h))
    return tensor("output.weight") @ (rms_norm(out, tensor("o_norm.weight"), c.norm_eps).reshape(-1) * gate)


def attention(c, w, state, i, position, h, chosen):
    """Latent attention of layer i on its normalised input h [D] → (output [D], the positions it read, ascending).

    ``chosen`` are the positions of the full layer below; a full layer replaces them by its own.
    """
    p = f"blk.{i}."
    latent = rms_norm(w[f"{p}attn_q_a.weight"] @ h, w[f"{p}attn_q_a_norm.weight"], c.norm_eps)
    q = (w[f"{p}attn_q_b.weight"] @ latent).reshape(c.heads, c.key_width)
    state[f"{i}.latent"].append(rms_norm(w[f"{p}attn_kv_a_mqa.weight"] @ h, w[f"{p}attn_kv_a_norm.weight"], c.norm_eps))
    if _chooses(c, i):
        chosen = index(c, w, i, state[f"{i}.pools"], position, latent, h)
    rows = state[f"{i}.latent"].rows()[chosen]
    out = attend_latent(q, None, rows, None, w[f"{p}attn_k_b.weight"], w[f"{p}attn_v_b.weight"], c.key_width**-0.5)
    return w[f"{p}attn_output.weight"] @ out.reshape(-1), chosen


def index(c, w, i, component, position, latent, h):
    """Append the token to its pool and choose the positions to read: those of the best pools, and the open pool.

    Pools are aligned blocks of P tokens. A complete one has one key: per channel, the softmax-weighted mix of its tokens'
    keys. Where the token completes its pool nothing is open, and the token itself is read only if its pool wins.
    """

    def tensor(name):
        return w[block_name(c, i, f"indexer.{name}")]

    def pool(tokens, _):
        return np.sum(softmax(tokens[:, 1] + tensor("pool_ape.weight"), axis=0) * tokens[:, 0], axis=0)

    key = layer_norm(tensor("attn_k.weight") @ h, tensor("k_norm.weight"), tensor("k_norm.bias"), c.index_eps)
    component.append(np.stack([key, tensor("pool_gate.weight") @ h]), pool)
    q = (tensor("attn_q_b.weight") @ latent).reshape(c.index_heads, c.index_width)
    weights = tensor("proj.weight") @ h / h.dtype.type(np.sqrt(c.index_heads * c.index_width))
    keys = component.rows()
    pools = select(index_scores(q, keys, weights), c.index_top_k // c.pool)
    positions = (pools[:, None] * c.pool + np.arange(c.pool)).reshape(-1)
    return np.concatenate([positions, np.arange(len(keys) * c.pool, position + 1)])


def feed_forward(c, w, i, h):
    """Dense SwiGLU in the first layers, else routed experts plus the shared one; gates clamped before SiLU. h [D] → [D]."""
    p = f"blk.{i}."
    if i < c.dense_layers:
        return moe.dense(h, w, p, c.clamp_shared[i])
    routed = moe.sigmoid_experts(h, w, p, c.experts_used, c.expert_scale, c.clamp_routed[i])
    return routed + moe.shared_expert(h, w, p, c.clamp_shared[i])


def draft_layouts(c):
    """State of the predictor: what a latent-attention layer keeps."""
    return [_latent_components(c, c.layers)]


def draft_input(c, w, h):
    """The predictor's hidden row of a position, from the trunk's last streams h [N, D] there: what the head reads."""
    return rms_norm(np.mean(h, axis=0), w["output_norm.weight"], c.norm_eps)


def draft_block(c, w, state, d, position, hidden, token):
    """Run the predictor on a hidden row and the token after it → the row [D] that its head and its next step read.

    It has no hyper-connections, and no positions but the order of its own rows.
    """
    i = c.layers + d
    p = f"blk.{i}."
    x = nextn.joined(w, p, hidden, token, c.norm_eps)
    x = x + attention(c, w, state, i, state.length, rms_norm(x, w[f"{p}attn_norm.weight"], c.norm_eps), None)[0]
    x = x + feed_forward(c, w, i, rms_norm(x, w[f"{p}ffn_norm.weight"], c.norm_eps))
    return rms_norm(x, w[f"{p}nextn.shared_head_norm.weight"], c.norm_eps)


def draft_logits(c, w, d, row):
    """Draft logits [V] of a row of the predictor."""
    return nextn.logits(w, f"blk.{c.layers + d}.", row)


def tiny_metadata():
    """Metadata, in the published layout, of a tiny model with every layer kind and a predictor block."""
    keys = {
        "block_count": 5,
        "trunk_block_count": 4,
        "nextn_predict_layers": 1,
        "context_length": 65536,
        "embedding_length": 64,
        "vocab_size": 512,
        "feed_forward_length": 96,
        "layer_types": np.array([0, 0, 0, 1, 1], np.int32),
        "swiglu_limit": 10.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.head_count": 4,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.q_lora_rank": 32,
        "attention.kv_lora_rank": 32,
        "attention.rope_dimension_count": 0,
        "attention.indexer.head_count": 8,
        "attention.indexer.key_length": 16,
        "attention.indexer.top_k": 16,
        "attention.indexer.pool_size": 4,
        "linear_attention.head_count": 4,
        "linear_attention.head_dimension": 16,
        "linear_attention.conv_kernel": 4,
        "linear_attention.gate_lower_bound": -5.0,
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
        "leading_dense_block_count": 1,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 32,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
    }
    return {f"glm5-next.{key}": value for key, value in keys.items()} | {"tokenizer.ggml.pre": "glm4"}
