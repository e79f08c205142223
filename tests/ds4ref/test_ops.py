"""The shared blocks against brute force or the textbook form, and their dtypes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ds4ref import attention, hyper, indexer, moe, ops, recurrent, rounding
from ds4ref.state import Ring, Rows

RNG = np.random.default_rng(0)


def table(mantissa_bits, exponent_bits, largest):
    """Every finite value of a small float format with bias 2^(e−1) − 1, in code order (even codes at even indices)."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(2 ** (mantissa_bits + exponent_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits
        values.append((1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias))
    return np.array([v for v in values if v <= largest])


def nearest_even_code(x, values):
    distance = np.abs(values - abs(x))
    candidates = np.flatnonzero(distance == distance.min())
    return np.copysign(values[min(candidates, key=lambda c: c % 2)], x)


@pytest.mark.parametrize(
    ("round_value", "values"), [(rounding.round_e4m3, table(3, 4, 448)), (rounding.round_e2m1, table(1, 2, 6))]
)
@given(fraction=hnp.arrays(np.float32, 8, elements=st.floats(-1, 1, width=32)))
def test_small_floats_round_to_the_nearest_even_code(round_value, values, fraction):
    halfway = (values[:-1] + values[1:]) / 2
    x = np.concatenate([fraction * values.max(), fraction * 2.0**-9, halfway, values]).astype(np.float32)
    assert np.array_equal(round_value(x), [nearest_even_code(v, values) for v in x.astype(float)])


def test_e2m1_is_the_published_list():
    assert table(1, 2, 6).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_block_scales_are_the_next_power_of_two():
    x = np.array([[448.0, 1.0, 449.0, 1.0, 0.0, 0.0]], np.float32)
    assert rounding.round_blocks(x, 2, 448, 1e-4, lambda v: v * 0 + 1).tolist() == [[1, 1, 2, 2, 2.0**-22, 2.0**-22]]


def test_hadamard_is_the_sylvester_matrix_and_its_own_inverse():
    matrix = np.array([[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)]) / 4
    x = RNG.normal(size=(3, 16))
    assert np.allclose(rounding.hadamard(x), x @ matrix, atol=1e-12)
    assert np.allclose(rounding.hadamard(rounding.hadamard(x)), x, atol=1e-12)


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=12), st.integers(1, 12))
def test_top_k_prefers_the_lowest_index(scores, k):
    expected = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
    assert ops.top_k(np.array(scores, np.float32), k).tolist() == expected
    assert indexer.select(np.array(scores, np.float32), k).tolist() == sorted(expected)


def test_rotations_depend_on_relative_position_only():
    frequencies = ops.rope_frequencies(8, 100.0)
    q, k = RNG.normal(size=(2, 12))
    for rotate in (ops.rotate_pairs, ops.rotate_halves):
        for place in (ops.rotate_head, ops.rotate_tail):
            products = [place(q, (p + 5) * frequencies, rotate) @ place(k, p * frequencies, rotate) for p in (0, 3, 1000)]
            assert np.allclose(products, products[0])
            assert not np.isclose(products[0], q @ k)


def test_yarn_bounds_of_the_real_model():
    ramp = ops.yarn_ramp(64, 160000.0, 65536, 32.0, 1.0)
    assert np.flatnonzero(ramp > 0)[0] == 16 and np.flatnonzero(ramp == 1)[0] == 25


def test_stable_at_the_ends():
    x = np.array([-1e4, -100, 0, 100, 1e4], np.float32)
    with np.errstate(all="raise", under="ignore"):
        assert ops.sigmoid(x).tolist() == pytest.approx([0, 0, 0.5, 1, 1])
        assert ops.softplus(x).tolist() == pytest.approx([0, 0, np.log(2), 100, 1e4])
        assert ops.silu(x)[-1] == 1e4


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_is_a_softmax_average(groups):
    q, k, v = RNG.normal(size=(4, 6)), RNG.normal(size=(5, groups, 6)), RNG.normal(size=(5, groups, 3))
    sinks, bias = RNG.normal(size=4), RNG.normal(size=(4, 5))
    for h, out in enumerate(attention.attend(q, k, v, 0.3, sinks, bias)):
        g = h * groups // 4
        e = np.exp(k[:, g] @ q[h] * 0.3 + bias[h])
        assert np.allclose(out, e @ v[:, g] / (e.sum() + np.exp(sinks[h])))


