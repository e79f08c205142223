"""The tensors of an artifact as a family asks for them: checked once against what it binds, dequantised on demand.

Knows nothing about architectures. A whole tensor is dequantised the first time it is read and kept while it fits the
cache; ``part`` reads one entry of a stacked tensor (one expert, one embedding row) without touching the rest.
"""

from collections import OrderedDict

import numpy as np

from .gguf import ArtifactError

CACHE_BYTES = 4 << 30


def bind(artifact, required, optional=(), dtype=np.float32, cache_bytes=CACHE_BYTES):
    """Check every tensor of ``artifact`` and return its :class:`Weights`.

    required, optional: name → shape in numpy order ([out, in]), or a tuple of accepted shapes. ArtifactError names the
    first tensor that is missing, misshapen, or that the family does not know (weights nobody multiplies are a model
    nobody implements).
    """
    optional = dict(optional)
    problems = check(artifact, required, optional)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ArtifactError(f"{artifact.path.name}: {problems[0]}{more}")
    return Weights(artifact, dtype, cache_bytes)


def check(artifact, required, optional):
    """Every way in which the artifact's tensors differ from what is expected, one sentence part each."""
    problems = [f"tensor {name!r} is missing" for name in required if name not in artifact.tensors]
    for name, tensor in artifact.tensors.items():
        shape = required.get(name) or optional.get(name)
        if shape is None:
            problems.append(f"tensor {name!r} {list(tensor.shape)} is not part of architecture {artifact.architecture!r}")
            continue
        accepted = [shape] if not isinstance(shape[0], tuple) else list(shape)
        if tensor.shape not in accepted:
            wanted = " or ".join(str(list(s)) for s in accepted)
            problems.append(f"tensor {name!r} has shape {list(tensor.shape)}, expected {wanted}")
    return problems


class Weights:
    """Read access by name. Floats come in ``dtype``; integer tensors in their own type. Arrays are read-only."""

    def __init__(self, artifact, dtype=np.float32, cache_bytes=CACHE_BYTES):
        self.artifact = artifact
        self.dtype = dtype
        self._limit = cache_bytes
        self._held = 0
        self._cache = OrderedDict()

    def __contains__(self, name):
        return name in self.artifact.tensors

    def __getitem__(self, name):
        """The whole tensor, in numpy order."""
        return self._cached((name, None), lambda: self.artifact.tensors[name].dequantize(self.dtype))

    def part(self, name, index):
        """Entry ``index`` along the first axis of a tensor: an expert's matrix, an embedding row."""
        return self._cached((name, index), lambda: self.artifact.tensors[name].slice(index, self.dtype))

    def _cached(self, key, read):
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        array = np.ascontiguousarray(read())
        array.flags.writeable = False
        if array.nbytes <= self._limit:
            self._cache[key] = array
            self._held += array.nbytes
            while self._held > self._limit:
                self._held -= self._cache.popitem(last=False)[1].nbytes
        return array
