"""K2-Horizon 375B A23B: plain grouped-query attention in every layer, half of each head rotated, routed experts.

The first blocks are dense, the others add routed experts and one shared expert. No window, no normalisation of queries or
keys, no biases, no predictor. Sources: the K2-Horizon release, DeepSeek-V3 (router) and the layout of the published GGUF
files.

Letters: D hidden, H heads, G key/value heads, d head width, n rotary width, E experts, F feed-forward width, V vocabulary.
Knows nothing about the siblings that share the architecture string and use more of it (grouped norms, an output gate,
routed values, tied heads): their files are refused by name.
"""

from dataclasses import dataclass

from .. import moe
from ..attention import attend
from ..gguf import REQUIRED, ArtifactError, Keys
from ..ops import rms_norm, rope_frequencies, rotate_head
from ..state import Rows

ARCHITECTURES = ("k2-horizon",)
OPTIONS = {}

SIBLINGS = "the K2-Horizon siblings (0.9B, 3.7B, 7B, 32B, MoVA-36B-A4B)"
MOVA = "the K2-Horizon sibling MoVA-36B-A4B"
SIBLING_TENSORS = {"attn_v_exps": MOVA, "attn_v_gate": MOVA, "attn_gate": SIBLINGS, "attn_q_norm": SIBLINGS}


@dataclass(frozen=True)
class Config:
    layers: int
    context: int
    width: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_width: int
    norm_eps: float
    rotary: int
    rope_base: float
    dense_layers: int
    dense_width: int
    experts: int
    experts_used: int
    expert_width: int
    shared_width: int
    expert_scale: float

    @classmethod
    def from_metadata(cls, artifact):
        """Read and validate every key the model relies on. ArtifactError names the key that is missing or off."""
        k = Keys(artifact, "k2-horizon.")
        _refuse_siblings(artifact, k)
        embedding = artifact.tensors.get("token_embd.weight")  # tells V: the published engine asks for no key
        layers = k.int("block_count", lo=1, hi=1024)
        experts = k.int("expert_count", lo=1)
        expert_width = k.int("expert_feed_forward_length", lo=1)
        config = cls(
            layers=layers,
            context=k.int("context_length", lo=1),
            width=k.int("embedding_length", lo=1),
            vocabulary=k.int("vocab_size", default=REQUIRED if embedding is None else embedding.shape[0], lo=1),
            heads=k.int("attention.head_count", lo=1),
            kv_heads=k.int("attention.head_count_kv", lo=1),
            head_width=k.int("attention.key_length", lo=2),
            norm_eps=k.float("attention.layer_norm_rms_epsilon", lo=0.0),
            rotary=k.int("rope.dimension_count", lo=2),
            rope_base=k.float("rope.freq_base", lo=1.0),
            dense_layers=k.int("leading_dense_block_count", default=0, lo=0, hi=layers),
            dense_width=k.int("feed_forward_length", lo=1),
            experts=experts,
            experts_used=k.int("expert_used_count", lo=1, hi=experts),
            expert_width=expert_width,
            shared_width=k.int("expert_shared_feed_forward_length", default=expert_width, lo=1),
            expert_scale=k.float("expert_weights_scale", default=1.0),
        )
        k.int("attention.value_length", lo=config.head_width, hi=config.head_width)
        k.str("rope.scaling.type", default="none", choices=("none",))
        k.int("moe_every_n_layers", default=1, lo=1, hi=1)
        k.int("nextn_predict_layers", default=0, lo=0, hi=0)
        k.int("expert_shared_count", lo=1, hi=1)
        k.int("expert_group_count", default=1, lo=0, hi=1)
        if (gating := k.int("expert_gating_func", default=2)) not in (0, 2):
            raise k.error("expert_gating_func", gating, "2 (sigmoid), or 0, which stands for it")
        if not k.bool("expert_weights_norm", default=True):
            raise k.error("expert_weights_norm", False, "true")
        if config.rotary % 2 or config.rotary > config.head_width:
            raise k.error("rope.dimension_count", config.rotary, f"an even number up to {config.head_width}")
        if config.heads % config.kv_heads:
            raise k.error("attention.head_count_kv", config.kv_heads, f"a divisor of {config.heads} heads")
        return config


