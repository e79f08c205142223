"""Ling 3.0 (``bailingmoe3``, Bailing V3): recurrent KDA layers, gated latent attention in every sixth, grouped experts.

KDA layers keep one matrix per head, changed at every token by the gated delta rule. Latent-attention layers (MLA) keep one
row per token, rotate part of each head and weigh every head's output by a gate. Experts are chosen within the best groups;
some layers clamp their activations. Sources: Kimi Linear (KDA), DeepSeek-V2 (MLA), DeepSeek-V3 (router), YaRN; the layout
of the published GGUF files.

Letters: D hidden, H heads, d KDA head width, r latent rank, n rotary width, v value width, E experts, V vocabulary.
Knows nothing about drafting (a predictor's block is bound, not run) and images: their encoder is another file, and without
them the three rotary axes of the vision model all count tokens, which is plain rotation.
"""

import warnings
from dataclasses import dataclass

import numpy as np

from .. import moe, nextn
from ..attention import attend_latent
from ..gguf import ArtifactError, Keys
from ..ops import rms_norm, rope_frequencies, rotate_pairs, sigmoid, yarn_frequencies
from ..recurrent import associate, bounded_decay, convolve
from ..state import Recurrent, Ring, Rows

ARCHITECTURES = ("bailingmoe3",)
OPTIONS = {
    "context": "tokens that a sequence shall have room for; above the trained context, up to twice that, rotation is "
    "stretched by YaRN (default: the trained context, unstretched)"
}

YARN_FACTOR = 2.0
YARN_SCALE = 0.1 * np.log(YARN_FACTOR) + 1.0  # of rotated queries and of rotated keys


