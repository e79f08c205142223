"""One record of the disk store, as bytes: a state that was kept, under the text that it has consumed.

Little-endian::

    0 "KVC"   3 u8 version 1   4 u8 quant bits   5 u8 reason   6 u8 flags   7 u8 family
    8 u32 tokens   12 u32 hits   16 u32 context   20 u8 payload ABI 80   21 u8[3] zero
    24 u64 created   32 u64 last used (both seconds since 1970)   40 u64 payload bytes   48 u32 text bytes
    52 text   then the payload (``ds4ref.snapshots``)   then the tool map, if any   then the footer of an identity, if any

    tool map   "KTM"   u8 1   u32 entries   per entry: u32 id bytes (1…256)   u32 block bytes   id   block
    footer     "KVI"   u8 1   32-byte digest   "KVI!"

A record's name is the SHA-1 of the digest, where there is one, and the text: a record can be found without being read, and
the name proves the text. Two kinds of bytes are refused: a file of another kind or version (:class:`NotRecord`), which is
none of our business, and a record that contradicts itself (:class:`RecordError`).

Sans-IO: bytes in, values out. Knows nothing about directories, models, or what a payload means.
"""

import hashlib
import re
import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag

MAGIC, VERSION, ABI = b"KVC", 1, 80
HEADER = struct.Struct("<3sBBBBBIIIB3sQQQI")
HITS_AT, LAST_USED_AT = 12, 32
U32 = struct.Struct("<I")
MOST_HITS = MOST_TEXT = 2**32 - 1

TOOL_MAP = struct.Struct("<3sBI")
TOOL_ENTRY = struct.Struct("<II")
MOST_ID = 256
FOOTER = struct.Struct("<4s32s4s")
FOOTER_OPEN, FOOTER_CLOSE = b"KVI\x01", b"KVI!"

NAME = re.compile(r"[0-9a-f]{40}\.kv")


class NotRecord(ValueError):
    """Not a record of this version."""


class RecordError(ValueError):
    """A record that contradicts itself; one sentence says how."""


class Reason(IntEnum):
    """Why a record was written. 0, 5 and 6 are reserved."""

    COLD = 1
    CONTINUED = 2
    EVICT = 3
    SHUTDOWN = 4
    BANK_EVICT = 7
    BANK_SHUTDOWN = 8
    BANK_CHECKPOINT = 9

    @property
    def bank(self):
        """Whether a bank was saved, not the serial session."""
        return self >= Reason.BANK_EVICT


class Flag(IntFlag):
    TOOL_MAP = 1
    RESPONSES_TEXT = 2
    """The key is the visible transcript of a Responses conversation."""
    THINKING_TEXT = 4
    """The key is the visible transcript of a conversation with reasoning."""
    TITLE = 8
    """Reserved: a section that this version neither writes nor reads."""
    BANK = 16
    MEDIA = 32
    IDENTITY = 64


READ = int(Flag.TOOL_MAP | Flag.RESPONSES_TEXT | Flag.THINKING_TEXT | Flag.BANK | Flag.MEDIA | Flag.IDENTITY)


@dataclass(frozen=True)
class Header:
    """The fixed fields. ``reason``, ``flags`` and ``abi`` are plain numbers: they may be those of a later program."""

    quant_bits: int
    reason: int
    flags: int
    family: int
    tokens: int
    context: int
    created: int
    last_used: int
    payload_bytes: int
    text_bytes: int
    hits: int = 0
    abi: int = ABI

    @property
    def readable(self):
        """Whether this version knows what the record holds."""
        return self.abi == ABI and self.reason in Reason.__members__.values() and not self.flags & ~READ

    @property
    def payload_at(self):
        return HEADER.size + self.text_bytes

    @property
    def sections_at(self):
        return self.payload_at + self.payload_bytes

    def encode(self):
        """The 52 bytes before the text."""
        return HEADER.pack(
            MAGIC, VERSION, self.quant_bits, self.reason, self.flags, self.family, self.tokens, self.hits, self.context,
            self.abi, bytes(3), self.created, self.last_used, self.payload_bytes, self.text_bytes,
        )  # fmt: skip

    @classmethod
    def decode(cls, data, size):
        """The header of a file of ``size`` bytes that begins with ``data``. NotRecord, RecordError."""
        if data[:3] != MAGIC:
            raise NotRecord(f"begins with {bytes(data[:3])!r}, a record with {MAGIC!r}")
        if len(data) > 3 and data[3] != VERSION:
            raise NotRecord(f"is a record of version {data[3]}, this program reads {VERSION}")
        if len(data) < HEADER.size:
            raise RecordError(f"record of {size} bytes, its header alone has {HEADER.size}")
        (_, _, quant_bits, reason, flags, family, tokens, hits, context, abi, zero, created, last_used, payload_bytes,
         text_bytes) = HEADER.unpack_from(data)  # fmt: skip
        header = cls(
            quant_bits, reason, flags, family, tokens, context, created, last_used, payload_bytes, text_bytes, hits, abi,
        )  # fmt: skip
        if not 1 <= quant_bits <= 32:
            raise RecordError(f"record states {quant_bits} quant bits, accepted are 1 to 32")
        if any(zero):
            raise RecordError("record has other bytes than zeros after its payload ABI")
        if not 1 <= tokens <= context:
            raise RecordError(f"record states {tokens} tokens of a context of {context}")
        if header.readable and bool(flags & Flag.BANK) != Reason(reason).bank:
            raise RecordError(f"record states reason {reason} and flags {flags}, which disagree about a bank")
        if not text_bytes or not header._sized(size):
            stated = f"{text_bytes} bytes of text and {payload_bytes} of payload"
            raise RecordError(f"record states {stated}, which a file of {size} bytes does not have")
        return header

    def _sized(self, size):
        """Whether a file of ``size`` bytes can be this record."""
        rest = size - self.sections_at
        if not self.readable:
            return rest >= 0
        rest -= FOOTER.size * bool(self.flags & Flag.IDENTITY)
        return rest > TOOL_MAP.size if self.flags & Flag.TOOL_MAP else rest == 0


