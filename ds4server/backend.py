"""Which backend computes, and why: JAX on cuda, metal or cpu, or the NumPy reference.

Looks at what is installed; loads no model and opens no device.
"""

from dataclasses import dataclass
from importlib.util import find_spec

from . import host

JAX = ("cuda", "metal", "cpu")


class BackendError(ValueError):
    """The backend asked for cannot run here. One sentence."""


@dataclass(frozen=True)
class Backend:
    """``name``: "cuda", "metal", "cpu" or "reference". ``reason``: why it was taken, one sentence. ``platform``: what "auto"
    takes here for this file."""

    name: str
    reason: str
    platform: str

    @property
    def fell_back(self):
        """Whether "auto" had to take the reference."""
        return self.platform == "reference"


def platform():
    """What "auto" takes here for a family that ds4jax runs."""
    return host.platform() if find_spec("jax") is not None else "reference"


def choose(requested, architecture, jax_installed=None, jax_families=None, platform=None):
    """The backend for one of the words of ``--backend`` and an architecture.

    A word for JAX that cannot run is a :class:`BackendError`, except that a device that is not visible is found out by the
    plan; ``auto`` falls back to the reference and says why. jax_installed, jax_families, platform: what is here.
    """
    missing = _why_not_jax(architecture, jax_installed, jax_families)
    found = "reference" if missing is not None else host.platform() if platform is None else platform
    if requested in ("numpy", "reference"):
        return Backend("reference", "the NumPy reference was asked for", found)
    if missing is None:
        name = found if requested in ("auto", "jax") else requested
        return Backend(name, "JAX is installed and ds4jax runs this family", found)
    if requested != "auto":
        raise BackendError(f"--backend {requested} cannot run this file: {missing} (accepted: auto, reference)")
    return Backend("reference", f"{missing}, so the NumPy reference runs, slowly", found)


def _why_not_jax(architecture, installed, families):
    if installed is None:
        installed = find_spec("jax") is not None
    if not installed:
        return "JAX is not installed"
    if families is None:
        from ds4jax import FAMILIES as families
    return None if architecture in families else f"ds4jax does not implement architecture {architecture!r} yet"