@dataclass(frozen=True)
class Config:
    layers: int
    context: int
    yarn: bool
    width: int
    vocabulary: int
    latent: tuple[bool, ...]
    kda_width: int
    kda_taps: int
    kda_lower: float
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rotary: int
    value_width: int
    norm_eps: float
    rope_base: float
    dense_layers: int
    dense_width: int
    experts: int
    experts_used: int
    groups: int
    groups_used: int
    expert_width: int
    shared_width: int
    expert_scale: float
    clamp_routed: tuple[float, ...]
    clamp_shared: tuple[float, ...]
    predictors: int

    @property
    def context_cap(self):
        """Tokens that a sequence may have under the rotary table in use."""
        return int(YARN_FACTOR * self.context) if self.yarn else self.context

    @classmethod
    def from_metadata(cls, artifact, *, context=None):
        """Read and validate every key the model relies on. ArtifactError names the key that is missing or off.

        ``context``: requested tokens, or None for the trained context. It alone decides about YaRN.
        """
        k = Keys(artifact, "bailingmoe3.")
        blocks = k.int("block_count", lo=1, hi=1024)
        predictors = k.int("nextn_predict_layers", default=0, lo=0, hi=min(1, blocks - 1))
        layers = blocks - predictors
        trained = k.int("rope.scaling.original_context_length", default=k.int("context_length", lo=1), lo=1)
        kinds = k.ints("attention.head_count_kv", n=layers, at_least=True, lo=0, hi=1)  # 0 KDA, 1 latent attention
        rotary = k.int("rope.dimension_count", lo=2)
        experts = k.int("expert_count", lo=1)
        groups = k.int("expert_group_count", default=1, lo=1, hi=experts)
        groups_used = k.int("expert_group_used_count", default=groups, lo=1, hi=groups)
        expert_width = k.int("expert_feed_forward_length", lo=1)
        absent = [key for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp") if not k.has(key)]
        if absent and layers == 42:  # the flash model, which was trained with limits; the tiny one was not
            effect = "an early conversion, whose answers degrade to garbage now and then"
            warnings.warn(f"{artifact.path.name}: key 'bailingmoe3.{absent[0]}' is missing: {effect}", stacklevel=2)
        config = cls(
            layers=layers,
            context=trained,
            yarn=_stretched(artifact, trained, context),
            width=k.int("embedding_length", lo=1),
            vocabulary=k.int("vocab_size", lo=1),
            latent=tuple(kind == 1 for kind in kinds[:layers]),
            kda_width=k.int("kda.head_dim", lo=1),
            kda_taps=k.int("ssm.conv_kernel", lo=1, hi=64),
            kda_lower=k.float("kda.gate_lower_bound", hi=0.0),
            heads=k.int("attention.head_count", lo=1),
            q_rank=k.int("attention.q_lora_rank", default=0, lo=0),
            kv_rank=k.int("attention.kv_lora_rank", lo=1),
            nope=k.int("attention.key_length_mla", lo=rotary + 1) - rotary,
            rotary=rotary,
            value_width=k.int("attention.value_length_mla", lo=1),
            norm_eps=k.float("attention.layer_norm_rms_epsilon", lo=0.0),
            rope_base=k.float("rope.freq_base", lo=1.0),
            dense_layers=k.int("leading_dense_block_count", default=0, lo=0, hi=layers),
            dense_width=k.int("feed_forward_length", lo=1),
            experts=experts,
            experts_used=k.int("expert_used_count", lo=1, hi=experts // groups * groups_used),
            groups=groups,
            groups_used=groups_used,
            expert_width=expert_width,
            shared_width=k.int("expert_shared_feed_forward_length", default=expert_width, lo=1),
            expert_scale=k.float("expert_weights_scale", default=1.0),
            clamp_routed=k.floats("swiglu_clamp_exp", n=layers, default=(0.0,) * layers, at_least=True, lo=0.0)[:layers],
            clamp_shared=k.floats("swiglu_clamp_shexp", n=layers, default=(0.0,) * layers, at_least=True, lo=0.0)[:layers],
            predictors=predictors,
        )
        if rotary % 2:
            raise k.error("rope.dimension_count", rotary, "an even number")
        row = config.kv_rank + rotary
        k.int("attention.key_length", default=row, lo=row, hi=row)
        k.int("expert_shared_count", lo=1, hi=1)
        moe.require_sigmoid(k)
        if k.str("rope.scaling.type", default="none", choices=("none", "yarn")) == "yarn":
            k.float("rope.scaling.factor", default=YARN_FACTOR, lo=YARN_FACTOR, hi=YARN_FACTOR)
        if not k.bool("kda.safe_gate", default=True):
            raise k.error("kda.safe_gate", False, "true")
        if experts % groups:
            raise k.error("expert_group_count", groups, f"a divisor of {experts} experts")
        sections = k.ints("rope.dimension_sections", default=(rotary // 2,), lo=0)
        if sum(sections) != rotary // 2:
            raise k.error("rope.dimension_sections", sum(sections), f"sections that add up to {rotary // 2} pairs")
        return config


def _stretched(artifact, trained, requested):
    """Whether a requested context (None: the trained one) needs YaRN. ArtifactError where it is out of reach."""
    if requested is None:
        return False
    cap = int(YARN_FACTOR * trained)
    if not isinstance(requested, int) or isinstance(requested, bool) or not 1 <= requested <= cap:
        raise ArtifactError(f"{artifact.path.name}: option context is {requested!r}; expected an integer from 1 up to {cap}")
    return requested > trained


def tensors(c):
    """(required, optional): tensor name → shape. The predictor's block, where there is one, comes after the trunk."""
    D, E = c.width, c.experts
    required = {"token_embd.weight": (c.vocabulary, D), "output_norm.weight": (D,), "output.weight": (c.vocabulary, D)}
    for i in range(c.layers + c.predictors):
        block = {"attn_norm.weight": (D,), "ffn_norm.weight": (D,)}
        block |= _latent_tensors(c) if i >= c.layers or c.latent[i] else _kda_tensors(c)
        if i < c.dense_layers:
            block |= moe.dense_tensors("", D, c.dense_width)
        else:
            block |= moe.router_tensors("", E, D) | moe.expert_tensors("", E, D, c.expert_width)
            block |= moe.shared_tensors("", D, c.shared_width)
        if i >= c.layers:
            block |= nextn.joint_tensors("", D) | {"layer_output_norm.weight": (D,)}
        required |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    return required, {}


def _kda_tensors(c):
    D, channels = c.width, c.heads * c.kda_width
    convolution = ((channels, 1, c.kda_taps), (1, channels, 1, c.kda_taps))
    return {
        **{f"attn_{part}.weight": (channels, D) for part in "qkv"},
        **{f"ssm_conv1d_{part}.weight": convolution for part in "qkv"},
        "ssm_f_a.weight": (channels, D),
        "ssm_g_a.weight": (channels, D),
        "ssm_beta.weight": (c.heads, D),
        "ssm_a": ((c.heads, 1), (c.heads,)),
        "ssm_dt.bias": (channels,),
        "ssm_norm.weight": (c.kda_width,),
        "attn_output.weight": (D, channels),
    }


def _latent_tensors(c):
    queries = c.heads * (c.nope + c.rotary)
    if c.q_rank:
        block = {
            "attn_q_a.weight": (c.q_rank, c.width),
            "attn_q_a_norm.weight": (c.q_rank,),
            "attn_q_b.weight": (queries, c.q_rank),
        }
    else:
        block = {"attn_q.weight": (queries, c.width)}
    return block | {
        "attn_kv_a_mqa.weight": (c.kv_rank + c.rotary, c.width),
        "attn_kv_a_norm.weight": (c.kv_rank,),
        "attn_k_b.weight": (c.heads, c.kv_rank, c.nope),
        "attn_v_b.weight": (c.heads, c.value_width, c.kv_rank),
        "attn_gate.weight": (c.heads, c.width),
        "attn_output.weight": (c.width, c.heads * c.value_width),
    }


def layout(c):
    """State components: per KDA layer the heads' matrices and the convolutions' last rows; per latent-attention layer one
    row per token: the latent, then the rotated key."""
    components = {}
    for i, latent in enumerate(c.latent):
        if latent:
            components[f"{i}.latent"] = Rows((c.kv_rank + c.rotary,))
        else:
            components |= {f"{i}.{part}": Ring(c.kda_taps, (c.heads * c.kda_width,)) for part in "qkv"}
            components[f"{i}.memory"] = Recurrent((c.heads, c.kda_width, c.kda_width))
    return components


def forward(c, w, state, token, trace):
    """Advance ``state`` by one token and return its logits [V]. ``trace(name, array)`` sees the parts by name."""
    angles = state.length * frequencies(c)
    x = w.part("token_embd.weight", token)
    trace("embed", x)
    for i in range(c.layers):
        p = f"blk.{i}."
        h = rms_norm(x, w[f"{p}attn_norm.weight"], c.norm_eps)
        y = attention(c, w, state, i, h, angles) if c.latent[i] else kda(c, w, state, i, h)
        trace(f"attn_{i}", y)
        x = x + y
        y = feed_forward(c, w, i, rms_norm(x, w[f"{p}ffn_norm.weight"], c.norm_eps))
        trace(f"ffn_{i}", y)
        x = x + y
        trace(f"h_{i}", x)
    return w["output.weight"] @ rms_norm(x, w["output_norm.weight"], c.norm_eps)


def frequencies(c):
    """Rotary frequencies float64 [n/2]: plain, or by parts stretched to twice the trained context (YaRN, betas 32 and 1)."""
    if c.yarn:
        return yarn_frequencies(c.rotary, c.rope_base, YARN_FACTOR, c.context)
    return rope_frequencies(c.rotary, c.rope_base)


def kda(c, w, state, i, h):
    """Kimi Delta Attention of layer i on its normalised input h [D] → [D]. Decay and gate are full-rank projections."""
    p = f"blk.{i}."
    q, k, v = (
        convolve(state[f"{i}.{part}"], w[f"{p}attn_{part}.weight"] @ h, w[f"{p}ssm_conv1d_{part}.weight"]).reshape(c.heads, -1)
        for part in "qkv"
    )
    raw = (w[f"{p}ssm_f_a.weight"] @ h + w[f"{p}ssm_dt.bias"]).reshape(c.heads, c.kda_width)
    decay = bounded_decay(raw, w[f"{p}ssm_a"].reshape(-1), c.kda_lower)  # ssm_a holds exp(A_log)
    out = associate(state[f"{i}.memory"], q, k, v, sigmoid(w[f"{p}ssm_beta.weight"] @ h), decay)
    gate = sigmoid(w[f"{p}ssm_g_a.weight"] @ h)
    return w[f"{p}attn_output.weight"] @ (rms_norm(out, w[f"{p}ssm_norm.weight"], c.norm_eps).reshape(-1) * gate)


def attention(c, w, state, i, h, angles):
    """Gated latent attention of layer i over all tokens so far, on its normalised input h [D] → [D]."""
    p, scale = f"blk.{i}.", YARN_SCALE if c.yarn else 1.0
    if c.q_rank:
        q = w[f"{p}attn_q_b.weight"] @ rms_norm(w[f"{p}attn_q_a.weight"] @ h, w[f"{p}attn_q_a_norm.weight"], c.norm_eps)
    else:
        q = w[f"{p}attn_q.weight"] @ h
    q, q_rot = np.split(q.reshape(c.heads, -1), [c.nope], axis=1)
    row = w[f"{p}attn_kv_a_mqa.weight"] @ h
    latent = rms_norm(row[: c.kv_rank], w[f"{p}attn_kv_a_norm.weight"], c.norm_eps)
    state[f"{i}.latent"].append(np.concatenate([latent, rotate_pairs(row[c.kv_rank :], angles, scale)]))
    latents, keys = np.split(state[f"{i}.latent"].rows(), [c.kv_rank], axis=1)
    k_b, v_b = w[f"{p}attn_k_b.weight"], w[f"{p}attn_v_b.weight"]
    out = attend_latent(q, rotate_pairs(q_rot, angles, scale), latents, keys, k_b, v_b, (c.nope + c.rotary) ** -0.5)
    gate = sigmoid(w[f"{p}attn_gate.weight"] @ h)
    return w[f"{p}attn_output.weight"] @ (gate[:, None] * out).reshape(-1)


def feed_forward(c, w, i, h):
    """Dense SwiGLU in the first layers, else routed experts plus the shared one, clamped after SiLU. h [D] → [D]."""
    p = f"blk.{i}."
    if i < c.dense_layers:
        return moe.dense(h, w, p)
    affinity, bias = sigmoid(w[f"{p}ffn_gate_inp.weight"] @ h), w[f"{p}exp_probs_b.bias"]
    chosen, weights = moe.route_grouped(affinity, c.experts_used, c.groups, c.groups_used, bias, c.expert_scale)
    routed = moe.experts(h, chosen, weights, w, p, c.clamp_routed[i], clamp="activation")
    return routed + moe.shared_expert(h, w, p, c.clamp_shared[i], clamp="activation")


def tiny_metadata():
    """Metadata of a tiny model with both layer kinds, dense and routed feed-forward, and every combination of limits."""
    keys = {
        "block_count": 6,
        "context_length": 32768,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "vocab_size": 512,
        "attention.head_count": 4,
        "attention.head_count_kv": np.array([0, 0, 1, 0, 0, 1], np.int32),
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.kv_lora_rank": 32,
        "attention.key_length": 48,
        "attention.value_length": 24,
        "attention.key_length_mla": 32,
        "attention.value_length_mla": 24,
        "rope.dimension_count": 16,
        "rope.freq_base": 6e6,
        "rope.dimension_sections": np.array([2, 3, 3, 0], np.int32),
        "ssm.conv_kernel": 4,
        "kda.head_dim": 16,
        "kda.safe_gate": True,
        "kda.gate_lower_bound": -5.0,
        "leading_dense_block_count": 1,
        "expert_count": 16,
        "expert_used_count": 3,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "expert_gating_func": 2,
        "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 32,
        "expert_shared_count": 1,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "swiglu_clamp_exp": np.array([0, 0, 0, 0, 4, 4], np.float32),
        "swiglu_clamp_shexp": np.array([0, 0, 0, 5, 0, 7], np.float32),
        "vision.image_token_id": 508,
        "vision.video_token_id": 509,
        "vision.start_token_id": 510,
        "vision.end_token_id": 511,
    }
    return {f"bailingmoe3.{key}": value for key, value in keys.items()} | {"tokenizer.ggml.pre": "bailingmoe2"}


def tiny_tensor(name, shape, rng):
    """The decay rates exp(A_log), which are positive."""
    return rng.uniform(0.5, 2.0, shape).astype(np.float32) if name.endswith("ssm_a") else None
