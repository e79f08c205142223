import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from ds4ref.sampling import Counts, SamplingParams, distribution, draw, fresh_seed, largest, logprobs, sample, uniform

INF = math.inf
PLAIN = {"min_p": 0.0}


def history(vocabulary, prompt=(), generated=()):
    counts = Counts(vocabulary, prompt)
    for token in generated:
        counts.add(token)
    return counts


def stepwise(logits, p, prompt=(), generated=(), banned=()):
    """The definition, one step after another over a dictionary id → number; None where an edge is too close to call."""
    x = {i: float(v) for i, v in enumerate(logits) if i not in banned and p.logit_bias.get(i) != -100 and v > -INF}
    times = Counter(generated)
    for i in x:
        x[i] += p.logit_bias.get(i, 0)
        if i in times or i in prompt:
            x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
        x[i] -= p.frequency_penalty * times[i] + p.presence_penalty * (i in times)
    order = sorted(x, key=lambda i: (-x[i], i))
    if p.temperature == 0:
        return {order[0]: 1.0}
    best = x[order[0]]
    w = {i: math.exp((x[i] - best) / p.temperature) for i in order}
    if p.top_k > 0:
        order = order[: p.top_k]
    total, mass = math.fsum(w[i] for i in order), 0.0
    for n, i in enumerate(order):  # the shortest prefix that reaches top_p
        mass += w[i] / total
        if p.top_p < 1 and mass >= p.top_p - 1e-12:
            if mass < p.top_p + 1e-12 and n + 1 < len(order):
                return None
            order = order[: n + 1]
            break
    if any(0 < abs(w[i] - p.min_p) < 1e-12 for i in order):
        return None
    order = [i for i in order if w[i] >= p.min_p and w[i] > 0]
    total = math.fsum(w[i] for i in order)
    return {i: w[i] / total for i in order}


V = 9
tokens = st.lists(st.integers(0, V - 1), max_size=6)
levels = st.one_of(st.integers(-4, 4).map(float), st.floats(-6, 6, width=32), st.just(-INF))
fractions = st.one_of(st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.floats(0, 1))
some_params = st.builds(
    SamplingParams,
    temperature=st.one_of(st.sampled_from([0.0, 0.5, 1.0, 2.0, 100.0]), st.floats(0.05, 5)),
    top_k=st.integers(-1, V + 2),
    top_p=fractions,
    min_p=fractions,
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.5, 3)),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.one_of(st.just(-100.0), st.floats(-3, 3)), max_size=3),
)


@given(st.lists(levels, min_size=V, max_size=V), some_params, tokens, tokens, tokens)
def test_equals_the_definition_step_by_step(logits, params, prompt, generated, banned):
    left = [i for i in range(V) if logits[i] > -INF and i not in banned]
    if all(params.logit_bias.get(i) == -100 for i in left):
        params = replace(params, logit_bias={})  # biases that leave nothing are not followed: a grammar may demand the token
    if not left:
        with pytest.raises(ValueError, match="no token is left"):
            distribution(logits, params, counts=history(V, prompt, generated), banned=banned)
        return
    want = stepwise(logits, params, prompt, generated, banned)
    assume(want is not None)
    got = distribution(np.array(logits, np.float32), params, counts=history(V, prompt, generated), banned=banned)
    assert got.dtype == np.float64 and got.shape == (V,)
    assert set(np.flatnonzero(got)) == set(want)
    assert_allclose(got, [want.get(i, 0) for i in range(V)], rtol=1e-9, atol=0)


def support(logits, **options):
    return np.flatnonzero(distribution(np.log(logits), SamplingParams(**{**PLAIN, **options}))).tolist()


def test_the_nucleus_includes_the_token_that_reaches_its_mass():
    p = [0.125, 0.5, 0.25, 0.125]
    assert support(p, top_p=0.5) == [1]
    assert support(p, top_p=0.501) == [1, 2]
    assert support(p, top_p=0.75) == [1, 2]
    assert support(p, top_p=0.875) == [0, 1, 2]  # of equal tokens, the lower id
    assert support(p, top_p=0) == [1]
    assert support(p, top_p=1) == [0, 1, 2, 3]
    assert support([1, 1, 1, 1], top_p=0) == [0]


