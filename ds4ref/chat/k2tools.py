"""How K2-Horizon's prompt shows tools: as Markdown, or one JSON line for each.

    ## get_weather
    Current weather of a city.

    **Parameters**
    - `city` *(string, required)* - City name
    - `unit` *(string)*
      - Allowed values: `celsius`, `fahrenheit`
      - Default: `celsius`

Nested schemas indent by two spaces; values are written as Python writes them. Where one tool's schema holds something that
this notation does not carry ($ref, patternProperties, nested objects as annotations …), all tools are JSON lines.

Source: the family's page, and public ports of the published template for what the renderings at hand do not show. The
template also writes out references, pattern properties and declared results, which are JSON lines here. Knows nothing about
messages.
"""
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ds4ref.chat import jsontext, schema, turns
from ds4ref.chat.errors import ChatError

_WRITTEN = frozenset({"type", "description", "enum", "default", "properties", "required", "items", "oneOf", "anyOf",
                      "additionalProperties"})
_MAX_NESTING = 32


def checked(tool: Mapping) -> dict[str, Any]:
    """The tool with a schema of its arguments, that of no arguments if it declares none. ChatError for a schema that the
    template refuses: one that requires a property it does not define."""
    function = dict(tool.get("function") or tool)
    if function.get("parameters") is None:
        function["parameters"] = {"type": "object", "properties": {}}
    if not isinstance(function["parameters"], Mapping):
        raise ChatError(f"the parameters of tool {function.get('name')!r} are no JSON schema object")
    _check(function["parameters"], f"tool {function.get('name')!r}")
    return {**tool, "function": function} if tool.get("function") else function


def _check(spec: Any, where: str, depth: int = 0) -> None:
    if not isinstance(spec, Mapping):
        return
    if depth > _MAX_NESTING:
        raise ChatError(f"the parameters of {where} are nested more than {_MAX_NESTING} deep")
    required, properties = spec.get("required") or [], spec.get("properties") or {}
    if not isinstance(required, (list, tuple)) or not isinstance(properties, Mapping):
        raise ChatError(f"{where} has a schema whose required is no list or whose properties are no object")
    for name in required:
        if name not in properties:
            raise ChatError(f"{where} requires the property {name!r}, which its schema does not define")
    for name, inner in properties.items():
        _check(inner, f"{where}, property {name!r}", depth + 1)
    _check(spec.get("items"), f"the items of {where}", depth + 1)


def listing(tools: Sequence[Mapping], presentation: str) -> str:
    """The tools as text. presentation: "markdown" or "json"."""
    functions = [tool.get("function") or tool for tool in tools]
    if presentation == "json" or not all(_carries(f["parameters"]) and not _others(f) for f in functions):
        return "\n".join(map(jsontext.dumps, tools))
    return "\n\n".join(map(_markdown, functions))


def _others(function: Mapping) -> bool:
    """Whether a function declares structured data beside its parameters."""
    known = ("name", "description", "parameters")
    return any(isinstance(v, (Mapping, list, tuple)) or k in ("returns", "response")
               for k, v in function.items() if k not in known)


def _carries(spec: Any) -> bool:
    """Whether the notation carries a schema."""
    if not isinstance(spec, Mapping):
        return isinstance(spec, bool)
    for key, value in spec.items():
        inner: Iterable[Any]
        match key:
            case "properties":
                inner = value.values() if isinstance(value, Mapping) else (None,)
            case "oneOf" | "anyOf":
                inner = value if isinstance(value, (list, tuple)) else (None,)
            case "items" | "additionalProperties":
                inner = (value,)
            case "type":
                inner = () if isinstance(value, (str, list, tuple)) else (None,)
            case "enum":
                inner = () if isinstance(value, (list, tuple)) else (None,)
            case "description" | "default" | "required":
                inner = ()
            case _:
                inner = (None,) if key == "$ref" or _structured(value) else ()
        if not all(map(_carries, inner)):
            return False
    return True


def _structured(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, (list, tuple)) and any(map(_structured, value)))


