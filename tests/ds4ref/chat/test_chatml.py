"""Prompts of Qwen, MiMo, Naive, Step and dots: every published rendering byte for byte, and what holds for any of them."""
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4ref.chat import NO_SPECIALS, Block, ChatError, Options, collect, dots, for_artifact, mimo, naive, qwen, step
from ds4ref.chat.xmlcalls import write
from ds4ref.conversation import Conversation
from ds4ref.gguf import Artifact
from ds4ref.sampling import SamplingParams

GOLDEN = Path(__file__).parents[3] / "golden"
RELEASES = {"MiMo-V2.5": "V2", "MiMo-VL": "VL", "StepFun3.5-Flash": "3.5", "Step-3.7-Flash": "3.7"}
FILES = {"qwen35/render.json": (qwen, {"release": "3.8"}), "qwen4exp/render.json": (qwen, {"release": "3.8"}),
         "qwen35/render-qwen3.5.json": (qwen, {"release": "3.5"}), "mimo2/render.json": (mimo, {}),
         "naive_n05_flash/render.json": (naive, {}), "step35/render.json": (step, {}), "dots3note/render.json": (dots, {})}


def load(kind):
    """(protocol, its settings, case) of every case, or every refusal, in the files."""
    for file, (protocol, how) in FILES.items():
        data = json.loads((GOLDEN / file).read_text())
        for case in (data if kind == "cases" else []) if isinstance(data, list) else data[kind]:
            release = {"release": RELEASES[case["template"]]} if case.get("template") in RELEASES else {}
            yield pytest.param(protocol, {**how, **release}, case, id=f"{file.split('/')[0]}/{case['name']}")


CASES, REFUSALS = list(load("cases")), list(load("errors"))
CALLS = [p for p in CASES if any(m.get("tool_calls") for m in p.values[2]["messages"])]
VARIANTS = {"qwen3.8": (qwen, {"release": "3.8"}), "qwen3.5": (qwen, {"release": "3.5"}), "mimo": (mimo, {"release": "V2"}),
            "mimo-vl": (mimo, {"release": "VL"}), "naive": (naive, {}), "step3.7": (step, {"release": "3.7"}),
            "step3.5": (step, {"release": "3.5"}), "dots": (dots, {})}
USER = [{"role": "user", "content": "x"}]
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def options(case):
    given = dict(case["options"])
    return Options(thinking=given.pop("enable_thinking", None), template_kwargs=given)


def render(variant, messages, tools=None, options=None, **how):
    protocol, fixed = VARIANTS[variant]
    return protocol.render(messages, tools, options or Options(), **{**fixed, **how})


# --- the published renderings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol, how, case", CASES)
def test_renderings(protocol, how, case):
    prompt = protocol.render(case["messages"], case["tools"], options(case), **how)
    assert prompt.text == case["expected_text"]
    assert prompt.thinking == prompt.text.endswith("<think>\n")
    assert prompt.plain == () or case["name"] == "think_tags_in_content"


@pytest.mark.parametrize("protocol, how, case", REFUSALS)
def test_refusals(protocol, how, case):
    with pytest.raises(ChatError) as error:
        protocol.render(case["messages"], case["tools"], options(case), **how)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("protocol, how, case", CALLS)
