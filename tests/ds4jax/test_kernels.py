"""The Pallas kernels: interpreted against NumPy, lowered for CUDA at the sizes of real models, and inside whole models.

None of this runs on a GPU; what it shows is that the arithmetic is right and that JAX accepts the kernels for CUDA.
"""

from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
from jax.export import DisabledSafetyCheck, export  # noqa: E402
from runs import runs  # noqa: E402

from ds4jax import blocks, kernels, weights  # noqa: E402
from ds4jax.kernels import choose, expert_products, matrix_product, rows_per_program, sum_of_experts  # noqa: E402
from ds4jax.model import Model  # noqa: E402
from ds4jax.weights import Packed, pack, pack_stack  # noqa: E402
from ds4ref.gguf import Tensor  # noqa: E402
from ds4ref.quants import BLOCK, TensorType, nbytes  # noqa: E402

TYPES = [TensorType[name] for name in kernels.TILES]
TRITON = "__gpu$xla.gpu.triton"
export_cuda = partial(export, platforms=["cuda"], disabled_checks=[DisabledSafetyCheck.custom_call(TRITON)])


def name_of(value):
    return getattr(value, "name", value)


def mild_tensor(type, shape, seed=0):
    """Random codes with scales around 1."""
    rng = np.random.default_rng(seed)
    if type not in blocks.FORMATS:
        values = rng.standard_normal(shape).astype(np.float32)
        narrow = {TensorType.F32: values, TensorType.F16: values.astype(np.float16)}
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return Tensor("mild", shape, type, np.ascontiguousarray(narrow.get(type, bits)).reshape(-1).view(np.uint8))
    data = rng.integers(0, 256, nbytes(type, shape), dtype=np.uint8)
    fields = data.view(np.dtype(blocks.FORMATS[type]))
    for name in {"d", "m"} & set(fields.dtype.names):
        fields[name] = (fields[name].view("<u2") & 0x83FF | 0x2400).view("<f2")  # 2^-6 … 2^-5, of either sign
    if type is TensorType.IQ1_M:  # the scale is the high nibbles of four words
        fields["s"][:, 3] = fields["s"][:, 3] & 0x8FFF | 0x2000
    return Tensor("mild", shape, type, data)


def silu_product(g, u):
    return jax.nn.silu(g) * u


def described(type, shape, index=()):
    """A Packed of shapes alone, for lowering at sizes that nobody wants in memory."""
    one = np.zeros(nbytes(type, (1, shape[-1])), np.uint8)
    planes = {
        name: jax.ShapeDtypeStruct((*shape[:-1], plane.shape[-1]), plane.dtype)
        for name, plane in blocks.planes(one, type, (1, shape[-1]))
    }
    return Packed(planes, type.name, "rows", *shape[-2:], index=index)


def error(y, x, exact):
    return np.max(np.abs(y - x @ exact.T) / (np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(exact, axis=1)))


@pytest.mark.parametrize("type", TYPES, ids=name_of)
def test_products_of_few_rows(type):
    """Of one matrix of a stack [L, E, N, K]; N is no multiple of the rows that a program takes."""
    tensors = [mild_tensor(type, (2, 70, 512), seed) for seed in range(2)]
    w = pack_stack(tensors, "gpu").at(jnp.int32(1), 0)
    exact = tensors[1].dequantize()[0].astype(np.float64)
    assert exact.std() > 1e-4
    for T in (1, 3):
        x = np.random.default_rng(T).standard_normal((T, 512)).astype(np.float32)
        y = jax.jit(partial(matrix_product, interpret=True))(w, x)
        assert y.dtype == jnp.float32 and y.shape == (T, 70) and error(y, x, exact) < 3e-7


@pytest.mark.parametrize(("N", "K"), [(1, 32), (3, 96), (64, 64), (33, 2880)])
@pytest.mark.parametrize("type", [TensorType.Q8_0, TensorType.BF16], ids=name_of)
def test_shapes_that_no_tile_divides(type, N, K):
    tensor = mild_tensor(type, (N, K))
    for T in (2, 5):
        x = np.random.default_rng(T).standard_normal((T, K)).astype(np.float32)
        y = matrix_product(pack(tensor, "gpu"), jnp.asarray(x), interpret=True)
        assert error(y, x, tensor.dequantize().astype(np.float64)) < 3e-7


