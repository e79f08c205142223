"""The artifact reader: real files against the gguf library, hostile ones, split ones, typed keys, the writer."""

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from ds4ref import gguf as artifacts
from ds4ref.gguf import Artifact, ArtifactError, Keys
from ds4ref.gguf_writer import write
from ds4ref.quants import TensorType

SHARED = Path(os.environ.get("DS4_SHARED", Path(__file__).parents[3] / "shared")) / "oracle"
GOLDEN = Path(__file__).parents[2] / "golden"
REAL = sorted(GOLDEN.glob("**/*.gguf")) + sorted(SHARED.glob("**/*.gguf"))


# A file by hand, piece by piece, so that a test can lie in any of them.


def text(value):
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name, type, data):
    return text(name) + struct.pack("<I", type) + data


def info(name="a", shape=(4,), type=0, offset=0, dims=None):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", dims or len(shape), *shape, type, offset)


def gguf_file(keys=(), infos=(), data=b"", *, version=3, n_keys=None, n_tensors=None, magic=b"GGUF", alignment=32):
    n_keys = len(keys) if n_keys is None else n_keys
    n_tensors = len(infos) if n_tensors is None else n_tensors
    header = magic + struct.pack("<IQQ", version, n_tensors, n_keys) + b"".join([*keys, *infos])
    return header + bytes(-len(header) % alignment) + data


def refuse(contents, *words):
    """Reading ``contents`` fails with one sentence that holds all ``words``."""
    with pytest.raises(ArtifactError) as caught:
        Artifact.from_bytes(contents, "model.gguf")
    message = str(caught.value)
    assert message.startswith("model.gguf: ") and "\n" not in message and len(message) < 700
    assert not [word for word in words if word not in message], message


# Real files


@pytest.mark.skipif(not REAL, reason="neither golden/ nor the shared oracle folder has a GGUF")
@pytest.mark.parametrize("path", REAL, ids=lambda path: "-".join(path.parts[-3:]))
def test_matches_the_gguf_library(path):
    with Artifact.open(path) as ours:
        try:
            theirs = gguf.GGUFReader(path)
        except ValueError as error:
            assert "142" in str(error)  # PQ2_0, which the library does not know
            assert any(t.type is TensorType.PQ2_0 for t in ours.tensors.values())
            assert all(np.isfinite(t.dequantize()).all() for t in ours.tensors.values())
            return
        assert list(ours.tensors) == [t.name for t in theirs.tensors]
        for tensor in theirs.tensors:
            mine = ours.tensors[tensor.name]
            assert mine.shape == tuple(int(n) for n in reversed(tensor.shape)) and mine.type == tensor.tensor_type
            assert mine.nbytes == tensor.n_bytes and np.array_equal(mine.data, tensor.data.reshape(-1).view(np.uint8))
            assert not mine.data.flags.writeable
        fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
        assert list(ours.metadata) == list(fields)
        for name, field in fields.items():
            value, expected = ours.metadata[name], field.contents()
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected, name
        assert ours.nbytes == path.stat().st_size and ours.shards == (path,)


# The writer, and what it wrote read back

METADATA = {
    "t.u8": (200, "u8"), "t.i8": (-5, "i8"), "t.u16": (60000, "u16"), "t.i16": (-300, "i16"),
    "t.u32": 7, "t.i32": -7, "t.u64": 1 << 63, "t.i64": (-1 << 40, "i64"), "t.f32": 0.1, "t.f64": (0.1, "f64"),
    "t.true": True, "t.false": False, "t.text": "naïve 😀\0", "t.empty": "",
    "t.texts": ["a", "", "漢字"], "t.none": ([], "array[str]"), "t.bools": [True, False], "t.ints": [1, -2],
    "t.reals": [0.5, 2], "t.nothing": ([], "array[f32]"), "t.bytes": np.arange(5, dtype=np.uint8),
    "t.longs": np.array([1 << 63], np.uint64), "t.doubles": np.array([1e300]),
}  # fmt: skip
TENSORS = {
    "plain": np.arange(12, dtype=np.float32).reshape(2, 3, 2),
    "half": np.ones(5, np.float16),
    "table": np.arange(6, dtype=np.int32).reshape(3, 2),
    "packed": (np.arange(68, dtype=np.uint8), TensorType.PQ2_0, (2, 128)),
}


