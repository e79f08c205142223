"""A command held within the machine's memory: ``python -m ds4server.guard [options] -- command …``.

For trying large models: when memory runs short, the job is ended before the machine stalls. An aid, not a guarantee.

Theory. A job is admitted with a grant: the smaller of ``--max-gib`` and what is available above ``--reserve-gib``. While it
runs, the host is sampled every 100 ms. :func:`decide`, which is pure, says whether a sample ends the job: too little is
available, tasks stall for memory while little is, the job holds more than its grant, or its time is over. Then everything in
the job's own control group (where one can be made), else in its process group, gets SIGTERM, and SIGKILL one second later.
What a job leaves behind when its first process ends is ended in the same way. Nothing else on the machine is ever signalled.

Exit code: that of the command (128 + n where signal n ended it); 75 where the job was refused or stopped, and then partial
results are not to be used; 2, 126 and 127 as shells have them.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from . import host
from .host import GIB

UNUSABLE = 75
INTERVAL = 0.1  # seconds between samples
GRACE = 1.0  # seconds from SIGTERM to SIGKILL
RESERVE_GIB, TRIP_GIB, OWNER_TRIP_GIB = 12, 12, 8
TIMEOUT = 1800
STALL, NEAR = 20.0, 4 * GIB
"""Percent of ten seconds in which all tasks waited for memory, which end a job where less than NEAR is above the trip."""
PRESSURE = Path("/proc/pressure/memory")
GROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))  # alone, and beside version 1


@dataclass(frozen=True)
class Limits:
    """grant, trip: bytes that the job may hold, and under which what is available must not fall; timeout: seconds; 0: none."""

    grant: int
    trip: int
    timeout: float


@dataclass(frozen=True)
class Sample:
    """seconds since the start; available: bytes on the host; stall: percent, see STALL; used: bytes that the job holds. None
    where the system does not tell."""

    seconds: float
    available: int | None
    stall: float | None = None
    used: int | None = None


def admit(available, most, reserve, trip):
    """(the grant in bytes, None), or (None, why the job is refused). most: of --max-gib, None where it was not given."""
    if available is None:
        return None, "this system does not tell how much memory is available, so nothing could be guarded"
    grant = available - reserve if most is None else min(most, available - reserve)
    if grant <= 0:
        return None, f"{_gib(available)} are available, and --reserve-gib keeps {_gib(reserve)}"
    if available <= trip:
        return None, f"{_gib(available)} are available, and --trip-gib stops a job under {_gib(trip)}"
    return grant, None


def decide(limits, sample):
    """Why the job is to be stopped now, one sentence, or None."""
    available, stall, used = sample.available, sample.stall, sample.used
    if available is not None and available < limits.trip:
        return f"{_gib(available)} are available, less than the {_gib(limits.trip)} of --trip-gib"
    near = available is not None and available < limits.trip + NEAR
    if near and stall is not None and stall >= STALL:
        return f"all tasks stalled for memory {stall:g} % of the time, with {_gib(available)} available"
    if used is not None and used > limits.grant:
        return f"the job holds {_gib(used)}, more than the {_gib(limits.grant)} it was admitted with"
    if limits.timeout and sample.seconds >= limits.timeout:
        return f"the job ran for {sample.seconds:.0f} s; --timeout allows {limits.timeout:g}"
    return None


def _gib(n):
    return f"{n / GIB:.2f} GiB"


# The host


def stalled(path=PRESSURE):
    """Percent of the last ten seconds in which all tasks waited for memory; None where the kernel does not tell."""
    with suppress(OSError):
        found = re.search(r"^full avg10=([0-9.]+)", path.read_text(), re.MULTILINE)
        return float(found[1]) if found else None


def control_group(name, grant, roots=GROUPS, own=Path("/proc/self/cgroup")):
    """A new control group (version 2) below this process's own, limited to ``grant`` bytes where it has that controller; None
    where there is none or may be none."""
    with suppress(OSError):
        found = re.search(r"^0::/(.*)", own.read_text(), re.MULTILINE)
        root = next((root for root in roots if (root / "cgroup.controllers").exists()), None)
        if found is None or root is None or ".." in found[1]:  # above what a container may see
            return None
        folder = root / found[1] / name
        folder.mkdir()
        if (folder / "memory.max").exists():
            (folder / "memory.max").write_text(str(grant))
        return folder


class Job:
    """A command in a process group of its own, and in the control group ``group`` where there is one. OSError where it cannot
    be started."""

    def __init__(self, command, group=None):
        self.group = group

        def join():
            with suppress(OSError):
                (group / "cgroup.procs").write_text("0")

        try:
            self._process = subprocess.Popen(command, start_new_session=True, preexec_fn=group and join)
        except OSError:
            self.close()
            raise
        if group is not None and not self.pids():  # over already, or not let in
            self.close()
            self.group = None

    @property
    def pid(self):
        return self._process.pid

    @property
    def code(self):
        """The command's exit code as a shell gives it; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def pids(self):
        """Processes of the job that are not over."""
        try:
            if self.group is None:
                found = [int(name) for name in os.listdir("/proc") if name.isdigit() and _group_of(int(name)) == self.pid]
            else:
                found = [int(pid) for path in self.group.rglob("cgroup.procs") for pid in path.read_text().split()]
        except OSError:
            return []
        return [pid for pid in found if not re.search(r"^State:\s+[ZX]", _status(pid) or "State: X", re.MULTILINE)]

    def wait(self, seconds):
        """Until the command is over, at most so long."""
        if self.code is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        else:
            time.sleep(seconds)

    def send(self, number):
        """A signal to every process of the job and to no other one."""
        with suppress(ProcessLookupError, PermissionError):
            if self.group is None:
                os.killpg(self.pid, number)
        for pid in self.pids() if self.group is not None else ():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def used(self, grant):
        """Bytes of memory that the job holds, without pages of files; None where the system does not tell. What processes share
        is counted once only where that decides whether it is more than ``grant``."""
        pids = self.pids()
        quick = [_kib(_status(pid), "RssAnon", "RssShmem") for pid in pids]
        if not quick or sum(quick) <= grant:
            return sum(quick) if quick else None
        return sum(_kib(_text(f"/proc/{pid}/smaps_rollup"), "Pss_Anon", "Pss_Shmem") for pid in pids)

    def out_of_memory(self):
        """Whether the kernel ended a process of the control group for its limit."""
        found = re.search(r"^oom_kill (\d+)", _text(self.group / "memory.events") or "", re.MULTILINE) if self.group else None
        return found is not None and int(found[1]) > 0

    def close(self):
        """Remove the control group, which must be empty."""
        if self.group is not None:
            with suppress(OSError):
                self.group.rmdir()


