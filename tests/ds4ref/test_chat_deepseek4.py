"""DeepSeek V4's chat format, held to the vendor's encoder, to renderings of both published templates and to 70 parsed
answers (golden/deepseek4), and by rule: the numbers in test names are those of the format's description."""
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4ref.chat import Block, Call, ChatError, Options, Specials, collect, deepseek4, jinja, joined
from ds4ref.chat.events import CallArguments, CallBegin, CallEnd, Reasoning, Text
from ds4ref.chat.guard import Guard

GOLDEN = Path(__file__).parents[2] / "golden" / "deepseek4"
ENCODER = json.loads((GOLDEN / "render.json").read_text())
JINJA = json.loads((GOLDEN / "render-jinja.json").read_text())
TOOLS = JINJA["tool_sets"]["harbour"]
PARSE = JINJA["parse_cases"] + [
    {"name": "encoder/" + c["name"], "thinking": c["thinking"], "tools": "harbour", "ended_by": "stop",
     "generated_text": c["text"], "expected": {"reasoning": c["reasoning_content"], "content": c["content"],
                                               "tool_calls": c["tool_calls"],
                                               "finish": "tool_calls" if c["tool_calls"] else "stop"}}
    for c in ENCODER["parse"]
]
RELEASES = {"V4": "first", "V4-Flash-0731": "0731", "preview": "first", "0731": "0731"}


def template(release):
    source = (GOLDEN / "template.jinja").read_text()
    return source.replace("@EFFORTS@", json.dumps(deepseek4.EFFORT_PREFIXES[release]))


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=[c["name"] for c in cases])


def parse(pieces, thinking=True, tools=TOOLS, ended="stop", **how):
    """(joined events, parser) of an answer."""
    parser = deepseek4.Parser(thinking, tools, **how)
    events = [e for piece in pieces for e in parser.feed(piece)]
    return joined(events + parser.finish(ended)), parser


def answer(text, **how):
    """(reasoning, text, calls with decoded arguments, outcome) of a buffered answer."""
    events, parser = parse([text], **{"stream": False, **how})
    message = collect(events)
    return message.reasoning, message.text, [(c.name, json.loads(c.arguments)) for c in message.calls], parser.outcome


def block(*invokes, s="｜DSML｜"):
    return f"\n\n<{s}tool_calls>\n" + "".join(f"{i}\n" for i in invokes) + f"</{s}tool_calls>"


def invoke(name, *parameters, s="｜DSML｜"):
    return f'<{s}invoke name="{name}">\n' + "".join(f"{p}\n" for p in parameters) + f"</{s}invoke>"


def parameter(name, value, kind="true", s="｜DSML｜"):
    attribute = f' string="{kind}"' if kind else ""
    return f'<{s}parameter name="{name}"{attribute}>{value}</{s}parameter>'


TIDE = invoke("tide", parameter("harbour", "Husum"))
PING = invoke("ping")


# --- rendering ------------------------------------------------------------------------------------------------------


def encoder_options(case):
    given, first = case["options"], case["messages"][0]
    return Options(thinking=given["thinking"], effort=given["reasoning_effort"],
                   response_format=first.get("response_format"),
                   template_kwargs={"drop_thinking": given["drop_thinking"]})


@by_name(ENCODER["cases"])
def test_encoder(case):
    release = RELEASES[case["options"]["revision"]]
    prompt = deepseek4.render(case["messages"], case["tools"], encoder_options(case), release=release)
    if case["name"] == "two_systems":  # The engine merges them first; the encoder alone does not.
        assert prompt.text == case["jinja_text"]
        assert deepseek4.encode(case["messages"], (), thinking=True) == case["expected_text"]
    else:
        assert prompt.text == case["expected_text"]
    assert prompt.plain == ()
    assert prompt.thinking == case["options"]["thinking"]


@by_name([c for c in ENCODER["cases"] if "jinja_text" in c])
def test_template_where_it_differs_from_the_encoder(case):
    source = template(RELEASES[case["options"]["revision"]])
    variables = {"messages": case["messages"], "tools": case["tools"] or [], "bos_token": deepseek4.BOS,
                 "add_generation_prompt": True, **case["options"]}
    assert jinja.render(source, variables) == case["jinja_text"]
    prompt = deepseek4.render(case["messages"], case["tools"], encoder_options(case), template=source)
    if case["name"] == "results_out_of_order":  # The engine sorts them first.
        assert prompt.text.endswith("<tool_result>18</tool_result>\n\n<tool_result>[]</tool_result><｜Assistant｜><think>")
    else:
        assert prompt.text == case["jinja_text"]


