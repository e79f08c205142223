"""Motif-3: what a file must say, the published tensor set and figures, and attention against its expanded form."""

import numpy as np
import pytest
from runs import GOLDEN

from ds4ref import gguf_writer, hyper, tiny
from ds4ref.families import motif3
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.model import Model
from ds4ref.ops import rope_frequencies, yarn_ramp
from ds4ref.state import Ring, Rows, State

MODEL = GOLDEN / "motif3" / "model.gguf"
PUBLISHED = {
    "block_count": 53,
    "context_length": 262144,
    "attention.key_length": 192,
    "attention.sliding_window": 128,
    "attention.rope_dimension_count": 64,
    "rope.scaling.factor": 64.0,
}


def described(changes):
    """The tiny model's metadata with some keys changed, or absent where None."""
    metadata = motif3.tiny_metadata() | {f"motif3.{key}": value for key, value in changes.items()}
    return tiny.Described("motif3", {k: v for k, v in metadata.items() if v is not None})


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("attention.kv_lora_rank", None, "is missing; expected an integer from 1"),
        ("attention.noise_head_count", 4, "is 4; expected an integer equal to 2"),
        ("attention.head_count", 7, "is 7; expected two or more heads for each of 2 groups"),
        ("attention.head_count", 2, "is 2; expected two or more heads for each of 2 groups"),
        ("attention.sliding_window_pattern", 4, "is 4; expected a string"),
        ("attention.sliding_window", 65537, "is 65537; expected an integer from 1 up to 65536"),
        ("attention.rope_dimension_count", 24, "is 24; expected an even number below 24"),
        ("attention.elementwise_output_gate", False, "is False; expected true"),
        ("rope.scaling.type", "linear", "is 'linear'; expected 'yarn'"),
        ("rope.scaling.apply_mscale", False, "is False; expected true"),
        ("rope.scaling.beta_fast", 0.0, "is 0.0; expected a number above 0"),
        ("rope.freq_base", 1.0, "is 1.0; expected more than 1, since YaRN divides by its logarithm"),
        ("expert_gating_func", 2, "is 2; expected an integer equal to 1"),
        ("expert_shared_count", 2, "is 2; expected an integer equal to 1"),
        ("activation", "silu", "is 'silu'; expected 'poly_norm'"),
        ("polynorm.sigmoid_weight", False, "is False; expected true"),
        ("mhc.enabled", False, "is False; expected true"),
        ("mtp.block_count", 2, "is 2; expected an integer from 0 up to 1"),
        ("nextn_predict_layers", 1, "is 1; expected no such key, since only the published layout (mhc.*, mtp.*) is read"),
    ],
)
def test_a_key_that_is_off_is_named(key, value, sentence):
    with pytest.raises(ArtifactError) as error:
        motif3.Config.from_metadata(described({key: value}))
    assert str(error.value) == f"tiny.gguf: key 'motif3.{key}' {sentence}"


def test_the_activation_may_be_spelled_without_its_underscore():
    assert motif3.Config.from_metadata(described({"activation": "PolyNorm"})) == motif3.Config.from_metadata(described({}))


def test_the_published_configuration_gives_the_published_figures():
    """2,287 tensors; YaRN's ramp from channel 10 to 23; score scales; full layers 0, 4 … 52; 129 keys in the others."""
    c = motif3.Config.from_metadata(described(PUBLISHED))
    required, optional = motif3.tensors(c)
    assert len(required) == 2287 and not optional
    ramp = yarn_ramp(c.rotary, c.rope_base, c.yarn_context, c.yarn_beta_fast, c.yarn_beta_slow)
    assert np.allclose(ramp, np.clip((np.arange(32) - 10) / 13, 0, 1))
    plain = rope_frequencies(64, 10000.0)
    assert np.allclose(motif3._frequencies(c, 4), ramp * plain / 64 + (1 - ramp) * plain, rtol=1e-14)
    assert np.array_equal(motif3._frequencies(c, 1), plain)
    assert motif3._score_scale(c, 0) == pytest.approx(0.1446796, abs=5e-8)
    assert motif3._score_scale(c, 1) == pytest.approx(0.0721688, abs=5e-8)
    layout = motif3.layout(c)
    assert [i for i in range(53) if isinstance(layout[f"{i}.latent"], Rows)] == list(range(0, 53, 4))
    assert layout["1.latent"] == Ring(129, (24 + 64,))


def test_the_temperature_needs_an_extended_context():
    c = motif3.Config.from_metadata(described({"context_length": 4096}))
    assert motif3._score_scale(c, 0) == c.key_width**-0.5


