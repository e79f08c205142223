"""Motif-3: differential latent attention, hyper-connections at every block, PolyNorm instead of SiLU, routed experts.

Every token leaves one row, a normalised latent and a rotated key part that all heads share. Heads come in groups of some
signal heads and one noise head: what the noise head reads is subtracted from what each signal head reads, by a gate of the
input. One layer in ``period`` sees everything, with YaRN frequencies; the others see a window. The residual is N streams.
Sources: the keys and tensors of the published GGUF; Differential Transformer (Ye et al. 2024), DeepSeek-V2 (latent
attention), PolyCom (Zhuo et al. 2024, PolyNorm), mHC (Xie et al. 2025).

Letters: D hidden, H heads, G groups of heads, n rotary width, r latent rank, v value width, N streams, E experts,
F feed-forward width, V vocabulary.
Describes the predictor block (``mtp.0``) but drafts nothing with it, as the published model is served. Does not read the
layout of llama.cpp's converter (``hyper_connection.*`` keys, ``nextn_predict_layers``).
"""

from dataclasses import dataclass
from math import log

import numpy as np

from .. import hyper, moe
from ..attention import attend
from ..gguf import Keys
from ..ops import rms_norm, rope_frequencies, rotate_halves, rotate_tail, sigmoid, yarn_frequencies
from ..state import Ring, Rows

ARCHITECTURES = ("motif3",)
OPTIONS = {}

LONGEST_DRAFT = 1

# Constants of the authors' modeling code that the file has no key for.
HYPER_NORM_EPS = 1e-6
POLY_NORM_EPS = 1e-6
GATE_BOUND = 10.0  # of the logits of a site's pre and post weights


