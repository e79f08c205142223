"""GLM-5.3-Flash: what a file must say, its two layouts, and what the pooled indexer may choose."""

import numpy as np
import pytest
from runs import GOLDEN

from ds4ref import gguf_writer, tiny
from ds4ref.families import glm5_next
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.model import Model

MODEL = GOLDEN / "glm5-next" / "model.gguf"
TOKENS = np.random.default_rng(0).integers(0, 512, 60)

# The keys that differ between the layouts, for the golden model: as llama.cpp's converter writes them.
PUBLISHED_ONLY = {
    "layer_types",
    "trunk_block_count",
    "swiglu_limit",
    "attention.rope_dimension_count",
    "attention.indexer.pool_size",
    "linear_attention.head_count",
    "linear_attention.head_dimension",
    "linear_attention.conv_kernel",
    "linear_attention.gate_lower_bound",
}
LLAMACPP_KEYS = {
    "attention.head_count_kv": np.array([0, 1, 0, 1, 1], np.int32),
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_mla": 16,
    "attention.value_length_mla": 24,
    "rope.dimension_count": 0,
    "attention.indexer.kpool": 4,
    "attention.indexer.kpool_select_tail": True,
    "ssm.conv_kernel": 4,
    "kda.head_dim": 16,
    "kda.gate_lower_bound": -5.0,
    "swiglu_clamp_exp": np.full(5, 1.25, np.float32),
    "swiglu_clamp_shexp": np.full(5, 1.25, np.float32),
    "expert_gating_func": 2,
}


def config(changes):
    """The tiny model's config with some keys changed, or absent where None."""
    metadata = glm5_next.tiny_metadata() | {f"glm5-next.{key}": value for key, value in changes.items()}
    return glm5_next.Config.from_metadata(tiny.Described("glm5-next", {k: v for k, v in metadata.items() if v is not None}))


def contents():
    """(metadata, arrays) of the golden artifact."""
    artifact = Artifact.open(MODEL)
    metadata = {k: v for k, v in artifact.metadata.items() if k != "general.architecture"}
    return metadata, {name: t.dequantize(np.float32) for name, t in artifact.tensors.items()}


def llamacpp(changes=None):
    """(metadata, arrays) of the golden artifact in llama.cpp's layout, with some keys changed."""
    metadata, arrays = contents()
    metadata = {k: v for k, v in metadata.items() if k.removeprefix("glm5-next.") not in PUBLISHED_ONLY}
    keys = LLAMACPP_KEYS | (changes or {})
    renamed = {}
    for name, array in arrays.items():
        block, _, rest = name.removeprefix("blk.").partition(".")
        if rest.endswith("_conv.weight"):
            array = array[None]
        elif rest == "kda_a_log.weight":
            array = -np.exp(array)
        renamed[f"blk.{block}.{glm5_next.LLAMACPP_NAMES[rest]}" if rest in glm5_next.LLAMACPP_NAMES else name] = array
    return metadata | {f"glm5-next.{key}": value for key, value in keys.items()}, renamed


def traced(model):
    """(logits, the positions that each latent-attention layer read per step: layer → list) of TOKENS."""
    state, logits, chosen = model.new_state(), [], {}

    def trace(name, array):
        if name.startswith("topk_"):
            chosen.setdefault(int(name.removeprefix("topk_")), []).append(array.tolist())

    for token in TOKENS:
        logits.append(model.step(state, token, trace))
    return np.stack(logits), chosen


@pytest.fixture
def write(tmp_path):
    def write(metadata, arrays):
        gguf_writer.write(tmp_path / "model.gguf", "glm5-next", metadata, arrays)
        return tmp_path / "model.gguf"

    return write


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("block_count", None, "is missing; expected an integer from 1 up to 1024"),
        ("trunk_block_count", 5, "is 5; expected an integer equal to 4"),
        ("attention.rope_dimension_count", 64, "is 64; expected an integer equal to 0"),
        ("attention.indexer.top_k", 18, "is 18; expected a multiple of the pool size 4"),
        ("linear_attention.gate_lower_bound", 1.0, "is 1.0; expected a finite number up to 0.0"),
        ("layer_types", np.array([0, 0, 0, 2, 1]), "holds 2 at 3; expected an array of 5 integers from 0 up to 1"),
        ("native_fp8", True, "is True; expected false (the FP8 variant of the weights is not read)"),
    ],
)
def test_a_bad_key_is_one_sentence(key, value, problem):
    with pytest.raises(ArtifactError) as error:
        config({key: value})
    assert str(error.value) == f"tiny.gguf: key 'glm5-next.{key}' {problem}"