def test_top_k_and_min_p_edges():
    p = [0.125, 0.5, 0.25, 0.125]
    assert support(p, top_k=3) == [0, 1, 2]
    assert support(p, top_k=1) == [1]
    assert support(p, top_k=-1) == support(p, top_k=0) == support(p, top_k=4) == support(p, top_k=5) == [0, 1, 2, 3]
    assert support([4, 1, 2, 1], min_p=0.25) == [0, 1, 2, 3]
    assert support([4, 1, 2, 1], min_p=0.26) == [0, 2]
    assert support([4, 1, 4, 1], min_p=1) == [0, 2]
    assert SamplingParams().min_p == 0.05


def test_order_of_steps():
    """Each pair of neighbours would give another answer if exchanged."""
    # A banned token has no part in top-k, top-p or the best probability.
    assert np.flatnonzero(distribution([9, 1, 0.5, 0], SamplingParams(top_k=1), banned=[0])).tolist() == [1]
    # Bias before the repetition penalty: (1 + 2) / 3 = 1; the other order gives 1/3 + 2 and token 0 wins.
    both = SamplingParams(temperature=0, logit_bias={0: 2}, repetition_penalty=3)
    assert sample([1, 1.5], both, 0, counts=history(2, [0])) == 1
    # The repetition penalty before the others: 4/2 − 2 = 0; the other order gives (4 − 2)/2 = 1.
    twice = SamplingParams(repetition_penalty=2, presence_penalty=2, **PLAIN)
    assert_allclose(distribution([4, 0], twice, counts=history(2, [], [0])), [0.5, 0.5])
    # Penalties before the temperature: (2 − 1)/0.5.
    cold = SamplingParams(temperature=0.5, presence_penalty=1, **PLAIN)
    p = distribution([2, 0], cold, counts=history(2, [], [0]))
    assert_allclose(np.log(p[0] / p[1]), 2)
    # Temperature before top-p and min-p: at 1 the best token has 0.88 of the mass, at 4 only 0.62.
    assert support(np.exp([2, 0]), top_p=0.7) == [0]
    assert support(np.exp([2, 0]), top_p=0.7, temperature=4) == [0, 1]
    assert support(np.exp([2, 0]), min_p=0.3) == [0]
    assert support(np.exp([2, 0]), min_p=0.3, temperature=4) == [0, 1]
    # Top-k before top-p: of the two kept, the first has 0.6; of all, 0.3.
    assert support([0.3, 0.2, 0.17, 0.17, 0.16], top_p=0.55) == [0, 1, 2]
    assert support([0.3, 0.2, 0.17, 0.17, 0.16], top_p=0.55, top_k=2) == [0]
    # Top-p before min-p: the mass of what min-p removes counts; the other order would give the first 0.53 and keep it alone.
    assert support([0.32, 0.28] + [0.04] * 10, top_p=0.5, min_p=0.5) == [0, 1]


def test_penalties():
    x = np.array([1.0, -1.0, 2.0, 0.5])
    counts = history(4, [0, 1], [2, 2, 0])

    def adjusted(**options):
        return np.log(distribution(x, SamplingParams(**PLAIN, **options), counts=counts))

    def moved(want, **options):
        got = adjusted(**options)
        assert_allclose(got - got[3], np.array(want) - want[3], atol=1e-12)

    moved([1 - 0.5, -1, 2 - 0.5, 0.5], presence_penalty=0.5)  # generated only
    moved([1 - 0.5, -1, 2 - 1.0, 0.5], frequency_penalty=0.5)  # per time
    moved([1 + 0.5, -1, 2 + 1.0, 0.5], frequency_penalty=-0.5)
    moved([0.5, -2, 1, 0.5], repetition_penalty=2)  # prompt and generated, whatever the sign
    with pytest.raises(ValueError, match="need the counts"):
        distribution(x, SamplingParams(presence_penalty=1))


def test_counts_pass_over_ids_outside_the_vocabulary():
    counts = history(3, [-1, 7, 2], [5, -2, 0])
    assert counts.in_prompt.tolist() == [False, False, True] and counts.generated.tolist() == [1, 0, 0]


def test_greedy():
    greedy = SamplingParams(temperature=0)
    assert sample([1, 3, 3, 2], greedy, 0) == 1
    assert sample([1, 3, 3, 2], greedy, 0, banned=[1]) == 2
    assert sample([1, 3, 3, 2], SamplingParams(temperature=0, logit_bias={1: -100, 2: -100}), 0) == 3
    assert distribution([1, 3, 3, 2], greedy).tolist() == [0, 1, 0, 0]
    assert sample([0, 0, 0], SamplingParams(temperature=0, top_k=2, top_p=0, min_p=1), 0) == 0