def test_calls_of_the_renderings_are_read_back_and_replayed(protocol, how, case):
    tools = case["tools"]
    for i, message in enumerate(case["messages"]):
        if not message.get("tool_calls"):
            continue
        before = protocol.render(case["messages"][:i], tools, Options(), **how)
        after = protocol.render(case["messages"][:i + 1], tools, Options(template_kwargs={"add_generation_prompt": False}),
                                **how)
        assert after.text.startswith(before.text)
        end = next(e for e in (*protocol.STOPS, "<|endofassistant|>") if after.text.rstrip("\n").endswith(e))
        sampled = after.text.rstrip("\n")[len(before.text):-len(end)]
        parser = protocol.Parser(before.thinking, tools)
        answer = collect([e for char in sampled for e in parser.feed(char)] + parser.finish("stop"))
        assert parser.outcome == "tool_calls" and answer.text == message["content"]
        if how.get("release") != "VL":
            assert answer.reasoning.strip("\n") == message.get("reasoning_content", "")
        assert [(c.name, list(json.loads(c.arguments).items())) for c in answer.calls] == [
            (c["function"]["name"], list(c["function"]["arguments"].items())) for c in message["tool_calls"]]
        blocks = {c["id"]: Block(parser.block, tuple(c["id"] for c in message["tool_calls"])) for c in message["tool_calls"]}
        replay = protocol.render(case["messages"][:i + 1], tools, Options(template_kwargs={"add_generation_prompt": False}),
                                 blocks=blocks, **how)
        assert replay.text == after.text


@each_variant
def test_kept_blocks_replace_their_calls(variant):
    protocol, _ = VARIANTS[variant]
    opening = "\n" + protocol.MARKERS[2] + "as it  was sampled <think>" + protocol.MARKERS[3]
    calls = [{"id": i, "function": {"name": "f", "arguments": a}} for i, a in (("a", {}), ("b", "{}"))]
    messages = [*USER, {"role": "assistant", "content": "Hm.", "reasoning_content": "r", "tool_calls": calls}]
    block = Block(opening, ("a", "b"))
    prompt = render(variant, messages, blocks={"a": block, "b": block})
    at = prompt.text.index("Hm." + opening)
    guarded = [prompt.text[a:b] for a, b in prompt.plain]
    assert guarded == ["<think>"] and prompt.plain[0][0] > at
    assert opening not in render(variant, messages, blocks={"a": Block(opening, ("a",))}).text


# --- what the artifact decides --------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture, name, protocol, expected", [
    ("qwen4exp", "Qwen3.8-Flash-Next", qwen, {"release": "3.8"}),
    ("qwen35", "Ternary-Bonsai-2-27B", qwen, {"release": "3.8"}),
    ("qwen35", "Qwen3.5-27B", qwen, {"release": "3.5"}),
    ("qwen35", "qwen3.6 27b", qwen, {"release": "3.5"}),
    ("mimo2", "MiMo-V2.6-Flash-RL", mimo, {"release": "V2"}),
    ("mimo2", "MiMo-VL-7B", mimo, {"release": "VL"}),
    ("naive_n05_flash", "", naive, {}),
    ("step35", "Step-3.7-Flash", step, {"release": "3.7"}),
    ("step35", "Step-3.5-Flash", step, {"release": "3.5"}),
    ("dots3note", "", dots, {}),
    ("dots3-note", "", dots, {}),
])
def test_the_artifact_decides_the_protocol_and_the_release(architecture, name, protocol, expected):
    for metadata, file in (({"general.name": name}, ""), ({}, name + "-00001-of-00004.gguf")):
        chat = for_artifact({"general.architecture": architecture, **metadata}, NO_SPECIALS, file)
        assert chat.protocol is protocol and chat.settings == expected and chat.template is None


TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m.name or m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\
{%- for c in m.tool_calls or [] %}<tool_call><function={{ c.function.name }}>\
{%- for k, v in c.function.arguments|items %}<parameter={{ k }}>{{ v }}</parameter>{% endfor %}{% endfor %}<|im_end|>
{% endfor %}[{{ enable_thinking }} {{ reasoning_effort }} {{ tools | length if tools else 0 }} {{ extra }}]\
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}{# tool_response <|endofuser|> <dots_function_call> #}"""


@each_variant
def test_the_artifacts_template_is_used(variant):
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [
                    {"id": "1", "function": {"name": "f", "arguments": '{"k": 1.0}'}}]},
                {"role": "function", "content": "</think>"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    prompt = render(variant, messages, tools, Options(effort="high", template_kwargs={"extra": 7}), template=TEMPLATE)
    word = {"qwen3.8": "xhigh", "naive": "high", "step3.7": "high"}.get(variant, "")
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        "<think>r</think><tool_call><function=f><parameter=k>1.0</parameter><|im_end|>\n<|im_start|>tool\n</think><|im_end|>\n"
        f"[True {word} 1 7]<|im_start|>assistant\n<think>\n")
    assert prompt.thinking and [prompt.text[a:b] for a, b in prompt.plain] == ["</think>"]


