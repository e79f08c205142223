"""Raw completions, the tokenizer's endpoints, and what is told about models, on a model that says what it is told."""

import json
import math
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from openai.types import Completion

from ds4ref.conversation import Conversation
from ds4ref.gguf import Artifact
from ds4ref.model import Model
from ds4server.api.completions import prompts_of
from ds4server.cli import _catalog, main
from ds4server.options import UsageError

from .artifact import toy
from .conftest import launch
from .inprocess import CHAT, CONVERSATION, Babbler, Scripted, running
from .toymodel import tokenizer

PATH = "/v1/completions"
HEAD = "alpha beta gamma delta"


@pytest.fixture(scope="module")
def idle():
    with running(Scripted("one two three")) as found:
        yield found


@pytest.fixture(scope="module")
def babbler():
    """Its answers depend on the prompt, and are bytes rather than words."""
    with running(Babbler(), width=4) as found:
        yield found


def post(found, path=PATH, **fields):
    return found.client.simulate_post(path, body=json.dumps(fields))


def complete(found, **fields):
    answer = post(found, **{"prompt": HEAD, "max_tokens": 8, "temperature": 0} | fields)
    assert answer.status_code == 200, answer.text
    Completion.model_validate(answer.json)
    assert answer.json["object"] == "text_completion" and answer.json["id"].startswith("cmpl-")
    return answer.json


def streamed(found, **fields):
    """(the choices that the chunks of a stream add up to, the chunks)."""
    asked = {"prompt": HEAD, "max_tokens": 8, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    answer = post(found, **asked | fields)
    *frames, last = [frame.removeprefix(": queued\n") for frame in answer.text.split("\n\n")[:-1]]
    assert last == "data: [DONE]"
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    *chunks, end = chunks
    assert end["choices"] == [] and end["usage"]["total_tokens"] and end["timings"]["prefill_tokens"] >= 0
    choices = {}
    for chunk in chunks:
        assert chunk["usage"] is None and {chunk[name] == end[name] for name in ("id", "created", "model")} == {True}
        (part,) = chunk["choices"]
        Completion.model_validate(chunk | {"choices": [part | {"finish_reason": part["finish_reason"] or "stop"}]})
        blank = {"index": part["index"], "text": "", "logprobs": None, "finish_reason": None}
        add(choices.setdefault(part["index"], blank), part)
    return [choices[index] for index in sorted(choices)], end


def add(whole, part):
    assert whole["finish_reason"] is None, "nothing follows the finish"
    whole["text"] += part["text"]
    whole["finish_reason"] = part["finish_reason"]
    assert not part["finish_reason"] or part["text"] == ""
    if part["logprobs"] is not None:
        whole["logprobs"] = whole["logprobs"] or {name: [] for name in part["logprobs"]}
        for name, items in part["logprobs"].items():
            whole["logprobs"][name] += items
    for name in ("token_ids", "prompt_token_ids"):
        if name in part:
            whole[name] = whole.get(name, []) + part[name]


def both(found, **fields):
    answer = complete(found, **fields)
    choices, end = streamed(found, **fields)
    assert choices == answer["choices"]
    assert all(end["usage"][name] == answer["usage"][name] for name in ("prompt_tokens", "completion_tokens"))
    return answer


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_streamed_equals_buffered(babbler, seed, temperature):
    fields = {"temperature": temperature, "seed": seed, "max_tokens": 30, "prompt": f"naïve 😀 {seed}", "logprobs": 3}
    answer = both(babbler, **fields, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] in ("stop", "length") and answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert choice["prompt_token_ids"] == CONVERSATION.encode_raw(fields["prompt"])
    lists = choice["logprobs"]
    size = len(lists["tokens"])
    assert {len(items) for items in lists.values()} == {size} and 0 < size <= answer["usage"]["completion_tokens"]
    for token, value, tops in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True):
        assert tops[token] == value <= 1e-6 and len(tops) <= 4 and sum(map(math.exp, tops.values())) < 1.001
    offsets = lists["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] == 0
    for token, at in zip(lists["tokens"], offsets, strict=True):
        # What is left of a character that this token did not complete stands before it.
        assert token.startswith("bytes:") or choice["text"][at:].removeprefix("\ufffd").startswith(token), (token, at)


def test_the_prompt_is_raw(idle):
    answer = both(idle, prompt="a<think>")
    assert answer["choices"][0]["text"] == "one two three" and answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["prompt_tokens"] == len(tokenizer().with_bos(tokenizer().encode("a<think>"))) <= 4
    assert idle.stats()["last_request"]["surface"] == "openai_completion"


@pytest.mark.parametrize(
    "fields, text, reason",
    [
        ({"max_tokens": 0}, "", "length"),
        ({"stop": "two"}, "one ", "stop"),
        ({"max_tokens": 1}, "one", "length"),
        ({"echo": True}, HEAD + "one two three", "stop"),
        ({"echo": True, "max_tokens": 0}, HEAD, "length"),
        ({"echo": True, "stop": ["alpha", "two"]}, HEAD + "one ", "stop"),
        ({"think": True, "reasoning_effort": "high"}, "one two three", "stop"),
        ({"suffix": "", "best_of": 1, "tools": None}, "one two three", "stop"),
    ],
)
def test_texts_and_their_ends(idle, fields, text, reason):
    (choice,) = both(idle, **fields)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, reason)


