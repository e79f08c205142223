"""Answers framed by markers: reasoning, text, calls, what ends them, and what is none of them. Rules that do not depend on
how a call is written are shown in GLM's and K-EXAONE's syntax; the properties hold for every family."""
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4ref.chat import (
    CallArguments,
    CallBegin,
    CallEnd,
    Options,
    Reasoning,
    Text,
    collect,
    exaone,
    glm,
    joined,
    k2,
    ling,
    motif,
    reasoning_tags,
    solar,
)

FAMILIES = pytest.mark.parametrize("family", [glm, ling, solar, exaone, k2, motif], ids=lambda m: m.__name__.split(".")[-1])
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}, "opts": {"type": "object"}}}}} for name in ("weather", "ping")]
PING = "<tool_call>ping</tool_call>"
ROME = "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
ROME_JSON = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def parse(family, pieces, thinking=False, tools=TOOLS, ended="stop", **how):
    """(joined events, parser)."""
    parser = family.Parser(thinking, tools, **how)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined(events + parser.finish(ended)), parser


def answer(text, family=glm, **how):
    """(reasoning, text, calls, outcome) of a buffered answer."""
    events, parser = parse(family, [text], **{"stream": False, **how})
    got = collect(events)
    return got.reasoning, got.text, [(c.name, json.loads(c.arguments)) for c in got.calls], parser.outcome


# --- reasoning and text ---------------------------------------------------------------------------------------------


def test_reasoning():
    assert answer("a</think>b", thinking=True) == ("a", "b", [], "stop")
    assert answer("<think>a</think>b", thinking=True) == ("a", "b", [], "stop")
    assert answer(" <think>a</think>b") == ("a", "b", [], "stop")
    assert answer("</think>a") == ("", "a", [], "stop")
    assert answer("a<think>b</think>c") == ("", "abc", [], "stop")
    assert answer("never closed", thinking=True) == ("never closed", "", [], "length")
    assert answer("", thinking=True) == ("", "", [], "length")
    assert answer("cut</thi", thinking=True, ended="length") == ("cut</thi", "", [], "length")
    assert answer(" a \n", tools=None) == ("", " a \n", [], "stop")


def test_newlines_around_the_closing_tag_belong_to_it_where_the_family_writes_them():
    for tools in (TOOLS, None):
        assert answer("a \n</think>\n\nb\n", exaone, thinking=True, tools=tools) == ("a ", "b\n", [], "stop")
    assert answer("a\n</think>\n\n" + ROME_JSON, exaone, thinking=True)[:3] == ("a", "", [("weather", {"city": "Rome"})])
    assert answer("a\n</think>\n\nb", glm, thinking=True) == ("a\n", "\n\nb", [], "stop")


def test_any_closing_tag_of_k2_ends_reasoning():
    for tag in ("think", "think_fast", "think_faster"):
        assert answer(f"a</ifm|{tag}>b", k2, thinking=True) == ("a", "b", [], "stop")


def test_without_tools_markup_is_text():
    assert answer(ROME, tools=None) == answer(ROME, tools=[]) == ("", ROME, [], "stop")
    assert glm.Parser(False, None).feed("a \n<tool_call") == [Text("a \n<tool_call")]


# --- calls ----------------------------------------------------------------------------------------------------------


def test_calls_and_the_white_space_around_them():
    text = f"Let me look. \n{ROME}\n{PING}\n"
    events, parser = parse(glm, [text])
    assert events == [Text("Let me look."), CallBegin(0, "weather"), CallArguments(0, '{"city": "Rome"}'), CallEnd(0),
                      CallBegin(1, "ping"), CallArguments(1, "{}"), CallEnd(1)]
    assert (parser.outcome, parser.stopped, parser.block) == ("tool_calls", False, text.removeprefix("Let me look."))
    events, parser = parse(glm, [f"{PING}\nDone.\n"])
    assert events[3:] == [Text("\nDone.\n")] and parser.outcome == "tool_calls" and parser.block is None


