"""GGUF blocks on the host → planes for the device: the file's bits, regrouped so that a product can stream them.

A plane holds one field of every block of a matrix [N, K], output rows last ("lanes"): [K / block, *field, N]. Codes of a row
are in words of 32 or 16 bits, the first in the lowest ones: a product reads few streams and masks codes where they lie. The
words of a few blocks are put together by their number, [K / (g · block), W, g · …, N], so that each stream is long. Kinds:

    int8     values × a scale per block or sub-block (+ a minimum): exact for every type but the plain ones
    float    the plain float types, at their own width (float64 as float32, bfloat16 as the upper half of a float32's bits)
    Q4_K, Q2_K, IQ2_XXS   the file's own codes, for the types that large models are mostly made of

With integers of few bits and float16 scales, every product of scales and codes fits float32 exactly; so a kind gives the bits
that ``ds4ref.quants`` gives. Field layouts are those of the GGUF format (ggml's ``block_*``); codebooks come from
``gguf.quants``. Knows nothing about JAX arrays or products.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from math import gcd, prod

import gguf
import ml_dtypes
import numpy as np

from ds4ref.quants import BLOCK, TensorType

OWN_KINDS = {TensorType.Q4_K: "Q4_K", TensorType.Q2_K: "Q2_K", TensorType.IQ2_XXS: "IQ2_XXS"}
FLOATS = {
    TensorType.F32: np.dtype("<f4"),
    TensorType.F16: np.dtype("<f2"),
    TensorType.BF16: np.dtype("<u2"),
    TensorType.F64: np.dtype("<f8"),
}
FACTOR = {
    TensorType.IQ1_S: 1 / 8,
    TensorType.IQ1_M: 1 / 8,
    TensorType.IQ2_XXS: 1 / 8,
    TensorType.IQ2_XS: 1 / 8,
    TensorType.IQ2_S: 1 / 8,
    TensorType.IQ3_XXS: 1 / 4,
}
"""What scales of the int8 kind are further multiplied by (1 where absent): it makes factors and codes whole numbers."""

BIAS = {
    TensorType.Q4_0: 8,
    TensorType.Q5_0: 16,
    TensorType.Q8_0: 128,
    TensorType.Q3_K: 4,
    TensorType.Q6_K: 32,
    TensorType.IQ1_S: 9,
    TensorType.IQ1_M: 9,
    TensorType.IQ2_XXS: 43,
    TensorType.IQ2_XS: 43,
    TensorType.IQ2_S: 43,
    TensorType.IQ3_XXS: 62,
    TensorType.IQ3_S: 15,
    TensorType.IQ4_NL: 127,
    TensorType.IQ4_XS: 127,
    TensorType.MXFP4: 12,
    TensorType.PQ2_0: 1,
}
"""What is added to codes of the int8 kind (0 where absent) so that none is negative. No more than that: it costs precision."""

WORDS = {"Q2_K": "<u2"}  # not int32: XLA copies first what a fusion reads sixteen times, for as many codes
LANE_PAD = 16
STREAM_ROWS = 8  # rows of lanes in a stream, where there are as many
ROWS_AT_ONCE = 64  # rows whose blocks are unpacked together: the temporaries stay in the cache


def kind(type, layout):
    """How a type is kept. The layouts differ in IQ2_XXS: "wide", the fastest without AVX-512, takes four times the file's
    bytes, "cpu", the fastest with it, twice as many, "lean", the slowest, no more than the file."""
    if type in FLOATS:
        return "float"
    if type is TensorType.IQ2_XXS and layout != "lean":
        return "int8" if layout == "wide" else "nibbles"
    return OWN_KINDS.get(type, "int8")


def planes(data, type, shape, layout="cpu"):
    """The planes of a tensor [..., N, K]: name → array [..., K / block, *field, N], and its main plane "q" wider than N.

    data: uint8, the tensor's bytes in the file. ``q`` has LANE_PAD unused lanes where its rows would otherwise all
    fall into the same few sets of a cache.
    """
    return {name: plane[0] for name, plane in stacked_planes([[data]], type, shape, layout).items()}


def stacked_planes(datas, type, shape, layout="cpu"):
    """The planes of tensors of one type and shape, one behind the other: name → [len(datas), ..., K / block, *field, N].

    datas: of each the bytes of its parts [..., n, K], tensors whose rows lie side by side: one of N rows, or several.
    """
    *lead, N, K = shape
    matrices, in_words = prod(lead), kind(type, layout) not in ("float", "IQ2_XXS")
    if type in FLOATS:
        split, values, size = lambda b: {"q": b[:, None]}, partial(_float_blocks, type=type, K=K), None
    else:
        split, size = partial(_fields, type, kind(type, layout)), BLOCK[type][1]

    def blocks_of(data):
        blocks = values(data) if size is None else data.reshape(-1, size)
        per_row = K // (blocks.shape[-1] if size is None else BLOCK[type][0])
        return blocks.reshape(matrices, -1, per_row, blocks.shape[-1])

    def unpack(blocks, m, n):
        rows = blocks[m, n : n + ROWS_AT_ONCE]
        fields = split(rows.reshape(-1, rows.shape[-1]))
        fields = {name: field.reshape(*rows.shape[:2], *field.shape[1:]) for name, field in fields.items()}
        if in_words:
            fields["q"] = _words_first(fields["q"])
        return fields

    def write(part):
        l, first, blocks, m, n = part
        for name, field in unpack(blocks, m, n).items():
            out[name][l, m, ..., first + n : first + n + len(field)] = np.moveaxis(field, 0, -1)

    out, held = {}, []
    for l, parts in enumerate(datas):
        first = 0
        for blocks in map(blocks_of, parts):
            held.append((l, first, blocks))
            first += blocks.shape[1]
    for name, field in unpack(held[0][2], 0, 0).items():
        width = N + LANE_PAD * (name == "q" and N * field.itemsize % 1024 == 0)
        out[name] = _aligned((len(datas), matrices, *field.shape[1:], width), field.dtype)
    parts = ((*one, m, n) for one in held for m in range(matrices) for n in range(0, one[2].shape[1], ROWS_AT_ONCE))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy lets go of the interpreter while it copies
        list(pool.map(write, parts))
    return {name: plane.reshape(-1, *lead, *plane.shape[2:]) for name, plane in out.items()}


def _words_first(q):
    """Codes [n, b, …, W] as [n, b / g, W, g · …]. A product reads the W words side by side: each is so a stream over several
    blocks, which CPUs read ahead of; short ones that share a page of memory they do not tell apart."""
    blocks, parts = q.shape[1], prod(q.shape[2:-1])
    together = gcd(blocks, max(1, STREAM_ROWS // parts))
    return q.reshape(len(q), blocks // together, together * parts, -1).swapaxes(2, 3)


def _aligned(shape, dtype):
    """Zeros that begin where a cache line does: JAX takes such an array over without a copy."""
    size = prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _fields(type, kind, blocks):
    """Fields of blocks uint8 [n, size], the codes of all kinds but IQ2_XXS as words [n, …, W / 4 or W / 2]."""
    fields = _SPLIT[type if kind == "int8" else kind](blocks)
    if kind != "IQ2_XXS":
        codes = fields["q"].view(np.uint8) + np.uint8(BIAS.get(type, 0) if kind == "int8" else 0)
        fields["q"] = np.ascontiguousarray(codes).view(WORDS.get(kind, "<i4"))
    return fields


def _float_blocks(data, type, K):
    """Floats in blocks of the largest divisor of K up to 32."""
    values = data.view(FLOATS[type])
    if type is TensorType.F64:
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)
    return values.reshape(-1, max(b for b in range(1, 33) if K % b == 0))


# Fields of blocks uint8 [n, size] → name → [n, *field], codes still one a byte. int8 kind: q int8 [n, S, W] codes of S
# sub-blocks of W values, d, m float16 [n] scale and minimum (what is *added*), sc, mn int8 [n, S] their factors.
# value = d·factor·sc·q + m·mn.


def _q8_0(b):
    return {"q": b[:, None, 2:].view(np.int8), "d": _f16(b[:, :2])}


def _q4_0(b):
    return {"q": _int8(_nibbles(b[:, 2:])[:, None], -8), "d": _f16(b[:, :2])}


def _q4_1(b):
    return {"q": _int8(_nibbles(b[:, 4:])[:, None]), "d": _f16(b[:, :2]), "m": _f16(b[:, 2:4])}


def _q5_0(b):
    return {"q": _int8(_nibbles(b[:, 6:]) | _bits(b[:, 2:6]) << 4, -16)[:, None], "d": _f16(b[:, :2])}


def _q5_1(b):
    q = _nibbles(b[:, 8:]) | _bits(b[:, 4:8]) << 4
    return {"q": _int8(q)[:, None], "d": _f16(b[:, :2]), "m": _f16(b[:, 2:4])}


def _q3_k(b):
    high, low, scales = b[:, :32], b[:, 32:96].reshape(-1, 2, 1, 32), b[:, 96:108]
    q = (low >> _shifts(4, 2)) & 3 | (high[:, None, None] >> _shifts(8).reshape(2, 4, 1) & 1) << 2
    low, high = scales[:, :8], scales[:, 8:]
    sc = np.concatenate([low & 15, low >> 4], 1) | (high[:, None] >> _shifts(4, 2) & 3).reshape(-1, 16) << 4
    return {"q": _int8(q, -4).reshape(-1, 16, 16), "sc": _int8(sc, -32), "d": _f16(b[:, 108:])}


def _q4_k(b):
    sc, mn = _six_bits(b[:, 4:16])
    q = b[:, 16:].reshape(-1, 4, 32)
    return {"q": q, "sc": sc.reshape(-1, 4, 2), "mn": mn.reshape(-1, 4, 2), "d": _f16(b[:, :2]), "m": -_f16(b[:, 2:4])}


def _q5_k(b):
    sc, mn = _six_bits(b[:, 4:16])
    low = b[:, 48:].reshape(-1, 4, 1, 32) >> _shifts(2, 4) & 15
    q = low.reshape(-1, 8, 32) | (b[:, None, 16:48] >> _shifts(8) & 1) << 4
    return {"q": _int8(q), "sc": sc, "mn": mn, "d": _f16(b[:, :2]), "m": -_f16(b[:, 2:4])}


def _q6_k(b):
    low = b[:, :128].reshape(-1, 2, 1, 64) >> _shifts(2, 4) & 15
    high = b[:, 128:192].reshape(-1, 2, 1, 32) >> _shifts(4, 2) & 3
    q = low.reshape(-1, 2, 4, 32) | high << 4
    return {"q": _int8(q, -32).reshape(-1, 16, 16), "sc": b[:, 192:208].view(np.int8), "d": _f16(b[:, 208:])}


def _q2_k(b):
    """q [n, half, which 16, 16], each byte four codes; s [n, half, which 16, code], scale in the low nibble, minimum above."""
    s = b[:, :16].reshape(-1, 2, 4, 2).transpose(0, 1, 3, 2)
    return {"q": b[:, 16:80].reshape(-1, 2, 2, 16), "s": s, "d": _f16(b[:, 80:82]), "m": -_f16(b[:, 82:])}


def _iq2_xxs(b):
    """q [n, 8, 4] grid indices; s uint32 [n, 8]: four times seven signs, the scale above."""
    words = b[:, 2:].copy().view("<u4").reshape(-1, 8, 2)
    return {"q": b[:, 2:].reshape(-1, 8, 8)[..., :4], "s": words[..., 1], "d": _f16(b[:, :2])}


def _iq2_xxs_nibbles(b):
    """q [n, 8, 16]: code of value j in the low nibble of byte j, of value 16 + j in the high one; sc, d as in the int8 kind.

    The codebook's −43, −25, −8, 8, 25, 43 have the codes m = 1 … 6 and are 17 m + (second bit of m) − 60; that of −v is 7 − m.
    """
    f = _iq2_xxs(b)
    codes = _magnitude_codes()[f["q"]]
    negative = np.unpackbits(_seven_signs(f["s"])[..., None], axis=-1, bitorder="little")
    codes = np.where(negative, 7 - codes, codes).reshape(-1, 8, 2, 16)
    return {"q": codes[:, :, 0] | codes[:, :, 1] << 4, "sc": _odd(f["s"] >> 28), "d": f["d"]}


@cache
def _magnitude_codes():
    """The codebook of IQ2_XXS with each magnitude as its nibble: uint8 [256, 8]."""
    return np.select([_grid("IQ2_XXS") == m for m in (8, 25, 43)], [np.uint8(n) for n in (4, 5, 6)])


def _iq2_xxs_bytes(b):
    words = b[:, 2:].copy().view("<u4").reshape(-1, 8, 2)
    signs = words[..., 1, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127
    q = _signed_grid().take(signs << 8 | b[:, 2:].reshape(-1, 8, 8)[..., :4])
    return {"q": q.view(np.int8).reshape(-1, 8, 32), "sc": _odd(words[..., 1] >> 28), "d": _f16(b[:, :2])}


@cache
def _signed_grid():
    """Eight codes of IQ2_XXS in each word, by seven stored signs and the entry of the codebook: uint64 [128 · 256]."""
    signs = _parity_signs()[:, None].repeat(256, axis=1)
    return _signed(_grid("IQ2_XXS"), signs).reshape(-1, 8).view(np.uint64)[:, 0]


def _iq2_xs(b):
    words = b[:, 2:66].copy().view("<u2")
    q = _signed(_grid("IQ2_XS")[words & 511], _parity_signs()[words >> 9])
    return {"q": q.reshape(-1, 16, 16), "sc": _odd(_pairs(b[:, 66:])), "d": _f16(b[:, :2])}


def _iq2_s(b):
    index = b[:, 2:34] | (b[:, 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1, 32).astype(np.uint16) << 8
    q = _signed(_grid("IQ2_S")[index], b[:, 34:66])
    return {"q": q.reshape(-1, 16, 16), "sc": _odd(_pairs(b[:, 74:])), "d": _f16(b[:, :2])}


def _iq3_xxs(b):
    s = b[:, 66:].copy().view("<u4")
    q = _signed(_grid("IQ3_XXS")[b[:, 2:66]].reshape(-1, 8, 4, 8), _seven_signs(s))
    return {"q": q.reshape(-1, 8, 32), "sc": _odd(s >> 28), "d": _f16(b[:, :2])}


def _iq3_s(b):
    index = b[:, 2:66] | _bits(b[:, 66:74]).astype(np.uint16) << 8
    q = _signed(_grid("IQ3_S")[index].reshape(-1, 32, 8), b[:, 74:106])
    return {"q": q.reshape(-1, 8, 32), "sc": _odd(_pairs(b[:, 106:])), "d": _f16(b[:, :2])}


def _iq1_s(b):
    """The codebook's −1, 0, 1 and the shift of ±1/8 that 32 values share, times 8."""
    high = b[:, 34:].copy().view("<u2")
    index = b[:, 2:34] | ((high[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7) << 8).reshape(-1, 32)
    q = _grid("IQ1_S")[index].reshape(-1, 8, 32) * np.int8(8) + _shift(high >> 15)[..., None]
    return {"q": q, "sc": _odd(high >> 12 & 7), "d": _f16(b[:, :2])}


def _iq1_m(b):
    """As IQ1_S, with a shift for every 8 values and the scale's 16 bits spread over four words."""
    high, words = _pairs(b[:, 32:48]), b[:, 48:].copy().view("<u2")
    index = b[:, :32] | (high & 7).astype(np.uint16) << 8
    q = _grid("IQ1_M")[index] * np.int8(8) + _shift(high >> 3)[..., None]
    d = np.bitwise_or.reduce(words >> 12 << np.arange(0, 16, 4, dtype=np.uint16), axis=1).view(np.float16)
    sc = _odd((words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 16))
    return {"q": q.reshape(-1, 16, 16), "sc": sc, "d": d}


def _iq4_nl(b):
    return {"q": _levels("IQ4_NL")[_nibbles(b[:, 2:])][:, None], "d": _f16(b[:, :2])}


def _iq4_xs(b):
    q = _levels("IQ4_NL")[_nibbles(b[:, 8:].reshape(-1, 8, 16))]
    high = b[:, 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    return {"q": q, "sc": _int8(_pairs(b[:, 4:8]) | high.astype(np.uint8) << 4, -32), "d": _f16(b[:, :2])}


def _mxfp4(b):
    """Twice the E2M1 values; 2^(e − 128), a subnormal for e < 2, is exact in bfloat16."""
    e = b[:, 0].astype(np.uint16)
    d = np.where(e < 2, 0x20 << e, (e.astype(np.int32) - 1) << 7).astype(np.uint16)
    return {"q": _levels("MXFP4")[_nibbles(b[:, 1:])][:, None], "d": d.view(ml_dtypes.bfloat16)}


def _pq2_0(b):
    q = b[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    return {"q": _int8(q, -1).reshape(-1, 4, 32), "d": _f16(b[:, :2])}


_SPLIT = {
    "Q4_K": _q4_k,
    "Q2_K": _q2_k,
    "IQ2_XXS": _iq2_xxs,
    "nibbles": _iq2_xxs_nibbles,
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q8_0: _q8_0,
    TensorType.Q3_K: _q3_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
    TensorType.IQ1_S: _iq1_s,
    TensorType.IQ1_M: _iq1_m,
    TensorType.IQ2_XXS: _iq2_xxs_bytes,
    TensorType.IQ2_XS: _iq2_xs,
    TensorType.IQ2_S: _iq2_s,
    TensorType.IQ3_XXS: _iq3_xxs,
    TensorType.IQ3_S: _iq3_s,
    TensorType.IQ4_NL: _iq4_nl,
    TensorType.IQ4_XS: _iq4_xs,
    TensorType.MXFP4: _mxfp4,
    TensorType.PQ2_0: _pq2_0,
}


def _f16(b):
    """float16 [n] of bytes [n, 2]."""
    return b.copy().view("<f2")[:, 0]


def _int8(codes, offset=0):
    return codes.view(np.int8) + np.int8(offset) if offset else codes.view(np.int8)


def _odd(s):
    return (2 * s + 1).astype(np.int8)


def _shift(negative):
    return 1 - 2 * negative.astype(np.int8)


def _shifts(count, step=1):
    return np.arange(0, count * step, step, dtype=np.uint8).reshape(count, 1)


def _nibbles(b):
    """Codes [..., 2m] of bytes [..., m]: all low nibbles, then all high ones."""
    return np.concatenate([b & 15, b >> 4], axis=-1)


def _pairs(b):
    """Codes [n, 2m] of bytes [n, m]: low and high nibble of each in turn."""
    return np.stack([b & 15, b >> 4], axis=-1).reshape(len(b), -1)


def _bits(b):
    """Bits [n, 8m] of bytes [n, m], low bit first."""
    return np.unpackbits(b, axis=-1, bitorder="little")


def _six_bits(b):
    """Scales and minima int8 [n, 8] of the twelve bytes that Q4_K and Q5_K keep them in."""
    d, m, rest = b[:, :4], b[:, 4:8], b[:, 8:]
    sc = np.concatenate([d & 63, rest & 15 | d >> 2 & 48], axis=1)
    mn = np.concatenate([m & 63, rest >> 4 | m >> 2 & 48], axis=1)
    return sc.view(np.int8), mn.view(np.int8)


def _signed(values, signs):
    """int8 [..., 8], negative where the bit of ``signs`` [...] is set."""
    negative = np.unpackbits(signs[..., None], axis=-1, bitorder="little").view(np.int8)
    return (values ^ -negative) + negative


def _seven_signs(words):
    """Sign bytes [n, 8, 4] of words [n, 8]: seven bits each, the eighth their parity."""
    return _parity_signs()[words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127]


@cache
def _parity_signs():
    codes = np.arange(128, dtype=np.uint8)
    return codes | (np.bitwise_count(codes) & 1) << 7


@cache
def _grid(name):
    """The codebook of a type: int8 [entries, 4 or 8]."""
    traits = getattr(gguf.quants, name)
    traits.init_grid()
    return traits.grid[0, 0].astype(np.int8)


@cache
def _levels(name):
    return np.array(getattr(gguf.quants, name).kvalues, np.int8)


def iq2_xxs_table():
    """The IQ2_XXS codebook as words of four magnitudes, low byte first: int32 [2, 256] for values 0–3 and 4–7."""
    return np.ascontiguousarray(_grid("IQ2_XXS").reshape(256, 2, 4)).view("<i4")[..., 0].T.copy()
