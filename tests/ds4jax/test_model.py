"""ds4jax against itself and the reference: chunking, banks, snapshots, truncation, and the number of programs.

Families that between them have every state kind: ``Rows``, ``Ring``, ``Compressed``, ``Recurrent``.
"""

import re

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

from ds4jax import FAMILIES
from ds4jax.layers import Run, runs_of
from ds4jax.model import Model, buckets, rounded
from ds4ref import tiny
from ds4ref.model import Model as Reference
from ds4ref.state import Snapshot

CLOSE = {"rtol": 0, "atol": 2e-4}
ARCHITECTURES = [name for name in ("deepseek4", "solar-open2", "mimo2") if name in FAMILIES]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def both(request, tmp_path_factory):
    """(device model with three banks, reference model, tokens, the reference's logits)."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    tiny.write(request.param, path, seed=2)
    model = Model.open(path, context=256, banks=3, chunk=16, sizes=(1, 16), least_bucket=256)
    reference = Reference.open(path)
    tokens = np.random.default_rng(3).integers(0, model.vocabulary, 90).tolist()
    return model, reference, tokens, reference.verify(reference.new_state(), tokens)


def test_any_chunking_gives_the_same(both):
    model, _, tokens, expected = both
    rng = np.random.default_rng(5)
    bank = model.new_state()
    while bank.length < len(tokens):
        at = bank.length
        part = tokens[at : at + int(rng.integers(1, 40))]
        if rng.random() < 0.5:
            assert np.allclose(model.prefill(bank, part), expected[at + len(part) - 1], **CLOSE)
        else:
            assert np.allclose(model.verify(bank, part), expected[at : at + len(part)], **CLOSE)
    bank.release()


def test_batched_decode_equals_single(both):
    model, reference, tokens, expected = both
    banks = [model.new_state() for _ in range(3)]
    for n, bank in zip((3, 40, 61), banks, strict=True):
        model.prefill(bank, tokens[:n])
    for chosen in ([0, 1, 2], [2, 0], [1], [0, 1, 2]):
        at = [banks[b].length for b in chosen]
        logits = model.decode([banks[b] for b in chosen], [tokens[n] for n in at])
        for row, n in zip(logits, at, strict=True):
            assert np.allclose(row, expected[n], **CLOSE)
    for bank in banks:
        bank.release()


def test_a_used_bank_starts_from_nothing(both):
    model, _, tokens, expected = both
    bank = model.new_state()
    model.prefill(bank, tokens[::-1])
    bank.truncate(0)
    assert np.allclose(model.prefill(bank, tokens[:20]), expected[19], **CLOSE)
    bank.release()


def test_snapshots_cross_backends(both):
    model, reference, tokens, expected = both
    bank, state = model.new_state(), reference.new_state()
    model.prefill(bank, tokens[:50])
    state.restore(bank.snapshot())
    assert np.allclose(reference.verify(state, tokens[50:60]), expected[50:60], **CLOSE)
    bank.restore(state.snapshot())
    assert bank.length == 60 and np.allclose(model.verify(bank, tokens[60:70]), expected[60:70], **CLOSE)
    again = model.new_state()
    again.restore(bank.snapshot())
    assert np.array_equal(model.prefill(again, tokens[70:75]), model.prefill(bank, tokens[70:75]))
    with pytest.raises(ValueError, match="component"):
        broken = state.snapshot()
        next(iter(broken.components.values())).clear()
        bank.restore(broken)
    bank.release()
    again.release()


def test_truncation_follows_the_reference(both):
    model, reference, tokens, expected = both
    bank, state = model.new_state(), reference.new_state()
    model.prefill(bank, tokens[:60])
    reference.prefill(state, tokens[:60])
    for n in range(61):
        assert bank.can_truncate(n) == state.can_truncate(n), n
    if bank.can_truncate(59):
        bank.truncate(59)
        state.truncate(59)
        assert np.allclose(model.verify(bank, tokens[59:66]), expected[59:66], **CLOSE)
        reference.verify(state, tokens[59:66])
        assert [bank.can_truncate(n) for n in range(67)] == [state.can_truncate(n) for n in range(67)]
        other = reference.new_state()
        other.restore(bank.snapshot())
        assert np.allclose(reference.verify(other, tokens[66:70]), expected[66:70], **CLOSE)
    else:
        with pytest.raises(ValueError, match="cannot truncate"):
            bank.truncate(59)
    bank.release()


def test_checkpoints_that_do_not_fit_change_nothing(both):
    """A missing component, array or row is refused as the reference refuses it, before anything is copied."""
    model, reference, tokens, expected = both
    bank, state = model.new_state(), reference.new_state()
    model.prefill(bank, tokens[:20])
    reference.prefill(state, tokens[:20])
    whole = bank.checkpoint()
    held = {name: arrays for name, arrays in whole.components.items() if arrays}
    for name, arrays in held.items():
        key, array = next(iter(arrays.items()))
        for arrays in ({}, {key: array[:1]}, {key: array[..., :1]}):
            wrong = Snapshot(whole.tokens, whole.components | {name: arrays}, whole.logits)
            for sequence in (bank, state):
                with pytest.raises(ValueError, match=re.escape(repr(name))):
                    sequence.resume(wrong, sequence)
    less = {name: arrays for name, arrays in whole.components.items() if name != next(iter(held))}
    for sequence in (bank, state):
        with pytest.raises(ValueError, match="differ in component"):
            sequence.resume(Snapshot(whole.tokens, less, whole.logits), sequence)
    bank.resume(whole, bank)
    assert np.allclose(model.step(bank, tokens[20]), expected[20], **CLOSE)
    bank.release()


def test_mistakes_are_refused_before_anything_runs(both):
    model, _, tokens, _ = both
    bank = model.new_state()
    with pytest.raises(ValueError, match="outside the vocabulary"):
        model.prefill(bank, [0, model.vocabulary])
    with pytest.raises(ValueError, match="exceed the context of 256"):
        model.prefill(bank, [1] * 257)
    with pytest.raises(ValueError, match="needs at least one token"):
        model.prefill(bank, [])
    taken = [model.new_state() for _ in range(2)]
    with pytest.raises(ValueError, match="all 3 banks are taken"):
        model.new_state()
    for b in (bank, *taken):
        b.release()


def test_the_number_of_programs_is_small(both):
    assert both[0].compiled <= 12


def test_runs_find_the_longest_repetition():
    assert runs_of(list("LLLG" * 3)) == [Run(0, 4, 3)]
    assert runs_of(list("aabcbcbcd")) == [Run(0, 1, 2), Run(2, 2, 3), Run(8, 1, 1)]
    assert runs_of(list("abc")) == [Run(0, 1, 1), Run(1, 1, 1), Run(2, 1, 1)]
    assert list(Run(2, 2, 3).members(1)) == [3, 5, 7]


def test_steps_of_sizes_and_buckets():
    assert buckets(256, 10000) == (256, 1024, 4096, 10000) and buckets(256, 256) == (256,)
    assert rounded(3, (1, 16, 64), 32) == 16 and rounded(40, (1, 16, 64), 32) == 32
