"""ds4server: OpenAI- and Anthropic-style HTTP over ds4ref and ds4jax."""
