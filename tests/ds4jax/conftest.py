"""Device models of tiny artifacts without arrays, and the programs that they would compile: for tracing and lowering only."""

from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pytest
from runs import GOLDEN

CONTEXT, BANKS, CHUNK, TRIAL, DRAFTS = 128, 4, 64, 4, 3


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


@pytest.fixture(scope="session")
def draft_programs():
    """``draft_programs(architecture, file, sidecar, **options of Model)``: the programs of a golden model's drafter and of
    the trials of its drafts, by name."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    from ds4jax import drafting, trials
    from ds4jax.layers import residual
    from ds4jax.model import Bank, Model
    from ds4jax.state import Chunk

    zero = np.zeros(1, np.int32)

    def chain(drafter, weights, arrays, rows):
        """The chunk, and the further drafts of a proposal."""
        blocks, tokens = len(drafter.layouts), np.zeros((1, CHUNK), np.int32)
        place = np.zeros(blocks, np.int32), zero, zero
        hidden = [jax.ShapeDtypeStruct((), np.float32)] * (blocks - 1)
        chunk = drafter._program(("chunk", CONTEXT), drafting._run_chunk, 1)
        arguments = weights, arrays, rows, hidden, tokens, np.int32(1), np.zeros(blocks, np.int32), *place
        yield Program("chunk", chunk, arguments)
        barred = np.zeros(drafter.model.vocabulary, bool)
        run = partial(drafting._run_best, DRAFTS)
        yield Program("best", drafter._program(("best", DRAFTS, CONTEXT), run, 1), (*arguments, barred))
        outs, *_ = jax.eval_shape(chunk, *arguments)
        for d in range(blocks > 1, blocks):
            program = drafter._program(("further", d, CONTEXT), partial(drafting._run_further, d), 1)
            parts = tuple(jax.ShapeDtypeStruct((1, 1, *outs[d].shape[2:]), np.float32) for _ in range(1 + (blocks > 1)))
            known = np.zeros((1, len(parts)), np.int32)
            yield Program(f"further {d}", program, (weights, arrays[d], parts, known, zero, zero, zero))

    def block(drafter, weights, arrays, rows):
        """What is committed, the rows of a block, and the logits of a draft."""
        place = zero, zero, zero
        commit = drafter._program("commit", drafting._run_commit, donated=1)
        yield Program("commit", commit, (weights, arrays, [rows] * len(drafter.taps), zero, *place))
        program = drafter._program("rows", drafting._run_rows)
        arguments = weights, arrays, zero, zero, *place
        yield Program("rows", program, arguments)
        made = jax.eval_shape(program, *arguments)
        yield Program("logits", drafter._program("logits", drafting._run_logits), (weights, made, np.int32(0), zero))
        best = drafter._program("best", partial(drafting._run_best_rows, DRAFTS))
        barred = np.zeros(drafter.model.vocabulary, bool)
        yield Program("best", best, (weights, arrays, zero, *place, barred))

    @cache
    def of(architecture, file, sidecar, **options):
        made = []

        def build():
            shapes = {"context": CONTEXT, "banks": BANKS, "chunk": CHUNK, "sizes": (1, CHUNK), "least_bucket": CONTEXT}
            model = Model.open(GOLDEN / architecture / file, **shapes, **options)
            drafter = drafting.attach(model, sidecar and GOLDEN / architecture / sidecar)
            made.append((model, drafter))
            return model._weights, model._arrays, drafter._weights, drafter._arrays

        weights, arrays, own, kept = jax.eval_shape(build)
        ((model, drafter),) = made
        prepared = model._prepared([Bank(model, 0)] * BANKS, [[1] * TRIAL] * BANKS, BANKS, TRIAL)
        call = np.zeros((BANKS, TRIAL), np.int32), *[np.zeros(BANKS, np.int32)] * 3
        trial = Program("trial", model._program(CONTEXT, True, True), (weights, arrays, *call, *prepared))
        _, after, _, tried = jax.eval_shape(trial.jitted, *trial.arguments)
        write = jax.jit(partial(trials.write, model.plan), donate_argnums=0)
        keep = Program("keep", write, (after, tried, *call[1:]))

        def enter(top, tokens, *prepared):
            place = np.zeros(len(tokens), np.int32)
            chunk = Chunk(place, place, tokens.shape[1], CONTEXT, place)
            return residual(model.arithmetic.start(model.config, top, tokens, chunk, *prepared))

        entered = jax.eval_shape(enter, weights["top"], call[0], *prepared)
        rows = jax.ShapeDtypeStruct((1, CHUNK, *entered.shape[2:]), np.float32)
        programs = (chain if isinstance(drafter, drafting.Chain) else block)(drafter, own, kept, rows)
        return {program.name: program for program in (trial, keep, *programs)}

    return of
