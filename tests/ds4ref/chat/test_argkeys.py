"""One call written as argument tags: names, keys, typed values, what ends a value, and what is no call."""
import json

import pytest

from ds4ref.chat.argkeys import ArgKeys
from ds4ref.chat.glm import TAGS as GLM
from ds4ref.chat.k2 import TAGS as K2
from ds4ref.chat.solar import TAGS as SOLAR

SCHEMAS = {"f": {"properties": {
    "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": "number"}, "b": {"type": "boolean"},
    "o": {"type": "object"},
    "a": {"type": "array"}, "u": {"type": ["string", "null"]}}}}  # fmt: skip


def read(text, tags=GLM, final=False, size=None):
    """(name, arguments' text, whether done, why bad, what is left)."""
    body = ArgKeys(tags, SCHEMAS)
    left = ""
    for at in range(0, len(text), size or max(len(text), 1)):
        left += text[at:at + (size or len(text))]
        left = left[body.read(left, False):]
        if body.done or body.bad:
            left += text[at + (size or len(text)):]
            break
    if final and not (body.done or body.bad):
        left = left[body.read(left, True):]
    return body.name, "".join(body.pieces), body.done, body.bad, left


def glm(*pairs, name="f"):
    return name + "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in pairs) + "</tool_call>"


@pytest.mark.parametrize("size", [None, 1, 4])
@pytest.mark.parametrize("tags, text", [
    (GLM, "f<arg_key>s</arg_key><arg_value> x </arg_value><arg_key>i</arg_key><arg_value>3</arg_value></tool_call>rest"),
    (GLM, "f\n<arg_key>s</arg_key>\n<arg_value> x </arg_value><arg_key> i </arg_key>\n<arg_value>\n"
          "3\n</arg_value>\n</tool_call>rest"),
    (SOLAR, "f\n<|tool_arg:start|>s<|tool_arg:value|> x <|tool_arg:end|>\n<|tool_arg:start|>i<|tool_arg:value|>3"
            "<|tool_arg:end|>\n<|tool_call:end|>rest"),
    (K2, "f\n<ifm|arg_key>s</ifm|arg_key>\n<ifm|arg_type>string</ifm|arg_type>\n<ifm|arg_value> x </ifm|arg_value>\n"
         "<ifm|arg_key>i</ifm|arg_key>\n<ifm|arg_value>3</ifm|arg_value>\n</ifm|tool_call>rest"),
])  # fmt: skip
def test_each_familys_tags(tags, text, size):
    assert read(text, tags, size=size) == ("f", '{"s": " x ", "i": 3}', True, None, "rest")


@pytest.mark.parametrize("key, text, value", [
    ("s", "02134", '"02134"'), ("s", "null", '"null"'), ("s", '"q"', '"\\"q\\""'), ("s", "", '""'), ("s", "a\n", '"a\\n"'),
    ("i", "02134", "2134"), ("i", "-007", "-7"), ("i", "1.5", '"1.5"'), ("i", "1.0", "1.0"), ("i", "many", '"many"'),
    ("i", "9" * 40, "9" * 40), ("n", "1e5", "1e5"), ("n", "NaN", '"NaN"'), ("n", "1.50", "1.50"), ("b", "True", "true"),
    ("b", "false", "false"), ("b", "yes", '"yes"'), ("o", ' {"a": 1.0} ', '{"a": 1.0}'), ("o", "{'a': 1}", "\"{'a': 1}\""),
    ("a", '["</arg_value>"]', '["</arg_value>"]'), ("u", "null", "null"), ("u", "7", '"7"'), ("x", "7", "7"), ("x",
     "x", '"x"'),
    ("x", '"q"', '"\\"q\\""'), ("s", "</arg_value>", '"</arg_value>"'), ("s", "</tool_call>x", '"</tool_call>x"'),
    ("s", "a </tool_call>", '"a </tool_call>"'),
])  # fmt: skip
def test_values_follow_the_declared_type(key, text, value):
    expected = f'{{"{key}": {value}}}'
    for size in (None, 1):
        assert read(glm((key, text)), size=size) == ("f", expected, True, None, "")
    assert isinstance(json.loads(expected), dict)


def test_a_type_in_the_call_counts_where_none_is_declared():
    def typed(key, kind):
        return (f"f<ifm|arg_key>{key}</ifm|arg_key><ifm|arg_type>{kind}</ifm|arg_type><ifm|arg_value>7</ifm|arg_value>"
                "</ifm|tool_call>")

    assert read(typed("x", "string"), K2)[1] == '{"x": "7"}'
    assert read(typed("x", "array[string]"), K2)[1] == '{"x": 7}'
    assert read(typed("i", "string"), K2)[1] == '{"i": 7}'


def test_an_argument_counts_once():
    assert read(glm(("s", "a"), ("s", "b"), ("i", "1"), ("i", "2")))[1] == '{"s": "a", "i": 1}'


def test_a_value_without_its_closing_tag_ends_with_the_call_if_another_follows():
    head = "f<arg_key>s</arg_key><arg_value>x"
    assert read(head + "\n</tool_call>\n<tool_call>g") == ("f", '{"s": "x"}', True, None, "\n<tool_call>g")
    assert read(head + "</tool_call>") == ("f", '{"s": "x', False, None, "</tool_call>")
    assert read(head + "</tool_call>", final=True) == ("f", '{"s": "x"}', True, None, "")


@pytest.mark.parametrize("text, reason", [
    ("no name", "name"), ("<arg_key>", "name"), ("</tool_call>", "name"), ("f{", "name"), ("f" * 129, "name"),
    ("f<arg_key></arg_key>", "no name"), ("f<arg_key>s</arg_key>x", "no value"), ("f<arg_key>s</arg_key></tool_call>",
     "no value"),
    ("f<arg_key>" + "k" * 9000, "does not end"), ("f</arg_value>", "name"),
    ("f<arg_key>s</arg_key><arg_value>x</arg_value>junk</tool_call>", None),
])  # fmt: skip
def test_what_is_no_call(text, reason):
    for size in (None, 1):
        bad = read(text, size=size)[3]
        assert (reason in bad) if reason else bad is None


@pytest.mark.parametrize("text", ["", "pi", "f<arg_key>s", "f<arg_key>s</arg_key>", "f<arg_key>i</arg_key><arg_value>x",
                                  "f<arg_key>s</arg_key><arg_value>x</arg_value>junk", "f<arg_key>o</arg_key><arg_value>{"])
def test_what_cannot_be_closed_at_the_end(text):
    assert read(text, final=True)[3]
