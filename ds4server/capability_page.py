"""The public page of capabilities: ``python -m ds4server.capability_page > docs/capabilities.md``.

Made of the product's table, of what ``qualification.json`` supports, and of the ``controls`` of a plan resolved on every row,
so that the page cannot say anything that a plan does not.
"""

import sys

from . import capabilities, options
from .plan import Facts, resolve

COMMAND = "python -m ds4server.capability_page > docs/capabilities.md"
HEAD = f"""# Capabilities

What `ds4server` implements for each family, and what has been verified. Generated; rewrite it with

```sh
{COMMAND}
```

Levels: **none** is not implemented, **unverified** is implemented, **qualified** is verified by the named tests on the named
artifact and backend, and for nothing wider. The artifacts are the tiny random ones of `golden/`: no real weights have been run
here, so every real file gets the warning `artifact_unqualified`. `ds4server --check-config -m FILE …` says what holds for a
file and a command line before anything is opened.
"""


def controls(key, backend):
    """The controls of a plan with every default on a family's row."""
    return resolve(options.read([], {}), capabilities.product(key, backend), Facts(platform=backend)).controls


def page():
    """The page, as text."""
    families = capabilities.table()["families"]
    gates = capabilities.table("qualification.json")["gates"]
    fields = capabilities.table()["fields"].items()
    levels = ["reuse", "exact reuse", "snapshots", "banks", "drafting", "disk"]
    kept = ["family", "GGUF architecture", "at once", "prefix reuse", "drafting", "disk", "native chunk variable"]
    evidence = ["family", "backend", "supports", "artifact", "fingerprint", "date", "tests"]
    parts = [
        HEAD,
        "## Families\n\nDrafting and disk as on the reference.\n",
        _table(kept, [_implemented(family) for family in families]),
        "## Qualified\n",
        _table(["family", "backend", *levels], [line for family in families for line in _verified(family)]),
        "## Evidence\n",
        _table(evidence, [_evidence(gate) for gate in gates]),
        "## Fields\n",
        "\n".join(f"- `{name}`: {text}" for name, text in fields) + "\n",
    ]
    return "\n".join(parts)


def _evidence(gate):
    tests = "<br>".join(f"`{test}`" for test in gate["tests"])
    artifact, mark = f"`{gate['file']}`", f"`{gate['artifact']}`"
    return [gate["family"], gate["backend"], ", ".join(sorted(gate["supports"])), artifact, mark, gate["date"], tests]


def _implemented(family):
    found = controls(family["key"], "reference")
    variable = found["native_prefill_env"]
    names = ", ".join(f"`{name}`" for name in family["architectures"])
    banks = {"serial": "one", "opt_in": "several, when named", "persistent": "several"}[found["banks"]]
    return [
        family["model"],
        names,
        banks,
        found["prefix_reuse"],
        found["mtp"],
        found["disk"],
        f"`{variable}`" if variable else "–",
    ]


def _verified(family):
    """A line for every backend on which something is qualified."""
    for backend in capabilities.BACKENDS:
        row = capabilities.product(family["key"], backend)
        levels = [
            row.reuse_support,
            row.exact_support or row.reuse_support,
            row.snapshot,
            row.bank_support,
            row.mtp_support,
            row.disk,
        ]
        if capabilities.QUALIFIED in levels:
            yield [family["model"], backend, *levels]


def _table(head, lines):
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
