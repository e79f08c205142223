"""A table of cases for the plan, evaluated: ``python -m ds4server.plan --cases FILE.json [--capabilities FILE.json]``.

A case has argv, env, facts and what to expect; its rows are the ``record`` rows of the capability table beside the file,
amended by the case's ``caps``. Every mismatch is printed.
"""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path

from . import capabilities, options, quote
from .plan import Facts, resolve

FACTS = {f.name for f in fields(Facts)}
VIEWS = ("requested", "effective", "qualified", "controls")


def record_row(table, key, changes=()):
    """The ``record`` row of a family in a capability table, with some fields changed."""
    family = next(family for family in table["families"] if family["key"] == key)
    return capabilities.row(family, family["record"] | dict(changes))


def facts_of(given):
    """The :class:`Facts` of a case. Budgets are in MiB; the platform is cuda unless the case says otherwise."""
    known = {name: value for name, value in given.items() if name in FACTS}
    budgets = given.get("memory_mib")
    if budgets is not None:
        known["budgets"] = quote.Budgets(**{name: mib << 20 for name, mib in budgets.items()})
    return Facts(**{"platform": "cuda"} | known)


def outcome(case, table):
    """(exit code or None where the process would listen, the plan or None after a command-line error)."""
    given = case["facts"]
    try:
        request = options.read(case["argv"], case["env"])
    except options.UsageError:
        return 2, None
    row = None if given["family"] is None else record_row(table, given["family"], given.get("caps", {}))
    plan = resolve(request, row, facts_of(given))
    return exit_code(request, row, plan), plan


def exit_code(request, row, plan):
    """2: refused; 0: approved by ``--check-config``; 1: the open fails by name; None: goes on to listen."""
    if plan.errors:
        return 2
    if request.check:
        return 0
    return 1 if row is None else None


def mismatches(case, table):
    """What differs from the case's expectations: one line each."""
    expect = case["expect"]
    code, plan = outcome(case, table)
    if code != expect["exit"]:
        yield f"exit is {code}, expected {expect['exit']}"
    if (plan is None) != expect.get("cli_error", False):
        yield "the command line was refused" if plan is None else "the command line was accepted"
    if plan is None:
        return
    found = plan.as_json()
    codes = [issue["code"] for issue in found["issues"]]
    if codes != expect["issues"]:
        yield f"issues are {codes}, expected {expect['issues']}"
    for view in VIEWS:
        for name, value in expect.get(view, {}).items():
            if found[view][name] != value:
                yield f"{view}.{name} is {found[view][name]!r}, expected {value!r}"
    if "quote_mib" in expect:
        yield from _quote_mismatches(found["quote"], expect["quote_mib"])


def _quote_mismatches(found, expected):
    if found is None or expected is None:
        if found is not expected:
            yield f"quote is {found}, expected {expected}"
        return
    for name, value in expected.items():
        value = value if name == "banks" else value << 20
        if found[name] != value:
            yield f"quote.{name} is {found[name]}, expected {value}"


def main(argv=None):
    top = argparse.ArgumentParser(prog="python -m ds4server.plan", description="Evaluate a table of plan cases.")
    top.add_argument("--cases", required=True, metavar="FILE", type=Path)
    top.add_argument("--capabilities", metavar="FILE", type=Path, help="default: capabilities.json beside the cases")
    args = top.parse_args(argv)
    path = args.capabilities or args.cases.with_name("capabilities.json")
    table, cases = json.loads(path.read_text()), json.loads(args.cases.read_text())["cases"]
    wrong = 0
    for case in cases:
        for line in mismatches(case, table):
            wrong += 1
            print(f"{case['name']}: {line}")
    print(f"{len(cases)} cases, {wrong} mismatches", file=sys.stderr)
    return 1 if wrong else 0
