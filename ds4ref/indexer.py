"""Sparse attention's indexer: which of the older rows a query attends to ("lightning indexer", DeepSeek-V3.2 report).

Scores are sums of rectified products, so exact ties (zeros) are common; the order of ties is part of the definition here:
the lowest index wins.
"""

import numpy as np

from .ops import layer_norm, rotate_head, rotate_pairs, top_k


def index_scores(q, keys, weights):
    """``score(s) = Σ_h weights_h · relu(q_h · keys_s)``. q: [H, d], keys: [S, d], weights: [H] (any sign) → [S].

    All constant factors belong into ``weights``: relu commutes with a positive scale.
    """
    return weights @ np.maximum(q @ keys.T, 0)


def select(scores, k):
    """The k best of ``scores`` [S], as ascending indices; all of them when there are no more than k."""
    return np.sort(top_k(scores, k)) if len(scores) > k else np.arange(len(scores))


def select_by_latent(component, h, latent, tensors, angles, eps, k):
    """Append a token's indexer key to its ``Rows`` and choose the best k positions up to the token: ascending.

    DeepSeek-V3.2's indexer beside latent attention: queries [I, d] come from the query latent [r], the one key and the
    heads' weights from the block's input h [D]; the first 2·len(angles) channels are rotated, in neighbouring pairs.
    tensors: queries [I·d, r], key [d, D], its norm's gain and bias [d], weights [I, D]; eps: of that norm.
    """
    queries, key, gain, bias, mix = tensors
    component.append(rotate_head(layer_norm(key @ h, gain, bias, eps), angles, rotate_pairs))
    q = rotate_head((queries @ latent).reshape(len(mix), -1), angles, rotate_pairs)
    return select(index_scores(q, component.rows(), mix @ h / h.dtype.type(np.sqrt(len(queries)))), k)
