"""Matrices side by side are each what it would be by itself, and one product gives what several give."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax
import jax.numpy as jnp

from ds4jax import weights
from ds4jax.weights import Beside, dequantize, experts, fit_beside, linear, linears, pack, pack_beside, select_layer
from ds4ref.quants import BLOCK, TensorType

from .test_weights import CODES, KINDS, name_of, normal_tensor, same_bits

ROWS = {"q": 96, "k": 32, "v": 37}
LAYERS, EXPERTS = 2, 4


def columns(type):
    """Sixteen blocks, so that the words of several are put together; 1024 columns at most."""
    return min(1024, 16 * BLOCK[type][0]) if BLOCK[type][0] > 1 else 48


def made(type):
    """Of every layer the tensors by name."""

    def tensor(layer, n, rows):
        return normal_tensor(type, (rows, columns(type)), seed=10 * layer + n)

    return [{name: tensor(layer, n, rows) for n, (name, rows) in enumerate(ROWS.items())} for layer in range(LAYERS)]


def close(got, expected):
    """But for the order of sums."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("type", KINDS, ids=name_of)
def test_each_is_what_it_would_be_alone(type):
    layers = made(type)
    assert fit_beside(list(layers[0].values()), "cpu")
    packed = pack_beside(layers)
    for layer, tensors in enumerate(layers):
        held = select_layer({"all": packed, "norm": jnp.arange(LAYERS)}, layer)
        assert held.pop("norm") == layer and list(held) == list(ROWS)
        for name, tensor in tensors.items():
            assert held[name].shape == tensor.shape
            same_bits(dequantize(held[name]), tensor.dequantize())


@pytest.mark.parametrize("type", KINDS, ids=name_of)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_one_product_gives_what_several_give(type, tokens, monkeypatch):
    layers = made(type)
    packed, counted = pack_beside(layers), []
    monkeypatch.setattr(weights, "SMALL", 0)
    monkeypatch.setattr(weights, "linear", lambda w, x: counted.append(w.rows) or linear(w, x))
    x = np.random.default_rng(1).standard_normal((1, tokens, columns(type))).astype(np.float32)
    held = select_layer({"all": packed}, 1)
    single = [pack(layers[1][name]) for name in ROWS]
    expected = [linear(w, x) for w in single]
    for got, alone in zip(linears([held[name] for name in ROWS], x), expected, strict=True):
        assert got.shape == alone.shape
        close(got, alone)
    assert counted == [sum(ROWS.values())]
    for names, products in (("kv", [69]), ("kq", [32, 96]), ("qv", [96, 37])):  # others than neighbours are read apart
        counted.clear()
        rows = linears([held[name] for name in names], x)
        assert counted == products
        for got, name in zip(rows, names, strict=True):
            close(got, expected[list(ROWS).index(name)])
    counted.clear()
    linears(single, x)
    assert counted == list(ROWS.values())


def test_what_lies_side_by_side():
    q8, q4 = (normal_tensor(type, (64, 256)) for type in (TensorType.Q8_0, TensorType.Q4_K))
    odd, wide = normal_tensor(TensorType.Q8_0, (20, 256)), normal_tensor(TensorType.Q8_0, (64, 512))
    stack, vector = normal_tensor(TensorType.Q8_0, (3, 64, 256)), normal_tensor(TensorType.F32, (64,))
    integers = replace(normal_tensor(TensorType.F32, (64, 256)), type=TensorType.I32)
    assert fit_beside([q8, q8], "cpu") and fit_beside([q8, q8, odd], "wide") and fit_beside([stack, stack], "lean")
    for pair in ([q8, q4], [odd, q8], [q8, wide], [q8, stack], [vector, vector], [integers, integers]):
        assert not fit_beside(pair, "cpu")
    assert not fit_beside([q8, q8], "gpu")


def test_bytes_count_once():
    packed = pack_beside(made(TensorType.Q8_0))
    assert isinstance(packed, Beside) and weights.nbytes({"all": packed}) == weights.nbytes(packed.whole)
    alone = sum(weights.nbytes(pack(t)) for layer in made(TensorType.Q8_0) for t in layer.values())
    assert alone <= weights.nbytes(packed) <= 1.05 * alone


@pytest.mark.parametrize("type", CODES, ids=name_of)
@pytest.mark.parametrize("at_once", [0, 1 << 30])
def test_experts_of_one_token(type, at_once, monkeypatch):
    """Side by side or apart, one at a time or all at once: those of many tokens, which are computed one by one."""
    monkeypatch.setattr(weights, "PARTIAL_SUMS", at_once)
    names, K = ("gate", "up"), columns(type)
    pairs = [{name: normal_tensor(type, (EXPERTS, 64, K), seed=n) for n, name in enumerate(names)}]
    down = pack(normal_tensor(TensorType.F32, (EXPERTS, 48, 64), seed=5))
    beside = select_layer({"both": pack_beside(pairs)}, 0)
    apart = {name: pack(pairs[0][name]) for name in names}
    rng = np.random.default_rng(3)
    h = rng.standard_normal((2, K)).astype(np.float32)
    chosen, mix = np.array([[3, 1], [1, 0]]), rng.random((2, 2)).astype(np.float32)
    own = (jnp.asarray(rng.standard_normal((EXPERTS, 64)).astype(np.float32)),)

    def act(g, u, scale):
        return jnp.tanh(g) * scale + u

    def computed(w, rows):
        return experts(jnp.asarray(h[rows]), jnp.asarray(chosen[rows]), jnp.asarray(mix[rows]), *w, down, act, own)

    expected = computed((apart["gate"], apart["up"]), slice(2))
    for w in (apart, beside):
        for row in range(2):
            got = jax.jit(lambda w, row=row: computed((w["gate"], w["up"]), slice(row, row + 1)))(w)
            close(got[0], expected[row])
