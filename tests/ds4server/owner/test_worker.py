"""Everything a worker verifies: an owner that keeps its promises, and one that breaks each of them."""

import gc
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from ds4ref.gguf import Artifact
from ds4server import options
from ds4server.owner import memory
from ds4server.owner.manifest import Derived, OwnerError
from ds4server.owner.worker import import_weights, shared


def refused(promises, text=None, needed=None):
    """The sentence with which a worker is refused."""
    with promises.kept(text) as path, pytest.raises(OwnerError) as error:
        import_weights(path, Artifact.open(promises.artifact.path), promises.model, needed)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_kept_promises_give_every_tensor(promises, memfd):
    warnings = []
    with promises.kept() as path:
        tensors = import_weights(path, promises.artifact, warn=warnings.append)
    assert tensors.keys() == promises.artifact.tensors.keys() and not warnings
    for name, data in tensors.items():
        assert np.array_equal(data, promises.artifact.tensors[name].data)
        assert not data.flags.writeable
        with pytest.raises(ValueError):
            data.flags.writeable = True


def test_only_ranges_of_needed_tensors_are_asked_for(promises):
    needed = "output.weight"
    data = promises.artifact.tensors[needed]
    home = next(r.id for r in promises.manifest.ranges if r.offset <= data.offset < r.end)
    promises.allocations = {home: promises.allocations[home]} | {
        id: (descriptor, 1) for id, (descriptor, _) in promises.allocations.items() if id != home
    }
    with promises.kept() as path:
        tensors = import_weights(path, promises.artifact, needed=[needed])
    assert list(tensors) == [needed] and np.array_equal(tensors[needed], data.data)


def test_dead_owner(promises):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    promises.manifest = replace(promises.manifest, pid=ended.pid)
    assert f"the owner, process {ended.pid}, is gone" in refused(promises)


def test_silent_broker(promises):
    promises.manifest = replace(promises.manifest, broker=promises.manifest.broker + "2")
    with promises.kept() as path:
        pass
    with pytest.raises(OwnerError, match=r"broker .*m\.sock2: does not answer for range 0 .No such file"):
        import_weights(path, promises.artifact)


def test_unknown_header(promises):
    assert "begins with 'DS4_WEIGHT_SERVER_VMM_V2'" in refused(promises, promises.manifest.text.replace("_V1", "_V2"))


def test_scope_that_does_not_cover(promises):
    promises.manifest = replace(promises.manifest, scope="mtp")
    assert "the owner's scope is mtp, which does not cover the base weights" in refused(promises)


def test_model_that_is_not_held(promises):
    promises.model = "mtp"
    assert "the owner holds no mtp weights (it holds: base)" in refused(promises)


def test_file_of_another_size(promises, tmp_path):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(promises.artifact.path.read_bytes() + bytes(1 << 16))
    with promises.kept() as path, pytest.raises(OwnerError, match=r"copy.gguf: has \d+ bytes in whole pages, but"):
        import_weights(path, Artifact.open(copy))


def test_file_of_other_contents(promises, tmp_path):
    data = bytearray(promises.artifact.path.read_bytes())
    data[-1 << 10] ^= 1
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(data)
    with promises.kept() as path, pytest.raises(OwnerError, match=r"copy.gguf: has fingerprint \w{16}, but the owner holds"):
        import_weights(path, Artifact.open(copy))


def test_wrong_fingerprint(promises):
    promises.content(fingerprint="0123456789abcdef")
    assert "but the owner holds 0123456789abcdef" in refused(promises)


def test_unknown_algorithm_is_a_warning(promises):
    promises.content(algorithm="crc0")
    warnings = []
    with promises.kept() as path:
        tensors = import_weights(path, promises.artifact, warn=warnings.append)
    assert len(tensors) == len(promises.artifact.tensors)
    assert len(warnings) == 1 and "the fingerprint is 'crc0', of which only blake2b-p16m-v1 is known" in warnings[0]


def test_overlapping_ranges(promises):
    first, second, *rest = promises.manifest.ranges
    line = f"alloc {second.id} base {second.logical_size} {second.offset}"
    text = promises.manifest.text
    assert line in text
    text = text.replace(line, f"alloc {second.id} base {second.logical_size} {first.end - 1}")
    assert f"ranges {first.id} and {second.id} of model 'base' overlap" in refused(promises, text)


def test_missing_range(promises):
    promises.manifest = replace(promises.manifest, ranges=promises.manifest.ranges[:-1])
    assert re.search(r"tensor '\S+', bytes \d+ to \d+ of the base files, lies in no range", refused(promises))


@pytest.mark.parametrize("cut", ["first", "last", "inside"])
def test_split_tensor(promises, cut):
    last = promises.manifest.ranges[-1]
    if cut == "first":
        parts = [replace(last, offset=last.offset + 1, nbytes=last.nbytes - 1)]
    elif cut == "last":
        parts = [replace(last, nbytes=last.nbytes - 1)]
    else:
        parts = [replace(last, nbytes=40), replace(last, id=99, offset=last.offset + 40, nbytes=last.nbytes - 40)]
    promises.manifest = replace(promises.manifest, ranges=(*promises.manifest.ranges[:-1], *parts))
    assert re.search(rf"is split: range {last.id} holds bytes \d+ to \d+; one range must hold it whole", refused(promises))


