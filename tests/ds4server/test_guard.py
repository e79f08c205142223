"""The memory guard: its decisions on scripted samples, and jobs that really allocate, disobey, and leave something behind."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4server import guard
from ds4server.guard import Job, Limits, Sample, admit, decide
from ds4server.host import GIB

LIMITS = Limits(grant=30 * GIB, trip=12 * GIB, timeout=1800)
CALM = Sample(5, 40 * GIB, 0.0, GIB)
amounts = st.none() | st.integers(0, 200 * GIB)


@pytest.mark.parametrize(
    ("available", "most", "reserve", "trip", "grant"),
    [
        (100, None, 12, 12, 88),
        (100, 40, 12, 12, 40),
        (100, 95, 12, 12, 88),
        (13, None, 12, 12, 1),
        (12, None, 12, 8, None),
        (12, None, 4, 12, None),
        (13, 0, 12, 12, None),
        (None, 5, 0, 0, None),
    ],
)
def test_the_grant_is_what_lies_above_the_reserve_and_no_more_than_was_asked_for(available, most, reserve, trip, grant):
    sizes = [None if gib is None else gib * GIB for gib in (available, most, reserve, trip)]
    found, why = admit(*sizes)
    assert found == (None if grant is None else grant * GIB)
    assert (why is None) == (found is not None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"available": 12 * GIB}, None),
        ({"available": 12 * GIB - 1}, "--trip-gib"),
        ({"available": 16 * GIB, "stall": 99.0}, None),
        ({"available": 16 * GIB - 1, "stall": 19.9}, None),
        ({"available": 16 * GIB - 1, "stall": 20.0}, "stalled"),
        ({"available": 13 * GIB, "stall": None}, None),
        ({"used": 30 * GIB}, None),
        ({"used": 30 * GIB + 1}, "30.00 GiB it was admitted with"),
        ({"used": None, "available": None}, None),
        ({"available": None, "stall": 100.0}, None),
        ({"seconds": 1799.9}, None),
        ({"seconds": 1800}, "--timeout"),
    ],
)
def test_what_stops_a_job(change, says):
    why = decide(LIMITS, replace(CALM, **change))
    assert why is None if says is None else says in why


def test_no_timeout():
    assert decide(replace(LIMITS, timeout=0), replace(CALM, seconds=1e9)) is None


@given(st.floats(0, 4000), amounts, st.none() | st.floats(0, 100), amounts)
def test_less_room_never_saves_a_job(seconds, available, stall, used):
    sample = Sample(seconds, available, stall, used)
    if decide(LIMITS, sample) is not None:
        assert decide(LIMITS, replace(sample, seconds=seconds + 100)) is not None
        if available is not None:
            assert decide(LIMITS, replace(sample, available=available // 2)) is not None


@pytest.mark.parametrize(
    ("text", "percent"),
    [
        ("some avg10=31.00 avg60=0.00 avg300=0.00 total=9\nfull avg10=21.50 avg60=1.00 avg300=0.00 total=5\n", 21.5),
        ("some avg10=31.00 avg60=0.00 avg300=0.00 total=9\n", None),
        (None, None),
    ],
)
def test_the_kernels_account_of_stalls(tmp_path, text, percent):
    if text is not None:
        (tmp_path / "memory").write_text(text)
    assert guard.stalled(tmp_path / "memory") == percent


@pytest.mark.parametrize(
    ("own", "below", "made"),
    [
        ("4:memory:/x\n0::/a/b\n", "a/b", "a/b/job"),
        ("0::/\n", "", "job"),
        ("4:memory:/x\n", "", None),
        ("0::/elsewhere\n", "a", None),
        ("0::/../a\n", "a", None),
    ],
)
def test_where_a_control_group_is_made(tmp_path, own, below, made):
    (tmp_path / "own").write_text(own)
    root = tmp_path / "cgroup"
    (root / below).mkdir(parents=True)
    (root / "cgroup.controllers").touch()
    found = guard.control_group("job", GIB, roots=(tmp_path / "none", root), own=tmp_path / "own")
    assert found == (None if made is None else root / made)
    assert made is None or found.is_dir()


# Jobs. The host's memory is scripted: nobody wants it short.


def job(code, *args, group=None):
    return Job([sys.executable, "-c", code, *map(str, args)], group)


def watched(started, *samples, limits=LIMITS, **options):
    """(code, why, the log's events) of a job; the last sample repeats."""
    events, rest = [], list(samples)

    def sample(seconds):
        found = rest.pop(0) if len(rest) > 1 else rest[0]
        return replace(found, seconds=seconds)

    code, why = guard.watch(started, limits, sample, lambda event, **fields: events.append((event, fields)), **options)
    return code, why, events


def names(events):
    return [event for event, _ in events if event != "sample"]


def test_the_commands_own_exit_code():
    assert watched(job("raise SystemExit(7)"), CALM)[:2] == (7, None)
    assert watched(job("import os; os.abort()"), CALM)[:2] == (128 + signal.SIGABRT, None)


def test_short_memory_ends_a_job():
    began = time.monotonic()
    code, why, events = watched(job("import time; time.sleep(60)"), CALM, CALM, replace(CALM, available=11 * GIB))
    assert (code, names(events)) == (128 + signal.SIGTERM, ["stopped", "ended"]) and "11.00 GiB are available" in why
    assert events[-2][1]["available"] == 11 * GIB and events[-1][1]["why"] == why
    assert time.monotonic() - began < 5


STUBBORN = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def ready(path):
    """A sampler's gate: calm until a job has made ``path``."""
    while not path.exists():
        time.sleep(0.01)
    return replace(CALM, stall=50.0, available=15 * GIB)


def test_a_job_that_ignores_the_signal_is_killed_a_second_later(tmp_path):
    stubborn = job(STUBBORN, tmp_path / "ready")
    began = time.monotonic()
    code, why, events = watched(stubborn, ready(tmp_path / "ready"))
    assert (code, names(events)) == (128 + signal.SIGKILL, ["stopped", "killed", "ended"]) and "stalled" in why
    assert events[1][1]["seconds"] - events[0][1]["seconds"] >= guard.GRACE and time.monotonic() - began < 10


OBEDIENT = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(9))
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""
FAMILY = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
if sys.argv[2] == "wait":
    time.sleep(60)
