"""Writing GGUF files: version 3 of the GGUF specification of the ggml project, little-endian, one shard at a time."""

import os
import struct
from pathlib import Path

import numpy as np

from . import quants
from .gguf import _U32, _U64, ALIGNMENT, ARRAY, IDS, MAGIC, STRING, VERSIONS, _is_bool, _is_int, _is_str, _shown


def write(path, architecture, metadata, tensors):
    """Write one GGUF file, beside its place first and then renamed.

    architecture: ``general.architecture``, or None to leave it out (later shards). metadata: key → value, or (value, type
    name as in :attr:`Artifact.types`); without a name int is u32 (i32, u64 or i64 where it must be), float is f32, a list
    of int is array[i32], and a numpy array keeps its type. tensors: name → array of a plain type, or (uint8 data,
    TensorType, shape), where instead of the data there may be a function that returns it in parts, an iterable of uint8
    arrays: it is called when the tensor's turn comes, so that a file larger than memory can be written. ValueError for
    what the format cannot hold.
    """
    path = Path(path)
    if architecture is not None:
        metadata = {"general.architecture": architecture} | metadata
    alignment = metadata.get("general.alignment", ALIGNMENT)
    alignment = alignment[0] if isinstance(alignment, tuple) else alignment
    packed = {name: _stored(name, tensor) for name, tensor in tensors.items()}
    out = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(packed), len(metadata))]
    for key, value in metadata.items():
        value, type = value if isinstance(value, tuple) else (value, _type_of(value))
        try:
            out += [_string(key), _encode(value, type)]
        except (struct.error, OverflowError, KeyError, TypeError, AttributeError, ValueError):
            raise ValueError(f"key {key!r}: {_shown(value)} cannot be stored as {type}") from None
    offset = 0
    for name, (_, type, shape) in packed.items():
        out += [_string(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], type, offset)]
        offset += -(-quants.nbytes(type, shape) // alignment) * alignment
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(b"".join(out))
            for name, (parts, type, shape) in packed.items():
                file.write(bytes(-file.tell() % alignment))
                start = file.tell()
                for part in parts():
                    file.write(part)
                _check_size(name, file.tell() - start, type, shape)
            file.write(bytes(-file.tell() % alignment))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _stored(name, tensor):
    """(function that returns the uint8 data in parts, type, shape) of an array or of data that is packed already."""
    if isinstance(tensor, tuple):
        data, type, shape = tensor
        if callable(data):
            return data, type, tuple(shape)
        _check_size(name, data.size, type, shape)
    else:
        type = next((type for type, dtype in quants.PLAIN.items() if dtype == tensor.dtype), None)
        if type is None or not tensor.size or not tensor.ndim:
            raise ValueError(f"tensor {name!r}: {tensor.dtype} {list(tensor.shape)} is no plain tensor type, or empty")
        data, shape = tensor, tensor.shape
    data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return lambda: (data,), type, tuple(shape)


def _check_size(name, found, type, shape):
    if found != (size := quants.nbytes(type, shape)):
        raise ValueError(f"tensor {name!r}: {type.name} {list(shape)} takes {size} bytes, not {found}")


def _type_of(value):
    """The type name of a metadata value that comes without one."""
    if isinstance(value, np.ndarray):
        return f"array[{next((name for name, (_, dtype) in IDS.items() if dtype == value.dtype), 'str')}]"
    if isinstance(value, list) and value:
        kinds = {_is_bool: "bool", _is_int: "i32", _is_str: "str"}
        return f"array[{next((name for is_kind, name in kinds.items() if all(map(is_kind, value))), 'f32')}]"
    if _is_bool(value):
        return "bool"
    if _is_int(value):
        limits = {name: np.iinfo(IDS[name][1]) for name in ("u32", "i32", "u64")}
        return next((name for name, limit in limits.items() if limit.min <= value <= limit.max), "i64")
    return "str" if _is_str(value) else "f32"


def _number(value, type):
    """Bytes of a number or of an array of them. ValueError where an integer or bool type would change a value."""
    given = np.asarray(value)
    stored = given.astype(IDS[type][1])
    if stored.dtype.kind != "f" and not np.array_equal(stored, given):
        raise ValueError("out of range")
    return stored.tobytes()


def _string(text):
    data = text.encode()
    return _U64.pack(len(data)) + data


def _encode(value, type):
    """Type id and bytes of a metadata value."""
    if type == "str":
        return _U32.pack(STRING) + _string(value)
    if not type.startswith("array["):
        return _U32.pack(IDS[type][0]) + _number(value, type)
    inner = type.removeprefix("array[").removesuffix("]")
    if inner == "str":
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_string, value))
    return struct.pack("<IIQ", ARRAY, IDS[inner][0], len(value)) + _number(value, inner)
