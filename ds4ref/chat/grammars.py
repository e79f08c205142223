"""Grammars of answers that must be calls, or begin with what the family writes around visible text.

    forced      white space, one call or several of the tools given, each with arguments valid for its schema
    guarded     free text, in which whatever begins like a call must be one
    visible     one expression where the family has its visible text

Each protocol describes how it writes calls (`Calls`); this module puts them together. What a grammar admits the family's
parser reads back as calls. It admits less than the schemas do: parameters come in the order of their schema, strings that
stand bare never hold what would end them, and where a schema lists properties no others are invented.

Knows nothing about tokenizers beyond the ids of markers. Sources: the families' pages (how calls are written); JSON Schema
2020-12.
"""
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds4ref.chat import constraints, jsontext, schema
from ds4ref.chat.errors import ChatError
from ds4ref.chat.lark import ANY, Writer, choice, escape, json_rule, quoted

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_SPACIOUS = {"whitespace_pattern": r"[ \t\r\n]{1,64}"}
SPACE = r"/\n{1,3}/"
"""Between reasoning, text and calls."""
_WHITE = r"[ \t\r\n]*"
_NUMBER = r"[+\-]?[0-9]+(\.[0-9]+)?([eE][+\-]?[0-9]+)?"
_READ = {"null": "null|None", "boolean": "true|True|false|False", "integer": _NUMBER, "number": _NUMBER}
"""What bare text is read as, by type, where a string may stand too (`xmlcalls.json_value`)."""
_ID = "/[A-Za-z0-9_\\-]{1,64}/"
_ANY_KEY = r'/[^<>"\x00-\x20]([^<>"\x00-\x1f]{0,200}[^<>"\x00-\x20])?/'
_KEY = r"/[A-Za-z_][A-Za-z0-9_.\-]{0,63}/"


@dataclass(frozen=True)
class Function:
    """A tool that may be called. parameters: the schema its arguments must follow; None: any object."""

    name: str
    parameters: Any


@dataclass(frozen=True)
class Calls:
    """How a family writes calls.

    opening: the marker that begins a call, or the block of all calls. call: (writer, function) → the expression of a call,
    behind `opening` unless there is a block. block: (behind `opening`, behind each call, at the end) of a block; None:
    calls stand alone, with or without newlines between them. turn: the marker in front of each message but the first, where
    an answer is several; text: the markers around visible text. spelled: what free text must not hold, as a regular
    expression. own_lines: whether newlines behind the reasoning are no text (`framed.Format`).
    """

    opening: str
    call: Callable[[Writer, Function], str]
    block: tuple[str, str, str] | None = None
    turn: str = ""
    text: tuple[str, str] = ("", "")
    spelled: str = ""
    own_lines: bool = False


def functions(tools: Iterable[Mapping], *, constrained: Callable[[Mapping], bool] = lambda function: True) -> list[Function]:
    """The callable tools; those that are not to be constrained take any object."""
    found = []
    for tool in tools:
        function = tool.get("function") or tool
        parameters = function.get("parameters") if constrained(function) else None
        if isinstance(parameters, Mapping):
            constraints.check(parameters)
        found.append(Function(function["name"], parameters if isinstance(parameters, Mapping) else None))
    return found


# --- answers --------------------------------------------------------------------------------------------------------


def forced(writer: Writer, calls: Calls, tools: Sequence[Function], parallel: bool, after_reasoning: bool) -> str:
    """The expression of an answer that is one call, or with `parallel` one or more."""
    call = writer.rule(choice(calls.call(writer, tool) for tool in tools))
    opening = writer.literal(calls.opening)
    if calls.turn:
        turn = writer.literal(calls.turn)
        return _sequence(turn if after_reasoning else "", call, f"({turn} {call})*" if parallel else "")
    space = f"{writer.terminal(SPACE)}?"
    if calls.block:
        return _sequence(space, opening, _in_block(writer, calls, call, parallel))
    more = f"({space} {opening} {call})* {space}" if parallel else ""
    return _sequence(space, opening, call, more)


def _in_block(writer: Writer, calls: Calls, call: str, parallel: bool) -> str:
    first, behind, last = map(writer.literal, calls.block)
    return _sequence(first, f"({call} {behind})+" if parallel else f"{call} {behind}", last)


