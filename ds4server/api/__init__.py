"""The HTTP surfaces: one module each, and what they share (bodies, errors, SSE framing, validation)."""
