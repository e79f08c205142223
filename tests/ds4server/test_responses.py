"""The Responses API in process, on a model that says what the test tells it to: items, events, tools, history, mistakes."""

import json
import threading

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from ds4ref.chat import CallArguments, CallBegin, CallEnd, Text
from ds4server.api import response_items, response_tools
from ds4server.api.response_output import Output
from ds4server.app import application

from .inprocess import CHAT, Scripted, running
from .toymodel import tokenizer

PATH = "/v1/responses"
EVENT = TypeAdapter(ResponseStreamEvent)
ITEM_IDS = {
    "reasoning": "rs_", "message": "msg_", "function_call": "fc_", "custom_tool_call": "ctc_", "tool_search_call": "tsc_",
}  # fmt: skip
DELTAS = {
    "response.output_text.delta": ("message", "text"),
    "response.reasoning_summary_text.delta": ("reasoning", "text"),
    "response.function_call_arguments.delta": ("function_call", "arguments"),
    "response.custom_tool_call_input.delta": ("custom_tool_call", "input"),
}
TIDE = {
    "type": "function", "name": "tide", "description": "High water.",
    "parameters": {"type": "object", "properties": {"harbour": {"type": "string"}, "days": {"type": "integer"}}},
}  # fmt: skip
SHOWN = {"reasoning": {"summary": "auto"}}


def called(*calls):
    """The sampled text of calls, each (name, {parameter: text})."""
    blocks = []
    for name, arguments in calls:
        lines = [
            f'<｜DSML｜parameter name="{key}" string="true">{text}</｜DSML｜parameter>\n' for key, text in arguments.items()
        ]
        blocks.append(f'<｜DSML｜invoke name="{name}">\n{"".join(lines)}</｜DSML｜invoke>\n')
    return f"\n\n<｜DSML｜tool_calls>\n{''.join(blocks)}</｜DSML｜tool_calls>"


class Session:
    def __init__(self, service):
        self.service, self.client = service.service, service.client
        self.stats = service.stats

    def post(self, body, path=PATH):
        return self.client.simulate_post(path, body=json.dumps(body))

    def whole(self, **fields):
        answer = self.post({"input": "Hello", "temperature": 0, "max_output_tokens": 400} | fields)
        assert answer.status_code == 200, answer.text
        Response.model_validate(answer.json)
        return answer.json

    def events(self, **fields):
        answer = self.post({"input": "Hello", "temperature": 0, "max_output_tokens": 400, "stream": True} | fields)
        assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        return parse(answer.text)

    def both(self, **fields):
        """The buffered answer, after the streamed one has been found to say the same."""
        whole, streamed = self.whole(**fields), replay(self.events(**fields))
        assert said(streamed) == said(whole)
        return whole


@pytest.fixture(scope="module")
def talk():
    """A function from what the model is to say to a session."""
    model = Scripted("-")
    with running(model) as service:

        def say(script):
            model.script = Scripted(script).script
            return Session(service)

        yield say


def parse(text):
    frames = [frame for frame in text.split("\n\n") if frame.strip()]
    events = []
    for frame in frames:
        lines = [line for line in frame.split("\n") if not line.startswith(":")]
        assert len(lines) == 2 and lines[0].startswith("event: ") and lines[1].startswith("data: "), frame
        event = json.loads(lines[1][6:])
        assert lines[0] == f"event: {event['type']}"
        events.append(event)
    return events


def said(response):
    """A response without what differs from one answer to the next."""
    kept = {name: value for name, value in response.items() if name not in ("id", "created_at", "completed_at", "timings")}
    usage = {name: value for name, value in response["usage"].items() if name != "input_tokens_details"}
    items = [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]]
    return kept | {"usage": usage, "output": items}