@pytest.mark.parametrize("T", range(1, 9))
def test_every_number_of_rows(T):
    tensor = mild_tensor(TensorType.Q4_K, (40, 256))
    x = np.random.default_rng(T).standard_normal((T, 256)).astype(np.float32)
    y = matrix_product(pack(tensor, "gpu"), jnp.asarray(x), interpret=True)
    assert error(y, x, tensor.dequantize().astype(np.float64)) < 3e-7


def expert_case(types, T, used=3, E=5, F=256, D=512, layers=2):
    """(h, chosen, share, stacks [L, E, …], their values of layer 1). Experts 0 and E − 1 are chosen, and some twice."""
    shapes = [(E, F, D), (E, F, D), (E, D, F)]
    tensors = [
        [mild_tensor(t, s, 10 * l + i) for l in range(layers)] for i, (t, s) in enumerate(zip(types, shapes, strict=True))
    ]
    rng = np.random.default_rng(T)
    chosen = np.stack([rng.permutation(E)[:used] for _ in range(T)]).astype(np.int32)
    chosen[0, :2] = 0, E - 1
    h, share = rng.standard_normal((T, D)).astype(np.float32), rng.random((T, used)).astype(np.float32)
    stacks = [pack_stack(stack, "gpu") for stack in tensors]
    return h, chosen, share, stacks, [stack[1].dequantize().astype(np.float64) for stack in tensors]


def expected_experts(h, chosen, share, dense, factor):
    gate, up, down = (values[chosen] for values in dense)  # [T, used, …]
    g, u = (np.einsum("td,tkfd->tkf", h, part) for part in (gate, up))
    return np.einsum("tk,tkf,tkdf->td", share * factor[chosen], g * (1 + np.tanh(g / 2)) / 2 * u, down)


@pytest.mark.parametrize("type", TYPES, ids=name_of)
def test_experts(type):
    """Pairs of two layers' stack, of which the second is asked for."""
    h, chosen, share, stacks, dense = expert_case([type] * 3, 4)
    expected = expected_experts(h, chosen, share, dense, np.ones(5))

    @jax.jit
    def run(l, stacks):
        return expert_products(
            h, jnp.asarray(chosen), jnp.asarray(share), *(w.at(l) for w in stacks), silu_product, interpret=True
        )

    y = run(jnp.int32(1), stacks)
    assert y.shape == h.shape and np.max(np.abs(y - expected)) < 2e-6 * np.max(np.abs(expected))


def test_experts_of_mixed_types_and_of_their_own_factor():
    """The second kind of ``act``, which need not be elementwise, sees whole rows."""
    types = [TensorType.IQ2_XXS, TensorType.Q8_0, TensorType.Q2_K]
    h, chosen, share, stacks, dense = expert_case(types, 3)
    factor = np.random.default_rng(0).random(5).astype(np.float32)
    at = [w.at(1) for w in stacks]
    chosen_, share_ = jnp.asarray(chosen), jnp.asarray(share)
    y = expert_products(h, chosen_, share_, *at, silu_product, interpret=True)
    expected = expected_experts(h, chosen, share, dense, np.ones(5))
    assert np.max(np.abs(y - expected)) < 2e-6 * np.max(np.abs(expected))

    def act(g, u, factor):
        return factor * silu_product(g, u) + 0 * jnp.mean(g, axis=-1, keepdims=True)

    y = expert_products(h, chosen_, share_, *at, act, (jnp.asarray(factor),), interpret=True)
    expected = expected_experts(h, chosen, share, dense, factor)
    assert np.max(np.abs(y - expected)) < 2e-6 * np.max(np.abs(expected))


def test_only_chosen_experts_are_read():
    """Every other expert's scales are NaN: one byte of them would show."""
    E, F, D = 4, 64, 256
    tensor = mild_tensor(TensorType.Q8_0, (E, F, D))
    fields = tensor.data.view(np.dtype(blocks.FORMATS[TensorType.Q8_0])).reshape(E, -1)
    fields["d"][[0, 1, 3]] = np.nan
    x = np.random.default_rng(0).standard_normal((2, D)).astype(np.float32)
    y = sum_of_experts(pack(tensor, "gpu"), jnp.full((2, 1), 2, jnp.int32), jnp.asarray(x), interpret=True)
    assert error(y, x, tensor.dequantize()[2].astype(np.float64)) < 3e-7


