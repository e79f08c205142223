"""MiMo-V2.6-Flash: what a file must say, and what only its tensors tell."""

import numpy as np
import pytest
from runs import GOLDEN

from ds4ref import tiny
from ds4ref.families import mimo2
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.state import Ring, Rows
from ds4ref.weights import check

MODEL = GOLDEN / "mimo2" / "model.gguf"


def config(**changes):
    """The tiny model's config with some keys (``__`` for the dot) changed, or absent where None."""
    metadata = mimo2.tiny_metadata() | {f"mimo2.{key.replace('__', '.')}": value for key, value in changes.items()}
    return mimo2.Config.from_metadata(tiny.Described("mimo2", {k: v for k, v in metadata.items() if v is not None}))


def problems(artifact):
    return check(artifact, *mimo2.tensors(mimo2.Config.from_metadata(artifact)))


def rename(artifact, old, new):
    for name in [name for name in artifact.tensors if old in name]:
        artifact.tensors[name.replace(old, new)] = artifact.tensors.pop(name)


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("attention__value_scale", None, "is missing; expected a finite number"),
        ("attention__sliding_window", 0, "is 0; expected an integer from 1"),
        ("attention__sliding_window_pattern", [0, 1, 2, 0, 1], "holds 2 at 2; expected an array of 5 integers from 0 up to 1"),
        ("attention__sliding_window_pattern", [0, 1, 1, 0, 0], "is 0; expected 1 (sliding) for the predictor blocks"),
        ("attention__head_count_kv", [1, 2, 3, 1, 2], "is 3; expected divisors of 4 heads"),
        ("rope__dimension_count", 26, "is 26; expected an even number up to 24"),
        ("rope__dimension_count", 7, "is 7; expected an even number up to 24"),
        ("expert_used_count", 9, "is 9; expected an integer from 1 up to 8"),
        ("expert_gating_func", 1, "is 1; expected an integer equal to 2"),
        ("expert_group_count", 2, "is 2; expected an integer from 0 up to 1"),
        ("nextn_predict_layers", 5, "is 5; expected an integer from 0 up to 4"),
    ],
)
def test_a_bad_key_is_one_sentence(key, value, found):
    with pytest.raises(ArtifactError) as error:
        config(**{key: value})
    assert str(error.value) == f"tiny.gguf: key 'mimo2.{key.replace('__', '.')}' {found}"


def test_predictors_are_bound_but_keep_no_state():
    c = config()
    assert (c.layers, c.predictors) == (4, 1)
    assert {"blk.4.nextn.eh_proj.weight", "blk.4.attn_sinks.weight", "blk.4.ffn_gate.weight"} <= mimo2.tensors(c)[0].keys()
    assert not any(name.startswith("4.") for name in mimo2.layout(c))


def test_sinks_and_rings_belong_to_sliding_layers():
    c = config()
    required, _ = mimo2.tensors(c)
    components = mimo2.layout(c)
    for i, sliding in enumerate([False, True, True, False]):
        assert (f"blk.{i}.attn_sinks.weight" in required) == sliding
        assert components[f"{i}.k"] == (Ring(16, (2, 24)) if sliding else Rows((1, 24)))
        assert components[f"{i}.v"] == (Ring(16, (2, 16)) if sliding else Rows((1, 16)))


def test_a_block_is_dense_where_the_file_has_no_router():
    c = mimo2.Config.from_metadata(Artifact.open(MODEL))
    assert c.routed == (False, True, True, True, True, False, False, False)
    assert c.vocabulary == 512  # the file has no vocab_size: its tokens are counted


def test_tensors_are_named_when_missing_unknown_or_misshapen():
    artifact = Artifact.open(MODEL)
    assert problems(artifact) == []
    artifact.tensors["blk.2.attn_qkv.weight"] = artifact.tensors["blk.0.attn_qkv.weight"]
    artifact.tensors["blk.0.attn_sinks.weight"] = artifact.tensors["blk.1.attn_sinks.weight"]
    del artifact.tensors["blk.7.nextn.enorm.weight"]
    assert problems(artifact) == [
        "tensor 'blk.7.nextn.enorm.weight' is missing",
        "tensor 'blk.2.attn_qkv.weight' has shape [136, 64], expected [176, 64]",
        "tensor 'blk.0.attn_sinks.weight' [4] is not part of architecture 'mimo2'",
    ]


def test_the_other_name_of_a_predictors_last_norm_stands_in():
    artifact = Artifact.open(MODEL)
    rename(artifact, "layer_output_norm", "nextn.shared_head_norm")
    assert problems(artifact) == []
    rename(artifact, "nextn.shared_head_norm", "nextn.norm")
    assert problems(artifact)[0] == "tensor 'blk.5.layer_output_norm.weight' is missing"


def test_leading_dense_blocks_may_be_a_key():
    assert config(leading_dense_block_count=2).routed == (False, False, True, True, False)
    assert np.count_nonzero(config(leading_dense_block_count=None).routed) == 0  # no key, and no tensors that would tell
