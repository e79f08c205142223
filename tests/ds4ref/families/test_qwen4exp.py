"""Qwen3.8-Flash-Next: what a file must say, its two layouts, where the n-gram table lies, and which tokens are seen."""

import json
import shutil
from dataclasses import asdict

import numpy as np
import pytest
from runs import GOLDEN, SHARED

from ds4ref import gguf, gguf_writer, tiny
from ds4ref.families import qwen4exp
from ds4ref.families.qwen4exp_layouts import Named
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.model import Model
from ds4ref.ple import open_sidecar
from ds4ref.state import Recurrent

FOLDER = GOLDEN / "qwen4exp"
MODEL = FOLDER / "model.gguf"
END = 486  # <|endoftext|> of the golden's vocabulary
TOKENS = [5, 17, 480, END, 3, 3, 99]


def config(architecture="qwen4exp", options=(), **changes):
    """The tiny model's config with some keys (``__`` for the dot) changed, or absent where None."""
    metadata = qwen4exp.tiny_metadata() | {f"qwen4exp.{key.replace('__', '.')}": value for key, value in changes.items()}
    described = tiny.Described(architecture, {k: v for k, v in metadata.items() if v is not None})
    return qwen4exp.Config.from_metadata(described, **dict(options))


@pytest.fixture
def rewrite(tmp_path):
    """A golden artifact written anew beside its sidecars: keys and tensors changed, or left out where None."""

    def write(source=MODEL, keys=(), tensors=()):
        artifact = Artifact.open(source)
        metadata = {k: (v, artifact.types[k]) for k, v in artifact.metadata.items() if k != "general.architecture"} | dict(keys)
        kept = {name: t for name, t in (artifact.tensors | dict(tensors)).items() if t is not None}
        stored = {n: (t.data, t.type, t.shape) if isinstance(t, gguf.Tensor) else t for n, t in kept.items()}
        gguf_writer.write(tmp_path / "m.gguf", "qwen4exp", {k: v for k, v in metadata.items() if v is not None}, stored)
        for folder in ("ple", "ple-fp8"):
            shutil.copytree(FOLDER / folder, tmp_path / folder, dirs_exist_ok=True)
        return tmp_path / "m.gguf"

    return write


@pytest.fixture
def converted():
    path = SHARED / "qwen4exp" / "model-llamacpp.gguf"
    if not path.exists():
        pytest.skip("the artifact in llama.cpp's layout is only in the shared oracle folder, which is absent")
    return path


def logits(path, **options):
    model = Model.open(path, **options)
    return model.verify(model.new_state(), TOKENS)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("attention__key_length", None, "key 'qwen4exp.attention.key_length' is missing; expected an integer from 2"),
        ("attention__value_length", 16, "key 'qwen4exp.attention.value_length' is 16; expected an integer equal to 32"),
        ("attention__head_count", 3, "key 'qwen4exp.attention.head_count' is 3; expected a multiple of 2 key/value heads"),
        ("attention__indexer__top_k", 18, "key 'qwen4exp.attention.indexer.top_k' is 18; expected a multiple of 4 tokens"),
        (
            "attention__linear_value_head_count",
            5,
            "key 'qwen4exp.attention.linear_value_head_count' is 5; expected a multiple of 2 key heads",
        ),
        ("attention__output_gate_type", "silu", "key 'qwen4exp.attention.output_gate_type' is 'silu'; expected 'sigmoid'"),
        ("rms_norm__zero_centered", False, "key 'qwen4exp.rms_norm.zero_centered' is False; expected true"),
        ("rope__scaling__type", "yarn", "key 'qwen4exp.rope.scaling.type' is 'yarn'; expected 'none'"),
        ("rope__dimension_count", 32, "key 'qwen4exp.rope.dimension_count' is 32; expected an integer from 2 up to 16"),
        ("expert_used_count", 9, "key 'qwen4exp.expert_used_count' is 9; expected an integer from 1 up to 8"),
        (
            "attention__layer_types",
            ["linear_attention", "full_attention", "sliding_attention", "linear_attention"],
            "key 'qwen4exp.attention.layer_types' is 'sliding_attention'; "
            "expected linear_attention or full_attention for every block",
        ),
        (
            "attention__full_layers",
            np.array([3], np.uint32),
            "key 'qwen4exp.attention.full_layers' is '(3,)'; expected (2,), as attention.layer_types has it",
        ),
        ("mtp__present", False, "key 'qwen4exp.mtp.present' is False; expected True, as nextn_predict_layers has it"),
        ("mtp__block_count", 2, "key 'qwen4exp.mtp.block_count' is 2; expected an integer equal to 1"),
        ("ple__embedding_length", 50, "key 'qwen4exp.ple.embedding_length' is 50; expected a multiple of 4 heads"),
        (
            "attention__linear_key_head_count",
            None,
            "neither key 'qwen4exp.attention.linear_key_head_count' (published layout) nor 'qwen4exp.ssm.group_count' "
            "(llama.cpp's) is there; expected one, no third layout is known",
        ),
    ],
)
def test_a_bad_key_is_one_sentence(key, value, sentence):
    with pytest.raises(ArtifactError) as error:
        config(**{key: value})
    assert str(error.value) == f"tiny.gguf: {sentence}"


