"""XML calls in the answers of Qwen, MiMo, Naive, Step and dots: reading, writing, and both together."""
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4ref.chat import collect, dots, jsontext, mimo, naive, qwen, step
from ds4ref.chat.events import CallArguments, CallBegin, CallEnd, Reasoning, Text, joined
from ds4ref.chat.xmlcalls import XmlCall, json_value, value_text, write

FAMILIES = {"qwen": qwen, "mimo": mimo, "naive": naive, "step": step, "dots": dots}
SYNTAXES = {"qwen": qwen.SYNTAX, "mimo": mimo.SYNTAX, "naive": mimo.SYNTAX, "step": step.SYNTAX, "dots": dots.SYNTAX}
each_family = pytest.mark.parametrize("family", FAMILIES)

TOOLS = [
    {"type": "function", "function": {"name": "put", "parameters": {"type": "object", "properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "ratio": {"type": "number"}, "on": {"type": "boolean"},
        "tags": {"type": "array"}, "where": {"type": "object"}, "either": {"type": ["string", "null"]}}}}},
    {"type": "function", "function": {"name": "now"}},
]


def parse(family, pieces, thinking=False, tools=TOOLS, ended="stop", **how):
    """(joined events, parser) of an answer."""
    parser = FAMILIES[family].Parser(thinking, tools, **how)
    events = [e for piece in pieces for e in parser.feed(piece)]
    return joined(events + parser.finish(ended)), parser


def answer(family, text, **how):
    """(reasoning, text, calls with decoded arguments, outcome) of a buffered answer."""
    events, parser = parse(family, [text], **{"stream": False, **how})
    message = collect(events)
    return message.reasoning, message.text, [(c.name, json.loads(c.arguments)) for c in message.calls], parser.outcome


def call(family, name="put", **arguments):
    return write(SYNTAXES[family], name, arguments, words=SYNTAXES[family].words)


def raw(family, name, *pairs):
    """A call with the given bare texts as values."""
    return write(SYNTAXES[family], name, dict(pairs))


def pieces(text, cuts):
    edges = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, types, words, value", [
    ("02134", {"string"}, False, '"02134"'),
    ("02134", {"integer"}, False, "2134"),
    ("-007.50", {"number"}, False, "-7.50"),
    ("+5", {"integer"}, False, "5"),
    ("1e5", {"integer"}, False, "1e5"),
    ("5.5", {"integer"}, False, '"5.5"'),
    ("NaN", {"number"}, False, '"NaN"'),
    ("Infinity", {"number"}, True, '"Infinity"'),
    ("9" * 6000, {"string"}, False, f'"{"9" * 6000}"'),
    ("9" * 6000, {"integer"}, False, f'"{"9" * 6000}"'),  # More digits than Python reads as a number.
    ("True", {"boolean"}, False, "true"),
    ("True", None, True, "true"),
    ("True", None, False, '"True"'),
    ("None", {"string", "null"}, False, "null"),
    ("null", {"string", "null"}, False, "null"),
    ("None", {"string"}, True, '"None"'),
    ("Nonesuch", {"string", "null"}, True, '"Nonesuch"'),
    (" [1, 2] ", {"array"}, False, "[1, 2]"),
    ("[1, 2]", {"object"}, False, '"[1, 2]"'),
    ("[1, 2", {"array"}, False, '"[1, 2"'),
    ('{"a": 1.0}', {"object"}, False, '{"a": 1.0}'),
    ('{"a": NaN}', {"object"}, False, '"{\\"a\\": NaN}"'),
    ('"quoted"', None, False, '"\\"quoted\\""'),
    ("3", None, False, "3"),
    ("three", None, False, '"three"'),
    ("", {"integer"}, False, '""'),
    ("a\n\tb\x00\ud800", {"string"}, False, '"a\\n\\tb\\u0000\\ud800"'),
])
def test_values_follow_the_declared_type(text, types, words, value):
    assert json_value(text, types and frozenset(types), words) == value
    jsontext.loads(value)


