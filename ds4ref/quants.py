"""Packed GGUF tensor blocks to NumPy arrays, for every tensor type the families ship.

A packed type stores runs of consecutive values along the last axis as blocks of a fixed number of bytes. ``gguf.quants``
decodes the blocks of the common types; the plain types and PQ2_0, which that library does not know, are decoded here.
Knows nothing about files, names or models.
"""

from enum import IntEnum
from math import prod

import gguf
import numpy as np


class TensorType(IntEnum):
    """Storage type of a tensor, by its id in a GGUF tensor info (``enum ggml_type``; PQ2_0 is Prism's own)."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    MXFP4 = 39
    PQ2_0 = 142


BLOCK = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q5_0: (32, 22),
    TensorType.Q5_1: (32, 24),
    TensorType.Q8_0: (32, 34),
    TensorType.Q2_K: (256, 84),
    TensorType.Q3_K: (256, 110),
    TensorType.Q4_K: (256, 144),
    TensorType.Q5_K: (256, 176),
    TensorType.Q6_K: (256, 210),
    TensorType.IQ2_XXS: (256, 66),
    TensorType.IQ2_XS: (256, 74),
    TensorType.IQ3_XXS: (256, 98),
    TensorType.IQ1_S: (256, 50),
    TensorType.IQ4_NL: (32, 18),
    TensorType.IQ3_S: (256, 110),
    TensorType.IQ2_S: (256, 82),
    TensorType.IQ4_XS: (256, 136),
    TensorType.I8: (1, 1),
    TensorType.I16: (1, 2),
    TensorType.I32: (1, 4),
    TensorType.I64: (1, 8),
    TensorType.F64: (1, 8),
    TensorType.IQ1_M: (256, 56),
    TensorType.BF16: (1, 2),
    TensorType.MXFP4: (32, 17),
    TensorType.PQ2_0: (128, 34),
}
"""Values and bytes of one block."""

PLAIN = {
    TensorType.F32: np.dtype("<f4"),
    TensorType.F16: np.dtype("<f2"),
    TensorType.F64: np.dtype("<f8"),
    TensorType.I8: np.dtype("i1"),
    TensorType.I16: np.dtype("<i2"),
    TensorType.I32: np.dtype("<i4"),
    TensorType.I64: np.dtype("<i8"),
}
"""Types that NumPy stores itself."""

BLOCKS_AT_ONCE = 4096  # keeps the temporaries of one decoding step to a few megabytes


def nbytes(type, shape):
    """Bytes of a tensor of ``shape`` (numpy order). ValueError unless the last axis is a whole number of blocks."""
    values, size = BLOCK[type]
    if shape[-1] % values:
        raise ValueError(f"the last axis has {shape[-1]} values; {TensorType(type).name} needs a multiple of {values}")
    return prod(shape) // values * size


def dequantize(data, type, shape, dtype=np.float32):
    """The values of a tensor.

    data: uint8 [nbytes(type, shape)]. Floats come as ``dtype``, from their exact float32 (F64: float64) value; integers
    keep their own type. The result may be a view of ``data``, and is read-only where ``data`` is.
    ValueError where ``data`` has another length.
    """
    type = TensorType(type)
    if data.size != (size := nbytes(type, shape)):
        raise ValueError(f"{type.name} {list(shape)} takes {size} bytes, not {data.size}")
    with np.errstate(all="ignore"):  # infinities and NaNs in the file are values like any other
        if type in PLAIN:
            values = data.view(PLAIN[type])
            if values.dtype.kind == "i":
                return values.reshape(shape)
        elif type is TensorType.BF16:
            values = (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = _unpack(data, type)
        return values.astype(dtype, copy=False).reshape(shape)


def _unpack(data, type):
    """float32 values of packed blocks, some blocks at a time."""
    values, size = BLOCK[type]
    blocks = data.reshape(-1, size)
    out = np.empty((len(blocks), values), np.float32)
    for start in range(0, len(blocks), BLOCKS_AT_ONCE):
        part = blocks[start : start + BLOCKS_AT_ONCE]
        if type is TensorType.PQ2_0:
            out[start : start + len(part)] = _pq2_0(part)
        else:
            decoded = gguf.quants.dequantize(part.reshape(1, -1), gguf.GGMLQuantizationType(type))
            out[start : start + len(part)] = decoded.reshape(part.shape[0], values)
    return out


def _pq2_0(blocks):
    """PQ2_0: uint8 [n, 34] → float32 [n, 128]. A float16 scale d, then 2-bit codes from the low bits up: (code − 1) · d."""
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    codes = blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    return (codes.reshape(len(blocks), 128).astype(np.float32) - 1) * scale
