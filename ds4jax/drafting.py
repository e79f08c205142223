"""Drafters on the device: :mod:`ds4ref.drafting` with the same verbs, over the same files.

A drafter's blocks keep their rows in arrays of their own, with a slot for every bank of the model; a :class:`Draft` has one of
them as long as somebody holds it. ``extend`` only notes what the target consumed. What was noted is computed when a proposal
needs it, or when it fills a chunk, all of its tokens in one program. Where the drafts are just the best tokens (``choose`` has
``barred``, the ids that are not drafted, and ``took(tokens, leads)`` → drafts), all of them come from that program too; where a
sampler on the host chooses, every further draft is a small program of its own.

The newest token is taken for consumed as soon as drafts are proposed after it, since a target consumes it first. Where it then
consumes another one, the draft begins anew.

Which blocks there are, whether they are used and whether a file fits is ds4ref's to say. A family's module here has the
arithmetic over [B, T] (``families``): ``draft_input(c, top, h)`` → hidden rows, ``draft_block(c, d, top, w, state, hidden,
tokens)`` → hidden rows, ``draft_logits(c, d, top, w, hidden)`` → [..., V]. top: the tensors of the model's ends; w: those of
block d by their name without its prefix; state: its components without their number, whose positions are the target's and
whose rows begin with the draft. Where the block's tensors are not called ``blk.{layers + d}.…`` or there are more ends,
``draft_tensors(c, artifact)`` → (ends, blocks): name → tensor, and a dictionary of these per block.

A block drafter's module has ``draft_tensors``, with a dictionary per layer; ``commit(c, top, w, state, outputs)``, outputs: [B,
T, …] of each tapped layer, w: a dictionary per layer, state: its components by their names; ``draft_rows(c, top, w,
state, anchor, count)`` → [B, N, …], N = ``longest``: the first predicts the token after the anchor's [B], and ``count`` [B] of
them are wanted; state is at a chunk of no tokens behind what is committed;
``draft_logits(c, top, w, row, previous)`` → [..., V].

Letters: B banks, always one here; T tokens, D hidden, V vocabulary.
"""

from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import SimpleNamespace
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ds4ref import drafting as reference
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.state import Recurrent, Rows

from . import families, primitives
from .compilation import Programs, call
from .layers import layer_tensors
from .model import _cleared, _operands, rounded, sizes_used
from .state import Chunk, Sequences, allocate
from .weights import pack


@dataclass(eq=False)
class Draft:
    """What a drafter keeps of one sequence; see :class:`ds4ref.drafting.Draft`.

    slot: of the arrays, None as long as there is nothing in them; lengths: rows of each block; hidden: per block the row
    [1, 1, …] that waits for its next token, or None (of block 0 it is ``last``, a tap); noted: pairs of a tap and the token
    after it that are not computed yet; ahead: the token after ``last`` where it is computed already, and what came of it.
    """

    start: int
    lengths: list[int]
    hidden: list
    slot: int | None = None
    last: object = None
    noted: list = field(default_factory=list)
    ahead: tuple | None = None
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self):
        """Tokens of the target that it follows."""
        return self.start + len(self.tokens)

    def restart(self):
        """Forget everything: follow the target from where it stands now."""
        self.__init__(self.length, [0] * len(self.lengths), [None] * len(self.hidden))


class Slots:
    """Which draft has which slot. One that is no longer held by anybody has none; where all are taken, the draft that was used
    longest ago begins anew."""

    def __init__(self, count):
        self._count, self._owners = count, {}

    def of(self, draft):
        """The draft's slot, and whether it is new."""
        new = draft.slot is None
        if new:
            self._owners = {slot: owner for slot, owner in self._owners.items() if owner() is not None}
            free = [slot for slot in range(self._count) if slot not in self._owners]
            if not free:
                oldest = next(iter(self._owners))
                self._owners.pop(oldest)().restart()
                free = [oldest]
            draft.slot = free[0]
        self._owners.pop(draft.slot, None)
        self._owners[draft.slot] = ref(draft)
        return draft.slot, new


