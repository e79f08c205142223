"""Qwen3.8-Flash-Next in JAX; read it beside ds4ref/families/qwen4exp.py. The n-gram table stays with the host."""

import re

import jax.numpy as jnp
import numpy as np

from ds4ref.families.qwen4exp import ARCHITECTURES
from ds4ref.families.qwen4exp_layouts import PUBLISHED

from .. import moe, views
from ..attention import Seen, attend
from ..indexer import choose
from ..layers import embed, layer_tensors
from ..ops import angles, rms_norm, rope_frequencies, rotate_halves, rotate_head, sigmoid, silu, softmax, yarn_frequencies
from ..recurrent import convolve, gated_delta, short_conv
from ..weights import dequantize, linear, linears

__all__ = [
    "ARCHITECTURES", "draft_block", "draft_input", "draft_logits", "draft_tensors", "finish", "homes", "layer",
    "prepare", "start", "tensors_of", "uses",
]  # fmt: skip

CONVERTED = {published: name for name, published in PUBLISHED.items()}
MIXER = re.compile(r"((?:mtp\.)?)(hc_input|hc_attn|hc_ffn)\.(?:mix_)?(norm|down|up|inject)\.weight")
MATRICES = ("gate", "up", "down")


def tensors_of(c, artifact):
    """The file's tensors by llama.cpp's names and in its meaning of the values; the experts' matrices stay in two parts."""
    if not c.published:
        return artifact.tensors
    made = [part for name, tensor in artifact.tensors.items() for part in _converted(c, artifact, name, tensor)]
    return {tensor.name: tensor for tensor in made}


def _converted(c, artifact, name, tensor):
    """The tensors, one or two, that stand for one of the published layout; see :class:`ds4ref.…qwen4exp_layouts.Named`."""
    block, rest = re.fullmatch(r"((?:mtp\.)?blk\.\d+\.)?(.*)", name).groups(default="")
    if mixer := MIXER.fullmatch(rest):
        end, site, part = mixer.groups()
        rest = f"{end}{site.replace('hc_input', 'output_hc')}_{part}.weight"
    if rest == "attn_index_qk.weight":
        cut, names = c.index_width, ("indexer.q_proj.weight", "indexer.k_proj.weight")
    elif rest in ("ffn_gate_exps.weight", "ffn_up_exps.weight"):
        stem, cut = rest.removesuffix("weight"), artifact.tensors[f"{block}ffn_down_exps.tail.weight"].shape[-1]
        names = f"{stem}main.weight", f"{stem}tail.weight"
    else:
        return [_renamed(tensor, block, CONVERTED.get(rest, rest))]
    ranges = slice(None, -cut), slice(-cut, None)
    return [views.rows(tensor, block + to, taken) for to, taken in zip(names, ranges, strict=True)]


def _renamed(tensor, block, rest):
    if rest == "ssm_a":
        return views.made(block + rest, -np.exp(tensor.dequantize()))
    if "norm" in rest and rest != "ssm_norm.weight":
        return views.made(block + rest, 1 + tensor.dequantize())
    # Convolutions have a middle axis of one entry, the shared expert's gate a first one.
    squeezed = rest.endswith("conv1d.weight") or rest == "ffn_gate_inp_shexp.weight"
    return views.reshaped(tensor, block + rest, (n for n in tensor.shape if n > 1 or not squeezed))


def uses(c, name):
    """Whether the device reads this tensor: not the draft block, the vision tower, and the n-gram table and its constants."""
    drafts = (f"blk.{c.layers + n}." for n in range(c.predictors))
    return not name.startswith((*c.ngrams.table, f"blk.{c.ngrams.layer}.ple.", "mtp.", "vision.", "vblk.", *drafts))


def homes(c):
    """The n-gram embedding's convolution belongs to the block that it precedes."""
    return {"ple.conv": c.ngrams.layer}


def prepare(c, w, before, tokens):
    """The n-gram embeddings of ``tokens`` after those ``before``: [T, width]."""
    known = [*before[1 - c.ngrams.order :], *tokens]
    first = len(known) - len(tokens)
    return np.stack([c.ngrams.embedding(w, known[:at], known[at]) for at in range(first, len(known))])


def start(c, top, tokens, chunk, e):
    """(streams [B, T, S, D], e [B, T, width]): S copies of the tokens' embeddings; one block needs those of the n-grams."""
    x = embed(top["token_embd.weight"], tokens)
    return jnp.repeat(x[:, :, None, :], c.streams, axis=2), e


