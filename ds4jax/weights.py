"""Weights that stay packed: a matrix as planes of its GGUF blocks, and the products that read them.

``linear``, ``linears``, ``experts`` and ``embed_rows`` are nearly all that a family needs. Formulations are those that measured
fastest on XLA:CPU (bench/products.py): output rows are the last axis; one row of x meets a whole matrix in one fusion of
explicit sums, ended by a barrier and a ``ones @ p``; many rows meet float32 chunks dequantised in a loop. Shapes decide at
trace time which it is. Pass weights to jitted functions as arguments: a captured constant would be copied into the program.
Knows nothing about models.

Letters: N output rows, K columns, T rows of x, L layers, E experts; b blocks along K, S sub-blocks of W values in a block.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ds4ref.quants import PLAIN, TensorType

from . import blocks, compilation, kernels, packing, primitives
from .lanes import KINDS as LANES
from .lanes import Kind, read

CPU_LAYOUTS = ("cpu", "wide", "lean")
LAYOUTS = (*CPU_LAYOUTS, "gpu")
KINDS = LANES | {"rows": Kind(2, None, blocks.chunk)}  # whose products are those of kernels.linear
FEW_ROWS = 6  # rows of x that are multiplied one by one
SMALL = 1 << 16  # values up to which a matrix is dequantised whole: its product is not worth a long program
CHUNK_VALUES = 1 << 20  # float32 values dequantised at a time
TILES = (64, 16)  # tokens of one expert multiplied at a time: as many large tiles as there are tokens for, then small ones
PARTIAL_SUMS = 1 << 21  # bytes of partial sums of experts that are computed at once
PAIRS_PER_EXPERT = 8  # (token, expert) pairs per expert from which dequantising an expert pays


_META = ["type", "kind", "rows", "columns", "operands", "first"]


@partial(jax.tree_util.register_dataclass, data_fields=["planes", "index"], meta_fields=_META)
@dataclass(frozen=True)
class Packed:
    """One packed matrix [N, K], or a stack of them [..., N, K]: a pytree whose leaves are planes [..., b, *field, lanes].

    index: positions along the first axes of the stack, integers or traced scalars, that ``at`` has chosen. They are applied
    where a plane is read, so that a product in a loop over layers or experts copies nothing.
    type: name of the GGUF type; kind: which planes there are, see :mod:`ds4jax.packing`. operands: "float32", or "bfloat16",
    to which a product rounds what it multiplies; it adds up in float32 either way. first: lane of the planes that is row 0,
    where they hold several matrices side by side, see :class:`Beside`.
    """

    planes: dict[str, jax.Array]
    type: str
    kind: str
    rows: int
    columns: int
    operands: str = "float32"
    index: tuple = field(default=())
    first: int = 0

    @property
    def shape(self):
        """[..., N, K] as in the file, without the axes that ``index`` has chosen from."""
        q = self.planes["q"]
        return (*q.shape[len(self.index) : q.ndim - KINDS[self.kind].axes], self.rows, self.columns)

    def at(self, *index):
        """Entry ``index`` along the first axes: a layer, an expert."""
        if len(index) > len(self.shape) - 2:
            raise ValueError(f"{self.type} weights {list(self.shape)} have no {len(index)} leading axes to index")
        return replace(self, index=(*self.index, *index))


@partial(jax.tree_util.register_dataclass, data_fields=["whole"], meta_fields=["parts"])
@dataclass(frozen=True)
class Beside:
    """Stacks of matrices with the same input side by side, so that one product reads them. parts: (name, rows) of each."""

    whole: Packed
    parts: tuple

    def named(self):
        """name → the Packed of that part; they share their planes."""
        first, found = 0, {}
        for name, rows in self.parts:
            found[name] = replace(self.whole, rows=rows, first=first)
            first += rows
        return found


def pack(tensor, layout="cpu", operands="float32"):
    """A tensor of an artifact on the device: :class:`Packed` for matrices and stacks, an array for vectors and integers.

    Vectors are dequantised to float32. int64 values that JAX's 32 bits cannot hold stay a NumPy array.
    layout: "cpu"; "wide" and "lean": more and fewer bytes for IQ2_XXS, see :func:`ds4jax.packing.kind`; "gpu": see
    :mod:`ds4jax.blocks`. ValueError for another one.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} of weights is unknown; {' or '.join(map(repr, LAYOUTS))} is accepted")
    if _is_integer(tensor.type):
        return _integers(tensor.dequantize())
    if len(tensor.shape) == 1:
        return array(tensor)
    if layout == "gpu":
        planes = {name: jnp.asarray(plane) for name, plane in blocks.planes(tensor.data, tensor.type, tensor.shape)}
        return Packed(planes, TensorType(tensor.type).name, "rows", *tensor.shape[-2:], operands)
    return _lanes(packing.planes(tensor.data, tensor.type, tensor.shape, layout), tensor, layout, operands)