class Chain:
    """Drafts by predictor blocks; see :class:`ds4ref.drafting.Chain`."""

    def __init__(self, model, like, module, ends, blocks):
        """like: ds4ref's drafter of the same file; ends, blocks: packed tensors beside the model's own, and per block."""
        self.model, self.module, self.config = model, module, like.config
        self.longest, self.taps = like.longest, like.taps
        self.layouts = [{name.rsplit(".", 1)[1]: kind for name, kind in layout.items()} for layout in like.layouts]
        self._weights = {"top": model._weights["top"] | ends, "blocks": blocks}
        self._arrays = [_allocated(layout, model) for layout in self.layouts]
        self._slots, self._programs = Slots(model.banks), Programs()
        self._sizes = _chunk_sizes(model)
        self._lasting = all(isinstance(kind, Rows) for layout in self.layouts for kind in layout.values())

    @property
    def compiled(self):
        """Programs compiled so far, but for those that only move rows and those let go since."""
        return self._programs.compiled

    @property
    def most_programs(self):
        """Programs there can be: per length of the past one per size of a chunk, alone or followed by the best drafts, of which
        there may be any number, and one per further draft."""
        blocks = len(self.layouts)
        further = 1 if blocks == 1 else sum(range(1, blocks))
        return len(self.model._buckets) * (sizes_used(self._sizes, self.model.chunk) * (1 + self.longest) + further)

    def new(self, start=0):
        """A :class:`Draft` that follows a target of ``start`` tokens from now on."""
        return Draft(start, [0] * len(self.layouts), [None] * len(self.layouts))

    def extend(self, draft, token, taps):
        """The target consumed ``token`` at position ``draft.length``; taps: name → :class:`ds4jax.speculative.Tap`."""
        token = int(token)
        if draft.ahead is not None:
            if draft.ahead[0] != token:
                draft.restart()
            draft.ahead = None
        elif draft.last is not None:
            draft.noted.append((draft.last, token))
        draft.last = taps[self.taps[0]]
        draft.tokens.append(token)
        if len(draft.noted) >= self.model.chunk:
            self.flush(draft)

    def flush(self, draft):
        """Compute what was noted. → (rows of every block [1, T, …], how many of each are meant and where they begin,
        logits [V] of block 0's last); None where nothing was."""
        return self._computed(draft, "chunk", _run_chunk)[:4] if draft.noted else None

    def _computed(self, draft, name, run, more=0, *given):
        """:meth:`flush` by the program of that name, which has the further arguments ``given``, followed by what else it gives.
        more: rows that it adds."""
        count, blocks = len(draft.noted), range(len(self.layouts))
        skips = self._skips(draft)
        size = rounded(count, self._sizes, self.model.chunk)
        rows = _rows_of([tap for tap, _ in draft.noted], size)
        tokens = np.zeros((1, size), np.int32)
        tokens[0, :count] = [token for _, token in draft.noted]
        hidden = [np.float32(0) if row is None else row for row in draft.hidden[1:]]
        place = self._place(draft)
        pairs = rows, hidden, tokens, np.int32(count), np.array(skips, np.int32)
        program = self._program((name, more, self._bucket(draft, count + more)), run, 1)
        called = call(program, self._weights, self._arrays, *pairs, *place, *given)
        outs, waiting, logits, self._arrays, *found = called
        for d in blocks:
            valid = count - skips[d]
            draft.lengths[d] += valid
            if d + 1 < len(self.layouts) and valid:
                draft.hidden[d + 1] = waiting[d]
        draft.noted = []
        return outs, skips, count, logits, *found

    def _skips(self, draft):
        """Per block how many of the noted tokens come before its first row."""
        skips = [0]
        for hidden in draft.hidden[1:]:
            skips.append(0 if hidden is not None else min(len(draft.noted), skips[-1] + 1))
        return skips

    def propose(self, draft, token, count, choose):
        """As :meth:`ds4ref.drafting.Chain.propose`. One program for all drafts where ``choose`` just takes the best."""
        count, token = min(count, self.longest, self.model.context - draft.length), int(token)
        if count < 1 or draft.last is None:
            return []
        if draft.ahead is None:
            draft.noted.append((draft.last, token))
            barred = getattr(choose, "barred", None)
            if barred is not None and self._skips(draft)[-1] < len(draft.noted):
                return choose.took(*_listed(self._best(draft, token, count, barred)))
            outs, _, noted, logits = self.flush(draft)
            draft.ahead = token, logits, outs[0][:, noted - 1 : noted]
        elif draft.ahead[0] != token:
            draft.restart()
            return []
        _, logits, row = draft.ahead
        saved = None if self._lasting or count == 1 else _saved(_spoiled(self.layouts, self._arrays), draft.slot)
        drafts, rows = [], (row,)
        try:
            while (chosen := choose(np.asarray(logits))) is not None:
                drafts.append(chosen)
                if len(drafts) == count:
                    break
                rows, logits = self._further(draft, rows, drafts)
        finally:
            if saved is not None:
                self._arrays = _put_back(self.layouts, self._arrays, saved, draft.slot)
        return drafts

    def _best(self, draft, token, count, barred):
        """The best tokens, one after another, but for those ``barred``, and their leads. The last token noted is ``token``."""
        run, mask = partial(_run_best, count), _mask(self.model.vocabulary, barred)
        _, _, _, logits, row, best = self._computed(draft, "best", run, count - 1, mask)
        draft.ahead = token, logits, row
        return best

    def _further(self, draft, rows, drafts):
        """The rows of the next block, or of the only one, and the logits [V] of the draft after ``drafts``. rows: of the one
        before. What is written here lies behind the end of the draft, or is put back."""
        n = len(drafts)
        if len(self.layouts) == 1:
            d, at = 0, n - 1
        else:
            # What waits in block n was made from the newest token; the rows of the block before from drafts, but for its first.
            waiting = draft.hidden[n]
            d, at, rows = n, 0, (rows if n > 1 else ()) if waiting is None else (waiting, *(rows if n > 1 else ()))
        known = np.array([drafts[-sum(row.shape[1] for row in rows) :]], np.int32)
        lengths, *place = self._place(draft)
        place = lengths[d : d + 1] + at, *place
        program = self._program(("further", d, self._bucket(draft, n)), partial(_run_further, d), 1)
        out, logits, self._arrays[d] = call(program, self._weights, self._arrays[d], rows, known, *place)
        return (out,), logits

    def _place(self, draft):
        """Where a draft stands, as arguments of the programs: rows of every block [D], position of the first, slot."""
        slot, new = self._slots.of(draft)
        if new and any(isinstance(kind, Recurrent) for layout in self.layouts for kind in layout.values()):
            self._arrays = _cleared(self._arrays, slot)
        return np.array(draft.lengths, np.int32), np.array([draft.start], np.int32), np.array([slot], np.int32)

    def _bucket(self, draft, more):
        return rounded(max(draft.lengths) + more, self.model._buckets, self.model.context)

    def _program(self, key, run, donated):
        run = partial(run, self.module, self.config, self.layouts, self.model.profile, key[-1])
        return self._programs.jitted(key, run, donated)