def replay(events):
    """The terminal response of a stream, after the automaton of its events has accepted it."""
    done, item, deltas, closed, parts = [], None, "", False, []
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    first, last = events[0]["response"], events[-1]
    assert first["status"] == "in_progress" and first["output"] == [] and first["usage"] is None
    for event in events[1:-1]:
        what = event["type"]
        if what == "response.in_progress":
            assert event["response"] == first
        elif what == "error":
            assert last["type"] == "response.failed" and event is events[-2]
        elif what == "response.output_item.added":
            assert item is None and event["output_index"] == len(done)
            item, deltas, closed, parts = event["item"], "", False, []
            assert item["status"] == "in_progress" and item["id"].startswith(ITEM_IDS[item["type"]])
            assert item.get("arguments", item.get("input", "")) in ("", {})
            assert not item.get("content") and not item.get("summary")
        elif what == "response.output_item.done":
            assert (event["item"]["id"], event["item"]["type"]) == (item["id"], item["type"])
            assert event["output_index"] == len(done)
            check_item(event["item"], deltas, closed, parts)
            done.append(event["item"])
            item = None
        else:
            assert event["item_id"] == item["id"] and event["output_index"] == len(done)
            if what in DELTAS:
                kind, _ = DELTAS[what]
                assert item["type"] == kind and event["delta"] and not closed
                deltas += event["delta"]
            elif what.endswith(("_part.added", "_part.done")):
                parts.append(event["part"])
            else:
                text = next(event[name] for name in ("text", "arguments", "input") if name in event)
                assert text == deltas and not closed
                closed = True
    assert item is None and last["response"]["output"] == done and last["response"]["id"] == first["id"]
    assert last["type"] == f"response.{last['response']['status']}"
    Response.model_validate(last["response"])
    return last["response"]


def check_item(item, deltas, closed, parts):
    if item["type"] == "message":
        assert closed and [part["text"] for part in parts] == ["", deltas] and item["content"] == parts[1:]
    elif item["type"] == "reasoning":
        assert [part["text"] for part in parts] == (["", deltas] if closed else []) and item["summary"] == parts[1:]
    elif item["type"] != "tool_search_call":
        assert item.get("arguments", item.get("input")) == deltas and closed >= (item["status"] == "completed")


# --- answers --------------------------------------------------------------------------------------------------------


