"""The owner's command line, its order of work, and owners and workers as real processes."""

import mmap
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ds4ref import drafting
from ds4ref.gguf import Artifact
from ds4ref.model import Model
from ds4ref.speculative import Speculator
from ds4server import options
from ds4server.drafter import Drafter
from ds4server.owner import server
from ds4server.owner.fingerprint import Logical
from ds4server.owner.manifest import read
from ds4server.owner.server import plan
from ds4server.owner.worker import import_weights

MODEL = Path(__file__).resolve().parents[3] / "golden" / "deepseek4"
GONE = "is gone; start ds4-weight-server again"


def run(*flags, **kwargs):
    """(exit code, stderr) of an owner that is expected to end by itself."""
    command = [sys.executable, "-m", "ds4server.owner", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **kwargs)
    assert done.stdout == ""
    return done.returncode, done.stderr


class TestCommandLine:
    @pytest.mark.parametrize("flags, sentence", [
        ([], "--scope both needs --base FILE"),
        (["--base", "f"], "--scope both needs --mtp FILE"),
        (["--scope", "mtp"], "--scope mtp needs --mtp FILE"),
        (["--scope", "base", "--base", "f", "--mtp", "g", "--manifest", "m"], "--mtp is given, but --scope base does not"),
        (["--scope", "base", "--base", "f"], "--manifest FILE is needed"),
        (["--scope", "base", "--base", "f", "--manifest", "m", "--backend", "ipc"], "--backend ipc is not supported"),
        (["--scope", "base", "--base", "f", "--manifest", "m", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--span-mb", "63"], "--span-mb: '63' is no whole number from 64 to 4096"),
        (["--copy-chunk-mb", "1025"], "--copy-chunk-mb: '1025' is no whole number from 16 to 1024"),
        (["--reserve-gb", "-1"], "--reserve-gb: '-1' is no whole number"),
        (["--device", "x"], "--device: 'x' is no whole number"),
        (["--scope", "all"], "invalid choice: 'all'"),
    ])  # fmt: skip
    def test_errors_exit_2(self, flags, sentence, capsys):
        with pytest.raises(SystemExit) as end:
            server.main(flags)
        assert end.value.code == 2 and sentence in capsys.readouterr().err

    def test_every_documented_flag_is_known(self):
        flags = """--base b --mtp m --drafter d --manifest f --backend vmm --storage host --scope both --broker-socket s
            --lock-file l --no-lock --device 1 --exit-on-parent-pid 1 --span-mb 64 --copy-chunk-mb 16 --reserve-gb 0
            --repack-iq2-aligned --no-repack-q2k-aligned --no-repack-q8-aligned --dry-run"""
        args = server.parser().parse_args(flags.split())
        assert args.repack_iq2_aligned and not args.repack_q2k_aligned and not args.repack_q8_aligned

    @pytest.mark.parametrize("flags, sentence", [
        (["--storage", "cuda"], "--storage cuda needs device memory exported as POSIX descriptors"),
        (["--manifest", "x" * 120], "Unix limits it to 107"),
        (["--base", "none.gguf"], "none.gguf: no such file"),
        (["--manifest", "no/folder"], "no is no folder"),
        (["--lock-file", "no/lock"], "no/lock: cannot be opened (No such file"),
    ])  # fmt: skip
    def test_what_cannot_be_owned_exits_1(self, flags, sentence, small_file, tmp_path):
        code, lines = run("--scope", "base", "--base", small_file, "--manifest", "m", "--reserve-gb", 0, *flags, cwd=tmp_path)
        assert code == 1 and sentence in lines.splitlines()[-1] and "Traceback" not in lines
        assert not list(tmp_path.iterdir())


def test_ranges_hold_every_tensor_whole(small_file):
    artifact = Artifact.open(small_file)
    logical = Logical.of(artifact.shards)
    tensors = sorted(artifact.tensors.values(), key=lambda t: t.offset)
    for span in (1, 5000, 1 << 17, 1 << 19, 1 << 30):
        ranges = plan("base", artifact, logical, span, 5)
        assert [r.id for r in ranges] == list(range(5, 5 + len(ranges)))
        homes = [next(r for r in ranges if r.offset <= t.offset and t.offset + t.nbytes <= r.end) for t in tensors]
        for r in ranges:
            inside = [t for t, home in zip(tensors, homes, strict=True) if home is r]
            assert (r.offset, r.end) == (inside[0].offset, inside[-1].offset + inside[-1].nbytes)
            assert r.nbytes <= span or len(inside) == 1
            assert r.alloc_bytes >= r.nbytes and r.logical_size == logical.nbytes
        for r, after in zip(ranges, ranges[1:], strict=False):  # none could have grown
            first = next(t for t in tensors if t.offset == after.offset)
            assert first.offset + first.nbytes - r.offset > span


def test_dry_run_touches_nothing(small_file, tmp_path):
    flags = ["--scope", "base", "--base", small_file, "--dry-run", "--lock-file", tmp_path / "lock"]
    code, lines = run(*flags, "--reserve-gb", 0, "--manifest", tmp_path / "m", cwd=tmp_path)
    assert code == 0 and not list(tmp_path.iterdir())
    assert "plan base" in lines and "1 ranges" in lines and "it fits" in lines and "repack: none" in lines
    code, lines = run(*flags, "--reserve-gb", 1 << 20, cwd=tmp_path)
    assert code == 1 and not list(tmp_path.iterdir()) and "bytes are missing" in lines


def test_preflight_refuses_before_the_lock_and_memory(small_file, tmp_path, monkeypatch, capsys):
    def never(*_):
        raise AssertionError("memory was asked for")

    monkeypatch.setattr(server.memory, "create", never)
    flags = ["--scope", "base", "--base", small_file, "--manifest", tmp_path / "m", "--lock-file", tmp_path / "lock"]
    assert server.main([*map(str, flags), "--reserve-gb", "1048576"]) == 1
    assert "bytes to allocate" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_file_changed_while_copied_is_refused(small_file, tmp_path, monkeypatch, capsys):
    path = tmp_path / "f.gguf"
    path.write_bytes(small_file.read_bytes())
    real = server.memory.create

    def create(*args):
        os.utime(path, ns=(1, 1))
        return real(*args)

    monkeypatch.setattr(server.memory, "create", create)
    flags = ["--scope", "base", "--base", path, "--manifest", tmp_path / "m", "--no-lock", "--reserve-gb", "0"]
    assert server.main([*map(str, flags)]) == 1
    assert "was changed while it was copied" in capsys.readouterr().err and not (tmp_path / "m").exists()


def test_a_file_cut_short_while_copied_is_refused(small_file, tmp_path, monkeypatch, capsys):
    path = tmp_path / "f.gguf"
    path.write_bytes(small_file.read_bytes())
    real = server.memory.create

    def create(*args):
        os.truncate(path, 1 << 20)
        return real(*args)

    monkeypatch.setattr(server.memory, "create", create)
    flags = ["--scope", "base", "--base", path, "--manifest", tmp_path / "m", "--no-lock", "--reserve-gb", "0"]
    assert server.main([*map(str, flags)]) == 1
    assert "ends at byte 1048576; it has become shorter" in capsys.readouterr().err


class TestOwner:
    def test_start_and_clean_end(self, owner, small_file, tmp_path):
        one = owner("--scope", "base", "--base", small_file).ready()
        assert one.lines[-2:] == [
            f"ds4_weight_server: broker listening {tmp_path}/m.sock",
            f"ds4_weight_server: ready manifest={tmp_path}/m ranges=1",
        ]
        told = read(one.manifest)
        assert (told.pid, told.device, told.scope, told.lock) == (one.process.pid, 0, "base", str(tmp_path / "lock"))
        assert stat.S_IMODE(os.stat(told.broker).st_mode) == 0o600
        assert one.end(signal.SIGTERM)[0] == 0
        assert sorted(p.name for p in tmp_path.iterdir()) == ["lock", "m"]

    def test_sigint_while_starting_ends_clean(self, owner, model_file, tmp_path):
        one = owner("--scope", "base", "--base", model_file).wait_for("ds4_weight_server: preflight")
        assert one.end(signal.SIGINT)[0] == 0
        assert not (tmp_path / "m.sock").exists()

    def test_one_owner_per_device(self, owner, small_file, tmp_path):
        first = owner("--scope", "base", "--base", small_file).ready()
        (tmp_path / "other").mkdir()
        flags = ["--scope", "base", "--base", small_file, "--manifest", tmp_path / "other/m", "--reserve-gb", 0]
        code, lines = run(*flags, "--lock-file", tmp_path / "lock")
        assert code == 1 and f"device 0 has an owner already, process {first.process.pid}" in lines
        code, lines = run(*flags, "--lock-file", tmp_path / "lock", "--dry-run")
        assert code == 0
        second = owner("--scope", "base", "--base", small_file, "--no-lock", folder=tmp_path / "other").ready()
        assert read(second.manifest).lock is None
        first.end(signal.SIGKILL)
        owner("--scope", "base", "--base", small_file).ready()  # the lock and the socket of the dead one are free

    @pytest.mark.parametrize("pidfd", [True, False])
    def test_ends_with_its_parent(self, owner, small_file, tmp_path, pidfd):
        parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        without = "import os, sys; vars(os).pop('pidfd_open', None); from ds4server.owner.server import main; sys.exit(main())"
        one = owner("--scope", "base", "--base", small_file, "--exit-on-parent-pid", parent.pid,
                    start=("-m", "ds4server.owner") if pidfd else ("-c", without)).ready()  # fmt: skip
        parent.communicate(b"\n", 30)
        assert one.end()[0] == 0 and not (tmp_path / "m.sock").exists()

    def test_does_not_outlive_a_parent_that_is_gone(self, owner, small_file):
        parent = subprocess.Popen([sys.executable, "-c", ""])
        parent.wait(30)
        assert owner("--scope", "base", "--base", small_file, "--exit-on-parent-pid", parent.pid).end()[0] == 0

    def test_every_model_is_held(self, owner, small_file, make_model, tmp_path):
        mtp, drafter = make_model(tmp_path / "mtp.gguf", 64, 2), make_model(tmp_path / "drafter.gguf", 96, 3)
        one = owner("--base", small_file, "--mtp", mtp, "--drafter", drafter).ready()
        told = read(one.manifest)
        assert list(told.contents) == [r.model for r in told.ranges] == ["base", "mtp", "drafter"]
        for path, model in ((small_file, "base"), (mtp, "mtp"), (drafter, "drafter")):
            artifact = Artifact.open(path)
            tensors = import_weights(one.manifest, artifact, model)
            assert all(np.array_equal(data, artifact.tensors[name].data) for name, data in tensors.items())

    def test_shards_are_one_model(self, owner, make_model, tmp_path):
        path = make_model(tmp_path / "s-00001-of-00002.gguf", 64)
        one = owner("--scope", "base", "--base", path).ready()
        told, artifact = read(one.manifest), Artifact.open(path)
        assert len(artifact.shards) == 2 and len(told.ranges) == 2
        tensors = import_weights(one.manifest, artifact)
        assert all(np.array_equal(tensors[name], tensor.data) for name, tensor in artifact.tensors.items())


@pytest.mark.usefixtures("memfd")
@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("role", ["mtp", "drafter"])
def test_a_drafter_in_the_owners_memory_drafts_as_the_file_does(owner, backend, role):
    if backend == "cpu":
        pytest.importorskip("jax", reason="JAX is not installed")
        from ds4jax.model import Model as Opened

        kwargs = {"context": 64, "banks": 2, "chunk": 16, "sizes": (1, 16), "least_bucket": 64}
    else:
        Opened, kwargs = Model, {}
    paths = {"base": MODEL / "model.gguf", "mtp": MODEL / "mtp.gguf", "drafter": MODEL / "dspark.gguf"}
    held = owner(*(word for model, path in paths.items() for word in (f"--{model}", path))).ready()
    found = Drafter(role, Artifact.open(paths[role]), drafting.attach(Model.open(paths["base"]), paths[role]))
    environment = {"DS4_CUDA_WEIGHT_IPC_MANIFEST": str(held.manifest), "DS4_CUDA_WEIGHT_IPC_SCOPE": "both"}
    told, model = [], Opened.open(paths["base"], **kwargs)
    for environ in (environment, {}):
        loaded, seen = found.load(options.read([], environ), model), []
        assert loaded.imported == bool(environ) and loaded.role == role
        speculator = Speculator(loaded.target(model, model.new_state()), loaded.drafter, 3)
        speculator.prefill([1, *range(7, 27)])
        drafts = loaded.drafter.propose(speculator.draft, 3, 3, lambda row, seen=seen: seen.append(row) or int(np.argmax(row)))
        assert len(drafts) == 3
        told.append((drafts, np.array(seen)))
    assert told[0][0] == told[1][0] and np.array_equal(told[0][1], told[1][1])


@pytest.mark.usefixtures("memfd")
class TestWorkers:
    @pytest.fixture
    def held(self, owner, model_file):
        return owner("--scope", "base", "--base", model_file, "--span-mb", 64).ready()

    def test_two_workers_share_the_pages(self, held, worker, model_file):
        workers = [worker(model_file, held.manifest) for _ in range(2)]
        total = sum(r.nbytes for r in read(held.manifest).ranges)
        assert len(read(held.manifest).ranges) == 2
        alone = workers[0].ask("touch")
        told = [one.ask("touch") for one in (workers[1], workers[0])]
        assert told[0]["inodes"] == told[1]["inodes"] and len(told[0]["inodes"]) == len(read(held.manifest).ranges)
        assert 0.95 < alone["pss"] / total < 1.05
        for one in told:
            assert one["sum"] == alone["sum"]
            assert 0.95 < one["rss"] / total < 1.05
            assert 0.47 < one["pss"] / one["rss"] < 0.53
        print(f"weights {total >> 20} MiB; each worker Rss {told[0]['rss'] >> 20} MiB, Pss {told[0]['pss'] >> 20} MiB")

    def test_the_file_is_hardly_read(self, held, worker, model_file):
        facts = worker(model_file, held.manifest, DS4_CUDA_WEIGHT_IPC_SCOPE="base").facts
        size = model_file.stat().st_size
        looked_at = (8 << 20) + 4096 * (size >> 24)
        assert size > 64 << 20 and facts["shared"] and facts["warnings"] == []
        assert looked_at - mmap.PAGESIZE <= facts["read"] < looked_at + (1 << 20)
        assert facts["file_resident"] < 1 << 20 and not facts["file_mapped"]

    def test_weights_are_the_owners_not_the_files(self, held, worker, model_file, direct_logits, tmp_path):
        """What the fingerprint does not look at is blanked in the worker's file, and nothing changes."""
        copy = tmp_path / "copy.gguf"
        data = bytearray(model_file.read_bytes())
        for first, last in ((5, 16), (17, 32), (33, 40)):
            data[first << 20 : last << 20] = bytes((last - first) << 20)
        copy.write_bytes(data)
        blank, shared = worker(copy), worker(copy, held.manifest)
        assert not np.array_equal(blank.logits(tmp_path), direct_logits)
        assert np.array_equal(shared.logits(tmp_path), direct_logits)

    def test_logits_equal_those_of_the_file(self, held, worker, model_file, direct_logits, tmp_path):
        assert np.array_equal(worker(model_file, held.manifest).logits(tmp_path), direct_logits)

    def test_a_workers_death_harms_nobody(self, held, worker, model_file, direct_logits, tmp_path):
        first, second = worker(model_file, held.manifest), worker(model_file, held.manifest)
        first.ask("touch")
        first.kill()
        assert held.process.poll() is None
        assert np.array_equal(second.logits(tmp_path), direct_logits)
        assert np.array_equal(worker(model_file, held.manifest).logits(tmp_path), direct_logits)

    @pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
    def test_an_owners_death_is_named_and_running_workers_go_on(self, held, worker, model_file, direct_logits, tmp_path, sig):
        running = worker(model_file, held.manifest)
        held.end(sig)
        assert np.array_equal(running.logits(tmp_path), direct_logits)
        code, lines = worker(model_file, held.manifest).refusal()
        assert code == 1 and f"worker: manifest {held.manifest}: the owner, process {held.process.pid}, {GONE}" in lines
        assert np.array_equal(running.logits(tmp_path), direct_logits)

    def test_a_changed_file_is_refused(self, owner, worker, make_model, tmp_path):
        path = make_model(tmp_path / "f.gguf", 512)
        one = owner("--scope", "base", "--base", path).ready()
        make_model(path, 512, seed=2)
        code, lines = worker(path, one.manifest).refusal()
        assert code == 1 and "has fingerprint" in lines and "the file was changed or is another one" in lines
