"""DeepSeek V4's DSpark, a sidecar: a few window layers that propose a block of tokens at once.

Every committed position leaves one row per stage, made of the trunk's streams after some layers. A block is the last sampled
token and tokens of noise, at the positions that follow; its rows see the committed ones and each other, in both directions.
A low-rank table of token pairs (the Markov head) joins the logits of each row with the token chosen before it. Source: the
layout of the published drafter.

Letters as in ``deepseek4.py``; m target layers, B rows of a block.
"""

from dataclasses import dataclass

import numpy as np

from ..gguf import Keys
from ..ops import rms_norm, rope_frequencies, sigmoid
from ..sidecar import agree, bind, refuse
from ..state import Ring
from . import deepseek4

SIDECAR = "architecture 'deepseek4-dspark'"


@dataclass(frozen=True)
class Config:
    """trunk: the target's config with the stages as layers behind it; first: the index of the first stage."""

    trunk: deepseek4.Config
    first: int
    block: int
    rank: int
    noise: int
    targets: tuple[int, ...]

    @property
    def stages(self):
        return range(self.first, self.trunk.layers)


def recognises(artifact):
    """Whether the file is such a drafter."""
    return artifact.metadata.get("general.architecture") == "deepseek4-dspark"


def open_sidecar(artifact, target):
    """(config, weights of drafter and target). ArtifactError where it does not fit the target."""
    k, base = Keys(artifact, "deepseek4.dspark."), target.config
    stages = k.int("layer_count", lo=1, hi=64)
    targets = k.ints("target_layers", lo=0)
    if not targets or max(targets) >= base.layers:
        raise refuse(artifact, target, f"it reads layers {list(targets)} of {base.layers}")
    trunk = deepseek4.window_blocks(base, stages, k.int("expert_count", lo=base.experts_used))
    c = Config(trunk, base.layers, k.int("block_size", lo=1, hi=256), k.int("markov_rank", lo=1), k.int("noise_token_id", lo=0),
               targets)  # fmt: skip
    if c.noise >= base.vocabulary:
        raise refuse(artifact, target, f"its noise token {c.noise} is outside the vocabulary of {base.vocabulary}")
    D, V = trunk.width, trunk.vocabulary
    table = artifact.tensors.get("dspark.markov_w1.weight")
    agree(artifact, target, {"the vocabulary": (table.shape[0] if table else V, V)})
    required = {
        "dspark.main_proj.weight": (D, len(targets) * D),
        "dspark.main_norm.weight": (D,),
        "dspark.markov_w1.weight": (V, c.rank),
        "dspark.markov_w2.weight": (V, c.rank),
        "dspark.conf_proj.weight": (1, D + c.rank),
        "dspark.norm.weight": (D,),
        **deepseek4.head_tensors(trunk, "dspark.hc_head"),
    }
    names = {f"blk.{i}.": f"dspark.{i - c.first}." for i in c.stages}
    for own in names.values():
        required |= deepseek4.window_tensors(trunk, own)

    def rename(name):
        block = ".".join(name.split(".")[:2]) + "."
        return names[block] + name.removeprefix(block) if block in names else name

    return c, bind(artifact, target, required, rename=rename)


def taps(c):
    """The traced streams that ``commit`` reads."""
    return tuple(f"h_{i}" for i in c.targets)


def draft_length(c):
    """Tokens of a proposal."""
    return c.block


def draft_layout(c):
    """State: one raw row per stage of the last positions."""
    return {f"{i}.raw": Ring(c.trunk.window, (c.trunk.head_width,)) for i in c.stages}


def ready(c, state, start):
    """Whether it can draft: after any committed position."""
    return state.length > 0


def commit(c, w, state, position, streams):
    """Keep a committed position. streams: of the target layers, each [N, D]."""
    t, angles = c.trunk, _angles(c, position)
    joint = w["dspark.main_proj.weight"] @ np.concatenate([np.mean(s, axis=0) for s in streams])
    row = rms_norm(joint, w["dspark.main_norm.weight"], t.norm_eps)
    for i in c.stages:
        state[f"{i}.raw"].append(deepseek4.raw_row(t, w, f"blk.{i}.", row, angles))


def _angles(c, position):
    return position * rope_frequencies(c.trunk.rotary, c.trunk.rope_base)


def draft_rows(c, w, state, position, anchor, count):
    """Rows [B, D] before the last norm; row i predicts the token at position + i + 1. anchor: the token at ``position``."""
    t = c.trunk
    tokens = [anchor, *[c.noise] * (c.block - 1)]
    angles = [_angles(c, position + r) for r in range(c.block)]
    rows = [np.tile(w.part("token_embd.weight", token), (t.streams, 1)) for token in tokens]
    for i in c.stages:
        rows = _stage(c, w, i, state[f"{i}.raw"].rows(), rows, angles)
    return np.stack([deepseek4.mixed(t, w, "dspark.hc_head", streams) for streams in rows])


def _stage(c, w, i, committed, rows, angles):
    """One stage on the streams of all rows of the block. The rows' inputs must all be known before the first one reads."""
    t, p = c.trunk, f"blk.{i}."
    inputs = [deepseek4.entered(t, w, p, "attn", streams)[0] for streams in rows]
    own = np.stack([deepseek4.raw_row(t, w, p, h, a) for h, a in zip(inputs, angles, strict=True)])
    seen = np.concatenate([committed, own])
    return [
        deepseek4.window_layer(t, w, i, s, lambda h, a=a: deepseek4.read(t, w, p, deepseek4.queries(t, w, p, h, a)[1], seen, a))
        for s, a in zip(rows, angles, strict=True)
    ]


def draft_logits(c, w, row, previous):
    """Draft logits [V] of a row, after the token ``previous``."""
    base = w["output.weight"] @ rms_norm(row, w["dspark.norm.weight"], c.trunk.norm_eps)
    return base + w["dspark.markov_w2.weight"] @ w.part("dspark.markov_w1.weight", previous)


def confidence(c, w, row, previous):
    """The drafter's own estimate, from 0 to 1, that the draft from ``row`` after ``previous`` is right. For diagnosis."""
    pair = np.concatenate([row, w.part("dspark.markov_w1.weight", previous)])
    return sigmoid(w["dspark.conf_proj.weight"] @ pair)[0]
