"""What a grammar and a budget of reasoning do to the choice of tokens. The grammars are toys: one text and nothing else."""

import numpy as np
import pytest

from ds4ref import tiny
from ds4ref.chat import Options, collect
from ds4ref.conversation import Conversation
from ds4ref.families import FAMILIES
from ds4ref.guidance import Guidance, ReasoningTokens, straddling
from ds4ref.sampling import SamplingParams
from ds4ref.stop import Finish


class Only:
    """The grammar of one text, in the given tokens; afterwards the end tokens, or with ``stays`` any token too."""

    def __init__(self, tokens, size, ends, stays=False):
        self.tokens, self.size, self.ends, self.stays = list(tokens), size, list(ends), stays
        self.demanding = not stays
        self.begun = []

    def begin(self, after_reasoning):
        self.begun.append(after_reasoning)
        return Place(self)


class Place:
    def __init__(self, grammar):
        self.grammar, self.at = grammar, 0

    def banned(self):
        grammar = self.grammar
        out = np.ones(grammar.size, dtype=bool)
        if self.at < len(grammar.tokens):
            out[grammar.tokens[self.at]] = False
        else:
            out[:] = not grammar.stays
            out[grammar.ends] = False
        return out

    def accept(self, token):
        assert not self.banned()[token]
        self.at += 1

    @property
    def complete(self):
        return self.at == len(self.grammar.tokens) and not self.grammar.stays


@pytest.fixture(scope="module")
def talk():
    return conversation("deepseek4")


def conversation(architecture):
    family = FAMILIES[architecture]
    metadata = family.tiny_metadata()
    size = family.Config.from_metadata(tiny.Described(architecture, metadata)).vocabulary
    return Conversation(tiny.Described(architecture, metadata | tiny.vocabulary(architecture, size)))


def only(talk, text, **more):
    return Only(talk.tokenizer.encode(text), talk.tokenizer.vocab_size, talk.end_ids, **more)


def play(talk, tape, *, rows=None, budget=100, params=None, thinking=True, effort=None, **more):
    """Generate with logits that favour ``tape``, then the end. → (generation, steps)."""
    prompt = talk.render([{"role": "user", "content": "x"}], None, Options(thinking=thinking, effort=effort))
    generation = talk.generation(
        talk.encode(prompt), params or SamplingParams(temperature=0), budget=budget, context=9000, prompt=prompt, **more
    )
    steps, tape = [generation.start()], list(tape)
    while generation.finish is None:
        logits = np.zeros(rows or talk.tokenizer.vocab_size)
        wanted = tape.pop(0) if tape and generation.forced is None else talk.tokenizer.eos_id
        logits[wanted] = 9
        steps.append(generation.accept(logits))
    return generation, steps


def answer(steps):
    return collect(event for step in steps for event in step.events)


def spell(talk, *texts):
    return [token for text in texts for token in talk.tokenizer.encode(text)]


def test_a_grammar_holds_the_text_behind_the_reasoning(talk):
    grammar = only(talk, "AB")
    generation, steps = play(talk, spell(talk, "hm", "</think>", "no such thing"), grammar=grammar)
    assert (answer(steps).reasoning, answer(steps).text) == ("hm", "AB")
    assert generation.finish == Finish.STOP and grammar.begun == [True]


def test_a_grammar_begins_at_once_where_there_is_no_reasoning(talk):
    grammar = only(talk, "AB")
    generation, steps = play(talk, spell(talk, "no"), grammar=grammar, thinking=False)
    assert answer(steps).text == "AB" and generation.finish == Finish.STOP and grammar.begun == [False]
    assert generation.generated == grammar.tokens


def test_raw_text_is_held_too(talk):
    generation = talk.generation([1], SamplingParams(temperature=0), budget=9, context=99, grammar=only(talk, "AB"))
    generation.start()
    while generation.finish is None:
        generation.accept(np.zeros(talk.tokenizer.vocab_size))
    assert generation.generated == spell(talk, "AB") and generation.finish == Finish.STOP


def test_reasoning_before_a_grammar_neither_ends_the_answer_nor_calls(talk):
    """An end token there is no answer, and a call there would not be held to a schema: both are banned."""
    dsml = talk.tokenizer.specials["｜DSML｜"]
    tape = [talk.tokenizer.eos_id, dsml, *spell(talk, "</think>")]
    generation, steps = play(talk, tape, grammar=only(talk, "AB"))
    assert answer(steps).text == "AB" and dsml not in generation.generated
    for free in (None, only(talk, "", stays=True)):  # where no answer is demanded, an end is an unfinished answer
        generation, _ = play(talk, [talk.tokenizer.eos_id], grammar=free)
        assert generation.finish == Finish.LENGTH and not generation.generated


def test_the_last_byte_of_a_marker_is_the_last_of_its_token():
    tokens = [b"</think>", b">x", b"k>y", b">", b"a</think>b", b"</think>\n", b"think", b"nk>"]
    found = dict(straddling(tokens, [b"</think>"]))
    assert found == {b"": {4, 5}, b"</think": {1}, b"</thin": {2}}
    guidance = Guidance(ReasoningTokens(straddling=straddling(tokens, [b"</think>"])), only_a_grammar(), reasoning_open=True)
    assert guidance.banned(b"so </think") == {4, 5, 1} and guidance.banned(b"so ") == {4, 5}