@pytest.mark.parametrize("context", [0, 262145, "65536", 1.5])
def test_a_context_that_no_factor_covers_is_refused(context):
    with pytest.raises(ArtifactError) as error:
        config(options={"context": context})
    assert str(error.value) == f"tiny.gguf: option 'context' is {context!r}; expected an integer from 1 to 262144"


@pytest.mark.parametrize(
    ("context", "factor"),
    [(None, 1), (1000, 1), (262144, 1), (262145, 2), (524288, 2), (524289, 3), (786432, 3), (786433, 4), (1048576, 4)],
)
def test_the_yarn_factor_follows_the_configured_context(context, factor):
    c = config(options={"context": context}, context_length=262144)
    assert (c.yarn_factor, c.context, c.context_cap) == (factor, 262144, context or 262144)


def test_yarn_changes_short_prompts_and_no_configuration_within_the_trained_context_does():
    plain = logits(MODEL)
    assert np.array_equal(plain, logits(MODEL, context=100))
    assert not np.array_equal(plain, logits(MODEL, context=262145))


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.linear_attn.qkv.weight",
        "blk.2.ffn_down_exps.tail.weight",
        "blk.1.ple.layer_multipliers",
        "mtp.blk.0.hc_ffn.inject.weight",
        "mtp.fc_hidden_norm.weight",
        "vblk.1.attn_qkv.bias",
        "vision.position_embd.weight",
    ],
)
def test_every_tensor_is_bound_by_name(rewrite, name):
    with pytest.raises(ArtifactError, match=rf"^m\.gguf: tensor '{name.replace('.', '[.]')}' is missing"):
        Model.open(rewrite(tensors={name: None}))


def test_a_tensor_of_the_other_layout_is_named(rewrite):
    tensors = {"blk.0.attn_qkv.weight": np.zeros((160, 48), np.float32)}
    with pytest.raises(ArtifactError, match=r"tensor 'blk\.0\.attn_qkv\.weight' \[160, 48\] is not part of architecture"):
        Model.open(rewrite(tensors=tensors))


def test_the_column_split_of_the_experts_comes_from_the_shapes(rewrite):
    tensors = {}
    for i in range(5):
        p = f"blk.{i}.ffn_down_exps."
        parts = [Artifact.open(MODEL).tensors[f"{p}{part}.weight"].dequantize() for part in ("main", "tail")]
        whole = np.concatenate(parts, axis=2)
        main = 3 + i
        tensors |= {f"{p}main.weight": whole[:, :, :main].copy(), f"{p}tail.weight": whole[:, :, main:].copy()}
    assert np.array_equal(logits(rewrite(tensors=tensors)), logits(MODEL))


def test_the_table_may_be_in_the_file(rewrite):
    c = Model.open(MODEL).config
    rows = np.stack([c.ngrams.sidecar.row(i) for i in range(272)])
    parts = {f"blk.1.ple.ngram_embd.part_{i:03}.weight": part for i, part in enumerate(np.split(rows, 8))}
    keys = {"qwen4exp.ple.sidecar_manifest": None, "qwen4exp.ple.resident_weight": True}
    path = rewrite(keys=keys, tensors=parts)
    shutil.rmtree(path.parent / "ple")
    assert np.array_equal(logits(path), logits(MODEL))
    with pytest.raises(ArtifactError, match=r"part_000\.weight' \[34, 12\] is not part of architecture"):
        Model.open(rewrite(tensors=parts))


