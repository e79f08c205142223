"""A store of toy states for the tests of the disk store: a token is a byte of the text, a state remembers its tokens.

``python kvtoy.py crashes|kills|sharing DIRECTORY NUMBER`` runs what needs processes of its own, in an interpreter without
threads, and prints one line per failure and a count at the end.
"""

import fcntl
import hashlib
import itertools
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np

from ds4ref import snapshots
from ds4ref.state import Ring, Rows, State
from ds4server import kvfiles, kvstore
from ds4server.kvpolicy import Options
from ds4server.kvrecord import Flag, Reason
from ds4server.kvstore import Form, Loaded, Query, Saved, Store

ROWS = {"a": Rows((2,)), "b": Rows((1,))}
WINDOW = {"a": Rows((2,)), "w": Ring(4, (1,))}
DIGEST = hashlib.sha256(b"these files").digest()
OPTIONS = Options(min_tokens=4, cold_max=1000, persist_min=4)
BIG = 1 << 30


def form(layout=ROWS, family=3, quant_bits=4, context=4096, **identity):
    fields = {"family": "toy", "layout": snapshots.layout_digest(layout), "config": "0", "dtype": "float32", "vocabulary": 256}
    return Form(family, quant_bits, context, layout, snapshots.Identity(**fields | identity))


def state_of(text, layout=ROWS, tokens=None):
    state = State(layout)
    for token in text if tokens is None else tokens:
        for name, kind in layout.items():
            state[name].append(np.full(kind.shape, token))
        state.tokens.append(int(token))
    state.logits = np.full(256, state.length, np.float32)
    return state


def snapshot_of(text, layout=ROWS, tokens=None):
    return state_of(text, layout, tokens).snapshot()


def query(text, **more):
    return Query(text, list(text), **{"partial_min": 4} | more)


def opened(directory, budget=BIG, identity=DIGEST, options=OPTIONS, clock=lambda: 1000, **kind):
    return Store.open(directory, budget, form(**kind), options, identity, clock)


def records(directory):
    return sorted(path.name for path in Path(directory).iterdir() if path.suffix == ".kv")


def bytes_of(directory):
    return sum(path.stat().st_size for path in Path(directory).iterdir() if path.suffix == ".kv")


def right(loaded, text):
    """Whether a loaded record is the state of ``text``."""
    if not isinstance(loaded, Loaded) or loaded.key_text != text:
        return False
    found, expected = loaded.snapshot, snapshot_of(text)
    pairs = [(found.tokens, expected.tokens), (found.logits, expected.logits)]
    for name, arrays in expected.components.items():
        pairs += [(found.components[name][part], array) for part, array in arrays.items()]
    return all(np.array_equal(a, b) for a, b in pairs)


# What runs in processes of its own

TEXTS = [bytes([65 + i]) * 40 + b"<call>" for i in range(5)]


def prepare(directory):
    """Two records, a left-over and room for one more."""
    store = opened(directory)
    for text in TEXTS[:2]:
        assert isinstance(store.save(text, snapshot_of(text), Reason.COLD), Saved)
    (directory / f"{'0' * 40}.kv.tmp.1.1").write_bytes(b"left")
    return int(bytes_of(directory) * 1.7)


def session(directory, budget):
    """Everything that a server does to the directory."""
    store = opened(directory, budget)
    store.restore(query(TEXTS[0] + b"more"))
    store.save(TEXTS[2], snapshot_of(TEXTS[2]), Reason.CONTINUED)
    store.save(TEXTS[2], snapshot_of(TEXTS[2]), Reason.CONTINUED, Flag(0), {b"call_1": b"<call>"})
    store.tool_blocks([b"call_1"])
    store.restore(query(TEXTS[2]))
    store.save(TEXTS[3], snapshot_of(TEXTS[3]), Reason.BANK_EVICT)


CALLS = [(os, name) for name in ("open", "close", "write", "pwrite", "fsync", "rename", "unlink", "preadv", "pread", "mkdir",
                                 "scandir", "listdir", "stat", "fstat")] + [(fcntl, "flock")]  # fmt: skip