def test_round_trip(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, "toy", METADATA, TENSORS)
    artifact = Artifact.open(path)
    assert artifact.architecture == "toy" and artifact.types["general.architecture"] == "str"
    for name, given in METADATA.items():
        value, type = given if isinstance(given, tuple) else (given, None)
        stored = artifact.metadata[name]
        assert type is None or artifact.types[name] == type
        if isinstance(value, float) and artifact.types[name] == "f32":
            value = float(np.float32(value))
        assert (stored.tolist() if isinstance(stored, np.ndarray) else stored) == (
            value.tolist() if isinstance(value, np.ndarray) else value
        ), name
    assert artifact.types["t.bytes"] == "array[u8]" and artifact.types["t.ints"] == "array[i32]"
    assert artifact.metadata["t.bools"].dtype == bool and artifact.types["t.u64"] == "u64"
    assert list(artifact.tensors) == list(TENSORS)
    for name in ("plain", "half", "table"):
        assert np.array_equal(artifact.tensors[name].dequantize(), TENSORS[name])
    assert artifact.tensors["packed"].type is TensorType.PQ2_0 and artifact.tensors["packed"].shape == (2, 128)
    assert np.array_equal(artifact.tensors["packed"].data, TENSORS["packed"][0])
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_the_library_reads_what_we_write(tmp_path):
    path = tmp_path / "m.gguf"
    tensors = {name: tensor for name, tensor in TENSORS.items() if name != "packed"}
    write(path, "toy", {"general.alignment": 64, "t.texts": ["a", "b"], "t.real": 0.5}, tensors)
    reader = gguf.GGUFReader(path)
    assert reader.fields["t.texts"].contents() == ["a", "b"] and reader.fields["t.real"].contents() == 0.5
    for tensor in reader.tensors:
        assert tensor.data_offset % 64 == 0 and np.array_equal(tensor.data, tensors[tensor.name])
    assert np.array_equal(Artifact.open(path).tensors["table"].dequantize(), tensors["table"])


@pytest.mark.parametrize(
    "value",
    [(1 << 40, "u32"), (1.5, "i32"), (-1, "u8"), ([1, "a"], "array[i32]"), ({}, "str"), (3, "u128"), ([2], "array[bool]")],
)
def test_the_writer_refuses_what_does_not_fit(tmp_path, value):
    with pytest.raises(ValueError, match="'t.x'.* cannot be stored as"):
        write(tmp_path / "m.gguf", "toy", {"t.x": value}, {})
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, "old", {}, {})
    with pytest.raises(ValueError, match="takes 34 bytes, not 33"):
        write(path, "new", {}, {"a": (np.zeros(33, np.uint8), TensorType.Q8_0, (32,))})
    assert Artifact.open(path).architecture == "old"


def test_tensors_outlive_the_artifact(tmp_path):
    write(tmp_path / "m.gguf", "toy", {}, TENSORS)
    with Artifact.open(tmp_path / "m.gguf") as artifact:
        plain = artifact.tensors["plain"].dequantize()
    assert not artifact.tensors and np.array_equal(plain, TENSORS["plain"]) and not plain.flags.writeable


# What is no GGUF file at all