def _group_of(pid):
    with suppress(ProcessLookupError):
        return os.getpgid(pid)


def _status(pid):
    return _text(f"/proc/{pid}/status")


def _text(path):
    with suppress(OSError):
        return Path(path).read_text()


def _kib(text, *names):
    """The sum of some lines "name: n kB", in bytes; 0 for those that are not there."""
    return 1024 * sum(int(n) for name, n in re.findall(r"^(\w+):\s+(\d+) kB", text or "", re.MULTILINE) if name in names)


# Watching


def watch(job, limits, sample, write, asked=()):
    """Wait for the job to be over, and stop it where a sample says so: (the command's exit code, why it was stopped or None).

    sample: seconds → :class:`Sample`; write: event, fields → a line of the log; asked: a list of signals to pass on, which
    grows while this runs.
    """
    start = beat = told = time.monotonic()
    why = kill_at = None
    killed = False
    while (code := job.code) is None or job.pids():
        seconds = time.monotonic() - start
        seen = sample(seconds)
        while asked:
            number = asked.pop(0)
            write("passed on", signal=signal.Signals(number).name)
            job.send(number)
        if kill_at is None:
            why = decide(limits, seen)
            if why is not None or code is not None:
                write("stopped" if why else "left behind", why=why, pids=job.pids(), **vars(seen))
                job.send(signal.SIGTERM)
                kill_at = seconds + GRACE
        elif seconds >= kill_at:
            if not killed:
                write("killed", pids=job.pids(), seconds=seconds)
            killed = True
            job.send(signal.SIGKILL)
        if time.monotonic() - told >= 1:
            write("sample", **vars(seen))
            told = time.monotonic()
        beat = max(beat + INTERVAL, time.monotonic())
        job.wait(max(0, beat - time.monotonic()))
    if why is None and job.out_of_memory():
        why = f"the kernel ended a process of the job, which held the {_gib(limits.grant)} it was admitted with"
        write("stopped", why=why)
    write("ended", code=code, why=why, seconds=round(time.monotonic() - start, 3))
    return code, why