@by_name(JINJA["cases"])
def test_templates(case):
    messages = case["messages"]
    if case.get("before") == "sort_results":
        messages = deepseek4.prepare(messages, Guard(()), {})
    variables = {"messages": messages, "bos_token": deepseek4.BOS, **case["options"]}
    if case["tools"] is not None:
        variables["tools"] = case["tools"]
    assert jinja.render(template(RELEASES[case["template"]]), variables) == case["expected_text"]


@by_name([c for c in JINJA["cases"] if "thinking" in c["options"] and c["options"].get("reasoning_effort") != "xhigh"])
def test_engine_with_a_template(case):
    """What the engine makes of the same messages: equal, except that a developer is a system."""
    given = dict(case["options"])
    thinking, effort = given.pop("thinking"), given.pop("reasoning_effort", None)
    options = Options(thinking=thinking, effort=effort, response_format=given.pop("response_format", None),
                      template_kwargs=given)
    prompt = deepseek4.render(case["messages"], case["tools"], options, template=template(RELEASES[case["template"]]))
    if case["name"].startswith("developer_is_user_here"):
        assert prompt.text == "<｜begin▁of▁sentence｜>Rules.<｜User｜>A<｜Assistant｜><think>"
    else:
        assert prompt.text == case["expected_text"]
    assert prompt.thinking == case["expected_text"].endswith("<think>")


USER = [{"role": "user", "content": "Why?"}]


@pytest.mark.parametrize("release", ["first", "0731"])
@pytest.mark.parametrize("source", ["encoder", "template"])
def test_effort_ladder(release, source):
    def prefix(**options):
        how = {"template": template(release)} if source == "template" else {"release": release}
        prompt = deepseek4.render(USER, None, Options(**options), **how)
        head, _, tail = prompt.text.removeprefix(deepseek4.BOS).partition("<｜User｜>")
        assert tail.endswith("<think>" if prompt.thinking else "</think>")
        return head.partition(".")[0], prompt.thinking, prompt.fallback_reason

    highest = "Reasoning Effort: Absolute maximum with no shortcuts permitted"
    beyond = "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising"
    assert prefix() == ("", True, None)
    assert prefix(effort="none") == prefix(effort="off", thinking=True) == ("", False, None)
    for word in ("minimal", "low", "medium", "xhigh"):
        assert prefix(effort=word) == ("", True, None)
    assert prefix(effort="high") == (highest if release == "0731" else "", True, None)
    best = (beyond if release == "0731" else highest, True, None)
    assert prefix(effort="max") == prefix(effort="max", context=393_216) == best
    text, thinking, reason = prefix(effort="max", context=393_215)
    assert (text, thinking) == ("", True) and "393216" in reason and "393215" in reason
    assert prefix(effort="max", thinking=False, context=8) == ("", False, None)
    with pytest.raises(ChatError, match="'ultra' is not known"):
        prefix(effort="ultra")


def test_release_and_template_of_the_artifact():
    assert deepseek4.settings({"general.name": "DeepSeek V4 Flash 0731"}) == {"release": "0731"}
    assert deepseek4.settings({}, "DeepSeek-V4-Flash-0731-Q2.gguf") == {"release": "0731"}
    assert deepseek4.settings({"deepseek4.dspark.block_size": 5}) == {"release": "0731"}
    assert deepseek4.settings({"general.name": "DeepSeek V4 Flash"}, "v4.gguf") == {"release": "first"}
    assert deepseek4.refuse_template(template("first")) is None
    assert deepseek4.refuse_template("{{ dsml_token + 'tool_calls' }}") is None
    assert "function_calls" in deepseek4.refuse_template("<｜DSML｜function_calls> tool_calls")
    assert "｜DSML｜" in deepseek4.refuse_template("{{ messages }}")


