"""Qwen3.8-Flash-Next: Gated DeltaNet and sparse gated attention (QSA), hyper-connections, experts, n-gram embeddings.

Three delta nets, then one attention block whose queries attend to the best blocks of tokens only, chosen by an indexer.
The residual is S streams; a low-rank mixer before every block takes the place of layer norms. Every block is followed by
routed experts and a shared one. One block first adds an embedding of the last n tokens, whose table stays on disk
(``ple.py``). Sources: the model's published code and configuration, and the layouts of its GGUF files.

Two layouts share the architecture string: the *published* one and that of *llama.cpp's* converter. Their keys are told
apart here, their tensors in ``qwen4exp_layouts.py``.

Letters: D hidden, S streams, H query heads, G key/value heads, d head width, B tokens of an indexer block, E experts.
Knows nothing about images: the vision tower is bound and not run.
"""

from dataclasses import dataclass

import numpy as np

from .. import moe
from ..attention import attend
from ..gguf import ArtifactError, Keys
from ..indexer import index_scores, select
from ..ops import rms_norm, rope_frequencies, rotate_halves, sigmoid, silu, softmax, yarn_frequencies
from ..ple import Ngrams, converted_ngrams, published_ngrams, running_offsets, successive_primes
from ..recurrent import convolve, gated_delta, short_conv
from ..state import Recurrent, Ring, Rows
from .qwen4exp_layouts import Named, channels, tail_widths, tensors

__all__ = ["ARCHITECTURES", "OPTIONS", "Config", "forward", "layout", "tensors", "tiny_metadata", "tiny_tensor"]

ARCHITECTURES = ("qwen4exp",)
OPTIONS = {
    "context": "tokens to be ready for (default: the trained context); beyond the trained context YaRN applies to all prompts",
    "ple": "folder of the n-gram embedding files (default: the one that the model's file names)",
}
LONGEST_DRAFT = 8
MOST_FACTOR = 4  # the largest YaRN factor that the model is published for


@dataclass(frozen=True)
class Vision:
    layers: int
    width: int
    feed_forward: int
    out: int
    patch: int
    frames: int
    merge: int
    positions: int