def _markdown(function: Mapping) -> str:
    parameters = function["parameters"]
    lines = [f"## {function.get('name')}"]
    if function.get("description"):
        lines.append(str(function["description"]))
    lines += ["", "**Parameters**"]
    properties = _properties(parameters, "")
    return "\n".join(lines + (properties or ["- None"]))


def _properties(spec: Mapping, indent: str) -> list[str]:
    required = spec.get("required") or ()
    lines = []
    for name, inner in (spec.get("properties") or {}).items():
        line = f"{indent}- `{name}` *({type_name(inner)}{', required' if name in required else ''})*"
        if isinstance(inner, Mapping) and inner.get("description"):
            line += " - " + str(inner["description"]).replace("\n", f"\n{indent}  ")
        lines += [line, *_details(inner, indent + "  ")]
    return lines


def _described(label: str, spec: Any, indent: str) -> list[str]:
    """A schema without a name of its own: the items of an array, a variant, further properties."""
    lines = [f"{indent}- {label} *({type_name(spec)})*"]
    if isinstance(spec, Mapping) and spec.get("description"):
        text = str(spec["description"]).replace("\n", f"\n{indent}    ")
        lines.append(f"{indent}  - Description: {text}")
    return lines + _details(spec, indent + "  ")


def _details(spec: Any, indent: str) -> list[str]:
    """What a schema says beside its type and description."""
    if not isinstance(spec, Mapping):
        return []
    lines = []
    if spec.get("enum"):
        lines.append(f"{indent}- Allowed values: {', '.join(map(_literal, spec['enum']))}")
    if "default" in spec:
        lines.append(f"{indent}- Default: {_literal(spec['default'])}")
    if isinstance(spec.get("additionalProperties"), Mapping):
        lines += _described("Additional properties", spec["additionalProperties"], indent)
    elif "additionalProperties" in spec:
        lines.append(f"{indent}- Additional properties: {_python(spec['additionalProperties'])}")
    lines += _properties(spec, indent)
    if isinstance(spec.get("items"), Mapping):
        lines += _described("Items", spec["items"], indent)
    elif "items" in spec:
        lines.append(f"{indent}- Items: {_python(spec['items'])}")
    for word in ("oneOf", "anyOf"):
        if spec.get(word):
            lines.append(f"{indent}- {word}:")
            for i, variant in enumerate(spec[word], 1):
                lines += _described(f"Variant {i}", variant, indent + "  ")
    for key, value in spec.items():
        if key not in _WRITTEN:
            lines.append(f"{indent}- {key}: {_python(value)}")
    return lines


def type_name(spec: Any) -> str:
    """A schema's type in words: string, array of string, string or null, oneOf[…], any."""
    if isinstance(spec, bool):
        return str(spec)
    if not isinstance(spec, Mapping):
        return "any"
    kind = spec.get("type")
    if kind:
        kinds = kind if isinstance(kind, (list, tuple)) else [kind]
        return " or ".join(f"array of {type_name(spec.get('items'))}" if k == "array" else str(k) for k in kinds)
    for word in ("oneOf", "anyOf"):
        if spec.get(word):
            return f"{word}[{' or '.join(map(type_name, spec[word]))}]"
    if spec.get("properties"):
        return "object"
    return f"array of {type_name(spec['items'])}" if "items" in spec else "any"


def argument_type(spec: Any, value: Any) -> str:
    """The type that a typed call states of an argument: the declared one, or the value's own where several are declared."""
    if isinstance(spec, Mapping) and (spec.get("oneOf") or spec.get("anyOf") or isinstance(spec.get("type"), (list, tuple))):
        return "number" if isinstance(value, float) else schema.type_of(value)
    if isinstance(spec, Mapping) and spec.get("type") == "array":
        return f"array[{argument_type(spec['items'], None) if 'items' in spec else 'any'}]"
    return str(spec.get("type") or "any") if isinstance(spec, Mapping) else "any"


def _literal(value: Any) -> str:
    if value == "":
        return '""'
    text = value.replace("\n", "\\n") if isinstance(value, str) else _python(value)
    return f"`{text}`"


def _python(value: Any) -> str:
    """A value as Python writes it, a string without quotes."""
    if isinstance(value, str):
        return value or '""'
    return repr(turns.plain_numbers(value))
