"""The products of packed matrices in lanes layout: output rows last, as XLA:CPU streams them best (bench/products.py).

One ``product`` and one ``chunk`` per kind of :mod:`ds4jax.packing`. product: one row x float32 [K] → [N], a single fusion of
explicit sums over the codes of a block, ended by a barrier and a ``ones @ p``. chunk: output rows (start, size) dequantised →
float32 [K, size], in the file's order along K. Both read planes through ``read`` alone, so that a layer or an expert of a
stack is never copied. Works on anything with the attributes of :class:`ds4jax.weights.Packed`.

Letters: N output rows, K columns; b blocks along K, S sub-blocks of W values in a block, C lanes of a chunk.
"""

from dataclasses import dataclass
from functools import cache, reduce
from operator import add

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ds4ref.quants import BLOCK, TensorType

from . import packing, primitives


def read(w, name, *where, lanes=None):
    """Plane ``name`` of one matrix: [b, *field, N or size], without the field axes for which ``where`` names a position."""
    plane, lead = w.planes[name], len(w.index)
    start, size = (0, w.rows) if lanes is None else lanes
    at = {axis: n for axis, n in enumerate(where, lead + 1) if n is not None}
    starts = [*(at.get(axis, 0) for axis in range(plane.ndim - 1)), w.first + start]
    sizes = [*(1 if axis in at else n for axis, n in enumerate(plane.shape[:-1])), size]
    if isinstance(start, int):  # what is known is cut off first: of several experts at once XLA gathers the rest by two numbers
        plane = lax.slice(plane, starts, [first + n for first, n in zip(starts, sizes, strict=True)])
        starts = [0] * plane.ndim
    cut = lax.dynamic_slice(plane, [*w.index, *starts[lead:]], [*[1] * lead, *sizes[lead:]])
    return cut.reshape([n for axis, n in enumerate(sizes) if axis >= lead and axis not in at])


def _read_f32(w, name, *where, lanes=None):
    values = read(w, name, *where, lanes=lanes)
    if name == "q" and w.type == "BF16":  # XLA:CPU has no fast bfloat16, so the plane keeps the bits
        return lax.bitcast_convert_type(values.astype(jnp.uint32) << 16, jnp.float32)
    return values.astype(jnp.float32)


def _sum(terms):
    """Explicit: XLA neither reassociates a float ``sum`` nor makes vectors of it, and splits the fusion that meets one."""
    return reduce(add, terms)


def _last_sum(x):
    """Sum of x [..., W] over its last axis, for the minima of sub-blocks."""
    return _sum(x[..., j] for j in range(x.shape[-1]))


def _add_blocks(p):
    """[..., N] → [N]. The barrier makes one fusion of p; ``ones @`` is the reduction that Eigen does well."""
    return _add_rows(lax.optimization_barrier(p.reshape(-1, p.shape[-1])))


@jax.custom_batching.custom_vmap
def _add_rows(p):
    return jnp.ones(len(p), jnp.float32) @ p


@_add_rows.def_vmap
def _add_rows_of_each(count, _, p):
    """As many products: JAX's own rule makes one of them all, for which XLA writes p transposed, twenty times slower."""
    return (jnp.ones((count, 1, p.shape[1]), jnp.float32) @ p)[:, 0], True


def _words(w, *parts):
    """Plane "q" as a list of its words, each [b, *parts, N], parts: what a block is made of."""
    return [read(w, "q", j).reshape(-1, *parts, w.rows) for j in range(w.planes["q"].shape[-3])]


def _codes(w, lanes, *parts):
    """Plane "q" of some lanes, a block's words together: [b, *parts, W, C]."""
    q = read(w, "q", lanes=lanes).swapaxes(1, 2)
    return q.reshape(-1, *parts, *q.shape[-2:])


