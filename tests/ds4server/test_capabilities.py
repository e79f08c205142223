"""The product's own table: whole, honest, and the source of the public page."""

from dataclasses import replace
from pathlib import Path

import pytest

from ds4ref import families
from ds4server import capabilities, capability_page, qualify
from ds4server.capabilities import Row, product, qualified
from ds4server.options import read
from ds4server.plan import Facts, resolve

ROOT = Path(__file__).parents[2]
TABLE = capabilities.table()
KEYS = [family["key"] for family in TABLE["families"]]
GATES = capabilities.table("qualification.json")["gates"]


def test_every_family_has_a_row():
    assert capabilities.architectures().keys() == families.FAMILIES.keys()
    assert len(KEYS) == len(set(KEYS)) == len(families.MODULES)
    assert set(TABLE["fields"]) == set(TABLE["every_family"])
    assert set(TABLE["fields"]) == capabilities.NAMES - {"key", "reported", "model", "native_prefill"}


def test_the_table_itself_claims_nothing():
    for values in (TABLE["every_family"], *(family["product"] for family in TABLE["families"])):
        assert not {name for name, value in values.items() if value == "qualified"}
        assert not any(values.get(name) for name in ("qualified_ctx", "qualified_banks", "qualified_prompt", "measured"))


SPOKEN = {"sidecar": [True], "deepseek": [True], "external": [False], "embedded": [False, "optional"]}
"""Kind of drafter → whether --mtp belongs to it."""


@pytest.mark.parametrize("family", TABLE["families"], ids=KEYS)
def test_drafters_are_those_that_there_are(family):
    """The table's kind and bounds against what the families' modules offer."""
    row, module = product(family["key"], "reference", []), families.FAMILIES[family["architectures"][0]]
    sidecars = [m for name in family["architectures"] for m in families.SIDECARS.get(name, ())]
    if row.mtp in ("none", "bound_only"):
        assert not sidecars and row.mtp_support == "none" == row.spec_lane
        assert (row.mtp == "bound_only") == ("predictors" in module.Config.__dataclass_fields__)
        return
    assert row.mtp_support == "unverified" and row.spec_lane == "both" and row.spec_draft_min == 1
    assert row.takes_sidecar in SPOKEN[row.mtp]
    assert hasattr(module, "draft_block") or row.mtp != "embedded"
    assert bool(sidecars) == (row.mtp != "embedded" or row.takes_sidecar == "optional")
    if row.mtp in ("external", "deepseek"):
        assert any(hasattr(m, "draft_rows") for m in sidecars)
    longest = getattr(module, "LONGEST_DRAFT", 1) if row.mtp == "embedded" else 1
    assert row.spec_draft_max == (longest if longest > 1 else None), "elsewhere the file tells"


def test_a_level_is_earned_by_a_gate_on_its_backend():
    gate = {"family": "motif-3", "backend": "cpu", "supports": {"reuse_support": "qualified", "mtp_support": "qualified"}}
    row = product("motif-3", "cpu", [gate])
    assert (row.reuse_support, row.exact_support, row.mtp_support) == ("qualified", "unverified", "none")
    for other in (product("motif-3", "cuda", [gate]), product("k-exaone", "cpu", [gate]), product("motif-3", "cpu", [])):
        assert other.reuse_support == "unverified"


def test_limits_are_the_widest_that_passed():
    row = Row("x", "x", bank_support="unverified")
    gates = [{"supports": {"qualified_banks": n, "bank_support": "qualified"}} for n in (2, 4, 3)]
    assert qualified(row, gates) == replace(row, qualified_banks=4, bank_support="qualified")
    assert qualified(row, []) == row


@pytest.mark.parametrize("gate", GATES, ids=lambda g: f"{g['family']}-{g['backend']}-{'-'.join(sorted(g['supports']))}")
def test_a_gate_is_of_this_tree(gate):
    """It is one that ``qualify`` runs, on the artifact that lies here, by tests that exist."""
    family = next(family for family in TABLE["families"] if family["key"] == gate["family"])
    current = [
        qualify.entry(g, family) for g in qualify.GATES if g.backend == gate["backend"] and g.supports == gate["supports"]
    ]
    assert [{**entry, "date": gate["date"]} for entry in current] == [gate]
    for test in gate["tests"]:
        file, name = test.split("::")
        assert f"def {name.split('[')[0]}(" in (ROOT / file).read_text()


def test_every_reuse_on_the_reference_is_qualified():
    """What ``--prefix-reuse auto`` takes there."""
    for key in KEYS:
        request = read(["-m", "x", "--cpu"], {})
        plan = resolve(request, product(key, "reference"), Facts(platform="reference"))
        assert plan.effective["prefix_reuse"] == "partial" and plan.qualified["prefix_reuse"] == "qualified", key


def test_a_failed_gate_loses_its_entry(tmp_path, monkeypatch):
    monkeypatch.setattr(qualify, "RECORD", tmp_path / "qualification.json")
    qualify.RECORD.write_text('{"gates": []}')
    wanted = {"motif-3": ["--family", "motif-3", "--backend", "reference"]}["motif-3"]
    monkeypatch.setattr(qualify, "passed", lambda tests, slow: set(tests))
    assert qualify.main(wanted) == 0
    assert '"motif-3"' in qualify.RECORD.read_text() and '"snapshot"' in qualify.RECORD.read_text()
    monkeypatch.setattr(qualify, "passed", lambda tests, slow: {test for test in tests if "snapshots" in test})
    assert qualify.main(wanted) == 1
    assert '"snapshot"' in qualify.RECORD.read_text() and '"reuse_support"' not in qualify.RECORD.read_text()


def test_passing_means_that_every_test_ran(tmp_path, monkeypatch):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\ndef test_good(): pass\n\ndef test_bad(): assert 0\n\ndef test_skipped(): pytest.skip('x')\n"
    )
    monkeypatch.setattr(qualify, "ROOT", tmp_path)
    assert {test.split("::")[1] for test in qualify.passed(["test_some.py"])} == {"test_good"}


def test_the_page_is_the_tables():
    assert (ROOT / "docs" / "capabilities.md").read_text() == capability_page.page(), f"stale; run: {capability_page.COMMAND}"


def test_the_page_shows_the_controls():
    text = capability_page.page()
    assert capability_page.COMMAND in text
    for family in TABLE["families"]:
        found = capability_page.controls(family["key"], "reference")
        line = next(line for line in text.splitlines() if line.startswith(f"| {family['model']} |"))
        assert f"| {found['prefix_reuse']} | {found['mtp']} | {found['disk']} |" in line
