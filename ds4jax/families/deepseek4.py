"""DeepSeek V4 in JAX; read it beside ds4ref/families/deepseek4.py."""

import jax.numpy as jnp

from ds4ref.families.deepseek4 import ARCHITECTURES, _frequencies

from .. import hyper, moe, views
from ..attention import Seen, attend
from ..indexer import choose
from ..layers import embed
from ..ops import angles, rms_norm, rotate_tail, softmax, softplus
from ..rounding import hadamard, round_blocks, round_e2m1, round_e4m3
from ..weights import batched_linear, dequantize, linear, linears

__all__ = ["ARCHITECTURES", "finish", "layer", "start", "tensors_of", "uses"]


def uses(c, name):
    """Whether the forward pass reads this tensor."""
    return not name.endswith("exp_probs_b_vl.bias")


def tensors_of(c, artifact):
    """The artifact's tensors, the first output projection as one matrix per group: [G, rank, H·d / G]."""
    projections = {name: t for name, t in artifact.tensors.items() if name.endswith("attn_output_a.weight")}
    groups = {name: views.reshaped(t, name, (c.out_groups, c.out_rank, t.shape[1])) for name, t in projections.items()}
    return artifact.tensors | groups


def start(c, top, tokens, chunk):
    """(streams [B, T, N, D], tokens [B, T]): N copies of the embedding; hash-routed layers need the ids."""
    x = embed(top["token_embd.weight"], tokens)
    return jnp.repeat(x[:, :, None, :], c.streams, axis=2), tokens


def finish(c, top, x):
    """Logits [..., V] of the streams after the last layer."""
    streams, _ = x
    h = mixed(c, top, "output_hc", streams)
    return linear(top["output.weight"], rms_norm(h, top["output_norm.weight"], c.norm_eps))


def mixed(c, w, prefix, streams):
    """One row [..., D] of the streams [..., N, D], by the mix named ``prefix``."""
    fn, base, scale = (w[f"{prefix}_{part}.weight"] for part in ("fn", "base", "scale"))
    return hyper.head(streams, fn, base, scale, c.hyper_eps, c.norm_eps)


def layer(c, i, w, state, x):
    """One layer on (streams, tokens)."""
    return block(c, i, w, x, lambda h: attention(c, i, w, state, h))


def block(c, i, w, x, attend_rows):
    """:func:`layer` with ``attend_rows`` as its attention, [B, T, D] → [B, T, D]."""
    streams, tokens = x
    streams = _site(c, w, "attn", streams, attend_rows)
    return _site(c, w, "ffn", streams, lambda h: feed_forward(c, i, w, tokens, h)), tokens


def _site(c, w, site, streams, inner):
    """One hyper-connection around attention or feed-forward, the norm of its input included."""
    fn, base, scale = (w[f"hc_{site}_{part}.weight"] for part in ("fn", "base", "scale"))
    x, post, comb = hyper.connect(streams, fn, base, scale, c.sinkhorn, c.hyper_eps, c.norm_eps)
    return hyper.expand(streams, inner(rms_norm(x, w[f"{site}_norm.weight"], c.norm_eps)), post, comb)


def attention(c, i, w, state, h):
    """Window plus compressed attention on the normalised input h [B, T, D]."""
    r, positions = c.ratios[i], state.positions
    frequencies = _frequencies(c, r)
    theta = angles(positions, frequencies)
    latent, row = linears([w["attn_q_a.weight"], w["attn_kv.weight"]], h)
    latent, q = queries(c, w, latent, theta)
    state["raw"].append(raw_row(c, w, row, theta))
    raw = state["raw"].rows()
    seen = [Seen(raw, raw, c.window)]
    if r:
        compress(c, w, state["rows"], "attn_compressor", r, frequencies, h, lambda row: _round_row(c, row))
        older, chosen = state["rows"].rows(), None
        if r == 4:
            compress(c, w, state["keys"], "indexer_compressor", r, frequencies, h, lambda row: _round_index(c, row))
            chosen = index(c, w, state["keys"].rows(), latent, h, theta)
        seen.append(Seen(older, older, chosen=chosen))
    return projected(c, w, attend(q, *seen, scale=c.head_width**-0.5, sinks=w["attn_sinks.weight"]), theta)


