"""Which backend computes, and why: the reference (NumPy) or JAX.

Looks at what is installed; loads no model.
"""

from dataclasses import dataclass
from importlib.util import find_spec

NAMES = ("auto", "numpy", "jax")


class BackendError(ValueError):
    """The backend asked for cannot run here. One sentence."""


@dataclass(frozen=True)
class Backend:
    """``name``: "reference" or "jax". ``reason``: why it was taken, one sentence."""

    name: str
    reason: str


def choose(requested, architecture, jax_installed=None, jax_families=None):
    """The backend for ``requested`` ("auto", "numpy" or "jax") and an architecture.

    A forced backend that cannot run is a :class:`BackendError`; ``auto`` falls back to the reference and says why.
    """
    if requested == "numpy":
        return Backend("reference", "the NumPy reference was asked for")
    missing = _why_not_jax(architecture, jax_installed, jax_families)
    if missing is None:
        return Backend("jax", "JAX is installed and ds4jax runs this family")
    if requested == "jax":
        raise BackendError(f"--backend jax cannot run this file: {missing} (accepted: auto, numpy)")
    return Backend("reference", f"{missing}, so the NumPy reference runs, slowly")


def _why_not_jax(architecture, installed, families):
    if installed is None:
        installed = find_spec("jax") is not None
    if not installed:
        return "JAX is not installed"
    if families is None:
        from ds4jax import FAMILIES as families
    return None if architecture in families else f"ds4jax does not implement architecture {architecture!r} yet"