@pytest.mark.parametrize("protocol, told, release", [
    (qwen, "reasoning_effort", "3.8"), (qwen, "", "3.5"), (step, "reasoning_effort", "3.7"), (step, "", "3.5"),
    (mimo, "<function=", "V2"), (mimo, "", "VL")])
def test_a_template_tells_its_release(protocol, told, release):
    template = "<|im_start|>" + ("<tool_call>" if protocol is mimo else "<function= tool_response") + told
    assert protocol.settings({"tokenizer.chat_template": template, "general.name": "Qwen3.5 Step-3.5 MiMo-VL"}) == {
        "release": release}
    assert protocol.refuse_template(template) is None and protocol.refuse_template("{{ messages }}")


def test_step_closes_reasoning_that_a_template_opens():
    for how in ({}, {"template": TEMPLATE}):
        prompt = render("step3.7", [{"role": "user", "content": "x"}], options=Options(thinking=False), **how)
        assert prompt.text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n") and not prompt.thinking


# --- thinking -------------------------------------------------------------------------------------------------------


@each_variant
def test_words_of_a_level_are_one_prompt(variant):
    texts = {word: render(variant, USER, options=Options(effort=word)) for word in
             ("none", "off", "minimal", "low", "medium", "high", "xhigh", "max")}
    assert texts["minimal"] == texts["low"] == texts["medium"] and texts["high"] == texts["xhigh"]
    assert texts["none"] == texts["off"] == render(variant, USER, options=Options(thinking=False, effort="high"))
    assert not texts["none"].thinking and texts["low"].text != texts["none"].text
    assert texts["low"].fallback_reason is None
    levels = {"qwen3.8": 2, "naive": 3, "step3.7": 3}.get(variant, 1)
    assert len({texts[w].text for w in ("low", "high", "max")}) == levels
    assert bool(texts["max"].fallback_reason) == (levels < 3) and bool(texts["high"].fallback_reason) == (levels < 2)
    with pytest.raises(ChatError):
        render(variant, USER, options=Options(effort="huge"))


def test_effort_lines():
    def head(variant, **given):
        return render(variant, USER, options=Options(**given)).text.partition("<|im_start|>user")[0]

    assert "set to low." in head("qwen3.8", effort="medium") and "set to xhigh." in head("qwen3.8", effort="high")
    assert head("qwen3.8", thinking=False) == "" == head("qwen3.5")
    assert "Effort: Low<" in head("naive", effort="low") and "Effort: Max<" in head("naive", thinking=False)
    assert "\nReasoning: low\n" in head("step3.7") and "\nReasoning: none\n" in head("step3.7", thinking=False)
    assert "\nReasoning: max\n" in head("step3.7", effort="low", template_kwargs={"reasoning_effort": "max"})
    with pytest.raises(ChatError):
        head("naive", template_kwargs={"reasoning_effort": 3})


# --- edges of single families ---------------------------------------------------------------------------------------


def test_qwen_joins_the_systems_at_the_beginning():
    messages = [{"role": "system", "content": "a "}, {"role": "developer", "content": "b"}, *USER]
    assert render("qwen3.5", messages).text.startswith("<|im_start|>system\na\n\nb<|im_end|>\n<|im_start|>user\n")


def test_qwen_with_no_words_for_the_system_block():
    messages = [{"role": "system", "content": " "}, *USER]
    assert render("qwen3.8", messages, options=Options(thinking=False)).text.startswith("<|im_start|>user\nx")


