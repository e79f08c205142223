"""Calls that cannot be read: asked for again once where the answer is buffered, text where it is not; and replays of calls."""

import json

import pytest

from .inprocess import CHAT, Scripted, running
from .toymodel import text_of, tokenizer

PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "tide", "parameters": PARAMETERS}}
OPEN, CLOSE = "\n\n<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>"
ARGUMENT = '<｜DSML｜parameter name="at" string="true">Husum</｜DSML｜parameter>'
GOOD = f'{OPEN}<｜DSML｜invoke name="tide">\n{ARGUMENT}\n</｜DSML｜invoke>{CLOSE}'
BAD = f"{OPEN}<｜DSML｜what is this>{CLOSE}"


class Mending(Scripted):
    """Writes a bad call, and after it was told so, ``second``."""

    def __init__(self, second):
        super().__init__("-")
        self.first, self.second = ([*tokenizer().encode(text), tokenizer().eos_id] for text in (BAD, second))

    def prefill(self, state, tokens):
        told = b"could not be read" in text_of([*state.tokens, *tokens])
        self.script = self.second if told else self.first
        return super().prefill(state, tokens)


def ask(found, **fields):
    answer = found.chat(tools=[TOOL], think=False, max_tokens=400, **fields)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_buffered_request_asks_once_again():
    with running(Mending(GOOD)) as found:
        answer = ask(found).json
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "tide", "arguments": '{"at": "Husum"}'}
        once = len(tokenizer().encode(BAD)) + len(tokenizer().encode(GOOD))
        assert abs(answer["usage"]["completion_tokens"] - once) <= 2, "both attempts count, their end tokens do not"
        assert "asked for again" in answer["timings"]["fallback_reason"]
        assert found.stats()["requests"]["completed"] == 2


def test_a_second_failure_is_text():
    with running(Mending(BAD)) as found:
        choice = ask(found).json["choices"][0]
        assert choice["finish_reason"] == "stop" and "what is this" in choice["message"]["content"]
        assert "tool_calls" not in choice["message"] and found.stats()["requests"]["completed"] == 2


def test_a_stream_is_not_repeated():
    with running(Mending(GOOD)) as found:
        frames = [json.loads(line[6:]) for line in ask(found, stream=True).text.splitlines() if line.startswith("data: {")]
        text = "".join(frame["choices"][0]["delta"].get("content") or "" for frame in frames)
        assert "what is this" in text and found.stats()["requests"]["completed"] == 1


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("odd", [True, False])
def test_a_replayed_call_renders_the_sampled_bytes(odd, parallel):
    """Whatever the client makes of the arguments' white space and order, the bank goes on where it stood."""
    text = GOOD.replace('<｜DSML｜parameter name="at"', '<｜DSML｜parameter  name="at"') if odd else GOOD
    with running(Scripted(text)) as found:
        first = ask(found, parallel_tool_calls=parallel).json
        (call,) = first["choices"][0]["message"]["tool_calls"]
        call["function"]["arguments"] = json.dumps({"at": "Husum"}, indent=3)
        turn = [
            {"role": "user", "content": "Hello"}, {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "04:10"},
        ]  # fmt: skip
        body = {"messages": turn, "tools": [TOOL], "think": False, "temperature": 0, "max_tokens": 1}
        second = found.client.simulate_post(CHAT, body=json.dumps(body)).json
        held = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= held - 1
        turn[1]["tool_calls"][0] |= {"id": "call_unknown"}
        third = found.client.simulate_post(CHAT, body=json.dumps(body)).json
        canonical = third["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
        assert canonical is not odd, "an id that nobody knows stands for nothing"