class Block:
    """Drafts a block at a time; see :class:`ds4ref.drafting.Block`."""

    def __init__(self, model, like, module, ends, layers):
        """like: ds4ref's drafter of the same file; ends, layers: packed tensors beside the model's own, and per layer."""
        self.model, self.module, self.config = model, module, like.config
        self.longest, self.taps = like.longest, like.taps
        self._like, self._layout = like.module, like.module.draft_layout(like.config)
        self._weights = {"top": model._weights["top"] | ends, "layers": layers}
        self._arrays = _allocated(self._layout, model)
        self._slots, self._programs = Slots(model.banks), Programs()
        self._sizes = _chunk_sizes(model)

    @property
    def compiled(self):
        """Programs compiled so far, but for those that only move rows and those let go since."""
        return self._programs.compiled

    @property
    def most_programs(self):
        """Programs there can be: one per size of a chunk, that of a block's rows, that of a draft's logits, and one per
        number of drafts that are the best."""
        return sizes_used(self._sizes, self.model.chunk) + 2 + self.longest

    def new(self, start=0):
        """A :class:`Draft` that follows a target of ``start`` tokens from now on."""
        return Draft(start, [0], [])

    def extend(self, draft, token, taps):
        """The target consumed ``token`` at position ``draft.length``; taps: name → :class:`ds4jax.speculative.Tap`."""
        draft.noted.append([taps[name] for name in self.taps])
        draft.tokens.append(int(token))
        if len(draft.noted) >= self.model.chunk:
            self.flush(draft)

    def flush(self, draft):
        """Commit what was noted."""
        if not draft.noted:
            return
        count = len(draft.noted)
        size = rounded(count, self._sizes, self.model.chunk)
        outputs = [_rows_of(taps, size) for taps in zip(*draft.noted, strict=True)]
        program = self._program("commit", _run_commit, donated=1)
        self._arrays = call(program, self._weights, self._arrays, outputs, np.full(1, count, np.int32), *self._place(draft))
        draft.lengths[0] += count
        draft.noted = []

    def propose(self, draft, token, count, choose):
        """As :meth:`ds4ref.drafting.Chain.propose`."""
        self.flush(draft)
        if count < 1 or not self._like.ready(self.config, SimpleNamespace(length=draft.lengths[0]), draft.start):
            return []
        count, anchor, drafts = min(count, self.longest), int(token), []
        if (barred := getattr(choose, "barred", None)) is not None:
            program = self._program(("best", count), partial(_run_best_rows, count))
            place = np.array([anchor], np.int32), *self._place(draft)
            best = call(program, self._weights, self._arrays, *place, _mask(self.model.vocabulary, barred))
            return choose.took(*_listed(best))
        rows = self.rows(draft, anchor, count)
        for n in range(count):
            previous = np.array(drafts[-1:] or [anchor], np.int32)
            program = self._program("logits", _run_logits)
            chosen = choose(np.asarray(call(program, self._weights, rows, np.int32(n), previous)))
            if chosen is None:
                break
            drafts.append(chosen)
        return drafts

    def rows(self, draft, anchor, count):
        """Rows [1, longest, …] on the device, of which the first ``count`` draft the tokens after ``anchor``."""
        program = self._program("rows", _run_rows)
        known = np.array([anchor], np.int32), np.array([count], np.int32)
        return call(program, self._weights, self._arrays, *known, *self._place(draft))

    def _place(self, draft):
        """Where a draft stands, as arguments of the programs: rows [1], position of the first [1], slot [1]."""
        slot, _ = self._slots.of(draft)
        return np.array(draft.lengths, np.int32), np.array([draft.start], np.int32), np.array([slot], np.int32)

    def _program(self, name, run, donated=()):
        run = partial(run, self.module, self.config, self._layout, self.model.profile)
        return self._programs.jitted(name, run, donated)


