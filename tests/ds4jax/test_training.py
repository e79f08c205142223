"""The script that trains the artifact inside the package still does: what it differentiates is the arithmetic that serves."""

import subprocess
import sys
from pathlib import Path

import pytest

from ds4ref.model import Model

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
def test_a_few_steps_of_training(tmp_path):
    """It ends with the two files, and by itself holds the training program's logits to the reference's."""
    out = str(tmp_path / "a.gguf")
    command = [sys.executable, "train_tiny.py", "alice29.txt", "-o", out, "--minutes", "0.5", "--batch", "2"]
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "are within" in done.stdout
    for name in ("a.gguf", "a.f32.gguf"):
        model = Model.open(tmp_path / name)
        assert len(model.verify(model.new_state(), [5, 6, 7])) == 3
