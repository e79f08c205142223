"""Sparse attention's indexer: which of the older rows a query attends to ("lightning indexer", DeepSeek-V3.2 report).

Scores are sums of rectified products, so exact ties (zeros) are common; the order of ties is part of the definition here:
the lowest index wins.
"""

import numpy as np

from .ops import top_k


def index_scores(q, keys, weights):
    """``score(s) = Σ_h weights_h · relu(q_h · keys_s)``. q: [H, d], keys: [S, d], weights: [H] (any sign) → [S].

    All constant factors belong into ``weights``: relu commutes with a positive scale.
    """
    return weights @ np.maximum(q @ keys.T, 0)


def select(scores, k):
    """The k best of ``scores`` [S], as ascending indices; all of them when there are no more than k."""
    return np.sort(top_k(scores, k)) if len(scores) > k else np.arange(len(scores))
