"""Which platform is chosen and why; what programs for Apple's GPUs hold, and that they compute the same."""

import re
from functools import cache

import numpy as np
import pytest
from runs import reference, runs

pytest.importorskip("jax", reason="JAX is not installed")

import jax
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from ds4jax import FAMILIES, platforms, primitives, weights
from ds4jax.model import Model
from ds4jax.platforms import ALLOWED, DTYPES, REFUSED, REFUSED_DTYPES, Found, PlatformError, choose
from ds4ref import ops
from ds4ref.gguf import Tensor
from ds4ref.quants import BLOCK, PLAIN, TensorType

CPU = Found("cpu", "cpu", package="jaxlib")
GPU = Found("gpu", "NVIDIA H200", 2, "jax-cuda12-plugin")
ROCM = Found("gpu", "AMD Instinct", 1, "jax-rocm")
MPS = Found("mps", "Apple M4", package="jax-mps")
APPLE = Found("METAL", "Metal", package="jax-metal")
MLX = Found("METAL", "Metal", package="metaljax")
NOW = (0, 10, 2)


# The choice


@pytest.mark.parametrize(
    "requested, available, version, name, package, words",
    [
        ("auto", (CPU,), NOW, "cpu", "jaxlib", "no accelerator"),
        ("auto", (GPU, CPU), NOW, "cuda", "jax-cuda12-plugin", "2 × NVIDIA H200"),
        ("auto", (CPU, MPS), NOW, "metal", "jax-mps", "jax-mps has Apple M4"),
        ("auto", (CPU, APPLE), NOW, "cpu", "jaxlib", "jax-metal is installed, but fails from JAX 0.5.1 on"),
        ("auto", (CPU, APPLE), (0, 5, 0), "metal", "jax-metal", "jax-metal has Metal"),
        ("auto", (CPU, MLX), NOW, "metal", "metaljax", "metaljax has Metal"),
        ("auto", (CPU, APPLE, MPS), NOW, "metal", "jax-mps", "jax-mps has"),
        ("auto", (CPU, ROCM), NOW, "cpu", "jaxlib", "no accelerator that ds4jax knows"),
        ("metal", (CPU, APPLE, MPS), NOW, "metal", "jax-mps", "asked for"),
        ("metal", (CPU, APPLE), NOW, "metal", "jax-metal", "known to fail"),
        ("cpu", (CPU, GPU), NOW, "cpu", "jaxlib", "asked for"),
        ("cuda", (CPU, GPU), NOW, "cuda", "jax-cuda12-plugin", "asked for"),
    ],
)
def test_choice(requested, available, version, name, package, words):
    chosen = choose(requested, available, version)
    assert (chosen.name, chosen.package) == (name, package) and words in chosen.why
    assert chosen.profile == ("metal" if name == "metal" else "default")
    assert chosen.layout in weights.LAYOUTS and jnp.dtype(chosen.dtype)


@pytest.mark.parametrize(
    "requested, available, words",
    [
        ("cuda", (CPU, MPS), "platform cuda is not here: JAX sees cpu, mps; pip install"),
        ("cuda", (CPU, ROCM), "platform cuda is not here: JAX sees cpu, gpu"),
        ("metal", (CPU,), "platform metal is not here: JAX sees cpu; pip install 'ds4[metal]'"),
        ("cpu", (GPU,), "platform cpu is not here"),
        ("auto", (), "JAX sees nothing"),
        ("tpu", (CPU,), "platform 'tpu' is unknown; auto, cuda, metal or cpu is accepted"),
    ],
)
def test_refusals(requested, available, words):
    with pytest.raises(PlatformError) as error:
        choose(requested, available, NOW)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_this_machine():
    found = platforms.found()
    assert any(device.platform == "cpu" and device.count >= 1 for device in found)
    chosen = choose("cpu")
    with chosen.active():
        assert next(iter(jnp.zeros(1).devices())).platform == "cpu" and primitives.profile() == "default"


def test_command(capsys, monkeypatch):
    monkeypatch.setattr(platforms, "found", lambda: [CPU])
    assert platforms.main([]) == 0
    assert capsys.readouterr().out.startswith("cpu: JAX has no accelerator")
    assert platforms.main(["metal"]) == 2
    assert "platform metal is not here" in capsys.readouterr().err
    monkeypatch.setattr(platforms, "found", lambda: [CPU, MPS])
    assert platforms.main(["metal"]) == 0
    printed = capsys.readouterr().out
    assert "profile metal" in printed and f"without scatter: {REFUSED['scatter'][0]}" in printed


