"""Request bodies: exactly one JSON object in UTF-8, nothing Python's parser would let through beyond the standard."""

import json

from .errors import ApiError, bad_request

MAX_DEPTH = 256


def read_object(req):
    """The body of a Falcon request as a dict. :class:`ApiError` 400 or 415 otherwise."""
    coding = req.get_header("Content-Encoding")
    if coding and coding.strip().lower() != "identity":
        raise ApiError(415, f"Content-Encoding must be identity or absent, got {coding!r}")
    return parse_object(req.bounded_stream.read())


def parse_object(raw):
    """``raw`` bytes as a JSON object."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"the body must be UTF-8, byte {error.start} is not") from None
    if not text.strip():
        raise bad_request("the body is empty; a JSON object is expected")
    _check_depth(text)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise bad_request(f"the body is not valid JSON: {error.msg} at {place}") from None
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, got {_kind(value)}")
    _check_surrogates(value)
    return value


def _refuse_constant(name):
    raise ValueError(f"{name} is not a JSON number")


def _check_depth(text):
    """Refuse nesting beyond MAX_DEPTH before the recursive parser meets it."""
    depth, inside, escaped = 0, False, False
    for char in text:
        if inside:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                inside = False
        elif char == '"':
            inside = True
        elif char in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise bad_request(f"the body is nested deeper than {MAX_DEPTH}")
        elif char in "]}":
            depth -= 1


def _check_surrogates(value):
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                raise bad_request("the body holds an unpaired surrogate escape (\\ud800 to \\udfff)") from None
        elif isinstance(item, dict):
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, list):
            pending += item


def _kind(value):
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
