"""Step 3.7 Flash's predictor blocks in a file of their own. What they compute is in ``step35.py``.

The sidecar repeats the model's keys, with as many blocks more as it holds, and the tensors that all blocks share.
"""

from dataclasses import fields, replace

from ..sidecar import agree, bind
from .step35 import (
    LONGEST_DRAFT,
    Config,
    draft_block,
    draft_input,
    draft_layouts,
    draft_logits,
    is_sidecar,
    tensors,
)

__all__ = [
    "LONGEST_DRAFT", "SIDECAR", "draft_block", "draft_input", "draft_layouts", "draft_logits", "open_sidecar", "recognises",
]  # fmt: skip

SIDECAR = "architecture 'step35' with predictor blocks only"


def recognises(artifact):
    """Whether the file holds predictor blocks of this architecture and nothing else."""
    return artifact.metadata.get("general.architecture") == "step35" and is_sidecar(artifact)


def open_sidecar(artifact, target):
    """(config, weights of predictors and trunk). ArtifactError where the keys differ from the target's."""
    c, base = Config.of_blocks(artifact), target.config
    trunk = {name: value[: base.layers] for name, value in vars(c).items() if isinstance(value, tuple)}
    trunk = replace(c, predictors=base.predictors, **trunk)
    names = [field.name for field in fields(Config) if field.name != "predictors"]
    agree(artifact, target, {name: (getattr(trunk, name), getattr(base, name)) for name in names})
    return c, bind(artifact, target, *tensors(c, first=c.layers))
