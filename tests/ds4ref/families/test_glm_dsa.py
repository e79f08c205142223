"""GLM-5.x: what a file must say, which layers choose tokens, and which tensors that takes."""

import numpy as np
import pytest
from runs import GOLDEN

from ds4ref import gguf_writer, tiny
from ds4ref.families import glm_dsa
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.model import Model

MODEL = GOLDEN / "glm-dsa" / "model.gguf"


def config(changes):
    """The tiny model's config with some keys changed, or absent where None."""
    metadata = glm_dsa.tiny_metadata() | {f"glm-dsa.{key}": value for key, value in changes.items()}
    return glm_dsa.Config.from_metadata(tiny.Described("glm-dsa", {k: v for k, v in metadata.items() if v is not None}))


@pytest.fixture
def rewrite(tmp_path):
    """The golden artifact written anew with changed keys, tensors added (name → array) and tensors left out."""

    def write(keys=None, tensors=None, without=()):
        artifact = Artifact.open(MODEL)
        metadata = {k: v for k, v in artifact.metadata.items() if k != "general.architecture"} | (keys or {})
        arrays = {name: t.dequantize(np.float32) for name, t in artifact.tensors.items()} | (tensors or {})
        arrays = {name: a for name, a in arrays.items() if name not in without}
        gguf_writer.write(tmp_path / "model.gguf", "glm-dsa", {k: v for k, v in metadata.items() if v is not None}, arrays)
        return tmp_path / "model.gguf"

    return write


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("attention.kv_lora_rank", None, "is missing; expected an integer from 1"),
        ("attention.key_length", 40, "is 40; expected an integer equal to 48"),
        ("rope.dimension_count", 15, "is 15; expected an even number"),
        ("rope.scaling.type", "yarn", "is 'yarn'; expected 'none'"),
        ("expert_gating_func", 1, "is 1; expected an integer equal to 2"),
        ("expert_group_count", 4, "is 4; expected an integer from 0 up to 1"),
        ("expert_weights_norm", False, "is False; expected true"),
        ("expert_used_count", 9, "is 9; expected an integer from 1 up to 8"),
        ("nextn_predict_layers", 2, "is 2; expected an integer from 0 up to 1"),
        ("attention.indexer.types", np.array([True, True]), "is an array of 2 bools; expected an array of 4 or more bools"),
    ],
)
def test_a_bad_key_is_one_sentence(key, value, problem):
    with pytest.raises(ArtifactError) as error:
        config({key: value})
    assert str(error.value) == f"tiny.gguf: key 'glm-dsa.{key}' {problem}"


RELEASED = {"block_count": 79, "leading_dense_block_count": 3, "attention.indexer.types": None}
GLM_5_2 = [0, 1, *range(2, 78, 4)]


@pytest.mark.parametrize(
    ("keys", "full"),
    [
        ({"context_length": 1 << 20}, GLM_5_2),
        ({"context_length": 202752}, range(78)),
        ({"attention.indexer.top_k_freq": 4, "attention.indexer.skip_top_k_offset": 3}, GLM_5_2),
        ({"attention.indexer.top_k_frequency": 4, "attention.indexer.skip_top_k_offset": 3}, GLM_5_2),
        ({"context_length": 1 << 20, "attention.indexer.types": np.arange(78) % 3 == 0}, range(0, 78, 3)),
    ],
)
def test_which_layers_choose(keys, full):
    c = config(RELEASED | keys)
    assert [i for i, is_full in enumerate(c.full) if is_full] == list(full)
    assert c.layers == 78  # the predictor is no layer of the trunk


SCHEDULE = {"attention.indexer.types": None, "attention.indexer.top_k_freq": 4}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"attention.indexer.types": np.array([False, True, True, True])}, r"types\[0\]' is False; expected true"),
        (SCHEDULE | {"attention.indexer.skip_top_k_offset": 0}, "skip_top_k_offset' is 0; expected 1 or more"),
        (SCHEDULE, "skip_top_k_offset' is missing"),
    ],
)
def test_the_first_layer_must_choose_itself(keys, problem):
    with pytest.raises(ArtifactError, match=problem):
        config(keys)


def test_the_published_file_has_as_many_tensors():
    """GLM-5.2's parts hold 1,809 tensors: indexers in all 79 blocks, no second embedding or head for the predictor."""
    required, optional = glm_dsa.tensors(config(RELEASED | {"context_length": 1 << 20}))
    assert len(required) + sum("indexer" in name for name in optional) == 1809


def test_unused_indexers_of_shared_layers_change_nothing(rewrite):
    full = Artifact.open(MODEL).tensors
    noise = {
        name.replace("blk.0.", f"blk.{i}."): 3 * full[name].dequantize(np.float32)[::-1]
        for name in full
        for i in (1, 2)
        if name.startswith("blk.0.indexer.")
    }
    assert len(noise) == 10
    plain, carrying = Model.open(MODEL), Model.open(rewrite(tensors=noise))
    tokens = np.random.default_rng(0).integers(0, 512, 40)
    assert np.array_equal(plain.verify(plain.new_state(), tokens), carrying.verify(carrying.new_state(), tokens))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"without": ["blk.3.indexer.k_norm.bias"]}, "tensor 'blk.3.indexer.k_norm.bias' is missing"),
        ({"without": ["blk.4.nextn.enorm.weight"]}, "tensor 'blk.4.nextn.enorm.weight' is missing"),
        (
            {"tensors": {"blk.1.attn_kv_b.weight": np.zeros((8, 8), np.float32)}},
            "tensor 'blk.1.attn_kv_b.weight' [8, 8] is not part of architecture 'glm-dsa'",
        ),
        (
            {"tensors": {"blk.1.attn_k_b.weight": np.zeros((4, 16, 32), np.float32)}},
            "tensor 'blk.1.attn_k_b.weight' has shape [4, 16, 32], expected [4, 32, 16]",
        ),
    ],
)
def test_a_wrong_tensor_is_named(rewrite, change, sentence):
    with pytest.raises(ArtifactError) as error:
        Model.open(rewrite(**change))
    assert str(error.value) == f"model.gguf: {sentence}"


def test_any_prefix_can_be_kept():
    model = Model.open(MODEL)
    tokens = np.random.default_rng(1).integers(0, 512, 60)
    state = model.new_state()
    expected = model.verify(state, tokens)
    for kept in (59, 31, 24, 7, 1):
        state.truncate(kept)
        assert np.array_equal(model.step(state, tokens[kept]), expected[kept])
