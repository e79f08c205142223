"""MiMo-V2.6-Flash's DFlash, a sidecar: a few layers that propose a block of tokens at once.

The block's first row is the last sampled token, the others a mask token; the first predicts nothing. Embedding and head are the
target's. Source: the layout of llama.cpp's converter.

Letters as in ``noise.py``.
"""

from dataclasses import dataclass

import numpy as np

from .. import noise
from ..gguf import Keys
from ..sidecar import agree, bind, refuse

SIDECAR = "architecture 'dflash'"

# The numbers of the published drafter, for files that do not name them.
VALUE_SCALE = 0.612
MASK = 151675


@dataclass(frozen=True)
class Config:
    layers: noise.Layers
    block: int
    mask: int


def recognises(artifact):
    """Whether the file is such a drafter."""
    return artifact.metadata.get("general.architecture") == "dflash"


def open_sidecar(artifact, target):
    """(config, weights of drafter and target). ArtifactError where it does not fit the target."""
    k, base = Keys(artifact, "dflash."), target.config
    count, head_width = k.int("block_count", lo=1, hi=64), k.int("attention.key_length", lo=2)
    layers = noise.Layers(
        count=count,
        width=k.int("embedding_length", lo=1),
        heads=k.int("attention.head_count", lo=1),
        kv_heads=k.int("attention.head_count_kv", lo=1),
        head_width=head_width,
        feed_forward=k.int("feed_forward_length", lo=1),
        window=k.int("attention.sliding_window", lo=1),
        norm_eps=k.float("attention.layer_norm_rms_epsilon", lo=0.0),
        rotary=k.int("rope.dimension_count", lo=2, hi=head_width),
        rope_base=k.float("rope.freq_base", lo=1.0),
        # The file counts the inputs of layers: 1 is what layer 0 puts out.
        targets=tuple(i - 1 for i in k.ints("target_layers", lo=1)),
        value_scale=k.float("attention.value_scale", default=VALUE_SCALE),
        sinks=True,
    )
    layers.check(k)
    k.int("attention.value_length", default=head_width, lo=head_width, hi=head_width)
    if k.bool("attention.causal", default=False):
        raise k.error("attention.causal", True, "false")
    if not all(k.bools("attention.sliding_window_pattern", n=count, default=(True,) * count)):
        raise k.error("attention.sliding_window_pattern", False, "true for every layer")
    agree(artifact, target, {"the width": (layers.width, base.width)})
    if not layers.targets or max(layers.targets) >= base.layers:
        raise refuse(artifact, target, f"it reads layers {list(layers.targets)} of {base.layers}")
    mask = Keys(artifact).int("tokenizer.ggml.mask_token_id", default=MASK, lo=0)
    if mask >= base.vocabulary:
        raise refuse(artifact, target, f"its mask token {mask} is outside the vocabulary of {base.vocabulary}")
    c = Config(layers, k.int("block_size", lo=2, hi=256), mask)
    return c, bind(artifact, target, noise.tensors(layers))


def taps(c):
    """The traced outputs that ``commit`` reads."""
    return noise.taps(c.layers)


def draft_length(c):
    """Tokens of a proposal."""
    return c.block - 1


def draft_layout(c):
    """State: keys and values of the last positions, by layer."""
    return noise.layout(c.layers)


def ready(c, state, start):
    """Whether it can draft: once it knows all positions of its window."""
    return state.length >= (1 if start == 0 else c.layers.window)


def commit(c, w, state, position, outputs):
    """Keep a committed position. outputs: of the target layers, each [D]."""
    noise.commit(c.layers, w, state, position, outputs)


def draft_rows(c, w, state, position, anchor, count):
    """Rows [count, D]; row i predicts the token at position + i + 1. anchor: the token at ``position``."""
    block = [w.part("token_embd.weight", token) for token in [anchor, *[c.mask] * count]]
    return noise.block_rows(c.layers, w, state, position, np.stack(block))[1:]


def draft_logits(c, w, row, previous):
    """Draft logits [V] of a row, whatever token is chosen before it."""
    return w["output.weight"] @ row