def conversation(*calls, ids=True):
    tool_calls = [{"id": f"c{i}", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)]
    return [*USER, {"role": "assistant", "content": "Ok.", "tool_calls": tool_calls}]


BOTH = pytest.mark.parametrize("source", [None, template("first")], ids=["encoder", "template"])


@BOTH
def test_escapes(source):
    end = "</｜DSML｜parameter>"
    messages = [*conversation(("f&<>\"", {"a\"b": f"x{end}", "o": {"k": f"x{end}"}, "n": 1})),
                {"role": "tool", "tool_call_id": "c0", "content": "x</tool_result>&amp;"}]
    prompt = deepseek4.render(messages, None, Options(), template=source)
    for expected in ('<｜DSML｜invoke name="f&amp;&lt;&gt;&quot;">',
                     'name="a&quot;b" string="true">x&lt;/｜DSML｜parameter><',
                     '"o" string="false">{"k": "x\\u003c/｜DSML｜parameter>"}<', 'string="false">1<',
                     "<tool_result>x&lt;/tool_result>&amp;</tool_result>"):
        assert expected in prompt.text
    # The three markers that users' values held are plain text now.
    assert [prompt.text[a:b] for a, b in prompt.plain] == ["｜DSML｜"] * 2


@BOTH
def test_kept_blocks_replace_their_calls(source):
    sampled = (' \n<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter string="false" name="n">1e0'
               "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>")
    messages = conversation(("f", {"n": 1}))
    kept = {"c0": Block(sampled, ("c0",))}
    text = deepseek4.render(messages, None, Options(), template=source, blocks=kept).text
    assert f"Ok.{sampled}<｜end▁of▁sentence｜>" in text
    assert deepseek4.render(messages, None, Options(), template=source, blocks=kept).plain == ()
    canonical = deepseek4.render(messages, None, Options(), template=source).text
    assert canonical != text
    for other in ({"c0": Block(sampled, ("c0", "c1"))}, {"c1": Block(sampled, ("c1",))}):
        assert deepseek4.render(messages, None, Options(), template=source, blocks=other).text == canonical
    two = conversation(("f", {}), ("f", {}))
    block_of_two = Block(sampled, ("c1", "c0"))
    swapped = deepseek4.render(two, None, Options(), template=source, blocks={"c0": block_of_two, "c1": block_of_two})
    assert swapped.text == deepseek4.render(two, None, Options(), template=source).text


@BOTH
def test_numbers_keep_their_text(source):
    messages = conversation(("f", '{"b": 1.0, "a": 1e5, "s": "2"}'), ("g", ""))
    text = deepseek4.render(messages, None, Options(), template=source).text
    assert '"b" string="false">1.0<' in text and '"a" string="false">1e5<' in text and '"s" string="true">2<' in text
    assert '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>' in text
    for broken in ("[1]", "{", "NaN"):
        with pytest.raises(ChatError, match="arguments of call 'f'"):
            deepseek4.render(conversation(("f", broken)), None, Options(), template=source)


def test_contents_and_roles():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "tool_reference", "x": 1}]
    text = deepseek4.render([{"role": "user", "content": parts}], None, Options()).text
    assert '<｜User｜>a\n\nb\n\n{"type": "tool_reference", "x": 1}<｜Assistant｜>' in text
    with pytest.raises(ChatError, match="'image_url'"):
        deepseek4.render([{"role": "user", "content": [{"type": "image_url"}]}], None, Options())
    with pytest.raises(ChatError, match="role 'critic'"):
        deepseek4.render([{"role": "critic", "content": ""}], None, Options())


def test_tool_results_are_sorted_around_users_texts():
    messages = [*conversation(("f", {}), ("g", {}), ("h", {})),
                {"role": "tool", "tool_call_id": "c2", "content": "2"}, {"role": "user", "content": "u"},
                {"role": "tool", "tool_call_id": "c1", "content": "1"},
                {"role": "tool", "tool_call_id": "?", "content": "unknown"}]
    text = deepseek4.render(messages, None, Options()).text.rpartition("<｜User｜>")[2]
    assert text.startswith("<tool_result>unknown</tool_result>\n\nu\n\n<tool_result>1</tool_result>\n\n<tool_result>2<")


