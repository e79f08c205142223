"""How many banks the memory holds: the arithmetic of the quote, over bytes that somebody else has measured or priced.

Pure. All amounts are bytes; sums saturate at ``LARGEST``, so that a quote never wraps to something that fits.
Knows nothing about layouts, hosts or files (:mod:`pricing` and :mod:`host` do).
"""

from dataclasses import dataclass, replace

LARGEST = 2**63 - 1
MIB, GIB = 1 << 20, 1 << 30
STATIC_RESERVE = 6144 * MIB


@dataclass(frozen=True)
class Budgets:
    """What a process of one artifact and context takes, and the ceiling.

    available: the ceiling, None where no probe worked. per_bank: one sequence at full context. media_per_extra_bank: what the
    media reserve grows by for every bank after the first; mtp_per_bank: what mtp_state grows by for every bank.
    scratch_per_row: what scratch grows by for every row of the native chunk, 0 where that is settled. domain: "host", "device"
    or "unified". host_staging and host_available: the host's part where the ceiling is a device's own memory.
    """

    available: int | None = None
    shared_weights: int = 0
    per_bank: int = 0
    mtp_state: int = 0
    scratch: int = 0
    checkpoint_pool: int = 0
    ple: int = 0
    media_reserve: int = 0
    media_per_extra_bank: int = 0
    domain: str = "host"
    host_staging: int = 0
    host_available: int | None = None
    mtp_per_bank: int = 0
    scratch_per_row: int = 0

    def with_rows(self, before, after):
        """Those of a native chunk of ``after`` rows instead of ``before``."""
        return replace(self, scratch=max(0, self.scratch - self.scratch_per_row * (before - after)))


@dataclass(frozen=True)
class Quote:
    """A priced number of banks. parts: the fields of the plan's ``quote``; fits: whether every total is within its ceiling."""

    parts: dict
    fits: bool

    @property
    def banks(self):
        return self.parts["banks"]

    @property
    def total(self):
        return self.parts["total"]

    def largest(self, count=3):
        """The largest parts of the total, the largest first: (name, bytes)."""
        costs = dict.fromkeys(("shared_weights", "mtp_state", "scratch", "checkpoint_pool", "ple", "media_reserve", "floor"))
        costs = {name: self.parts[name] for name in costs} | {"per_bank": add(self.parts["per_bank"] * self.banks)}
        return sorted(((n, b) for n, b in costs.items() if b), key=lambda part: -part[1])[:count]


def add(*amounts):
    """The saturating sum of non-negative amounts."""
    return min(LARGEST, sum(amounts))


def quoted(budgets, banks, floor, host_floor=0):
    """The :class:`Quote` of so many banks above a floor. host_floor: the host's, where the ceiling is a device's."""
    media = add(budgets.media_reserve, budgets.media_per_extra_bank * (banks - 1))
    mtp = add(budgets.mtp_state, budgets.mtp_per_bank * banks)
    total = add(budgets.shared_weights, budgets.per_bank * banks, mtp, budgets.scratch, budgets.checkpoint_pool, budgets.ple,
                media, floor)  # fmt: skip
    parts = {
        "shared_weights": budgets.shared_weights, "expert_cache": 0, "expert_staging": 0, "expert_metadata": 0,
        "per_bank": budgets.per_bank, "mtp_state": mtp, "scratch": budgets.scratch,
        "checkpoint_pool": budgets.checkpoint_pool, "ple": budgets.ple, "media_reserve": media, "floor": floor,
        "available": budgets.available, "banks": banks, "total": total, "domain": budgets.domain,
    }  # fmt: skip
    fits = total <= budgets.available
    if budgets.domain == "device":
        on_host = add(budgets.host_staging, budgets.checkpoint_pool, host_floor)
        parts["host"] = {"staging": budgets.host_staging, "checkpoint_pool": budgets.checkpoint_pool, "floor": host_floor,
                         "available": budgets.host_available, "total": on_host}  # fmt: skip
        fits = fits and (budgets.host_available is None or on_host <= budgets.host_available)
    return Quote(parts, fits)


def widest(budgets, wanted, floor, host_floor=0):
    """The quote of the most banks, at most ``wanted``, that fit; of one bank, which then does not fit, where none do.

    floor: banks → bytes that stay free beside so many.
    """
    for banks in range(wanted, 0, -1):
        quote = quoted(budgets, banks, floor(banks), host_floor)
        if quote.fits or banks == 1:
            return quote
    raise ValueError(f"a quote needs at least one bank, got {wanted}")


def credited(budgets, mapped_weights, fitted_banks=None):
    """``budgets`` of a process that has already taken part of them: what was taken is no longer available and is added back
    once. fitted_banks: banks that were allocated, None while none were. Media and checkpoint memory come later, reserves are
    never held, so neither is credited."""
    if budgets.available is None:
        return budgets
    taken = mapped_weights
    if fitted_banks is not None:
        banks = (budgets.per_bank + budgets.mtp_per_bank) * fitted_banks
        taken = add(taken, banks, budgets.mtp_state, budgets.scratch, budgets.ple)
    return replace(budgets, available=add(budgets.available, taken))


def headroom(reserves, floor_gb, *, cuda, batch_planned):
    """Bytes that a fit leaves free: the larger of the serial session's reserve and, where a bank allocation is planned on a
    family with one, the batch reserve. reserves: ``options.FitReserves``."""
    serial = reserves.serial * MIB if cuda else 0
    if not batch_planned:
        batch = 0
    elif reserves.batch is not None:
        batch = reserves.batch * MIB
    elif not reserves.derived:
        batch = STATIC_RESERVE
    else:
        batch = add(floor_gb * GIB, reserves.burst * MIB)
    return min(LARGEST, max(serial, batch))