def test_ids_are_a_prompt_too(babbler):
    ids = tokenizer().encode("alpha beta")
    want = complete(babbler, prompt="alpha beta")["choices"]
    assert complete(babbler, prompt=ids)["choices"] == complete(babbler, prompt=tokenizer().with_bos(ids))["choices"] == want
    assert complete(babbler, prompt=[float(i) for i in ids], echo=True)["choices"][0]["text"] == "alpha beta" + want[0]["text"]


def test_prompts_and_choices_are_numbered_prompt_by_prompt(babbler):
    fields = {"temperature": 1.2, "min_p": 0, "seed": 5, "max_tokens": 6}
    alone = [complete(babbler, prompt=prompt, n=2, **fields) for prompt in ("alpha", "beta")]
    answer = both(babbler, prompt=["alpha", "beta"], n=2, **fields)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [c["text"] for one in alone for c in one["choices"]]
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    assert answer["usage"]["completion_tokens"] == sum(one["usage"]["completion_tokens"] for one in alone)
    echoed = both(babbler, prompt=[tokenizer().encode("alpha"), tokenizer().encode("beta")], echo=True, n=2, **fields)
    heads = ["alpha", "alpha", "beta", "beta"]
    assert [c["text"] for c in echoed["choices"]] == [h + c["text"] for h, c in zip(heads, answer["choices"], strict=True)]


def test_without_usage_the_last_finish_has_the_timings(idle):
    text = post(idle, prompt=["a", "b"], stream=True, max_tokens=2).text
    *_, last = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "usage" not in text and last["choices"][0]["finish_reason"] == "length" and last["timings"]["ttft_ms"] >= 0
    assert text.count('"timings"') == 1 and "chat" not in text and "delta" not in text


@pytest.mark.parametrize(
    "fields, param",
    [
        ({}, "prompt"), ({"prompt": 5}, "prompt"), ({"prompt": {}}, "prompt"), ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1.5]}, "prompt[0]"), ({"prompt": [10**9]}, "prompt[0]"), ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": ["a", [1]]}, "prompt[1]"), ({"prompt": [[1], 1]}, "prompt[1]"), ({"prompt": [[1], ["a"]]}, "prompt[1][0]"),
        ({"prompt": ["a"] * 17}, "prompt"), ({"prompt": "word " * 5000}, "prompt"), ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"), ({"prompt": "a", "n": 17}, "n"), ({"prompt": "a", "echo": 1}, "echo"),
        ({"prompt": "a", "logprobs": True}, "logprobs"), ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"prompt": "a", "reasoning_effort": "hard"}, "reasoning_effort"), ({"prompt": "a", "stop": [5]}, "stop"),
        ({"prompt": "a", "thinking": {"type": "maybe"}}, "thinking.type"), ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "response_format": "xml"}, "response_format"),
    ],
)  # fmt: skip
def test_mistakes_name_the_field(idle, fields, param):
    answer = post(idle, **fields)
    error = answer.json["error"]
    assert answer.status_code == 400 and error["param"] == param and param.split("[")[0] in error["message"]


