"""The logical file and its fingerprint."""

import mmap
from hashlib import blake2b

import numpy as np
import pytest

from ds4server.owner.fingerprint import Logical, fingerprint, read_into, samples
from ds4server.owner.manifest import OwnerError

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def of(data):
    return fingerprint(len(data), lambda offset, nbytes: data[offset : offset + nbytes])


def test_small_files_are_hashed_whole():
    for size in (0, 1, 8 * MIB):
        data = bytes(size - 1) + b"x" if size else b""
        assert of(data) == blake2b(size.to_bytes(8, "little") + data, digest_size=8).hexdigest()


def test_large_files_are_hashed_by_ends_and_samples():
    data = np.arange(10 * MIB + 8, dtype=np.int32).tobytes()  # 40 MiB and a little
    size = len(data)
    expected = blake2b(digest_size=8)
    for part in (size.to_bytes(8, "little"), data[: 4 * MIB], data[-4 * MIB :], data[16 * MIB : 16 * MIB + 4096],
                 data[32 * MIB : 32 * MIB + 4096]):  # fmt: skip
        expected.update(part)
    assert of(data) == expected.hexdigest()


def test_samples_lie_inside_and_are_few():
    for size in (8 * MIB + 1, 16 * MIB, 20 * MIB, 20 * MIB + 1, 100 << 30):
        found = samples(size)
        assert all(offset >= 0 and offset + nbytes <= size for offset, nbytes in found)
        assert sum(nbytes for _, nbytes in found) <= 8 * MIB + 4096 * (size // (16 * MIB))


def test_a_changed_byte_is_seen_where_it_is_looked_at():
    data = bytearray(40 * MIB)
    plain = of(data)
    for at, seen in ((0, True), (4 * MIB - 1, True), (16 * MIB, True), (40 * MIB - 1, True), (16 * MIB + 4096, False)):
        data[at] = 1
        assert (of(data) != plain) is seen
        data[at] = 0


def test_shards_begin_on_pages_between_zeros(tmp_path):
    (tmp_path / "a").write_bytes(b"a" * (PAGE + 1))
    (tmp_path / "b").write_bytes(b"b" * PAGE)
    logical = Logical.of([tmp_path / "a", tmp_path / "b"])
    assert [part.start for part in logical.parts] == [0, 2 * PAGE] and logical.nbytes == 3 * PAGE
    whole = b"a" * (PAGE + 1) + bytes(PAGE - 1) + b"b" * PAGE
    assert logical.read(0, 3 * PAGE) == whole
    for offset, nbytes in ((PAGE - 3, 9), (2 * PAGE - 1, 2), (PAGE + 5, 7)):
        assert logical.read(offset, nbytes) == whole[offset : offset + nbytes]


def test_missing_and_shortened_files_are_named(tmp_path):
    path = tmp_path / "a"
    with pytest.raises(OwnerError, match="a: cannot be read .No such file"):
        Logical.of([path])
    path.write_bytes(b"abc")
    with pytest.raises(OwnerError, match="a: ends at byte 3; it has become shorter"):
        read_into(path, 1, memoryview(bytearray(4)))