LITERALS = sorted(deepseek4._LITERALS | {"<｜▁pad▁｜>", "<|EOT|>"})
hostile = st.lists(st.one_of(st.sampled_from(LITERALS), st.sampled_from(["<", ">", "｜", "think>", "</", " ", "\n", "￿"]),
                             st.text(max_size=3))).map("".join)


def specials_in(prompt):
    """The special tokens a tokenizer would match: none inside a plain span."""
    edges = [0, *(x for span in prompt.plain for x in span), len(prompt.text)]
    free = [prompt.text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
    found = []
    for piece in free:
        while piece:
            hit = next((x for x in sorted(LITERALS, key=len, reverse=True) if piece.startswith(x)), None)
            found += [hit] if hit else []
            piece = piece[len(hit or " "):]
    return found


@BOTH
@given(texts=st.tuples(*[hostile] * 9))
def test_text_of_users_makes_no_special_token(source, texts):
    def messages(system, user, content, reasoning, name, key, value, nested, result):
        return [{"role": "system", "content": system}, {"role": "user", "content": user},
                {"role": "assistant", "content": content, "reasoning_content": reasoning,
                 "tool_calls": [{"id": "1", "function": {"name": name, "arguments": {key: value, "o": [nested]}}}]},
                {"role": "tool", "tool_call_id": "1", "content": result}]

    def rendered(texts):
        tools = [{"type": "function", "function": {"name": texts[4], "description": texts[0]}}]
        options = Options(response_format={"title": texts[1]})
        return deepseek4.render(messages(*texts), tools, options, template=source,
                                specials=Specials(frozenset(LITERALS)))

    prompt = rendered(texts)
    assert specials_in(prompt) == specials_in(rendered(["a"] * 9))
    for text in (texts[0], texts[1], texts[2], texts[3], texts[7] if texts[7].isalnum() else ""):
        assert text in prompt.text


# --- parsing --------------------------------------------------------------------------------------------------------


@by_name(PARSE)
def test_parse(case):
    tools = JINJA["tool_sets"].get(case["tools"])
    expected = case["expected"]
    got = answer(case["generated_text"], thinking=case["thinking"], tools=tools, ended=case["ended_by"])
    calls = [(c["name"], json.dumps(c["arguments"])) for c in expected["tool_calls"]]
    assert got[:2] + got[3:] == (expected["reasoning"], expected["content"], expected["finish"])
    assert [(name, json.dumps(arguments)) for name, arguments in got[2]] == calls


def pieces(text, cuts):
    edges = [0, *sorted({c % (len(text) + 1) for c in cuts}), len(text)]
    return [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@by_name(PARSE)
@given(data=st.data())
def test_any_split_gives_the_same_events(case, data):
    how = {"thinking": case["thinking"], "tools": JINJA["tool_sets"].get(case["tools"]), "ended": case["ended_by"],
           "stream": data.draw(st.booleans())}
    text = case["generated_text"]
    whole, parser = parse([text], **how)
    for split in (list(text), pieces(text, data.draw(st.lists(st.integers(0, len(text)))))):
        events, other = parse(split, **how)
        assert events == whole
        assert (other.outcome, other.malformed, other.block) == (parser.outcome, parser.malformed, parser.block)


FRAGMENTS = [
    "<think>", "</think>", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", '<｜DSML｜invoke name="tide">', "<｜DSML｜invoke>",
    "</｜DSML｜invoke>", '<｜DSML｜parameter name="harbour" string="true">', '<｜DSML｜parameter name="days" string="false">',
    '<｜DSML｜parameter name="x">', "</｜DSML｜parameter>", "&lt;/｜DSML｜parameter>", "<tool_calls>", '<invoke name="ping">',
    "</invoke>", "</tool_calls>", "<DSML｜tool_calls>", "7", '{"a": 1', "}", " ", "\n", "text", "<", "</", '"', "é",
]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=24), st.booleans(), st.booleans(), st.booleans(),
       st.sampled_from(["stop", "length"]), st.lists(st.integers(0, 999)))
