"""ds4jax: the families of ds4ref in JAX/XLA. FAMILIES names the architectures that run; so far there are none."""

FAMILIES: frozenset[str] = frozenset()