def _lanes(planes, tensor, layout, operands):
    planes = {name: jax.device_put(plane, may_alias=True) for name, plane in planes.items()}  # on a CPU without a copy
    return Packed(planes, TensorType(tensor.type).name, packing.kind(tensor.type, layout), *tensor.shape[-2:], operands)


def pack_stack(tensors, layout="cpu", operands="float32"):
    """Tensors of one shape and type, one per layer, as one stack [L, ...] of what :func:`pack` gives.

    In the layouts of CPUs they are packed into one array; else each is packed, written into the stack on the device and let
    go. ValueError unless they are alike.
    """
    alike = {(t.shape, t.type) for t in tensors}
    if len(alike) != 1:
        found = ", ".join(sorted(f"{TensorType(type).name} {list(shape)}" for shape, type in alike))
        raise ValueError(f"only tensors of one shape and type can be stacked, not {found or 'none'}")
    first = tensors[0]
    if layout in CPU_LAYOUTS and len(first.shape) > 1 and not _is_integer(first.type):
        datas = [[tensor.data] for tensor in tensors]
        return _lanes(packing.stacked_planes(datas, first.type, first.shape, layout), first, layout, operands)
    stack = None
    for layer, tensor in enumerate(tensors):
        packed = pack(tensor, layout, operands)
        if stack is None:
            stack = jax.tree.map(lambda a: jnp.zeros((len(tensors), *a.shape), a.dtype), packed)
        stack = _write_layer(stack, packed, layer)
    return stack


def fit_beside(tensors, layout):
    """Whether tensors of one layer can be packed :class:`Beside` each other: matrices, or stacks of as many, of one type and
    with as many columns, in a layout of CPUs; each begins where a vector of lanes does."""
    if layout not in CPU_LAYOUTS or any(len(t.shape) < 2 for t in tensors):
        return False
    alike = {(t.type, *t.shape[:-2], t.shape[-1]) for t in tensors}
    whole_vectors = all(t.shape[-2] % packing.LANE_PAD == 0 for t in tensors[:-1])
    return len(alike) == 1 and not _is_integer(tensors[0].type) and whole_vectors


def pack_beside(layers, layout="cpu", operands="float32"):
    """:class:`Beside` of layers [L], each a dictionary of the same names and alike tensors that :func:`fit_beside`."""
    one = list(layers[0].values())
    whole = replace(one[0], shape=(*one[0].shape[:-2], sum(t.shape[-2] for t in one), one[0].shape[-1]))
    datas = [[tensor.data for tensor in layer.values()] for layer in layers]
    planes = packing.stacked_planes(datas, whole.type, whole.shape, layout)
    return Beside(_lanes(planes, whole, layout, operands), tuple((name, t.shape[-2]) for name, t in layers[0].items()))


@partial(jax.jit, donate_argnums=0)
def _write_layer(stack, packed, layer):
    return jax.tree.map(lambda s, a: lax.dynamic_update_index_in_dim(s, a, layer, 0), stack, packed)


def array(tensor):
    """A tensor dequantised: float32, of its own shape. For norms, biases and what else is not multiplied as a matrix."""
    return jnp.asarray(tensor.dequantize())


def _is_integer(type):
    return type in PLAIN and PLAIN[type].kind == "i"


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


def default_layout(platform):
    """The layout for a platform as ``jax.default_backend()`` names it: "gpu" (or "cuda", "rocm"), else that of CPUs."""
    return "gpu" if platform in ("gpu", "cuda", "rocm") else "cpu"


def roomy(layout, tensors):
    """The layout "wide" in place of "cpu" where it is faster, on a CPU without AVX-512, and all of these tensors' planes so
    take at most half of the machine's memory. Not of what is free: states on disk belong to one layout, so that a restart must
    not choose another."""
    if layout != "cpu" or jax.default_backend() != "cpu" or compilation.avx512():
        return layout
    wide = sum(
        prod(t.shape) if packing.kind(t.type, "wide") == "int8" else t.nbytes for t in tensors if len(t.shape) > 1
    )  # fmt: skip
    return "wide" if wide <= _machine_memory() / 2 else "cpu"