def test_unreadable_paths(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty.gguf").touch()
    for name, words in {
        "absent.gguf": "no such file", "": "a folder", "pipe": "not a regular file", "empty.gguf": "is empty",
        "a\0b": "is no file name", "x" * 300: "cannot be read",
    }.items():  # fmt: skip
        with pytest.raises(ArtifactError, match=words):
            Artifact.open(tmp_path / name)


def test_versions():
    for version in (2, 3):
        assert Artifact.from_bytes(gguf_file(version=version)).tensors == {}
    refuse(gguf_file(magic=b"GGML"), "GGML", "no GGUF file")
    refuse(gguf_file(version=1), "version 1", "versions 2 and 3")
    refuse(gguf_file(version=4), "version 4")
    refuse(gguf_file(version=3 << 24), "big-endian")
    for size in range(24):
        refuse(gguf_file()[:size])


# Lies in the metadata


def test_counts_that_cannot_be():
    refuse(gguf_file(n_keys=1 << 63), "9223372036854775808 metadata keys", "at most 0")
    refuse(gguf_file(n_tensors=1 << 60), "tensors", "at most 0")
    refuse(gguf_file([key("a", 0, b"\0")], n_keys=2, data=bytes(64)), "key 1", "0 bytes")
    refuse(gguf_file([key("a", 8, struct.pack("<Q", 1 << 62) + b"abc")]), "key 'a'", "needs 4611686018427387904 bytes")
    refuse(gguf_file([struct.pack("<Q", 1 << 40) + bytes(32)]), "key 0", "1099511627776 bytes", "1 to 65535")
    refuse(gguf_file([key("a", 9, struct.pack("<IQ", 6, 1 << 61))]), "key 'a'", "needs 9223372036854775808 bytes")
    refuse(gguf_file([key("a", 9, struct.pack("<IQ", 8, 1 << 61))]), "key 'a'", "2305843009213693952 strings")
    refuse(gguf_file([key("a", 9, struct.pack("<IQ", 8, 2) + text("x") + struct.pack("<Q", 99))]), "'a'", "string 1 of 2")


@pytest.mark.parametrize(
    "limit, value, words",
    [
        ("MAX_KEYS", 1, "declares 2 metadata keys"),
        ("MAX_TENSORS", 0, "declares 1 tensors"),
        ("MAX_STRINGS", 3, "key 'b' brings the strings in arrays to 4; 3 are accepted"),
        ("HEADER_BYTES", 70, "key 1 needs 8 bytes from byte 67, but a header must end at 70"),
    ],
)
def test_limits(monkeypatch, limit, value, words):
    strings = [key(name, 9, struct.pack("<IQ", 8, 2) + text("x") + text("y")) for name in "ab"]
    contents = gguf_file(strings, [info()], bytes(32))
    assert list(Artifact.from_bytes(contents).tensors) == ["a"]
    monkeypatch.setattr(artifacts, limit, value)
    refuse(contents, words)


def test_values_of_no_type():
    refuse(gguf_file([key("a", 13, bytes(8))]), "key 'a'", "unknown value type 13")
    refuse(gguf_file([key("a", 9, struct.pack("<IQ", 99, 1) + b"x")]), "key 'a'", "unknown value type 99")
    refuse(gguf_file([key("a", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 0, 1) + b"x")]), "'a'", "array of arrays")
    refuse(gguf_file([key("a", 7, b"\2")]), "key 'a'", "a bool of 2")
    refuse(gguf_file([key("a", 9, struct.pack("<IQ", 7, 3) + b"\0\1\7")]), "key 'a'", "a bool of 7")


def test_text_that_is_none():
    bad = b"a\xff"
    refuse(gguf_file([key(bad, 0, b"\0")]), "key 0", "not UTF-8")
    refuse(gguf_file([key("a", 8, text(bad))]), "key 'a'", "not UTF-8")
    refuse(gguf_file([key("a", 9, struct.pack("<IQ", 8, 2) + text("x") + text(bad))]), "'a'", "not UTF-8", "string 1")
    refuse(gguf_file([key("a", 8, text(b"\xed\xa0\x80"))]), "key 'a'", "not UTF-8")
    refuse(gguf_file([key("", 0, b"\0")]), "key 0", "0 bytes")
    refuse(gguf_file(infos=[info(bad)], data=bytes(32)), "tensor 0", "not UTF-8")


def test_names_are_unique():
    refuse(gguf_file([key("a", 0, b"\0"), key("a", 0, b"\1")]), "key 'a'", "twice")
    refuse(gguf_file(infos=[info("t"), info("t", offset=32)], data=bytes(64)), "tensor 't'", "twice")


