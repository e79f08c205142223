"""The model families, one module per architecture. All offer the same plain functions:

``Config.from_metadata(artifact, **options)``, ``tensors(config) → (required, optional)``, ``layout(config)`` and
``forward(config, weights, state, token, trace) → logits``; ``ARCHITECTURES`` names what they answer to, ``OPTIONS`` their
switches. Those with predictor blocks also offer what ``drafting`` lists; drafters in files of their own are in ``SIDECARS``.
"""

from ..gguf import ArtifactError
from . import (
    bailingmoe3,
    deepseek4,
    deepseek4_dspark,
    deepseek4_mtp,
    dots3note,
    exaone_moe,
    glm5_next,
    glm_dsa,
    inkling,
    inkling_mtp,
    k2_horizon,
    mimo2,
    mimo2_dflash,
    motif3,
    naive_n05_flash,
    naive_n05_flash_dspark,
    qwen4exp,
    qwen35,
    solar_open2,
    step35,
    step35_mtp,
)

MODULES = (
    bailingmoe3, deepseek4, dots3note, exaone_moe, glm5_next, glm_dsa, inkling, k2_horizon, mimo2, motif3,
    naive_n05_flash, qwen35, qwen4exp, solar_open2, step35,
)  # fmt: skip
FAMILIES = {name: module for module in MODULES for name in module.ARCHITECTURES}
SIDECARS = {
    "deepseek4": (deepseek4_mtp, deepseek4_dspark),
    "inkling": (inkling_mtp,),
    "mimo2": (mimo2_dflash,),
    "naive_n05_flash": (naive_n05_flash_dspark,),
    "step35": (step35_mtp,),
}
"""Architecture → the modules of its drafters in files of their own."""


def of(artifact):
    """The module of the artifact's ``general.architecture``; ArtifactError lists the known ones otherwise."""
    family = FAMILIES.get(artifact.architecture)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ArtifactError(f"{artifact.path.name}: unknown architecture {artifact.architecture!r} (known: {known})")
    return family
