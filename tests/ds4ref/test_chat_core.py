"""What all chat protocols share: JSON text, types of schemas, guarded text, the template sandbox, events, the registry."""
import contextlib
import datetime
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4ref import chat
from ds4ref.chat import Call, CallArguments, CallBegin, CallEnd, ChatError, Reasoning, Specials, Text, jinja, jsontext, schema
from ds4ref.chat.guard import Guard

values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
                      | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=12)


# --- JSON ------------------------------------------------------------------------------------------------------------


@given(values, st.sampled_from([None, 0, 1, 4]), st.booleans())
def test_json_is_pythons_layout(value, indent, sort_keys):
    text = jsontext.dumps(value, indent=indent, sort_keys=sort_keys)
    expected = json.dumps(value, ensure_ascii=False, indent=indent, sort_keys=sort_keys)
    assert json.loads(text) == value
    if "\x7f" not in expected:
        assert text == expected
    assert jsontext.dumps(jsontext.loads(text), indent=indent) == text


def test_json_keeps_how_numbers_were_written():
    text = '{"a": 1.0, "b": 1e5, "c": -0.0, "d": 1E400, "e": 12345678901234567890, "f": [2.50]}'
    assert jsontext.dumps(jsontext.loads(text)) == text
    assert jsontext.dumps({"a": jsontext.Encoded('{ "b":1}')}) == '{"a": { "b":1}}'


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "{'a': 1}", "02134", "1 2", "", "[" * 100_000, '"a\nb"', "1" * 5000])
def test_json_refuses(text):
    with pytest.raises(ValueError):
        jsontext.loads(text)
    assert not jsontext.is_valid(text)


@given(st.text(st.characters(codec=None)), st.text())
def test_json_escapes_piece_by_piece(a, b):
    assert jsontext.escape(a + b) == jsontext.escape(a) + jsontext.escape(b)
    assert json.loads(f'"{jsontext.escape(a)}"') == a
    jsontext.escape(a).encode()


# --- types of schemas ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_schema, types", [
    ({"type": "string"}, {"string"}), ({"type": ["integer", "null"]}, {"integer", "null"}), ({}, None), (True, None),
    ({"enum": ["a", 1]}, {"string", "integer"}), ({"const": None}, {"null"}), ({"$ref": "#/$defs/x"}, None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}), ({"anyOf": [{"type": "string"}, {}]}, None),
    ({"type": "number", "nullable": True}, {"number", "null"}), ({"type": "str"}, None),
])  # fmt: skip
def test_declared_types(given_schema, types):
    assert schema.declared(given_schema) == types


def test_values_fit_types():
    assert schema.fits(7, frozenset({"number"})) and schema.fits(7.0, frozenset({"integer"}))
    assert not schema.fits(True, frozenset({"integer"})) and not schema.fits(7.5, frozenset({"integer"}))
    assert schema.fits("x", None) and schema.fits({}, frozenset({"object"})) and schema.fits([], frozenset({"array"}))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "null"}}}}},
             {"function": {"name": "g"}}]
    assert schema.parameters(tools) == {"f": {"properties": {"a": {"type": "null"}}}, "g": {}}
    assert schema.property_schema(schema.parameters(tools)["f"], "a") == {"type": "null"}
    assert schema.property_schema({"properties": []}, "a") == {}


# --- guarded text ----------------------------------------------------------------------------------------------------

LITERALS = ["<think>", "</think>", "<|user|>", "<|u", "ab", "ba", "\n\n", "x"]
pieces = st.lists(st.sampled_from([*LITERALS, "<", ">", "|", "a", "b", " ", "think>", "\ufdd0", "\ufdd1"])).map("".join)


@given(st.lists(pieces), pieces)
def test_guarded_text_is_whole_and_plain(texts, own):
    """Whatever the template writes between and around the users' texts is the only source of specials."""
    guard = Guard(LITERALS, texts, own)
    rendered = "<|user|>".join(guard.text(t) for t in ["", *texts, ""])
    text, plain = guard.mend(rendered)
    assert text == "<|user|>".join(["", *texts, ""])
    assert all(0 <= a < b <= len(text) for a, b in plain)
    assert all(b <= c for (_, b), (c, _) in zip(plain, plain[1:], strict=False))
    written = []  # Where the template's own markers are.
    for t in ["", *texts]:
        written.append(len(t) + (written[-1] + len("<|user|>") if written else 0))
    markers = [x for x in LITERALS if len(x) > 1 and not x.isspace()]
    inside = lambda at: any(a <= at < b for a, b in plain)  # noqa: E731
    for at in range(len(text)):
        for marker in markers:
            if text.startswith(marker, at) and not any(inside(i) for i in range(at, at + len(marker))):
                assert any(w <= at and at + len(marker) <= w + len("<|user|>") for w in written)
    assert not any(inside(i) for w in written for i in range(w, w + len("<|user|>"))) or any(
        t[-1:] in "<|ab" or t[:1] in ">|ab" for t in texts)


