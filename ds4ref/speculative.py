"""Speculative decoding: a drafter proposes, the target judges, and no distribution changes.

Theory of operation. Let x be the newest token of an answer, sampled and not consumed yet. One *trial* is

    draft     the drafter proposes d₁ … d_k, each from a distribution q of its own
    verify    the target consumes x, d₁ … d_k, which gives the logits of k + 1 positions
    accept    position by position: d is kept with probability min(1, p(d) / q(d)); the first that is not is replaced by a
              draw from max(p − q, 0), normalised, and ends the trial. After k kept drafts one token more is drawn from p
    roll back the target goes back to the last token that it consumed of what was kept

Each token is then distributed by p, the distribution of ordinary decoding (Leviathan et al. 2023, appendix A.1; Chen et al.
2023, theorem 1), where p is what the sampler draws from at that position: after stop policy, grammar, logit bias, penalties,
temperature, top-k, top-p and min-p. The same filters make q, along the drafted history; a filter on q changes how many drafts
are kept, never what is distributed. Greedy decoding is the case where p and q each have one token.

Whether a position gets a draft may depend on what came before it and on the drafter's logits, but not on the token drawn from
them: dropping a draft for what it is would bias what takes its place.

Randomness. Every draw is a function of (seed, choice, position, lane) alone (``sampling.uniform``): lane 0 draws a token from p
or from what is left of it, lane 1 draws a draft from q, lane 2 decides whether it is kept. So a seed gives one text for one
history of trials. It need not be the text without drafts, but for temperature 0, where it is, token for token.

Where a seed has to give one text whatever the history (``SamplingParams.repeats``), the token is drawn from p as without
drafts, and a draft from q with the same random number: it is kept where both are the same token. That is the text without
drafts, and keeps as many where p and q are alike, fewer than the rule above where they are not.

The target computes one token at a time, so that what it has after a roll back is bit for bit what it would have had without
drafts. Knows nothing about families, files or text: any target with the verbs of :class:`Stepwise`, any drafter with those of
``drafting``.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from .drafting import follow
from .guidance import excluded
from .sampling import Counts, distribution, draw, sample, uniform

DRAW, DRAFT, KEEP = 0, 1, 2  # lanes of random numbers


def judge(p, q, draft, u, v):
    """The token of a position whose draft came from q: the draft itself, or a draw from ``max(p − q, 0)``.

    p, q: [V] distributions; draft: ids; u decides whether it is kept, v draws; each one number or [N] independent ones.
    """
    rest = np.maximum(p - q, 0.0)
    rest = rest if rest.any() else p  # equal but for rounding: then nothing is rejected but by rounding
    ids = np.flatnonzero(rest)
    cumulative = np.cumsum(rest[ids])
    at = np.searchsorted(cumulative, v * cumulative[-1], side="right")
    return np.where(u * q[draft] < p[draft], draft, ids[np.minimum(at, len(ids) - 1)])


class Drafted(np.ndarray):
    """Logits [V] of a position that has a draft, drawn from ``q``. ``sampling.sample`` lets them find their token."""

    @classmethod
    def of(cls, logits, draft, q):
        drafted = np.asarray(logits).view(cls)
        drafted.draft, drafted.q = draft, q
        return drafted

    def settle(self, params, position, *, counts, banned, choice):
        """The position's token by :func:`judge`; arguments and errors are those of ``sampling.sample``."""
        p = distribution(self, params, counts=counts, banned=banned)
        u, v = (uniform(params.seed, choice, position, lane) for lane in (KEEP, DRAW))
        return int(judge(p, self.q, self.draft, u, v))