def only_a_grammar():
    return Only([0], 8, [])


def test_log_probabilities_are_the_models_own(talk):
    (a,) = spell(talk, "A")
    params = SamplingParams(temperature=0, logprobs=True, top_logprobs=1)
    _, steps = play(talk, [talk.tokenizer.id_of("z")] * 2, grammar=only(talk, "AB"), thinking=False, params=params)
    first = [entry for step in steps for entry in step.logprobs][0]
    assert first.token == a and first.top[0][0] == talk.tokenizer.id_of("z")
    assert first.logprob == pytest.approx(-9 - np.log(1 + (talk.tokenizer.vocab_size - 1) * np.exp(-9)))


def test_rows_of_logits_beyond_the_vocabulary_are_banned(talk):
    size = talk.tokenizer.vocab_size
    generation, _ = play(talk, [size + 3], rows=size + 8, grammar=only(talk, "AB"), thinking=False)
    assert generation.generated == spell(talk, "AB")


def test_a_bias_cannot_ban_what_the_grammar_demands(talk):
    (a,) = spell(talk, "A")
    params = SamplingParams(temperature=0, logit_bias={a: -100})
    generation, _ = play(talk, [], grammar=only(talk, "AB"), thinking=False, params=params)
    assert generation.generated == spell(talk, "AB")


def test_ignored_end_tokens_come_only_where_nothing_else_may(talk):
    generation, _ = play(talk, [], grammar=only(talk, "AB", stays=True), thinking=False, eos="global", budget=10)
    assert generation.finish == Finish.LENGTH and len(generation.generated) == 10


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_end_of_reasoning_is_forced_when_its_budget_is_used_up(talk, budget):
    generation, steps = play(talk, map(talk.tokenizer.id_of, "abcdefgh"), thinking_budget=budget)
    closing = talk.tokenizer.specials["</think>"]
    assert generation.generated.index(closing) == budget and generation.generated.count(closing) == 1
    assert answer(steps).reasoning == "abcdefgh"[:budget] and answer(steps).text == "abcdefgh"[budget:]
    assert generation.finish == Finish.STOP


def test_reasoning_that_ends_by_itself_is_left_alone(talk):
    generation, steps = play(talk, spell(talk, "ab", "</think>", "yes"), thinking_budget=50)
    assert (answer(steps).reasoning, answer(steps).text) == ("ab", "yes") and generation.finish == Finish.STOP


def test_forced_tokens_count_in_the_budget_of_the_answer(talk):
    generation, _ = play(talk, spell(talk, "abcdef"), thinking_budget=2, budget=3)
    assert len(generation.generated) == 3 and generation.finish == Finish.LENGTH


def test_a_budget_of_reasoning_without_reasoning_changes_nothing(talk):
    generation, steps = play(talk, spell(talk, "abc"), thinking=False, thinking_budget=0)
    assert answer(steps).text == "abc" and generation.generated == spell(talk, "abc")


@pytest.mark.parametrize(("effort", "tag"), [("high", "think"), ("medium", "think_fast"), ("low", "think_faster")])
def test_the_marker_that_is_forced_is_that_of_the_tag_that_opened(effort, tag):
    talk = conversation("k2-horizon")
    generation, _ = play(talk, spell(talk, "ab"), thinking_budget=1, effort=effort, thinking=None)
    assert talk.tokenizer.piece(generation.generated[1]) == f"</ifm|{tag}>"


@pytest.mark.parametrize("family", ["mimo2", "dots3note", "inkling"])
def test_a_model_that_opens_reasoning_itself_may_do_so_before_a_grammar(family):
    talk = conversation(family)
    opening = talk.chat.protocol.REASONING[0]
    grammar = only(talk, "AB" if family != "inkling" else "<|message_model|><|content_text|>AB")
    closing = talk.chat.protocol.REASONING[1]
    generation, steps = play(talk, spell(talk, opening, "hm", closing, "zz"), grammar=grammar)
    assert answer(steps).reasoning == "hm" and answer(steps).text == "AB" and grammar.begun == [False, True]
    generation, steps = play(talk, spell(talk, opening, "hmm and hm"), grammar=grammar, thinking_budget=2)
    assert answer(steps).text == "AB" and generation.reasoning_tokens <= 5
    if family != "inkling":
        generation, steps = play(talk, spell(talk, opening), grammar=grammar, thinking=False)
        assert not answer(steps).reasoning and answer(steps).text == "AB"
        generation, steps = play(talk, spell(talk, "x"), grammar=grammar)
        assert not answer(steps).reasoning and answer(steps).text == "AB"


def test_a_grammar_that_spells_a_marker_stays_in_the_answer(talk):
    """Once the answer has begun its text cannot open reasoning again."""
    letters = [talk.tokenizer.id_of(char) for char in "A<think>B"]
    grammar = Only(letters, talk.tokenizer.vocab_size, talk.end_ids)
    generation, _ = play(talk, [], grammar=grammar, thinking=False, eos="reasoning")
    assert generation.generated == letters and generation.finish == Finish.STOP