@pytest.mark.parametrize(
    ("tensors", "without", "sentence"),
    [
        ({}, ["blk.4.ffn_polynorm_exps.bias"], "tensor 'blk.4.ffn_polynorm_exps.bias' is missing"),
        ({}, ["mtp.0.final_layernorm.weight"], "tensor 'mtp.0.final_layernorm.weight' is missing"),
        ({"blk.0.ffn_gate_inp.weight": (6, 64)}, [], "tensor 'blk.0.ffn_gate_inp.weight' [6, 64] is not part of architecture"),
        ({"blk.1.mhc_ffn.bias_res": (16,)}, [], "tensor 'blk.1.mhc_ffn.bias_res' has shape [16], expected [4, 4]"),
    ],
)
def test_a_tensor_that_is_missing_unknown_or_misshapen_is_named(tmp_path, tensors, without, sentence):
    artifact = Artifact.open(MODEL)
    arrays = {name: tensor.dequantize() for name, tensor in artifact.tensors.items() if name not in without}
    arrays |= {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    metadata = {k: v for k, v in artifact.metadata.items() if k != "general.architecture"}
    gguf_writer.write(tmp_path / "model.gguf", "motif3", metadata, arrays)
    with pytest.raises(ArtifactError) as error:
        Model.open(tmp_path / "model.gguf")
    assert sentence in str(error.value)


class Weights(dict):
    """Plain arrays in the place of an artifact's tensors."""

    def part(self, name, index):
        return self[name][index]


@pytest.fixture
def model():
    """(config, weights in float64) of a random tiny model."""
    c = motif3.Config.from_metadata(described({"attention.sliding_window": 6, "rope.scaling.original_context_length": 16}))
    rng = np.random.default_rng(2)
    return c, Weights({name: rng.standard_normal(s) / np.sqrt(s[-1]) for name, s in motif3.tensors(c)[0].items()})


@pytest.mark.parametrize("i", [0, 1])
def test_attention_equals_its_expanded_form(model, i):
    """Keys and values of every head written out; the window counts the own key and the ``sliding_window`` before it."""
    c, w = model
    p, nope, T = f"blk.{i}.", c.key_width - c.rotary, 12
    inputs = np.random.default_rng(4).standard_normal((T, c.width))
    state = State(motif3.layout(c), np.float64)
    found = [motif3.attention(c, w, state, i, t, a) for t, a in enumerate(inputs)]

    def norm(x, weight):
        return weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + c.norm_eps)

    def rotated(x, t):
        angles = t * motif3._frequencies(c, i)
        z = (x[..., : c.rotary // 2] + 1j * x[..., c.rotary // 2 :]) * np.exp(1j * angles)
        return np.concatenate([z.real, z.imag], axis=-1)

    per_group = c.heads // c.groups
    q_latent = norm(inputs @ w[f"{p}attn_q_a.weight"].T, w[f"{p}attn_q_a_norm.weight"])
    q = (q_latent @ w[f"{p}attn_q_b.weight"].T).reshape(T, c.heads, c.key_width)
    kv = inputs @ w[f"{p}attn_kv_a.weight"].T
    expanded = norm(kv[:, : c.kv_rank], w[f"{p}attn_kv_a_norm.weight"]) @ w[f"{p}attn_kv_b.weight"].T
    expanded = expanded.reshape(T, c.groups, nope + c.value_width)
    balance = 1 / (1 + np.exp(-inputs @ w[f"{p}attn_lambda.weight"].T))
    gate = 1 / (1 + np.exp(-q_latent @ w[f"{p}attn_q_gate.weight"].T))
    for t in range(T):
        first = max(0, t - 6) if i else 0
        read = []
        for h in range(c.heads):
            g = h // per_group
            query = np.concatenate([q[t, h, :nope], rotated(q[t, h, nope:], t)])
            keys = [np.concatenate([expanded[s, g, :nope], rotated(kv[s, c.kv_rank :], s)]) for s in range(first, t + 1)]
            e = np.exp(np.array(keys) @ query * motif3._score_scale(c, i))
            read.append(e / e.sum() @ expanded[first : t + 1, g, nope:])
        signal = [h for h in range(c.heads) if h % per_group != per_group - 1]
        out = [read[h] - balance[t, j] * read[h - h % per_group + per_group - 1] for j, h in enumerate(signal)]
        assert np.allclose(found[t], w[f"{p}attn_output.weight"] @ (np.concatenate(out) * gate[t]), rtol=0, atol=1e-12)


def test_poly_norm_is_a_weighted_sum_of_normalised_powers():
    x, powers, bias = np.array([-2.0, 0.5, 3.0]), np.array([0.3, -1.0, 2.0]), np.array([0.7])
    terms = [x**n / np.sqrt(np.mean(x ** (2 * n)) + 1e-6) for n in (3, 2, 1)]
    assert np.allclose(motif3.poly_norm(x, powers, bias), 0.7 + 1 / (1 + np.exp(-powers)) @ terms, rtol=1e-14)


def test_only_routed_experts_clamp_their_bias(model):
    """Far biases: a routed expert acts as if its bias were ±0.5, the shared one and the dense blocks keep theirs."""
    c, w = model
    a = np.random.default_rng(6).standard_normal(c.width)

    def output(i, name, value):
        return motif3.feed_forward(c, Weights(w | {name: np.full_like(w[name], value)}), i, a)

    routed, shared, dense = (f"ffn_polynorm{kind}.bias" for kind in ("_exps", "_shexp", ""))
    assert np.array_equal(output(2, f"blk.2.{routed}", 9.0), output(2, f"blk.2.{routed}", 0.5))
    assert np.array_equal(output(2, f"blk.2.{routed}", -9.0), output(2, f"blk.2.{routed}", -0.5))
    assert not np.allclose(output(2, f"blk.2.{routed}", 0.5), output(2, f"blk.2.{routed}", 0.4))
    assert not np.allclose(output(2, f"blk.2.{shared}", 9.0), output(2, f"blk.2.{shared}", 0.5))
    assert not np.allclose(output(0, f"blk.0.{dense}", 9.0), output(0, f"blk.0.{dense}", 0.5))


def test_sinkhorn_ends_on_columns():
    """Columns sum to 1 exactly, rows nearly; one round by hand; far logits are clipped to ±20."""
    logits = np.random.default_rng(8).standard_normal((4, 4)) * 3
    m = hyper.sinkhorn_exp(logits, 20)
    assert np.allclose(m.sum(axis=0), 1, atol=1e-15) and np.allclose(m.sum(axis=1), 1, atol=1e-2)
    once = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert np.allclose(hyper.sinkhorn_exp(logits, 1), once / once.sum(axis=0, keepdims=True), rtol=1e-14)
    far = np.where(np.eye(4) > 0, 700.0, -700.0)
    assert np.array_equal(hyper.sinkhorn_exp(far, 20), hyper.sinkhorn_exp(np.clip(far, -20, 20), 20))