def test_a_schema_for_raw_text(babbler):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = both(babbler, prompt=[HEAD, "beta"], response_format=form, temperature=1, seed=2, max_tokens=200)
    assert all(json.loads(choice["text"])["n"] in (1, 22) for choice in answer["choices"])
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]


# --- tokens -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["hello world", "naïve 😀 漢字 👩‍🔬", "  spaces\n\n\ttabs ", "", "x" * 3000])
@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_text_to_tokens_and_back(idle, text, prefix):
    found = post(idle, prefix + "/tokenize", content=text).json
    assert found == {"tokens": tokenizer().encode(text), "count": len(found["tokens"]), "max_model_len": 4096}
    assert post(idle, prefix + "/tokenize", prompt=text).json == found
    assert post(idle, prefix + "/detokenize", tokens=found["tokens"]).json == {"content": text}


def test_ways_to_tokenize(idle):
    plain = post(idle, "/tokenize", content="😀</think>", with_pieces=True).json
    assert [piece["id"] for piece in plain["pieces"]] == plain["tokens"]
    raw = b"".join(bytes(p["piece"]) if isinstance(p["piece"], list) else p["piece"].encode() for p in plain["pieces"])
    assert raw.decode() == "😀</think>"
    assert post(idle, "/tokenize", content="<think>").json["tokens"] == [tokenizer().id_of("<think>")]
    assert len(post(idle, "/tokenize", content="<think>", parse_special=False).json["tokens"]) > 1


def test_exactly_one_bos_where_the_vocabulary_wants_one(idle, monkeypatch):
    for prompt in ("", [], ["a", ""]):
        assert post(idle, prompt=prompt).status_code == 400, "nothing to begin with"
    bos = tokenizer().id_of("a")
    monkeypatch.setattr(CONVERSATION.tokenizer, "add_bos", True)
    monkeypatch.setattr(CONVERSATION.tokenizer, "bos_id", bos)
    service = SimpleNamespace(conversation=CONVERSATION)
    b = tokenizer().id_of("b")
    assert prompts_of(service, ["", "b", "ab"]) == [("", [bos]), ("b", [bos, b]), ("ab", [bos, *tokenizer().encode("ab")])]
    assert prompts_of(service, []) == [(None, [bos])] and prompts_of(service, [bos, b]) == [(None, [bos, b])]
    assert post(idle, "/tokenize", content="b", add_special=True).json["tokens"] == [bos, b]


def test_messages_to_tokens(idle):
    tools = [{"type": "function", "function": {"name": "tide"}}]
    body = {"messages": [{"role": "user", "content": "Say hello."}], "tools": tools, "think": False}
    found = post(idle, "/tokenize", **body, max_tokens="any").json
    assert "Say hello." in found["prompt"] and "tide" in found["prompt"]
    assert found["count"] == post(idle, CHAT, **body, max_tokens=0).json["usage"]["prompt_tokens"]
    assert post(idle, "/tokenize", **body | {"tool_choice": "none"}).json["count"] < found["count"]