def test_a_call_is_announced_with_its_name_and_told_as_it_comes():
    parser = glm.Parser(False, TOOLS)
    assert parser.feed("Ok. <tool_call>weather") == [Text("Ok.")]
    assert parser.feed("<arg_key>") == [CallBegin(0, "weather")]
    assert parser.feed("city</arg_key><arg_value>Ro") == [CallArguments(0, '{"city": "Ro')]
    assert parser.feed("me</arg") == [CallArguments(0, "me")]
    assert parser.feed("_value></tool_call>") == [CallArguments(0, '"}'), CallEnd(0)]
    parser = exaone.Parser(False, TOOLS)
    assert parser.feed('<tool_call>{"name": "weather", "arg') == [CallBegin(0, "weather")]
    assert parser.feed('uments": {"city": "Ro') == [CallArguments(0, '{"city": "Ro')]
    assert parser.feed('me"}}</tool_call>') == [CallArguments(0, 'me"}'), CallEnd(0)]
    parser = glm.Parser(False, TOOLS, stream=False)
    assert parser.feed(ROME[:-1]) == [] and len(joined(parser.feed(">"))) == 3


def test_single_stops_after_the_first_call():
    events, parser = parse(glm, [ROME + PING], single=True)
    assert [e.index for e in events] == [0, 0, 0] and parser.stopped and parser.outcome == "tool_calls"


def test_the_block_of_k2_ends_generation():
    text = (" \n<ifm|tool_calls>\n<ifm|tool_call>weather\n<ifm|arg_key>city</ifm|arg_key>\n<ifm|arg_value>Rome"
            '</ifm|arg_value>\n</ifm|tool_call>\n<ifm|tool_call>{"name": "ping", "arguments": {}}'
            "</ifm|tool_call>\n</ifm|tool_calls>")
    events, parser = parse(k2, ["Ok." + text + "junk"])
    assert [type(e).__name__ for e in events] == ["Text", *["CallBegin", "CallArguments", "CallEnd"] * 2]
    assert (parser.stopped, parser.outcome, parser.block) == (True, "tool_calls", text)
    calls = [("weather", {"city": "Rome"}), ("ping", {})]
    assert answer("Ok." + text, k2) == ("", "Ok.", calls, "tool_calls")
    assert answer("Ok." + text.removesuffix("</ifm|tool_calls>"), k2) == ("", "Ok.", calls, "tool_calls")
    bare = text.replace("<ifm|tool_calls>", "").replace("</ifm|tool_calls>", "")
    assert answer("Ok." + bare, k2) == ("", "Ok.", calls, "tool_calls")
    assert answer("Ok." + bare + " Bye.", k2)[1:3] == ("Ok.\n Bye.", calls)
    assert answer("a<ifm|tool_calls>\n</ifm|tool_calls>b", k2) == ("", "ab", [], "stop")
    assert answer("a<ifm|tool_calls>b", k2) == ("", "a<ifm|tool_calls>b", [], "stop")
    assert answer("a<ifm|tool_calls>", k2, ended="length") == ("", "a<ifm|tool_calls>", [], "length")