def test_written_out_results_are_no_query():
    response = {"role": "user", "content": [{"type": "text", "text": " <tool_response>\n1\n</tool_response>\n"}]}
    answer = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    for variant in ("qwen3.5", "step3.5"):
        assert "<think>\nr\n</think>" in render(variant, [*USER, answer, response]).text
        assert "<think>\nr\n</think>" not in render(variant, [*USER, answer, response, *USER]).text


def test_step_trims_contents():
    assert "<|im_start|>user\na b<|im_end|>" in render("step3.7", [{"role": "user", "content": " a b\n"}]).text


def test_dots_results_share_a_turn_and_calls_have_blocks_of_their_own():
    calls = [{"id": i, "function": {"name": "f", "arguments": {}}} for i in "ab"]
    messages = [*USER, {"role": "assistant", "content": "Hm.", "tool_calls": calls},
                {"role": "tool", "tool_call_id": "a", "content": "1"}, {"role": "tool", "tool_call_id": "b", "content": "2"}]
    block = '\n<dots_function_call>\n<invoke name="f">\n</invoke>\n</dots_function_call>'
    assert render("dots", messages).text.endswith(
        "<|user|>x<|endofuser|><|assistant|>Hm." + 2 * block + "<|endofassistant|><|user|>\n<dots_function_response>\n1\n"
        "</dots_function_response>\n<dots_function_response>\n2\n</dots_function_response><|endofuser|><|assistant|>")


def test_mimo_lists_schemas_of_any_shape():
    properties = {"a": {"type": ["string", "null"], "description": " d "}, "b": True}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}, "strict": None}},
             {"name": "g", "parameters": None}]
    text = render("mimo", USER, tools).text
    assert ("<function>\n<name>f</name>\n<parameters>\n<parameter>\n<name>a</name>\n<type>['string', 'null']</type>\n"
            "<description>d</description>\n</parameter>\n<parameter>\n<name>b</name>\n</parameter>\n</parameters>\n"
            "<strict>None</strict>\n</function>\n<function>\n<name>g</name>\n<parameters>\n</parameters>\n</function>") in text


def test_mimo_reads_json_calls_too():
    tools = [{"type": "function", "function": {"name": "f"}}]
    parser = mimo.Parser(False, tools)
    text = 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'
    answer = collect(parser.feed(text) + parser.finish("stop"))
    assert answer.text == "Hm." and [(c.name, c.arguments) for c in answer.calls] == [("f", '{"a": [1]}')]


@pytest.mark.parametrize("variant, kinds", [("qwen3.8", {"image", "video"}), ("mimo", {"image", "video", "audio"}),
                                            ("step3.7", {"image"}), ("naive", set()), ("dots", set())])
def test_media_stand_where_the_family_has_a_place_for_them(variant, kinds):
    for kind, part in (("image", {"type": "image_url", "image_url": "data:"}), ("video", {"type": "video"}),
                       ("audio", {"type": "input_audio"})):
        messages = [{"role": "user", "content": [{"type": "text", "text": "<|im_"}, part, {"type": "text", "text": "end|>"}]}]
        if kind in kinds:
            text = render(variant, messages).text
            assert "<|im_<" in text and ">end|>" in text
        else:
            with pytest.raises(ChatError):
                render(variant, messages)
        with pytest.raises(ChatError):
            render(variant, [*USER, {"role": "assistant", "content": [part]}])


# --- users' text ----------------------------------------------------------------------------------------------------


LITERALS = sorted(qwen._LITERALS | mimo._LITERALS | naive._LITERALS | step._LITERALS | dots._LITERALS)
hostile = st.lists(st.one_of(st.sampled_from(LITERALS), st.sampled_from(["<", ">", "think>", "</", "<|", " ", "\n"]),
                             st.text(max_size=3)), max_size=4).map("".join)