def _run_chunk(module, c, layouts, profile, bucket, weights, arrays, rows, hidden, tokens, count, skips, lengths, origin, slot):
    """Every block over the pairs of a chunk. rows: trunk rows [1, T, …], each before its token [1, T]; hidden: of blocks 1 …
    the row that waits for the first token; skips [D]: leading tokens for which a block has no row yet.

    → (rows of every block [1, T, …], those after its skipped tokens first; of every block but the last the row of the last
    token; logits [V] of block 0 there; state)
    """
    with primitives.using(profile):
        top, size = weights["top"], tokens.shape[1]
        t, after, outs, waiting = jnp.arange(size, dtype=jnp.int32), [], [], []
        inputs = module.draft_input(c, top, rows)
        for d, (layout, w) in enumerate(zip(layouts, weights["blocks"], strict=True)):
            own = jnp.minimum(t + skips[d], size - 1)
            chunk = Chunk(lengths[d : d + 1], (count - skips[d])[None], size, bucket, slot, origin)
            state = Sequences(layout, arrays[d], chunk)
            out = module.draft_block(c, d, top, w, state, inputs[:, own], tokens[:, own])
            after.append(state.arrays)
            outs.append(out)
            if d + 1 < len(layouts):
                waiting.append(lax.dynamic_slice_in_dim(out, jnp.maximum(count - skips[d] - 1, 0), 1, axis=1))
                before = out[:, jnp.maximum(t - 1 - skips[d], 0)]
                first = (t == 0).reshape(1, -1, *(1,) * (out.ndim - 2))
                inputs = jnp.where(first, hidden[d], before)
        last = lax.dynamic_slice_in_dim(outs[0], count - 1, 1, axis=1)
        logits = module.draft_logits(c, 0, top, weights["blocks"][0], last)
        return outs, waiting, logits[0, 0], after


def _run_best(count, module, c, layouts, profile, bucket, weights, arrays, *pairs_and_barred):
    """:func:`_run_chunk`, followed by the ``count`` best drafts one after another, but for tokens ``barred``, bool [V].

    → (what that gives; the last row of block 0 [1, 1, …]; what :func:`_best_of` gives of each)
    """
    *pairs, barred = pairs_and_barred
    rows, hidden, tokens, noted, skips, lengths, origin, slot = pairs
    outs, waiting, logits, after = _run_chunk(module, c, layouts, profile, bucket, weights, arrays, *pairs)
    held = [None, *(jnp.where(noted > skips[d], row, hidden[d]) for d, row in enumerate(waiting))]
    lengths = lengths + noted - skips
    first = lax.dynamic_slice_in_dim(outs[0], noted - 1, 1, axis=1)
    saved = _saved(_spoiled(layouts, after), slot[0]) if count > 1 else None
    best, out, row = [], logits, (first,)
    for n in range(count):
        if n:
            d, at, row = (0, n - 1, row) if len(layouts) == 1 else (n, 0, (held[n], *(row if n > 1 else ())))
            known = jnp.stack([draft for draft, _ in best[-sum(part.shape[1] for part in row) :]])[None]
            chunk = lengths[d : d + 1] + at, origin, slot
            made, out, after[d] = _run_further(d, module, c, layouts, profile, bucket, weights, after[d], row, known, *chunk)
            row = (made,)
        best.append(_best_of(out, barred))
    if saved is not None:
        after = _put_back(layouts, after, saved, slot[0])
    return outs, waiting, logits, after, first, _stacked(best)


