"""Predictor blocks (NextN; multi-token prediction, DeepSeek-V3 report, section 2.2): their tensors, and what all of them do.

A block of the model's own kind reads ``eh_proj [enorm(embedding), hnorm(hidden)]``: the hidden row of a position and the
embedding of the token after it. Its output stands for the hidden row of that token. Knows no family: which block it is, what
it makes of its input and how drafts are chained is for others to say. Letters: D hidden, V vocabulary.
"""

import numpy as np

from .ops import rms_norm


def joint_tensors(prefix, D):
    """Shapes of what joins the hidden row and the next token's embedding into the block's input."""
    return {
        f"{prefix}nextn.eh_proj.weight": (D, 2 * D),
        f"{prefix}nextn.enorm.weight": (D,),
        f"{prefix}nextn.hnorm.weight": (D,),
    }


def own_ends(prefix, D, V):
    """Shapes of an embedding and a head of the predictor's own, in place of the trunk's: optional wherever they occur."""
    return {f"{prefix}nextn.{name}.weight": (V, D) for name in ("embed_tokens", "shared_head_head")}


def join(hidden, embedding, enorm, hnorm, projection, eps):
    """A block's input: ``projection [rms(embedding; enorm) ; rms(hidden; hnorm)]``. Rows and norms [D], projection [D, 2D]."""
    return projection @ np.concatenate([rms_norm(embedding, enorm, eps), rms_norm(hidden, hnorm, eps)])


def joined(w, prefix, hidden, token, eps):
    """:func:`join` with the tensors of :func:`joint_tensors`, and an embedding of the block's own where it has one."""
    own = f"{prefix}nextn.embed_tokens.weight"
    embedding = w.part(own if own in w else "token_embd.weight", token)
    norms = (w[f"{prefix}nextn.{name}.weight"] for name in ("enorm", "hnorm", "eh_proj"))
    return join(hidden, embedding, *norms, eps)


def logits(w, prefix, row):
    """Draft logits [V] of a normalised row [D]: the block's own head where it has one, else the trunk's."""
    own = f"{prefix}nextn.shared_head_head.weight"
    return w[own if own in w else "output.weight"] @ row
