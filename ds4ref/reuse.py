"""Which resident state a prompt continues, and what of the prompt is left to compute.

Theory of operation. A *bank* holds one sequence. A prompt P shares its first L tokens (the longest common prefix) with a bank's
sequence S, and the bank's state can serve at most that much. What it really serves is its best *cut*, a position where a
whole state exists:

=======================  =====================================================================================
L = |S|                  the frontier itself, continued (*exact*) or copied into another bank (*fork*)
L < |S|                  the state truncated to L, where every component still holds what L needs; or the deepest
                         checkpoint c ≤ L, whose gap P[c:L] is computed again (*partial*)
neither                  nothing (*cold*), with the reason
=======================  =====================================================================================

A cut at |P| counts only where the logits of that position were kept; otherwise the last prompt token is computed. ``decide``
is pure: banks and checkpoints in, one :class:`Decision` out. :class:`Reuser` carries it out. A bank's life is

    idle → (admit) → in use → (retire) → idle        clear: any → idle and empty

Between two steps a bank's tokens are exactly what was computed, so a request may end anywhere, in its prompt or its answer.

Tokens are compared, never hashed: a cut is right by construction. Everything here follows from the kinds of components
(``state``), so it is written once for all families, and it only asks a state for ``tokens``, ``length``, ``logits``,
``can_truncate``, ``truncate``, ``snapshot``, ``restore``, ``checkpoint`` and ``resume``, so any backend can provide it.

Knows nothing about models, text formats, disks or threads.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from .state import Rows, Snapshot, State

MODES = ("off", "exact", "partial")
SLOTS = 32
MINIMUM = 192
PIN = 65536

CHANGED = "rendered prefix changed"
SHORT = "below minimum token threshold"
MISMATCH = "payload family/layout mismatch"
NO_CHECKPOINT = "no checkpoint at or below LCP"
REPLAY = "session state requires prefix replay"
MISSES = (CHANGED, SHORT, MISMATCH, NO_CHECKPOINT, REPLAY)


def stride(context, slots=SLOTS):
    """Tokens between two checkpoints of a prompt: the pool spread over the context, in units of 256."""
    return max(256, -(-context // max(1, slots) // 256) * 256)


def common_prefix(a, b):
    """Length of the longest common prefix of two integer arrays."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def needs_checkpoints(layout):
    """Whether a state of this layout can be cut anywhere only with a checkpoint: some component is not ``Rows``."""
    return not all(isinstance(kind, Rows) for kind in layout.values())


@dataclass(frozen=True)
class Policy:
    """What reuse is allowed to do.

    mode: ``off``; ``exact``, whole frontiers only; ``partial``. minimum: tokens that a prefix must share with a bank for a
    partial cut. fork: whether a frontier or cut may be copied, so that its source stays. pin: committed tokens from which
    a bank is *deep*: given up last, never for a shallow record, and continued in place rather than copied; 0 for no such tier.
    """

    mode: str = "partial"
    minimum: int = MINIMUM
    fork: bool = True
    pin: int = PIN

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"reuse mode must be one of {', '.join(MODES)}, got {self.mode!r}")

    def deep(self, tokens):
        return 0 < self.pin <= tokens


@dataclass(eq=False)
class Bank:
    """One resident sequence. protected: in use, or held by the caller: neither given up nor changed by another request.
    text: what the tokens render, where the caller knows it; it explains a miss and decides nothing."""

    state: State
    text: str | None = None
    last_used: int = 0
    protected: bool = False


