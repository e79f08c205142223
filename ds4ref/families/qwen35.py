"""Qwen3.5, 3.6 and 3.8 dense, and Prism's ternary Bonsai 2: three Gated DeltaNet blocks, then one gated-attention block.

A dense pre-norm decoder with SwiGLU in every block. Prism's files hold their matrices rotated by a block-diagonal
Hadamard transform of the input ("fold"), so that ternary values lose less; the input is rotated the same way instead of
the matrix back. Sources: the Qwen3-Next and Qwen3.5 model code, Gated DeltaNet (Yang et al. 2024), the layout of
llama.cpp's converter, and the ``prism.hadamard`` keys of the published files.

Letters: D hidden, H query heads, G key/value heads, d head width; Hk and Hv key and value heads of the delta net, r = Hv/Hk.
Knows nothing about images (their encoder is another file).
"""

import re
from dataclasses import dataclass

import numpy as np

from .. import nextn
from ..attention import attend
from ..gguf import Keys
from ..ops import rms_norm, rope_frequencies, rotate_head, sigmoid, silu
from ..recurrent import convolve, gated_delta
from ..rounding import hadamard
from ..state import Recurrent, Ring, Rows

ARCHITECTURES = ("qwen35",)
OPTIONS = {}

LONGEST_DRAFT = 8
FOLDABLE = re.compile(r"blk\.\d+\.(attn_(q|k|v|qkv|gate|output)|ffn_(gate|up|down)|ssm_out)\.weight|output\.weight")


@dataclass(frozen=True)
class Fold:
    """The rotation in which a file stores its matrices: ``W_stored = W · S · H``, H block-diagonal, S signs.

    sign_widths: input widths that have a vector of ±1 in the file, one after the other (none: no signs); weights: names of
    matrices whose input is rotated; embedding: whether the rows of the embedding are stored rotated; tied: whether the
    head is the embedding; grouped: whether the columns of ``ssm_out`` stand in checkpoint order (all value heads of a key
    head together) while everything else is tiled.
    """

    block: int
    sign_widths: tuple[int, ...]
    weights: tuple[str, ...]
    embedding: bool
    tied: bool
    grouped: bool