def test_the_folder_chosen_at_launch_decides(rewrite):
    path = rewrite()
    shutil.rmtree(path.parent / "ple")
    with pytest.raises(ArtifactError, match=r"ple/ple-manifest\.json: cannot be read \(No such file or directory\)"):
        Model.open(path)
    assert Model.open(path, ple=str(path.parent / "ple-fp8")).config.ngrams.sidecar.storage == "FP8_E4M3FN"
    with pytest.raises(ArtifactError, match=r"m\.gguf: architecture 'qwen4exp' has no option 'PLE' \(accepted: context, ple\)"):
        Model.open(path, PLE="ple-fp8")


@pytest.mark.parametrize("path", ["../ple/ple-manifest.json", "/ple/ple-manifest.json", ""])
def test_the_file_names_a_manifest_in_its_folder(rewrite, path):
    with pytest.raises(ArtifactError) as error:
        Model.open(rewrite(keys={"qwen4exp.ple.sidecar_manifest": path}))
    expected = f"key 'qwen4exp.ple.sidecar_manifest' is {path!r}; expected a path inside the model's folder"
    assert str(error.value) == f"m.gguf: {expected}"


def test_the_constants_of_file_configuration_and_sidecar_are_the_same(rewrite):
    other = np.array([61, 67, 71, 79], np.int64)
    with pytest.raises(ArtifactError, match=r"head_vocab_sizes' holds \[61, 67, 71, 79\]; expected \[61, 67, 71, 73\]"):
        Model.open(rewrite(tensors={"blk.1.ple.head_vocab_sizes": other}))
    with pytest.raises(ArtifactError, match=r"layer_multipliers is \[4295158889763781, .*, expected \[1, 2, 3\]"):
        Model.open(rewrite(tensors={"blk.1.ple.layer_multipliers": np.array([1, 2, 3])}))
    with pytest.raises(ArtifactError, match=r"'blk\.1\.ple\.layer_multipliers' is F32 \[3\]; expected I64 of one dimension"):
        Model.open(rewrite(tensors={"blk.1.ple.layer_multipliers": np.ones(3, np.float32)}))
    with pytest.raises(ArtifactError, match="6528 bytes of rows.*expected the 6529 that the model's file states"):
        Model.open(rewrite(keys={"qwen4exp.ple.sidecar_payload_bytes": 6529}))


def test_n_grams_end_at_endoftext_and_not_at_the_end_of_turn(rewrite):
    assert Model.open(MODEL).config.ngrams.hash.end == END
    tokens = Artifact.open(MODEL).metadata["tokenizer.ggml.tokens"]
    with pytest.raises(ArtifactError, match=r"is an array of 511 strs; expected '<\|endoftext\|>' among them"):
        Model.open(rewrite(keys={"tokenizer.ggml.tokens": [token for token in tokens if token != "<|endoftext|>"]}))


def test_a_padded_manifest_is_refused_beyond_its_usable_rows(rewrite):
    path = rewrite()
    manifest = path.parent / "ple" / "ple-manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"usable_vocabulary_rows": 271}))
    with pytest.raises(ArtifactError, match="usable_vocabulary_rows is 271, expected an integer from 272 to 272"):
        Model.open(path)


def test_llamacpps_layout_holds_its_table_and_may_carry_a_draft_block(rewrite, converted):
    with pytest.raises(ArtifactError, match=r"option 'ple' is 'ple'; expected none, since this file holds its table"):
        Model.open(converted, ple="ple")
    with pytest.raises(ArtifactError, match=r"'qwen4exp\.ple\.head_offsets' is .*expected \(0, 61, 128, 199\)"):
        Model.open(rewrite(converted, keys={"qwen4exp.ple.head_offsets": np.array([0, 61, 128, 200], np.uint64)}))
    # A draft block is one more attention block: block 3 stands in for it.
    tensors = Artifact.open(converted).tensors
    draft = {name.replace("blk.3.", "blk.5."): t for name, t in tensors.items() if name.startswith("blk.3.")}
    draft |= {f"blk.5.nextn.{name}.weight": np.ones(n, np.float32) for name, n in (("enorm", 48), ("hnorm", 192))}
    keys = {"qwen4exp.block_count": 6, "qwen4exp.nextn_predict_layers": 1}
    with pytest.raises(ArtifactError, match=r"tensor 'blk\.5\.nextn\.eh_proj\.weight' is missing$"):
        Model.open(rewrite(converted, keys, draft))
    draft["blk.5.nextn.eh_proj.weight"] = np.ones((48, 96), np.float32)
    assert np.array_equal(logits(rewrite(converted, keys, draft)), logits(converted))


