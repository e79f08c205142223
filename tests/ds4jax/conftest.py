"""Device models of tiny artifacts without arrays, and the programs that they would compile: for tracing and lowering only."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

CONTEXT, BANKS, CHUNK = 128, 4, 64


@dataclass(frozen=True)
class Program:
    """One jitted entry point and the shapes it is called with."""

    name: str
    jitted: object
    arguments: tuple

    def fresh(self):
        """The function as a new object, which JAX traces again though it knows the jitted one."""
        return lambda *arguments: self.jitted.__wrapped__(*arguments)


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """``programs(architecture, **options of Model)``: every program of its tiny model, by name."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    from ds4jax import model as device
    from ds4ref import tiny

    @cache
    def path(architecture):
        path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
        tiny.write(architecture, path, seed=1)
        return path

    @cache
    def of(architecture, **options):
        made = []

        def build():
            opened = device.Model.open(
                path(architecture), context=CONTEXT, banks=BANKS, chunk=CHUNK, sizes=(1, CHUNK), least_bucket=CONTEXT, **options
            )
            made.append(opened)
            return opened._weights, opened._arrays

        weights, arrays = jax.eval_shape(build)
        model = made[0]

        def step(name, banks, tokens, every=False):
            prepared = model._prepared([device.Bank(model, 0)] * banks, [[1] * tokens] * banks, banks, tokens)
            shapes = ((banks, tokens), (banks,), (banks,), (banks,))
            call = [np.zeros(shape, np.int32) for shape in shapes]
            return Program(name, model._program(CONTEXT, every), (weights, arrays, *call, *prepared))

        every = [
            step("decode 4 banks", 4, 1),
            step("decode 1 bank", 1, 1),
            step("prefill", 1, CHUNK),
            step("verify", 1, CHUNK, every=True),
            Program("clear", device._cleared, (arrays, 3)),
            Program("copy", device._copied, (arrays, 3, 1)),
        ]
        return {program.name: program for program in every}

    return of