@dataclass(frozen=True)
class Config:
    layers: int
    predictors: int
    context: int
    width: int
    vocabulary: int
    recurrent: tuple[bool, ...]
    heads: int
    kv_heads: int
    head_width: int
    rotary: int
    rope_base: float
    key_heads: int
    value_heads: int
    delta_width: int
    taps: int
    feed_forward: int
    norm_eps: float
    fold: Fold | None

    @classmethod
    def from_metadata(cls, artifact):
        """Read and validate every key the model relies on. ArtifactError names the key that is missing or off."""
        k = Keys(artifact, "qwen35.")
        blocks = k.int("block_count", lo=1, hi=1024)
        predictors = k.int("nextn_predict_layers", default=0, lo=0, hi=blocks - 1)
        layers = blocks - predictors
        kv_heads = k.int("attention.head_count_kv", lo=1)
        head_width = k.int("attention.key_length", lo=2)
        key_heads = k.int("ssm.group_count", lo=1)
        config = cls(
            layers=layers,
            predictors=predictors,
            context=k.int("context_length", lo=1),
            width=k.int("embedding_length", lo=1),
            vocabulary=_vocabulary(k, artifact),
            recurrent=_recurrent_layers(k, layers),
            heads=k.int("attention.head_count", lo=1),
            kv_heads=kv_heads,
            head_width=head_width,
            rotary=k.int("rope.dimension_count", lo=2, hi=head_width),
            rope_base=k.float("rope.freq_base", lo=1.0),
            key_heads=key_heads,
            value_heads=k.int("ssm.time_step_rank", lo=1),
            delta_width=k.int("ssm.state_size", lo=1),
            taps=k.int("ssm.conv_kernel", lo=1, hi=64),
            feed_forward=k.int("feed_forward_length", lo=1),
            norm_eps=k.float("attention.layer_norm_rms_epsilon", lo=0.0),
            fold=_fold(artifact),
        )
        if config.heads % kv_heads:
            raise k.error("attention.head_count", config.heads, f"a multiple of {kv_heads} key/value heads")
        if config.value_heads % key_heads:
            raise k.error("ssm.time_step_rank", config.value_heads, f"a multiple of {key_heads} key heads")
        if config.rotary % 2:
            raise k.error("rope.dimension_count", config.rotary, "an even number")
        inner = config.value_heads * config.delta_width
        k.int("ssm.inner_size", lo=inner, hi=inner)
        k.int("attention.value_length", lo=head_width, hi=head_width)
        k.str("rope.scaling.type", default="none", choices=("none",))
        # Text has one position on all three axes, so how the axes share the frequencies does not matter here.
        sections = k.ints("rope.dimension_sections", n=4, default=(config.rotary // 2, 0, 0, 0))
        if min(sections) < 0 or 2 * sum(sections) != config.rotary:
            raise k.error("rope.dimension_sections", list(sections), f"four parts of {config.rotary // 2} frequencies")
        if config.fold:
            _check_fold(Keys(artifact, "prism.hadamard."), config)
        return config


def _vocabulary(k, artifact):
    """Rows of the head: the key where there is one, else as many as there are tokens (the converter pads their list)."""
    return k.int("vocab_size", lo=1) if k.has("vocab_size") else len(Keys(artifact, "tokenizer.ggml.").strs("tokens"))


def _recurrent_layers(k, layers):
    """Which blocks of the trunk are delta nets: the file's list, else all but every n-th."""
    if k.has("attention.recurrent_layers"):
        return k.bools("attention.recurrent_layers", n=layers, at_least=True)[:layers]
    interval = k.int("full_attention_interval", lo=1)
    return tuple((i + 1) % interval != 0 for i in range(layers))


def _fold(artifact):
    """The :class:`Fold` that the file declares, or None. ArtifactError for any value that names another rotation."""
    k = Keys(artifact, "prism.hadamard.")
    names = {key.removeprefix("prism.hadamard.") for key in artifact.metadata if key.startswith("prism.hadamard.")}
    if not names:
        return None
    known = {"version", "block_size", "transform", "axis", "sign_mode", "sign_widths", "sign_values"}
    if odd := sorted(names - known - {"weight_names", "inverse_weight_names", "gdn_v_grouped"}):
        raise k.error(odd[0], k.metadata[f"prism.hadamard.{odd[0]}"], "no such key: its meaning is not known")
    block = k.int("block_size", lo=1)
    if block.bit_count() != 1:
        raise k.error("block_size", block, "a power of two")
    k.str("transform", choices=("normalized-sylvester-walsh-hadamard",))
    k.str("axis", choices=("input-last-dimension",))
    explicit = k.str("sign_mode", choices=("explicit", "identity")) == "explicit"
    weights, inverse = k.strs("weight_names"), k.strs("inverse_weight_names")
    if odd := [name for name in weights if not FOLDABLE.fullmatch(name)]:
        raise k.error("weight_names", odd[0], "matrices of the blocks or output.weight")
    if set(inverse) - {"token_embd.weight"}:
        raise k.error("inverse_weight_names", inverse[0], "token_embd.weight alone")
    return Fold(
        block=block,
        sign_widths=_sign_widths(k) if explicit else _no_signs(k),
        weights=weights,
        embedding=bool(inverse),
        tied=k.int("version", lo=1, hi=2) == 2,
        grouped=k.bool("gdn_v_grouped", default=False),
    )


def _sign_widths(k):
    """The widths that have sign vectors, the values checked."""
    widths = k.ints("sign_widths", lo=1)
    if not widths or len(set(widths)) != len(widths):
        raise k.error("sign_widths", str(widths), "distinct widths")
    values = k.floats("sign_values", n=sum(widths), lo=-1, hi=1)
    if odd := [value for value in values if abs(value) != 1]:
        raise k.error("sign_values", odd[0], "1 and -1 only")
    return widths


def _no_signs(k):
    for key in ("sign_widths", "sign_values"):
        if k.has(key):
            raise k.error(key, k.metadata[f"prism.hadamard.{key}"], "no such key where sign_mode is identity")
    return ()


def _check_fold(k, c):
    """Every folded matrix exists, and its input width has whole blocks and signs. ArtifactError names the first without."""
    required, optional = tensors(c)
    known = required | optional
    for name in (*c.fold.weights, *["token_embd.weight"] * c.fold.embedding):
        if name not in known:
            raise k.error("weight_names", name, "matrices of this model")
        width = known[name][-1]
        if width % c.fold.block:
            raise k.error("block_size", c.fold.block, f"a divisor of {width}, the input width of {name}")
        if c.fold.sign_widths and width not in c.fold.sign_widths:
            raise k.error("sign_widths", str(c.fold.sign_widths), f"{width} too, the input width of {name}")


def tensors(c):
    """(required, optional): tensor name → shape. NextN blocks come after the trunk, each a complete attention block."""
    D, V = c.width, c.vocabulary
    required = {"token_embd.weight": (V, D), "output_norm.weight": (D,)}
    optional = {}
    if c.fold is None:
        optional["output.weight"] = (V, D)  # absent: the embedding is the head
    elif not c.fold.tied:
        required["output.weight"] = (V, D)
    for i in range(c.layers + c.predictors):
        p = f"blk.{i}."
        required |= {
            f"{p}attn_norm.weight": (D,),
            f"{p}post_attention_norm.weight": (D,),
            f"{p}ffn_gate.weight": (c.feed_forward, D),
            f"{p}ffn_up.weight": (c.feed_forward, D),
            f"{p}ffn_down.weight": (D, c.feed_forward),
        }
        required |= _delta_tensors(c, p) if i < c.layers and c.recurrent[i] else _attention_tensors(c, p)
        if i >= c.layers:
            required |= nextn.joint_tensors(p, D)
            optional |= nextn.own_ends(p, D, V) | {f"{p}nextn.shared_head_norm.weight": (D,)}
    return required, optional


def _delta_tensors(c, p):
    D, values = c.width, c.value_heads * c.delta_width
    return {
        f"{p}attn_qkv.weight": (_channels(c), D),
        f"{p}attn_gate.weight": (values, D),
        f"{p}ssm_conv1d.weight": (_channels(c), c.taps),
        f"{p}ssm_a": (c.value_heads,),
        f"{p}ssm_dt.bias": (c.value_heads,),
        f"{p}ssm_alpha.weight": (c.value_heads, D),
        f"{p}ssm_beta.weight": (c.value_heads, D),
        f"{p}ssm_norm.weight": (c.delta_width,),
        f"{p}ssm_out.weight": (D, values),
    }


def _attention_tensors(c, p):
    D, d = c.width, c.head_width
    return {
        f"{p}attn_q.weight": (2 * c.heads * d, D),
        f"{p}attn_k.weight": (c.kv_heads * d, D),
        f"{p}attn_v.weight": (c.kv_heads * d, D),
        f"{p}attn_output.weight": (D, c.heads * d),
        f"{p}attn_q_norm.weight": (d,),
        f"{p}attn_k_norm.weight": (d,),
    }


def _channels(c):
    """Channels of the delta net's convolution: q, k and v of all heads."""
    return (2 * c.key_heads + c.value_heads) * c.delta_width


def layout(c):
    """State components: keys and values of attention blocks; convolution input and matrix memory of delta nets."""
    components = {}
    for i, recurrent in enumerate(c.recurrent):
        if recurrent:
            components[f"{i}.conv"] = Ring(c.taps, (_channels(c),))
            components[f"{i}.memory"] = Recurrent((c.value_heads, c.delta_width, c.delta_width))
        else:
            components |= _attention_components(c, i)
    return components


def _attention_components(c, i):
    return {f"{i}.{part}": Rows((c.kv_heads, c.head_width)) for part in "kv"}


def forward(c, w, state, token, trace):
    """Advance ``state`` by one token and return its logits [V]. ``trace(name, array)`` sees the parts by name."""
    angles = state.length * rope_frequencies(c.rotary, c.rope_base)
    h = embed(c, w, token)
    trace("embed", h)
    for i in range(c.layers):
        p = f"blk.{i}."
        x = rms_norm(h, w[f"{p}attn_norm.weight"], c.norm_eps)
        y = delta_net(c, w, state, i, x) if c.recurrent[i] else attention(c, w, state, i, angles, x)
        trace(f"attn_{i}", y)
        h = h + y
        y = feed_forward(c, w, p, rms_norm(h, w[f"{p}post_attention_norm.weight"], c.norm_eps))
        trace(f"ffn_{i}", y)
        h = h + y
        trace(f"h_{i}", h)
    return linear(c, w, _head(w), rms_norm(h, w["output_norm.weight"], c.norm_eps))


def _head(w):
    return "output.weight" if "output.weight" in w else "token_embd.weight"


def embed(c, w, token):
    """The embedding [D] of a token; a rotated row z becomes ``s ⊙ (H z)``."""
    row = w.part("token_embd.weight", token)
    return _signed(c, w, _rotate(c, row)) if c.fold and c.fold.embedding else row


def linear(c, w, name, x):
    """The product with matrix ``name``; where the file holds it rotated, with ``H (s ⊙ x)`` instead of x."""
    rotated = c.fold and (name in c.fold.weights or (name == "token_embd.weight" and c.fold.embedding))
    return w[name] @ (_rotate(c, _signed(c, w, x)) if rotated else x)


def _rotate(c, x):
    return hadamard(x.reshape(-1, c.fold.block)).reshape(-1)


def _signed(c, w, x):
    """x times the sign vector of its width."""
    if not c.fold.sign_widths:
        return x
    start = sum(c.fold.sign_widths[: c.fold.sign_widths.index(len(x))])
    return x * w.artifact.metadata["prism.hadamard.sign_values"][start : start + len(x)].astype(x.dtype)


def delta_net(c, w, state, i, x):
    """Gated DeltaNet block i on its normalised input x [D] → [D]. Value head j reads key head j mod Hk (tiled)."""
    p = f"blk.{i}."
    qkv = convolve(state[f"{i}.conv"], linear(c, w, f"{p}attn_qkv.weight", x), w[f"{p}ssm_conv1d.weight"])
    a, b = w[f"{p}ssm_alpha.weight"] @ x, w[f"{p}ssm_beta.weight"] @ x
    key_head = np.arange(c.value_heads) % c.key_heads
    out = gated_delta(state[f"{i}.memory"], qkv, a, b, w[f"{p}ssm_a"], w[f"{p}ssm_dt.bias"], key_head)
    z = linear(c, w, f"{p}attn_gate.weight", x).reshape(out.shape)
    out = rms_norm(out, w[f"{p}ssm_norm.weight"], c.norm_eps) * silu(z)
    if c.fold and c.fold.grouped:
        out = out.reshape(-1, c.key_heads, c.delta_width).swapaxes(0, 1)
    return linear(c, w, f"{p}ssm_out.weight", out.reshape(-1))


def attention(c, w, state, i, angles, x):
    """Gated attention block i on its normalised input x [D] → [D]. ``attn_q`` holds d query rows, then d gate rows per head."""
    p = f"blk.{i}."
    q, gate = np.split(linear(c, w, f"{p}attn_q.weight", x).reshape(c.heads, 2 * c.head_width), 2, axis=1)
    k, v = (linear(c, w, f"{p}attn_{name}.weight", x).reshape(c.kv_heads, c.head_width) for name in "kv")
    q = rotate_head(rms_norm(q, w[f"{p}attn_q_norm.weight"], c.norm_eps), angles)
    k = rotate_head(rms_norm(k, w[f"{p}attn_k_norm.weight"], c.norm_eps), angles)
    keys, values = state[f"{i}.k"], state[f"{i}.v"]
    keys.append(k)
    values.append(v)
    out = attend(q, keys.rows(), values.rows(), c.head_width**-0.5)
    return linear(c, w, f"{p}attn_output.weight", (out * sigmoid(gate)).reshape(-1))


def feed_forward(c, w, p, x):
    """SwiGLU on the normalised input x [D] → [D]."""
    gate, up = linear(c, w, f"{p}ffn_gate.weight", x), linear(c, w, f"{p}ffn_up.weight", x)
    return linear(c, w, f"{p}ffn_down.weight", silu(gate) * up)


def draft_unused(c):
    """Why the NextN blocks do not draft, or None."""
    return None if c.predictors == 1 else f"the use of {c.predictors} blocks is not described"


def draft_layouts(c):
    """State of the predictor: keys and values of every position."""
    return [_attention_components(c, c.layers)]


def draft_input(c, w, h):
    """The predictor's hidden row of a position, from the trunk's last output h [D] there: what the head reads."""
    return rms_norm(h, w["output_norm.weight"], c.norm_eps)


def draft_block(c, w, state, d, position, hidden, token):
    """Run the predictor on a hidden row and the token after it → the row [D] that its head and its next step read."""
    i = c.layers + d
    p, angles = f"blk.{i}.", position * rope_frequencies(c.rotary, c.rope_base)
    own = f"{p}nextn.embed_tokens.weight"
    embedding = w.part(own, token) if own in w else embed(c, w, token)
    norms = (w[f"{p}nextn.{name}.weight"] for name in ("enorm", "hnorm", "eh_proj"))
    x = nextn.join(hidden, embedding, *norms, c.norm_eps)
    x = x + attention(c, w, state, i, angles, rms_norm(x, w[f"{p}attn_norm.weight"], c.norm_eps))
    x = x + feed_forward(c, w, p, rms_norm(x, w[f"{p}post_attention_norm.weight"], c.norm_eps))
    last = f"{p}nextn.shared_head_norm.weight"
    return rms_norm(x, w[last if last in w else "output_norm.weight"], c.norm_eps)


def draft_logits(c, w, d, row):
    """Draft logits [V] of a row of the predictor: its own head where it has one, else the trunk's."""
    own = f"blk.{c.layers + d}.nextn.shared_head_head.weight"
    return linear(c, w, own if own in w else _head(w), row)


def tiny_metadata():
    """Metadata of a tiny plain model with both kinds of block and a NextN block."""
    keys = {
        "block_count": 5,
        "context_length": 65536,
        "embedding_length": 64,
        "vocab_size": 512,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
        "rope.dimension_count": 8,
        "rope.dimension_sections": np.array([2, 1, 1, 0], np.int32),
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 6,
        "ssm.inner_size": 96,
        "full_attention_interval": 4,
        "nextn_predict_layers": 1,
    }
    return {f"qwen35.{key}": value for key, value in keys.items()} | {"tokenizer.ggml.pre": "qwen35"}


def tiny_tensor(name, shape, rng):
    """Decay rates are negative: −exp(A_log)."""
    return -np.exp(rng.standard_normal(shape)).astype(np.float32) if name.endswith("ssm_a") else None