def test_long_names_do_not_flood_the_message():
    refuse(gguf_file([key("k" * 60000, 99, b"\0")]), "kkk", "unknown value type")
    refuse(gguf_file(infos=[info("t" * 128)], data=bytes(32)), "tensor 0", "128 bytes", "1 to 127")


def test_alignment():
    def aligned(type, data):
        return gguf_file([key("general.alignment", type, data)], [info()], bytes(256), alignment=256)

    assert Artifact.from_bytes(aligned(4, struct.pack("<I", 256))).tensors["a"].nbytes == 16
    for value in (0, 1, 4, 24, 33):
        refuse(aligned(4, struct.pack("<I", value)), "general.alignment", str(value), "power of two")
    refuse(aligned(4, struct.pack("<I", 1 << 31)), "tensor 'a'", "ends at byte")
    refuse(aligned(10, struct.pack("<Q", 32)), "general.alignment", "u64", "u32")
    refuse(aligned(8, text("32")), "general.alignment", "str", "u32")


# Lies in the tensor directory


def test_shapes_that_cannot_be():
    huge = (1 << 63, 1 << 63, 1 << 63)
    refuse(gguf_file(infos=[info(shape=huge)], data=bytes(64)), "tensor 'a'", "ends at byte")
    refuse(gguf_file(infos=[info(shape=(1 << 32, 1 << 32))], data=bytes(64)), "tensor 'a'", "ends at byte")
    refuse(gguf_file(infos=[info(shape=(4, 0))], data=bytes(64)), "tensor 'a'", "[0, 4]", "at least 1")
    refuse(gguf_file(infos=[text("a") + bytes(28)], data=bytes(64)), "tensor 'a'", "0 dimensions", "1 to 8")
    refuse(gguf_file(infos=[info(dims=9)], data=bytes(64)), "tensor 'a'", "9 dimensions")
    refuse(gguf_file(infos=[info(dims=(1 << 32) - 1)], data=bytes(64)), "tensor 'a'", "4294967295 dimensions")
    refuse(gguf_file(infos=[info(shape=(48,), type=2)], data=bytes(64)), "tensor 'a'", "48", "Q4_0", "multiple of 32")


def test_unknown_tensor_types():
    for id in (4, 5, 9, 31, 42, 143, 1 << 31):
        refuse(gguf_file(infos=[info(type=id)], data=bytes(64)), "tensor 'a'", f"type id {id} ", "F32 0", "PQ2_0 142")


def test_data_that_is_not_there():
    whole = gguf_file(infos=[info(), info("b", offset=32)], data=bytes(48))
    assert Artifact.from_bytes(whole).tensors["b"].nbytes == 16
    for size in range(len(whole)):
        refuse(whole[:size])
    refuse(whole[:-1], "tensor 'b'", "ends at byte", f"only {len(whole) - 1} bytes")
    refuse(gguf_file(infos=[info(offset=16)], data=bytes(64)), "tensor 'a'", "offset 16", "alignment 32")
    refuse(gguf_file(infos=[info(offset=1 << 63)], data=bytes(64)), "tensor 'a'", "ends at byte")
    refuse(gguf_file(infos=[info(offset=(1 << 64) - 32)], data=bytes(64)), "tensor 'a'", "ends at byte")


def test_overlap():
    refuse(gguf_file(infos=[info(), info("b")], data=bytes(64)), "'a'", "'b'", "overlap")
    refuse(gguf_file(infos=[info("b", (2,), offset=32), info("a", (16,))], data=bytes(96)), "'a'", "'b'", "overlap")


# Split files