class CheckpointPool:
    """The checkpoints of all banks: a few slots, the least recently captured or restored given up first.

    A checkpoint belongs to its tokens, not to a bank, so a fork goes on using its source's. It holds what no longer
    sequence keeps; the rest comes from a bank that begins with the same tokens.
    """

    def __init__(self, slots=SLOTS):
        self.slots = slots
        self._held = []  # the least recently used first

    def __len__(self):
        return len(self._held)

    def __iter__(self):
        return iter(self._held)

    @property
    def nbytes(self):
        """Bytes of all checkpoints."""
        return sum(checkpoint.nbytes for checkpoint in self)

    def capture(self, state):
        """Keep a checkpoint of ``state`` as it stands. One that is there already is only renewed."""
        if self.slots == 0 or state.length == 0:
            return
        tokens = np.array(state.tokens, np.int64)
        held = next((checkpoint for checkpoint in self if np.array_equal(checkpoint.tokens, tokens)), None)
        others = [checkpoint for checkpoint in self if checkpoint is not held]
        stale = held is None or (held.logits is None and state.logits is not None)
        self._held = [*others, state.checkpoint() if stale else held][-self.slots :]

    def best(self, prompt, limit):
        """The deepest checkpoint of at most ``limit`` of the prompt's first tokens, or None. At the prompt's very end only
        one with logits is of use. ``prompt``: int64 [P]."""

        def serves(checkpoint):
            n = len(checkpoint.tokens)
            known = n < len(prompt) or checkpoint.logits is not None
            return n <= limit and known and np.array_equal(checkpoint.tokens, prompt[:n])

        return max(filter(serves, self), key=lambda checkpoint: len(checkpoint.tokens), default=None)

    def renew(self, checkpoint):
        """Make ``checkpoint``, one of the pool's, the last to be given up."""
        self._held = [*(other for other in self if other is not checkpoint), checkpoint]


@dataclass(frozen=True)
class Decision:
    """Where a prompt runs and from what. Banks are indices.

    tokens: of the prompt; target: None when every bank is protected; source: None when cold; common: tokens shared with the
    source; cached: tokens whose state is kept; checkpoint: what the cut is restored from, None for the source's own state;
    whole: the cut is the source's frontier; refused: (bank, one of ``MISSES``), the candidates of the largest shared prefix
    first.
    """

    tokens: int
    target: int | None
    source: int | None = None
    common: int = 0
    cached: int = 0
    checkpoint: Snapshot | None = None
    whole: bool = False
    refused: tuple[tuple[int, str], ...] = ()

    @property
    def kind(self):
        """``cold``, ``exact``, ``partial`` or ``fork``."""
        if self.source is None:
            return "cold"
        if not self.whole:
            return "partial"
        return "exact" if self.target == self.source else "fork"

    @property
    def computed(self):
        """Prompt tokens to compute, replayed ones included."""
        return self.tokens - self.cached

    @property
    def replayed(self):
        """Tokens computed although the source once held them."""
        return self.common - self.cached

    @property
    def miss(self):
        """Why a cold prompt found no state; None where nothing was refused or something was taken."""
        return self.refused[0][1] if self.source is None and self.refused else None


def decide(prompt, banks, pool, policy=Policy(), text=None):
    """The :class:`Decision` for ``prompt`` (token ids, at least one). Changes nothing.

    The cut that keeps most wins; on a tie a frontier before a checkpoint, an idle bank before one in use, the least recently
    used before others. It is copied where ``victim`` finds a bank that nobody misses; else continued in place; else, in a
    bank that must not change, passed over for the next best.
    """
    if len(prompt) == 0:
        raise ValueError("a prompt needs at least one token, got none")
    prompt = np.asarray(prompt, np.int64)
    cuts, refused = [], []
    for i, bank in enumerate(banks):
        if policy.mode == "off" or bank.state.length == 0:
            continue
        tokens = np.array(bank.state.tokens, np.int64)
        common = common_prefix(prompt, tokens)
        cut = _cut(prompt, bank.state, common, pool, policy)
        if isinstance(cut, _Cut):
            cuts.append((i, common, cut))
        else:
            renamed = None not in (text, bank.text) and text.startswith(bank.text) and common < len(tokens)
            refused.append((common, i, CHANGED if renamed else cut))
    reasons = tuple((i, reason) for _, i, reason in sorted(refused, key=lambda r: (-r[0], r[1])))

    def worth(candidate):
        i, _, cut = candidate
        return cut.tokens, cut.whole, not banks[i].protected, -banks[i].last_used

    for i, common, cut in sorted(cuts, key=worth, reverse=True):
        target = _place(i, cut.tokens, banks, policy)
        if target is not None:
            return Decision(len(prompt), target, i, common, cut.tokens, cut.checkpoint, cut.whole, reasons)
    return Decision(len(prompt), victim(banks, policy), refused=reasons)


