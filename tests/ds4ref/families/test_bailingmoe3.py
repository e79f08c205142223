"""Ling 3.0: what a file must say, the context that decides about YaRN, and the variants of its tensors."""

import warnings

import numpy as np
import pytest
from runs import GOLDEN

from ds4ref import gguf_writer, tiny
from ds4ref.families import bailingmoe3
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.model import Model

MODEL = GOLDEN / "bailingmoe3" / "model.gguf"
TOKENS = np.random.default_rng(0).integers(0, 512, 40)


def config(changes):
    """The tiny model's config with some keys changed, or absent where None."""
    metadata = bailingmoe3.tiny_metadata() | {f"bailingmoe3.{key}": value for key, value in changes.items()}
    described = tiny.Described("bailingmoe3", {k: v for k, v in metadata.items() if v is not None})
    return bailingmoe3.Config.from_metadata(described)


def logits(model):
    return model.verify(model.new_state(), TOKENS)


@pytest.fixture
def rewrite(tmp_path):
    """The golden artifact written anew, its (metadata, arrays) passed through ``change``."""

    def write(change):
        artifact = Artifact.open(MODEL)
        metadata = {k: v for k, v in artifact.metadata.items() if k != "general.architecture"}
        arrays = {name: t.dequantize(np.float32) for name, t in artifact.tensors.items()}
        change(metadata, arrays)
        gguf_writer.write(tmp_path / "model.gguf", "bailingmoe3", metadata, arrays)
        return tmp_path / "model.gguf"

    return write


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("kda.head_dim", None, "is missing; expected an integer from 1"),
        ("kda.safe_gate", False, "is False; expected true"),
        ("attention.head_count_kv", 1, "is 1; expected an array of 6 or more integers from 0 up to 1"),
        ("expert_group_count", 3, "is 3; expected a divisor of 16 experts"),
        ("expert_used_count", 9, "is 9; expected an integer from 1 up to 8"),
        ("expert_gating_func", 1, "is 1; expected an integer equal to 2"),
        ("rope.dimension_count", 17, "is 17; expected an even number"),
        ("rope.dimension_sections", np.array([8, 12, 12, 0]), "is 32; expected sections that add up to 8 pairs"),
        ("rope.scaling.type", "linear", "is 'linear'; expected 'none' or 'yarn'"),
        ("swiglu_clamp_exp", np.full(6, -1.0), "holds -1.0 at 0; expected an array of 6 or more finite numbers from 0.0"),
    ],
)
def test_a_bad_key_is_one_sentence(key, value, problem):
    with pytest.raises(ArtifactError) as error:
        config({key: value})
    assert str(error.value) == f"tiny.gguf: key 'bailingmoe3.{key}' {problem}"


def test_the_requested_context_alone_decides_about_yarn():
    trained = Model.open(MODEL)
    assert np.array_equal(logits(trained), logits(Model.open(MODEL, context=4096)))
    stretched = Model.open(MODEL, context=4097)
    assert (trained.context_cap, stretched.context_cap) == (4096, 8192)
    assert np.array_equal(logits(stretched), logits(Model.open(MODEL, context=8192)))
    assert np.max(np.abs(logits(stretched) - logits(trained))) > 1e-2
    with np.load(GOLDEN / "bailingmoe3" / "cases-yarn.npz") as oracle:
        np.testing.assert_allclose(bailingmoe3.frequencies(stretched.config), oracle["inv_freq"], rtol=1e-7)


@pytest.mark.parametrize("context", [8193, 0, -1, "8192", True, 4096.0])
def test_a_context_out_of_reach_is_refused(context):
    with pytest.raises(ArtifactError) as error:
        Model.open(MODEL, context=context)
    assert str(error.value) == f"model.gguf: option context is {context!r}; expected an integer from 1 up to 8192"