def test_text_and_reasoning(talk):
    api = talk("Let me think.</think>Hi there.")
    answer = api.both(**SHOWN)
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"] and answer["status"] == "completed"
    assert answer["output"][0]["summary"] == [{"type": "summary_text", "text": "Let me think."}]
    assert answer["output"][1]["content"] == [{"type": "output_text", "text": "Hi there.", "annotations": [], "logprobs": []}]
    usage = answer["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    silent = api.both()
    assert [item["type"] for item in silent["output"]] == ["message"]
    assert silent["usage"]["output_tokens"] == usage["output_tokens"]
    assert "timings" in silent and silent["completed_at"] >= silent["created_at"]


def test_what_was_asked_for_is_reported(talk):
    fields = {
        "model": "some-model", "instructions": "Be brief.", "temperature": 0.5, "top_p": 0.9, "metadata": {"a": "b"},
        "tools": [TIDE], "tool_choice": "auto", "parallel_tool_calls": False,
        "reasoning": {"effort": "high", "generate_summary": "concise"},
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "store": True, "truncation": "auto", "user": "x", "seed": 1,
        "service_tier": "flex", "max_tool_calls": "any", "include": ["file_search_call.results"], "stream_options": {"x": 1},
    }  # fmt: skip
    answer = talk("a</think>b").both(**fields)
    same = ("model", "instructions", "temperature", "top_p", "metadata", "tools", "tool_choice", "parallel_tool_calls", "text")
    assert {name: answer[name] for name in same} == {name: fields[name] for name in same}
    assert answer["reasoning"] == {"effort": "high", "summary": "concise"} and answer["max_output_tokens"] == 400
    assert (answer["store"], answer["truncation"], answer["service_tier"], answer["background"]) == (
        False, "disabled", "default", False,
    )  # fmt: skip
    bare = talk("a</think>b").whole(max_output_tokens=None, max_tokens=3, metadata=7, temperature=None)
    assert bare["model"] == "toy" and bare["metadata"] == {} and bare["tools"] == [] and bare["max_output_tokens"] == 3
    assert bare["temperature"] == bare["top_p"] == 1 and bare["tool_choice"] == "auto" and bare["error"] is None


@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content"]])
@pytest.mark.parametrize("summary", [None, "auto"])
def test_every_budget(talk, summary, include):
    """Whatever a budget cuts: the shorter answer begins the longer one, and says what is unfinished."""
    api = talk("hm, so</think>Well done")
    fields = {"reasoning": {"summary": summary}, "include": include}
    total = api.whole(**fields)["usage"]["output_tokens"]
    shown = bool(summary or include)
    for budget in range(total + 1):
        answer = api.both(**fields, max_output_tokens=budget)
        assert answer["usage"]["output_tokens"] == budget
        assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["completed_at"] is None
        *before, last = answer["output"]
        assert last["type"] == "message" and last["status"] == "incomplete"
        assert "Well done".startswith(last["content"][0]["text"])
        assert len(before) <= shown and (budget == 0 or len(before) == shown)
        if before:
            finished = bool(last["content"][0]["text"]) or before[0]["summary"] == [{"type": "summary_text", "text": "hm, so"}]
            assert before[0]["status"] == "completed" or not last["content"][0]["text"]
            assert before[0]["status"] == "incomplete" or finished or not summary
            assert ("encrypted_content" in before[0]) == bool(include) and bool(before[0]["summary"]) == bool(summary)
    assert api.both(**fields)["status"] == "completed"


def test_stop_strings_and_end_in_reasoning(talk):
    answer = talk("x</think>one two three").both(stop=["two"])
    assert answer["status"] == "completed" and answer["output"][0]["content"][0]["text"] == "one "
    answer = talk("never closed").both(**SHOWN)
    assert answer["status"] == "incomplete" and [item["status"] for item in answer["output"]] == ["incomplete"] * 2


def test_logprobs_are_those_of_chat(talk):
    api = talk("x</think>Straße 漢字")
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    found = api.both(**asked)["output"][0]["content"][0]["logprobs"]
    messages = [{"role": "user", "content": "Hello"}]
    chat = api.post({"messages": messages, "temperature": 0, "logprobs": True, "top_logprobs": 2}, CHAT).json
    assert found == chat["choices"][0]["logprobs"]["content"] and len(found) > 5
    deltas = [e["logprobs"] for e in api.events(**asked) if e["type"] == "response.output_text.delta"]
    assert sum(deltas, []) == found
    assert api.both(top_logprobs=2)["output"][0]["content"][0]["logprobs"] == []


# --- tools ----------------------------------------------------------------------------------------------------------


def test_calls(talk):
    script = "why</think>Looking." + called(("tide", {"harbour": "Husum"}), ("tide", {"harbour": "Büsum"}))
    api = talk(script)
    answer = api.both(tools=[TIDE], **SHOWN)
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call", "function_call"]
    calls = answer["output"][2:]
    assert [json.loads(call["arguments"]) for call in calls] == [{"harbour": "Husum"}, {"harbour": "Büsum"}]
    assert len({call["call_id"] for call in calls}) == 2 and all(len(call["call_id"]) == len("call_") + 32 for call in calls)
    assert answer["status"] == "completed" and all(call["name"] == "tide" for call in calls)
    assert 0 < answer["usage"]["output_tokens_details"]["reasoning_tokens"] <= len("why</think>")
    single = api.both(tools=[TIDE], parallel_tool_calls=False)
    assert [item["type"] for item in single["output"]] == ["message", "function_call"]
    alone = talk("why</think>" + called(("tide", {})))
    assert [item["type"] for item in alone.both(tools=[TIDE])["output"]] == ["function_call"]


def last_status(response):
    """The status of the item that was being written."""
    return response["output"][-1]["status"]


def test_a_budget_inside_a_call(talk):
    api = talk("x</think>" + called(("tide", {"harbour": "Husum"})))
    total = api.whole(tools=[TIDE])["usage"]["output_tokens"]
    seen = set()
    for budget in [*range(12, total, 9), total - 1]:
        streamed = replay(api.events(tools=[TIDE], max_output_tokens=budget))
        buffered = api.whole(tools=[TIDE], max_output_tokens=budget)
        assert streamed["status"] == buffered["status"] == "incomplete"
        seen |= {(kind, answer["output"][-1]["type"]) for kind, answer in (("streamed", streamed), ("buffered", buffered))}
        assert last_status(streamed) == last_status(buffered) == "incomplete"
    assert seen == {(kind, item) for kind in ("streamed", "buffered") for item in ("message", "function_call")}


def test_text_behind_a_call_stands_before_it_in_the_buffered_answer():
    """What is left of a call that the budget cut becomes text there; the calls before it are whole."""
    said = [Text("Look. "), CallBegin(0, "tide"), CallArguments(0, "{}"), CallEnd(0), Text("<invoke")]
    output = Output(response_tools.Toolbox(), lambda call: f"call_{call}")
    for event in said:
        output.take(event, [{"logprob": -1}] if isinstance(event, Text) else ())
    output.finish(cut=True, reasoning_open=False)
    assert [(item["type"], item["status"]) for item in output.items] == [
        ("message", "completed"), ("function_call", "completed"), ("message", "incomplete"),
    ]  # fmt: skip
    message, call = output.ordered()
    assert message["content"][0]["text"] == "Look. <invoke" and len(message["content"][0]["logprobs"]) == 2
    assert message["status"] == "incomplete" and call == output.items[1]


def test_custom_tools_take_free_text(talk):
    text = 'first\nsecond "quoted" \\ 漢字 😀'
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    tools = [{"type": "custom", "name": "patch", "description": "Edits.", "format": grammar}]
    api = talk("x</think>" + called(("patch", {"input": text})))
    (call,) = api.both(tools=tools)["output"]
    assert call["type"] == "custom_tool_call" and call["input"] == text and call["name"] == "patch"
    (call,) = talk("x</think>" + called(("patch", {"other": "odd"}))).both(tools=tools)["output"]
    assert json.loads(call["input"]) == {"other": "odd"}
    box = response_tools.Toolbox()
    box.add(tools, "tools")
    function = box.definitions[0]["function"]
    assert "start: /.+/" in function["description"] and function["parameters"]["required"] == ["input"]


def test_namespaces(talk):
    tools = [{"type": "namespace", "name": "mcp__sea__", "description": "The sea.", "tools": [TIDE]}]
    (call,) = talk("x</think>" + called(("mcp__sea__tide", {"harbour": "Husum"}))).both(tools=tools)["output"]
    assert call["name"] == "tide" and call["namespace"] == "mcp__sea__"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}
    found = response_items.messages([{"role": "user", "content": "?"}, call, result], response_tools.Toolbox())
    assert found[1]["tool_calls"][0]["function"]["name"] == "mcp__sea__tide"