def _machine_memory():
    """Bytes, 0 where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemTotal:")), 0)


def select_layer(weights, layer):
    """Layer ``layer`` (a traced integer) of stacks [L, ...] by name, and each of what lies side by side by its own. Packed
    matrices are not copied, see Packed.index."""
    found = {}
    for name, w in weights.items():
        found |= w.named() if isinstance(w, Beside) else {name: w}
    return {name: _entry(w, layer) for name, w in found.items()}


def _entry(w, index):
    """Entry ``index`` (a traced integer) of a stack: a layer, an expert."""
    return w.at(index) if isinstance(w, Packed) else lax.dynamic_index_in_dim(w, index, keepdims=False)


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
        return KINDS[w.kind].chunk(w, (0, w.rows)).T
    return lax.map(lambda i: dequantize(w.at(i)), jnp.arange(lead[0]))


def linear(w, x):
    """``x Wᵀ``: x [..., K] → float32 [..., N]. w: :class:`Packed` [N, K], or an array."""
    rows = _rounded(w, x.reshape(-1, x.shape[-1]).astype(jnp.float32))
    y = _packed_product(w, rows) if isinstance(w, Packed) else _dense_product(w.astype(jnp.float32), rows)
    return y.reshape(*x.shape[:-1], w.shape[-2])


def linears(ws, x):
    """``linear(w, x)`` for each of several matrices; one product for those that lie :class:`Beside` each other so."""
    groups = []
    for w in ws:
        if groups and _follows(groups[-1][-1], w):
            groups[-1].append(w)
        else:
            groups.append([w])
    return [y for group in groups for y in _together(group, x)]


def _follows(before, w):
    if not (isinstance(before, Packed) and isinstance(w, Packed)) or before.planes is not w.planes:
        return False
    same_index = len(w.index) == len(before.index) and all(a is b for a, b in zip(w.index, before.index, strict=True))
    return same_index and w.first == before.first + before.rows


def _together(ws, x):
    ends = list(accumulate(w.shape[-2] for w in ws))
    whole = ws[0] if len(ws) == 1 else replace(ws[0], rows=ends[-1])
    return jnp.split(linear(whole, x), ends[:-1], axis=-1)


def _rounded(w, x):
    """x float32 as the operands of a product with ``w``; not by ``astype``, a pair of which XLA may leave out."""
    return lax.reduce_precision(x, 8, 7) if getattr(w, "operands", "float32") == "bfloat16" else x


def expert_linear(w, expert, x):
    """``x W_eᵀ`` for expert ``expert`` (a traced integer) of a stack [E, N, K]; reads only that expert's bytes."""
    return linear(_entry(w, expert), x)


def batched_linear(w, x):
    """``x_g W_gᵀ`` for every matrix of a stack, one input each: w [G, N, K], x [..., G, K] → float32 [..., G, N].

    On a CPU one after the other, so that packed bytes are read; a GPU is faster with all of them dequantised.
    """
    if not isinstance(w, Packed) or w.kind == "rows":
        return jnp.einsum("...gk,gnk->...gn", _rounded(w, x), dequantize(w))
    rows = jnp.moveaxis(x.reshape(-1, *x.shape[-2:]), 1, 0)
    y = lax.map(lambda item: expert_linear(w, *item), (jnp.arange(len(rows)), rows))
    return jnp.moveaxis(y, 0, 1).reshape(*x.shape[:-1], w.shape[-2])


def embed_rows(w, ids):
    """Rows ``ids`` [T] of an embedding [V, D]: float32 [T, D]. Ids beyond V read its last row."""
    ids = jnp.clip(ids, 0, w.shape[-2] - 1)
    if not isinstance(w, Packed):
        return w[ids].astype(jnp.float32)
    if w.kind == "rows":
        return blocks.take(w, ids)
    planes = {name: read(w, name)[..., ids] for name in w.planes}
    taken = replace(w, planes=planes, rows=len(ids), index=(), first=0)
    return KINDS[w.kind].chunk(taken, (0, len(ids))).T


def experts(h, chosen, weights, gate, up, down, act, own=()):
    """``y_r = Σ_k weights[r, k] · down_e( act(gate_e h_r, up_e h_r) )`` with e = chosen[r, k].

    h: [R, D]; chosen, weights: [R, K]; gate, up: stacks [E, F, D]; down: [E, D, F]; act: (gate, up) [..., F] → [..., F].
    own: arrays [E, ...] whose entries of the expert are further arguments of ``act``.
    Few pairs go one by one; many are grouped by expert, and each expert that has any is dequantised once. Without ``own``,
    act is elementwise.
    """
    pairs = chosen.size
    many = len(h) > FEW_ROWS and pairs >= PAIRS_PER_EXPERT * gate.shape[-3]
    if not many and all(isinstance(w, Packed) and w.kind == "rows" for w in (gate, up, down)):
        return kernels.experts(h.astype(jnp.float32), chosen, weights, gate, up, down, act, own, _single_experts)
    apply = _grouped_experts if many else _single_experts
    return apply(h.astype(jnp.float32), chosen, weights, gate, up, down, act, own)


