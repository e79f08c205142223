"""The accept rule keeps distributions and greedy drafting keeps tokens, on a toy model with exactly known distributions."""

from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import lgamma

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4ref import speculative
from ds4ref.generation import Generation
from ds4ref.generation import run as run_plain
from ds4ref.sampling import Counts, SamplingParams, distribution, sample, uniform
from ds4ref.speculative import DRAW, KEEP, Drafted, Speculator, Stepwise, judge, run, verify_together
from ds4ref.state import State
from ds4ref.stop import Finish, ReasoningTracker, StopPolicy

V = 12
DRAWS = 200_000
SETTINGS = [
    SamplingParams(seed=1, min_p=0),
    SamplingParams(seed=1, temperature=0.7, top_k=5, min_p=0),
    SamplingParams(seed=1, temperature=1.3, top_p=0.8, min_p=0),
    SamplingParams(seed=1, temperature=2.0, min_p=0.2),
    SamplingParams(seed=1, min_p=0, logit_bias={3: 2.0, 5: -100.0}, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(seed=1, min_p=0, repetition_penalty=1.4, temperature=0.9, top_p=0.95, top_k=9),
]


# The accept rule ------------------------------------------------------------------------------------------------------


def p_value(counts, expected):
    """Upper tail of Pearson's chi-square test of counts [V] against a distribution [V]; impossible tokens must not occur."""
    possible = expected > 0
    if counts[~possible].any():
        return 0.0
    wanted = expected[possible] * counts.sum()
    assert wanted.min() >= 5
    return upper_gamma((possible.sum() - 1) / 2, np.sum((counts[possible] - wanted) ** 2 / wanted) / 2)


def upper_gamma(a, x):
    """The regularised upper incomplete gamma function Q(a, x) (Abramowitz & Stegun, 6.5.29 and 6.5.31)."""
    scale = np.exp(a * np.log(x) - x - lgamma(a)) if x > 0 else 0.0
    if x < a + 1:
        term = total = 1 / a
        n = a
        while term > total * 1e-15:
            n += 1
            term *= x / n
            total += term
        return 1 - total * scale
    value = 0.0
    for i in range(300, 0, -1):
        value = i * (i - a) * -1 / (x + 2 * i + 1 - a + value)
    return scale / (x + 1 - a + value)


def test_the_test_knows_chi_square():
    """Table values of the chi-square distribution: 95 % points of 1, 5 and 10 degrees, and the far tail."""
    for degrees, point, tail in ((1, 3.841459, 0.05), (5, 11.070498, 0.05), (10, 18.307038, 0.05), (10, 2.558212, 0.99)):
        assert abs(upper_gamma(degrees / 2, point / 2) - tail) < 1e-6


def distributions(params, seed):
    """(p, q): what target and drafter would sample from, under the same filters and history."""
    rng = np.random.default_rng(seed)
    target, draft = rng.normal(0, 1.0, (2, V))
    counts = Counts(V, [1, 2, 2])
    for token in (4, 4, 7):
        counts.add(token)
    made = [distribution(row, params, counts=counts, banned=(0,)) for row in (target, (target + draft) / 2)]
    return made[0], made[1]


def drafted(rng, q):
    return rng.choice(V, size=DRAWS, p=q)


def kept_or_redrawn_from_p(p, q, draft, u, v):
    """A broken rule: what is rejected is drawn from p, not from what q leaves of it."""
    cumulative = np.cumsum(p)
    return np.where(u * q[draft] < p[draft], draft, np.searchsorted(cumulative, v * cumulative[-1], side="right"))


def kept_where_likely(p, q, draft, u, v):
    """A broken rule: the ratio is turned round."""
    return judge(q, p, draft, u, v)


def kept_with_probability_p(p, q, draft, u, v):
    """A broken rule: accepts with p instead of p / q."""
    ids = np.flatnonzero(np.maximum(p - q, 0))
    rest = np.maximum(p - q, 0)[ids]
    at = np.minimum(np.searchsorted(np.cumsum(rest), v * rest.sum(), side="right"), len(ids) - 1)
    return np.where(u < p[draft], draft, ids[at])


def kept_unless_unlucky(p, q, draft, u, v):
    """A broken rule: a draft is dropped for the token that it is, and the position drawn from p as if it had none."""
    cumulative = np.cumsum(p)
    plain = np.searchsorted(cumulative, v * cumulative[-1], side="right")
    return np.where(draft == np.argmax(q), plain, judge(p, q, draft, u, v))


BROKEN = [kept_or_redrawn_from_p, kept_where_likely, kept_with_probability_p, kept_unless_unlucky]


def counted(rule, p, q, greedy=False, seed=7):
    rng = np.random.default_rng(seed)
    if greedy:
        q = np.eye(V)[np.argmax(q)]
    draft = drafted(rng, q)
    tokens = rule(p, q, draft, rng.random(DRAWS), rng.random(DRAWS))
    return np.bincount(tokens, minlength=V)


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled drafts", "greedy drafts"])
@pytest.mark.parametrize("setting", range(len(SETTINGS)))
def test_200000_judgements_have_the_targets_distribution(setting, greedy):
    p, q = distributions(SETTINGS[setting], setting)
    assert np.count_nonzero(p) >= 3 and np.abs(p - q).sum() > 0.1
    assert p_value(counted(judge, p, q, greedy), p) > 0.01


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_a_broken_rule_fails_the_same_test(rule):
    p, q = distributions(SETTINGS[0], 0)
    assert p_value(counted(rule, p, q), p) < 1e-6


def test_draws_by_counter_have_the_targets_distribution():
    """The same with the numbers that decoding uses, one (seed, choice, position) after another; fewer, since each costs."""
    p, q = distributions(SETTINGS[0], 3)
    n = DRAWS // 40
    draft_u, keep_u, draw_u = (
        np.array([uniform(5, 0, position, lane) for position in range(n)])
        for lane in (speculative.DRAFT, speculative.KEEP, speculative.DRAW)
    )
    draft = np.searchsorted(np.cumsum(q), draft_u * np.sum(q), side="right")
    assert p_value(np.bincount(judge(p, q, draft, keep_u, draw_u), minlength=V), p) > 0.01
    assert max(abs(np.corrcoef(a, b)[0, 1]) for a, b in ((draft_u, keep_u), (keep_u, draw_u), (draft_u, draw_u))) < 0.05


def test_lane_zero_is_the_samplers_draw():
    assert uniform(9, 2, 77) == uniform(9, 2, 77, speculative.DRAW)
    assert len({uniform(9, 2, 77, lane) for lane in range(3)}) == 3


@given(st.integers(0, 10**6), st.integers(0, V - 1), st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
def test_a_judgement_is_possible_and_greedy_is_exact(seed, draft, u, v):
    rng = np.random.default_rng(seed)
    p, q = (rng.random(V) * (rng.random(V) < 0.6) + np.eye(V)[i] for i in rng.integers(0, V, 2))
    p, q = p / p.sum(), q / q.sum()
    token = int(judge(p, q, draft, u, v))
    assert p[token] > 0
    assert token == draft or p[token] > q[token]
    one = np.eye(V)[np.argmax(p)]
    assert int(judge(one, np.eye(V)[draft], draft, 0.0, 0.0)) == np.argmax(p)


def test_equal_distributions_keep_every_draft():
    p, _ = distributions(SETTINGS[0], 1)
    draft = np.arange(V)[p > 0]
    assert np.array_equal(judge(p, p.copy(), draft, np.full(len(draft), 1 - 2.0**-53), np.zeros(len(draft))), draft)


def test_the_sampler_lets_drafted_logits_settle():
    rng = np.random.default_rng(0)
    logits, q = rng.normal(size=V).astype(np.float32), rng.dirichlet(np.ones(V))
    params, draft = SamplingParams(temperature=1.0, seed=7), 3
    p = distribution(logits, params)
    for position in range(50):
        u, v = (uniform(7, 0, position, lane) for lane in (KEEP, DRAW))
        assert sample(Drafted.of(logits, draft, q), params, position) == judge(p, q, draft, u, v)
    assert sample(Drafted.of(logits, draft, q), params, 0, banned=(draft,)) != draft
    with pytest.raises(ValueError, match="every one is banned"):
        sample(Drafted.of(logits, 0, q), params, 0, banned=range(V))


# Whole answers of a toy model -----------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of V letters; the last token ends an answer."""

    vocab_size, specials, eos_id = V, {}, V - 1

    def token_bytes(self, token):
        return bytes([97 + token])

    def piece(self, token):
        return chr(97 + token)

    def is_control(self, token):
        return token == self.eos_id


class Toy:
    """A model whose logits depend on the last two tokens; ``end`` is the end token's. It notes what it consumes and how far."""

    def __init__(self, seed, scale=1.0, end=-2.0):
        self.consumed, self.furthest = set(), 0
        self.table = np.random.default_rng(seed).normal(0, scale, (V, V, V)).astype(np.float32)
        self.table[:, :, V - 1] = end

    def new_state(self):
        return State({})

    def row(self, tokens):
        two = [0, 0, *tokens][-2:]
        return self.table[two[0], two[1]]

    def step(self, state, token, trace=lambda name, array: None):
        state.tokens.append(int(token))
        state.logits = self.row(state.tokens)
        self.consumed.add(int(token))
        self.furthest = max(self.furthest, state.length)
        trace("seen", np.array(state.tokens))
        return state.logits


@dataclass
class Kept:
    start: int
    tokens: list = field(default_factory=list)

    @property
    def length(self):
        return self.start + len(self.tokens)


class ToyDrafter:
    """Drafts from the logits of another toy; checks that it is told every token exactly once."""

    taps, longest = ("seen",), 8

    def __init__(self, model):
        self.model = model

    def new(self, start=0):
        return Kept(start)

    def extend(self, draft, token, taps):
        draft.tokens.append(int(token))
        assert taps["seen"].tolist()[draft.start :] == draft.tokens

    def propose(self, draft, token, count, choose):
        drafts = []
        while len(drafts) < count:
            chosen = choose(self.model.row([*draft.tokens, token, *drafts]))
            if chosen is None:
                break
            drafts.append(chosen)
        return drafts


TARGET = Toy(0)
TWIN, COUSIN, STRANGER = TARGET, Toy(1), Toy(2, 4.0)
COUSIN.table = (0.7 * TARGET.table + 0.3 * COUSIN.table).astype(np.float32)


def generation(params, budget=20, context=1000, prompt=(1, 2), choice=0, eos="model", tracker=None, stops=(), guidance=None):
    policy = StopPolicy(frozenset([V - 1]), eos=eos)
    return Generation(
        Letters(), list(prompt), params, budget, context, policy, stop_strings=stops, choice=choice, tracker=tracker,
        guidance=guidance,
    )  # fmt: skip


def plain(params, model=TARGET, **kwargs):
    made, state = generation(params, **kwargs), model.new_state()
    steps = list(run_plain(model, state, made))
    return made, state, steps


def speculated(params, drafter=COUSIN, width=4, model=TARGET, margin=0.0, mask=None, **kwargs):
    made, state = generation(params, **kwargs), model.new_state()
    speculator = Speculator(Stepwise(model, state), ToyDrafter(drafter), width, margin, mask=mask)
    return made, state, list(run(speculator, made)), speculator


GREEDY = SamplingParams(temperature=0)
TRACKER = ReasoningTracker((b"b",), (b"cd", b"e"))


@given(
    seed=st.integers(0, 10**6),
    drafter=st.sampled_from([TWIN, COUSIN, STRANGER]),
    width=st.integers(1, 8),
    margin=st.sampled_from([0.0, 0.5, 100.0]),
    budget=st.integers(0, 30),
    room=st.integers(0, 30),
    eos=st.sampled_from(["model", "global", "reasoning"]),
    stops=st.sampled_from([(), ("g",), ("ab", "ba"), ("kjk",)]),
    more=st.sampled_from([
        {},
        {"logprobs": True, "top_logprobs": 3},
        {"presence_penalty": 0.8, "repetition_penalty": 1.2},
        {"logit_bias": {4: 3.0, 5: -100.0}},
    ]),
)  # fmt: skip
def test_greedy_is_what_it_is_without_drafts(seed, drafter, width, margin, budget, room, eos, stops, more):
    """Tokens, events and log-probabilities, step by step, and the state that is left."""
    model = Toy(seed, end=0.5)
    params = replace(GREEDY, **more)
    how = {"budget": budget, "context": 2 + room, "eos": eos, "stops": stops, "tracker": TRACKER}
    expected, at, steps = plain(params, model, **how)
    model.furthest = 0
    found, state, ours, speculator = speculated(params, drafter, width, model, margin, **how)
    assert model.furthest <= max(2, 2 + min(budget, room) - 1)
    assert (found.generated, found.finish, found.matched_stop) == (expected.generated, expected.finish, expected.matched_stop)
    assert ours == steps
    assert state.tokens == at.tokens and np.array_equal(state.logits, at.logits)
    assert speculator.draft.tokens == state.tokens
    assert speculator.accepted <= speculator.drafted <= speculator.width * speculator.trials


@pytest.mark.parametrize("setting", [4, 5])
def test_filters_on_the_drafters_side_follow_the_drafted_history(setting):
    """A drafter with the target's own logits is never wrong, whatever penalties and masks apply."""
    params, drafted, masked = replace(SETTINGS[setting], temperature=0), 0, 0
    for seed in range(20):
        model, answers = Toy(seed, end=1.0), []
        for eos in ("model", "reasoning"):
            how = {"eos": eos, "tracker": replace(TRACKER, is_open=True), "budget": 40}
            found, *_, speculator = speculated(params, model, 6, model, **how)
            assert speculator.accepted == speculator.drafted
            drafted += speculator.drafted
            answers.append(found.generated)
        masked += answers[0] != answers[1]
    assert drafted > 200 and masked > 5


@pytest.mark.parametrize("eos", ["model", "global"])
@pytest.mark.parametrize("margin", [0.0, 0.4])
def test_what_is_taken_of_the_best_tokens_is_what_is_chosen_one_by_one(margin, eos):
    """By a drafter that names the best tokens and their leads itself, as those on a device do."""
    lengths, rng = set(), np.random.default_rng(1)
    for rows in rng.normal(size=(60, 6, V)).astype(np.float32):
        made = generation(GREEDY, eos=eos)
        one, other = (speculative._Chooser(made, margin, None, []) for _ in range(2))
        chosen = list(takewhile(lambda token: token is not None, map(one, rows)))
        leads = [float(np.diff(np.sort(row)[-2:])[0]) for row in rows]
        rows[:, list(other.barred)] = -np.inf
        assert other.took(np.argmax(rows, axis=1).tolist(), leads) == chosen
        assert V - 1 not in (chosen if eos == "global" else chosen[:-1])
        lengths.add(len(chosen))
    assert len(lengths) == 1 if eos == "global" and not margin else len(lengths) > 3


def test_only_plain_greedy_answers_let_the_drafter_choose():
    for more in ({"temperature": 1.0, "seed": 3}, {"presence_penalty": 1.0}, {"logit_bias": {1: 2.0}}):
        params = replace(GREEDY, **more)
        assert speculative._Chooser(generation(params), 0.0, None, []).barred is None
    assert speculative._Chooser(generation(GREEDY), 0.0, Even, []).barred is None
    thinking = generation(GREEDY, eos="reasoning", tracker=replace(TRACKER, is_open=True))
    assert speculative._Chooser(thinking, 0.0, None, []).barred == {V - 1}
    assert speculative._Chooser(generation(GREEDY), 0.0, None, []).barred == set()


def test_a_perfect_drafter_keeps_all_and_a_stranger_is_paused():
    *_, twin = speculated(GREEDY, TWIN, 4, eos="global", budget=61)
    assert twin.accepted == twin.drafted == 48 and twin.trials == 12
    *_, stranger = speculated(GREEDY, STRANGER, 4, eos="global", budget=200)
    assert stranger.pace.paused > 0 and stranger.trials < 60


def test_stopping_in_a_trial_leaves_state_and_answer_in_accord():
    expected, *_ = plain(GREEDY, eos="global", budget=40)
    for taken in range(1, 40):
        made, state = generation(GREEDY, eos="global", budget=40), TARGET.new_state()
        steps = run(Speculator(Stepwise(TARGET, state), ToyDrafter(COUSIN), 5), made)
        seen = [next(steps).token for _ in range(taken)]
        steps.close()
        assert seen == expected.generated[:taken]
        assert made.generated == expected.generated[: len(made.generated)]
        assert state.tokens == [*made.prompt, *made.generated[:-1]]


def test_end_tokens_are_judged_and_never_consumed():
    drafted = 0
    for seed in range(20):
        model = Toy(seed, end=1.5)
        expected, at, _ = plain(GREEDY, model)
        found, state, _, speculator = speculated(GREEDY, model, 8, model)
        assert (found.finish, found.generated, state.tokens) == (expected.finish, expected.generated, at.tokens)
        assert V - 1 not in model.consumed
        if found.finish is Finish.STOP:
            assert speculator.accepted == speculator.drafted == len(found.generated)
            drafted += speculator.drafted
    assert drafted > 20


class Rows(Toy):
    """A model that consumes several trials in one call, and notes how many."""

    def __init__(self, seed):
        super().__init__(seed)
        self.together = []

    def verify_rows(self, states, tokens):
        self.together.append(len(states))
        return [[self.step(state, token) for token in part] for state, part in zip(states, tokens, strict=True)]


class Tried(Stepwise):
    """A target whose model has consumed the trial already."""

    def tried(self, rows, names):
        tokens, n = self.state.tokens.copy(), len(rows)
        self.state.truncate(len(tokens) - n)
        return self.verify(tokens[-n:], names)


@pytest.mark.parametrize(("model", "target"), [(TARGET, Stepwise), (Rows(0), Tried)], ids=["one by one", "in one program"])
def test_answers_that_are_verified_together_are_what_they_are_alone(model, target):
    """Each with a history, bounds of its trials, and prompts that are fed a chunk at a time."""
    drafter, answers = ToyDrafter(COUSIN), [generation(GREEDY, prompt=[n, 1, 2], budget=12 + n) for n in range(3)]
    speculators = [Speculator(target(model, model.new_state()), drafter, 4) for _ in answers]
    for speculator, made in zip(speculators, answers, strict=True):
        speculator.prefill(made.prompt[:2])
        speculator.prefill(made.prompt[2:])
        made.accept(speculator.state.logits)
    while going := [(s, made) for s, made in zip(speculators, answers, strict=True) if made.finish is None]:
        trials = [s.prepare(made, most) for most, (s, made) in enumerate(going, 1)]
        assert all(len(trial.tokens) <= 1 + most for most, trial in enumerate(trials, 1))
        seen = verify_together([s for s, _ in going], trials)
        for (s, made), trial, (rows, taps) in zip(going, trials, seen, strict=True):
            s.settle(made, trial, rows, taps)
    for n, (speculator, made) in enumerate(zip(speculators, answers, strict=True)):
        expected, at, _ = plain(GREEDY, prompt=[n, 1, 2], budget=12 + n)
        assert (made.generated, speculator.state.tokens) == (expected.generated, at.tokens)
        assert speculator.accepted > 0 and speculator.draft.tokens == at.tokens
    assert target is Stepwise or 3 in model.together


def test_width_is_what_the_drafter_can():
    with pytest.raises(ValueError, match="1 to 8 drafts with this drafter, got 9"):
        Speculator(Stepwise(TARGET, TARGET.new_state()), ToyDrafter(TWIN), 9)


def test_a_mask_keeps_the_drafter_inside_a_grammar():
    """Even tokens only: the drafter proposes none that the grammar excludes, and the answer is the one without drafts."""
    odd = np.arange(V) % 2 == 1
    expected, *_ = plain(GREEDY, guidance=Even(), budget=30)
    found, _, _, speculator = speculated(GREEDY, TWIN, 4, guidance=Even(), mask=lambda drafts: odd, budget=30)
    assert found.generated == expected.generated and not any(token % 2 for token in found.generated)
    assert speculator.accepted == speculator.drafted > 0
    unmasked, _, _, speculator = speculated(GREEDY, TWIN, 4, guidance=Even(), budget=30)
    assert unmasked.generated == expected.generated and speculator.accepted < speculator.drafted


class Even:
    """A guidance that lets even tokens pass."""

    in_answer = complete = False

    def forced(self, reasoning_tokens):
        return None

    def banned(self, text):
        return np.arange(V) % 2 == 1

    def accept(self, token, reasoning_open):
        assert token % 2 == 0


def exact(params, length, **kwargs):
    """Token sequences of an answer of at most ``length`` tokens → their probability without drafts, by enumeration."""
    found, open_ends = {}, [((), 1.0)]
    while open_ends:
        tokens, weight = open_ends.pop()
        made = generation(params, budget=length, **kwargs)
        counts = Counts(V, made.prompt)
        tracker = made.tracker
        for token in tokens:
            counts.add(token)
            tracker = tracker and tracker.after(Letters().token_bytes(token))
        banned = made.policy.masked(tracker is not None and tracker.is_open)
        p = distribution(TARGET.row([*made.prompt, *tokens]), params, counts=counts, banned=banned)
        for token in np.flatnonzero(p).tolist():
            longer = (*tokens, token)
            if token == V - 1 or len(longer) == length:
                found[longer] = weight * p[token]
            else:
                open_ends.append((longer, weight * p[token]))
    return found


def sampled_answers(params, drafter, seeds, length, **kwargs):
    """How often each token sequence came, its end token included."""
    counts = {}
    for seed in seeds:
        made, _, steps, _ = speculated(replace(params, seed=seed), drafter, length, budget=length, **kwargs)
        tokens = tuple(step.token for step in steps)
        assert made.finish is not None
        counts[tokens] = counts.get(tokens, 0) + 1
    return counts


WHOLE = [
    (SamplingParams(temperature=1.0, top_k=3, min_p=0), COUSIN, {}),
    (SamplingParams(temperature=0.8, top_k=3, min_p=0, repetition_penalty=1.3), STRANGER, {}),
    (SamplingParams(temperature=1.5, top_k=3, min_p=0, presence_penalty=1.0, logit_bias={2: 1.0}), COUSIN,
     {"eos": "reasoning", "tracker": replace(TRACKER, is_open=True)}),
]  # fmt: skip


def whole_answers(params, drafter, how, n):
    """p value of n answers of three tokens against their joint distribution; rare ones are put together."""
    expected = exact(params, 3, **how)
    counts = sampled_answers(params, drafter, range(n), 3, **how)
    assert counts.keys() <= expected.keys()
    common = [tokens for tokens, p in expected.items() if p * n >= 8]
    p = np.array([expected[tokens] for tokens in common])
    seen = np.array([counts.get(tokens, 0) for tokens in common])
    rest = 1 - p.sum()
    if rest * n >= 8:
        p, seen = np.append(p, rest), np.append(seen, n - seen.sum())
    assert len(p) > 5
    return p_value(seen, p / p.sum())


@pytest.mark.parametrize("case", range(len(WHOLE)))
def test_whole_answers_have_the_joint_distribution_without_drafts(case):
    assert whole_answers(*WHOLE[case], 700) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(WHOLE)))
