"""Naive-N0.5-Flash's DSpark, a sidecar: a few layers that propose a block of tokens at once.

The block's first row is the last sampled token, the others a learned vector; the first predicts nothing. A low-rank table of
token pairs (the Markov head) joins the logits of each row with the token chosen before it. Embedding and head are the target's.
Source: the published source equations of the draft.

Letters as in ``noise.py``; V vocabulary, r Markov rank.
"""

from dataclasses import dataclass

import numpy as np

from .. import noise
from ..gguf import Keys
from ..sidecar import agree, bind, refuse

SIDECAR = "architecture 'naive_n05_flash_dspark'"


@dataclass(frozen=True)
class Config:
    layers: noise.Layers
    block: int
    proposals: int
    vocabulary: int
    rank: int


def recognises(artifact):
    """Whether the file is such a drafter."""
    return artifact.metadata.get("general.architecture") == "naive_n05_flash_dspark"


def open_sidecar(artifact, target):
    """(config, weights of drafter and target). ArtifactError where it does not fit the target."""
    k = Keys(artifact, "naive_draft.")
    head_width = k.int("attention.head_dim", lo=2)
    block = k.int("block_size", lo=2, hi=256)
    layers = noise.Layers(
        count=k.int("block_count", lo=1, hi=64),
        width=k.int("embedding_length", lo=1),
        heads=k.int("attention.head_count", lo=1),
        kv_heads=k.int("attention.head_count_kv", lo=1),
        head_width=head_width,
        feed_forward=k.int("feed_forward_length", lo=1),
        window=k.int("attention.sliding_window", lo=1),
        norm_eps=k.float("attention.layer_norm_rms_epsilon", lo=0.0),
        rotary=k.int("rope.dimension_count", lo=2, hi=head_width),
        rope_base=k.float("rope.freq_base", lo=1.0),
        targets=k.ints("target.layer_ids", lo=0),
    )
    layers.check(k)
    proposals = k.int("proposal_count", lo=1, hi=block - 1)
    c = Config(layers, block, proposals, k.int("vocab_size", lo=1), k.int("markov_rank", lo=1))
    _check(k, artifact, target, c)
    D, V = layers.width, c.vocabulary
    required = noise.tensors(layers) | {
        "mask_embedding.weight": (D,),
        "markov_w1.weight": (V, c.rank),
        "markov_w2.weight": (V, c.rank),
        "confidence_head.weight": (1, D + c.rank),
        "confidence_head.bias": (1,),
    }
    return c, bind(artifact, target, required)


def _check(k, artifact, target, c):
    """Refuse another target, and variants of the draft that are not written here."""
    base = target.config
    k.str("target.architecture", default="naive_n05_flash", choices=("naive_n05_flash",))
    agree(artifact, target, {"the width": (c.layers.width, base.width), "the vocabulary": (c.vocabulary, base.vocabulary)})
    if not c.layers.targets or max(c.layers.targets) >= base.layers:
        raise refuse(artifact, target, f"it reads layers {list(c.layers.targets)} of {base.layers}")
    k.str("target.feature_kind", choices=("post_layer_hidden_concat",))
    k.int("target.hidden_state_offset", lo=1, hi=1)
    k.str("rope.layout", choices=("split_half",))
    k.str("markov_head_type", choices=("vanilla",))
    switches = {
        "target.shared_token_embedding": True,
        "target.shared_output": True,
        "use_target_kv": False,
        "attention.causal": False,
        "use_mask_embedding": True,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    for name, wanted in switches.items():
        if k.bool(name) != wanted:
            raise k.error(name, not wanted, str(wanted).lower())


def taps(c):
    """The traced outputs that ``commit`` reads."""
    return noise.taps(c.layers)


def draft_length(c):
    """Tokens of a proposal."""
    return c.proposals


def draft_layout(c):
    """State: keys and values of the last positions, by layer."""
    return noise.layout(c.layers)


def ready(c, state, start):
    """Whether it can draft: after any committed position."""
    return state.length > 0


def commit(c, w, state, position, outputs):
    """Keep a committed position. outputs: of the target layers, each [D]."""
    noise.commit(c.layers, w, state, position, outputs)


def draft_rows(c, w, state, position, anchor, count):
    """Rows [proposals, D]; row i predicts the token at position + i + 1. anchor: the token at ``position``."""
    block = [w.part("token_embd.weight", anchor), *[w["mask_embedding.weight"]] * (c.block - 1)]
    return noise.block_rows(c.layers, w, state, position, np.stack(block))[1 : c.proposals + 1]


def draft_logits(c, w, row, previous):
    """Draft logits [V] of a row, after the token ``previous``."""
    return w["output.weight"] @ row + w["markov_w2.weight"] @ w.part("markov_w1.weight", previous)


def confidence(c, w, row, previous):
    """The drafter's own estimate, any number, of the draft from ``row`` after ``previous``. For diagnosis."""
    pair = np.concatenate([row, w.part("markov_w1.weight", previous)])
    return (w["confidence_head.weight"] @ pair + w["confidence_head.bias"])[0]
