"""GGUF files: one Artifact over all shards, its metadata typed, its tensors lazy views of the mapped files.

The format is the GGUF specification of the ggml project, versions 2 and 3, little-endian: magic, version, number of
tensors, number of metadata keys, the keys, one info per tensor, padding, tensor data. Numbers in a file are claims; each
is checked against the real size before anything is read or allocated for it. Knows nothing about architectures.

Limits, so that no file takes more than a second or more memory than a small multiple of its header: HEADER_BYTES before
the tensor data, MAX_KEYS keys, MAX_STRINGS strings in arrays, MAX_TENSORS tensors, per shard. Arrays of arrays are
refused.
"""

import copy
import math
import mmap
import operator
import os
import re
import stat
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from . import quants
from .quants import BLOCK, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
HEADER_BYTES = 64 << 20
MAX_KEYS = 1 << 16
MAX_STRINGS = 1 << 20
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 127
MAX_DIMS = 8
LEAST_KEY_BYTES = 14  # length, one character, type, one-byte value
LEAST_TENSOR_BYTES = 33  # length, one character, number of dimensions, one dimension, type, offset

# Value type ids of the specification. Strings and arrays are built from these.
NUMBERS = {
    0: ("u8", np.dtype("u1")),
    1: ("i8", np.dtype("i1")),
    2: ("u16", np.dtype("<u2")),
    3: ("i16", np.dtype("<i2")),
    4: ("u32", np.dtype("<u4")),
    5: ("i32", np.dtype("<i4")),
    6: ("f32", np.dtype("<f4")),
    7: ("bool", np.dtype("?")),
    10: ("u64", np.dtype("<u8")),
    11: ("i64", np.dtype("<i8")),
    12: ("f64", np.dtype("<f8")),
}
STRING, ARRAY = 8, 9
IDS = {name: (id, dtype) for id, (name, dtype) in NUMBERS.items()}
SHARD_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
KNOWN = {type.value: type for type in TensorType}
REQUIRED = object()

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class ArtifactError(ValueError):
    """What is wrong with a file, in one sentence. Nothing else is raised for anything a file holds."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor of a file. ``shape`` is in numpy order; ``data`` a read-only uint8 view of the file's map, which begins at
    byte ``offset`` of the file of shard ``shard``."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    data: np.ndarray
    shard: int = 0
    offset: int = 0

    @property
    def nbytes(self):
        """Bytes in the file."""
        return self.data.size

    def dequantize(self, dtype=np.float32):
        """All values, of ``shape``; see :func:`quants.dequantize`."""
        return quants.dequantize(self.data, self.type, self.shape, dtype)

    def slice(self, index, dtype=np.float32):
        """Entry ``index`` along the first axis, ``dequantize()[index]``, decoding no more than it takes.

        IndexError outside 0 … shape[0] − 1.
        """
        index = operator.index(index)
        if not 0 <= index < self.shape[0]:
            raise IndexError(f"tensor {self.name!r} has {self.shape[0]} entries, there is no entry {index}")
        if len(self.shape) == 1:
            values, size = BLOCK[self.type]
            block, within = divmod(index, values)
            return quants.dequantize(self.data[block * size : (block + 1) * size], self.type, (values,), dtype)[within]
        size = self.nbytes // self.shape[0]
        return quants.dequantize(self.data[index * size : (index + 1) * size], self.type, self.shape[1:], dtype)


@dataclass(frozen=True)
class Contents:
    """What one file holds, before shards are put together."""

    path: Path
    nbytes: int
    metadata: dict
    types: dict
    tensors: dict


class Artifact:
    """A model file, or all shards of a split one.

    path: the (first) file; shards: every file; nbytes: their sizes summed; metadata: key → bool, int, float, str, numpy
    array (numbers, bools) or list of str; types: key → the type's name ("u32", "array[str]"); tensors: name →
    Tensor.
    """

    def __init__(self, files):
        """``files``: the Contents of every shard, the first one first. ArtifactError where they do not belong together."""
        first = files[0]
        self.path = first.path
        self.shards = tuple(file.path for file in files)
        self.nbytes = sum(file.nbytes for file in files)
        self.metadata, self.types, self.tensors = dict(first.metadata), dict(first.types), dict(first.tensors)
        for number, file in enumerate(files[1:], 1):
            _check_sibling(first, file, number, len(files))
            for name, tensor in file.tensors.items():
                if name in self.tensors:
                    other = self.shards[self.tensors[name].shard].name
                    raise ArtifactError(f"{file.path.name}: tensor {name!r} is already in {other}")
                self.tensors[name] = tensor
        declared = Keys(first, "split.").int("tensors.count", default=None) if len(files) > 1 else None
        if declared not in (None, len(self.tensors)):
            raise ArtifactError(
                f"{self.path.name}: split.tensors.count is {declared}, but the {len(files)} shards hold {len(self.tensors)}"
            )

    @classmethod
    def open(cls, path):
        """Map a file; for ``X-00001-of-000NN.gguf`` its siblings too.

        ArtifactError for anything that is wrong with the files, a missing or unreadable one included.
        """
        first = _load(Path(path), 0)
        count = _shard_count(first)
        return cls([first, *(_load(_sibling(first.path, number), number) for number in range(1, count))])

    @classmethod
    def from_bytes(cls, data, name="memory"):
        """The artifact that one file's bytes hold, ``name`` standing for the file's. ArtifactError as :meth:`open`."""
        file = parse(bytes(data), Path(name))
        if _shard_count(file) > 1:
            raise ArtifactError(f"{name}: is the first of several shards; only a whole file can be read from memory")
        return cls([file])

    @property
    def architecture(self):
        """``general.architecture``. ArtifactError without it."""
        return Keys(self, "").str("general.architecture")

    def with_data(self, data):
        """The same artifact with its tensors' bytes elsewhere: ``data`` maps every name to uint8 [nbytes].

        This artifact stays as it is; closed, it lets its files go, of which the new one maps nothing.
        ValueError where bytes are missing or of another length.
        """
        other = copy.copy(self)
        other.tensors = {}
        for name, tensor in self.tensors.items():
            found = data[name].size if name in data else 0
            if found != tensor.nbytes:
                raise ValueError(f"{self.path.name}: tensor {name!r} needs {tensor.nbytes} bytes of data, got {found}")
            other.tensors[name] = replace(tensor, data=data[name])
        return other

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Let the tensors go. A file's map ends with the last array that views it."""
        self.tensors = {}


