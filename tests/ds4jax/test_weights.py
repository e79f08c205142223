"""Packed weights: dequantisation bit for bit, products against float64, experts, stacks, exports for CUDA."""

import os

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402
from jax.export import export  # noqa: E402

from ds4jax import compilation, weights  # noqa: E402
from ds4jax.weights import Packed, dequantize, embed_rows, expert_linear, experts, linear, pack, pack_stack  # noqa: E402
from ds4ref import moe, quants  # noqa: E402
from ds4ref.gguf import Tensor  # noqa: E402
from ds4ref.quants import BLOCK, PLAIN, TensorType  # noqa: E402

FLOATS = [t for t in TensorType if t is TensorType.BF16 or t in PLAIN and PLAIN[t].kind == "f"]
PACKED = [t for t in TensorType if t not in PLAIN and t is not TensorType.BF16]
LAYOUTS = [(t, "cpu") for t in FLOATS + PACKED] + [(TensorType.IQ2_XXS, layout) for layout in ("wide", "lean")]
CODES = [TensorType.Q8_0, *weights.packing.OWN_KINDS]  # one type for every way of keeping codes
KINDS = [TensorType.F16, TensorType.BF16, TensorType.Q8_0, TensorType.Q6_K, TensorType.Q5_K, *weights.packing.OWN_KINDS]


def name_of(value):
    return getattr(value, "name", value)


def random_tensor(type, shape, seed=0, limit=np.inf):
    """All bit patterns occur, but for blocks with values that are not finite or beyond ``limit``.

    For MXFP4 also those with subnormal values, see the test of its exponents.
    """
    rng = np.random.default_rng(seed)
    values, size = BLOCK[type]
    data = rng.integers(0, 256, quants.nbytes(type, shape), dtype=np.uint8)
    blocks = data.reshape(-1, size)
    while True:
        with np.errstate(all="ignore"):
            decoded = quants.dequantize(data, type, (len(blocks), values))
            bad = ~(np.isfinite(decoded) & (np.abs(decoded) < limit)).all(axis=1)
            if type is TensorType.MXFP4:
                bad |= blocks[:, 0] < 2
        if not bad.any():
            return Tensor("random", shape, type, data)
        blocks[bad] = rng.integers(0, 256, (bad.sum(), size), dtype=np.uint8)


def normal_tensor(type, shape, seed=0):
    """A tensor with values around 1, so that sums do not hang on a few huge blocks."""
    if type not in FLOATS:
        return random_tensor(type, shape, seed, limit=1e3)
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    data = (values.view(np.uint32) >> 16).astype(np.uint16) if type is TensorType.BF16 else values.astype(PLAIN[type])
    return Tensor("normal", shape, type, np.ascontiguousarray(data).reshape(-1).view(np.uint8))


def width(type):
    """Columns: three blocks, and for plain types a number that no power of two above 16 divides."""
    return 3 * BLOCK[type][0] if BLOCK[type][0] > 1 else 48


def same_bits(a, b):
    assert a.dtype == b.dtype == np.float32 and a.shape == b.shape
    assert np.array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))


@pytest.mark.parametrize(("type", "layout"), LAYOUTS, ids=name_of)
def test_dequantisation_is_that_of_the_reference(type, layout):
    tensor = random_tensor(type, (2, 70, width(type)))
    packed = pack(tensor, layout)
    assert packed.shape == tensor.shape and packed.type == type.name
    expected = tensor.dequantize()
    same_bits(jax.jit(dequantize)(packed), expected)


@pytest.mark.parametrize("N", [1, 5, 1024, 1025])
def test_any_number_of_rows(N):
    """Padding included, of which nothing is seen."""
    tensor = random_tensor(TensorType.Q8_0, (N, 64))
    packed = pack(tensor)
    assert packed.shape == (N, 64) and packed.planes["q"].shape[-1] == (1040 if N == 1024 else N)
    same_bits(dequantize(packed), tensor.dequantize())


