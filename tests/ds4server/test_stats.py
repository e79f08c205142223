"""``GET /v1/stats``, ``last_request`` and the ``timings`` of answers: one object each, with the keys of the API."""

import json
import threading

import pytest

from ds4ref.reuse import MISSES
from ds4server.api import status
from ds4server.lanes import LANES, REASONS, SURFACES, Environment

from .inprocess import Scripted, running
from .test_chat import wait_for

KEYS = {
    "uptime_seconds", "version", "model", "requests", "routes", "route_decisions", "think_modes", "sheds", "clients",
    "queue_depth", "inflight_body_bytes", "banks", "tokens", "cache", "memory", "serving", "recent",
}  # fmt: skip
TIMINGS = {"prefill_tokens", "prefill_cached_tokens", "effective_lane", "reuse_kind", "speculation_active"}
RATES = {"ttft_ms", "prefill_tok_s", "decode_tok_s", "tok_per_step"}
LAST = {
    "request_id", "surface", "effective_lane", "reuse_kind", "speculation_active", "fallback_reason", "finish", "prompt_tokens",
    "completion_tokens",
}  # fmt: skip
SAID = "about the tides of this harbour"


def test_before_the_first_request():
    with running(Scripted(SAID)) as server:
        stats = server.stats()
    assert set(stats) == KEYS, "last_request is absent before the first request"
    assert stats["requests"] == {"started": 0, "completed": 0, "failed": 0, "canceled": 0, "inflight": 0}
    assert stats["routes"] == {f"{surface}_{lane}": 0 for surface in SURFACES for lane in LANES} and len(stats["routes"]) == 12
    assert stats["route_decisions"] == dict.fromkeys(REASONS, 0)
    assert stats["think_modes"] == {"none": 0, "low": 0, "high": 0, "max": 0}
    assert stats["sheds"] == {"queue_full": 0, "slow_reader": 0, "shutdown": 0, "memory": 0}
    assert stats["tokens"] == {"prefill_computed": 0, "prefill_cached": 0, "decoded": 0,
                               "speculation": {"drafted": 0, "accepted": 0}}  # fmt: skip
    assert stats["cache"] == {"entries": 0, "bytes": 0, "budget_bytes": 0, "hits": 0, "misses": 0,
                              "misses_by_reason": dict.fromkeys(MISSES, 0)}  # fmt: skip
    empty = [{"id": i, "state": "empty", "tokens": 0, "reusable": False} for i in range(2)]
    assert stats["banks"] == {"total": 1, "busy": 0, "warm": 0, "items": empty}
    assert stats["serving"] == {"effective": {"ctx": 4096}} and stats["recent"] == []


def test_the_last_request_is_what_was_answered():
    with running(Scripted(SAID)) as server:
        turns = [{"role": "user", "content": "a word about the harbour"}]
        first = server.chat(messages=turns)
        usage = first.json["usage"]
        stats = server.stats()
        last = stats["last_request"]
        assert set(last) >= LAST and last["request_id"] == first.headers["x-request-id"]
        assert last["surface"] == "openai_chat" and last["effective_lane"] == "serial" and last["fallback_reason"] is None
        assert last["reuse_kind"] == "cold" and last["speculation_active"] is False and "reuse_miss" not in last
        assert last["prompt_tokens"] == usage["prompt_tokens"] and last["completion_tokens"] == usage["completion_tokens"]
        assert stats["tokens"]["prefill_computed"] == usage["prompt_tokens"]
        assert stats["tokens"]["decoded"] == usage["completion_tokens"]
        second = server.chat(messages=turns)
        stats = server.stats()
        assert stats["last_request"]["reuse_kind"] == second.json["timings"]["reuse_kind"] != "cold"
        assert [item["request_id"] for item in stats["recent"]] == [
            answer.headers["x-request-id"] for answer in (second, first)
        ]
        assert stats["banks"]["warm"] >= 1 and stats["banks"]["items"][0]["tokens"] > 0
        assert "harbour" not in json.dumps(stats), "no text of anybody"


