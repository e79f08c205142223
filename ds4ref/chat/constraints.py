"""JSON schemas of tools taken apart, as grammars of call syntaxes that carry bare text need them (JSON Schema 2020-12).

A schema is resolved (local references, allOf) and opened into *cases*: schemas without combinators that admit values of
known types. What cannot be taken apart is a ChatError, since a grammar must admit valid values only; it may admit fewer.

Knows nothing about grammars and markers. Types as the parsers see them are `schema`'s.
"""
from collections.abc import Iterator, Mapping
from typing import Any

from ds4ref.chat import schema
from ds4ref.chat.errors import ChatError

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""The formats that are enforced in JSON; others are annotations (JSON Schema 2020-12, section 7.2.1)."""

_DEPTH = 32
_ROOT = "root"
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose members are named by the user."""
_DATA = ("enum", "const", "default", "examples")
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable",
                          "contentEncoding", "contentMediaType", "contentSchema", "format", "strict"})
_HINTS = {"properties": "object", "required": "object", "additionalProperties": "object", "items": "array",
          "prefixItems": "array", "pattern": "string", "minLength": "string", "maxLength": "string", "minimum": "number",
          "maximum": "number"}
"""A keyword → the type that is meant where a schema with it states none."""

_KINDS = {"an object": Mapping, "an array": (list, tuple), "a string": str, "a number of at least 0": int,
          "a number": (int, float), "a schema": (Mapping, bool)}
_SHAPES = {
    "an object": _NAMED,
    "an array": ("required", "enum", "anyOf", "oneOf", "allOf", "prefixItems"),
    "a string": ("$ref", "pattern", "format"),
    "a number of at least 0": ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    "a number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "a schema": ("items", "additionalProperties", "not", "if", "then", "else", "propertyNames", "contains"),
}
_SHAPE_OF = {key: kind for kind, keys in _SHAPES.items() for key in keys}


def check(spec: Any) -> None:
    """ChatError unless the keywords that are looked at have values of the kinds that JSON Schema gives them."""
    if isinstance(spec, bool):
        return
    if not isinstance(spec, Mapping):
        raise ChatError(f"a schema must be an object or a boolean, not {spec!r:.40}")
    for key, value in spec.items():
        kind = _SHAPE_OF.get(key)
        if kind and (not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "a schema")
                     or (kind == "a number of at least 0" and value < 0)):
            raise ChatError(f"{key!r} in a schema must be {kind}, not {value!r:.40}")
        if key == "required" and not all(isinstance(name, str) for name in value):
            raise ChatError("'required' in a schema must be an array of strings")
        kinds = value if isinstance(value, (list, tuple)) else [value]
        if key == "type" and not (kinds and all(kind in schema.TYPES for kind in kinds)):
            raise ChatError(f"'type' in a schema must be one or several of {', '.join(schema.TYPES)}, not {value!r:.40}")
        if kind == "a schema":
            check(value)
        elif key in _NAMED:
            for inner in value.values():
                check(inner)
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            for inner in value:
                check(inner)


def document(spec: Any, root: Any) -> Any:
    """A part of `root` as a schema of its own, with what it refers to; without what llguidance would trip over."""
    out = _moved(spec)
    if _refers(out):
        out = {**out, "$defs": {_ROOT: _moved(root)}}
    return out


def _moved(spec: Any) -> Any:
    """A copy whose local references lead to `#/$defs/root/…`, without identifiers and formats that are not enforced."""
    if isinstance(spec, (list, tuple)):
        return [_moved(item) for item in spec]
    if not isinstance(spec, Mapping):
        return spec
    out = {}
    for key, value in spec.items():
        if key in _NAMED and isinstance(value, Mapping):
            out[key] = {name: _moved(inner) for name, inner in value.items()}
        elif key in _DATA:
            out[key] = value
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            out[key] = f"#/$defs/{_ROOT}{value[1:]}"
        elif not _says_nothing(key, value):
            out[key] = _moved(value)
    return out


def _says_nothing(key: str, value: Any) -> bool:
    """Whether a keyword constrains nothing here: identifiers, formats that are annotations, conditions always met."""
    match key:
        case "$schema" | "$id" | "id":
            return isinstance(value, str)
        case "format":
            return value not in FORMATS
        case "propertyNames":
            return value in (True, {}, {"type": "string"})
        case "uniqueItems":
            return value is False
        case "minProperties" | "minContains":
            return value == 0
    return key in ("$comment", "$anchor", "x-guidance", "strict")


def _refers(spec: Any) -> bool:
    if isinstance(spec, Mapping):
        return "$ref" in spec or any(_refers(value) for key, value in spec.items() if key not in _DATA)
    return isinstance(spec, list) and any(map(_refers, spec))


def resolved(spec: Any, root: Any) -> Any:
    """A schema with its own reference and allOf merged into it. ChatError for references out of the document."""
    for _ in range(_DEPTH):
        if not isinstance(spec, Mapping):
            return spec
        if "$ref" in spec:
            rest = {key: value for key, value in spec.items() if key != "$ref"}
            spec = merged(schema.target(spec["$ref"], root), rest)
        elif "allOf" in spec:
            parts = spec["allOf"]
            spec = {key: value for key, value in spec.items() if key != "allOf"}
            for part in parts:
                spec = merged(spec, resolved(part, root))
        else:
            return spec
    raise ChatError("a schema refers to itself in a circle")