@pytest.mark.parametrize("K", [1, 7, 37, 40, 67])
def test_any_number_of_columns_of_floats(K):
    tensor = normal_tensor(TensorType.F32, (6, K))
    x = np.random.default_rng(1).standard_normal((2, K)).astype(np.float32)
    same_bits(dequantize(pack(tensor)), tensor.dequantize())
    np.testing.assert_allclose(linear(pack(tensor), x), x @ tensor.dequantize().T, rtol=1e-5, atol=1e-5)


def test_mxfp4_of_every_exponent():
    """Up to infinity, and down to scales of 2^−127 and 2^−128, subnormal numbers that XLA:CPU may take for zero."""
    blocks = np.random.default_rng(0).integers(0, 256, (256, 17), dtype=np.uint8)
    blocks[:, 0] = np.arange(256)
    tensor = Tensor("t", (256, 32), TensorType.MXFP4, blocks.reshape(-1))
    with np.errstate(over="ignore"):
        expected = tensor.dequantize()
    got = np.asarray(jax.jit(dequantize)(pack(tensor)))
    assert np.array_equal(got[2:], expected[2:])
    assert np.all((got[:2] == 0) | (got[:2] == expected[:2]))


@pytest.mark.parametrize(("type", "layout"), LAYOUTS, ids=name_of)
def test_products_of_any_number_of_rows(type, layout):
    """Relative to |row| · |x|, for the one-row, few-row and many-row paths, the last also with chunks that do not divide N."""
    tensor = normal_tensor(type, (200, width(type)))
    exact = tensor.dequantize().astype(np.float64)
    packed = pack(tensor, layout)
    for T in (1, 3, 8, 40) if type in CODES else (1, 8):
        x = np.random.default_rng(T).standard_normal((T, exact.shape[1])).astype(np.float32)
        size = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(exact, axis=1)
        y = jax.jit(linear)(packed, x)
        assert y.dtype == jnp.float32 and np.max(np.abs(y - x @ exact.T) / size) < 1e-6
    if type in CODES:
        y = jax.jit(weights._chunked_product, static_argnums=2)(packed, x, 64)
        assert np.max(np.abs(y - x @ exact.T) / size) < 1e-6


def test_wide_only_where_it_is_faster_and_memory_allows(monkeypatch):
    """IQ2_XXS at a byte a value, Q8_0 too, floats and vectors as they are."""
    monkeypatch.setattr(weights.compilation, "avx512", lambda: False)
    tensors = [random_tensor(TensorType.IQ2_XXS, (4, 256)), random_tensor(TensorType.Q8_0, (2, 64))]
    tensors += [normal_tensor(TensorType.F16, (2, 32)), normal_tensor(TensorType.F32, (1000,))]
    taken = 4 * 256 + 2 * 64 + 2 * 32 * 2
    for available, layout in (2 * taken, "wide"), (2 * taken - 1, "cpu"), (0, "cpu"):
        monkeypatch.setattr(weights, "_machine_memory", lambda available=available: available)
        assert weights.roomy("cpu", tensors) == layout
        assert weights.roomy("gpu", tensors) == "gpu" and weights.roomy("lean", tensors) == "lean"
    monkeypatch.setattr(weights, "_machine_memory", lambda: 2 * taken)
    assert weights.roomy("cpu", tensors) == "wide"
    monkeypatch.setattr(weights.compilation, "avx512", lambda: True)
    assert weights.roomy("cpu", tensors) == "cpu"
    monkeypatch.setattr(weights.compilation, "avx512", lambda: False)
    monkeypatch.setattr(weights.jax, "default_backend", lambda: "mps")
    assert weights.roomy("cpu", tensors) == "cpu", "a GPU that keeps the CPU's layout has no memory to spare"


