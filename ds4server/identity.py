"""What this process computes with, as one digest (``local-file-stat-v1``): records of the disk store carry it.

Two processes of one identity compute the same states: the same files, as far as their ``stat`` tells, with the same program
and the same settings. It identifies local files and does not attest their every byte. It is *taken* before a model is opened
and again after; :func:`changed` tells whether an input changed while the model was being read. The second one counts: by then
every library is loaded.

Knows nothing about models or what the settings mean.
"""

import hashlib
import json
import os
import re
import stat
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

METHOD = "local-file-stat-v1"
PACKAGES = ("ds4ref", "ds4jax", "ds4server")
BESIDE = ("chat_template.jinja", "tokenizer_config.json")
MOST_CONTENTS = 16 << 20
LIBRARY = re.compile(r"\.(so|dylib)($|\.)")

COUNTS = re.compile(r"DS4_.*|XLA_FLAGS|JAX_.*|CUDA_VISIBLE_DEVICES|NVIDIA_TF32_OVERRIDE")
COUNTS_NOT = re.compile(r"DS4_CUDA_WEIGHT_IPC.*|DS4_SERVER_.*|DS4_MEM.*|DS4_CONT_PREFILL_CHUNK(_LIVE)?|DS4_BOOT.*|DS4_TRACE.*")
"""How weights come into the process, how requests are served, memory bounds, the schedule, and what is printed: none of them
changes a state, and what the schedule resolves to is among the settings."""


class IdentityError(ValueError):
    """A file that cannot be identified; one sentence."""


@dataclass(frozen=True)
class Identity:
    """document: {method, files: {sources, runtime}, settings}, plain JSON."""

    document: dict

    @cached_property
    def digest(self):
        """SHA-256 of the canonical JSON, 32 bytes."""
        return hashlib.sha256(json.dumps(self.document, sort_keys=True, separators=(",", ":")).encode()).digest()


def take(files, settings, manifests=(), environment=os.environ):
    """The :class:`Identity` at this moment. IdentityError.

    files: role ("model", "mtp", "vision", "drafter", …) → paths of all its files, every shard; settings: what else decides
    about a state, as JSON values: backend, layout, dtype, options, effective context, banks, chunks, schedule and speculation.
    manifests: small files whose contents count too.
    """
    sources = {role: [_stated(path) for path in paths] for role, paths in files.items()}
    folders = {Path(path).resolve().parent for paths in files.values() for path in paths}
    beside = sorted(folder / name for folder in folders for name in BESIDE)
    contents = [_contents(path) for path in [*beside, *manifests]]
    variables = {name: environment[name] for name in sorted(environment) if _counts(name)}
    return Identity({
        "method": METHOD,
        "files": {"sources": sources | {"contents": contents}, "runtime": _runtime()},
        "settings": {"resolved": settings, "environment": variables},
    })  # fmt: skip


def changed(before, after):
    """What of ``before`` is another in ``after``, one sentence, or None. Libraries loaded in between are no change."""
    a, b = before.document, after.document
    if a["settings"] != b["settings"]:
        return "the settings changed while the model was opened"
    stated = {entry["path"]: entry for entry in _entries(b)}
    for entry in _entries(a):
        if stated.get(entry["path"]) != entry:
            return f"{entry['path']}: changed while the model was opened"
    if a["files"]["sources"] != b["files"]["sources"]:
        return "other files belong to the model than when it was opened"
    return None


def _entries(document):
    files = document["files"]
    return [entry for group in (*files["sources"].values(), *files["runtime"].values()) for entry in group]


def _counts(name):
    return COUNTS.fullmatch(name) is not None and COUNTS_NOT.fullmatch(name) is None


def _runtime():
    program = [path for package in PACKAGES for path in _sources(package)]
    libraries = sorted(set(mapped_libraries()))
    return {name: [_stated(path) for path in paths] for name, paths in
            {"interpreter": [sys.executable], "program": program, "libraries": libraries}.items()}  # fmt: skip


def _sources(package):
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else ()
    return sorted(path for folder in folders for path in Path(folder).rglob("*.py"))


def mapped_libraries():
    """Paths of the shared libraries in this process: all that are mapped where the system lists them (Linux), else those that
    Python itself imported. Files that are gone by now are left out."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
        paths = [line.split(maxsplit=5)[5] for line in lines if line.count("/")]
    except OSError:
        paths = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    return [path for path in paths if LIBRARY.search(os.path.basename(path)) and os.path.exists(path)]


def _stated(path):
    try:
        resolved = Path(path).resolve(strict=True)
        status = resolved.stat()
    except (OSError, RuntimeError) as error:
        raise IdentityError(f"{path}: cannot be identified: {getattr(error, 'strerror', None) or error}") from None
    return {"path": str(resolved), "stat": _numbers(status)}


def _numbers(status):
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _contents(path):
    """A small file with the SHA-256 of what it holds, or "missing"."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return {"path": str(path), "sha256": "missing"}
    except OSError as error:
        raise IdentityError(f"{path}: cannot be read: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise IdentityError(f"{path}: is not a regular file")
        data = file.read(MOST_CONTENTS + 1)
    if len(data) > MOST_CONTENTS:
        raise IdentityError(f"{path}: has {max(status.st_size, len(data))} bytes, accepted are at most {MOST_CONTENTS}")
    return {"path": str(Path(path).resolve()), "stat": _numbers(status), "sha256": hashlib.sha256(data).hexdigest()}
