"""K2-Horizon: what a file must say, and the siblings under the same architecture string that are refused by name."""

import numpy as np
import pytest
from runs import GOLDEN

from ds4ref import gguf_writer, tiny
from ds4ref.families import k2_horizon
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.model import Model
from ds4ref.state import Rows

MODEL = GOLDEN / "k2-horizon" / "model.gguf"
SIBLINGS = "the K2-Horizon siblings (0.9B, 3.7B, 7B, 32B, MoVA-36B-A4B), which this does not run"
MOVA = "the K2-Horizon sibling MoVA-36B-A4B, which this does not run"


def config(**changes):
    """The tiny model's config with some keys (``__`` for the dot) changed, or absent where None."""
    metadata = k2_horizon.tiny_metadata() | {f"k2-horizon.{key.replace('__', '.')}": v for key, v in changes.items()}
    described = tiny.Described("k2-horizon", {k: v for k, v in metadata.items() if v is not None})
    return k2_horizon.Config.from_metadata(described)


@pytest.fixture
def rewrite(tmp_path):
    """The golden artifact written anew, its (metadata, arrays) passed through ``change``."""

    def write(change):
        artifact = Artifact.open(MODEL)
        metadata = {k: v for k, v in artifact.metadata.items() if k != "general.architecture"}
        arrays = {name: t.dequantize(np.float32) for name, t in artifact.tensors.items()}
        change(metadata, arrays)
        gguf_writer.write(tmp_path / "model.gguf", "k2-horizon", metadata, arrays)
        return tmp_path / "model.gguf"

    return write


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("rope__dimension_count", None, "is missing; expected an integer from 2"),
        ("rope__dimension_count", 18, "is 18; expected an even number up to 16"),
        ("rope__dimension_count", 7, "is 7; expected an even number up to 16"),
        ("rope__scaling__type", "yarn", "is 'yarn'; expected 'none'"),
        ("attention__head_count_kv", 4, "is 4; expected a divisor of 6 heads"),
        ("attention__value_length", 8, "is 8; expected an integer equal to 16"),
        ("attention__group_norm_groups", 8, f"is 8; expected 1, since grouped norms belong to {SIBLINGS}"),
        ("attention__value_expert_count", 16, f"is 16; expected 0, since routed values belong to {MOVA}"),
        ("moe_every_n_layers", 2, "is 2; expected an integer equal to 1"),
        ("expert_gating_func", 1, "is 1; expected 2 (sigmoid), or 0, which stands for it"),
        ("expert_weights_norm", False, "is False; expected true"),
        ("expert_used_count", 9, "is 9; expected an integer from 1 up to 8"),
        ("nextn_predict_layers", 1, "is 1; expected an integer equal to 0"),
        ("vocab_size", None, "is missing; expected an integer from 1"),
    ],
)
def test_a_bad_key_is_one_sentence(key, value, found):
    with pytest.raises(ArtifactError) as error:
        config(**{key: value})
    assert str(error.value) == f"tiny.gguf: key 'k2-horizon.{key.replace('__', '.')}' {found}"


@pytest.mark.parametrize("gating", [None, 0, 2])
def test_sigmoid_is_the_default_router(gating):
    assert config(expert_gating_func=gating) == config()


def test_the_embedding_tells_the_vocabulary(rewrite):
    def change(metadata, arrays):
        del metadata["k2-horizon.vocab_size"]

    assert Model.open(rewrite(change)).vocabulary == 512


def test_every_layer_keeps_every_row():
    assert k2_horizon.layout(config()) == {f"{i}.{part}": Rows((2, 16)) for i in range(4) for part in "kv"}


@pytest.mark.parametrize(
    ("name", "shape", "found"),
    [
        ("blk.0.attn_gate.weight", (96, 64), f"belongs to {SIBLINGS}"),
        ("blk.1.attn_v_exps.weight", (4, 32, 64), f"belongs to {MOVA}"),
        ("blk.1.attn_q_norm.weight", (16,), f"belongs to {SIBLINGS}"),
        ("blk.1.attn_q.bias", (96,), "[96] is not part of architecture 'k2-horizon'"),
        ("output.weight", None, "is missing"),
        ("blk.2.exp_probs_b.bias", (8,), "has shape [8], expected [9]"),
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


def test_a_sequence_can_be_cut_anywhere():
    model = Model.open(MODEL)
    tokens = np.random.default_rng(0).integers(0, 512, 20)
    expected = model.verify(model.new_state(), tokens)
    state = model.new_state()
    model.prefill(state, [*tokens[:15], 1, 2, 3])
    for n in (15, 7, 1):
        state.truncate(n)
        assert np.array_equal(model.verify(state, tokens[n:]), expected[n:])