def test_stacks_are_not_copied():
    """What NumPy packed is what JAX reads."""
    tensors = [random_tensor(TensorType.Q8_0, (70, 64), seed) for seed in range(3)]
    planes = weights.packing.stacked_planes([[t.data] for t in tensors], TensorType.Q8_0, (70, 64))
    stack = weights._lanes(planes, tensors[0], "cpu", "float32")
    assert all(stack.planes[name].unsafe_buffer_pointer() == plane.ctypes.data for name, plane in planes.items())
    for layer, tensor in enumerate(tensors):
        same_bits(dequantize(stack.at(layer)), tensor.dequantize())


@pytest.mark.parametrize("T", [None, 1, 5, 40])
def test_dense_products(T):
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((24, 16)), rng.standard_normal((2, T, 16) if T else 16)
    y = jax.jit(linear)(jnp.asarray(w, jnp.bfloat16), jnp.asarray(x, jnp.float32))
    w = np.asarray(jnp.asarray(w, jnp.bfloat16), np.float64)
    assert y.dtype == jnp.float32 and y.shape == (*x.shape[:-1], 24)
    np.testing.assert_allclose(y, x @ w.T, atol=1e-5)


def test_leading_axes_of_x_are_kept():
    packed = pack(normal_tensor(TensorType.F32, (20, 64)))
    x = np.random.default_rng(0).standard_normal((2, 3, 64)).astype(np.float32)
    y = jax.jit(linear)(packed, x)
    assert y.shape == (2, 3, 20)
    np.testing.assert_allclose(y[1, 2], jax.jit(linear)(packed, x[1, 2]), rtol=1e-4)


@pytest.mark.parametrize("type", [*KINDS, TensorType.F32], ids=name_of)
def test_embedding_rows(type):
    tensor = normal_tensor(type, (50, width(type)))
    ids = np.array([3, 49, 0, 3], np.int32)
    same_bits(jax.jit(embed_rows)(pack(tensor), ids), tensor.dequantize()[ids])
    same_bits(jax.jit(embed_rows)(jnp.asarray(tensor.dequantize()), ids), tensor.dequantize()[ids])


@pytest.mark.parametrize(
    "type",
    [
        TensorType.Q8_0,
        TensorType.IQ2_XXS,
        *(
            pytest.param(t, marks=pytest.mark.slow)
            for t in (TensorType.Q4_K, TensorType.Q2_K, TensorType.Q5_K, TensorType.BF16)
        ),
    ],
    ids=name_of,
)
def test_experts_one_by_one_grouped_and_by_the_reference(type):
    D, F, E, used = width(type), width(type), 5, 2
    tensors = [normal_tensor(type, shape, seed) for seed, shape in enumerate([(E, F, D), (E, F, D), (E, D, F)])]
    gate, up, down = map(pack, tensors)
    dense = [t.dequantize() for t in tensors]
    rng = np.random.default_rng(0)
    h = rng.standard_normal((50, D)).astype(np.float32)
    chosen = np.array([rng.permutation(E - 1)[:used] for _ in h], np.int32)  # nobody chooses the last expert
    share = rng.random((len(h), used)).astype(np.float32)
    act = lambda g, u: jax.nn.silu(g) * u  # noqa: E731
    w = _Parts(dict(zip(("gate", "up", "down"), dense, strict=True)))
    expected = np.stack([moe.experts(x, c, s, w, "") for x, c, s in zip(h, chosen, share, strict=True)])
    size = np.max(np.abs(expected))
    for path in (weights._single_experts, weights._grouped_experts):
        y = jax.jit(path, static_argnums=6)(h, chosen, share, gate, up, down, act, ())
        assert np.max(np.abs(y - expected)) < 2e-6 * size