class Cost:
    """What a draft costs in steps of the target: about a third until it is measured.

    Whoever times passes tells (:meth:`took`). A pass with drafts is compared with those without of as many sequences, and
    always the shortest of the newest ones counts: what makes others longer, a compilation or other work on the machine, is not
    the drafts'. Knows nothing about what is computed.
    """

    newest, enough, stale = 8, 2, 64

    def __init__(self, per_draft=0.3):
        self.per_draft = per_draft
        self._plain, self._drafted = {}, {}  # seconds by the number of sequences, and by that and the number of drafts
        self._since = 0

    def due(self, sequences):
        """Whether the next pass of so many had better have no drafts, so that there is something to compare with."""
        return len(self._plain.get(sequences, ())) < self.enough or self._since >= self.stale

    def took(self, drafts, seconds):
        """A pass took so long. drafts: of each sequence, how many."""
        sequences, total = len(drafts), sum(drafts)
        self._since = self._since + 1 if total else 0
        held, key = (self._drafted, (sequences, total)) if total else (self._plain, sequences)
        held.setdefault(key, deque(maxlen=self.newest)).append(seconds)
        plain = min(self._plain.get(sequences, ()), default=None)
        found = [(min(times), total) for (n, total), times in self._drafted.items() if n == sequences]
        if plain and found:
            self.per_draft = max(0.0, min((seconds / plain - 1) * sequences / total for seconds, total in found))


@dataclass
class Pace:
    """How many drafts a trial is worth: as many as give most tokens for what they cost.

    ``rate`` estimates how often a draft is kept whose predecessors were, from the newest judgements. So n drafts give
    1 + rate + … + rateⁿ tokens, in a trial of 1 + n · cost steps of the target. Where none gives most, drafting pauses for
    ``rest`` tokens and then tries one again. With a cost that nobody measures the same seed gives the same trials.
    """

    most: int
    cost: Cost = field(default_factory=Cost)
    rest: int = 32
    memory: float = 0.125
    rate: float = 1.0
    paused: int = 0
    """Pauses so far."""
    _resting: int = 0

    def width(self):
        """Drafts to try next, 0 while drafting pauses."""
        if self._resting:
            self._resting -= 1
            return 0
        return max(1, self._best())

    def judged(self, kept, rejected):
        """A trial kept so many drafts and rejected one more or none."""
        for outcome in [1.0] * kept + [0.0] * rejected:
            self.rate += self.memory * (outcome - self.rate)
        if self._best() == 0:
            self.paused += 1
            self._resting = self.rest

    def _best(self):
        """The number of drafts that gives most tokens a step."""
        best, most, tokens = 0, 1.0, 1.0
        for n in range(1, self.most + 1):
            tokens += self.rate**n
            if (gain := tokens / (1 + n * self.cost.per_draft)) > most:
                best, most = n, gain
        return best


class Stepwise:
    """A target that computes one token at a time. Another backend offers the same verbs, ``prefill`` and ``verify`` in one call
    for all tokens.

    It remembers a checkpoint per token of the trial, which holds what cannot be truncated; the rest is cut in place.
    """

    def __init__(self, model, state):
        self.model, self.state = model, state
        self._marks = []

    def feed(self, token, names):
        """Consume ``token``; → the traced parts ``names`` of its computation."""
        taps = {}

        def trace(name, array):
            if name in names:
                taps[name] = np.array(array)

        self.model.step(self.state, token, trace)
        return taps

    def prefill(self, tokens, names):
        """Consume ``tokens``, a chunk of a prompt; → the traced parts ``names`` of every one."""
        return [self.feed(token, names) for token in tokens]

    def verify(self, tokens, names):
        """Consume ``tokens`` on trial; → (logits [V] after each, its traced parts ``names``)."""
        rows, taps, self._marks = [], [], []
        for token in tokens:
            taps.append(self.feed(token, names))
            rows.append(self.state.logits)
            self._marks.append(self.state.checkpoint())
        return rows, taps

    def keep(self, n):
        """Take back all but the first ``n`` ≥ 1 tokens of the trial, as if they had never been."""
        if n < len(self._marks):
            self.state.rewind(self._marks[n - 1])


@dataclass(frozen=True)
class Trial:
    """What is to be judged. tokens: those that the target consumes on trial, the newest of the answer first; drafts: ids; qs:
    the distribution [V] that each was drawn from, none where drafts are what the answer would have after such logits."""

    tokens: list[int]
    drafts: list[int]
    qs: list[np.ndarray]


