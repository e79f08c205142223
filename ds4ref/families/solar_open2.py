"""Solar Open2 250B: gated attention without positions in every fourth layer, recurrent KDA layers between, routed experts.

KDA layers keep one matrix per head, changed at every token by the gated delta rule; its write strength reaches 2, so that the
matrix may have negative eigenvalues. Attention layers see everything, rotate nothing, and gate their output channel by
channel. Every layer has routed experts and one shared expert. Sources: Kimi Linear (KDA), the Solar Open2 release,
DeepSeek-V3 (router) and the layout of the published GGUF files.

Letters: D hidden, H heads, G key/value heads, d head width (each kind its own), E experts, F expert width, V vocabulary.
Knows nothing about rotation: a stored ``rope.freq_base`` is a leftover.
"""

from dataclasses import dataclass

import numpy as np

from .. import moe
from ..attention import attend
from ..gguf import ArtifactError, Keys
from ..ops import rms_norm, sigmoid, softplus
from ..recurrent import associate, convolve
from ..state import Recurrent, Ring, Rows

ARCHITECTURES = ("solar-open2",)
OPTIONS = {
    "unbounded": "let KDA's log decay fall below -5, as the authors' class does; the engine that publishes the file bounds it "
    "(default off: bounded)"
}

LEAST_LOG_DECAY = -5.0


@dataclass(frozen=True)
class Config:
    layers: int
    context: int
    width: int
    vocabulary: int
    heads: int
    kv_heads: tuple[int, ...]
    head_width: int
    kda_width: int
    kda_taps: int
    norm_eps: float
    experts: int
    experts_used: int
    expert_width: int
    expert_scale: float
    unbounded: bool = False

    @classmethod
    def from_metadata(cls, artifact, *, unbounded=False):
        """Read and validate every key the model relies on. ArtifactError names the key that is missing or off.

        ``kv_heads`` is 0 for a KDA layer.
        """
        if not isinstance(unbounded, bool):
            raise ArtifactError(f"{artifact.path.name}: option unbounded is {unbounded!r}; expected true or false")
        k = Keys(artifact, "solar-open2.")
        layers = k.int("block_count", lo=1, hi=1024)
        experts = k.int("expert_count", lo=1)
        config = cls(
            layers=layers,
            context=k.int("context_length", lo=1),
            width=k.int("embedding_length", lo=1),
            vocabulary=k.int("vocab_size", lo=1),
            heads=k.int("attention.head_count", lo=1),
            kv_heads=k.ints("attention.head_count_kv", n=layers, lo=0),
            head_width=k.int("attention.key_length", lo=1),
            kda_width=k.int("kda.head_dim", lo=1),
            kda_taps=k.int("ssm.conv_kernel", lo=1, hi=64),
            norm_eps=k.float("attention.layer_norm_rms_epsilon", lo=0.0),
            experts=experts,
            experts_used=k.int("expert_used_count", lo=1, hi=experts),
            expert_width=k.int("expert_feed_forward_length", lo=1),
            expert_scale=k.float("expert_weights_scale", default=1.0),
            unbounded=unbounded,
        )
        k.int("attention.value_length", lo=config.head_width, hi=config.head_width)
        k.int("rope.dimension_count", default=0, lo=0, hi=0)
        k.int("leading_dense_block_count", default=0, lo=0, hi=0)
        k.int("nextn_predict_layers", default=0, lo=0, hi=0)
        k.int("expert_shared_count", lo=1, hi=1)
        k.int("expert_group_count", default=1, lo=0, hi=1)
        moe.require_sigmoid(k)
        if odd := [groups for groups in config.kv_heads if groups and config.heads % groups]:
            raise k.error("attention.head_count_kv", odd[0], f"0 (a KDA layer) or a divisor of {config.heads} heads")
        return config


def tensors(c):
    """(required, optional): tensor name → shape."""
    D, E, F = c.width, c.experts, c.expert_width
    required = {"token_embd.weight": (c.vocabulary, D), "output.weight": (c.vocabulary, D), "output_norm.weight": (D,)}
    for i, groups in enumerate(c.kv_heads):
        block = {
            "attn_norm.weight": (D,),
            **(_attention_tensors(c, groups) if groups else _kda_tensors(c)),
            "ffn_norm.weight": (D,),
            **moe.router_tensors("", E, D),
            **moe.expert_tensors("", E, D, F),
            **moe.shared_tensors("", D, F),
        }
        required |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    return required, {}


def _attention_tensors(c, groups):
    D, channels, rows = c.width, c.heads * c.head_width, groups * c.head_width
    return {
        "attn_q.weight": (channels, D),
        "attn_k.weight": (rows, D),
        "attn_v.weight": (rows, D),
        "attn_gate.weight": (channels, D),
        "attn_output.weight": (D, channels),
    }


def _kda_tensors(c):
    """Two ranks are in use for some of them: requantising drops the trailing ones of GGUF's order."""
    D, H, d = c.width, c.heads, c.kda_width
    return {
        **{f"attn_{part}.weight": (H * d, D) for part in "qkv"},
        **{f"ssm_conv1d_{part}.weight": ((1, H * d, 1, c.kda_taps), (H * d, 1, c.kda_taps)) for part in "qkv"},
        "ssm_f_a.weight": (d, D),
        "ssm_f_b.weight": (H * d, d),
        "ssm_g_a.weight": (d, D),
        "ssm_g_b.weight": (H * d, d),
        "ssm_beta.weight": (H, D),
        "ssm_a": ((1, 1, H, 1), (H, 1)),
        "ssm_dt.bias": (H * d,),
        "ssm_norm.weight": (d,),
        "attn_output.weight": (D, H * d),
    }