def test_both_layouts_hold_the_same_values(converted):
    """Under llama.cpp's names, up to the order of the value heads."""
    ours, theirs = Model.open(MODEL), Model.open(converted)
    w = Named(ours.config, ours.weights)
    required, _ = qwen4exp.tensors(theirs.config)
    tiled = ("attn_qkv.weight", "attn_gate.weight", "ssm_conv1d.weight", "ssm_a", "ssm_dt.bias")
    tiled += ("ssm_alpha.weight", "ssm_beta.weight", "ssm_out.weight")
    compared = [n for n in required if not n.endswith((*tiled, "_exps.weight")) and n != "per_layer_token_embd.weight"]
    assert len(compared) > 80
    for name in compared:
        assert np.allclose(w[name], theirs.weights[name], rtol=0, atol=3e-7), name
    for name in (n for n in required if n.endswith("_exps.weight")):
        assert np.array_equal(w.part(name, 1), theirs.weights.part(name, 1)), name
    sidecar = ours.config.ngrams.sidecar
    assert np.array_equal([sidecar.row(i) for i in range(272)], theirs.weights["per_layer_token_embd.weight"])


def test_a_query_sees_whole_blocks_and_the_open_one():
    """At most the budget of blocks plus the tail; everything while there are no more blocks than that."""
    model = Model.open(MODEL)
    state, seen = model.new_state(), []
    rng = np.random.default_rng(0)
    for token in rng.integers(0, 480, 40):
        step = {}
        model.step(state, token, lambda name, array, step=step: step.__setitem__(name, np.array(array)))
        seen.append(step["select_3"])
    for position, kept in enumerate(seen):
        complete, tail = divmod(position + 1, 4)
        assert np.array_equal(kept[len(kept) - tail :], np.arange(4 * complete, position + 1))
        assert len(kept) == 4 * min(complete, 4) + tail
        blocks = kept[: len(kept) - tail].reshape(-1, 4)
        assert np.array_equal(blocks, 4 * np.sort(blocks[:, :1] // 4, axis=0) + np.arange(4))
    assert any(not np.array_equal(kept[:16], np.arange(len(seen[-1]) - 16, len(seen[-1]))) for kept in seen[20:])


def test_equal_scores_keep_the_lower_blocks():
    """A query that no block key matches scores zero everywhere: the first blocks stay."""
    c = config(options={})
    weights = {
        "blk.2.attn_index_qk.weight": np.zeros((80, 48)),
        "blk.2.attn_index_q_norm.weight": np.zeros(16),
        "blk.2.attn_index_k_norm.weight": np.zeros(16),
    }

    class Fixed(dict):
        dtype = np.float64

    w = Named(c, Fixed(weights))
    kept = qwen4exp.visible_tokens(c, w, "blk.2.", np.random.default_rng(1).standard_normal((30, 16)), np.ones(48), 29)
    assert kept.tolist() == [*range(16), 28, 29]


def test_the_state_is_the_pages():
    """Rows only in attention blocks, a matrix and a ring in delta nets, one ring of nine earlier rows for n-grams."""
    layout = qwen4exp.layout(Model.open(MODEL).config)
    assert [name for name, kind in layout.items() if isinstance(kind, Recurrent)] == [f"{i}.memory" for i in (0, 1, 2, 4)]
    assert layout["ple.conv"].window == 10 and layout["ple.conv"].shape == (192,)
    assert {name for name in layout if name.startswith("3.")} == {"3.k", "3.v", "3.index"}


def test_a_sidecar_of_another_model_is_refused():
    c = Model.open(MODEL).config.ngrams
    path = SHARED / "qwen4exp" / "mixed" / "ple" / "ple-manifest.json"
    if not path.exists():
        pytest.skip("the sidecar of the quantised mix is only in the shared oracle folder, which is absent")
    with pytest.raises(ArtifactError, match="row_stride_bytes is 64, expected 24"):
        open_sidecar(path, path.parent.parent, c.hash, c.order, c.row, 4096)


@pytest.mark.parametrize("options", [{}, {"ple": FOLDER / "ple-fp8"}])
def test_the_config_is_plain_data(options):
    config = Model.open(MODEL, **options).config
    json.dumps(asdict(config))
    assert hash(config) == hash(Model.open(MODEL, **options).config)
