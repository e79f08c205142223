"""Messages in Anthropic's form: on a model that says what it is told, with the events' automaton and the SDK's types."""

import json
import re
import threading

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from ds4ref.chat import CallArguments, CallBegin, CallEnd, Reasoning, Text, collect
from ds4ref.chat.dsml import DSML
from ds4server.api import anthropic_blocks, opaque
from ds4server.api.anthropic import Blocks, blocks, call_input
from ds4server.api.continuation import results_without_calls
from ds4server.api.errors import ApiError

from .inprocess import Babbler, Scripted, running

PATH = "/v1/messages"
EVENT = TypeAdapter(RawMessageStreamEvent)
TOOLS = [{"name": "tide", "description": "Tides.", "input_schema": {"type": "object", "properties": {
    "harbour": {"type": "string"}, "day": {"type": "integer"}}}}]  # fmt: skip


def invoke(**arguments):
    parts = "".join(
        f'<{DSML}parameter name="{name}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</{DSML}parameter>\n"
        for name, value in arguments.items()
    )
    return f'<{DSML}invoke name="tide">\n{parts}</{DSML}invoke>\n'


def block(*invokes):
    return f"\n\n<{DSML}tool_calls>\n{''.join(invokes)}</{DSML}tool_calls>"


def post(found, path=PATH, **fields):
    body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 200} | fields
    return found.client.simulate_post(path, body=json.dumps(body))


def whole(found, **fields):
    answer = post(found, **fields)
    assert answer.status_code == 200, answer.text
    return Message.model_validate(answer.json).model_dump() and answer.json


def streamed(found, **fields):
    """(the message that the events of a stream add up to, the events)."""
    answer = post(found, stream=True, **fields)
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = []
    for frame in answer.text.split("\n\n")[:-1]:
        name, data = [line for line in frame.split("\n") if not line.startswith(":")]
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return replayed(events), events


def replayed(events):
    """The message that a complete stream adds up to. The automaton: start, blocks one after the other, delta, stop."""
    first, *rest, delta, stop = [event for event in events if event["type"] != "ping"]
    for event in (first, *rest, delta, stop):
        EVENT.validate_python(event)
    assert [event["type"] for event in (first, delta, stop)] == ["message_start", "message_delta", "message_stop"]
    assert events[0] is first, "nothing comes before the start"
    message = first["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["usage"]["output_tokens"] == 0
    given = {name: n for name, n in message["usage"].items() if name != "output_tokens"}
    assert given.items() <= delta["usage"].items(), "the counts of the input do not change"
    content = content_of(rest, cut=delta["delta"]["stop_reason"] == "max_tokens")
    return message | delta["delta"] | {"content": content, "usage": delta["usage"], "timings": delta["timings"]}


def content_of(events, cut=False):
    out, raw, state = [], "", "closed"
    for event in events:
        kind = event["type"]
        if kind == "content_block_start":
            assert state == "closed" and event["index"] == len(out)
            out.append(dict(event["content_block"]))
            raw, state = "", "open"
            continue
        assert state != "closed" and event["index"] == len(out) - 1
        now = out[-1]
        if kind == "content_block_stop":
            assert state == ("signed" if now["type"] == "thinking" else "open")
            if now["type"] == "tool_use":
                now["input"] = json.loads(raw or "{}") if not cut else raw
            state = "closed"
            continue
        delta = event["delta"]
        assert state == "open" and kind == "content_block_delta"
        match delta["type"], now["type"]:
            case "text_delta", "text":
                now["text"] += delta["text"]
            case "thinking_delta", "thinking":
                now["thinking"] += delta["thinking"]
            case "input_json_delta", "tool_use":
                assert now["input"] == {}
                raw += delta["partial_json"]
            case "signature_delta", "thinking":
                now["signature"], state = delta["signature"], "signed"
            case found:
                raise AssertionError(found)
    assert state == "closed"
    return out


def comparable(message):
    """What must not depend on streaming."""
    content = [part | ({"id": "…"} if part["type"] == "tool_use" else {}) for part in message["content"]]
    usage = message["usage"]
    counts = prompt_of(usage), usage["output_tokens"], usage["output_tokens_details"]
    return content, message["stop_reason"], message["stop_sequence"], counts


def prompt_of(usage):
    return usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]


