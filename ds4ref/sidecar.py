"""Drafters in files of their own: held to the model they are for, and read together with it.

Knows no family. A sidecar's identity is its shapes, and what its keys say of the target; its module knows which.
"""

from .gguf import ArtifactError
from .weights import Weights, check


def refuse(artifact, target, why):
    """The error for a sidecar that does not fit ``target`` (a model); ``why`` is a phrase."""
    return ArtifactError(f"{artifact.path.name}: does not fit {target.artifact.path.name}: {why}")


def agree(artifact, target, pairs):
    """ArtifactError for the first of ``pairs``, name → (the sidecar's value, the target's), that differs."""
    for name, (own, wanted) in pairs.items():
        if own != wanted:
            raise refuse(artifact, target, f"{name} is {own}, the model's is {wanted}")


def same_vocabulary(artifact, target):
    """ArtifactError where a sidecar that carries a vocabulary carries another one than its target."""
    key = "tokenizer.ggml.tokens"
    own, theirs = artifact.metadata.get(key), target.artifact.metadata.get(key)
    if own is None or theirs is None:
        return
    agree(artifact, target, {"the vocabulary's size": (len(own), len(theirs))})
    for i, (a, b) in enumerate(zip(own, theirs, strict=True)):
        if a != b:
            raise refuse(artifact, target, f"token {i} is {a!r}, the model's is {b!r}")


def bind(artifact, target, required, optional=(), rename=lambda name: name):
    """Weights of a sidecar, and behind them those of its target. ArtifactError names the first tensor that does not fit.

    required, optional: name → shape; rename: the name asked for → the sidecar's.
    """
    problems = check(artifact, required, dict(optional))
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise refuse(artifact, target, f"{problems[0]}{more}")
    return Joined(Weights(artifact, target.dtype), target.weights, rename)


class Joined:
    """Tensors of a sidecar under other names, and behind them those of its target."""

    def __init__(self, sidecar, target, rename):
        self._sidecar, self._target, self._rename = sidecar, target, rename
        self.dtype = target.dtype

    def __contains__(self, name):
        return self._rename(name) in self._sidecar or name in self._target

    def __getitem__(self, name):
        own = self._rename(name)
        return self._sidecar[own] if own in self._sidecar else self._target[name]

    def part(self, name, index):
        own = self._rename(name)
        return self._sidecar.part(own, index) if own in self._sidecar else self._target.part(name, index)