@dataclass
class Speculator:
    """Drafting for one answer on ``target``. Between two calls its state and the draft stand at the same token.

    width: drafts of a trial at most; margin: a draft whose logit leads the second best by less ends the proposal; draft: what
    the drafter kept of this sequence (``drafting.follow`` says whether it still fits); mask: where the answer has a grammar,
    ``mask(drafts)`` → what it excludes after so many drafts, ids or bool [V], None where none can follow (``guidance.Ahead``);
    cost: of a draft.

    Whoever verifies for several answers at once takes :meth:`advance` apart: ``prepare`` for each, :func:`verify_together`,
    ``settle`` for each.
    """

    target: object
    drafter: object
    width: int
    margin: float = 0.0
    draft: object = None
    mask: object = None
    cost: Cost = field(default_factory=Cost)
    trials: int = 0
    drafted: int = 0
    """Drafts that were judged."""
    accepted: int = 0
    pace: Pace = field(init=False)

    def __post_init__(self):
        if not 1 <= self.width <= self.drafter.longest:
            raise ValueError(f"a trial has 1 to {self.drafter.longest} drafts with this drafter, got {self.width}")
        self.pace = Pace(self.width, self.cost)
        self.draft = follow(self.drafter, self.draft, self.state)

    @property
    def state(self):
        """The target's."""
        return self.target.state

    def feed(self, token):
        """Consume a token that is no draft."""
        self.drafter.extend(self.draft, token, self.target.feed(token, self.drafter.taps))

    def prefill(self, tokens):
        """Consume ``tokens`` of the prompt."""
        for token, taps in zip(tokens, self.target.prefill(tokens, self.drafter.taps), strict=True):
            self.drafter.extend(self.draft, token, taps)

    def advance(self, generation):
        """One trial from the newest token of ``generation``, which has not finished. → its :class:`Step` list, not empty."""
        trial = self.prepare(generation)
        return self.settle(generation, trial, *self.target.verify(trial.tokens, self.drafter.taps))

    def prepare(self, generation, most=None):
        """The :class:`Trial` that goes on from the newest token of ``generation``, which has not finished. most: drafts at
        most, None for as many as are worth it. Nothing is computed by the target."""
        token = generation.generated[-1]
        drafts, qs = self._propose(generation, token, most)
        # An end token would never be consumed: it is judged, but not computed.
        end = bool(drafts) and generation.policy.is_end(drafts[-1])
        return Trial([token, *(drafts[:-1] if end else drafts)], drafts, qs)

    def settle(self, generation, trial, rows, taps):
        """Judge a trial whose tokens the target has consumed, and keep what stands. rows, taps: of ``target.verify``.
        → its :class:`Step` list, not empty."""
        steps, judged, kept = self._accept(generation, rows, trial.drafts, trial.qs)
        self.target.keep(len(steps))
        for token, seen in zip(trial.tokens, taps[: len(steps)], strict=False):
            self.drafter.extend(self.draft, token, seen)
        if trial.drafts:
            self.trials += 1
            self.drafted += judged
            self.accepted += kept
            self.pace.judged(kept, judged - kept)
        return steps

    def _propose(self, generation, token, most):
        """(drafts, ``Trial.qs`` of them): no more than context and budget leave room for."""
        limit = min(generation.budget, generation.context - len(generation.prompt))
        width = min(self.pace.width(), limit - len(generation.generated) - 1)
        if most is not None:
            width = min(width, most)
        qs = []
        if width < 1:
            return [], qs
        return self.drafter.propose(self.draft, token, width, _Chooser(generation, self.margin, self.mask, qs)), qs

    def _accept(self, generation, rows, drafts, qs):
        """(steps, drafts judged, drafts kept). Judging stops with the first draft that is not kept and with the answer."""
        steps, kept = [], 0
        for n, (row, draft) in enumerate(zip(rows, drafts, strict=False)):
            steps.append(generation.accept(Drafted.of(row, draft, qs[n]) if qs else row))
            if steps[-1].token != draft:
                break
            kept += 1
            if generation.finish is not None:
                break
        judged = len(steps)
        if kept == len(drafts) and generation.finish is None:
            steps.append(generation.accept(rows[-1]))
        return steps, judged, kept


