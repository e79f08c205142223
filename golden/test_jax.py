"""ds4jax held to the same goldens as the reference: float32, 1e-3 max abs."""

from functools import cache

import numpy as np
import pytest
from runs import runs

pytest.importorskip("jax", reason="JAX is not installed")

from ds4jax import FAMILIES
from ds4jax.model import Model

TOLERANCE = 1e-3


@cache
def model(run):
    """One model a run, whose shapes make a single program serve every case."""
    options = {k: str(run.path(v[1:])) if isinstance(v, str) and v.startswith("@") else v for k, v in run.options.items()}
    context = options.pop("context", 512)
    return Model.open(run.path(run.artifact), context=context, chunk=64, sizes=(64,), least_bucket=512, **options)


def pytest_generate_tests(metafunc):
    metafunc.parametrize("jax_run", [run for run in runs() if run.arch in FAMILIES], ids=str)


def test_logits(jax_run):
    run = jax_run
    cases = run.arrays(run.cases)
    for case in ("short", "medium", "long"):
        if f"tokens_{case}" not in cases:
            continue
        bank = model(run).new_state()
        logits = model(run).verify(bank, cases[f"tokens_{case}"])[cases[f"pos_{case}"]]
        bank.release()
        assert logits.dtype == np.float32
        assert np.max(np.abs(logits - cases[f"logits_{case}"])) <= TOLERANCE, case
