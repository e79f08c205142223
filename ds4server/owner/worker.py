"""The worker's side: tensors of an artifact as read-only views of an owner's memory, or one sentence why not.

Nothing is copied: the pages are the owner's. They outlive it, because a map keeps its memory. Nothing but the header and the
samples of the fingerprint is read of the worker's own files. Layouts that an owner derives are not used here, so a tensor
that is held only in one cannot be imported.
"""

import logging
import mmap
import os
from bisect import bisect_right
from pathlib import Path

import numpy as np

from . import broker, manifest, memory
from .fingerprint import ALGORITHM, Logical, fingerprint
from .manifest import MODELS, SCOPES, Derived, OwnerError

log = logging.getLogger("ds4server")


def shared(request, artifact, model="base", warn=log.warning):
    """``artifact`` with its tensors in an owner's memory as a request (``options.Request``) asks; None where it does not.

    model: "base", "mtp" or "drafter", what the artifact is to this process. The request's manifest_scope names what is
    imported; a drafter is, where manifest_drafter says so. OwnerError where base or MTP cannot be imported; a drafter that
    cannot is a warning, and None.
    """
    asked = request.manifest_drafter if model == "drafter" else model in SCOPES[request.manifest_scope]
    if request.manifest is None or not asked:
        return None
    try:
        return artifact.with_data(import_weights(request.manifest, artifact, model, warn=warn))
    except OwnerError as error:
        if model != "drafter":
            raise
        warn(f"the drafter is loaded from its file: {error}")
        return None


def import_weights(path, artifact, model="base", needed=None, warn=log.warning):
    """Tensor name → read-only uint8 [nbytes] in the memory of the owner whose manifest lies at ``path``.

    artifact: the worker's own, of which only names, places and sizes are used; needed: the names of the tensors that will
    be used, default all. ``warn`` is called with a sentence for what cannot be verified. OwnerError for everything that
    differs: the owner is gone, its scope, the files' size or fingerprint, a tensor outside every range or in two, a wrong
    answer of the broker, memory too short or not sealed.
    """
    if model not in MODELS:
        raise ValueError(f"model is {model!r}; {', '.join(MODELS)} are accepted")
    told = manifest.read(path)
    logical = Logical.of(artifact.shards)
    _check_owner(told)
    _check_content(told, artifact, model, logical, warn)
    places = _places(told, artifact, model, logical, artifact.tensors if needed is None else needed)
    if not memory.SEALABLE:
        warn(f"{told.name}: this system has no sealed memory files, so it is not checked that the owner's cannot change")
    maps = {r.id: _map(told, r) for r in {r.id: r for r, _ in places.values()}.values()}
    return {
        name: np.frombuffer(maps[r.id], np.uint8, artifact.tensors[name].nbytes, start - r.offset)
        for name, (r, start) in places.items()
    }


def _check_owner(told):
    try:
        os.kill(told.pid, 0)
    except ProcessLookupError:
        raise OwnerError(f"{told.name}: the owner, process {told.pid}, is gone; start ds4-weight-server again") from None
    except (OSError, OverflowError):
        pass  # another user's process lives; whether the weights can be had, the broker says


def _check_content(told, artifact, model, logical, warn):
    """That the owner holds this model, and the same files."""
    if model != "drafter" and model not in SCOPES[told.scope]:
        raise OwnerError(f"{told.name}: the owner's scope is {told.scope}, which does not cover the {model} weights asked for")
    content = told.contents.get(model)
    if content is None:
        raise OwnerError(f"{told.name}: the owner holds no {model} weights (it holds: {', '.join(told.contents) or 'none'})")
    if content.logical_size != logical.nbytes:
        raise OwnerError(
            f"{artifact.path}: has {logical.nbytes} bytes in whole pages, but the owner holds {content.logical_size}; "
            f"the file was changed or is another one than in {told.name}"
        )
    if content.algorithm != ALGORITHM:
        warn(f"{told.name}: the fingerprint is {content.algorithm!r}, of which only {ALGORITHM} is known here; "
             f"it is not checked that {artifact.path} is the file that the owner holds")  # fmt: skip
        return
    if (own := fingerprint(logical.nbytes, logical.read)) != content.fingerprint:
        raise OwnerError(
            f"{artifact.path}: has fingerprint {own}, but the owner holds {content.fingerprint}; "
            f"the file was changed or is another one than in {told.name}"
        )


def _places(told, artifact, model, logical, needed):
    """Name → (range, first byte of the tensor in the logical file). OwnerError unless each lies in one range alone."""
    ranges = sorted((r for r in (*told.ranges, *told.derived) if r.model == model), key=lambda r: r.offset)
    starts = [r.offset for r in ranges]
    places = {}
    for name in needed:
        tensor = artifact.tensors[name]
        first = logical.parts[tensor.shard].start + tensor.offset
        end = first + tensor.nbytes
        where = f"{told.name}: tensor {name!r}, bytes {first} to {end} of the {model} files,"
        at = bisect_right(starts, first) - 1
        touched = [r for r in ranges[max(at, 0) : at + 2] if r.offset < end and first < r.end]
        if not touched:
            raise OwnerError(f"{where} lies in no range")
        r = touched[0]
        if not (r.offset <= first and end <= r.end):
            raise OwnerError(f"{where} is split: range {r.id} holds bytes {r.offset} to {r.end}; one range must hold it whole")
        if isinstance(r, Derived):
            raise OwnerError(f"{where} is held in layout {r.kind!r}, which this worker cannot use (accepted: the file's own)")
        places[name] = r, first
    return places


def _map(told, r):
    """The pages of a range, mapped read-only, after the descriptor was verified."""
    descriptor = broker.request(Path(told.broker), r.id, r.alloc_bytes)
    where = f"{told.name}: range {r.id}"
    try:
        size = os.fstat(descriptor).st_size
        if size < r.alloc_bytes:
            raise OwnerError(f"{where} has a descriptor of {size} bytes; at least {r.alloc_bytes} are expected")
        if memory.SEALABLE and (open_to := memory.seals_missing(descriptor)):
            missing = ", ".join(open_to)
            raise OwnerError(f"{where} is memory that is not sealed against {missing}; a sealed memory file is expected")
        return mmap.mmap(descriptor, r.alloc_bytes, access=mmap.ACCESS_READ)
    except OSError as error:
        raise OwnerError(f"{where} cannot be mapped ({error.strerror or error})") from None
    finally:
        os.close(descriptor)