def _int8_scale(w, lanes=None):
    """(scale [b, S or 1, N], minimum likewise or None) of the int8 kind."""
    scale = _read_f32(w, "d", lanes=lanes)[:, None]
    if (factor := packing.FACTOR.get(TensorType[w.type], 1)) != 1:
        scale = scale * factor
    if "sc" in w.planes:
        scale = scale * _read_f32(w, "sc", lanes=lanes)
    minimum = _read_f32(w, "m", lanes=lanes)[:, None] if "m" in w.planes else None
    if "mn" in w.planes:
        minimum = minimum * _read_f32(w, "mn", lanes=lanes)
    return scale, minimum


BYTES = np.arange(0, 32, 8)


def _met(x, shifts, bits):
    """x as it meets codes of ``bits`` bits that begin at bits ``shifts`` (an array as x's last axes) of words of 32: divided by
    that power of two, exactly, since codes are masked where they lie, one operation less than to shift them down."""
    return x * np.where(shifts + bits == 32, 1.0, 2.0**-shifts).astype(np.float32)


def _term(words, shift, bits, x):
    """Codes of ``bits`` bits at bit ``shift`` of words [..., N] times what :func:`_met` gives of x [...]."""
    if shift + bits == 32:  # the highest bit would be taken for a sign
        return lax.shift_right_logical(words, shift).astype(jnp.float32) * x[..., None]
    return (words & ((1 << bits) - 1 << shift)).astype(jnp.float32) * x[..., None]


def _float_product(w, x):
    W = w.planes["q"].shape[-2]
    x = x.reshape(-1, 1, W)
    return _add_blocks(_sum(_read_f32(w, "q", None, j) * x[:, :, j, None] for j in range(W)))


def _float_chunk(w, lanes):
    return _read_f32(w, "q", lanes=lanes).reshape(w.columns, lanes[1])


def _sub_blocks(w):
    """Sub-blocks in a block of the int8 kind, which has four codes in a word."""
    return BLOCK[TensorType[w.type]][0] // (4 * w.planes["q"].shape[-3])


