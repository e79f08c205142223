"""K2-Horizon's list of tools, where the renderings of the fixtures do not reach."""
import pytest

from ds4ref.chat import ChatError, Options, k2, k2tools


def tool(**function):
    return k2tools.checked({"type": "function", "function": {"name": "f", **function}})


def listed(**properties):
    text = k2tools.listing([tool(parameters={"type": "object", "properties": properties})], "markdown")
    head, _, rest = text.partition("\n\n**Parameters**\n")
    assert head == "## f"
    return rest


def test_values_are_pythons():
    assert listed(a={"type": "number", "default": 0.00001}).endswith("  - Default: `1e-05`")
    assert listed(a={"default": True, "enum": [True, None, 1.0, "x", ""]}) == (
        '- `a` *(any)*\n  - Allowed values: `True`, `None`, `1.0`, `x`, ""\n  - Default: `True`')
    assert listed(a={"type": "string", "description": "One\ntwo", "minLength": 3, "pattern": "^a"}) == (
        "- `a` *(string)* - One\n  two\n  - minLength: 3\n  - pattern: ^a")
    assert listed(a={"type": "string", "default": "x\ny"}).endswith("- Default: `x\\ny`")


def test_nested_schemas():
    inner = {"type": "object", "description": "Of it", "properties": {"b": {"type": ["integer", "null"]}}, "required": ["b"]}
    assert listed(a={"type": "array", "items": inner}) == (
        "- `a` *(array of object)*\n  - Items *(object)*\n    - Description: Of it\n    - `b` *(integer or null, required)*")
    assert listed(a={"anyOf": [{"type": "string"}, {"type": "array"}]}) == (
        "- `a` *(anyOf[string or array of any])*\n  - anyOf:\n    - Variant 1 *(string)*\n    - Variant 2 *(array of any)*")
    assert listed(a={"type": "object", "additionalProperties": False}) == "- `a` *(object)*\n  - Additional properties: False"
    assert listed() == "- None" and k2tools.listing([tool()], "markdown").endswith("## f\n\n**Parameters**\n- None")


@pytest.mark.parametrize("schema", [{"$ref": "#/$defs/x"}, {"patternProperties": {}}, {"type": {}}, {"x": [{"a": 1}]},
                                    {"anyOf": {}}, {"enum": "x"}, {"items": [{"type": "string"}]}])
def test_what_the_notation_does_not_carry_is_json_for_all_tools(schema):
    odd = tool(parameters={"type": "object", "properties": {"a": schema}})
    text = k2tools.listing([tool(name="g"), odd], "markdown")
    assert text.count("\n") == 1 and all(line.startswith('{"type": "function", "function": {') for line in text.split("\n"))


def test_schemas_that_the_template_refuses():
    def render(parameters):
        return k2.render([], [{"type": "function", "function": {"name": "f", "parameters": parameters}}], Options())

    with pytest.raises(ChatError, match="tool 'f' requires the property 'b', which its schema does not define"):
        render({"properties": {"a": {}}, "required": ["b"]})
    with pytest.raises(ChatError, match="tool 'f', property 'a' requires the property 'c'"):
        render({"properties": {"a": {"required": ["c"]}}})
    for odd in ([1], "x", {"required": 1}, {"properties": [1]}):
        with pytest.raises(ChatError, match="tool 'f'"):
            render(odd)
    deep = {}
    for _ in range(100):
        deep = {"items": deep}
    with pytest.raises(ChatError, match="deep"):
        render(deep)
    assert "- None" in k2.render([], [{"type": "function", "function": {"name": "f"}}], Options()).text


def test_typed_calls_state_types():
    spec = {"properties": {"s": {"type": "string"}, "u": {"type": ["string", "null"]}, "a": {"type": "array",
        "items": {"type": "string"}},
                           "f": {"anyOf": [{"type": "number"}, {"type": "null"}]}}}
    arguments = {"s": "x", "u": None, "a": ["y"], "f": 1.5, "z": 1}
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": spec}}]
    text = k2.render([message], tools, Options(template_kwargs={"tool_call_format": "xml_typed"})).text
    for key, kind, value in (("s", "string", "x"), ("u", "null", "null"), ("a", "array[string]", '["y"]'), ("f",
        "number", "1.5"),
                             ("z", "any", "1")):
        assert (f"<ifm|arg_key>{key}</ifm|arg_key>\n<ifm|arg_type>{kind}</ifm|arg_type>\n<ifm|arg_value>{value}"
                "</ifm|arg_value>\n") in text
    with pytest.raises(ChatError, match="tool_call_format is 'yaml'; accepted are xml, xml_typed, json"):
        k2.render([], None, Options(template_kwargs={"tool_call_format": "yaml"}))
