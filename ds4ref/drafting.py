"""Drafters: what proposes the next tokens of a sequence, from what a model left behind at the tokens before.

Two kinds, whose blocks the families write (``families/``):

* A *chain* of predictor blocks (NextN, MTP). Block d turns the hidden row of position t and token t + d + 1 into the hidden row
  from which token t + d + 2 is predicted; block 0 reads the trunk's row. With several blocks each drafts one token; a single
  block drafts any number by reading its own output.
* A *block drafter* (DSpark, DFlash). It keeps a row per committed position, made from the outputs of some trunk layers, and
  proposes a whole block of tokens at once from rows of noise that see each other.

A drafter follows one target sequence: ``extend`` is told every token that the target has consumed, with the parts of the
trunk's trace named in ``taps``. ``propose`` leaves no trace. What it keeps (:class:`Draft`) is no part of the target's state,
is never stored, and may begin anywhere in the sequence: after a fork, a restored record or a cut it starts anew, and drafts
less well until it has seen enough. Nothing it does can change an answer: the target judges every draft (``speculative``).

A family's module offers for a chain: ``LONGEST_DRAFT``, ``draft_layouts(c)`` (one per block), ``draft_input(c, w, h)`` (the
trunk's last layer output → block 0's hidden row), ``draft_block(c, w, state, d, position, hidden, token)`` → hidden row, and
``draft_logits(c, w, d, hidden)`` → [V]. A sidecar's module offers ``recognises(artifact)`` and ``open_sidecar(artifact,
target)`` → (config, weights), and for a block drafter ``taps(c)``, ``draft_layout(c)``, ``draft_length(c)``,
``ready(c, state, start)``, ``commit(c, w, state, position, outputs)``, ``draft_rows(c, w, state, position, anchor, count)``
→ at least count rows, the first of which predicts position + 1, and ``draft_logits(c, w, row, previous)`` → [V].
"""

from dataclasses import dataclass, field

import numpy as np

from .families import SIDECARS
from .gguf import Artifact, ArtifactError
from .sidecar import same_vocabulary
from .state import State


@dataclass
class Draft:
    """What a drafter keeps of one sequence. start: the target's length when it began.

    blocks: one state per block; hidden: per block of a chain, the row [D] that waits for its next token, or None; tokens: what
    the target consumed since ``start``.
    """

    blocks: list[State]
    hidden: list[np.ndarray | None]
    start: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self):
        """Tokens of the target that it follows."""
        return self.start + len(self.tokens)


@dataclass
class Chain:
    """Drafts by predictor blocks. longest: drafts that one proposal may have."""

    module: object
    config: object
    weights: object
    layers: int
    """Of the trunk."""
    dtype: type = np.float32
    layouts: tuple = field(init=False)
    longest: int = field(init=False)

    def __post_init__(self):
        self.layouts = tuple(self.module.draft_layouts(self.config))
        self.longest = self.module.LONGEST_DRAFT if len(self.layouts) == 1 else len(self.layouts)

    @property
    def taps(self):
        """Names of the trunk's traced arrays that ``extend`` reads."""
        return (f"h_{self.layers - 1}",)

    def new(self, start=0):
        """A :class:`Draft` that follows a target of ``start`` tokens from now on."""
        blocks = [State(layout, self.dtype) for layout in self.layouts]
        return Draft(blocks, [None] * len(blocks), start)

    def extend(self, draft, token, taps):
        """The target consumed ``token`` at position ``draft.length``; taps: traced name → array. → the blocks' new rows."""
        row, rows = self.module.draft_input(self.config, self.weights, taps[self.taps[0]]), []
        waiting = draft.hidden
        draft.hidden = [row] + [None] * (len(waiting) - 1)
        for d, hidden in enumerate(waiting):
            if hidden is None:
                break
            rows.append(self._advance(draft, d, hidden, token))
            if d + 1 < len(waiting):
                draft.hidden[d + 1] = rows[-1]
        draft.tokens.append(int(token))
        return rows

    def propose(self, draft, token, count, choose):
        """Draft up to ``count`` tokens after ``token``, which the target has not consumed. → their ids.

        ``choose(logits)`` names each draft, or None to stop. The draft's state is the same afterwards.
        """
        if draft.hidden[0] is None or count < 1:
            return []
        before = [state.checkpoint() for state in draft.blocks]
        drafts = []
        for logits in self._chained(draft, token, drafts, min(count, self.longest)):
            chosen = choose(logits)
            if chosen is None:
                break
            drafts.append(chosen)
        for state, checkpoint in zip(draft.blocks, before, strict=True):
            state.rewind(checkpoint)
        return drafts

    def _chained(self, draft, token, drafts, count):
        """Logits of one draft after another; ``drafts`` grows between two of them."""
        rows = []
        for n in range(count):
            if len(draft.blocks) == 1:
                rows = [self._advance(draft, 0, rows[0] if rows else draft.hidden[0], drafts[-1] if drafts else token)]
            else:
                # Block n still lacks the row whose token has just become known, and then reads what block n − 1 drafted from.
                rows = [hidden for hidden in (draft.hidden[n],) if hidden is not None] + rows
                known = [token, *drafts][-len(rows) :]
                rows = [self._advance(draft, n, hidden, t) for hidden, t in zip(rows, known, strict=True)]
            yield self.module.draft_logits(self.config, self.weights, n if len(draft.blocks) > 1 else 0, rows[-1])

    def _advance(self, draft, d, hidden, token):
        state = draft.blocks[d]
        position = draft.start + state.length
        row = self.module.draft_block(self.config, self.weights, state, d, position, hidden, int(token))
        state.tokens.append(int(token))
        return row


