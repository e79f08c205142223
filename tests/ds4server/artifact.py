"""The random DeepSeek V4 that the tests of the server run on, of which what it says is never asked."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from ds4ref import tiny


@functools.cache
def toy():
    """The path of ``ds4ref tiny deepseek4 --seed 0``, written once in this process and removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="ds4-toy-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tiny.write("deepseek4", folder / "ds4-tiny.gguf", seed=0)
    return folder / "ds4-tiny.gguf"
