"""A tool turn over a restart: the id of a call still stands for the bytes that were sampled."""

import httpx

from .conftest import launch

PARAMETERS = {"type": "object", "properties": {"at": {"type": "string", "maxLength": 6}, "n": {"enum": [1, 2]}}}
TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": PARAMETERS | {"required": ["at", "n"]}}}]
ASKED = [{"role": "user", "content": "When is high water?"}]


def post(server, path, **body):
    return httpx.post(server.url + path, json={"tools": TOOLS, "think": False} | body, timeout=120).json()


def turn(call, arguments):
    """A history in which ``call`` is replayed with other arguments, and its result."""
    replayed = call | {"function": call["function"] | {"arguments": arguments}}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "04:10"}
    return [*ASKED, {"role": "assistant", "tool_calls": [replayed]}, result]


def rendered(server, call, arguments):
    return post(server, "/tokenize", messages=turn(call, arguments))["prompt"]


def test_the_sampled_bytes_are_rendered_after_a_restart(tmp_path):
    flags = ("--ctx", "4096", "--mem-floor-gb", "1", "--kv-disk-dir", str(tmp_path / "kv"), "--kv-cache-min-tokens", "16")
    server = launch(*flags)
    try:
        forced = {"temperature": 0, "max_tokens": 400, "tool_choice": "required", "parallel_tool_calls": False}
        answer = post(server, "/v1/chat/completions", messages=ASKED, **forced)["choices"][0]
        (call,) = answer["message"]["tool_calls"]
        true = rendered(server, call, call["function"]["arguments"])
        assert "forged" not in rendered(server, call, '{"at": "forged"}')
        post(server, "/v1/chat/completions", messages=turn(call, "{}"), max_tokens=1)
        server.stop()
        server = launch(*flags)
        assert rendered(server, call, '{"at": "forged"}') == true
        assert "forged" in rendered(server, call | {"id": "call_of_nobody"}, '{"at": "forged"}')
        server.stop()
        server = launch(*flags, "--disable-exact-dsml-tool-replay")
        assert "forged" in rendered(server, call, '{"at": "forged"}')
    finally:
        server.process.kill()