def test_guard_of_data_keys_and_kept_literals():
    guard = Guard(["<think>"], "")
    data = guard.data({"<think>": ["a<think>", 1, None], "b": ("c",)})
    assert jsontext.dumps(data) != '{"<think>": ["a<think>", 1, null], "b": ["c"]}'
    text, plain = guard.mend(jsontext.dumps(data))
    assert text == '{"<think>": ["a<think>", 1, null], "b": ["c"]}' and plain == ((2, 9), (15, 22))
    assert guard.text("<think>", keep=["<think>"]) == "<think>"
    assert Guard([], "").text("<think>") == "<think>"
    with pytest.raises(ChatError, match="noncharacter"):
        Guard(["<think>"], "".join(map(chr, range(0xFDD0, 0xFDF0))))


def test_inline_reasoning_is_split_before_guarding():
    assert chat.split_reasoning("<think>\nr\n</think>\n\nt") == ("\nr\n", "\n\nt")
    assert chat.split_reasoning("r</think>a</think>b") == ("r", "a</think>b")
    assert chat.split_reasoning("no <think> closed") is None
    # A template that does it itself does not see guarded tags, and sees the split parts.
    template = "{% if '</think>' in m.content %}{{ m.content.split('</think>')[0] }}{% else %}-{% endif %}{{ m.r }}"
    guard = Guard(["<think>", "</think>"], "")
    message = {"content": guard.text("a</think>b"), "r": "a"}
    assert guard.mend(jinja.render(template, {"m": message}))[0] == "-a"


# --- templates -------------------------------------------------------------------------------------------------------


def render(template, now=None, **variables):
    return jinja.render(template, variables, now=now)


def test_the_dialect():
    assert render("{% for i in [1, 2, 3] %}\n  {% if i == 2 %}{% continue %}{% endif %}\n{{ i }}\n{% endfor %}") == "1\n3\n"
    assert render("{% generation %}a{{ b }}{% endgeneration %}", b=1) == "a1"
    assert render("{{ x | tojson }}", x={"b": "<é'>", "a": [1.0, True, None]}) == '{"b": "<é\'>", "a": [1.0, true, null]}'
    assert render("{{ x | tojson(indent=2, sort_keys=true) }}", x={"b": 1, "a": []}) == '{\n  "a": [],\n  "b": 1\n}'
    assert render("{{ x | tojson(separators=(',', ':'), ensure_ascii=true) }}", x=["é", "😀"]) == '["\\u00e9","\\ud83d\\ude00"]'
    assert render("{{ ('{\"b\": 1.0}' | from_json).b }}") == "1.0"
    assert render("{{ strftime_now('%d %b %Y') }}", datetime.datetime(2026, 2, 1)) == "01 Feb 2026"
    assert render("{{ missing }}{{ m.missing }}{% if x is defined %}x{% endif %}", m={}) == ""
    assert render("{% macro f(a) %}[{{ a }}]{% endmacro %}{{ f(1) ~ f('b') }}") == "[1][b]"
    assert render("{{ 'a-%s-%03d' % ('b', 7) }}{{ '{:>3}'.format(1) }}{{ '%s' | format(2) }}") == "a-b-007  12"
    assert render("{{ 'aXbX' | replace('X', '-') }}{{ 'aXbX'.replace('X', '+', 1) }}{{ m | join(',', 'a') }}",
                  m=[{"a": 1}, {"a": 2}]) == "a-b-a+bX1,2"


