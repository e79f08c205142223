"""``ds4-weight-server``: one process that keeps a model's weights in memory while workers come and go.

Theory of operation. The files are parsed and the ranges planned; if memory suffices, the device's lock is taken, every range
is allocated, filled from its file and sealed, the files' fingerprint taken, the broker's socket opened and the manifest
written. From then on the process only answers the broker. A signal, or the end of the parent it was told to watch, is
looked for between two chunks of copying and wakes the broker: the socket is unlinked and the memory let go. Workers that
have mapped it keep it.

Exit codes: 0 clean end; 1 the weights cannot be owned; 2 command line. Knows nothing about architectures.
"""

import argparse
import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.progress import Progress

from .. import host
from . import broker, memory
from . import manifest as manifests
from .fingerprint import ALGORITHM, Logical, fingerprint, page_rounded, read_into
from .manifest import MODELS, SCOPES, Content, Manifest, OwnerError, Range

NAME = "ds4_weight_server"
GIB, MIB = 1 << 30, 1 << 20
REPACKS = ("iq2", "q2k", "q8")
SPARE_DESCRIPTORS = broker.PENDING + 64


class Stopped(Exception):
    """The end was asked for while weights were still being copied."""


@dataclass(frozen=True)
class Held:
    """A model's files and the ranges that they are held in."""

    model: str
    artifact: Artifact
    logical: Logical
    ranges: tuple[Range, ...]


