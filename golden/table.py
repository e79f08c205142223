"""Measure every run and rewrite the table of ``golden/README.md``: ``python golden/table.py``.

Needs the shared oracle folder for the runs whose files are not in the repository.
"""

import json
import sys

import numpy as np
from runs import GOLDEN, SHARED, available, reference, runs

BEGIN, END = "<!-- table: python golden/table.py -->", "<!-- end of table -->"


def worst(run, dtype):
    """Largest absolute error over all cases of a run, and how many positions were compared."""
    cases, model = run.arrays(run.cases), reference(run, dtype)
    names = sorted(name.removeprefix("tokens_") for name in cases if name.startswith("tokens_"))
    error = 0.0
    for name in names:
        logits = model.verify(model.new_state(), cases[f"tokens_{name}"])[cases[f"pos_{name}"]]
        error = max(error, float(np.max(np.abs(logits - cases[f"logits_{name}"]))))
    return error, names, sum(len(cases[f"pos_{name}"]) for name in names)


def rows():
    yield "| family | artifact | cases (positions) | float32 | float64 | trace | where |"
    yield "|---|---|---|---|---|---|---|"
    for run in runs():
        if not (available(run.arch, run.artifact) and available(run.arch, run.cases)):
            sys.exit(f"{run}: its files are neither in golden/ nor in {SHARED}")
        error, names, positions = worst(run, np.float32)
        exact = f"{worst(run, np.float64)[0]:.1e}" if run.float64 is not None else "–"
        artifact = run.artifact.removesuffix(".gguf") + ("" if run.cases.endswith("cases.npz") else f" ({run.cases})")
        options = "".join(f", {name}={value}" for name, value in run.options.items())
        where = "golden" if (GOLDEN / run.arch / run.artifact).exists() else "shared"
        trace = "yes" if run.trace else "–"
        cases = f"{', '.join(names)} ({positions})"
        yield f"| {run.arch} | {artifact}{options} | {cases} | {error:.1e} | {exact} | {trace} | {where} |"


def oracles():
    yield "| family | oracle | confirmed by |"
    yield "|---|---|---|"
    for manifest in sorted(GOLDEN.glob("*/manifest.json")):
        entry = json.loads(manifest.read_text())
        yield f"| {manifest.parent.name} | {entry['oracle']} | {entry.get('confirmed', '–')} |"


def main():
    readme = GOLDEN / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    table = "\n".join([BEGIN, "", *rows(), "", *oracles(), "", END])
    readme.write_text(before + table + after)


if __name__ == "__main__":
    main()
