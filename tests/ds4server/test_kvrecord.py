"""The bytes of a record: laid out by hand, and bytes that contradict themselves."""

import hashlib
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4server import kvrecord
from ds4server.kvrecord import Flag, Header, NotRecord, Reason, RecordError

DIGEST = bytes(range(32))
HEADER = Header(4, Reason.CONTINUED, Flag.IDENTITY, 7, tokens=600, context=8192, created=1000, last_used=2000,
                payload_bytes=100, text_bytes=10, hits=3)  # fmt: skip
SIZE = 52 + 10 + 100 + 40


def test_header_bytes_by_hand():
    data = HEADER.encode()
    assert data.hex() == "4b5643" "01" "04" "02" "40" "07" "58020000" "03000000" "00200000" "50" "000000" \
        "e803000000000000" "d007000000000000" "6400000000000000" "0a000000"  # fmt: skip
    assert len(data) == 52
    assert struct.unpack_from("<I", data, kvrecord.HITS_AT) == (3,)
    assert struct.unpack_from("<Q", data, kvrecord.LAST_USED_AT) == (2000,)
    assert (HEADER.payload_at, HEADER.sections_at) == (62, 162)


def test_numbers_of_reasons_and_flags():
    assert {reason.name: reason.value for reason in Reason} == {
        "COLD": 1, "CONTINUED": 2, "EVICT": 3, "SHUTDOWN": 4, "BANK_EVICT": 7, "BANK_SHUTDOWN": 8, "BANK_CHECKPOINT": 9,
    }  # fmt: skip
    assert [flag.name for flag in Flag] == ["TOOL_MAP", "RESPONSES_TEXT", "THINKING_TEXT", "TITLE", "BANK", "MEDIA", "IDENTITY"]
    assert [flag.value for flag in Flag] == [1 << bit for bit in range(7)]
    assert [reason.bank for reason in Reason] == [False] * 4 + [True] * 3


def test_footer_and_tool_map_bytes_by_hand():
    tool_map = {b"call_1": b"<a>", b"x": b"<bc>"}
    footer = b"KVI\x01" + DIGEST + b"KVI!"
    assert kvrecord.encode_sections({}, DIGEST) == footer and len(footer) == 40
    data = kvrecord.encode_sections(tool_map, DIGEST)
    entries = "06000000" "03000000" + b"call_1<a>".hex() + "01000000" "04000000" + b"x<bc>".hex()  # fmt: skip
    assert data.hex() == b"KTM\x01".hex() + "02000000" + entries + footer.hex()
    assert kvrecord.decode_sections(data, Flag.TOOL_MAP | Flag.IDENTITY) == (tool_map, DIGEST)
    assert kvrecord.decode_sections(data[:-40], Flag.TOOL_MAP) == (tool_map, None)
    assert kvrecord.decode_sections(b"", 0) == ({}, None)


def test_names_are_hashes_of_identity_and_text():
    assert kvrecord.record_name(None, b"text") == hashlib.sha1(b"text").hexdigest() + ".kv"
    assert kvrecord.record_name(DIGEST, b"text") == hashlib.sha1(DIGEST + b"text").hexdigest() + ".kv"


@given(st.binary(max_size=60), st.sets(st.integers(0, 70)))
def test_names_of_prefixes_are_names_of_records(text, lengths):
    expected = {kvrecord.record_name(DIGEST, text[:n]): n for n in lengths if n <= len(text)}
    assert kvrecord.prefix_names(DIGEST, text, lengths) == expected


def test_a_header_comes_back():
    assert Header.decode(HEADER.encode(), SIZE) == HEADER
    plain = replace(HEADER, flags=Flag.RESPONSES_TEXT)
    assert Header.decode(plain.encode(), SIZE - 40) == plain
    named = replace(HEADER, flags=Flag.IDENTITY | Flag.TOOL_MAP)
    assert Header.decode(named.encode(), SIZE + 8 + 10) == named


@pytest.mark.parametrize(
    ("data", "sentence"),
    [(b"", "begins with b''"), (b"GGUF" + bytes(48), "begins with b'GGU'"), (b"KVC\x02" + bytes(48), "version 2, .* reads 1")],
)
def test_other_files_are_no_records(data, sentence):
    with pytest.raises(NotRecord, match=sentence):
        Header.decode(data, 1000)


