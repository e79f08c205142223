"""One answer from logits to events: budgets, stops, reasoning, UTF-8, log-probabilities. The model is a tape of tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4ref import tiny
from ds4ref.chat import Options, Text, collect
from ds4ref.conversation import Conversation
from ds4ref.generation import run
from ds4ref.gguf import Artifact
from ds4ref.model import Model
from ds4ref.sampling import SamplingParams
from ds4ref.stop import Finish
from ds4ref.tokenizer import CONTROL, USER_DEFINED


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    tiny.write("deepseek4", path, seed=5)
    return Model.open(path)


@pytest.fixture(scope="module")
def conversation(model):
    return Conversation(model.artifact)


GREEDY = SamplingParams(temperature=0)


def play(conversation, tape, *, thinking=False, budget=1000, context=2000, **kwargs):
    """Generate with logits that choose ``tape`` (token ids), then the end token. → (generation, steps)."""
    prompt = conversation.render([{"role": "user", "content": "x"}], None, Options(thinking=thinking))
    ids = conversation.encode(prompt)
    generation = conversation.generation(ids, GREEDY, budget=budget, context=context, prompt=prompt, **kwargs)
    steps = [generation.start()]
    end = conversation.tokenizer.eos_id
    for token in [*tape, end]:
        if generation.finish is not None:
            break
        logits = np.zeros(conversation.tokenizer.vocab_size)
        logits[token] = 9.0
        steps.append(generation.accept(logits))
    return generation, steps


def answer(steps):
    return collect(event for step in steps for event in step.events)


def spell(conversation, *texts):
    return [token for text in texts for token in conversation.tokenizer.encode(text)]


def in_bytes(conversation, *pieces):
    """Tokens of single bytes: characters cut anywhere."""
    return [b for piece in pieces for b in piece]


@pytest.mark.parametrize(
    ("stop", "text", "finish", "matched"),
    [
        (["beta gamma"], "alpha ", Finish.STOP_STRING, "beta gamma"),
        (["gamma"], "alpha beta ", Finish.STOP_STRING, "gamma"),
        (["gamble"], "alpha beta gamma delta", Finish.STOP, None),
        (["delta!"], "alpha beta gamma delta", Finish.STOP, None),
        (["delta", "beta"], "alpha ", Finish.STOP_STRING, "beta"),
        (["ma delta", "gamma"], "alpha beta ", Finish.STOP_STRING, "gamma"),
    ],
)
def test_stop_strings_over_tokens(conversation, stop, text, finish, matched):
    tape = in_bytes(conversation, b"alpha", b" beta", b" gam", b"ma", b" delta")
    generation, steps = play(conversation, tape, stop_strings=stop)
    assert answer(steps).text == text and generation.finish == finish and generation.matched_stop == matched


@pytest.mark.parametrize(
    ("tape", "text"),
    [
        (b"Hi \xf0\x9f\x98\x80!", "Hi 😀!"),
        (b"\xe6\xbc\xa2\xe5\xad\x97", "漢字"),
        (b"caf\xc3", "caf"),
        (b"A\xffB", "A\ufffdB"),
        (b"\xf0\x9fA", "\ufffdA"),
    ],
)
@pytest.mark.parametrize("thinking", [True, False])
def test_characters_are_never_cut(conversation, tape, text, thinking):
    _, steps = play(conversation, list(tape), thinking=thinking)
    message = answer(steps)
    assert (message.reasoning if thinking else message.text) == text
    for step in steps:
        for event in step.events:
            event.text.encode()


def test_stop_strings_do_not_see_reasoning(conversation):
    tape = spell(conversation, "plan beta", "</think>", "so beta it is")
    generation, steps = play(conversation, tape, thinking=True, stop_strings=["beta"])
    message = answer(steps)
    assert (message.reasoning, message.text) == ("plan beta", "so ") and generation.finish == Finish.STOP_STRING
    assert 0 < generation.reasoning_tokens < len(generation.generated)


def test_reasoning_that_never_closes_is_an_unfinished_answer(conversation):
    generation, steps = play(conversation, spell(conversation, "hm"), thinking=True)
    assert answer(steps).reasoning == "hm" and answer(steps).text == "" and generation.finish == Finish.LENGTH


@pytest.mark.parametrize(("budget", "context", "finish"), [(3, 2000, Finish.LENGTH), (50, None, Finish.CONTEXT)])
def test_budget_and_context(conversation, budget, context, finish):
    prompt = len(conversation.encode(conversation.render([{"role": "user", "content": "x"}], None, Options(thinking=False))))
    tape = in_bytes(conversation, b"abcdefgh")
    generation, steps = play(conversation, tape, budget=budget, context=context or prompt + 3)
    assert answer(steps).text == "abc" and generation.finish == finish and len(generation.generated) == 3


def test_a_budget_of_zero_samples_nothing(conversation):
    generation, steps = play(conversation, [65], budget=0)
    assert generation.finish == Finish.LENGTH and generation.generated == [] and answer(steps).text == ""
    with pytest.raises(ValueError, match="has ended"):
        generation.accept(np.zeros(512))


def test_end_tokens_are_masked_where_the_policy_says(conversation):
    end = conversation.tokenizer.eos_id
    close = spell(conversation, "</think>")
    for eos, thinking, survives in [("model", True, False), ("reasoning", True, True), ("reasoning", False, False),
                                    ("global", False, True)]:  # fmt: skip
        generation, _ = play(conversation, [end], thinking=thinking, eos=eos, budget=1)
        assert (generation.generated != []) is survives, (eos, thinking)
        assert end not in generation.generated
    generation, _ = play(conversation, [*close, end, 65], thinking=True, eos="reasoning")
    assert generation.generated == close and generation.finish == Finish.STOP


def test_a_tool_call_ends_the_answer(conversation):
    block = (
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="tide">\n<｜DSML｜parameter name="harbour" string="true">Husum'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    tools = [{"type": "function", "function": {"name": "tide"}}]
    for stream in (True, False):
        tape = spell(conversation, "Look.", block, "never read")
        generation, steps = play(conversation, tape, tools=tools, stream=stream, stop_strings=["Look.?"])
        message = answer(steps)
        assert message.text == "Look." and generation.finish == Finish.TOOL_CALLS
        assert [(call.name, call.arguments) for call in message.calls] == [("tide", '{"harbour": "Husum"}')]


@given(st.lists(st.integers(0, 255), max_size=40), st.lists(st.sampled_from(["a", "b ", "tide", "\n"]), max_size=3))
def test_logprobs_travel_with_their_text(conversation, tape, stops):
    prompt = conversation.render([{"role": "user", "content": "x"}], None, Options(thinking=False))
    params = SamplingParams(temperature=0, logprobs=True, top_logprobs=2)
    generation = conversation.generation(conversation.encode(prompt), params, budget=99, context=999, prompt=prompt,
                                         stop_strings=stops)  # fmt: skip
    text, entries = "", []
    for token in [*tape, conversation.tokenizer.eos_id]:
        if generation.finish is None:
            step = generation.accept(np.eye(512)[token] * 9)
            text += "".join(event.text for event in step.events if isinstance(event, Text))
            entries += step.logprobs
            covered = b"".join(conversation.tokenizer.token_bytes(e.token) for e in entries).decode("utf-8", "replace")
            assert text.startswith(covered) or covered.rstrip("\ufffd").startswith(text[: len(covered.rstrip("\ufffd"))])
    if generation.finish == Finish.STOP:
        assert covered.rstrip("\ufffd") == text.rstrip("\ufffd")


def test_the_same_seed_gives_the_same_text(model, conversation):
    prompt = conversation.render([{"role": "user", "content": "Hello"}])
    ids = conversation.encode(prompt)

    def text(seed, choice=0):
        params = SamplingParams(seed=seed)
        generation = conversation.generation(ids, params, budget=25, context=999, prompt=prompt, choice=choice, eos="global")
        return [step.token for step in run(model, model.new_state(), generation)]

    assert text(1) == text(1) != text(2)
    assert text(1, choice=1) != text(1)


def test_run_computes_the_prompt_once(model, conversation):
    prompt = conversation.render([{"role": "user", "content": "Hello"}])
    ids = conversation.encode(prompt)
    state, seen = model.new_state(), []
    generation = conversation.generation(ids, GREEDY, budget=3, context=999, prompt=prompt, eos="global")
    tokens = [step.token for step in run(model, state, generation, progress=lambda done, total: seen.append((done, total)))]
    assert state.tokens == ids + tokens[:-1] and seen[-1] == (len(ids), len(ids))



def test_markers_typed_as_control_tokens_still_reach_the_parser(tmp_path):
    """Converters differ: the same marker is a user-defined token here and a control token, without text, there."""
    path = tmp_path / "control.gguf"
    tiny.write("deepseek4", path, seed=5)
    artifact = Artifact.open(path)
    kinds = artifact.metadata["tokenizer.ggml.token_type"]
    artifact.metadata["tokenizer.ggml.token_type"] = np.where(kinds == USER_DEFINED, CONTROL, kinds)
    conversation = Conversation(artifact)
    tape = [*b"hm \xe6", *spell(conversation, "</think>", "so")]
    _, steps = play(conversation, tape, thinking=True)
    message = answer(steps)
    assert (message.reasoning, message.text) == ("hm \ufffd", "so")
