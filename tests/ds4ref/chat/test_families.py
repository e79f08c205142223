"""The chat formats whose calls are argument tags or JSON: GLM, Ling, Solar, K-EXAONE, K2-Horizon, Motif and Inkling.

Renderings are held to `golden/<family>/render.json`; what is rendered is parsed back; users' text makes no special token."""
import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ds4ref.chat import PROTOCOLS, Block, ChatError, Options, Specials, collect, for_artifact, joined, reasoning_tags, schema
from ds4ref.chat.argkeys import _ends
from ds4ref.chat.guard import Guard
from ds4ref.generation import Generation
from ds4ref.pretokenizers import RULES
from ds4ref.sampling import SamplingParams
from ds4ref.stop import Finish, StopPolicy
from ds4ref.tokenizer import ALPHABET, CONTROL, NORMAL, USER_DEFINED, Tokenizer

GOLDEN = Path(__file__).parents[3] / "golden"
ENDS = {  # Architecture → what closes an assistant's turn.
    "glm5-next": "", "glm-dsa": "", "bailingmoe3": "<|role_end|>", "solar-open2": "<|im:end|>\n",
    "exaone-moe": "<|endofturn|>\n", "k2-horizon": "<|ifm|im_end|>", "motif3": "<|endofturn|><|endoftext|>",
    "inkling": "<|content_model_end_sampling|>",
}  # fmt: skip
BY_FAMILY = pytest.mark.parametrize("family", ENDS)
BY_PROTOCOL = pytest.mark.parametrize("family", [family for family in ENDS if family != "glm-dsa"])


def fixture(family):
    data = json.loads((GOLDEN / family / "render.json").read_text())
    return data["cases"] if isinstance(data, dict) else data


CASES = [(family, case) for family in ENDS for case in fixture(family)]
ALL = pytest.mark.parametrize("family, case", CASES, ids=[f"{family}-{case['name']}" for family, case in CASES])


def chat(family, literals=()):
    return for_artifact({"general.architecture": family}, Specials(frozenset(literals)))


def module(family):
    return importlib.import_module(f"ds4ref.chat.{PROTOCOLS[family]}")


def options(given):
    given = dict(given)
    return Options(thinking=given.pop("enable_thinking", None), effort=given.pop("reasoning_effort", None),
                   template_kwargs=given)


@ALL
def test_rendering(family, case):
    prompt = chat(family).render(case["messages"], case["tools"] or None, options(case["options"]))
    assert prompt.text == case["expected_text"]
    assert prompt.plain == ()
    openings = (*module(family).FORMAT.think,) if family != "inkling" else ()
    assert prompt.thinking == prompt.text.rstrip("\n").endswith(openings or "<none>")


# --- rendered answers are parsed back -------------------------------------------------------------------------------


def sampled(family, message, tools=None, **variables):
    """[(is a marker, text)] that a model would have sampled for an assistant message, and whether reasoning was open."""
    user = {"role": "user", "content": "Go"}
    ask = chat(family).render([user], tools, Options(template_kwargs=variables))
    variables["add_generation_prompt"] = False
    done = chat(family).render([user, message], tools, Options(template_kwargs=variables))
    assert done.text.startswith(ask.text) and done.text.endswith(ENDS[family])
    end = len(done.text) - len(ENDS[family])
    markers = re.compile("|".join(map(re.escape, sorted(module(family).MARKERS, key=len, reverse=True))))
    pieces, at = [], len(ask.text)
    for match in markers.finditer(done.text, at, end):
        if not any(a < match.end() and match.start() < b for a, b in done.plain):
            pieces += [(False, done.text[at:match.start()]), (True, match[0])]
            at = match.end()
    return [*pieces, (False, done.text[at:end])], ask.thinking


def parse(family, pieces, thinking, tools, ended="stop", cuts=None, **how):
    """(joined events, parser). cuts: a list of lengths, used in turn, or None for whole pieces."""
    parser = module(family).Parser(thinking, tools, **how)
    events, turn = [], 0
    for is_marker, text in pieces:
        if is_marker and family == "inkling":
            events += parser.mark(text)
            continue
        while text:
            length = cuts[turn % len(cuts)] if cuts else len(text)
            events += parser.feed(text[:length])
            text, turn = text[length:], turn + 1
    return joined(events + parser.finish(ended)), parser


CALLS = [(f, c, m) for f, c in CASES for m in c["messages"] if m.get("tool_calls")]


