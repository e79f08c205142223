"""Records of states in one directory, so that a prefix survives its bank and the process.

Theory of operation. The directory is all there is: no index, no open files between two calls, and other servers may use it
at the same time. A file is

    absent → temporary → record → absent        record → record: replaced by a whole one, or its hits counted in place

What a record says of itself is read once per change of the file and remembered
(:mod:`kvlisting`); what it holds is checked when it is loaded, all of it, through one descriptor: text against the name,
checksums, identity, layout, and at last the tokens. Text only finds a record; tokens decide. A record that contradicts itself
is deleted, one that cannot be used here is not tried again, and neither ever fails a request.

One process at a time makes room and puts one more record in place (``kvfiles.exclusive``), so the records of all servers
together never exceed the budget after a write. Whoever cannot have its turn soon does not write.

Knows nothing about models or chat formats; when to save is the caller's (``kvpolicy``).
"""

import errno
import logging
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ds4ref import reuse, snapshots
from ds4ref.state import Compressed, Ring, Snapshot, State

from . import kvfiles, kvrecord
from .kvlisting import Listing
from .kvpolicy import Options, eviction_score
from .kvrecord import Flag, Header, NotRecord, Reason, RecordError

TEMPORARY = re.compile(r"(\.payload|[0-9a-f]{40}\.kv\.tmp)\.\d+\.\d+")
ATTEMPTS = 4  # records read for one prompt
BLOCK = 1 << 16  # of a text, read at a time
TOOL_MAP_IDS = 100_000
TOOL_MAP_BYTES = 512 << 20
NO_ROOM = "no room could be made for the record"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
DEFAULTS, NO_FLAGS = Options(), Flag(0)


class StoreError(ValueError):
    """The directory cannot be used; one sentence."""


def check(directory):
    """StoreError where no store could be opened in ``directory``. Leaves nothing behind."""
    made, directory = [], Path(directory)
    try:
        for path in reversed([directory, *directory.parents]):
            if not path.exists():
                path.mkdir(0o700)
                made.append(path)
        kvfiles.check(directory)
    except OSError as error:
        raise StoreError(_unusable(directory, error)) from None
    finally:
        for path in reversed(made):
            with suppress(OSError):
                path.rmdir()


def _unusable(directory, error):
    return f"disk store {directory} cannot be used: {error.strerror or error}; accepted is a directory to write files into"


@dataclass(frozen=True)
class Form:
    """What states of this process are: records of another form are refused.

    family: a number of 0 to 255; quant_bits: of the routed experts, 1 to 32; context: tokens that a state may hold;
    layout: of the components (``state``); identity: what a snapshot states of itself.
    """

    family: int
    quant_bits: int
    context: int
    layout: dict
    identity: snapshots.Identity


@dataclass(frozen=True)
class Query:
    """A prompt that looks for a record.

    text: what it renders, bytes; tokens: its ids; partial: whether a record that departs from it may be cut; partial_min: least
    common prefix then, in bytes and again in tokens; bank: whether a bank will continue, which must be left some of the prompt
    to compute; media: whether the text holds keys of media; resident: tokens that a live state serves anyway.
    """

    text: bytes
    tokens: object
    partial: bool = False
    partial_min: int = reuse.MINIMUM
    bank: bool = False
    media: bool = False
    resident: int = 0


@dataclass(frozen=True)
class Candidate:
    """A record that should serve ``query``: its text shares ``common`` bytes with the prompt."""

    name: str
    tokens: int
    common: int
    query: Query = field(repr=False)


@dataclass(frozen=True)
class Loaded:
    """A state of which ``cached`` tokens serve the prompt, and what was stored with it. tool_map: id → block, bytes."""

    name: str
    snapshot: Snapshot
    cached: int
    key_text: bytes
    reason: Reason
    flags: Flag
    tool_map: dict


@dataclass(frozen=True)
class Miss:
    """Nothing. reason: one of ``reuse.MISSES``; None when a record was usable but a live state is as good."""

    reason: str | None


@dataclass(frozen=True)
class Saved:
    """The record is there: written now, or kept."""

    name: str
    nbytes: int
    kept: bool = False


@dataclass(frozen=True)
class Refused:
    """Nothing was written; ``reason`` says why."""

    reason: str