def both(script, **fields):
    """The buffered answer, which is what the streamed one adds up to."""
    with running(Scripted(script)) as found:
        answer, (stream, _) = whole(found, **fields), streamed(found, **fields)
    assert comparable(stream) == comparable(answer)
    assert answer["id"] != stream["id"] and answer["id"].startswith("msg_") and answer["type"] == "message"
    assert answer["timings"]["prefill_tokens"] >= 1
    return answer


# --- answers ------------------------------------------------------------------------------------------------------------


def kinds(answer):
    return [part["type"] for part in answer["content"]]


def test_thinking_text_and_calls_in_their_order():
    script = "I look.</think>Moment." + block(invoke(harbour="Husum", day=3), invoke())
    answer = both(script, tools=TOOLS)
    assert kinds(answer) == ["thinking", "text", "tool_use", "tool_use"] and answer["stop_reason"] == "tool_use"
    thinking, text, first, second = answer["content"]
    assert thinking["thinking"] == "I look." and thinking["signature"] and text["text"] == "Moment."
    assert first["name"] == "tide" and first["input"] == {"harbour": "Husum", "day": 3} and second["input"] == {}
    assert first["id"] != second["id"] and all(re.fullmatch("toolu_[0-9a-f]{32}", call["id"]) for call in (first, second))
    usage = answer["usage"]
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]
    only = both(script, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert kinds(only) == ["thinking", "text", "tool_use"] and only["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    "fields, texts, reason, sequence",
    [
        ({}, ["one two three"], "end_turn", None),
        ({"stop_sequences": ["never", "two"]}, ["one "], "stop_sequence", "two"),
        ({"stop_sequences": ["one"]}, [""], "stop_sequence", "one"),
        ({"max_tokens": 0}, [], "max_tokens", None),
        ({"max_tokens": 1, "stop_sequences": None}, ["one"], "max_tokens", None),
        ({"tools": TOOLS, "tool_choice": {"type": "none"}}, ["one two three"], "end_turn", None),
    ],
)
def test_how_answers_end(fields, texts, reason, sequence):
    answer = both("one two three", think=False, **fields)
    assert [part["text"] for part in answer["content"]] == texts
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


def test_a_full_context_has_its_own_reason():
    with running(Scripted("one")) as found:
        found.service.context = 40
        asked = {"think": False, "ignore_eos": True, "max_tokens": 400}
        answer, (stream, _) = whole(found, **asked), streamed(found, **asked)
    assert comparable(stream) == comparable(answer) and answer["stop_reason"] == "model_context_window_exceeded"


def test_unfinished_thinking_still_has_a_text_block():
    answer = both("I never come to an end", max_tokens=3, ignore_eos=True)
    assert kinds(answer) == ["thinking", "text"] and answer["content"][1]["text"] == ""
    assert answer["stop_reason"] == "max_tokens"


def test_a_call_cut_by_the_budget_is_no_call():
    with running(Scripted(block(invoke(harbour="Husum", day=3)))) as found:
        fields = {"tools": TOOLS, "think": False, "max_tokens": 60}
        answer, (stream, _) = whole(found, **fields), streamed(found, **fields)
    assert answer["stop_reason"] == stream["stop_reason"] == "max_tokens" and kinds(answer) == ["text"]
    assert "tide" in answer["content"][0]["text"], "what was sampled is not lost"
    (call,) = stream["content"]
    assert call["type"] == "tool_use" and call["input"] in '{"harbour": "Husum", "day": 3}' and call["input"][-1:] != "}"


def test_omitted_thinking_survives_in_its_signature():
    fields = {"thinking": {"type": "adaptive", "display": "omitted"}}
    answer = both("I look.</think>There.", **fields)
    thinking, text = answer["content"]
    assert thinking["thinking"] == "" and text["text"] == "There." and opaque.opened(thinking["signature"]) == "I look."
    shown = both("I look.</think>There.", thinking={"type": "adaptive"})
    replays = [anthropic_blocks.messages(None, [{"role": "assistant", "content": a["content"]}]) for a in (answer, shown)]
    assert replays[0] == replays[1] == [{"role": "assistant", "content": "There.", "reasoning_content": "I look."}]


@given(st.text(), st.binary(max_size=40))
def test_opaque_text_comes_back_and_foreign_strings_do_not_open(text, noise):
    assert opaque.opened(opaque.sealed(text)) == text
    assert isinstance(opaque.opened(opaque.PREFIX + noise.decode("latin-1")), str | None)
    assert opaque.opened("EqoBCkgIARABGAIiQ") is None


def test_the_official_client(server):
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    asked = {"model": "claude-x", "max_tokens": 12, "messages": [{"role": "user", "content": "Say hello."}],
             "extra_body": {"temperature": 0, "seed": 7, "think": False, "ignore_eos": True}}  # fmt: skip
    answer = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text, final = "".join(stream.text_stream), stream.get_final_message()
    assert text == answer.content[0].text and final.stop_reason == answer.stop_reason == "max_tokens"
    assert final.model == "claude-x" and final.usage.output_tokens == answer.usage.output_tokens == 12
    n = client.messages.count_tokens(model="x", messages=asked["messages"], extra_body={"think": False}).input_tokens
    assert n == answer.usage.input_tokens + answer.usage.cache_creation_input_tokens + answer.usage.cache_read_input_tokens
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        client.messages.create(**asked | {"stop_sequences": ["x"] * 17})
    with pytest.raises(anthropic.NotFoundError):
        client.post("/v1/messages/batches", body={}, cast_to=object)


# --- what is enforced while sampling ------------------------------------------------------------------------------------

PLACE = {"type": "object", "properties": {"harbour": {"enum": ["Husum", "Büsum"]}, "day": {"type": "integer", "enum": [1, 30]}},
         "required": ["harbour", "day"], "additionalProperties": False}  # fmt: skip


@pytest.fixture(scope="module")
def babbler():
    with running(Babbler()) as found:
        yield found


def alike(found, **fields):
    """The buffered answer, which is what the streamed one adds up to."""
    answer, (stream, _) = whole(found, **fields), streamed(found, **fields)
    assert comparable(stream) == comparable(answer)
    return answer


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "place"}])
def test_forced_calls(babbler, choice):
    tools = [{"name": "place", "input_schema": PLACE}]
    choice = choice | {"disable_parallel_tool_use": True}
    answer = alike(babbler, tools=tools, tool_choice=choice, think=False, temperature=1, seed=3, max_tokens=600)
    assert answer["stop_reason"] == "tool_use" and kinds(answer) == ["tool_use"]
    call = answer["content"][0]["input"]
    assert call.keys() == {"harbour", "day"} and call["harbour"] in ("Husum", "Büsum") and call["day"] in (1, 30)


