"""Weights that stay packed: a matrix as planes of its GGUF blocks, and the products that read them.

``linear``, ``expert_linear``, ``experts`` and ``embed_rows`` are all that a family needs. Formulations are those that measured
fastest on XLA:CPU (bench/products.py): output rows are the last axis; one row of x meets a whole matrix in one fusion of
explicit sums, ended by a barrier and a ``ones @ p``; many rows meet float32 chunks dequantised in a loop. Shapes decide at
trace time which it is. Pass weights to jitted functions as arguments: a captured constant would be copied into the program.
Knows nothing about models.

Letters: N output rows, K columns, T rows of x, L layers, E experts; b blocks along K, S sub-blocks of W values in a block.
"""

import hashlib
import os
import platform
import sys
from dataclasses import dataclass, field, replace
from functools import cache, partial, reduce
from operator import add
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ds4ref.quants import PLAIN, TensorType

from . import packing

LAYOUTS = ("cpu", "int8")
FEW_ROWS = 6  # rows of x that are multiplied one by one
SMALL = 1 << 16  # values up to which a matrix is dequantised whole: its product is not worth a long program
CHUNK_VALUES = 1 << 20  # float32 values dequantised at a time
TILE = 32  # tokens of one expert multiplied at a time
PAIRS_PER_EXPERT = 8  # (token, expert) pairs per expert from which dequantising an expert pays


@partial(jax.tree_util.register_dataclass, data_fields=["planes", "index"], meta_fields=["type", "kind", "rows", "columns"])
@dataclass(frozen=True)
class Packed:
    """One packed matrix [N, K], or a stack of them [..., N, K]: a pytree whose leaves are planes [..., b, *field, lanes].

    index: positions along the first axes of the stack, integers or traced scalars, that ``at`` has chosen. They are applied
    where a plane is read, so that a product in a loop over layers or experts copies nothing.
    type: name of the GGUF type; kind: which planes there are, see :mod:`ds4jax.packing`.
    """

    planes: dict[str, jax.Array]
    type: str
    kind: str
    rows: int
    columns: int
    index: tuple = field(default=())

    @property
    def shape(self):
        """[..., N, K] as in the file, without the axes that ``index`` has chosen from."""
        q = self.planes["q"]
        return (*q.shape[len(self.index) : q.ndim - _KINDS[self.kind].axes], self.rows, self.columns)

    def at(self, *index):
        """Entry ``index`` along the first axes: a layer, an expert."""
        if len(index) > len(self.shape) - 2:
            raise ValueError(f"{self.type} weights {list(self.shape)} have no {len(index)} leading axes to index")
        return replace(self, index=(*self.index, *index))


def pack(tensor, layout="cpu"):
    """A tensor of an artifact on the device: :class:`Packed` for matrices and stacks, an array for vectors and integers.

    Vectors are dequantised to float32. int64 values that JAX's 32 bits cannot hold stay a NumPy array.
    layout: "cpu", or "int8": faster on IQ2_XXS, for four times its bytes. ValueError for another one.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} of weights is unknown; {' or '.join(map(repr, LAYOUTS))} is accepted")
    if tensor.type in PLAIN and PLAIN[tensor.type].kind == "i":
        return _integers(tensor.dequantize())
    if len(tensor.shape) == 1:
        return array(tensor)
    planes = packing.planes(tensor.data, tensor.type, tensor.shape, layout)
    planes = {name: jnp.asarray(plane) for name, plane in planes.items()}
    return Packed(planes, TensorType(tensor.type).name, packing.kind(tensor.type, layout), *tensor.shape[-2:])


def pack_stack(tensors, layout="cpu"):
    """Tensors of one shape and type, one per layer, as one stack [L, ...] of what :func:`pack` gives.

    Each is packed, written into the stack on the device and let go. ValueError unless they are alike.
    """
    alike = {(t.shape, t.type) for t in tensors}
    if len(alike) != 1:
        found = ", ".join(sorted(f"{TensorType(type).name} {list(shape)}" for shape, type in alike))
        raise ValueError(f"only tensors of one shape and type can be stacked, not {found or 'none'}")
    stack = None
    for layer, tensor in enumerate(tensors):
        packed = pack(tensor, layout)
        if stack is None:
            stack = jax.tree.map(lambda a: jnp.zeros((len(tensors), *a.shape), a.dtype), packed)
        stack = _write_layer(stack, packed, layer)
    return stack


@partial(jax.jit, donate_argnums=0)
def _write_layer(stack, packed, layer):
    return jax.tree.map(lambda s, a: lax.dynamic_update_index_in_dim(s, a, layer, 0), stack, packed)


def array(tensor):
    """A tensor dequantised: float32, of its own shape. For norms, biases and what else is not multiplied as a matrix."""
    return jnp.asarray(tensor.dequantize())


def _integers(values):
    if values.dtype == np.int64:
        limits = np.iinfo(np.int32)
        if values.size and (values.min() < limits.min or values.max() > limits.max):
            return values
        values = values.astype(np.int32)
    return jnp.asarray(values)


def nbytes(weights):
    """Bytes that the arrays of a Packed, or of any pytree of them, take."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(weights) if hasattr(leaf, "nbytes"))


