"""The model families, one module per architecture. All offer the same plain functions:

``Config.from_metadata(artifact, **options)``, ``tensors(config) → (required, optional)``, ``layout(config)`` and
``forward(config, weights, state, token, trace) → logits``; ``ARCHITECTURES`` names what they answer to, ``OPTIONS`` their
switches.
"""

from ..gguf import ArtifactError
from . import deepseek4

FAMILIES = {name: module for module in (deepseek4,) for name in module.ARCHITECTURES}


def of(artifact):
    """The module of the artifact's ``general.architecture``; ArtifactError lists the known ones otherwise."""
    family = FAMILIES.get(artifact.architecture)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ArtifactError(f"{artifact.path.name}: unknown architecture {artifact.architecture!r} (known: {known})")
    return family