def test_a_file_that_announces_yarn_counts_from_the_original_context():
    announced = {"context_length": 65536, "rope.scaling.type": "yarn", "rope.scaling.original_context_length": 32768}
    c = config(announced | {"rope.scaling.factor": 2.0})
    assert (c.context, c.yarn, c.context_cap) == (32768, False, 32768)
    with pytest.raises(ArtifactError, match=r"rope.scaling.factor' is 4.0; expected a finite number equal to 2.0"):
        config(announced | {"rope.scaling.factor": 4.0})


def test_convolutions_of_four_dimensions_and_flat_rates_are_the_same_model(rewrite):
    def change(metadata, arrays):
        for name in arrays:
            if "ssm_conv1d" in name:
                arrays[name] = arrays[name][None]
            if name.endswith("ssm_a"):
                arrays[name] = arrays[name][:, 0]

    assert np.array_equal(logits(Model.open(MODEL)), logits(Model.open(rewrite(change))))


def test_queries_of_low_rank(rewrite):
    """A query pair whose first matrix is the identity normalises what attn_norm has normalised: the same queries."""

    def change(metadata, arrays):
        metadata["bailingmoe3.attention.q_lora_rank"] = 64
        for i in (2, 4):
            gain = arrays[f"blk.{i}.attn_norm.weight"].copy()
            # Undo the gain first: the second normalisation must meet values whose mean square is 1 already.
            arrays[f"blk.{i}.attn_q_a.weight"] = np.diag(1 / gain)
            arrays[f"blk.{i}.attn_q_a_norm.weight"] = gain
            arrays[f"blk.{i}.attn_q_b.weight"] = arrays.pop(f"blk.{i}.attn_q.weight")

    model = Model.open(rewrite(change), np.float64)
    plain = logits(Model.open(MODEL, np.float64))
    assert np.max(np.abs(logits(model) - plain)) < 1e-3
    assert np.max(np.abs(logits(model) - plain)) > 0  # eps enters twice: it is another path


FLASH = {"block_count": 42, "attention.head_count_kv": (np.arange(1, 43) % 6 == 0).astype(np.int32)}
LIMITS = {"swiglu_clamp_exp": np.zeros(42, np.float32), "swiglu_clamp_shexp": np.zeros(42, np.float32)}


@pytest.mark.parametrize("absent", list(LIMITS))
def test_the_flash_model_without_limits_is_warned_about(absent):
    with pytest.warns(UserWarning, match=rf"tiny.gguf: key 'bailingmoe3.{absent}' is missing: an early conversion"):
        config(FLASH | LIMITS | {absent: None})


@pytest.mark.parametrize("keys", [FLASH | LIMITS, {"swiglu_clamp_exp": None}])
def test_other_files_are_not_warned_about(keys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(keys)


def test_the_published_file_has_as_many_tensors():
    assert len(bailingmoe3.tensors(config(FLASH | LIMITS | {"leading_dense_block_count": 2}))[0]) == 917


def test_a_predictor_is_bound_and_no_layer():
    c = config({"block_count": 7, "nextn_predict_layers": 1})
    required, _ = bailingmoe3.tensors(c)
    assert c.layers == 6
    assert {"blk.6.attn_gate.weight", "blk.6.ffn_gate_exps.weight", "blk.6.layer_output_norm.weight"} <= required.keys()
    assert required["blk.6.nextn.eh_proj.weight"] == (64, 128)
    assert not any(name.startswith("6.") for name in bailingmoe3.layout(c))


@pytest.mark.parametrize(
    ("name", "array", "problem"),
    [
        ("blk.2.attn_gate.weight", None, "is missing"),
        ("blk.2.attn_sinks.weight", np.zeros(4, np.float32), "[4] is not part of architecture 'bailingmoe3'"),
        ("blk.0.ssm_conv1d_k.weight", np.zeros((64, 4), np.float32), "has shape [64, 4], expected [64, 1, 4] or [1, 64, 1, 4]"),
    ],
)
def test_a_wrong_tensor_is_named(rewrite, name, array, problem):
    def change(metadata, arrays):
        arrays[name] = array
        if array is None:
            del arrays[name]

    with pytest.raises(ArtifactError) as error:
        Model.open(rewrite(change))
    assert str(error.value) == f"model.gguf: tensor '{name}' {problem}"
