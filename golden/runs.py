"""The goldens: tiny artifacts and logits that an implementation other than ours computed.

``golden/<arch>/manifest.json`` names the oracle and lists the runs. Files live beside the manifest; larger ones only in the
shared oracle folder (``DS4_SHARED``, or ``shared`` beside the checkout), and their runs are skipped without it.
"""

import json
import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ds4ref.model import Model

GOLDEN = Path(__file__).parent
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options of ds4jax's compiler for tests of arithmetic: XLA need not make it fast."""
SHARED = Path(os.environ.get("DS4_SHARED", GOLDEN.parent.parent / "shared")) / "oracle"


def available(arch, name):
    """Where a golden file lies: in the repository, else in the shared folder, else None."""
    found = [folder / arch / name for folder in (GOLDEN, SHARED) if (folder / arch / name).exists()]
    return found[0] if found else None


@dataclass(frozen=True)
class Run:
    """One artifact with its independent logits."""

    arch: str
    artifact: str
    cases: str
    tolerance: float
    trace: str | None = None
    float64: float | None = None
    options: dict = field(default_factory=dict, hash=False)

    def path(self, name):
        """Where a file of this run lies; skips the test when only the absent shared folder has it."""
        if (found := available(self.arch, name)) is not None:
            return found
        pytest.skip(f"{self.arch}/{name} is not in golden/ and the shared oracle folder is absent")

    def arrays(self, name):
        with np.load(self.path(name)) as data:
            return dict(data)

    def __str__(self):
        cases = Path(self.cases).stem
        return f"{self.arch}-{Path(self.artifact).with_suffix('')}" + ("" if cases == "cases" else f"-{cases}")


def runs():
    """Every run of every manifest."""
    for manifest in sorted(GOLDEN.glob("*/manifest.json")):
        for entry in json.loads(manifest.read_text())["runs"]:
            yield Run(arch=manifest.parent.name, **entry)


@cache
def _model(path, dtype, options):
    return Model.open(path, dtype, **dict(options))


def reference(run, dtype=np.float32):
    """The run's artifact opened by ds4ref; kept, since several tests share it."""
    options = {k: str(run.path(v[1:])) if isinstance(v, str) and v.startswith("@") else v for k, v in run.options.items()}
    return _model(run.path(run.artifact), dtype, tuple(options.items()))
