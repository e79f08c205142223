"""Text to token ids and back: byte-level byte-pair encoding from the vocabulary inside an artifact.

Text is cut at special tokens, each run between them into pieces (``pretokenizers.py``), each piece into bytes written as
the 256 printable characters of GPT-2 (Radford et al. 2019), and the bytes are merged in the order of the vocabulary's
merges (Sennrich et al. 2016). The merging itself is done by the `tokenizers` library.

Knows nothing about chat formats: whoever renders a prompt says which of its characters came from users (``plain``), and no
special token is read there. Knows the ids that end a turn only as far as the artifact names them.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import tokenizers
from tokenizers import Regex, models, normalizers
from tokenizers import pre_tokenizers as splits

from .gguf import ArtifactError
from .pretokenizers import O200K, RULES, Rule

# Token types of `tokenizer.ggml.token_type` (GGUF specification).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

BYTES_OF_UTF8 = [*range(0x80), *range(0x80, 0xC0), *range(0xC2, 0xF5)]
"""Every byte value that occurs in UTF-8 text."""


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte value in a byte-level vocabulary (GPT-2), by value."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


ALPHABET = byte_alphabet()
VALUE = {character: value for value, character in enumerate(ALPHABET)}


class Tokenizer:
    """A vocabulary with its rule.

    tokens: the entries as stored, by id; types: their token types; merges: pairs of entries, first merged first.
    specials: text → id of the control, unknown and user-defined entries. add_bos: whether sequences begin with ``bos_id``.
    bos_id, eos_id, eot_id, eom_id, pad_id: None where the artifact names none; eot_ids: those of the last two that exist.
    """

    def __init__(self, tokens: list[str], types: list[int], merges: Iterable[tuple[str, str]], rule: Rule, *,
                 named: dict[str, int | None] | None = None, add_bos: bool = False, where: str = "tokenizer"):
        """``named``: ids by role (bos, eos, eot, eom, pad). ArtifactError, beginning with ``where``, for a bad vocabulary."""
        self._ids = _index(tokens, types, where)
        self.tokens, self.types = tokens, types
        self.specials = {text: i for i, text in enumerate(tokens) if types[i] in (CONTROL, UNKNOWN, USER_DEFINED)}
        self.unused_ids = tuple(i for i, kind in enumerate(types) if kind == UNUSED)
        roles = _named(named or {}, len(tokens), where)
        self.bos_id, self.eos_id, self.pad_id = roles.get("bos"), roles.get("eos"), roles.get("pad")
        self.eot_id, self.eom_id = roles.get("eot"), roles.get("eom")
        self.eot_ids = tuple(i for i in (self.eot_id, self.eom_id) if i is not None)
        if add_bos and self.bos_id is None:
            raise ArtifactError(f"{where}: add_bos_token is true but there is no bos_token_id")
        self.add_bos = add_bos
        # Runs of blanks that a vocabulary lists as entries of their own are text, not markers: they hold in users' text too.
        blanks = [text for text, i in self.specials.items() if text.isspace() and types[i] == USER_DEFINED]
        self._blanks = _any_of(blanks)
        self._markers = _any_of(self.specials.keys() - set(blanks))
        self._core = _core(self._ids, types, list(merges), rule, where)

    @classmethod
    def from_artifact(cls, artifact) -> "Tokenizer":
        """The tokenizer of an artifact: `tokenizer.ggml.*`, or `inkling.tokenizer.json` for Inkling.

        ArtifactError for a missing or malformed key, an unknown kind of vocabulary or an unknown pre-tokenizer.
        """
        metadata, where = artifact.metadata, artifact.path.name
        if metadata.get("general.architecture") == "inkling":
            return cls(**_inkling(metadata, where))
        return cls(**_ggml(metadata, where))

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary; a model may have more rows of logits, as padding."""
        return len(self.tokens)

    def encode(self, text: str, *, parse_special: bool = True, plain: Sequence[tuple[int, int]] = ()) -> list[int]:
        """Token ids of ``text``; no BOS is added.

        Special tokens are matched leftmost, the longest first, save where a match would touch one of the character spans
        [start, end) in ``plain``; with ``parse_special`` false they are matched nowhere. Everything between two matches is
        one run, whatever spans it is made of, so pieces merge across the spans' ends.
        ValueError for a span outside the text and for an unpaired surrogate.
        """
        if lone := re.search("[\ud800-\udfff]", text):
            raise ValueError(f"character {lone.start()} of the text is an unpaired surrogate, U+{ord(lone.group()):04X}")
        regions = _outside(plain, len(text)) if parse_special else []
        ids = []
        for run, marker in _cut(text, self._markers, regions):
            for words, blank in _cut(run, self._blanks, [(0, len(run))]):
                if words:
                    ids += self._core.encode(words, add_special_tokens=False).ids
                if blank is not None:
                    ids.append(self.specials[blank])
            if marker is not None:
                ids.append(self.specials[marker])
        return ids

    def with_bos(self, ids: Sequence[int]) -> list[int]:
        """``ids`` with BOS in front if the vocabulary wants one and it is not there yet."""
        ids = list(ids)
        return [self.bos_id, *ids] if self.add_bos and ids[:1] != [self.bos_id] else ids

    def decode(self, ids: Iterable[int], *, skip_control: bool = True) -> str:
        """Text of ``ids``, as :class:`Detokenizer` gives it. ValueError for an id outside the vocabulary."""
        detokenizer = Detokenizer(self, skip_control=skip_control)
        return "".join([detokenizer.feed(i) for i in ids]) + detokenizer.flush()

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one entry: of a special token those of its text, of an unused entry none."""
        text, kind = self.piece(id), self.types[id]
        if kind == UNUSED:
            return b""
        if kind == BYTE:
            return bytes([_byte_value(text)])
        try:
            return text.encode() if kind != NORMAL else bytes(map(VALUE.__getitem__, text))
        except KeyError:  # an added token that the converter did not mark: its text is not in the byte alphabet
            return text.encode()

    def piece(self, id: int) -> str:
        """The entry as the vocabulary stores it. ValueError for an id outside the vocabulary."""
        if not 0 <= id < len(self.tokens):
            raise ValueError(f"token id {id} is outside the vocabulary of {len(self.tokens)} entries")
        return self.tokens[id]

    def id_of(self, text: str) -> int | None:
        """The id of the entry stored as ``text``, or None."""
        return self._ids.get(text)

    def is_control(self, id: int) -> bool:
        """Whether the entry is a control (or the unknown) token, which has no text of its own. ValueError as ``piece``."""
        self.piece(id)
        return self.types[id] in (CONTROL, UNKNOWN)


class Detokenizer:
    """Token ids to text, one at a time, never ending inside a character.

    Bytes that cannot become a character are replaced by U+FFFD as soon as that is certain; a character that is still
    incomplete at the end is dropped. Control tokens have no text unless ``skip_control`` is false.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, *, skip_control: bool = True):
        """``tokenizer`` may be None where only ``feed_bytes`` is used."""
        self._tokenizer, self._skip = tokenizer, skip_control
        self._held = b""

    def feed(self, id: int) -> str:
        """The characters that this token completes. ValueError for an id outside the vocabulary."""
        if self._skip and self._tokenizer.is_control(id):
            return ""
        return self.feed_bytes(self._tokenizer.token_bytes(id))

    def feed_bytes(self, data: bytes) -> str:
        """The characters that these bytes complete."""
        data = self._held + data
        complete = len(data) - _beginning(data)
        self._held = data[complete:]
        return data[:complete].decode("utf-8", "replace")

    def flush(self) -> str:
        """End of the answer: an incomplete character is dropped, so there is never anything left to say."""
        self._held = b""
        return ""


