"""Chat completions against a real server process: the official SDK, the wire, limits, cancellation."""

import json
import signal
import socket
import threading
import time

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from .conftest import launch

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "seed": 7, "ignore_eos": True}
PATH = "/v1/chat/completions"


def chat(api, **fields):
    return api.post(PATH, json=HELLO | fields)


def stream(api, **fields):
    """(frames, joined reasoning, joined content, finish reason, last chunk with usage)."""
    with api.stream("POST", PATH, json=HELLO | fields | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        data = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate_json(item) for item in data[:-1]]
    raw = [json.loads(item) for item in data[:-1]]
    return raw, chunks


def joined(raw, name):
    return "".join(c["choices"][0]["delta"].get(name) or "" for c in raw if c["choices"])


def test_the_official_client(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert client.models.list().data[0].id == "ds4-tiny"
    asked = {"model": "ds4-tiny", "messages": HELLO["messages"], "max_tokens": 16, "seed": 3}
    answer = client.chat.completions.create(**asked, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16 and answer.choices[0].finish_reason == "length"
    pieces = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
    )
    chunks = list(pieces)
    assert chunks[-1].usage.completion_tokens == 16 and chunks[-1].choices == []
    text = "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks if c.choices)
    assert text == answer.choices[0].message.reasoning_content
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="x", messages=[], temperature=1e9)


@pytest.mark.parametrize("think", [True, False])
@pytest.mark.parametrize("temperature", [0, 1])
def test_streamed_equals_buffered(api, think, temperature):
    fields = {"max_tokens": 40, "think": think, "temperature": temperature}
    buffered = chat(api, **fields).json()
    ChatCompletion.model_validate(buffered)
    raw, chunks = stream(api, **fields, stream_options={"include_usage": True})
    message = buffered["choices"][0]["message"]
    assert joined(raw, "content") == message["content"]
    assert joined(raw, "reasoning_content") == message.get("reasoning_content", "")
    finishes = [c["choices"][0]["finish_reason"] for c in raw if c["choices"]]
    assert finishes[-1] == buffered["choices"][0]["finish_reason"] and set(finishes[:-1]) <= {None}
    counts = ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details")
    assert {name: raw[-1]["usage"][name] for name in counts} == {name: buffered["usage"][name] for name in counts}
    assert raw[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({c["id"] for c in raw}) == 1 and all(c["usage"] is None for c in raw[:-1])
    assert chat(api, **fields).json()["choices"] == buffered["choices"], "the same seed gives the same answer"


@pytest.mark.parametrize("budget", [0, 1, 2, 3])
def test_small_budgets_are_exact(api, budget):
    answer = chat(api, max_tokens=budget).json()
    assert answer["usage"]["completion_tokens"] == budget and answer["usage"]["prompt_tokens"] > 0
    assert answer["choices"][0]["finish_reason"] == "length"
    raw, _ = stream(api, max_tokens=budget)
    assert [c["choices"][0]["finish_reason"] for c in raw][-1] == "length" and "usage" not in raw[-1]


def test_reasoning_is_kept_apart(api):
    assert "reasoning_content" in chat(api, max_tokens=30, temperature=0).json()["choices"][0]["message"]
    off = chat(api, max_tokens=30, temperature=0, reasoning_effort="none").json()
    assert off["choices"][0]["message"]["content"]
    alias = chat(api, max_tokens=30, temperature=0, model="deepseek-chat").json()
    assert alias["choices"] == off["choices"] and alias["model"] == "deepseek-chat"


def test_stop_strings_end_the_visible_text(api):
    whole = chat(api, max_tokens=60, temperature=0, think=False).json()["choices"][0]["message"]["content"]
    stop = whole[5:8]
    answer = chat(api, max_tokens=60, temperature=0, think=False, stop=["never there", stop]).json()["choices"][0]
    assert answer["finish_reason"] == "stop" and answer["message"]["content"] == whole[: whole.index(stop)]


def test_logprobs_cover_the_visible_text(api):
    fields = {"max_tokens": 24, "temperature": 0, "think": False, "logprobs": True, "top_logprobs": 3}
    choice = chat(api, **fields).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    text = b"".join(bytes(e["bytes"]) for e in entries).decode("utf-8", "replace")
    assert text.rstrip("\ufffd") == choice["message"]["content"].rstrip("\ufffd")
    assert all(len(e["top_logprobs"]) == 3 and e["logprob"] == e["top_logprobs"][0]["logprob"] for e in entries)
    raw, _ = stream(api, **fields)
    streamed = [e for c in raw for e in ((c["choices"][0].get("logprobs") or {}).get("content") or [])]
    assert streamed == entries


def test_logit_bias_bans_and_forces(api):
    forced = chat(api, max_tokens=4, temperature=0, logit_bias={"65": 100}, return_token_ids=True).json()
    assert forced["choices"][0]["token_ids"] == [65] * 4
    assert chat(api, logit_bias={"99999": 1}).json()["error"]["param"] == "logit_bias"


def test_tools_are_rendered_and_history_is_accepted(api):
    tools = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}]
    plain = chat(api, max_tokens=1).json()["usage"]["prompt_tokens"]
    assert chat(api, max_tokens=1, tools=tools).json()["usage"]["prompt_tokens"] > plain + 50
    assert chat(api, max_tokens=1, tools=tools, tool_choice="none").json()["usage"]["prompt_tokens"] == plain
    call = {"id": "call_1", "type": "function", "function": {"name": "tide", "arguments": '{"harbour": "Husum"}'}}
    history = [
        {"role": "user", "content": "Husum?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "04:10"},
    ]
    assert chat(api, messages=history, tools=tools, max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
        ({"stream": "true"}, "stream"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": True}, "seed"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"reasoning_effort": "hard"}, "reasoning_effort"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"think": "yes"}, "think"),
        ({"n": 17}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "["}}}},
         "response_format"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice.tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"functions": []}, "functions"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ],
)  # fmt: skip
def test_mistakes_name_the_field(api, fields, param):
    response = chat(api, **fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]


