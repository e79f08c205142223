"""GGUF files: one Artifact over all shards, its metadata typed, its tensors lazy views of the mapped files.

The format is the GGUF specification of the ggml project, versions 2 and 3, little-endian: magic, version, number of
tensors, number of metadata keys, the keys, one info per tensor, padding, tensor data. Numbers in a file are claims; each
is checked against the real size before anything is read or allocated for it. Knows nothing about architectures.

Limits, so that no file can take more than a second or more memory than a small multiple of its header: HEADER_BYTES before
the tensor data, MAX_KEYS keys, MAX_STRINGS strings in arrays, MAX_TENSORS tensors, per shard. Arrays of arrays are refused.
"""

import math
import mmap
import operator
import os
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import quants
from .quants import BLOCK, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
HEADER_BYTES = 128 << 20
MAX_KEYS = 1 << 16
MAX_STRINGS = 1 << 21
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 127
MAX_DIMS = 8
LEAST_KEY_BYTES = 14  # length, one character, type, one-byte value
LEAST_TENSOR_BYTES = 33  # length, one character, number of dimensions, one dimension, type, offset

# Value type ids of the specification. Strings and arrays are built from these.
NUMBERS = {
    0: ("u8", np.dtype("u1")),
    1: ("i8", np.dtype("i1")),
    2: ("u16", np.dtype("<u2")),
    3: ("i16", np.dtype("<i2")),
    4: ("u32", np.dtype("<u4")),
    5: ("i32", np.dtype("<i4")),
    6: ("f32", np.dtype("<f4")),
    7: ("bool", np.dtype("?")),
    10: ("u64", np.dtype("<u8")),
    11: ("i64", np.dtype("<i8")),
    12: ("f64", np.dtype("<f8")),
}
STRING, ARRAY = 8, 9
IDS = {name: (id, dtype) for id, (name, dtype) in NUMBERS.items()}
SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
REQUIRED = object()

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class ArtifactError(ValueError):
    """What is wrong with a file, in one sentence. Nothing else is raised for anything a file holds."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor of a file. ``shape`` is in numpy order; ``data`` a read-only uint8 view of the file's map."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    data: np.ndarray
    shard: int = 0

    @property
    def nbytes(self):
        """Bytes in the file."""
        return self.data.size

    def dequantize(self, dtype=np.float32):
        """All values, of ``shape``; see :func:`quants.dequantize`."""
        return quants.dequantize(self.data, self.type, self.shape, dtype)

    def slice(self, index, dtype=np.float32):
        """Entry ``index`` along the first axis, ``dequantize()[index]``, decoding no more than it takes.

        IndexError outside 0 … shape[0] − 1.
        """
        index = operator.index(index)
        if not 0 <= index < self.shape[0]:
            raise IndexError(f"tensor {self.name!r} has {self.shape[0]} entries, there is no entry {index}")
        if len(self.shape) == 1:
            values, size = BLOCK[self.type]
            block, within = divmod(index, values)
            return quants.dequantize(self.data[block * size : (block + 1) * size], self.type, (values,), dtype)[within]
        size = self.nbytes // self.shape[0]
        return quants.dequantize(self.data[index * size : (index + 1) * size], self.type, self.shape[1:], dtype)


class Artifact:
    """A model file, or all shards of a split one.

    path: the (first) file; shards: every file; nbytes: their sizes summed; metadata: key → bool, int, float, str, numpy
    array (numbers, bools) or list of str; types: key → the type's name ("u32", "array[str]"); tensors: name → Tensor.
    """

    def __init__(self, path, shards):
        """``shards``: (path, bytes-like contents) of every file, the first one first. ArtifactError as :meth:`open`."""
        self.path = path
        self.shards = tuple(path for path, _ in shards)
        self.nbytes = sum(len(contents) for _, contents in shards)
        self.metadata, self.types, self.tensors = {}, {}, {}
        for number, (path, contents) in enumerate(shards):
            metadata, types, tensors = _parse(path.name, contents, number)
            if len(shards) > 1:
                _check_split(path.name, metadata, number, len(shards))
            self._merge(path.name, metadata, types, tensors)
        for path, declared in self._declared_tensors if len(shards) > 1 else ():
            pass

    @classmethod
    def open(cls, path):
        """Map a file; for ``X-00001-of-000NN.gguf`` its siblings too.

        ArtifactError for anything that is wrong with the files, a missing or unreadable one included.
        """
