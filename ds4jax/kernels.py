"""Products of weights in the layout of :mod:`ds4jax.blocks`: Pallas kernels for CUDA that dequantise inside, and XLA.

A kernel takes few rows of x (decode) and reads every byte of a weight once: a program owns R output rows, decodes a step of
(mostly) 256 values of each at a time, multiplies them by the same values of x and adds up elementwise; one sum over the step
ends it. Stacks come whole, with the layer or expert as numbers that the kernel reads: nothing is copied, and of an expert stack
only the chosen experts' bytes are touched. What no kernel takes, ``choose`` says why, XLA does: rows are dequantised in chunks
and multiplied as float32 matrices (as bfloat16 ones where the weights' ``operands`` say so).

The kernels were lowered for CUDA, compiled for sm_90 by Triton 3.9 (which tells registers and spills), and run in Pallas's
interpreter. They were never run or timed on a GPU: tile sizes follow from register counts, not from measurements.

Letters: N output rows, K columns, T rows of x, E experts, F an expert's width, P pairs of token and expert, R rows a program.
"""

import logging
from dataclasses import dataclass
from functools import cache
from math import gcd, prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from . import packing
from .blocks import rows

MOST_ROWS = 8  # rows of x that a kernel takes
CHUNK_VALUES = 1 << 22  # values dequantised at a time: 16 MB, which stay in a GPU's cache
WARPS = 4
SUMS_PER_THREAD = 32  # registers for sums; a thread has 255
PROGRAMS = 256  # that keep a GPU of some 130 multiprocessors busy
UNREACHABLE = 1 << 31, 1 << 32  # bytes of planes that offsets do not reach, see _unreachable
MOST_CUT = 64  # matrices that are copied out of such a plane

log = logging.getLogger(__name__)


class Choice(NamedTuple):
    kernel: bool
    reason: str


def choose(type, N, K, T, platform):
    """Whether a product of T rows of x with [N, K] weights of a type (its name) is a kernel's or XLA's, and why.

    platform: where the program will run ("cuda", "cpu", …).
    """
    if platform != "cuda":
        return Choice(False, f"the kernels are for cuda, not {platform}")
    if type not in TILES:
        return Choice(False, f"no kernel decodes {type}")
    if T > MOST_ROWS:
        return Choice(False, f"{T} rows of x are worth dequantising once; a kernel takes {MOST_ROWS}")
    tile = TILES[type](K)
    if tile.columns < 32:
        return Choice(False, f"{K} columns are no multiple of 32")
    return Choice(True, f"{T} rows of x: dequantised inside the product")


def linear(w, x):
    """x [T, K] float32 times one matrix: float32 [T, N]. w: as :class:`ds4jax.weights.Packed`."""
    return _by_platform(matrix_product, chunked_product, w, x) if _chosen(w, len(x)) else chunked_product(w, x)


def experts(h, chosen, weights, gate, up, down, act, own, otherwise):
    """:func:`ds4jax.weights.experts`: two kernels on CUDA where there are some, else the function ``otherwise``."""

    def kernel(h, chosen, weights, gate, up, down, own):
        return expert_products(h, chosen, weights, gate, up, down, act, own)

    def fallback(h, chosen, weights, gate, up, down, own):
        return otherwise(h, chosen, weights, gate, up, down, act, own)

    operands = h, chosen, weights, gate, up, down, own
    kernels = all(_chosen(w, 1) for w in (gate, up, down))
    if chosen.size > MOST_CUT and any(_unreachable(plane) for w in (gate, up, down) for plane in w.planes.values()):
        kernels = False
    return _by_platform(kernel, fallback, *operands) if kernels else fallback(*operands)


def _chosen(w, T):
    """Whether a kernel is what CUDA runs."""
    choice = choose(w.type, w.rows, w.columns, T, "cuda")
    log.debug("%s [%d, %d] on cuda: %s", w.type, w.rows, w.columns, choice.reason)
    return choice.kernel


