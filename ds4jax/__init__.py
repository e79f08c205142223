"""ds4jax: the families of ds4ref in JAX/XLA. FAMILIES names the architectures that run."""

from .families import FAMILIES

__all__ = ["FAMILIES"]
