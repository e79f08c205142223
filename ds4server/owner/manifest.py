"""The manifest: the text by which an owner of weights tells its workers what it holds and where to ask for it.

A :class:`Manifest` that exists is consistent: ranges lie inside their models and do not overlap. Knows no processes,
sockets, memory or GGUF.
"""

import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

HEADER = "DS4_WEIGHT_SERVER_VMM_V1"
DERIVED_HEADER = "DS4_WEIGHT_SERVER_VMM_DERIVED_V1"
SCOPES = {"base": ("base",), "mtp": ("mtp",), "both": ("base", "mtp")}
"""Scope → the models that it covers. A drafter is outside the scopes: it is held wherever one is given."""
MODELS = ("base", "mtp", "drafter")
MOST_BYTES = 16 << 20
"""Longest manifest that is read: some hundred bytes for each of a hundred thousand ranges."""


class OwnerError(ValueError):
    """Why weights cannot be owned or imported, in one sentence."""


@dataclass(frozen=True)
class Content:
    """What identifies a model's files, see :mod:`.fingerprint`. logical_size: bytes of the logical file."""

    model: str
    logical_size: int
    algorithm: str
    fingerprint: str


@dataclass(frozen=True)
class Range:
    """Bytes [offset, offset + nbytes) of a logical file, at the start of allocation ``id`` of ``alloc_bytes``."""

    id: int
    model: str
    logical_size: int
    offset: int
    nbytes: int
    alloc_bytes: int

    @property
    def end(self):
        """The first byte after the range, in the logical file."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Derived:
    """Tensor ``tensor``, the bytes [offset, offset + source_bytes) of a logical file, held in another layout.

    kind: the layout; columns, rows: of one matrix; groups: how many there are (experts); nbytes: size in that layout.
    """

    id: int
    model: str
    logical_size: int
    offset: int
    source_bytes: int
    kind: str
    columns: int
    rows: int
    groups: int
    nbytes: int
    alloc_bytes: int
    tensor: str

    @property
    def end(self):
        """The first byte after the tensor's own bytes, in the logical file."""
        return self.offset + self.source_bytes


@dataclass(frozen=True)
class Manifest:
    """pid: the owner; device: its number; scope: a key of SCOPES; lock: lock file or None; broker: socket; contents: by
    model id. OwnerError, with ``name`` for the manifest's, where the parts contradict each other."""

    pid: int
    device: int
    scope: str
    lock: str | None
    broker: str
    contents: dict[str, Content]
    ranges: tuple[Range, ...]
    derived: tuple[Derived, ...] = ()
    name: str = "manifest"

    def __post_init__(self):
        _check(self)

    @property
    def text(self):
        """The manifest as it is stored. OwnerError for a path or name that a line cannot hold."""
        lines = [
            DERIVED_HEADER if self.derived else HEADER,
            f"owner {self.pid} {self.device} {self.scope} {self.lock or '-'}",
            f"broker {self.broker}",
            *(f"content {c.model} {c.logical_size} {c.algorithm} {c.fingerprint}" for c in self.contents.values()),
            *(f"alloc {r.id} {r.model} {r.logical_size} {r.offset} {r.nbytes} {r.alloc_bytes}" for r in self.ranges),
            *(
                f"derived-alloc {d.id} {d.model} {d.logical_size} {d.offset} {d.source_bytes} {d.kind} {d.columns} {d.rows} "
                f"{d.groups} {d.nbytes} {d.alloc_bytes} {d.tensor}"
                for d in self.derived
            ),
        ]
        if broken := next((line for line in lines if "\n" in line or "\r" in line), None):
            raise OwnerError(f"{self.name}: {broken!r} holds a line break, which a manifest cannot store")
        return "".join(f"{line}\n" for line in lines)


def parse(text, name="manifest"):
    """The :class:`Manifest` of a text. OwnerError with the line for whatever is wrong."""
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.startswith("#")]
    header = lines[0][1].strip() if lines else ""
    if header not in (HEADER, DERIVED_HEADER):
        raise OwnerError(f"{name}: begins with {header[:80]!r}; {HEADER} or {DERIVED_HEADER} is expected")
    found = {"owner": [], "broker": [], "content": [], "alloc": [], "derived-alloc": []}
    for number, line in lines[1:]:
        kind, _, rest = line.partition(" ")
        where = f"{name}: line {number}"
        if kind not in found:
            raise OwnerError(f"{where} begins with {kind[:40]!r}; {', '.join(found)} are accepted")
        if kind == "derived-alloc" and header == HEADER:
            raise OwnerError(f"{where} is a derived-alloc, which needs the header {DERIVED_HEADER}")
        found[kind].append(_PARSERS[kind](where, rest))
    for kind in ("owner", "broker"):
        if len(found[kind]) != 1:
            raise OwnerError(f"{name}: has {len(found[kind])} {kind} lines; exactly one is expected")
    contents = {}
    for content in found["content"]:
        if content.model in contents:
            raise OwnerError(f"{name}: model {content.model!r} has two content lines; one is expected")
        contents[content.model] = content
    pid, device, scope, lock = found["owner"][0]
    return Manifest(pid, device, scope, lock, found["broker"][0], contents, tuple(found["alloc"]),
                    tuple(found["derived-alloc"]), name)  # fmt: skip


