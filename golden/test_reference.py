"""ds4ref held to the goldens: logits of every case, and the per-layer trace."""

import numpy as np
import pytest
from runs import reference


@pytest.mark.parametrize("case", ["short", "medium", "long"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logits(run, case, dtype, record_property):
    cases = run.arrays(run.cases)
    if f"tokens_{case}" not in cases:
        pytest.skip(f"this oracle has no case {case!r}")
    tolerance = run.tolerance if dtype == "float32" else run.float64
    if tolerance is None:
        pytest.skip("the oracle is float32: its own rounding is all that float64 would measure")
    model = reference(run, np.dtype(dtype).type)
    logits = model.verify(model.new_state(), cases[f"tokens_{case}"])[cases[f"pos_{case}"]]
    assert logits.dtype == dtype
    error = np.max(np.abs(logits - cases[f"logits_{case}"]))
    record_property("error", float(error))
    assert error <= tolerance


def test_trace(run):
    if run.trace is None:
        pytest.skip("this oracle has no trace")
    expected = run.arrays(run.trace)
    # Intermediates reach magnitudes where float32 alone is off by more than the logits' tolerance; in float64 they are not.
    model = reference(run, np.float32 if run.float64 is None else np.float64)
    tolerance = run.tolerance if run.float64 is None else 5 * run.float64
    traced = {}
    for suffix, case in (("", "short"), ("_long", "long")):
        names = {name for name in expected if name.endswith("_long") == bool(suffix) and name != "tokens"}
        if not names:
            continue
        steps = []
        state = model.new_state()
        for token in run.arrays(run.cases)[f"tokens_{case}"]:
            steps.append({})
            model.step(state, token, lambda name, array, seen=steps[-1]: seen.__setitem__(name, np.array(array)))
        traced |= {name + suffix: [step.get(name) for step in steps] for name in steps[-1]}
    assert expected.keys() - {"tokens"} <= traced.keys(), "a traced part of the oracle is not offered by the family"
    for name, array in expected.items():
        if name == "tokens":
            continue
        kind, seen = name.split("_")[0], traced[name]
        if kind in ("select", "topk"):
            assert [_visible(row, t) for t, row in enumerate(array)] == [_visible(row, t) for t, row in enumerate(seen)], name
        else:
            ours = seen[-1] if kind == "comp" else np.stack(seen)
            assert np.max(np.abs(ours - array), initial=0) <= tolerance, name


def _visible(row, position):
    """A selection as a set: without padding (−1) and without fillers beyond the query's own position."""
    return {int(index) for index in row if 0 <= index <= position}