def _by_platform(kernel, fallback, *operands):
    """The kernel where the program is lowered for CUDA. Decided by JAX at lowering, so that exports are right too."""
    return lax.platform_dependent(*operands, cuda=kernel, default=fallback)


# XLA


def chunked_product(w, x):
    """The product by XLA, for every type and shape: x [T, K] times chunks of dequantised rows."""
    size = w.rows if w.type == "F32" else min(w.rows, max(64, CHUNK_VALUES // w.columns))
    return by_chunks(lambda start: _dense_product(x, rows(w, start, size), w.operands), len(x), w.rows, size)


def by_chunks(product, T, N, size):
    """float32 [T, N] of ``product(start)`` [T, size] for one chunk of output rows after the other, in one buffer each.

    The last chunk may overlap the one before. One that holds all rows needs no loop.
    """
    if size == N:
        return product(0)

    def one_chunk(i, y):
        start = jnp.minimum(i * size, N - size)
        return lax.dynamic_update_slice(y, product(start), (0, start))

    return lax.fori_loop(0, -(-N // size), one_chunk, jnp.zeros((T, N), jnp.float32))


def _dense_product(x, w, operands):
    """x [T, K], w [N, K] → [T, N]. HIGHEST, since a GPU would otherwise round float32 operands to ten bits."""
    if operands == "bfloat16":
        x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


# Kernels


def matrix_product(w, x, interpret=False):
    """x [T, K] float32, T up to MOST_ROWS, times one matrix of a kernel's type: float32 [T, N]."""
    T, N = len(x), w.rows
    m = _Matrix.of(w)
    R = rows_per_program(m.tile, N, T)

    def kernel(at, x, planes, tables, out):
        row = _first_row(0, R, N)
        lead = [at[j] for j in range(len(w.index))]
        for t, y in enumerate(_dot(m, planes, tables, lead, 0, row, R, x, range(T))):
            out[t, pl.ds(row, R)] = y

    return _call(kernel, (T, N), (pl.cdiv(N, R),), interpret)(_numbers(w.index), m.view(x), m.planes, m.tables)


def expert_products(h, chosen, weights, gate, up, down, act, own=(), interpret=False):
    """As :func:`ds4jax.weights.experts`, of h [T, D]: two kernels, one for gate, up and ``act``, one for the sum of downs.

    act must be elementwise where ``own`` is empty, since it then sees R values at a time; else it is XLA's.
    """
    used = chosen.shape[1]
    h = _rounded(gate, h)
    flat, share = chosen.reshape(-1).astype(jnp.int32), weights.reshape(-1).astype(jnp.float32)
    if own:
        one = flat[:, None]
        x = jnp.repeat(h, used, axis=0)
        g, u = (sum_of_experts(w, one, x, interpret) for w in (gate, up))
        a = share[:, None] * jax.vmap(act)(g, u, *(array[flat] for array in own))
    else:
        a = _activations(h, used, flat, share, gate, up, act, interpret)
    return sum_of_experts(down, flat.reshape(-1, used), _rounded(down, a), interpret)


def _activations(h, used, flat, share, gate, up, act, interpret):
    """share_p · act(gate_e h_r, up_e h_r) for every pair p of row r and expert e = flat[p]: [P, F]."""
    pairs, F = len(flat), gate.rows
    g, u = _Matrix.of(gate, flat), _Matrix.of(up, flat)
    R = rows_per_program(max(g.tile, u.tile, key=lambda tile: prod(tile.part)), F, 2, pairs)

    def kernel(at, flat, share, x, planes, tables, out):
        p, row = pl.program_id(0), _first_row(1, R, F)
        product = [
            _dot(m, planes[i], tables[i], [*(at[i][j] for j in range(n)), flat[p]], p, row, R, x[i], [p // used])[0]
            for i, (m, n) in enumerate([(g, len(gate.index)), (u, len(up.index))])
        ]
        out[p, pl.ds(row, R)] = share[p] * act(*product)

    at = [_numbers(gate.index), _numbers(up.index)]
    xs, planes, tables = [g.view(h), u.view(h)], [g.planes, u.planes], [g.tables, u.tables]
    return _call(kernel, (pairs, F), (pairs, pl.cdiv(F, R)), interpret)(at, flat, share, xs, planes, tables)


def sum_of_experts(w, chosen, x, interpret=False):
    """``y_r = Σ_k W_e x[r · used + k]`` with e = chosen[r, k]: chosen int32 [T, used], x [T · used, K] → float32 [T, N]."""
    T, used = chosen.shape
    N = w.rows
    m = _Matrix.of(w, chosen.reshape(-1))
    R = rows_per_program(m.tile, N, 1, T)

    def kernel(at, chosen, x, planes, tables, out):
        r, row = pl.program_id(0), _first_row(1, R, N)
        lead = [at[j] for j in range(len(w.index))]

        def add_expert(k, y):
            pair = r * used + k
            return y + _dot(m, planes, tables, [*lead, chosen[r, k]], pair, row, R, x, [pair])[0]

        out[r, pl.ds(row, R)] = lax.fori_loop(0, used, add_expert, jnp.zeros(R, jnp.float32))

    return _call(kernel, (T, N), (T, pl.cdiv(N, R)), interpret)(_numbers(w.index), chosen, m.view(x), m.planes, m.tables)


def _rounded(w, x):
    """x as the operands of a product with ``w``."""
    return lax.reduce_precision(x, 8, 7) if w.operands == "bfloat16" else x


def rows_per_program(tile, N, T, others=1):
    """Output rows R of one program, a power of two: what the registers hold, but so few that there are enough programs.

    others: programs for every R rows.
    """
    R = max(1, min(32, SUMS_PER_THREAD * 32 * WARPS // (T * prod(tile.part))))
    while R > 1 and (R > N or R > 4 and others * N // R < PROGRAMS):
        R //= 2
    return 1 << R.bit_length() - 1


def _call(kernel, shape, grid, interpret):
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=grid,
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=2),
    )


def _numbers(index):
    """Positions in a stack as an operand: int32, never empty."""
    return jnp.stack([jnp.asarray(i, jnp.int32) for i in index or (0,)])


def _first_row(axis, R, N):
    """The last program overlaps the one before where R does not divide N; both write the same."""
    return jnp.minimum(pl.program_id(axis) * R, N - R)


def _unreachable(plane):
    """Whether kernels cannot index a plane: Pallas takes 32 bits up to 2³² bytes, and Triton takes them for signed."""
    least, most = UNREACHABLE
    return plane.dtype.itemsize == 1 and least < prod(plane.shape) <= most


@dataclass(frozen=True)
class _Matrix:
    """A matrix (or a stack) as a kernel sees it: its planes [..., N, steps, *field], its codebooks.

    cut: names of planes out of which the matrices that a kernel is going to read were copied: [pairs or 1, N, steps, *field].
    """

    tile: "Tile"
    planes: dict
    tables: tuple
    steps: int
    cut: frozenset

    @classmethod
    def of(cls, w, experts=None):
        """experts: numbers [pairs] of the matrices that will be read, where there is more than the one at ``w.index``."""
        tile = TILES[w.type](w.columns)
        steps, planes = w.columns // tile.columns, dict(w.planes)
        cut = frozenset(name for name, plane in planes.items() if _unreachable(plane))
        for name in cut:
            taken = planes[name].at[w.index if experts is None else (*w.index, experts)].get(mode="promise_in_bounds")
            planes[name] = taken[None] if experts is None else taken
        planes = {name: planes[name].reshape(*planes[name].shape[:-1], steps, *field) for name, field in tile.planes.items()}
        return cls(tile, planes, tuple(map(jnp.asarray, tile.tables())), steps, cut)

    def view(self, x):
        """x [T, K] as [T, steps, *tile.x]."""
        return x.astype(jnp.float32).reshape(len(x), self.steps, *self.tile.x)


def _dot(m, planes, tables, lead, pair, row, R, x, ts):
    """Inside a kernel: rows row … row + R − 1 of the matrix at ``lead`` times rows ``ts`` of x. A list of float32 [R].

    pair: the matrix's place in planes that were cut.
    """

    def step(i, sums):
        def read(name, *index):
            at = (pair,) if name in m.cut else lead
            return planes[name][(*at, pl.ds(row, R), i, *index)]

        parts = [jnp.zeros_like(s) for s in sums]
        for index, weights in m.tile.parts(read, tables):
            parts = [p + weights * x[(t, i, *index)][None] for p, t in zip(parts, ts, strict=True)]
        return [s + p for s, p in zip(sums, parts, strict=True)]

    sums = lax.fori_loop(0, m.steps, step, [jnp.zeros((R, *m.tile.part), jnp.float32) for _ in ts])
    for _ in m.tile.part:
        sums = [s.sum(-1) for s in sums]
    return sums


# How kernels decode a step of every type


@dataclass(frozen=True)
class Tile:
    """A step: so many columns of R rows, decoded in parts of equal shape.

    x: the shape in which the step's values of x are seen; planes: name → shape of the step's field; part: shape of a part;
    parts: (read, tables) → pairs of an index into x and weights float32 [R, *part]; tables: → the codebooks, arrays.
    read(name, *index) loads a field [R, *field] of the step, at an index of its shape.
    """

    columns: int
    x: tuple
    planes: dict
    part: tuple
    parts: object
    tables: object = tuple


ALL = slice(None)


def _f32(x):
    return x.astype(jnp.float32)


def _codes(x, shift, mask):
    """Bits of an integer as float32."""
    return _f32(x >> shift & mask)


def _int(x):
    """Arithmetic on bytes would be done in 32 bits anyway."""
    return x.astype(jnp.int32)


def _iota(shape, axis, step=1):
    return lax.broadcasted_iota(jnp.int32, shape, axis) * step


def _most(K, values, limit):
    """The largest power of two of blocks, up to ``limit``, that divide a row."""
    return gcd(K // values, limit)


def _float(K):
    C = _most(K, 1, 256)

    def parts(read, tables):
        q = read("q")
        if q.dtype == jnp.uint16:  # bfloat16
            yield (), lax.bitcast_convert_type(_int(q) << 16, jnp.float32)
        else:
            yield (), _f32(q)

    return Tile(C, (C,), {"q": (C,)}, (C,), parts)


def _q8_0(K):
    C = _most(K, 32, 8)

    def parts(read, tables):
        yield (), _f32(read("q")) * _f32(read("d"))[:, :, None]

    return Tile(32 * C, (C, 32), {"q": (C, 32), "d": (C,)}, (C, 32), parts)


def _q4_k(K):
    """Sub-block 2g in the low nibbles of group g, 2g + 1 in the high ones."""

    def parts(read, tables):
        q = _int(read("q"))
        d, m = _f32(read("d"))[:, None], _f32(read("m"))[:, None]
        for i in range(2):
            scale, least = (factor * _f32(read(name, ALL, i)) for factor, name in ((d, "s"), (m, "n")))
            yield (ALL, i), _codes(q, 4 * i, 15) * scale[:, :, None] - least[:, :, None]

    return Tile(256, (4, 2, 32), {"q": (4, 32), "s": (4, 2), "n": (4, 2), "d": (), "m": ()}, (4, 32), parts)


def _q5_k(K):
    """As Q4_K; the fifth bit of sub-block s is bit s of the 32 bytes h."""

    def parts(read, tables):
        q, h = _int(read("q")), _int(read("h"))[:, None]
        d, m = _f32(read("d"))[:, None], _f32(read("m"))[:, None]
        for i in range(2):
            scale, least = (factor * _f32(read(name, ALL, i)) for factor, name in ((d, "s"), (m, "n")))
            codes = q >> 4 * i & 15 | (h >> _iota((1, 4, 1), 1, 2) + i & 1) << 4
            yield (ALL, i), _f32(codes) * scale[:, :, None] - least[:, :, None]

    planes = {"q": (4, 32), "h": (32,), "s": (4, 2), "n": (4, 2), "d": (), "m": ()}
    return Tile(256, (4, 2, 32), planes, (4, 32), parts)


def _q2_k(K):
    """Halves of 128 values: bits 2k of byte j are value 32k + j; every 16 values have a scale."""

    def parts(read, tables):
        q = _int(read("q"))
        d, m = (_f32(read(name))[:, None, None] for name in "dm")
        for k in range(4):
            s = _int(read("s", ALL, k))
            scale, least = d * _codes(s, 0, 15), m * _codes(s, 4, 15)
            yield (ALL, k), _codes(q, 2 * k, 3) * scale[..., None] - least[..., None]

    return Tile(256, (2, 4, 2, 16), {"q": (2, 2, 16), "s": (2, 4, 2), "d": (), "m": ()}, (2, 2, 16), parts)


def _q3_k(K):
    """As Q2_K; the third bit of value 32k + j of half i is bit 4i + k of byte j of h."""

    def parts(read, tables):
        q, h = _int(read("q")), _int(read("h"))[:, None]
        d = _f32(read("d"))[:, None, None]
        for k in range(4):
            codes = q >> 2 * k & 3 | (h >> _iota((1, 2, 1, 1), 1, 4) + k & 1) << 2
            yield (ALL, k), (_f32(codes) - 4) * (d * _f32(read("s", ALL, k)))[..., None]

    return Tile(256, (2, 4, 2, 16), {"q": (2, 2, 16), "h": (2, 16), "s": (2, 4, 2), "d": ()}, (2, 2, 16), parts)


def _q6_k(K):
    """Halves of 128 values: quarter k has nibble k // 2 of byte 32 · (k % 2) + j, and bits 2k of byte j of h."""

    def parts(read, tables):
        h, d = _int(read("h")), _f32(read("d"))[:, None, None]
        for k in range(4):
            codes = _int(read("q", ALL, k % 2)) >> 4 * (k // 2) & 15 | (h >> 2 * k & 3) << 4
            yield (ALL, k), (_f32(codes) - 32) * (d * _f32(read("s", ALL, k)))[..., None]

    planes = {"q": (2, 2, 2, 16), "h": (2, 2, 16), "s": (2, 4, 2), "d": ()}
    return Tile(256, (2, 4, 2, 16), planes, (2, 2, 16), parts)


def _pq2_0(K):
    """Bits 2k of byte j are value 4j + k."""
    C = _most(K, 128, 2)

    def parts(read, tables):
        codes = _int(read("q"))[..., None] >> _iota((1, 1, 1, 4), 3, 2) & 3
        yield (), (_f32(codes) - 1) * _f32(read("d"))[:, :, None, None]

    return Tile(128 * C, (C, 32, 4), {"q": (C, 32), "d": (C,)}, (C, 32, 4), parts)


def _iq2_xxs(K):
    """Eight words s of a scale and four times seven signs."""

    def parts(read, tables):
        s = _int(read("s"))
        scale = _f32(read("d"))[:, None] * ((_codes(s, 28, 15) + 0.5) * 0.25)
        values = _iq2_values(tables, 256, _int(read("q")), s[:, :, None] >> _iota((1, 1, 4), 2, 7) & 127)
        yield (), values * scale[:, :, None, None, None]

    shape = 8, 4, 2, 4
    return Tile(256, shape, {"q": (8, 4), "s": (8,), "d": ()}, shape, parts, lambda: _iq2_words("IQ2_XXS"))


def _iq2_xs(K):
    """Words of nine bits of an index and seven signs; a nibble of s is the scale of two of them."""

    def parts(read, tables):
        q, s = _int(read("q")), _int(read("s"))[:, :, None] >> _iota((1, 1, 2), 2, 4) & 15
        scale = _f32(read("d"))[:, None, None] * ((_f32(s) + 0.5) * 0.25)
        yield (), _iq2_values(tables, 512, q & 511, q >> 9 & 127) * scale[..., None, None, None]

    shape = 8, 2, 2, 2, 4
    return Tile(256, shape, {"q": (8, 2, 2), "s": (8,), "d": ()}, shape, parts, lambda: _iq2_words("IQ2_XS"))


def _iq2_values(tables, entries, index, signs):
    """Entries of a codebook with seven signs and, for the eighth, their parity: float32 [..., 2, 4]."""
    (words,) = tables
    signs = (signs | (lax.population_count(signs) & 1) << 7)[..., None, None]
    ones = tuple(1 for _ in index.shape)
    word = words[index[..., None] + _iota((*ones, 2), index.ndim, entries)][..., None]
    half, byte = (_iota((*ones, 2, 4), index.ndim + axis) for axis in range(2))
    magnitude = _f32(word >> 8 * byte & 255)
    return jnp.where((signs >> 4 * half + byte & 1) != 0, -magnitude, magnitude)


@cache
def _iq2_words(name):
    """A codebook, int32 [2 · entries]: values 0–3 of every entry as bytes, the lowest first, then values 4–7 of every entry."""
    return (np.ascontiguousarray(packing._grid(name).reshape(-1, 2, 4).swapaxes(0, 1)).view("<i4").reshape(-1),)


def _iq1_s(K):
    """Eight words h: three bits more for each of four indices, the scale, and the sign of the shift of an eighth."""

    def parts(read, tables):
        h = _int(read("h"))
        index = _int(read("q")) | (h[:, :, None] >> _iota((1, 1, 4), 2, 3) & 7) << 8
        scale = _f32(read("d"))[:, None] * (2 * _codes(h, 12, 7) + 1)
        yield (), _iq1_values(tables, index, (h >> 15 & 1)[:, :, None]) * scale[:, :, None, None]

    shape = 8, 4, 8
    return Tile(256, shape, {"q": (8, 4), "h": (8,), "d": ()}, shape, parts, _iq1_words)


def _iq1_m(K):
    """Four words s: a nibble of the scale's 16 bits, then three bits for each 16 of 64 values. A nibble of h per index."""

    def parts(read, tables):
        s, h = _int(read("s")), _int(read("h"))[..., None] >> _iota((1, 1, 1, 2), 3, 4)
        d = ((s >> 12 & 15) << _iota((1, 4), 1, 4)).sum(-1)
        d = _f32(lax.bitcast_convert_type(d.astype(jnp.uint16), jnp.float16))
        scale = d[:, None, None] * (2 * _f32(s[:, :, None] >> _iota((1, 1, 4), 2, 3) & 7) + 1)
        yield (), _iq1_values(tables, _int(read("q")) | (h & 7) << 8, h >> 3 & 1) * scale[..., None, None]

    shape = 4, 4, 2, 8
    return Tile(256, shape, {"q": (4, 4, 2), "h": (4, 4), "s": (4,)}, shape, parts, _iq1_words)


def _iq1_values(tables, index, negative):
    """float32 [..., 8]: entries of the codebook plus an eighth, or minus one where ``negative`` is 1."""
    (words,) = tables
    codes = words[index][..., None] >> _iota((*(1 for _ in index.shape), 8), index.ndim, 4) & 15
    return _f32(codes) - (0.25 * _f32(negative) + 0.875)[..., None]


@cache
def _iq1_words():
    """The codebook of IQ1_S and IQ1_M, int32 [2048]: eight nibbles of −1, 0, 1 plus 1, the lowest first."""
    nibbles = packing._grid("IQ1_S").astype(np.int64) + 1 << np.arange(0, 32, 4)
    return (nibbles.sum(axis=1).astype(np.uint32).view(np.int32),)


TILES = {
    "F32": _float,
    "F16": _float,
    "BF16": _float,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "PQ2_0": _pq2_0,
}
"""Type → its :class:`Tile`, a function of K. Formats are ggml's ``block_*``."""