@dataclass(frozen=True)
class Config:
    published: bool
    layers: int
    predictors: int
    context: int
    context_cap: int
    width: int
    vocabulary: int
    recurrent: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int
    heads: int
    kv_heads: int
    head_width: int
    index_heads: int
    index_width: int
    index_blocks: int
    block: int
    rotary: int
    rope_base: float
    yarn_factor: int
    experts: int
    experts_used: int
    expert_width: int
    expert_tails: tuple[int, ...]
    shared_width: int
    streams: int
    rank: int
    norm_eps: float
    ngrams: Ngrams
    vision: Vision | None

    @classmethod
    def from_metadata(cls, artifact, *, context=None, ple=None):
        """Read and validate every key the model relies on, and open the sidecar. ArtifactError names what is off."""
        k = Keys(artifact, "qwen4exp.")
        published = k.has("attention.linear_key_head_count")
        if not published and not k.has("ssm.group_count"):
            keys = "'qwen4exp.attention.linear_key_head_count' (published layout) nor 'qwen4exp.ssm.group_count' (llama.cpp's)"
            raise ArtifactError(f"{artifact.path.name}: neither key {keys} is there; expected one, no third layout is known")
        blocks = k.int("block_count", lo=1, hi=1024)
        predictors = k.int("nextn_predict_layers", default=0, lo=0, hi=1 if published else min(1, blocks - 1))
        layers = blocks if published else blocks - predictors
        recurrent, block = _published_kinds(k, layers) if published else _converted_kinds(k, layers)
        delta = _published_delta(k) if published else _converted_delta(k)
        trained = k.int("context_length", lo=1)
        cap = _context(artifact, trained, context)
        kv_heads = k.int("attention.head_count_kv", lo=1)
        head_width = k.int("attention.key_length", lo=2)
        index_width = k.int("attention.indexer.key_length", lo=2)
        experts, expert_width = k.int("expert_count", lo=1), k.int("expert_feed_forward_length", lo=1)
        config = cls(
            published=published,
            layers=layers,
            predictors=predictors,
            context=trained,
            context_cap=cap,
            width=k.int("embedding_length", lo=1),
            vocabulary=_vocabulary(k, artifact),
            recurrent=recurrent,
            **delta,
            heads=k.int("attention.head_count", lo=1),
            kv_heads=kv_heads,
            head_width=head_width,
            index_heads=k.int("attention.indexer.head_count", lo=1),
            index_width=index_width,
            index_blocks=k.int("attention.indexer.top_k", lo=block) // block,
            block=block,
            rotary=k.int("rope.dimension_count", lo=2, hi=min(head_width, index_width)),
            rope_base=k.float("rope.freq_base", lo=1.0),
            yarn_factor=-(-cap // trained),
            experts=experts,
            experts_used=k.int("expert_used_count", lo=1, hi=experts),
            expert_width=expert_width,
            expert_tails=tail_widths(artifact, layers, expert_width) if published else (),
            shared_width=k.int("expert_shared_feed_forward_length", lo=1),
            streams=k.int("hyper_connection.count", lo=1),
            rank=k.int("hyper_connection.lowrank" if published else "hyper_connection.low_rank", lo=1),
            norm_eps=k.float("attention.layer_norm_rms_epsilon", lo=0.0),
            ngrams=(published_ngrams if published else converted_ngrams)(k, artifact, layers, ple),
            vision=_vision(k) if k.bool("vision.present", default=False) else None,
        )
        k.int("attention.value_length", lo=head_width, hi=head_width)
        k.int("mtp.block_count", default=predictors, lo=predictors, hi=predictors)
        if k.bool("mtp.present", default=predictors > 0) != (predictors > 0):
            raise k.error("mtp.present", predictors == 0, f"{predictors > 0}, as nextn_predict_layers has it")
        k.int("attention.indexer.kv_head_count", default=1, lo=1, hi=1)
        k.int("expert_shared_count", default=1, lo=1, hi=1)
        k.str("rope.scaling.type", default="none", choices=("none",))
        sections = k.ints("rope.dimension_sections", n=4, default=(config.rotary // 2, 0, 0, 0), lo=0)
        if config.rotary % 2 or 2 * sum(sections) != config.rotary:
            raise k.error("rope.dimension_count", config.rotary, f"twice {sum(sections)}, the sum of rope.dimension_sections")
        if config.heads % kv_heads:
            raise k.error("attention.head_count", config.heads, f"a multiple of {kv_heads} key/value heads")
        if config.value_heads % config.key_heads:
            key = "attention.linear_value_head_count" if published else "ssm.time_step_rank"
            raise k.error(key, config.value_heads, f"a multiple of {config.key_heads} key heads")
        if k.int("attention.indexer.top_k") % block:
            raise k.error("attention.indexer.top_k", k.int("attention.indexer.top_k"), f"a multiple of {block} tokens")
        return config


def _context(artifact, trained, context):
    """The context to be ready for, up to the largest YaRN factor times the trained one."""
    cap, most = trained if context is None else context, MOST_FACTOR * trained
    if not isinstance(cap, int) or not 1 <= cap <= most:
        raise ArtifactError(f"{artifact.path.name}: option 'context' is {cap!r}; expected an integer from 1 to {most}")
    return cap


def _vocabulary(k, artifact):
    """Rows of the head: the key where there is one, else as many as there are tokens (the converter pads their list)."""
    return k.int("vocab_size", lo=1) if k.has("vocab_size") else len(Keys(artifact, "tokenizer.ggml.").strs("tokens"))


def _published_kinds(k, layers):
    """(which blocks are delta nets, tokens of an indexer block)."""
    kinds = k.strs("attention.layer_types", n=layers)
    if odd := sorted(set(kinds) - {"linear_attention", "full_attention"}):
        raise k.error("attention.layer_types", odd[0], "linear_attention or full_attention for every block")
    full = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    if k.ints("attention.full_layers", default=full) != full:
        raise k.error("attention.full_layers", str(k.ints("attention.full_layers")), f"{full}, as attention.layer_types has it")
    return tuple(kind == "linear_attention" for kind in kinds), k.int("attention.indexer.compress_ratio", lo=1)


def _converted_kinds(k, layers):
    """As :func:`_published_kinds`: the converter writes the block length where there is attention, 0 elsewhere."""
    ratios = k.ints("attention.compress_ratios", n=layers, at_least=True, lo=0)[:layers]
    if len(set(ratios) - {0}) != 1:
        raise k.error("attention.compress_ratios", str(ratios), "0 and one block length")
    return tuple(ratio == 0 for ratio in ratios), max(ratios)


def _published_delta(k):
    if not k.bool("rms_norm.zero_centered"):
        raise k.error("rms_norm.zero_centered", False, "true")
    k.str("attention.output_gate_type", default="sigmoid", choices=("sigmoid",))
    return {
        "key_heads": k.int("attention.linear_key_head_count", lo=1),
        "value_heads": k.int("attention.linear_value_head_count", lo=1),
        "key_width": k.int("attention.linear_key_length", lo=1),
        "value_width": k.int("attention.linear_value_length", lo=1),
        "taps": k.int("attention.linear_conv_kernel", lo=1, hi=64),
    }


def _converted_delta(k):
    heads, width = k.int("ssm.time_step_rank", lo=1), k.int("ssm.state_size", lo=1)
    k.int("ssm.inner_size", lo=heads * width, hi=heads * width)
    return {
        "key_heads": k.int("ssm.group_count", lo=1),
        "value_heads": heads,
        "key_width": width,
        "value_width": width,
        "taps": k.int("ssm.conv_kernel", lo=1, hi=64),
    }


def _vision(k):
    return Vision(
        layers=k.int("vision.block_count", lo=1, hi=1024),
        width=k.int("vision.embedding_length", lo=1),
        feed_forward=k.int("vision.feed_forward_length", lo=1),
        out=k.int("vision.output_embedding_length", lo=1),
        patch=k.int("vision.patch_size", lo=1),
        frames=k.int("vision.temporal_patch_size", lo=1),
        merge=k.int("vision.spatial_merge_size", lo=1),
        positions=k.int("vision.position_count", lo=1),
    )


def layout(c):
    """State components: matrix memory and convolution input of delta nets; keys, values and raw index keys of attention
    blocks; the convolution input of the n-gram embedding."""
    n = c.ngrams
    components = {"ple.conv": Ring(n.order * (n.taps - 1) + 1, (c.streams * c.width,))}
    for i, recurrent in enumerate(c.recurrent):
        if recurrent:
            components[f"{i}.conv"] = Ring(c.taps, (channels(c),))
            components[f"{i}.memory"] = Recurrent((c.value_heads, c.key_width, c.value_width))
        else:
            components |= _attention_components(c, i)
    return components


def _attention_components(c, i):
    return {f"{i}.{part}": Rows((c.kv_heads, c.head_width)) for part in "kv"} | {f"{i}.index": Rows((c.index_width,))}


def _prefix(c, i):
    """What the names of block i begin with: one of the trunk, or the draft block after it."""
    return f"blk.{i}." if i < c.layers else "mtp.blk.0."


def forward(c, w, state, token, trace):
    """Advance ``state`` by one token and return its logits [V]. ``trace(name, array)`` sees the parts by name."""
    w = Named(c, w)
    streams = np.tile(w.part("token_embd.weight", token), (c.streams, 1))
    trace("embed", streams)
    for i in range(c.layers):
        if i == c.ngrams.layer:
            added = ngram_embedding(c, w, state, token, streams, trace)
            trace("ple", added)
            streams = streams + added
        mixer = delta_net if c.recurrent[i] else attention
        streams = _site(c, w, i, "attn", streams, lambda x, i=i, mixer=mixer: mixer(c, w, state, i, x, trace), trace)
        streams = _site(c, w, i, "ffn", streams, lambda x, i=i: feed_forward(c, w, f"blk.{i}.", x), trace)
        trace(f"h_{i}", streams)
    x, _ = mix(c, w, "output_hc_", streams)
    trace("mixed", x)
    return w["output.weight"] @ x


def _site(c, w, i, site, streams, block, trace):
    """One block between its mixer and the streams: ``R_s += g_s · block(x)``, gains g around 1."""
    p = f"{_prefix(c, i)}hc_{site}_"
    x, normed = mix(c, w, p, streams)
    gains = 2 * sigmoid(w[f"{p}inject.weight"] @ normed / c.streams)
    y = block(x)
    trace(f"{site}_{i}", y)
    return streams + gains[:, None] * y


def mix(c, w, p, streams):
    """A block's input [D] and the normed streams [S·D]: the mean of the normed streams, each channel gated.

    ``m = σ(up · silu(down · n / S))``, ``x = mean_s m_s ⊙ n_s``.
    """
    normed = _stream_norm(c, streams, w[f"{p}norm.weight"])
    flat = normed.reshape(-1)
    gates = sigmoid(w[f"{p}up.weight"] @ silu(w[f"{p}down.weight"] @ flat / c.streams))
    return np.mean(gates.reshape(normed.shape) * normed, axis=0), flat


def _stream_norm(c, streams, weight):
    """RMS norm of each stream [S, D] with its own part of ``weight`` [S·D]."""
    return rms_norm(streams, weight.reshape(streams.shape), c.norm_eps)


def ngram_embedding(c, w, state, token, streams, trace):
    """What the embedding of the last n-grams adds to the streams [S, D]: gated by its match with them, then convolved.

    The convolution is dilated by the length of the n-grams. Gate: ``σ(±sqrt(|K · Q| / sqrt(D)))``.
    """
    n, p = c.ngrams, f"blk.{c.ngrams.layer}.ple_"
    e = n.embedding(w, state.tokens, token)
    trace("ple_embedding", e)
    key = _stream_norm(c, (w[f"{p}key.weight"] @ e).reshape(streams.shape), w[f"{p}norm_key.weight"])
    query = _stream_norm(c, streams, w[f"{p}norm_query.weight"])
    match = np.sum(key * query, axis=1) / streams.dtype.type(np.sqrt(c.width))
    gates = sigmoid(np.sign(match) * np.sqrt(np.maximum(np.abs(match), match.dtype.type(1e-6))))
    gated = gates[:, None] * (w[f"{p}value.weight"] @ e)
    ring = state["ple.conv"]
    ring.append(_stream_norm(c, gated, w[f"{p}norm_conv.weight"]).reshape(-1))
    rows = ring.rows()
    convolved = silu(short_conv(rows[(len(rows) - 1) % n.order :: n.order], w[f"{p}conv1d.weight"]))
    return gated + convolved.reshape(streams.shape)


def delta_net(c, w, state, i, x, trace):
    """Gated DeltaNet block i on its input x [D] → [D]."""
    p = f"blk.{i}."
    qkv = convolve(state[f"{i}.conv"], w[f"{p}attn_qkv.weight"] @ x, w[f"{p}ssm_conv1d.weight"])
    a, b = w[f"{p}ssm_alpha.weight"] @ x, w[f"{p}ssm_beta.weight"] @ x
    heads = np.arange(c.value_heads)
    key_head = heads // (c.value_heads // c.key_heads) if c.published else heads % c.key_heads
    out = gated_delta(state[f"{i}.memory"], qkv, a, b, w[f"{p}ssm_a"], w[f"{p}ssm_dt.bias"], key_head)
    z = (w[f"{p}attn_gate.weight"] @ x).reshape(out.shape)
    return w[f"{p}ssm_out.weight"] @ (rms_norm(out, w[f"{p}ssm_norm.weight"], c.norm_eps) * sigmoid(z)).reshape(-1)


def attention(c, w, state, i, x, trace):
    """Sparse gated attention of block i on its input x [D] → [D]. ``attn_q`` holds d query rows, then d gate rows per head."""
    p, position = _prefix(c, i), state.length
    q, gate = np.split((w[f"{p}attn_q.weight"] @ x).reshape(c.heads, 2 * c.head_width), 2, axis=1)
    k, v = ((w[f"{p}attn_{name}.weight"] @ x).reshape(c.kv_heads, c.head_width) for name in "kv")
    state[f"{i}.k"].append(rotate(c, rms_norm(k, w[f"{p}attn_k_norm.weight"], c.norm_eps), position))
    state[f"{i}.v"].append(v)
    state[f"{i}.index"].append(w[f"{p}indexer.k_proj.weight"] @ x)
    kept = visible_tokens(c, w, p, state[f"{i}.index"].rows(), x, position)
    trace(f"select_{i}", kept)
    q = rotate(c, rms_norm(q, w[f"{p}attn_q_norm.weight"], c.norm_eps), position)
    out = attend(q, state[f"{i}.k"].rows()[kept], state[f"{i}.v"].rows()[kept], c.head_width**-0.5)
    return w[f"{p}attn_output.weight"] @ (out * sigmoid(gate)).reshape(-1)


def visible_tokens(c, w, p, raw, x, position):
    """Ascending indices of the tokens that a query attends to: those of the best complete blocks, and the incomplete one.

    raw: [T, index width], the index keys of all tokens as projected. A block's key is their mean, normed, rotated by the
    position of its first token. ``score_j = Σ_h relu(q_h · key_j) / sqrt(width)``.
    """
    blocks = len(raw) // c.block
    tail = np.arange(blocks * c.block, len(raw))
    if blocks <= c.index_blocks:
        return np.arange(len(raw))
    q = (w[f"{p}indexer.q_proj.weight"] @ x).reshape(c.index_heads, c.index_width)
    q = rotate(c, rms_norm(q, w[f"{p}indexer.q_norm.weight"], c.norm_eps), position)
    pooled = np.mean(raw[: len(raw) - len(tail)].reshape(blocks, c.block, -1), axis=1)
    keys = rms_norm(pooled, w[f"{p}indexer.k_norm.weight"], c.norm_eps)
    keys = rotate(c, keys, c.block * np.arange(blocks))
    weights = np.full(c.index_heads, c.index_width**-0.5, x.dtype)
    kept = select(index_scores(q, keys, weights), c.index_blocks)
    return np.concatenate([(c.block * kept[:, None] + np.arange(c.block)).reshape(-1), tail])


def rotate(c, x, position):
    """Rotary embedding of the first channels of ``x`` [N, d] at one position, or at one position per row.

    Beyond the trained context the frequencies are YaRN's, by the context that was configured and not by the prompt, and
    rotated channels grow by ``0.1 ln f + 1``.
    """
    frequencies, scale = rope_frequencies(c.rotary, c.rope_base), 1.0
    if c.yarn_factor > 1:
        frequencies = yarn_frequencies(c.rotary, c.rope_base, c.yarn_factor, c.context)
        scale = 0.1 * np.log(c.yarn_factor) + 1
    rotated = rotate_halves(x[:, : c.rotary], np.multiply.outer(position, frequencies), scale)
    return np.concatenate([rotated, x[:, c.rotary :]], axis=1)


def feed_forward(c, w, p, x):
    """Routed experts (softmax over all, renormalised) plus the shared one behind its own gate, on x [D] → [D]."""
    chosen, weights = moe.route(softmax(w[f"{p}ffn_gate_inp.weight"] @ x), c.experts_used)
    shared = sigmoid(w[f"{p}ffn_gate_inp_shexp.weight"] @ x) * moe.shared_expert(x, w, p)
    return moe.experts(x, chosen, weights, w, p) + shared


def draft_unused(c):
    """Why the draft block does not draft, or None."""
    return None if c.published else "llama.cpp's layout has no mixer before its head, and none is described in its place"


def draft_layouts(c):
    """State of the draft block: what an attention block keeps."""
    return [_attention_components(c, c.layers)]


def draft_input(c, w, h):
    """The draft block's hidden row of a position: the trunk's last streams h [S, D] there, before the final mixer."""
    return h


def draft_block(c, w, state, d, position, hidden, token):
    """Run the draft block on streams [S, D] and the token after them → streams [S, D]. Its positions are its own rows'.

    ``H_s = fc_hidden · N(R_s) + fc_embedding · N(embedding)``, then a block of the attention kind without n-grams.
    """
    w, i = Named(c, w), c.layers + d
    embedding = rms_norm(w.part("token_embd.weight", token), w["mtp.fc_embedding_norm.weight"], c.norm_eps)
    normed = _stream_norm(c, hidden, w["mtp.fc_hidden_norm.weight"])
    streams = normed @ w["mtp.fc_hidden.weight"].T + w["mtp.fc_embedding.weight"] @ embedding
    silent = lambda name, array: None  # noqa: E731
    streams = _site(c, w, i, "attn", streams, lambda x: attention(c, w, state, i, x, silent), silent)
    return _site(c, w, i, "ffn", streams, lambda x: feed_forward(c, w, _prefix(c, i), x), silent)


def draft_logits(c, w, d, streams):
    """Draft logits [V] of the draft block's streams: its own mixer, the trunk's head."""
    w = Named(c, w)
    return w["output.weight"] @ mix(c, w, "mtp.output_hc_", streams)[0]


def tiny_metadata():
    """Metadata of a tiny model of the published layout: both kinds of block, the n-gram table in the file, a draft block."""
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    keys = {
        "block_count": len(kinds),
        "context_length": 65536,
        "embedding_length": 48,
        "vocab_size": 512,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.layer_types": kinds,
        "attention.linear_key_head_count": 2,
        "attention.linear_value_head_count": 6,
        "attention.linear_key_length": 16,
        "attention.linear_value_length": 16,
        "attention.linear_conv_kernel": 4,
        "attention.output_gate_type": "sigmoid",
        "attention.indexer.head_count": 4,
        "attention.indexer.key_length": 16,
        "attention.indexer.top_k": 16,
        "attention.indexer.compress_ratio": 4,
        "rms_norm.zero_centered": True,
        "rope.dimension_count": 8,
        "rope.freq_base": 1e7,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 16,
        "hyper_connection.count": 4,
        "hyper_connection.lowrank": 8,
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": 2,
        "ple.ngram_vocab_size_base": 61,
        "ple.ngram_parts": 4,
        "ple.embedding_length": 48,
        "ple.conv_kernel": 4,
        "ple.layer_ids_one_based": np.array([2], np.uint32),
        "ple.checkpoint_layer_ids_zero_based": np.array([1], np.uint32),
        "nextn_predict_layers": 1,
        "vision.present": False,
    }
    # The end of n-grams is found in the vocabulary by name, so a vocabulary must be there before the real one is made.
    tokenizer = {"tokenizer.ggml.pre": "qwen35", "tokenizer.ggml.tokens": ["<|endoftext|>"]}
    return {f"qwen4exp.{key}": value for key, value in keys.items()} | tokenizer


def tiny_tensor(name, shape, rng):
    """Norm weights around 0 (the delta net's around 1), and the constants of the n-gram hash."""
    sizes = successive_primes(tiny_metadata()["qwen4exp.ple.ngram_vocab_size_base"], 4)
    constants = {"multipliers": rng.integers(1, 1 << 54, shape) | 1, "vocab_sizes": sizes, "offsets": running_offsets(sizes)}
    for kind, values in constants.items():
        if name.endswith(f"_{kind}"):
            return np.array(values, np.int64)
    if "norm" in name and not name.endswith("linear_attn.norm.weight"):
        return (0.1 * rng.standard_normal(shape)).astype(np.float32)
    return None
