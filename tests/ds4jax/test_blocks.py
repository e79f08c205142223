"""The layout for GPUs: bytes, dequantisation bit for bit, and all that ds4jax.weights does with it; by XLA, on the CPU."""

import tracemalloc

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.export import export  # noqa: E402

from ds4jax import blocks, kernels, weights  # noqa: E402
from ds4jax.weights import dequantize, embed_rows, expert_linear, experts, linear, pack, pack_stack  # noqa: E402
from ds4ref import quants  # noqa: E402
from ds4ref.gguf import Tensor  # noqa: E402
from ds4ref.quants import BLOCK, PLAIN, TensorType  # noqa: E402

FLOATS = [t for t in TensorType if t is TensorType.BF16 or t in PLAIN and PLAIN[t].kind == "f"]
TYPES = FLOATS + list(blocks.FORMATS)


def name_of(value):
    return getattr(value, "name", value)


def random_tensor(type, shape, seed=0):
    """All bit patterns occur, NaNs and infinities too; of MXFP4 not those with subnormal scales, which XLA:CPU may flush."""
    data = np.random.default_rng(seed).integers(0, 256, quants.nbytes(type, shape), dtype=np.uint8)
    if type is TensorType.MXFP4:
        data.reshape(-1, BLOCK[type][1])[:, 0].clip(2, out=data.reshape(-1, BLOCK[type][1])[:, 0])
    return Tensor("random", shape, type, data)


def mild_tensor(type, shape, seed=0):
    """Random codes with scales around 1: the exponents of half floats are replaced."""
    if type in FLOATS:
        values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        data = (values.view(np.uint32) >> 16).astype(np.uint16) if type is TensorType.BF16 else values.astype(PLAIN[type])
        return Tensor("mild", shape, type, np.ascontiguousarray(data).reshape(-1).view(np.uint8))
    tensor = random_tensor(type, shape, seed)
    fields = tensor.data.view(np.dtype(blocks.FORMATS[type]))
    names = fields.dtype.names
    for name in {"d", "m"} & set(names):
        fields[name] = (fields[name].view("<u2") & 0x83FF | 0x2400).view("<f2")  # 2^-6 … 2^-5
    if "e" in names:
        fields["e"] = 120 + fields["e"] % 4
    if type is TensorType.IQ1_M:  # the scale is the high nibble of four words
        fields["s"][:, 3] = fields["s"][:, 3] & 0x8FFF | 0x2000
    return tensor


def width(type):
    return 3 * BLOCK[type][0] if BLOCK[type][0] > 1 else 48


def same(got, expected):
    """Equal bits, but that any NaN equals any other."""
    got = np.asarray(got)
    assert got.dtype == expected.dtype == np.float32 and got.shape == expected.shape
    known = ~np.isnan(expected)
    assert np.array_equal(known, ~np.isnan(got))
    assert np.array_equal(got.view(np.uint32)[known], expected.view(np.uint32)[known])


def reference(tensor):
    with np.errstate(all="ignore"):
        return tensor.dequantize()


def test_formats_are_blocks_of_the_file():
    packed = [t for t in TensorType if t not in PLAIN and t is not TensorType.BF16]
    assert set(blocks.FORMATS) == set(packed)
    for type, fields in blocks.FORMATS.items():
        assert np.dtype(fields).itemsize == BLOCK[type][1]


@pytest.mark.parametrize("type", TYPES, ids=name_of)
def test_dequantisation_is_that_of_the_reference(type):
    tensor = random_tensor(type, (2, 70, width(type)))
    packed = pack(tensor, "gpu")
    assert packed.shape == tensor.shape and packed.type == type.name and packed.kind == "rows"
    same(jax.jit(dequantize)(packed), reference(tensor))


@pytest.mark.parametrize("type", TYPES, ids=name_of)
def test_rows_of_a_stack(type):
    """A part and single rows of one matrix of [L, E, N, K], chosen by traced numbers."""
    tensors = [random_tensor(type, (2, 9, width(type)), seed) for seed in range(2)]
    stack = pack_stack(tensors, "gpu")
    assert stack.shape == (2, *tensors[0].shape)
    expected = reference(tensors[1])[1]
    at = stack.at(jnp.int32(1)).at(jnp.int32(1))
    same(jax.jit(blocks.rows, static_argnums=2)(at, jnp.int32(3), 4), expected[3:7])
    ids = np.array([8, 0, 8], np.int32)
    same(jax.jit(embed_rows)(at, ids), expected[ids])


@pytest.mark.parametrize("shape", [(4096, 4096), (8, 2048, 512)], ids=str)
@pytest.mark.parametrize("type", TYPES, ids=name_of)
def test_bytes_are_those_of_the_file(type, shape):
    tensor = Tensor("zeros", shape, type, np.zeros(quants.nbytes(type, shape), np.uint8))
    assert weights.nbytes(pack(tensor, "gpu")) <= 1.05 * tensor.nbytes


@pytest.mark.parametrize("type", [TensorType.Q8_0, TensorType.Q4_K, TensorType.IQ2_XXS], ids=name_of)
def test_the_host_holds_one_plane_at_a_time(type):
    tensor = random_tensor(type, (2048, 4096))
    tracemalloc.start()
    for _, plane in blocks.planes(tensor.data, type, tensor.shape):
        del plane
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.05 * tensor.nbytes + (16 << 20)