@pytest.mark.parametrize("template, found", [
    ("{{ raise_exception('no such\n role') }}", "no such role"), ("{% if %}", "line 1"), ("\n{{ a b }}", "line 2"),
    ("{{ missing.a.b }}", "undefined"), ("{{ missing | tojson }}", "undefined"), ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{{ 'x' | from_json }}", "JSON"), ("{{ f | tojson }}", "no JSON form"), ("{{ m.append(1) }}", "unsafe|safe"),
    ("{{ ''.__class__.__mro__ }}", "unsafe|safe"), ("{% include 'x' %}", "loader"), ("{% import 'x' as y %}", "loader"),
    ("{{ lipsum }}{{ lipsum() }}", "undefined"), ("{{ f.__globals__.x }}", "unsafe|safe"),
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "loops more than"),
    ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}", "loops more than"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too deeply"), ("{{ range(10 ** 9) }}", "Range too big"),
    ("{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "characters"),
    ("{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", "characters"),
    ("{{ 'ab' * 999999999 }}", "characters"), ("{{ [1] * 999999999 }}", "characters"), ("{{ 9 ** (9 ** 9) }}", "characters"),
    ("{% for i in range(90000) %}{{ s }}{% endfor %}", "characters"), ("{{ 'a'.ljust(999999999) }}", "unsafe|safe"),
    ("{{ '%999999999d' % 1 }}", "pads"), ("{{ '{:999999999}'.format(1) }}", "pads"),
    ("{{ 'a' | center(9999999999) }}", "center"), ("{{ 'a' | indent(999999999) }}", "indents"),
    ("{{ [1] | slice(999999999) | list }}", "slice"), ("{{ 1 | round(999999999, 'ceil') }}", "round"),
    ("{{ s.replace('', s) }}", "characters"), ("{{ s | replace('', s) }}", "characters"), ("{{ s.join(s) }}", "characters"),
    ("{{ s | join(s) }}", "characters"), ("{{ '%*d' | format(999999999, 1) }}", "pads"),
])  # fmt: skip
def test_templates_fail_in_one_sentence(template, found, monkeypatch):
    monkeypatch.setattr(jinja, "MAX_STEPS", 100_000)
    with pytest.raises(ChatError, match=found) as caught:
        render(template, s="x" * 50_000, m=[], f=render)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_template_size_and_cache():
    with pytest.raises(ChatError, match="at most 1048576"):
        render("x" * (jinja.MAX_TEMPLATE_CHARS + 1))
    assert jinja.compile_template("{{ a }}") is jinja.compile_template("{{ a }}")


@given(st.text("{}%-#_ab()[]|.'\"<>=\n 1,", max_size=40))
def test_any_template_renders_or_is_refused(template):
    with contextlib.suppress(ChatError):
        assert isinstance(render(template, a=[1], b="b"), str)


# --- messages and events ---------------------------------------------------------------------------------------------


def test_contents_and_arguments():
    assert chat.flatten(None) == "" and chat.flatten(["a", {"type": "text", "text": "b"}], "|") == "a|b"
    with pytest.raises(ChatError, match="content is a int"):
        chat.flatten(3)
    assert chat.call_arguments({"function": {"name": "f", "arguments": '{"b": 1.0, "a": 2}'}}) == {"b": 1.0, "a": 2}
    assert chat.call_arguments({"function": {"name": "f", "arguments": " "}}) == {}
    with pytest.raises(ChatError, match=r"'f' are \[1\]"):
        chat.call_arguments({"function": {"name": "f", "arguments": [1]}})


def test_events_are_collected():
    events = [Reasoning("a"), Reasoning("b"), Text("c"), CallBegin(0, "f"), CallArguments(0, "{"), CallArguments(0, "}"),
              CallEnd(0), CallBegin(1, "g"), CallArguments(1, "{")]
    message = chat.collect(events)
    assert (message.reasoning, message.text, message.calls) == ("ab", "c", (Call("f", "{}"),))
    assert chat.joined(events) == [Reasoning("ab"), Text("c"), CallBegin(0, "f"), CallArguments(0, "{}"), CallEnd(0),
                                   CallBegin(1, "g"), CallArguments(1, "{")]


def test_protocol_of_an_artifact(caplog):
    metadata = {"general.architecture": "deepseek4", "tokenizer.chat_template": "x"}
    with caplog.at_level(logging.WARNING):
        bound = chat.for_artifact(metadata, Specials(), "v4-0731.gguf")
    assert "tokenizer.chat_template is not used: it does not write" in caplog.text
    assert bound.template is None and bound.settings == {"release": "0731"}
    prompt = bound.render([{"role": "user", "content": "a"}], None, chat.Options())
    assert prompt.text.endswith("<｜User｜>a<｜Assistant｜><think>")
    parser = bound.parser(prompt, None)
    assert parser.feed("r</think>t") == [Reasoning("r"), Text("t")]
    own = "{# ｜DSML｜tool_calls #}{{ bos_token }}{{ messages[0].content }}"
    bound = chat.for_artifact({**metadata, "tokenizer.chat_template": own}, Specials(bos="<s>"))
    assert bound.render([{"role": "user", "content": "a"}], None, chat.Options()).text == "<s>a"
    for messages, tools, where in ((3, None, "messages"), (["a"], None, r"messages\[0\]"), ([{}], None, "role"),
                                   ([{"role": "user", "reasoning": 1}], None, "reasoning"),
                                   ([{"role": "assistant", "tool_calls": [{"function": {}}]}], None, "tool_calls"),
                                   ([], [{"type": "function"}], r"tools\[0\].function"), ([], {"a": 1}, "tools")):
        with pytest.raises(ChatError, match=where) as caught:
            bound.render(messages, tools, chat.Options())
        assert caught.value.field
    with pytest.raises(ChatError, match="'bert' has no chat protocol; known are .*deepseek4"):
        chat.for_artifact({"general.architecture": "bert"}, Specials())
    with pytest.raises(ChatError, match="a string is expected"):
        chat.for_artifact({**metadata, "tokenizer.chat_template": 3}, Specials())