@pytest.mark.parametrize("family, case, message", CALLS, ids=[f"{f}-{c['name']}" for f, c, _ in CALLS])
@pytest.mark.parametrize("cuts", [None, [1], [3, 1, 7]])
@pytest.mark.parametrize("stream", [True, False])
def test_calls_of_the_fixtures_are_parsed_back(family, case, message, cuts, stream):
    message = {"reasoning_content": "Look.", **message}
    expected = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        ordered = dict(sorted(arguments.items())) if family == "inkling" else arguments
        expected.append((call["function"]["name"], json.dumps(ordered, sort_keys=family == "inkling")))
    form = {k: v for k, v in case["options"].items() if k == "tool_call_format"}
    pieces, thinking = sampled(family, message, case["tools"], **form)
    events, parser = parse(family, pieces, thinking, case["tools"], cuts=cuts, stream=stream)
    got = collect(events)
    calls = [(c.name, json.dumps(json.loads(c.arguments), sort_keys=family == "inkling")) for c in got.calls]
    assert calls == expected
    assert (got.reasoning, got.text) == (message["reasoning_content"], (message["content"] or "").strip())
    assert (parser.outcome, parser.malformed) == ("tool_calls", None)
    assert parser.block is not None and parser.block.removeprefix("<|message_model|>") in "".join(p for _, p in pieces)


HOSTILE = ["</arg_value>", "</tool_call>", "<tool_call>", "<|tool_arg:end|>", "</ifm|arg_value>", "</ifm|tool_calls>",
           "</think>", "<|end_message|>", "<|message_model|>", "<|content_invoke_tool_json|>", '"', "\\", "{", "}",
           "<", "</", " ", "\n",
           "é", "￿", "007", "null", "NaN"]  # fmt: skip
characters = st.characters(exclude_categories=["Cs"])
texts = st.lists(st.sampled_from(HOSTILE) | st.text(characters, max_size=3), max_size=6).map("".join)
numbers = st.integers(-(10**40), 10**40) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(st.none() | st.booleans() | numbers | texts,
                      lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=3), max_leaves=5)
keys = st.text("abcXYZ0_ -é", min_size=1, max_size=6).filter(lambda k: k == k.strip())
calls = st.lists(st.tuples(st.text("abcXYZ_.:/-09", min_size=1, max_size=9), st.dictionaries(keys, values, max_size=3)),
                 min_size=1, max_size=3)


@BY_PROTOCOL
@given(calls=calls, cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5), stream=st.booleans())
def test_any_call_is_parsed_back(family, calls, cuts, stream):
    tools = []
    for name in dict(calls):
        given = next(a for n, a in calls if n == name)
        properties = {k: {"type": schema.type_of(v)} for k, v in given.items()}
        tools.append({"type": "function", "function": {"name": name, "parameters": {"properties": properties}}})
    calls = [(n, next(a for m, a in calls if m == n)) for n, _ in calls]
    tags = getattr(module(family), "TAGS", None)
    for value in (v for _, a in calls for v in a.values()):
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if tags:  # A value that holds what ends one, with what follows it, cannot be told from two.
            assume(_ends(tags, False).search(text + tags.value[1] + tags.call[1]).start() == len(text))
    message = {"role": "assistant", "content": "Ok.", "reasoning_content": "R",
               "tool_calls": [{"id": f"c{i}", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)]}
    pieces, thinking = sampled(family, message, tools)
    events, parser = parse(family, pieces, thinking, tools, cuts=cuts, stream=stream)
    got = collect(events)
    assert [(c.name, json.loads(c.arguments)) for c in got.calls] == calls
    if family != "inkling":
        assert [list(json.loads(c.arguments)) for c in got.calls] == [list(a) for _, a in calls]
    assert (got.reasoning, got.text, parser.outcome, parser.malformed) == ("R", "Ok.", "tool_calls", None)


@BY_FAMILY
def test_a_kept_block_is_rendered_as_it_was_sampled(family):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = {"id": "c0", "function": {"name": "f", "arguments": {"b": "x", "a": 1}}}
    message = {"role": "assistant", "content": "Ok.", "reasoning_content": "R", "tool_calls": [call]}
    pieces, thinking = sampled(family, message, tools)
    _, parser = parse(family, pieces, thinking, tools)

    text = parser.block.replace('"a":1', '"a": 1').replace(">x<", ">xy<").replace('"x"', '"xy"')
    asked = [{"role": "user", "content": "Go"}, message]
    bare = Options(template_kwargs={"add_generation_prompt": False})
    canonical = chat(family).render(asked, tools, bare)
    replayed = chat(family).render(asked, tools, bare, {"c0": Block(text, ("c0",))})
    assert replayed.text != canonical.text and text in replayed.text and replayed.plain == ()
    assert chat(family).render(asked, tools, bare, {"c0": Block(parser.block, ("c0",))}).text == canonical.text
    assert chat(family).render(asked, tools, bare, {"c0": Block(text, ("c0", "c1"))}).text == canonical.text


