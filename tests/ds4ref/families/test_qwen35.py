"""Qwen3.5 dense and Bonsai: what a file must say, which blocks are which, and what the Hadamard fold means."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from runs import GOLDEN

from ds4ref import gguf, gguf_writer, tiny
from ds4ref.families import qwen35
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.model import Model
from ds4ref.rounding import hadamard
from ds4ref.state import Recurrent

FOLDER = GOLDEN / "qwen35"
FOLDED = FOLDER / "mixed" / "model.gguf"
TOKENS = [5, 17, 480, 3, 3, 99]


def config(**changes):
    """The tiny model's config with some keys (``__`` for the dot) changed, or absent where None."""
    metadata = qwen35.tiny_metadata() | {f"qwen35.{key.replace('__', '.')}": value for key, value in changes.items()}
    return qwen35.Config.from_metadata(tiny.Described("qwen35", {k: v for k, v in metadata.items() if v is not None}))


@pytest.fixture
def rewrite(tmp_path):
    """A golden artifact written anew: keys and tensors changed (name → array or Tensor), or left out where None."""

    def write(source, keys=(), tensors=()):
        artifact = Artifact.open(source)
        metadata = {k: (v, artifact.types[k]) for k, v in artifact.metadata.items() if k != "general.architecture"} | dict(keys)
        kept = {name: t for name, t in (artifact.tensors | dict(tensors)).items() if t is not None}
        stored = {n: (t.data, t.type, t.shape) if isinstance(t, gguf.Tensor) else t for n, t in kept.items()}
        gguf_writer.write(tmp_path / "m.gguf", "qwen35", {k: v for k, v in metadata.items() if v is not None}, stored)
        return tmp_path / "m.gguf"

    return write


def logits(path, dtype=np.float32):
    model = Model.open(path, dtype)
    return model.verify(model.new_state(), TOKENS)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("attention__key_length", None, "key 'qwen35.attention.key_length' is missing; expected an integer from 2"),
        ("attention__value_length", 16, "key 'qwen35.attention.value_length' is 16; expected an integer equal to 32"),
        ("attention__head_count", 3, "key 'qwen35.attention.head_count' is 3; expected a multiple of 2 key/value heads"),
        ("ssm__group_count", 4, "key 'qwen35.ssm.time_step_rank' is 6; expected a multiple of 4 key heads"),
        ("ssm__inner_size", 95, "key 'qwen35.ssm.inner_size' is 95; expected an integer equal to 96"),
        ("rope__dimension_count", 7, "key 'qwen35.rope.dimension_count' is 7; expected an even number"),
        ("rope__scaling__type", "yarn", "key 'qwen35.rope.scaling.type' is 'yarn'; expected 'none'"),
        ("nextn_predict_layers", 5, "key 'qwen35.nextn_predict_layers' is 5; expected an integer from 0 up to 4"),
    ],
)
def test_a_bad_key_is_one_sentence(key, value, sentence):
    with pytest.raises(ArtifactError) as error:
        config(**{key: value})
    assert str(error.value) == f"tiny.gguf: {sentence}"


def test_the_list_of_recurrent_layers_wins_over_the_interval():
    assert config().recurrent == (True, True, True, False)
    listed = config(attention__recurrent_layers=np.array([False, True, False, True, False]), full_attention_interval=None)
    assert listed.recurrent == (False, True, False, True)
    kinds = {name: type(kind) for name, kind in qwen35.layout(listed).items()}
    assert [i for i in range(4) if kinds.get(f"{i}.memory") is Recurrent] == [1, 3]


def test_a_nextn_block_is_complete_or_named(rewrite):
    path = rewrite(FOLDER / "model-mtp.gguf", tensors={"blk.5.nextn.hnorm.weight": None})
    with pytest.raises(ArtifactError, match=r"m\.gguf: tensor 'blk\.5\.nextn\.hnorm\.weight' is missing$"):
        Model.open(path)
    path = rewrite(FOLDER / "model-mtp.gguf", keys={"qwen35.nextn_predict_layers": None, "qwen35.block_count": 5})
    with pytest.raises(ArtifactError, match=r"tensor 'blk\.5\.attn_norm\.weight' \[64\] is not part of architecture 'qwen35'"):
        Model.open(path)


