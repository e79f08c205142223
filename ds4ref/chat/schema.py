"""What a tool's JSON schema says about the type of an argument (JSON Schema 2020-12, sections 4.2.1 and 6.1).

Only types are looked at: enough to tell "02134" the string from 2134 the number in call syntaxes that carry bare text.
"""
from collections.abc import Iterable, Mapping
from typing import Any

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def parameters(tools: Iterable[Mapping] | None) -> dict[str, Mapping]:
    """Tool name → the schema of its arguments ({} if it declares none)."""
    found = {}
    for tool in tools or ():
        function = tool.get("function") or tool
        schema = function.get("parameters")
        found[function.get("name")] = schema if isinstance(schema, Mapping) else {}
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