def _refuse_siblings(artifact, k):
    """ArtifactError for the models that share the architecture string but are another graph, by what only they have."""
    if experts := k.int("attention.value_expert_count", default=0, lo=0):
        accepted = f"0, since routed values belong to {MOVA}, which this does not run"
        raise k.error("attention.value_expert_count", experts, accepted)
    if (groups := k.int("attention.group_norm_groups", default=1, lo=1)) != 1:
        accepted = f"1, since grouped norms belong to {SIBLINGS}, which this does not run"
        raise k.error("attention.group_norm_groups", groups, accepted)
    for kind, sibling in SIBLING_TENSORS.items():
        if name := next((name for name in artifact.tensors if f".{kind}." in name), None):
            raise ArtifactError(f"{artifact.path.name}: tensor {name!r} belongs to {sibling}, which this does not run")


def tensors(c):
    """(required, optional): tensor name → shape."""
    D, d = c.width, c.head_width
    required = {"token_embd.weight": (c.vocabulary, D), "output.weight": (c.vocabulary, D), "output_norm.weight": (D,)}
    for i in range(c.layers):
        p = f"blk.{i}."
        required |= {
            f"{p}attn_norm.weight": (D,),
            f"{p}attn_q.weight": (c.heads * d, D),
            f"{p}attn_k.weight": (c.kv_heads * d, D),
            f"{p}attn_v.weight": (c.kv_heads * d, D),
            f"{p}attn_output.weight": (D, c.heads * d),
            f"{p}ffn_norm.weight": (D,),
        }
        if i < c.dense_layers:
            required |= moe.dense_tensors(p, D, c.dense_width)
        else:
            required |= moe.router_tensors(p, c.experts, D) | moe.expert_tensors(p, c.experts, D, c.expert_width)
            required |= moe.shared_tensors(p, D, c.shared_width)
    return required, {}


def layout(c):
    """State components: rotated keys and values of every position, by layer."""
    return {f"{i}.{part}": Rows((c.kv_heads, c.head_width)) for i in range(c.layers) for part in "kv"}


def forward(c, w, state, token, trace):
    """Advance ``state`` by one token and return its logits [V]. ``trace(name, array)`` sees the parts by name."""
    angles = state.length * rope_frequencies(c.rotary, c.rope_base)
    x = w.part("token_embd.weight", token)
    trace("embed", x)
    for i in range(c.layers):
        p = f"blk.{i}."
        y = attention(c, w, state, i, angles, rms_norm(x, w[f"{p}attn_norm.weight"], c.norm_eps))
        trace(f"attn_{i}", y)
        x = x + y
        y = feed_forward(c, w, i, rms_norm(x, w[f"{p}ffn_norm.weight"], c.norm_eps))
        trace(f"ffn_{i}", y)
        x = x + y
        trace(f"h_{i}", x)
    return w["output.weight"] @ rms_norm(x, w["output_norm.weight"], c.norm_eps)


def attention(c, w, state, i, angles, h):
    """Grouped-query attention of layer i over all tokens so far, on its normalised input h [D] → [D]."""
    p = f"blk.{i}."
    q, k, v = ((w[f"{p}attn_{part}.weight"] @ h).reshape(-1, c.head_width) for part in "qkv")
    state[f"{i}.k"].append(rotate_head(k, angles))
    state[f"{i}.v"].append(v)
    out = attend(rotate_head(q, angles), state[f"{i}.k"].rows(), state[f"{i}.v"].rows(), c.head_width**-0.5)
    return w[f"{p}attn_output.weight"] @ out.reshape(-1)


def feed_forward(c, w, i, h):
    """Dense SwiGLU in the first layers, else routed experts plus the shared one, on the normalised input h [D] → [D]."""
    p = f"blk.{i}."
    if i < c.dense_layers:
        return moe.dense(h, w, p)
    return moe.sigmoid_experts(h, w, p, c.experts_used, c.expert_scale) + moe.shared_expert(h, w, p)


def tiny_metadata():
    """Metadata of a tiny model with both layer kinds, dense and routed."""
    keys = {
        "block_count": 4,
        "context_length": 65536,
        "embedding_length": 64,
        "vocab_size": 512,
        "feed_forward_length": 96,
        "leading_dense_block_count": 1,
        "moe_every_n_layers": 1,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.group_norm_groups": 1,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": 8,
        "rope.freq_base": 1e7,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 16,
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": 16,
        "expert_gating_func": 2,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
    }
    return {f"k2-horizon.{key}": value for key, value in keys.items()} | {"tokenizer.ggml.pre": "k2-horizon"}