@dataclass(frozen=True)
class Config:
    layers: int
    predictors: int
    context: int
    width: int
    vocabulary: int
    heads: int
    groups: int
    key_width: int
    value_width: int
    q_rank: int
    kv_rank: int
    window: int
    period: int
    norm_eps: float
    rotary: int
    rope_base: float
    rope_base_sliding: float
    yarn_factor: float
    yarn_context: int
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_mscale: float
    dense_layers: int
    dense_width: int
    experts: int
    experts_used: int
    expert_width: int
    expert_scale: float
    poly_scale: float
    poly_bias_bound: float
    hidden_bound: float
    streams: int
    sinkhorn: int
    post_scale: float

    @classmethod
    def from_metadata(cls, artifact):
        """Read and validate every key the model relies on. ArtifactError names the key that is missing or off."""
        k = Keys(artifact, "motif3.")
        if k.has("nextn_predict_layers"):
            found = k.int("nextn_predict_layers")
            raise k.error("nextn_predict_layers", found, "no such key, since only the published layout (mhc.*, mtp.*) is read")
        layers = k.int("block_count", lo=1, hi=1024)
        context = k.int("context_length", lo=1)
        groups = k.int("attention.head_count_kv", lo=1)
        config = cls(
            layers=layers,
            predictors=k.int("mtp.block_count", default=0, lo=0, hi=1),
            context=context,
            width=k.int("embedding_length", lo=1),
            vocabulary=k.int("vocab_size", lo=1),
            heads=k.int("attention.head_count", lo=1),
            groups=groups,
            key_width=k.int("attention.key_length", lo=2),
            value_width=k.int("attention.value_length", lo=1),
            q_rank=k.int("attention.q_lora_rank", lo=1),
            kv_rank=k.int("attention.kv_lora_rank", lo=1),
            window=k.int("attention.sliding_window", lo=1, hi=context),
            period=k.int("attention.sliding_window_period", lo=1),
            norm_eps=k.float("attention.layer_norm_rms_epsilon", lo=0.0),
            rotary=k.int("attention.rope_dimension_count", lo=2),
            rope_base=k.float("rope.freq_base", lo=1.0),
            rope_base_sliding=k.float("rope.freq_base_swa", lo=1.0),
            yarn_factor=k.float("rope.scaling.factor", lo=1.0),
            yarn_context=k.int("rope.scaling.original_context_length", lo=1),
            yarn_beta_fast=k.float("rope.scaling.beta_fast"),
            yarn_beta_slow=k.float("rope.scaling.beta_slow"),
            yarn_mscale=k.float("rope.scaling.mscale", lo=0.0),
            dense_layers=k.int("leading_dense_block_count", lo=0, hi=layers),
            dense_width=k.int("feed_forward_length", lo=1),
            experts=k.int("expert_count", lo=1),
            experts_used=k.int("expert_used_count", lo=1, hi=k.int("expert_count")),
            expert_width=k.int("expert_feed_forward_length", lo=1),
            expert_scale=k.float("expert_weights_scale"),
            poly_scale=k.float("polynorm.output_scale"),
            poly_bias_bound=k.float("polynorm.bias_clamp", lo=0.0),
            hidden_bound=k.float("hidden_clamp", lo=0.0),
            streams=k.int("mhc.expansion_rate", lo=1),
            sinkhorn=k.int("mhc.sinkhorn_iterations", lo=1, hi=1000),
            post_scale=k.float("mhc.h_post_coefficient"),
        )
        k.int("attention.noise_head_count", lo=groups, hi=groups)
        k.str("attention.sliding_window_pattern", choices=("interleave",))
        k.str("rope.scaling.type", choices=("yarn",))
        k.int("expert_shared_count", lo=1, hi=1)
        k.int("expert_gating_func", lo=1, hi=1)  # sigmoid, though llama.cpp's enumeration calls 1 softmax
        if k.str("activation", default="poly_norm").lower().replace("_", "") != "polynorm":
            raise k.error("activation", k.str("activation"), "'poly_norm'")
        for switch in ("mhc.enabled", "attention.elementwise_output_gate", "polynorm.sigmoid_weight", "expert_weights_norm"):
            if not k.bool(switch):
                raise k.error(switch, False, "true")
        # No source says what false would change, nor what the published file holds.
        if not k.bool("rope.scaling.apply_mscale", default=True):
            raise k.error("rope.scaling.apply_mscale", False, "true")
        if config.heads % groups or config.heads == groups:
            raise k.error("attention.head_count", config.heads, f"two or more heads for each of {groups} groups")
        if config.rotary % 2 or config.rotary >= config.key_width:
            raise k.error("attention.rope_dimension_count", config.rotary, f"an even number below {config.key_width}")
        if config.rope_base == 1.0:
            raise k.error("rope.freq_base", 1.0, "more than 1, since YaRN divides by its logarithm")
        for key, beta in (("beta_fast", config.yarn_beta_fast), ("beta_slow", config.yarn_beta_slow)):
            if beta <= 0:
                raise k.error(f"rope.scaling.{key}", beta, "a number above 0")
        return config

    def sliding(self, i):
        """Whether layer i sees a window only."""
        return i % self.period != 0

    @property
    def signal_heads(self):
        """Heads whose difference to their group's noise head is kept: all but the last of every group."""
        return self.heads - self.groups


def tensors(c):
    """(required, optional): tensor name → shape."""
    D, N = c.width, c.streams
    required = {"token_embd.weight": (c.vocabulary, D), "output.weight": (c.vocabulary, D), "output_norm.weight": (D,)}
    for i in range(c.layers):
        p = f"blk.{i}."
        required |= _attention_tensors(c, p) | {f"{p}attn_norm.weight": (D,), f"{p}ffn_norm.weight": (D,)}
        for site in ("attn", "ffn"):
            required[f"{p}mhc_{site}.rms_norm.weight"] = (N * D,)
            for part, shape in (("pre", (N,)), ("post", (N,)), ("res", (N, N))):
                required[f"{p}mhc_{site}.proj_{part}.weight"] = (int(np.prod(shape)), N * D)
                required[f"{p}mhc_{site}.bias_{part}"] = shape
                required[f"{p}mhc_{site}.alpha_{part}"] = (1,)
        if i < c.dense_layers:
            required |= _poly_tensors(p, "", c.dense_width, D)
        else:
            required |= {
                **moe.router_tensors(p, c.experts, D),
                **_poly_tensors(p, "_exps", c.expert_width, D, (c.experts,)),
                **_poly_tensors(p, "_shexp", c.expert_width, D),
            }
    for i in range(c.predictors):
        p = f"mtp.{i}."
        for norm in ("embed_norm", "input_layernorm", "post_attention_layernorm", "final_layernorm"):
            required[f"{p}{norm}.weight"] = (D,)
        required[f"{p}input_proj.weight"] = (D, 2 * D)
        required |= _attention_tensors(c, p) | _poly_tensors(p, "", c.dense_width, D)
    return required, {}


