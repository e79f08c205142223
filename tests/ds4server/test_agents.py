"""Coding agents as they are on the wire: many turns with tools, each of which must find the last one's state in its bank.

Three clients with the official SDKs: one of Responses (stateless, encrypted reasoning, custom and hosted tools beside
functions), one of Messages (a system prompt in blocks with cache marks and a billing line that changes, a thinking budget,
``?beta=true``, count_tokens before each turn), one of Chat Completions (usage in the stream). The model is scripted: it thinks,
calls the tool and at last answers, in the syntax of its family.
"""

import json
import threading

import anthropic
import openai
import pytest
from waitress.server import create_server

from .inprocess import InProcess, Scripted
from .toymodel import text_of, tokenizer

TURNS = 4
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}, "required": ["path"]}
SYSTEM = "You are a careful coding agent. Read files before you change them.\n" + "Rules: keep the diff small. " * 12
TASK = "Find out why the tide table is an hour late."


def call(i):
    path = f'<｜DSML｜parameter name="path" string="true">src/file_{i}.py</｜DSML｜parameter>'
    lines = f'<｜DSML｜parameter name="lines" string="false">{40 + i}</｜DSML｜parameter>'
    inside = f'<｜DSML｜invoke name="read_file">\n{path}\n{lines}\n</｜DSML｜invoke>'
    return f"I should look at file {i}.</think>\n\n<｜DSML｜tool_calls>\n{inside}\n</｜DSML｜tool_calls>"


class Agent(Scripted):
    """Calls the tool until it has seen the results of all turns."""

    def __init__(self):
        super().__init__("-")
        self.turns = [[*tokenizer().encode(text), tokenizer().eos_id]
                      for text in (*map(call, range(TURNS)), "I see it.</think>The zone is wrong.")]  # fmt: skip

    def prefill(self, state, tokens):
        seen = text_of([*state.tokens, *tokens]).count(b"def tide_")
        self.script = self.turns[min(seen, TURNS)]
        return super().prefill(state, tokens)


def result(i):
    return f"def tide_{i}(): ...\n" + f"# the rest of file {i}\n" * 8


@pytest.fixture
def server():
    """An engine on the scripted model behind a real socket; ``url`` is its address."""
    found = InProcess(Agent())
    found.engine.start()
    http = create_server(found.client.app, host="127.0.0.1", port=0, threads=4)
    threading.Thread(target=http.run, daemon=True).start()
    found.url = f"http://127.0.0.1:{http.effective_port}"
    yield found
    http.close()
    found.engine.stop(0)


def responses_client(server):
    """Each turn: (name, arguments) of the calls, or the text at the end."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    tools = [
        {"type": "function", "name": "read_file", "description": "Reads.", "strict": False, "parameters": SCHEMA},
        {"type": "custom", "name": "apply_patch", "description": "A patch.", "format": {"type": "text"}},
        {"type": "web_search"},
    ]  # fmt: skip
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": TASK}]}]
    for i in range(TURNS + 1):
        stream = client.responses.create(
            model="gpt-5-codex", instructions=SYSTEM, input=items, tools=tools, tool_choice="auto", parallel_tool_calls=False,
            reasoning={"effort": "medium", "summary": "auto"}, store=False, stream=True, temperature=0, max_output_tokens=300,
            include=["reasoning.encrypted_content"], prompt_cache_key="thread-1", extra_body={"text": {"verbosity": "low"}},
        )  # fmt: skip
        last = list(stream)[-1]
        assert last.type == "response.completed"
        output = [item.model_dump(exclude_none=True) for item in last.response.output]
        calls = [item for item in output if item["type"] == "function_call"]
        yield [(item["name"], item["arguments"]) for item in calls] or last.response.output_text
        items += [{k: v for k, v in item.items() if k not in ("status", "id")} for item in output]
        items += [{"type": "function_call_output", "call_id": item["call_id"], "output": result(i)} for item in calls]


def messages_client(server):
    client = anthropic.Anthropic(base_url=server.url, api_key="none")
    cached = {"cache_control": {"type": "ephemeral"}}
    tools = [{"name": "read_file", "description": "Reads.", "input_schema": SCHEMA}]
    messages = [{"role": "user", "content": [{"type": "text", "text": TASK} | cached]}]
    for i in range(TURNS + 1):
        system = [{"type": "text", "text": f"x-anthropic-billing-header: turn={i}"}, {"type": "text", "text": SYSTEM} | cached]
        shared = {"model": "claude-sonnet", "system": system, "tools": tools, "messages": messages}
        counted = client.messages.count_tokens(**shared, thinking={"type": "enabled", "budget_tokens": 2048}).input_tokens
        with client.messages.stream(
            **shared, max_tokens=300, thinking={"type": "enabled", "budget_tokens": 2048}, metadata={"user_id": "u"},
            extra_query={"beta": "true"}, extra_body={"temperature": 0},
        ) as stream:  # fmt: skip
            answer = stream.get_final_message()
        used = answer.usage
        assert used.input_tokens + used.cache_read_input_tokens + used.cache_creation_input_tokens == counted
        calls = [block for block in answer.content if block.type == "tool_use"]
        text = "".join(block.text for block in answer.content if block.type == "text")
        yield [(block.name, json.dumps(block.input)) for block in calls] or text
        messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": result(i)} | cached]}
                   for block in calls]  # fmt: skip
        messages.append({"role": "user", "content": results})


def chat_client(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    tools = [{"type": "function", "function": {"name": "read_file", "description": "Reads.", "parameters": SCHEMA}}]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    for i in range(TURNS + 1):
        stream = client.chat.completions.create(
            model="ds4", messages=messages, tools=tools, tool_choice="auto", stream=True, max_tokens=300, temperature=0,
            stream_options={"include_usage": True},
        )  # fmt: skip
        text, reasoning, calls = "", "", {}
        for chunk in stream:
            for delta in (choice.delta for choice in chunk.choices):
                text += delta.content or ""
                reasoning += getattr(delta, "reasoning_content", None) or ""
                for part in delta.tool_calls or ():
                    known = calls.setdefault(part.index, {"id": part.id, "name": part.function.name, "arguments": ""})
                    known["arguments"] += part.function.arguments or ""
        yield [(found["name"], found["arguments"]) for found in calls.values()] or text
        replayed = [{"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                    for c in calls.values()]  # fmt: skip
        messages.append({"role": "assistant", "content": text, "reasoning_content": reasoning}
                        | ({"tool_calls": replayed} if replayed else {}))  # fmt: skip
        messages += [{"role": "tool", "tool_call_id": c["id"], "content": result(i)} for c in calls.values()]


@pytest.mark.parametrize("client", [responses_client, messages_client, chat_client])
def test_every_turn_goes_on_where_the_last_one_ended(server, client):
    held = 0
    for i, turn in enumerate(client(server)):
        last = server.stats()["last_request"]
        if i < TURNS:
            ((name, arguments),) = turn
            assert name == "read_file" and json.loads(arguments) == {"path": f"src/file_{i}.py", "lines": 40 + i}
        else:
            assert turn == "The zone is wrong."
        if i:
            assert last["reuse_kind"] != "cold" and last["cached_tokens"] >= held - 1, (i, last)
        assert last["cached_tokens"] + last["computed_tokens"] == last["prompt_tokens"]
        held = last["prompt_tokens"] + last["completion_tokens"]
    assert i == TURNS
