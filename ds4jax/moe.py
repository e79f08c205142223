"""Mixture of experts for a chunk of tokens: :mod:`ds4ref.moe` over any leading axes. Letters: E experts, K chosen, F width.

``w`` is one layer's weights by their name without the block prefix (``w["ffn_gate_exps.weight"]``).
"""

import jax.numpy as jnp

from . import primitives
from . import weights as packed
from .ops import sigmoid, swiglu_activation, top_k
from .weights import linear, linears


def route(affinity, used, bias=None, scale=1.0, floor=1e-20):
    """(chosen [..., K] best first, weights [..., K]): chosen by affinity + bias, weighed by affinity."""
    chosen = top_k(affinity if bias is None else affinity + bias, used)
    return chosen, renormalise(jnp.take_along_axis(affinity, chosen, axis=-1), scale, floor)


def route_grouped(affinity, used, groups, groups_used, bias, scale=1.0, floor=1e-20):
    """:func:`route` limited to the best groups; a group's score is the sum of its two best biased affinities."""
    biased = (affinity + bias).reshape(*affinity.shape[:-1], groups, -1)
    kept = top_k(jnp.sum(primitives.top_k(biased, 2)[0], axis=-1), groups_used)
    allowed = jnp.any(kept[..., None] == jnp.arange(groups), axis=-2)
    chosen = top_k(jnp.where(allowed[..., None], biased, -jnp.inf).reshape(affinity.shape), used)
    return chosen, renormalise(jnp.take_along_axis(affinity, chosen, axis=-1), scale, floor)


def renormalise(affinity, scale=1.0, floor=1e-20):
    """Weights of the chosen experts: ``affinity / (Σ affinity + floor) · scale``."""
    return affinity / (jnp.sum(affinity, axis=-1, keepdims=True) + floor) * scale


def sigmoid_experts(x, w, used, scale=1.0, limit=0.0, clamp="gate", floor=1e-20):
    """The routed part of DeepSeek-V3's feed-forward: affinities ``σ(router x)``, chosen by affinity + bias. x: [..., D]."""
    affinity = sigmoid(linear(w["ffn_gate_inp.weight"], x))
    chosen, weights = route(affinity, used, w["exp_probs_b.bias"], scale, floor)
    return experts(x, chosen, weights, w, limit, clamp)


def experts(x, chosen, weights, w, limit=0.0, clamp="gate", activation=None, own=()):
    """``Σ weights_e · swiglu_e(x)`` over the chosen experts. x: [..., D], chosen and weights: [..., K].

    activation: a function of (gate, up), in place of SwiGLU's, and of the expert's entries of the arrays ``own`` [E, ...].
    """
    act = activation or (lambda g, u: swiglu_activation(g, u, limit, clamp))
    stacks = (w[f"ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
    used = chosen.shape[-1]
    y = packed.experts(x.reshape(-1, x.shape[-1]), chosen.reshape(-1, used), weights.reshape(-1, used), *stacks, act, own)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def shared_expert(x, w, limit=0.0, clamp="gate"):
    """The expert every token passes: ``ffn_{gate,up,down}_shexp.weight``."""
    gate, up, down = (w[f"ffn_{name}_shexp.weight"] for name in ("gate", "up", "down"))
    return linear(down, swiglu_activation(*linears((gate, up), x), limit, clamp))


def dense(x, w, limit=0.0, clamp="gate"):
    """A dense SwiGLU feed-forward: ``ffn_{gate,up,down}.weight``."""
    gate, up, down = (w[f"ffn_{name}.weight"] for name in ("gate", "up", "down"))
    return linear(down, swiglu_activation(*linears((gate, up), x), limit, clamp))