def encode_sections(tool_map, digest):
    """What follows the payload. tool_map: id → block, both bytes, maybe empty; digest: 32 bytes or None."""
    parts = []
    if tool_map:
        parts.append(TOOL_MAP.pack(b"KTM", 1, len(tool_map)))
        for name, block in tool_map.items():
            if not 1 <= len(name) <= MOST_ID:
                raise ValueError(f"a tool call's id has 1 to {MOST_ID} bytes, got {len(name)}")
            parts += [TOOL_ENTRY.pack(len(name), len(block)), name, block]
    if digest is not None:
        parts.append(FOOTER.pack(FOOTER_OPEN, digest, FOOTER_CLOSE))
    return b"".join(parts)


def decode_sections(data, flags):
    """(tool map, digest or None) in ``data``, all that follows the payload of a readable record. RecordError."""
    digest = None
    if flags & Flag.IDENTITY:
        digest = decode_footer(data[-FOOTER.size :])
        data = data[: -FOOTER.size]
    return _decode_tool_map(data) if flags & Flag.TOOL_MAP else {}, digest


def decode_footer(data):
    """The digest in a footer. RecordError."""
    if len(data) != FOOTER.size or bytes(data[:4]) != FOOTER_OPEN or bytes(data[-4:]) != FOOTER_CLOSE:
        raise RecordError("record does not end with the identity that its flags announce")
    return FOOTER.unpack(data)[1]


def _decode_tool_map(data):
    if len(data) < TOOL_MAP.size or bytes(data[:4]) != b"KTM\x01":
        raise RecordError("record has no tool map where its flags announce one")
    count = TOOL_MAP.unpack_from(data)[2]
    at, found = TOOL_MAP.size, {}
    while at < len(data):
        if len(data) - at < TOOL_ENTRY.size:
            raise RecordError("record's tool map ends within an entry")
        id_bytes, block_bytes = TOOL_ENTRY.unpack_from(data, at)
        at += TOOL_ENTRY.size
        if not 1 <= id_bytes <= MOST_ID or id_bytes + block_bytes > len(data) - at:
            stated = f"an id of {id_bytes} bytes and a block of {block_bytes}"
            raise RecordError(f"record's tool map states {stated}, {len(data) - at} remain")
        name, block = bytes(data[at : at + id_bytes]), bytes(data[at + id_bytes : at + id_bytes + block_bytes])
        found[name] = block
        at += id_bytes + block_bytes
    if count != len(found) or count == 0:
        raise RecordError(f"record's tool map states {count} entries and holds {len(found)} different ones")
    return found


def record_name(digest, text):
    """The file name of the record of ``text``."""
    return next(iter(prefix_names(digest, text, [len(text)])))


def prefix_names(digest, text, lengths):
    """File name → length, of the records of the first ``lengths`` bytes of ``text``; those beyond it are left out."""
    text, names, at = memoryview(text), {}, 0
    state = hashlib.sha1(digest or b"", usedforsecurity=False)
    for length in sorted(n for n in lengths if n <= len(text)):
        state.update(text[at:length])
        names[f"{state.hexdigest()}.kv"] = length
        at = length
    return names