def test_profile_of_the_device(monkeypatch):
    assert primitives.profile() == "default"
    assert [primitives.profile_of(name) for name in ("cpu", "gpu", "METAL", "mps")] == ["default", "default", "metal", "metal"]
    monkeypatch.setattr(jax, "default_backend", lambda: "mps")
    assert primitives.profile() == "metal"
    with primitives.using("default"):
        assert primitives.profile() == "default"
    with pytest.raises(ValueError, match="'vulkan' is unknown; 'default' or 'metal'"), primitives.using("vulkan"):
        pass


# What programs hold


def equations(jaxpr):
    """Every equation of a jaxpr, those of the functions inside it too."""
    for equation in jaxpr.eqns:
        yield equation
        parameters = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: isinstance(p, Jaxpr | ClosedJaxpr))
        for inner in parameters:
            if isinstance(inner, Jaxpr | ClosedJaxpr):
                yield from equations(getattr(inner, "jaxpr", inner))


def refused(function, *arguments):
    """What a function's program for Metal holds that it may not: {(primitive or dtype, why)}."""
    with primitives.using("metal"):
        closed = jax.make_jaxpr(function)(*arguments)
    problems, held = set(), list(equations(closed.jaxpr))
    values = [*closed.jaxpr.invars, *closed.jaxpr.constvars, *(v for e in held for v in (*e.invars, *e.outvars))]
    for name in {equation.primitive.name for equation in held} - ALLOWED:
        problems.add((name, *REFUSED.get(name, ("not known to work",))))
    for name in {str(value.aval.dtype) for value in values} - DTYPES:
        problems.add((name, *REFUSED_DTYPES.get(name, ("not known to work",))))
    return problems


STEPS = ("decode 1 bank", "decode 4 banks", "prefill", "verify", "clear", "copy")


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_metal_programs_hold_what_metal_has(programs, architecture):
    model = programs(architecture, profile="metal")
    assert {step: refused(model[step].fresh(), *model[step].arguments) for step in STEPS} == dict.fromkeys(STEPS, set())


@pytest.mark.parametrize(
    "drafter",
    [("naive_n05_flash", "model.gguf", "draft.gguf"), ("qwen35", "model-mtp.gguf", None)],
    ids=lambda drafter: drafter[0],
)
def test_metal_drafts_and_trials_hold_what_metal_has(draft_programs, drafter):
    programs = draft_programs(*drafter, profile="metal")
    found = {name: refused(program.fresh(), *program.arguments) for name, program in programs.items()}
    assert found == dict.fromkeys(programs, set())