def _attention_tensors(c, p):
    signal = c.signal_heads * c.value_width
    return {
        f"{p}attn_q_a.weight": (c.q_rank, c.width),
        f"{p}attn_q_a_norm.weight": (c.q_rank,),
        f"{p}attn_q_b.weight": (c.heads * c.key_width, c.q_rank),
        f"{p}attn_q_gate.weight": (signal, c.q_rank),
        f"{p}attn_kv_a.weight": (c.kv_rank + c.rotary, c.width),
        f"{p}attn_kv_a_norm.weight": (c.kv_rank,),
        f"{p}attn_kv_b.weight": (c.groups * (c.key_width - c.rotary + c.value_width), c.kv_rank),
        f"{p}attn_lambda.weight": (c.signal_heads, c.width),
        f"{p}attn_output.weight": (c.width, signal),
    }


def _poly_tensors(p, kind, F, D, stack=()):
    """A PolyNorm feed-forward, or a ``stack`` of them."""
    return {
        f"{p}ffn_gate{kind}.weight": (*stack, F, D),
        f"{p}ffn_up{kind}.weight": (*stack, F, D),
        f"{p}ffn_down{kind}.weight": (*stack, D, F),
        f"{p}ffn_polynorm{kind}.weight": (*stack, 3),
        f"{p}ffn_polynorm{kind}.bias": (*stack, 1),
    }


def layout(c):
    """State components: rows [latent | rotated key part], of every position or of the window, by layer.

    ``sliding_window`` counts the keys before the query's own: a window of 128 sees 129.
    """
    return {f"{i}.latent": _windowed(c) if c.sliding(i) else Rows((c.kv_rank + c.rotary,)) for i in range(c.layers)}


def _windowed(c):
    return Ring(c.window + 1, (c.kv_rank + c.rotary,))


def forward(c, w, state, token, trace):
    """Advance ``state`` by one token and return its logits [V]. ``trace(name, array)`` sees the parts by name."""
    position = state.length
    streams = np.tile(w.part("token_embd.weight", token), (c.streams, 1))
    trace("embed", streams)
    for i in range(c.layers):
        streams = _site(c, w, i, "attn", streams, lambda a, i=i: attention(c, w, state, i, position, a), trace)
        streams = _site(c, w, i, "ffn", streams, lambda a, i=i: feed_forward(c, w, i, a), trace)
        trace(f"h_{i}", streams)
    return w["output.weight"] @ rms_norm(np.mean(streams, axis=0), w["output_norm.weight"], c.norm_eps)


def _site(c, w, i, site, streams, block, trace):
    """One hyper-connection around one block (attention or feed-forward), the block's norm included."""
    p = f"blk.{i}.mhc_{site}."
    n = rms_norm(streams.reshape(-1), w[f"{p}rms_norm.weight"], HYPER_NORM_EPS)
    pre, post, mix = (
        w[f"{p}alpha_{part}"] * (w[f"{p}proj_{part}.weight"] @ n) + w[f"{p}bias_{part}"].reshape(-1)
        for part in ("pre", "post", "res")
    )
    pre, post = (sigmoid(np.clip(x, -GATE_BOUND, GATE_BOUND)) for x in (pre, post))
    mix = hyper.sinkhorn_exp(mix.reshape(c.streams, c.streams), c.sinkhorn)
    y = block(rms_norm(pre @ streams, w[f"blk.{i}.{site}_norm.weight"], c.norm_eps))
    trace(f"{site}_{i}", y)
    return hyper.expand(streams, y, y.dtype.type(c.post_scale) * post, mix.T)


