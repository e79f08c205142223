"""Schemas taken apart and put together: what the cases admit is what the schema admits (held to `jsonschema`)."""

import jsonschema
import pytest

from ds4ref.chat import ChatError, constraints, schema

ROOT = {"$defs": {"word": {"type": "string", "maxLength": 3}, "loop": {"$ref": "#/$defs/loop"},
                  "tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}}}}  # fmt: skip
VALUES = [None, True, False, 0, 3, -1.5, "", "ab", "abcd", [], [1], {}, {"a": 1}, {"a": "x"}, {"a": 1, "b": 2}, {"b": "x"}]


@pytest.mark.parametrize(
    "spec",
    [
        True, {}, {"type": "string"}, {"type": ["integer", "null"]}, {"$ref": "#/$defs/word"},
        {"$ref": "#/$defs/word", "minLength": 1}, {"anyOf": [{"$ref": "#/$defs/word"}, {"type": "boolean"}]},
        {"enum": [None, "ab", 3, {"a": 1}]}, {"const": "ab"}, {"oneOf": [{"const": "ab"}, {"const": 3}]},
        {"oneOf": [{"type": "string"}, {"type": "integer"}]}, {"type": "object", "required": ["a"]},
        {"allOf": [{"type": ["string", "integer"]}, {"maxLength": 2, "type": ["string", "null"]}]},
        {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
                   {"type": "object", "properties": {"b": {"type": "integer"}}}]},
        {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        {"anyOf": [{"type": "string", "maxLength": 2}, {"anyOf": [{"type": "null"}, {"type": "string", "minLength": 4}]}]},
    ],
)  # fmt: skip
def test_the_cases_of_a_schema_admit_what_it_admits(spec):
    cases = [constraints.document(case, ROOT) for case in constraints.cases(spec, ROOT)]
    whole = ROOT | spec if isinstance(spec, dict) else spec
    for value in VALUES:
        admitted = any(jsonschema.Draft202012Validator(case).is_valid(value) for case in cases)
        assert admitted == jsonschema.Draft202012Validator(whole).is_valid(value), value


@pytest.mark.parametrize("spec", [False, {"allOf": [{"type": "string"}, False]}, {"anyOf": []}])
def test_what_admits_nothing_has_no_case(spec):
    assert list(constraints.cases(spec, ROOT)) == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"not": {}}, "'not' in a schema cannot be enforced"),
        ({"$ref": "#/$defs/loop"}, "refers to itself in a circle"),
        ({"$ref": "#/$defs/nothing"}, "leads nowhere"),
        ({"$ref": "other.json#/a"}, "only local ones are followed"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 2}]}, "oneOf whose branches differ in more"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "both state 'pattern'"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused(spec, message):
    with pytest.raises(ChatError, match=message):
        list(constraints.cases(spec, ROOT))


def test_a_part_of_a_schema_carries_what_it_refers_to():
    part = constraints.document({"type": "array", "items": {"$ref": "#/$defs/tree"}}, ROOT)
    validator = jsonschema.Draft202012Validator(part)
    assert validator.is_valid([{"left": {"left": {}}}]) and not validator.is_valid([{"left": {"left": 3}}])
    assert constraints.document({"type": "string", "format": "color", "$id": "x"}, ROOT) == {"type": "string"}


def test_declared_types_follow_local_references():
    parameters = {"properties": {"a": {"$ref": "#/$defs/word"}, "b": {"anyOf": [{"$ref": "#/$defs/word"}, {"type": "null"}]},
                                 "c": {"$ref": "#/$defs/loop"}, "d": {"$ref": "#/nowhere"}}, **ROOT}  # fmt: skip
    read = schema.parameters([{"name": "f", "parameters": parameters}])["f"]
    types = {name: schema.declared(schema.property_schema(read, name)) for name in "abcd"}
    assert types == {"a": {"string"}, "b": {"string", "null"}, "c": None, "d": None}