def _run_further(d, module, c, layouts, profile, bucket, weights, arrays, rows, tokens, lengths, origin, slot):
    """Block d over a few rows, in parts [1, n, …], and the tokens [1, T] after them. → (rows [1, T, …], logits [V], state)"""
    with primitives.using(profile):
        top, w, size = weights["top"], weights["blocks"][d], tokens.shape[1]
        chunk = Chunk(lengths, jnp.full(1, size, jnp.int32), size, bucket, slot, origin)
        state = Sequences(layouts[d], arrays, chunk)
        out = module.draft_block(c, d, top, w, state, jnp.concatenate(rows, axis=1), tokens)
        return out, module.draft_logits(c, d, top, w, out[:, -1:])[0, 0], state.arrays


def _run_commit(module, c, layout, profile, weights, arrays, outputs, count, lengths, origin, slot):
    """Commit the first ``count`` of the outputs [1, T, …] of the target layers. → state"""
    with primitives.using(profile):
        size = outputs[0].shape[1]
        state = Sequences(layout, arrays, Chunk(lengths, count, size, size, slot, origin))
        module.commit(c, weights["top"], weights["layers"], state, outputs)
        return state.arrays


def _run_rows(module, c, layout, profile, weights, arrays, anchor, count, lengths, origin, slot):
    """The rows [1, N, …] of a block behind what is committed, of which ``count`` [1] are asked for."""
    with primitives.using(profile):
        state = Sequences(layout, arrays, Chunk(lengths, jnp.zeros_like(count), 1, 1, slot, origin))
        return module.draft_rows(c, weights["top"], weights["layers"], state, anchor, count)


def _run_best_rows(count, module, c, layout, profile, weights, arrays, anchor, lengths, origin, slot, barred):
    """What :func:`_best_of` gives of the ``count`` best drafts of a block, one after another, but for tokens ``barred``."""
    given = lengths, origin, slot
    rows = _run_rows(module, c, layout, profile, weights, arrays, anchor, jnp.full(1, count, jnp.int32), *given)
    best, previous = [], anchor
    for n in range(count):
        best.append(_best_of(_run_logits(module, c, layout, profile, weights, rows, n, previous), barred))
        previous = best[-1][0][None]
    return _stacked(best)


def _best_of(logits, barred):
    """(the best token of logits [V] that is not ``barred``, by how much the best of all leads the second best)"""
    ids = jnp.arange(len(logits), dtype=jnp.int32)

    def best(x):  # no argmax: a reduction of two operands, slow on CPUs and unknown to jax-metal
        return jnp.min(jnp.where(x == jnp.max(x), ids, len(x) - 1))

    others = jnp.where(ids == best(logits), -jnp.inf, logits)
    return best(jnp.where(barred, -jnp.inf, logits)), jnp.max(logits) - jnp.max(others)


def _stacked(best):
    """Pairs of :func:`_best_of` as two arrays."""
    return tuple(jnp.stack(values) for values in zip(*best, strict=True))


def _listed(best):
    """What :func:`_stacked` gives as lists of numbers."""
    return [np.asarray(values).tolist() for values in best]


@lru_cache(8)
def _mask(vocabulary, barred):
    """bool [V] on the device: which tokens are ``barred``, a frozenset of ids."""
    mask = np.zeros(vocabulary, bool)
    mask[list(barred)] = True
    return jax.device_put(mask)


def _run_logits(module, c, layout, profile, weights, rows, n, previous):
    """Draft logits [V] of row n of a block [1, N, …] after the token ``previous`` [1]."""
    with primitives.using(profile):
        row = lax.dynamic_index_in_dim(rows, n, axis=1, keepdims=False)
        return module.draft_logits(c, weights["top"], weights["layers"], row, previous)[0]


def _chunk_sizes(model):
    """Sizes of chunks that programs are made for."""
    return tuple(sorted({*model.trial_sizes, *model._sizes, model.chunk}))