# Well-formed UTF-8 (Unicode, table 3-7): length by lead byte, and the second byte's range where it is not 80 to BF.
_LENGTH = dict.fromkeys(range(0xC2, 0xE0), 2) | dict.fromkeys(range(0xE0, 0xF0), 3) | dict.fromkeys(range(0xF0, 0xF5), 4)
_SECOND = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}


def _beginning(data):
    """How many bytes at the end of ``data`` begin a character that further bytes could complete: 0 to 3."""
    for n in range(1, min(3, len(data)) + 1):
        lead, rest = data[-n], data[len(data) - n + 1 :]
        if lead in _LENGTH:
            low, high = _SECOND.get(lead, (0x80, 0xBF))
            return n if n < _LENGTH[lead] and (not rest or low <= rest[0] <= high) else 0
        if not 0x80 <= lead <= 0xBF:
            return 0
    return 0


def _index(tokens, types, where):
    """Entry → id. ArtifactError for duplicates, unknown types, empty specials, malformed bytes."""
    if len(tokens) != len(types):
        raise ArtifactError(f"{where}: the vocabulary has {len(tokens)} tokens but {len(types)} token types")
    ids = {text: i for i, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        i = next(i for i, text in enumerate(tokens) if ids[text] != i)
        raise ArtifactError(f"{where}: token {i} and token {ids[tokens[i]]} are both {tokens[i]!r}; every entry must differ")
    for i, kind in enumerate(types):
        if not NORMAL <= kind <= BYTE:
            raise ArtifactError(f"{where}: token {i} {tokens[i]!r} has token type {kind} (known: {NORMAL} to {BYTE})")
        if kind == BYTE and not re.fullmatch("<0x[0-9A-F]{2}>", tokens[i]):
            raise ArtifactError(f"{where}: token {i} has the type of a byte but reads {tokens[i]!r}, not like '<0x0A>'")
    if ids.get("", -1) >= 0 and types[ids[""]] != UNUSED:
        raise ArtifactError(f"{where}: token {ids['']} is empty and not marked unused")
    return ids


def _byte_value(text):
    return int(text[3:5], 16)


def _named(named, size, where):
    """``named`` without the absent roles, every id inside the vocabulary."""
    for role, i in named.items():
        if i is not None and not 0 <= i < size:
            raise ArtifactError(f"{where}: the {role} token id is {i}, outside the vocabulary of {size} entries")
    return {role: i for role, i in named.items() if i is not None}


def _core(ids, types, merges, rule, where):
    """The `tokenizers` pipeline for text without special tokens: normaliser, splits, byte alphabet, merges.

    Control tokens are not in its vocabulary, so no text can become one, not even by a merge or as a piece taken whole.
    """
    mergeable = {text: i for text, i in ids.items() if types[i] == NORMAL}
    for rank, (left, right) in enumerate(merges):
        for text in (left, right, left + right):
            i = ids.get(text, -1)
            if i < 0 or types[i] not in (NORMAL, USER_DEFINED):
                problem = "not in the vocabulary" if i < 0 else f"token {i} of type {types[i]}, not an ordinary one"
                raise ArtifactError(f"{where}: merge {rank} joins {left!r} and {right!r}, but {text!r} is {problem}")
            mergeable[text] = i
    for value in BYTES_OF_UTF8:
        i = ids.get(f"<0x{value:02X}>", -1)
        if ALPHABET[value] not in mergeable and i >= 0 and types[i] == BYTE:
            mergeable[ALPHABET[value]] = i
        if ALPHABET[value] not in mergeable:
            raise ArtifactError(
                f"{where}: the vocabulary has no token for byte 0x{value:02X} ({ALPHABET[value]!r} or '<0x{value:02X}>'), "
                "so text that holds it could not be encoded"
            )
    core = tokenizers.Tokenizer(models.BPE(mergeable, merges, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        core.normalizer = normalizers.NFC()
    cuts = [splits.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    core.pre_tokenizer = splits.Sequence([*cuts, splits.ByteLevel(add_prefix_space=False, use_regex=False)])
    return core


def _any_of(texts):
    """A pattern that matches the longest of ``texts``, or None when there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None


def _outside(spans, length):
    """The parts [start, end) of a text of ``length`` characters that no span touches, in order."""
    regions, position = [], 0
    for start, end in sorted(spans):
        if not 0 <= start <= end <= length:
            raise ValueError(f"the plain span ({start}, {end}) does not lie in a text of {length} characters")
        if start < end:
            regions.append((position, start))
            position = max(position, end)
    return [(start, end) for start, end in [*regions, (position, length)] if start < end]


def _cut(text, pattern, regions) -> Iterator[tuple[str, str | None]]:
    """``text`` cut at the matches of ``pattern`` inside ``regions``: each run with the match after it (None at the end)."""
    position = 0
    if pattern is not None:
        for start, end in regions:
            for match in pattern.finditer(text, start, end):
                yield text[position:match.start()], match.group()
                position = match.end()
    yield text[position:], None


def _ggml(metadata, where):
    """Arguments of ``Tokenizer`` from the `tokenizer.ggml.*` keys."""

    def get(key, kind, expected, default=None):
        value = metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            found = "missing" if value is None else f"of type {type(value).__name__}"
            raise ArtifactError(f"{where}: tokenizer.ggml.{key} is {found}; {expected} is expected")
        return value

    def identifier(key):
        return get(key, int, "a token id") if f"tokenizer.ggml.{key}" in metadata else None

    if (model := get("model", str, "'gpt2'")) != "gpt2":
        raise ArtifactError(f"{where}: tokenizer.ggml.model is {model!r}; only 'gpt2' (byte-level BPE) is known")
    if (pre := get("pre", str, "the name of a pre-tokenizer")) not in RULES:
        raise ArtifactError(f"{where}: tokenizer.ggml.pre is {pre!r} (known: {', '.join(sorted(RULES))})")
    rule = RULES[pre]
    normalizer = get("normalizer", str, "'nfc' or 'none'", "nfc" if rule.nfc else "none")
    if normalizer not in ("nfc", "none"):
        raise ArtifactError(f"{where}: tokenizer.ggml.normalizer is {normalizer!r} (known: nfc, none)")
    types = get("token_type", np.ndarray, "an array of integers")
    if types.ndim != 1 or types.dtype.kind not in "iu":
        raise ArtifactError(f"{where}: tokenizer.ggml.token_type is an array of {types.dtype}; integers are expected")
    turn_end = identifier("eot_token_id")
    return {
        "tokens": _strings(get("tokens", list, "a list of strings"), "tokenizer.ggml.tokens", where),
        "types": types.tolist(),
        "merges": [
            _pair(merge, rank, where)
            for rank, merge in enumerate(_strings(get("merges", list, "a list of strings"), "tokenizer.ggml.merges", where))
        ],
        "rule": replace(rule, nfc=normalizer == "nfc"),
        "named": {
            "bos": identifier("bos_token_id"),
            "eos": identifier("eos_token_id"),
            "eot": identifier("end_of_turn_token_id") if turn_end is None else turn_end,  # Motif-3 has a key of its own
            "eom": identifier("eom_token_id"),
            "pad": identifier("padding_token_id"),
        },
        "add_bos": get("add_bos_token", bool, "true or false", False),
        "where": where,
    }


def _strings(values, key, where):
    """``values`` if all of them are strings."""
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise ArtifactError(f"{where}: {key}[{i}] is of type {type(value).__name__}; a string is expected")
    return values


def _pair(merge, rank, where):
    """The two entries of a merge, written as one string with a space between them or as a list of two."""
    pair = tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) if isinstance(merge, list) else ()
    if len(pair) != 2 or not all(isinstance(text, str) and text for text in pair):
        raise ArtifactError(f"{where}: merge {rank} is {merge!r}; two tokens with one space between them are expected")
    return pair


INKLING_END = "<|content_model_end_sampling|>"
INKLING_BEGIN = "<|begin_of_text|>"


def _inkling(metadata, where):
    """Arguments of ``Tokenizer`` from `inkling.tokenizer.json`, a complete file of the `tokenizers` library.

    Only what Inkling publishes is read: byte-level BPE after the o200k split, no normaliser, plain added tokens.
    """
    where = f"{where}: inkling.tokenizer.json"
    if not isinstance(text := metadata.get("inkling.tokenizer.json"), str):
        raise ArtifactError(f"{where} is {'missing' if text is None else 'not a string'}; a tokenizer.json is expected")
    try:
        document = json.loads(text)
        model, added = document["model"], document["added_tokens"]
        split, byte_level = document["pre_tokenizer"]["pretokenizers"]
        found = {
            "model": model["type"],
            "normalizer": document["normalizer"],
            "split": split["pattern"]["Regex"],
            "split behavior": (split["behavior"], split["invert"]),
            "byte level": (byte_level["type"], byte_level["use_regex"], byte_level["add_prefix_space"]),
            "extras": [key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)],
            "added tokens with lstrip, rstrip or single_word": [
                token["content"] for token in added if token["lstrip"] or token["rstrip"] or token["single_word"]
            ],
        }
        entries = [*model["vocab"].items(), *((token["content"], token["id"]) for token in added)]
        ids = dict(entries)
        kinds = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in added}
        merges = list(model["merges"])
        ignore_merges = model["ignore_merges"] is True
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{where} is not a byte-level BPE tokenizer ({type(error).__name__}: {error})") from None
    expected = {
        "model": "BPE",
        "normalizer": None,
        "split": O200K,
        "split behavior": ("Isolated", False),
        "byte level": ("ByteLevel", False, False),
    }
    for part, value in found.items():
        if value != expected.get(part, []):
            raise ArtifactError(f"{where}: its {part} is {value!r}; {expected.get(part, [])!r} is expected")
    tokens = [None] * len(ids)
    for name, i in entries:
        if type(i) is not int or not 0 <= i < len(tokens) or tokens[i] not in (None, name) or not isinstance(name, str):
            raise ArtifactError(f"{where}: {name!r} has id {i!r}; {len(tokens)} tokens need the ids 0 to {len(tokens) - 1}")
        tokens[i] = name
    for name in (INKLING_BEGIN, INKLING_END):
        if name not in kinds:
            raise ArtifactError(f"{where}: it has no added token {name!r}")
    return {
        "tokens": tokens,
        "types": [kinds.get(name, NORMAL) for name in tokens],
        "merges": [_pair(merge, rank, where) for rank, merge in enumerate(merges)],
        "rule": Rule((O200K,), ignore_merges=ignore_merges),
        "named": {"bos": ids[INKLING_BEGIN], "eos": ids[INKLING_END]},
        "where": where,
    }
