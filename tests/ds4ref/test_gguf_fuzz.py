"""Hostile GGUF files in bulk: mutants of a small valid one give ArtifactError or a sound artifact, soon and in little memory.

The mutations are drawn from fixed seeds, so that a failure names the file that caused it.
"""

import random
import struct
import time
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest

from ds4ref.gguf import Artifact, ArtifactError, Keys
from ds4ref.gguf_writer import write
from ds4ref.quants import BLOCK, TensorType

FILES = 24_000
BATCHES = 12
SECONDS = 1.0

NUMBERS = [0, 1, 2, 3, 4, 7, 8, 9, 12, 13, 31, 32, 33, 127, 128, 142, 255, 256, 1 << 15, 1 << 16, (1 << 24) + 1]
NUMBERS += [(1 << n) + d for n in (31, 32, 61, 62, 63, 64) for d in (-32, -1, 0, 1) if (1 << n) + d < 1 << 64]


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """(bytes of a valid file with every kind of value and many tensor types, where its tensor data begins)."""
    rng = np.random.default_rng(0)
    scalars = {"u8": 1, "i8": -1, "u16": 2, "i16": -2, "u32": 3, "i32": -3, "u64": 4, "i64": -4, "f32": 0.5, "f64": 0.25}
    metadata = {f"t.{type}": (value, type) for type, value in scalars.items()}
    metadata |= {f"t.{type}s": ([value] * 3, f"array[{type}]") for type, value in scalars.items()}
    metadata |= {"general.alignment": 32, "t.bool": True, "t.bools": [True, False], "t.text": "naïve 😀"}
    metadata |= {"t.texts": ["a", "", "漢字"], "t.none": ([], "array[str]"), "split.count": (1, "u16")}
    tensors = {"plain": rng.standard_normal((2, 3)).astype(np.float32), "ids": np.arange(6, dtype=np.int32)}
    for type in (TensorType.F64, TensorType.BF16, TensorType.Q8_0, TensorType.MXFP4, TensorType.PQ2_0, TensorType.IQ1_S):
        values, size = BLOCK[type]
        tensors[type.name] = (rng.integers(0, 256, 2 * size, dtype=np.uint8), type, (2, values))
    path = tmp_path_factory.mktemp("fuzz") / "valid.gguf"
    write(path, "toy", metadata, tensors)
    data = path.read_bytes()
    assert len(Artifact.from_bytes(data).tensors) == 8
    return data, len(data) - sum(-(-t.nbytes // 32) * 32 for t in Artifact.from_bytes(data).tensors.values())


def mutate(valid, rng):
    """One to four changes to a valid file, most of them in its header."""
    data, start = valid
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        at = rng.randrange(min(start, len(data)) or 1)
        match rng.randrange(9):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                data[at : at + 1] = bytes([(data[at] if at < len(data) else 0) ^ 1 << rng.randrange(8)])
            case 2:
                data[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
            case 3:
                data[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)
            case 4:
                del data[rng.randrange(len(data) + 1) :]
            case 5:
                del data[at : at + rng.randrange(1, 40)]
            case 6:
                source = rng.randrange(len(data) + 1)
                data[at:at] = data[source : source + rng.randrange(1, 60)]
            case 7:
                source, size = rng.randrange(len(data) + 1), rng.randrange(1, 60)
                data[at : at + size] = data[source : source + size]
            case 8:
                field = rng.choice(fields(data))
                data[field : field + 8] = struct.pack("<Q", rng.choice(NUMBERS) if rng.random() < 0.7 else rng.randrange(2000))
    return bytes(data)


def fields(data):
    """Where the 64-bit counts and lengths of a (possibly damaged) file seem to be: small little-endian numbers."""
    zeros = bytes(6)
    return [8, 16, *(at for at in range(24, len(data) - 8) if data[at + 2 : at + 8] == zeros and any(data[at : at + 2]))]


def touch(artifact, limit):
    """Use everything a sound artifact offers; every tensor lies inside the file and decodes."""
    for name, tensor in artifact.tensors.items():
        assert 0 < tensor.nbytes <= limit and tensor.data.size == tensor.nbytes and name == tensor.name
        whole = tensor.dequantize()
        assert whole.shape == tensor.shape
        tensor.slice(tensor.shape[0] - 1)
    keys = Keys(artifact)
    for key in artifact.metadata:
        for get in (keys.int, keys.float, keys.bool, keys.str, keys.ints, keys.floats, keys.bools, keys.strs):
            try:
                get(key)
            except ArtifactError as error:
                assert len(str(error)) < 1000
    with suppress(ArtifactError):
        assert isinstance(artifact.architecture, str)


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.filterwarnings("error")
def test_mutants(valid, batch):
    sound = 0
    for number in range(FILES // BATCHES):
        data = mutate(valid, random.Random(f"{batch}/{number}"))
        begin = time.process_time()
        try:
            artifact = Artifact.from_bytes(data)
        except ArtifactError as error:
            assert str(error).startswith("memory: ") and "\n" not in str(error) and len(str(error)) < 1000
            continue
        finally:
            assert time.process_time() - begin < SECONDS, (batch, number)
        sound += 1
        touch(artifact, len(data))
    assert 0.02 < sound / (FILES // BATCHES) < 0.9  # both outcomes are exercised


def test_mutants_take_little_memory(valid):
    """Reading allocates no more than a few times the file, whatever numbers it claims."""
    Artifact.from_bytes(valid[0])
    tracemalloc.start()
    try:
        for number in range(1000):
            data = mutate(valid, random.Random(f"memory/{number}"))
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with suppress(ArtifactError):
                Artifact.from_bytes(data)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 16 * len(data) + 65536, number
    finally:
        tracemalloc.stop()


def test_mutants_among_shards(valid, tmp_path):
    """Mapped files, one of two shards mutated: errors name the files, and what opens is sound."""
    metadata = {"split.count": (2, "u16"), "split.tensors.count": 10, "t.texts": ["a", "b"], "t.reals": [0.5, 1.5]}
    paths = [tmp_path / f"m-0000{n + 1}-of-00002.gguf" for n in range(2)]
    for n, path in enumerate(paths):
        tensors = {f"{n}.{name}": np.ones((2, name), np.float32) for name in range(1, 6)}
        write(path, "toy" if n == 0 else None, metadata | {"split.no": (n, "u16")}, tensors)
    assert len(Artifact.open(paths[0]).tensors) == 10
    whole = [path.read_bytes() for path in paths]
    for number in range(1000):
        path, data = paths[number % 2], whole[number % 2]
        path.unlink()
        path.write_bytes(mutate((data, len(data) - 160), random.Random(f"shards/{number}")))
        try:
            with Artifact.open(paths[0]) as artifact:
                touch(artifact, artifact.nbytes)
        except ArtifactError as error:
            assert "m-0000" in str(error) and "\n" not in str(error)
        path.unlink()
        path.write_bytes(data)


def key(name, type, data):
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", type) + data


def file(keys=(), infos=(), data=b""):
    return b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys)) + b"".join([*keys, *infos]) + data


WORST = {
    "strings": lambda: file([key(b"k", 9, struct.pack("<IQ", 8, 1 << 20) + (struct.pack("<Q", 3) + b"a\xc3\xa9") * (1 << 20))]),
    "keys": lambda: file([key(b"%x" % n, 0, b"\0") for n in range(1 << 16)]),
    "long keys": lambda: file([key(b"%4x" % n + b"\xc3\xa9" * 32000, 0, b"\0") for n in range(900)]),
    "arrays": lambda: file([key(b"%x" % n, 9, struct.pack("<IQ", 7, 9) + b"\1" * 9) for n in range(1 << 16)]),
    "bools": lambda: file([key(b"k", 9, struct.pack("<IQ", 7, 60 << 20) + b"\1" * (60 << 20))]),
    "text": lambda: file([key(b"k", 8, struct.pack("<Q", 60 << 20) + "漢".encode() * (20 << 20))]),
    "tensors": lambda: file(
        (),
        [struct.pack("<Q", 5) + b"%05x" % n + struct.pack("<IQIQ", 1, 8, 0, n * 32) for n in range(1 << 16)],
        bytes((32 << 16) + 32),
    ),
}


@pytest.mark.parametrize("kind", WORST)
def test_files_at_the_limits(kind):
    """The largest files that are still accepted are read in a second of processor time."""
    data = WORST[kind]()
    took = []
    for _ in range(2):
        begin = time.process_time()
        artifact = Artifact.from_bytes(data)
        took.append(time.process_time() - begin)
    assert min(took) < SECONDS and (artifact.metadata or artifact.tensors)


def test_a_real_vocabulary_is_read_at_once(tmp_path):
    """130,000 tokens and 128,000 merges with their scores and types."""
    tokens = [f"Ġtoken{n}é" for n in range(130_000)]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [f"Ġto ken{n}" for n in range(128_000)],
        "tokenizer.ggml.scores": np.zeros(130_000, np.float32),
        "tokenizer.ggml.token_type": np.ones(130_000, np.int32),
    }
    write(tmp_path / "m.gguf", "toy", metadata, {})
    begin = time.process_time()
    artifact = Artifact.open(tmp_path / "m.gguf")
    assert time.process_time() - begin < SECONDS
    assert artifact.metadata["tokenizer.ggml.tokens"] == tokens
