"""A real server process on a random toy, shared by the tests of a session."""

import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field

import httpx
import pytest

from .artifact import toy


@dataclass
class Server:
    """A running ``ds4server`` and what it has written to stderr."""

    process: subprocess.Popen
    url: str = ""
    lines: list = field(default_factory=list)

    def stop(self, sig=signal.SIGINT):
        """Send a signal and return the exit code."""
        self.process.send_signal(sig)
        return self.process.wait(30)

    def stats(self):
        return httpx.get(f"{self.url}/v1/stats").json()


def launch(*flags, backend="numpy", stdout=None, embedded=False):
    """Start a server on a free port and wait until it listens: on the model of the flags, else on a random toy, or on the
    artifact inside the package if ``embedded``. ``stdout``: a file for it."""
    model = () if embedded or "-m" in flags else ("-m", str(toy()))
    command = [sys.executable, "-m", "ds4server", "--port", "0", "--backend", backend, *model, *flags]
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    server = Server(subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env))
    listening = threading.Event()

    def read():
        for line in server.process.stderr:
            server.lines.append(line)
            if found := re.search(r"listening on (http://\S+)", line):
                server.url = found[1]
                listening.set()
        listening.set()

    threading.Thread(target=read, daemon=True).start()
    assert listening.wait(600 if backend == "jax" else 60) and server.url, "".join(server.lines)
    return server


@pytest.fixture(autouse=True)
def own_environment():
    """What a server started in this process writes into its environment is gone after the test."""
    before = {name: value for name, value in os.environ.items() if name.startswith("DS4_")}
    yield
    for name in [name for name in os.environ if name.startswith("DS4_")]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def server():
    running = launch("--ctx", "32768", "--sse-keepalive-seconds", "1")
    yield running
    running.process.kill()


@pytest.fixture(scope="session")
def api(server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client