"""


def alive(pid):
    try:
        return not any(line.startswith("State:\tZ") for line in open(f"/proc/{pid}/status"))
    except OSError:
        return False


def test_everything_in_the_jobs_group_is_ended_and_nothing_else(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        family = job(FAMILY, tmp_path / "child", "wait")
        short = replace(ready(tmp_path / "child"), available=GIB)
        assert watched(family, short)[1] is not None
        assert not alive(int((tmp_path / "child").read_text())) and other.poll() is None and alive(os.getpid())
    finally:
        other.kill()
        other.wait()


def test_what_a_job_leaves_behind_is_ended_and_its_code_kept(tmp_path):
    code, why, events = watched(job(FAMILY, tmp_path / "child", "leave"), CALM)
    assert (code, why, names(events)) == (0, None, ["left behind", "ended"])
    assert not alive(int((tmp_path / "child").read_text()))


def test_signals_are_passed_on(tmp_path):
    waiting = job(OBEDIENT, tmp_path / "ready")
    ready(tmp_path / "ready")
    assert watched(waiting, CALM, asked=[signal.SIGINT])[:2] == (9, None)


def test_what_a_job_holds():
    """Allocated memory counts, also that of children; what parent and child share counts once where it decides."""
    text = "import os, time; x = bytearray(64 << 20); x[::4096] = b'1' * (len(x) // 4096); os.fork(); time.sleep(60)"
    forked = job(text)
    try:
        deadline = time.monotonic() + 20
        while len(forked.pids()) < 2 or (forked.used(1 << 40) or 0) < 128 << 20:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert 64 << 20 <= forked.used(100 << 20) < 100 << 20 < 128 << 20 <= forked.used(1 << 40)
    finally:
        forked.send(signal.SIGKILL)
        forked.wait(5)


# The command.


def run(*args, log=None):
    """(exit code, stderr, the log's lines) of the guard's command line."""
    command = [sys.executable, "-m", "ds4server.guard", *([] if log is None else ["--log", str(log)]), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr, [] if log is None else [json.loads(line) for line in log.read_text().splitlines()]


ROOMY = ("--reserve-gib", "0.25", "--trip-gib", "0.25")
EATER = """
import time
held = []
for _ in range(50):
    held.append(bytearray(16 << 20))
    time.sleep(0.05)
time.sleep(60)
"""


def test_a_job_that_outgrows_its_grant_is_stopped(tmp_path):
    code, said, lines = run(*ROOMY, "--max-gib", "0.1", "--", sys.executable, "-c", EATER, log=tmp_path / "log")
    assert code == 75 and "0.10 GiB it was admitted with" in said and "not to be used" in said
    events = [line["event"] for line in lines if line["event"] not in ("sample", "note")]
    assert events in (["admitted", "stopped", "ended"], ["admitted", "stopped", "killed", "ended"])
    assert lines[0]["grant"] == int(0.1 * GIB) and all("time" in line for line in lines)


def test_a_job_that_fits_has_its_own_output_and_exit_code(tmp_path):
    code, said, lines = run(*ROOMY, "--", sys.executable, "-c", "import sys; sys.exit('done')", log=tmp_path / "log")
    assert (code, said.strip()) == (1, "done")
    assert lines[0]["event"] == "admitted" and lines[-1] == lines[-1] | {"event": "ended", "code": 1, "why": None}


def test_there_is_no_room(tmp_path):
    code, said, lines = run("--reserve-gib", "1000000", "--", "touch", str(tmp_path / "ran"), log=tmp_path / "log")
    assert code == 75 and "refused" in said and [line["event"] for line in lines] == ["refused"]
    assert not (tmp_path / "ran").exists()


LEAVES = """
import pathlib, subprocess, sys
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
"""


def test_a_control_group_also_holds_what_leaves_the_process_group(tmp_path):
    code, said, lines = run(*ROOMY, "--", sys.executable, "-c", LEAVES, str(tmp_path / "pid"), log=tmp_path / "log")
    group, pid = lines[0]["group"], int((tmp_path / "pid").read_text())
    try:
        assert (code, alive(pid)) == (0, group is None), said
        assert group is None or not os.path.exists(group)
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_ends_no_job():
    done = subprocess.run([sys.executable, "-m", "ds4server.guard", "--log", "/dev/full", *ROOMY, "--", "sh", "-c", "exit 4"],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 4 and done.stderr.count("this line of the log is lost") >= 2


def test_time_is_up():
    code, said, _ = run(*ROOMY, "--timeout", "0.3", "--", sys.executable, "-c", "import time; time.sleep(60)")
    assert code == 75 and "--timeout allows 0.3" in said


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ([], 2, "must follow --"),
        (["--max-gib", "much", "--", "true"], 2, "invalid number of at least 0 value: 'much'"),
        ([*ROOMY, "--", "/no/such/command"], 127, "No such file"),
        ([*ROOMY, "--", os.path.dirname(__file__)], 126, "Permission denied"),
        (["--log", "/no/such/folder/log", "--", "true"], 2, "No such file"),
    ],
)
def test_mistakes(args, code, says):
    found, said, _ = run(*args)
    assert found == code and says in said


def test_an_owner_trips_later():
    assert guard.read(["--persistent-owner", "--", "a", "--", "b"])[1] == ["a", "--", "b"]
    parsed, _ = guard.read(["--", "true"])
    assert (parsed.reserve_gib, parsed.timeout, parsed.trip_gib, parsed.max_gib) == (12, 1800, None, None)
    assert guard.trip_gib(parsed) == 12 and guard.trip_gib(guard.read(["--persistent-owner", "--", "true"])[0]) == 8
    assert guard.trip_gib(guard.read(["--persistent-owner", "--trip-gib", "3", "--", "true"])[0]) == 3
