"""Inkling: attention without rotary position, short convolutions around every block, routed and shared experts in one softmax.

Position enters through a learned bias per distance (a bias of zero beyond its extent, not a mask), the window of the local
layers and four convolutions per layer: over keys, over values and over both blocks' outputs. Global layers sharpen their
scores with the logarithm of the position beyond a floor. The shared experts compete with the chosen ones for weight.
Sources: the published checkpoint's configuration, whose text the file carries, and its tensors, whose names and shapes the
file keeps (``source-interleaved-v1``: row 2j of a ``w13`` is gate row j, row 2j + 1 is up row j).

Letters: D hidden, H heads, G key/value heads, d head width, R relative features, X extent, K convolution taps, E routed and
S shared experts, F feed-forward width, V vocabulary.
Binds the audio and image towers but does not run them; the draft blocks live in a sidecar (``inkling_mtp.py``).
"""

import json
from dataclasses import dataclass
from math import isqrt, log, prod
from types import SimpleNamespace

import numpy as np

from ..attention import attend
from ..gguf import Keys
from ..ops import rms_norm, sigmoid, silu, softmax, softplus, top_k
from ..recurrent import short_conv
from ..state import Ring, Rows

ARCHITECTURES = ("inkling",)
OPTIONS = {}

CONFIG_KEY = "inkling.config.json"

# Variants of the configuration format; only the published setting of each is implemented.
SWITCHES = {
    "use_embed_norm": True,
    "use_sconv": True,
    "use_gate_bias": True,
    "use_global_scale": True,
    "norm_after_topk": True,
    "shared_expert_sink": True,
    "q_bias": False,
    "o_bias": False,
}


@dataclass(frozen=True)
class Heads:
    """The attention geometry of one layer kind; ``extent`` is the number of distances that have a learned bias."""

    query: int
    kv: int
    width: int
    extent: int


@dataclass(frozen=True)
class Audio:
    """The audio tower: ``bins`` mel bins, each one of ``levels`` levels."""

    bins: int
    levels: int


@dataclass(frozen=True)
class Visual:
    """The image tower: ``folds[j]`` is the side of the square of rows that linear map j joins into one; the last joins time."""

    channels: int
    folds: tuple[int, ...]
    frames: int