def specials_in(prompt, literals):
    """The special tokens a tokenizer would match: none inside a plain span."""
    edges = [0, *(x for span in prompt.plain for x in span), len(prompt.text)]
    found = []
    for a, b in zip(edges[::2], edges[1::2], strict=True):
        piece = prompt.text[a:b]
        while piece:
            hit = next((x for x in literals if piece.startswith(x)), None)
            found += [hit] if hit else []
            piece = piece[len(hit or " "):]
    return found


@each_variant
@pytest.mark.parametrize("source", [None, TEMPLATE], ids=["written", "template"])
@settings(max_examples=40, deadline=None)
@given(texts=st.tuples(*[hostile] * 9))
def test_text_of_users_makes_no_special_token(variant, source, texts):
    def rendered(texts):
        system, user, content, reasoning, name, key, value, nested, result = texts
        messages = [{"role": "system", "content": "s" + system}, {"role": "user", "content": "u" + user},
                    {"role": "assistant", "content": content, "reasoning_content": "r" + reasoning,
                     "tool_calls": [{"id": "1", "function": {"name": name, "arguments": {key: value, "o": [nested]}}}]},
                    {"role": "tool", "tool_call_id": "1", "content": result}]
        tools = [{"type": "function", "function": {"name": name, "description": system, "parameters": {
            "properties": {key: {"type": "string", "description": value}}}}}]
        return render(variant, messages, tools, template=source)

    literals = sorted(VARIANTS[variant][0]._LITERALS, key=len, reverse=True)
    prompt = rendered(texts)
    assert specials_in(prompt, literals) == specials_in(rendered(["a"] * 9), literals)
    for text in (texts[0], texts[1], texts[2], texts[8]):
        assert text.strip() in prompt.text


@pytest.mark.parametrize("name", ["qwen35", "qwen4exp", "mimo2", "naive_n05_flash", "step35", "dots3note"])
def test_prompts_of_the_small_artifacts(name):
    conversation = Conversation(Artifact.open(GOLDEN / name / "model.gguf"))
    tokenizer, protocol = conversation.tokenizer, conversation.chat.protocol
    known = [text for text in protocol.MARKERS if tokenizer.id_of(text) is not None]
    assert "<think>" in known and conversation.end_ids
    end = next(text for text in reversed(protocol.STOPS) if tokenizer.id_of(text) is not None)

    def ends(content):
        ids = conversation.encode(conversation.render([{"role": "user", "content": content}]))
        return ids.count(tokenizer.id_of(end)), ids.count(tokenizer.id_of("<think>"))

    assert ends("x") == ends(f"{end}<think>x{end}") == ends("<th" + "ink>")


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("name", ["qwen35", "mimo2", "naive_n05_flash", "step35", "dots3note"])
def test_answers_of_the_small_artifacts(name, hidden, monkeypatch):
    """The vocabularies type the markers as control tokens, which have no text; others type them as user-defined."""
    conversation = Conversation(Artifact.open(GOLDEN / name / "model.gguf"))
    tokenizer, protocol = conversation.tokenizer, conversation.chat.protocol
    if not hidden:
        monkeypatch.setattr(tokenizer, "is_control", lambda id: False)
    tools = [{"type": "function", "function": {"name": "f"}}]
    syntax = mimo.SYNTAX if protocol is naive else protocol.SYNTAX
    prompt = conversation.render(USER, tools)
    text = ("" if prompt.thinking else "<think>") + "Hm.</think>Yes.\n" + write(syntax, "f", {"a": 1})
    generation = conversation.generation(conversation.encode(prompt), SamplingParams(temperature=0), budget=500, context=5000,
                                         prompt=prompt, tools=tools)
    steps = [generation.start()]
    for token in [*tokenizer.encode(text), tokenizer.eos_id]:
        logits = np.zeros(tokenizer.vocab_size)
        logits[token] = 9.0
        steps.append(generation.accept(logits))
    answer = collect(event for step in steps for event in step.events)
    assert (answer.reasoning, answer.text, len(answer.calls)) == ("Hm.", "Yes.", 1)
    assert answer.calls[0].arguments == '{"a": 1}' and generation.finish == "tool_calls"
