"""DeepSeek V4's predictor (MTP), a sidecar: one window layer behind the trunk, drafting from the trunk's streams.

Row t is made of the streams at t, before the trunk's closing mix, and of token t + 1; it predicts token t + 2. The block has
its own closing mix and norm, and shares the embedding and the head. Source: the layout of the published predictor file.

Letters as in ``deepseek4.py``.
"""

from ..ops import rms_norm
from ..sidecar import bind
from ..state import Ring
from . import deepseek4

SIDECAR = "a file of tensors mtp.0.*"
LONGEST_DRAFT = 8

OWN = "mtp.0."


def recognises(artifact):
    """Whether the file is such a predictor."""
    return f"{OWN}e_proj.weight" in artifact.tensors


def open_sidecar(artifact, target):
    """(config of trunk and predictor, weights of both). ArtifactError where it does not fit the target's shapes."""
    router = artifact.tensors.get(f"{OWN}ffn_gate_inp.weight")
    c = deepseek4.window_blocks(target.config, 1, router.shape[0] if router else target.config.experts)
    D = c.width
    required = deepseek4.window_tensors(c, OWN) | deepseek4.head_tensors(c, f"{OWN}hc_head")
    required |= {f"{OWN}{name}.weight": (D, D) for name in ("e_proj", "h_proj")}
    required |= {f"{OWN}{name}.weight": (D,) for name in ("enorm", "hnorm", "norm")}
    block = f"blk.{c.layers - 1}."
    return c, bind(artifact, target, required, rename=lambda name: name.replace(block, OWN))


def draft_layouts(c):
    """State of the predictor: raw rows of the window."""
    return [{f"{c.layers - 1}.raw": Ring(c.window, (c.head_width,))}]


def draft_input(c, w, h):
    """The predictor's streams of a position: the trunk's last ones h [N, D] there."""
    return h


def draft_block(c, w, state, d, position, hidden, token):
    """Run the predictor on streams [N, D] and the token after them → streams [N, D]."""
    embedding = rms_norm(w.part("token_embd.weight", token), w[f"{OWN}enorm.weight"], c.norm_eps)
    streams = rms_norm(hidden, w[f"{OWN}hnorm.weight"], c.norm_eps) @ w[f"{OWN}h_proj.weight"].T
    streams = streams + w[f"{OWN}e_proj.weight"] @ embedding
    i = c.layers - 1
    return deepseek4.window_layer(
        c, w, i, streams, lambda h: deepseek4.attention(c, w, state, i, position, h, lambda name, array: None)
    )


def draft_logits(c, w, d, streams):
    """Draft logits [V] of the predictor's streams."""
    row = deepseek4.mixed(c, w, f"{OWN}hc_head", streams)
    return w["output.weight"] @ rms_norm(row, w[f"{OWN}norm.weight"], c.norm_eps)
