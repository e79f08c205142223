"""ds4jax.diff: silent where the two packages agree, and where one thing is broken on the device it names exactly that."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

from ds4jax import FAMILIES, diff
from ds4jax.families import exaone_moe, qwen35
from ds4jax.model import Model
from ds4ref import tiny
from ds4ref.model import Model as Reference

QUICK = ("exaone-moe", "k2-horizon", "qwen35")
ALL = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
    for name in sorted({module.ARCHITECTURES[0] for module in FAMILIES.values()})
]


def opened(architecture, folder, count=24, **keywords):
    """(device model, tokens, what the reference makes of them) of a tiny artifact: a whole chunk, a padded one, a token."""
    path = folder / "tiny.gguf"
    tiny.write(architecture, path, seed=2)
    reference = Reference.open(path)
    tokens = np.random.default_rng(3).integers(0, reference.vocabulary, count).tolist()
    seen = diff.observe_reference(reference, tokens)
    assert np.array_equal(seen.logits, reference.verify(reference.new_state(), tokens))
    return Model.open(path, context=count, chunk=16, **keywords), tokens, seen


def judged(model, tokens, reference, chained=False):
    tolerance = diff.TOLERANCE["float32"] * (diff.CHAINED if chained else 1)
    seen = diff.observe(model, tokens, reference, chained)
    return diff.judge(seen, reference, diff.kinds(model), tolerance, chained)


def wrong(blocks):
    return [block.name for block in blocks if block.beyond]


def place(model, i):
    """(weights of the place in a run that layer i has, its number in their stack)."""
    for run, held in zip(model.plan.runs, model._weights["layers"], strict=True):
        for j, weights in enumerate(held):
            if i in run.members(j):
                return weights, run.members(j).index(i)
    raise AssertionError(i)


def scaled(packed, factor, entry=...):
    """A packed tensor with its values, or those of one layer of the stack, times ``factor``."""
    plane = packed.planes["q"]
    return dataclasses.replace(packed, planes=packed.planes | {"q": plane.at[entry].multiply(factor)})


def spoil(model, i, name, factor=1.01):
    weights, entry = place(model, i)
    weights[name] = scaled(weights[name], factor, entry)


@pytest.mark.parametrize("architecture", ALL)
def test_nothing_departs(architecture, tmp_path):
    model, tokens, reference = opened(architecture, tmp_path)
    blocks = judged(model, tokens, reference)
    assert [b.name for b in blocks] == ["embedding", *(f"block {i}" for i in range(model.config.layers)), "head"]
    assert wrong(blocks) == [] and any(block.error > 0 for block in blocks)  # two packages never round alike throughout


def test_one_percent_of_one_matrix_in_a_stack(tmp_path):
    model, tokens, reference = opened("qwen35", tmp_path)
    assert model.plan.runs[0].repeats == 3
    spoil(model, 1, "ffn_down.weight")
    blocks = judged(model, tokens, reference)
    assert wrong(blocks) == ["block 1"] and blocks[2].beyond == 24
    text = diff.report(blocks, 24)
    assert "block 1 is the first that departs" in text and "Of the 3 blocks of its kind, 1 depart." in text
    chained = judged(model, tokens, reference, chained=True)
    assert wrong(chained) == ["block 1", "block 2", "block 3", "head"]


def test_one_experts_matrix_names_the_tokens_it_serves(tmp_path):
    model, tokens, reference = opened("k2-horizon", tmp_path)
    last = model.config.layers - 1
    weights, entry = place(model, last)
    stack = weights["ffn_down_exps.weight"]
    weights["ffn_down_exps.weight"] = scaled(stack, 1.1, (entry, 3))
    blocks = judged(model, tokens, reference)
    assert wrong(blocks) == [f"block {last}"] and 0 < blocks[-2].beyond < 24


def test_a_wrong_operation_of_one_kind_is_the_kinds(tmp_path, monkeypatch):
    right = exaone_moe.Seen

    def one_short(keys, values, window=None):
        return right(keys, values, None if window is None else window - 1)

    monkeypatch.setattr(exaone_moe, "Seen", one_short)
    model, tokens, reference = opened("exaone-moe", tmp_path)
    blocks = judged(model, tokens, reference)
    sliding = [f"block {i}" for i, local in enumerate(model.config.sliding[: model.config.layers]) if local]
    assert wrong(blocks) == sliding != []
    window = model.config.window
    assert all(block.beyond == 24 - window + 1 for block in blocks if block.beyond)


def test_ends_of_the_model(tmp_path):
    model, tokens, reference = opened("qwen35", tmp_path, count=6)
    top = model._weights["top"]
    top["token_embd.weight"] = scaled(top["token_embd.weight"], 1.001)
    top["output_norm.weight"] = 1.001 * top["output_norm.weight"]
    assert wrong(judged(model, tokens, reference)) == ["embedding", "head"]


def test_decoding_alone(tmp_path, monkeypatch):
    right = qwen35.product

    def wrong_for_one_row(w, x):
        return right(w, x) * (1.01 if x.shape[1] == 1 else 1)

    monkeypatch.setattr(qwen35, "product", wrong_for_one_row)
    model, tokens, reference = opened("qwen35", tmp_path)
    blocks = judged(model, tokens, reference)
    assert all((block.token, block.beyond) == (23, 1) for block in blocks[1:])
    assert "at token 23, the one decoded alone; 1 of 24 tokens" in diff.report(blocks, 24)


@pytest.mark.slow
@pytest.mark.parametrize("architecture, i, name", [
    ("deepseek4", 3, "attn_compressor_gate.weight"),
    ("deepseek4", 2, "hc_ffn_fn.weight"),
    ("inkling", 1, "attn.wr_du.weight"),
    ("qwen4exp", 2, "hc_attn_inject.weight"),
    ("step35", 2, "ffn_down_exps.weight"),
    ("solar-open2", 1, "ffn_down_exps.weight"),
])  # fmt: skip
def test_one_tensor_of_many_families(architecture, i, name, tmp_path):
    model, tokens, reference = opened(architecture, tmp_path, count=40)
    spoil(model, i, name, 1.2)
    assert wrong(judged(model, tokens, reference)) == [f"block {i}"]


@pytest.mark.slow
def test_a_wrong_selection_is_first_seen_where_it_is_made(tmp_path):
    model, tokens, reference = opened("glm-dsa", tmp_path, count=40)
    spoil(model, 0, "indexer.proj.weight", -1)  # the worst tokens for the best; the next two layers share the choice
    assert wrong(judged(model, tokens, reference)) == ["block 0", "block 1", "block 2"]


def test_what_is_no_number_departs():
    stream = np.ones((2, 3, 4), np.float32)
    reference = diff.Observed(stream, np.ones((3, 5), np.float32))
    spoiled = stream.copy()
    spoiled[1, 2, 0] = np.nan
    blocks = diff.judge(diff.Observed(spoiled, reference.logits), reference, ["A"], 1e-4)
    assert wrong(blocks) == ["block 0"] and (blocks[1].token, blocks[1].beyond) == (2, 1)


def test_the_scale_is_what_the_layer_adds():
    before, added = np.full((1, 8), 100, np.float32), np.full((1, 8), 0.5, np.float32)
    reference = diff.Observed(np.stack([before, before + added]), np.ones((1, 5), np.float32))
    seen = diff.Observed(np.stack([before, before + 1.01 * added]), reference.logits)
    alone = diff.judge(seen, reference, ["A"], 1e-3)
    chained = diff.judge(seen, reference, ["A"], 1e-3, chained=True)
    assert wrong(alone) == ["block 0"] and alone[1].relative == pytest.approx(0.01, rel=1e-3)
    assert wrong(chained) == [] and chained[1].relative == pytest.approx(0.005 / 100.5, rel=1e-2)


def test_chunks_leave_the_last_token_alone():
    assert list(diff.chunks([1, 2, 3, 4, 5, 6], 2)) == [(0, [1, 2], 2), (2, [3, 4], 2), (4, [5], 2), (5, [6], 1)]
    assert list(diff.chunks([1, 2, 3], 256)) == [(0, [1, 2], 2), (2, [3], 1)]
    assert list(diff.chunks([1], 256)) == [(0, [1], 1)]


def test_padding_repeats_the_last_row():
    assert diff._padded(np.array([[1, 2], [3, 4]]), 4).tolist() == [[1, 2], [3, 4], [3, 4], [3, 4]]
