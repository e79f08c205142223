"""Per-layer embeddings of n-grams (Qwen3.8-Flash-Next): the hash that picks rows, and the sidecar files that hold them.

The table has some 320 million rows and stays on disk: a sidecar is a folder with ``ple-manifest.json`` and a few files of
rows, BF16 (format version 1) or E4M3FN codes with one scale (version 2). The manifest is a claim, so all of it is checked
against the model and against the files' real sizes when it is opened. Rows are read from the map one at a time; no file is
ever loaded. Sources: the model's published configuration and the layout of its SSD-PLE artifacts.

Knows the keys and tensors that describe the table, and nothing about what the model does with an embedding.
"""

import bisect
import json
import os
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath

import numpy as np

from .gguf import ArtifactError, Keys

END = "<|endoftext|>"
MANIFEST = "ple-manifest.json"
MANIFEST_BYTES = 16 << 20
VERSIONS = {1: ("BF16", 2), 2: ("FP8_E4M3FN", 1)}  # format version → (storage type, bytes per value)


@dataclass(frozen=True)
class Hash:
    """The constants of the n-gram hash: one multiplier per position back, and per head the rows it has and where they start.

    ``end`` is the token that no n-gram reaches across.
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    end: int

    def rows(self, tokens, token):
        """The table rows of ``token`` after ``tokens``, one per head.

        A head of n-grams mixes the token and its n − 1 predecessors, ``t_0 m_0 xor t_1 m_1 …`` in unsigned 64-bit
        integers, and takes the remainder by its size. What is missing, or at or before an ``end``, reads as ``end``.
        """
        order = len(self.multipliers)
        ids = [token]
        while len(ids) < order:
            cut = len(ids) > len(tokens) or (len(ids) > 1 and ids[-1] == self.end)
            ids.append(self.end if cut else tokens[-len(ids)])
        products = (id * multiplier % 2**64 for id, multiplier in zip(ids, self.multipliers, strict=True))
        mixed = list(accumulate(products, lambda a, b: a ^ b))[1:]
        per_order = len(self.sizes) // (order - 1)
        return [mixed[h // per_order] % size + self.offsets[h] for h, size in enumerate(self.sizes)]


def successive_primes(start, count):
    """The ``count`` smallest primes from ``start`` on: the sizes of the hash heads."""
    primes = []
    while len(primes) < count:
        if start > 1 and all(start % divisor for divisor in range(2, int(start**0.5) + 1)):
            primes.append(start)
        start += 1
    return tuple(primes)


def running_offsets(sizes):
    """Where each head's rows start: the sizes before it, summed."""
    return (0, *accumulate(sizes[:-1]))


@dataclass(frozen=True)
class Sidecar:
    """Where the rows of a checked table lie; plain data, no file is held open.

    storage: "BF16" or "FP8_E4M3FN"; rows: how many may be read; width: values of a row; scale: of the codes, or None;
    files: paths; parts: (first row, number of its file, offset in it), in the order of rows.
    """

    storage: str
    rows: int
    width: int
    scale: float | None
    files: tuple[str, ...]
    parts: tuple[tuple[int, int, int], ...]

    def row(self, index, dtype=np.float32):
        """Row ``index``, [width]. IndexError outside 0 … rows − 1; ArtifactError where the file has shrunk or gone since."""
        if not 0 <= index < self.rows:
            raise IndexError(f"the embedding sidecar has {self.rows} rows, there is no row {index}")
        start, file, offset = self.parts[bisect.bisect_right(self.parts, index, key=lambda part: part[0]) - 1]
        size = self.width * (1 if self.scale else 2)
        try:
            stored = np.memmap(self.files[file], np.uint8, "r", offset + (index - start) * size, (size,))
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{self.files[file]}: row {index} cannot be read any more ({error})") from None
        return (_code_values(stored, self.scale) if self.scale else _bf16(stored.view("<u2"))).astype(dtype)