def test_many_whole_answers_have_the_joint_distribution_without_drafts(case):
    assert whole_answers(*WHOLE[case], 20_000) > 0.01


def test_the_same_seed_gives_the_same_answer_whatever_the_batch():
    params = SamplingParams(temperature=1.0, seed=4, min_p=0)
    first, *_ = speculated(params, COUSIN, 3, eos="global")
    again, *_ = speculated(params, COUSIN, 3, eos="global")
    other, *_ = speculated(params, COUSIN, 3, eos="global", choice=1)
    assert first.generated == again.generated != other.generated


@given(
    seed=st.integers(0, 10**6),
    drafter=st.sampled_from([TWIN, COUSIN, STRANGER]),
    width=st.integers(1, 8),
    setting=st.sampled_from(range(len(SETTINGS))),
    eos=st.sampled_from(["model", "global"]),
)
def test_a_seed_that_repeats_gives_the_answer_without_drafts(seed, drafter, width, setting, eos):
    params = replace(SETTINGS[setting], seed=seed, repeats=True)
    expected, at, steps = plain(params, eos=eos)
    found, state, ours, speculator = speculated(params, drafter, width, eos=eos)
    assert (found.generated, found.finish, ours) == (expected.generated, expected.finish, steps)
    assert state.tokens == at.tokens
    assert drafter is not TWIN or speculator.accepted == speculator.drafted


def test_a_seed_that_repeats_keeps_drafts_where_the_drafter_is_alike():
    kept = [0, 0]
    for seed in range(20):
        for n, repeats in enumerate((False, True)):
            *_, speculator = speculated(replace(SETTINGS[0], seed=seed, repeats=repeats), COUSIN, 1, eos="global", budget=40)
            kept[n] += speculator.accepted
    assert kept[1] > kept[0] / 2 > 50