def merged(first: Any, second: Any) -> Any:
    """A schema of what both admit. ChatError where that cannot be written down."""
    for one, other in ((first, second), (second, first)):
        if one is True or one == {}:
            return other
        if one is False or not isinstance(one, Mapping):
            return False
    out = dict(first)
    properties = _properties(first, second)
    if properties:
        out["properties"] = properties
    for key, value in second.items():
        known = out.get(key, value)
        if key == "properties":
            pass
        elif known == value or key in _ANNOTATIONS:
            out[key] = value
        elif key == "additionalProperties":
            out[key] = merged(known, value)
        elif key in _BOUNDS:
            out[key] = _BOUNDS[key](known, value)
        elif key == "required":
            out[key] = [*known, *(name for name in value if name not in known)]
        elif key == "type":
            out[key] = sorted(_types(known) & _types(value))
        elif key == "enum":
            out[key] = [item for item in known if item in value]
        else:
            raise ChatError(f"schemas that both state {key!r} cannot be combined")
    return out


def _properties(first: Mapping, second: Mapping) -> dict[str, Any]:
    """The properties of two schemas of objects; one that a schema does not list is of its `additionalProperties`."""
    known, others = first.get("properties") or {}, second.get("properties") or {}
    out = {name: merged(spec, others.get(name, second.get("additionalProperties", True))) for name, spec in known.items()}
    for name, spec in others.items():
        if name not in known:
            out[name] = merged(spec, first.get("additionalProperties", True))
    return out


_BOUNDS = {"minLength": max, "maxLength": min, "minimum": max, "maximum": min, "minItems": max, "maxItems": min}


def _types(kind: Any) -> set[str]:
    kinds = set(kind) if isinstance(kind, (list, tuple)) else {kind}
    return kinds | {"integer"} if "number" in kinds else kinds


def cases(spec: Any, root: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Schemas without reference and combinator that together admit what `spec` admits; each states its types, as a list."""
    if depth > _DEPTH:
        raise ChatError("a schema is nested too deeply")
    spec = resolved(spec, root)
    if spec is False:
        return
    spec = {} if spec is True or not isinstance(spec, Mapping) else spec
    for word in ("anyOf", "oneOf"):
        if word in spec:
            rest = {key: value for key, value in spec.items() if key != word}
            branches = [list(cases(merged(rest, resolved(branch, root)), root, depth + 1)) for branch in spec[word]]
            if word == "oneOf":
                _check_disjoint(branches)
            for branch in branches:
                yield from branch
            return
    unknown = [key for key in spec if key in ("not", "if", "then", "else", "dependentSchemas", "$dynamicRef")]
    if unknown:
        raise ChatError(f"{unknown[0]!r} in a schema cannot be enforced")
    known = schema.declared(spec)
    hints = {_HINTS[key] for key in spec if key in _HINTS}
    yield {**spec, "type": sorted(known if known is not None else hints or schema.TYPES)}


def _check_disjoint(branches: list[list[dict[str, Any]]]) -> None:
    """ChatError unless no value fits two branches of a oneOf, as far as types and listed values tell."""
    seen: list[tuple[set[str], list | None]] = []
    for branch in branches:
        mine = [(_types(case["type"]), values(case)) for case in branch]
        for types, listed in mine:
            for others, theirs in seen:
                apart = listed is not None and theirs is not None and not any(v in theirs for v in listed)
                if types & others and not apart:
                    raise ChatError("oneOf whose branches differ in more than types or listed values cannot be enforced")
        seen += mine


def values(case: Mapping) -> list | None:
    """The values that a case lists, None if it lists none."""
    if "const" in case:
        return [case["const"]]
    return list(case["enum"]) if isinstance(case.get("enum"), (list, tuple)) else None


def of_type(case: Mapping, types: set[str]) -> dict[str, Any] | None:
    """A case narrowed to some types, None if nothing is left."""
    listed = values(case)
    if listed is not None:
        left = [v for v in listed if schema.fits(v, frozenset(types)) and schema.fits(v, frozenset(case["type"]))]
        return {"enum": left} if left else None
    left = [kind for kind in case["type"] if kind in types]
    return {**case, "type": left} if left else None


def admits_all(spec: Any, root: Any) -> bool:
    """Whether a schema says nothing about a value."""
    spec = resolved(spec, root)
    return spec is True or (isinstance(spec, Mapping) and spec.keys() <= _ANNOTATIONS | {"$comment", "$defs", "definitions"})


def object_case(case: Mapping) -> dict[str, Any]:
    """A case of objects as {properties, required, additional}. additional: the schema of further properties, None for none:
    where a schema lists its properties, only those are generated unless it asks for others. ChatError for keywords that
    cannot be enforced over tags."""
    properties = case.get("properties") or {}
    required = list(case.get("required") or ())
    for key in ("patternProperties", "propertyNames", "dependentRequired", "unevaluatedProperties"):
        if key in case and not _says_nothing(key, case[key]):
            raise ChatError(f"{key!r} in the parameters of a tool cannot be enforced")
    further = case.get("additionalProperties", "properties" not in case)
    additional = None if further is False else {} if further is True else further
    if case.get("minProperties", 0) > len(required):
        raise ChatError("'minProperties' beyond the required ones cannot be enforced in the parameters of a tool")
    if "maxProperties" in case:
        if case["maxProperties"] < len(set(properties) | set(required)):
            raise ChatError("'maxProperties' below the number of properties cannot be enforced in the parameters of a tool")
        additional = None
    return {"properties": properties, "required": required, "additional": additional}
