"""A process keeps no more compiled programs than Linux has memory maps for, and answers the same whatever it let go."""

import numpy as np
import pytest
from runs import GOLDEN

pytest.importorskip("jax", reason="JAX is not installed")

from ds4jax import compilation
from ds4jax.model import Model

CLOSE = {"rtol": 0, "atol": 1e-5}
TOKENS = np.random.default_rng(0).integers(0, 256, 64).tolist()


def opened():
    sizes = {"chunk": 16, "sizes": (1, 16), "least_bucket": 16}
    return Model.open(GOLDEN / "k2-horizon" / "model.gguf", context=64, banks=1, **sizes)


def logits(model):
    """After each of the tokens, by programs of every size and length; some of them are called again after others."""
    bank, rows = model.new_state(), []
    for at in (0, 16, 32, 48):
        model.prefill(bank, TOKENS[at : at + 14])
        rows += [model.step(bank, token) for token in TOKENS[at + 14 : at + 16]]
    bank.truncate(15)
    rows.append(model.step(bank, TOKENS[15]))
    bank.release()
    return np.array(rows)


@pytest.mark.skipif(not compilation.maps(), reason="this system has no count of memory maps")
def test_programs_used_longest_ago_make_room(monkeypatch):
    """Those of any model; what one program takes beside the limit is the most there ever is."""
    first = opened()
    expected = logits(first)
    assert np.allclose(expected[-1], expected[1], **CLOSE)
    many = first.compiled
    assert many >= 4
    monkeypatch.setattr(compilation, "most_maps", lambda: 0)
    second = opened()
    assert np.allclose(logits(second), expected, **CLOSE)
    assert first.compiled == 0 and second.compiled == 1
    monkeypatch.undo()
    assert np.allclose(logits(second), expected, **CLOSE) and second.compiled == many
    least = compilation.maps()
    monkeypatch.setattr(compilation, "most_maps", lambda: least)
    assert np.allclose(logits(first), expected, **CLOSE)
    assert first.compiled + second.compiled < 2 * many and compilation.maps() <= least


@pytest.mark.skipif(not compilation.maps(), reason="this system has no count of memory maps")
def test_a_program_is_small_beside_the_limit():
    """What is let go is counted after the program that was too much: it must have fitted."""
    model, before = opened(), compilation.maps()
    bank = model.new_state()
    model.prefill(bank, TOKENS[:3])
    bank.release()
    assert 0 < compilation.maps() - before < compilation.most_maps() / 12