def queries(c, w, latent, theta):
    """(query latent [B, T, q_rank] normalised, normalised and rotated queries [B, T, H, d]) of what ``attn_q_a`` gives."""
    latent = rms_norm(latent, w["attn_q_a_norm.weight"], c.norm_eps)
    q = linear(w["attn_q_b.weight"], latent).reshape(*latent.shape[:2], c.heads, c.head_width)
    return latent, rotate_tail(rms_norm(q, eps=c.norm_eps), theta[:, :, None, :])


def raw_row(c, w, row, theta):
    """The rows [B, T, d], keys and values at once, that tokens leave by what ``attn_kv`` gives."""
    return _round_row(c, rotate_tail(rms_norm(row, w["attn_kv_a_norm.weight"], c.norm_eps), theta))


def projected(c, w, out, theta):
    """What the heads read [B, T, H, d], rotated back and projected → [B, T, D]."""
    out = rotate_tail(out, -theta[:, :, None, :])
    grouped = batched_linear(w["attn_output_a.weight"], out.reshape(*out.shape[:2], c.out_groups, -1))
    return linear(w["attn_output_b.weight"], grouped.reshape(*out.shape[:2], -1))


def compress(c, w, component, prefix, r, frequencies, h, round_row):
    """Feed the tokens' (content, gate) rows to a compressor; completed blocks become normalised, rotated rows."""
    slot = component.chunk.positions % r
    content, gate = linears([w[f"{prefix}_kv.weight"], w[f"{prefix}_gate.weight"]], h)
    gate = gate + dequantize(w[f"{prefix}_ape.weight"])[slot]

    def block(tokens, held, b):
        if r == 4:
            first, second = jnp.split(tokens, 2, axis=-1)
            tokens = jnp.concatenate([first[:, :, :r], second[:, :, r:]], axis=2)
        gates = jnp.where(held[..., None], tokens[:, :, :, 1], -jnp.inf)
        mixed = jnp.sum(softmax(gates, axis=2) * tokens[:, :, :, 0], axis=2)
        return round_row(rotate_tail(rms_norm(mixed, w[f"{prefix}_norm.weight"], c.norm_eps), angles(r * b, frequencies)))

    component.append(jnp.stack([content, gate], axis=2), block)


def index(c, w, keys, latent, h, theta):
    """The compressed blocks that an indexed layer attends to: the best ``top_k`` of the visible ones."""
    q = linear(w["indexer.attn_q_b.weight"], latent).reshape(*h.shape[:2], c.index_heads, c.index_width)
    weights = linear(w["indexer.proj.weight"], h) / (c.index_heads * c.index_width) ** 0.5
    q = _round_index(c, rotate_tail(q, theta[:, :, None, :]))
    return choose(q, weights, keys, c.index_top_k)


def _round_row(c, row):
    """The vendor's rounding of a cached row. Identity unless ``qat``."""
    if not c.qat:
        return row
    n = c.head_width - c.rotary
    return jnp.concatenate([round_blocks(row[..., :n], 64, 448, 1e-4, round_e4m3), row[..., n:]], axis=-1)


def _round_index(c, x):
    """The vendor's rounding of indexer queries and keys. Identity unless ``qat``."""
    return round_blocks(hadamard(x), 32, 6, 7.05e-38, round_e2m1) if c.qat else x


def feed_forward(c, i, w, tokens, h):
    """Routed experts plus the shared one, on the normalised input h [B, T, D]."""
    affinity = jnp.sqrt(softplus(linear(w["ffn_gate_inp.weight"], h)))
    if "ffn_gate_tid2eid.weight" in w:
        chosen = w["ffn_gate_tid2eid.weight"][tokens]
        weights = moe.renormalise(jnp.take_along_axis(affinity, chosen, axis=-1), c.expert_scale)
    else:
        chosen, weights = moe.route(affinity, c.experts_used, w["exp_probs_b.bias"], c.expert_scale)
    return moe.experts(h, chosen, weights, w, c.clamp_routed[i]) + moe.shared_expert(h, w, c.clamp_shared[i])
