"""Every program lowers for CUDA on any machine, so that one without a GPU notices when it no longer would.

Nothing is compiled or run: this checks types, shapes and that every operation has a lowering, not registers, memory or speed.
"""

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax
from jax import export

from ds4jax import FAMILIES, platforms

STEPS = ("decode 4 banks", "decode 1 bank", "prefill", "verify", "clear", "copy")
CUDA = platforms.choose("cuda", (platforms.Found("gpu", "any", package="jax-cuda12-plugin"),))
KERNEL = export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")


def exported(program):
    """The StableHLO of a program lowered for CUDA."""
    return export.export(program.jitted, platforms=["cuda"], disabled_checks=[KERNEL])(*program.arguments)


@pytest.mark.parametrize("step", [STEPS[0], *(pytest.param(step, marks=pytest.mark.slow) for step in STEPS[1:])])
@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_programs_lower_for_cuda(programs, architecture, step):
    program = programs(architecture, layout=CUDA.layout, dtype=CUDA.dtype)[step]
    lowered = exported(program)
    assert lowered.platforms == ("cuda",)
    vocabulary = {"decode 4 banks": (4,), "decode 1 bank": (1,), "prefill": (1,), "verify": (1, 64)}.get(step)
    if vocabulary is not None:  # the logits come first
        assert lowered.out_avals[0].shape[:-1] == vocabulary and lowered.out_avals[0].dtype == "float32"
    donated = lowered.mlir_module().count("tf.aliasing_output") + lowered.mlir_module().count("jax.buffer_donor")
    assert donated, "no state array is donated"


DRAFTERS = {
    ("deepseek4", "model.gguf", "dspark.gguf"): ("commit", "rows", "logits", "best"),
    ("deepseek4", "model.gguf", "mtp.gguf"): ("chunk", "best", "further 0"),
    ("dots3note", "model.gguf", None): ("chunk", "best", "further 0"),
    ("exaone-moe", "model.gguf", None): ("chunk", "best", "further 0"),
    ("glm-dsa", "model.gguf", None): ("chunk", "best", "further 0"),
    ("glm5-next", "model.gguf", None): ("chunk", "best", "further 0"),
    ("inkling", "model.gguf", "mtp.gguf"): ("chunk", "best", "further 1", "further 2"),
    ("mimo2", "model.gguf", None): ("chunk", "best", "further 1", "further 2"),
    ("mimo2", "model.gguf", "dflash.gguf"): ("commit", "rows", "logits", "best"),
    ("naive_n05_flash", "model.gguf", "draft.gguf"): ("commit", "rows", "logits", "best"),
    ("qwen35", "model-mtp.gguf", None): ("chunk", "best", "further 0"),
    ("qwen4exp", "model.gguf", None): ("chunk", "best", "further 0"),
    ("step35", "model.gguf", "mtp.gguf"): ("chunk", "best", "further 1", "further 2"),
}
QUICK = (("qwen35", "best"), ("naive_n05_flash", "trial"), ("naive_n05_flash", "rows"))


def draft_steps():
    for drafter, steps in DRAFTERS.items():
        for step in ("trial", "keep", *steps):
            architecture, _, sidecar = drafter
            marks = () if (architecture, step) in QUICK else pytest.mark.slow
            yield pytest.param(drafter, step, id=f"{architecture}-{sidecar or 'embedded'}-{step}", marks=marks)


@pytest.mark.parametrize(("drafter", "step"), list(draft_steps()))
def test_drafts_and_trials_lower_for_cuda(draft_programs, drafter, step):
    programs = draft_programs(*drafter, layout=CUDA.layout, dtype=CUDA.dtype)
    assert [*programs] == ["trial", "keep", *DRAFTERS[drafter]]
    lowered = exported(programs[step])
    assert lowered.platforms == ("cuda",)
    donated = lowered.mlir_module().count("tf.aliasing_output") + lowered.mlir_module().count("jax.buffer_donor")
    assert donated or step in ("rows", "logits") or step == "best" and "rows" in DRAFTERS[drafter], "no state array is donated"


def test_what_cannot_lower_is_found():
    """The check can fail: JAX has the Schur decomposition on CPUs only."""
    with pytest.raises(NotImplementedError, match="cuda"):
        export.export(jax.jit(lambda x: jax.lax.linalg.schur(x)[0]), platforms=["cuda"])(np.eye(3, dtype=np.float32))
