"""``ds4ref.reuse`` over device banks, unchanged: every admission's logits are those of a cold run, within tolerance."""

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

from ds4jax import FAMILIES
from ds4jax.model import Model
from ds4ref import tiny
from ds4ref.model import Model as Reference
from ds4ref.reuse import Policy, Reuser


@pytest.mark.parametrize("architecture", [name for name in ("deepseek4", "solar-open2") if name in FAMILIES])
def test_edits_forks_and_rewinds(architecture, tmp_path):
    tiny.write(architecture, tmp_path / "tiny.gguf", seed=4)
    model = Model.open(tmp_path / "tiny.gguf", context=256, banks=2, chunk=16, sizes=(1, 16), least_bucket=256)
    reference = Reference.open(tmp_path / "tiny.gguf")
    reuser = Reuser(model.new_state, 256, 2, Policy("partial", minimum=4), slots=6, every=16)
    rng, prompt, kinds = np.random.default_rng(6), [1, 2, 3, 4, 5, 6], []
    for turn in range(14):
        match turn % 4:
            case 0 | 1:  # append
                prompt = prompt + rng.integers(0, 500, 9).tolist()
            case 2:  # edit in the middle
                cut = len(prompt) * 2 // 3
                prompt = prompt[:cut] + rng.integers(0, 500, 12).tolist()
            case 3:  # the same again
                pass
        admission = reuser.admit(prompt)
        kinds.append(admission.decision.kind)
        state, at = admission.bank.state, 0
        while at < len(admission.remaining):
            end = next((s for s in admission.stops if s > state.length), len(prompt))
            part = admission.remaining[at : at + end - state.length]
            model.prefill(state, part)
            at += len(part)
            admission.progress()
        assert state.tokens == prompt
        assert np.allclose(state.logits, reference.prefill(reference.new_state(), prompt), rtol=0, atol=2e-4)
        reuser.retire(admission.bank)
    assert {"cold", "exact", "partial"} <= set(kinds) or {"cold", "fork", "partial"} <= set(kinds), kinds