def guarded(writer: Writer, calls: Calls, tools: Sequence[Function], parallel: bool, after_reasoning: bool,
            others: Sequence[int]) -> str:
    """The expression of an answer in which calls are free to come, but not free in form. others: the special tokens that
    text may hold."""
    call = writer.rule(choice(calls.call(writer, tool) for tool in tools))
    if calls.turn:
        turn = writer.literal(calls.turn)
        message = f"{calls_text(writer, calls, writer.terminal(ANY))} | {call}"
        return _sequence(turn if after_reasoning else "", f"({message}) ({turn} ({message}))*")
    body = f"/(?s:.*)/ & ~/(?s:.*)({calls.spelled or escape(calls.opening)})(?s:.*)/"
    text = writer.terminal(body)
    pieces = f"({text} <[{','.join(map(str, others))}]>)*" if others else ""
    begin, free = _sequence(pieces, writer.until(body, calls.opening)), _sequence(pieces, text)
    if calls.block:
        return f"({begin} {_in_block(writer, calls, call, parallel)} | {free})"
    return f"({begin} {call}){'*' if parallel else '?'} {free}"


def visible(writer: Writer, calls: Calls, body: str, after_reasoning: bool) -> str:
    """The expression of an answer whose visible text is `body`."""
    if calls.turn:
        return _sequence(writer.literal(calls.turn) if after_reasoning else "", calls_text(writer, calls, body))
    return f"{writer.terminal(SPACE)}? {body}" if after_reasoning and calls.own_lines else body


def calls_text(writer: Writer, calls: Calls, body: str) -> str:
    """Visible text between its markers."""
    opening, closing = map(writer.literal, calls.text)
    return _sequence(opening, body, closing)


def _sequence(*parts: str) -> str:
    return " ".join(part for part in parts if part)


# --- arguments as JSON ----------------------------------------------------------------------------------------------


def arguments(function: Function) -> str:
    """The expression of a function's arguments as one JSON object."""
    root = function.parameters
    if root is None:
        return json_rule({"type": "object", "x-guidance": _SPACIOUS})
    spec = constraints.document(root, root)
    kinds = spec.get("type", "object")
    if kinds != "object" and "object" not in kinds:
        raise ChatError(f"the parameters of {function.name!r} must be a schema of objects, not of {kinds}")
    if "properties" in spec and not {"additionalProperties", "anyOf", "oneOf", "allOf", "$ref"} & spec.keys():
        named = dict.fromkeys(spec.get("required", ()), True)
        spec |= {"properties": {**spec["properties"], **{k: v for k, v in named.items() if k not in spec["properties"]}},
                 "additionalProperties": False}
    return json_rule({**spec, "type": "object", "x-guidance": _COMPACT})


def json_call(opening: str, closing: str, key: str = "arguments", separators: tuple[str, str] = (", ", ": "),
              named: str = "", ids: bool = False, ordered: bool = False) -> Callable[[Writer, Function], str]:
    """The `Calls.call` of a family whose calls are JSON objects between markers. key: of the arguments. named: what follows
    the tool's name in front of the object, where it stands there too. ids: whether the object may hold an id. ordered:
    whether the family sorts the keys of arguments."""
    comma, colon = separators

    def call(writer: Writer, function: Function) -> str:
        name = jsontext.dumps(function.name)
        head = f'{opening}{{"name"{colon}{name}{comma}"{key}"{colon}'
        front = writer.literal(function.name + named) if named else ""
        before, behind = quoted(f'{comma}"id"{colon}"'), quoted('"')
        identity = f"({before} {writer.terminal(_ID)} {behind})?" if ids else ""
        spec = Function(function.name, _ordered(function.parameters)) if ordered else function
        return _sequence(front, writer.literal(head), arguments(spec), identity, writer.literal("}" + closing))

    return call


def _ordered(spec: Any) -> Any:
    """A schema with its properties sorted by name, everywhere in it."""
    if isinstance(spec, (list, tuple)):
        return [_ordered(item) for item in spec]
    if not isinstance(spec, Mapping):
        return spec
    out = {key: _ordered(value) for key, value in spec.items()}
    if isinstance(out.get("properties"), Mapping):
        out["properties"] = dict(sorted(out["properties"].items()))
    return out


# --- arguments as bare text -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bare:
    """Where bare values stand. closing: the markup behind a value. forbidden: what a string must not hold, as a regular
    expression. words: whether True, False and None are values too."""

    closing: str
    forbidden: str
    words: bool = False

    def text(self, pattern: str = ANY) -> str:
        """The terminal body of strings that match another and can stand here."""
        return f"{pattern} & ~/(?s:.*)({self.forbidden})(?s:.*)/"


