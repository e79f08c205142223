"""How programs are compiled and kept: options for the backend at hand, the cache of compiled programs in the user's directory,
and how many of them a process holds."""

import hashlib
import os
import platform
import sys
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import jax

_called = WeakKeyDictionary()
"""Jitted functions that hold programs, the one called longest ago first."""


class Programs:
    """Jitted functions by key, made when they are first asked for."""

    def __init__(self):
        self._jitted = {}

    @property
    def compiled(self):
        """Programs that they hold: one for every combination of shapes."""
        return sum(jitted._cache_size() for jitted in self._jitted.values())

    def jitted(self, key, run, donated=()):
        """``jax.jit`` of the function ``run`` that was first given for ``key``; donated: numbers of its donated arguments."""
        if key not in self._jitted:
            self._jitted[key] = jax.jit(run, donate_argnums=donated, compiler_options=compile_options())
        return self._jitted[key]


def call(jitted, *arguments):
    """``jitted(*arguments)``. Where that compiles a program and the process then has too many memory maps, the programs of the
    functions called longest ago are let go; they come back from the cache of compiled programs.

    XLA:CPU maps every kernel of a program by itself, several hundred to some thousand times, and compiling crashes the process
    where Linux gives it no more (65,530 by default; jax-ml/jax issues 27201 and 29139).
    """
    held = jitted._cache_size()
    out = jitted(*arguments)
    _called.pop(jitted, None)
    _called[jitted] = None
    if jitted._cache_size() > held:
        for oldest in list(_called)[:-1]:
            if maps() <= most_maps():
                break
            oldest.clear_cache()
            del _called[oldest]
    return out


def maps():
    """Memory maps of this process, 0 where the system does not tell."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


@cache
def most_maps():
    """Memory maps from which programs are let go: three quarters of Linux's limit, so that the largest program still fits."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text()) * 3 // 4
    except (OSError, ValueError):
        return sys.maxsize


def compile_options():
    """``compiler_options`` for the outermost ``jax.jit``: full-width vectors on CPUs with AVX-512, nothing elsewhere."""
    return {"xla_cpu_prefer_vector_width": 512} if jax.default_backend() == "cpu" and avx512() else {}


def avx512():
    """Whether this machine's CPU has vectors of 512 bits."""
    return " avx512f " in _cpu_description()


def enable_cache():
    """Keep compiled programs in the user's cache directory, in a folder of this CPU model's own; returns the folder.

    The entries hold native code. A folder that JAX was already given (JAX_COMPILATION_CACHE_DIR) stays.
    """
    folder = jax.config.jax_compilation_cache_dir
    if not folder:
        key = hashlib.sha256(_cpu_description().encode()).hexdigest()[:16]
        folder = str(_user_cache() / "ds4" / "xla" / f"jax-{jax.__version__}-{key}")
        jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    return Path(folder)


def _user_cache():
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


@cache
def _cpu_description():
    """Model name and instruction sets of the CPU, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    told = {key.strip(): value for key, value in told.items()}
    return " ".join([platform.machine(), told.get("model name", ""), told.get("flags", told.get("Features", "")), ""])