class Log:
    """Lines of JSON in a file of bytes, flushed one by one. samples: whether they belong there too. A full disk ends no job."""

    def __init__(self, file, samples):
        self._file, self._samples = file, samples

    def write(self, event, **fields):
        if event != "sample" or self._samples:
            line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": event} | fields)
            try:
                self._file.write(f"{line}\n".encode())
                self._file.flush()
            except OSError as error:
                print(f"ds4server.guard: this line of the log is lost, {error.strerror}: {line}", file=sys.stderr)


def main(argv=None):
    """Run the command of a command line and return the exit code."""
    args, command = read(sys.argv[1:] if argv is None else argv)
    if args.log is None:
        return _guard(args, command, Log(sys.stderr.buffer, samples=False).write)
    try:
        with Path(args.log).open("ab", buffering=0) as file:
            return _guard(args, command, Log(file, samples=True).write)
    except OSError as error:
        return _fail(f"--log {args.log}: {error.strerror}", 2)


def _guard(args, command, write):
    """Admit the command or refuse it, and run it: the exit code."""
    sizes = args.max_gib, args.reserve_gib, trip_gib(args)
    most, reserve, trip = (None if gib is None else int(gib * GIB) for gib in sizes)
    available = host.memory("reference").available
    grant, refusal = admit(available, most, reserve, trip)
    if refusal is not None:
        write("refused", why=refusal, available=available, command=command)
        return _fail(f"the job is refused: {refusal}", UNUSABLE)
    with ExitStack() as stack:
        return _run(command, Limits(grant, trip, args.timeout), available, write, stack)


def _run(command, limits, available, write, stack):
    asked = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        before = signal.signal(number, lambda number, frame: asked.append(number))
        stack.callback(signal.signal, number, before)
    try:
        job = Job(command, control_group(f"ds4-guard-{os.getpid()}", limits.grant))
    except OSError as error:
        write("refused", why=str(error), command=command)
        return _fail(f"{command[0]}: {error.strerror}", 127 if isinstance(error, FileNotFoundError) else 126)
    stack.callback(job.close)
    write("admitted", pid=job.pid, available=available, group=None if job.group is None else str(job.group), command=command,
          **vars(limits))  # fmt: skip
    if stalled() is None:
        write("note", what=f"{PRESSURE} cannot be read, so stalls for memory are not watched")

    def sample(seconds):
        return Sample(seconds, host.memory("reference").available, stalled(), job.used(limits.grant))

    try:
        code, why = watch(job, limits, sample, write, asked)
    except BaseException:
        job.send(signal.SIGKILL)
        raise
    return code if why is None else _fail(f"the job was stopped: {why}; its partial results are not to be used", UNUSABLE)


def _fail(sentence, code):
    print(f"ds4server.guard: {sentence}", file=sys.stderr)
    return code


def read(argv):
    """(the options, the command) of a command line. SystemExit(2), one sentence, for what cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m ds4server.guard", usage="%(prog)s [options] -- command …", allow_abbrev=False,
        description="Run a command as long as the machine's memory allows it. Exit code 75: refused or stopped.",
    )  # fmt: skip
    add = parser.add_argument
    add("--max-gib", metavar="F", type=_amount, help="most that the job may hold (default: what is there above the reserve)")
    add("--reserve-gib", metavar="F", type=_amount, default=RESERVE_GIB,
        help="what an admission leaves available (default: %(default)s)")  # fmt: skip
    add("--trip-gib", metavar="F", type=_amount, help="the job is stopped when less is available "
        f"(default: {TRIP_GIB}, with --persistent-owner {OWNER_TRIP_GIB})")  # fmt: skip
    add("--persistent-owner", action="store_true", help="the job is a weight owner, which is stopped after its workers")
    add("--timeout", metavar="S", type=_amount, default=TIMEOUT, help="seconds; 0: no bound (default: %(default)s)")
    add("--log", metavar="FILE", help="append lines of JSON here, samples too (default: stderr, without samples)")
    cut = argv.index("--") if "--" in argv else len(argv)
    args, command = parser.parse_args(argv[:cut]), argv[cut + 1 :]
    if not command:
        parser.error("the command must follow --, and there is none")
    return args, command


def trip_gib(args):
    """What has to stay available while the job runs: a persistent owner goes after its workers."""
    if args.trip_gib is not None:
        return args.trip_gib
    return OWNER_TRIP_GIB if args.persistent_owner else TRIP_GIB


def _amount(text):
    value = float(text)
    if not 0 <= value < 1 << 30:
        raise ValueError(text)
    return value


_amount.__name__ = "number of at least 0"  # what argparse calls it when it refuses one


if __name__ == "__main__":
    sys.exit(main())