@dataclass(frozen=True)
class Config:
    layers: int
    context: int
    width: int
    vocabulary: int
    stored_vocabulary: int
    local: tuple[bool, ...]
    local_heads: Heads
    global_heads: Heads
    relative: int
    taps: int
    norm_eps: float
    log_floor: float
    log_alpha: float
    dense_layers: int
    dense_width: int
    experts: int
    experts_used: int
    shared_experts: int
    expert_width: int
    route_scale: float
    logit_divisor: float
    audio: Audio | None
    visual: Visual | None

    @classmethod
    def from_metadata(cls, artifact):
        """Read and validate the file's layout keys and the embedded configuration. ArtifactError names what is off."""
        own = Keys(artifact, "inkling.")
        own.str("tensor_layout", choices=("source-interleaved-v1",))
        if own.bool("mtp.sidecar", default=False):
            raise own.error("mtp.sidecar", True, "false: these are the draft blocks of a model, not the model")
        k = embedded_keys(artifact)
        text = "text_config."
        layers = k.int(f"{text}num_hidden_layers", lo=1, hi=1024)
        local = set(k.ints(f"{text}local_layer_ids", lo=0, hi=layers - 1))
        stored = k.int(f"{text}vocab_size", lo=1)
        width = k.int(f"{text}hidden_size", lo=1)
        window = k.int(f"{text}sliding_window_size", lo=1)
        config = cls(
            layers=layers,
            context=k.int(f"{text}model_max_length", lo=1),
            width=width,
            vocabulary=k.int(f"{text}unpadded_vocab_size", lo=1, hi=stored),
            stored_vocabulary=stored,
            local=tuple(i in local for i in range(layers)),
            local_heads=_heads(k, f"{text}swa_", window),
            global_heads=_heads(k, text, k.int(f"{text}rel_extent", lo=1)),
            relative=k.int(f"{text}d_rel", lo=1),
            taps=k.int(f"{text}sconv_kernel_size", lo=1),
            norm_eps=k.float(f"{text}rms_norm_eps", lo=0.0),
            log_floor=k.float(f"{text}log_scaling_n_floor", lo=1.0),
            log_alpha=k.float(f"{text}log_scaling_alpha", lo=0.0),
            dense_layers=k.int(f"{text}dense_mlp_idx", lo=0, hi=layers),
            dense_width=k.int(f"{text}dense_intermediate_size", lo=1),
            experts=k.int(f"{text}n_routed_experts", lo=1),
            experts_used=k.int(f"{text}num_experts_per_tok", lo=1, hi=k.int(f"{text}n_routed_experts")),
            shared_experts=k.int(f"{text}n_shared_experts", lo=1),
            expert_width=k.int(f"{text}intermediate_size", lo=1),
            route_scale=k.float(f"{text}route_scale"),
            logit_divisor=k.float(f"{text}logits_mup_width_multiplier"),
            audio=_audio(k, width),
            visual=_visual(k, width, artifact),
        )
        if config.logit_divisor <= 0:
            raise k.error(f"{text}logits_mup_width_multiplier", config.logit_divisor, "a number above 0")
        k.str(f"{text}gate_activation", choices=("sigmoid",))
        for name, wanted in SWITCHES.items():
            if k.bool(text + name) != wanted:
                raise k.error(text + name, not wanted, str(wanted).lower())
        if k.has(f"{text}final_logit_softcapping"):
            raise k.error(f"{text}final_logit_softcapping", k.float(f"{text}final_logit_softcapping"), "null")
        return config

    def heads(self, i):
        """The attention geometry of layer i."""
        return self.local_heads if self.local[i] else self.global_heads


def embedded_keys(artifact):
    """Keys over the embedded config.json, named ``inkling.config.json/section.field``; a null counts as absent."""
    text = Keys(artifact).str(CONFIG_KEY)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise Keys(artifact).error(CONFIG_KEY, text, "a JSON object")
    fields = {}
    for section, values in config.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, int) and abs(value) >= 1 << 63:
                raise Keys(artifact).error(f"{CONFIG_KEY}/{section}.{name}", value, "an integer of 64 bits")
            if value is not None:
                fields[f"{CONFIG_KEY}/{section}.{name}"] = value
    return Keys(SimpleNamespace(path=artifact.path, metadata=fields), f"{CONFIG_KEY}/")


def _heads(k, prefix, extent):
    query = k.int(f"{prefix}num_attention_heads", lo=1)
    kv = k.int(f"{prefix}num_key_value_heads", lo=1)
    if query % kv:
        raise k.error(f"{prefix}num_key_value_heads", kv, f"a divisor of {query} heads")
    return Heads(query, kv, k.int(f"{prefix}head_dim", lo=1), extent)


def _audio(k, width):
    if not k.has("audio_config.n_mel_bins"):
        return None
    k.int("audio_config.decoder_dmodel", lo=width, hi=width)
    return Audio(k.int("audio_config.n_mel_bins", lo=1), k.int("audio_config.mel_vocab_size", lo=1))