def test_experts_of_any_number_of_tokens():
    """Through the entry point, on both sides of its choice of path; fewer rows than a large tile, and large and small tiles in
    turn; packed, and as plain arrays; with a factor per expert."""
    D, F, E, used = 64, 96, 4, 2
    tensors = [normal_tensor(TensorType.Q8_0, shape, seed) for seed, shape in enumerate([(E, F, D), (E, F, D), (E, D, F)])]
    stacks = [t.dequantize() for t in tensors]
    rng = np.random.default_rng(0)
    factor = rng.random(E).astype(np.float32)
    act = lambda g, u, f: f * g * u  # noqa: E731
    for R in (1, weights.FEW_ROWS + 10, weights.FEW_ROWS + 60, 200):
        h, chosen = rng.standard_normal((R, D)).astype(np.float32), np.minimum(rng.integers(0, 2 * E, (R, used)), E - 1)
        share = rng.random((R, used)).astype(np.float32)
        g, u = (np.einsum("rd,rkfd->rkf", h, stacks[i][chosen]) for i in (0, 1))
        expected = np.einsum("rk,rkf,rkdf->rd", share * factor[chosen], g * u, stacks[2][chosen])
        for kept in (list(map(pack, tensors)), list(map(jnp.asarray, stacks))):
            y = jax.jit(experts, static_argnums=6)(h, chosen, share, *kept, act, (factor,))
            assert np.max(np.abs(y - expected)) < 1e-5 * np.max(np.abs(expected))


class _Parts(dict):
    """Weights as ``ds4ref.moe`` asks for them."""

    def part(self, name, index):
        return self[name.split("_")[1]][index]


@pytest.mark.parametrize("type", CODES, ids=name_of)
def test_layers_of_experts_in_a_loop(type):
    """A stack [L, E, N, K], indexed by two traced scalars."""
    tensors = [normal_tensor(type, (2, 32, width(type)), seed) for seed in range(3)]
    norms = [normal_tensor(TensorType.F32, (32,), seed) for seed in range(3)]
    layers = {"w": pack_stack(tensors), "norm": pack_stack(norms)}
    assert layers["w"].shape == (3, *tensors[0].shape) and layers["norm"].shape == (3, 32)

    @jax.jit
    def all_layers(layers, x):
        def one_layer(l, y):
            at = weights.select_layer(layers, l)
            return y.at[l].set(expert_linear(at["w"], l % 2, x) * at["norm"])

        return lax.fori_loop(0, 3, one_layer, jnp.zeros((3, 32)))

    x = np.random.default_rng(0).standard_normal(width(type)).astype(np.float32)
    for l, y in enumerate(all_layers(layers, x)):
        exact = tensors[l].dequantize()[l % 2].astype(np.float64)
        error = np.abs(y / norms[l].dequantize() - exact @ x)
        assert np.max(error / np.linalg.norm(exact, axis=1)) < 1e-5 * np.linalg.norm(x)


@pytest.mark.parametrize("type", [*CODES, TensorType.Q4_1, TensorType.Q5_K, TensorType.Q6_K, TensorType.BF16], ids=name_of)
def test_one_row_is_one_fusion(type):
    """Broadcast of ones, the product, its consumer; IQ2_XXS also scales x. A layer of a stack costs no copy."""
    most = 8 if type is TensorType.IQ2_XXS else 3
    tensor = normal_tensor(type, (256, 512))
    x = jnp.ones(512)
    assert fusions(linear, pack(tensor), x) <= most
    stack = pack_stack([tensor, tensor])
    compiled = jax.jit(lambda w, l, x: linear(w.at(l), x)).lower(stack, jnp.int32(1), x).compile()
    assert compiled.as_text().count(" fusion(") <= most + 1
    assert compiled.memory_analysis().temp_size_in_bytes < 256 * 512


def fusions(f, *args):
    return jax.jit(f).lower(*args).compile().as_text().count(" fusion(")


