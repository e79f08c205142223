"""``python -m ds4jax`` as a user has it: the same commands as ds4ref, the same answers, and diff's exit codes."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax

from ds4jax.__main__ import main
from ds4jax.families import qwen35
from ds4ref import tiny
from ds4ref.__main__ import main as reference


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny artifact, token ids, and compiled programs that stay out of the user's cache."""
    folder = tmp_path_factory.mktemp("cli")
    tiny.write("qwen35", folder / "tiny.gguf", seed=1)
    np.save(folder / "ids.npy", np.array([5, 80, 300, 2, 77, 9]))
    settings = {"jax_compilation_cache_dir": str(folder / "xla"), "jax_platforms": jax.config.jax_platforms}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)


def fails(capsys, *argv):
    """The one sentence that a mistake prints."""
    assert main(list(map(str, argv))) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("ds4jax: ") and printed.err.count("\n") == 1
    return printed.err


def test_logits_are_the_references(folder, capsys):
    for run, name in ((reference, "numpy.npz"), (main, "jax.npz")):
        argv = ["logits", "-m", folder / "tiny.gguf", "--tokens", folder / "ids.npy", "-o", folder / name]
        assert run(list(map(str, argv))) == 0
    with np.load(folder / "numpy.npz") as expected, np.load(folder / "jax.npz") as seen:
        assert seen["logits"].dtype == np.float32 and seen["logits"].shape == expected["logits"].shape
        assert np.allclose(seen["logits"], expected["logits"], rtol=0, atol=1e-3)
        assert not np.array_equal(seen["logits"], expected["logits"])  # another package computed them
    err = capsys.readouterr().err
    assert "loaded in " in err and "compiled for " in err


def test_generate_is_the_references(folder, capsys):
    flags = ["-p", "The tide comes in", "-n", "6", "--ctx", "64", "--ignore-eos"]

    def text(run, *more):
        assert run(["generate", "-m", str(folder / "tiny.gguf"), *flags, *more]) == 0
        return capsys.readouterr()

    greedy = text(main, "--temperature", "0", "--chunk", "2")
    assert greedy.out == text(reference, "--temperature", "0").out
    assert "6 generated, finish: length; first token after " in greedy.err and "tokens/s" in greedy.err
    assert "loaded in " in greedy.err
    assert text(main, "--seed", "4", "--chunk", "2").out == text(reference, "--seed", "4").out
    drafted = text(main, "--temperature", "0", "--chunk", "2", "--draft", "2")
    assert drafted.out == greedy.out and re.search(r"\d+ of \d+ drafts kept \(\d+%\) in \d+ trials", drafted.err)


def test_diff_agrees(folder):
    command = [sys.executable, "-m", "ds4jax", "diff", "-m", "tiny.gguf", "The tide comes in", "--platform", "cpu"]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "xla")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "No block departs" in done.stdout, done.stderr
    assert done.stdout.count(" OK\n") == 6


def test_diff_names_what_departs(folder, capsys, monkeypatch):
    attention = qwen35.attention
    monkeypatch.setattr(qwen35, "attention", lambda *args: 1.01 * attention(*args))
    argv = ["diff", "-m", str(folder / "tiny.gguf")]
    assert main([*argv, "--tokens", str(folder / "ids.npy")]) == 1
    assert "block 3 is the first that departs" in capsys.readouterr().out
    assert main([*argv, "--tokens", str(folder / "ids.npy"), "--tolerance", "0.5"]) == 0
    assert main([*argv, "--random", "6", "--chained"]) == 1
    chained = capsys.readouterr().out
    assert "block 3 is the first that departs" in chained and "model " in chained
    assert [line.split()[0] for line in chained.splitlines() if line.endswith("DEPARTS")] == ["block", "head", "model"]


def test_mistakes_are_one_sentence(folder, capsys):
    model = folder / "tiny.gguf"
    np.save(folder / "far.npy", np.array([512]))
    far = fails(capsys, "logits", "-m", model, "-o", folder / "x.npz", "--tokens", folder / "far.npy")
    assert "id 512 is outside the vocabulary of 512" in far
    diff = ["diff", "-m", model]
    assert "--tolerance must be greater than 0, got 0" in fails(capsys, *diff, "--tolerance", "0")
    assert "--tolerance must be greater than 0, got nan" in fails(capsys, *diff, "--tolerance", "nan")
    assert "--chunk must be at least 1, got 0" in fails(capsys, *diff, "--chunk", "0")
    assert "--random must be from 1 to " in fails(capsys, *diff, "--random", "0")
    assert "--seed must be at least 0, got -1" in fails(capsys, *diff, "--seed", "-1")
    assert "the prompt has 0 tokens" in fails(capsys, *diff, "")
    assert "has no option 'fast'" in fails(capsys, *diff, "--option", "fast=true")
    assert "--ctx must be from 1 to " in fails(capsys, "generate", "-m", model, "-p", "x", "--ctx", "0")
    generate = ["generate", "-m", model, "-p", "x", "--ctx", "64"]
    assert "--draft must be from 1 to 8 with this drafter, got 9" in fails(capsys, *generate, "--draft", "9")
    assert "--draft must be at least 1, got 0" in fails(capsys, *generate, "--draft", "0")
    assert "qwen35 takes no draft sidecar" in fails(capsys, *generate, "--mtp", model)
    assert "no such file" in fails(capsys, "diff", "-m", folder / "none.gguf")
    assert "--platform: platform metal is not here: JAX sees " in fails(capsys, *diff, "--platform", "metal")


def test_help_is_complete(capsys):
    for command in ("logits", "generate", "diff"):
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0 and "--platform" in capsys.readouterr().out