def split(folder, parts, stem="m", total=None, **changes):
    """Write shards holding ``parts`` (name → array each); ``changes``: shard number → its keys that differ."""
    total = sum(map(len, parts)) if total is None else total
    for number, tensors in enumerate(parts):
        keys = {"split.no": (number, "u16"), "split.count": (len(parts), "u16"), "split.tensors.count": (total, "i32")}
        keys |= {"toy.x": 1} if number == 0 else {}
        keys |= changes.get(f"shard{number}", {})
        path = folder / f"{stem}-{number + 1:05}-of-{len(parts):05}.gguf"
        write(path, "toy" if number == 0 else None, keys, tensors)
    return folder / f"{stem}-00001-of-{len(parts):05}.gguf"


A, B = {"a": np.arange(4, dtype=np.float32)}, {"b": np.arange(3, dtype=np.int32)}


def test_split_files_are_one_artifact(tmp_path):
    for parts in ([A, B], [{}, A, B]):
        path = split(tmp_path, parts)
        artifact = Artifact.open(path)
        assert artifact.architecture == "toy" and artifact.metadata["toy.x"] == 1
        assert list(artifact.tensors) == ["a", "b"] and artifact.path == path and len(artifact.shards) == len(parts)
        assert [t.shard for t in artifact.tensors.values()] == [len(parts) - 2, len(parts) - 1]
        assert np.array_equal(artifact.tensors["b"].dequantize(), B["b"])
        assert artifact.nbytes == sum(p.stat().st_size for p in artifact.shards)


def refuse_path(path, *words):
    with pytest.raises(ArtifactError) as caught:
        Artifact.open(path)
    assert not [word for word in words if word not in str(caught.value)], caught.value


def test_split_files_that_do_not_belong_together(tmp_path):
    path = split(tmp_path, [A, B], "later")
    refuse_path(tmp_path / "later-00002-of-00002.gguf", "shard 2 of 2", "open the first one, later-00001-of-00002.gguf")
    (tmp_path / "later-00002-of-00002.gguf").unlink()
    refuse_path(path, "later-00002-of-00002.gguf", "no such file")
    refuse_path(path.rename(tmp_path / "alone.gguf"), "alone.gguf", "shard 1 of 2", "-00001-of-00002.gguf")
    refuse_path(split(tmp_path, [A, A], "twice"), "twice-00002", "tensor 'a'", "already in twice-00001-of-00002.gguf")
    refuse_path(split(tmp_path, [A, B], "total", total=3), "total-00001", "split.tensors.count is 3", "hold 2")
    refuse_path(split(tmp_path, [A, B], "no", shard1={"split.no": 2}), "no-00002", "2 and 2; 1 and 2 are expected")
    refuse_path(split(tmp_path, [A, B], "key", shard1={"toy.x": 2}), "key-00002", "'toy.x'", "differs")
    refuse_path(split(tmp_path, [A, B], "more", shard1={"toy.y": 2}), "more-00002", "'toy.y'", "not in the first")
    refuse_path(split(tmp_path, [A, B], "many", shard0={"split.count": 3}), "shard 1 of 2 by its name", "1 of 3")
    refuse_path(split(tmp_path, [A, B], "odd", shard0={"split.count": "2"}), "'split.count' is '2'", "an integer")
    write(tmp_path / "bare-00001-of-00002.gguf", "toy", {}, A)
    refuse_path(tmp_path / "bare-00001-of-00002.gguf", "shard 1 of 2 by its name", "1 of 1 by split.no")


def test_one_of_one_is_a_whole_file(tmp_path):
    assert list(Artifact.open(split(tmp_path, [A])).tensors) == ["a"]
    write(tmp_path / "merged.gguf", "toy", {"split.count": (0, "u16")}, A)
    assert list(Artifact.open(tmp_path / "merged.gguf").tensors) == ["a"]


# Typed keys


@pytest.fixture
def keys(tmp_path):
    write(tmp_path / "m.gguf", "toy", {f"toy.{name[2:]}": value for name, value in METADATA.items()}, {})
    return Keys(Artifact.open(tmp_path / "m.gguf"), "toy.")