@pytest.mark.parametrize(
    ("kinds", "problem"),
    [
        (
            None,
            "no key tells the layers' kinds; expected 'glm5-next.layer_types' (published layout) or "
            "'glm5-next.attention.head_count_kv' (llama.cpp's layout)",
        ),
        (
            np.array([0, 0, 0, 1, 0]),
            "key 'glm5-next.nextn_predict_layers' is 1; expected a predictor block of the latent-attention kind",
        ),
    ],
)
def test_layer_kinds_must_be_known_and_fit(kinds, problem):
    with pytest.raises(ArtifactError) as error:
        config({"layer_types": kinds})
    assert str(error.value) == f"tiny.gguf: {problem}"


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("rope.dimension_count", 16, "is 16; expected an integer equal to 0"),
        ("attention.key_length", 16, "is 16; expected an integer equal to 32"),
        ("attention.indexer.kpool_select_tail", False, "is False; expected true"),
    ],
)
def test_a_bad_key_of_llamacpp_layout_is_one_sentence(write, key, value, problem):
    with pytest.raises(ArtifactError) as error:
        Model.open(write(*llamacpp({key: value})))
    assert str(error.value) == f"model.gguf: key 'glm5-next.{key}' {problem}"


def test_the_first_latent_attention_must_choose_itself(write):
    with pytest.raises(ArtifactError, match=r"indexer.types\[1\]' is False; expected true"):
        Model.open(write(*llamacpp({"attention.indexer.types": np.array([True, False, True, True])})))


def test_the_published_file_has_as_many_tensors():
    kinds = np.append(np.arange(45) % 4 == 3, True).astype(np.int32)
    c = config({"block_count": 46, "trunk_block_count": 45, "leading_dense_block_count": 3, "layer_types": kinds})
    assert len(glm5_next.tensors(c)[0]) == 1412


def test_both_layouts_are_the_same_model(write):
    published, renamed = Model.open(MODEL), Model.open(write(*llamacpp()))
    assert renamed.config.llamacpp and not published.config.llamacpp
    assert published.layout == renamed.layout
    assert np.array_equal(traced(published)[0], traced(renamed)[0])


def test_keys_and_names_of_different_layouts_do_not_mix(write):
    metadata, _ = contents()
    _, renamed = llamacpp()
    with pytest.raises(ArtifactError, match=r"tensor 'blk.0.kda_q.weight' is missing \(and \d+ more\)"):
        Model.open(write(metadata, renamed))


@pytest.mark.parametrize(
    ("name", "array", "problem"),
    [
        ("blk.1.indexer.pool_ape.weight", None, "is missing"),
        ("blk.4.nextn.hnorm.weight", None, "is missing"),
        ("blk.0.kda_a_log.weight", np.zeros(5, np.float32), "has shape [5], expected [4] or [4, 1]"),
        ("blk.4.hc_attn_base.weight", np.zeros(24, np.float32), "[24] is not part of architecture 'glm5-next'"),
    ],
)
def test_a_wrong_tensor_is_named(write, name, array, problem):
    metadata, arrays = contents()
    arrays = {n: a for n, a in (arrays | {name: array}).items() if a is not None}
    with pytest.raises(ArtifactError) as error:
        Model.open(write(metadata, arrays))
    assert str(error.value) == f"model.gguf: tensor '{name}' {problem}"


def test_whole_pools_and_the_open_one_are_read():
    """Aligned blocks of 4 among the complete ones, at most top_k tokens of them, then exactly the open block."""
    _, chosen = traced(Model.open(MODEL))
    own_left_out = 0
    for t, positions in [(t, p) for layer in (1, 3) for t, p in enumerate(chosen[layer])]:
        complete = (t + 1) // 4
        best, tail = positions[: 4 * min(4, complete)], positions[4 * min(4, complete) :]
        assert tail == list(range(4 * complete, t + 1))
        assert best == sorted(set(best)) and all(p < 4 * complete for p in best)
        assert [p // 4 for p in best[::4]] == [p // 4 for p in best[3::4]] and best[::4] == [4 * (p // 4) for p in best[::4]]
        own_left_out += t not in positions
    assert own_left_out  # nothing forces a token whose pool has just closed


def test_a_shared_layer_reads_what_the_full_layer_below_chose(write):
    metadata, arrays = llamacpp({"attention.indexer.types": np.array([True, True, True, False])})
    arrays = {name: a for name, a in arrays.items() if not name.startswith(("blk.3.indexer.", "blk.3.indexer_compressor"))}
    model = Model.open(write(metadata, arrays))
    _, chosen = traced(model)
    assert chosen[3] == chosen[1]
    assert "3.pools" not in model.layout
    _, own = traced(Model.open(MODEL))
    assert own[3] != own[1]