def test_planes_that_offsets_do_not_reach(monkeypatch):
    """Byte planes of more than 2³¹ up to 2³² bytes: what is read of them is copied first. Here, those above 2048 bytes."""
    monkeypatch.setattr(kernels, "UNREACHABLE", (2048, 1 << 32))
    h, chosen, share, stacks, dense = expert_case([TensorType.Q4_K, TensorType.Q2_K, TensorType.Q8_0], 2)
    assert kernels._Matrix.of(stacks[0].at(1), jnp.zeros(3, jnp.int32)).cut == {"q", "s", "n"}
    y = expert_products(h, jnp.asarray(chosen), jnp.asarray(share), *(w.at(1) for w in stacks), silu_product, interpret=True)
    expected = expected_experts(h, chosen, share, dense, np.ones(5))
    assert np.max(np.abs(y - expected)) < 2e-6 * np.max(np.abs(expected))
    for w, values in [(stacks[0].at(1, 2), dense[0][2]), (pack(mild_tensor(TensorType.Q4_K, (256, 512), 10), "gpu"), None)]:
        assert kernels._Matrix.of(w).cut == {"q", "s", "n"}
        values = np.asarray(weights.dequantize(w), np.float64) if values is None else values
        assert error(matrix_product(w, jnp.asarray(h), interpret=True), h, values) < 3e-7


def test_what_is_copied_of_planes_that_offsets_do_not_reach():
    """Of 2^32 bytes of codes, one matrix; of an F16 plane as large, nothing. Of experts no more than some are copied."""
    f = jax.jit(lambda l, w, x: weights.linear(w.at(l), x))
    l, x = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((1, 2048), jnp.float32)
    for type, entries, copied in [("Q8_0", 512, True), ("Q8_0", 513, False), ("Q8_0", 256, False), ("F16", 257, False)]:
        text = export_cuda(f)(l, described(TensorType[type], (entries, 4096, 2048)), x).mlir_module()
        assert text.count(TRITON) == 1 and ("stablehlo.gather" in text or "stablehlo.dynamic_slice" in text) == copied
    f = jax.jit(lambda h, chosen, share, w: weights.experts(h, chosen, share, w, w, w, silu_product))
    for T, entries, count in [(8, 1024, 2), (9, 1024, 3), (9, 1025, 2)]:  # 3: a loop over pairs
        w = described(TensorType.Q8_0, (entries, 2048, 2048))
        shapes = [((T, 2048), jnp.float32), ((T, 8), jnp.int32), ((T, 8), jnp.float32)]
        text = export_cuda(f)(*(jax.ShapeDtypeStruct(*s) for s in shapes), w).mlir_module()
        assert text.count(TRITON) == count


def test_bfloat16_operands_of_experts():
    h, chosen, share, stacks, _ = expert_case([TensorType.Q8_0] * 3, 2)
    rounded = [pack(mild_tensor(TensorType.Q8_0, w.shape[1:], i), "gpu", "bfloat16") for i, w in enumerate(stacks)]
    plain = [pack(mild_tensor(TensorType.Q8_0, w.shape[1:], i), "gpu") for i, w in enumerate(stacks)]
    run = partial(expert_products, chosen=jnp.asarray(chosen), weights=jnp.ones_like(share), act=lambda g, u: u, interpret=True)
    a = run(h, gate=rounded[0], up=rounded[1], down=rounded[2])
    h_ = np.asarray(jnp.asarray(h, jnp.bfloat16), np.float32)
    middle = np.einsum("td,tkfd->tkf", h_, plain[1].planes and np.asarray(weights.dequantize(plain[1]))[chosen])
    middle = np.asarray(jnp.asarray(middle, jnp.bfloat16), np.float32)
    b = np.einsum("tkf,tkdf->td", middle, np.asarray(weights.dequantize(plain[2]))[chosen])
    assert np.max(np.abs(a - b)) < 1e-3 * np.max(np.abs(b))
    assert np.max(np.abs(a - run(h, gate=plain[0], up=plain[1], down=plain[2]))) > 1e-4 * np.max(np.abs(b))


@pytest.mark.parametrize(
    ("arguments", "kernel", "reason"),
    [
        (("Q8_0", 4096, 4096, 1, "cuda"), True, "inside the product"),
        (("Q4_K", 4096, 4096, 8, "cuda"), True, "inside the product"),
        (("Q4_K", 4096, 4096, 9, "cuda"), False, "9 rows"),
        (("Q4_K", 4096, 4096, 1, "cpu"), False, "not cpu"),
        (("IQ3_S", 4096, 4096, 1, "cuda"), False, "no kernel decodes IQ3_S"),
        (("F32", 256, 4, 1, "cuda"), False, "4 columns"),
    ],
)
def test_choices(arguments, kernel, reason):
    choice = choose(*arguments)
    assert choice.kernel == kernel and reason in choice.reason