# --- users' text ----------------------------------------------------------------------------------------------------


@BY_PROTOCOL
@given(data=st.data())
def test_text_of_users_makes_no_special_token(family, data):
    literals = sorted(module(family)._LITERALS, key=len, reverse=True)
    hostile = st.lists(st.sampled_from(literals) | st.sampled_from(["<", ">", "|", "think>", " ",
        "\n"]) | st.text(max_size=2),
                       max_size=5).map("".join)

    def specials(texts):
        system, user, content, reasoning, name, key, value, nested, result = texts
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user},
                    {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": [
                        {"id": "1", "function": {"name": name, "arguments": {key: value, "o": [nested]}}}]},
                    {"role": "tool", "tool_call_id": "1", "content": result}]
        tools = [{"type": "function", "function": {"name": name, "description": system, "parameters": {"title": value}}}]
        prompt = chat(family, literals).render(messages, tools, Options())
        edges = [0, *(x for span in prompt.plain for x in span), len(prompt.text)]
        found = []
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            found += re.findall("|".join(map(re.escape, literals)), prompt.text[start:end])
        return found

    safe = ["a"] * 9
    texts = [data.draw(hostile) or "a" for _ in safe]
    # Reasoning given apart: what is inline in content is recognised, by design.
    texts[2] = texts[2].replace("</think>", "") or "a"
    texts[2] = "a" if not texts[2].strip() else texts[2]
    texts[3] = "a" if not texts[3].strip() else texts[3]
    assert specials(texts) == specials(safe)


@BY_FAMILY
def test_words_that_are_not_known_are_refused(family):
    with pytest.raises(ChatError, match="'ultra' is not known"):
        chat(family).render([{"role": "user", "content": ""}], None, Options(effort="ultra"))
    with pytest.raises(ChatError, match="role 'critic' is not known"):
        chat(family).render([{"role": "critic", "content": ""}], None, Options())
    with pytest.raises(ChatError, match="arguments of call 'f'"):
        broken = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
        chat(family).render([broken], None, Options())
    with pytest.raises(ChatError, match="'input_audio'"):
        chat(family).render([{"role": "user", "content": [{"type": "input_audio"}]}], None, Options())


# --- through a template ---------------------------------------------------------------------------------------------

TEMPLATES = {
    "glm5-next": """[gMASK]<sop><|system|>Reasoning Effort: {{ {'low': 'Low', 'high': 'High'}.get(reasoning_effort, 'Max') }}
{%- for m in messages %}{% if m.role == 'assistant' %}<|assistant|><think>{{ m.reasoning_content }}</think>
{{- m.content | trim }}
{%- for c in m.tool_calls %}<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() -%}
<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|observation|>{% endif -%}
<tool_response>{{ m.content }}</tool_response>{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|><think>{% endif %}""",
    "k2-horizon": """<|ifm|begin_of_text|>{% for m in messages %}<|ifm|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% set t = 'think_fast' if m.think_fast is defined else 'think' %}<ifm|{{ t }}>
{{ m[t] if m[t] is defined else m.reasoning_content }}</ifm|{{ t }}>{% endif %}{{ m.content }}<|ifm|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|ifm|im_start|>assistant
<ifm|{{ {'high': 'think', 'medium': 'think_fast', 'low': 'think_faster'}[reasoning_effort] }}>
{% endif %}<ifm|tool_calls>""".removesuffix("<ifm|tool_calls>") + "{# tool_call #}",
}  # fmt: skip


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_template_gets_the_prepared_messages(family):
    artifact = for_artifact({"general.architecture": family, "tokenizer.chat_template": TEMPLATES[family]}, Specials())
    assert artifact.template
    tried = 0
    for case in fixture(family):
        if case["tools"]:
            continue
        prompt = artifact.render(case["messages"], None, options(case["options"]))
        native = chat(family).render(case["messages"], None, options(case["options"]))
        if "clear_thinking" not in case["options"]:  # The template above does not know it.
            assert (prompt.text, prompt.thinking) == (native.text, native.thinking) == (case["expected_text"],
                native.thinking)
            tried += 1
    assert tried >= 5
    hostile = [{"role": "user", "content": "".join(module(family).MARKERS)}]
    assert len(artifact.render(hostile, None, Options()).plain) == len(module(family).MARKERS)


