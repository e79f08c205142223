"""When states go to disk and come back (section 14.4 of the serving contract): a :class:`kvstore.Store` beside the banks.

A serial request saves a *cold* prompt and *continued* frontiers while its state stands there, and its bank an *evict* record
when another request takes it over; a request of the bank lanes is written when it retires (*bank-checkpoint*) or its bank is
taken over (*bank-evict*). What is resident at a clean end is written as *shutdown* and *bank-shutdown*. Nothing is ever
computed again for it.

The key of a record is the text of its tokens, specials included: the bytes of the vocabulary's entries, one after another. With
byte-level vocabularies that is the rendered prompt, and the answer as it was sampled. A prefix of the tokens has a prefix of
the text, which is all that finding a record needs; tokens decide.

Knows nothing about jobs or threads; called by the engine's thread alone.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ds4ref.reuse import MINIMUM, MISMATCH, needs_checkpoints

from . import banks, kvpolicy
from .kvrecord import Reason
from .kvstore import Miss, Query, Saved

log = logging.getLogger("ds4server")
DEFAULTS = kvpolicy.Options()


@dataclass
class _Note:
    """What is known about a bank. serial: whether a serial request used it last; saved: the last position that was saved or
    loaded; cold: the position of a cold save that is due; mark: one that the next turn is expected to share; blocks: id → text
    of the tool calls in its sequence, which may still grow; named: ids that the last record names; record: the name of the one
    from which its state was restored, until something was computed from it to the end."""

    serial: bool = True
    saved: int = 0
    cold: int | None = None
    mark: int | None = None
    blocks: Mapping[str, str] = field(default_factory=dict)
    named: frozenset[str] = frozenset()
    record: str | None = None

    def unnamed(self):
        """Whether there are calls that no record names."""
        return not self.named.issuperset(tuple(self.blocks))


class Keeper:
    """Writes and reads records for the banks of ``reuser``.

    store: None where there is no disk; text_of: token ids → bytes; options: ``kvpolicy.Options``; partial_min: least common
    prefix of a record that is cut; partial: whether records may be cut; checkpoints: whether retiring banks are written.
    """

    def __init__(self, store, reuser, text_of, options=DEFAULTS, partial_min=MINIMUM, partial=True, checkpoints=True):
        self.store, self._reuser, self.text_of, self._options = store, reuser, text_of, options
        mode = reuser.policy.mode
        self._off = store is None or mode == "off"
        self._partial_min, self._cuts = partial_min, partial and mode == "partial"
        self._checkpoints = checkpoints
        self._layout = reuser.banks[0].state.layout
        self._notes = {}

    def restore(self, prompt, text, resident, bank):
        """(the bank that now holds a record with more than ``resident`` tokens of the prompt, None), or (None, why nothing was
        found or None). bank: whether a request of a bank lane asks."""
        if self._off:
            return None, None
        query = Query(text, prompt, self._cuts, self._partial_min, bank, resident=resident)
        found = self.store.restore(query)
        if isinstance(found, Miss):
            return None, found.reason
        place = self._reuser.room(len(found.snapshot.tokens))
        if place is None:
            return None, None  # usable, but every bank is worth more
        self.displaced(place)
        try:
            self._reuser.adopt(found.snapshot, found.key_text)
        except ValueError as error:
            self.store.quarantine(found.name, str(error))
            return None, MISMATCH
        self._notes[place] = _Note(saved=len(found.snapshot.tokens), record=found.name)
        return place, None

    def begin(self, admission, source, serial, marks=(), opening=None, blocks=None):
        """A request has got its bank, whose state was cut from the bank ``source`` or is empty (None). opening: of the prompt,
        what every conversation with its system prompt shares; blocks: id → text of the tool calls that are known in it, to
        which those of the answer are added. Returns the positions of the prompt to stop at and call ``reached``."""
        bank, at, end = admission.bank, admission.decision.cached, admission.decision.tokens
        known = self._notes.get(source)
        saved = min(known.saved, at) if known else 0
        note = _Note(serial, saved, mark=max(marks, default=None), blocks={} if blocks is None else blocks)
        if known and saved == known.saved:
            note.named = known.named
        if known and at:
            note.record = known.record
        self._notes[bank] = note
        if self._off or not serial:
            return ()
        if at == 0:
            note.cold = kvpolicy.cold_target(end, self._options, opening)
        frontiers = kvpolicy.continued_frontiers(max(note.saved, at), end, self._options)
        return tuple(sorted({*frontiers, *([] if note.cold is None else [note.cold])}))

    def reached(self, bank):
        """The bank's state has advanced: save it if it stands where a serial request saves."""
        note = self._notes[bank]
        if self._off or not note.serial:
            return
        n = bank.state.length
        if n == note.cold:
            note.cold = None
            self._save(bank, note, Reason.COLD)
        step = kvpolicy.continued_step(self._options)
        if step and n % step == 0 and n > note.saved and n >= self._options.min_tokens:
            self._save(bank, note, Reason.CONTINUED)

    def room(self, bank):
        """Tokens that the bank's state may take until it stands where a serial request saves, None for any number."""
        step = kvpolicy.continued_step(self._options)
        if self._off or not step or not self._notes[bank].serial:
            return None
        return step - bank.state.length % step

    def retired(self, bank):
        """A request has given the bank back."""
        note = self._notes[bank]
        note.record = None
        if self._off or note.serial or not self._checkpoints:
            return
        if kvpolicy.checkpoint_due(bank.state.length, note.saved, self._options, note.unnamed()):
            self._save(bank, note, Reason.BANK_CHECKPOINT)
            self._save_mark(bank, note, Reason.BANK_CHECKPOINT)

    def displaced(self, bank):
        """The bank's sequence is about to be replaced."""
        self._write(bank, Reason.EVICT, Reason.BANK_EVICT)

    def close(self):
        """The process ends: write what is resident."""
        for bank in self._reuser.banks:
            self._write(bank, Reason.SHUTDOWN, Reason.BANK_SHUTDOWN)

    def failed(self, bank):
        """Computing from the bank's state has failed. Where it came from a record, that may be why: it is not tried again."""
        note = self._notes.get(bank)
        if note is not None and note.record is not None:
            self.store.quarantine(note.record, "computing from it failed")

    def forget(self, bank):
        """The bank was emptied."""
        self._notes.pop(bank, None)

    def _write(self, bank, serial_reason, bank_reason):
        note, n = self._notes.get(bank), bank.state.length
        if self._off or note is None or (n == note.saved and not note.unnamed()):
            return
        least = self._options.min_tokens
        if n >= least if note.serial else kvpolicy.bank_persists(n, self._options):
            reason = serial_reason if note.serial else bank_reason
            self._save(bank, note, reason)
            self._save_mark(bank, note, reason)

    def _save(self, bank, note, reason):
        """Write the bank's state as it stands."""
        tokens, blocks = bank.state.tokens, dict(note.blocks)
        if self._saved(tokens, bank.state.snapshot, reason, blocks):
            note.saved, note.named = len(tokens), frozenset(blocks)

    def _save_mark(self, bank, note, reason):
        """Write the state at the position that the next turn will share, under its own text, where the whole sequence would not
        serve that turn."""
        n, tokens, policy = note.mark, bank.state.tokens, self._options
        if n is None or not policy.min_tokens <= n < len(tokens) or (reason.bank and not kvpolicy.bank_persists(n, policy)):
            return
        if self._cuts and not needs_checkpoints(self._layout):
            return  # the record of the whole sequence can be cut there
        checkpoint = self._reuser.pool.best(np.array(tokens, np.int64), n)
        if checkpoint is not None and len(checkpoint.tokens) != n:
            checkpoint = None

        def take():
            return banks.cut(bank.state.snapshot(), n, self._layout, checkpoint)

        self._saved(tokens[:n], take, reason, dict(note.blocks))

    def _saved(self, tokens, take, reason, blocks):
        """Whether a record of ``tokens`` is there now. take: () → their snapshot, or None where it cannot be had; only called
        where the store might write it, since it copies the whole state."""
        text = self.text_of(tokens)
        refusal = self.store.refusal(text, len(tokens))
        if refusal is None and (snapshot := take()) is not None:
            tool_map = {name.encode(): block.encode() for name, block in blocks.items()}
            result = self.store.save(text, snapshot, reason, tool_map=tool_map)
            if isinstance(result, Saved):
                return True
            refusal = result.reason
        if refusal is not None:
            log.debug("%s record of %d tokens: %s", reason.name.lower(), len(tokens), refusal)
        return False
