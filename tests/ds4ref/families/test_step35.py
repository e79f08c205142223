"""Step 3.7 Flash: what a file must say, and the two rotations."""

import numpy as np
import pytest
from runs import GOLDEN

from ds4ref import tiny
from ds4ref.families import step35
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.ops import rope_frequencies
from ds4ref.state import Ring, Rows
from ds4ref.weights import check

MODEL = GOLDEN / "step35" / "model.gguf"


def config(**changes):
    """The tiny model's config with some keys (``__`` for the dot) changed, or absent where None."""
    metadata = step35.tiny_metadata() | {f"step35.{key.replace('__', '.')}": value for key, value in changes.items()}
    return step35.Config.from_metadata(tiny.Described("step35", {k: v for k, v in metadata.items() if v is not None}))


def problems(artifact):
    return check(artifact, *step35.tensors(step35.Config.from_metadata(artifact)))


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("expert_weights_scale", None, "is missing; expected a finite number"),
        ("attention__head_count", 4, "is 4; expected an array of 5 integers from 1"),
        ("attention__head_count_kv", [2, 2, 4, 2, 2], "is 4; expected divisors of attention.head_count, entry by entry"),
        ("attention__value_length", 24, "is 24; expected an integer equal to 16"),
        ("rope__dimension_count", 8, "is 8; expected an integer equal to 16"),
        ("moe_every_n_layers", 2, "is 2; expected an integer equal to 1"),
        ("expert_gating_func", 1, "is 1; expected an integer equal to 2"),
        ("expert_weights_norm", False, "is False; expected true"),
        ("swiglu_clamp_exp", [0.0, 0.0, -1.0, 0.0, 0.0], "holds -1.0 at 2; expected an array of 5 finite numbers from 0.0"),
        ("leading_dense_block_count", 6, "is 6; expected an integer from 0 up to 5"),
    ],
)
def test_a_bad_key_is_one_sentence(key, value, found):
    with pytest.raises(ArtifactError) as error:
        config(**{key: value})
    assert str(error.value) == f"tiny.gguf: key 'step35.{key.replace('__', '.')}' {found}"


def test_heads_that_cannot_be_halved_are_refused():
    with pytest.raises(ArtifactError, match="multiple of 4, since full layers rotate half a head"):
        config(attention__key_length=18, attention__value_length=18)


def test_layers_differ_in_heads_and_in_what_they_keep():
    c = config()
    required, _ = step35.tensors(c)
    components = step35.layout(c)
    for i, (heads, sliding) in enumerate([(4, False), (6, True), (6, True), (6, True), (4, False)]):
        assert required[f"blk.{i}.attn_q.weight"] == (heads * 16, 64)
        assert required[f"blk.{i}.attn_gate.weight"] == (heads, 64)
        assert required[f"blk.{i}.attn_k.weight"] == (32, 64)
        assert components[f"{i}.k"] == components[f"{i}.v"] == (Ring(24, (2, 16)) if sliding else Rows((2, 16)))


def test_divisors_apply_to_the_rotated_half_of_full_layers_only():
    c = config()
    divisors = np.array([1, 2, 4, 8, 16, 16, 16, 16], np.float32)
    weights = {"rope_freqs.weight": divisors}
    full, sliding = (step35._frequencies(c, weights, i) for i in (0, 1))
    assert full.dtype == sliding.dtype == np.float64
    np.testing.assert_allclose(full, rope_frequencies(8, 5e6) / [1, 2, 4, 8], rtol=1e-15)
    np.testing.assert_allclose(sliding, rope_frequencies(16, 1e4), rtol=1e-15)


def test_tensors_are_named_when_missing_unknown_or_misshapen():
    artifact = Artifact.open(MODEL)
    assert problems(artifact) == []
    artifact.tensors["blk.1.attn_q.weight"] = artifact.tensors["blk.0.attn_q.weight"]
    artifact.tensors["blk.0.exp_probs_b.bias"] = artifact.tensors["blk.2.exp_probs_b.bias"]
    del artifact.tensors["rope_freqs.weight"]
    assert problems(artifact) == [
        "tensor 'rope_freqs.weight' is missing",
        "tensor 'blk.1.attn_q.weight' has shape [64, 64], expected [96, 64]",
        "tensor 'blk.0.exp_probs_b.bias' [10] is not part of architecture 'step35'",
    ]


def test_the_predictor_sidecar_is_refused_as_a_model():
    metadata = step35.tiny_metadata() | {"step35.nextn_predict_layers": 2}
    sidecar = tiny.Described("step35", metadata)
    sidecar.tensors = {"blk.3.nextn.eh_proj.weight": None}
    with pytest.raises(ArtifactError) as error:
        step35.Config.from_metadata(sidecar)
    assert str(error.value) == ("tiny.gguf: a step35 predictor sidecar (blocks 3 to 4 only), not a model; open the main file")


def test_predictors_inside_a_main_file_are_bound():
    c = config(
        nextn_predict_layers=1,
        attention__sliding_window_pattern=[False, True, True, False, True],
        attention__head_count=[4, 6, 6, 4, 6],
    )
    required, _ = step35.tensors(c)
    assert c.layers == 4
    assert required["blk.4.nextn.shared_head_head.weight"] == (512, 64)
    assert "blk.4.ffn_gate.weight" in required and "blk.4.ffn_gate_inp.weight" not in required
    assert not any(name.startswith("4.") for name in step35.layout(c))
    with pytest.raises(ArtifactError, match="'step35.attention.sliding_window_pattern' is False; expected true for the pred"):
        config(nextn_predict_layers=1)