def test_extreme_logits():
    p = distribution([-INF, 3e38, -3e38, 3e38], SamplingParams())
    assert p.tolist() == [0, 0.5, 0, 0.5]
    assert distribution([1e308, -1e308, 1e308], SamplingParams(temperature=1e-300)).tolist() == [0.5, 0, 0.5]
    assert distribution([0.0, -INF], SamplingParams(top_k=2, min_p=0)).tolist() == [1, 0]
    assert sample([-1e30, -INF], SamplingParams(seed=1), 0) == 0
    for theta in (1e-300, 1e300):
        harsh = SamplingParams(repetition_penalty=theta)
        for x in ([1e30, -1e30], [-1e30, -1e30]):
            p = distribution(x, harsh, counts=history(2, [0, 1]))
            assert np.isfinite(p).all() and abs(p.sum() - 1) < 1e-12
    # A bias cannot revive what the mask has removed.
    assert distribution([1, 2], SamplingParams(logit_bias={1: 100}), banned=[1]).tolist() == [1, 0]


@pytest.mark.parametrize("call", [lambda x: distribution(x, SamplingParams()), lambda x: logprobs(x, 0)])
def test_bad_logits_are_refused(call):
    for x, message in [
        ([0, math.nan], r"^logits must be finite or -inf, got nan for token 1$"),
        ([INF, 0], r"^logits must be finite or -inf, got inf for token 0$"),
        ([[0.0, 1.0]], r"^logits must be one row of at least one number, got shape \(1, 2\)$"),
        ([], r"got shape \(0,\)$"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(x)


def test_bad_ids_are_refused():
    with pytest.raises(ValueError, match=r"^logit_bias must name token ids below 3, got 3$"):
        distribution([0, 0, 0], SamplingParams(logit_bias={0: 1, 3: 1}))
    for bad in (-1, 3):
        with pytest.raises(ValueError, match=rf"^a banned token id must be from 0 to 2, got {bad}$"):
            distribution([0, 0, 0], SamplingParams(), banned=[bad])
    with pytest.raises(ValueError, match="no token is left to sample"):
        sample([0, -INF, 0], SamplingParams(temperature=0), 0, banned=[0, 2])
    with pytest.raises(ValueError, match=r"^banned must have one entry for each of 3 tokens, got shape \(2,\)$"):
        sample([0, 0, 0], SamplingParams(temperature=0), 0, banned=np.zeros(2, dtype=bool))


def test_a_mask_bans_as_ids_do_and_a_bias_cannot_ban_the_last_token():
    mask = np.array([False, True, True])
    for params in (SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams(temperature=0, logit_bias={0: -100})):
        assert sample([0, 9, 9], params, 0, banned=mask) == sample([0, 9, 9], params, 0, banned=[1, 2]) == 0


@pytest.mark.parametrize(
    "field, good, bad",
    [
        ("temperature", [0, 1, 100, 0.5], [-0.1, 100.5, math.nan, INF, "1", True, None, 10**400]),
        ("top_k", [-1, 0, 1, 10**9], [-2, 1.5, True, "4", None]),
        ("top_p", [0, 0.5, 1], [-0.01, 1.01, math.nan, "1", True]),
        ("min_p", [0, 0.5, 1], [-0.01, 1.01, math.nan, "1", True]),
        ("seed", [None, 0, -(2**63), 2**64 - 1], [-(2**63) - 1, 2**64, 1.0, True, "7"]),
        ("presence_penalty", [-2, 0, 2], [-2.1, 2.1, math.nan, "0"]),
        ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1, math.nan, "0"]),
        ("repetition_penalty", [1e-9, 1, 50], [0, -1, math.nan, INF, "1", True]),
        ("logit_bias", [{}, {0: -100, 5: 100}], [{-1: 0}, {"1": 0}, {1: 101}, {1: math.nan}, {1: True}, [1], None]),
        ("logprobs", [True, False], [1, None, "true"]),
        ("top_logprobs", [0], [1, -1, 21, 1.0, True]),
    ],
)
def test_fields_are_validated(field, good, bad):
    for value in good:
        assert getattr(SamplingParams(**{field: value}), field) == value
    for value in bad:
        with pytest.raises(ValueError, match=field) as refused:
            SamplingParams(**{field: value})
        assert "\n" not in str(refused.value)
    assert SamplingParams(logprobs=True, top_logprobs=20).top_logprobs == 20