def test_calls_inside_open_reasoning_end_it_if_nothing_else_follows():
    for after in ("", "\n", "</think>", "\n</think>\n"):
        got = answer(f"hm {ROME}{after}", thinking=True)
        assert got == ("hm", "", [("weather", {"city": "Rome"})], "tool_calls")
    assert answer(f"hm {ROME}{PING}</think>", thinking=True)[2] == [("weather", {"city": "Rome"}), ("ping", {})]
    # Nothing is told before that is decided.
    assert glm.Parser(True, TOOLS).feed(f"hm {ROME}") == [Reasoning("hm")]
    for text in (f"a {ROME} is how", "a <tool_call>other</tool_call>", "a <tool_call> tag", f"{PING}{ROME}."):
        assert answer(f"{text}</think>b", thinking=True) == (text, "b", [], "stop")
    assert answer("a <tool_call>weather</think>b", thinking=True) == ("a <tool_call>weather", "b", [], "stop")
    assert answer(f"a {ROME}", thinking=True, ended="length") == (f"a {ROME}", "", [], "length")
    block = "<ifm|tool_calls>\n<ifm|tool_call>ping\n</ifm|tool_call>\n</ifm|tool_calls>"
    assert answer("hm\n" + block, k2, thinking=True) == ("hm", "", [("ping", {})], "tool_calls")
    text = "hm <ifm|tool_call>ping</ifm|tool_call> as hypothetical text."
    assert answer(text + "</ifm|think>b", k2, thinking=True) == (text, "b", [], "stop")


def test_reasoning_full_of_openings_is_read_in_time():
    text = "<tool_call>weather<arg_key>city</arg_key><arg_value>" * 3000
    assert answer(text, thinking=True) == (text, "", [], "length")
    assert answer(text + "</think>b", thinking=True) == (text, "b", [], "stop")


# --- what is no call ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [
    "<tool_call>no name here</tool_call>", "<tool_call></tool_call>", "<tool_call>f junk<arg_key>", "<tool_call>",
    "<tool_call>f<arg_key></arg_key>", "<tool_call>f<arg_key>a</arg_key></tool_call>", "<tool_call>f</tool_ca",
    "<tool_call>f<arg_key>a</arg_key>junk",
])  # fmt: skip
def test_malformed_calls_are_visible_text(text):
    events, parser = parse(glm, [f"a \n{text} b"], stream=False)
    assert events == [Text(f"a \n{text} b")] and parser.outcome == "stop" and parser.malformed
    events, parser = parse(glm, [f"{PING}\n{text}"], stream=False)
    assert collect(events).text == f"\n{text}" and len(collect(events).calls) == 1 and parser.block is None


def test_a_call_that_was_announced_and_breaks_never_ends():
    events, parser = parse(glm, ["<tool_call>weather<arg_key>city</arg_key>junk</tool_call> text"])
    assert events == [CallBegin(0, "weather")] and parser.malformed and parser.outcome == "stop"


def test_missing_closing_tags_are_supplied_at_an_end_token():
    rome = [("weather", {"city": "Rome"})]
    head = "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome"
    for tail in ("", "</arg_va", "\n</tool_call>", "</arg_value>", "</arg_value>\n</tool_", "</tool_call> \n"):
        assert answer(head + tail) == ("", "", rome, "tool_calls")
        assert parse(glm, [head + tail])[1].block is None
    assert answer(head + "</tool_call>" + PING) == ("", "", [*rome, ("ping", {})], "tool_calls")
    assert answer("<tool_call>ping") == ("", "", [("ping", {})], "tool_calls")
    assert answer("<tool_call>pin") == ("", "<tool_call>pin", [], "stop")
    days = "<tool_call>weather<arg_key>days</arg_key><arg_value>"
    assert answer(days + "3")[2] == [("weather", {"days": 3})]
    assert answer(days + "three") == ("", days + "three", [], "stop")