def test_a_failed_request_is_the_last_one_too():
    model = Scripted(SAID)
    with running(model) as server:
        server.chat()
        model.bad = set(range(model.vocabulary))
        answer = server.chat("something else")
        assert answer.status_code == 500
        last = server.stats()["last_request"]
    assert last["request_id"] == answer.headers["x-request-id"] and last["finish"] == "failed"
    assert last["completion_tokens"] == 0


@pytest.mark.parametrize("driver", [False, True])
def test_timings_stand_beside_usage(driver):
    env = Environment(driver=driver, width=2)
    with running(Scripted(SAID), env=env, width=2) as server:
        for expected in ("cold", None):
            answer = server.chat(ignore_eos=True).json
            timings, last = answer["timings"], server.stats()["last_request"]
            assert set(timings) - {"reuse_miss", "fallback_reason"} == TIMINGS | RATES - (
                {"prefill_tok_s"} if timings["prefill_tokens"] == 0 else set()
            )
            assert timings["prefill_tokens"] + timings["prefill_cached_tokens"] == answer["usage"]["prompt_tokens"]
            assert timings["prefill_cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            for name in ("effective_lane", "reuse_kind", "speculation_active"):
                assert timings[name] == last[name]
            assert timings["effective_lane"] == ("continuous" if driver else "serial")
            assert expected is None or timings["reuse_kind"] == expected
            assert all(timings[name] > 0 for name in RATES & set(timings))
        assert timings["reuse_kind"] != "cold"
        nothing = server.chat(max_tokens=0).json["timings"]
        assert not {"ttft_ms", "decode_tok_s", "tok_per_step"} & set(nothing), "what cannot be computed is left out"


@pytest.mark.parametrize("usage", [False, True])
def test_timings_of_a_stream_come_once(usage):
    with running(Scripted(SAID)) as server:
        text = server.chat(stream=True, stream_options={"include_usage": usage}).text
    frames = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    with_timings = [frame for frame in frames if "timings" in frame]
    assert with_timings == frames[-1:] and set(frames[-1]["timings"]) >= TIMINGS
    assert bool(frames[-1]["choices"]) != usage and ("usage" in frames[-1] and frames[-1]["usage"] is not None) == usage


def test_gauges_while_one_runs_and_one_waits():
    model = Scripted(SAID)
    with running(model) as server:
        server.service.clients = lambda: 5
        model.gate.clear()
        asking = [threading.Thread(target=server.chat, args=(text,)) for text in ("one", "two")]
        for thread in asking:
            thread.start()
        wait_for(lambda: server.stats()["banks"]["busy"] == server.stats()["queue_depth"] == 1)
        stats = server.stats()
        assert stats["requests"]["inflight"] == 2 and stats["clients"] == 5
        assert stats["inflight_body_bytes"] > 100
        assert sum(item["state"] == "protected" for item in stats["banks"]["items"]) == 1
        model.gate.set()
        for thread in asking:
            thread.join(20)
        assert server.stats()["requests"] == {"started": 2, "completed": 2, "failed": 0, "canceled": 0, "inflight": 0}


def test_memory_says_only_what_is_known(tmp_path):
    assert status.memory(tmp_path) == {}
    known = status.memory()
    assert set(known) <= {"resident_bytes", "available_bytes"} and all(n > 0 for n in known.values())


def test_a_real_server_serves_its_plan(server, api):
    api.post("/v1/chat/completions", json={"messages": [{"content": "Hello"}], "max_tokens": 2})
    stats = server.stats()
    assert set(stats) == KEYS | {"last_request"} and set(stats["last_request"]) >= LAST
    assert set(stats["serving"]) >= {"requested", "effective", "qualified", "issues"}
    assert stats["recent"][0] == stats["last_request"] and len(stats["recent"]) <= 32
    assert stats["requests"]["started"] == sum(n for name, n in stats["requests"].items() if name != "started")


def test_requests_are_counted_by_their_reasoning():
    with running(Scripted("ok")) as found:
        efforts = ({"reasoning_effort": word} for word in ("high", "max"))
        for fields in ({"think": False}, {}, *efforts, {"think": True, "n": 2}):
            assert found.chat(**fields).status_code == 200
        # max needs a context that this server has not, and falls back
        assert found.stats()["think_modes"] == {"none": 1, "low": 4, "high": 1, "max": 0}