@dataclass
class Block:
    """Drafts a block at a time. longest: drafts that one proposal may have."""

    module: object
    config: object
    weights: object
    dtype: type = np.float32

    @property
    def longest(self):
        return self.module.draft_length(self.config)

    @property
    def layouts(self):
        return (self.module.draft_layout(self.config),)

    @property
    def taps(self):
        """Names of the trunk's traced arrays that ``extend`` reads."""
        return self.module.taps(self.config)

    def new(self, start=0):
        """A :class:`Draft` that follows a target of ``start`` tokens from now on."""
        return Draft([State(layout, self.dtype) for layout in self.layouts], [], start)

    def extend(self, draft, token, taps):
        """The target consumed ``token`` at position ``draft.length``; taps: traced name → array."""
        (state,) = draft.blocks
        self.module.commit(self.config, self.weights, state, draft.length, [taps[name] for name in self.taps])
        state.tokens.append(int(token))
        draft.tokens.append(int(token))

    def propose(self, draft, token, count, choose):
        """As :meth:`Chain.propose`."""
        (state,) = draft.blocks
        if count < 1 or not self.module.ready(self.config, state, draft.start):
            return []
        drafts = []
        for row in self._rows(draft, int(token), min(count, self.longest)):
            previous = drafts[-1] if drafts else int(token)
            chosen = choose(self.module.draft_logits(self.config, self.weights, row, previous))
            if chosen is None:
                break
            drafts.append(chosen)
        return drafts

    def _rows(self, draft, token, count):
        """Rows that draft the ``count`` tokens after ``token``."""
        (state,) = draft.blocks
        return self.module.draft_rows(self.config, self.weights, state, draft.length, token, count)[:count]


def follows(draft, state):
    """Whether ``draft``, or None, stands just where ``state`` does."""
    return draft is not None and draft.length == state.length and draft.tokens == state.tokens[draft.start :]


def follow(drafter, draft, state):
    """The draft to go on with at ``state``: ``draft`` itself where it stands just there, else a new one."""
    return draft if follows(draft, state) else drafter.new(state.length)


def attach(model, sidecar=None):
    """The drafter of ``model``: of ``sidecar`` (an artifact, or the path of one), else of the predictor blocks in its own file.

    ArtifactError, in one sentence, where there is none, where it is not used, or where it belongs to another model.
    """
    if sidecar is None:
        return _embedded(model)
    artifact = sidecar if isinstance(sidecar, Artifact) else Artifact.open(sidecar)
    modules = SIDECARS.get(model.artifact.architecture, ())
    if not modules:
        raise ArtifactError(f"{artifact.path.name}: {model.artifact.architecture} takes no draft sidecar")
    for module in modules:
        if module.recognises(artifact):
            same_vocabulary(artifact, model)
            config, weights = module.open_sidecar(artifact, model)
            if hasattr(module, "draft_rows"):
                return Block(module, config, weights, model.dtype)
            return Chain(module, config, weights, model.config.layers, model.dtype)
    accepted = " or ".join(module.SIDECAR for module in modules)
    found = artifact.metadata.get("general.architecture")
    raise ArtifactError(
        f"{artifact.path.name}: a file of architecture {found!r}, no draft sidecar of {model.artifact.architecture} "
        f"(accepted: {accepted})"
    )


def sidecar_of(artifact):
    """The architecture whose drafter a file is, or None."""
    return next((name for name, modules in SIDECARS.items() if any(m.recognises(artifact) for m in modules)), None)


def _embedded(model):
    name = f"{model.artifact.path.name}: {model.artifact.architecture}"
    if not getattr(model.config, "predictors", 0):
        sidecars = " or ".join(module.SIDECAR for module in SIDECARS.get(model.artifact.architecture, ()))
        hint = f"; it drafts from a sidecar: {sidecars}" if sidecars else ""
        raise ArtifactError(f"{name} holds no predictor block{hint}")
    if why := unused(model.family, model.config):
        raise ArtifactError(f"{name}: the predictor block is bound and not used: {why}")
    return Chain(model.family, model.config, model.weights, model.config.layers, model.dtype)


def unused(family, config):
    """Why the predictor blocks of a model's own file are bound and not used, as a phrase; None where they draft."""
    if not hasattr(family, "draft_block"):
        return "no use of it is described for this family"
    return family.draft_unused(config) if hasattr(family, "draft_unused") else None
