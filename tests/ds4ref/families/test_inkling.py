"""Inkling: the embedded configuration, the published tensor set, the distance bias and the convolutions with their residual."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from runs import GOLDEN

from ds4ref import gguf_writer, tiny
from ds4ref.families import inkling
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.model import Model
from ds4ref.state import Ring, Rows, State

MODEL = GOLDEN / "inkling" / "model.gguf"
ABSENT = object()

# Inkling Small as published.
PUBLISHED = {
    "model_max_length": 1048576,
    "hidden_size": 4096,
    "num_hidden_layers": 42,
    "vocab_size": 201024,
    "unpadded_vocab_size": 200058,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "swa_num_attention_heads": 32,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 128,
    "d_rel": 16,
    "rel_extent": 1024,
    "sliding_window_size": 512,
    "local_layer_ids": [i for i in range(42) if i % 6 != 5],
    "dense_mlp_idx": 2,
    "dense_intermediate_size": 16384,
    "intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
}


def described(sections=None, tensors=None, keys=None, **text):
    """The tiny model's metadata with fields of text_config changed, whole sections added and other keys changed."""
    metadata = inkling.tiny_metadata()
    config = json.loads(metadata[inkling.CONFIG_KEY])
    config["text_config"] = {k: v for k, v in (config["text_config"] | text).items() if v is not ABSENT}
    metadata[inkling.CONFIG_KEY] = json.dumps(config | (sections or {}))
    artifact = tiny.Described("inkling", {k: v for k, v in (metadata | (keys or {})).items() if v is not ABSENT})
    artifact.tensors = tensors or {}
    return artifact


def refusal(**changes):
    with pytest.raises(ArtifactError) as error:
        inkling.Config.from_metadata(described(**changes))
    return str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("hidden_size", ABSENT, "hidden_size' is missing; expected an integer from 1"),
        ("hidden_size", None, "hidden_size' is missing; expected an integer from 1"),
        ("hidden_size", "64", "hidden_size' is '64'; expected an integer from 1"),
        ("hidden_size", 10**400, "expected an integer of 64 bits"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps' is nan; expected a finite number from 0.0"),
        ("unpadded_vocab_size", 513, "unpadded_vocab_size' is 513; expected an integer from 1 up to 512"),
        ("local_layer_ids", [0, 4], "local_layer_ids' holds 4 at 1; expected an array of integers from 0 up to 3"),
        ("num_experts_per_tok", 9, "num_experts_per_tok' is 9; expected an integer from 1 up to 8"),
        ("swa_num_key_value_heads", 3, "swa_num_key_value_heads' is 3; expected a divisor of 4 heads"),
        ("final_logit_softcapping", 30.0, "final_logit_softcapping' is 30.0; expected null"),
        ("gate_activation", "softmax", "gate_activation' is 'softmax'; expected 'sigmoid'"),
        ("logits_mup_width_multiplier", 0, "logits_mup_width_multiplier' is 0.0; expected a number above 0"),
        ("q_bias", True, "q_bias' is True; expected false"),
        ("use_sconv", False, "use_sconv' is False; expected true"),
        ("shared_expert_sink", False, "shared_expert_sink' is False; expected true"),
    ],
)
def test_a_field_that_is_off_is_named(field, value, sentence):
    message = refusal(**{field: value})
    assert message.startswith(f"tiny.gguf: key 'inkling.config.json/text_config.{field}' ")
    assert sentence in message and "\n" not in message


@pytest.mark.parametrize("text", ["{", "[1, 2]", "[" * 200_000, "", '{"text_config": {"hidden_size": ' + "9" * 5000 + "}}"])
def test_a_configuration_that_is_no_json_object_is_refused(text):
    message = refusal(keys={inkling.CONFIG_KEY: text})
    assert message.startswith("tiny.gguf: key 'inkling.config.json' is ") and message.endswith("; expected a JSON object")


def test_other_files_of_the_family_are_refused():
    assert "'inkling.tensor_layout' is 'halves'; expected 'source-interleaved-v1'" in refusal(
        keys={"inkling.tensor_layout": "halves"}
    )
    assert "'inkling.mtp.sidecar' is True; expected false" in refusal(keys={"inkling.mtp.sidecar": True})
    assert "'inkling.config.json' is missing" in refusal(keys={inkling.CONFIG_KEY: ABSENT})