def philox4x64(key, counter, rounds=10):
    """Salmon et al. 2011, on Python integers."""
    mask, (k0, k1), (c0, c1, c2, c3) = 2**64 - 1, key, counter
    for _ in range(rounds):
        a, b = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (b >> 64) ^ c1 ^ k0, b & mask, (a >> 64) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return c0, c1, c2, c3


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 15), st.integers(0, 2**40))
def test_random_numbers_are_philox(seed, choice, position):
    word = philox4x64((seed % 2**64, choice), (position + 1, 0, 0, 0))[0]
    assert uniform(seed, choice, position) == (word >> 11) / 2**53 == uniform(seed, choice, position)


def chi_square(observed, expected):
    """(statistic, 1 % critical value): Wilson & Hilferty 1931, good to 0.3 % from 3 degrees of freedom up."""
    df = len(expected) - 1
    critical = df * (1 - 2 / (9 * df) + 2.3263 * math.sqrt(2 / (9 * df))) ** 3
    return float(np.sum((observed - expected) ** 2 / expected)), critical


def test_random_numbers_look_independent():
    """Uniform over positions, choices and seeds, and no relation between neighbours: 16 × 16 cells of pairs each."""
    n = 20_000
    streams = {
        "positions": [uniform(3, 0, i) for i in range(n)],
        "choices": [uniform(3, i % 16, i // 16) for i in range(n)],
        "seeds": [uniform(i, 0, 5) for i in range(n)],
    }
    for name, u in streams.items():
        u = np.array(u)
        assert u.min() >= 0 and u.max() < 1 and len(set(u)) == n
        cells = (u[:-1] * 16).astype(int) * 16 + (u[1:] * 16).astype(int)
        statistic, critical = chi_square(np.bincount(cells, minlength=256), np.full(256, (n - 1) / 256))
        assert statistic < critical, name


LOGITS = np.random.default_rng(0).normal(size=24) * 1.5
CASES = {
    "temperature": SamplingParams(temperature=1.4, **PLAIN),
    "top-k": SamplingParams(top_k=9, **PLAIN),
    "top-p": SamplingParams(top_p=0.8, **PLAIN),
    "min-p": SamplingParams(min_p=0.1),
    "all": SamplingParams(
        temperature=0.8, top_k=15, top_p=0.95, min_p=0.02, presence_penalty=0.3, frequency_penalty=0.2,
        repetition_penalty=1.2, logit_bias={3: 1.5, 4: -100},
    ),
}  # fmt: skip
COUNTS = history(24, [1, 2, 3], [5, 5, 8])
U = np.array([uniform(11, 0, i) for i in range(50_000)])


def statistic_of(drawn, probs):
    """χ² of drawn tokens; cells that expect fewer than 5 are merged; nothing outside the support may occur."""
    observed, expected = np.bincount(drawn, minlength=len(probs)), probs * len(drawn)
    assert observed[probs == 0].sum() == 0
    small = expected < 5
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    return chi_square(observed[expected > 0], expected[expected > 0])


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_distribution(case):
    probs = distribution(LOGITS, CASES[case], counts=COUNTS, banned=[7])
    statistic, critical = statistic_of([draw(probs, u) for u in U], probs)
    assert statistic < critical


def test_the_chi_square_notices_a_wrong_sampler():
    probs = distribution(LOGITS, CASES["temperature"])
    slightly_warmer = distribution(LOGITS, SamplingParams(temperature=1.5, **PLAIN))
    statistic, critical = statistic_of([draw(slightly_warmer, u) for u in U], probs)
    assert statistic > critical


def test_sample_follows_the_distribution_and_the_seed_law():
    params = SamplingParams(temperature=1.2, top_p=0.9, seed=5)
    probs = distribution(LOGITS, params)
    drawn = [sample(LOGITS, params, i) for i in range(8000)]
    statistic, critical = statistic_of(drawn, probs)
    assert statistic < critical
    order = np.random.default_rng(1).permutation(8000)[:500]  # any order, alone or again: the same token
    assert [sample(LOGITS, params, int(i)) for i in order] == [drawn[i] for i in order]
    same = np.sum(probs**2)  # the chance that independent draws agree
    for other in (
        [sample(LOGITS, params, i, choice=1) for i in range(2000)],
        [sample(LOGITS, SamplingParams(temperature=1.2, top_p=0.9, seed=6), i) for i in range(2000)],
        drawn[1:2001],
    ):
        agree = np.mean(np.array(other) == drawn[:2000])
        assert abs(agree - same) < 4 * math.sqrt(same * (1 - same) / 2000)
    assert drawn[:50] == [sample(LOGITS.astype(np.float64), params, i) for i in range(50)]


def test_seeds():
    ask = SamplingParams(seed=-1), SamplingParams(seed=2**64 - 1)
    assert len({tuple(sample(LOGITS, p, i) for i in range(20)) for p in ask}) == 1  # equal modulo 2⁶⁴
    with pytest.raises(ValueError, match="seed must be chosen"):
        sample(LOGITS, SamplingParams(), 0)
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    for seed in seeds:
        SamplingParams(seed=seed)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0, 1, exclude_max=True))