def watched(before):
    """Call ``before(number, name, call, args)`` before every system call."""
    counter = itertools.count()

    def wrap(name, call):
        def wrapped(*args, **kwargs):
            before(next(counter), name, call, args)
            return call(*args, **kwargs)

        return wrapped

    for module, name in CALLS:
        setattr(module, name, wrap(name, getattr(module, name)))


def dying(last, half):
    """Make the process end, as by SIGKILL, before system call ``last``, or with ``half`` of it done."""

    def before(number, name, call, args):
        if number == last:
            if half:
                call(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
            os.kill(os.getpid(), signal.SIGKILL)

    watched(before)


def made_calls(work, file):
    """The names of the system calls that ``work`` makes."""
    watched(lambda number, name, call, args: print(name, file=file))
    work()
    file.flush()


def in_child(work):
    """Run ``work`` in a forked process; its wait status."""
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException as error:
            print("failure: child", type(error).__name__, error, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def check(directory, budget, what):
    """A directory after a crash: nothing half-written, nothing wrong, nothing over the budget."""
    store = opened(directory, budget)
    names = sorted(path.name for path in directory.iterdir())
    known = {kvstore.kvrecord.record_name(DIGEST, text): text for text in TEXTS}
    if set(names) - {".lock"} != set(records(directory)) or not set(records(directory)) <= known.keys():
        print("failure:", what, "left", names)
    if bytes_of(directory) > budget:
        print("failure:", what, "exceeds the budget")
    for name in records(directory):
        if not right(store.restore(query(known[name] + b"!")), known[name]):
            print("failure:", what, "made a record that does not load", name)
    return len(records(directory))


def crashes(base, every):
    """The process ends between any two system calls, or within a write: at every so manyth of these points."""
    os.fsync = os.fstat  # the machine goes on: what was written counts, flushed or not, and flushing takes long
    seen, directory, budget = set(), base / "store", prepare(base / "before")

    def at_once(work):
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(base / "before", directory)
        return in_child(work)

    with open(base / "calls", "w") as file:
        at_once(lambda: made_calls(lambda: session(directory, budget), file))
    names = (base / "calls").read_text().split()
    points = [(n, False) for n in range(len(names))] + [(n, True) for n in range(len(names)) if "write" in names[n]]
    for last, half in points[::every]:
        status = at_once(lambda: (dying(last, half), session(directory, budget)))  # noqa: B023
        if not os.WIFSIGNALED(status):
            print("failure: the process outlived call", last)
        seen.add(check(directory, budget, f"crash {last} {half}"))
    print("done", len(points[::every]), sorted(seen))


def kills(base, rounds):
    """SIGKILL from outside at random moments of a writer."""
    rng, directory = random.Random(7), base / "store"
    budget = prepare(directory)

    def write():
        for text in itertools.cycle(TEXTS):
            session(directory, budget)
            opened(directory, budget).save(text, snapshot_of(text), Reason.COLD)

    for number in range(rounds):
        pid = os.fork()
        if not pid:
            write()
            os._exit(1)
        time.sleep(rng.uniform(0.002, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        check(directory, budget, f"kill {number}")
    print("done", rounds)


def sharing(base, rounds):
    """Two processes write, read and evict in one directory."""
    directory = base / "store"
    budget = prepare(directory)

    def work(seed):
        rng, hits, store = random.Random(seed), 0, opened(directory, budget, clock=time.time)
        for _ in range(rounds):
            text = rng.choice(TEXTS)
            if rng.random() < 0.5:
                saved = store.save(text, snapshot_of(text), Reason.COLD, Flag(0), {b"call_1": b"<call>"})
                assert isinstance(saved, Saved), saved
                with kvfiles.exclusive(directory):
                    assert bytes_of(directory) <= budget
            else:
                loaded = store.restore(query(text))
                assert not isinstance(loaded, Loaded) or right(loaded, text)
                hits += isinstance(loaded, Loaded)
            if rng.random() < 0.1:
                store = opened(directory, budget, clock=time.time)
        assert hits and not store.counts["error.damaged"]

    pids = []
    for seed in (1, 2):
        pid = os.fork()
        if not pid:
            try:
                work(seed)
            except BaseException as error:
                print("failure: child", type(error).__name__, error, flush=True)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    check(directory, budget, "sharing")
    print("done", 2)


if __name__ == "__main__":
    {"crashes": crashes, "kills": kills, "sharing": sharing}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
