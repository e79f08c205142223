"""DeepSeek V4 (Flash and PRO): compressed attention with an indexer, hyper-connections, hash-routed and scored experts.

Every token leaves one row that is key and value at once. Attention sees a short window of raw rows and *compressed* older
ones: one row per 4 tokens, chosen by an indexer (CSA), or one per 128, all of them (HCA), by layer. The residual is N
streams. Sources: the DeepSeek V4 model report and the layout of the published GGUF files.

Letters: D hidden, H heads, d head width, n rotary width, r compression ratio, N streams, E experts, K used, V vocabulary.
Knows nothing about drafting: predictors live in sidecars (``deepseek4_mtp.py``, ``deepseek4_dspark.py``).
"""

from dataclasses import dataclass, replace

import numpy as np

from .. import hyper, moe
from ..attention import attend
from ..gguf import Keys
from ..indexer import index_scores, select
from ..ops import rms_norm, rope_frequencies, rotate_tail, softmax, softplus, yarn_frequencies
from ..rounding import hadamard, round_blocks, round_e2m1, round_e4m3
from ..state import Compressed, Ring

ARCHITECTURES = ("deepseek4",)
OPTIONS = {"qat": "round cached rows to E4M3 and E2M1 blocks, as the vendor's inference graph does (default off)"}


@dataclass(frozen=True)
class Config:
    layers: int
    context: int
    width: int
    vocabulary: int
    heads: int
    head_width: int
    q_rank: int
    out_rank: int
    out_groups: int
    window: int
    ratios: tuple[int, ...]
    index_heads: int
    index_width: int
    index_top_k: int
    norm_eps: float
    rotary: int
    rope_base: float
    compress_base: float
    yarn_factor: float
    yarn_context: int
    yarn_beta_fast: float
    yarn_beta_slow: float
    experts: int
    experts_used: int
    expert_width: int
    expert_scale: float
    hash_layers: int
    clamp_routed: tuple[float, ...]
    clamp_shared: tuple[float, ...]
    streams: int
    sinkhorn: int
    hyper_eps: float
    qat: bool = False

    @classmethod
    def from_metadata(cls, artifact, *, qat=False):
        """Read and validate every key the model relies on. ArtifactError names the key that is missing or off."""
        k = Keys(artifact, "deepseek4.")
        layers = k.int("block_count", lo=1, hi=1024)
        heads = k.int("attention.head_count", lo=1)
        clamp = k.floats("swiglu_clamp_exp", n=layers, default=(0.0,) * layers)
        ratios = k.ints("attention.compress_ratios", n=layers, at_least=True)[:layers]
        config = cls(
            layers=layers,
            context=k.int("context_length", lo=1),
            width=k.int("embedding_length", lo=1),
            vocabulary=k.int("vocab_size", lo=1),
            heads=heads,
            head_width=k.int("attention.key_length", lo=2),
            q_rank=k.int("attention.q_lora_rank", lo=1),
            out_rank=k.int("attention.output_lora_rank", lo=1),
            out_groups=k.int("attention.output_group_count", lo=1, hi=heads),
            window=k.int("attention.sliding_window", lo=1),
            ratios=ratios,
            index_heads=k.int("attention.indexer.head_count", lo=1),
            index_width=k.int("attention.indexer.key_length", lo=1),
            index_top_k=k.int("attention.indexer.top_k", lo=1),
            norm_eps=k.float("attention.layer_norm_rms_epsilon", lo=0.0),
            rotary=k.int("rope.dimension_count", lo=2),
            rope_base=k.float("rope.freq_base", lo=1.0),
            compress_base=k.float("attention.compress_rope_freq_base", lo=1.0),
            yarn_factor=k.float("rope.scaling.factor", lo=1.0),
            yarn_context=k.int("rope.scaling.original_context_length", lo=1),
            yarn_beta_fast=k.float("rope.scaling.yarn_beta_fast", default=32.0),
            yarn_beta_slow=k.float("rope.scaling.yarn_beta_slow", default=1.0),
            experts=k.int("expert_count", lo=1),
            experts_used=k.int("expert_used_count", lo=1, hi=k.int("expert_count")),
            expert_width=k.int("expert_feed_forward_length", lo=1),
            expert_scale=k.float("expert_weights_scale", default=1.0),
            hash_layers=k.int("hash_layer_count", lo=0, hi=layers),
            clamp_routed=clamp,
            clamp_shared=k.floats("swiglu_clamp_shexp", n=layers, default=clamp),
            streams=k.int("hyper_connection.count", lo=1),
            sinkhorn=k.int("hyper_connection.sinkhorn_iterations", lo=1),
            hyper_eps=k.float("hyper_connection.epsilon", lo=0.0),
            qat=qat,
        )
        k.str("rope.scaling.type", choices=("yarn",))
        k.int("attention.head_count_kv", lo=1, hi=1)
        k.int("attention.value_length", lo=config.head_width, hi=config.head_width)
        k.int("expert_shared_count", lo=1, hi=1)
        k.int("expert_group_count", default=0, lo=0, hi=1)
        k.int("expert_gating_func", default=4, lo=4, hi=4)
        if not k.bool("expert_weights_norm", default=True):
            raise k.error("expert_weights_norm", False, "true")
        if odd := [r for r in ratios if r not in (0, 4) and (r < 2 or r % 2)]:
            raise k.error("attention.compress_ratios", odd[0], "0 (window only), 4 (indexed) or an even ratio (all rows)")
        if config.rotary % 2 or config.rotary > config.head_width:
            raise k.error("rope.dimension_count", config.rotary, f"an even number up to {config.head_width}")
        if heads % config.out_groups:
            raise k.error("attention.output_group_count", config.out_groups, f"a divisor of {heads} heads")
        if qat and (config.head_width - config.rotary) % 64:
            raise k.error("attention.key_length", config.head_width, "blocks of 64 unrotated channels, since qat rounds those")
        if qat and (config.index_width < 32 or config.index_width.bit_count() != 1):
            raise k.error("attention.indexer.key_length", config.index_width, "a power of two from 32, since qat rotates by it")
        return config