@pytest.mark.parametrize(
    ("change", "size", "sentence"),
    [
        ({"quant_bits": 0}, SIZE, "0 quant bits, accepted are 1 to 32"),
        ({"quant_bits": 33}, SIZE, "33 quant bits"),
        ({"tokens": 0}, SIZE, "0 tokens of a context of 8192"),
        ({"tokens": 8193}, SIZE, "8193 tokens of a context of 8192"),
        ({"reason": Reason.BANK_EVICT}, SIZE, "disagree about a bank"),
        ({"flags": Flag.IDENTITY | Flag.BANK}, SIZE, "disagree about a bank"),
        ({"flags": 0}, SIZE, "does not have"),
        ({"flags": Flag.IDENTITY | Flag.TOOL_MAP}, SIZE, "does not have"),
        ({"text_bytes": 0}, SIZE - 10, "0 bytes of text"),
        ({"text_bytes": 2**32 - 1}, SIZE, "4294967295 bytes of text and 100 of payload, which a file of 202 bytes does not"),
        ({"payload_bytes": 2**64 - 1}, SIZE, "does not have"),
        ({"payload_bytes": 2**64 - 1, "flags": 128}, SIZE, "does not have"),
        ({}, SIZE - 1, "does not have"),
        ({}, SIZE + 1, "does not have"),
    ],
)
def test_headers_that_contradict_themselves(change, size, sentence):
    with pytest.raises(RecordError, match=sentence):
        Header.decode(replace(HEADER, **change).encode(), size)


def test_a_short_file_and_stray_bytes():
    with pytest.raises(RecordError, match="record of 51 bytes, its header alone has 52"):
        Header.decode(HEADER.encode()[:51], 51)
    for at in (21, 22, 23):
        data = bytearray(HEADER.encode())
        data[at] = 1
        with pytest.raises(RecordError, match="other bytes than zeros"):
            Header.decode(data, SIZE)


@pytest.mark.parametrize("change", [{"reason": 0}, {"reason": 5}, {"reason": 6}, {"reason": 200}, {"abi": 81},
                                    {"flags": Flag.TITLE}, {"flags": 128}])  # fmt: skip
def test_records_of_later_programs_are_known_but_not_read(change):
    other = replace(HEADER, **change)
    assert not Header.decode(other.encode(), SIZE).readable and HEADER.readable


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "no tool map"),
        (b"KTM\x02" + bytes(9), "no tool map"),
        (b"KTM\x01" + struct.pack("<I", 0), "0 entries"),
        (b"KTM\x01" + struct.pack("<I", 2**32 - 1) + struct.pack("<II", 1, 1) + b"ab", "4294967295 entries and holds 1"),
        (b"KTM\x01" + struct.pack("<I", 1) + b"abc", "within an entry"),
        (b"KTM\x01" + struct.pack("<III", 1, 0, 1) + b"a", "an id of 0 bytes"),
        (b"KTM\x01" + struct.pack("<III", 1, 257, 1) + bytes(258), "an id of 257 bytes"),
        (b"KTM\x01" + struct.pack("<III", 1, 1, 2**32 - 1) + b"ab", "a block of 4294967295, 2 remain"),
        (b"KTM\x01" + struct.pack("<I", 2) + 2 * (struct.pack("<II", 1, 1) + b"ab"), "2 entries and holds 1"),
    ],
)
def test_tool_maps_that_lie(data, sentence):
    with pytest.raises(RecordError, match=sentence):
        kvrecord.decode_sections(data, Flag.TOOL_MAP)


def test_footers_that_lie():
    footer = kvrecord.encode_sections({}, DIGEST)
    for data in (footer[1:], b"KVJ" + footer[3:], footer[:-1] + b"?", footer[:3] + b"\x02" + footer[4:], b""):
        with pytest.raises(RecordError, match="does not end with the identity"):
            kvrecord.decode_sections(data, Flag.IDENTITY)


def test_ids_are_bounded_when_written():
    for name in (b"", b"x" * 257):
        with pytest.raises(ValueError, match="1 to 256 bytes"):
            kvrecord.encode_sections({name: b"block"}, None)


@given(st.dictionaries(st.binary(min_size=1, max_size=256), st.binary(max_size=50), min_size=1, max_size=8), st.data())
def test_any_tool_map_comes_back_and_no_part_of_it_does(tool_map, data):
    encoded = kvrecord.encode_sections(tool_map, None)
    assert kvrecord.decode_sections(encoded, Flag.TOOL_MAP) == (tool_map, None)
    with pytest.raises(RecordError):
        kvrecord.decode_sections(encoded[: data.draw(st.integers(0, len(encoded) - 1))], Flag.TOOL_MAP)
