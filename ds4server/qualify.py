"""Run the gates and write down what they prove: ``python -m ds4server.qualify [--family KEY] [--backend NAME] [--field NAME]``.

A gate is a set of tests of this repository on one artifact and backend; every test must pass, none may be skipped. A gate that
passes becomes an entry of ``qualification.json`` with the fields that it supports, the artifact's fingerprint, the tests and
the date; one that fails loses its entry. :mod:`capabilities` reads the levels from there, so nothing else can claim one.
"""

import argparse
import datetime
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from . import capabilities
from .owner.fingerprint import Logical, fingerprint

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_name("qualification.json")

REUSE = {"reuse_support": capabilities.QUALIFIED, "exact_support": capabilities.QUALIFIED}
SNAPSHOT = {"snapshot": capabilities.QUALIFIED}
BANKS = {"bank_support": capabilities.QUALIFIED, "qualified_banks": 2}
DISK = {"disk": capabilities.QUALIFIED}
DRAFTS = {"mtp_support": capabilities.QUALIFIED}


MODEL = "model.gguf"
PREDICTORS = {"qwen35": "model-mtp.gguf"}
"""Golden folder → the file with the predictor, where that is another."""


@dataclass(frozen=True)
class Gate:
    """tests: node ids, in which {arch} stands for the family's golden folder; slow: whether they are among the long runs."""

    backend: str
    supports: dict
    tests: tuple[str, ...]
    slow: bool = False

    def concerns(self, family):
        """Whether the family has on this backend what the gate is about: every family, but for drafts."""
        row = capabilities.product(family["key"], self.backend, [])
        return self.supports is not DRAFTS or (row.mtp_support != capabilities.NONE and self.backend in row.mtp_hosts)

    def artifact(self, arch):
        """The file that the tests run on."""
        return f"golden/{arch}/{PREDICTORS.get(arch, MODEL) if self.supports is DRAFTS else MODEL}"


_FAMILIES = "tests/ds4ref/test_reuse_families.py::"
_SNAPSHOTS = "tests/ds4ref/test_snapshots.py::"
_GATES = "tests/ds4server/test_gates.py::"
GATES = (
    Gate("reference", REUSE, (
        _FAMILIES + "test_no_history_changes_an_answer[{arch}-model]",
        _FAMILIES + "test_a_growing_conversation_computes_what_is_new[{arch}-model]",
        _FAMILIES + "test_a_turn_replays_no_more_than_the_gap_to_a_checkpoint[{arch}-model]",
        _FAMILIES + "test_a_marked_history_is_not_replayed[{arch}-model]",
    )),
    Gate("reference", SNAPSHOT, (
        *(_SNAPSHOTS + f"test_any_state_comes_back[{{arch}}-model-{n}]" for n in (0, 1, 5, 40)),
        _SNAPSHOTS + "test_mutations_are_refused[{arch}-model]",
    )),
    Gate("cpu", REUSE, (_GATES + "test_reuse_on_the_device[{arch}]",), slow=True),
    *(Gate(backend, BANKS, (_GATES + f"test_two_banks[{backend}-{{arch}}]",), slow=True) for backend in ("reference", "cpu")),
    *(
        Gate(backend, fields, (_GATES + f"test_records_over_restarts[{backend}-{{arch}}]",), slow=True)
        for backend, fields in (("reference", DISK), ("cpu", DISK | SNAPSHOT))
    ),
    *(Gate(backend, DRAFTS, (_GATES + f"test_drafts[{backend}-{{arch}}]",), slow=True) for backend in ("reference", "cpu")),
)  # fmt: skip


def golden_folder(family):
    """The family's folder in ``golden/``: one of its architectures."""
    return next((name for name in family["architectures"] if (ROOT / "golden" / name / "model.gguf").exists()), None)


def entry(gate, family):
    """The record of a gate that has passed for a family."""
    arch = golden_folder(family)
    logical = Logical.of([ROOT / gate.artifact(arch)])
    return {
        "family": family["key"], "backend": gate.backend, "supports": gate.supports,
        "artifact": fingerprint(logical.nbytes, logical.read), "file": gate.artifact(arch),
        "tests": [test.format(arch=arch) for test in gate.tests], "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def passed(tests, slow=False):
    """The node ids that ran and passed."""
    import pytest

    class Outcome:
        def __init__(self):
            self.good, self.bad = set(), set()

        def pytest_runtest_logreport(self, report):
            if report.outcome != "passed":
                self.bad.add(report.nodeid)
            elif report.when == "call":
                self.good.add(report.nodeid)

    outcome = Outcome()
    flags = ["-q", "--rootdir", str(ROOT), *(["--slow"] if slow else [])]
    pytest.main([*flags, *(str(ROOT / test) for test in tests)], plugins=[outcome])
    return outcome.good - outcome.bad


def same(a, b):
    """Whether two records are of the same gate."""
    return (a["family"], a["backend"], a["supports"]) == (b["family"], b["backend"], b["supports"])


def main(argv=None):
    """Returns the exit code: 1 when a gate failed."""
    top = argparse.ArgumentParser(prog="python -m ds4server.qualify", description="Run the gates and record what passes.")
    top.add_argument("--family", action="append", metavar="KEY", help="only this family (default: all; may be repeated)")
    top.add_argument("--backend", metavar="NAME", help="only gates of this backend (default: all)")
    top.add_argument("--field", metavar="NAME", help="only gates that support this field (default: all)")
    args = top.parse_args(argv)
    if not (ROOT / "golden").is_dir():
        print(f"qualify: {ROOT} holds no golden/ folder; gates run in a checkout", file=sys.stderr)
        return 1
    families = [f for f in capabilities.table()["families"] if args.family is None or f["key"] in args.family]
    wanted, good = [], set()
    for slow in (False, True):
        chosen = [gate for gate in GATES if gate.slow == slow and args.backend in (None, gate.backend)]
        chosen = [gate for gate in chosen if args.field is None or args.field in gate.supports]
        entries = [entry(gate, family) for family in families for gate in chosen if gate.concerns(family)]
        if entries:
            wanted += entries
            good |= passed([test for e in entries for test in e["tests"]], slow)
    ran = [gate for gate in wanted if good.issuperset(gate["tests"])]
    kept = [gate for gate in json.loads(RECORD.read_text())["gates"] if not any(same(gate, other) for other in wanted)]
    gates = sorted(kept + ran, key=lambda gate: (gate["family"], gate["backend"], sorted(gate["supports"])))
    lines = ",\n".join("  " + json.dumps(gate) for gate in gates)
    RECORD.write_text('{\n "format": 1,\n "gates": [\n' + lines + "\n ]\n}\n")
    for gate in wanted:
        if gate not in ran:
            print(f"qualify: {gate['family']} on {gate['backend']} has not passed: {', '.join(gate['tests'])}", file=sys.stderr)
    return 0 if ran == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