def tensors(c):
    """(required, optional): tensor name → shape."""
    D = c.width
    required = {"token_embd.weight": (c.vocabulary, D), "output.weight": (c.vocabulary, D), "output_norm.weight": (D,)}
    required |= head_tensors(c, "output_hc")
    optional = {}
    for i, r in enumerate(c.ratios):
        p = f"blk.{i}."
        required |= _window_tensors(c, p)
        if i < c.hash_layers:
            required[f"{p}ffn_gate_tid2eid.weight"] = (c.vocabulary, c.experts_used)
        else:
            required[f"{p}exp_probs_b.bias"] = (c.experts,)
        optional[f"{p}exp_probs_b_vl.bias"] = (c.experts,)  # image tokens' routing bias; text does not use it
        if r:
            required |= _compressor_tensors(f"{p}attn_compressor", r, c.head_width, D)
        if r == 4:
            required |= _compressor_tensors(f"{p}indexer_compressor", r, c.index_width, D)
            required[f"{p}indexer.attn_q_b.weight"] = (c.index_heads * c.index_width, c.q_rank)
            required[f"{p}indexer.proj.weight"] = (c.index_heads, D)
    return required, optional


def _window_tensors(c, p):
    """What every layer has, of whatever kind, but for its router's bias or table."""
    N, D = c.streams, c.width
    mix = 2 * N + N * N
    sites = {}
    for site in ("attn", "ffn"):
        sites[f"{p}hc_{site}_fn.weight"] = (mix, N * D)
        sites[f"{p}hc_{site}_base.weight"] = (mix,)
        sites[f"{p}hc_{site}_scale.weight"] = (3,)
        sites[f"{p}{site}_norm.weight"] = (D,)
    return sites | {
        f"{p}attn_q_a.weight": (c.q_rank, D),
        f"{p}attn_q_a_norm.weight": (c.q_rank,),
        f"{p}attn_q_b.weight": (c.heads * c.head_width, c.q_rank),
        f"{p}attn_kv.weight": (c.head_width, D),
        f"{p}attn_kv_a_norm.weight": (c.head_width,),
        f"{p}attn_sinks.weight": (c.heads,),
        f"{p}attn_output_a.weight": (c.out_groups * c.out_rank, c.heads * c.head_width // c.out_groups),
        f"{p}attn_output_b.weight": (D, c.out_groups * c.out_rank),
        f"{p}ffn_gate_inp.weight": (c.experts, D),
        **moe.expert_tensors(p, c.experts, D, c.expert_width),
        **moe.shared_tensors(p, D, c.expert_width),
    }


def head_tensors(c, prefix):
    """Shapes of the mix that makes one row of the streams."""
    return {
        f"{prefix}_fn.weight": (c.streams, c.streams * c.width),
        f"{prefix}_base.weight": (c.streams,),
        f"{prefix}_scale.weight": (1,),
    }


def _compressor_tensors(prefix, r, width, D):
    rows = (2 if r == 4 else 1) * width
    return {
        f"{prefix}_kv.weight": (rows, D),
        f"{prefix}_gate.weight": (rows, D),
        f"{prefix}_ape.weight": (r, rows),
        f"{prefix}_norm.weight": (width,),
    }


def layout(c):
    """State components: raw rows of the window; compressed rows and their pending (content, gate) token rows."""
    components = {}
    for i, r in enumerate(c.ratios):
        components[f"{i}.raw"] = Ring(c.window, (c.head_width,))
        if r:
            components[f"{i}.rows"] = _compressed(r, c.head_width)
        if r == 4:
            components[f"{i}.keys"] = _compressed(r, c.index_width)
    return components


def _compressed(r, width):
    # r = 4 blocks overlap: each also mixes the previous block's four tokens.
    return Compressed(r, (width,), (2, 2 * width), 2 * r) if r == 4 else Compressed(r, (width,), (2, width), r)


def forward(c, w, state, token, trace):
    """Advance ``state`` by one token and return its logits [V]. ``trace(name, array)`` sees the parts by name."""
    position = state.length
    streams = np.tile(w.part("token_embd.weight", token), (c.streams, 1))
    trace("embed", streams)
    for i in range(c.layers):
        streams = _site(c, w, f"blk.{i}.", "attn", streams, lambda h, i=i: attention(c, w, state, i, position, h, trace), trace)
        streams = _site(c, w, f"blk.{i}.", "ffn", streams, lambda h, i=i: feed_forward(c, w, i, token, h), trace)
        trace(f"h_{i}", streams)
    return w["output.weight"] @ rms_norm(mixed(c, w, "output_hc", streams), w["output_norm.weight"], c.norm_eps)


def mixed(c, w, prefix, streams):
    """One row [D] of the streams [N, D], by the mix named ``prefix``."""
    fn, base, scale = (w[f"{prefix}_{part}.weight"] for part in ("fn", "base", "scale"))
    return hyper.head(streams, fn, base, scale, c.hyper_eps, c.norm_eps)


def _site(c, w, prefix, site, streams, block, trace):
    """One hyper-connection around one block (attention or feed-forward), the block's norm included."""
    x, post, comb = entered(c, w, prefix, site, streams)
    y = block(x)
    trace(f"{site}_{prefix.split('.')[1]}", y)
    return hyper.expand(streams, y, post, comb)


def entered(c, w, prefix, site, streams):
    """(the block's normalised input [D], what writes its output back: post [N], comb [N, N])."""
    fn, base, scale = (w[f"{prefix}hc_{site}_{part}.weight"] for part in ("fn", "base", "scale"))
    x, post, comb = hyper.connect(streams, fn, base, scale, c.sinkhorn, c.hyper_eps, c.norm_eps)
    return rms_norm(x, w[f"{prefix}{site}_norm.weight"], c.norm_eps), post, comb


def attention(c, w, state, i, position, h, trace):
    """Window plus compressed attention of layer i on its normalised input h [D] → [D]."""
    p, r = f"blk.{i}.", c.ratios[i]
    frequencies = _frequencies(c, r)
    angles = position * frequencies
    latent, q = queries(c, w, p, h, angles)
    state[f"{i}.raw"].append(raw_row(c, w, p, h, angles))
    rows = state[f"{i}.raw"].rows()
    if r:
        compress(c, w, state[f"{i}.rows"], f"{p}attn_compressor", r, frequencies, h, lambda row: _round_row(c, row))
        older = state[f"{i}.rows"].rows()
        trace(f"comp_{i}", older)
        if r == 4:
            compress(c, w, state[f"{i}.keys"], f"{p}indexer_compressor", r, frequencies, h, lambda row: _round_index(c, row))
            kept = index(c, w, p, state[f"{i}.keys"].rows(), latent, h, angles)
            trace(f"select_{i}", kept)
            older = older[kept]
        rows = np.concatenate([rows, older])
    return read(c, w, p, q, rows, angles)


def queries(c, w, p, h, angles):
    """(query latent [q_rank], normalised and rotated queries [H, d]) of a block's normalised input h [D]."""
    latent = rms_norm(w[f"{p}attn_q_a.weight"] @ h, w[f"{p}attn_q_a_norm.weight"], c.norm_eps)
    q = (w[f"{p}attn_q_b.weight"] @ latent).reshape(c.heads, c.head_width)
    return latent, rotate_tail(rms_norm(q, eps=c.norm_eps), angles)


def raw_row(c, w, p, h, angles):
    """The row [d], key and value at once, that a token leaves in block ``p`` by its normalised input h [D]."""
    row = rotate_tail(rms_norm(w[f"{p}attn_kv.weight"] @ h, w[f"{p}attn_kv_a_norm.weight"], c.norm_eps), angles)
    return _round_row(c, row)


def read(c, w, p, q, rows, angles):
    """What queries [H, d] at ``angles`` read from ``rows`` [S, d], projected back: [D]."""
    rows = rows[:, None, :]
    out = attend(q, rows, rows, c.head_width**-0.5, sinks=w[f"{p}attn_sinks.weight"])
    # Values carried the rotation of their own position; undoing the query's leaves the relative one.
    out = rotate_tail(out, -angles)
    groups = out.reshape(c.out_groups, -1, 1)
    mixed = np.matmul(w[f"{p}attn_output_a.weight"].reshape(c.out_groups, c.out_rank, -1), groups)
    return w[f"{p}attn_output_b.weight"] @ mixed.reshape(-1)


def _frequencies(c, r):
    """Rotary frequencies of a layer: plain for window layers, YaRN on the compress base for everything else."""
    if r == 0:
        return rope_frequencies(c.rotary, c.rope_base)
    return yarn_frequencies(c.rotary, c.compress_base, c.yarn_factor, c.yarn_context, c.yarn_beta_fast, c.yarn_beta_slow)


def compress(c, w, component, prefix, r, frequencies, h, round_row):
    """Feed the token's (content, gate) row to a compressor; a completed block becomes one normalised, rotated row.

    Per channel, a block is the softmax-weighted mix of its tokens' contents. With r = 4 rows are two halves wide: a block
    mixes the first halves of the previous four tokens and the second halves of its own.
    """
    slot = component.length % r
    content = w[f"{prefix}_kv.weight"] @ h
    gate = w[f"{prefix}_gate.weight"] @ h + w[f"{prefix}_ape.weight"][slot]

    def block(tokens, b):
        if r == 4:
            first, second = np.split(tokens, 2, axis=2)
            tokens = np.concatenate([first[:-r], second[-r:]])
        mixed = np.sum(softmax(tokens[:, 1], axis=0) * tokens[:, 0], axis=0)
        row = rms_norm(mixed, w[f"{prefix}_norm.weight"], c.norm_eps)
        return round_row(rotate_tail(row, r * b * frequencies))

    component.append(np.stack([content, gate]), block)


def index(c, w, p, keys, latent, h, angles):
    """The compressed blocks that an indexed layer attends to: ascending indices of the best ``top_k``."""
    q = rotate_tail((w[f"{p}indexer.attn_q_b.weight"] @ latent).reshape(c.index_heads, c.index_width), angles)
    weights = w[f"{p}indexer.proj.weight"] @ h / h.dtype.type(np.sqrt(c.index_heads * c.index_width))
    return select(index_scores(_round_index(c, q), keys, weights), c.index_top_k)


def _round_row(c, row):
    """The vendor's rounding of a cached row: E4M3 in blocks of 64 on the unrotated channels. Identity unless ``qat``."""
    if not c.qat:
        return row
    n = c.head_width - c.rotary
    return np.concatenate([round_blocks(row[:n], 64, 448, 1e-4, round_e4m3), row[n:]])


def _round_index(c, x):
    """The vendor's rounding of indexer queries and keys: Hadamard, then E2M1 in blocks of 32. Identity unless ``qat``."""
    return round_blocks(hadamard(x), 32, 6, 7.05e-38, round_e2m1) if c.qat else x


def feed_forward(c, w, i, token, h):
    """Routed experts plus the shared one, on the normalised input h [D] → [D]. The first layers route by a token table."""
    p = f"blk.{i}."
    affinity = np.sqrt(softplus(w[f"{p}ffn_gate_inp.weight"] @ h))
    if i < c.hash_layers:
        chosen = w.part(f"{p}ffn_gate_tid2eid.weight", token)
        weights = moe.renormalise(affinity[chosen], c.expert_scale)
    else:
        chosen, weights = moe.route(affinity, c.experts_used, w[f"{p}exp_probs_b.bias"], c.expert_scale)
    routed = moe.experts(h, chosen, weights, w, p, c.clamp_routed[i])
    return routed + moe.shared_expert(h, w, p, c.clamp_shared[i])


# Drafters are window layers of this kind in files of their own. They run as layers behind the trunk.


def window_blocks(c, count, experts):
    """The config of a model that has ``count`` more window layers, score-routed to ``experts`` experts."""
    routed, shared = ((*clamp, *[clamp[-1]] * count) for clamp in (c.clamp_routed, c.clamp_shared))
    return replace(c, layers=c.layers + count, ratios=c.ratios + (0,) * count, experts=experts, clamp_routed=routed,
                   clamp_shared=shared)  # fmt: skip


def window_tensors(c, p):
    """Shapes of one such layer under the names that begin with ``p``."""
    return _window_tensors(c, p) | {f"{p}exp_probs_b.bias": (c.experts,)}


def window_layer(c, w, i, streams, attend_rows):
    """Layer i on the streams [N, D] of one row; ``attend_rows`` is its attention, [D] → [D]."""
    streams = _site(c, w, f"blk.{i}.", "attn", streams, attend_rows, _silent)
    return _site(c, w, f"blk.{i}.", "ffn", streams, lambda h: feed_forward(c, w, i, None, h), _silent)


def _silent(name, array):
    pass


def tiny_metadata():
    """Metadata of a tiny model with every layer kind: window, indexed and fully compressed, hash-routed and scored."""
    layers = 4
    keys = {
        "block_count": layers,
        "context_length": 65536,
        "embedding_length": 64,
        "vocab_size": 512,
        "attention.head_count": 4,
        "attention.head_count_kv": 1,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.q_lora_rank": 32,
        "attention.output_lora_rank": 20,
        "attention.output_group_count": 2,
        "attention.sliding_window": 32,
        "attention.compress_ratios": np.array([0, 4, 128, 4], np.int32),
        "attention.compress_rope_freq_base": 160000.0,
        "attention.indexer.head_count": 8,
        "attention.indexer.key_length": 32,
        "attention.indexer.top_k": 16,
        "rope.dimension_count": 16,
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 4096,
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 32,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "hash_layer_count": 1,
        "swiglu_clamp_exp": np.full(layers, 10.0, np.float32),
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
    }
    return {f"deepseek4.{key}": value for key, value in keys.items()} | {"tokenizer.ggml.pre": "joyai-llm"}


def tiny_tensor(name, shape, rng):
    """The token table of hash-routed layers: different experts per token, in random order."""
    if not name.endswith("ffn_gate_tid2eid.weight"):
        return None
    experts = tiny_metadata()["deepseek4.expert_count"]
    return np.stack([rng.permutation(experts)[: shape[1]] for _ in range(shape[0])]).astype(np.int32)
