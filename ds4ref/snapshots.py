"""The bytes of a snapshot: what a bank needs to go on, in another process or on another backend.

Little-endian::

    0  "DS4P"   4 u32 version   8 u32 directory bytes   12 directory, JSON   then the blobs, each at a multiple of 64

The directory names the family, the digests of its layout and configuration, the dtype of the state, the vocabulary, the
number of tokens, and every blob {name, dtype, shape, offset, bytes, crc32}: the token ids (int32), the logits after the
last token where they are known, then the arrays of the components, ``component/array``, by name. Nothing else is in the file
and the padding is zero, so one snapshot has one encoding: what is accepted is, byte for byte, what ``encode`` would write.

Sans-IO: bytes in, arrays out. Knows nothing about weights: two models of one family and configuration have one identity, and
whoever stores snapshots of several must tell them apart.
"""

import dataclasses
import hashlib
import json
import struct
import zlib
from dataclasses import dataclass
from math import prod

import numpy as np

from .state import Snapshot, State

MAGIC = b"DS4P"
VERSION = 1
ALIGNMENT = 64
HEAD = struct.Struct("<4sII")
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("float16", "float32", "float64", "int32")}
FIELDS = {"bytes", "crc32", "dtype", "name", "offset", "shape"}
MOST_AXES = 32


class SnapshotError(ValueError):
    """The bytes are not a snapshot that this state can become; one sentence says why."""


class ForeignSnapshot(SnapshotError):
    """Not damaged as far as was read, but of another identity or a later version of the format."""


@dataclass(frozen=True)
class Identity:
    """What a snapshot and the state that it becomes must agree on."""

    family: str
    layout: str
    config: str
    dtype: str
    vocabulary: int

    @classmethod
    def of(cls, model):
        return cls(
            family=model.artifact.architecture,
            layout=layout_digest(model.layout),
            config=_digest(dataclasses.asdict(model.config)),
            dtype=np.dtype(model.dtype).name,
            vocabulary=model.vocabulary,
        )


def layout_digest(layout):
    """SHA-256, hexadecimal, over the names, kinds and shapes of the components, in order."""
    return _digest([[name, type(kind).__name__, dataclasses.asdict(kind)] for name, kind in layout.items()])


def _digest(value):
    return hashlib.sha256(_json(value)).hexdigest()