def layout_name(layout="cpu"):
    """What a plan calls a layout."""
    return {"cpu": "lanes, packed (XLA)", "int8": "lanes, IQ2_XXS as int8 (XLA)"}[layout]


def select_layer(weights, layer):
    """Layer ``layer`` (a traced integer) of a pytree of stacks [L, ...]. Packed matrices are not copied, see Packed.index."""
    return jax.tree.map(
        lambda w: w.at(layer) if isinstance(w, Packed) else lax.dynamic_index_in_dim(w, layer, keepdims=False),
        weights,
        is_leaf=lambda w: isinstance(w, Packed),
    )


# Products. Everything below may be traced.


def dequantize(w):
    """All values, float32 [..., N, K]: bit for bit those of :func:`ds4ref.quants.dequantize`.

    But for subnormal numbers, which XLA:CPU may take for zero; of the packed types only MXFP4 can hold any. An array comes
    back as it is.
    """
    if not isinstance(w, Packed):
        return w
    lead = w.shape[:-2]
    if not lead:
        return _KINDS[w.kind].chunk(w, (0, w.rows)).T
    return lax.map(lambda i: dequantize(w.at(i)), jnp.arange(lead[0]))


def linear(w, x):
    """``x Wᵀ``: x [..., K] → float32 [..., N]. w: :class:`Packed` [N, K], or an array."""
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    y = _packed_product(w, rows) if isinstance(w, Packed) else _dense_product(w.astype(jnp.float32), rows)
    return y.reshape(*x.shape[:-1], w.shape[-2])


def expert_linear(w, expert, x):
    """``x W_eᵀ`` for expert ``expert`` (a traced integer) of a stack [E, N, K]; reads only that expert's bytes."""
    return linear(w.at(expert) if isinstance(w, Packed) else lax.dynamic_index_in_dim(w, expert, keepdims=False), x)


def embed_rows(w, ids):
    """Rows ``ids`` [T] of an embedding [V, D]: float32 [T, D]. Ids beyond V read its last row."""
    ids = jnp.clip(ids, 0, w.shape[-2] - 1)
    if not isinstance(w, Packed):
        return w[ids].astype(jnp.float32)
    planes = {name: _read(w, name)[..., ids] for name in w.planes}
    taken = replace(w, planes=planes, rows=len(ids), index=())
    return _KINDS[w.kind].chunk(taken, (0, len(ids))).T


def experts(h, chosen, weights, gate, up, down, act, own=()):
    """``y_r = Σ_k weights[r, k] · down_e( act(gate_e h_r, up_e h_r) )`` with e = chosen[r, k].

    h: [R, D]; chosen, weights: [R, K]; gate, up: stacks [E, F, D]; down: [E, D, F]; act: (gate, up) [..., F] → [..., F].
    own: arrays [E, ...] whose entries of the expert are further arguments of ``act``.
    Few pairs go one by one; many are grouped by expert, and each expert that has any is dequantised once.
    """
    pairs = chosen.size
    many = len(h) > FEW_ROWS and pairs >= PAIRS_PER_EXPERT * gate.shape[-3]
    apply = _grouped_experts if many else _single_experts
    return apply(h.astype(jnp.float32), chosen, weights, gate, up, down, act, own)