def _single_experts(h, chosen, weights, gate, up, down, act, own):
    """Products of one row, pair after pair, sorted by expert, whose bytes are then still in the cache."""
    used, flat, mix = chosen.shape[1], chosen.reshape(-1), weights.reshape(-1)

    def one_pair(e, x):
        hidden = act(*linears([_entry(gate, e), _entry(up, e)], x), *(a[e] for a in own))
        return expert_linear(down, e, hidden)

    if len(h) == 1 and all(isinstance(w, Packed) and w.kind in LANES for w in (gate, up, down)):
        return _experts_of_one(partial(one_pair, x=h[0]), flat, mix, gate, down)[None]
    order = primitives.group(flat, gate.shape[-3]).order

    def add_pair(n, y):
        i = order[n]
        r = i // used
        return primitives.add_row(y, mix[i] * one_pair(flat[i], lax.dynamic_index_in_dim(h, r, keepdims=False)), r)

    return lax.fori_loop(0, flat.size, add_pair, jnp.zeros((len(h), down.shape[-2]), jnp.float32))


def _experts_of_one(one, chosen, mix, gate, down):
    """``Σ mix_k · one(chosen_k)``, as many experts at once as leave what their products add up in the cache: XLA:CPU shares a
    product of several among its threads at the price of one. one: what an expert makes of the row."""
    partial_sums = 4 * max(2 * gate.rows * gate.columns, down.rows * down.columns) // 32
    used = len(chosen)
    turn = max(n for n in range(1, used + 1) if used % n == 0 and (n == 1 or n * partial_sums <= PARTIAL_SUMS))

    def add_turn(n, y):
        here, share = (lax.dynamic_slice_in_dim(a, n * turn, turn) for a in (chosen, mix))
        return y + share @ jax.vmap(one)(here)

    return lax.fori_loop(0, used // turn, add_turn, jnp.zeros(down.rows, jnp.float32))


def _grouped_experts(h, chosen, weights, gate, up, down, act, own):
    """Pairs sorted by expert; each expert that has any dequantised once and applied to tiles of its tokens.

    A tile may run past its expert's pairs: the next expert overwrites those rows, and nobody reads the last ones.
    """
    pairs, used, E = chosen.size, chosen.shape[1], gate.shape[-3]
    flat = chosen.reshape(-1)
    order, places, ends = primitives.group(flat, E)
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    busy = primitives.true_first(ends > starts, min(E, pairs))
    x = jnp.pad(_rounded(gate, h)[order // used], ((0, TILES[-1]), (0, 0)))

    def one_expert(i, y):
        e = busy[i]
        g, u, d = (lax.optimization_barrier(_transposed(w, e)) for w in (gate, up, down))
        held = [a[e] for a in own]

        def one_tile(tile, state):
            at, y = state
            rows = lax.dynamic_slice_in_dim(x, at, tile)
            z = _rounded(down, act(rows @ g, rows @ u, *held)) @ d
            return at + tile, lax.dynamic_update_slice_in_dim(y, z, at, 0)

        state = starts[e], y
        for tile in [*(tile for tile in TILES[:-1] if tile <= pairs), TILES[-1]]:
            least = 1 if tile == TILES[-1] else tile
            state = lax.while_loop(lambda s, n=least: s[0] + n <= ends[e], partial(one_tile, tile), state)
        return state[1]

    y = jnp.zeros((pairs + TILES[-1], down.shape[-2]), jnp.float32)
    y = lax.fori_loop(0, jnp.count_nonzero(ends > starts), one_expert, y)
    return jnp.einsum("rk,rkd->rd", weights.astype(jnp.float32), y[places].reshape(*chosen.shape, -1))


def _transposed(w, expert):
    """Expert ``expert`` of a stack as float32 [K, N]."""
    if isinstance(w, Packed):
        return KINDS[w.kind].chunk(w.at(expert), (0, w.rows))
    return lax.dynamic_index_in_dim(w, expert, keepdims=False).astype(jnp.float32).T


def _dense_product(w, x):
    """x [T, K], w [N, K] → [T, N], in the orientation that suits T."""
    if len(x) == 1:
        return (w @ x[0])[None]
    return (w @ x.T).T if len(x) < 32 else x @ w.T


def _packed_product(w, x):
    if len(w.shape) != 2:
        raise ValueError(f"a product needs one matrix; {w.type} weights {list(w.shape)} are a stack, choose with at()")
    if w.kind == "rows":
        return kernels.linear(w, x)
    if len(x) <= FEW_ROWS and w.rows * w.columns > SMALL:
        return jnp.stack([KINDS[w.kind].product(w, row) for row in x])
    size = min(w.rows, max(64, CHUNK_VALUES // w.columns))
    return _chunked_product(w, x, size)


def _chunked_product(w, x, size):
    """x [T, K] times float32 chunks of ``size`` output rows."""
    chunk = KINDS[w.kind].chunk
    return kernels.by_chunks(lambda start: x @ lax.optimization_barrier(chunk(w, (start, size))), len(x), w.rows, size)
