"""Which requests draft, and what is kept of their sequences from turn to turn.

Whether a request drafts is decided when it gets its bank, from its lane and its sampling; where it does not although drafting
was forced, it says why. Each bank keeps one draft: a request that continues the bank's sequence just where it stood goes on
with it, any other begins a new one there (``ds4ref.drafting.follow``). What drafting is: ``ds4ref.speculative``.

Knows nothing about families and files; called by the engine's thread alone.
"""

from dataclasses import dataclass, field

from ds4ref.drafting import follows
from ds4ref.guidance import Ahead
from ds4ref.speculative import Cost, Speculator

from .lanes import LANES

LANE = "drafting was asked for and does not run in the {} lane"
SAMPLED = "drafting was asked for, and sampled requests of this family decode ordinarily"


@dataclass
class Drafts:
    """drafter: of ``ds4ref.drafting.attach`` or its like; target: (model, state) → what it drafts for; length: most drafts in a
    trial; margin: as ``Speculator``; forced: whether a request that does not draft says why; lanes: those that draft; sampled:
    whether sampled requests do; cost: of a draft, learnt from what passes take, None where it is not."""

    drafter: object
    target: object
    length: int
    margin: float = 0.0
    forced: bool = False
    lanes: frozenset = frozenset(LANES)
    sampled: bool = True
    cost: Cost | None = None
    _kept: dict = field(default_factory=dict)

    def refusal(self, job):
        """Why a job does not draft on its lane, or None."""
        if job.lane not in self.lanes:
            return LANE.format(job.lane)
        return SAMPLED if not self.sampled and job.generation.params.temperature > 0 else None

    def speculator(self, model, job, bank):
        """The ``Speculator`` of a job from where its bank stands, or None where the job does not draft."""
        if (why := self.refusal(job)) is not None:
            job.fallback_reason = job.fallback_reason or (why if self.forced else None)
            return None
        draft = self._kept.pop(bank, None)
        if not follows(draft, bank.state):
            draft = None  # let go before there is another
        mask = None if job.generation.guidance is None else Ahead(job.generation)
        target, cost = self.target(model, bank.state), self.cost or Cost()
        return Speculator(target, self.drafter, self.length, self.margin, draft, mask, cost)

    def left(self, bank, speculator):
        """A job that drafted has left its bank as it stands."""
        self._kept[bank] = speculator.draft

    def forget(self, bank):
        """The bank was emptied."""
        self._kept.pop(bank, None)