@pytest.mark.parametrize("fields", [{"output_config": {"format": {"type": "json_schema", "schema": PLACE}}},
                                    {"output_format": {"type": "json_schema", "schema": PLACE}}])  # fmt: skip
def test_a_schema_for_the_text(babbler, fields):
    answer = alike(babbler, **fields, thinking={"type": "enabled", "budget_tokens": 4}, temperature=1, seed=3, max_tokens=600)
    assert kinds(answer) == ["thinking", "text"] and answer["stop_reason"] == "end_turn"
    assert json.loads(answer["content"][1]["text"]).keys() == {"harbour", "day"}
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] <= 8


def test_what_cannot_be_enforced_is_refused(babbler):
    nonsense = {"type": "json_schema", "schema": {"type": "nonsense"}}
    forced = {"output_config": {"format": nonsense}, "tools": TOOLS, "tool_choice": {"type": "any"}}
    for fields in ({"output_config": {"format": nonsense}}, {"output_format": nonsense}, forced):
        answer = post(babbler, **fields)
        assert answer.status_code == 400 and answer.json["error"]["type"] == "invalid_request_error"
    assert answer.json["error"]["message"].startswith("output_config.format cannot be combined")


# --- streams ------------------------------------------------------------------------------------------------------------


def test_pings_after_the_start_and_comments_before_it():
    model = Scripted("slow")
    with running(model) as found:
        found.service.keepalive = 0.1
        model.gate.clear()
        release = threading.Timer(1.2, model.gate.set)
        release.start()
        first = []
        other = threading.Thread(target=lambda: first.append(post(found, stream=True, think=False).text))
        other.start()
        while not found.stats()["banks"]["busy"]:
            pass
        second = post(found, stream=True, think=False).text
        other.join()
    start = first[0].index("event: message_start")
    assert start == 0 and 'event: ping\ndata: {"type":"ping"}\n\n' in first[0] and ":" not in first[0][:1]
    queued, _, after = second.partition("event: message_start")
    assert queued.startswith(": queued\n: keep-alive\n") and "ping" not in queued and ": keep-alive" not in after