@FAMILIES
@pytest.mark.parametrize("stream", [True, False])
def test_the_budget_may_end_anywhere(family, stream):
    """No call is reported complete before its closing marker, and buffered text is all there."""
    calls = [{"function": {"name": "weather", "arguments": {"city": "<b>R", "opts": {"a": [1, "}"]}, "days": 3}}},
             {"function": {"name": "ping", "arguments": {}}}]
    message = {"role": "assistant", "content": "Ok.", "reasoning_content": "R", "tool_calls": calls}

    ask = family.render([{"role": "user", "content": "Go"}], TOOLS, Options())
    bare = Options(template_kwargs={"add_generation_prompt": False})
    whole = family.render([{"role": "user", "content": "Go"}, message], TOOLS, bare)
    text = whole.text.removeprefix(ask.text)
    close = family.TAGS.call[1] if hasattr(family, "TAGS") else "</tool_call>"
    for length in range(len(text) + 1):
        cut = text[:length]
        events, parser = parse(family, [cut], thinking=True, ended="length", stream=stream)
        got = collect(events)
        assert len(got.calls) == cut.count(close)
        assert parser.outcome == "length" or (family is k2 and parser.stopped)
        assert parser.malformed is None
        for call in got.calls:
            assert isinstance(json.loads(call.arguments), dict)
        if not stream and not got.calls:
            after = cut.partition(reasoning_tags(family)[1][0])[2]
            assert got.text == (after.lstrip("\n") if family is exaone else after)
        parse(family, [cut], thinking=True, ended="stop", stream=stream)


# --- any split ------------------------------------------------------------------------------------------------------


def words_of(family):
    return [*family.MARKERS, "weather", "ping", "city", "days", "opts", "7", '{"a": 1}', '{"name": "ping"', "}", '"', ", ", " ",
            '{"name": "weather", "arguments": {"city": "R"}}', "\n", "text", "<", "</", "é", "\\"]


def answers(family):
    """Random words, or an answer with two calls in which some pieces are replaced by random words."""
    ask = family.render([{"role": "user", "content": "Go"}], TOOLS, Options())
    calls = [{"function": {"name": "weather", "arguments": {"city": "Rome", "opts": {"a": ["}"]}, "days": 3}}},
             {"function": {"name": "ping", "arguments": {}}}]
    message = {"role": "assistant", "content": "Ok.", "reasoning_content": "R", "tool_calls": calls}
    bare = Options(template_kwargs={"add_generation_prompt": False})
    whole = family.render([{"role": "user", "content": "Go"}, message], TOOLS, bare).text.removeprefix(ask.text)
    pieces = re.findall(r"<[^<>]*>|[{}\":,]|[a-zA-Z_]+|\s+|.", whole)
    some = st.lists(st.sampled_from(words_of(family)), max_size=2)
    edits = st.lists(st.tuples(st.integers(0, len(pieces) - 1), some), min_size=1, max_size=2)

    def edited(changes):
        out = [[p] for p in pieces]
        for place, words in changes:
            out[place] = words
        return [word for words in out for word in words]

    return edits.map(edited) | st.lists(st.sampled_from(words_of(family)), max_size=20)


@FAMILIES
@given(data=st.data())
def test_any_text_is_parsed_the_same_however_split(family, data):
    words = data.draw(answers(family))
    how = {"thinking": data.draw(st.booleans()), "stream": data.draw(st.booleans()), "single": data.draw(st.booleans()),
           "ended": data.draw(st.sampled_from(["stop", "length"]))}
    text = "".join(words)
    whole, parser = parse(family, [text], **how)
    cut = data.draw(st.integers(0, len(text)))
    for split in (list(text), words, [text[:cut], text[cut:]]):
        events, other = parse(family, split, **how)
        assert events == whole
        assert (other.outcome, other.malformed, other.block) == (parser.outcome, parser.malformed, parser.block)
    message = collect(whole)
    assert all(isinstance(json.loads(c.arguments), dict) for c in message.calls)
    indices = [e.index for e in whole if isinstance(e, CallBegin)]
    assert indices == list(range(len(indices)))
    buffered = collect(parse(family, [text], **{**how, "stream": False})[0])
    assert buffered.calls == message.calls and buffered.reasoning == message.reasoning
    if not message.calls and how["ended"] == "stop" and family is not k2:  # Whose empty block vanishes.
        # Nothing is lost: what was no call is there, but for reasoning tags and white space at them.
        tags = r"\s|" + "|".join(map(re.escape, [*family.FORMAT.think, *family.FORMAT.end_think]))
        assert re.sub(tags, "", buffered.reasoning + buffered.text) == re.sub(tags, "", text)