def _json(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def encode(snapshot, identity):
    """The bytes of ``snapshot``, taken of a state of that identity. ValueError for an array that the format cannot hold."""
    return b"".join(encode_parts(snapshot, identity))


def encode_parts(snapshot, identity):
    """The same bytes in several pieces, buffers that share the snapshot's memory where it lies as the format wants it."""
    blobs = _blobs(snapshot)
    directory = _directory(identity, len(snapshot.tokens), blobs)
    parts = [HEAD.pack(MAGIC, VERSION, len(directory)), directory]
    written = HEAD.size + len(directory)
    for array in blobs.values():
        parts += [bytes(_padding(written)), array.reshape(-1).view(np.uint8).data]
        written += len(parts[-2]) + array.nbytes
    return parts


def _blobs(snapshot):
    """Name → contiguous little-endian array, in the order of the file."""
    tokens = snapshot.tokens.astype(DTYPES["int32"])
    if not np.array_equal(tokens, snapshot.tokens):
        raise ValueError(f"a snapshot holds token ids below 2^31, got {snapshot.tokens.max()}")
    blobs = {"tokens": tokens} | ({} if snapshot.logits is None else {"logits": snapshot.logits})
    for component, arrays in sorted(snapshot.components.items()):
        blobs |= {f"{component}/{name}": array for name, array in sorted(arrays.items())}
    if odd := [f"{name!r} of {array.dtype}" for name, array in blobs.items() if array.dtype.name not in DTYPES]:
        raise ValueError(f"a snapshot holds arrays of {', '.join(DTYPES)}, got {odd[0]}")
    return {name: np.ascontiguousarray(array, DTYPES[array.dtype.name]) for name, array in blobs.items()}


def _directory(identity, tokens, blobs):
    """The directory's JSON. Offsets count from the first blob: the directory's own length does not change them."""
    entries, offset = [], 0
    for name, array in blobs.items():
        offset += _padding(offset)
        entries.append({
            "name": name, "dtype": array.dtype.name, "shape": list(array.shape), "offset": offset, "bytes": array.nbytes,
            "crc32": zlib.crc32(array),
        })  # fmt: skip
        offset += array.nbytes
    return _json({**dataclasses.asdict(identity), "tokens": tokens, "blobs": entries})


def _padding(offset):
    return -offset % ALIGNMENT


def decode(data, layout, identity):
    """The :class:`Snapshot` in ``data`` (bytes, or a map of a file), whose arrays are read-only views of it.

    ``layout`` and ``identity`` are those of the state that shall become it. SnapshotError for anything else than what
    ``encode`` writes for such a state. Nothing is allocated that the data does not hold.
    """
    data = memoryview(data).cast("B").toreadonly()
    text, found = _read_directory(data)
    for name, expected in dataclasses.asdict(identity).items():
        if found[name] != expected:
            raise ForeignSnapshot(f"snapshot of {name} {found[name]!r:.80}, expected {expected!r}")
    blobs = _read_blobs(data, HEAD.size + len(text), found["blobs"])
    snapshot = _assembled(blobs, identity)
    if text != _directory(identity, len(snapshot.tokens), _blobs(snapshot)):
        raise SnapshotError("snapshot directory does not describe its blobs in the one form that is written")
    try:
        State(layout, DTYPES[identity.dtype].newbyteorder("=")).restore(snapshot)
    except ValueError as error:
        raise SnapshotError(f"snapshot does not fit the layout: {error}") from None
    return snapshot


def _read_directory(data):
    """(its bytes, its fields), all of which are there; nothing is known of their types but that ``blobs`` is a list."""
    if len(data) < HEAD.size:
        raise SnapshotError(f"snapshot has {len(data)} bytes, its head alone has {HEAD.size}")
    magic, version, size = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise SnapshotError(f"snapshot begins with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise ForeignSnapshot(f"snapshot is of version {version}, this program reads {VERSION}")
    if size > len(data) - HEAD.size:
        raise SnapshotError(f"snapshot directory of {size} bytes ends beyond the {len(data)} bytes of the snapshot")
    text = bytes(data[HEAD.size : HEAD.size + size])
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise SnapshotError("snapshot directory is not JSON") from None
    names = {"tokens", "blobs", *(field.name for field in dataclasses.fields(Identity))}
    if not isinstance(found, dict) or found.keys() != names or not isinstance(found["blobs"], list):
        raise SnapshotError(f"snapshot directory is not an object of {', '.join(sorted(names))}")
    return text, found


def _read_blobs(data, at, entries):
    """Name → array, of blobs that follow each other from ``at`` to the end of the data."""
    blobs = {}
    for entry in entries:
        name, shape, dtype, nbytes = _described(entry)
        padding = _padding(at)
        if nbytes > len(data) - at - padding:
            raise SnapshotError(f"snapshot blob {name!r} of {nbytes} bytes ends beyond the {len(data)} bytes of the snapshot")
        if any(data[at : at + padding]):
            raise SnapshotError(f"snapshot has other bytes than zeros before blob {name!r}")
        at += padding
        stored = data[at : at + nbytes]
        if zlib.crc32(stored) != entry["crc32"]:
            raise SnapshotError(f"snapshot blob {name!r} does not have the checksum that its directory states")
        blobs[name] = (np.frombuffer(stored, dtype) if nbytes else np.empty(0, dtype)).reshape(shape)
        at += nbytes
    if at != len(data):
        raise SnapshotError(f"snapshot has {len(data) - at} bytes after its last blob")
    if len(blobs) != len(entries):
        raise SnapshotError("snapshot directory names a blob twice")
    return blobs


def _described(entry):
    """(name, shape, dtype, bytes) of a blob's entry, which agree with each other."""
    if not isinstance(entry, dict) or entry.keys() != FIELDS or not isinstance(entry["name"], str):
        raise SnapshotError(f"snapshot directory has an entry that is not an object of {', '.join(sorted(FIELDS))}")
    name, shape = entry["name"], entry["shape"]
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise SnapshotError(f"snapshot blob {name!r} is of dtype {entry['dtype']!r:.80}, accepted are {', '.join(DTYPES)}")
    dtype = DTYPES[entry["dtype"]]
    if not isinstance(shape, list) or len(shape) > MOST_AXES or not all(type(n) is int and 0 <= n < 2**48 for n in shape):
        raise SnapshotError(f"snapshot blob {name!r} has the shape {shape!r:.80}, which no array has")
    if entry["bytes"] != prod(shape) * dtype.itemsize:
        raise SnapshotError(f"snapshot blob {name!r} has {entry['bytes']!r:.80} bytes, its shape {shape} needs another number")
    return name, shape, dtype, prod(shape) * dtype.itemsize


def _assembled(blobs, identity):
    """The blobs as a :class:`Snapshot`, with tokens and logits of the vocabulary."""
    tokens, logits = blobs.get("tokens"), blobs.get("logits")
    if tokens is None or tokens.dtype != DTYPES["int32"] or tokens.ndim != 1:
        raise SnapshotError("snapshot has no row of token ids")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < identity.vocabulary:
        found = f"{tokens.min()} to {tokens.max()}"
        raise SnapshotError(f"snapshot has token ids from {found}, accepted are 0 to {identity.vocabulary - 1}")
    if logits is not None and (logits.dtype.name != identity.dtype or logits.shape != (identity.vocabulary,)):
        expected = f"{identity.dtype} of shape ({identity.vocabulary},)"
        raise SnapshotError(f"snapshot has logits {logits.dtype} of shape {logits.shape}, expected {expected}")
    components = {}
    for name, array in blobs.items():
        component, slash, part = name.rpartition("/")
        if slash:
            components.setdefault(component, {})[part] = _native(array)
    return Snapshot(tokens.astype(np.int64), components, None if logits is None else _native(logits))


def _native(array):
    return array.astype(array.dtype.newbyteorder("="), copy=False)