def finish(c, top, x):
    """Logits [..., V] of the streams after the last layer."""
    streams, _ = x
    return linear(top["output.weight"], mix(c, top, "output_hc_", streams)[0])


def layer(c, i, w, state, x):
    """One layer on (streams, n-gram embeddings)."""
    streams, e = x
    if "ple_key.weight" in w:
        streams = streams + ngram_embedding(c, w, state, e, streams)
    mixer = delta_net if c.recurrent[i] else attention
    streams = _site(c, w, "attn", streams, lambda x: mixer(c, w, state, x))
    return _site(c, w, "ffn", streams, lambda x: feed_forward(c, w, x)), e


def _site(c, w, site, streams, block):
    """One block between its mixer and the streams: ``R_s += g_s · block(x)``, gains g around 1."""
    p = f"hc_{site}_"
    x, normed = mix(c, w, p, streams)
    gains = 2 * sigmoid(linear(w[f"{p}inject.weight"], normed) / c.streams)
    return streams + gains[..., None] * block(x)[..., None, :]


def mix(c, w, p, streams):
    """A block's input [..., D] and the normed streams [..., S·D]: the mean of the normed streams, each channel gated."""
    normed = _stream_norm(c, streams, w[f"{p}norm.weight"])
    flat = normed.reshape(*streams.shape[:-2], -1)
    gates = sigmoid(linear(w[f"{p}up.weight"], silu(linear(w[f"{p}down.weight"], flat) / c.streams)))
    return jnp.mean(gates.reshape(normed.shape) * normed, axis=-2), flat


def _stream_norm(c, streams, weight):
    """RMS norm of each stream [..., S, D] with its own part of ``weight`` [S·D]."""
    return rms_norm(streams, weight.reshape(streams.shape[-2:]), c.norm_eps)


def ngram_embedding(c, w, state, e, streams):
    """What the embeddings e [B, T, width] add to the streams [B, T, S, D]: gated by their match, then convolved."""
    n = c.ngrams
    key = _stream_norm(c, linear(w["ple_key.weight"], e).reshape(streams.shape), w["ple_norm_key.weight"])
    query = _stream_norm(c, streams, w["ple_norm_query.weight"])
    match = jnp.sum(key * query, axis=-1) / c.width**0.5
    gates = sigmoid(jnp.sign(match) * jnp.sqrt(jnp.maximum(jnp.abs(match), 1e-6)))
    gated = gates[..., None] * linear(w["ple_value.weight"], e)[:, :, None, :]
    ring = state["ple.conv"]
    ring.append(_stream_norm(c, gated, w["ple_norm_conv.weight"]).reshape(*e.shape[:2], -1))
    convolved = silu(short_conv(ring.history(n.order * (n.taps - 1)), dequantize(w["ple_conv1d.weight"]), n.order))
    return gated + convolved.reshape(streams.shape)


def delta_net(c, w, state, x):
    """Gated DeltaNet block on its input x [B, T, D]."""
    qkv, z = linears([w["attn_qkv.weight"], w["attn_gate.weight"]], x)
    qkv = convolve(state["conv"], qkv, dequantize(w["ssm_conv1d.weight"]))
    a, b = linear(w["ssm_alpha.weight"], x), linear(w["ssm_beta.weight"], x)
    heads = np.arange(c.value_heads)
    key_head = heads // (c.value_heads // c.key_heads) if c.published else heads % c.key_heads
    out = gated_delta(state["memory"], qkv, a, b, w["ssm_a"], w["ssm_dt.bias"], key_head)
    out = rms_norm(out, w["ssm_norm.weight"], c.norm_eps) * sigmoid(z.reshape(out.shape))
    return linear(w["ssm_out.weight"], out.reshape(*x.shape[:2], -1))