@BY_FAMILY
def test_a_template_of_another_family_is_not_used(family, caplog):
    artifact = for_artifact({"general.architecture": family, "tokenizer.chat_template": "{{ messages }}"}, Specials())
    assert artifact.template is None and "it does not write" in caplog.text


@BY_FAMILY
def test_surface(family):
    protocol = module(family)
    assert set(protocol.MARKERS) | set(protocol.STOPS) <= protocol._LITERALS
    assert {tag for tags in reasoning_tags(protocol) for tag in tags} <= set(protocol.MARKERS)
    parser = protocol.Parser(False, None, stream=False, single=True)
    assert (parser.stopped, parser.outcome, parser.malformed, parser.block) == (False, None, None, None)
    assert Guard(protocol._LITERALS).text("plain text") == "plain text"


# --- what each family does with the controls ------------------------------------------------------------------------

GO = [{"role": "user", "content": "Go"}]
HISTORY = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "1", "reasoning_content": "why"}, *GO]


def ends(family, **how):
    """(how the prompt ends, whether reasoning is open, whether something was not given)."""
    prompt = chat(family).render(GO, None, Options(**how))
    return prompt.text[prompt.text.rindex("Go") + 2:], prompt.thinking, prompt.fallback_reason is not None


@pytest.mark.parametrize("family, how, end, thinking, fallback", [
    ("glm5-next", {"thinking": False}, "<|assistant|><think>", True, True),
    ("glm5-next", {"effort": "none"}, "<|assistant|><think>", True, True),
    ("glm-dsa", {"effort": "off"}, "<|assistant|><think></think>", False, False),
    ("bailingmoe3", {"thinking": False}, "<|role_end|><role>ASSISTANT</role>\n<think></think>", False, False),
    ("bailingmoe3", {"thinking": True}, "<|role_end|><role>ASSISTANT</role>\n<think>", True, False),
    ("solar-open2", {"thinking": False},
     "<|im:end|>\n<|im:start|>assistant<|im:content|><|think:start|><|think:end|>", False, False),
    ("solar-open2", {"effort": "low"}, "<|im:end|>\n<|im:start|>assistant<|im:content|><|think:start|><|think:end|>",
     False, True),
    ("solar-open2", {"effort": "max"}, "<|im:end|>\n<|im:start|>assistant<|im:content|><|think:start|>", True, False),
    ("exaone-moe", {"effort": "none"}, "<|endofturn|>\n<|assistant|>\n<think>\n\n</think>\n\n", False, False),
    ("k2-horizon", {"thinking": False}, "<|ifm|im_end|><|ifm|im_start|>assistant\n<ifm|think_faster>\n", True, True),
    ("k2-horizon", {"effort": "max"}, "<|ifm|im_end|><|ifm|im_start|>assistant\n<ifm|think>\n", True, False),
    ("motif3", {}, "<|endofturn|><|startofturn|><|assistant|><think>", True, False),
    ("motif3", {"thinking": False}, "<|endofturn|><|startofturn|><|assistant|><think></think>", False, False),
    ("inkling", {"effort": "max"}, "<|end_message|><|message_model|>", False, False),
])  # fmt: skip
def test_how_a_prompt_ends(family, how, end, thinking, fallback):
    assert ends(family, **how) == (end, thinking, fallback)


@pytest.mark.parametrize("family, kept", [("glm5-next", True), ("glm-dsa", False), ("bailingmoe3", True),
    ("solar-open2", False),
                                          ("exaone-moe", False), ("k2-horizon", True), ("motif3", True), ("inkling", True)])
