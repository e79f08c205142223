"""Inkling's draft blocks, a sidecar: dense blocks of the trunk's kind, each one token further ahead than the one before.

Block k reads the hidden row of a position (hidden part first) and the token k + 1 later, normalised by the trunk's embedding
norm and then by its own; transformers leaves the trunk's norm out, the published engine does not. Outputs go from block to
block as they are. Embedding and head are the trunk's. A local block has the local heads and extent, but no window: as in
transformers, it sees every position. Source: the published checkpoint's tensors and configuration.

Letters as in ``inkling.py``.
"""

from dataclasses import dataclass

import numpy as np

from ..gguf import Keys
from ..ops import rms_norm
from ..sidecar import agree, bind
from ..state import Rows
from . import inkling

SIDECAR = "architecture 'inkling' with inkling.mtp.sidecar true"
LONGEST_DRAFT = 1  # of a single block; several draft one token each

FIELDS = (
    "hidden_size", "vocab_size", "unpadded_vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "d_rel", "rel_extent", "sliding_window_size", "sconv_kernel_size", "rms_norm_eps", "dense_intermediate_size",
    "logits_mup_width_multiplier",
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """local: of each draft block, whether its heads are those of the trunk's local blocks."""

    trunk: inkling.Config
    local: tuple[bool, ...]


def recognises(artifact):
    """Whether the file holds draft blocks of this architecture."""
    own = artifact.metadata.get("general.architecture"), artifact.metadata.get("inkling.mtp.sidecar")
    return own == ("inkling", True)


def open_sidecar(artifact, target):
    """(config, weights of draft blocks and trunk). ArtifactError where they do not belong to the target."""
    Keys(artifact, "inkling.").str("tensor_layout", choices=("source-interleaved-v1",))
    k, base = inkling.embedded_keys(artifact), inkling.embedded_keys(target.artifact)

    def value(keys, name):
        return keys.metadata.get(f"{inkling.CONFIG_KEY}/text_config.{name}")

    agree(artifact, target, {name: (value(k, name), value(base, name)) for name in FIELDS})
    blocks = k.int("mtp_config.num_nextn_predict_layers", lo=1, hi=64)
    if k.bool("mtp_config.chain_hidden_post_norm", default=False):
        raise k.error("mtp_config.chain_hidden_post_norm", True, "false")
    local = set(k.ints("mtp_config.local_layer_ids", lo=0, hi=blocks - 1))
    c = Config(target.config, tuple(i in local for i in range(blocks)))
    D, required = c.trunk.width, {}
    for i, is_local in enumerate(c.local):
        p = _prefix(i)
        required |= {f"{p}embed_norm.weight": (D,), f"{p}hidden_norm.weight": (D,), f"{p}input_proj.weight": (D, 2 * D)}
        required |= inkling.block_tensors(c.trunk, f"{p}transformer_block.", is_local)
    return c, bind(artifact, target, required)


def _prefix(i):
    return f"model.mtp.layers.{i}."


def draft_layouts(c):
    """State of each draft block: what a block of the trunk keeps, but keys and values of every position."""
    return [
        {name: Rows(kind.shape) if name in (f"{i}.k", f"{i}.v") else kind for name, kind in _trunk_layout(c, i).items()}
        for i in range(len(c.local))
    ]


def _trunk_layout(c, i):
    return inkling.block_layout(c.trunk, i, c.local[i])


def draft_input(c, w, h):
    """Block 0's hidden row of a position: the trunk's last output h [D] there, normalised."""
    return rms_norm(h, w["model.llm.norm.weight"], c.trunk.norm_eps)


def draft_block(c, w, state, d, position, hidden, token):
    """Run draft block d on the hidden row of ``position`` and the token d + 1 later → its output [D].

    The position that sharpens a global block's scores is the token's.
    """
    p, t = _prefix(d), c.trunk
    row = rms_norm(hidden, w[f"{p}hidden_norm.weight"], t.norm_eps)
    embedding = rms_norm(inkling.embed(t, w, token), w[f"{p}embed_norm.weight"], t.norm_eps)
    x = w[f"{p}input_proj.weight"] @ np.concatenate([row, embedding])
    return inkling.block(
        t, w, state, d, f"{p}transformer_block.", x, position + d + 1, lambda name, array: None, local=c.local[d], dense=True
    )


def draft_logits(c, w, d, row):
    """Draft logits [V] of a block's output."""
    return inkling.head(c.trunk, w, row)