def attention(c, w, state, i, position, a):
    """Differential latent attention of layer i on its normalised input a [D] → [D]."""
    return _attend(c, w, f"blk.{i}.", state[f"{i}.latent"], position * _frequencies(c, i), _score_scale(c, i), a)


def _attend(c, w, p, component, angles, scale, a):
    """The attention of one block, whose row joins ``component`` first.

    Absorbed form: queries meet the latents themselves, and the value expansion comes after the difference of the heads.
    """
    nope = c.key_width - c.rotary
    latent_q = rms_norm(w[f"{p}attn_q_a.weight"] @ a, w[f"{p}attn_q_a_norm.weight"], c.norm_eps)
    q = (w[f"{p}attn_q_b.weight"] @ latent_q).reshape(c.groups, -1, c.key_width)
    q = rotate_tail(q, angles, rotate_halves)
    latent, k_rot = np.split(w[f"{p}attn_kv_a.weight"] @ a, (c.kv_rank,))
    latent = rms_norm(latent, w[f"{p}attn_kv_a_norm.weight"], c.norm_eps)
    component.append(np.concatenate([latent, rotate_halves(k_rot, angles)]))
    rows = component.rows()[:, None, :]
    k_b, v_b = np.split(w[f"{p}attn_kv_b.weight"].reshape(c.groups, -1, c.kv_rank), (nope,), axis=1)
    query = np.concatenate([np.matmul(q[..., :nope], k_b), q[..., nope:]], axis=-1).reshape(c.heads, -1)
    read = attend(query, rows, rows[..., : c.kv_rank], scale).reshape(c.groups, -1, c.kv_rank)
    balance = sigmoid(w[f"{p}attn_lambda.weight"] @ a).reshape(c.groups, -1, 1)
    difference = read[:, :-1] - balance * read[:, -1:]
    out = np.matmul(difference, v_b.transpose(0, 2, 1)).reshape(-1)
    return w[f"{p}attn_output.weight"] @ (out * sigmoid(w[f"{p}attn_q_gate.weight"] @ latent_q))


def _frequencies(c, i):
    """Rotary frequencies of layer i: plain with the window's own base, YaRN where everything is seen."""
    if c.sliding(i):
        return rope_frequencies(c.rotary, c.rope_base_sliding)
    return yarn_frequencies(c.rotary, c.rope_base, c.yarn_factor, c.yarn_context, c.yarn_beta_fast, c.yarn_beta_slow)


def _score_scale(c, i):
    """1/√(key width), and YaRN's temperature squared in full layers of a context that was extended."""
    scale = c.key_width**-0.5
    if c.sliding(i) or c.context <= c.yarn_context:
        return scale
    return scale * (0.1 * c.yarn_mscale * log(c.yarn_factor) + 1) ** 2


def feed_forward(c, w, i, a):
    """The dense feed-forward of the first layers; then routed experts plus the shared one. a: [D] → [D]."""
    p = f"blk.{i}."
    if i < c.dense_layers:
        return _poly_unit(c, a, *(w[name] for name in _unit_names(p, "")))
    affinity = sigmoid(w[f"{p}ffn_gate_inp.weight"] @ a)
    chosen, weights = moe.route(affinity, c.experts_used, w[f"{p}exp_probs_b.bias"], c.expert_scale)
    y = np.zeros_like(a)
    for e, weight in zip(chosen.tolist(), weights, strict=True):
        gate, up, down, powers, bias = (w.part(name, e) for name in _unit_names(p, "_exps"))
        bias = np.clip(bias, -c.poly_bias_bound, c.poly_bias_bound)
        y += weight * _poly_unit(c, a, gate, up, down, powers, bias, product_bound=c.hidden_bound)
    return y + _poly_unit(c, a, *(w[name] for name in _unit_names(p, "_shexp")))


def _unit_names(p, kind):
    return (
        *(f"{p}ffn_{part}{kind}.weight" for part in ("gate", "up", "down")),
        f"{p}ffn_polynorm{kind}.weight",
        f"{p}ffn_polynorm{kind}.bias",
    )


