"""The black-box suite (``conformance/``, real SDK clients) against server processes of this project.

It runs in a pytest of its own, since it brings its own options and expects a server that nobody else uses.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import launch

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "conformance"
FAMILIES = {"deepseek4": 0, "qwen35": 3, "glm-dsa": 2}
"""Families whose call syntaxes (DSML, XML, argument pairs) differ from the JSON of the embedded artifact, and the seeds of
their weights. Not every random model writes what the suite takes for granted: it counts the tokens of some answers, among which
there must be no control token."""
ALWAYS = ("test_text.py", "test_tools.py", "test_validation.py")


def run(url, *options, files=()):
    """(exit code, the end of what pytest said) of the suite against ``url``."""
    where = [str(SUITE / name) for name in files] or [str(SUITE)]
    pytest_alone = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(SUITE), "-c", os.devnull, *where]
    command = [sys.executable, *pytest_alone, "--base-url", url, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3300)
    return done.returncode, done.stdout[-6000:] + done.stderr[-2000:]


def conform(*options, backend="numpy", flags=(), files=(), embedded=False):
    flags = ("--ctx", "32768", "--mem-floor-gb", "1", "--max-queue", "64", *flags)
    server = launch(*flags, backend=backend, embedded=embedded)
    try:
        code, said = run(server.url, *options, files=files)
        assert code == 0, said
    finally:
        server.process.kill()


def test_core_on_a_random_toy():
    """Of what every release must pass, the part that a minute allows."""
    conform("-m", "core", "-k", "chat or test_validation", files=ALWAYS)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_everything_on_the_embedded_artifact(backend):
    if backend == "jax":
        pytest.importorskip("jax", reason="JAX is not installed")
    conform("--queue-limit", "64", "--request-timeout", "600", backend=backend, embedded=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_everything_on_other_call_syntaxes(family, tmp_path):
    path = tmp_path / f"{family}.gguf"
    made = ["tiny", family, "--seed", str(FAMILIES[family]), "-o", str(path)]
    subprocess.run([sys.executable, "-m", "ds4ref", *made], check=True)
    conform("--request-timeout", "600", backend="auto", flags=("-m", str(path)))
