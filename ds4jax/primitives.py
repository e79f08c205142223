"""Operations that not every device has or does right, each in two formulations that give the same results.

The profile decides while a program is traced: "default" is JAX's own operation; "metal" does without sort, top_k, cumsum,
population_count and scatter, which plugins for Apple's GPUs lack or do wrong (docs/platforms.md, with sources). Orders of
equal values are the same in both: the lower index first. Knows nothing about models, nor which platform is chosen and why.

Letters: R stacked layers, B banks, S slots, E groups.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

PROFILES = ("default", "metal")
APPLE = ("metal", "mps", "mtl")
"""What plugins for Apple's GPUs call their platform, in lower case."""

_LEAST = -(2**31)
_asked = ContextVar("profile", default=None)


@contextmanager
def using(profile):
    """Trace what the block traces with ``profile``. A program that was compiled before is not traced again."""
    if profile not in PROFILES:
        raise ValueError(f"profile {profile!r} is unknown; {' or '.join(map(repr, PROFILES))} is accepted")
    token = _asked.set(profile)
    try:
        yield
    finally:
        _asked.reset(token)


def profile():
    """The profile that :func:`using` asked for, else that of the platform that JAX computes on."""
    return _asked.get() or profile_of(_default_platform())


def profile_of(platform):
    """The profile of a platform by JAX's name for it."""
    return "metal" if platform.lower() in APPLE else "default"


def _default_platform():
    device = jax.config.jax_default_device
    return getattr(device, "platform", device) or jax.default_backend()


def top_k(x, k):
    """``lax.top_k``: (values [..., k], indices int32 [..., k]) of the k largest of the last axis, best first."""
    if profile() == "default":
        return lax.top_k(x, k)
    keys, index = _ordered(x), jnp.arange(x.shape[-1], dtype=jnp.int32)
    values, indices = [], []
    for _ in range(k):
        best = jnp.max(keys, axis=-1, keepdims=True)
        first = jnp.min(jnp.where(keys == best, index, x.shape[-1]), axis=-1, keepdims=True)
        keys = jnp.where(index == first, _LEAST, keys)
        values.append(best)
        indices.append(first)
    return _float(jnp.concatenate(values, axis=-1)), jnp.concatenate(indices, axis=-1)


def largest(x, k):
    """Which of the last axis of x float32 [..., S] are among its k < S largest, bool: exactly k, the first of equals.

    metal: the k-th largest value is found bit by bit, deciding each by a count; so is which of those that equal it belong.
    """
    size = x.shape[-1]
    if profile() == "default":
        best = lax.top_k(x, k)[1]
        places = jnp.indices(best.shape, sparse=True)[:-1]
        return jnp.zeros(x.shape, bool).at[(*places, best)].set(True)
    keys, index = _ordered(x), jnp.arange(size, dtype=jnp.int32)

    def next_bit(n, least):
        tried = least ^ (1 << (31 - n))  # of the most negative number, so that an exclusive or only ever raises it
        return jnp.where(_count(keys >= tried) >= k, tried, least)

    least = lax.fori_loop(0, 32, next_bit, jnp.full((*x.shape[:-1], 1), _LEAST, jnp.int32))
    above, equal = keys > least, keys == least
    wanted, bits = k - _count(above), size.bit_length()

    def next_end_bit(n, end):
        tried = end + (1 << (bits - 1 - n))
        return jnp.where(_count(equal & (index < tried)) <= wanted, tried, end)

    end = lax.fori_loop(0, bits, next_end_bit, jnp.zeros_like(least))
    return above | (equal & (index < end))


def _count(mask):
    return jnp.sum(mask.astype(jnp.int32), axis=-1, keepdims=True)


def _ordered(x):
    """float32 as int32 in the order that XLA sorts floats in: −0.0 below +0.0, NaN at the ends."""
    return _flip(lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32))


def _float(keys):
    return lax.bitcast_convert_type(_flip(keys), jnp.float32)


def _flip(bits):
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def running_sum(x):
    """Inclusive sums along the first axis; metal: in log2 steps of shifted sums."""
    if profile() == "default":
        return jnp.cumsum(x, axis=0, dtype=x.dtype)
    step = 1
    while step < len(x):
        x = x + jnp.concatenate([jnp.zeros_like(x[:step]), x[:-step]])
        step *= 2
    return x


class Groups(NamedTuple):
    """Members 0 … n − 1 in the order of their groups, equals in their own order.

    order: int32 [n] the member at each place; places: int32 [n] its inverse; ends: int32 [E] where each group ends.
    """

    order: jnp.ndarray
    places: jnp.ndarray
    ends: jnp.ndarray


def group(keys, count):
    """:class:`Groups` of members with ``keys`` int32 [n], each below ``count`` (E), a stable counting sort.

    metal: a member's place is the end of the groups before plus how many of its own came before; the member at a place is found
    by bisection of those numbers.
    """
    size = len(keys)
    member = jnp.arange(size, dtype=jnp.int32)
    if profile() == "default":
        order = jnp.argsort(keys).astype(jnp.int32)
        ends = jnp.cumsum(jnp.bincount(keys, length=count)).astype(jnp.int32)
        return Groups(order, jnp.zeros(size, jnp.int32).at[order].set(member), ends)
    own = (keys[:, None] == jnp.arange(count)).astype(jnp.int32)
    seen = running_sum(own)  # [n, E]
    ends = running_sum(seen[-1])
    starts = ends - seen[-1]
    places = jnp.sum(own * (starts + seen), axis=1) - 1
    at = jnp.sum((member[:, None] >= ends).astype(jnp.int32), axis=1)  # the group at each place
    before, flat, found = member - starts[at], seen.reshape(-1), jnp.zeros_like(member)
    for bit in reversed(range(size.bit_length())):
        tried = found + (1 << bit)
        less = flat[jnp.minimum(tried, size) * count - count + at] <= before
        found = jnp.where((tried <= size) & less, tried, found)
    return Groups(found, places, ends)


def true_first(mask, size):
    """Where a mask [n] is true, in order: int32 [size], filled up with zeros."""
    if profile() == "default":
        return jnp.nonzero(mask, size=size, fill_value=0)[0].astype(jnp.int32)
    groups = group(1 - mask.astype(jnp.int32), 2)
    return jnp.where(jnp.arange(size) < groups.ends[0], groups.order[:size], 0)


def odd_bits(x):
    """Whether an odd number of the low eight bits of integers 0 … 255 is set: 0 or 1, of their own type."""
    if profile() == "default":
        return lax.population_count(x) & 1
    return reduce(lambda x, shift: x ^ x >> shift, (4, 2, 1), x) & 1


def add_row(y, row, index):
    """y [n, …] with ``row`` added to its row ``index``, which it must have."""
    if profile() == "default":
        return y.at[index].add(row)
    return lax.dynamic_update_index_in_dim(y, lax.dynamic_index_in_dim(y, index, keepdims=False) + row, index, 0)
