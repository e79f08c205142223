"""dots3-note: what a file must say in either layout, and that both layouts and both prefixes are one model."""

import dataclasses

import numpy as np
import pytest
from runs import GOLDEN

from ds4ref import gguf_writer, tiny
from ds4ref.families import dots3note
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.model import Model
from ds4ref.state import Ring, Rows
from ds4ref.weights import check

MODEL = GOLDEN / "dots3note" / "model.gguf"
TOKENS = np.random.default_rng(0).integers(0, 512, 60)


def config(**changes):
    """The tiny model's config (llama.cpp's layout) with some keys (``__`` for the dot) changed, or absent where None."""
    metadata = dots3note.tiny_metadata() | {f"dots3note.{key.replace('__', '.')}": v for key, v in changes.items()}
    return dots3note.Config.from_metadata(tiny.Described("dots3note", {k: v for k, v in metadata.items() if v is not None}))


def published(**changes):
    """The golden published artifact with some keys changed, or absent where None."""
    artifact = Artifact.open(MODEL)
    for key, value in changes.items():
        name = f"dots3note.{key.replace('__', '.')}"
        artifact.metadata.pop(name, None)
        if value is not None:
            artifact.metadata[name] = value
    return artifact


def problems(artifact):
    return check(artifact, *dots3note.tensors(dots3note.Config.from_metadata(artifact)))


def logits(model):
    return model.verify(model.new_state(), TOKENS)


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("expert_count", None, "is missing; expected an integer from 1"),
        ("attention__sliding_window_pattern", [False, True], "is an array of 2 values; expected an array of 4 bools"),
        ("attention__sliding_window_pattern", [True] * 4, "is an array of 4 values; expected full and sliding layers"),
        (
            "attention__indexer__types",
            [True] * 4,
            "is an array of 4 values; expected true in exactly the layers that do not slide",
        ),
        ("attention__head_count", [4, 2, 2, 2, 2], "is an array of 2 values; expected one number for all full layers"),
        ("attention__head_count_kv", 4, "is 4; expected an integer equal to 1"),
        ("attention__key_length", 39, "is 39; expected an integer equal to 40"),
        ("attention__value_length_swa", 32, "is 32; expected an integer equal to 48"),
        ("attention__key_length_mla", 8, "is 8; expected an integer from 9"),
        ("expert_group_count", 8, "is 8; expected an integer from 0 up to 1"),
        ("expert_gating_func", 1, "is 1; expected an integer equal to 2"),
        ("expert_shared_count", 2, "is 2; expected an integer equal to 1"),
        ("expert_weights_norm", False, "is False; expected true"),
        ("nextn_predict_layers", 2, "is 2; expected an integer from 0 up to 1"),
    ],
)
def test_a_bad_key_of_llamacpps_layout_is_one_sentence(key, value, found):
    with pytest.raises(ArtifactError) as error:
        config(**{key: value})
    assert str(error.value) == f"tiny.gguf: key 'dots3note.{key.replace('__', '.')}' {found}"


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("sliding_window", None, "is missing; expected an integer from 1"),
        ("attention__head_count", 2, "is 2; expected an integer equal to 4"),
        ("attention__key_length", 40, "is 40; expected an integer equal to 32"),
        ("full_attention_count", 3, "is 3; expected an integer equal to 2"),
        ("language_only", False, "is False; expected true"),
    ],
)
def test_a_bad_key_of_the_published_layout_is_one_sentence(key, value, found):
    with pytest.raises(ArtifactError) as error:
        dots3note.Config.from_metadata(published(**{key: value}))
    assert str(error.value) == f"model.gguf: key 'dots3note.{key.replace('__', '.')}' {found}"


def test_a_third_layout_is_refused():
    sentence = "expected either 'swa_kv_lora_rank' (published) or 'attention.kv_lora_rank_swa' (llama.cpp)"
    for artifact in (published(swa_kv_lora_rank=None), published(attention__kv_lora_rank_swa=48)):
        with pytest.raises(ArtifactError) as error:
            dots3note.Config.from_metadata(artifact)
        assert str(error.value) == f"model.gguf: the keys are of no known dots3note layout; {sentence}"


def test_shapes_without_a_key_come_from_the_tensors():
    c = dots3note.Config.from_metadata(Artifact.open(MODEL))
    assert c.full == dots3note.Geometry(heads=4, rank=32, nope=24, value_width=16, rope_base=8e7)
    assert c.windowed == dots3note.Geometry(heads=2, rank=48, nope=24, value_width=16, rope_base=5e4)
    assert (c.layers, c.predictors, c.rotary, c.index_heads, c.index_width) == (5, 1, 8, 8, 64)
    assert c.sliding == (False, False, True, True, True, True)


