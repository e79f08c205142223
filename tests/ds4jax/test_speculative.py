"""Drafts on the device never change a greedy answer, whatever the widths, the histories and the company; and the drafter's own
state follows the target's."""

from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
from runs import GOLDEN, QUICK

pytest.importorskip("jax", reason="JAX is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax import compilation, drafting
from ds4jax.model import Model
from ds4jax.speculative import Target
from ds4ref.generation import Generation
from ds4ref.gguf import ArtifactError
from ds4ref.sampling import SamplingParams
from ds4ref.speculative import Speculator, run, verify_together
from ds4ref.stop import StopPolicy

CHAINS = [
    ("qwen35", "model-mtp.gguf", None),
    ("deepseek4", "model.gguf", "mtp.gguf"),
    ("dots3note", "model.gguf", None),
    ("exaone-moe", "model.gguf", None),
    ("glm-dsa", "model.gguf", None),
    ("glm5-next", "model.gguf", None),
    ("inkling", "model.gguf", "mtp.gguf"),
    ("mimo2", "model.gguf", None),
    ("qwen4exp", "model.gguf", None),
    ("step35", "model.gguf", "mtp.gguf"),
]
BLOCKS = [
    ("naive_n05_flash", "model.gguf", "draft.gguf"),
    ("deepseek4", "model.gguf", "dspark.gguf"),
    ("mimo2", "model.gguf", "dflash.gguf"),
]


def drafters(cases, always):
    """These always, all in the slow profile."""
    return pytest.mark.parametrize(
        ("arch", "file", "sidecar"),
        [
            pytest.param(*case, id=f"{case[0]}-{case[2] or 'embedded'}", marks=() if case[0] in always else pytest.mark.slow)
            for case in cases
        ],
    )


BUDGET, CONTEXT = 24, 64


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """What is compared here is answers; XLA need not make them fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "compile_options", lambda: QUICK)
        yield


class Letters:
    """A tokenizer that spells every id with a letter."""

    vocab_size, specials = 512, {}

    def token_bytes(self, token):
        return b"abcdefgh"[token % 8 : token % 8 + 1]

    def piece(self, token):
        return self.token_bytes(token).decode()

    def is_control(self, token):
        return False


@cache
def opened(arch, file, sidecar):
    """(model of two banks, its drafter, two prompts, their greedy answers without drafts)."""
    path = GOLDEN / arch / file
    model = Model.open(path, context=CONTEXT, banks=2, chunk=16, sizes=(1, 16), trial_sizes=(1, 4), least_bucket=CONTEXT)
    rng, prompts, answers = np.random.default_rng(2), [], []
    for length in (5, 21):
        prompts.append(rng.integers(0, model.vocabulary, length).tolist())
        bank, answer = model.new_state(), []
        logits = model.prefill(bank, prompts[-1])
        while len(answer) < BUDGET:
            answer.append(int(np.argmax(logits)))
            logits = model.step(bank, answer[-1])
        bank.release()
        answers.append(answer)
    return model, drafting.attach(model, sidecar and GOLDEN / arch / sidecar), prompts, answers


class Steered:
    """The model's drafter, but that some of its logits are made to name the token that is right, since that of random weights
    hardly ever does."""

    def __init__(self, drafter, sequences, seed, share):
        self.drafter, self.sequences = drafter, sequences
        self.rng, self.share = np.random.default_rng(seed), share
        self.longest, self.taps, self.new, self.extend = drafter.longest, drafter.taps, drafter.new, drafter.extend

    def propose(self, draft, token, count, choose):
        at, (sequence,) = draft.length, [s for s in self.sequences if s[: draft.length] == draft.tokens]

        def steered(logits):
            nonlocal at
            at += 1
            if at < len(sequence) and self.rng.random() < self.share:
                logits = np.array(logits)
                logits[sequence[at]] = 1e3
            return choose(logits)

        return self.drafter.propose(draft, token, count, steered)


@contextmanager
def taken(model, count):
    """Banks, which are given back."""
    banks = [model.new_state() for _ in range(count)]
    try:
        yield banks
    finally:
        for bank in banks:
            bank.release()


def generation(prompt):
    return Generation(Letters(), list(prompt), SamplingParams(temperature=0), BUDGET, CONTEXT, StopPolicy(frozenset()))


@drafters([*CHAINS, *BLOCKS], always=("qwen35", "naive_n05_flash"))
def test_an_answer_with_drafts_is_the_one_without(arch, file, sidecar):
    model, drafter, prompts, answers = opened(arch, file, sidecar)
    for prompt, answer in zip(prompts, answers, strict=True):
        with taken(model, 1) as (bank,):
            made, speculator = generation(prompt), Speculator(Target(model, bank), drafter, 3)
            assert len(list(run(speculator, made))) == BUDGET
            assert made.generated == answer and speculator.drafted > 0
            assert bank.tokens == [*prompt, *answer][: bank.length] and bank.length >= len(prompt) + BUDGET - 1


@drafters([*CHAINS, *BLOCKS], always=("qwen35",))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_two_answers_at_once(arch, file, sidecar, data):
    """Trials of any widths, of one or of both in one program, some of them without drafts."""
    model, drafter, prompts, answers = opened(arch, file, sidecar)
    seed, share = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.sampled_from([0.0, 0.7, 1.0]))
    steered = Steered(drafter, [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)], seed, share)
    widths = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    with taken(model, 2) as banks:
        made = [generation(prompt) for prompt in prompts]
        speculators = [Speculator(Target(model, bank), steered, width) for bank, width in zip(banks, widths, strict=True)]
        for speculator, one in zip(speculators, made, strict=True):
            one.start()
            speculator.prefill(one.prompt)
            one.accept(speculator.state.logits)
        while going := [n for n in range(2) if made[n].finish is None]:
            chosen = data.draw(st.sampled_from([*[[n] for n in going], going]))
            trials = [speculators[n].prepare(made[n], data.draw(st.sampled_from([None, 1, 0]))) for n in chosen]
            seen = verify_together([speculators[n] for n in chosen], trials)
            for n, trial, (rows, taps) in zip(chosen, trials, seen, strict=True):
                speculators[n].settle(made[n], trial, rows, taps)
        for n, speculator in enumerate(speculators):
            assert made[n].generated == answers[n]
            whole = [*prompts[n], *answers[n]]
            assert speculator.draft.tokens == banks[n].tokens == whole[: banks[n].length]
            assert share < 1 or speculator.accepted == speculator.drafted
    assert model.compiled <= model.most_programs and drafter.compiled <= drafter.most_programs


def proposal(drafter, draft, token, count=3):
    """(drafts, logits of each) of a greedy proposal."""
    seen = []
    drafts = drafter.propose(draft, token, count, lambda logits: seen.append(logits) or int(np.argmax(logits)))
    return drafts, np.array(seen)


@drafters(CHAINS, always=("qwen35",))
def test_a_draft_depends_on_what_was_consumed_alone(arch, file, sidecar):
    """Not on the chunks it came in, on proposals before, nor on other drafts; and it may begin midway."""
    model, drafter, prompts, _ = opened(arch, file, sidecar)
    tokens = prompts[1]
    with taken(model, 1) as (bank,):
        taps = Target(model, bank).prefill(tokens, drafter.taps)

    def followed(flushed=(), start=0):
        draft = drafter.new(start)
        for n in range(start, len(tokens)):
            drafter.extend(draft, tokens[n], taps[n])
            if n in flushed:
                proposal(drafter, draft, tokens[n + 1])
        return draft

    whole = followed()
    drafts, logits = proposal(drafter, whole, 7)
    assert [len(drafts), len(logits)] == [3, 3]
    other = followed(flushed=(3, 4, 11))
    again, same = proposal(drafter, other, 7)
    assert again == drafts and np.allclose(same, logits, rtol=0, atol=1e-4)
    assert np.array_equal(proposal(drafter, whole, 7)[1], logits)  # a proposal leaves no trace
    late = followed(start=6)
    assert late.length == whole.length and len(proposal(drafter, late, 7)[0]) == 3  # in the slot that was not used longest
    assert other.slot is None and other.start == whole.length and proposal(drafter, other, 7)[0] == []
    assert np.array_equal(proposal(drafter, whole, 7)[1], logits)
    assert proposal(drafter, whole, 8)[0] == [] and whole.start == whole.length  # 7 was taken for consumed
    del late
    assert len(proposal(drafter, followed(), 7)[0]) == 3


class Best:
    """Takes the best tokens but for ``barred`` ones."""

    def __init__(self, barred):
        self.barred = frozenset(barred)

    def took(self, drafts, leads):
        assert len(leads) == len(drafts) and all(lead >= 0 for lead in leads)
        return drafts

    def __call__(self, logits):
        logits = np.array(logits)
        logits[list(self.barred)] = -np.inf
        return int(np.argmax(logits))


@drafters([*CHAINS, *BLOCKS], always=("qwen35", "naive_n05_flash"))
def test_the_best_drafts_of_one_program_are_those_chosen_one_by_one(arch, file, sidecar):
    """From any point, for any number of them, whatever is barred; and nothing is left of them in the draft."""
    model, drafter, prompts, _ = opened(arch, file, sidecar)
    tokens, barred = prompts[1], []
    with taken(model, 1) as (bank,):
        taps = Target(model, bank).prefill(tokens, drafter.taps)
    drafts = [drafter.new(0), drafter.new(0)]
    for n, token in enumerate(tokens):
        for draft in drafts:
            drafter.extend(draft, token, taps[n])
        following = tokens[n + 1] if n + 1 < len(tokens) else 7
        if n in (0, 2, 3, 7, 12, len(tokens) - 1):
            best, count = Best(barred), 1 + n % 3
            slow = drafter.propose(drafts[0], following, count, best.__call__)
            assert drafter.propose(drafts[1], following, count, best) == slow
            barred = [*barred[-3:], *slow]
            for draft in drafts:  # again from where a proposal has been made
                assert drafter.propose(draft, following, count, Best([]).__call__) == drafter.propose(
                    drafts[0], following, count, Best([])
                )
    assert barred


def test_what_cannot_draft_says_so(tmp_path):
    model = Model.open(GOLDEN / "qwen35" / "model-mtp.gguf", context=16)
    with pytest.raises(ArtifactError, match="takes no draft sidecar"):
        drafting.attach(model, GOLDEN / "qwen35" / "model-mtp.gguf")
    model.config = model.config.__class__(**{**vars(model.config), "predictors": 0})
    with pytest.raises(ArtifactError, match="holds no predictor block"):
        drafting.attach(model)
