"""Gates of the capability table that no other test stands for; ``python -m ds4server.qualify`` records what holds."""

import numpy as np
import pytest
from runs import reference, runs

pytest.importorskip("jax", reason="JAX is not installed")

from ds4jax import FAMILIES
from ds4jax.model import Model
from ds4ref.reuse import Policy, Reuser

RUNS = {run.arch: run for run in runs() if run.artifact == "model.gguf" and run.cases == "cases.npz"}


@pytest.mark.slow
@pytest.mark.parametrize("arch", sorted(set(RUNS) & set(FAMILIES)))
def test_reuse_on_the_device(arch):
    """Appends, edits and repetitions over two device banks: every admission's logits are those of the reference, cold."""
    run = RUNS[arch]
    cold = reference(run)
    model = Model.open(run.path("model.gguf"), context=256, banks=2, chunk=16, sizes=(1, 16), least_bucket=256)
    reuser = Reuser(model.new_state, 256, 2, Policy("partial", minimum=4), slots=6, every=16)
    rng, prompt, kinds = np.random.default_rng(6), [1, 2, 3, 4, 5, 6], set()
    for turn in range(14):
        more = rng.integers(0, min(500, model.vocabulary), 12).tolist()
        if turn % 4 < 2:
            prompt = prompt + more[:9]
        elif turn % 4 == 2:
            prompt = prompt[: len(prompt) * 2 // 3] + more
        admission = reuser.admit(prompt)
        kinds.add(admission.decision.kind)
        state, rest = admission.bank.state, admission.remaining
        while rest:
            end = next((stop for stop in admission.stops if stop > state.length), len(prompt))
            part, rest = rest[: end - state.length], rest[end - state.length :]
            model.prefill(state, part)
            admission.progress()
        assert state.tokens == prompt
        assert np.abs(state.logits - cold.prefill(cold.new_state(), prompt)).max() <= 1e-3
        reuser.retire(admission.bank)
    assert {"cold", "partial"} <= kinds and kinds & {"exact", "fork"}, kinds