def _load(path, number):
    """Map and parse one file."""
    try:
        with open(path, "rb", opener=_open_regular) as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ArtifactError(f"{path}: the file is empty; a GGUF file is expected")
            contents = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file") from None
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ArtifactError:
        raise
    except ValueError as error:
        raise ArtifactError(f"{str(path)!r} is no file name ({error})") from None
    return parse(contents, path, number)


def _open_regular(path, flags):
    """Open without waiting for the other end of a pipe; OSError unless it is a regular file."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(0, "a folder, not a file" if stat.S_ISDIR(mode) else "not a regular file")
    return descriptor


def _shard_count(first):
    """How many shards the artifact has whose given file is ``first``. ArtifactError unless it is the first of them."""
    name = first.path.name
    keys = Keys(first, "split.")
    count, number = keys.int("count", default=1, lo=0), keys.int("no", default=0, lo=0)
    match = SHARD_NAME.fullmatch(name)
    named, of = (int(match[2]), int(match[3])) if match else (1, 1)
    if count <= 1 and of <= 1:
        return 1
    if not match:
        raise ArtifactError(
            f"{name}: is shard {number + 1} of {count} by split.no and split.count; "
            f"its siblings cannot be found unless it is named …-{number + 1:05}-of-{count:05}.gguf"
        )
    if (number + 1, count) != (named, of):
        raise ArtifactError(
            f"{name}: is shard {named} of {of} by its name, but {number + 1} of {count} by split.no and split.count"
        )
    if number:
        raise ArtifactError(f"{name}: is shard {named} of {of}; open the first one, {_sibling(first.path, 0).name}")
    return count


def _sibling(path, number):
    stem, _, count = SHARD_NAME.fullmatch(path.name).groups()
    return path.with_name(f"{stem}-{number + 1:05}-of-{count}.gguf")


def _check_sibling(first, file, number, count):
    """ArtifactError unless ``file`` is shard ``number`` of the artifact that ``first`` begins."""
    keys = Keys(file, "split.")
    found = keys.int("no"), keys.int("count")
    if found != (number, count):
        raise ArtifactError(
            f"{file.path.name}: split.no and split.count are {found[0]} and {found[1]}; {number} and {count} are expected"
        )
    own = {"split.no", "general.alignment"}  # what each shard says of itself
    for key in file.metadata.keys() & first.metadata.keys() - own:
        if file.types[key] != first.types[key] or not _equal(file.metadata[key], first.metadata[key]):
            raise ArtifactError(f"{file.path.name}: key {key!r} differs from that in {first.path.name}")
    if more := sorted(file.metadata.keys() - first.metadata.keys() - own):
        raise ArtifactError(f"{file.path.name}: key {more[0]!r} is not in the first shard, {first.path.name}")


def _equal(a, b):
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


def parse(contents, path, shard=0):
    """:class:`Contents` of one file's bytes (``bytes`` or a read-only map). ArtifactError for whatever is wrong."""
    header = _Header(path.name, contents)
    tensor_count, key_count = header.counts()
    metadata, types = {}, {}
    for number in range(key_count):
        key = header.text(f"key {number}", MAX_KEY_BYTES)
        if key in metadata:
            raise header.error(f"key {_shown(key)} occurs twice")
        metadata[key], types[key] = header.value(key)
    alignment = _alignment(header, metadata, types)
    infos = {}
    for number in range(tensor_count):
        name, *info = header.tensor_info(number)
        if name in infos:
            raise header.error(f"tensor {name!r} occurs twice")
        infos[name] = info
    start = -(-header.at // alignment) * alignment
    _check_layout(header, infos, start, alignment)
    tensors = {
        name: Tensor(name, shape, type, np.frombuffer(contents, np.uint8, size, start + offset), shard, start + offset)
        for name, (shape, type, offset, size) in infos.items()
    }
    return Contents(path, len(contents), metadata, types, tensors)


def _alignment(header, metadata, types):
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if "general.alignment" in types and types["general.alignment"] != "u32":
        raise header.error(f"key 'general.alignment' is of type {types['general.alignment']}; u32 is expected")
    if alignment < 8 or alignment & (alignment - 1):
        raise header.error(f"key 'general.alignment' is {alignment}; a power of two from 8 is expected")
    return alignment


def _check_layout(header, infos, start, alignment):
    """Every tensor aligned, inside the file, and on bytes of its own."""
    total, end, before = len(header.data), 0, None
    for name, (_, type, offset, size) in sorted(infos.items(), key=lambda item: item[1][2]):
        if offset % alignment:
            raise header.error(f"tensor {name!r} is at offset {offset}, which is no multiple of the alignment {alignment}")
        if start + offset + size > total:
            raise header.error(
                f"tensor {name!r} ({type.name}) ends at byte {start + offset + size}, but the file has only {total} bytes"
            )
        if offset < end:
            raise header.error(f"tensors {before!r} and {name!r} overlap")
        end, before = offset + size, name


class _Header:
    """Reads a file's header from front to back, checking every length against what is left of it."""

    def __init__(self, name, contents):
        self.name, self.data, self.at = name, contents, 0
        self.end = min(len(contents), HEADER_BYTES)
        self.strings = 0

    def error(self, what):
        return ArtifactError(f"{self.name}: {what}")

    def skip(self, size, where):
        """Go past ``size`` bytes; returns where they begin."""
        start = self.at
        if size > self.end - start:
            limit = "the file ends" if self.end == len(self.data) else "a header must end"
            raise self.error(f"{where} needs {size} bytes from byte {start}, but {limit} at {self.end}")
        self.at = start + size
        return start

    def u32(self, where):
        return _U32.unpack_from(self.data, self.skip(4, where))[0]

    def u64(self, where):
        return _U64.unpack_from(self.data, self.skip(8, where))[0]

    def counts(self):
        """Magic and version checked; (number of tensors, number of keys), neither more than can be there."""
        if self.data[:4] != MAGIC:
            raise self.error(f"begins with {self.data[:4]!r}, not {MAGIC!r}; this is no GGUF file")
        self.skip(4, "the magic")
        version = self.u32("the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "is big-endian" if swapped in (1, *VERSIONS) else f"is GGUF version {version}"
            raise self.error(f"{what}; versions 2 and 3, little-endian, can be read")
        tensors, keys = self.u64("the number of tensors"), self.u64("the number of keys")
        self._check_count(keys, "metadata keys", LEAST_KEY_BYTES, MAX_KEYS)
        self._check_count(tensors, "tensors", LEAST_TENSOR_BYTES, MAX_TENSORS)
        return tensors, keys

    def _check_count(self, count, what, least, most):
        room = min(most, (self.end - self.at) // least)
        if count > room:
            raise self.error(f"declares {count} {what}; a file of {len(self.data)} bytes can have at most {room}")

    def text(self, where, most):
        """A non-empty UTF-8 string of up to ``most`` bytes."""
        size = self.u64(where)
        if not 1 <= size <= most:
            raise self.error(f"{where} has a name of {size} bytes; 1 to {most} are accepted")
        return self._decode(self.skip(size, where), size, where)

    def _decode(self, start, size, where):
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError:
            raise self.error(f"{where} holds bytes that are not UTF-8") from None

    def value(self, key):
        """(value, name of its type)."""
        where = f"key {_shown(key)}"
        type = self.u32(where)
        if type == STRING:
            size = self.u64(where)
            return self._decode(self.skip(size, where), size, where), "str"
        if type == ARRAY:
            return self._array(where)
        name, array = self._numbers(type, 1, where)
        return array[0].item(), name

    def _array(self, where):
        type, count = self.u32(where), self.u64(where)
        if type == ARRAY:
            raise self.error(f"{where} is an array of arrays; arrays of numbers, bools or strings are accepted")
        if type == STRING:
            return self._strings(count, where), "array[str]"
        name, array = self._numbers(type, count, where)
        return array, f"array[{name}]"

    def _numbers(self, type, count, where):
        """(type name, read-only array of ``count`` numbers)."""
        if type not in NUMBERS:
            raise self.error(f"{where} has the unknown value type {type}; 0 to 12 are known")
        name, dtype = NUMBERS[type]
        start = self.skip(count * dtype.itemsize, where)
        raw = self.data[start : self.at]
        if name == "bool" and (odd := raw.strip(b"\0\1")):
            raise self.error(f"{where} holds a bool of {odd[0]}; 0 and 1 are accepted")
        return name, np.frombuffer(raw, dtype)

    def _strings(self, count, where):
        self.strings += count
        if count * 8 > self.end - self.at:
            raise self.error(f"{where} declares {count} strings, but only {self.end - self.at} bytes are left")
        if self.strings > MAX_STRINGS:
            raise self.error(f"{where} brings the strings in arrays to {self.strings}; {MAX_STRINGS} are accepted")
        data, at, end, length = self.data, self.at, self.end, _U64.unpack_from
        strings = []
        for _ in range(count):
            start = at + 8
            at = start + length(data, at)[0] if start <= end else end + 1
            if at > end:
                raise self.error(f"{where} runs past the end at string {len(strings)} of {count}")
            try:
                strings.append(data[start:at].decode())
            except UnicodeDecodeError:
                raise self.error(f"{where} holds bytes that are not UTF-8 in string {len(strings)}") from None
        self.at = at
        return strings

    def tensor_info(self, number):
        """(name, shape in numpy order, type, offset in the tensor data, bytes)."""
        name = self.text(f"tensor {number}", MAX_NAME_BYTES)
        where = f"tensor {name!r}"
        dims = self.u32(where)
        if not 1 <= dims <= MAX_DIMS:
            raise self.error(f"{where} has {dims} dimensions; 1 to {MAX_DIMS} are accepted")
        shape = struct.unpack_from(f"<{dims}Q", self.data, self.skip(8 * dims, where))[::-1]
        id, offset = self.u32(where), self.u64(where)
        if 0 in shape:
            raise self.error(f"{where} has shape {list(shape)}; every dimension must be at least 1")
        if id not in KNOWN:
            known = ", ".join(f"{type.name} {type.value}" for type in TensorType)
            raise self.error(f"{where} has the unknown type id {id} (known: {known})")
        type = KNOWN[id]
        try:
            size = quants.nbytes(type, shape)
        except ValueError as error:
            raise self.error(f"{where}: {error}") from None
        return name, shape, type, offset, size


class Keys:
    """Typed metadata of ``artifact`` under ``prefix``, or under the first of several prefixes that has the key.

    Every getter raises ArtifactError, one sentence with the file, the key, what was found and what is accepted, where the
    key is absent (unless a default is given) or holds anything else.
    """

    def __init__(self, artifact, prefix=""):
        self.file, self.metadata = artifact.path.name, artifact.metadata
        self.prefixes = (prefix,) if isinstance(prefix, str) else tuple(prefix)

    def has(self, key):
        """Whether the key is there."""
        return self._full(key) in self.metadata

    def error(self, key, found, accepted):
        """The error for a key whose value ``found`` is not what is ``accepted`` (a phrase)."""
        return ArtifactError(f"{self.file}: key {self._full(key)!r} is {_shown(found)}; expected {accepted}")

    def int(self, key, default=REQUIRED, lo=None, hi=None):
        """An integer of any width from lo to hi."""
        return self._one(key, default, _is_int, int, "an integer", lo, hi)

    def float(self, key, default=REQUIRED, lo=None, hi=None):
        """A finite number from lo to hi, exactly as stored."""
        return self._one(key, default, _is_finite, float, "a finite number", lo, hi)

    def bool(self, key, default=REQUIRED):
        """A bool."""
        return self._one(key, default, _is_bool, bool, "a bool")

    def str(self, key, default=REQUIRED, choices=None):
        """A string, one of ``choices`` where these are given."""
        value = self._one(key, default, _is_str, str, "a string")
        if choices is not None and self.has(key) and value not in choices:
            raise self.error(key, value, " or ".join(map(repr, choices)))
        return value

    def ints(self, key, n=None, default=REQUIRED, at_least=False, lo=None, hi=None):
        """A tuple of ``n`` integers (any number without n; n or more with ``at_least``), each from lo to hi."""
        return self._many(key, default, n, at_least, _is_int, int, "integers", lo, hi)

    def floats(self, key, n=None, default=REQUIRED, at_least=False, lo=None, hi=None):
        """A tuple of finite numbers, exactly as stored; ``n``, ``at_least``, lo and hi as for :meth:`ints`."""
        return self._many(key, default, n, at_least, _is_finite, float, "finite numbers", lo, hi)

    def bools(self, key, n=None, default=REQUIRED, at_least=False):
        """A tuple of bools; ``n`` and ``at_least`` as for :meth:`ints`."""
        return self._many(key, default, n, at_least, _is_bool, bool, "bools")

    def strs(self, key, n=None, default=REQUIRED, at_least=False):
        """A tuple of strings; ``n`` and ``at_least`` as for :meth:`ints`."""
        return self._many(key, default, n, at_least, _is_str, str, "strings")

    def _full(self, key):
        names = [prefix + key for prefix in self.prefixes]
        return next((name for name in names if name in self.metadata), names[0])

    def _get(self, key, default, accepted):
        """(value, whether it is the file's)."""
        name = self._full(key)
        if name in self.metadata:
            return self.metadata[name], True
        if default is REQUIRED:
            raise ArtifactError(f"{self.file}: key {name!r} is missing; expected {accepted}")
        return default, False

    def _one(self, key, default, is_kind, kind, what, lo=None, hi=None):
        accepted = what + _range(lo, hi)
        value, stored = self._get(key, default, accepted)
        if not stored:
            return value
        if not is_kind(value) or not _within(value, lo, hi):
            raise self.error(key, value, accepted)
        return kind(value)

    def _many(self, key, default, n, at_least, is_kind, kind, what, lo=None, hi=None):
        size = "an array of " if n is None else f"an array of {n} or more " if at_least else f"an array of {n} "
        accepted = size + what + _range(lo, hi)
        values, stored = self._get(key, default, accepted)
        if not stored:
            return values
        if not isinstance(values, list | np.ndarray):
            raise self.error(key, values, accepted)
        if n is not None and (len(values) < n if at_least else len(values) != n):
            raise self.error(key, values, accepted)
        values = values.tolist() if isinstance(values, np.ndarray) else values
        for index, value in enumerate(values):
            if not is_kind(value) or not _within(value, lo, hi):
                raise ArtifactError(f"{self.file}: key {self._full(key)!r} holds {value!r} at {index}; expected {accepted}")
        return tuple(kind(value) for value in values)


def _is_bool(value):
    return isinstance(value, bool | np.bool_)


def _is_int(value):
    return isinstance(value, int | np.integer) and not _is_bool(value)


def _is_finite(value):
    return (_is_int(value) or isinstance(value, float | np.floating)) and math.isfinite(value)


def _is_str(value):
    return isinstance(value, str)


def _within(value, lo, hi):
    return (lo is None or value >= lo) and (hi is None or value <= hi)


def _range(lo, hi):
    if lo is not None and lo == hi:
        return f" equal to {lo}"
    return (f" from {lo}" if lo is not None else "") + (f" up to {hi}" if hi is not None else "")


def _shown(value):
    """A value in an error: arrays by their kind and length, long strings shortened."""
    if isinstance(value, np.ndarray | list | tuple):
        kind = value.dtype.name if isinstance(value, np.ndarray) else "str" if value and _is_str(value[0]) else "value"
        return f"an array of {len(value)} {kind}s"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