def _single_experts(h, chosen, weights, gate, up, down, act, own):
    """One pair after the other, products of one row; sorted by expert, whose bytes are then still in the cache."""
    used, flat = chosen.shape[1], chosen.reshape(-1)
    order = jnp.argsort(flat)

    def add_pair(n, y):
        i = order[n]
        r, e = i // used, flat[i]
        x = lax.dynamic_index_in_dim(h, r, keepdims=False)
        z = expert_linear(down, e, act(expert_linear(gate, e, x), expert_linear(up, e, x), *(a[e] for a in own)))
        return y.at[r].add(weights[r, i % used] * z)

    return lax.fori_loop(0, chosen.size, add_pair, jnp.zeros((len(h), down.shape[-2]), jnp.float32))


def _grouped_experts(h, chosen, weights, gate, up, down, act, own):
    """Pairs sorted by expert; each expert that has any dequantised once and applied to tiles of its tokens.

    A tile may run past its expert's pairs: the next expert overwrites those rows, and nobody reads the last ones.
    """
    pairs, used, E = chosen.size, chosen.shape[1], gate.shape[-3]
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    ends = jnp.cumsum(jnp.bincount(flat, length=E))
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    busy = jnp.nonzero(ends > starts, size=min(E, pairs), fill_value=0)[0]
    x = jnp.pad(h[order // used], ((0, TILE), (0, 0)))

    def one_expert(i, y):
        e = busy[i]
        g, u, d = (lax.optimization_barrier(_transposed(w, e)) for w in (gate, up, down))
        held = [a[e] for a in own]

        def one_tile(state):
            at, y = state
            rows = lax.dynamic_slice_in_dim(x, at, TILE)
            return at + TILE, lax.dynamic_update_slice_in_dim(y, act(rows @ g, rows @ u, *held) @ d, at, 0)

        return lax.while_loop(lambda state: state[0] < ends[e], one_tile, (starts[e], y))[1]

    y = jnp.zeros((pairs + TILE, down.shape[-2]), jnp.float32)
    y = lax.fori_loop(0, jnp.count_nonzero(ends > starts), one_expert, y)
    mine = jnp.zeros(pairs, order.dtype).at[order].set(jnp.arange(pairs, dtype=order.dtype))
    return jnp.einsum("rk,rkd->rd", weights.astype(jnp.float32), y[mine].reshape(*chosen.shape, -1))


def _transposed(w, expert):
    """Expert ``expert`` of a stack as float32 [K, N]."""
    if isinstance(w, Packed):
        return _KINDS[w.kind].chunk(w.at(expert), (0, w.rows))
    return lax.dynamic_index_in_dim(w, expert, keepdims=False).astype(jnp.float32).T


def _dense_product(w, x):
    """x [T, K], w [N, K] → [T, N], in the orientation that suits T."""
    if len(x) == 1:
        return (w @ x[0])[None]
    return (w @ x.T).T if len(x) < 32 else x @ w.T


def _packed_product(w, x):
    if len(w.shape) != 2:
        raise ValueError(f"a product needs one matrix; {w.type} weights {list(w.shape)} are a stack, choose with at()")
    if len(x) <= FEW_ROWS and w.rows * w.columns > SMALL:
        return jnp.stack([_KINDS[w.kind].product(w, row) for row in x])
    size = min(w.rows, max(64, CHUNK_VALUES // w.columns))
    return _chunked_product(w, x, size)


def _chunked_product(w, x, size):
    """x [T, K] times float32 chunks of ``size`` output rows. The last chunk may overlap the one before."""
    chunk = _KINDS[w.kind].chunk
    if size == w.rows:
        return x @ lax.optimization_barrier(chunk(w, (0, size)))

    def one_chunk(i, y):
        start = jnp.minimum(i * size, w.rows - size)
        part = x @ lax.optimization_barrier(chunk(w, (start, size)))
        return lax.dynamic_update_slice(y, part, (0, start))

    return lax.fori_loop(0, -(-w.rows // size), one_chunk, jnp.zeros((len(x), w.rows), jnp.float32))


# One ``product`` and one ``chunk`` per kind. product: x float32 [K] → [N]. chunk: lanes (start, size) → float32 [K, size], in
# the file's order along K. Both read planes through ``_read`` alone.


def _read(w, name, *where, lanes=None):
    """Plane ``name`` of one matrix: [b, *field, N or size], without the field axes for which ``where`` names a position."""
    plane, lead = w.planes[name], len(w.index)
    start, size = (0, w.rows) if lanes is None else lanes
    own = list(plane.shape[lead:])
    fixed = {axis: at for axis, at in enumerate(where, 1) if at is not None}
    starts = [*w.index, *(fixed.get(axis, 0) for axis in range(len(own) - 1)), start]
    sizes = [1 if axis in fixed else n for axis, n in enumerate(own[:-1])] + [size]
    shape = [n for axis, n in enumerate(sizes) if axis not in fixed]
    if all(isinstance(at, int) for at in starts):
        cut = lax.slice(plane, starts, [at + n for at, n in zip(starts, [1] * lead + sizes, strict=True)])
    else:
        cut = lax.dynamic_slice(plane, starts, [1] * lead + sizes)
    return cut.reshape(shape)


def _read_f32(w, name, *where, lanes=None):
    values = _read(w, name, *where, lanes=lanes)
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
    p = lax.optimization_barrier(p.reshape(-1, p.shape[-1]))
    return jnp.ones(len(p), jnp.float32) @ p


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


def _int8_product(w, x):
    S, W = w.planes["q"].shape[-3:-1]
    t = 2 if W == 16 and S % 2 == 0 else 1  # sub-blocks that share an output: 32 terms where there can be
    split = (-1, S // t, t, w.rows)
    x = x.reshape(-1, S // t, t, W)
    codes = [_read_f32(w, "q", None, j).reshape(split) for j in range(W)]
    parts = [_sum(q[:, :, i] * x[:, :, i, j, None] for j, q in enumerate(codes)) for i in range(t)]
    if w.kind == "float":
        return _add_blocks(_sum(parts))
    scale, minimum = _int8_scale(w)
    if "sc" in w.planes:
        scale = scale.reshape(split)
        parts = [part * scale[:, :, i] for i, part in enumerate(parts)]
    p = _sum(parts) if "sc" in w.planes else _sum(parts) * scale
    if minimum is not None:
        p = p + minimum * _last_sum(x[:, :, 0])[..., None]
    return _add_blocks(p)


def _int8_chunk(w, lanes):
    q = _read_f32(w, "q", lanes=lanes)
    if w.kind == "int8":
        scale, minimum = lax.optimization_barrier(_int8_scale(w, lanes))
        q = q * scale[:, :, None]
        if minimum is not None:
            q = q + minimum[:, :, None]
    return q.reshape(w.columns, lanes[1])


def _q4_k_product(w, x):
    x = x.reshape(-1, 4, 2, 32)  # sub-block 2g in the low nibbles of group g, 2g + 1 in the high ones
    sums = lax.optimization_barrier(_last_sum(x))
    codes = [_read(w, "q", None, j) for j in range(32)]
    low = _sum((q & 15).astype(jnp.float32) * x[:, :, 0, j, None] for j, q in enumerate(codes))
    high = _sum((q & 240).astype(jnp.float32) * (x[:, :, 1, j, None] / 16) for j, q in enumerate(codes))
    p = low * _read_f32(w, "sc", None, 0) + high * _read_f32(w, "sc", None, 1)
    least = _read_f32(w, "mn", None, 0) * sums[:, :, 0, None] + _read_f32(w, "mn", None, 1) * sums[:, :, 1, None]
    return _add_blocks(p * _read_f32(w, "d")[:, None] + least * _read_f32(w, "m")[:, None])


def _q4_k_chunk(w, lanes):
    q = _read(w, "q", lanes=lanes)[:, :, None] >> jnp.array([0, 4], jnp.uint8)[:, None, None] & 15
    d, m = (_read_f32(w, name, lanes=lanes)[:, None, None] for name in "dm")
    factors = d * _read_f32(w, "sc", lanes=lanes), m * _read_f32(w, "mn", lanes=lanes)
    scale, minimum = lax.optimization_barrier(factors)
    return (q.astype(jnp.float32) * scale[:, :, :, None] + minimum[:, :, :, None]).reshape(w.columns, lanes[1])


def _q2_k_product(w, x):
    x = x.reshape(-1, 2, 4, 2, 16)  # half, code in the byte, which 16
    sums = lax.optimization_barrier(_last_sum(x))
    codes = [_read(w, "q", None, None, j) for j in range(16)]
    p = least = 0
    for k in range(4):
        s = _read(w, "s", None, None, k)
        part = _sum((q & 3 << 2 * k).astype(jnp.float32) * (x[:, :, k, :, j, None] / 4**k) for j, q in enumerate(codes))
        p = p + part * (s & 15).astype(jnp.float32)
        least = least + (s >> 4).astype(jnp.float32) * sums[:, :, k, :, None]
    d, m = (_read_f32(w, name)[:, None, None] for name in "dm")
    return _add_blocks(p * d + least * m)


def _q2_k_chunk(w, lanes):
    q, s = _read(w, "q", lanes=lanes), _read(w, "s", lanes=lanes)
    d, m = (_read_f32(w, name, lanes=lanes)[:, None, None, None] for name in "dm")
    factors = d * (s & 15).astype(jnp.float32), m * (s >> 4).astype(jnp.float32)  # [b, half, which 16, code, C]
    scale, minimum = (f.swapaxes(2, 3)[..., None, :] for f in lax.optimization_barrier(factors))
    q = q[:, :, None] >> jnp.arange(0, 8, 2, dtype=jnp.uint8)[:, None, None, None] & 3
    return (q.astype(jnp.float32) * scale + minimum).reshape(w.columns, lanes[1])


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
    return signs | (lax.population_count(signs) & 1) << 7


def _iq2_xxs_scale(w, lanes=None):
    s = _read(w, "s", lanes=lanes)
    return s, _read_f32(w, "d", lanes=lanes)[:, None] * (((s >> 28).astype(jnp.float32) + 0.5) * 0.25)


def _iq2_xxs_product(w, x):
    x = x.reshape(-1, 8, 4, 2, 4) * 2.0**-24
    s, scale = _iq2_xxs_scale(w)
    terms = []
    for group in range(4):
        index, signs = _read(w, "q", None, group), _iq2_xxs_signs(s, 7 * group)
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
    index, half = _read(w, "q", lanes=lanes)[:, :, :, None], jnp.arange(2)[:, None]
    words = lax.optimization_barrier(_iq2_xxs_words(index, signs[:, :, :, None], half))  # [b, 8, 4, 2, C]
    tops = words[:, :, :, :, None] << jnp.arange(24, -8, -8)[:, None] & -(1 << 24)
    return (tops.astype(jnp.float32) * scale[:, :, None, None, None]).reshape(w.columns, lanes[1])


@dataclass(frozen=True)
class _Kind:
    axes: int  # of plane "q"
    product: object
    chunk: object


_KINDS = {
    "int8": _Kind(4, _int8_product, _int8_chunk),
    "float": _Kind(4, _int8_product, _int8_chunk),
    "Q4_K": _Kind(4, _q4_k_product, _q4_k_chunk),
    "Q2_K": _Kind(5, _q2_k_product, _q2_k_chunk),
    "IQ2_XXS": _Kind(4, _iq2_xxs_product, _iq2_xxs_chunk),
}


# Compilation.


def compile_options():
    """``compiler_options`` for the outermost ``jax.jit``: full-width vectors on CPUs with AVX-512, nothing elsewhere."""
    if jax.default_backend() == "cpu" and " avx512f " in _cpu_description():
        return {"xla_cpu_prefer_vector_width": 512}
    return {}


def enable_cache():
    """Keep compiled programs in the user's cache directory, in a folder of this CPU model's own; returns the folder.

    The entries hold native code. A folder that JAX was already given (JAX_COMPILATION_CACHE_DIR) stays.
    """
    folder = jax.config.jax_compilation_cache_dir
    if not folder:
        key = hashlib.sha256(_cpu_description().encode()).hexdigest()[:16]
        folder = str(_user_cache() / "ds4" / "xla" / f"jax-{jax.__version__}-{key}")
        jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    return Path(folder)


def _user_cache():
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


@cache
def _cpu_description():
    """Model name and instruction sets of the CPU, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    told = {key.strip(): value for key, value in told.items()}
    return " ".join([platform.machine(), told.get("model name", ""), told.get("flags", told.get("Features", "")), ""])