def test_text_that_is_not_shown_does_not_look_like_a_stall():
    """Reasoning that is omitted is silence to the client."""
    with running(Slow("one two three four five six seven eight nine ten</think>x")) as found:
        found.service.keepalive = 0.1
        answer = post(found, stream=True, thinking={"type": "enabled", "display": "omitted"})
    assert answer.text.count("event: ping") >= 3


class Slow(Scripted):
    def step(self, state, token):
        threading.Event().wait(0.05)
        return super().step(state, token)


def test_failures_in_a_stream_and_before_it():
    model = Scripted("one two three four")
    model.bad = {model.script[1]}
    with running(model) as found:
        events = post(found, stream=True, think=False).text
        assert events.count("event: error") == 1 and "message_stop" not in events and "message_delta" not in events
        error = json.loads(events.split("event: error\ndata: ")[1])
        assert error["type"] == "error" and error["error"]["type"] == "api_error"
        answer = post(found, think=False)
        assert answer.status_code == 500 and answer.json["error"]["type"] == "api_error"
        assert answer.json["request_id"] == answer.headers["request-id"]


PIECES = st.one_of(
    st.builds(Reasoning, st.text(min_size=1, max_size=3)),
    st.builds(Text, st.text(min_size=1, max_size=3)),
    st.just("call"),
)


@given(st.lists(PIECES, max_size=12), st.booleans(), st.booleans(), st.booleans())
def test_blocks_of_any_answer(pieces, omitted, answered, cut):
    """Every sequence of events a parser can report passes the automaton, and nothing of it is lost."""
    events, calls = [], 0
    for piece in pieces:
        if piece == "call":
            events += [CallBegin(calls, "tide"), CallArguments(calls, '{"n"'), CallArguments(calls, ": 1}"), CallEnd(calls)]
            calls += 1
        else:
            events.append(piece)
    if cut:
        events += [CallBegin(calls, "tide"), CallArguments(calls, '{"n"')]
    made = Blocks(omitted)
    payloads = [payload for event in events for payload in made.feed(event, str)] + list(made.close(answered))
    for payload in payloads:
        EVENT.validate_python(payload)
    content, found = content_of(payloads, cut=True), collect(events)

    def joined(kind, key):
        return "".join(part[key] for part in content if part["type"] == kind)

    assert joined("text", "text") == found.text and joined("thinking", "thinking") == ("" if omitted else found.reasoning)
    used = [part for part in content if part["type"] == "tool_use"]
    assert [part["input"] for part in used] == [call.arguments for call in found.calls] + ['{"n"'] * cut
    assert [part["id"] for part in used] == [str(i) for i in range(len(used))]
    assert not answered or any(part["type"] != "thinking" for part in content)
    order = [part["type"] for part in blocks(events, omitted, str)]
    assert order == sorted(order, key=["thinking", "text", "tool_use"].index)


def test_arguments_that_json_in_utf8_cannot_carry():
    found = call_input('{"a": "\\ud83d!", "b": [1e999, -1e999, 1.5]}')
    assert found["a"] == "\ufffd!" and json.loads(json.dumps(found, allow_nan=False))["b"][2] == 1.5


# --- requests -----------------------------------------------------------------------------------------------------------


def said(*content, role="user", system=None):
    return anthropic_blocks.messages(system, [{"role": role, "content": list(content)}])


def text(value):
    return {"type": "text", "text": value}


def user(value):
    return {"role": "user", "content": value}


def tool(identity, content):
    return {"role": "tool", "tool_call_id": identity, "content": content}


