"""One call written as a JSON object: when its name and arguments are known, what is repaired, and what is no call."""
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4ref.chat.jsoncalls import JsonCall

CLOSE = "</tool_call>"


def read(text, size=None, final=False, close=CLOSE, **how):
    """(name, arguments' text, whether done, why bad, what is left)."""
    body = JsonCall(close, **how)
    left, size = "", size or max(len(text), 1)
    for at in range(0, len(text), size):
        left += text[at:at + size]
        left = left[body.read(left, False):]
        if body.done or body.bad:
            left += text[at + size:]
            break
    if final and not (body.done or body.bad):
        left = left[body.read(left, True):]
    return body.name, "".join(body.pieces), body.done, body.bad, left


SIZES = pytest.mark.parametrize("size", [None, 1, 5])


@SIZES
@pytest.mark.parametrize("text, arguments", [
    ('{"name": "f", "arguments": {"a": 1}}', '{"a": 1}'),
    ('{"arguments": {"a": [{}, "}"], "name": "g"}, "name": "f"}', '{"a": [{}, "}"], "name": "g"}'),
    ('{"name":"f","arguments":{"s":"</tool_call>\\"}{"},"id":"x"}', '{"s":"</tool_call>\\"}{"}'),
    ('{"id": "name", "name": "f", "arguments": {  }}', "{  }"), ('{"name": "f"}', "{}"),
    ('{"name": "f", "arguments": null}', "{}"), ('{"name": "f", "arguments": ""}', "{}"),
    ('{"name": "f", "arguments": "{\\"a\\": 1.0}"}', '{"a": 1.0}'), ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
    ('\n{"n\\u0061me": "f", "arguments": {"n": 12345678901234567890123}}', '{"n": 12345678901234567890123}'),
])  # fmt: skip
def test_calls(text, arguments, size):
    assert read(f"{text} \n{CLOSE}rest", size) == ("f", arguments, True, None, "rest")
    assert read(f"{text}</tool", size, final=True) == ("f", arguments, True, None, "")


def test_arguments_are_passed_on_as_they_come():
    body = JsonCall(CLOSE)
    told = []
    for char in '{"name": "f", "arguments": {"a": "xyz"}':
        body.read(char, False)
        told.append((body.name, "".join(body.pieces)))
    assert told[11] == ("f", "") and told[-4] == ("f", '{"a": "xy') and told[-1] == ("f", '{"a": "xyz"}')
    body = JsonCall(CLOSE)
    body.read('{"arguments": {"a": 1}, ', False)
    assert (body.name, body.pieces) == (None, [])
    body.read('"name": "f"', False)
    assert (body.name, "".join(body.pieces)) == ("f", '{"a": 1}')


@SIZES
@pytest.mark.parametrize("text", [
    "[1]", "f", "{'name': 'f'}", '{"name": ""}', '{"name": "a b"}', '{"name": 1}', '{"arguments": {}}',
    '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": "x"}', '{"name": "f", "arguments": {"a": NaN}}', '{"name": "f", "arguments": {"a": 1}}}',
    '{"name": "f", "arguments": {"a": 1,}}', '{"name": "f", "arguments": {"a": "\n"}}',
    '{"name": "f", "arguments": {"a": 1}} x',
    '{"name": "f"', '{"name": "f", "arguments": {"a": 1', "", '{"name": "f", "\\x": 1}', '{"a": <b>}', "{" * 3000,
])  # fmt: skip
def test_what_is_no_call(text, size):
    name, _, done, bad, _ = read(text + CLOSE, size, final=True)
    assert bad and not done
    if text:
        whole, split = read(text + CLOSE, final=True), read(text + CLOSE, 1, final=True)
        assert whole[:4] == split[:4]


def test_the_end_and_the_name_may_come_from_outside():
    assert read('{"name":"g","args":{"a":1}}', close="", arguments="args", name="f", final=True)[:4] == ("f",
        '{"a":1}', True, None)
    assert read('{"args":{"a":1}} x', close="", arguments="args", name="f")[3]
    assert read('{"args":{"a":1}', close="", arguments="args", name="f", final=True)[:3] == ("f", '{"a":1}', True)


values = st.recursive(st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.text(),
                      lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3), max_leaves=6)


@given(st.dictionaries(st.text(), values, max_size=4), st.booleans(), st.integers(1, 9), st.sampled_from([None, 1]))
def test_any_object_comes_back(arguments, ascii, size, indent):
    text = json.dumps({"name": "f", "arguments": arguments, "id": "</tool_call>"}, ensure_ascii=ascii, indent=indent)
    name, got, done, bad, left = read(text + CLOSE, size)
    assert (name, json.loads(got), done, bad, left) == ("f", arguments, True, None, "")
    assert list(json.loads(got)) == list(arguments)
