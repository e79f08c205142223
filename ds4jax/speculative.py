"""A target of speculative decoding on the device, with the verbs of :class:`ds4ref.speculative.Stepwise`.

A trial is one program: its tokens are consumed on trial and taken back without a copy of the past (:mod:`ds4jax.trials`). What
the drafter reads of them stays on the device: a *tap* says where.
"""

from dataclasses import dataclass

import jax
import numpy as np


@dataclass(frozen=True)
class Tap:
    """The residual after a layer at one token, on the device: array[row, token]."""

    array: jax.Array
    row: int
    token: int

    def value(self):
        """It as a NumPy array."""
        return np.asarray(self.array[self.row, self.token])


class Target:
    """One bank of a :class:`ds4jax.model.Model` that watches what a drafter reads (``drafting.attach`` sees to that)."""

    def __init__(self, model, bank):
        self.model, self.state = model, bank

    def feed(self, token, names):
        """Consume ``token``; → the taps ``names`` of its computation."""
        return self.prefill([token], names)[0]

    def prefill(self, tokens, names):
        """Consume ``tokens``, a chunk at a time; → the taps ``names`` of each."""
        taps = []
        for at in range(0, len(tokens), self.model.chunk):
            part = tokens[at : at + self.model.chunk]
            self.model.prefill(self.state, part)
            taps += self._taps(names, len(part))
        return taps

    def verify(self, tokens, names):
        """Consume ``tokens`` on trial; → (logits [V] after each, its taps ``names``)."""
        (rows,) = self.model.verify_rows([self.state], [tokens])
        return self.tried(rows, names)

    def tried(self, rows, names):
        """What :meth:`verify` returns, of a trial that gave the logits ``rows``."""
        return list(rows), self._taps(names, len(rows))

    def keep(self, n):
        """Take back all but the first ``n`` ≥ 1 tokens of the trial, as if they had never been."""
        self.model.keep([self.state], [n])

    def _taps(self, names, count):
        seen = self.state.seen
        arrays = {f"h_{layer}": array for layer, array in zip(self.model.taps, seen.arrays, strict=True)}
        return [{name: Tap(arrays[name], seen.row, token) for name in names} for token in range(count)]
