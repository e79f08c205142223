"""The n-gram hash and the embedding sidecars: a manifest is believed only where the files and the model agree with it."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4ref.gguf import ArtifactError
from ds4ref.ple import Hash, open_sidecar, running_offsets, successive_primes
from ds4ref.rounding import round_e4m3

SIZES = successive_primes(11, 4)
HASH = Hash((23703573157769, 20109073645365, 8052911324071), SIZES, running_offsets(SIZES), end=7)
WIDTH, ALIGN = 6, 64
ROWS = [30, 1, 31]  # of the parts; 62 in all, of which the hash uses 60
PLACES = [(0, 0), (1, 0), (0, 384)]  # file and offset of every part: part 2 follows part 0
FILE_BYTES = [768, 64]


def bf16(x):
    """``x`` to BF16 by trying both neighbours, ties to the even pattern; as float32."""
    low = (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    high = (low.view(np.uint32) + 0x10000).view(np.float32)
    up, down = np.abs(high.astype(np.float64) - x), np.abs(low.astype(np.float64) - x)
    even = (low.view(np.uint32) >> 16) % 2 == 0
    return np.where((up < down) | ((up == down) & ~even), high, low)


def write(folder, version=1, seed=0):
    """A sound sidecar in ``folder``/ple. Returns (manifest path, manifest, expected values float32 [62, WIDTH])."""
    rng = np.random.default_rng(seed)
    (folder / "ple").mkdir()
    if version == 1:
        values = bf16(rng.standard_normal((62, WIDTH)))
        data = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    else:
        data = rng.integers(0, 0x7F, (62, WIDTH), np.uint8) | rng.integers(0, 2, (62, WIDTH), np.uint8) << 7
        sign, exponent, mantissa = np.where(data >> 7, -1.0, 1.0), (data >> 3 & 15).astype(int), data & 7
        codes = sign * np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
        values = bf16(codes * np.float64(np.array(0x3BD30000, np.uint32).view(np.float32)))
    stride = data.shape[1]
    prefix = "ple/" if version == 1 else ""
    files = [np.zeros(size, np.uint8) for size in FILE_BYTES]
    parts, start = [], 0
    for number, (count, (file, offset)) in enumerate(zip(ROWS, PLACES, strict=True)):
        files[file][offset : offset + count * stride] = data[start : start + count].reshape(-1)
        parts.append(
            {
                "logical_part": number,
                "physical_file_index": file,
                "physical_file": f"{prefix}rows-{file}.bin",
                "global_row_start": start,
                "rows": count,
                "file_offset": offset,
                "payload_bytes": count * stride,
                "row_stride_bytes": stride,
                "embedding_row_dimension": WIDTH,
            }
        )
        start += count
    for number, contents in enumerate(files):
        (folder / "ple" / f"rows-{number}.bin").write_bytes(contents.tobytes())
    payloads = [61 * stride, stride]
    manifest = {
        "format_version": version,
        "byte_order": "little",
        "storage_dtype": {1: "BF16", 2: "FP8_E4M3FN"}[version],
        "alignment_bytes": ALIGN,
        "row_stride_bytes": stride,
        "embedding_row_dimension": WIDTH,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "usable_vocabulary_rows": 60,
        "padded_vocabulary_rows": 62,
        "total_payload_bytes": 62 * stride,
        "layer_multipliers": list(HASH.multipliers),
        "per_head_vocabulary_sizes": list(HASH.sizes),
        "per_head_offsets": list(HASH.offsets),
        "logical_parts": parts,
        "physical_files": [
            {"index": i, "path": f"{prefix}rows-{i}.bin", "file_bytes": size, "payload_bytes": payloads[i]}
            for i, size in enumerate(FILE_BYTES)
        ],
    }
    if version == 2:
        (folder / "ple" / "scale.bin").write_bytes(bytes([0xD3, 0x3B]))
        scale = {"dtype": "BF16", "path": "scale.bin", "file_bytes": 2, "bits_hex": "0x3bd3", "shape": [1]}
        quantization = {"format": "E4M3FN", "scheme": "per_tensor", "scale_is_inverse": False, "scale": scale}
        manifest["quantization"] = quantization
    path = folder / "ple" / "ple-manifest.json"
    path.write_text(json.dumps(manifest))
    return path, manifest, values


def reopen(path, payload=None):
    return open_sidecar(path, path.parent.parent, HASH, 3, WIDTH, ALIGN, payload)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_row_comes_back_across_parts_and_files(tmp_path, version, dtype):
    path, _, values = write(tmp_path, version)
    sidecar = reopen(path)
    rows = np.stack([sidecar.row(i, dtype) for i in range(60)])
    assert rows.dtype == dtype
    assert np.array_equal(rows, values[:60])
    for beyond in (-1, 60):
        with pytest.raises(IndexError, match=f"has 60 rows, there is no row {beyond}$"):
            sidecar.row(beyond)


def test_codes_are_e4m3fn(tmp_path):
    """With scale 1 the values are the fixed points of rounding to E4M3, in order, 448 the largest, 0x7f and 0xff NaN."""
    path, manifest, _ = write(tmp_path, 2)
    (tmp_path / "ple" / "scale.bin").write_bytes(bytes([0x80, 0x3F]))
    manifest["quantization"]["scale"]["bits_hex"] = "0x3F80"
    manifest["usable_vocabulary_rows"] = 62
    path.write_text(json.dumps(manifest))
    (tmp_path / "ple" / "rows-0.bin").write_bytes(bytes([*range(180), *bytes(204), *range(70, 256), *bytes(198)]))
    sidecar = reopen(path)
    low, high = (np.concatenate([sidecar.row(i) for i in rows]) for rows in (range(30), range(31, 62)))
    values = np.concatenate([low, high[110:]])
    assert np.array_equal(low[70:], high[:110], equal_nan=True) and len(values) == 256
    assert np.isnan(values[[0x7F, 0xFF]]).all() and values[0x7E] == 448 and values[1] == 2.0**-9
    assert np.array_equal(round_e4m3(values[:0x7F]), values[:0x7F]) and np.all(np.diff(values[:0x7F]) > 0)
    assert np.array_equal(values[0x80:0xFF], -values[:0x7F])


def change(path, *steps):
    """A mutation of the manifest: the value at ``steps`` set to the last of them."""

    def apply(manifest):
        *way, last, value = steps
        for step in way:
            manifest = manifest[step]
        manifest[last] = value

    return pytest.param(apply, path, id="-".join(map(str, steps))[:60])


@pytest.mark.parametrize(
    ("mutate", "sentence"),
    [
        change("format_version is 3, expected an integer from 1 to 2", "format_version", 3),
        change("format_version is true, expected an integer from 1 to 2", "format_version", True),
        change('storage_dtype is "F16", expected "BF16"', "storage_dtype", "F16"),
        change('byte_order is "big", expected "little"', "byte_order", "big"),
        change("alignment_bytes is 4096, expected 64", "alignment_bytes", 4096),
        change("row_stride_bytes is 16, expected 12", "row_stride_bytes", 16),
        change("embedding_row_dimension is 5, expected 6", "embedding_row_dimension", 5),
        change("ngram_size is 2, expected 3", "ngram_size", 2),
        change("layer_multipliers is [1, 2, 3], expected [23703573157769, ", "layer_multipliers", [1, 2, 3]),
        change("per_head_vocabulary_sizes is [11, 13], expected [11, 13, 17, 19]", "per_head_vocabulary_sizes", [11, 13]),
        change("per_head_offsets is [0, 11, 24, 40], expected [0, 11, 24, 41]", "per_head_offsets", [0, 11, 24, 40]),
        change("usable_vocabulary_rows is 59, expected an integer from 60 to 62", "usable_vocabulary_rows", 59),
        change("usable_vocabulary_rows is 63, expected an integer from 60 to 62", "usable_vocabulary_rows", 63),
        change("padded_vocabulary_rows is 61, expected 62", "padded_vocabulary_rows", 61),
        change("total_payload_bytes is 1, expected 744", "total_payload_bytes", 1),
        change("logical_parts is null, expected a list of objects", "logical_parts", None),
        change("logical_parts[1] of ", "logical_parts", 1, 5),
        change("logical_parts[1].logical_part is 2, expected 1", "logical_parts", 1, "logical_part", 2),
        change(
            "logical_parts[2].physical_file_index is 2, expected an integer from 0 to 1",
            *("logical_parts", 2, "physical_file_index", 2),
        ),
        change('expected "ple/rows-0.bin"', "logical_parts", 0, "physical_file", "ple/rows-1.bin"),
        change("logical_parts[1].global_row_start is 29, expected 30", "logical_parts", 1, "global_row_start", 29),
        change("logical_parts[0].payload_bytes is 372, expected 360", "logical_parts", 0, "payload_bytes", 372),
        change("logical_parts[1].rows is 0, expected an integer from 1", "logical_parts", 1, "rows", 0),
        change("logical_parts[0].file_offset is 32, expected a multiple of 64", "logical_parts", 0, "file_offset", 32),
        change("logical_parts[2].file_offset is 448, expected a multiple of 64", "logical_parts", 2, "file_offset", 448),
        change("logical_parts[2].file_offset is 320, expected an offset from 384 on", "logical_parts", 2, "file_offset", 320),
        change("physical_files[0].payload_bytes is 7, expected 732", "physical_files", 0, "payload_bytes", 7),
        change("physical_files[1].index is 0, expected 1", "physical_files", 1, "index", 0),
        change("rows-1.bin: holds 64 bytes, physical_files[1] of ", "physical_files", 1, "file_bytes", 128),
        change("rows-9.bin: no such file, which physical_files[1] of ", "physical_files", 1, "path", "ple/rows-9.bin"),
        change("expected a file that no other entry names", "physical_files", 1, "path", "./ple//rows-0.bin"),
        change('[0].path is "../rows-0.bin", expected a path inside', "physical_files", 0, "path", "../rows-0.bin"),
        change("expected a path inside", "physical_files", 0, "path", "ple/../../rows-0.bin"),
        change('physical_files[0].path is "/etc/passwd", expected a path', "physical_files", 0, "path", "/etc/passwd"),
        change("expected a path inside", "physical_files", 0, "path", "..\\rows-0.bin"),
        change("expected a path inside", "physical_files", 0, "path", ""),
        change("expected a path inside", "physical_files", 0, "path", "ple/\ud800"),
        change("expected a path inside", "physical_files", 0, "path", "ple/\0"),
        change("physical_files[0].path is 3, expected a string", "physical_files", 0, "path", 3),
    ],
)
def test_a_wrong_manifest_is_named(tmp_path, mutate, sentence):
    path, manifest, _ = write(tmp_path)
    mutate(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError) as error:
        reopen(path)
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("mutate", "sentence"),
    [
        change('bits_hex is "0x3951", expected 0x3bd3, as its file holds', "quantization", "scale", "bits_hex", "0x3951"),
        change("quantization.scale_is_inverse is true, expected false", "quantization", "scale_is_inverse", True),
        change('quantization.scheme is "per_row", expected "per_tensor"', "quantization", "scheme", "per_row"),
        change('quantization.format is "E5M2", expected "E4M3FN"', "quantization", "format", "E5M2"),
        change("quantization.scale.path is", "quantization", "scale", "path", "../scale.bin"),
        change("rows-1.bin: holds 64 bytes, quantization.scale of", "quantization", "scale", "path", "rows-1.bin"),
        change('physical_files[0].path is "../ple/rows-0.bin", expected', "physical_files", 0, "path", "../ple/rows-0.bin"),
        change(" is null, expected an object", "quantization", None),
    ],
)
def test_a_wrong_fp8_manifest_is_named(tmp_path, mutate, sentence):
    path, manifest, _ = write(tmp_path, 2)
    mutate(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError) as error:
        reopen(path)
    assert sentence in str(error.value)


@pytest.mark.parametrize("bits", [0x0000, 0x7F80, 0x7FC0, 0xBBD3])
def test_a_scale_is_finite_and_positive(tmp_path, bits):
    path, manifest, _ = write(tmp_path, 2)
    (tmp_path / "ple" / "scale.bin").write_bytes(bits.to_bytes(2, "little"))
    manifest["quantization"]["scale"]["bits_hex"] = f"0x{bits:04x}"
    path.write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=f'bits_hex is "0x{bits:04x}", expected the bits of a finite number above 0'):
        reopen(path)


def test_files_that_are_missing_or_no_manifest(tmp_path):
    with pytest.raises(ArtifactError, match=r"ple-manifest\.json: cannot be read \(No such file or directory\)"):
        reopen(tmp_path / "ple" / "ple-manifest.json")
    path, _, _ = write(tmp_path)
    for text, sentence in (("{", "not JSON"), ("[" * 100000, "not JSON"), ("[]", "expected an object"), ("\ud800", "not JSON")):
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(ArtifactError, match=sentence):
            reopen(path)


def test_a_file_that_shrinks_later_is_an_error_not_a_crash(tmp_path):
    path, _, _ = write(tmp_path)
    sidecar = reopen(path)
    (tmp_path / "ple" / "rows-0.bin").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"rows-0\.bin: row 3 cannot be read any more"):
        sidecar.row(3)


def test_the_payload_that_the_model_states_must_agree(tmp_path):
    path, _, _ = write(tmp_path)
    reopen(path, 744)
    with pytest.raises(ArtifactError, match="744 bytes of rows.*expected the 745 that the model's file states"):
        reopen(path, 745)


def test_version_1_lies_in_the_models_folder(tmp_path):
    path, _, _ = write(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ArtifactError, match="a manifest of format_version 1 must lie in the model's folder"):
        open_sidecar(path, tmp_path / "elsewhere", HASH, 3, WIDTH, ALIGN)


def test_a_table_larger_than_memory_opens_at_once(tmp_path):
    """64 GiB, all of it a hole but one row."""
    path, manifest, _ = write(tmp_path)
    rows = 64 * 2**30 // 12
    size = -(-rows * 12 // ALIGN) * ALIGN
    with (tmp_path / "ple" / "rows-0.bin").open("r+b") as file:
        file.truncate(size)
        file.seek((rows - 1) * 12)
        file.write(np.array([0x3F80] * WIDTH, "<u2").tobytes())
    part = manifest["logical_parts"][0] | {"rows": rows, "payload_bytes": rows * 12}
    manifest |= {"logical_parts": [part], "usable_vocabulary_rows": rows, "padded_vocabulary_rows": rows}
    manifest["physical_files"] = [manifest["physical_files"][0] | {"file_bytes": size, "payload_bytes": rows * 12}]
    manifest["total_payload_bytes"] = rows * 12
    path.write_text(json.dumps(manifest))
    assert np.array_equal(reopen(path).row(rows - 1), np.ones(WIDTH, np.float32))


def test_the_published_constants_follow_from_the_configuration():
    sizes = successive_primes(20_000_000, 16)
    assert sizes[:2] == (20000003, 20000023)
    assert -(-sum(sizes) // 128) == 2_500_012
    assert running_offsets(sizes)[:3] == (0, 20000003, 40000026)


@given(st.lists(st.integers(5, 9), max_size=12), st.integers(5, 9))
def test_the_hash_is_the_published_rule(tokens, token):
    """Trigrams: the one before or the end; the end again if that is one, else the one before that."""
    t1 = tokens[-1] if tokens else HASH.end
    t2 = tokens[-2] if len(tokens) > 1 and t1 != HASH.end else HASH.end
    with np.errstate(over="ignore"):
        a, b, c = (np.uint64(t) * np.uint64(m) for t, m in zip((token, t1, t2), HASH.multipliers, strict=True))
    mixed = (a ^ b, a ^ b, a ^ b ^ c, a ^ b ^ c)
    expected = [int(m) % size + offset for m, size, offset in zip(mixed, HASH.sizes, HASH.offsets, strict=True)]
    assert HASH.rows(tokens, token) == expected