@pytest.mark.parametrize(
    "raw",
    [b"", b"  ", b"[]", b"{", b'{"messages": [], x}', b'{"messages": []} x', b'{"a": NaN}', b'{"a": "\\ud83d"}',
     b'{"a": "\xff"}', b'{"a":' + b"[" * 300 + b"]" * 300 + b"}"],
)  # fmt: skip
def test_bodies_that_are_no_json_object(api, raw):
    response = api.post(PATH, content=raw)
    assert response.status_code == 400 and "body" in response.json()["error"]["message"]
    assert response.headers["x-request-id"] == response.headers["request-id"]


def test_a_chunked_body_cut_anywhere(api):
    raw = json.dumps(HELLO | {"max_tokens": 3, "messages": [{"content": "Grüße 漢字"}]}, ensure_ascii=False).encode()
    response = api.post(PATH, content=(raw[i : i + 7] for i in range(0, len(raw), 7)))
    assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 3


def test_other_paths_and_methods(api):
    assert api.get("/nope").json()["error"]["type"] == "invalid_request_error"
    refused = api.get(PATH)
    assert refused.status_code == 405 and "POST" in refused.headers["allow"]
    assert api.options("/anything").status_code == 204
    assert api.head("/health").status_code == 200 and api.get("/health/?x=1").json() == {"status": "ok"}
    assert api.get("/v1/models/deepseek-reasoner").json()["id"] == "deepseek-reasoner"
    assert api.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert not [h for h in api.get("/health").headers if h.startswith("access-control")]
    assert api.post(PATH, content=b"{}", headers={"Content-Encoding": "gzip"}).status_code == 415


def test_a_prompt_beyond_the_context(api):
    error = chat(api, messages=[{"content": "word " * 40000}], stream=True).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["n_ctx"] == 32768 <= error["n_prompt_tokens"]


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.05)


