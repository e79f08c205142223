"""What this machine has to give: memory, and which accelerators are visible. Opens no device and loads no framework.

Everything is read from text that the system offers (``/proc``, control groups, ``vm_stat``, ``nvidia-smi``); what cannot be
read is None, which is "unknown".
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

GIB = 1 << 30
UNBOUNDED = 1 << 60  # larger than any machine: how version 1 of control groups says "no limit"
CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
METAL_PLUGINS = ("jax_plugins.metal_plugin", "jax_plugins.mps")


@dataclass(frozen=True)
class Memory:
    """available: bytes under the ceiling; domain: whose they are ("host", "device", "unified"); host_available: the host's
    where the ceiling is a device's."""

    available: int | None
    domain: str = "host"
    host_available: int | None = None


def memory(backend):
    """The :class:`Memory` of this machine for a backend."""
    host = _vm_stat() if sys.platform == "darwin" else available()
    if backend == "cuda" and (device := _nvidia()) is not None:
        total, free = device
        installed = _meminfo(Path("/proc")).get("MemTotal")
        if installed is not None and total + GIB < installed:
            return Memory(free, "device", host)
    return Memory(host, "host" if backend in ("cpu", "reference") else "unified")


def available(proc=Path("/proc"), groups=Path("/sys/fs/cgroup")):
    """``MemAvailable``, lowered by what every control group of this process has left, up the tree; None without it."""
    found = _meminfo(proc).get("MemAvailable")
    if found is None:
        return None
    return max(0, min([found, *_left(proc, groups)]))


def _meminfo(proc):
    """Bytes by name."""
    text = _text(proc / "meminfo") or ""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def _left(proc, groups):
    """Bytes left under each limit of the process's control groups, version 2 and 1."""
    for line in (_text(proc / "self" / "cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        parts = Path(path).parts[1:]
        if number == "0":
            root, names, use = groups, ("memory.high", "memory.max"), "memory.current"
        elif "memory" in controllers.split(","):
            root, names, use = groups / "memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes"
        else:
            continue
        for depth in range(len(parts), -1, -1):
            folder = root.joinpath(*parts[:depth])
            used = _number(folder / use)
            for name in names:
                limit = _number(folder / name)
                if used is not None and limit is not None and limit < UNBOUNDED:
                    yield limit - used


def _number(path):
    text = _text(path)
    return int(text) if text and text.strip().isdigit() else None


def _text(path):
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _vm_stat():
    return macos_available(_output("vm_stat"))


def macos_available(text):
    """Free, inactive and speculative pages of ``vm_stat``'s report, in bytes; None where it has none."""
    page = re.search(r"page size of (\d+) bytes", text or "")
    pages = re.findall(r"^Pages (?:free|inactive|speculative):\s+(\d+)", text or "", re.MULTILINE)
    return int(page[1]) * sum(map(int, pages)) if page and pages else None


def _nvidia():
    """(total, free) bytes of the first visible device, or None."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    which = ["-i", visible] if visible else []
    return nvidia_memory(_output("nvidia-smi", *which, "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"))


def nvidia_memory(text):
    """(total, free) bytes of the first line of a report in MiB, or None."""
    found = re.match(r"\s*(\d+)\s*,\s*(\d+)", text or "")
    return (int(found[1]) << 20, int(found[2]) << 20) if found else None


def _output(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def platform(environ=os.environ):
    """The best platform that JAX would find here: cuda, metal or cpu. Says nothing about whether JAX is installed."""
    asked = environ.get("JAX_PLATFORMS", "").split(",")[0].strip().lower()
    if asked:
        return {"cuda": "cuda", "gpu": "cuda", "metal": "metal", "mps": "metal"}.get(asked, "cpu")
    hidden = environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if not hidden and Path("/proc/driver/nvidia/version").exists() and any(map(_installed, CUDA_PLUGINS)):
        return "cuda"
    if sys.platform == "darwin" and any(map(_installed, METAL_PLUGINS)):
        return "metal"
    return "cpu"


def _installed(name):
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