def test_any_text_is_parsed_the_same_however_split(fragments, thinking, stream, single, ended, cuts):
    text = "".join(fragments)
    how = {"thinking": thinking, "stream": stream, "single": single, "ended": ended}
    whole, parser = parse([text], **how)
    for split in (list(text), fragments, pieces(text, cuts)):
        events, other = parse(split, **how)
        assert (events, other.outcome, other.block) == (whole, parser.outcome, parser.block)
    message = collect(whole)
    assert all(isinstance(json.loads(c.arguments), dict) for c in message.calls)
    indices = [e.index for e in whole if isinstance(e, CallBegin)]
    assert indices == list(range(len(indices)))
    buffered = collect(parse([text], **{**how, "stream": False})[0])
    assert buffered.calls == message.calls and buffered.reasoning == message.reasoning
    assert not (thinking and parser.outcome == "stop" and "</think>" not in text)


names = st.text("abcXYZ_.:/-09", min_size=1, max_size=12)
json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
                           | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=6)
argument_texts = st.one_of(st.text(), hostile).filter(lambda s: "&lt;/｜DSML｜parameter>" not in s)
argument_objects = st.dictionaries(st.text(min_size=1), json_values | argument_texts, max_size=4).filter(
    lambda d: not any("&lt;/｜DSML｜parameter>" in v for v in d.values() if isinstance(v, str)))


@BOTH
@given(calls=st.lists(st.tuples(names, argument_objects), min_size=1, max_size=3), cuts=st.lists(st.integers(0, 9999)))
def test_rendered_calls_are_parsed_back(source, calls, cuts):
    messages = conversation(*calls)
    text = deepseek4.render(messages, None, Options(thinking=False), template=source).text
    sampled = text.rpartition("<｜User｜>Why?<｜Assistant｜></think>")[2].partition("<｜end▁of▁sentence｜><｜Assistant｜>")[0]
    sampled = sampled if sampled.endswith("</｜DSML｜tool_calls>") else text.removesuffix(
        "<｜end▁of▁sentence｜><｜Assistant｜></think>").partition("<｜User｜>Why?<｜Assistant｜></think>")[2]
    tools = [{"type": "function", "function": {"name": "other"}}]
    events, parser = parse(pieces(sampled, cuts), thinking=False, tools=tools)
    message = collect(events)
    assert [(c.name, json.loads(c.arguments)) for c in message.calls] == calls
    assert [list(json.loads(c.arguments)) for c in message.calls] == [list(a) for _, a in calls]
    assert (message.text, parser.outcome, parser.stopped, parser.malformed) == ("Ok.", "tool_calls", True, None)
    assert parser.block == sampled.removeprefix("Ok.")


@by_name(ENCODER["cases"] + JINJA["cases"])
def test_calls_of_the_fixtures_are_parsed_back(case):
    for message in case["messages"]:
        if message.get("tool_calls"):
            functions = [c["function"] for c in message["tool_calls"]]
            calls = [(f["name"], f["arguments"]) for f in functions]
            rendered = deepseek4.render([message], None, Options(thinking=False)).text
            sampled = rendered.removeprefix(deepseek4.BOS).partition("<｜end▁of▁sentence｜>")[0]
            decoded = [(n, json.loads(a) if isinstance(a, str) else a) for n, a in calls]
            assert answer(sampled, thinking=False, tools=case["tools"] or TOOLS)[2] == decoded


# --- the numbered rules of "Reading the output" -----------------------------------------------------------------------


def test_rule_1_reasoning():
    assert answer(" a</think>b</think>c") == (" a", "bc", [], "stop")
    assert answer("<think>a<think>b</think>c") == ("a<think>b", "c", [], "stop")
    assert answer("never closed") == ("never closed", "", [], "length")
    assert answer("") == ("", "", [], "length")
    assert answer("</think>a", thinking=False) == ("", "a", [], "stop")
    assert answer("<think>a", thinking=False) == ("a", "", [], "length")
    assert answer("a<think>b</think>c", thinking=False) == ("", "abc", [], "stop")
    assert answer("<thin", thinking=False) == ("", "<thin", [], "stop")


def test_rule_2_without_tools_markup_is_text():
    text = block(TIDE) + "</｜DSML｜invoke> \n"
    for tools in (None, []):
        assert answer(text, thinking=False, tools=tools) == ("", text, [], "stop")
        assert answer(text, tools=tools) == (text, "", [], "length")
        # Nothing is held back but what could be a think tag.
        assert deepseek4.Parser(False, tools).feed("a \n<｜DSML") == [Text("a \n<｜DSML")]


