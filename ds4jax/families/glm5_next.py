"""GLM-5.3-Flash in JAX; read it beside ds4ref/families/glm5_next.py. Tensors go by their names in the published layout."""

from dataclasses import replace

import jax.numpy as jnp

from ds4ref.families.glm5_next import ARCHITECTURES, _chooses, block_name, tensors

from .. import hyper, moe, nextn
from ..attention import attend_latent
from ..indexer import choose, nothing
from ..layers import block_number, embed
from ..ops import layer_norm, rms_norm, sigmoid, softmax
from ..recurrent import associate, bounded_decay, convolve
from ..weights import dequantize, linear

__all__ = ["ARCHITECTURES", "draft_block", "draft_input", "draft_logits", "finish", "layer", "start", "tensors_of", "uses"]


def tensors_of(c, artifact):
    """The artifact's tensors by their names in the published layout."""
    required, optional = tensors(replace(c, llamacpp=False))
    stored = {name: _stored(c, name) for name in (*required, *optional)}
    return {name: artifact.tensors[other] for name, other in stored.items() if other in artifact.tensors}


def _stored(c, name):
    i = block_number(name)
    return name if i < 0 else block_name(c, i, name.removeprefix(f"blk.{i}."))


def uses(c, name):
    """Whether the forward pass reads this tensor: not the predictor's, nor an indexer where the choice is shared."""
    i = block_number(name)
    return i < c.layers and (".indexer." not in name or c.full[i])


def start(c, top, tokens, chunk):
    """(N copies of the embedding [B, T, N, D], the choice of the full layer below: nothing yet)."""
    x = embed(top["token_embd.weight"], tokens)
    pools = max(1, chunk.bucket // c.pool)
    return jnp.repeat(x[:, :, None, :], c.streams, axis=2), nothing(tokens.shape, pools, c.index_top_k // c.pool, c.pool)


def finish(c, top, x):
    """Logits [..., V] after the last layer."""
    streams, _ = x
    return linear(top["output.weight"], rms_norm(jnp.mean(streams, axis=-2), top["output_norm.weight"], c.norm_eps))


def layer(c, i, w, state, x):
    """One layer on (streams, choice)."""
    streams, chosen = x
    x, expand = _connect(c, w, "attn", streams)
    if c.latent[i]:
        y, chosen = attention(c, i, w, state, x, chosen)
    else:
        y = kda(c, w, state, x)
    x, expand = _connect(c, w, "ffn", expand(y))
    return expand(feed_forward(c, i, w, x)), chosen


def _connect(c, w, site, streams):
    """Enter attention or feed-forward: (its normalised input [B, T, D], the function that writes its output back)."""
    fn, base, scale = (w[f"hc_{site}_{part}.weight"] for part in ("fn", "base", "scale"))
    x, post, comb = hyper.connect(streams, fn, base, scale, c.sinkhorn, c.hyper_eps, c.norm_eps)
    return rms_norm(x, w[f"{site}_norm.weight"], c.norm_eps), lambda y: hyper.expand(streams, y, post, comb)


def kda(c, w, state, h):
    """Kimi Delta Attention on the normalised input h [B, T, D]."""

    def project(name, x):
        return linear(w[f"kda_{name}.weight"], x)

    heads = (*h.shape[:2], c.kda_heads, c.kda_width)
    q, k, v = (
        convolve(state[part], project(part, h), dequantize(w[f"kda_{part}_conv.weight"])).reshape(heads) for part in "qkv"
    )
    raw = project("f_b", project("f_a", h)) + w["kda_dt_bias.weight"]
    a = dequantize(w["kda_a_log.weight"]).reshape(-1)
    rate = -a if c.llamacpp else jnp.exp(a)  # llama.cpp's layout holds −exp(A_log), the published one A_log
    decay = bounded_decay(raw.reshape(heads), rate, c.kda_lower)
    out = associate(state["memory"], q, k, v, sigmoid(project("beta", h)), decay)
    gate = sigmoid(project("g_b", project("g_a", h)))
    return project("output", rms_norm(out, w["kda_o_norm.weight"], c.norm_eps).reshape(gate.shape) * gate)


def attention(c, i, w, state, h, chosen):
    """Latent attention on the normalised input h [B, T, D] → (output [B, T, D], what the indexer chose)."""
    latent = rms_norm(linear(w["attn_q_a.weight"], h), w["attn_q_a_norm.weight"], c.norm_eps)
    q = linear(w["attn_q_b.weight"], latent).reshape(*h.shape[:2], c.heads, c.key_width)
    state["latent"].append(rms_norm(linear(w["attn_kv_a_mqa.weight"], h), w["attn_kv_a_norm.weight"], c.norm_eps))
    rows = state["latent"].rows()
    if _chooses(c, i):
        chosen = index(c, w, state["pools"], latent, h)
    k_b, v_b = w["attn_k_b.weight"], w["attn_v_b.weight"]
    out = attend_latent(q, None, rows, rows, k_b, v_b, c.key_width**-0.5, chosen=chosen)
    return linear(w["attn_output.weight"], out.reshape(*h.shape[:2], -1)), chosen


def index(c, w, component, latent, h):
    """Append the tokens to their pools and choose: the tokens of each query's best pools, and those of the open one."""

    def project(name, x):
        return linear(w[f"indexer.{name}.weight"], x)

    def pool(tokens, held, number):
        gates = softmax(tokens[..., 1, :] + dequantize(w["indexer.pool_ape.weight"]), axis=2)
        return jnp.sum(gates * tokens[..., 0, :], axis=2)

    key = layer_norm(project("attn_k", h), w["indexer.k_norm.weight"], w["indexer.k_norm.bias"], c.index_eps)
    component.append(jnp.stack([key, project("pool_gate", h)], axis=2), pool)
    q = project("attn_q_b", latent).reshape(*h.shape[:2], c.index_heads, c.index_width)
    weights = project("proj", h) / (c.index_heads * c.index_width) ** 0.5
    return choose(q, weights, component.rows(), c.index_top_k // c.pool, c.pool)


def feed_forward(c, i, w, h):
    """Dense SwiGLU where the layer has one, else routed experts plus the shared one; gates clamped before SiLU."""
    if "ffn_gate.weight" in w:
        return moe.dense(h, w, c.clamp_shared[i])
    routed = moe.sigmoid_experts(h, w, c.experts_used, c.expert_scale, c.clamp_routed[i])
    return routed + moe.shared_expert(h, w, c.clamp_shared[i])


def draft_input(c, top, h):
    """The predictor's hidden rows, from the trunk's last streams h [B, T, N, D]: what the head reads."""
    return rms_norm(jnp.mean(h, axis=-2), top["output_norm.weight"], c.norm_eps)


def draft_block(c, d, top, w, state, hidden, tokens):
    """Run the predictor, which has no hyper-connections, on hidden rows and the tokens after them → the rows [B, T, D] that
    head and next step read."""
    i, x = c.layers + d, nextn.joined(top, w, hidden, tokens, c.norm_eps)
    x = x + attention(c, i, w, state, rms_norm(x, w["attn_norm.weight"], c.norm_eps), None)[0]
    x = x + feed_forward(c, i, w, rms_norm(x, w["ffn_norm.weight"], c.norm_eps))
    return rms_norm(x, w["nextn.shared_head_norm.weight"], c.norm_eps)


def draft_logits(c, d, top, w, hidden):
    """Draft logits [..., V] of the predictor's rows."""
    return nextn.logits(top, w, hidden)
