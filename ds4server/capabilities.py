"""What each family can do here, as data: a row per family, its levels, and what has been verified.

A table is a JSON file: ``families``, each with a key, names, its native chunk variable and one or more rows of fields (the
table of this package says what every field means). In the product's own table no field says ``qualified``: it says what is
implemented, and :func:`product` raises a level only where a gate of ``qualification.json`` passed on that backend. So a level
cannot be claimed, only earned. Knows nothing about requests.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files

NONE, UNVERIFIED, QUALIFIED = LEVELS = ("none", "unverified", "qualified")
EARNED = ("bank_support", "reuse_support", "exact_support", "disk", "snapshot", "mtp_support")
BACKENDS = ("cuda", "metal", "cpu", "reference")
VERIFIED_CHUNKS = (256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class NativePrefill:
    """env: the family's variable of the native chunk; default and max in tokens. None where nothing is recorded."""

    env: str | None = None
    default: int | None = None
    max: int | None = None


@dataclass(frozen=True)
class Row:
    """One family's capabilities; ``capabilities.json`` explains every field.

    reuse_lane and think_max_ctx are of the product's table: "both" where checkpoints are replayed without a bank driver too,
    and the context from which the family thinks without a bound.
    """

    key: str
    reported: str
    model: str = ""
    banks: str = "serial"
    bank_support: str = NONE
    reuse: str = "none"
    reuse_support: str = NONE
    exact_support: str | None = None
    reuse_lane: str = "bank"
    disk: str = NONE
    snapshot: str = NONE
    mtp: str = "none"
    mtp_support: str = NONE
    spec_lane: str = "none"
    spec_draft_min: int = 1
    spec_draft_max: int | None = None
    takes_sidecar: bool | str = False
    sampled_speculation: bool | None = None
    hosts: tuple[str, ...] = ()
    bank_hosts: tuple[str, ...] = ()
    mtp_hosts: tuple[str, ...] = ()
    distributed: bool = False
    ctx_max: int | None = None
    qualified_ctx: int | None = None
    qualified_banks: int | None = None
    qualified_prompt: int | None = None
    media_serial: bool = False
    fit_reserve: bool = False
    single_bank_driver: bool = False
    qualified_native_chunk: int | None = None
    native_rows: tuple[int, int] | None = None
    native_halves: bool = False
    measured: tuple[Mapping, ...] = ()
    think_max_ctx: int | None = None
    note: str = ""
    native_prefill: NativePrefill = field(default_factory=NativePrefill)


NAMES = frozenset(f.name for f in fields(Row))
_TUPLES = ("hosts", "bank_hosts", "mtp_hosts", "native_rows", "measured")


def row(family, values):
    """A :class:`Row` of a table's family and one of its dictionaries of fields; names that a row does not have are left out."""
    known = {name: value for name, value in values.items() if name in NAMES}
    known |= {name: tuple(known[name]) for name in _TUPLES if known.get(name) is not None}
    prefill = NativePrefill(**(family.get("native_prefill") or {}))
    return Row(
        **{"key": family["key"], "reported": family["reported"], "model": family["model"], "native_prefill": prefill} | known
    )


@cache
def table(name="capabilities.json"):
    """A JSON file of this package."""
    return json.loads(files("ds4server").joinpath(name).read_text())


def architectures():
    """GGUF architecture → key of its row."""
    return {name: family["key"] for family in table()["families"] for name in family["architectures"]}


def product(key, backend, gates=None):
    """The product's own row of a family on a backend. ``gates``: passed gates (default: those of ``qualification.json``)."""
    family = next(family for family in table()["families"] if family["key"] == key)
    base = row(family, table()["every_family"] | family["product"])
    gates = table("qualification.json")["gates"] if gates is None else gates
    return qualified(base, [gate for gate in gates if gate["family"] == key and gate["backend"] == backend])


def qualified(base, gates):
    """``base`` with the levels and limits that passed gates support: a level is raised only where something is implemented."""
    earned = {}
    for gate in gates:
        for name, value in gate["supports"].items():
            if name in EARNED and value == QUALIFIED and getattr(base, name) == UNVERIFIED:
                earned[name] = QUALIFIED
            elif name in ("qualified_ctx", "qualified_banks", "qualified_prompt"):
                earned[name] = max(value, earned.get(name, 0))
    return replace(base, **earned)


def artifacts(key, backend):
    """Fingerprints of the artifacts that the passed gates of a family ran on."""
    gates = table("qualification.json")["gates"]
    return {gate["artifact"] for gate in gates if gate["family"] == key and gate["backend"] == backend}


def host(backend, accepted):
    """Whether a list of hosts takes a backend: ``reference`` counts as ``cpu`` unless the list names it."""
    return backend in accepted or (backend == "reference" and "cpu" in accepted)
