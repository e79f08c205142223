"""From the logits of one position to one token id.

The distribution is built in a fixed order: mask, logit bias, penalties, temperature, top-k, top-p, min-p; then one token
is drawn by inverting its cumulative sum. Everything is computed in float64 and every tie goes to the lowest id, so that
equal logits give equal text on any backend. The random number of a draw is a function of (seed, choice, position) alone:
neither the rest of a batch, nor a cache, nor an earlier draw can change it.

Knows nothing about tokenizers, grammars or the reasons for a mask: banned ids come in as ids (``stop.py`` says which).

Letters: V vocabulary, x logits, z scaled logits (0 at the best token), w = exp(z).
"""

import math
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

LARGEST = sys.float_info.max
BAN = -100.0  # the logit bias that forbids a token (OpenAI API reference)
WORD = 2**64


@dataclass(frozen=True)
class SamplingParams:
    """What a request may ask of the sampler; ``ValueError`` names the field, what was found and what is accepted.

    =====================  ============  ==================================================================
    field                  range         meaning (exact definitions: ``distribution``)
    =====================  ============  ==================================================================
    temperature            0 … 100       0 is greedy
    top_k                  int ≥ −1      keep the k most likely; −1 and 0 switch it off
    top_p                  0 … 1         keep the nucleus; 1 switches it off, 0 keeps one token
    min_p                  0 … 1         keep p ≥ min_p · p_max; 0 switches it off
    seed                   −2⁶³ … 2⁶⁴−1  taken modulo 2⁶⁴; None: nobody has chosen one yet (``fresh_seed``)
    presence_penalty       −2 … 2        on generated tokens
    frequency_penalty      −2 … 2        on generated tokens
    repetition_penalty     > 0           on prompt and generated tokens; 1 switches it off
    logit_bias             −100 … 100    token id → number added to its logit; −100 bans the token, unless none is left
    logprobs               bool          report the log-probability of each token
    top_logprobs           0 … 20        and of so many most likely ones; needs ``logprobs``
    repeats                bool          the seed gives one answer, whatever is drafted (``speculative``)
    =====================  ============  ==================================================================
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.05
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0
    repeats: bool = False

    def __post_init__(self):
        _require_number("temperature", self.temperature, 0, 100)
        _require_integer("top_k", self.top_k, -1)
        _require_number("top_p", self.top_p, 0, 1)
        _require_number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _require_integer("seed", self.seed, -(2**63), 2**64 - 1)
        _require_number("presence_penalty", self.presence_penalty, -2, 2)
        _require_number("frequency_penalty", self.frequency_penalty, -2, 2)
        penalty = self.repetition_penalty
        if not (_is_number(penalty) and penalty > 0):
            raise ValueError(f"repetition_penalty must be a finite number greater than 0, got {penalty!r}")
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, got {type(self.logit_bias).__name__}")
        for token, bias in self.logit_bias.items():
            _require_integer("each token id of logit_bias", token, 0)
            _require_number(f"logit_bias of token {token}", bias, BAN, -BAN)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller may go on changing theirs
        if not isinstance(self.logprobs, bool):
            raise ValueError(f"logprobs must be true or false, got {self.logprobs!r}")
        _require_integer("top_logprobs", self.top_logprobs, 0, 20)
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs must be 0 unless logprobs is true, got {self.top_logprobs}")

    @property
    def penalised(self):
        """Whether the distribution depends on earlier tokens, so that ``Counts`` must be kept."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def check_vocabulary(self, vocabulary):
        """``ValueError`` if ``logit_bias`` names an id outside ``0 … vocabulary − 1``."""
        beyond = max(self.logit_bias, default=-1)
        if beyond >= vocabulary:
            raise ValueError(f"logit_bias must name token ids below {vocabulary}, got {beyond}")


def _is_number(value):
    real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return real and abs(value) <= LARGEST


def _require_number(name, value, low, high):
    if not (_is_number(value) and low <= value <= high):
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")


def _require_integer(name, value, low, high=None):
    integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not (integer and value >= low and (high is None or value <= high)):
        accepted = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be an integer {accepted}, got {value!r}")


class Counts:
    """Which tokens a sequence holds, kept up to date one token at a time.

    ``in_prompt`` [V] bool, ``generated`` [V] int64. Ids outside the vocabulary (placeholders of images or audio) cannot
    be sampled and are passed over.
    """

    def __init__(self, vocabulary, prompt_ids=()):
        prompt = np.asarray(list(prompt_ids), dtype=np.int64)
        self.in_prompt = np.zeros(vocabulary, dtype=bool)
        self.in_prompt[prompt[(prompt >= 0) & (prompt < vocabulary)]] = True
        self.generated = np.zeros(vocabulary, dtype=np.int64)

    def add(self, token):
        """Count one generated token."""
        if 0 <= token < len(self.generated):
            self.generated[token] += 1