def _visual(k, width, artifact):
    """The image tower by the configuration; how it divides the patch side into folds, only the tensors tell."""
    if not k.has("vision_config.n_layers"):
        return None
    k.int("vision_config.decoder_dmodel", lo=width, hi=width)
    spatial = k.int("vision_config.n_layers", lo=2, hi=64) - 1
    side = k.int("vision_config.patch_size", lo=1)
    channels = k.int("vision_config.n_channels", lo=1)
    folds, before = [], channels
    for j in range(spatial - 1):
        linear = artifact.tensors.get(f"model.visual.layers.linear_{j}.weight")
        folds.append(max(1, isqrt(linear.shape[-1] // before)) if linear else 1)
        before = visual_width(channels, folds)
    folds.append(max(1, side // prod(folds)))
    return Visual(channels, tuple(folds), k.int("vision_config.temporal_patch_size", lo=1))


def visual_width(channels, folds):
    """Width after these folds of the image tower: the joined pixels' values, rounded up to a multiple of 64."""
    return -(-channels * prod(folds) ** 2 // 64) * 64


def tensors(c):
    """(required, optional): tensor name → shape. The towers are optional."""
    D = c.width
    required = {
        "model.llm.embed.weight": (c.stored_vocabulary, D),
        "model.llm.unembed.weight": (c.stored_vocabulary, D),
        "model.llm.embed_norm.weight": (D,),
        "model.llm.norm.weight": (D,),
    }
    for i in range(c.layers):
        p = f"model.llm.layers.{i}."
        required |= _attention_tensors(c, p, c.heads(i))
        if i < c.dense_layers:
            required |= _dense_tensors(c, p)
        else:
            F = c.expert_width
            required |= {
                f"{p}mlp.gate.weight": (c.experts + c.shared_experts, D),
                f"{p}mlp.gate.bias": (c.experts,),
                f"{p}mlp.gate.global_scale": (1,),
                f"{p}mlp.experts.w13_weight": (c.experts, 2 * F, D),
                f"{p}mlp.experts.w2_weight": (c.experts, D, F),
                f"{p}mlp.shared_experts.shared_w13_weight": (c.shared_experts, 2 * F, D),
                f"{p}mlp.shared_experts.shared_w2_weight": (c.shared_experts, D, F),
            }
    return required, _tower_tensors(c)


def block_tensors(c, p, local):
    """Shapes of a dense block whose names begin with ``p``."""
    return _attention_tensors(c, p, c.local_heads if local else c.global_heads) | _dense_tensors(c, p)


def _attention_tensors(c, p, heads):
    D, q, kv = c.width, heads.query * heads.width, heads.kv * heads.width
    return {
        f"{p}attn_norm.weight": (D,),
        f"{p}mlp_norm.weight": (D,),
        f"{p}attn.wq_du.weight": (q, D),
        f"{p}attn.wk_dv.weight": (kv, D),
        f"{p}attn.wv_dv.weight": (kv, D),
        f"{p}attn.wo_ud.weight": (D, q),
        f"{p}attn.wr_du.weight": (heads.query * c.relative, D),
        f"{p}attn.rel_logits_proj.proj": (c.relative, heads.extent),
        f"{p}attn.q_norm.weight": (heads.width,),
        f"{p}attn.k_norm.weight": (heads.width,),
        f"{p}attn.k_sconv.weight": (kv, 1, c.taps),
        f"{p}attn.v_sconv.weight": (kv, 1, c.taps),
        f"{p}attn_sconv.weight": (D, 1, c.taps),
        f"{p}mlp_sconv.weight": (D, 1, c.taps),
    }


def _dense_tensors(c, p):
    return {
        f"{p}mlp.w13_dn.weight": (2 * c.dense_width, c.width),
        f"{p}mlp.w2_md.weight": (c.width, c.dense_width),
        f"{p}mlp.global_scale": (1,),
    }


def _tower_tensors(c):
    towers = {}
    if c.audio:
        towers["model.audio.encoder.weight"] = (c.audio.bins * c.audio.levels, c.width)
        towers["model.audio.final_norm.weight"] = (c.width,)
    if c.visual:
        p, before = "model.visual.layers.", c.visual.channels
        for j, fold in enumerate(c.visual.folds):
            width = visual_width(c.visual.channels, c.visual.folds[: j + 1])
            towers[f"{p}linear_{j}.weight"] = (width, before * fold * fold)
            towers[f"{p}norm_{j}.weight"] = (width,)
            before = width
        towers[f"{p}linear_{len(c.visual.folds)}.weight"] = (c.width, before * c.visual.frames)
        towers["model.visual.final_norm.weight"] = (c.width,)
    return towers


def layout(c):
    """State components: keys and values, of every position or of the window, and the inputs of the four convolutions."""
    components = {}
    for i in range(c.layers):
        components |= block_layout(c, i, c.local[i])
    return components


def block_layout(c, i, local):
    """State components of a block, named by ``i``."""
    components, heads = {}, c.local_heads if local else c.global_heads
    row = (heads.kv, heads.width)
    for name in ("k", "v"):
        components[f"{i}.{name}"] = Ring(heads.extent, row) if local else Rows(row)
        components[f"{i}.conv_{name}"] = Ring(c.taps, (heads.kv * heads.width,))
    for site in ("attn", "mlp"):
        components[f"{i}.conv_{site}"] = Ring(c.taps, (c.width,))
    return components


def forward(c, w, state, token, trace):
    """Advance ``state`` by one token and return its logits [V]. ``trace(name, array)`` sees the parts by name.

    The rows that pad the stored vocabulary have no logits.
    """
    x = embed(c, w, token)
    trace("embed", x)
    for i in range(c.layers):
        dense = i < c.dense_layers
        x = block(c, w, state, i, f"model.llm.layers.{i}.", x, state.length, trace, local=c.local[i], dense=dense)
        trace(f"h_{i}", x)
    return head(c, w, rms_norm(x, w["model.llm.norm.weight"], c.norm_eps))


def embed(c, w, token):
    """The normalised embedding [D] of a token."""
    return rms_norm(w.part("model.llm.embed.weight", token), w["model.llm.embed_norm.weight"], c.norm_eps)


def head(c, w, h):
    """Logits [V] of a row [D]."""
    return w["model.llm.unembed.weight"][: c.vocabulary] @ (h / h.dtype.type(c.logit_divisor))


def block(c, w, state, i, p, x, position, trace, *, local, dense):
    """One block on x [D] → [D]: its tensors' names begin with ``p``, its components' with ``i``."""
    y = attention(c, w, state, i, p, rms_norm(x, w[f"{p}attn_norm.weight"], c.norm_eps), position, local)
    trace(f"attn_{i}", y)
    x = x + _convolve(state[f"{i}.conv_attn"], y, w[f"{p}attn_sconv.weight"])
    y = feed_forward(c, w, p, rms_norm(x, w[f"{p}mlp_norm.weight"], c.norm_eps), dense)
    trace(f"ffn_{i}", y)
    return x + _convolve(state[f"{i}.conv_mlp"], y, w[f"{p}mlp_sconv.weight"])


def _convolve(ring, row, taps):
    """Append ``row`` [C] to its ``Ring(K)`` and return it plus the short convolution at it. taps: [C, 1, K] → [C]."""
    ring.append(row)
    return row + short_conv(ring.rows(), taps[:, 0])


def attention(c, w, state, i, p, a, position, local):
    """Attention of a block on its normalised input a [D] → [D], before the output convolution."""
    p, heads = f"{p}attn.", c.local_heads if local else c.global_heads
    q = (w[f"{p}wq_du.weight"] @ a).reshape(heads.query, heads.width)
    k = _convolve(state[f"{i}.conv_k"], w[f"{p}wk_dv.weight"] @ a, w[f"{p}k_sconv.weight"])
    v = _convolve(state[f"{i}.conv_v"], w[f"{p}wv_dv.weight"] @ a, w[f"{p}v_sconv.weight"])
    r = (w[f"{p}wr_du.weight"] @ a).reshape(heads.query, c.relative)
    q = rms_norm(q, w[f"{p}q_norm.weight"], c.norm_eps)
    k = rms_norm(k.reshape(heads.kv, heads.width), w[f"{p}k_norm.weight"], c.norm_eps)
    state[f"{i}.k"].append(k)
    state[f"{i}.v"].append(v.reshape(heads.kv, heads.width))
    keys = state[f"{i}.k"].rows()
    bias = relative_bias(r, w[f"{p}rel_logits_proj.proj"], len(keys))
    if not local:
        sharpness = q.dtype.type(1 + c.log_alpha * log(max((position + 1) / c.log_floor, 1.0)))
        q, bias = q * sharpness, bias * sharpness
    out = attend(q, keys, state[f"{i}.v"].rows(), 1 / heads.width, bias=bias)
    return w[f"{p}wo_ud.weight"] @ out.reshape(-1)


def relative_bias(r, projection, count):
    """Score bias of the newest ``count`` rows, oldest first: ``r · projection[:, distance]``, 0 from the extent on.

    r: [H, R], projection: [R, X] → [H, count].
    """
    near = min(count, projection.shape[1])
    bias = np.zeros((len(r), count), r.dtype)
    bias[:, count - near :] = (r @ projection[:, :near])[:, ::-1]
    return bias


def feed_forward(c, w, p, m, dense):
    """The dense feed-forward of the first layers, or the experts. m: [D] normalised → [D], before the convolution."""
    p = f"{p}mlp."
    if dense:
        return w[f"{p}global_scale"] * (w[f"{p}w2_md.weight"] @ _gated(m, w[f"{p}w13_dn.weight"]))
    logits = w[f"{p}gate.weight"] @ m
    chosen = top_k(sigmoid(logits[: c.experts]) + w[f"{p}gate.bias"], c.experts_used)
    rivals = np.concatenate([logits[chosen], logits[c.experts :]])
    # Softmax of log σ: each rival's σ over the sum of all of them, whatever their size.
    weights = softmax(-softplus(-rivals)) * m.dtype.type(c.route_scale) * w[f"{p}gate.global_scale"]
    y = np.zeros_like(m)
    for e, weight in zip(chosen.tolist(), weights[: c.experts_used], strict=True):
        y += weight * (w.part(f"{p}experts.w2_weight", e) @ _gated(m, w.part(f"{p}experts.w13_weight", e)))
    for s, weight in enumerate(weights[c.experts_used :]):
        hidden = weight * _gated(m, w.part(f"{p}shared_experts.shared_w13_weight", s))
        y += w.part(f"{p}shared_experts.shared_w2_weight", s) @ hidden
    return y


def _gated(m, w13):
    """``silu(gate m) · (up m)`` of interleaved rows, gate row first. w13: [2F, D] → [F]."""
    gate, up = (w13 @ m).reshape(-1, 2).T
    return silu(gate) * up


def tiny_metadata():
    """Metadata of a tiny model with every layer kind: local and global attention, dense and routed, a padded vocabulary."""
    text = {
        "model_max_length": 65536,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "vocab_size": 512,
        "unpadded_vocab_size": 500,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "d_rel": 4,
        "rel_extent": 48,
        "sliding_window_size": 32,
        "log_scaling_n_floor": 128,
        "log_scaling_alpha": 0.1,
        "rms_norm_eps": 1e-6,
        "local_layer_ids": [0, 2],
        "dense_mlp_idx": 1,
        "sconv_kernel_size": 4,
        "logits_mup_width_multiplier": 1.0,
        "final_logit_softcapping": None,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "dense_intermediate_size": 96,
        "intermediate_size": 32,
        "route_scale": 4.0,
        "gate_activation": "sigmoid",
    }
    return {
        "inkling.tensor_layout": "source-interleaved-v1",
        "inkling.mtp.sidecar": False,
        CONFIG_KEY: json.dumps({"text_config": text | SWITCHES}),
    }


def tiny_tensor(name, shape, rng):
    """Scales of whole blocks near 1, where the generic rule would have them near 0."""
    if not name.endswith("global_scale"):
        return None
    return (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32)