def parser():
    top = argparse.ArgumentParser(
        prog="ds4-weight-server", allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Hold the weights of a model in memory for workers that are restarted (ds4-server with "
        "DS4_CUDA_WEIGHT_IPC_MANIFEST set to the manifest).",
    )  # fmt: skip
    top.add_argument("--base", metavar="FILE", help="GGUF of the model; of a split artifact the first shard")
    top.add_argument("--mtp", metavar="FILE", help="GGUF of the multi-token predictor")
    top.add_argument("--drafter", metavar="FILE", help="GGUF of the separate drafter, held whatever the scope")
    top.add_argument("--manifest", metavar="FILE", help="where workers are told what is held")
    top.add_argument("--scope", choices=("both", "base", "mtp"), default="both", help="which files are needed and held")
    top.add_argument("--backend", choices=("vmm", "ipc"), default="vmm", help="how memory is handed over")
    top.add_argument("--storage", choices=("host", "cuda"), default="host", help="where the weights are held")
    top.add_argument("--broker-socket", metavar="FILE", help="Unix socket of the broker (default: the manifest + .sock)")
    top.add_argument("--lock-file", metavar="FILE", help="lock of the device (default: by device in the temporary folder)")
    top.add_argument("--no-lock", action="store_true", help="let several owners share a device")
    top.add_argument("--device", type=_whole(0, 1023), default=0, metavar="N", help="device number")
    top.add_argument("--exit-on-parent-pid", type=_whole(1, 1 << 30), metavar="PID", help="end when that process ends")
    top.add_argument("--span-mb", type=_whole(64, 4096), default=1024, metavar="MB", help="size up to which ranges grow")
    top.add_argument("--copy-chunk-mb", type=_whole(16, 1024), default=256, metavar="MB", help="bytes read at a time")
    top.add_argument("--reserve-gb", type=_whole(0, 1 << 20), default=32, metavar="GB", help="memory that must stay free")
    for kind in REPACKS:
        top.add_argument(f"--repack-{kind}-aligned", action=argparse.BooleanOptionalAction, default=True,
                         help="hold the workers' layout where there is one for the artifact")  # fmt: skip
    top.add_argument("--dry-run", action="store_true", help="show plan and preflight, hold nothing")
    return top


def _whole(least, most):
    def number(text):
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return int(text)

    return number


def main(argv=None):
    """Entry point. Returns the exit code; SystemExit(2) for the command line."""
    args = _arguments(argv)
    with contextlib.ExitStack() as stack:
        try:
            return _own(args, _Ending(args.exit_on_parent_pid, stack), stack)
        except Stopped:
            return 0
        except (OwnerError, ArtifactError) as error:
            say(error)
            return 1


def say(line):
    print(f"{NAME}: {line}", file=sys.stderr, flush=True)


def _arguments(argv):
    top = parser()
    args = top.parse_args(argv)
    if args.backend == "ipc":
        top.error("--backend ipc is not supported: a Python worker cannot open driver handles; use --backend vmm")
    for model in SCOPES["both"]:
        if model in SCOPES[args.scope] and getattr(args, model) is None:
            top.error(f"--scope {args.scope} needs --{model} FILE")
        if model not in SCOPES[args.scope] and getattr(args, model) is not None:
            top.error(f"--{model} is given, but --scope {args.scope} does not hold it")
    if args.manifest is None and not args.dry_run:
        top.error("--manifest FILE is needed (only a --dry-run goes without)")
    return args


def _own(args, ending, stack):
    """The life of an owner. Returns the exit code."""
    if args.storage == "cuda":
        raise OwnerError("--storage cuda needs device memory exported as POSIX descriptors by the CUDA driver "
                         "(cuMemExportToShareableHandle), which this build has no binding for; use --storage host")  # fmt: skip
    manifest = socket_path = None
    if args.manifest is not None:
        manifest = Path(args.manifest).absolute()
        socket_path = Path(args.broker_socket or f"{manifest}.sock").absolute()
        broker.check_path(socket_path)
    held = _plan(args)
    _preflight(sum(r.alloc_bytes for h in held for r in h.ranges), args.reserve_gb * GIB)
    say(_repack_line(args))
    if args.dry_run:
        return 0
    if not manifest.parent.is_dir():
        raise OwnerError(f"manifest {manifest}: {manifest.parent} is no folder")
    _allow_descriptors(sum(len(h.ranges) for h in held))
    lock = None if args.no_lock else _lock(args, stack)
    allocations = _load(held, args.copy_chunk_mb * MIB, ending, stack)
    contents = {h.model: Content(h.model, h.logical.nbytes, ALGORITHM, fingerprint(h.logical.nbytes, h.logical.read))
                for h in held}  # fmt: skip
    text = Manifest(os.getpid(), args.device, args.scope, lock, str(socket_path), contents,
                    tuple(r for h in held for r in h.ranges), name=f"manifest {manifest}")  # fmt: skip
    listener = stack.enter_context(broker.listen(socket_path))
    stack.callback(socket_path.unlink, missing_ok=True)
    say(f"broker listening {socket_path}")
    manifests.write(manifest, text)
    say(f"ready manifest={manifest} ranges={len(allocations)}")
    broker.serve(listener, allocations, ending.descriptors)
    say("stopped")
    return 0


def plan(model, artifact, logical, span, first_id=0):
    """The ranges of one artifact: whole tensors in file order, up to ``span`` bytes together, none over a shard's border."""
    cuts = []  # [shard, first byte, end] in the logical file
    for tensor in sorted(artifact.tensors.values(), key=lambda tensor: (tensor.shard, tensor.offset)):
        start = logical.parts[tensor.shard].start + tensor.offset
        end = start + tensor.nbytes
        if cuts and cuts[-1][0] == tensor.shard and end - cuts[-1][1] <= span:
            cuts[-1][2] = end
        else:
            cuts.append([tensor.shard, start, end])
    return tuple(
        Range(id, model, logical.nbytes, start, end - start, page_rounded(end - start))
        for id, (_, start, end) in enumerate(cuts, first_id)
    )


def _plan(args):
    """Parse every file; what is to be held of each."""
    held, count = [], 0
    for model in MODELS:
        if (path := getattr(args, model)) is None:
            continue
        artifact = Artifact.open(path)
        logical = Logical.of(artifact.shards)
        ranges = plan(model, artifact, logical, args.span_mb * MIB, count)
        if not ranges:
            raise OwnerError(f"{path}: holds no tensors, so there is nothing to own")
        count += len(ranges)
        held.append(Held(model, artifact, logical, ranges))
        say(f"plan {model} {artifact.path}: {len(artifact.shards)} files, {len(artifact.tensors)} tensors, "
            f"{logical.nbytes} bytes, {len(ranges)} ranges of {sum(r.alloc_bytes for r in ranges)} bytes")  # fmt: skip
    return held


def _repack_line(args):
    wanted = [kind for kind in REPACKS if getattr(args, f"repack_{kind}_aligned")]
    why = f"there is no layout of {', '.join(wanted)} that workers would map" if wanted else "declined"
    return f"repack: none ({why})"


def _preflight(nbytes, reserve):
    """OwnerError unless the allocation fits beside the reserve."""
    available = host.memory("reference").available
    if available is None:
        say(f"preflight: {nbytes} bytes to allocate; not checked, since this system does not tell how much is available")
        return
    line = f"preflight: {nbytes} bytes to allocate and {reserve} to stay free, {available} available"
    if nbytes + reserve > available:
        raise OwnerError(f"{line}: {nbytes + reserve - available} bytes are missing; free memory or lower --reserve-gb")
    say(f"{line}: it fits")


def _allow_descriptors(ranges):
    """One descriptor per range. OwnerError where the system does not allow so many."""
    needed = ranges + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if hard != unlimited and needed > hard:
        raise OwnerError(f"{ranges} ranges need {needed} open files, but the limit is {hard}; use a larger --span-mb")
    if soft != unlimited and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _lock(args, stack):
    """Take the device's lock for as long as this process lives; its path. OwnerError where another owner has it."""
    path = Path(args.lock_file or Path(tempfile.gettempdir(), f"ds4-weight-server-device{args.device}.lock")).absolute()
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise OwnerError(f"lock file {path}: cannot be opened ({error.strerror or error})") from None
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
        raise OwnerError(f"device {args.device} has an owner already, process {holder or '?'} (lock file {path})") from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return str(path)


def _load(held, chunk, ending, stack):
    """Allocate, fill and seal every range: id → (descriptor, bytes). OwnerError where a file changes meanwhile."""
    allocations = {}
    with Progress("loading", sum(r.nbytes for h in held for r in h.ranges)) as progress:
        for h in held:
            before = _stamps(h.artifact.shards)
            for r in h.ranges:
                fill = _filler(h.logical, r, chunk, ending, progress)
                descriptor = memory.create(f"ds4-{r.model}-{r.id}", r.alloc_bytes, fill)
                stack.callback(os.close, descriptor)
                allocations[r.id] = descriptor, r.alloc_bytes
            if _stamps(h.artifact.shards) != before:
                raise OwnerError(f"{h.artifact.path}: was changed while it was copied")
            h.artifact.close()
    return allocations


def _filler(logical, r, chunk, ending, progress):
    """What writes a range: a function of its memory."""
    part = next(part for part in reversed(logical.parts) if part.start <= r.offset)

    def fill(view):
        for at in range(0, r.nbytes, chunk):
            if ending.asked():
                raise Stopped
            size = min(chunk, r.nbytes - at)
            read_into(part.path, r.offset - part.start + at, view[at : at + size])
            progress.advance(size)

    return fill


def _stamps(paths):
    return [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in map(os.stat, paths)]


class _Ending:
    """Whether the end was asked for, by SIGINT, SIGTERM or the end of the parent; ``descriptors`` can be read then."""

    def __init__(self, parent, stack):
        self._signals, wakeup = socket.socketpair()
        for end in (self._signals, wakeup):
            end.setblocking(False)
            stack.enter_context(end)
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(wakeup.fileno()))
        self.descriptors = [self._signals.fileno()]
        if parent is not None:
            self.descriptors.append(_end_of(parent, stack))

    def asked(self):
        return bool(select.select(self.descriptors, [], [], 0)[0])


def _end_of(pid, stack):
    """A descriptor that can be read once process ``pid`` has ended."""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):  # it has ended, or the kernel is older than 5.3
            descriptor = os.pidfd_open(pid)
            stack.callback(os.close, descriptor)
            return descriptor
    reader, writer = os.pipe()
    stack.callback(os.close, reader)
    threading.Thread(target=_close_after, args=(writer, pid), daemon=True).start()
    return reader


def _close_after(descriptor, pid):
    """Where the system cannot tell of a process's end: look once a second, close ``descriptor`` then."""
    while _alive(pid):
        time.sleep(1)
    os.close(descriptor)


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        pass
    return True