def distribution(logits, params, *, counts=None, banned=()):
    """``probs`` [V] float64: the exact distribution that ordinary decoding samples from at this position.

    ``logits`` [V]: finite numbers, or −inf for a token that cannot occur. ``banned``: what the stop policy or a grammar
    excludes here, token ids or a bool array [V]. ``counts``: the history, needed when ``params.penalised``. In order:

    1. *Mask*: x[banned] = −inf.
    2. *Logit bias*: x += bias; a bias of −100 sets −inf, except where that would leave no token at all.
    3. *Penalties*, first repetition θ on every token of prompt or answer: x/θ where x > 0, x·θ elsewhere (Keskar et al.
       2019, CTRL, section 4.1, whose plain division would reward a repeated token with a negative logit; the field
       multiplies there); then x −= frequency · (times generated) + presence · [generated at all] (OpenAI API reference).
    4. *Temperature* T: z = (x − max x) / T (Ackley et al. 1985). T = 0: all mass on the largest x, and the steps below
       have nothing left to do.
    5. *Top-k*: the k largest z (Fan et al. 2018); equal ones at the edge: lowest ids.
    6. *Top-p*: of the tokens left, renormalised and sorted by falling logit (equal ones: rising id), the shortest
       prefix whose mass is at least p, the token that reaches p included; never fewer than one (Holtzman et al. 2019).
    7. *Min-p*: tokens with p ≥ min_p · p_max, the edge included (Nguyen et al. 2024).

    What is left is renormalised. Steps 5 to 7 each keep a prefix of one order, and min-p compares with the best token,
    which no step removes; so min-p may be applied first, and only its survivors need sorting.

    Raises ``ValueError`` when a logit is NaN or +inf, when an id lies outside the vocabulary, or when nothing is left.
    """
    x = _adjusted(logits, params, counts, banned)
    probs = np.zeros(len(x))
    if params.temperature == 0:
        probs[np.argmax(x)] = 1
        return probs
    kept, w = _kept(x, params)
    probs[kept] = w / np.sum(w)
    return probs


def _kept(x, params):
    """``(ids, w)`` after steps 4 to 7, ids rising; x [V] with at least one finite number, T > 0."""
    with np.errstate(over="ignore"):  # far below the best: −inf, weight 0
        w = np.exp((x - np.max(x)) / params.temperature)
    if 0 < params.top_k < len(x):
        beyond = np.ones(len(x), dtype=bool)
        beyond[largest(x, params.top_k)] = False
        w[beyond] = 0
    mass = np.sum(w)
    ids = np.flatnonzero((w > 0) & (w >= params.min_p))
    if params.top_p < 1:
        ids = ids[np.argsort(-x[ids], kind="stable")]
        reaches = np.searchsorted(np.cumsum(w[ids]), params.top_p * mass)
        ids = np.sort(ids[: reaches + 1])
    return ids, w[ids]


def _adjusted(logits, params, counts, banned):
    """x [V] float64 after steps 1 to 3: finite, or −inf for what cannot be sampled; at least one is finite."""
    x = _masked(logits, banned)
    params.check_vocabulary(len(x))
    if params.logit_bias:
        tokens = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
        bias = np.fromiter(params.logit_bias.values(), dtype=np.float64)
        biased = x.copy()
        biased[tokens] += np.where(bias == BAN, -np.inf, bias)
        x = biased if np.max(biased) > -np.inf else x
    possible = x > -np.inf
    if not possible.any():
        raise ValueError("no token is left to sample: every one is banned by the stop policy or a grammar")
    if params.penalised:
        if counts is None:
            raise ValueError("the penalties need the counts of the sequence, got none")
        x = _penalised(x, params, counts)
        # A huge repetition penalty overflows; a token that may occur keeps a finite logit.
        x = np.where(possible, np.clip(x, -LARGEST, LARGEST), -np.inf)
    return x


def _penalised(x, params, counts):
    theta = params.repetition_penalty
    with np.errstate(over="ignore"):
        repeated = np.where(x > 0, x / theta, x * theta)
    x = np.where(counts.in_prompt | (counts.generated > 0), repeated, x)
    return x - params.frequency_penalty * counts.generated - params.presence_penalty * (counts.generated > 0)