def test_which_reasoning_is_kept(family, kept):
    assert ("why" in chat(family).render(HISTORY, None, Options()).text) == kept
    result = {"role": "tool", "content": "r", "tool_call_id": "c"}
    called = {**HISTORY[1], "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]}
    assert "why" in chat(family).render([*GO, called, result], None, Options()).text


def test_glm_leaves_out_tools_that_are_loaded_later():
    tools = [{"type": "function", "function": {"name": name, "defer_loading": name == "g"}} for name in "fg"]
    text = chat("glm5-next").render(GO, tools, Options()).text
    assert '<tools>\n{"name": "f"}\n</tools>' in text
    assert "# Tools" not in chat("glm5-next").render(GO, tools[1:], Options()).text


@pytest.mark.parametrize("ids, order", [(["c2", "c1"], "12"), (["c2", "c2"], "21"), (["c2", None], "21"),
                                        (["c2", "x"], "21"), (["c1"], "2")])
def test_glm_and_solar_put_results_in_the_order_of_calls_if_every_id_is_known(ids, order):
    calls = [{"id": i, "function": {"name": "f", "arguments": {}}} for i in ("c1", "c2")]
    contents = dict(zip(range(2), "21", strict=True))
    results = [{"role": "tool", "tool_call_id": i, "content": f"result{contents[k]}"} for k, i in enumerate(ids)]
    for family in ("glm-dsa", "solar-open2"):
        text = chat(family).render([*GO, {"role": "assistant", "tool_calls": calls}, *results, *GO], None, Options()).text
        assert "".join(re.findall("result(.)", text)) == order


def test_images_stand_where_the_part_stands():
    parts = [{"type": "text", "text": "a<|image|>"}, {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "text", "text": "b"}]
    prompt = chat("glm5-next").render([{"role": "user", "content": parts}], None, Options())
    assert "<|user|>a<|image|><|begin_of_image|><|image|><|end_of_image|>b<|assistant|>" in prompt.text
    assert [prompt.text[a:b] for a, b in prompt.plain] == ["<|image|>"]
    for family, role in (("glm5-next", "tool"), ("solar-open2", "user")):
        with pytest.raises(ChatError, match="'image_url'"):
            chat(family).render([{"role": role, "content": parts}], None, Options())


def test_exaone_knows_no_developer_and_renders_arguments_as_they_came():
    with pytest.raises(ChatError, match="role 'developer'"):
        chat("exaone-moe").render([{"role": "developer", "content": "x"}], None, Options())
    call = {"function": {"name": "f", "arguments": '{"a":1.50,"b":"\\u00fc"}'}}
    text = chat("exaone-moe").render([*GO, {"role": "assistant", "tool_calls": [call]}], None, Options()).text
    assert '<tool_call>{"name": "f", "arguments": {"a":1.50,"b":"\\u00fc"}}</tool_call>' in text
    call = {"function": {"name": "f", "arguments": ""}}
    text = chat("exaone-moe").render([*GO, {"role": "assistant", "tool_calls": [call]}], None, Options()).text
    assert '"arguments": {}}</tool_call>' in text


def test_words_of_template_variables():
    with pytest.raises(ChatError, match="thinking_option is 'maybe'; accepted are on, off"):
        chat("bailingmoe3").render(GO, None, Options(template_kwargs={"thinking_option": "maybe"}))
    with pytest.raises(ChatError, match="provider_system_prompt needs"):
        chat("solar-open2").render(GO, None, Options(template_kwargs={"provider_system_prompt": True}))


# --- through a tokenizer --------------------------------------------------------------------------------------------


@BY_FAMILY
@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_markers_are_heard_of_whatever_their_token_type(family, kind):
    """A vocabulary of bytes and markers; the sampled tokens go through the generation loop."""
    protocol = module(family)
    literals = sorted(protocol._LITERALS)
    tokens = [ALPHABET[i] for i in range(256)] + literals
    tokenizer = Tokenizer(tokens, [NORMAL] * 256 + [kind] * len(literals), [], RULES["glm4"])
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"s": {"type": "string"}}}}}]
    value = "é " + "".join(m for m in protocol.MARKERS if family == "inkling" or m in sum(reasoning_tags(protocol), ()))
    call = {"function": {"name": "f", "arguments": {"s": value, "n": [1]}}}
    messages = [{"role": "user", "content": "Go"},
                {"role": "assistant", "content": "Ok.", "reasoning_content": "R", "tool_calls": [call]}]
    artifact = chat(family, literals)
    ask = artifact.render(messages[:1], tools, Options())
    done = artifact.render(messages, tools, Options(template_kwargs={"add_generation_prompt": False}))
    prompt, whole = (tokenizer.encode(p.text, plain=p.plain) for p in (ask, done))
    assert whole[:len(prompt)] == prompt
    ends = frozenset(tokenizer.id_of(text) for text in protocol.STOPS)
    generation = Generation(tokenizer, prompt, SamplingParams(temperature=0), 9999, 9999, StopPolicy(ends),
                            artifact.parser(ask, tools), markers=frozenset(protocol.MARKERS))
    events = []
    for token in [*whole[len(prompt):], min(ends)]:
        if generation.finish is None:
            logits = np.zeros(len(tokens))
            logits[token] = 9.0
            events += generation.accept(logits).events
    got = collect(events)
    assert (got.reasoning, got.text, generation.finish) == ("R", "Ok.", Finish.TOOL_CALLS)
    assert [(c.name, json.loads(c.arguments)) for c in got.calls] == [("f", {"s": value, "n": [1]})]
