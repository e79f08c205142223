"""The layout of weights for GPUs: every field of a GGUF block as a plane with the output rows first, and its dequantisation.

A matrix [N, K] becomes planes [N, b · field], b blocks in a row: the file's own bits, taken apart so that neighbouring threads
read neighbouring bytes and every piece is a power of two long, as Triton demands (a block of 34 or 66 bytes is not). Only the
twelve bytes of six-bit scales that Q3_K, Q4_K and Q5_K have are unpacked to sixteen; so a tensor takes at most 1.04 times its
bytes in the file (F64, kept as float32, half of them).

``planes`` works on the host, plane by plane; ``take`` and ``chunk`` are traced and give float32, bit for bit that of
:mod:`ds4ref.quants` (factors of few bits: no product rounds; but for subnormal numbers, which XLA:CPU may take for zero).
Formats are ggml's ``block_*``; codebooks come from ``gguf.quants``. Knows nothing about products.

Letters: R rows, b blocks along K, S sub-blocks of W values.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import jax.numpy as jnp
import numpy as np
from jax import lax

from ds4ref.quants import BLOCK, TensorType

from .packing import FLOATS, _grid, _levels, _six_bits

BYTES_AT_ONCE = 1 << 20  # of a plane that one thread copies at a time

FORMATS = {
    TensorType.Q4_0: [("d", "<f2"), ("q", "u1", 16)],
    TensorType.Q4_1: [("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)],
    TensorType.Q5_0: [("d", "<f2"), ("h", "u1", 4), ("q", "u1", 16)],
    TensorType.Q5_1: [("d", "<f2"), ("m", "<f2"), ("h", "u1", 4), ("q", "u1", 16)],
    TensorType.Q8_0: [("d", "<f2"), ("q", "i1", 32)],
    TensorType.Q2_K: [("s", "u1", 16), ("q", "u1", 64), ("d", "<f2"), ("m", "<f2")],
    TensorType.Q3_K: [("h", "u1", 32), ("q", "u1", 64), ("s", "u1", 12), ("d", "<f2")],
    TensorType.Q4_K: [("d", "<f2"), ("m", "<f2"), ("s", "u1", 12), ("q", "u1", 128)],
    TensorType.Q5_K: [("d", "<f2"), ("m", "<f2"), ("s", "u1", 12), ("h", "u1", 32), ("q", "u1", 128)],
    TensorType.Q6_K: [("q", "u1", 128), ("h", "u1", 64), ("s", "i1", 16), ("d", "<f2")],
    TensorType.IQ1_S: [("d", "<f2"), ("q", "u1", 32), ("h", "<u2", 8)],
    TensorType.IQ1_M: [("q", "u1", 32), ("h", "u1", 16), ("s", "<u2", 4)],
    TensorType.IQ2_XXS: [("d", "<f2"), ("groups", [("q", "u1", 4), ("s", "<u4")], 8)],
    TensorType.IQ2_XS: [("d", "<f2"), ("q", "<u2", 32), ("s", "u1", 8)],
    TensorType.IQ2_S: [("d", "<f2"), ("q", "u1", 32), ("n", "u1", 32), ("h", "u1", 8), ("s", "u1", 8)],
    TensorType.IQ3_XXS: [("d", "<f2"), ("q", "u1", 64), ("s", "<u4", 8)],
    TensorType.IQ3_S: [("d", "<f2"), ("q", "u1", 64), ("h", "u1", 8), ("n", "u1", 32), ("s", "u1", 4)],
    TensorType.IQ4_NL: [("d", "<f2"), ("q", "u1", 16)],
    TensorType.IQ4_XS: [("d", "<f2"), ("h", "<u2"), ("s", "u1", 4), ("q", "u1", 128)],
    TensorType.MXFP4: [("e", "u1"), ("q", "u1", 16)],
    TensorType.PQ2_0: [("d", "<f2"), ("q", "u1", 32)],
}
"""Blocks as the file has them. q: codes, h: their high bits, n: signs, s: scales (and minima), d, m: what those are times."""

SIX_BITS = {TensorType.Q3_K, TensorType.Q4_K, TensorType.Q5_K}


# On the host


def planes(data, type, shape):
    """Yield (name, array [..., N, b · field]) for a tensor [..., N, K] whose bytes are ``data``, one plane at a time.

    data: uint8, the tensor's bytes in the file. Whoever lets go of a plane before asking for the next needs the host memory
    of one plane.
    """
    if type in FLOATS:
        yield "q", _floats(data, type).reshape(shape)
        return
    blocks = data.view(np.dtype(FORMATS[type]))
    for name, pick in _fields(type):
        first = pick(blocks[:1])
        out = np.empty((len(blocks), *first.shape[1:]), first.dtype)
        _copy(pick, blocks, out)
        yield name, out.reshape(*shape[:-1], -1)


def _fields(type):
    """(name of a plane, function of blocks [n] → its field [n, *field]) of every plane."""
    for name, *_ in FORMATS[type]:
        if name == "groups":  # of IQ2_XXS: four indices, then a word of signs
            yield "q", lambda blocks: blocks["groups"]["q"]
            yield "s", lambda blocks: blocks["groups"]["s"]
        elif name == "s" and type is TensorType.Q3_K:
            yield "s", _q3_k_scales
        elif name == "s" and type in SIX_BITS:
            yield "s", lambda blocks: _six_bits(blocks["s"])[0].view(np.uint8)
            yield "n", lambda blocks: _six_bits(blocks["s"])[1].view(np.uint8)
        else:
            yield name, lambda blocks, name=name: blocks[name]


def _q3_k_scales(blocks):
    """int8 [n, 16] of twelve bytes: four low bits in eight of them, two high bits in the other four."""
    low, high = blocks["s"][:, :8], blocks["s"][:, 8:]
    high = (high[:, None] >> np.array([[0], [2], [4], [6]], np.uint8) & 3).reshape(-1, 16)
    return (np.concatenate([low & 15, low >> 4], axis=1) | high << 4).view(np.int8) - np.int8(32)


def _copy(pick, blocks, out):
    """``out[:] = pick(blocks)`` in parts, on every core: NumPy lets go of the interpreter while it copies."""
    size = max(1, BYTES_AT_ONCE // out[0].nbytes)

    def part(start):
        out[start : start + size] = pick(blocks[start : start + size])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(part, range(0, len(out), size)))


def _floats(data, type):
    """The values as they are, bfloat16 as its 16 bits; float64 as float32."""
    values = data.view(FLOATS[type])
    if type is TensorType.F64:
        with np.errstate(over="ignore", invalid="ignore"):
            values = values.astype(np.float32)
    return values


# Traced


def chunk(w, lanes):
    """Output rows (start, size) of one matrix, transposed: float32 [K, size]."""
    return rows(w, *lanes).T


def rows(w, start, size):
    """Output rows start … start + size − 1 of one matrix, float32 [size, K]. start may be traced.

    w: anything with the attributes of :class:`ds4jax.weights.Packed`.
    """

    def cut(plane):
        at = (*w.index, start, 0)
        taken = lax.dynamic_slice(plane, at, (*(1 for _ in w.index), size, plane.shape[-1]))
        return taken.reshape(size, -1)

    return values(w.type, {name: cut(plane) for name, plane in w.planes.items()}, w.columns)


def take(w, ids):
    """Output rows ``ids`` [R] of one matrix, float32 [R, K]; ids must be in range."""
    taken = {name: plane.at[(*w.index, ids)].get(mode="promise_in_bounds") for name, plane in w.planes.items()}
    return values(w.type, taken, w.columns)


def values(type, planes, columns):
    """Planes [R, b · field] of whole rows → float32 [R, columns]. type: a name of :class:`ds4ref.quants.TensorType`."""
    type = TensorType[type]
    if type is TensorType.BF16:  # by its bits, since conversions may flush subnormal numbers
        return lax.bitcast_convert_type(planes["q"].astype(jnp.uint32) << 16, jnp.float32)
    if type in FLOATS:
        return planes["q"].astype(jnp.float32)
    blocks = columns // BLOCK[type][0]
    fields = {name: plane.reshape(len(plane), blocks, -1) for name, plane in planes.items()}
    return _VALUES[type](fields).reshape(-1, columns)


def _f32(x):
    return x.astype(jnp.float32)


def _layers(x, bits):
    """Codes of ``bits`` bits [..., 8 / bits, m] of bytes [..., m]: the lowest of every byte, then the next of every byte …"""
    shifts = jnp.arange(0, 8, bits, dtype=x.dtype)
    return x[..., None, :] >> shifts[:, None] & ((1 << bits) - 1)


def _series(x, bits):
    """Codes of ``bits`` bits [..., m · 8 / bits] of bytes [..., m]: those of a byte follow each other, low bits first."""
    codes = x[..., None] >> jnp.arange(0, 8, bits, dtype=x.dtype) & ((1 << bits) - 1)
    return codes.reshape(*x.shape[:-1], -1)


def _split(x, *shape):
    return x.reshape(*x.shape[:2], *shape)


def _table(name, make):
    return jnp.asarray(_tables(name, make))


@cache
def _tables(name, make):
    return make(name)


def _entries(name, index):
    """Entries of a codebook, int8 [..., 4 or 8]."""
    return _table(name, _grid).at[index.astype(jnp.int32)].get(mode="promise_in_bounds")


def _levels_of(name, codes):
    return _f32(_table(name, _levels).at[codes.astype(jnp.int32)].get(mode="promise_in_bounds"))


def _signed(values, signs):
    """float32 [..., 8], negative where the bit of ``signs`` [...] is set. No value is zero."""
    negative = signs[..., None] >> jnp.arange(8, dtype=signs.dtype) & 1
    return jnp.where(negative != 0, -_f32(values), _f32(values))


def _seven_signs(word):
    """Sign bits [..., 4] of words [...]: four times seven, each with their parity for an eighth."""
    signs = word[..., None] >> jnp.arange(0, 28, 7, dtype=word.dtype) & 127
    return _with_parity(signs)


def _with_parity(signs):
    return signs | (lax.population_count(signs) & 1) << 7


def _scaled(codes, scale, minimum=None):
    """[R, b, S, …] · [R, b, S] (+ minimum). Every operand is a float32."""
    extra = (1,) * (codes.ndim - scale.ndim)
    product = codes * scale.reshape(*scale.shape, *extra)
    return product if minimum is None else product + minimum.reshape(*minimum.shape, *extra)


def _four_bits(f):
    return _split(_layers(f["q"], 4), 32)


def _five_bits(f):
    return _four_bits(f) | _series(f["h"], 1) << 4


def _q4_0(f):
    return (_f32(_four_bits(f)) - 8) * _f32(f["d"])


def _q4_1(f):
    return _f32(_four_bits(f)) * _f32(f["d"]) + _f32(f["m"])


def _q5_0(f):
    return (_f32(_five_bits(f)) - 16) * _f32(f["d"])


def _q5_1(f):
    return _f32(_five_bits(f)) * _f32(f["d"]) + _f32(f["m"])


def _q8_0(f):
    return _f32(f["q"]) * _f32(f["d"])


def _q2_k(f):
    q = _split(_layers(_split(f["q"], 2, 32), 2), 16, 16)
    return _scaled(_f32(q), _f32(f["d"]) * _f32(f["s"] & 15), -_f32(f["m"]) * _f32(f["s"] >> 4))


def _q3_k(f):
    low, high = _layers(_split(f["q"], 2, 32), 2), _split(_layers(f["h"], 1), 2, 4, 32)
    return _scaled(_split(_f32(low | high << 2) - 4, 16, 16), _f32(f["d"]) * _f32(f["s"]))


def _q4_k(f):
    q = _split(_layers(_split(f["q"], 4, 32), 4), 8, 32)
    return _scaled(_f32(q), _f32(f["d"]) * _f32(f["s"]), -_f32(f["m"]) * _f32(f["n"]))


def _q5_k(f):
    q = _split(_layers(_split(f["q"], 4, 32), 4), 8, 32) | _layers(f["h"], 1) << 4
    return _scaled(_f32(q), _f32(f["d"]) * _f32(f["s"]), -_f32(f["m"]) * _f32(f["n"]))


def _q6_k(f):
    low = _split(_layers(_split(f["q"], 2, 64), 4), 2, 4, 32)
    q = low | _layers(_split(f["h"], 2, 32), 2) << 4
    return _scaled(_split(_f32(q) - 32, 16, 16), _f32(f["d"]) * _f32(f["s"]))


def _iq1(name, index, negative, scale):
    """Entries of the codebook, −1, 0 or 1, plus ⅛ or minus ⅛; times 8, as scale / 8 · whole number."""
    shift = 1 - 2 * _f32(negative)
    return _scaled(8 * _f32(_entries(name, index)) + shift[..., None], scale * 0.125)


def _iq1_s(f):
    h = f["h"]  # of 32 values: three bits for each of four indices, three of the scale, one of the shift
    high = h[..., None] >> jnp.arange(0, 12, 3, dtype=h.dtype) & 7
    index = _split(f["q"], 8, 4) | high << 8
    scale = _f32(f["d"]) * (2 * _f32(h >> 12 & 7) + 1)
    return _iq1("IQ1_S", index, jnp.broadcast_to((h >> 15)[..., None], index.shape), scale)


def _iq1_m(f):
    high, words = _series(f["h"], 4), f["s"]
    index = f["q"] | (high & 7).astype(jnp.uint16) << 8
    bits = words >> 12 << jnp.arange(0, 16, 4, dtype=words.dtype)
    d = lax.bitcast_convert_type(bits[..., 0] | bits[..., 1] | bits[..., 2] | bits[..., 3], jnp.float16)
    sc = _split(words[..., None] >> jnp.arange(0, 12, 3, dtype=words.dtype) & 7, 16)
    return _iq1("IQ1_M", _split(index, 16, 2), _split(high >> 3, 16, 2), _f32(d)[..., None] * (2 * _f32(sc) + 1))


def _half_odd(f, sc):
    """d · (½ + sc) · ¼, the scale of the two-bit codebooks."""
    return _f32(f["d"]) * (_f32(sc) + 0.5) * 0.25


def _iq2_xxs(f):
    q = _signed(_entries("IQ2_XXS", _split(f["q"], 8, 4)), _seven_signs(f["s"]))
    return _scaled(q, _half_odd(f, f["s"] >> 28))


def _iq2_xs(f):
    q = _signed(_entries("IQ2_XS", f["q"] & 511), _with_parity(f["q"] >> 9))
    return _scaled(_split(q, 16, 16), _half_odd(f, _series(f["s"], 4)))


def _iq2_s(f):
    index = f["q"] | _series(f["h"], 2).astype(jnp.uint16) << 8
    q = _signed(_entries("IQ2_S", index), f["n"])
    return _scaled(_split(q, 16, 16), _half_odd(f, _series(f["s"], 4)))


def _iq3_xxs(f):
    q = _signed(_split(_entries("IQ3_XXS", f["q"]), 8, 4, 8), _seven_signs(f["s"]))
    return _scaled(q, _f32(f["d"]) * (_f32(f["s"] >> 28) + 0.5) * 0.5)


def _iq3_s(f):
    index = f["q"] | _series(f["h"], 1).astype(jnp.uint16) << 8
    q = _signed(_split(_entries("IQ3_S", index), 32, 8), f["n"])
    return _scaled(_split(q, 8, 32), _f32(f["d"]) * (2 * _f32(_series(f["s"], 4)) + 1))


def _iq4_nl(f):
    return _levels_of("IQ4_NL", _four_bits(f)) * _f32(f["d"])


def _iq4_xs(f):
    high = f["h"] >> jnp.arange(0, 16, 2, dtype=f["h"].dtype) & 3
    scale = _f32(f["d"]) * (_f32(_series(f["s"], 4) | high << 4) - 32)
    q = _split(_layers(_split(f["q"], 8, 16), 4), 8, 32)
    return _scaled(_levels_of("IQ4_NL", q), scale)


def _mxfp4(f):
    """Twice the E2M1 values times 2^(e − 128), a subnormal number for e < 2."""
    e = f["e"].astype(jnp.uint32)
    bits = jnp.where(e < 2, jnp.uint32(1 << 21) << e, e - 1 << 23)
    return _levels_of("MXFP4", _four_bits(f)) * lax.bitcast_convert_type(bits, jnp.float32)


def _pq2_0(f):
    return (_f32(_series(f["q"], 2)) - 1) * _f32(f["d"])


_VALUES = {
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q8_0: _q8_0,
    TensorType.Q2_K: _q2_k,
    TensorType.Q3_K: _q3_k,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
    TensorType.IQ1_S: _iq1_s,
    TensorType.IQ1_M: _iq1_m,
    TensorType.IQ2_XXS: _iq2_xxs,
    TensorType.IQ2_XS: _iq2_xs,
    TensorType.IQ2_S: _iq2_s,
    TensorType.IQ3_XXS: _iq3_xxs,
    TensorType.IQ3_S: _iq3_s,
    TensorType.IQ4_NL: _iq4_nl,
    TensorType.IQ4_XS: _iq4_xs,
    TensorType.MXFP4: _mxfp4,
    TensorType.PQ2_0: _pq2_0,
}
