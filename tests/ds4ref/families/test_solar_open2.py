"""Solar Open2: what a file must say, the bound of the decay and its switch, and the two ranks of the KDA tensors."""

import numpy as np
import pytest
from runs import GOLDEN

from ds4ref import gguf_writer, tiny
from ds4ref.families import solar_open2
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.model import Model
from ds4ref.state import Recurrent, Ring, Rows

MODEL = GOLDEN / "solar-open2" / "model.gguf"
TOKENS = np.random.default_rng(0).integers(0, 512, 20)


def config(unbounded=False, **changes):
    """The tiny model's config with some keys (``__`` for the dot) changed, or absent where None."""
    metadata = solar_open2.tiny_metadata() | {f"solar-open2.{key.replace('__', '.')}": v for key, v in changes.items()}
    described = tiny.Described("solar-open2", {k: v for k, v in metadata.items() if v is not None})
    return solar_open2.Config.from_metadata(described, unbounded=unbounded)


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
        gguf_writer.write(tmp_path / "model.gguf", "solar-open2", metadata, arrays)
        return tmp_path / "model.gguf"

    return write


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("kda__head_dim", None, "is missing; expected an integer from 1"),
        ("ssm__conv_kernel", 65, "is 65; expected an integer from 1 up to 64"),
        ("attention__head_count_kv", 2, "is 2; expected an array of 5 integers from 0"),
        ("attention__head_count_kv", [3, 0, 0, 0, 2], "is 3; expected 0 (a KDA layer) or a divisor of 4 heads"),
        ("attention__value_length", 8, "is 8; expected an integer equal to 16"),
        ("rope__dimension_count", 16, "is 16; expected an integer equal to 0"),
        ("leading_dense_block_count", 1, "is 1; expected an integer equal to 0"),
        ("nextn_predict_layers", 1, "is 1; expected an integer equal to 0"),
        ("expert_shared_count", 0, "is 0; expected an integer equal to 1"),
        ("expert_group_count", 2, "is 2; expected an integer from 0 up to 1"),
        ("expert_gating_func", 1, "is 1; expected an integer equal to 2"),
        ("expert_weights_norm", False, "is False; expected true"),
    ],
)
def test_a_bad_key_is_one_sentence(key, value, found):
    with pytest.raises(ArtifactError) as error:
        config(**{key: value})
    assert str(error.value) == f"tiny.gguf: key 'solar-open2.{key.replace('__', '.')}' {found}"


@pytest.mark.parametrize("value", [1, "yes", None])
def test_the_switch_is_a_bool(value):
    with pytest.raises(ArtifactError) as error:
        Model.open(MODEL, unbounded=value)
    assert str(error.value) == f"model.gguf: option unbounded is {value!r}; expected true or false"


def test_the_bound_holds_where_it_is_on():
    raw, rate = np.array([[-3.0, 0.0, 2.0], [-3.0, 0.0, 2.0]]), np.array([[-0.5], [-8.0]])
    free = solar_open2.log_decay(config(unbounded=True), raw, rate)
    np.testing.assert_allclose(free, rate * np.log1p(np.exp(raw)), rtol=1e-14)
    assert np.array_equal(solar_open2.log_decay(config(), raw, rate), np.where(free < -5, -5, free))
    assert np.count_nonzero(free < -5) == 2


def test_rotation_stays_off_whatever_base_is_stored(rewrite):
    expected = logits(Model.open(MODEL))
    for base in (None, 1e6):

        def change(metadata, arrays, base=base):
            del metadata["solar-open2.rope.freq_base"]
            if base:
                metadata |= {"solar-open2.rope.freq_base": base, "solar-open2.rope.dimension_count": 0}

        assert np.array_equal(logits(Model.open(rewrite(change))), expected)


def test_requantised_files_drop_trailing_ones(rewrite):
    def change(metadata, arrays):
        for name in arrays:
            if "conv1d" in name or name.endswith("ssm_a"):
                arrays[name] = arrays[name][0] if "conv1d" in name else arrays[name][0, 0]

    path = rewrite(change)
    shapes = {name: tensor.shape for name, tensor in Artifact.open(path).tensors.items()}
    assert (shapes["blk.1.ssm_conv1d_k.weight"], shapes["blk.1.ssm_a"]) == ((64, 1, 4), (4, 1))
    assert np.array_equal(logits(Model.open(path)), logits(Model.open(MODEL)))


def test_head_counts_of_zero_mark_the_recurrent_layers():
    c = config(attention__head_count_kv=[0, 4, 0, 0, 2])
    components, (required, _) = solar_open2.layout(c), solar_open2.tensors(c)
    assert components["0.memory"] == Recurrent((4, 16, 16))
    assert components["0.q"] == components["0.k"] == components["0.v"] == Ring(4, (64,))
    assert components["1.k"] == components["1.v"] == Rows((4, 16))
    assert components["4.k"] == Rows((2, 16))
    gated = {i for i in range(5) if f"blk.{i}.attn_gate.weight" in required}
    assert gated == {1, 4}
    assert {i for i in range(5) if f"blk.{i}.ssm_a" in required} == {0, 2, 3}


@pytest.mark.parametrize(
    ("name", "shape", "found"),
    [
        ("blk.4.attn_gate.weight", None, "is missing"),
        ("blk.1.attn_gate.weight", (64, 64), "[64, 64] is not part of architecture 'solar-open2'"),
        ("blk.1.ssm_a", (4,), "has shape [4], expected [1, 1, 4, 1] or [4, 1]"),
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