def test_without_an_output_matrix_the_embedding_is_the_head(rewrite):
    embedding = Artifact.open(FOLDER / "model.gguf").tensors["token_embd.weight"]
    tied = logits(rewrite(FOLDER / "model.gguf", tensors={"output.weight": None}))
    assert np.array_equal(tied, logits(rewrite(FOLDER / "model.gguf", tensors={"output.weight": embedding})))


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("version", 3, "'prism.hadamard.version' is 3; expected an integer from 1 up to 2"),
        ("version", None, "'prism.hadamard.version' is missing; expected an integer from 1 up to 2"),
        ("block_size", 96, "'prism.hadamard.block_size' is 96; expected a power of two"),
        ("block_size", 256, "'prism.hadamard.block_size' is 256; expected a divisor of 384, the input width of blk.0.ssm_out"),
        ("transform", "dct", "'prism.hadamard.transform' is 'dct'; expected 'normalized-sylvester-walsh-hadamard'"),
        ("axis", "output", "'prism.hadamard.axis' is 'output'; expected 'input-last-dimension'"),
        ("sign_mode", "random", "'prism.hadamard.sign_mode' is 'random'; expected 'explicit' or 'identity'"),
        ("sign_mode", "identity", "'prism.hadamard.sign_widths' is an array of 3 uint32s; expected no such key where"),
        ("sign_widths", np.array([256, 896], np.uint32), "expected 512 too, the input width of blk.0.ffn_down.weight"),
        ("sign_widths", np.array([256, 384], np.uint32), "expected an array of 640 finite numbers from -1 up to 1"),
        ("sign_values", np.zeros(1152, np.int32), "'prism.hadamard.sign_values' is 0.0; expected 1 and -1 only"),
        ("weight_names", ["blk.0.ssm_alpha.weight"], "is 'blk.0.ssm_alpha.weight'; expected matrices of the blocks or output"),
        ("weight_names", ["blk.9.attn_q.weight"], "is 'blk.9.attn_q.weight'; expected matrices of this model"),
        ("inverse_weight_names", ["output.weight"], "is 'output.weight'; expected token_embd.weight alone"),
        ("scale", 2, "'prism.hadamard.scale' is 2; expected no such key: its meaning is not known"),
    ],
)
def test_a_fold_that_is_not_ours_is_refused(rewrite, key, value, sentence):
    with pytest.raises(ArtifactError) as error:
        Model.open(rewrite(FOLDED, keys={f"prism.hadamard.{key}": value}))
    assert str(error.value).startswith("m.gguf: key 'prism.hadamard.") and sentence in str(error.value)


def test_unfolded_matrices_in_a_plain_file_give_the_same_logits(rewrite):
    """The fold is a change of basis: row ← s ⊙ H row, and the columns of ``ssm_out`` back from grouped to tiled."""
    artifact = Artifact.open(FOLDED)
    fold = qwen35.Config.from_metadata(artifact).fold
    values = artifact.metadata["prism.hadamard.sign_values"]
    signs = {256: values[:256], 384: values[256:640], 512: values[640:]}
    plain = {}
    for name in (*fold.weights, "token_embd.weight"):
        rows = artifact.tensors[name].dequantize(np.float64)
        rows = hadamard(rows.reshape(len(rows), -1, fold.block)).reshape(rows.shape) * signs[rows.shape[1]]
        if name.endswith("ssm_out.weight"):
            rows = rows.reshape(len(rows), 2, 3, 64).swapaxes(1, 2).reshape(len(rows), -1)
        plain[name] = rows
    path = rewrite(FOLDED, keys=dict.fromkeys(k for k in artifact.metadata if k.startswith("prism.")), tensors=plain)
    assert Model.open(path).config.fold is None
    assert np.max(np.abs(logits(path, np.float64) - logits(FOLDED, np.float64))) < 1e-9


def test_version_2_uses_the_rotated_embedding_as_head(rewrite):
    artifact = Artifact.open(FOLDED)
    names = [name for name in artifact.metadata["prism.hadamard.weight_names"] if name != "output.weight"]
    untied = logits(rewrite(FOLDED, tensors={"output.weight": artifact.tensors["token_embd.weight"]}))
    keys = {"prism.hadamard.version": 2, "prism.hadamard.weight_names": names}
    assert np.array_equal(logits(rewrite(FOLDED, keys=keys, tensors={"output.weight": None})), untied)
    with pytest.raises(ArtifactError, match=r"tensor 'output\.weight' \[512, 256\] is not part of"):
        Model.open(rewrite(FOLDED, keys=keys))


def test_identity_mode_is_signs_of_one(rewrite):
    ones = {"prism.hadamard.sign_values": np.ones(1152, np.float32)}
    none = {"prism.hadamard.sign_mode": "identity", "prism.hadamard.sign_values": None, "prism.hadamard.sign_widths": None}
    explicit = logits(rewrite(FOLDED, keys=ones))
    assert np.array_equal(explicit, logits(rewrite(FOLDED, keys=none)))
    assert not np.array_equal(explicit, logits(FOLDED))


@pytest.mark.parametrize("path", [FOLDER / "model-mtp.gguf", FOLDED])
def test_the_config_is_plain_data(path):
    json.dumps(asdict(Model.open(path).config))
