"""ds4jax held to the same goldens as the reference: float32 within 1e-3; bfloat16 by KL divergence and greedy tokens."""

from functools import cache

import numpy as np
import pytest
from runs import runs

pytest.importorskip("jax", reason="JAX is not installed")

from ds4jax import FAMILIES
from ds4jax.model import Model

TOLERANCE = 1e-3
KL = 1e-2
ALWAYS_IN_BFLOAT16 = ("deepseek4", "qwen35")


@cache
def model(run, dtype="float32"):
    """One model a run, whose shapes make a single program serve every case."""
    options = {k: str(run.path(v[1:])) if isinstance(v, str) and v.startswith("@") else v for k, v in run.options.items()}
    context = options.pop("context", 512)
    shapes = {"context": context, "chunk": 64, "sizes": (64,), "least_bucket": 512}
    return Model.open(run.path(run.artifact), dtype=dtype, **shapes, **options)


def verified(run, dtype):
    """(logits of ds4jax, logits of the oracle) [positions, V] of every case in turn."""
    cases = run.arrays(run.cases)
    for case in ("short", "medium", "long"):
        if f"tokens_{case}" in cases:
            bank = model(run, dtype).new_state()
            logits = model(run, dtype).verify(bank, cases[f"tokens_{case}"])[cases[f"pos_{case}"]]
            bank.release()
            yield logits, cases[f"logits_{case}"]


def jax_runs():
    return [run for run in runs() if run.arch in FAMILIES]


@pytest.mark.parametrize("jax_run", jax_runs(), ids=str)
def test_logits(jax_run):
    for logits, expected in verified(jax_run, "float32"):
        assert logits.dtype == np.float32
        assert np.max(np.abs(logits - expected)) <= TOLERANCE


def bfloat16_runs():
    """The published mixes of some families, and everything in the slow profile."""
    for run in jax_runs():
        always = run.arch in ALWAYS_IN_BFLOAT16 and "mixed" in run.artifact
        yield pytest.param(run, marks=() if always else pytest.mark.slow, id=str(run))


@pytest.mark.parametrize("jax_run", list(bfloat16_runs()))
def test_bfloat16(jax_run):
    """The median: where rounding tips the choice of an expert or of rows, random weights give another distribution. With the
    same choices it is every position, see test_jax_choices.py."""
    logits, expected = (np.concatenate(both).astype(np.float64) for both in zip(*verified(jax_run, "bfloat16"), strict=True))
    assert np.median(divergence(expected, logits)) <= KL
    assert_greedy_where_sure(logits, expected)


def assert_greedy_where_sure(logits, expected):
    """The greedy token is the oracle's wherever that leads by more than the error."""
    best, error = np.sort(expected, axis=-1), np.max(np.abs(logits - expected), axis=-1)
    sure = best[:, -1] - best[:, -2] > error
    assert np.array_equal(logits.argmax(-1)[sure], expected.argmax(-1)[sure])


def divergence(a, b):
    """KL(a ‖ b) of the distributions of logits [N, V], in nats."""
    a, b = (x - np.max(x, axis=-1, keepdims=True) for x in (a, b))
    a, b = (x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True)) for x in (a, b))
    return np.sum(np.exp(a) * (a - b), axis=-1)