def layout(c):
    """State components: keys and values of every position in attention layers; in KDA layers the heads' matrices and the
    convolutions' last rows, as projected."""
    components = {}
    for i, groups in enumerate(c.kv_heads):
        if groups:
            components |= {f"{i}.{part}": Rows((groups, c.head_width)) for part in "kv"}
        else:
            components |= {f"{i}.{part}": Ring(c.kda_taps, (c.heads * c.kda_width,)) for part in "qkv"}
            components[f"{i}.memory"] = Recurrent((c.heads, c.kda_width, c.kda_width))
    return components


def forward(c, w, state, token, trace):
    """Advance ``state`` by one token and return its logits [V]. ``trace(name, array)`` sees the parts by name."""
    x = w.part("token_embd.weight", token)
    trace("embed", x)
    for i, groups in enumerate(c.kv_heads):
        p = f"blk.{i}."
        h = rms_norm(x, w[f"{p}attn_norm.weight"], c.norm_eps)
        y = attention(c, w, state, i, h) if groups else kda(c, w, state, i, h)
        trace(f"attn_{i}", y)
        x = x + y
        trace(f"a_{i}", x)
        y = feed_forward(c, w, i, rms_norm(x, w[f"{p}ffn_norm.weight"], c.norm_eps))
        trace(f"ffn_{i}", y)
        x = x + y
        trace(f"h_{i}", x)
    return w["output.weight"] @ rms_norm(x, w["output_norm.weight"], c.norm_eps)


def attention(c, w, state, i, h):
    """Grouped-query attention of layer i over all tokens so far, gated per channel, on its input h [D] → [D]."""
    p = f"blk.{i}."
    q, k, v = ((w[f"{p}attn_{part}.weight"] @ h).reshape(-1, c.head_width) for part in "qkv")
    state[f"{i}.k"].append(k)
    state[f"{i}.v"].append(v)
    out = attend(q, state[f"{i}.k"].rows(), state[f"{i}.v"].rows(), c.head_width**-0.5)
    return w[f"{p}attn_output.weight"] @ (out.reshape(-1) * sigmoid(w[f"{p}attn_gate.weight"] @ h))


def kda(c, w, state, i, h):
    """Kimi Delta Attention of layer i on its normalised input h [D] → [D]. Decay and gate are low-rank projections."""
    p = f"blk.{i}."
    q, k, v = (
        convolve(state[f"{i}.{part}"], w[f"{p}attn_{part}.weight"] @ h, w[f"{p}ssm_conv1d_{part}.weight"]).reshape(c.heads, -1)
        for part in "qkv"
    )
    raw = w[f"{p}ssm_f_b.weight"] @ (w[f"{p}ssm_f_a.weight"] @ h) + w[f"{p}ssm_dt.bias"]
    beta = 2 * sigmoid(w[f"{p}ssm_beta.weight"] @ h)
    decay = np.exp(log_decay(c, raw.reshape(c.heads, c.kda_width), w[f"{p}ssm_a"].reshape(-1, 1)))
    out = associate(state[f"{i}.memory"], q, k, v, beta, decay)
    gate = sigmoid(w[f"{p}ssm_g_b.weight"] @ (w[f"{p}ssm_g_a.weight"] @ h))
    return w[f"{p}attn_output.weight"] @ (rms_norm(out, w[f"{p}ssm_norm.weight"], c.norm_eps).reshape(-1) * gate)


def log_decay(c, raw, rate):
    """``max(rate · softplus(raw), −5)`` per head and key channel, [H, d]; without the maximum where ``unbounded``.

    rate: [H, 1] < 0, the stored −exp(A_log).
    """
    g = rate * softplus(raw)
    return g if c.unbounded else np.maximum(g, LEAST_LOG_DECAY)


def feed_forward(c, w, i, h):
    """Routed experts plus the shared one of layer i, on the normalised input h [D] → [D]."""
    p = f"blk.{i}."
    return moe.sigmoid_experts(h, w, p, c.experts_used, c.expert_scale) + moe.shared_expert(h, w, p)


def tiny_metadata():
    """Metadata of a tiny model with both layer kinds, attention and KDA."""
    keys = {
        "block_count": 5,
        "context_length": 65536,
        "embedding_length": 64,
        "vocab_size": 512,
        "feed_forward_length": 160,
        "attention.head_count": 4,
        "attention.head_count_kv": np.array([2, 0, 0, 0, 2], np.int32),
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "ssm.conv_kernel": 4,
        "kda.head_dim": 16,
        "leading_dense_block_count": 0,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 16,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
    }
    return {f"solar-open2.{key}": value for key, value in keys.items()} | {"tokenizer.ggml.pre": "solar-open"}


def tiny_tensor(name, shape, rng):
    """The decay rates −exp(A_log), which are negative: some heads forget slowly, some reach the bound."""
    return -np.exp(rng.uniform(-1.5, 2.0, shape)).astype(np.float32) if name.endswith("ssm_a") else None
