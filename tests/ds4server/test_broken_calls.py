"""Calls that are cut, lack their closing tags or cannot be read, in every protocol: what is reported of them."""

import json

import pytest

from ds4ref import chat
from ds4ref.chat import Options
from ds4ref.families import FAMILIES
from ds4ref.stop import Finish
from ds4ref.tokenizer import ALPHABET

from .guided import begin, conversation, tape, tool

PROTOCOLS = {chat.PROTOCOLS[family]: family for family in sorted(FAMILIES)}
BY_FAMILY = pytest.mark.parametrize("family", PROTOCOLS.values(), ids=PROTOCOLS.keys())
TOOLS = [tool("write", {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}})]


def sampled(talk, *paths):
    """Token ids of calls as the template renders them, up to where their turn ends."""
    calls = [{"id": f"call_{i}", "type": "function", "function": {"name": "write", "arguments": {"path": path, "n": 7}}}
             for i, path in enumerate(paths)]  # fmt: skip
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    prompt = talk.render(messages, TOOLS, Options(thinking=False, template_kwargs={"add_generation_prompt": False}))
    form = talk.chat.calls(Options())
    first = prompt.text.index(paths[0])
    at = prompt.text.rindex(form.turn + "write" if form.turn else form.opening, 0, first) + len(form.turn)
    ids = talk.tokenizer.encode(prompt.text[at:])
    return ids[: next((i for i, token in enumerate(ids) if token in talk.end_ids), len(ids))]


def played(talk, tokens, *, stream, budget=600):
    _, generation = begin(talk, TOOLS, thinking=False, thinking_budget=0, stream=stream, budget=budget)
    return generation, tape(talk, generation, tokens)


@BY_FAMILY
@pytest.mark.parametrize("stream", [True, False])
def test_a_budget_that_ends_inside_a_call(family, stream):
    """Wherever it ends: the finish is length, complete calls stay, the rest is raw text if buffered and stops if streamed."""
    talk = conversation(family)
    tokens = sampled(talk, "a.txt", "b.txt")
    generation, answer = played(talk, tokens, stream=stream)
    assert generation.finish == Finish.TOOL_CALLS and len(answer.calls) == 2
    forced = len(generation.generated) - len(tokens)
    before = 0
    for budget in range(forced + 1, len(generation.generated), max(1, len(tokens) // 9)):
        cut, answer = played(talk, tokens, stream=stream, budget=budget)
        assert cut.finish == Finish.LENGTH and cut.broken_call is None
        assert before <= len(answer.calls) <= 2
        before = len(answer.calls)
        for call, path in zip(answer.calls, ("a.txt", "b.txt"), strict=False):
            assert json.loads(call.arguments) == {"path": path, "n": 7}
        raw = b"".join(map(talk.tokenizer.token_bytes, cut.generated)).decode()
        if not stream and before == 0 and "a.txt" in raw:
            assert "a.txt" in answer.text
    assert before >= 1


@BY_FAMILY
@pytest.mark.parametrize("stream", [True, False])
def test_missing_closing_tags_are_supplied(family, stream):
    talk = conversation(family)
    tokens = sampled(talk, "a.txt")
    while talk.tokenizer.piece(tokens.pop()) in ("\n", ALPHABET[10]):
        pass
    generation, answer = played(talk, tokens, stream=stream)
    assert generation.finish == Finish.TOOL_CALLS and generation.blocks == []
    assert json.loads(answer.calls[0].arguments) == {"path": "a.txt", "n": 7}


@BY_FAMILY
def test_a_call_that_cannot_be_read_is_visible_text_and_says_why(family):
    talk = conversation(family)
    whole = sampled(talk, "a.txt")
    middle = len(whole) // 2
    bad = [*whole[:middle], *talk.tokenizer.encode("\x00<<nonsense>>\n\n")]
    form = talk.chat.calls(Options())
    opening = talk.tokenizer.encode(f"write{form.opening}" if form.turn else form.opening)
    for tokens in (bad, [*opening, *talk.tokenizer.encode(" ?? is no call")]):
        generation, answer = played(talk, tokens, stream=False)
        if generation.broken_call is not None:
            assert generation.finish == Finish.STOP and not answer.calls and generation.blocks == []
            assert generation.broken_call.startswith("the call") and "\n" not in generation.broken_call
            assert answer.text
    assert generation.broken_call is not None
