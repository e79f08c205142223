"""The files of one directory of records as they are now: what each says of itself, and which proved useless here.

There is no index: every look lists the directory, and a file is examined once per change. A file that is no record is passed
over, one that contradicts itself deleted; where it cannot be, it is not tried again. Other processes may change the directory
at any time. Knows nothing about prompts or states.
"""

import os
import stat
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from . import kvfiles, kvrecord
from .kvrecord import Flag, Header, NotRecord, RecordError

HEAD_BYTES = 256  # of a text, remembered


@dataclass
class Entry:
    """A file as it was when it was last looked at; ``key`` changes when the file does. header: None where it has none."""

    name: str
    key: tuple
    header: Header | None = None
    digest: bytes | None = None
    head: bytes = b""
    ids: frozenset | None = None
    """The tool calls in it, once somebody asked."""

    @property
    def size(self):
        return self.key[1]


class Listing:
    """Any thread may call it. counts: of errors, ``error.read``, ``error.write``, ``error.full`` and ``error.damaged``."""

    def __init__(self, directory, log):
        self.directory, self._log = directory, log
        self._entries = {}
        self._refused = {}  # name → key of a file that proved useless here
        self._quarantined = set()  # names of records that could be read and then not be used
        self._lock = threading.RLock()
        self.counts = Counter(dict.fromkeys(("error.read", "error.write", "error.full", "error.damaged"), 0))

    def useless(self, entry):
        """Whether the file proved useless here as it is."""
        return self._refused.get(entry.name) == entry.key or entry.name in self._quarantined

    def quarantine(self, name, why):
        """Let no prompt of this process have a record again, whatever becomes of its file, until this process replaces it."""
        self._log.warning("disk store %s: %s is quarantined: %s", self.directory, name, why)
        with self._lock:
            self._quarantined.add(name)

    def replaced(self, name):
        """This process has just written the record."""
        with self._lock:
            self._quarantined.discard(name)

    def look_again(self, name):
        """Forget what is known of a file that is about to change in place."""
        with self._lock:
            self._entries.pop(name, None)  # a clock tick may pass before the file's time tells that it changed

    def scan(self):
        """The records in the directory as they are now. OSError where it cannot be listed."""
        found = {}
        with self._lock, os.scandir(self.directory) as listing:
            for item in listing:
                if not kvrecord.NAME.fullmatch(item.name):
                    continue
                with suppress(OSError):
                    status = item.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        known = self._entries.get(item.name)
                        found[item.name] = known if known and known.key == kvfiles.version(status) else self._examine(item.name)
            self._entries = found
            self._refused = {name: key for name, key in self._refused.items() if name in found}
        return [entry for entry in found.values() if entry.header]

    def _examine(self, name):
        """What a file says of itself. OSError."""
        key = None
        try:
            with kvfiles.opened(self.directory / name) as fd:
                key = kvfiles.version(os.fstat(fd))
                return self.examined(fd, name, key)
        except NotRecord:
            pass
        except RecordError as error:
            self.discard(name, key, error)
        return Entry(name, key)

    def examined(self, fd, name, key):
        """NotRecord, RecordError, OSError."""
        data, at = os.pread(fd, kvrecord.HEADER.size + HEAD_BYTES, 0), kvrecord.HEADER.size
        header = Header.decode(data[:at], key[1])
        digest = None
        if header.readable and header.flags & Flag.IDENTITY:
            footer = kvrecord.FOOTER.size
            digest = kvrecord.decode_footer(os.pread(fd, footer, key[1] - footer))
        return Entry(name, key, header, digest, data[at : header.payload_at])

    def discard(self, name, key, error):
        """Delete a record that contradicts itself; where it cannot be deleted it is not tried again."""
        self.pass_over(name, key, error)
        self.counts["error.damaged"] += 1
        with suppress(OSError):
            if kvfiles.version(os.stat(self.directory / name, follow_symlinks=False)) == key:
                os.unlink(self.directory / name)

    def pass_over(self, name, key, error):
        self._log.warning("disk store %s: %s is not used: %s", self.directory, name, error)
        with self._lock:
            self._refused[name] = key

    def failed(self, kind, what, error):
        self.counts[f"error.{kind}"] += 1
        self._log.warning("disk store %s: %s: %s", self.directory, what, error.strerror or error)