@pytest.mark.parametrize(
    "path, fields, param",
    [
        ("/tokenize", {}, "content"), ("/tokenize", {"content": 5}, "content"), ("/tokenize", {"messages": "x"}, "messages"),
        ("/tokenize", {"content": "x", "with_pieces": 1}, "with_pieces"), ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"), ("/detokenize", {"tokens": [10**9]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"), ("/v1/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ],
)  # fmt: skip
def test_mistakes_in_tokens(idle, path, fields, param):
    answer = post(idle, path, **fields)
    assert answer.status_code == 400 and answer.json["error"]["param"] == param


# --- models -------------------------------------------------------------------------------------------------------------


def test_names_of_other_models(idle):
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 0}
    paths = (PATH, CHAT, "/v1/messages")
    assert {post(idle, path, **body, model="gpt-x").status_code for path in paths} == {200}
    idle.service.strict_model = True
    try:
        for path in paths:
            refused = post(idle, path, **body, model="gpt-x")
            assert refused.status_code == 404 and "gpt-x" in refused.json["error"]["message"]
            assert post(idle, path, **body, model="toy-chat").status_code == post(idle, path, **body).status_code == 200
        assert post(idle, PATH, **body, model="gpt-x").json["error"]["code"] == "model_not_found"
        assert post(idle, "/v1/messages", **body, model="gpt-x").json["error"]["type"] == "not_found_error"
    finally:
        idle.service.strict_model = False


def test_a_catalogue_beside_the_model(idle, tmp_path):
    assert "models" not in idle.client.simulate_get("/v1/models").json and _catalog(None) is None
    file = tmp_path / "catalogue.json"
    file.write_text(json.dumps({"models": [{"slug": "tide-1"}], "other": 1}))
    idle.service.catalog = _catalog(str(file))
    try:
        assert idle.client.simulate_get("/v1/models").json["models"] == [{"slug": "tide-1"}]
    finally:
        idle.service.catalog = None


def test_the_flags_take_effect(tmp_path, capsys):
    file = tmp_path / "catalogue.json"
    file.write_text('{"models": [{"slug": "tide-1"}]}')
    server = launch("--ctx", "4096", "--strict-model", "--model-catalog", str(file))
    try:
        assert httpx.get(f"{server.url}/v1/models").json()["models"] == [{"slug": "tide-1"}]
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "model": "gpt-x", "max_tokens": 0})
        assert refused.status_code == 404
    finally:
        server.process.kill()
    assert main(["--model-catalog", str(tmp_path / "none.json"), "--check-config"]) == 2
    assert "none.json: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"models": {}}', b"\xff"])
def test_catalogues_that_are_none(tmp_path, content):
    file = tmp_path / "catalogue.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match="--model-catalog .*catalogue.json: "):
        _catalog(str(file))


def test_an_echoed_prompt_is_scored_by_the_model_itself(api):
    """Against the reference's logits of a run of its own; the same whatever a bank already holds, streamed and buffered."""
    artifact = Artifact.open(toy())
    model, conversation = Model.from_artifact(artifact, context=512), Conversation(artifact)
    ids = conversation.encode_raw("The tide turns at noon. " * 4)
    table = model.verify(model.new_state(), ids[:-1]).astype(np.float64)
    table -= np.log(np.sum(np.exp(table - table.max(1, keepdims=True)), axis=1, keepdims=True)) + table.max(1, keepdims=True)
    body = {"prompt": ids, "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 2, "ignore_eos": True}
    lists = [api.post(PATH, json=body).json()["choices"][0]["logprobs"] for _ in range(2)]
    assert lists[0] == lists[1]
    found = lists[0]["token_logprobs"]
    assert found[0] is None and lists[0]["top_logprobs"][0] is None and len(found) == len(ids) + 3
    assert np.allclose(found[1 : len(ids)], table[np.arange(len(ids) - 1), ids[1:]], atol=1e-5)
    assert np.allclose([max(tops.values()) for tops in lists[0]["top_logprobs"][1 : len(ids)]], table.max(1), atol=1e-5)
    chunks = [json.loads(line[6:])["choices"][0] for line in api.post(PATH, json=body | {"stream": True}).text.splitlines()
              if line.startswith("data: {")]  # fmt: skip
    for name, whole in lists[0].items():
        assert [item for chunk in chunks if chunk["logprobs"] for item in chunk["logprobs"][name]] == whole
    plain = api.post(PATH, json=body | {"echo": False}).json()["choices"][0]
    assert "".join(chunk["text"] for chunk in chunks) == conversation.tokenizer.decode(ids) + plain["text"]
