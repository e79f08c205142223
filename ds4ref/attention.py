"""Attention of one query position over the rows it may see.

The caller decides which rows those are (all, a window, a selection) and hands them over in position order; nothing here
knows about masks, caches or positions. Softmax in the dtype of the state.

Letters: H query heads, G key/value heads, d key width, v value width, S visible rows, r latent rank, n rotary width.
"""

import numpy as np

from .ops import softmax


def attend(q, k, v, scale, sinks=None, bias=None):
    """Grouped-query attention (Ainslie et al. 2023). q: [H, d], k: [S, G, d], v: [S, G, v] → [H, v].

    Query head h reads group ⌊h·G/H⌋. ``bias`` [H, S] is added to the scaled scores. ``sinks`` [H] is one more logit per
    head that takes probability and has no value (Xiao et al. 2023; gpt-oss form).
    """
    heads, groups = q.shape[0], k.shape[1]
    scores = np.matmul(q.reshape(groups, heads // groups, -1), k.transpose(1, 2, 0)).reshape(heads, -1)
    scores = scores * q.dtype.type(scale)
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        scores = np.concatenate([scores, sinks[:, None]], axis=1)
    p = softmax(scores)[:, : k.shape[0]]
    return np.matmul(p.reshape(groups, heads // groups, -1), v.transpose(1, 0, 2)).reshape(heads, -1)


def attend_latent(q, q_rot, latent, k_rot, k_b, v_b, scale):
    """Multi-head latent attention in absorbed form (DeepSeek-V2, section 2.1). → [H, v].

    q: [H, d] unrotated queries; latent: [S, r] normalised rows c; k_b: [H, r, d] and v_b: [H, v, r] expand a latent into
    keys and values. q_rot: [H, n] and k_rot: [S, n] are the rotated parts, one key for all heads; both None where the
    family rotates nothing. Score = (q · k_bᵀ c + q_rot · k_rot) · scale; value = v_b c.
    """
    absorbed = np.matmul(k_b, q[:, :, None])[:, :, 0]
    scores = absorbed @ latent.T
    if q_rot is not None:
        scores = scores + q_rot @ k_rot.T
    mixed = softmax(scores * q.dtype.type(scale)) @ latent
    return np.matmul(v_b, mixed[:, :, None])[:, :, 0]