def test_a_tensor_that_should_tell_a_shape_is_named():
    artifact = Artifact.open(MODEL)
    del artifact.tensors["blk.0.attn_k_rope_norm.weight"]
    with pytest.raises(ArtifactError, match="tensor 'blk.0.attn_k_rope_norm.weight' is missing; it tells a shape"):
        dots3note.Config.from_metadata(artifact)
    artifact = Artifact.open(MODEL)
    artifact.tensors["blk.5.attn_idx_k.weight"] = artifact.tensors["blk.0.attn_idx_k.weight"]
    with pytest.raises(ArtifactError, match="attn_idx_k.weight is in 3 of 6 blocks; expected it in the full layers"):
        dots3note.Config.from_metadata(artifact)
    artifact = Artifact.open(MODEL)
    artifact.tensors["blk.2.attn_gate.weight"] = artifact.tensors["blk.2.attn_q_b.weight"]
    with pytest.raises(ArtifactError, match="give 64 heads of -7 unrotated and 8 value channels in block 2"):
        dots3note.Config.from_metadata(artifact)


def test_tensors_are_named_when_missing_unknown_or_misshapen():
    artifact = Artifact.open(MODEL)
    assert problems(artifact) == []
    artifact.tensors["blk.3.attn_kv_b.weight"] = artifact.tensors["blk.0.attn_kv_b.weight"]
    artifact.tensors["blk.5.nextn.enorm.weight"] = artifact.tensors["blk.5.enorm.weight"]
    del artifact.tensors["token_embd_mtp.weight"]
    assert problems(artifact) == [
        "tensor 'token_embd_mtp.weight' is missing",
        "tensor 'blk.3.attn_kv_b.weight' has shape [160, 32], expected [80, 48]",
        "tensor 'blk.5.nextn.enorm.weight' [64] is not part of architecture 'dots3note'",
    ]


def test_state_by_layer_kind():
    components = dots3note.layout(config())
    assert components["1.latent"] == Rows((32,)) and components["2.latent"] == Ring(17, (48,))
    assert components["1.rope"] == Rows((8,)) and components["2.rope"] == Ring(17, (8,))
    assert components["1.index"] == Rows((64,)) and "2.index" not in components
    assert not any(name.startswith("4.") for name in components)


def test_the_legacy_prefix_is_the_same_model(tmp_path):
    artifact = Artifact.open(MODEL)
    metadata = {key.replace("dots3note.", "dots3-note."): value for key, value in artifact.metadata.items()}
    del metadata["general.architecture"]
    values = {name: tensor.dequantize() for name, tensor in artifact.tensors.items()}
    gguf_writer.write(tmp_path / "legacy.gguf", "dots3-note", metadata, values)
    assert np.array_equal(logits(Model.open(tmp_path / "legacy.gguf")), logits(Model.open(MODEL)))


def test_llamacpps_layout_of_the_same_weights_is_the_same_model(tmp_path):
    """Names, split matrices and folded norms, converted here by the family page's table rather than by the module's."""
    artifact = Artifact.open(MODEL)
    renames = {
        "attn_k_rope_norm": "attn_k_norm",
        "attn_idx_q_b": "indexer.attn_q_b",
        "attn_idx_k_norm": "indexer.k_norm",
        "attn_idx_k.": "indexer.attn_k.",
        "attn_idx_w": "indexer.proj",
        "blk.5.eh_proj": "blk.5.nextn.eh_proj",
        "blk.5.enorm": "blk.5.nextn.enorm",
        "blk.5.hnorm": "blk.5.nextn.hnorm",
        "blk.5.shared_head_norm": "blk.5.nextn.shared_head_norm",
        "token_embd_mtp": "blk.5.nextn.embed_tokens",
    }
    tensors = {}
    for name, tensor in artifact.tensors.items():
        array = tensor.dequantize()
        if name.endswith("attn_kv_b.weight"):
            heads = 4 if len(array) == 160 else 2
            per_head = array.reshape(heads, 24 + 16, -1)
            tensors[name.replace("kv_b", "k_b")] = np.ascontiguousarray(per_head[:, :24].transpose(0, 2, 1))
            tensors[name.replace("kv_b", "v_b")] = np.ascontiguousarray(per_head[:, 24:])
            continue
        if name.endswith(("attn_q_a_norm.weight", "attn_kv_a_norm.weight")):
            array = (array * np.sqrt(64 / len(array))).astype(np.float32)
        for old, new in renames.items():
            name = name.replace(old, new) if old in name else name
        tensors[name] = array
    metadata = dots3note.tiny_metadata() | {
        "dots3note.block_count": 6,
        "dots3note.attention.head_count": [4, 4, 2, 2, 2, 2],
        "dots3note.attention.sliding_window_pattern": [False, False, True, True, True],
        "dots3note.attention.indexer.types": [True, True, False, False, False],
    }
    gguf_writer.write(tmp_path / "converted.gguf", "dots3note", metadata, tensors)
    ours, theirs = Model.open(MODEL), Model.open(tmp_path / "converted.gguf")
    same = dataclasses.replace(theirs.config, published=True, context=ours.config.context)
    assert same == ours.config and not theirs.config.published
    assert np.max(np.abs(logits(ours) - logits(theirs))) < 1e-4