class Store:
    """The records in ``directory``. Any thread may call ``tool_blocks`` and ``usage``; the rest is for one thread at a time.

    ``counts``: hits, evictions, ``miss.<reason>`` and ``error.read``, ``error.write``, ``error.full``, ``error.damaged``.
    """

    def __init__(self, directory, budget, form, options, identity, clock, log):
        self.directory, self.budget, self.form, self.options = Path(directory), budget, form, options
        self.identity = identity
        self._clock, self._log = clock, log
        self._disabled = None
        self._listing = Listing(self.directory, log)
        self.counts = self._listing.counts
        self.counts.update(dict.fromkeys(("hits", "evictions", *(f"miss.{reason}" for reason in reuse.MISSES)), 0))

    @classmethod
    def open(cls, directory, budget, form, options=DEFAULTS, identity=None, clock=time.time, log=None):
        """The store in ``directory``, made if missing, with the left-overs of dead processes removed and within ``budget``
        bytes. identity: 32 bytes that every record must carry, or None for records that carry none. StoreError."""
        store = cls(directory, budget, form, options, identity, clock, log or logging.getLogger("ds4server"))
        try:
            store.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with kvfiles.exclusive(store.directory):
                kvfiles.remove_left_overs(store.directory, TEMPORARY.fullmatch)
                store._make_room()
            kvfiles.check(store.directory)
            private = not store.directory.stat().st_mode & 0o077
        except OSError as error:
            raise StoreError(_unusable(directory, error)) from None
        if not private:
            store._log.warning("disk store %s: other users may list the directory; its files are private", directory)
        named = "without identity" if identity is None else f"identity {identity.hex()}"
        store._log.info("disk store %s: %d records, %d bytes, %s", directory, *store.usage(), named)
        return store

    def usage(self):
        """(records, bytes) of everybody in the directory."""
        try:
            entries = self._listing.scan()
        except OSError:
            return 0, 0
        return len(entries), sum(entry.size for entry in entries)

    def restore(self, query):
        """:class:`Loaded` from the best record for ``query``, or :class:`Miss` with the first refusal. Never raises."""
        first, passed = None, set()
        for _ in range(ATTEMPTS):
            candidate = self.find(query, passed)
            result = candidate if isinstance(candidate, Miss) else self.load(candidate)
            if isinstance(result, Loaded):
                self.counts["hits"] += 1
                return result
            first = first or result
            if isinstance(candidate, Miss):
                break
            passed.add(candidate.name)
        if first.reason:
            self.counts[f"miss.{first.reason}"] += 1
        return first

    def quarantine(self, name, why):
        """Restore a record no more in this process: what was read from it could not be used. why: one sentence."""
        self._listing.quarantine(name, why)

    # Finding

    def find(self, query, passed=()):
        """The :class:`Candidate` for ``query`` that promises most, or :class:`Miss`. passed: names to pass over.

        A record whose whole text begins the prompt, the longest; or, where states can be cut anywhere, one that shares more.
        """
        try:
            entries = [entry for entry in self._listing.scan() if entry.name not in passed]
        except OSError as error:
            self._listing.failed("read", "could not be listed", error)
            return Miss(reuse.NO_CHECKPOINT)
        names = kvrecord.prefix_names(self.identity, query.text, {entry.header.text_bytes for entry in entries})
        cuts = query.partial and not reuse.needs_checkpoints(self.form.layout)
        found, refused, served = [], set(), False
        for entry in entries:
            refusal = self._refusal(entry, query.media)
            if refusal in refused:
                continue
            if refusal == reuse.MISMATCH or (cuts and entry.name not in names):
                common = self._common(entry, cuts, query)
            else:
                common = names.get(entry.name, 0)  # its name proves that all of its text begins the prompt, or that not
            exact = common == entry.header.text_bytes
            if not (_leaves_suffix(entry, query) if exact else cuts and _worth_cutting(common, entry, query)):
                continue
            if refusal is not None:
                refused.add(refusal)
            elif entry.header.tokens > query.resident:
                found.append((common, exact, -entry.header.text_bytes, entry.header.tokens, entry.name))
            else:
                served = True
        if found:
            common, _, _, tokens, name = max(found)
            return Candidate(name, tokens, common, query)
        return Miss(None if served else self._why(refused, query))

    def _why(self, refused, query):
        if reuse.MISMATCH in refused:
            return reuse.MISMATCH
        short = reuse.SHORT in refused or len(query.tokens) < self.options.min_tokens
        return reuse.SHORT if short else reuse.NO_CHECKPOINT

    def _refusal(self, entry, media):
        """Why a record is of no use to any prompt of this process, or None."""
        header, form = entry.header, self.form
        if (
            not header.readable
            or entry.digest != self.identity
            or header.family != form.family
            or header.context > form.context
            or (self.options.reject_different_quant and header.quant_bits != form.quant_bits)
            or bool(header.flags & Flag.MEDIA) != media
            or self._listing.useless(entry)
        ):
            return reuse.MISMATCH
        return reuse.SHORT if header.tokens < self.options.min_tokens else None

    def _common(self, entry, cuts, query):
        """Bytes that a record's text shares with the beginning of the prompt's, as far as it can be read. ``cuts``: whether
        less than all of it is of interest."""
        text, size = memoryview(query.text), entry.header.text_bytes
        same, limit = _common_bytes(entry.head, text), min(size, len(text))
        if same < len(entry.head) or (size > len(text) and not cuts):
            return same
        with suppress(OSError), kvfiles.opened(self.directory / entry.name) as fd:
            while same < limit:
                block = os.pread(fd, min(BLOCK, limit - same), kvrecord.HEADER.size + same)
                more = _common_bytes(block, text[same:])
                same += more
                if not block or more < len(block):
                    break
        return same

    # Loading

    def load(self, candidate):
        """:class:`Loaded` from a candidate, which is then counted as used, or :class:`Miss`. Never raises."""
        key = None
        try:
            with kvfiles.opened(self.directory / candidate.name, write=True) as fd:
                key = kvfiles.version(os.fstat(fd))
                return self._load(fd, key, candidate)
        except FileNotFoundError:
            pass  # another server needed the room
        except (NotRecord, snapshots.ForeignSnapshot) as error:
            self._listing.pass_over(candidate.name, key, error)
        except (RecordError, snapshots.SnapshotError, EOFError) as error:
            self._listing.discard(candidate.name, key, error)
        except (OSError, MemoryError) as error:
            self._listing.pass_over(candidate.name, key, error)
            self.counts["error.read"] += 1
        return Miss(reuse.MISMATCH)

    def _load(self, fd, key, candidate):
        entry, query = self._listing.examined(fd, candidate.name, key), candidate.query
        if refusal := self._refusal(entry, query.media):
            return Miss(refusal)
        header, text, tool_map = self._envelope(fd, entry)
        payload = kvfiles.read(fd, header.payload_at, header.payload_bytes)
        snapshot = snapshots.decode(payload, self.form.layout, self.form.identity)
        if len(snapshot.tokens) != header.tokens:
            raise RecordError(f"record states {header.tokens} tokens, its payload holds {len(snapshot.tokens)}")
        cached, refusal = self._cut(snapshot, text, query)
        if cached <= query.resident:
            return Miss(refusal)
        self._touch(fd, entry.name)
        return Loaded(entry.name, snapshot, cached, text, Reason(header.reason), Flag(header.flags), tool_map)

    def _envelope(self, fd, entry):
        """(header, text, tool map) of a record that was examined through ``fd``, proved by its name. RecordError, OSError,
        EOFError."""
        header = entry.header
        text = bytes(kvfiles.read(fd, kvrecord.HEADER.size, header.text_bytes))
        tool_map, digest = self._sections(fd, entry)
        if kvrecord.record_name(digest, text) != entry.name:
            raise RecordError("record's text is not the one that its name proves")
        if odd := [name for name, block in tool_map.items() if block not in text]:
            raise RecordError(f"record's tool map has a block of {odd[0]!r:.80} that its text has not")
        return header, text, tool_map

    def _sections(self, fd, entry):
        """(tool map, digest). RecordError, OSError, EOFError."""
        at = entry.header.sections_at
        return kvrecord.decode_sections(memoryview(kvfiles.read(fd, at, entry.size - at)), entry.header.flags)

    def _cut(self, snapshot, text, query):
        """(tokens of the snapshot that serve the prompt, why they are none)."""
        prompt, tokens = np.asarray(query.tokens, np.int64), snapshot.tokens
        common = reuse.common_prefix(prompt, tokens)
        if common == len(tokens) and (common < len(prompt) or snapshot.logits is not None):
            return common, None
        state = State(self.form.layout, self.form.identity.dtype)
        state.restore(snapshot)
        policy = reuse.Policy("partial" if query.partial else "exact", query.partial_min, fork=False)
        decision = reuse.decide(prompt, [reuse.Bank(state, text)], reuse.CheckpointPool(0), policy, query.text)
        return decision.cached, decision.miss

    def _touch(self, fd, name):
        """Count a hit, in place. Failing is harmless."""
        self._listing.look_again(name)
        with suppress(OSError):
            if kvfiles.try_lock(fd):
                (hits,) = kvrecord.U32.unpack(os.pread(fd, 4, kvrecord.HITS_AT))
                os.pwrite(fd, int(self._clock()).to_bytes(8, "little"), kvrecord.LAST_USED_AT)
                os.pwrite(fd, kvrecord.U32.pack(min(hits + 1, kvrecord.MOST_HITS)), kvrecord.HITS_AT)

    def tool_blocks(self, ids):
        """Id → block, both bytes, of those of ``ids`` that a record of this family, whatever its identity, names."""
        wanted, found = set(ids), {}
        try:
            entries = self._listing.scan() if wanted else []
        except OSError:
            return found
        for entry in entries:
            if not wanted:
                break
            header = entry.header
            if not header.flags & Flag.TOOL_MAP or not header.readable or header.family != self.form.family:
                continue
            try:
                blocks = self._tool_map(entry, wanted)
            except (RecordError, EOFError) as error:
                self._listing.discard(entry.name, entry.key, error)
            except (NotRecord, OSError, MemoryError):
                self.counts["error.read"] += 1
            else:
                found |= blocks
                wanted -= blocks.keys()
        return found

    def _tool_map(self, entry, wanted):
        """Those of the wanted blocks that a record holds. RecordError, NotRecord, OSError, EOFError."""
        if entry.ids is not None and not entry.ids & wanted:
            return {}
        with kvfiles.opened(self.directory / entry.name) as fd:
            key = kvfiles.version(os.fstat(fd))
            if key != entry.key:  # it was replaced or used this moment
                entry = self._listing.examined(fd, entry.name, key)
            if not entry.header.readable:
                return {}
            if entry.ids is None:
                entry.ids = frozenset(self._sections(fd, entry)[0])
            if not entry.ids & wanted:
                return {}
            return {name: block for name, block in self._envelope(fd, entry)[2].items() if name in wanted}

    # Saving

    def save(self, key_text, snapshot, reason, key_flags=NO_FLAGS, tool_map=None):
        """Write ``snapshot`` under the text that its tokens render: :class:`Saved` or :class:`Refused`. Never raises OSError.

        key_flags: what the key is, of RESPONSES_TEXT, THINKING_TEXT and MEDIA. tool_map: id → block, bytes, of this
        conversation; those in the text are kept. A record that is there already stays, unless this one knows more tool calls.
        """
        tool_map = {name: block for name, block in (tool_map or {}).items() if block in key_text}
        if refusal := self._not_saved(key_text, snapshot, tool_map):
            return Refused(refusal)
        name, now = kvrecord.record_name(self.identity, key_text), int(self._clock())
        hits, created, last_used = 0, now, now
        try:
            if (there := self._present(name, len(snapshot.tokens), bool(key_flags & Flag.MEDIA))) is not None:
                entry, held = there
                if tool_map.keys() <= held.keys():
                    return Saved(name, entry.size, kept=True)
                tool_map = held | tool_map
                if refusal := self._not_saved(key_text, snapshot, tool_map):
                    return Refused(refusal)
                hits, created, last_used = entry.header.hits, entry.header.created, entry.header.last_used
            payload = snapshots.encode_parts(snapshot, self.form.identity)
            sections = kvrecord.encode_sections(tool_map, self.identity)
        except ValueError as error:
            return Refused(f"the state cannot be written: {error}")
        flags = key_flags | (Flag.TOOL_MAP if tool_map else 0) | (Flag.BANK if reason.bank else 0)
        flags |= Flag.IDENTITY if self.identity is not None else 0
        header = Header(
            self.form.quant_bits, reason, flags, self.form.family, len(snapshot.tokens), self.form.context, created, last_used,
            sum(map(len, payload)), len(key_text), hits,
        )  # fmt: skip
        return self._write(name, [header.encode(), key_text, *payload, sections])

    def refusal(self, key_text, tokens):
        """Why a state of so many tokens under ``key_text`` is not worth or not able to be written, as far as can be told
        without it (rings and open blocks may hold less than their layout), or None."""
        least = self.options.min_tokens
        if self._disabled:
            return self._disabled
        if not least <= tokens <= self.form.context:
            return f"{tokens} tokens, records have {least} to {self.form.context}"
        if not 1 <= len(key_text) <= kvrecord.MOST_TEXT:
            return f"key text of {len(key_text)} bytes, records have 1 to {kvrecord.MOST_TEXT}"
        held = sum(kind.values(tokens) for kind in self.form.layout.values() if not isinstance(kind, Compressed | Ring))
        return self._too_large(held * np.dtype(self.form.identity.dtype).itemsize + len(key_text))

    def _not_saved(self, key_text, snapshot, tool_map):
        """:meth:`refusal` with the state at hand."""
        n, map_bytes = len(snapshot.tokens), sum(map(len, tool_map)) + sum(map(len, tool_map.values()))
        if refusal := self.refusal(key_text, n):
            return refusal
        if len(tool_map) > TOOL_MAP_IDS or map_bytes > TOOL_MAP_BYTES:
            limits = f"records have at most {TOOL_MAP_IDS} and {TOOL_MAP_BYTES}"
            return f"tool map of {len(tool_map)} ids and {map_bytes} bytes, {limits}"
        return self._too_large(snapshot.nbytes - 4 * n + len(key_text) + map_bytes)

    def _too_large(self, size):
        if size * 101 > self.budget * 100:
            return f"record of {size} bytes, which with a hundredth more exceeds the budget of {self.budget}"
        return None

    def _present(self, name, tokens, media):
        """(entry, tool map) of the record of that name where it serves as well as a new one, or None."""
        try:
            with kvfiles.opened(self.directory / name) as fd:
                entry = self._listing.examined(fd, name, kvfiles.version(os.fstat(fd)))
                if self._refusal(entry, media) or entry.header.tokens != tokens:
                    return None
                return entry, self._envelope(fd, entry)[2]
        except (RecordError, NotRecord, EOFError, OSError, MemoryError):
            return None

    def _write(self, name, parts):
        """Beside, flushed, renamed, flushed."""
        size, beside, final = sum(map(len, parts)), None, self.directory / name
        if refusal := self._too_large(size):
            return Refused(refusal)
        try:
            with kvfiles.exclusive(self.directory):
                if not self._make_room(size, name):
                    return Refused(NO_ROOM)
                beside, fd = kvfiles.temporary(self.directory, f"{name}.tmp")
            try:
                for part in parts:
                    kvfiles.write(fd, part)
                os.fsync(fd)
                with kvfiles.exclusive(self.directory):
                    if not self._make_room(size, name):  # what others wrote meanwhile
                        return Refused(NO_ROOM)
                    kvfiles.publish(beside, final)
                    beside = None
                    self._listing.replaced(name)
            finally:
                os.close(fd)
        except OSError as error:
            return self._not_written(error)
        finally:
            if beside is not None:
                with suppress(OSError):
                    os.unlink(beside)
        return Saved(name, size)

    def _not_written(self, error):
        if error.errno in FULL:
            self._disabled = f"saving is off since the disk refused a record: {error.strerror}"
            self.counts["error.full"] += 1
            self._log.warning("disk store %s: %s; nothing more is saved", self.directory, error.strerror)
        else:
            self._listing.failed("write", "a record could not be written", error)
        return Refused(f"not written: {error.strerror or error}")

    def _make_room(self, incoming=0, spare=None):
        """Delete what is worth least until ``incoming`` bytes fit, ``spare`` (about to be replaced) apart. Whether they do."""
        now, entries = self._clock(), [entry for entry in self._listing.scan() if entry.name != spare]
        total = sum(entry.size for entry in entries)

        def worth(entry):
            header = entry.header
            used = header.last_used or header.created
            return eviction_score(header.tokens, header.hits, now - used, entry.size), used, entry.name

        for entry in sorted(entries, key=worth):
            if total + incoming <= self.budget:
                break
            try:
                os.unlink(self.directory / entry.name)
                self.counts["evictions"] += 1
            except FileNotFoundError:
                pass
            except OSError as error:
                self._listing.failed("write", "a record could not be deleted", error)
                return False
            total -= entry.size
        return total + incoming <= self.budget


def _leaves_suffix(entry, query):
    """Whether some of the prompt is left to compute, where it must be."""
    must = query.bank or entry.header.flags & Flag.BANK
    return not must or entry.header.text_bytes < len(query.text)


def _worth_cutting(common, entry, query):
    size = entry.header.text_bytes
    return common >= query.partial_min and 8 * common >= size and size <= 8 * len(query.text)


def _common_bytes(a, b):
    """Length of the longest common prefix of two buffers."""
    n = min(len(a), len(b))
    return reuse.common_prefix(np.frombuffer(a, np.uint8, n), np.frombuffer(b, np.uint8, n)) if n else 0
