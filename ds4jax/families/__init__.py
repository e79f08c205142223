"""The arithmetic of the families, one module per architecture beside ds4ref's file of the same name:

``start(c, top, tokens, chunk) → x``, ``layer(c, i, w, state, x) → x``, ``finish(c, top, x) → logits``, ``uses(c, name)``.

More where a family needs it: ``tensors_of(c, artifact)``, its tensors by the names and in the shapes that the others
read, and ``prepare(c, w, before, tokens) → [T, …]``, what the host computes for new ``tokens`` after those ``before`` (w:
:class:`ds4ref.weights.Weights`), a fifth argument of ``start``. ``LAYER_PREFIX``: how names of a layer's tensors begin.
``homes(c)``: the state components that the reference names without a layer's number, and the layer that holds each.
"""

from ds4ref.gguf import ArtifactError

from . import (
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
    qwen4exp,
    qwen35,
    solar_open2,
    step35,
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
FAMILIES = {name: module for module in MODULES for name in module.ARCHITECTURES}


def of(artifact):
    """The module of the artifact's architecture; ArtifactError lists those that exist otherwise."""
    family = FAMILIES.get(artifact.architecture)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        name = f"{artifact.path.name}: ds4jax does not implement architecture {artifact.architecture!r}"
        raise ArtifactError(f"{name} (it has: {known})")
    return family


def tensors(artifact, config):
    """Name → tensor of those that are loaded, by the names and in the shapes that the family's module reads."""
    family = of(artifact)
    found = family.tensors_of(config, artifact) if hasattr(family, "tensors_of") else artifact.tensors
    return {name: tensor for name, tensor in found.items() if family.uses(config, name)}
