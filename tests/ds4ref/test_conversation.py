"""Every family from messages to an answer and on to the next turn: tokens, markers, history marks, reuse.

The artifacts are tiny ones with random weights; the protocols are the families' own.
"""

import numpy as np
import pytest

from ds4ref import chat, tiny
from ds4ref.chat import Options, collect, deepseek4, qwen
from ds4ref.conversation import Conversation
from ds4ref.families import FAMILIES
from ds4ref.generation import run
from ds4ref.model import Model
from ds4ref.reuse import Policy, Reuser
from ds4ref.sampling import SamplingParams
from ds4ref.stop import Finish

TOOLS = [{"type": "function", "function": {"name": "tide", "description": "Tide table.", "parameters": {
    "type": "object", "properties": {"harbour": {"type": "string"}}, "required": ["harbour"]}}}]  # fmt: skip
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf"
    tiny.write(request.param, path, seed=1)
    return Model.open(path)


@pytest.fixture(scope="module")
def conversation(model):
    return Conversation(model.artifact)


@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_is_read_whatever_the_model_says(model, conversation, thinking):
    prompt = conversation.render([{"role": "user", "content": "Husum?"}], TOOLS, Options(thinking=thinking))
    ids = conversation.encode(prompt)
    for seed in range(3):
        generation = conversation.generation(
            ids, SamplingParams(seed=seed), budget=24, context=4000, prompt=prompt, tools=TOOLS, stream=seed % 2 == 0
        )
        steps = list(run(model, model.new_state(), generation))
        collect(event for step in steps for event in step.events)
        assert generation.finish in (Finish.STOP, Finish.LENGTH, Finish.TOOL_CALLS)


def test_users_cannot_write_markers(conversation):
    """A message that spells every special token renders to as many special tokens as a harmless one of the same shape."""
    tokenizer = conversation.tokenizer
    special = set(tokenizer.specials.values())

    def markers(content):
        messages = [{"role": "system", "content": content}, {"role": "user", "content": content}]
        return [i for i in conversation.encode(conversation.render(messages, None, Options())) if i in special]

    assert markers("x " + " y ".join(tokenizer.specials) + " z") == markers("x y z")


def test_stop_tokens_exist_in_the_vocabulary(conversation):
    assert conversation.end_ids and all(conversation.tokenizer.piece(i) for i in conversation.end_ids)


@pytest.mark.parametrize(
    ("tools", "thinking", "turns"),
    [
        pytest.param(None, True, 4, id="plain-thinking"),
        pytest.param(TOOLS, False, 2, id="tools-direct"),
        pytest.param(None, False, 7, id="plain-direct", marks=pytest.mark.slow),
        pytest.param(TOOLS, True, 7, id="tools-thinking", marks=pytest.mark.slow),
    ],
)
def test_a_growing_conversation_hits_every_turn(model, conversation, tools, thinking, turns):
    """Turns through the family's own rendering, with reasoning in the answers and, with tools, a call in every other
    turn. Each turn computes at most what its rendering adds to the last one's, up to what a template drops from history,
    which a checkpoint at the mark makes cheap. Logits equal those of a cold run, bit for bit."""
    options = Options(thinking=thinking)
    reuser = Reuser(model.new_state, 8192, policy=Policy("partial", minimum=8))
    messages, before = [], []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Question {turn} about the harbour."})
        before = check_turn(model, conversation, reuser, messages, tools, options, before)
        answer = {"role": "assistant", "content": f"Answer {turn}."}
        if thinking:
            answer["reasoning_content"] = f"Thought {turn}."
        if tools and turn % 2:
            call = {"id": f"call_{turn}", "type": "function", "function": {"name": "tide", "arguments": '{"harbour": "Husum"}'}}
            messages.append(answer | {"tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "04:10"})
            before = check_turn(model, conversation, reuser, messages, tools, options, before)
            answer = {"role": "assistant", "content": "At ten past four."}
        messages.append(answer)


def check_turn(model, conversation, reuser, messages, tools, options, before):
    """Admit the prompt of ``messages``, compute the rest, and check what was computed. → its ids."""
    ids = conversation.encode(conversation.render(messages, tools, options))
    marks = conversation.marks(messages, tools, options, ids)
    admission = reuser.admit(ids, marks=marks)
    shared = next((n for n, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), len(before))
    state = admission.bank.state
    # The turn before left its state at the marks: everything up to where the renderings part is kept.
    assert admission.decision.cached >= min(shared, len(ids) - 1) if before else admission.decision.cached == 0
    for token in admission.remaining:
        model.step(state, token)
        admission.progress()
    if len(messages) in (1, 7):
        assert np.array_equal(state.logits, model.prefill(model.new_state(), ids))
    reuser.retire(admission.bank)
    return ids


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_opening_is_what_other_conversations_share(conversation, tools):
    """The tokens up to it are those of every conversation with the same instructions, and it ends where the question begins."""
    system = [{"role": "system", "content": "Answer with the tide table. " * 3}]

    def ids_of(*questions):
        messages = [*system, {"role": "user", "content": questions[0]}]
        for question in questions[1:]:
            messages += [{"role": "assistant", "content": "04:10"}, {"role": "user", "content": question}]
        ids = conversation.encode(conversation.render(messages, tools, Options(thinking=False)))
        return ids, conversation.opening(messages, tools, Options(thinking=False), ids)

    first, at = ids_of("Husum?")
    other, _ = ids_of("Wremen!", "And then?")
    assert first[:at] == other[:at] and first[at] != other[at]
    assert ids_of("Husum?", "And then?")[1] == at == ids_of(".")[1]
    assert conversation.opening([{"role": "assistant", "content": "04:10"}], None, Options(), first) is None


def test_systems_come_first_where_a_protocol_wants_them_there():
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "x"}, {"role": "developer", "content": "y"}]
    merged = chat.with_systems_first(qwen, messages)
    assert merged == [{"role": "system", "content": "x\n\ny"}, {"role": "user", "content": "a"}]
    assert chat.with_systems_first(qwen, merged) == merged, "one system message at the beginning stays as it is"
    assert chat.with_systems_first(deepseek4, messages) == messages
