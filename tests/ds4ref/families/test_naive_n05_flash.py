"""Naive-N0.5-Flash: what a file must say, and how its indexer chooses."""

import numpy as np
import pytest
from runs import GOLDEN

from ds4ref import tiny
from ds4ref.families import naive_n05_flash as naive
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.model import Model
from ds4ref.state import Ring, Rows
from ds4ref.weights import check

MODEL = GOLDEN / "naive_n05_flash" / "model.gguf"


def config(**changes):
    """The tiny model's config with some keys (``__`` for the dot) changed, or absent where None."""
    metadata = naive.tiny_metadata() | {f"naive_n05_flash.{key.replace('__', '.')}": v for key, v in changes.items()}
    described = tiny.Described("naive_n05_flash", {k: v for k, v in metadata.items() if v is not None})
    return naive.Config.from_metadata(described)


def problems(artifact):
    return check(artifact, *naive.tensors(naive.Config.from_metadata(artifact)))


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("index_top_k", None, "is missing; expected an integer from 1"),
        ("attention__hybrid_layer_pattern", [0, 1, 3, 0], "holds 3 at 2; expected an array of 4 integers from 0 up to 1"),
        ("attention__dsa_layers", [0, 2], "is an array of 2 values; expected [0, 3], as the layer pattern has it"),
        ("attention__dsa_enabled", False, "is False; expected true"),
        ("attention__add_full_sink", True, "is True; expected false"),
        ("attention__projection_layout", "fused", "is 'fused'; expected 'split'"),
        ("rope__pairing", "interleaved", "is 'interleaved'; expected 'split-half / GPT-NeoX'"),
        ("rope__dimension_count_swa", 16, "is 16; expected an integer equal to 8"),
        ("rope__partial_rotary_factor", 0.5, "is 0.5; expected a part of 24 that truncates to 8"),
        ("index_n_kv_heads", 2, "is 2; expected an integer equal to 1"),
        ("indexer_activation_dtype", "bf16", "is 'bf16'; expected 'fp8_e4m3'"),
        ("moe__scoring_func", "softmax", "is 'softmax'; expected 'sigmoid'"),
        ("expert_weights_norm", False, "is False; expected true"),
        ("attention__head_count_kv", [1, 2, 3, 1], "is 3; expected divisors of 4 heads"),
    ],
)
def test_a_bad_key_is_one_sentence(key, value, found):
    with pytest.raises(ArtifactError) as error:
        config(**{key: value})
    assert str(error.value) == f"tiny.gguf: key 'naive_n05_flash.{key.replace('__', '.')}' {found}"


def test_an_indexer_narrower_than_the_rotation_is_refused():
    with pytest.raises(ArtifactError, match="'naive_n05_flash.rope.dimension_count' is 8; expected an even number up to 6"):
        config(index_head_dim=6)


def test_sinks_indexers_and_state_by_layer_kind():
    c = config()
    required, _ = naive.tensors(c)
    components = naive.layout(c)
    for i, sliding in enumerate([False, True, True, False]):
        assert (f"blk.{i}.attn_sinks.weight" in required) == sliding
        assert (f"blk.{i}.indexer.k_norm.bias" in required) == (not sliding)
        assert components[f"{i}.k"] == (Ring(20, (2, 24)) if sliding else Rows((1, 24)))
        assert components.get(f"{i}.index") == (None if sliding else Rows((16,)))


def test_tensors_are_named_when_missing_unknown_or_misshapen():
    artifact = Artifact.open(MODEL)
    assert problems(artifact) == []
    artifact.tensors["blk.1.attn_k.weight"] = artifact.tensors["blk.0.attn_k.weight"]
    artifact.tensors["blk.1.indexer.proj.weight"] = artifact.tensors["blk.0.indexer.proj.weight"]
    del artifact.tensors["blk.3.indexer.k_norm.bias"]
    assert problems(artifact) == [
        "tensor 'blk.3.indexer.k_norm.bias' is missing",
        "tensor 'blk.1.attn_k.weight' has shape [24, 64], expected [48, 64]",
        "tensor 'blk.1.indexer.proj.weight' [4, 64] is not part of architecture 'naive_n05_flash'",
    ]


def test_equal_scores_keep_the_earliest_positions():
    c = config()
    p, rng = "blk.0.", np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in naive.tensors(c)[0].items()}
    weights[f"{p}indexer.proj.weight"] = np.zeros((4, 64), np.float32)  # every score is zero
    keys = Rows((16,)).new(np.float32)
    for position in range(40):
        n = rng.standard_normal(64).astype(np.float32)
        kept = naive.index(c, weights, keys, p, n, position * np.ones(4))
        assert kept.tolist() == list(range(min(position + 1, c.index_top_k)))


def test_indexer_rows_are_stored_as_e4m3_of_their_own_scale():
    model = Model.open(MODEL)
    state = model.new_state()
    model.prefill(state, range(40))
    codes = state["0.index"].rows().astype(np.float64)
    codes = codes / np.max(np.abs(codes), axis=1, keepdims=True) * 448
    mantissa, _ = np.frexp(codes)
    assert np.max(np.abs(mantissa * 16 - np.rint(mantissa * 16))) < 1e-5  # three bits after the leading one
    assert np.max(np.abs(codes)) == pytest.approx(448)


def test_the_indexer_limits_what_full_layers_see():
    model = Model.open(MODEL)
    state, kept = model.new_state(), {}
    for token in range(60):
        model.step(state, token, lambda name, array: kept.__setitem__(name, array))
    for i in (0, 3):
        assert len(kept[f"topk_{i}"]) == 32 and kept[f"topk_{i}"].max() < 60
        assert np.all(np.diff(kept[f"topk_{i}"]) > 0)
    assert "topk_1" not in kept