def test_numbers_keep_their_digits():
    events, _ = parse("qwen", [raw("qwen", "put", ("ratio", "1.50"), ("where", '{"x": 1e-05}'))])
    assert collect(events).calls[0].arguments == '{"ratio": 1.50, "where": {"x": 1e-05}}'


# --- calls ----------------------------------------------------------------------------------------------------------


@each_family
def test_a_call_between_texts(family):
    text = "I look.\n\n" + call(family, text="a\nb", count=3, on=True, tags=["x"], either=None)
    arguments = {"text": "a\nb", "count": 3, "on": True, "tags": ["x"], "either": None}
    assert answer(family, text) == ("", "I look.", [("put", arguments)], "tool_calls")
    assert answer(family, text + "\n") == ("", "I look.", [("put", arguments)], "tool_calls")
    assert answer(family, text, tools=None) == ("", text, [], "stop")


@each_family
def test_several_calls(family):
    text = call(family, "now") + "\n" + call(family, count=1) + call(family, count=2)
    calls = [("now", {}), ("put", {"count": 1}), ("put", {"count": 2})]
    assert answer(family, text) == ("", "", calls, "tool_calls")
    events, parser = parse(family, [text])
    assert [e.index for e in events] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert parser.block == text and not parser.stopped
    events, parser = parse(family, list(text), single=True)
    assert collect(events).calls[0].name == "now" and len(collect(events).calls) == 1 and parser.stopped


@each_family
def test_calls_are_told_as_they_come(family):
    parser = FAMILIES[family].Parser(False, TOOLS)
    told = []
    for char in call(family, text="12 34", count=5):
        told += parser.feed(char)
    assert told[0] == CallBegin(0, "put") and told[-1] == CallEnd(0)
    fragments = [e.fragment for e in told if isinstance(e, CallArguments)]
    assert fragments[:6] == ['{"text": "', "1", "2", " ", "3", "4"]
    assert "".join(fragments) == '{"text": "12 34", "count": 5}'


def test_a_value_loses_one_newline_at_either_end_where_it_has_lines_of_its_own():
    for family, syntax in SYNTAXES.items():
        tag = syntax.parameter
        text = raw(family, "put", ("text", "@")).replace(
            f"{tag.after}\n@\n" if syntax.own_lines else f"{tag.after}@", f"{tag.after}\n\n v \n\n")
        expected = "\n v \n" if syntax.own_lines else "\n\n v \n\n"
        assert answer(family, text)[2] == [("put", {"text": expected})]
        assert answer(family, text.replace("\n\n v \n\n", ""))[2] == [("put", {"text": ""})]
        assert answer(family, text.replace("\n\n v \n\n", "x"))[2] == [("put", {"text": "x"})]


HOSTILE = ["</parameter>", "a</parameter>\nb", "</function>", "</invoke> x", "</tool_call>", "<tool_call>",
           "<tool_call>\n<function=now>\n</function>\n</tool_call>", "</function>\n</tool_call>", "</think>", "<think>",
           "<parameter=x>", '<parameter name="x">', '"\\', "</param", "\n", "\n\n", "", " ", "한국어 🦆", "\u2028",
           "<dots_function_call>\n</invoke>\n</dots_function_call>", "&lt;/parameter>", "1" * 400, "NaN", "null"]


@each_family
@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_strings_come_back(family, value):
    calls = [("put", {"text": value, "count": 1}), ("put", {"count": 2, "text": value})]
    text = "".join(call(family, name, **arguments) for name, arguments in calls)
    assert answer(family, text)[2] == calls
    assert parse(family, list(text))[0] == parse(family, [text])[0]


@each_family
def test_a_parameter_twice_counts_once(family):
    text = raw(family, "put", ("text", "a"), ("count", "1"))
    closing = SYNTAXES[family].call.closing
    again = raw(family, "put", ("text", "b"), ("count", "2")).split("\n", 2)[2].rsplit("\n" + closing, 1)[0]
    text = text.replace("\n" + closing, "\n" + again + "\n" + closing)
    assert answer(family, text)[2] == [("put", {"text": "a", "count": 1})]


# --- calls that are not whole ---------------------------------------------------------------------------------------


