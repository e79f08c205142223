"""K-EXAONE: what a file must say, which layers slide, and the predictor that is bound but no layer."""

import numpy as np
import pytest
from runs import GOLDEN

from ds4ref import gguf_writer, tiny
from ds4ref.families import exaone_moe
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.model import Model
from ds4ref.state import Ring, Rows

MODEL = GOLDEN / "exaone-moe" / "model.gguf"
PATTERN = "exaone-moe.attention.sliding_window_pattern"
TOKENS = np.random.default_rng(0).integers(0, 512, 40)


def config(**changes):
    """The tiny model's config with some keys (``__`` for the dot) changed, or absent where None."""
    metadata = exaone_moe.tiny_metadata() | {f"exaone-moe.{key.replace('__', '.')}": v for key, v in changes.items()}
    described = tiny.Described("exaone-moe", {k: v for k, v in metadata.items() if v is not None})
    return exaone_moe.Config.from_metadata(described)


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
        gguf_writer.write(tmp_path / "model.gguf", "exaone-moe", metadata, arrays)
        return tmp_path / "model.gguf"

    return write


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("attention__sliding_window", None, "is missing; expected an integer from 1"),
        ("attention__sliding_window_pattern", 4, "is 4; expected an array of bools"),
        ("attention__head_count_kv", 3, "is 3; expected a divisor of 4 heads"),
        ("attention__value_length", 8, "is 8; expected an integer equal to 16"),
        ("rope__dimension_count", 8, "is 8; expected an integer equal to 16"),
        ("rope__scaling__type", "yarn", "is 'yarn'; expected 'none'"),
        ("expert_used_count", 9, "is 9; expected an integer from 1 up to 8"),
        ("expert_group_count", 2, "is 2; expected an integer from 0 up to 1"),
        ("expert_gating_func", 1, "is 1; expected an integer equal to 2"),
        ("expert_weights_norm", False, "is False; expected true"),
        ("expert_shared_count", 2, "is 2; expected an integer equal to 1"),
        ("leading_dense_block_count", 6, "is 6; expected an integer from 0 up to 5"),
        ("nextn_predict_layers", 2, "is 2; expected an integer from 0 up to 1"),
    ],
)
def test_a_bad_key_is_one_sentence(key, value, found):
    with pytest.raises(ArtifactError) as error:
        config(**{key: value})
    assert str(error.value) == f"tiny.gguf: key 'exaone-moe.{key.replace('__', '.')}' {found}"


@pytest.mark.parametrize("length", [4, 7])
def test_a_pattern_has_an_entry_per_block(length):
    with pytest.raises(ArtifactError) as error:
        config(attention__sliding_window_pattern=np.ones(length, np.bool_))
    accepted = "an array of 6 bools, or of 5 without the predictor"
    assert str(error.value) == f"tiny.gguf: key '{PATTERN}' is an array of {length} values; expected {accepted}"


def test_heads_rotate_in_halves():
    with pytest.raises(ArtifactError, match="key 'exaone-moe.attention.key_length' is 15; expected an even number"):
        config(attention__key_length=15, attention__value_length=15, rope__dimension_count=15)


def test_the_period_stands_in_for_an_absent_pattern_and_a_missing_predictor_slides(rewrite):
    def change(metadata, arrays):
        del metadata[PATTERN]

    absent = Model.open(rewrite(change))
    assert absent.config.sliding == (True, True, True, False, True, True)

    def shorten(metadata, arrays):
        metadata[PATTERN] = metadata[PATTERN][:5]

    short = Model.open(rewrite(shorten))
    expected = logits(Model.open(MODEL))
    assert np.array_equal(logits(absent), expected)
    assert np.array_equal(logits(short), expected)
    assert short.config.sliding[5]


def test_only_sliding_layers_feel_positions(rewrite):
    """In the first layer, the order of earlier tokens changes nothing where keys carry no rotation."""

    def change(metadata, arrays):
        metadata[PATTERN] = np.zeros(6, np.bool_)

    def first_attention(model, tokens):
        seen, state = {}, model.new_state()
        for token in tokens:
            model.step(state, token, seen.__setitem__)
        return seen["attn_0"]

    sliding, full = Model.open(MODEL, np.float64), Model.open(rewrite(change), np.float64)
    difference = [np.max(np.abs(first_attention(m, [3, 5, 7]) - first_attention(m, [5, 3, 7]))) for m in (full, sliding)]
    assert difference[0] < 1e-12
    assert difference[1] > 1e-3


def test_windows_and_rows():
    components = exaone_moe.layout(config())
    assert set(components) == {f"{i}.{part}" for i in range(5) for part in "kv"}
    for i, sliding in enumerate([True, True, True, False, True]):
        assert components[f"{i}.k"] == components[f"{i}.v"] == (Ring(16, (2, 16)) if sliding else Rows((2, 16)))


def test_a_predictor_is_bound_and_no_layer():
    c = config()
    required, optional = exaone_moe.tensors(c)
    assert (c.layers, c.predictors) == (5, 1)
    assert {"blk.5.ffn_gate.weight", "blk.5.nextn.enorm.weight", "blk.5.attn_q_norm.weight"} <= required.keys()
    assert required["blk.5.nextn.eh_proj.weight"] == (64, 128)
    assert optional["blk.5.nextn.embed_tokens.weight"] == (512, 64)
    none = config(nextn_predict_layers=0)
    assert none.layers == 6
    assert not any("nextn" in name for kind in exaone_moe.tensors(none) for name in kind)


@pytest.mark.parametrize(
    ("name", "shape", "found"),
    [
        ("blk.3.attn_q_norm.weight", None, "is missing"),
        ("blk.5.nextn.hnorm.weight", None, "is missing"),
        ("rope_freqs.weight", (8,), "[8] is not part of architecture 'exaone-moe'"),
        ("blk.0.ffn_gate_inp.weight", (8, 64), "[8, 64] is not part of architecture 'exaone-moe'"),
        ("blk.1.attn_k.weight", (64, 64), "has shape [64, 64], expected [32, 64]"),
    ],
)
def test_a_wrong_tensor_is_named(rewrite, name, shape, found):
    def change(metadata, arrays):
        if shape is None:
            del arrays[name]
        else:
            arrays[name] = np.ones(shape, np.float32)

    with pytest.raises(ArtifactError) as error:
        Model.open(rewrite(change))
    assert str(error.value) == f"model.gguf: tensor {name!r} {found}"
