"""A model's files as one logical file, and the fingerprint that tells two of them apart in milliseconds.

The logical file is the shards one after the other, each beginning on a page: zeros fill the last page of each. The
fingerprint detects mix-ups; a few bytes changed on purpose between its samples it does not see. Knows nothing of GGUF.
"""

import mmap
import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from .manifest import OwnerError

ALGORITHM = "blake2b-p16m-v1"
ENDS = 4 << 20
SAMPLE = 4096
STRIDE = 16 << 20


def page_rounded(nbytes):
    """``nbytes`` up to the next whole page."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True)
class Part:
    """One shard: its file, where it begins in the logical file, and its own size."""

    path: Path
    start: int
    nbytes: int


@dataclass(frozen=True)
class Logical:
    """The logical file of some shards. nbytes: its size, whole pages."""

    parts: tuple[Part, ...]
    nbytes: int

    @classmethod
    def of(cls, paths):
        """The logical file of ``paths`` as they are now. OwnerError where one cannot be looked at."""
        parts, start = [], 0
        for path in paths:
            try:
                size = os.stat(path).st_size
            except OSError as error:
                raise OwnerError(f"{path}: cannot be read ({error.strerror or error})") from None
            parts.append(Part(path, start, size))
            start += page_rounded(size)
        return cls(tuple(parts), start)

    def read(self, offset, nbytes):
        """Bytes [offset, offset + nbytes). OwnerError where a file has become shorter or cannot be read."""
        out = bytearray(nbytes)
        for part in self.parts:
            first, last = max(offset, part.start), min(offset + nbytes, part.start + part.nbytes)
            if first < last:
                read_into(part.path, first - part.start, memoryview(out)[first - offset : last - offset])
        return bytes(out)


def read_into(path, offset, view):
    """Fill ``view`` from byte ``offset`` of a file. OwnerError where the file ends before or cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            done = 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise OwnerError(f"{path}: ends at byte {offset + done}; it has become shorter")
                done += count
    except OSError as error:
        raise OwnerError(f"{path}: cannot be read ({error.strerror or error})") from None


def samples(size):
    """What is looked at of a logical file, in the order of the digest: (offset, bytes) pairs."""
    if size <= 2 * ENDS:
        return [(0, size)]
    return [(0, ENDS), (size - ENDS, ENDS), *((offset, SAMPLE) for offset in range(STRIDE, size - ENDS, STRIDE))]


def fingerprint(size, read):
    """``blake2b-p16m-v1``: hex of an 8-byte BLAKE2b over the size (8 bytes, little-endian) and the samples.

    read: (offset, bytes) → bytes.
    """
    digest = blake2b(size.to_bytes(8, "little"), digest_size=8)
    for offset, nbytes in samples(size):
        digest.update(read(offset, nbytes))
    return digest.hexdigest()