@dataclass(frozen=True)
class _Cut:
    tokens: int
    checkpoint: Snapshot | None
    whole: bool


def _cut(prompt, state, common, pool, policy):
    """The deepest cut of ``state`` that serves ``prompt``, or the reason why there is none."""
    whole = common == state.length
    if whole and (common < len(prompt) or state.logits is not None):
        return _Cut(common, None, True)
    last = min(common, len(prompt) - 1)  # the deepest position from which logits are computed anyway
    if whole and last > 0 and state.can_truncate(last):
        return _Cut(last, None, True)
    if policy.mode == "partial":
        if common < policy.minimum:
            return SHORT if common else NO_CHECKPOINT
        checkpoint = pool.best(prompt, common)
        kept = last if state.can_truncate(last) else 0
        if checkpoint is not None and len(checkpoint.tokens) > kept:
            return _Cut(len(checkpoint.tokens), checkpoint, False)
        if kept:
            return _Cut(kept, None, False)
    return REPLAY if whole else NO_CHECKPOINT


def _place(source, cached, banks, policy):
    """The bank in which a cut of ``source`` continues: a copy where one may be made, the source itself, or None."""
    if policy.fork and not policy.deep(cached):
        copy = victim(banks, policy, lru=False, spare=source)
        if copy is not None:
            return copy
    return None if banks[source].protected else source


def victim(banks, policy=Policy(), lru=True, spare=None, deep=True):
    """The bank to give up, or None: the first empty one; the least recently used whose sequence another bank's begins with;
    then, with ``lru``, the least recently used shallow one and last, with ``deep``, the least recently used deep one. Never
    a protected bank, nor ``spare``."""
    idle = [i for i, bank in enumerate(banks) if not bank.protected and i != spare]
    empty = [i for i in idle if banks[i].state.length == 0]
    if empty:
        return empty[0]
    superseded = [i for i in idle if any(_supersedes(other, banks[i]) for other in banks)]
    shallow = [i for i in idle if lru and not policy.deep(banks[i].state.length)]
    rest = idle if lru and deep else []
    return min(superseded or shallow or rest, key=lambda i: banks[i].last_used, default=None)


def _supersedes(other, bank):
    """Whether ``other`` begins with all of ``bank``; of two equal ones the more recently used supersedes."""
    n = bank.state.length
    longer = (other.state.length, other.last_used) > (n, bank.last_used)
    if other is bank or not longer or (n and other.state.tokens[n - 1] != bank.state.tokens[n - 1]):
        return False  # mostly the last token tells, before thousands are compared
    return other.state.tokens[:n] == bank.state.tokens


@dataclass(frozen=True)
class Admission:
    """A prompt that has its bank. The caller computes ``remaining`` on ``bank.state`` and calls ``progress`` between the
    tokens (``generation.run`` does); one that computes several at once stops at every position of ``stops``."""

    bank: Bank
    decision: Decision
    remaining: list[int]
    stops: tuple[int, ...]
    """Positions to capture at, rising: multiples of the stride, the caller's marks, the prompt's end."""
    pool: CheckpointPool

    def progress(self, done=0, total=0):
        """Capture a checkpoint when the state stands at one of the stops. The arguments are not used."""
        if self.bank.state.length in self.stops:
            self.pool.capture(self.bank.state)


