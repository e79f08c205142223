"""Mixture of experts: routers (which experts, with what weights) and the weighted sum of their outputs.

Router arithmetic follows DeepSeek-V3 (auxiliary-loss-free balancing): the bias chooses, it never weighs. Ties go to the
lowest index. What a function reads of a block's weights, ``{prefix}ffn_…``, has its shapes in the ``…_tensors`` beside it.
Letters: D hidden, E experts, K chosen, F feed-forward width.
"""

import numpy as np

from .ops import sigmoid, swiglu, top_k


def route(affinity, used, bias=None, scale=1.0, floor=1e-20):
    """Choose ``used`` experts by affinity (+ bias) and weigh them by the unbiased affinity, renormalised, times ``scale``.

    affinity: [E] ≥ 0 → (chosen [K] best first, weights [K]).
    """
    chosen = top_k(affinity if bias is None else affinity + bias, used)
    return chosen, renormalise(affinity[chosen], scale, floor)


def route_grouped(affinity, used, groups, groups_used, bias, scale=1.0, floor=1e-20):
    """:func:`route` limited to the best groups (DeepSeek-V3): a group's score is the sum of its two best biased affinities."""
    biased = (affinity + bias).reshape(groups, -1)
    kept = top_k(np.sort(biased, axis=1)[:, -2:].sum(axis=1), groups_used)
    masked = np.full_like(biased, -np.inf)
    masked[kept] = biased[kept]
    chosen = top_k(masked.reshape(-1), used)
    return chosen, renormalise(affinity[chosen], scale, floor)


def renormalise(affinity, scale=1.0, floor=1e-20):
    """``affinity / (Σ affinity + floor) · scale``: weights of the chosen experts."""
    return affinity / (np.sum(affinity) + affinity.dtype.type(floor)) * affinity.dtype.type(scale)


def sigmoid_experts(x, w, prefix, used, scale=1.0, limit=0.0, clamp="gate", floor=1e-20):
    """The routed part of DeepSeek-V3's feed-forward (report, equations 12 to 16), on x [D] → [D].

    Affinities ``σ(router x)``, experts chosen by affinity + bias, weighed by affinity.
    """
    affinity = sigmoid(w[f"{prefix}ffn_gate_inp.weight"] @ x)
    chosen, weights = route(affinity, used, w[f"{prefix}exp_probs_b.bias"], scale, floor)
    return experts(x, chosen, weights, w, prefix, limit, clamp)


def require_sigmoid(keys):
    """ArtifactError where the metadata names another router than a sigmoid (2) whose chosen weights are renormalised."""
    keys.int("expert_gating_func", default=2, lo=2, hi=2)
    if not keys.bool("expert_weights_norm", default=True):
        raise keys.error("expert_weights_norm", False, "true")


def router_tensors(prefix, E, D):
    """Shapes of the router and of the bias that helps it choose."""
    return {f"{prefix}ffn_gate_inp.weight": (E, D), f"{prefix}exp_probs_b.bias": (E,)}


def experts(x, chosen, weights, w, prefix, limit=0.0, clamp="gate"):
    """``Σ weights_e · swiglu_e(x)`` over the chosen experts; only their slices of the stacked tensors are read.

    ``w`` holds ``{prefix}ffn_{gate,up}_exps.weight`` [E, F, D] and ``ffn_down_exps.weight`` [E, D, F]. The sum runs in the
    order of ``chosen``.
    """
    y = np.zeros_like(x)
    for e, weight in zip(chosen.tolist(), weights, strict=True):
        gate, up, down = (w.part(f"{prefix}ffn_{name}_exps.weight", e) for name in ("gate", "up", "down"))
        y += weight * swiglu(x, gate, up, down, limit, clamp)
    return y


def expert_tensors(prefix, E, D, F):
    """Shapes of what :func:`experts` reads."""
    return _swiglu_tensors(prefix, "_exps", D, F, (E,))


def shared_expert(x, w, prefix, limit=0.0, clamp="gate"):
    """The expert every token passes: ``{prefix}ffn_{gate,up,down}_shexp.weight``."""
    gate, up, down = (w[f"{prefix}ffn_{name}_shexp.weight"] for name in ("gate", "up", "down"))
    return swiglu(x, gate, up, down, limit, clamp)


def shared_tensors(prefix, D, F):
    """Shapes of what :func:`shared_expert` reads."""
    return _swiglu_tensors(prefix, "_shexp", D, F)


def dense(x, w, prefix, limit=0.0, clamp="gate"):
    """A dense SwiGLU feed-forward: ``{prefix}ffn_{gate,up,down}.weight``."""
    gate, up, down = (w[f"{prefix}ffn_{name}.weight"] for name in ("gate", "up", "down"))
    return swiglu(x, gate, up, down, limit, clamp)


def dense_tensors(prefix, D, F):
    """Shapes of what :func:`dense` reads."""
    return _swiglu_tensors(prefix, "", D, F)


def _swiglu_tensors(prefix, kind, D, F, stack=()):
    shapes = {"gate": (F, D), "up": (F, D), "down": (D, F)}
    return {f"{prefix}ffn_{part}{kind}.weight": (*stack, *shape) for part, shape in shapes.items()}
