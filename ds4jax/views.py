"""Tensors made of an artifact's tensors before they are packed: some of the rows, another shape, a few new values.

All but :func:`made` are views of the mapped file, so that a large model is still loaded tensor by tensor.
"""

from dataclasses import replace

import numpy as np

from ds4ref.gguf import Tensor
from ds4ref.quants import TensorType

TYPES = {np.dtype(np.float32): TensorType.F32, np.dtype(np.int8): TensorType.I8}


def rows(tensor, name, taken):
    """Rows ``taken`` (a slice) of every matrix of a tensor [..., N, K], as a tensor of its own."""
    *lead, count, columns = tensor.shape
    data = tensor.data.reshape(*lead, count, -1)[..., taken, :]
    return replace(tensor, name=name, shape=(*data.shape[:-1], columns), data=data)


def reshaped(tensor, name, shape):
    """The same values under another name and shape."""
    return replace(tensor, name=name, shape=tuple(shape))


def made(name, values):
    """A tensor of new values, float32 or int8."""
    values = np.ascontiguousarray(values)
    return Tensor(name, values.shape, TYPES[values.dtype], values.view(np.uint8).reshape(-1))
