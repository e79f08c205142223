"""Model files of some size, owners and workers as real processes, and an owner whose every promise can be broken."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds4ref import gguf_writer, tiny
from ds4ref.families import step35
from ds4ref.gguf import Artifact
from ds4server.owner import broker, manifest, memory
from ds4server.owner.fingerprint import ALGORITHM, Logical, fingerprint
from ds4server.owner.server import plan

PATIENCE = 150  # seconds for a start or an answer; a busy machine may pause processes for a minute
WORKER = Path(__file__).with_name("worker_process.py")
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("DS4_")} | {"OPENBLAS_NUM_THREADS": "1"}


@pytest.fixture
def memfd():
    """Skips the test where memory cannot be sealed."""
    if not memory.SEALABLE:
        pytest.skip("this system has no sealed memory files (memfd)")


@pytest.fixture(scope="session")
def make_model():
    return write_model


def write_model(path, feed_forward, seed=1):
    """A random step35 model whose size ``feed_forward`` decides: 1,536 bytes for each. With a path …-00001-of-00002.gguf,
    in two shards."""
    metadata = step35.tiny_metadata() | {"step35.feed_forward_length": feed_forward}
    config = step35.Config.from_metadata(tiny.Described("step35", metadata))
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in step35.tensors(config)[0].items():
        values = rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1])
        tensors[name] = (1 + 0.1 * values if len(shape) == 1 else values).astype(np.float32)
    if "-of-00002" not in path.name:
        gguf_writer.write(path, "step35", metadata, tensors)
        return path
    names = list(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": len(names)}
        own = metadata | split if number == 0 else split
        shard = path.with_name(path.name.replace("-00001-", f"-0000{number + 1}-"))
        gguf_writer.write(shard, "step35" if number == 0 else None, own, {name: tensors[name] for name in part})
    return path


@pytest.fixture(scope="session")
def model_file(tmp_path_factory):
    """A model file of 76 MB: larger than what a fingerprint looks at, and than one range of the shortest span."""
    return write_model(tmp_path_factory.mktemp("model") / "model.gguf", 49152)


@contextmanager
def bounded(process):
    """Kills a process that takes longer than PATIENCE, so that whoever reads from it sees the end and not nothing at all."""
    timer = threading.Timer(PATIENCE, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Owner:
    """A running ``ds4_weight_server``; ``lines`` are those of its stderr."""

    def __init__(self, folder, *flags, start=("-m", "ds4server.owner")):
        self.manifest = folder / "m"
        command = [sys.executable, *start, "--manifest", str(self.manifest), "--reserve-gb", "0",
                   "--lock-file", str(folder / "lock"), *map(str, flags)]  # fmt: skip
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        self.lines = []

    def wait_for(self, start):
        """Read stderr up to a line that begins so. AssertionError where the process ends before."""
        with bounded(self.process):
            for line in self.process.stderr:
                self.lines.append(line.rstrip("\n"))
                if line.startswith(start):
                    return self
        raise AssertionError(f"no line {start!r}: {self.lines}")

    def ready(self):
        return self.wait_for("ds4_weight_server: ready ")

    def end(self, sig=None):
        """Send a signal, if one is given; (exit code, the lines of stderr)."""
        if sig is not None:
            self.process.send_signal(sig)
        with bounded(self.process):
            self.lines += self.process.stderr.read().splitlines()
            return self.process.wait(), self.lines


@pytest.fixture
def owner(tmp_path):
    """Start owners with a folder and flags; those that are left are killed."""
    started = []

    def start(*flags, folder=tmp_path, **kwargs):
        started.append(Owner(folder, *flags, **kwargs))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait(30)
        one.process.stderr.close()


class Worker:
    """A running ``worker_process.py``; ``facts`` is what it printed first, None where it was refused."""

    def __init__(self, path, manifest_path=None, name="base", **variables):
        env = ENVIRONMENT | variables
        if manifest_path is not None:
            env["DS4_CUDA_WEIGHT_IPC_MANIFEST"] = str(manifest_path)
        self.process = subprocess.Popen([sys.executable, WORKER, path, name], text=True, env=env, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
        with bounded(self.process):
            first = self.process.stdout.readline()
        self.facts = json.loads(first) if first else None

    def ask(self, line):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        with bounded(self.process):
            return json.loads(self.process.stdout.readline())

    def logits(self, folder):
        path = folder / f"{self.process.pid}.npy"
        self.ask(f"logits {path}")
        return np.load(path)

    def refusal(self):
        """(exit code, stderr) of a worker that was refused."""
        assert self.facts is None
        with bounded(self.process):
            return self.process.wait(), self.process.stderr.read()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture
def worker():
    started = []

    def start(*args, **kwargs):
        started.append(Worker(*args, **kwargs))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait(30)
        for stream in (one.process.stdin, one.process.stdout, one.process.stderr):
            stream.close()


@pytest.fixture(scope="session")
def direct_logits(model_file, tmp_path_factory):
    """What a process computes that opened the file itself."""
    one = Worker(model_file)
    assert one.facts["shared"] is False
    logits = one.logits(tmp_path_factory.mktemp("direct"))
    one.kill()
    for stream in (one.process.stdin, one.process.stdout, one.process.stderr):
        stream.close()
    return logits


class Promises:
    """An owner within the test's own process: a manifest and a broker, each part of which a test may change."""

    def __init__(self, folder, path, model="base", span=1 << 19):
        self.artifact = Artifact.open(path)
        self.path, self.model = folder / "m", model
        logical = Logical.of(self.artifact.shards)
        content = manifest.Content(model, logical.nbytes, ALGORITHM, fingerprint(logical.nbytes, logical.read))
        self.manifest = manifest.Manifest(os.getpid(), 0, "both", None, str(folder / "m.sock"), {model: content},
                                          plan(model, self.artifact, logical, span))  # fmt: skip
        assert len(self.manifest.ranges) > 2
        self.allocations = {}
        for r in self.manifest.ranges:
            data = logical.read(r.offset, r.nbytes)
            self.allocations[r.id] = memory.create("test", r.alloc_bytes, lambda view, d=data: _put(view, d)), r.alloc_bytes

    def content(self, **changes):
        """Change the manifest's content line."""
        changed = replace(self.manifest.contents[self.model], **changes)
        self.manifest = replace(self.manifest, contents={self.model: changed})

    @contextmanager
    def kept(self, text=None):
        """The manifest written (or ``text`` in its place) and the broker serving."""
        if text is None:
            manifest.write(self.path, self.manifest)
        else:
            self.path.write_text(text)
        wake, stop = os.pipe()
        with broker.listen(self.manifest.broker) as listener:
            thread = threading.Thread(target=broker.serve, args=(listener, self.allocations, [wake]))
            thread.start()
            try:
                yield self.path
            finally:
                os.close(stop)
                thread.join(30)
                os.close(wake)
                os.unlink(self.manifest.broker)

    def close(self):
        for descriptor in {descriptor for descriptor, _ in self.allocations.values()}:
            os.close(descriptor)


def _put(view, data):
    view[: len(data)] = data


@pytest.fixture(scope="session")
def small_file(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("small") / "small.gguf", 512)


@pytest.fixture
def promises(tmp_path, small_file):
    """An owner of the base model, all of whose promises are kept so far."""
    one = Promises(tmp_path, small_file)
    yield one
    one.close()