def bare_call(before: str, after: str, key: tuple[str, str], bare: Bare, between: str) -> Callable[[Writer, Function], str]:
    """The `Calls.call` of a family that writes each argument between markers. before: what stands around the tool's name,
    as "…{name}…"; key: before and behind an argument's name; between: behind each value; after: the end of the call."""

    def call(writer: Writer, function: Function) -> str:
        def pair(name: str, spec: Any, root: Any) -> str:
            return f"{writer.literal(name.join(key))} {value(writer, spec, root, bare)} {writer.literal(between)}".rstrip()

        def others(names: Iterable[str] | None, spec: Any, root: Any) -> str:
            name = f"{writer.literal(key[0])} {other_name(writer, names)} {writer.literal(key[1])}"
            return f"{name} {value(writer, spec, root, bare)} {writer.literal(between)}".rstrip()

        head = writer.literal(before.replace("{name}", function.name))
        return _sequence(head, pairs(writer, function, pair, others, _writable), writer.literal(after))

    return call


def pairs(writer: Writer, function: Function, pair: Callable, others: Callable, writable: Callable[[str], bool],
          empty: str = "") -> str:
    """The expression of a function's arguments, one after the other. pair: (name, schema, root) → one argument; others:
    (names, schema, root) → one argument of another name, of any where they are None; writable: whether a name can be
    written. empty: what may stand where there are none."""
    empty = f"{quoted(empty)}?" if empty else ""
    root = function.parameters
    if root is None:
        several = f"({writer.rule(others(None, {}, {}))})*"
        return f"({several} | {empty})" if empty else several
    found = []
    for case in constraints.cases(root, root):
        if "object" not in case["type"]:
            continue
        spec = constraints.object_case(case)
        properties = dict(spec["properties"])
        for name in spec["required"]:
            properties.setdefault(name, {} if spec["additional"] is None else spec["additional"])
        parts = []
        for name, inner in properties.items():
            needed = name in spec["required"]
            if not writable(name) or constraints.resolved(inner, root) is False:
                if needed:
                    raise ChatError(f"the parameter {name!r} of {function.name!r} cannot be written in this model's calls")
                continue
            try:
                one = writer.rule(pair(name, inner, root))
            except ChatError as error:
                raise ChatError(f"the parameter {name!r} of {function.name!r}: {error}") from None
            parts.append(one if needed else f"{one}?")
        if spec["additional"] is not None:
            parts.append(f"({writer.rule(others(list(properties), spec['additional'], root))})*")
        found.append(" ".join(parts) or empty or '""')
        found += [empty] if parts and empty and not spec["required"] else []
    if not found:
        raise ChatError(f"the parameters of {function.name!r} must be a schema of objects")
    return choice(found)


def other_name(writer: Writer, names: Iterable[str] | None) -> str:
    """The terminal of a parameter's name that is none of those; of any that can be written where they are None."""
    if names is None:
        return writer.terminal(_ANY_KEY)
    known = choice(map(quoted, names)) if names else ""
    return writer.terminal(_KEY + (f" & ~({known})" if known else ""))


def _writable(name: str) -> bool:
    return bool(name) and name == name.strip() and not any(c in '<>"\n\r\t' for c in name)


def value(writer: Writer, spec: Any, root: Any, bare: Bare) -> str:
    """The expression of a value as bare text with the markup behind it: strings as they are, other values as JSON. Where
    both may stand, a string is none that would be read as another value."""
    if constraints.admits_all(spec, root):
        return writer.until(bare.text(), bare.closing)
    texts, rests = [], []
    for case in constraints.cases(spec, root):
        _divide(case, bare, texts, rests)
    spelled = _SPELLED | _PYTHON if bare.words else _SPELLED
    words, found, heads = [], [], set()
    for rest in rests:
        plain = _words(rest, spelled) if texts or set(rest.get("type", "?")) <= _PYTHON.keys() else None
        if plain is None:
            found.append(_json(rest, root))
            heads |= _heads(rest)
        else:
            words += plain
    if not texts:
        found += [writer.terminal(choice(words))] if words else []
        if not found:
            raise ChatError("no value fits its schema")
        return f"{choice(found)} {writer.literal(bare.closing)}"
    read = schema.declared(schema.followed(spec, root))
    others = set(schema.TYPES if read is None else read) - {"string"}
    body = f"({choice(texts)})"
    body += f" & ~/{_read_as_json(others)}/" if others else ""
    # Where a JSON value ends and a string goes on no lexer can tell, so a string here begins like none of those.
    body += f" & ~/{_WHITE}[{''.join(sorted(heads))}](?s:.*)/" if heads else ""
    bare_text = writer.until(choice([f"({body})", *words]), bare.closing)
    return f"({choice(found)} {writer.literal(bare.closing)} | {bare_text})" if found else bare_text


