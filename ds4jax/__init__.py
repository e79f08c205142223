"""ds4jax: the families of ds4ref in JAX/XLA."""