def test_rule_3_openings_and_white_space():
    husum = [("tide", {"harbour": "Husum"})]
    for s in ("｜DSML｜", "DSML｜", ""):
        written = block(invoke("tide", parameter("harbour", "Husum", s=s), s=s), s=s)
        assert answer("r</think>\n Hi" + written) == ("r", "\n Hi", husum, "tool_calls")
    assert answer("</think>Hi\n" + TIDE) == ("", "Hi", husum, "tool_calls")
    assert answer("</think>Hi\n" + TIDE + TIDE) == ("", "Hi", husum * 2, "tool_calls")
    # In its own spelling throughout: another one is data.
    mixed = block(invoke("edit", parameter("new", "a</｜DSML｜parameter>b", s=""), s=""), s="")
    assert answer("</think>" + mixed)[2] == [("edit", {"new": "a</｜DSML｜parameter>b"})]
    for text in ("a <tool_calls> b", "<tool_calls>", "<invoke name='x'>", "<｜DSML｜invokes>", "a <"):
        assert answer("</think>" + text) == ("", text, [], "stop")


def test_rule_4_tags():
    written = ("<｜DSML｜tool_calls><｜DSML｜invoke\n name = 'm&amp;n' >"
               '<｜DSML｜parameter string="true"\tname="a&quot;&lt;b&gt;">'
               "&amp;</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>")
    assert answer("</think>" + written)[2] == [("m&n", {'a"<b>': "&amp;"})]


@pytest.mark.parametrize("name, kind, text, value", [
    ("days", "true", "7", 7), ("days", "true", "two", "two"), ("days", "true", "7.5", "7.5"), ("days", "false", "7", 7),
    ("days", "", "7", 7), ("days", "", "x", "x"), ("live", "true", "true", True), ("live", "true", "1", "1"),
    ("zip", "false", "02134", "02134"), ("zip", "false", '"02134"', "02134"), ("zip", "false", "[1]", "[1]"),
    ("zip", "false", "null", "null"), ("zip", "", "7", "7"), ("ports", "true", '["a"]', ["a"]),
    ("other", "false", "NaN", "NaN"), ("other", "false", "Infinity", "Infinity"), ("other", "false", " 1.0 ", 1.0),
    ("other", "false", "{'a': 1}", "{'a': 1}"), ("other", "", "7", "7"), ("other", "true", " 7 ", " 7 "),
    ("other", "false", '"a\\ud800"', "a\ud800"),
])  # fmt: skip
def test_rule_5_types(name, kind, text, value):
    got = answer("</think>" + block(invoke("tide", parameter(name, text, kind))))
    assert got[2] == [("tide", {name: value})] and type(got[2][0][1][name]) is type(value)


def test_rule_6_a_parameter_twice():
    twice = invoke("tide", parameter("harbour", "a"), parameter("harbour", "b"), parameter("x", "1", "false"),
                   parameter("x", "2", "false"))
    assert answer("</think>" + block(twice))[2] == [("tide", {"harbour": "a", "x": 1})]


def test_rule_7_nested_parameters():
    inner = parameter("old", "x") + "\n" + parameter("n", "7", "false")
    for closing in ("", "\n</｜DSML｜parameter>"):
        written = invoke("edit", parameter("path", "p"), f'<｜DSML｜parameter name="edits">\n{inner}{closing}')
        assert answer("</think>" + block(written))[2] == [("edit", {"path": "p", "edits": {"old": "x", "n": 7}})]
    after = invoke("edit", parameter("edits", inner, ""), parameter("edits", inner, ""), parameter("path", "p"))
    assert answer("</think>" + block(after))[2] == [("edit", {"edits": {"old": "x", "n": 7}, "path": "p"})]
    marked = invoke("edit", parameter("new", '<｜DSML｜parameter name="a">', "true"))
    assert answer("</think>" + block(marked))[2] == [("edit", {"new": '<｜DSML｜parameter name="a">'})]
    deep = '<｜DSML｜parameter name="a">' * 5000
    assert answer("</think>" + block(f'<｜DSML｜invoke name="edit">{deep}'))[3] == "stop"