def test_a_soft_cap_may_be_null_or_absent():
    with_null = inkling.Config.from_metadata(described(final_logit_softcapping=None))
    assert inkling.Config.from_metadata(described(final_logit_softcapping=ABSENT)) == with_null


def test_local_and_global_layers_have_their_own_geometry():
    c = inkling.Config.from_metadata(described(num_key_value_heads=2, swa_num_key_value_heads=4, swa_head_dim=8))
    required, _ = inkling.tensors(c)
    p = "model.llm.layers."
    assert required[f"{p}0.attn.wk_dv.weight"] == (4 * 8, 64) and required[f"{p}1.attn.wk_dv.weight"] == (2 * 16, 64)
    assert required[f"{p}0.attn.rel_logits_proj.proj"] == (4, 32) and required[f"{p}1.attn.rel_logits_proj.proj"] == (4, 48)
    assert inkling.layout(c)["0.k"] == Ring(32, (4, 8)) and inkling.layout(c)["1.v"] == Rows((2, 16))


def test_the_published_configuration_gives_the_published_tensors():
    """888 tensors, and the image tower whose folds (5, 2, 4 and two frames) only its shapes tell."""
    sections = {
        "audio_config": {"decoder_dmodel": 4096, "n_mel_bins": 80, "mel_vocab_size": 16},
        "vision_config": {
            "decoder_dmodel": 4096,
            "patch_size": 40,
            "temporal_patch_size": 2,
            "n_channels": 3,
            "n_layers": 4,
        },
    }
    p = "model.visual.layers."
    visual = {"linear_0": (128, 75), "linear_1": (320, 512), "linear_2": (4800, 5120), "linear_3": (4096, 9600)}
    found = {f"{p}{name}.weight": SimpleNamespace(shape=shape) for name, shape in visual.items()}
    c = inkling.Config.from_metadata(described(sections, found, **PUBLISHED))
    required, optional = inkling.tensors(c)
    assert len(required) + len(optional) == 888
    assert {name: optional[f"{p}{name}.weight"] for name in visual} == visual
    assert [optional[f"{p}norm_{j}.weight"] for j in range(3)] == [(128,), (320,), (4800,)]
    assert optional["model.audio.encoder.weight"] == (80 * 16, 4096)
    assert [i for i in range(42) if not c.local[i]] == [5, 11, 17, 23, 29, 35, 41]
    assert (c.vocabulary, c.stored_vocabulary) == (200058, 201024)


def rewritten(tmp_path, tensors=None, without=()):
    """The golden artifact written anew, some tensors changed or added (name → array) and some left out."""
    artifact = Artifact.open(MODEL)
    arrays = {name: tensor.dequantize() for name, tensor in artifact.tensors.items()} | (tensors or {})
    metadata = {k: v for k, v in artifact.metadata.items() if k != "general.architecture"}
    gguf_writer.write(tmp_path / "model.gguf", "inkling", metadata, {k: v for k, v in arrays.items() if k not in without})
    return tmp_path / "model.gguf"