def test_latent_attention_equals_its_expanded_form():
    heads, d, n, rank, width, rows = 3, 4, 2, 5, 6, 7
    q, q_rot = RNG.normal(size=(heads, d)), RNG.normal(size=(heads, n))
    latent, k_rot = RNG.normal(size=(rows, rank)), RNG.normal(size=(rows, n))
    k_b, v_b = RNG.normal(size=(heads, rank, d)), RNG.normal(size=(heads, width, rank))
    k = np.einsum("hrd,sr->shd", k_b, latent)
    k = np.concatenate([k, np.broadcast_to(k_rot[:, None], (rows, heads, n))], axis=2)
    v = np.einsum("hvr,sr->shv", v_b, latent)
    expanded = attention.attend(np.concatenate([q, q_rot], axis=1), k, v, 0.4)
    assert np.allclose(attention.attend_latent(q, q_rot, latent, k_rot, k_b, v_b, 0.4), expanded)
    plain = attention.attend_latent(q, None, latent, None, k_b, v_b, 0.4)
    assert np.allclose(plain, attention.attend(q, k[..., :d], v, 0.4))


def test_delta_rule_writes_what_it_reads():
    state = RNG.normal(size=(2, 4, 3))
    k = ops.unit_norm(RNG.normal(size=(2, 4)), 0.0)
    v = RNG.normal(size=(2, 3))
    # With β = 1, a unit key and no decay, reading the key back gives exactly the value just written.
    _, out = recurrent.delta_rule(state, k, k, v, np.ones(2), np.ones((2, 1)))
    assert np.allclose(out, v)
    decayed, _ = recurrent.delta_rule(state, k, k, v, np.zeros(2), np.full((2, 4), 0.5))
    assert np.allclose(decayed, state / 2)


def test_short_convolution_meets_the_newest_row_last():
    taps = RNG.normal(size=(5, 4))
    rows = RNG.normal(size=(9, 5))
    for t in range(9):
        held = rows[max(0, t - 3) : t + 1]
        expected = sum(taps[:, 3 - lag] * rows[t - lag] for lag in range(min(t + 1, 4)))
        assert np.allclose(recurrent.short_conv(held, taps), expected)


def test_sinkhorn_approaches_a_doubly_stochastic_matrix():
    c = hyper.sinkhorn(RNG.normal(size=(4, 4)), 50, 1e-9)
    assert np.allclose(c.sum(0), 1) and np.allclose(c.sum(1), 1, atol=1e-6)
    rough = hyper.sinkhorn(RNG.normal(size=(4, 4)) * 3, 1, 1e-9)
    assert np.allclose(rough.sum(0), 1) and not np.allclose(rough.sum(1), 1, atol=1e-2)


def test_router_bias_chooses_but_never_weighs():
    affinity = np.array([0.1, 0.5, 0.4, 0.2])
    chosen, weights = moe.route(affinity, 2, bias=np.array([1.0, 0, 0, 0]), scale=3.0)
    assert chosen.tolist() == [0, 1]
    assert np.allclose(weights, 3 * np.array([0.1, 0.5]) / 0.6)


def test_group_limit_ranks_groups_by_their_two_best():
    affinity = np.array([0.9, 0.0, 0.5, 0.5, 0.4, 0.55])
    chosen, _ = moe.route_grouped(affinity, 2, groups=3, groups_used=2, bias=np.zeros(6))
    assert sorted(chosen.tolist()) == [3, 5] or sorted(chosen.tolist()) == [2, 5]
    assert chosen.tolist() == [5, 2]


class Recorded(dict):
    """Arrays by name that remembers which were read."""

    def __init__(self, shapes):
        super().__init__({name: RNG.normal(size=shape) for name, shape in shapes.items()})
        self.names = set()

    def __getitem__(self, name):
        self.names.add(name)
        return super().__getitem__(name)

    def part(self, name, index):
        return self[name][index]


def test_every_feed_forward_reads_what_its_tensors_list():
    x = RNG.normal(size=6)
    for shapes, run in (
        (moe.dense_tensors("p.", 6, 4), moe.dense),
        (moe.shared_tensors("p.", 6, 4), moe.shared_expert),
        (moe.router_tensors("p.", 5, 6) | moe.expert_tensors("p.", 5, 6, 4), lambda *a: moe.sigmoid_experts(*a, 2)),
    ):
        w = Recorded(shapes)
        assert run(x, w, "p.").shape == (6,)
        assert w.names == set(shapes)


