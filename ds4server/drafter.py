"""The drafter of a process: in which file it is, whether it attaches, and what it is held to.

It is in the model's own file, in the one that ``--mtp`` names (role "mtp"), or in the one that DS4_DSPARK_MODEL names (role
"drafter", block drafters alone). Looking for it reads headers: the weights are mapped and nobody multiplies them.
"""

from dataclasses import dataclass

from ds4ref import drafting, families
from ds4ref.drafting import Block
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.model import Model
from ds4ref.speculative import Stepwise
from ds4ref.weights import Weights

from .owner import worker

SEPARATE = ("deepseek", "external")
"""Kinds of families (``capabilities.json``, mtp) that take a drafter by variable."""


@dataclass(frozen=True)
class Drafter:
    """role: of its file, None for the model's own; artifact: that file, None alike; found: ``ds4ref.drafting``'s, attached to a
    model of which nothing was read."""

    role: str | None
    artifact: Artifact | None
    found: object

    @property
    def layouts(self):
        """State components of each of its blocks: name → kind."""
        return self.found.layouts

    @property
    def longest(self):
        return self.found.longest

    def load(self, request, model):
        """:class:`Loaded` for an opened model. ArtifactError where its backend does not have the drafter; OwnerError where
        its weights are to come from an owner and cannot."""
        held = None if self.artifact is None else worker.shared(request, self.artifact, self.role)
        attach, target = drafting.attach, Stepwise
        if not isinstance(model, Model):
            from ds4jax.drafting import attach
            from ds4jax.speculative import Target as target
        return Loaded(self.role, attach(model, held or self.artifact), target, held is not None)


@dataclass(frozen=True)
class Loaded:
    """drafter: attached to the model that serves; target: (model, state) → what it drafts for; imported: whether the weights of
    its file are in an owner's memory."""

    role: str | None
    drafter: object
    target: object = Stepwise
    imported: bool = False


def look(request, row, artifact, config):
    """(the :class:`Drafter` that a request leads to, or None; fact → why it is not so, None where it is).

    config: of the model, None where it cannot be loaded; then a sidecar is only opened.
    """
    found, told = None, {}
    model = config and Model(artifact, families.of(artifact), config, Weights(artifact))
    for fact, path, role in (("mtp_path_ok", request.mtp, "mtp"), ("dspark_ok", request.dspark, "drafter")):
        if path is None:
            continue
        try:
            sidecar = Artifact.open(path)
            if model is not None:
                attached = drafting.attach(model, sidecar)
                if role == "drafter":
                    _check_separate(row, attached, path, request.mtp if found else None)
                found = Drafter(role, sidecar, attached)
            told[fact] = None
        except ArtifactError as error:
            told[fact] = str(error)
    if row.mtp == "embedded" and request.mtp is None and model is not None:
        try:
            found = Drafter(None, None, drafting.attach(model))
        except ArtifactError as error:
            told["mtp_loaded"] = str(error)
    return found, told


def _check_separate(row, attached, path, other):
    """ArtifactError where DS4_DSPARK_MODEL is no place for a drafter."""
    if row.mtp not in SEPARATE:
        raise ArtifactError(f"{path}: a drafter of {row.reported} is named with --mtp")
    if not isinstance(attached, Block):
        raise ArtifactError(f"{path}: it drafts token by token; such a sidecar is named with --mtp")
    if other is not None:
        raise ArtifactError(f"{path}: --mtp {other} names a drafter too; one of them is accepted")