def test_tool_search(talk):
    search = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {"type": "object"}}
    api = talk("x</think>" + called(("tool_search", {"query": "tides"})))
    (call,) = api.both(tools=[search])["output"]
    assert call["type"] == "tool_search_call" and call["execution"] == "client" and call["arguments"] == {"query": "tides"}
    history = [{"role": "user", "content": "?"}, call]
    found = {"type": "tool_search_output", "call_id": call["call_id"], "tools": [TIDE]}
    api = talk("x</think>" + called(("tide", {})))
    assert api.both(input=[*history, found], tools=[search, TIDE])["output"][0]["name"] == "tide"
    assert api.both(input=[*history, found], tools=[search])["output"][0]["type"] == "function_call"


def test_hosted_tools_are_dropped(talk):
    api = talk("x</think>" + called(("web_search", {})))
    hosted = [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"type": "tool_search", "execution": "server"}]
    count = "/v1/responses/input_tokens"
    plain, dropped, kept = (api.post({"input": "Hi", "tools": tools}, count).json["input_tokens"]
                            for tools in ([], hosted, [*hosted, TIDE]))  # fmt: skip
    assert plain == dropped < kept
    (item,) = api.both(tools=hosted)["output"]
    assert item["type"] == "message", "without tools, markup is text"


# --- history --------------------------------------------------------------------------------------------------------