@each_family
def test_missing_closing_tags_are_supplied(family):
    syntax = SYNTAXES[family]
    whole = call(family, text="a b", count=7)
    expected = [("put", {"text": "a b", "count": 7})]
    for missing in ([syntax.closing], [syntax.call.closing], [syntax.closing, syntax.call.closing]):
        text = whole
        for tag in missing:
            text = text.replace("\n" + tag, "")
        events, parser = parse(family, [text], stream=False)
        assert answer(family, text)[2] == expected and parser.outcome == "tool_calls"
        assert parser.block is None
    assert answer(family, whole[:-3])[2] == expected
    last = whole.rindex(syntax.parameter.closing)
    assert answer(family, whole[:last])[2] == expected
    assert answer(family, whole[:last + 5])[2] == expected
    without = whole[:last] + whole[last + len(syntax.parameter.closing):]
    assert answer(family, without)[2] == expected
    assert answer(family, without + call(family, text="c"))[2] == [*expected, ("put", {"text": "c"})]
    assert answer(family, raw(family, "put", ("where", '{"a": '))[:-40])[2] == []


@each_family
def test_the_budget_ends_inside_a_call(family):
    first, second = call(family, "now"), call(family, text="abc", count=1, where={"k": [1]})
    for cut in range(len(second)):
        text = "Hm. " + first + second[:cut]
        events, parser = parse(family, [text], stream=False, ended="length")
        message = collect(events)
        assert [c.name for c in message.calls] == ["now"] and parser.outcome == "length"
        assert "Hm. " + message.text[3:].strip() == "Hm. " + second[:cut].strip()
        events, parser = parse(family, [text], ended="length")
        assert sum(isinstance(e, CallEnd) for e in events) == 1 and parser.outcome == "length"


@each_family
@pytest.mark.parametrize("text", ["{opening}", "{opening}text{closing}", "{opening}\n{before}put", "{opening}\n{before}{after}",
                                  "{opening}\n{before}put{after}\ntext\n{end}\n{closing}", "{opening}{closing}"])
def test_malformed_calls_are_visible_text(family, text):
    syntax = SYNTAXES[family]
    text = text.format(opening=syntax.opening, closing=syntax.closing, before=syntax.call.before, after=syntax.call.after,
                       end=syntax.call.closing)
    events, parser = parse(family, ["Hm. ", text], stream=False)
    assert events == [Text("Hm. " + text)] and parser.outcome == "stop" and parser.malformed
    streamed, parser = parse(family, ["Hm. ", text])
    assert not any(isinstance(e, CallEnd) for e in streamed) and parser.malformed


# --- reasoning ------------------------------------------------------------------------------------------------------


@each_family
def test_reasoning_opened_by_the_prompt_or_by_the_model(family):
    gap = "\n" if SYNTAXES[family].own_lines else ""
    text = f"Sum.{gap}</think>{gap}{gap}Four."
    assert answer(family, text, thinking=True) == ("Sum.", "Four.", [], "stop")
    assert answer(family, "<think>" + text, thinking=True) == ("Sum.", "Four.", [], "stop")
    assert answer(family, "<think>" + text) == ("Sum.", "Four.", [], "stop")
    assert answer(family, "Four.") == ("", "Four.", [], "stop")
    assert answer(family, text + "</think>", thinking=True) == ("Sum.", "Four.", [], "stop")
    reasoning, _, calls, outcome = answer(family, f"Sum.{gap}</think>{gap}" + call(family, count=1), thinking=True)
    assert (reasoning, calls, outcome) == ("Sum.", [("put", {"count": 1})], "tool_calls")
    for ended in ("stop", "length"):
        assert answer(family, "Sum.", thinking=True, ended=ended) == ("Sum.", "", [], "length")


