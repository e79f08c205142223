"""Programs of a process that was asked for exact products: every one multiplies float32 numbers with all of their bits."""

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax
from jax import lax
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from ds4jax import FAMILIES, platforms, primitives

EXACT = lax.Precision.HIGHEST
BRIEF = [("deepseek4", "gpu"), ("inkling", "gpu")]


@pytest.fixture
def exact():
    before = jax.config.jax_default_matmul_precision
    platforms.exact()
    yield
    jax.config.update("jax_default_matmul_precision", before)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: isinstance(p, Jaxpr | ClosedJaxpr)):
            if isinstance(inner, Jaxpr | ClosedJaxpr):
                yield from equations(getattr(inner, "jaxpr", inner))


def products(function, *arguments):
    """{(dtypes of the operands, dtype of the sum, whether all bits count)} of the matrix products in a function's program."""
    found = set()
    for equation in equations(jax.make_jaxpr(function)(*arguments).jaxpr):
        name = equation.primitive.name
        assert name not in ("conv_general_dilated", "ragged_dot_general"), "another product, which is not looked at"
        if name == "dot_general":
            types = tuple(str(v.aval.dtype) for v in equation.invars)
            whole = equation.params["precision"] in (EXACT, (EXACT, EXACT))
            found.add((types, str(equation.outvars[0].aval.dtype), whole))
    return found


@pytest.mark.parametrize(
    ("architecture", "layout", "profile"),
    [
        pytest.param(architecture, layout, profile, marks=[] if (architecture, layout) in BRIEF else pytest.mark.slow)
        for architecture in sorted(FAMILIES)
        for layout, profile in (("gpu", "default"), ("cpu", "default"), ("cpu", "metal"))
    ],
)
def test_every_product_takes_all_bits(exact, programs, architecture, layout, profile):
    model = programs(architecture, layout=layout, dtype="float32", profile=profile)
    with primitives.using(profile):
        found = set.union(*(products(model[s].fresh(), *model[s].arguments) for s in ("decode 4 banks", "prefill")))
    assert found == {(("float32", "float32"), "float32", True)}


def test_what_is_not_exact_is_found(programs):
    """Without asking, products are the platform's own, and bfloat16's where models are."""
    model = programs("deepseek4", layout="gpu", dtype="float32", profile="default")["prefill"]
    assert (("float32", "float32"), "float32", False) in products(model.fresh(), *model.arguments)
    rounded = programs("deepseek4", layout="gpu", dtype="bfloat16", profile="default")["prefill"]
    assert any("bfloat16" in types for types, _, _ in products(rounded.fresh(), *rounded.arguments))


def test_a_cpu_is_exact_already():
    """The same bits with and without asking."""
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((37, 300), (300, 50)))
    before = np.asarray(jax.jit(lambda a, b: jnp.einsum("ik,kj->ij", a, b))(a, b))
    with jax.default_matmul_precision("highest"):
        after = np.asarray(jax.jit(lambda a, b: jnp.einsum("ik,kj->ij", a, b))(a, b))
    assert np.array_equal(before, after)
    error = np.abs(before - a.astype(np.float64) @ b).max()
    assert error < 1e-4, "operands of ten bits would be some 1e-2 off"