@pytest.mark.parametrize("mode", ["stream", "buffered", "prefill"])
def test_a_client_that_leaves_frees_the_engine(server, mode):
    before = server.stats()["requests"]["canceled"]
    content = "word " * 8000 if mode == "prefill" else "Hello"
    body = json.dumps(HELLO | {"messages": [{"content": content}], "stream": mode != "buffered", "max_tokens": 30000}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_for(lambda: server.stats()["banks"]["busy"] == 1)
        if mode == "stream":
            assert b"200 OK" in connection.recv(65536)
    wait_for(lambda: server.stats()["requests"]["canceled"] == before + 1)
    wait_for(lambda: server.stats()["banks"]["busy"] == 0)
    decoded = server.stats()["tokens"]
    time.sleep(0.3)
    assert server.stats()["tokens"] == decoded


def test_a_waiting_stream_is_told_and_kept_alive(server):
    host, port = server.url.removeprefix("http://").split(":")
    first = httpx.Client(base_url=server.url, timeout=60)
    with first.stream("POST", PATH, json=HELLO | {"stream": True, "max_tokens": 30000}) as running:
        pieces = running.iter_raw()  # kept: closing the iterator closes the connection
        next(pieces)
        with httpx.stream("POST", server.url + PATH, json=HELLO | {"stream": True, "max_tokens": 1}, timeout=60) as waiting:
            seen, comments = "", waiting.iter_text()  # kept, too
            for piece in comments:
                seen += piece
                if seen.count(": keep-alive\n") == 2:
                    break
            assert seen == ": queued\n" + ": keep-alive\n" * 2
            assert server.stats()["queue_depth"] == 1
    wait_for(lambda: server.stats()["requests"]["inflight"] == 0)


def test_a_full_queue_is_429_and_ctrl_c_ends_cleanly():
    server = launch("--max-queue", "0", "--grace-seconds", "0.2", "--cors")
    with httpx.stream("POST", server.url + PATH, json=HELLO | {"stream": True}, timeout=60) as running:
        pieces = running.iter_text()
        next(pieces)
        refused = httpx.post(server.url + PATH, json=HELLO)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["retry-after"] and refused.headers["access-control-allow-origin"] == "*"
        rest = []
        reader = threading.Thread(target=lambda: rest.extend(pieces))
        reader.start()
        assert server.stop(signal.SIGINT) == 0
        reader.join(10)
    assert "event: error" in "".join(rest) and "shutting down" in "".join(rest) and "[DONE]" not in "".join(rest)
    assert not [line for line in server.lines if "Traceback" in line]


def test_answers_do_not_depend_on_company(api):
    alone = [chat(api, max_tokens=12, seed=s).json()["choices"] for s in range(4)]
    together = [None] * 4
    url = str(api.base_url).rstrip("/") + PATH

    def ask(s):
        together[s] = httpx.post(url, json=HELLO | {"max_tokens": 12, "seed": s}, timeout=60).json()

    threads = [threading.Thread(target=ask, args=(s,)) for s in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer["choices"] for answer in together] == alone


def test_stats_tell_what_happened(server, api):
    answer = chat(api, max_tokens=3)
    stats = server.stats()
    last = stats["last_request"]
    assert last["completion_tokens"] == 3 and last["effective_lane"] == "serial"
    assert last["request_id"] == answer.headers["x-request-id"]
    assert stats["serving"]["effective"]["backend"] == "reference"
    assert "Hello" not in json.dumps(stats)


TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(
    ("think", "tools"),
    [
        (True, TOOLS),
        (False, None),
        pytest.param(True, None, marks=pytest.mark.slow),
        pytest.param(False, TOOLS, marks=pytest.mark.slow),
    ],
)
def test_a_growing_conversation_computes_only_what_is_new(api, server, tools, think):
    """Eight turns whose history is what the server answered. Every answer equals that of a server that reuses nothing."""
    messages, spent = [], []
    for turn in range(8):
        messages.append({"role": "user", "content": f"question {turn} " + "about the harbour and its tides " * 25})
        fields = {"messages": list(messages), "tools": tools, "think": think, "max_tokens": 12, "temperature": 0}
        answer = chat(api, **fields).json()
        usage, timings = answer["usage"], answer["timings"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert timings["prefill_cached_tokens"] + timings["prefill_tokens"] == usage["prompt_tokens"]
        spent.append((usage["prompt_tokens"], cached))
        message = answer["choices"][0]["message"]
        messages.append({name: message[name] for name in ("role", "content", "reasoning_content") if name in message})
    for (before, _), (_, cached) in zip(spent, spent[1:], strict=False):
        # At most the generation prompt of the turn before (a header and an open or closed reasoning block) is recomputed.
        assert cached >= before - 4, spent
    assert server.stats()["last_request"]["reuse_kind"] in ("exact", "partial", "fork")
    cold = launch("--ctx", "32768", "--prefix-reuse", "off")
    try:
        last = httpx.post(cold.url + PATH, json=HELLO | fields, timeout=60).json()
        assert last["choices"] == answer["choices"]
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert cold.stats()["last_request"]["reuse_kind"] == "cold"
    finally:
        cold.process.kill()


def test_the_same_prompt_twice_computes_one_token(api):
    fields = {"messages": [{"role": "user", "content": "the same " * 90}], "max_tokens": 2}
    chat(api, **fields)
    usage = chat(api, **fields).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 1


def test_an_edited_question_keeps_what_comes_before(api):
    turns = [{"role": "user", "content": "alpha " * 300}, {"role": "assistant", "content": "beta"}]
    first = chat(api, messages=[*turns, {"role": "user", "content": "gamma " * 50}], max_tokens=1).json()["usage"]
    edited = chat(api, messages=[*turns, {"role": "user", "content": "delta " * 50}], max_tokens=1).json()
    again = chat(api, messages=[*turns, {"role": "user", "content": "delta " * 50}], max_tokens=1).json()
    assert edited["choices"] == again["choices"] and first["prompt_tokens"] > 300


def test_several_choices(api):
    """Each choice has its own random numbers, the same ones in every repetition, streamed or not; the prompt counts once."""
    fields = {"max_tokens": 12, "n": 3, "temperature": 1, "think": False, "stream_options": {"include_usage": True}}
    one = chat(api, **fields | {"n": 1}).json()
    answer = chat(api, **fields).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2] and len(set(texts)) == 3
    assert texts[0] == one["choices"][0]["message"]["content"]
    assert answer["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"] and answer["usage"]["completion_tokens"] == 36
    raw, _ = stream(api, **fields)
    choices = [c["choices"][0] for c in raw if c["choices"]]
    assert ["".join(c["delta"].get("content") or "" for c in choices if c["index"] == i) for i in range(3)] == texts
    assert [c["finish_reason"] for c in choices].count("length") == 3 and raw[-1]["usage"]["completion_tokens"] == 36


WEATHER = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 3]}},
           "required": ["city", "days"], "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_calls_are_valid_whatever_the_model_is(api, choice, streamed):
    tools = [{"type": "function", "function": {"name": name, "parameters": WEATHER}} for name in ("weather", "tide")]
    fields = {"tools": tools, "tool_choice": choice, "max_tokens": 400, "parallel_tool_calls": False, "ignore_eos": False}
    if streamed:
        raw, _ = stream(api, **fields)
        deltas = [call for c in raw for call in c["choices"][0]["delta"].get("tool_calls", [])]
        name, text = deltas[0]["function"]["name"], "".join(call["function"]["arguments"] for call in deltas)
        assert raw[-1]["choices"][0]["finish_reason"] == "tool_calls"
    else:
        answer = chat(api, **fields).json()["choices"][0]
        (call,) = answer["message"]["tool_calls"]
        name, text = call["function"]["name"], call["function"]["arguments"]
        assert answer["finish_reason"] == "tool_calls"
    arguments = json.loads(text)
    assert set(arguments) == {"city", "days"} and len(arguments["city"]) <= 8 and arguments["days"] in (1, 3)
    assert name in ({"weather", "tide"} if choice == "required" else {"weather"})


def test_the_form_of_the_text_is_enforced(api):
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
    answer = chat(api, response_format=form, max_tokens=400, think=False, ignore_eos=False).json()["choices"][0]
    assert answer["finish_reason"] == "stop" and json.loads(answer["message"]["content"])["days"] in (1, 3)
    tools = [{"type": "function", "function": {"name": "f"}}]
    refused = chat(api, response_format=form, tools=tools, tool_choice="required")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "response_format"


@pytest.mark.parametrize("budget", [0, 3])
def test_a_budget_closes_the_reasoning(api, budget):
    answer = chat(api, thinking_budget=budget, max_tokens=40, temperature=1).json()
    assert budget <= answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= budget + 2
    assert answer["choices"][0]["message"]["content"]
