"""A loaded model: an artifact, its family, and the three verbs prefill, decode and verify.

Knows nothing about text, sampling, reuse or HTTP. Every verb advances a state one token at a time through the family's
``forward``, so the logits depend on the token sequence alone.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import families
from .gguf import Artifact, ArtifactError
from .state import State
from .weights import Weights, bind


@dataclass
class Model:
    artifact: Artifact
    family: Any
    config: Any
    weights: Weights
    dtype: type = np.float32
    chunk: int = 1
    """Tokens that ``prefill`` computes at a time; whoever wants to look up in between hands it no more."""

    @classmethod
    def open(cls, path, dtype=np.float32, *, context=None, **options):
        """Open a GGUF of a known family. ``options`` are the family's own switches (see its ``OPTIONS``).

        context: tokens that sequences are to have, for the families whose rotary table depends on it; the others do
        not look at it (``context_cap`` says what a sequence can have).

        ArtifactError, one sentence, for anything wrong with the file: unknown architecture, missing or misshapen tensors,
        metadata out of range.
        """
        return cls.from_artifact(Artifact.open(path), dtype, context=context, **options)

    @classmethod
    def from_artifact(cls, artifact, dtype=np.float32, *, context=None, **options):
        """:meth:`open` for an artifact that is already open."""
        family = families.of(artifact)
        if context is not None and "context" in family.OPTIONS:
            options["context"] = context
        if unknown := sorted(options.keys() - family.OPTIONS.keys()):
            accepted = ", ".join(sorted(family.OPTIONS)) or "none"
            name = f"{artifact.path.name}: architecture {artifact.architecture!r}"
            raise ArtifactError(f"{name} has no option {unknown[0]!r} (accepted: {accepted})")
        config = family.Config.from_metadata(artifact, **options)
        return cls(artifact, family, config, bind(artifact, *family.tensors(config), dtype), dtype)

    @property
    def vocabulary(self):
        """Rows of the logits."""
        return self.config.vocabulary

    @property
    def context_cap(self):
        """Tokens that one sequence may have at most."""
        return getattr(self.config, "context_cap", self.config.context)

    @property
    def layout(self):
        """State components of one sequence: name → kind."""
        return self.family.layout(self.config)

    def new_state(self):
        """An empty sequence."""
        return State(self.layout, self.dtype)

    def step(self, state, token, trace=lambda name, array: None):
        """Consume one token id and return its logits [V]. ValueError for an id outside the vocabulary."""
        token = int(token)
        if not 0 <= token < self.vocabulary:
            raise ValueError(f"token id {token} is outside the vocabulary of {self.vocabulary}")
        state.logits = self.family.forward(self.config, self.weights, state, token, trace)
        state.tokens.append(token)
        return state.logits

    def prefill(self, state, tokens):
        """Consume ``tokens`` and return the logits [V] after the last (those already known when there are none)."""
        for token in tokens:
            self.step(state, token)
        if state.logits is None:
            raise ValueError("prefill needs at least one token: this state has no logits yet")
        return state.logits

    def decode(self, states, tokens):
        """One token for each of several sequences: logits [len(states), V]."""
        return np.stack([self.step(state, token) for state, token in zip(states, tokens, strict=True)])

    def verify(self, state, tokens):
        """Consume ``tokens`` and return the logits after every one of them: [T, V]."""
        return np.stack([self.step(state, token) for token in tokens])