def test_mxfp4_of_every_exponent():
    data = np.random.default_rng(0).integers(0, 256, (256, 17), dtype=np.uint8)
    data[:, 0] = np.arange(256)
    tensor = Tensor("t", (256, 32), TensorType.MXFP4, data.reshape(-1))
    expected, got = reference(tensor), np.asarray(jax.jit(dequantize)(pack(tensor, "gpu")))
    assert np.array_equal(got[2:], expected[2:])
    assert np.all((got[:2] == 0) | (got[:2] == expected[:2]))


@pytest.mark.parametrize("type", TYPES, ids=name_of)
def test_products_of_any_number_of_rows(type, monkeypatch):
    """Relative to |row| · |x|; in one piece, and in chunks of which the last overlaps the one before."""
    tensor = mild_tensor(type, (150, width(type)))
    exact, packed = tensor.dequantize().astype(np.float64), pack(tensor, "gpu")
    assert np.isfinite(exact).all() and exact.std() > 1e-4
    for T, values in [(1, 1 << 22), (12, 64 * width(type))]:
        monkeypatch.setattr(kernels, "CHUNK_VALUES", values)
        x = np.random.default_rng(T).standard_normal((T, exact.shape[1])).astype(np.float32)
        size = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(exact, axis=1)
        y = jax.jit(linear)(packed, x)
        assert y.dtype == jnp.float32 and np.max(np.abs(y - x @ exact.T) / size) < 1e-6


@pytest.mark.parametrize("T", [1, 12])
def test_bfloat16_operands(T):
    """Both operands are rounded, sums are not: the error is that of exact products of rounded numbers."""
    tensor = mild_tensor(TensorType.F32, (64, 512))
    x = np.random.default_rng(1).standard_normal((T, 512)).astype(np.float32)
    rounded = [np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in (tensor.dequantize(), x)]
    y = jax.jit(linear)(pack(tensor, "gpu", "bfloat16"), x)
    size = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(rounded[0], axis=1)
    assert np.max(np.abs(y - rounded[1] @ rounded[0].T) / size) < 2e-6


@pytest.mark.parametrize("R", [2, 60])
def test_experts_are_those_of_the_other_layout(R):
    """One by one, and grouped by expert."""
    D, F, E, used = 256, 512, 4, 2
    kinds = [TensorType.IQ2_XXS, TensorType.Q8_0, TensorType.Q2_K]
    tensors = [mild_tensor(t, s) for t, s in zip(kinds, [(E, F, D), (E, F, D), (E, D, F)], strict=True)]
    rng = np.random.default_rng(0)
    h, chosen = rng.standard_normal((R, D)).astype(np.float32), rng.integers(0, E, (R, used))
    share = rng.random((R, used)).astype(np.float32)
    act = lambda g, u: jax.nn.silu(g) * u  # noqa: E731
    a, b = (
        jax.jit(experts, static_argnums=6)(h, chosen, share, *(pack(t, layout) for t in tensors), act)
        for layout in ("gpu", "cpu")
    )
    assert np.max(np.abs(a - b)) < 1e-5 * np.max(np.abs(b))


def test_layers_of_experts_in_a_loop():
    tensors = [mild_tensor(TensorType.Q4_K, (2, 32, 256), seed) for seed in range(3)]
    layers = {"w": pack_stack(tensors, "gpu")}

    @jax.jit
    def all_layers(layers, x):
        def one_layer(l, y):
            return y.at[l].set(expert_linear(weights.select_layer(layers, l)["w"], l % 2, x))

        return lax.fori_loop(0, 3, one_layer, jnp.zeros((3, 32)))

    x = np.random.default_rng(0).standard_normal(256).astype(np.float32)
    expected = np.stack([t.dequantize()[l % 2] @ x for l, t in enumerate(tensors)])
    np.testing.assert_allclose(all_layers(layers, x), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("type", TYPES, ids=name_of)
def test_everything_lowers_for_cuda_without_kernels(type):
    """Many rows: products, grouped experts; rows of an embedding; whole stacks."""
    K = max(256, BLOCK[type][0])
    stack = pack(mild_tensor(type, (3, 256, K)), "gpu")
    act = lambda g, u: g * u  # noqa: E731
    x, chosen = jnp.ones((16, K)), jnp.zeros((16, 2), jnp.int32)
    for f, args in [
        (lambda w, e, x: kernels.chunked_product(w.at(e), x), (stack, jnp.int32(1), x)),
        (lambda *a: experts(*a, act), (x, chosen, jnp.ones((16, 2)), stack, stack, stack)),
        (lambda w, ids: embed_rows(w.at(0), ids), (stack, chosen[:, 0])),
        (dequantize, (stack,)),
    ]:
        assert export(jax.jit(f), platforms=["cuda"])(*args).platforms == ("cuda",)


def test_the_layout_of_a_platform():
    assert [weights.default_layout(p) for p in ("gpu", "cuda", "cpu", "METAL")] == ["gpu", "gpu", "cpu", "cpu"]
