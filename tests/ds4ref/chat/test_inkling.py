"""Inkling's parser: the channel is switched by tokens (`mark`), never by text that spells one."""
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4ref.chat import CallArguments, CallBegin, CallEnd, ChatError, Options, Reasoning, Text, collect, inkling, joined
from ds4ref.chat.inkling import CALL_JSON, CALL_TEXT, END_MESSAGE, MODEL, TEXT, THINKING, USER

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = f'f{CALL_JSON}{{"name":"f","args":{{"a":"x"}}}}{END_MESSAGE}'
_MARKERS = re.compile("(" + "|".join(map(re.escape, inkling.MARKERS)) + ")")


def run(answer, tools=TOOLS, ended="stop", size=None, **how):
    """(joined events, parser) of an answer, given as text in which every marker is a token."""
    parser, events = inkling.Parser(False, tools, **how), []
    for i, piece in enumerate(_MARKERS.split(answer)):
        if i % 2:
            events += parser.mark(piece)
            continue
        for at in range(0, len(piece), size or max(len(piece), 1)):
            events += parser.feed(piece[at:at + (size or len(piece))])
    return joined(events + parser.finish(ended)), parser


def answer(text, **how):
    """(reasoning, text, calls, outcome) of a buffered answer."""
    events, parser = run(text, **{"stream": False, **how})
    got = collect(events)
    return got.reasoning, got.text, [(c.name, json.loads(c.arguments)) for c in got.calls], parser.outcome


THOUGHT = f"{THINKING}Hm.{END_MESSAGE}{MODEL}"
SAID = f"{TEXT}Ok.{END_MESSAGE}"


def test_channels():
    assert answer(THOUGHT + SAID) == ("Hm.", "Ok.", [], "stop")
    assert answer(SAID + "\n") == ("", "Ok.", [], "stop")
    assert answer(f"{TEXT} a \n") == ("", " a \n", [], "stop")
    assert answer(f"{THINKING}a{END_MESSAGE}{TEXT}b") == ("a", "b", [], "stop")
    assert answer(f"{THINKING}cut") == answer(f"{THINKING}cut", ended="length") == ("cut", "", [], "length")
    assert answer("plain text, no channel") == ("", "plain text, no channel", [], "stop")
    assert answer("word") == ("", "word", [], "stop") and answer("") == ("", "", [], "stop")


def test_calls():
    events, parser = run(THOUGHT + SAID + MODEL + CALL + MODEL + CALL)
    assert events[:2] == [Reasoning("Hm."), Text("Ok.")]
    assert events[2:] == [e for i in (0, 1) for e in (CallBegin(i, "f"), CallArguments(i, '{"a":"x"}'), CallEnd(i))]
    assert (parser.outcome, parser.stopped, parser.block) == ("tool_calls", False, MODEL + CALL + MODEL + CALL)
    parser = inkling.Parser(False, TOOLS)
    assert parser.feed("f") == [] and parser.mark(CALL_JSON) == [CallBegin(0, "f")]
    assert parser.feed('{"name":"f","args":{"a":') == [CallArguments(0, '{"a":')]
    assert parser.feed('"x"}}') == [CallArguments(0, '"x"}')] and parser.mark(END_MESSAGE) == [CallEnd(0)]
    events, parser = run(CALL + MODEL + CALL, single=True)
    assert len(events) == 3 and parser.stopped and parser.outcome == "tool_calls"
    assert answer(f'{CALL_JSON}{{"name":"f","args":{{}}}}{END_MESSAGE}')[2] == [("f", {})]
    assert run(CALL + MODEL + SAID)[1].block is None


def test_text_that_spells_a_marker_stays_text():
    parser = inkling.Parser(False, TOOLS)
    spelled = f"{THINKING}a{END_MESSAGE}{MODEL}{CALL}"
    events = parser.mark(TEXT) + parser.feed(spelled) + parser.mark(END_MESSAGE) + parser.finish("stop")
    assert joined(events) == [Text(spelled)] and parser.outcome == "stop"


def test_another_turn_ends_this_one():
    events, parser = run(SAID + USER + "me again")
    assert events == [Text("Ok.")] and parser.stopped and parser.outcome == "stop"
    assert run(f"{THINKING}a{USER}")[1].outcome == "length"
    assert run(CALL + USER)[1].outcome == "tool_calls"


def test_what_is_no_call():
    plain = _MARKERS.sub("", CALL)
    assert answer(CALL, tools=None) == ("", plain, [], "stop")
    for broken in (f"f{CALL_JSON}{{}} x{END_MESSAGE}", f'f{CALL_JSON}{{"args":[1]}}{END_MESSAGE}',
        f"f{CALL_JSON}{END_MESSAGE}",
                   f"f{CALL_TEXT}free text{END_MESSAGE}", f'{CALL_JSON}{{"args":{{}}}}{END_MESSAGE}'):
        events, parser = run(broken, stream=False)
        assert events == [Text(_MARKERS.sub("", broken))] and parser.malformed and parser.outcome == "stop"
    events, parser = run(f"f{CALL_JSON}[1]{END_MESSAGE}")
    assert events == [CallBegin(0, "f")] and parser.malformed
    # Without its last marker, a call is complete at an end token, and cut at the end of the budget.
    whole = CALL.removesuffix(END_MESSAGE)
    assert answer(whole) == ("", "", [("f", {"a": "x"})], "tool_calls") and run(whole)[1].block is None
    for length in range(len("f" + CALL_JSON), len(whole) + 1):
        cut = whole[:length]
        assert answer(cut, ended="length") == ("", _MARKERS.sub("", cut), [], "length")
        events, parser = run(cut, ended="length")
        assert CallEnd(0) not in events and Text not in map(type, events) and parser.outcome == "length"


words = st.sampled_from([*inkling.MARKERS, "f", "g h", '{"name":"f","args":{"a":1}}', '{"args":', '{"a":"', '"}}',
    "}", " ", "\n", "é"])


@given(st.lists(words, max_size=14), st.booleans(), st.booleans(), st.sampled_from(["stop", "length"]), st.integers(1, 5))
def test_any_split_gives_the_same_events(pieces, stream, single, ended, size):
    text, how = "".join(pieces), {"stream": stream, "single": single, "ended": ended}
    whole, parser = run(text, **how)
    for width in (1, size):
        events, other = run(text, size=width, **how)
        assert (events, other.outcome, other.malformed, other.block) == (whole, parser.outcome, parser.malformed,
            parser.block)
    message = collect(whole)
    assert all(isinstance(json.loads(c.arguments), dict) for c in message.calls)
    assert collect(run(text, **{**how, "stream": False})[0]).calls == message.calls


def test_rendering_rules():
    def text(messages, **how):
        return inkling.render(messages, None, Options(**how)).text

    for word, number in {"minimal": "0.1", "medium": "0.7", "xhigh": "0.9", None: "0.9", "off": "0"}.items():
        assert f"level: {number}{END_MESSAGE}" in text([], effort=word)
    assert "level: 0<" in text([], thinking=False, effort="max")
    call = {"id": "c", "function": {"name": "f", "arguments": '{"b": 1e20, "a": 1.50}'}}
    got = text([{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "x",
        "content": "r"}])
    assert f'{MODEL}f{CALL_JSON}{{"name":"f","args":{{"a":1.5,"b":1e+20}}}}{END_MESSAGE}{inkling.END}' in got
    assert f"{inkling.TOOL}{TEXT}r{END_MESSAGE}" in got
    with pytest.raises(ChatError, match="'image_url'"):
        text([{"role": "user", "content": [{"type": "image_url"}]}])