def attention(c, w, state, x):
    """Sparse gated attention on its input x [B, T, D]. ``attn_q`` holds d query rows, then d gate rows per head.

    Positions are those of the block's own rows, which a draft may begin to keep anywhere in a sequence.
    """
    leading, positions = x.shape[:2], state.chunk.positions
    q, *rows = linears([w[f"attn_{part}.weight"] for part in "qkv"], x)
    q, gate = jnp.split(q.reshape(*leading, c.heads, -1), 2, axis=-1)
    k, v = (part.reshape(*leading, c.kv_heads, c.head_width) for part in rows)
    state["k"].append(rotate(c, rms_norm(k, w["attn_k_norm.weight"], c.norm_eps), positions[:, :, None]))
    state["v"].append(v)
    state["index"].append(linear(w["indexer.k_proj.weight"], x))
    chosen = index(c, w, state["index"].rows(), x, positions)
    q = rotate(c, rms_norm(q, w["attn_q_norm.weight"], c.norm_eps), positions[:, :, None])
    out = attend(q, Seen(state["k"].rows(), state["v"].rows(), chosen=chosen), scale=c.head_width**-0.5)
    return linear(w["attn_output.weight"], (out * sigmoid(gate)).reshape(*leading, -1))


def index(c, w, raw, x, positions):
    """Which tokens each query attends to: those of its best complete blocks, and of its incomplete one.

    raw: View of the index keys of all tokens as projected, rows [index width].
    """

    def pooled(rows, number):
        keys = rms_norm(jnp.mean(rows, axis=2), w["indexer.k_norm.weight"], c.norm_eps)
        return rotate(c, keys, c.block * number)

    q = linear(w["indexer.q_proj.weight"], x).reshape(*x.shape[:2], c.index_heads, c.index_width)
    q = rotate(c, rms_norm(q, w["indexer.q_norm.weight"], c.norm_eps), positions[:, :, None])
    weights = jnp.full(q.shape[:-1], c.index_width**-0.5)
    return choose(q, weights, raw.grouped(c.block, pooled), c.index_blocks, c.block)


def rotate(c, x, positions):
    """Rotary embedding of the first channels of x [..., d] at positions [...]; YaRN where that context was configured."""
    frequencies, scale = rope_frequencies(c.rotary, c.rope_base), 1.0
    if c.yarn_factor > 1:
        frequencies = yarn_frequencies(c.rotary, c.rope_base, c.yarn_factor, c.context)
        scale = 0.1 * np.log(c.yarn_factor) + 1
    return rotate_head(x, angles(positions, frequencies), rotate_halves, scale)


def feed_forward(c, w, x):
    """Routed experts (softmax over all, renormalised) plus the shared one behind its own gate, on x [B, T, D].

    Where the file splits the experts' width in two, the parts are experts of their own whose outputs add up.
    """
    chosen, weights = moe.route(softmax(linear(w["ffn_gate_inp.weight"], x), axis=-1), c.experts_used)
    routed = 0
    for part in (".main", ".tail") if c.published else ("",):
        stacks = {f"ffn_{name}_exps.weight": w[f"ffn_{name}_exps{part}.weight"] for name in MATRICES}
        routed = routed + moe.experts(x, chosen, weights, stacks)
    gate = sigmoid(jnp.sum(x * w["ffn_gate_inp_shexp.weight"], axis=-1, keepdims=True))
    return routed + gate * moe.shared_expert(x, w)


def draft_tensors(c, artifact):
    """(what joins the draft block's input, and its mixer before the head; the block's own tensors)."""
    found, block = tensors_of(c, artifact), "mtp.blk.{i}."
    ends = {name: t for name, t in found.items() if name.startswith("mtp.") and not name.startswith(block.format(i=0))}
    return ends, [layer_tensors(found, block, 0)]


def draft_input(c, top, h):
    """The draft block's hidden rows: the trunk's last streams h [B, T, S, D], before the final mixer."""
    return h


def draft_block(c, d, top, w, state, hidden, tokens):
    """Run the draft block on streams [B, T, S, D] and the tokens after them → streams [B, T, S, D]."""
    embedding = rms_norm(embed(top["token_embd.weight"], tokens), top["mtp.fc_embedding_norm.weight"], c.norm_eps)
    streams = linear(top["mtp.fc_hidden.weight"], _stream_norm(c, hidden, top["mtp.fc_hidden_norm.weight"]))
    streams = streams + linear(top["mtp.fc_embedding.weight"], embedding)[:, :, None, :]
    streams = _site(c, w, "attn", streams, lambda x: attention(c, w, state, x))
    return _site(c, w, "ffn", streams, lambda x: feed_forward(c, w, x))


def draft_logits(c, d, top, w, hidden):
    """Draft logits [..., V] of the draft block's streams [..., S, D]: its own mixer, the trunk's head."""
    return linear(top["output.weight"], mix(c, top, "mtp.output_hc_", hidden)[0])