def test_programs_fit_and_are_many():
    for name, tile in kernels.TILES.items():
        tile = tile(4096)
        for T in range(1, 9):
            for N in (1, 5, 512, 4096, 150000):
                R = rows_per_program(tile, N, T)
                assert R & R - 1 == 0 and 1 <= R <= min(N, 32), name
                assert R * T * np.prod(tile.part) <= kernels.SUMS_PER_THREAD * 32 * kernels.WARPS or R == 1
                assert N < 4 * kernels.PROGRAMS or N // R >= kernels.PROGRAMS


@pytest.mark.parametrize("type", TYPES, ids=name_of)
def test_kernels_lower_for_cuda_at_real_sizes(type):
    """Matrices, an unembedding, and stacks of 60 layers of 256 experts, whose offsets need 64 bits."""
    matrix, head = described(type, (4096, 4096)), described(type, (151936, 4096))
    for w, T in [(matrix, 1), (matrix, 8), (head, 1)]:
        exported = export_cuda(jax.jit(weights.linear))(w, jax.ShapeDtypeStruct((T, 4096), jnp.float32))
        assert exported.mlir_module().count(TRITON) == 1
    gate, down = described(type, (60, 256, 2048, 4096)), described(type, (60, 256, 4096, 2048))

    def run(l, h, chosen, share, gate, down):
        return weights.experts(h, chosen, share, gate.at(l), gate.at(l), down.at(l), silu_product)

    shapes = [((), jnp.int32), ((4, 4096), jnp.float32), ((4, 8), jnp.int32), ((4, 8), jnp.float32)]
    exported = export_cuda(jax.jit(run))(*(jax.ShapeDtypeStruct(*s) for s in shapes), gate, down)
    assert exported.mlir_module().count(TRITON) == 2


@pytest.mark.parametrize(("T", "count"), [(8, 1), (9, 0)])
def test_where_kernels_end(T, count):
    w, x = described(TensorType.Q8_0, (512, 512)), jax.ShapeDtypeStruct((T, 512), jnp.float32)
    assert export_cuda(jax.jit(weights.linear))(w, x).mlir_module().count(TRITON) == count
    assert TRITON not in jax.jit(weights.linear).lower(w, x).as_text()


MIXED = ("deepseek4", "k2-horizon", "step35", "motif3")
WHOLE = [run for run in runs() if str(run) in {f"{arch}-mixed/model" for arch in MIXED}]


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels run wherever CUDA would run them, in the interpreter."""
    call = kernels._call
    monkeypatch.setattr(kernels, "_call", lambda kernel, shape, grid, interpret: call(kernel, shape, grid, True))
    calls = []

    def by_platform(kernel, fallback, *operands):
        calls.append(kernel)
        return kernel(*operands)

    monkeypatch.setattr(kernels, "_by_platform", by_platform)
    return calls


def first(count):
    return [run if i < count else pytest.param(run, marks=pytest.mark.slow) for i, run in enumerate(WHOLE)]


@pytest.mark.parametrize("run", first(1), ids=str)
def test_whole_models_by_xla(run):
    cases = run.arrays(run.cases)
    model = Model.open(run.path(run.artifact), context=64, layout="gpu", chunk=16, sizes=(16,), least_bucket=64, **run.options)
    logits = model.verify(model.new_state(), cases["tokens_medium"])[cases["pos_medium"]]
    assert np.max(np.abs(logits - cases["logits_medium"])) < 1e-3


@pytest.mark.parametrize("run", first(2), ids=str)
def test_whole_models_by_kernels(run, interpreted):
    """Token by token, as kernels are for decoding."""
    cases = run.arrays(run.cases)
    model = Model.open(run.path(run.artifact), context=16, layout="gpu", chunk=1, sizes=(1,), least_bucket=16, **run.options)
    bank, tokens = model.new_state(), cases["tokens_short"]
    logits = np.stack([model.step(bank, token) for token in tokens])
    assert interpreted
    assert np.max(np.abs(logits[cases["pos_short"]] - cases["logits_short"])) < 1e-3


def test_the_sizes_of_tiles_are_those_of_the_planes():
    for type in TYPES:
        tile, K = kernels.TILES[type.name](1024), 1024
        planes = {name: plane.shape[-1] for name, plane in described(type, (1, K)).planes.items()}
        assert {name: K // tile.columns * np.prod(field, dtype=int) for name, field in tile.planes.items()} == planes
        assert np.prod(tile.x) == tile.columns and tile.columns % BLOCK[type][0] == 0
