"""The resident sequences of a server: what each is, what memory a request may claim, cuts of their snapshots. Pure.

A bank is chosen by :mod:`ds4ref.reuse`, the same for every lane. This module tells what a bank is (for the stats), whether the
memory holds a request to its end (:func:`refusal`), and makes the snapshot of an earlier position (:func:`cut`).

Knows nothing about jobs, threads or disks.
"""

from dataclasses import dataclass, field, replace

from ds4ref.reuse import victim
from ds4ref.state import Compressed, Rows, Snapshot

EMPTY, DEEP, SUPERSEDED, SHALLOW, PROTECTED = STATES = ("empty", "deep", "superseded", "shallow", "protected")
REFUSALS = ("class_budget", "live_headroom", "obs_retry", "unsupported", "fault", "deep_policy", "lane_disabled")
"""Why a lane may refuse a request; the last five never occur here."""


def state_of(bank, banks, policy):
    """What of ``STATES`` a bank is: protected; empty; superseded, as another begins with all of it; deep or shallow by its
    length."""
    if bank.protected:
        return PROTECTED
    if bank.state.length == 0:
        return EMPTY
    # A copy without LRU takes only what nobody misses: an empty bank or a superseded one.
    if victim([b if b is bank else replace(b, protected=True) for b in banks], policy, lru=False) is not None:
        return SUPERSEDED
    return DEEP if policy.deep(bank.state.length) else SHALLOW


def describe(banks, policy):
    """The banks for the stats: {id, state, tokens, reusable}, plain JSON."""
    return [
        {"id": i, "state": state_of(bank, banks, policy), "tokens": bank.state.length,
         "reusable": policy.mode != "off" and bank.state.length > 0}
        for i, bank in enumerate(banks)
    ]  # fmt: skip


# Admission credits


@dataclass(frozen=True)
class Claim:
    """Bytes of one class of memory: what was promised to its holders, and how much of that is resident."""

    promised: int
    resident: int

    @property
    def outstanding(self):
        """Promised and not resident yet."""
        return max(0, self.promised - self.resident)


@dataclass(frozen=True)
class Credits:
    """Who may still ask for memory that is free now, in bytes. claims: class → :class:`Claim`; reserved: set aside for lanes
    that are not running; floor: kept free; untracked: on its way to processes nobody counts; transient: a moment's work."""

    claims: dict
    reserved: int = 0
    floor: int = 0
    untracked: int = 0
    transient: int = 0


def refusal(credits, name, proposed, limit, free):
    """Why class ``name`` may not raise its claim to ``proposed`` bytes, of ``REFUSALS``, or None. limit: of the class; free:
    bytes that are free now, None where nobody can tell."""
    if proposed > limit:
        return "class_budget"
    if free is None:
        return None
    others = sum(claim.outstanding for other, claim in credits.claims.items() if other != name)
    held = credits.claims[name].resident if name in credits.claims else 0
    needed = proposed - held + others + credits.reserved + credits.floor + credits.untracked + credits.transient
    return "live_headroom" if free < needed else None


@dataclass
class Memory:
    """What sequences that grow take of the host. price: tokens → bytes of a sequence; free: () → bytes free now or None; limit:
    bytes of all banks together; floor: bytes kept free."""

    price: object
    free: object
    limit: int
    floor: int = 0
    targets: dict = field(default_factory=dict)
    """Bank (by id) → tokens that the request in it may reach: its credit, from admission until it ends."""

    def refusal(self, banks, bank, target):
        """Why a request of up to ``target`` tokens may not begin in ``bank``, whose sequence it takes over, or None."""
        resident = sum(self.price(b.state.length) for b in banks)
        others = sum(self.price(max(b.state.length, self.targets.get(id(b), 0))) for b in banks if b is not bank)
        credits = Credits({"banks": Claim(others + self.price(bank.state.length), resident)}, floor=self.floor)
        return refusal(credits, "banks", others + self.price(target), self.limit, self.free())

    def hold(self, bank, target):
        self.targets[id(bank)] = target

    def release(self, bank):
        self.targets.pop(id(bank), None)


# Snapshots of an earlier position


def cut(snapshot, n, layout, checkpoint=None):
    """``snapshot`` as it was at its first ``n`` tokens: what a longer sequence still holds is taken from it, the rest from
    ``checkpoint``, a checkpoint of those tokens. None where ``layout`` needs one and there is none."""
    components = {}
    for name, kind in layout.items():
        arrays = snapshot.components[name]
        if isinstance(kind, Rows):
            components[name] = {"rows": arrays["rows"][:n]}
        elif checkpoint is None:
            return None
        else:
            components[name] = dict(checkpoint.components[name])
            if isinstance(kind, Compressed):
                components[name]["blocks"] = arrays["blocks"][: n // kind.ratio]
    return Snapshot(snapshot.tokens[:n], components, None if checkpoint is None else checkpoint.logits)
