"""JSON as prompts and calls carry it: ", " and ": " between items, keys in the order received, non-ASCII kept, nothing
HTML-escaped, numbers in the digits they arrived in.

Knows nothing about messages or templates. Decoding is strict (RFC 8259): NaN and Infinity are not JSON.
"""
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


class WrittenFloat(float):
    """A float that remembers how it was written, so that 1.0 does not become 1 nor 1e5 become 100000.0."""

    __slots__ = ("text",)

    def __new__(cls, text: str) -> "WrittenFloat":
        value = super().__new__(cls, text)
        value.text = text
        return value

    def __repr__(self) -> str:
        return self.text

    __str__ = __repr__

    def __copy__(self) -> "WrittenFloat":
        return self

    def __deepcopy__(self, memo: dict) -> "WrittenFloat":
        return self

    def __reduce__(self) -> tuple:
        return WrittenFloat, (self.text,)


@dataclass(frozen=True)
class Encoded:
    """A value that is JSON text already; `dumps` writes it as it stands."""

    text: str


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def loads(text: str) -> Any:
    """Decode one JSON value. ValueError if the text is anything else, NaN, Infinity and trailing text included."""
    try:
        return json.loads(text, parse_float=WrittenFloat, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def escape(text: str) -> str:
    """The inside of the JSON string for text, without the quotes. Character by character, so that pieces concatenate:
    escape(a + b) == escape(a) + escape(b)."""
    if text.isprintable() and '"' not in text and "\\" not in text:
        return text
    return "".join(
        _ESCAPES.get(c) or (f"\\u{ord(c):04x}" if c < " " or "\ud800" <= c <= "\udfff" else c) for c in text
    )


def dumps(value: Any, *, indent: int | None = None, separators: tuple[str, str] | None = None,
          sort_keys: bool = False) -> str:
    """Encode a value. indent, separators and sort_keys mean what they mean in Python's `json.dumps`, whose layout
    (RFC 8259 leaves it open) is also the default here. TypeError for a value that JSON has no form for."""
    comma, colon = separators or ("," if indent is not None else ", ", ": ")
    return _dump(value, indent, comma, colon, sort_keys, "\n")


def _dump(value: Any, indent: int | None, comma: str, colon: str, sort_keys: bool, newline: str) -> str:
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f'"{escape(value)}"'
    if isinstance(value, (WrittenFloat, Encoded)):
        return value.text
    if isinstance(value, (int, float)):
        return json.dumps(value, allow_nan=False)
    if not isinstance(value, (Mapping, list, tuple)):
        raise TypeError(f"{type(value).__name__} has no JSON form")
    inner = newline + " " * (indent or 0)
    if isinstance(value, Mapping):
        opening, closing = "{", "}"
        pairs = sorted(value.items()) if sort_keys else value.items()
        items = [f'"{escape(str(k))}"{colon}{_dump(v, indent, comma, colon, sort_keys, inner)}' for k, v in pairs]
    else:
        opening, closing = "[", "]"
        items = [_dump(v, indent, comma, colon, sort_keys, inner) for v in value]
    if not items or indent is None:
        return opening + comma.join(items) + closing
    return opening + inner + (comma + inner).join(items) + newline + closing


def is_valid(text: str) -> bool:
    """Whether text is exactly one JSON value (white space around it allowed)."""
    try:
        loads(text)
    except ValueError:
        return False
    return True