def parts(spec: Any, root: Any, bare: Bare) -> tuple[list[str], list[str]]:
    """(the terminal bodies of the strings that a schema admits, the expressions of the other values)."""
    texts, rests = [], []
    for case in constraints.cases(spec, root):
        _divide(case, bare, texts, rests)
    return texts, [_json(rest, root) for rest in rests]


def _divide(case: Mapping, bare: Bare, texts: list[str], rests: list[Mapping]) -> None:
    text, rest = constraints.of_type(case, {"string"}), constraints.of_type(case, _NOT_STRINGS)
    texts += [] if text is None else strings(text, bare)
    rests += [] if rest is None else [rest]


def _json(case: Mapping, root: Any) -> str:
    return json_rule({**constraints.document(case, root), "x-guidance": _COMPACT})


_NOT_STRINGS = frozenset(schema.TYPES) - {"string"}
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def _words(case: Mapping, spelled: Mapping[str, str]) -> list[str] | None:
    """The terminal bodies of the values of a case if all are scalars without limits, None otherwise."""
    listed = constraints.values(case)
    if listed is not None:
        scalar = not any(isinstance(item, (Mapping, list, tuple)) for item in listed)
        return [quoted(jsontext.dumps(item)) for item in listed] if scalar else None
    if {"array", "object"} & set(case["type"]) or any(key in case for key in _LIMITS):
        return None
    return [spelled[kind] for kind in case["type"]]


_SPELLED = {"null": '"null"', "boolean": '"true" | "false"', "integer": "/-?(0|[1-9][0-9]*)/",
            "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?/"}
_PYTHON = {"null": '"null" | "None"', "boolean": '"true" | "false" | "True" | "False"'}
_HEADS = {"null": "n", "boolean": "tf", "integer": "0-9\\-", "number": "0-9\\-", "array": "\\[", "object": "{"}


def _heads(case: Mapping) -> set[str]:
    """How the JSON text of the values of a case begins, as parts of a character class."""
    listed = constraints.values(case)
    return {_HEADS[kind] for kind in (case["type"] if listed is None else map(schema.type_of, listed))}


def _read_as_json(types: set[str]) -> str:
    """The regular expression of bare text that is read as a value of one of the types."""
    scalars = [_READ[kind] for kind in sorted(types) if kind in _READ]
    parts = [f"{_WHITE}({'|'.join(dict.fromkeys(scalars))}){_WHITE}"] if scalars else []
    letters = "".join(_HEADS[kind] for kind in ("array", "object") if kind in types)
    parts += [f"{_WHITE}[{letters}](?s:.*)"] if letters else []
    return "|".join(f"({part})" for part in parts)


def strings(case: Mapping, bare: Bare) -> list[str]:
    """The terminal bodies of the strings of a case."""
    listed = constraints.values(case)
    if listed is not None:
        return [quoted(text) for text in listed if not re.search(bare.forbidden, text)]
    low, high = case.get("minLength", 0), case.get("maxLength")
    length = f"/(?s:.{{{low},{'' if high is None else high}}})/" if low or high is not None else ANY
    body = bare.text(length)
    if "pattern" in case:
        body += f" & {_searched(case['pattern'])}"
    return [f"({body})"]


def _searched(pattern: str) -> str:
    """The terminal of the texts in which a pattern is found (ECMA-262 there, anchored nowhere)."""
    starts, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[1 if starts else 0:len(pattern) - 1 if ends else len(pattern)]
    if (starts or ends) and _alternates(inner):
        raise ChatError(f"the pattern {pattern!r} has an anchor in one of several alternatives; group them")
    inner = inner.replace("\\d", "[0-9]").replace("\\w", "[A-Za-z0-9_]").replace("/", "\\/").replace("\\\\/", "\\/")
    inner = inner.replace("\n", "\\n")
    return f"/{'' if starts else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}/"


def _alternates(pattern: str) -> bool:
    """Whether a pattern has a `|` outside of groups and classes."""
    depth, in_class, escaped = 0, False, False
    for char in pattern:
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and not depth:
            return True
    return False
