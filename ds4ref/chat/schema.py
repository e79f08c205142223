"""What a tool's JSON schema says about the type of an argument (JSON Schema 2020-12, sections 4.2.1 and 6.1).

Only types are looked at: enough to tell "02134" the string from 2134 the number in call syntaxes that carry bare text.
"""
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from ds4ref.chat.errors import ChatError

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


_STEPS = 32


def parameters(tools: Iterable[Mapping] | None) -> dict[str, Mapping]:
    """Tool name → the schema of its arguments ({} if it declares none), with local references of the properties followed."""
    found = {}
    for tool in tools or ():
        function = tool.get("function") or tool
        schema = function.get("parameters")
        found[function.get("name")] = _top_followed(schema) if isinstance(schema, Mapping) else {}
    return found


def _top_followed(schema: Mapping) -> Mapping:
    top = followed(schema, schema)
    properties = top.get("properties") if isinstance(top, Mapping) else None
    if not isinstance(properties, Mapping):
        return top if isinstance(top, Mapping) else {}
    return {**top, "properties": {name: followed(inner, schema) for name, inner in properties.items()}}


def followed(schema: Any, root: Mapping, steps: int = _STEPS) -> Any:
    """A schema without a reference at its own level and that of its alternatives; what cannot be followed says nothing."""
    if not isinstance(schema, Mapping) or not steps:
        return schema if not isinstance(schema, Mapping) else {}
    if isinstance(schema.get("$ref"), str):
        try:
            found = target(schema["$ref"], root)
        except ChatError:
            return {}
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        found = followed(found, root, steps - 1)
        return {**found, **beside} if isinstance(found, Mapping) else found
    branches = {word: [followed(branch, root, steps - 1) for branch in schema[word]]
                for word in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(word), (list, tuple))}
    return {**schema, **branches} if branches else schema


def target(reference: str, root: Any) -> Any:
    """What a local reference ("#", or "#/…", a JSON pointer, RFC 6901) leads to. ChatError if it leads nowhere."""
    found = root
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise ChatError(f"the reference {reference!r} of a schema does not begin with '#/'; only local ones are followed")
    for part in reference[2:].split("/") if len(reference) > 1 else ():
        part = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, (list, tuple)) and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
        else:
            raise ChatError(f"the reference {reference!r} of a schema leads nowhere")
    return found


def property_schema(schema: Any, name: str) -> Any:
    """The schema of property `name` of an object schema, {} if it declares none."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(name, {}) if isinstance(properties, Mapping) else {}


def declared(schema: Any) -> frozenset[str] | None:
    """The JSON types a schema admits, None if it does not say (no type, a reference, not a schema)."""
    if not isinstance(schema, Mapping):
        return None
    types: set[str] | None = None
    kind = schema.get("type")
    if isinstance(kind, str):
        types = {kind}
    elif isinstance(kind, (list, tuple)):
        types = {k for k in kind if isinstance(k, str)}
    elif isinstance(schema.get("enum"), (list, tuple)):
        types = {type_of(v) for v in schema["enum"]}
    elif "const" in schema:
        types = {type_of(schema["const"])}
    else:
        for word in ("anyOf", "oneOf"):
            branches = schema.get(word)
            if isinstance(branches, (list, tuple)) and branches:
                known = [declared(branch) for branch in branches]
                if None not in known:
                    types = set().union(*known)
        if types is None and isinstance(schema.get("allOf"), (list, tuple)):
            known = [found for part in schema["allOf"] if (found := declared(part)) is not None]
            types = set(frozenset.intersection(*known)) if known else None
    if types is None or not types <= set(TYPES):
        return None
    return frozenset(types | {"null"} if schema.get("nullable") is True else types)


def type_of(value: Any) -> str:
    """The JSON type of a decoded value; a number without a fraction is an integer, as JSON Schema has it."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list() | tuple():
            return "array"
    return "object"


def fits(value: Any, types: frozenset[str] | None) -> bool:
    """Whether a decoded value is of one of the types (all values are if the types are not known)."""
    if types is None:
        return True
    kind = type_of(value)
    return kind in types or (kind == "integer" and "number" in types)