def test_keys_give_python_values(keys):
    for name in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"):
        assert type(keys.int(name)) is int
    assert keys.float("f32") == float(np.float32(0.1)) and keys.float("f64") == 0.1 and keys.float("u8") == 200.0
    assert keys.bool("true") is True and keys.str("text") == "naïve 😀\0"
    assert keys.ints("ints") == (1, -2) and keys.ints("longs") == (1 << 63,) and keys.floats("reals") == (0.5, 2.0)
    assert keys.bools("bools", n=2) == (True, False) and keys.strs("texts") == ("a", "", "漢字")
    assert keys.ints("bytes", n=3, at_least=True) == (0, 1, 2, 3, 4)
    assert keys.has("u8") and not keys.has("u9")


def test_defaults_stand_only_for_absent_keys(keys):
    assert keys.int("none.such", default=None, lo=1) is None and keys.floats("none.such", n=2, default=()) == ()
    assert keys.str("none.such", default="x", choices=("y",)) == "x"
    with pytest.raises(ArtifactError, match="'toy.text'"):
        keys.int("text", default=3)


@pytest.mark.parametrize(
    "ask, words",
    [
        (lambda k: k.int("none.such", lo=1, hi=9), "'toy.none.such' is missing; expected an integer from 1 up to 9"),
        (lambda k: k.int("f32"), "'toy.f32' is 0.1"),
        (lambda k: k.int("true"), "'toy.true' is True; expected an integer"),
        (lambda k: k.int("u32", lo=8), "'toy.u32' is 7; expected an integer from 8"),
        (lambda k: k.int("u32", hi=6), "'toy.u32' is 7; expected an integer up to 6"),
        (lambda k: k.int("ints"), "'toy.ints' is an array of 2 int32s"),
        (lambda k: k.float("text"), "'toy.text' is 'naïve"),
        (lambda k: k.bool("u32"), "'toy.u32' is 7; expected a bool"),
        (lambda k: k.str("text", choices=("yarn", "none")), "expected 'yarn' or 'none'"),
        (lambda k: k.ints("ints", n=3), "an array of 2 int32s; expected an array of 3 integers"),
        (lambda k: k.ints("ints", n=3, at_least=True), "expected an array of 3 or more integers"),
        (lambda k: k.ints("ints", lo=0), "'toy.ints' holds -2 at 1; expected an array of integers from 0"),
        (lambda k: k.ints("reals"), "'toy.reals' holds 0.5 at 0"),
        (lambda k: k.ints("u32"), "'toy.u32' is 7; expected an array of integers"),
        (lambda k: k.floats("texts"), "'toy.texts' holds 'a' at 0"),
        (lambda k: k.bools("bytes"), "'toy.bytes' holds 0 at 0; expected an array of bools"),
    ],
)
def test_keys_say_what_is_wrong(keys, ask, words):
    with pytest.raises(ArtifactError) as caught:
        ask(keys)
    assert str(caught.value).startswith("m.gguf: key ") and words in str(caught.value), caught.value


def test_infinite_numbers_are_refused(tmp_path):
    write(tmp_path / "m.gguf", "toy", {"a": float("nan"), "b": [1.0, float("inf")]}, {})
    keys = Keys(Artifact.open(tmp_path / "m.gguf"))
    for ask in (lambda: keys.float("a"), lambda: keys.floats("b")):
        with pytest.raises(ArtifactError, match="finite number"):
            ask()


def test_prefixes_are_alternatives(tmp_path):
    write(tmp_path / "m.gguf", "toy", {"toy-x.a": 1, "toyx.b": 2}, {})
    artifact = Artifact.open(tmp_path / "m.gguf")
    keys = Keys(artifact, ("toyx.", "toy-x."))
    assert keys.int("a") == 1 and keys.int("b") == 2
    with pytest.raises(ArtifactError, match="'toyx.c' is missing"):
        keys.int("c")
    assert Keys(artifact).str("general.architecture") == "toy"
    assert str(keys.error("a", 1, "an even number")) == "m.gguf: key 'toy-x.a' is 1; expected an even number"


def test_no_architecture():
    with pytest.raises(ArtifactError, match="memory: key 'general.architecture' is missing"):
        _ = Artifact.from_bytes(gguf_file()).architecture