@pytest.mark.parametrize("T", [1, 40])
@pytest.mark.parametrize("type", KINDS, ids=name_of)
def test_products_lower_for_cuda(type, T):
    stack = pack(normal_tensor(type, (3, 64, 256)))
    act = lambda g, u: g * u  # noqa: E731
    x, chosen = jnp.ones((T, 256)), jnp.zeros((T, 2), jnp.int32)
    down = pack(normal_tensor(type, (3, 256, 256)))
    gate = pack(normal_tensor(type, (3, 256, 256)))
    for f, args in [
        (expert_linear, (stack, jnp.int32(1), x)),
        (lambda *a: experts(*a, act), (x, chosen, jnp.ones((T, 2)), gate, gate, down)),
        (lambda w, ids: embed_rows(w.at(0), ids), (stack, chosen[:, 0])),
        (dequantize, (stack,)),
    ]:
        assert export(jax.jit(f), platforms=["cuda"])(*args).platforms == ("cuda",)


def test_what_pack_makes_of_vectors_and_integers():
    vector = pack(normal_tensor(TensorType.F16, (12,)))
    assert vector.dtype == jnp.float32 and vector.shape == (12,)
    for type in (TensorType.I8, TensorType.I16, TensorType.I32, TensorType.I64):
        values = np.arange(-6, 6).reshape(3, 4).astype(PLAIN[type])
        packed = pack(Tensor("t", (3, 4), type, values.reshape(-1).view(np.uint8)))
        assert isinstance(packed, jax.Array) and np.array_equal(packed, values)
    values = np.array([1 << 40, 3])
    assert pack(Tensor("t", (2,), TensorType.I64, values.view(np.uint8))).tolist() == [1 << 40, 3]


def test_bytes_are_those_of_the_file():
    for type in (TensorType.Q8_0, TensorType.Q2_K, TensorType.IQ2_XXS, TensorType.F16, TensorType.BF16):
        tensor = normal_tensor(type, (70, 512))
        held = {"w": pack(tensor, "lean"), "l": pack_stack([tensor] * 2, "lean")}
        assert weights.nbytes(held) == 3 * tensor.nbytes
    assert weights.nbytes(pack(tensor := normal_tensor(TensorType.IQ2_XXS, (70, 512)))) < 2.1 * tensor.nbytes
    assert weights.nbytes(pack(normal_tensor(TensorType.Q4_K, (70, 512)))) < 1.03 * 70 * 512 * 4.5 / 8


def test_errors_name_what_was_found():
    q8, q4 = normal_tensor(TensorType.Q8_0, (4, 256)), normal_tensor(TensorType.Q4_K, (4, 256))
    with pytest.raises(ValueError, match="'fast' .* 'cpu' or 'wide' or 'lean'"):
        pack(q8, "fast")
    with pytest.raises(ValueError, match=r"Q4_K \[4, 256\], Q8_0 \[4, 256\]"):
        pack_stack([q8, q4])
    with pytest.raises(ValueError, match="are a stack"):
        linear(pack_stack([q8, q8]), jnp.ones(256))
    with pytest.raises(ValueError, match="no 1 leading axes"):
        pack(q8).at(0)


def test_packed_is_a_pytree():
    packed = pack(normal_tensor(TensorType.Q4_K, (3, 4, 256)))
    again = jax.tree.map(lambda a: a, packed.at(2))
    assert isinstance(again, Packed) and again.index == (2,) and again.shape == (4, 256)
    assert jax.eval_shape(lambda w: w, packed).shape == (3, 4, 256)


def test_compilation_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compilation.sys, "platform", "linux")
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    compilation_cache.reset_cache()  # it may have been opened elsewhere before
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        folder = compilation.enable_cache()
        assert tmp_path in folder.parents and jax.__version__ in folder.name
        jax.jit(lambda x: x * 3 + 1).lower(jnp.ones(77)).compile()
        assert os.listdir(folder)
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
        assert compilation.enable_cache() == tmp_path / "own"
    finally:
        compilation_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


def test_compile_options_are_accepted():
    f = jax.jit(lambda x: x + 1, compiler_options=compilation.compile_options())
    assert f(jnp.ones(3)).tolist() == [2, 2, 2]
