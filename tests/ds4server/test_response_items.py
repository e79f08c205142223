"""What a Responses request says, without a model: tools and choices, input items, free text, and mistakes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4server.api import response_items, response_tools
from ds4server.api.errors import ApiError

from .inprocess import Scripted, running

TIDE = {"type": "function", "name": "tide", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def client():
    with running(Scripted("x")) as service:
        yield service.client


FORMS = ('{"input": "%s"}', ' {"input":"%s", "more": 1}')


@given(st.text(), st.booleans(), st.lists(st.integers(1, 5)), st.sampled_from(FORMS))
def test_free_text_in_any_pieces(text, plain, cuts, form):
    raw = form % json.dumps(text, ensure_ascii=not plain)[1:-1]
    reader, out, at = response_tools.FreeText(), "", 0
    for cut in [*cuts, len(raw)]:
        out += reader.feed(raw[at : at + cut])
        out.encode()
        at += cut
    assert out + reader.finish() == text.encode("utf-8", "replace").decode()


@pytest.mark.parametrize("raw", ["{}", '{"input": 5}', '{"inputs": "x"}', "{", "", '{"input'])
def test_other_arguments_are_given_as_they_are(raw):
    reader = response_tools.FreeText()
    assert "".join(map(reader.feed, raw)) + reader.finish() == raw


def test_half_characters_in_free_text():
    reader = response_tools.FreeText()
    assert reader.feed('{"input": "a\\ud83d') == "a" and reader.feed("\\ude00") == "😀"
    assert reader.feed("\\ud83d") == "" and reader.feed('x\\\\ud83d"') == "\ufffdx\\ud83d" and reader.finish() == ""


CHOICES = [
    ("auto", "auto", None),
    ("none", "none", None),
    ("required", "required", None),
    ({"type": "function", "name": "tide"}, "required", ("tide",)),
    ({"type": "custom", "name": "patch"}, "required", ("patch",)),
    ({"type": "function", "name": "row"}, "required", ("boat.row",)),
    ({"type": "function", "name": "row", "namespace": "boat."}, "required", ("boat.row",)),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "boat."}, {"type": "web_search"}]},
     "auto", ("boat.row",)),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "tide"}, {"type": "tool_search"}]},
     "required", ("tide", "tool_search")),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, "none", None),
]  # fmt: skip


def full_box():
    box = response_tools.Toolbox()
    row = {"type": "function", "name": "row"}
    box.add([TIDE, {"type": "custom", "name": "patch"}, {"type": "tool_search"}, {"type": "web_search"},
             {"type": "namespace", "name": "boat.", "tools": [row]}], "tools")  # fmt: skip
    return box


@pytest.mark.parametrize(("value", "mode", "names"), CHOICES)
def test_choices(value, mode, names):
    found = response_tools.tool_choice(value, full_box())
    assert (found.mode, found.names) == (mode, names)


@pytest.mark.parametrize(
    "value",
    [
        "sometimes", 5, {"type": "function", "name": "absent"}, {"type": "web_search"}, {"type": "function"},
        {"type": "allowed_tools", "tools": []}, {"type": "allowed_tools", "tools": ["tide"]},
    ],
)  # fmt: skip
def test_refused_choices(value):
    with pytest.raises(ApiError, match="tool_choice"):
        response_tools.tool_choice(value, full_box())


def text_part(kind, text):
    return [{"type": kind, "text": text}]


def test_items_become_messages():
    items = [
        {"role": "developer", "content": "Rules."},
        {"type": "message", "role": "user", "content": [*text_part("input_text", "a"), *text_part("text", "b")]},
        {"type": "reasoning", "summary": text_part("summary_text", "short"), "content": text_part("reasoning_text", "R")},
        {"role": "assistant", "content": [*text_part("output_text", "T"), {"type": "refusal", "refusal": "!"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": ""},
        {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": 'x"y'},
        {"type": "function_call_output", "call_id": "c1", "output": [*text_part("input_text", "1"), {"type": "odd", "n": 2}]},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "2"},
        {"type": "compaction", "encrypted_content": "zz"},
        {"type": "reasoning", "summary": text_part("summary_text", "S"), "encrypted_content": "gAAAA-foreign"},
        {"role": "assistant", "content": "first"},
        {"role": "assistant", "content": "second"},
        {"type": "function_call", "call_id": "cut", "name": "f", "arguments": '{"a', "status": "incomplete"},
        {"role": "user", "content": None},
        {"type": "reasoning", "summary": text_part("summary_text", "alone")},
    ]  # fmt: skip

    def call(name, tool, arguments):
        return {"id": name, "type": "function", "function": {"name": tool, "arguments": arguments}}

    assert response_items.messages(items, response_tools.Toolbox()) == [
        {"role": "system", "content": "Rules."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "T!", "reasoning_content": "R",
         "tool_calls": [call("c1", "f", "{}"), call("c2", "g", '{"input": "x\\"y"}')]},
        {"role": "tool", "tool_call_id": "c1", "content": '1{"type": "odd", "n": 2}'},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "content": "first", "reasoning_content": "S"},
        {"role": "assistant", "content": "second"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "", "reasoning_content": "alone"},
    ]  # fmt: skip
    assert response_items.messages([], response_tools.Toolbox()) == []


def test_hosted_calls_in_history():
    box = response_tools.Toolbox()
    items = [
        {"type": "local_shell_call", "id": "lsh", "call_id": "c1", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "lsh", "output": "files"},
        {"type": "web_search_call", "id": "ws", "action": {"type": "search", "query": "q"}, "status": "completed"},
        {"type": "image_generation_call", "id": "ig", "result": "iVBOR", "revised_prompt": "a cat", "status": "failed"},
        {"type": "web_search_call", "id": "w2", "action": {"type": "open_page"}},
        {"type": "web_search_call_output", "call_id": "w2", "output": "page"},
        {"type": "tool_search_call", "call_id": "ts", "arguments": {"query": "x"}},
        {"type": "tool_search_output", "call_id": "ts", "tools": [TIDE]},
    ]
    found = response_items.messages(items, box)
    calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for m in found for c in m.get("tool_calls", ())]
    assert calls == [
        ("c1", "local_shell", '{"type": "exec", "command": ["ls"]}'), ("ws", "web_search", '{"type": "search", "query": "q"}'),
        ("ig", "image_generation", '{"prompt": "a cat"}'), ("w2", "web_search", '{"type": "open_page"}'),
        ("ts", "tool_search", '{"query": "x"}'),
    ]  # fmt: skip
    results = [(m["tool_call_id"], m["content"]) for m in found if m["role"] == "tool"]
    assert results == [("c1", "files"), ("ws", '{"status": "completed"}'), ("ig", '{"status": "failed"}'), ("w2", "page"),
                       ("ts", '{"tools": ["tide"]}')]  # fmt: skip
    assert [tool["function"]["name"] for tool in box.definitions] == ["tide"]


# --- mistakes -------------------------------------------------------------------------------------------------------


def item(**members):
    return {"input": [members]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        (item(type="mystery"), "input[0].type"),
        (item(), "input[0].type"),
        (item(type=["x"]), "input[0].type"),
        (item(type="item_reference", id="msg_1"), "input[0]"),
        (item(id="msg_1"), "input[0]"),
        (item(role="tool", content="x"), "input[0].role"),
        (item(type="message", content="x"), "input[0].role"),
        (item(role="user", content=5), "input[0].content"),
        (item(role="user", content=[{"type": "video"}]), "input[0].content[0].type"),
        (item(role="user", content=[{"type": "input_text"}]), "input[0].content[0].text"),
        (item(role="user", content=[{"type": "input_image", "image_url": "data:"}]), "input[0].content[0]"),
        (item(type="function_call", call_id="c", name="f", arguments="[1]"), "input[0].arguments"),
        (item(type="function_call", name="f", arguments="{}"), "input[0].call_id"),
        (item(type="function_call", call_id="c", arguments="{}"), "input[0].name"),
        (item(type="custom_tool_call", call_id="c", name="f"), "input[0].input"),
        (item(type="function_call_output", call_id="gone", output="x"), "input"),
        (item(type="function_call_output", call_id="c", output=5), "input[0].output"),
        (item(type="function_call_output", call_id="c", output=[{"type": "input_image"}]), "input[0].output[0]"),
        (item(type="reasoning", encrypted_content=5), "input[0].encrypted_content"),
        (item(type="reasoning", summary=[{"type": "text", "text": "x"}]), "input[0].summary[0].type"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"max_output_tokens": 1.5}, "max_output_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stream": "true"}, "stream"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": "all"}, "include"),
        ({"reasoning": "high"}, "reasoning"),
        ({"reasoning": {"effort": "banana"}}, "reasoning.effort"),
        ({"reasoning": {"effort": 3.5}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "tools": [TIDE], "tool_choice": "required"}, "text.format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TIDE, TIDE]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "name": "f", "strict": 1}]}, "tools[0].strict"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "n" * 100, "tools": [{"name": "f" * 100}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "custom", "name": "n", "format": {"type": "json"}}]}, "tools[0].format"),
        ({"tools": [{"type": "custom", "name": "n", "format": {"type": "grammar", "syntax": "lark"}}]},
         "tools[0].format.definition"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"functions": []}, "functions"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"stop": 5}, "stop"),
        ({"think": "yes"}, "think"),
    ],
)  # fmt: skip
def test_mistakes_name_the_field(client, fields, param):
    answer = client.simulate_post("/v1/responses", body=json.dumps({"input": "Hello", "max_output_tokens": 1} | fields))
    error = answer.json["error"]
    assert answer.status_code == 400 and error["param"] == param and error["type"] == "invalid_request_error", error
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
