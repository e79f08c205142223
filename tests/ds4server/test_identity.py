"""Identity of files and settings: what changes it, what does not, and files that cannot be identified."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ds4server import identity
from ds4server.identity import IdentityError, changed, take

CORE = str(Path(np._core._multiarray_umath.__file__).resolve())
SETTINGS = {"backend": "reference", "context": 8192}


@pytest.fixture
def model(tmp_path):
    for name in ("model-00001-of-00002.gguf", "model-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    return tmp_path


def taken(folder, settings=SETTINGS, environment=None, **more):
    return take({"model": sorted(folder.glob("model*"))}, settings, environment=environment or {}, **more)


def test_the_digest_is_of_canonical_json(model):
    found = taken(model, environment={"XLA_FLAGS": "-x"})
    text = json.dumps(found.document, sort_keys=True, separators=(",", ":"))
    assert found.digest == hashlib.sha256(text.encode()).digest() and len(found.digest) == 32
    assert found.document.keys() == {"method", "files", "settings"} and found.document["method"] == "local-file-stat-v1"
    assert found.document["files"].keys() == {"sources", "runtime"}
    assert found.document["settings"] == {"resolved": SETTINGS, "environment": {"XLA_FLAGS": "-x"}}
    first = found.document["files"]["sources"]["model"][0]
    path = model / "model-00001-of-00002.gguf"
    status = path.stat()
    numbers = [status.st_dev, status.st_ino, 4, status.st_mtime_ns, status.st_ctime_ns]
    assert first == {"path": str(path.resolve()), "stat": numbers}


def test_taking_it_twice_gives_the_same(model):
    a, b = taken(model), taken(model)
    assert a.digest == b.digest and changed(a, b) is None


def test_it_is_the_same_in_the_next_process(model):
    """The libraries, the program and the interpreter too, else no record would survive a restart."""
    code = "import sys; from pathlib import Path; from ds4server import identity as i; " \
        "print(i.take({'model': sorted(Path(sys.argv[1]).glob('model*'))}, {}, environment={}).digest.hex())"  # fmt: skip
    runs = {subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True).stdout for _ in range(2)}
    assert len(runs) == 1 and len(runs.pop().strip()) == 64


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "model-00002-of-00002.gguf").write_bytes(b"GGUF!"),
        lambda folder: os.utime(folder / "model-00001-of-00002.gguf", ns=(5, 5)),
        lambda folder: os.replace(folder / "other", folder / "model-00002-of-00002.gguf"),
        lambda folder: (folder / "chat_template.jinja").write_text("{{ x }}"),
        lambda folder: (folder / "tokenizer_config.json").write_text("{}"),
        lambda folder: (folder / "manifest").write_text("other"),
        lambda folder: (folder / "manifest").unlink(),
    ],
)
def test_a_file_that_changes_while_the_model_opens(model, change):
    (model / "other").write_bytes(b"GGUF")
    (model / "manifest").write_text("small")
    before = taken(model, manifests=[model / "manifest"])
    change(model)
    after = taken(model, manifests=[model / "manifest"])
    assert before.digest != after.digest
    assert changed(before, after).endswith(": changed while the model was opened") and str(model) in changed(before, after)


def test_contents_count_even_under_one_stat(model):
    path = model / "chat_template.jinja"
    path.write_text("a")
    assert taken(model).document["files"]["sources"]["contents"][0]["sha256"] == hashlib.sha256(b"a").hexdigest()
    assert taken(model).document["files"]["sources"]["contents"][1]["sha256"] == "missing"


def test_files_that_are_added_are_a_change(model):
    before = taken(model)
    (model / "model-00003-of-00003.gguf").write_bytes(b"GGUF")
    assert changed(before, taken(model)) == "other files belong to the model than when it was opened"


def test_settings_and_environment(model):
    base = taken(model)
    assert taken(model, {**SETTINGS, "context": 4096}).digest != base.digest
    assert "settings changed" in changed(base, taken(model, environment={"JAX_PLATFORMS": "cpu"}))
    for name in ("DS4_NATIVE_PREFILL_CHUNK", "DS4_CONT_PREFILL_NOFENCE", "XLA_FLAGS", "JAX_X", "CUDA_VISIBLE_DEVICES",
                 "NVIDIA_TF32_OVERRIDE", "DS4_MTP_SPEC_DISABLE"):  # fmt: skip
        assert taken(model, environment={name: "1"}).digest != base.digest, name
    for name in ("DS4_CUDA_WEIGHT_IPC_MANIFEST", "DS4_SERVER_FORK", "DS4_MEM_FLOOR_GB", "DS4_CONT_PREFILL_CHUNK",
                 "DS4_CONT_PREFILL_CHUNK_LIVE", "DS4_TRACE", "DS4_BOOT_QUIET", "HOME", "PATH"):  # fmt: skip
        assert taken(model, environment={name: "1"}).digest == base.digest, name


def test_the_runtime_is_this_program():
    runtime = take({}, {}, environment={}).document["files"]["runtime"]
    paths = {name: {entry["path"] for entry in entries} for name, entries in runtime.items()}
    assert paths["interpreter"] == {str(Path(sys.executable).resolve())}
    assert str(Path(identity.__file__).resolve()) in paths["program"]
    assert CORE in paths["libraries"]


def test_libraries_without_a_list_of_maps(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError()))
    assert CORE in {str(Path(path).resolve()) for path in identity.mapped_libraries()}


def test_a_library_that_is_loaded_later_is_no_change(model, monkeypatch):
    before = taken(model)
    (model / "late.so").write_bytes(b"")
    found = identity.mapped_libraries()
    monkeypatch.setattr(identity, "mapped_libraries", lambda: [*found, str(model / "late.so")])
    after = taken(model)
    assert before.digest != after.digest and changed(before, after) is None
    (model / "late.so").write_bytes(b"new")
    assert "late.so: changed" in changed(after, taken(model))


def test_files_that_cannot_be_identified(model, monkeypatch):
    with pytest.raises(IdentityError, match=r"absent.gguf: cannot be identified: No such file or directory"):
        take({"model": [model / "absent.gguf"]}, {})
    monkeypatch.setattr(identity, "MOST_CONTENTS", 3)
    (model / "tokenizer_config.json").write_text("{  }")
    with pytest.raises(IdentityError, match="tokenizer_config.json: has 4 bytes, accepted are at most 3"):
        taken(model)
    (model / "tokenizer_config.json").unlink()
    os.mkfifo(model / "tokenizer_config.json")
    with pytest.raises(IdentityError, match="tokenizer_config.json: is not a regular file"):
        taken(model)
