"""How programs are compiled: options for the backend at hand, and the cache of compiled programs in the user's directory."""

import hashlib
import os
import platform
import sys
from functools import cache
from pathlib import Path

import jax


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
