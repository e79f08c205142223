"""``ds4ref tiny ARCH --scale SIZE``: a model of the family, of the size and the types asked for, that repeats with its seed."""

from collections import Counter

import numpy as np
import pytest

from ds4ref import gguf_writer, quants, scaled
from ds4ref.__main__ import UsageError, bytes_of, main
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.inspection import inspect
from ds4ref.model import Model
from ds4ref.quants import TensorType
from ds4ref.tokenizer import Tokenizer

SIZE = 8_000_000
TYPES = {
    "deepseek4": {"IQ2_XXS", "Q2_K", "Q8_0", "F16", "F32", "I32"},
    "qwen35": {"Q8_0", "F32"},
    "step35": {"IQ2_XXS", "Q4_K", "Q8_0", "F32"},
}


@pytest.mark.parametrize("architecture", sorted(scaled.SHAPES))
def test_a_model_of_the_size_asked_for(architecture, tmp_path):
    path = tmp_path / "scaled.gguf"
    scaled.write(architecture, path, SIZE, seed=3)
    model = Model.open(path)
    tensors = model.artifact.tensors.values()
    assert abs(sum(t.nbytes for t in tensors) / SIZE - 1) < 0.1
    assert {t.type.name for t in tensors} == TYPES[architecture]
    assert inspect(model.artifact)["problems"] == []
    tokenizer = Tokenizer.from_artifact(model.artifact)
    assert tokenizer.decode(tokenizer.encode("The tide, 漢字")) == "The tide, 漢字"
    assert len(tokenizer.tokens) == model.vocabulary == 1024
    residual = []
    state = model.new_state()
    for token in (5, 900, 17):
        logits = model.step(state, token, lambda name, a: residual.append(np.std(a)) if name.startswith("h_") else None)
        assert np.isfinite(logits).all() and 0.5 < logits.std() < 2
    assert min(residual) > 0.5 and max(residual) < 4
    other = model.new_state()
    assert np.abs(model.step(other, 6) - logits).max() > 0.5  # a random model still tells its inputs apart


@pytest.mark.parametrize("architecture", sorted(scaled.SHAPES))
def test_the_seed_decides_every_byte(architecture, tmp_path):
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        scaled.write(architecture, path, SIZE, seed)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    one, other = (Artifact.open(path) for path in paths[1:])
    assert one.metadata.keys() == other.metadata.keys()
    for name, tensor in one.tensors.items():
        if name != "rope_freqs.weight":
            assert not np.array_equal(tensor.data, other.tensors[name].data), name


@pytest.mark.parametrize("size", (3e7, 3e8, 1.6e9))
@pytest.mark.parametrize("architecture", sorted(scaled.SHAPES))
def test_every_size_has_a_shape(architecture, size):
    metadata, shapes = scaled._fitting(architecture, size)
    assert abs(scaled._nbytes(architecture, shapes) / size - 1) < 0.1
    assert 6 <= metadata[f"{architecture}.block_count"] <= 64


def test_the_largest_step35_is_the_one_of_the_published_measurements():
    metadata, _ = scaled._fitting("step35", 1.6e9)
    keys = ("block_count", "embedding_length", "expert_count", "expert_used_count", "expert_feed_forward_length", "vocab_size")
    assert [metadata[f"step35.{key}"] for key in keys] == [17, 2048, 64, 8, 512, 16384]


@pytest.mark.parametrize("type", (TensorType.Q8_0, TensorType.IQ2_XXS, TensorType.Q4_K, TensorType.Q2_K))
def test_packed_blocks_are_centred_and_of_the_deviation_asked_for(type):
    values, size = quants.BLOCK[type]
    blocks = scaled.packed_blocks(type, 3000, 0.02 / scaled._spread(type), np.random.Generator(np.random.SFC64(7)))
    decoded = quants.dequantize(blocks.reshape(-1), type, (3000, values))
    assert blocks.shape == (3000, size)
    assert abs(decoded.std() / 0.02 - 1) < 0.03 and abs(decoded.mean()) < 0.0005
    assert Counter(np.sign(decoded.mean(axis=1)))[1] in range(1200, 1800)  # no block leans to one side by construction
    assert np.std(decoded.std(axis=1)) > 0.001  # scales differ


def test_what_cannot_be_scaled(tmp_path, capsys):
    path = tmp_path / "x.gguf"
    with pytest.raises(ArtifactError, match="'mimo2' cannot be scaled .those that can: deepseek4, qwen35, step35.$"):
        scaled.write("mimo2", path, SIZE)
    with pytest.raises(ArtifactError, match="smallest scaled 'step35' has [0-9]+ bytes of tensors; 1000000 were asked for$"):
        scaled.write("step35", path, 1_000_000)
    assert main(["tiny", "step35", "-o", str(path), "--scale", "lots"]) == 2
    assert capsys.readouterr().err == "ds4ref: --scale takes a size such as 300M or 1.6G, got 'lots'\n"
    assert not path.exists()


def test_the_command(tmp_path):
    path = tmp_path / "x.gguf"
    assert main(["tiny", "step35", "-o", str(path), "--scale", "8M", "--seed", "3"]) == 0
    again = tmp_path / "again.gguf"
    scaled.write("step35", again, SIZE, seed=3)
    assert path.read_bytes() == again.read_bytes()


def test_sizes_in_words():
    assert [bytes_of(text) for text in ("300M", "1.6G", "7k", "12", "2.5MB")] == [3e8, 1.6e9, 7000, 12, 2.5e6]
    for text in ("", "M", "-3M", "1e9", "3 M", "nanM"):
        with pytest.raises(UsageError):
            bytes_of(text)


def test_a_tensor_written_in_parts(tmp_path):
    """As many bytes as the shape takes, in any number of parts, or nothing is written."""
    path, data = tmp_path / "x.gguf", np.arange(68, dtype=np.uint8)
    whole = {"a": (data, TensorType.Q8_0, (2, 32)), "b": np.ones(3, np.float32)}
    gguf_writer.write(path, "toy", {}, whole)
    expected = path.read_bytes()
    gguf_writer.write(path, "toy", {}, whole | {"a": (lambda: iter((data[:5], data[5:])), TensorType.Q8_0, (2, 32))})
    assert path.read_bytes() == expected
    with pytest.raises(ValueError, match="tensor 'a': Q8_0 .2, 32. takes 68 bytes, not 67"):
        gguf_writer.write(path, "toy", {}, whole | {"a": (lambda: (data[1:],), TensorType.Q8_0, (2, 32))})
    assert path.read_bytes() == expected and list(tmp_path.iterdir()) == [path]