def _int8_product(w, x):
    words, S = w.planes["q"].shape[-3], _sub_blocks(w)
    t = 2 if words == 4 and S % 2 == 0 else 1  # sub-blocks that share an output: 32 terms where there can be
    split = (-1, S // t, t)
    x = x.reshape(*split, words, 4)
    q = _words(w, S // t, t)
    sums, x = _last_sum(x.reshape(*split, 4 * words)), _met(x, BYTES, 8)
    bias = packing.BIAS.get(TensorType[w.type], 0)
    least = lax.optimization_barrier((-bias * sums, sums))

    def part(i):
        """Four sums side by side, since one would wait for itself."""
        four = [_sum(_term(q[j][:, :, i], 8 * k, 8, x[:, :, i, j, k]) for j in range(words)) for k in range(4)]
        return _sum(four) + least[0][:, :, i, None] if bias else _sum(four)

    scale, minimum = _int8_scale(w)
    if "sc" in w.planes:
        scale = scale.reshape(*split, w.rows)
        p = _sum(part(i) * scale[:, :, i] for i in range(t))
    else:
        p = _sum(part(i) for i in range(t)) * scale
    if minimum is not None:
        p = p + minimum * least[1][:, :, 0, None]
    return _add_blocks(p)


def _int8_chunk(w, lanes):
    q = _parts(_codes(w, lanes, _sub_blocks(w), 1), 8)[:, :, 0] - packing.BIAS.get(TensorType[w.type], 0)
    scale, minimum = lax.optimization_barrier(_int8_scale(w, lanes))
    q = q.astype(jnp.float32) * scale[:, :, None, None]
    if minimum is not None:
        q = q + minimum[:, :, None, None]
    return q.reshape(w.columns, lanes[1])


def _parts(words, bits):
    """Parts of ``bits`` bits of every byte of words [b, n, 1, …, W, C], low ones first: integers [b, n, parts, …, W, bytes, C].

    In one expression: where arrays of the parts are joined, a fusion asks for every element which one it comes from.
    """
    width = words.dtype.itemsize
    shifts = np.arange(0, 8, bits)[:, None] + np.arange(0, 8 * width, 8)
    shifts = shifts.reshape(1, 1, len(shifts), *(1,) * (words.ndim - 4), width, 1)
    words = words.view(f"u{width}")[..., None, :]
    return (words >> jnp.array(shifts, words.dtype) & (1 << bits) - 1).astype(jnp.int32)


def _q4_k_product(w, x):
    x = x.reshape(-1, 4, 2, 8, 4)  # sub-block 2g in the low nibbles of group g, 2g + 1 in the high ones
    sums = lax.optimization_barrier(_last_sum(x.reshape(-1, 4, 2, 32)))
    x = _met(x, np.array([[BYTES], [BYTES + 4]]), 4)
    q = _words(w, 4)

    def half(h):
        two = [[_term(q[j], 8 * k + 4 * h, 4, x[:, :, h, j, k]) for j in range(8) for k in (i, i + 1)] for i in (0, 2)]
        return _sum(map(_sum, two))

    p = half(0) * _read_f32(w, "sc", None, 0) + half(1) * _read_f32(w, "sc", None, 1)
    least = _read_f32(w, "mn", None, 0) * sums[:, :, 0, None] + _read_f32(w, "mn", None, 1) * sums[:, :, 1, None]
    return _add_blocks(p * _read_f32(w, "d")[:, None] + least * _read_f32(w, "m")[:, None])


def _q4_k_chunk(w, lanes):
    q = _parts(_codes(w, lanes, 4, 1), 4)  # [b, 4, 2, 8, 4, C]
    d, m = (_read_f32(w, name, lanes=lanes)[:, None, None] for name in "dm")
    factors = d * _read_f32(w, "sc", lanes=lanes), m * _read_f32(w, "mn", lanes=lanes)
    scale, minimum = (f[:, :, :, None, None] for f in lax.optimization_barrier(factors))
    return (q.astype(jnp.float32) * scale + minimum).reshape(w.columns, lanes[1])


def _q2_k_product(w, x):
    x = x.reshape(-1, 2, 4, 2, 8, 2)  # half, code in the byte, which 16, word of 16 bits, byte
    sums = lax.optimization_barrier(_last_sum(x.reshape(-1, 2, 4, 2, 16)))
    x = _met(x, np.arange(0, 8, 2).reshape(4, 1, 1, 1) + BYTES[:2], 2)
    q = _words(w, 2, 2)
    p = least = 0
    for k in range(4):
        s = read(w, "s", None, None, k)
        part = _sum(_term(q[j], 8 * i + 2 * k, 2, x[:, :, k, :, j, i]) for j in range(8) for i in range(2))
        p = p + part * (s & 15).astype(jnp.float32)
        least = least + (s >> 4).astype(jnp.float32) * sums[:, :, k, :, None]
    d, m = (_read_f32(w, name)[:, None, None] for name in "dm")
    return _add_blocks(p * d + least * m)


def _q2_k_chunk(w, lanes):
    s = read(w, "s", lanes=lanes)
    d, m = (_read_f32(w, name, lanes=lanes)[:, None, None, None] for name in "dm")
    factors = d * (s & 15).astype(jnp.float32), m * (s >> 4).astype(jnp.float32)  # [b, half, which 16, code, C]
    scale, minimum = (f.swapaxes(2, 3)[..., None, None, :] for f in lax.optimization_barrier(factors))
    q = _parts(_codes(w, lanes, 2, 1, 2), 2)  # [b, half, code, which 16, word, byte, C]
    return (q.astype(jnp.float32) * scale + minimum).reshape(w.columns, lanes[1])


def _nibbles_product(w, x):
    x = x.reshape(-1, 8, 2, 4, 4)  # low nibbles are values 0 to 15 of a sub-block, high ones 16 to 31; word, byte
    least = lax.optimization_barrier(-60 * _last_sum(x.reshape(-1, 8, 32)))
    x = _met(x, BYTES, 8)
    q = _words(w, 8)

    def values(words, high):
        """Four values + 60 in a word: of a code m in its byte 17 m, and one more where the second bit of m is set."""
        if high:
            m = words & 0x70707070
            return m + lax.shift_right_logical(m, 4) + (lax.shift_right_logical(m, 5) & 0x01010101)
        m = words & 0x07070707
        return m + (m << 4) + (lax.shift_right_logical(m, 1) & 0x01010101)

    v = [[values(words, high) for words in q] for high in range(2)]
    # Four sums side by side, since one would wait for itself.
    four = [_sum(_term(v[h][j], 8 * k, 8, x[:, :, h, j, k]) for h in range(2) for j in range(4)) for k in range(4)]
    return _add_blocks((_sum(four) + least[..., None]) * _int8_scale(w)[0])


def _nibbles_chunk(w, lanes):
    scale = lax.optimization_barrier(_int8_scale(w, lanes)[0])[:, :, None, None, None]
    m = _parts(_codes(w, lanes, 8, 1), 4)
    q = 17 * m + (m >> 1 & 1) - 60
    return (q.astype(jnp.float32) * scale).reshape(w.columns, lanes[1])


@cache
def _iq2_xxs_table():
    return packing.iq2_xxs_table()


def _iq2_xxs_words(index, signs, half):
    """Four signed codes in each int32, low byte first: values 4·half … of the groups with these entries and sign bytes."""
    table = jnp.asarray(_iq2_xxs_table().reshape(-1))
    words = table.at[index.astype(jnp.int32) + 256 * half].get(mode="promise_in_bounds")
    ones = (signs >> 4 * half & 15) * 0x00204081 & 0x01010101  # bit i to byte i
    return (words ^ ones * 255) + ones


def _iq2_xxs_signs(s, shift):
    """Sign bytes of the groups whose seven stored bits begin at bit ``shift``; the eighth is their parity."""
    signs = (s >> shift & 127).astype(jnp.int32)
    return signs | primitives.odd_bits(signs) << 7


def _iq2_xxs_scale(w, lanes=None):
    s = read(w, "s", lanes=lanes)
    return s, _read_f32(w, "d", lanes=lanes)[:, None] * (((s >> 28).astype(jnp.float32) + 0.5) * 0.25)


def _iq2_xxs_product(w, x):
    x = x.reshape(-1, 8, 4, 2, 4) * 2.0**-24
    s, scale = _iq2_xxs_scale(w)
    terms = []
    for group in range(4):
        index, signs = read(w, "q", None, group), _iq2_xxs_signs(s, 7 * group)
        for half in range(2):
            words = _iq2_xxs_words(index, signs, half)
            for j in range(4):  # the byte as the word's highest, so that no shift must extend its sign
                top = (words << 24 - 8 * j & -(1 << 24)).astype(jnp.float32)
                terms.append(top * x[:, :, group, half, j, None])
    return _add_blocks(_sum(terms) * scale)


def _iq2_xxs_chunk(w, lanes):
    s, scale = _iq2_xxs_scale(w, lanes)
    scale = lax.optimization_barrier(scale * 2.0**-24)
    signs = _iq2_xxs_signs(s[:, :, None], jnp.arange(0, 28, 7, dtype=jnp.uint32)[:, None])  # [b, 8, 4, C]
    index, half = read(w, "q", lanes=lanes)[:, :, :, None], jnp.arange(2)[:, None]
    words = lax.optimization_barrier(_iq2_xxs_words(index, signs[:, :, :, None], half))  # [b, 8, 4, 2, C]
    tops = words[:, :, :, :, None] << jnp.arange(24, -8, -8)[:, None] & -(1 << 24)
    return (tops.astype(jnp.float32) * scale[:, :, None, None, None]).reshape(w.columns, lanes[1])


@dataclass(frozen=True)
class Kind:
    axes: int  # of plane "q"
    product: object
    chunk: object


KINDS = {
    "int8": Kind(4, _int8_product, _int8_chunk),
    "float": Kind(4, _float_product, _float_chunk),
    "Q4_K": Kind(4, _q4_k_product, _q4_k_chunk),
    "Q2_K": Kind(4, _q2_k_product, _q2_k_chunk),
    "nibbles": Kind(4, _nibbles_product, _nibbles_chunk),
    "IQ2_XXS": Kind(4, _iq2_xxs_product, _iq2_xxs_chunk),
}