def test_sigmoid_experts_are_a_weighted_sum_of_the_best():
    x, scale = RNG.normal(size=6), 2.5
    w = Recorded(moe.router_tensors("", 5, 6) | moe.expert_tensors("", 5, 6, 4))
    affinity = 1 / (1 + np.exp(-w["ffn_gate_inp.weight"] @ x))
    best = sorted(range(5), key=lambda e: -(affinity[e] + w["exp_probs_b.bias"][e]))[:2]
    expected = 0
    for e in best:
        g, u = w["ffn_gate_exps.weight"][e] @ x, w["ffn_up_exps.weight"][e] @ x
        g, u = np.minimum(g, 0.3), np.clip(u, -0.3, 0.3)
        expected += scale * affinity[e] / affinity[best].sum() * (w["ffn_down_exps.weight"][e] @ (g / (1 + np.exp(-g)) * u))
    assert np.allclose(moe.sigmoid_experts(x, w, "", 2, scale, limit=0.3), expected)


def test_convolution_takes_taps_as_files_store_them():
    taps, rows = RNG.normal(size=(5, 4)), RNG.normal(size=(6, 5))
    rings = [Ring(4, (5,)).new(np.float64) for _ in range(3)]
    for t, row in enumerate(rows):
        expected = ops.silu(recurrent.short_conv(rows[max(0, t - 3) : t + 1], taps))
        for ring, shape in zip(rings, ((5, 4), (5, 1, 4), (1, 5, 1, 4)), strict=True):
            assert np.array_equal(recurrent.convolve(ring, row, taps.reshape(shape)), expected)


def test_latent_indexer_ranks_by_rectified_products_of_rotated_rows():
    heads, d, rank, width, n, k = 3, 6, 4, 5, 2, 4
    queries, key, gain, bias = (RNG.normal(size=s) for s in ((heads * d, rank), (d, width), d, d))
    mix, component, keys = RNG.normal(size=(heads, width)), Rows((d,)).new(np.float64), []

    def turned(x, position):
        z = (x[0] + 1j * x[1]) * np.exp(0.7j * position)
        return np.concatenate([[z.real, z.imag], x[n:]])

    for t in range(9):
        h, latent, angles = RNG.normal(size=width), RNG.normal(size=rank), np.array([0.7 * t])
        kept = indexer.select_by_latent(component, h, latent, (queries, key, gain, bias, mix), angles, 1e-3, k)
        raw = key @ h
        keys.append(turned((raw - raw.mean()) / np.sqrt(raw.var() + 1e-3) * gain + bias, t))
        q = [turned(row, t) for row in (queries @ latent).reshape(heads, d)]
        scores = [sum(m * max(0, row @ key_s) for m, row in zip(mix @ h, q, strict=True)) for key_s in keys]
        assert kept.tolist() == sorted(sorted(range(t + 1), key=lambda s: -scores[s])[:k])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_block_keeps_its_dtype(dtype):
    a = RNG.normal(size=(4, 4)).astype(dtype)
    state, out = recurrent.delta_rule(a[None], a[:1], a[:1], a[:1], a[0, :1], a[:1])
    results = [
        ops.rms_norm(a, a[0]), ops.layer_norm(a, a[0], a[1]), ops.unit_norm(a), ops.sigmoid(a), ops.silu(a), ops.softplus(a),
        ops.softmax(a), ops.swiglu(a[0], a, a, a, 1.0), ops.swiglu(a[0], a, a, a, 1.0, "activation"), state, out,
        ops.rotate_pairs(a, np.arange(2.0)), ops.rotate_halves(a, np.arange(2.0), 1.5), rounding.hadamard(a),
        rounding.round_blocks(a, 2, 448, 1e-4, rounding.round_e4m3), attention.attend(a, a[:, None], a[:, None], 0.5, a[0], a),
        attention.attend_latent(a, a, a, a, a[None].repeat(4, 0), a[None].repeat(4, 0), 0.5), hyper.sinkhorn(a, 3, 1e-6),
        moe.route(np.abs(a[0]), 2, a[1], 2.5)[1], recurrent.short_conv(a, a), indexer.index_scores(a, a, a[0]),
    ]  # fmt: skip
    assert {r.dtype for r in results} == {np.dtype(dtype)}