@dataclass
class Reuser:
    """Banks, their checkpoints and the policy: admits prompts and takes their states back.

    new_state: makes an empty sequence; context: tokens a sequence may hold; every: tokens between checkpoints of a prompt
    (default: ``stride`` of the context). Checkpoints are only kept where the policy and the layout have a use for them.
    """

    new_state: object
    context: int
    width: int = 1
    policy: Policy = Policy()
    slots: int = SLOTS
    every: int | None = None
    banks: list[Bank] = field(init=False)
    pool: CheckpointPool = field(init=False)

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(f"reuse needs at least one bank, got {self.width}")
        self.banks = [Bank(self.new_state()) for _ in range(self.width)]
        useful = self.policy.mode == "partial" and needs_checkpoints(self.banks[0].state.layout)
        self.pool = CheckpointPool(self.slots if useful else 0)
        self.every = self.every or stride(self.context, self.slots)
        self._clock = 0

    def decide(self, prompt, text=None, only=None, fresh=False):
        """What ``admit`` would do with ``prompt``. only: a bank, to be continued in place whatever the others hold; fresh:
        nothing is reused, since every token's logits are wanted."""
        if only is None:
            return decide(prompt, self.banks, self.pool, replace(self.policy, mode="off") if fresh else self.policy, text)
        found = decide(prompt, [only], self.pool, replace(self.policy, fork=False), text)
        i = self.banks.index(only)
        source, refused = None if found.source is None else i, tuple((i, why) for _, why in found.refused)
        return replace(found, target=i, source=source, refused=refused)

    def admit(self, prompt, text=None, marks=(), decision=None):
        """Give ``prompt`` a bank whose state stands at its best cut: an :class:`Admission`, or None while all are protected.

        text: what the prompt renders, to explain a miss. marks: positions of the prompt that a later prompt is expected to
        share although it departs before this one's end, such as the end of what a chat template repeats in the next turn.
        decision: of ``decide``, where the caller has looked at it and changed no bank since.
        """
        if decision is None:
            decision = self.decide(prompt, text)
        if decision.target is None:
            return None
        bank = self.banks[decision.target]
        self._move(decision, bank.state)
        bank.protected, bank.text = True, None
        self._touch(bank)
        at, end = decision.cached, decision.tokens
        strides = range(at - at % self.every + self.every, end, self.every)
        stops = sorted({*strides, *(mark for mark in marks if at < mark < end), end}) if self.pool.slots else ()
        return Admission(bank, decision, [int(token) for token in prompt[at:]], tuple(stops), self.pool)

    def _move(self, decision, state):
        """Bring the target's state to the cut. The decision owns its checkpoint: no capture can take it away."""
        if decision.source is None:
            state.truncate(0)
            return
        source = self.banks[decision.source].state
        if decision.checkpoint is not None:
            self.pool.renew(decision.checkpoint)
            state.resume(decision.checkpoint, source)
            return
        if state is not source:
            state.restore(source.snapshot())
        state.truncate(decision.cached)

    def retire(self, bank, text=None):
        """Take the bank back with what was computed, be the request finished or not. text: what its tokens render."""
        self.pool.capture(bank.state)
        bank.protected, bank.text = False, text
        self._touch(bank)

    def clear(self, bank):
        """Take the bank back empty, as after a step that failed."""
        bank.state.truncate(0)
        bank.protected, bank.text = False, None

    def room(self, tokens):
        """The bank that a snapshot of so many tokens would displace, or None."""
        found = victim(self.banks, self.policy, deep=self.policy.deep(tokens))
        return None if found is None else self.banks[found]

    def adopt(self, snapshot, text=None):
        """Put a snapshot, from a record or another process, into a bank, and return it; None when it would displace one
        that is protected, or deep while the snapshot is not. ValueError when it is of another layout."""
        bank = self.room(len(snapshot.tokens))
        if bank is None:
            return None
        bank.state.restore(snapshot)
        self.retire(bank, text)
        return bank

    def _touch(self, bank):
        self._clock += 1
        bank.last_used = self._clock