def test_layout_that_is_not_used(promises):
    *rest, last = promises.manifest.ranges
    derived = Derived(last.id, "base", last.logical_size, last.offset, last.nbytes, "iq2-aligned", 64, 8, 1, last.nbytes,
                      last.alloc_bytes, "t")  # fmt: skip
    promises.manifest = replace(promises.manifest, ranges=tuple(rest), derived=(derived,))
    assert "is held in layout 'iq2-aligned', which this worker cannot use" in refused(promises)


def test_broker_that_knows_no_such_range(promises):
    del promises.allocations[1]
    assert "answers b'ERR invalid allocation\\n' with 0 descriptors for range 1" in refused(promises)


def test_broker_with_another_size(promises):
    descriptor, nbytes = promises.allocations[0]
    promises.allocations[0] = descriptor, nbytes - 4096
    assert f"answers b'OK 0 {nbytes - 4096}\\n' for range 0; b'OK 0 {nbytes}\\n' with one" in refused(promises)


def test_short_descriptor(promises):
    _, nbytes = promises.allocations[0]
    short = memory.create("short", 4096, lambda view: None)
    os.close(promises.allocations[0][0])
    promises.allocations[0] = short, nbytes
    assert f"range 0 has a descriptor of 4096 bytes; at least {nbytes} are expected" in refused(promises)


def test_unsealed_memory(promises, memfd):
    import fcntl

    descriptor, nbytes = promises.allocations[0]
    os.close(descriptor)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, nbytes)
    promises.allocations[0] = unsealed, nbytes
    assert "range 0 is memory that is not sealed against write, grow, shrink; a sealed" in refused(promises)
    fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    assert "range 0 is memory that is not sealed against write; a sealed" in refused(promises)


def test_ordinary_file_in_place_of_memory(promises, memfd):
    os.close(promises.allocations[0][0])
    nbytes = promises.allocations[0][1]
    promises.allocations[0] = os.open(promises.artifact.path, os.O_RDONLY), nbytes
    assert "range 0 is memory that is not sealed against write, grow, shrink" in refused(promises)


def test_refusals_leave_no_descriptor_open(promises):
    del promises.allocations[2]
    counts = []
    for _ in range(3):
        refused(promises)
        gc.collect()
        counts.append(len(os.listdir("/dev/fd")))
    assert counts == counts[:1] * 3


def test_without_sealed_memory_an_unlinked_object_and_a_warning(tmp_path, small_file, monkeypatch, request):
    monkeypatch.setattr(memory, "SEALABLE", False)
    promises = request.getfixturevalue("promises")
    for descriptor, _ in promises.allocations.values():
        with pytest.raises(OSError):
            os.pwrite(descriptor, b"x", 0)
    warnings = []
    with promises.kept() as path:
        tensors = import_weights(path, promises.artifact, warn=warnings.append)
    assert all(np.array_equal(data, promises.artifact.tensors[name].data) for name, data in tensors.items())
    assert len(warnings) == 1 and "no sealed memory files" in warnings[0]


def asked(environ, *args):
    return shared(options.read([], environ), *args)


class TestEnvironment:
    def test_unset_or_empty_is_none(self, promises):
        assert asked({}, promises.artifact) is None
        assert asked({"DS4_CUDA_WEIGHT_IPC_MANIFEST": ""}, promises.artifact) is None

    def test_scope_chooses(self, promises):
        with promises.kept() as path:
            env = {"DS4_CUDA_WEIGHT_IPC_MANIFEST": str(path)}
            scope = "DS4_CUDA_WEIGHT_IPC_SCOPE"
            assert asked(env, promises.artifact).tensors.keys() == promises.artifact.tensors.keys()
            assert asked(env | {scope: "base"}, promises.artifact) is not None
            assert asked(env | {scope: "mtp"}, promises.artifact) is None
            assert asked(env | {scope: "base"}, promises.artifact, "mtp") is None
            with pytest.raises(OwnerError, match="holds no mtp weights"):
                asked(env, promises.artifact, "mtp")
            assert asked(env | {scope: "all"}, promises.artifact) is not None  # ignored, as the plan says

    def test_a_drafter_fails_softly(self, promises):
        warnings = []
        with promises.kept() as path:
            env = {"DS4_CUDA_WEIGHT_IPC_MANIFEST": str(path)}
            assert asked(env, promises.artifact, "drafter", warnings.append) is None
            assert len(warnings) == 1 and "the drafter is loaded from its file: " in warnings[0]
            off = env | {"DS4_CUDA_WEIGHT_IPC_NO_DRAFTER": "1"}
            assert asked(off, promises.artifact, "drafter", warnings.append) is None
        assert len(warnings) == 1


def test_data_elsewhere_must_be_of_the_same_size(promises):
    data = {name: tensor.data for name, tensor in promises.artifact.tensors.items()}
    without = {name: found for name, found in data.items() if name != "output.weight"}
    for broken in (without, data | {"output.weight": data["output.weight"][1:]}):
        with pytest.raises(ValueError, match="tensor 'output.weight' needs"):
            promises.artifact.with_data(broken)
