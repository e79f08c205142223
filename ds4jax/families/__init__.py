"""The arithmetic of the families, one module per architecture beside ds4ref's file of the same name:

``start(c, top, tokens, chunk) → x``, ``layer(c, i, w, state, x) → x``, ``finish(c, top, x) → logits``, ``uses(c, name)``.

More where a family needs it: ``tensors_of(c, artifact)``, its tensors by the names and in the shapes that the others
read, and ``prepare(c, w, before, tokens) → [T, …]``, what the host computes for new ``tokens`` after those ``before`` (w:
:class:`ds4ref.weights.Weights`), a fifth argument of ``start``. ``LAYER_PREFIX``: how names of a layer's tensors begin.
``homes(c)``: the state components that the reference names without a layer's number, and the layer that holds each.
Those that draft, from the model's own file or from a sidecar, have what :mod:`ds4jax.drafting` lists.
"""

from ds4ref.gguf import ArtifactError

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
    bailingmoe3,
    deepseek4,
    dots3note,
    exaone_moe,
    glm5_next,
    glm_dsa,
    inkling,
    k2_horizon,
    mimo2,
    motif3,
    naive_n05_flash,
    qwen35,
    qwen4exp,
    solar_open2,
    step35,
)
SIDECARS = (deepseek4_dspark, deepseek4_mtp, inkling_mtp, mimo2_dflash, naive_n05_flash_dspark, step35_mtp)
"""Modules of drafters in files of their own."""
FAMILIES = {name: module for module in MODULES for name in module.ARCHITECTURES}


def of(artifact):
    """The module of the artifact's architecture; ArtifactError lists those that exist otherwise."""
    family = FAMILIES.get(artifact.architecture)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        name = f"{artifact.path.name}: ds4jax does not implement architecture {artifact.architecture!r}"
        raise ArtifactError(f"{name} (it has: {known})")
    return family


def drafter(module):
    """The module that drafts like a module of ds4ref, which has the same name; None where there is none."""

    def name(module):
        return module.__name__.rsplit(".", 1)[1]

    drafting = (own for own in (*MODULES, *SIDECARS) if hasattr(own, "draft_logits"))
    return next((own for own in drafting if name(own) == name(module)), None)


def tensors(artifact, config):
    """Name → tensor of those that are loaded, by the names and in the shapes that the family's module reads."""
    family = of(artifact)
    return {name: tensor for name, tensor in named(family, config, artifact).items() if family.uses(config, name)}


def named(module, config, artifact):
    """Name → tensor of all that a file holds, by the names and in the shapes that a module of this package reads."""
    return module.tensors_of(config, artifact) if hasattr(module, "tensors_of") else artifact.tensors