def _poly_unit(c, x, gate, up, down, powers, bias, product_bound=None):
    """``down( poly_norm(gate x) · (up x) · scale )``; gate, up: [F, D], down: [D, F], powers: [3], bias: [1]."""
    g, u = (np.clip(m @ x, -c.hidden_bound, c.hidden_bound) for m in (gate, up))
    product = poly_norm(g, powers, bias) * u
    if product_bound is not None:
        product = np.clip(product, -product_bound, product_bound)
    return down @ (product * product.dtype.type(c.poly_scale))


def poly_norm(x, powers, bias):
    """PolyNorm with sigmoid weights: ``σ(w₀) N(x³) + σ(w₁) N(x²) + σ(w₂) N(x) + b``, N = RMS normalisation. x: [F] → [F]."""
    cube, square, line = (rms_norm(power, eps=POLY_NORM_EPS) for power in (x * x * x, x * x, x))
    w0, w1, w2 = sigmoid(powers)
    return w0 * cube + w1 * square + w2 * line + bias


def draft_unused(c):
    """Why the predictor does not draft."""
    return "the published model is served without drafts"


def draft_layouts(c):
    """State of the predictor: what a sliding layer keeps."""
    return [{"mtp.0.latent": _windowed(c)}]


def draft_input(c, w, h):
    """The predictor's hidden row of a position, from the trunk's last streams h [N, D] there: what the head reads."""
    return rms_norm(np.mean(h, axis=0), w["output_norm.weight"], c.norm_eps)


def draft_block(c, w, state, d, position, hidden, token):
    """Run the predictor on a hidden row and the token after it → the row [D] that its head reads. Hidden row first."""
    p = f"mtp.{d}."
    embedding = rms_norm(w.part("token_embd.weight", token), w[f"{p}embed_norm.weight"], c.norm_eps)
    x = w[f"{p}input_proj.weight"] @ np.concatenate([hidden, embedding])
    a = rms_norm(x, w[f"{p}input_layernorm.weight"], c.norm_eps)
    angles = position * rope_frequencies(c.rotary, c.rope_base_sliding)
    x = x + _attend(c, w, p, state[f"{p}latent"], angles, c.key_width**-0.5, a)
    a = rms_norm(x, w[f"{p}post_attention_layernorm.weight"], c.norm_eps)
    x = x + _poly_unit(c, a, *(w[name] for name in _unit_names(p, "")))
    return rms_norm(x, w[f"{p}final_layernorm.weight"], c.norm_eps)


def draft_logits(c, w, d, row):
    """Draft logits [V] of a row of the predictor."""
    return w["output.weight"] @ row


def tiny_metadata():
    """Metadata of a tiny model with every layer kind: full and sliding attention, dense and routed, one predictor block."""
    keys = {
        "block_count": 5,
        "context_length": 65536,
        "embedding_length": 64,
        "vocab_size": 512,
        "feed_forward_length": 64,
        "leading_dense_block_count": 2,
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 1,
        "expert_gating_func": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.0,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.noise_head_count": 2,
        "attention.key_length": 24,
        "attention.value_length": 16,
        "attention.q_lora_rank": 32,
        "attention.kv_lora_rank": 24,
        "attention.rope_dimension_count": 8,
        "attention.sliding_window": 31,
        "attention.sliding_window_period": 4,
        "attention.sliding_window_pattern": "interleave",
        "attention.elementwise_output_gate": True,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.freq_base_swa": 10000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.beta_fast": 32.0,
        "rope.scaling.beta_slow": 1.0,
        "rope.scaling.mscale": 1.0,
        "rope.scaling.apply_mscale": True,
        "mhc.enabled": True,
        "mhc.expansion_rate": 4,
        "mhc.sinkhorn_iterations": 20,
        "mhc.h_post_coefficient": 1.0,
        "activation": "poly_norm",
        "polynorm.output_scale": 0.5,
        "polynorm.bias_clamp": 0.5,
        "polynorm.sigmoid_weight": True,
        "hidden_clamp": 1e6,
        "mtp.block_count": 1,
    }
    return {f"motif3.{key}": value for key, value in keys.items()} | {"tokenizer.ggml.pre": "motif3"}