def _allocated(layout, model):
    """State of one block, for every bank of the model: component → arrays [1, B, …]."""
    dtype = {name: jnp.float32 if isinstance(kind, Recurrent) else model.rows_in for name, kind in layout.items()}
    return {name: allocate(kind, 1, model.banks, model.context, dtype[name]) for name, kind in layout.items()}


def _rows_of(taps, size):
    """What taps stand for, as one array [1, size, …] on the device; what is behind their number means nothing."""
    parts = []  # (array, row, token of the first, how many)
    for tap in taps:
        array, row, token, count = parts[-1] if parts else (None, 0, 0, 0)
        if array is tap.array and row == tap.row and token + count == tap.token:
            parts[-1] = array, row, token, count + 1
        else:
            parts.append((tap.array, tap.row, tap.token, 1))
    rows = None
    at = 0
    for array, row, token, count in parts:
        rows = _picked(array, row, token, size=size) if rows is None else _put(rows, array, row, token, at)
        at += count
    return rows


@partial(jax.jit, static_argnames="size")
def _picked(array, row, token, size):
    """Tokens token … of bank ``row`` of [B, T, …]: [1, size, …]."""
    return array[row, jnp.minimum(token + jnp.arange(size), array.shape[1] - 1)][None]


@partial(jax.jit, donate_argnums=0)
def _put(rows, array, row, token, at):
    """Rows [1, T, …] of which those from ``at`` on are tokens token … of bank ``row``, as far as there are any."""
    t = jnp.arange(rows.shape[1]) - at
    new = array[row, jnp.clip(token + t, 0, array.shape[1] - 1)][None]
    return jnp.where((t >= 0).reshape(1, -1, *(1,) * (rows.ndim - 2)), new, rows)


def _spoiled(layouts, arrays):
    """Of the state of the blocks the arrays that drafts spoil: all but what lies behind the end until it is overwritten."""
    return [
        {
            name: {key: array for key, array in held[name].items() if key != "blocks"}
            for name, kind in layout.items()
            if not isinstance(kind, Rows)
        }
        for layout, held in zip(layouts, arrays, strict=True)
    ]


def _put_back(layouts, arrays, saved, slot):
    """The state in which a slot has what was :func:`_saved` of it."""
    back = _restored(_spoiled(layouts, arrays), saved, slot)
    return [
        held | {name: held[name] | restored for name, restored in of_block.items()}
        for held, of_block in zip(arrays, back, strict=True)
    ]


@jax.jit
def _saved(spoiled, slot):
    return jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, slot, 1, axis=1), spoiled)


@partial(jax.jit, donate_argnums=0)
def _restored(spoiled, saved, slot):
    return jax.tree.map(lambda array, held: lax.dynamic_update_slice_in_dim(array, held, slot, axis=1), spoiled, saved)


def attach(model, sidecar=None):
    """The drafter of a :class:`ds4jax.model.Model`, which from now on watches what it reads. Arguments and errors are those of
    :func:`ds4ref.drafting.attach`; ArtifactError too where ds4jax has no arithmetic for it."""
    target = SimpleNamespace(
        artifact=model.artifact, family=model.family, config=model.config, weights=model._host, dtype=np.float32
    )
    if sidecar is not None and not isinstance(sidecar, Artifact):
        sidecar = Artifact.open(sidecar)
    like, artifact = reference.attach(target, sidecar), sidecar or model.artifact
    module = families.drafter(like.module)
    if module is None:
        raise ArtifactError(f"{artifact.path.name}: ds4jax does not implement the drafter of {model.artifact.architecture}")
    ends, blocks = tensors(module, like, artifact)
    ends, *blocks = ({name: _packed(model, tensor) for name, tensor in held.items()} for held in (ends, *blocks))
    model.watch(int(name.removeprefix("h_")) for name in like.taps)
    return (Block if isinstance(like, reference.Block) else Chain)(model, like, module, ends, blocks)


def tensors(module, like, artifact):
    """(tensors of ends, those of each block by their name there) that a drafter reads: ``like`` is ds4ref's, ``module`` the one
    that drafts like its module, ``artifact`` the file that holds it."""
    if hasattr(module, "draft_tensors"):
        return module.draft_tensors(like.config, artifact)
    found = families.named(module, like.config, artifact)
    return {}, [layer_tensors(found, "blk.{i}.", like.layers + d) for d in range(len(like.layouts))]


def _packed(model, tensor):
    operands = _operands([tensor], "bfloat16" if model.rows_in == jnp.bfloat16 else "float32")
    return pack(tensor, model.weights_layout, operands)