def test_rule_8_empty_blocks_and_stray_closing_tags():
    assert answer("</think>a \n\n<｜DSML｜tool_calls> \n</｜DSML｜tool_calls> b") == ("", "a \n\n b", [], "stop")
    assert answer("</think>a</｜DSML｜parameter>b</DSML｜invoke>c</｜DSML｜tool_calls>") == ("", "abc", [], "stop")
    assert answer("</think>a" + block() + block(PING)) == ("", "a", [("ping", {})], "tool_calls")


def test_rule_9_blocks_inside_reasoning():
    for end in ("", " \n", "\n</think>", "</think>ignored"):
        events, parser = parse(["r" + block(PING) + end])
        assert events == [Reasoning("r"), CallBegin(0, "ping"), CallArguments(0, "{}"), CallEnd(0)]
        assert (parser.outcome, parser.block) == ("tool_calls", None)
    quoted = "r" + block(PING) + " is how.\n"
    assert answer(quoted + "</think>t") == (quoted, "t", [], "stop")
    assert answer(quoted + TIDE) == (quoted.rstrip(), "", [("tide", {"harbour": "Husum"})], "tool_calls")
    unfinished = 'Write <｜DSML｜tool_calls><｜DSML｜invoke name="f">, then'
    assert answer(unfinished + "</think>t") == (unfinished, "t", [], "stop")
    # A tag in a value is data if the block counts, and ends the reasoning if it does not.
    value = block(invoke("edit", parameter("new", "a</think>b")))
    assert answer("r" + value)[2] == [("edit", {"new": "a</think>b"})]
    assert answer("r" + value + " no")[0] == "r" + value.partition("</think>")[0]
    assert answer("r" + block(PING) + "<｜DSML｜invoke x", ended="stop")[3] == "length"
    # While it is undecided nothing from the marker on is told.
    parser = deepseek4.Parser(True, TOOLS)
    assert parser.feed("r" + block(TIDE)) == [Reasoning("r")] and not parser.stopped


def test_rule_10_missing_closing_tags():
    husum = [("tide", {"harbour": "Husum"})]
    whole = block(TIDE)
    for tail in ("</｜DSML｜tool_calls>", "\n</｜DSML｜tool_calls>", "ool_calls>", "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
                 "｜invoke>\n</｜DSML｜tool_calls>", "rameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
                 "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"):
        text = whole.removesuffix(tail)
        assert len(text) < len(whole)
        assert answer("</think>a" + text) == ("", "a", husum, "tool_calls"), tail
        assert parse(["</think>a" + text])[1].block is None
    number = invoke("tide", parameter("days", "7", "false"))
    assert answer("</think>" + block(number).partition("</")[0])[2] == [("tide", {"days": 7})]
    broken = block(invoke("tide", parameter("days", "[7", "false"))).partition("</")[0]
    assert answer("</think>" + broken) == ("", broken, [], "stop")
    # A call's missing closing tag before the next call.
    two = block('<｜DSML｜invoke name="ping">', TIDE)
    assert answer("</think>" + two)[2] == [("ping", {}), *husum]


def test_rule_11_malformed():
    for bad in ("<｜DSML｜invoke>", '<｜DSML｜invoke name="">', '<｜DSML｜invoke id="x">', "words"):
        text = f"t{block(bad)} after<think>"
        assert answer("r</think>" + text) == ("r", text, [], "stop")
        after_a_call = f"t{block(PING, bad)} after"
        got = answer("r</think>" + after_a_call)
        assert got == ("r", "t" + bad + "\n</｜DSML｜tool_calls> after", [("ping", {})], "tool_calls")
    for bad in (invoke("tide", "words"), invoke("tide", parameter("", "x")), invoke("tide", "<｜DSML｜parameter>")):
        text = "t" + block(bad)
        assert answer("r</think>" + text) == ("r", text, [], "stop")
        events, parser = parse(["r</think>" + text])  # Streamed: announced, so no raw text follows.
        assert events == [Reasoning("r"), Text("t"), CallBegin(0, "tide")]
        assert parser.outcome == "stop" and "could not be read" in parser.malformed
        events, _ = parse(["r</think>t" + block(PING, bad)])
        assert collect(events).calls == (Call("ping", "{}"),) and collect(events).text == "t"


