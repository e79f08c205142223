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
FAMILIES = {"deepseek4": "DSML", "qwen35": "XML calls", "glm5-next": "argument keys", "k2-horizon": "JSON calls"}
"""Families whose call syntaxes differ, beside the embedded artifact's."""


def run(url, *options):
    """(exit code, the end of what pytest said) of the suite against ``url``."""
    pytest_alone = ["-m", "pytest", str(SUITE), "-q", "-p", "no:cacheprovider", "--rootdir", str(SUITE), "-c", os.devnull]
    command = [sys.executable, *pytest_alone, "--base-url", url, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3300)
    return done.returncode, done.stdout[-6000:] + done.stderr[-2000:]


def conform(*options, backend="numpy", flags=()):
    server = launch("--ctx", "32768", "--mem-floor-gb", "1", "--max-queue", "64", *flags, backend=backend)
    try:
        code, said = run(server.url, *options)
        assert code == 0, said
    finally:
        server.process.kill()


@pytest.mark.skipif(not SUITE.exists(), reason="the source distribution without its suite")
def test_core_on_the_embedded_artifact():
    """What every release must pass, of the messages that this project is asked most."""
    conform("-m", "core", "-k", "chat or messages and not disconnect")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_everything_on_the_embedded_artifact(backend):
    if backend == "jax":
        pytest.importorskip("jax", reason="JAX is not installed")
    conform("--queue-limit", "64", "--request-timeout", "600", backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_everything_on_other_call_syntaxes(family, tmp_path):
    path = tmp_path / f"{family}.gguf"
    subprocess.run([sys.executable, "-m", "ds4ref", "tiny", family, "-o", str(path)], check=True)
    conform("--request-timeout", "600", flags=("-m", str(path)))
