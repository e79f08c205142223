"""Tensor types: sizes, and decoding against the gguf library, hand-written loops and the plain NumPy types."""

import warnings

import gguf
import numpy as np
import pytest

from ds4ref.gguf import Tensor
from ds4ref.quants import BLOCK, PLAIN, TensorType, dequantize, nbytes

PACKED = [t for t in TensorType if t not in PLAIN and t is not TensorType.PQ2_0]


def random_bytes(type, shape, seed=0):
    """Random packed data; all bit patterns occur, infinities and NaNs of the scales too."""
    return np.random.default_rng(seed).integers(0, 256, nbytes(type, shape), dtype=np.uint8)


def same(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert np.array_equal(np.isnan(a), np.isnan(b)) and np.array_equal(a[~np.isnan(a)], b[~np.isnan(b)])


@pytest.mark.parametrize("type", [t for t in TensorType if t is not TensorType.PQ2_0], ids=lambda t: t.name)
def test_ids_and_blocks_are_those_of_the_format(type):
    known = gguf.GGMLQuantizationType[type.name]
    assert type == known and BLOCK[type] == gguf.GGML_QUANT_SIZES[known]


@pytest.mark.parametrize("type", PACKED, ids=lambda t: t.name)
def test_packed_types_match_the_library(type):
    values, size = BLOCK[type]
    shape = (3, 5, 2 * values)
    data = random_bytes(type, shape)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data.reshape(3, 5, -1), gguf.GGMLQuantizationType(type))
    same(dequantize(data, type, shape), expected)
    same(dequantize(data, type, shape, np.float64), expected.astype(np.float64))
    same(dequantize(data, type, (30 * values,)), expected.reshape(-1))


@pytest.mark.parametrize("type", [t for t in TensorType if t not in PLAIN], ids=lambda t: t.name)
def test_many_blocks_are_decoded_alike(type):
    """More blocks than are decoded at once give what they give one by one."""
    shape = (9001, BLOCK[type][0])
    data = random_bytes(type, shape, 1).reshape(9001, -1)
    whole = dequantize(data.reshape(-1), type, shape)
    for row in (0, 4095, 4096, 8191, 8192, 9000):
        same(whole[row], dequantize(data[row], type, shape[1:]))


def test_pq2_0_by_hand():
    shape = (4, 256)
    data = random_bytes(TensorType.PQ2_0, shape, 2)
    expected = np.empty(shape, np.float32)
    for block, raw in enumerate(data.reshape(-1, 34)):
        scale = np.float32(raw[:2].view(np.float16)[0])
        for j in range(128):
            code = (int(raw[2 + j // 4]) >> 2 * (j % 4)) & 3
            expected[block // 2, block % 2 * 128 + j] = np.float32(code - 1) * scale
    same(dequantize(data, TensorType.PQ2_0, shape), expected)


def test_q8_0_and_mxfp4_by_hand():
    raw = np.concatenate([np.array([0.5], np.float16).view(np.uint8), np.arange(-16, 16, dtype=np.int8).view(np.uint8)])
    same(dequantize(raw, TensorType.Q8_0, (32,)), np.arange(-16, 16, dtype=np.float32) / 2)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # E2M1 of the OCP Microscaling specification
    codes = np.arange(16, dtype=np.uint8)
    raw = np.concatenate([[np.uint8(128)], codes | codes[::-1] << 4])  # scale 2^(128 − 127); low nibbles come first
    expected = 2 * np.concatenate([levels, -levels, -levels[::-1], levels[::-1]])
    assert np.array_equal(dequantize(raw, TensorType.MXFP4, (32,)), expected)


@pytest.mark.parametrize("type", PLAIN, ids=lambda t: t.name)
def test_plain_types(type):
    values = np.random.default_rng(3).integers(-100, 100, (4, 6)).astype(PLAIN[type])
    data = values.reshape(-1).view(np.uint8)
    got = dequantize(data, type, (4, 6))
    assert got.dtype == (np.float32 if values.dtype.kind == "f" else values.dtype) and np.array_equal(got, values)


def test_float64_stays_exact():
    values = np.array([1 / 3, np.pi, 1e300])
    assert np.array_equal(dequantize(values.view(np.uint8), TensorType.F64, (3,), np.float64), values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(dequantize(values.view(np.uint8), TensorType.F64, (3,)), [*np.float32(values[:2]), np.inf])


def test_bf16_is_the_upper_half_of_float32():
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = (bits.astype(np.uint32) << 16).view(np.float32)
    same(dequantize(bits.view(np.uint8), TensorType.BF16, (1 << 16,)), expected)


@pytest.mark.parametrize("type", TensorType, ids=lambda t: t.name)
def test_slice_is_an_entry_of_the_whole(type):
    values = BLOCK[type][0]
    for shape in [(3, 2, values), (5, 2 * values), (2 * values,)]:
        tensor = Tensor("t", shape, type, random_bytes(type, shape, 4))
        whole = tensor.dequantize()
        for index in {0, 1, shape[0] // 2, shape[0] - 1}:
            same(np.asarray(tensor.slice(index)), np.asarray(whole[index]))
        for index in (-1, shape[0]):
            with pytest.raises(IndexError, match=f"{shape[0]} entries"):
                tensor.slice(index)


@pytest.mark.parametrize("type", TensorType, ids=lambda t: t.name)
def test_no_warnings_for_odd_values(type):
    """Infinite scales times zero and the like are the file's business."""
    shape = (64, BLOCK[type][0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dequantize(random_bytes(type, shape, 5) | 0x7C, type, shape)


def test_sizes():
    assert nbytes(TensorType.Q4_K, (3, 512)) == 3 * 2 * 144
    assert nbytes(TensorType.F16, (7,)) == 14
    with pytest.raises(ValueError, match="48 values; Q4_0 needs a multiple of 32"):
        nbytes(TensorType.Q4_0, (64, 48))
    with pytest.raises(ValueError, match=r"Q8_0 \[2, 32\] takes 68 bytes, not 67"):
        dequantize(np.zeros(67, np.uint8), TensorType.Q8_0, (2, 32))
