"""bfloat16 with every choice of experts and rows that float32 makes: what rounding does to the arithmetic alone.

On the small random artifacts of golden/ rounding of any kind, that of the state by itself too, now and then tips a near tie of
a router or an indexer, and random weights answer that with another distribution; so test_jax.py holds bfloat16 to a median.
Here the choices are recorded in float32 and dictated in bfloat16, and every position is held to the limit.
"""

from collections import deque
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax
import jax.numpy as jnp
from jax.experimental import io_callback
from runs import QUICK
from test_jax import KL, TOLERANCE, assert_greedy_where_sure, divergence, jax_runs, model, verified

from ds4jax import compilation, primitives

ALWAYS = ("dots3note", "naive_n05_flash")
CHOOSE = {"top_k": primitives.top_k, "largest": primitives.largest}


@contextmanager
def choices(hook):
    """Every choice of a model passes through ``hook``: what was chosen, indices or a mask → what shall be."""

    def top_k(x, k):
        _, chosen = CHOOSE["top_k"](x, k)
        chosen = hook(chosen)
        return jnp.take_along_axis(x, chosen, axis=-1), chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitives, "top_k", top_k)
        patch.setattr(primitives, "largest", lambda x, k: hook(CHOOSE["largest"](x, k)))
        patch.setattr(compilation, "compile_options", lambda: QUICK)
        model.cache_clear()
        yield
    model.cache_clear()


def recording(kept):
    def hook(chosen):
        io_callback(lambda c: kept.append(np.array(c)), None, chosen, ordered=True)
        return chosen

    return hook


def dictating(kept):
    def hook(chosen):
        return io_callback(lambda _: kept.popleft(), jax.ShapeDtypeStruct(chosen.shape, chosen.dtype), chosen, ordered=True)

    return hook


def cases():
    for run in jax_runs():
        if "mixed" in run.artifact:
            yield pytest.param(run, marks=() if run.arch in ALWAYS else pytest.mark.slow, id=str(run))


@pytest.mark.parametrize("jax_run", list(cases()))
def test_rounding_alone_changes_little(jax_run):
    """At every position, not in the mean; and the greedy token is the oracle's wherever it leads by more than the error."""
    kept = deque()
    with choices(recording(kept)):
        exact = [logits for logits, _ in verified(jax_run, "float32")]
    with choices(dictating(kept)):
        rounded = list(verified(jax_run, "bfloat16"))
    assert not kept
    for logits, (got, expected) in zip(exact, rounded, strict=True):
        assert np.max(np.abs(logits - expected)) <= TOLERANCE
        assert np.max(divergence(expected.astype(np.float64), got.astype(np.float64))) <= KL
        assert_greedy_where_sure(got, expected)