@dataclass(frozen=True)
class Ngrams:
    """The n-gram embedding of a model. layer: the block it precedes; order: longest n-gram; row: values of a table row;
    taps: of its convolution. The table is a sidecar, or tensors of the file: ``table`` names them, ``part_rows`` rows each.
    """

    layer: int
    order: int
    row: int
    taps: int
    hash: Hash
    table: tuple[str, ...]
    part_rows: int
    sidecar: Sidecar | None

    @property
    def width(self):
        """Values of the embedding: a row per head."""
        return len(self.hash.sizes) * self.row

    def embedding(self, w, tokens, token):
        """The embedding [width] of ``token`` after ``tokens``; ``w`` holds the table where no sidecar does."""
        rows = self.hash.rows(tokens, token)
        if self.sidecar:
            return np.concatenate([self.sidecar.row(row, w.dtype) for row in rows])
        places = (divmod(row, self.part_rows) for row in rows)
        return np.concatenate([w.part(self.table[part], row) for part, row in places])


def published_ngrams(k, artifact, layers, folder=None):
    """:class:`Ngrams` of the published layout, its sidecar opened: ``folder``, or the one that the file names.

    Sizes and offsets follow from the configuration, and the tensors that repeat them must agree; the multipliers are only
    stored. The end token is found by its name: ``tokenizer.ggml.eos_token_id`` is another one.
    """
    order, per_order = _orders(k)
    heads = (order - 1) * per_order
    (layer,) = k.ints("ple.checkpoint_layer_ids_zero_based", n=1, lo=0, hi=layers - 1)
    k.ints("ple.layer_ids_one_based", n=1, default=(layer + 1,), lo=layer + 1, hi=layer + 1)
    width = k.int("ple.embedding_length", lo=heads)
    if width % heads:
        raise k.error("ple.embedding_length", width, f"a multiple of {heads} heads")
    row, taps = width // heads, _taps(k)
    sizes = successive_primes(k.int("ple.ngram_vocab_size_base", lo=2, hi=1 << 31), heads)
    offsets = running_offsets(sizes)
    p = f"blk.{layer}.ple."
    _same_integers(artifact, f"{p}head_vocab_sizes", sizes)
    _same_integers(artifact, f"{p}head_offsets", offsets)
    vocabulary = Keys(artifact, "tokenizer.ggml.")
    if END not in (tokens := vocabulary.strs("tokens")):
        raise vocabulary.error("tokens", tokens, f"{END!r} among them, which ends n-grams")
    multipliers = _integers(artifact, f"{p}layer_multipliers") or ()
    hash = Hash(multipliers, sizes, offsets, tokens.index(END))
    if folder is None and not k.has("ple.sidecar_manifest"):
        parts = k.int("ple.ngram_parts", lo=1, hi=1000)
        table = tuple(f"{p}ngram_embd.part_{i:03}.weight" for i in range(parts))
        return Ngrams(layer, order, row, taps, hash, table, -(-sum(sizes) // parts), None)
    k.str("ple.weight_storage", default=None, choices=("ssd_backed_bounded_page_cache",))
    k.str("ple.storage_dtype", default=None, choices=("BF16",))
    manifest = Path(folder) / MANIFEST if folder is not None else _named_manifest(k, artifact)
    alignment = k.int("ple.sidecar_alignment", default=4096, lo=1)
    payload = k.int("ple.sidecar_payload_bytes", default=None, lo=1)
    # A file without its multipliers is refused by the name of that tensor, when tensors are bound.
    sidecar = open_sidecar(manifest, artifact.path.parent, hash, order, row, alignment, payload) if multipliers else None
    return Ngrams(layer, order, row, taps, hash, (), 0, sidecar)


def _named_manifest(k, artifact):
    path = k.str("ple.sidecar_manifest")
    if _leaves(path):
        raise k.error("ple.sidecar_manifest", path, "a path inside the model's folder")
    return artifact.path.parent / path


def converted_ngrams(k, artifact, layers, folder=None):
    """:class:`Ngrams` of llama.cpp's layout: all constants are keys, and the table is in the file."""
    if folder is not None:
        found = f"option 'ple' is {str(folder)!r}"
        raise ArtifactError(f"{artifact.path.name}: {found}; expected none, since this file holds its table")
    order, per_order = _orders(k)
    (layer,) = k.ints("ple.layers", n=1, lo=0, hi=layers - 1)
    sizes = k.ints("ple.head_vocab_sizes", n=(order - 1) * per_order, lo=1)
    offsets, expected = k.ints("ple.head_offsets", n=len(sizes)), running_offsets(sizes)
    if offsets != expected:
        raise k.error("ple.head_offsets", str(offsets), f"{expected}, the running sum of ple.head_vocab_sizes")
    hash = Hash(k.ints("ple.layer_multipliers", n=order), sizes, offsets, k.int("ple.eos_token_id", lo=0))
    row = k.int("embedding_length_per_layer_input", lo=1)
    table = "per_layer_token_embd.weight"
    stored = artifact.tensors.get(table)
    rows = max(sum(sizes), stored.shape[0] if stored else 0)  # the table may be padded
    return Ngrams(layer, order, row, _taps(k), hash, (table,), rows, None)


def _orders(k):
    """(longest n-gram, heads for each of 2, 3 … n)."""
    return k.int("ple.ngram_size", lo=2, hi=16), k.int("ple.heads_per_ngram", lo=1, hi=64)


def _taps(k):
    return k.int("ple.conv_kernel", lo=1, hi=64)


def _integers(artifact, name):
    """An integer tensor as a tuple; None where the file lacks it, which the binding of tensors refuses."""
    tensor = artifact.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type.name not in ("I32", "I64") or len(tensor.shape) != 1:
        found = f"{tensor.type.name} {list(tensor.shape)}"
        raise ArtifactError(f"{artifact.path.name}: tensor {name!r} is {found}; expected I64 of one dimension")
    return tuple(tensor.dequantize().tolist())


def _same_integers(artifact, name, expected):
    stored = _integers(artifact, name)
    if stored not in (None, expected):
        said = f"tensor {name!r} holds {list(stored)}"
        raise ArtifactError(f"{artifact.path.name}: {said}; expected {list(expected)}, as the configuration gives")


def open_sidecar(manifest, model_folder, hash, order, width, alignment, payload=None):
    """Open the sidecar that ``manifest`` (a path) describes, for a model that hashes by ``hash``.

    model_folder: where the GGUF lies, which the paths of version 1 start from; order: longest n-gram; width: values of a
    row; alignment: bytes; payload: the bytes that the GGUF states for its BF16 table, if it does. ArtifactError, one
    sentence, for a missing file, a path that leaves the folder, a size, part or constant that does not fit.
    """
    manifest = Path(manifest)
    top = _Entry(manifest, "", _read(manifest))
    version = top.int("format_version", lo=1, hi=max(VERSIONS))
    storage, itemsize = VERSIONS[version]
    folder = Path(model_folder) if version == 1 else manifest.parent
    if version == 1 and not Path(os.path.abspath(manifest)).is_relative_to(os.path.abspath(folder)):
        raise ArtifactError(f"{manifest}: a manifest of format_version 1 must lie in the model's folder {folder}")
    heads, stride = len(hash.sizes), width * itemsize
    top.same("storage_dtype", storage)
    top.same("alignment_bytes", alignment)
    top.same("row_stride_bytes", stride)
    top.same("embedding_row_dimension", width)
    top.same_if_present("byte_order", "little")
    top.same_if_present("ngram_size", order)
    top.same_if_present("heads_per_ngram", heads // (order - 1))
    top.same_if_present("number_of_ngram_heads", heads)
    top.same_if_present("number_of_ple_layers", 1)
    top.same("layer_multipliers", list(hash.multipliers))
    top.same("per_head_vocabulary_sizes", list(hash.sizes))
    top.same("per_head_offsets", list(hash.offsets))
    files = _files(top, folder)
    parts, rows = _parts(top, files, width, stride, alignment)
    top.same("padded_vocabulary_rows", rows)
    top.same_if_present("total_payload_bytes", rows * stride)
    if version == 1 and payload is not None and payload != rows * stride:
        raise top.error("logical_parts", f"{rows * stride} bytes of rows", f"the {payload} that the model's file states")
    usable = top.int("usable_vocabulary_rows", lo=sum(hash.sizes), hi=rows)
    scale = None if version == 1 else _scale(top.entry("quantization"), folder)
    return Sidecar(storage, usable, width, scale, tuple(str(file) for _, file, _ in files), parts)


def _read(manifest):
    try:
        with manifest.open("rb") as file:
            text = file.read(MANIFEST_BYTES + 1)
    except OSError as error:
        raise ArtifactError(f"{manifest}: cannot be read ({error.strerror}); a {MANIFEST} is expected") from None
    if len(text) > MANIFEST_BYTES:
        raise ArtifactError(f"{manifest}: larger than {MANIFEST_BYTES} bytes; a {MANIFEST} is expected")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ArtifactError(f"{manifest}: not JSON; a {MANIFEST} is expected") from None


def _files(top, folder):
    """(path as written, path, bytes) of every physical file."""
    entries = top.entries("physical_files", "physical_file_count")
    files, seen, total = [], set(), 0
    for number, entry in enumerate(entries):
        entry.same("index", number)
        path = entry.str("path")
        if PurePosixPath(path) in seen:
            raise entry.error("path", path, "a file that no other entry names")
        size = entry.int("file_bytes", lo=1)
        files.append((path, _file(entry, folder, size), size))
        seen.add(PurePosixPath(path))
        total += size
    top.same_if_present("total_file_bytes_including_alignment", total)
    return files


def _file(entry, folder, size):
    """The file of an entry: inside ``folder``, of exactly ``size`` bytes."""
    path = entry.str("path")
    if _leaves(path):
        raise entry.error("path", path, f"a path inside {folder}")
    file = folder / path
    try:
        if not file.is_file():
            raise ArtifactError(f"{file}: no such file, which {entry.where} names")
        if (found := file.stat().st_size) != size:
            raise ArtifactError(f"{file}: holds {found} bytes, {entry.where} says {size}")
    except OSError as error:
        raise ArtifactError(f"{file}: cannot be read ({error.strerror})") from None
    return file


def _leaves(path):
    """Whether a path of a file could lead out of the folder it starts from, or is none at all.

    By its text alone: a manifest cannot make links, and download caches keep files as links to elsewhere.
    """
    pure = PurePosixPath(path)
    return not path or not path.isprintable() or "\\" in path or pure.is_absolute() or ".." in pure.parts


def _parts(top, files, width, stride, alignment):
    """(the parts as :class:`Sidecar` has them, rows in all). Parts are in order and share no byte."""
    entries = top.entries("logical_parts", "logical_shard_count")
    parts, rows, spans, payloads = [], 0, [], [0] * len(files)
    for number, entry in enumerate(entries):
        entry.same("logical_part", number)
        index = entry.int("physical_file_index", lo=0, hi=len(files) - 1)
        path, _, file_bytes = files[index]
        entry.same("physical_file", path)
        entry.same("global_row_start", rows)
        entry.same("row_stride_bytes", stride)
        entry.same("embedding_row_dimension", width)
        count = entry.int("rows", lo=1)
        size = count * stride
        entry.same("payload_bytes", size)
        at = entry.int("file_offset", lo=0)
        padded = -(-size // alignment) * alignment
        if at % alignment or at + padded > file_bytes:
            accepted = f"a multiple of {alignment} with {padded} bytes after it in the {file_bytes} of {path}"
            raise entry.error("file_offset", at, accepted)
        spans.append((index, at, at + padded, entry))
        parts.append((rows, index, at))
        rows += count
        payloads[index] += size
    spans.sort(key=lambda span: span[:2])
    for (file, _, end, _), (other, at, _, entry) in zip(spans, spans[1:], strict=False):
        if file == other and at < end:
            raise entry.error("file_offset", at, f"an offset from {end} on, where the part before it ends")
    for entry, payload in zip(top.entries("physical_files", "physical_file_count"), payloads, strict=True):
        entry.same("payload_bytes", payload)
    return tuple(parts), rows


def _scale(entry, folder):
    """The one scale of all codes, from its own file of one BF16 number."""
    entry.same("format", "E4M3FN")
    entry.same("scheme", "per_tensor")
    entry.same("scale_is_inverse", False)
    scale = entry.entry("scale")
    scale.same("dtype", "BF16")
    scale.same_if_present("shape", [1])
    scale.same_if_present("file_bytes", 2)
    bits = np.fromfile(_file(scale, folder, 2), "<u2")
    written = f"0x{bits[0]:04x}"
    if scale.str("bits_hex").lower() != written:
        raise scale.error("bits_hex", scale.str("bits_hex"), f"{written}, as its file holds")
    factor = _bf16(bits)[0]
    if not (np.isfinite(factor) and factor > 0):
        raise scale.error("bits_hex", written, "the bits of a finite number above 0")
    return float(factor)


def _code_values(codes, scale):
    """What E4M3FN codes are worth: ``BF16(BF16(code) · scale)``, float32."""
    return _round_bf16(_e4m3fn(codes) * np.float32(scale))


def _e4m3fn(codes):
    """Values of E4M3FN codes (OCP 8-bit floating point): sign, 4 exponent bits of bias 7, 3 mantissa bits; 0x7f is NaN."""
    codes = codes.astype(np.int32)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    magnitude = np.where(codes & 127 == 127, np.nan, magnitude)
    return np.where(codes & 128, -magnitude, magnitude).astype(np.float32)


def _bf16(bits):
    """float32 values of BF16 bit patterns (uint16)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round_bf16(x):
    """``x`` float32 rounded to BF16, ties to even, still as float32."""
    bits = x.view(np.uint32)
    rounded = bits + (0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.astype(np.uint32).view(np.float32))


class _Entry:
    """One JSON object of a manifest, read field by field."""

    def __init__(self, manifest, name, value):
        self.manifest, self.name, self.value = manifest, name, value
        self.where = f"{name} of {manifest}" if name else str(manifest)
        if not isinstance(value, dict):
            raise ArtifactError(f"{self.where} is {_shown(value)}, expected an object")

    def error(self, field, found, accepted):
        name = f"{self.name}.{field}" if self.name else field
        return ArtifactError(f"{self.manifest}: {name} is {_shown(found)}, expected {accepted}")

    def same(self, field, expected):
        found = self.value.get(field)
        if type(found) is not type(expected) or found != expected:
            raise self.error(field, found, _shown(expected))

    def same_if_present(self, field, expected):
        if field in self.value:
            self.same(field, expected)

    def int(self, field, lo, hi=None):
        found = self.value.get(field)
        if type(found) is not int or found < lo or (hi is not None and found > hi):
            raise self.error(field, found, f"an integer from {lo}" + ("" if hi is None else f" to {hi}"))
        return found

    def str(self, field):
        found = self.value.get(field)
        if not isinstance(found, str):
            raise self.error(field, found, "a string")
        return found

    def entry(self, field):
        return _Entry(self.manifest, f"{self.name}.{field}" if self.name else field, self.value.get(field))

    def entries(self, field, count):
        found = self.value.get(field)
        if not isinstance(found, list) or not found:
            raise self.error(field, found, "a list of objects")
        self.same_if_present(count, len(found))
        return [_Entry(self.manifest, f"{field}[{i}]", value) for i, value in enumerate(found)]


def _shown(value):
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict | list) for item in value)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