@pytest.mark.parametrize("type", [t for t in BLOCK if t not in PLAIN or PLAIN[t].kind == "f"], ids=lambda t: TensorType(t).name)
def test_metal_products_hold_what_metal_has(type):
    rows, columns, experts = 320, 256, 4
    values, size = BLOCK[type]
    raw = np.zeros(experts * rows * columns // values * size, np.uint8)
    stack = jax.eval_shape(lambda: weights.pack(Tensor("w", (experts, rows, columns), TensorType(type), raw)))
    one = jax.eval_shape(lambda: weights.pack(Tensor("w", (rows, columns), TensorType(type), raw[: len(raw) // experts])))
    x = jax.ShapeDtypeStruct((40, columns), np.float32)
    chosen = jax.ShapeDtypeStruct((40, 2), np.int32)
    few = jax.ShapeDtypeStruct((1, columns), np.float32)

    def activation(gate, up):
        return (gate * up)[..., :columns]

    def routed(h, chosen, stack):
        return weights.experts(h, chosen, jnp.ones(chosen.shape, jnp.float32), stack, stack, stack, activation)

    assert not refused(weights.linear, one, x) | refused(weights.linear, one, few)
    assert not refused(weights.embed_rows, one, jax.ShapeDtypeStruct((5,), np.int32))
    assert not refused(weights.dequantize, stack)
    assert not refused(routed, x, chosen, stack) | refused(routed, few, jax.ShapeDtypeStruct((1, 2), np.int32), stack)


def test_what_metal_lacks_is_found(programs):
    """The walk can fail: JAX's own operations, also inside loops and calls, and every dtype that Metal lacks."""
    x = np.zeros((4, 8), np.float32)

    def looped(x):
        return lax.fori_loop(0, 3, lambda i, x: jax.jit(lambda x: x.at[i].set(jnp.sort(x[0])))(x), x)

    assert {problem[0] for problem in refused(looped, x)} == {"sort", "scatter"}
    assert {problem[0] for problem in refused(lambda x: lax.top_k(x, 2), x)} == {"top_k"}
    assert {problem[0] for problem in refused(lambda x: jnp.cumsum(x), x)} == {"cumsum"}
    assert {problem[0] for problem in refused(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), x)} == {"cond"}
    assert {problem[0] for problem in refused(lambda x: x.astype(jnp.int4).astype(jnp.int32), x)} == {"int4"}
    assert {problem[0] for problem in refused(lambda x: jnp.real(lax.complex(x, x)), x)} >= {"complex64", "complex"}
    jax.config.update("jax_enable_x64", True)
    try:
        assert {problem[0] for problem in refused(lambda x: x.astype(jnp.float64) + jnp.arange(8), x)} >= {"float64", "int64"}
    finally:
        jax.config.update("jax_enable_x64", False)
    default = programs("deepseek4")["decode 4 banks"]
    used = {equation.primitive.name for equation in equations(jax.make_jaxpr(default.fresh())(*default.arguments).jaxpr)}
    assert {"scatter", "sort", "top_k"} <= used, "the default programs are the same: what is this test worth?"


def test_lists_do_not_contradict_each_other():
    assert not ALLOWED & set(REFUSED) and not DTYPES & set(REFUSED_DTYPES)
    assert all(re.match(r"https://github\.com/\S+$", where) for _, where in [*REFUSED.values(), *REFUSED_DTYPES.values()])


# Those that jax-mps executes: names in its src/pjrt_plugin/ops, github.com/tillahoffmann/jax-mps, commit 9cc6ce6.
STABLEHLO = (
    "abs add and atan2 bitcast_convert broadcast_in_dim case cbrt ceil clamp compare complex composite concatenate constant "
    "convert convolution cosine count_leading_zeros custom_call divide dot_general dynamic_slice dynamic_update_slice "
    "exponential exponential_minus_one fft floor gather imag iota is_finite log log_plus_one logistic maximum minimum multiply "
    "negate not optimization_barrier or pad popcnt power real reduce reduce_precision reduce_window remainder reshape return "
    "reverse round_nearest_afz round_nearest_even rsqrt scatter select shift_left shift_right_arithmetic shift_right_logical "
    "sign sine slice sort sqrt subtract tan tanh transpose while xor"
)


@pytest.mark.parametrize("architecture", ["deepseek4", "inkling", "naive_n05_flash", "qwen4exp"])
def test_metal_programs_lower_to_what_jax_mps_executes(programs, architecture):
    program = programs(architecture, profile="metal")["decode 4 banks"]
    with primitives.using("metal"):
        text = jax.jit(program.fresh()).trace(*program.arguments).lower(lowering_platforms=("mps",)).as_text()
    operations = set(re.findall(r"\b(?:stablehlo|chlo)\.(\w+)", text))
    assert operations - set(STABLEHLO.split()) == set() and "while" in operations
    assert not operations & {"scatter", "sort", "top_k", "reduce_window", "popcnt", "custom_call", "case"}


# The same results


@cache
def compiled(function, profile, *static):
    def traced(*arguments):
        with primitives.using(profile):
            return function(*arguments, *static)

    return jax.jit(traced)


def same(function, *arguments, static=()):
    """Asserts that both profiles give the same bits and dtypes, and returns them. static: last arguments, hashable."""
    one, other = (compiled(function, profile, *static)(*arguments) for profile in primitives.PROFILES)
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)
    return jax.tree.map(np.asarray, other)


values = st.sampled_from([-np.inf, -2.0, -1.0, -0.0, 0.0, 1.0, 1.0000001, 3.0, np.inf])
rows_of_values = st.lists(values, min_size=12, max_size=12)


@given(rows_of_values, st.sampled_from([1, 3, 12]))
def test_top_k_keeps_the_order_of_equals(row, k):
    x = np.array([row, row[::-1]], np.float32)
    assert np.array_equal(same(primitives.top_k, x, static=(k,))[1], np.asarray(lax.top_k(x, k)[1]))
    x = np.where(x == 0, np.float32(0), x)  # NumPy has one zero
    assert np.array_equal(same(primitives.top_k, x, static=(k,))[1], [ops.top_k(row, k) for row in x])


@given(rows_of_values, st.sampled_from([1, 5, 11]))
def test_largest_are_the_first_of_equals(row, k):
    x = np.array([[row, row[::-1]]], np.float32)
    mask = same(primitives.largest, x, static=(k,))
    assert np.array_equal(np.sort(np.asarray(lax.top_k(x, k)[1])), np.nonzero(mask)[2].reshape(1, 2, k))


def test_values_that_are_no_numbers():
    x = np.array([[np.nan, 1, -np.inf, np.inf, -np.nan, 0]], np.float32)
    assert same(primitives.top_k, x, static=(6,))[1].tolist() == np.asarray(lax.top_k(x, 6)[1]).tolist()


def busy_first(keys, size):
    return primitives.true_first(keys > 2, size)


@given(st.lists(st.integers(0, 6), min_size=9, max_size=9))
def test_groups_are_a_stable_sort(keys):
    keys = np.array(keys, np.int32)
    order, places, ends = same(primitives.group, keys, static=(7,))
    assert np.array_equal(order, np.argsort(keys, kind="stable")) and np.array_equal(order[places], np.arange(9))
    assert np.array_equal(ends, np.cumsum(np.bincount(keys, minlength=7)))
    expected = np.nonzero(keys > 2)[0][:4]
    assert np.array_equal(same(busy_first, keys, static=(4,)), np.pad(expected, (0, 4 - len(expected))))


def test_small_operations():
    odd = same(primitives.odd_bits, np.arange(256, dtype=np.int32))
    assert np.array_equal(odd, [n.bit_count() % 2 for n in range(256)])
    x = np.random.default_rng(0).integers(-9, 9, (37, 3)).astype(np.int32)
    assert np.array_equal(same(primitives.running_sum, x), np.cumsum(x, axis=0))
    y = same(primitives.add_row, np.ones((4, 3), np.float32), np.full(3, 2, np.float32), 2)
    assert np.array_equal(y[:, 0], [1, 1, 3, 1])


@cache
def golden(architecture):
    return next(run for run in runs() if run.arch == architecture and not run.options)


# Between them: rows, rings, recurrent and compressed state, an indexer, grouped routing, many pairs of experts.
@pytest.mark.parametrize(
    "architecture",
    ["mimo2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek4", "solar-open2", "bailingmoe3"))],
)
def test_metal_computes_the_goldens(architecture):
    run = golden(architecture)
    cases = run.arrays(run.cases)
    with primitives.using("metal"):
        model = Model.open(run.path(run.artifact), context=512, banks=2, chunk=64, sizes=(64,), least_bucket=512)
        busy, bank = model.new_state(), model.new_state()
        model.prefill(busy, cases["tokens_short"])
        before = busy.snapshot()
        for case in ("short", "medium"):
            bank.clear()
            logits = model.verify(bank, cases[f"tokens_{case}"])[cases[f"pos_{case}"]]
            assert np.max(np.abs(logits - cases[f"logits_{case}"])) <= 1e-3, case
    for name, arrays in busy.snapshot().components.items():  # nothing was written into the neighbouring bank
        assert all(np.array_equal(array, before.components[name][key]) for key, array in arrays.items()), name


def test_metal_decodes_several_banks():
    """Three of four banks at once, the fourth row idle, are what the reference gives for each alone."""
    run = golden("mimo2")
    tokens = run.arrays(run.cases)["tokens_medium"].tolist()
    sequences = [tokens[start : start + 14] for start in (0, 5, 9)]
    with primitives.using("metal"):
        model = Model.open(run.path(run.artifact), context=64, banks=4, chunk=1, sizes=(1,), least_bucket=64)
        banks = [model.new_state() for _ in sequences]
        got = np.stack([model.decode(banks, step) for step in zip(*sequences, strict=True)], axis=1)
    for sequence, logits in zip(sequences, got, strict=True):
        assert np.allclose(logits, reference(run).verify(reference(run).new_state(), sequence), rtol=0, atol=2e-4)