def _masked(logits, banned):
    """A float64 copy of ``logits`` [V] with what is banned (ids, or a bool array [V]) at −inf."""
    x = np.array(logits, dtype=np.float64)
    if x.ndim != 1 or not len(x):
        raise ValueError(f"logits must be one row of at least one number, got shape {x.shape}")
    bad = np.flatnonzero(~(x < np.inf))
    if len(bad):
        raise ValueError(f"logits must be finite or -inf, got {x[bad[0]]} for token {bad[0]}")
    if isinstance(banned, np.ndarray) and banned.dtype == bool:
        if banned.shape != x.shape:
            raise ValueError(f"banned must have one entry for each of {len(x)} tokens, got shape {banned.shape}")
        x[banned] = -np.inf
        return x
    ids = np.fromiter(banned, dtype=np.int64)
    outside = ids[(ids < 0) | (ids >= len(x))]
    if len(outside):
        raise ValueError(f"a banned token id must be from 0 to {len(x) - 1}, got {outside[0]}")
    x[ids] = -np.inf
    return x


def largest(x, k):
    """Ids of the k largest of x [V], best first, equal ones by rising id; without sorting all of x. 0 < k ≤ V."""
    edge = np.partition(x, len(x) - k)[len(x) - k]
    above = np.flatnonzero(x > edge)
    ids = np.concatenate([above, np.flatnonzero(x == edge)[: k - len(above)]])
    return ids[np.argsort(-x[ids], kind="stable")]


def fresh_seed():
    """A seed from the system's random source, for a request that names none; draw it once per request."""
    return secrets.randbits(64)


def uniform(seed, choice, position, lane=0):
    """The random number in [0, 1) of one draw: Philox4x64-10 (Salmon et al. 2011), key (seed mod 2⁶⁴, choice), counter
    (position, lane, 0, 0), which NumPy advances by one before the first block; the upper 53 bits of that block's first word.
    There is no state, so any draw can be repeated alone. The sampler's lane is 0; others decide about drafts."""
    key = np.array([int(seed) % WORD, choice], dtype=np.uint64)
    counter = np.array([position, lane, 0, 0], dtype=np.uint64)
    return (np.random.Philox(key=key, counter=counter).random_raw() >> 11) * 2.0**-53


def draw(probs, u):
    """The token that u in [0, 1) selects: the first whose cumulative sum over rising ids exceeds u. probs [V], any scale."""
    ids = np.flatnonzero(probs)
    cumulative = np.cumsum(probs[ids])
    at = np.searchsorted(cumulative, u * cumulative[-1], side="right")
    return int(ids[min(at, len(ids) - 1)])  # u · total may round up to the total


def sample(logits, params, position, *, counts=None, banned=(), choice=0):
    """The token id at ``position`` of the sequence (prompt included) for the answer number ``choice``.

    Greedy at temperature 0 (equal logits: lowest id), which needs no seed. Otherwise ``params.seed`` must be a number;
    arguments and errors are those of ``distribution``. Logits that know how their token is found (``settle``, as those of a
    position with a draft do) are asked for it.
    """
    if hasattr(logits, "settle"):
        return logits.settle(params, position, counts=counts, banned=banned, choice=choice)
    if params.temperature == 0:
        return int(np.argmax(_adjusted(logits, params, counts, banned)))
    if params.seed is None:
        raise ValueError("seed must be chosen before sampling, got None (fresh_seed gives one)")
    return draw(distribution(logits, params, counts=counts, banned=banned), uniform(params.seed, choice, position))


def logprobs(logits, chosen, top=0, *, masked=()):
    """``(logprob of chosen, [(id, logprob), …])``: natural logarithms of the model's own distribution.

    That is log softmax of the logits before bias, penalties and temperature, but after ``masked``, the ids the stop
    policy excludes at this position (a grammar's are not among them). The list holds the ``top`` most likely tokens,
    best first, equal ones by rising id; impossible tokens are not listed, so it can be shorter. ``chosen`` itself is
    −inf when it was impossible, as a forced token can be; JSON has no such number, so a surface must replace it.
    """
    x = _masked(logits, masked)
    if not 0 <= chosen < len(x):
        raise ValueError(f"the chosen token id must be from 0 to {len(x) - 1}, got {chosen}")
    best = np.max(x)
    if best == -np.inf:
        return -math.inf, []
    with np.errstate(over="ignore"):
        shifted = x - best
    log_p = shifted - np.log(np.sum(np.exp(shifted)))
    ids = largest(x, min(top, len(x))) if top > 0 else ()
    return float(log_p[chosen]), [(int(i), float(log_p[i])) for i in ids if log_p[i] > -np.inf]