def result(identity, content=None, **more):
    return {"type": "tool_result", "tool_use_id": identity, "content": content} | more


@pytest.mark.parametrize(
    "blocks, messages",
    [
        ([text("a"), text(""), text(" b")], [user("a b")]),
        ([], [user("")]),
        ([{"type": "search_result", "content": []}, text("a")], [user("a")]),
        ([result("t1", "one"), result("t2", [text("t"), text("wo")]), text("Go "), text("on.")],
         [tool("t1", "one"), tool("t2", "two"), user("Go on.")]),
        ([text("Here:"), result("t1"), text("more"), result("t2", "", is_error=True)],
         [user("Here:"), tool("t1", ""), user("more"), tool("t2", "error")]),
        ([result("t", [{"type": "tool_reference", "tool_name": "grüß", "cache_control": {"type": "ephemeral"}}, text("!")])],
         [tool("t", '{"type": "tool_reference", "tool_name": "grüß"}!')]),
        ([result("t", "broken", is_error=True)], [tool("t", "broken")]),
    ],
)  # fmt: skip
def test_blocks_of_a_user(blocks, messages):
    assert said(*blocks) == messages


def test_blocks_of_the_assistant():
    use = {"type": "tool_use", "id": "t1", "name": "tide", "input": {"harbour": "Büsum", "day": 1}}
    call = {"id": "t1", "type": "function", "function": {"name": "tide", "arguments": '{"harbour": "Büsum", "day": 1}'}}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "anything"}
    foreign = {"type": "thinking", "thinking": "", "signature": "EqoBCkgI"}
    (message,) = said(thinking, {"type": "redacted_thinking", "data": "z"}, foreign, text("See."), use, role="assistant")
    assert message == {"role": "assistant", "content": "See.", "reasoning_content": "hm", "tool_calls": [call]}
    assert said(text("a"), role="assistant") == [{"role": "assistant", "content": "a"}]
    assert said({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, role="assistant")[0]["content"] == ""


def test_system_texts():
    billed = [text("x-anthropic-billing-header: cch=a1;"), text("One."), text(""), text("Two.")]
    assert said(text("a"), system=billed) == [{"role": "system", "content": "One.\nTwo."}, user("a")]
    assert said(text("a"), system="Zero.")[0] == {"role": "system", "content": "Zero."}
    assert said(text("a"), system="") == said(text("a"), system=billed[:1]) == [user("a")]
    assert said(text("later"), role="system") == [{"role": "system", "content": "later"}]


def test_tools_in_chat_form():
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    given = [{"type": "web_search_20250305", "name": "web_search"}, {"input_schema": schema, "name": "f", "cache_control": {}},
             {"name": "g", "type": "custom", "description": "G.", "strict": True}]  # fmt: skip
    f, g = anthropic_blocks.tools(given)
    assert json.dumps(f) == json.dumps({"type": "function", "function": {"name": "f", "parameters": schema}})
    assert g["function"] == {"name": "g", "description": "G.", "strict": True}
    assert anthropic_blocks.tools(given[:1]) is anthropic_blocks.tools([]) is anthropic_blocks.tools(None) is None


@pytest.mark.parametrize("block", ["image", "document", "container_upload"])
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_media_are_refused_everywhere(block, role):
    for content in ({"type": block}, *([result("t", [{"type": block}])] if role == "user" else [])):
        with pytest.raises(ApiError, match="text|no containers") as refused:
            said(text("a"), content, role=role)
        assert refused.value.status == 400 and refused.value.param.startswith("messages[0].content[1]")


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "fields, names",
    [
        ({"messages": None}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": [result("t", "x")]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [result(5, "x")]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": [result("t", 5)]}]}, "messages[0].content[0].content"),
        ({"messages": [{"role": "user", "content": [result("t", "", is_error="no")]}]}, "messages[0].content[0].is_error"),
        ({"messages": [{"role": "user", "content": [result("toolu_gone", "x")]}]}, "toolu_gone"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": [1]}]}]},
         "messages[0].content[0].input"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}, {"name": "a"}]}, "tools[1].name"),
        ({"tools": [{"name": "a", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "f"}, "tools": TOOLS}, "tool_choice"),
        ({"thinking": {"type": "sideways"}}, "thinking.type"),
        ({"thinking": {"type": {}}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "full"}}, "thinking.display"),
        ({"output_config": {"effort": "banana"}}, "output_config.effort"),
        ({"output_config": {"effort": {"a": 1}}}, "output_config.effort"),
        ({"output_config": 5}, "output_config"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "messages"),
    ],
)  # fmt: skip
def test_mistakes_name_the_field(idle, fields, names):
    answer = post(idle, **fields)
    assert answer.status_code == 400 and answer.json["type"] == "error", answer.text
    error = answer.json["error"]
    assert error["type"] == "invalid_request_error" and names in error["message"] and "\n" not in error["message"]
    assert answer.json["request_id"].startswith("req_") and set(answer.json) == {"type", "error", "request_id"}