def read(path):
    """The manifest of a file. OwnerError where it cannot be read or is none."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise OwnerError(f"manifest {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if len(data) > MOST_BYTES:
        raise OwnerError(f"manifest {path}: is longer than {MOST_BYTES} bytes; this is no manifest")
    try:
        return parse(data.decode(), f"manifest {path}")
    except UnicodeDecodeError:
        raise OwnerError(f"manifest {path}: holds bytes that are not UTF-8; this is no manifest") from None


def write(path, manifest):
    """Store a manifest: beside its place first, then renamed. OwnerError where that fails."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(manifest.text)
        beside.replace(path)
    except OSError as error:
        raise OwnerError(f"manifest {path}: cannot be written ({error.strerror or error})") from None
    finally:
        beside.unlink(missing_ok=True)


def _fields(where, rest, names):
    """The blank-separated fields of a line by name; the last one takes the rest of the line."""
    values = rest.strip().split(maxsplit=len(names) - 1)
    if len(values) != len(names):
        raise OwnerError(f"{where} has {len(values)} fields; {len(names)} are expected: {' '.join(names)}")
    return dict(zip(names, values, strict=True))


def _whole(where, fields, *names):
    """Replace the named fields by integers from 0 on."""
    for name in names:
        text = fields[name]
        if not (text.isascii() and text.isdigit() and len(text) <= 19):
            raise OwnerError(f"{where}: {name} is {text[:40]!r}; a whole number from 0 is expected")
        fields[name] = int(text)
    return fields


def _model(where, fields):
    if fields["model"] not in MODELS:
        raise OwnerError(f"{where}: model is {fields['model'][:40]!r}; {', '.join(MODELS)} are accepted")
    return fields


def _owner(where, rest):
    fields = _whole(where, _fields(where, rest, ("pid", "device", "scope", "lock")), "pid", "device")
    if fields["scope"] not in SCOPES:
        raise OwnerError(f"{where}: scope is {fields['scope'][:40]!r}; {', '.join(SCOPES)} are accepted")
    if fields["pid"] == 0:
        raise OwnerError(f"{where}: pid is 0; a process id is expected")
    return fields["pid"], fields["device"], fields["scope"], None if fields["lock"] == "-" else fields["lock"]


def _broker(where, rest):
    return _fields(where, rest, ("socket",))["socket"]


def _content(where, rest):
    fields = _model(where, _fields(where, rest, ("model", "logical_size", "algorithm", "fingerprint")))
    return Content(**_whole(where, fields, "logical_size"))


def _alloc(where, rest):
    names = ("id", "model", "logical_size", "offset", "nbytes", "alloc_bytes")
    return Range(**_whole(where, _model(where, _fields(where, rest, names)), *(name for name in names if name != "model")))


def _derived(where, rest):
    names = ("id", "model", "logical_size", "offset", "source_bytes", "kind", "columns", "rows", "groups", "nbytes",
             "alloc_bytes", "tensor")  # fmt: skip
    numbers = (name for name in names if name not in ("model", "kind", "tensor"))
    return Derived(**_whole(where, _model(where, _fields(where, rest, names)), *numbers))


_PARSERS = {"owner": _owner, "broker": _broker, "content": _content, "alloc": _alloc, "derived-alloc": _derived}


def _check(manifest):
    """OwnerError unless ids are unique, every range belongs to a content and lies inside it, and none overlap."""
    ids = set()
    every = (*manifest.ranges, *manifest.derived)
    for r in every:
        where = f"{manifest.name}: range {r.id}"
        if r.id in ids:
            raise OwnerError(f"{where} occurs twice")
        ids.add(r.id)
        content = manifest.contents.get(r.model)
        if content is None:
            raise OwnerError(f"{where} is of model {r.model!r}, which has no content line")
        if r.logical_size != content.logical_size:
            raise OwnerError(f"{where} gives model {r.model!r} {r.logical_size} bytes, its content line {content.logical_size}")
        if r.offset == r.end or r.end > r.logical_size:
            raise OwnerError(
                f"{where} is bytes {r.offset} to {r.end} of model {r.model!r}; "
                f"one byte or more, inside its {r.logical_size}, is expected"
            )
        if not 1 <= r.nbytes <= r.alloc_bytes:
            raise OwnerError(f"{where} has {r.nbytes} bytes in an allocation of {r.alloc_bytes}; 1 to that many are expected")
    for before, after in pairwise(sorted(every, key=lambda r: (r.model, r.offset))):
        if before.model == after.model and after.offset < before.end:
            raise OwnerError(f"{manifest.name}: ranges {before.id} and {after.id} of model {after.model!r} overlap")