@pytest.mark.parametrize(
    ("tensors", "without", "sentence"),
    [
        ({}, ["model.llm.layers.3.mlp.gate.bias"], "tensor 'model.llm.layers.3.mlp.gate.bias' is missing"),
        ({"model.llm.layers.5.mlp.gate.bias": (8,)}, [], "'model.llm.layers.5.mlp.gate.bias' [8] is not part of architecture"),
        ({"model.llm.layers.0.attn.rel_logits_proj.proj": (4, 40)}, [], "has shape [4, 40], expected [4, 24]"),
        ({"model.visual.layers.linear_1.weight": (64, 512)}, [], "has shape [64, 512], expected [64, 256]"),
    ],
)
def test_a_tensor_that_is_missing_unknown_or_misshapen_is_named(tmp_path, tensors, without, sentence):
    path = rewritten(tmp_path, {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, without)
    with pytest.raises(ArtifactError) as error:
        Model.open(path)
    assert sentence in str(error.value)


def test_the_towers_may_be_absent(tmp_path):
    """A text-only file answers text like the whole one."""
    towers = [name for name in Artifact.open(MODEL).tensors if name.startswith(("model.audio.", "model.visual."))]
    whole, text = Model.open(MODEL), Model.open(rewritten(tmp_path, without=towers))
    assert towers and np.array_equal(text.verify(text.new_state(), [1, 2, 3]), whole.verify(whole.new_state(), [1, 2, 3]))


def test_padding_rows_have_no_logits_and_no_tokens():
    model = Model.open(MODEL)
    assert model.prefill(model.new_state(), [499]).shape == (500,)
    with pytest.raises(ValueError, match="token id 500 is outside the vocabulary of 500"):
        model.prefill(model.new_state(), [500])


@pytest.mark.parametrize("count", [1, 4, 5, 9])
def test_the_bias_depends_on_the_distance_and_ends_at_the_extent(count):
    rng = np.random.default_rng(3)
    r, projection = rng.standard_normal((2, 3)), rng.standard_normal((3, 5))
    bias = inkling.relative_bias(r, projection, count)
    for s in range(count):
        distance = count - 1 - s
        expected = r @ projection[:, distance] if distance < 5 else np.zeros(2)
        assert np.allclose(bias[:, s], expected, rtol=1e-14)


def test_a_token_reaches_no_further_than_the_window_and_the_taps():
    """In one local layer, with its four convolutions: the last logits depend on this many tokens back."""
    artifact = described(num_hidden_layers=1, local_layer_ids=[0], dense_mlp_idx=1, sliding_window_size=6)
    c = inkling.Config.from_metadata(artifact)
    rng = np.random.default_rng(5)
    required, _ = inkling.tensors(c)
    weights = Weights({name: rng.standard_normal(shape) / np.sqrt(shape[-1]) for name, shape in required.items()})
    # The key and value convolutions reach back taps − 1, the window 5 more, the two output convolutions taps − 1 each.
    reach = 5 + 3 * (c.taps - 1)
    tokens = rng.integers(0, 500, 40).tolist()
    for distance, seen in ((reach, True), (reach + 1, False)):
        changed = list(tokens)
        changed[-1 - distance] = (tokens[-1 - distance] + 1) % 500
        assert seen != np.array_equal(last_logits(c, weights, tokens), last_logits(c, weights, changed))


class Weights(dict):
    """Plain arrays in the place of an artifact's tensors."""

    def part(self, name, index):
        return self[name][index]


def last_logits(c, weights, tokens):
    state = State(inkling.layout(c), np.float64)
    for token in tokens:
        logits = inkling.forward(c, weights, state, token, lambda name, array: None)
        state.tokens.append(token)
    return logits


def test_gate_and_up_rows_alternate():
    gate, up, m = np.arange(6.0).reshape(2, 3) - 2, np.arange(6.0).reshape(2, 3) / 3, np.array([0.5, -1.0, 2.0])
    w13 = np.stack([gate, up], axis=1).reshape(4, 3)
    g = gate @ m
    assert np.allclose(inkling._gated(m, w13), g / (1 + np.exp(-g)) * (up @ m), rtol=1e-14)


def test_expert_weights_share_one_softmax_of_log_sigmoid():
    """Bias chooses and never weighs; the shared experts take part; the sum is route scale times global scale."""
    c = inkling.Config.from_metadata(described(num_hidden_layers=1, local_layer_ids=[0], dense_mlp_idx=0))
    rng = np.random.default_rng(11)
    required, _ = inkling.tensors(c)
    w = Weights({name: rng.standard_normal(shape) / np.sqrt(shape[-1]) for name, shape in required.items()})
    p, m = "model.llm.layers.0.mlp.", rng.standard_normal(c.width)
    affinity = 1 / (1 + np.exp(-(w[f"{p}gate.weight"] @ m)))
    chosen = sorted(range(c.experts), key=lambda e: -(affinity[e] + w[f"{p}gate.bias"][e]))[: c.experts_used]
    total = sum(affinity[e] for e in chosen) + sum(affinity[c.experts :])
    assert set(chosen) != set(np.argsort(-affinity[: c.experts])[: c.experts_used].tolist())
    expected = np.zeros(c.width)
    for index, (w13, w2) in [
        *((e, (w[f"{p}experts.w13_weight"][e], w[f"{p}experts.w2_weight"][e])) for e in chosen),
        *(
            (c.experts + s, (w[f"{p}shared_experts.shared_w13_weight"][s], w[f"{p}shared_experts.shared_w2_weight"][s]))
            for s in range(c.shared_experts)
        ),
    ]:
        gate, up = w13[0::2] @ m, w13[1::2] @ m
        expected += affinity[index] / total * (w2 @ (gate / (1 + np.exp(-gate)) * up))
    expected *= c.route_scale * w[f"{p}gate.global_scale"]
    assert np.allclose(inkling.feed_forward(c, w, "model.llm.layers.0.", m, dense=False), expected, rtol=1e-12)