@each_family
def test_a_call_inside_reasoning_closes_it_if_it_is_whole(family):
    text = "Hm.\n" + call(family, count=1)
    events, parser = parse(family, list(text), thinking=True)
    assert events == [Reasoning("Hm."), CallBegin(0, "put"), CallArguments(0, '{"count": 1}'), CallEnd(0)]
    assert parser.outcome == "tool_calls"
    assert answer(family, "Hm.\n" + call(family, "unknown"), thinking=True)[2:] == ([], "length")
    half = "Hm.\n" + call(family, count=1)[:-30]
    assert answer(family, half, thinking=True, ended="length") == (half, "", [], "length")


# --- any text, any split --------------------------------------------------------------------------------------------


def fragments(family):
    syntax = SYNTAXES[family]
    put, count = syntax.call, syntax.parameter
    return ["<think>", "</think>", "\n", " ", "x", "12", "{", "</", "<", ">", '"', "True", syntax.opening, syntax.closing,
            f"{put.before}put{put.after}", f"{put.before}now{put.after}", put.before, put.closing,
            f"{count.before}count{count.after}", f"{count.before}text{count.after}", count.before, count.closing,
            call(family, count=1), call(family, text="a b"), call(family, "now")]


@each_family
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_text_is_parsed_the_same_however_split(family, data):
    text = "".join(data.draw(st.lists(st.sampled_from(fragments(family)), max_size=18)))
    how = {"thinking": data.draw(st.booleans()), "stream": data.draw(st.booleans()), "single": data.draw(st.booleans()),
           "ended": data.draw(st.sampled_from(["stop", "length"]))}
    whole, parser = parse(family, [text], **how)
    chars, other = parse(family, list(text), **how)
    cut, third = parse(family, pieces(text, data.draw(st.lists(st.integers(0, 999), max_size=6))), **how)
    assert whole == chars == cut
    assert parser.outcome == other.outcome == third.outcome and parser.block == other.block == third.block
    ended = {e.index for e in whole if isinstance(e, CallEnd)}
    begun = {e.index: "" for e in whole if isinstance(e, CallBegin)}
    for event in whole:
        if isinstance(event, CallArguments):
            begun[event.index] += event.fragment
    for index in ended:
        assert isinstance(json.loads(begun[index]), dict)
    if not how["stream"]:
        assert ended == set(begun)
    if ended and how["ended"] == "stop":
        assert parser.outcome in ("tool_calls", "length")


numbers = st.floats(allow_nan=False, allow_infinity=False)
values = st.one_of(st.none(), st.booleans(), st.integers(), numbers, st.lists(st.integers()),
                   st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))
WRITTEN = {"count": st.integers(), "ratio": numbers, "on": st.booleans(),
           "tags": st.lists(values, max_size=3), "where": st.dictionaries(st.text(max_size=3), values, max_size=3),
           "text": st.text(max_size=20)}


@each_family
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_written_calls_are_read_back(family, data):
    keys = data.draw(st.permutations(sorted(WRITTEN)))[:data.draw(st.integers(0, 6))]
    arguments = {key: data.draw(WRITTEN[key]) for key in keys}
    text = "Now.\n" + call(family, **arguments) + call(family, "now")
    cuts = data.draw(st.lists(st.integers(0, 999), max_size=5))
    message = collect(parse(family, pieces(text, cuts))[0])
    assert [c.name for c in message.calls] == ["put", "now"] and message.text == "Now."
    read = json.loads(message.calls[0].arguments)
    assert read == arguments and list(read) == list(arguments)


def test_long_values_take_linear_time():
    parser = qwen.Parser(False, TOOLS)
    head, tail = call("qwen", text="@").split("@")
    parser.feed(head)
    for _ in range(40_000):
        parser.feed("<a> b")
    assert isinstance(parser.feed(tail)[-1], CallEnd)


def test_value_texts():
    assert [value_text(v, True) for v in (True, None, 1.5, [True], "x", {"a": "ü"})] == [
        "True", "None", "1.5", "[true]", "x", '{"a": "ü"}']
    assert [value_text(v, False) for v in (True, None, 1.5, "x")] == ["true", "null", "1.5", "x"]


def test_a_body_says_why_it_is_bad():
    body = XmlCall(qwen.SYNTAX, {})
    body.read("hello", True)
    assert body.bad == "text stands where <function= belongs" and not body.done