def test_the_prompt_is_that_of_chat(talk):
    """The same conversation costs the same tokens on both surfaces, hidden reasoning included."""
    api = talk("I should call it.</think>" + called(("tide", {"harbour": "Husum"})))
    answer = api.both(input="Husum?", instructions="Be brief.", tools=[TIDE], include=["reasoning.encrypted_content"])
    hidden, call = answer["output"]
    assert hidden["summary"] == [] and hidden["type"] == "reasoning"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "04:10"}
    asked = {"role": "user", "content": "Husum?"}
    body = {"input": [asked, hidden, call, result], "instructions": "Be brief.", "tools": [TIDE]}
    counted = api.post(body, "/v1/responses/input_tokens").json
    assert counted == {"object": "response.input_tokens", "input_tokens": api.whole(**body)["usage"]["input_tokens"]}
    made = {"id": call["call_id"], "type": "function", "function": {"name": "tide", "arguments": call["arguments"]}}
    messages = [
        {"role": "system", "content": "Be brief."}, asked,
        {"role": "assistant", "content": None, "reasoning_content": "I should call it.", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": call["call_id"], "content": "04:10"},
    ]  # fmt: skip
    function = {name: TIDE[name] for name in ("name", "description", "parameters")}
    chat = api.post({"messages": messages, "tools": [{"type": "function", "function": function}], "max_tokens": 1}, CHAT).json
    assert chat["usage"]["prompt_tokens"] == counted["input_tokens"]
    body["input"][1] = hidden | {"encrypted_content": "gAAAAAB-of-another-server"}
    assert api.post(body, "/v1/responses/input_tokens").json["input_tokens"] < counted["input_tokens"]


def test_results_alone_continue(talk):
    api = talk("why</think>" + called(("tide", {"harbour": "Husum"}), ("tide", {"harbour": "Büsum"})))
    fields = {"instructions": "Be brief.", "tools": [TIDE]}
    reasoning, first, second = api.whole(**fields, **SHOWN)["output"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "4"} for call in (first, second)]
    history = [{"role": "user", "content": "Hello"}, reasoning, first, second, *results]
    api = talk("so</think>Four.")
    replayed = api.both(**fields, input=history)
    for instructions in ("Be brief.", None):
        assert api.both(**fields | {"instructions": instructions}, input=results)["output"][0]["content"][0]["text"] == "Four."
        alone = api.whole(**fields | {"instructions": instructions}, input=results)
        assert alone["usage"]["input_tokens"] == replayed["usage"]["input_tokens"]
    for items in (results[:1], [{"role": "user", "content": "x"}, *results]):
        refused = api.post({"input": items, **fields})
        assert refused.status_code == 400 and "replay the full history" in refused.json["error"]["message"]


def test_harmless_fields(talk):
    api = talk("x</think>y")
    absent = ("previous_response_id", "conversation", "prompt", "tools", "reasoning", "include", "text", "max_output_tokens")
    assert api.whole(**dict.fromkeys(absent), max_tokens=5, background=False)["status"] == "completed"
    assert api.whole(input=[])["usage"]["input_tokens"] > 0
    error = api.post({"input": "word " * 5000}).json["error"]
    assert error["code"] == "context_length_exceeded" and error["param"] == "input" and error["n_ctx"] == 4096


# --- streams --------------------------------------------------------------------------------------------------------


def test_silence_is_broken_by_numbered_events():
    model = Scripted("x</think>one two")
    taken, step = [], model.step

    def halting(state, token):
        taken.append(token)
        if len(taken) == 5:
            model.gate.clear()
            threading.Timer(1.2, model.gate.set).start()
        return step(state, token)

    model.step = halting
    with running(model) as service:
        service.service.keepalive = 0.3
        events = Session(service).events(**SHOWN)
    assert len([event for event in events[2:] if event["type"] == "response.in_progress"]) >= 2
    assert replay(events)["status"] == "completed"


def test_a_failure_after_the_first_byte():
    model = Scripted("x</think>Hi ~ there")
    model.bad = set(tokenizer().encode("~"))
    with running(model) as service:
        events = Session(service).events(**SHOWN)
        assert Session(service).post({"input": "Hello"}).status_code == 500
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["code"] == "server_error" and events[-2]["message"]
    response = replay(events)
    assert response["status"] == "failed" and response["error"]["code"] == "server_error"
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_the_official_client(talk):
    api = talk("why</think>Looking." + called(("tide", {"harbour": "Husum"})))
    transport = httpx.WSGITransport(app=application(api.service))
    with httpx.Client(transport=transport) as http:
        client = openai.OpenAI(base_url="http://server/v1", api_key="none", http_client=http, max_retries=0)
        asked = {"model": "toy", "input": "Hello", "tools": [TIDE], "temperature": 0}
        whole = client.responses.create(**asked)
        assert whole.output_text == "Looking." and whole.output[1].name == "tide"
        with client.responses.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert final.output_text == whole.output_text and json.loads(final.output[1].arguments) == {"harbour": "Husum"}
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        counted = client.responses.input_tokens.count(model="toy", input="Hello", tools=[TIDE])
        assert counted.input_tokens == whole.usage.input_tokens
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            client.responses.create(model="toy", input="x", previous_response_id="resp_1")