class _Chooser:
    """Names the drafts of one proposal, by the sampler's own rules along the drafted history."""

    def __init__(self, generation, margin, mask, qs):
        self.generation, self.margin, self.mask, self.qs = generation, margin, mask, qs
        self.params, self.tracker = generation.params, generation.tracker
        self.position = len(generation.prompt) + len(generation.generated)
        self.drafts, self.counts, self.ended = [], None, False

    @property
    def barred(self):
        """Ids that are not drafted, where every draft is just the best of the others; None where more is to be asked."""
        params = self.params
        if params.temperature or params.penalised or params.logit_bias or self.mask is not None:
            return None
        return self.generation.policy.masked(self.tracker is not None and self.tracker.is_open)

    def took(self, best, leads):
        """What of the ``best`` tokens is drafted: up to an end token, or to one whose logit leads by less than the margin."""
        for token, lead in zip(best, leads, strict=True):
            if self.ended or (self.margin and lead < self.margin):
                break
            self.drafts.append(token)
            self.ended = self.generation.policy.is_end(token)
        return self.drafts

    def __call__(self, logits):
        """The next draft, whose distribution joins ``qs`` where it was drawn; None where drafting had better stop."""
        if self.ended or (self.margin and _lead(logits) < self.margin):
            return None
        params, policy = self.params, self.generation.policy
        if params.penalised and self.counts is None:
            self.counts = Counts(len(logits), self.generation.prompt)
            for token in self.generation.generated:
                self.counts.add(token)
        banned = self._banned(len(logits))
        if banned is None:
            return None
        choice, allowed = self.generation.choice, {"counts": self.counts, "banned": banned}
        if params.temperature == 0 or params.repeats:
            token = sample(logits, params, self.position, choice=choice, **allowed)
        else:
            self.qs.append(distribution(logits, params, **allowed))
            token = draw(self.qs[-1], uniform(params.seed, choice, self.position, DRAFT))
        self.drafts.append(token)
        self.ended = policy.is_end(token)
        self.position += 1
        if self.counts is not None:
            self.counts.add(token)
        if self.tracker is not None:
            self.tracker = self.tracker.after(self.generation.tokenizer.token_bytes(token))
        return token

    def _banned(self, rows):
        """What the next draft may not be: ids or bool [rows]; None where there is no next one."""
        masked = self.generation.policy.masked(self.tracker is not None and self.tracker.is_open)
        banned = () if self.mask is None else self.mask(tuple(self.drafts))
        if banned is None:
            return None
        banned = excluded(masked, banned, rows)
        return None if isinstance(banned, np.ndarray) and banned.all() else banned


def _lead(logits):
    """By how much the best logit leads the second best."""
    if len(logits) < 2:
        return np.inf
    second, first = np.partition(logits, len(logits) - 2)[-2:]
    return first - second


def verify_together(speculators, trials):
    """(logits, taps) of each trial, as ``target.verify`` has them: one after another, or in one program where targets share a
    drafter and a model with ``verify_rows(states, tokens of each)`` → logits of each; ``target.tried`` then finds the taps.
    Where that program raises it has consumed nothing."""
    first, tokens = speculators[0], [trial.tokens for trial in trials]
    model, names = first.target.model, first.drafter.taps
    shared = all(s.target.model is model and s.drafter is first.drafter for s in speculators)
    if len(speculators) > 1 and shared and hasattr(model, "verify_rows"):
        rows = model.verify_rows([s.state for s in speculators], tokens)
        return [s.target.tried(found, names) for s, found in zip(speculators, rows, strict=True)]
    return [s.target.verify(part, s.drafter.taps) for s, part in zip(speculators, tokens, strict=True)]


def run(speculator, generation, prompt=None, progress=lambda done, total: None):
    """``generation.run`` with drafts: the same arguments but for the speculator, the same tokens where greedy.

    Steps come one by one; those of one trial are computed together, so whoever stops in between finds the rest of the trial in
    ``generation``, and state and generation in accord.
    """
    step = generation.start()
    tokens = generation.prompt if prompt is None else prompt
    for done, token in enumerate(tokens):
        progress(done, len(tokens))
        speculator.feed(token)
    progress(len(tokens), len(tokens))
    if generation.finish is not None:
        yield step
        return
    if speculator.state.logits is None:
        raise ValueError("an answer needs a prompt of at least one token")
    yield generation.accept(speculator.state.logits)
    while generation.finish is None:
        yield from speculator.advance(generation)