def test_rule_12_the_budget_ends():
    husum = [("tide", {"harbour": "Husum"})]
    whole = block(TIDE, TIDE)
    opening = whole.index(TIDE)
    first, second = opening + len(TIDE), whole.index(TIDE, opening + 1)
    for n in range(1, len(whole)):
        got = answer("</think>a" + whole[:n], ended="length")
        message = collect(parse(["</think>a" + whole[:n]], ended="length")[0])
        assert got[3] == "length"
        if n < first:
            assert got[:3] == ("", "a" + whole[:n], [])
            assert message.calls == () and message.text in ("a", "a" + whole[:n])
        elif n < second + len(TIDE):
            assert got[1:3] == ("a" + whole[second:n], husum)
        else:
            lone = "<" if whole[:n].endswith("<") else ""  # Of a call or of the closing tag: kept, as nothing is lost.
            assert got[1:3] == ("a" + lone, husum * 2)
    assert answer("</think>a" + whole, ended="length")[2:] == (husum * 2, "tool_calls")
    for text in ("r" + block(PING)[:-4], "r" + block(PING), "r", "r</thi"):
        assert answer(text, ended="length") == (text, "", [], "length")
    assert answer("</think>a \n", ended="length") == ("", "a \n", [], "length")


def test_rule_13_stops():
    assert set(deepseek4.STOPS) == {"<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>"}
    text = "</think>" + block(TIDE, PING)
    for single, end in ((False, len(text)), (True, text.index(TIDE) + len(TIDE))):
        for thinking_closed in ("", "r"):
            parser = deepseek4.Parser(True, TOOLS, single=single)
            fed = [(i, parser.stopped) for i, c in enumerate(thinking_closed + text, 1) if parser.feed(c) or True]
            assert [i for i, stopped in fed if stopped][0] == end + len(thinking_closed)
            assert parser.finish("stop") == [] and parser.outcome == "tool_calls"
    assert answer("r" + block(TIDE, PING), single=True)[2] == [("tide", {"harbour": "Husum"})]


def test_rule_14_an_end_right_after_reasoning():
    assert answer("r</think>") == ("r", "", [], "stop")


def test_fragments_are_streamed_as_they_come():
    parser = deepseek4.Parser(False, TOOLS)
    assert parser.feed('Hi \n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="edit"') == [Text("Hi")]
    assert parser.feed(">") == [CallBegin(0, "edit")]
    assert parser.feed('\n<｜DSML｜parameter name="new" string="true">') == [CallArguments(0, '{"new": "')]
    assert parser.feed('a "b"\né ') == [CallArguments(0, 'a \\"b\\"\\né')]
    assert parser.feed("</｜DSML｜invoke>x</｜DSML｜para") == []  # May be a missing closing tag.
    assert parser.feed("meter>") == [CallArguments(0, ' </｜DSML｜invoke>x"')]
    assert parser.feed('<｜DSML｜parameter name="n" string="false">[1,') == []
    assert parser.feed(" 2]</｜DSML｜parameter>") == [CallArguments(0, ', "n": [1, 2]')]
    assert parser.feed("</｜DSML｜invoke>") == [CallArguments(0, "}"), CallEnd(0)]
    assert not parser.stopped
    assert parser.feed("</｜DSML｜tool_calls>") == [] and parser.stopped
    assert parser.block.startswith(" \n\n<｜DSML｜tool_calls>") and parser.block.endswith("</｜DSML｜tool_calls>")


def test_buffered_calls_are_told_only_when_complete():
    parser = deepseek4.Parser(False, TOOLS, stream=False)
    assert parser.feed(block(TIDE).partition("</｜DSML｜invoke>")[0]) == []
    assert parser.feed("</｜DSML｜invoke>")[0] == CallBegin(0, "tide")


def test_long_values_take_linear_time():
    text = "<" * 200_000
    for kind in ("true", "false"):
        _, parser = parse(["</think>" + block(invoke("edit", parameter("new", text, kind)))])
        assert parser.outcome == "tool_calls"
    parse(["</think>", *(["<｜DSML｜"] * 20_000)])