@pytest.fixture(scope="module")
def idle():
    with running(Scripted("well")) as found:
        yield found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be brief."},
        {"system": [text("x-anthropic-billing-header: 5"), text("Be brief.")], "tools": TOOLS},
        {"tools": TOOLS, "tool_choice": {"type": "none"}},
        {"think": True},
        {"output_config": {"effort": "none"}},
        {"messages": [user("a"), {"role": "assistant", "content": [text("b")]}, user([text("naïve 😀")])]},
    ],
)
def test_counted_tokens_are_those_of_the_prompt(idle, fields):
    counted = post(idle, PATH + "/count_tokens", **fields, temperature="hot", max_tokens=-1)
    usage = whole(idle, max_tokens=0, **fields)["usage"]
    assert counted.json == {"input_tokens": prompt_of(usage)}


def test_counting_waits_for_nobody():
    model = Scripted("busy")
    with running(model, max_queue=0) as found:
        model.gate.clear()
        other = threading.Thread(target=lambda: post(found))
        other.start()
        while not found.stats()["banks"]["busy"]:
            pass
        assert post(found, PATH + "/count_tokens").json["input_tokens"] > 0
        assert post(found).status_code == 429 and post(found).json["error"]["type"] == "rate_limit_error"
        model.gate.set()
        other.join()


def test_effort_and_its_older_name():
    with running(Scripted("x")) as found:
        def count(**fields):
            return post(found, PATH + "/count_tokens", **fields).json["input_tokens"]

        off, on = count(think=False), count(think=True, output_config={"effort": "high"})
        assert count(output_config={"effort": "none"}) == count(reasoning_effort="off", output_config={"effort": "high"}) == off
        assert count(reasoning_effort="high") == count(reasoning_effort="low", output_config={"effort": "high"}) == on
        assert count(model="deepseek-chat") == off


# --- calls and their results --------------------------------------------------------------------------------------------


def test_results_alone_continue_the_answer_that_waits_for_them():
    script = "Moment." + block(invoke(harbour="Husum", day=3))
    with running(Scripted(script)) as found:
        fields = {"tools": TOOLS, "think": False, "system": "Be brief."}
        answer = whole(found, **fields)
        call = answer["content"][-1]
        results = user([result(call["id"], "02:14"), text("So?")])
        full = [user("Hello"), {"role": "assistant", "content": answer["content"]}, results]
        alone = whole(found, **fields, messages=[results])
        assert found.stats()["route_decisions"]["need_live_frontier"] == 1, "the serial lane holds the turn"
        assert prompt_of(alone["usage"]) == prompt_of(whole(found, **fields, messages=full)["usage"])
        counted = post(found, PATH + "/count_tokens", **fields, messages=[results]).json
        assert counted == {"input_tokens": prompt_of(alone["usage"])}
        late = [user("Hello"), results]
        refused = post(found, **fields, messages=late)
        assert refused.status_code == 400 and "replay the full history" in refused.json["error"]["message"]


def test_which_results_lack_their_call():
    calls = {"role": "assistant", "tool_calls": [{"id": "a"}, {"id": "b"}]}
    a, b, c = ({"role": "tool", "tool_call_id": name} for name in "abc")
    assert results_without_calls([calls, a, b]) == [] and results_without_calls([a, calls, b, c]) == ["a", "c"]