def test_draw_inverts_the_cumulative_sum(weights, u):
    assume(sum(weights) > 0)
    token = draw(np.array(weights), u)
    assert weights[token] > 0
    below, total = sum(weights[:token]), sum(weights)
    assert below <= u * total + 1e-12 and u * total - 1e-12 <= below + weights[token]


def test_draw_at_the_ends():
    assert draw(np.array([0, 0.5, 0.5, 0]), 0.0) == 1
    assert draw(np.array([0, 0.5, 0.5, 0]), 0.5) == 2
    assert draw(np.array([0, 0.1, 0.2, 0]), math.nextafter(1, 0)) == 2


@given(st.lists(st.integers(-3, 3).map(float) | st.just(-INF), min_size=1, max_size=30), st.integers(1, 30))
def test_largest_equals_a_full_sort(x, k):
    k = min(k, len(x))
    assert largest(np.array(x), k).tolist() == sorted(range(len(x)), key=lambda i: (-x[i], i))[:k]


def test_logprobs():
    p = np.array([0.1, 0.4, 0.1, 0.4])
    chosen, top = logprobs(np.log(p) + 7, 2, 3)
    assert_allclose(chosen, math.log(0.1))
    assert [i for i, _ in top] == [1, 3, 0]
    assert_allclose([v for _, v in top], np.log([0.4, 0.4, 0.1]))
    assert logprobs(np.log(p), 0) == (pytest.approx(math.log(0.1)), [])
    assert len(logprobs(np.log(p), 0, 20)[1]) == 4


def test_logprobs_are_those_after_the_stop_mask():
    chosen, top = logprobs(np.log([0.5, 0.25, 0.25]), 1, 3, masked={0})
    assert_allclose(chosen, math.log(0.5))
    assert [i for i, _ in top] == [1, 2]
    assert logprobs(np.log([0.5, 0.25, 0.25]), 0, 1, masked={0})[0] == -INF
    assert logprobs([0.0, 0.0], 0, 2, masked={0, 1}) == (-INF, [])
    with pytest.raises(ValueError, match="chosen token id must be from 0 to 1, got 2"):
        logprobs([0.0, 0.0], 2)


def test_logprobs_of_extreme_logits():
    chosen, top = logprobs(np.array([3e38, -3e38, -INF], np.float32), 1, 3)
    assert chosen < -5e38 and top[0] == (0, 0.0) and [i for i, _ in top] == [0, 1]
    assert logprobs([1e308, -1e308], 1, 2) == (-INF, [(0, 0.0)])


@given(st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=20), st.sets(st.integers(0, 19), max_size=5))
def test_logprobs_equal_the_untouched_distribution(x, masked):
    masked = {i for i in masked if i < len(x)}
    assume(len(masked) < len(x))
    free = distribution(x, SamplingParams(**PLAIN), banned=masked)
    got = [logprobs(x, i, masked=masked)[0] for i in range(len(x))]
    assert_allclose(np.exp(got), free, rtol=1e-9)


def test_inputs_are_left_alone():
    x, bias = np.arange(5.0), {1: -100.0}
    distribution(x, SamplingParams(logit_bias=bias, repetition_penalty=2), counts=history(5, [0]), banned=[4])
    logprobs(x, 0, masked=[4])
    assert_array_equal(x, np.arange(5.0))
    assert bias == {1: -100.0}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 1e9
    assert params.logit_bias == {1: -100.0}
