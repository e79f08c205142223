"""Tokens on trial: what a program leaves to be written once it is known how many of them stay.

A trial advances its banks by a few tokens and gives the logits after each. Rows of every position, and the blocks of
``Compressed``, are written at once: behind the sequence's end they are hidden until they are overwritten. What cannot be taken
back like that (rings, values that every token changes) a trial leaves alone and hands over instead, and :func:`write` puts it
in place for the tokens that are kept. So a trial of which nothing is kept leaves no trace, and after one of which n tokens are
kept the state is that of a sequence that had only those.

Letters: R stacked layers, B banks of the trial, T its tokens, S slots of a ring.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ds4ref.state import Recurrent

from . import primitives


@dataclass(frozen=True)
class Seen:
    """The residual after some layers at the tokens of a call, on the device: of bank ``row`` in arrays [B, T, …]."""

    arrays: tuple
    row: int


@dataclass(frozen=True)
class Trial:
    """Tokens of one bank that are on trial. logits: [T, V] after each; tried: what the program left to be written."""

    tokens: list[int]
    logits: np.ndarray
    tried: list
    row: int
    """Of the bank among the program's ``rows``."""
    rows: int


def write(plan, arrays, tried, lengths, counts, banks):
    """The state with the first ``counts`` [B] tokens of a trial of the banks ``banks`` [B], which stood at ``lengths`` [B].

    tried: as :meth:`ds4jax.layers.Plan.apply` returns it. A bank with no tokens, or a number out of range, stays as it is.
    """

    def component(kind, held, name, value):
        if isinstance(kind, Recurrent):
            return held | {name: _chosen(held[name], value, counts, banks)}
        return held | {name: _into_ring(held[name], value, lengths, counts, banks)}

    def place(layout, state, values):
        new = {c: component(layout[c], state[c], name, value) for c, rows in values.items() for name, value in rows.items()}
        return state | new

    return [
        [place(*of_place) for of_place in zip(*of_run, strict=True)] for of_run in zip(plan.layouts, arrays, tried, strict=True)
    ]


def _into_ring(ring, rows, lengths, counts, banks):
    """A ring [R, B', …, S, d] with the first ``counts`` of rows [R, B, …, T, d] in the slots after ``lengths``."""
    tokens, slots = rows.shape[-2], ring.shape[-2]
    t, count = jnp.arange(tokens, dtype=jnp.int32), counts[:, None]
    lives = (t < count) & (t >= count - slots)  # of two tokens in one slot the later
    if primitives.profile() == "metal":
        return _token_by_token(ring, rows, lives, (lengths[:, None] + t) % slots, banks)
    bank = jnp.where(lives, banks[:, None], ring.shape[1])
    middle = (slice(None),) * (ring.ndim - 4)
    if middle:  # the axes of two index arrays that are apart come first
        rows = jnp.moveaxis(rows, (1, -2), (0, 1))
    at = (slice(None), bank, *middle, (lengths[:, None] + t) % slots)
    return ring.at[at].set(rows, mode="drop", unique_indices=True)


def _token_by_token(ring, rows, lives, slots, banks):
    """:func:`_into_ring` without scatter, which programs for Metal may not hold.

    lives: which of the rows [B, T] to write, and slots: where to.
    """
    tokens = rows.shape[-2]

    def write(n, ring):
        b, t = n // tokens, n % tokens
        middle = [0] * (ring.ndim - 4)
        row = lax.dynamic_slice(rows, (0, b, *middle, t, 0), (ring.shape[0], 1, *ring.shape[2:-2], 1, ring.shape[-1]))
        at = (0, jnp.minimum(banks[b], ring.shape[1] - 1), *middle, slots[b, t], 0)
        kept = lax.dynamic_slice(ring, at, row.shape)
        return lax.dynamic_update_slice(ring, jnp.where(lives[b, t] & (banks[b] < ring.shape[1]), row, kept), at)

    return lax.fori_loop(0, lives.size, write, ring)


def _chosen(values, tried, counts, banks):
    """Values [R, B', …] with those after ``counts`` tokens of tried [R, T, B, …]."""

    def one(b, values):
        at = jnp.minimum(banks[b], values.shape[1] - 1)
        value = lax.dynamic_index_in_dim(lax.dynamic_index_in_dim(tried, counts[b] - 1, 1, False), b, 1)
        if len(banks) > 1:
            idle = (counts[b] == 0) | (banks[b] >= values.shape[1])
            value = jnp.where(idle, lax.dynamic_index_in_dim(values, at, 1), value)
        return lax.dynamic_update_index_in_dim(values, value, at, 1)

    return one(0, values) if len(banks) == 1 else lax.fori_loop(0, len(banks), one, values)


def holds(tried):
    """Whether a trial left anything to be written."""
    return bool(jax.tree.leaves(tried))
