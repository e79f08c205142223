"""The families on a device, on the command line: logits and generate as in ds4ref, and diff, which compares the two.

Exit codes: 0 done, 1 where diff finds a block that departs, 2 for anything wrong with an argument or a file (one sentence on
stderr).
"""

import argparse
import sys
import time
from contextlib import contextmanager
from functools import cache

import jax
import numpy as np

from ds4ref.__main__ import (
    UsageError,
    add_command,
    add_computing,
    add_generation,
    add_output,
    add_tokens,
    answer_of,
    drafter_of,
    options_of,
    run_command,
    token_ids,
    write_answer,
    write_logits,
)
from ds4ref.model import Model as Reference
from ds4ref.progress import Progress
from ds4ref.speculative import Speculator
from ds4ref.tokenizer import Tokenizer

from . import diff as blockwise
from . import drafting, platforms
from .compilation import enable_cache
from .model import DTYPES, Model
from .speculative import Target


def main(argv=None):
    """Entry point. Returns the exit code."""
    return run_command("ds4jax", parser().parse_args(argv))


def parser():
    top = argparse.ArgumentParser(prog="ds4jax", description="Large model families in JAX, loaded from GGUF.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name, run, text):
        sub = add_command(commands, name, run, text)
        add_computing(sub, DTYPES)
        sub.add_argument("--chunk", type=int, default=512, help="tokens of a prompt that are computed at a time")
        sub.add_argument("--platform", choices=platforms.NAMES, default="auto", help="where JAX computes")
        return sub

    sub = command("logits", logits, "Logits after every token of a sequence.")
    add_tokens(sub)
    add_output(sub, "written with one array, logits [T, V]")

    sub = command("generate", generate, "Continue a text, or answer a chat message, token by token.")
    add_generation(sub)

    sub = command("diff", diff, "Run ds4ref and ds4jax block by block and name the first block whose output departs.")
    what = sub.add_mutually_exclusive_group()
    what.add_argument("prompt", nargs="?", metavar="TEXT", help="raw text whose tokens are compared")
    add_tokens(what, required=False)
    what.add_argument("--random", type=int, default=16, metavar="N", help="compare N random tokens")
    sub.add_argument("--seed", type=int, default=0, help="of the random tokens")
    tolerances = ", ".join(f"{value:g} in {dtype}" for dtype, value in blockwise.TOLERANCE.items())
    default = f"(default: {tolerances}; {blockwise.CHAINED} times that with --chained)"
    sub.add_argument(
        "--tolerance", type=float, metavar="X", default=argparse.SUPPRESS, help=f"error over scale that departs {default}"
    )
    sub.add_argument("--chained", action="store_true", help="let each block read what the one before made: errors add up")
    return top


def logits(args):
    reference = _reference(args)
    ids = token_ids(args.tokens, reference)
    with _device(args) as load:
        write_logits(args.output, load(reference.artifact, len(ids)), ids)


def generate(args):
    reference = _reference(args, args.ctx)
    answer = answer_of(args, reference)
    drafter_of(args, reference)  # its mistakes, before anything is loaded
    with _device(args) as load:
        model = load(reference.artifact, args.ctx)
        drafter, width = drafter_of(args, model, drafting.attach) or (None, 0)
        write_answer(model, answer, drafter and Speculator(Target(model, model.new_state()), drafter, width))


def diff(args):
    """1 when a block departs."""
    reference = _reference(args)
    tokens = _tokens(args, reference)
    tolerance = getattr(args, "tolerance", blockwise.TOLERANCE[args.dtype] * (blockwise.CHAINED if args.chained else 1))
    if not tolerance > 0:
        raise UsageError(f"--tolerance must be greater than 0, got {tolerance:g}")
    with _device(args) as load:
        model = load(reference.artifact, len(tokens))
        with Progress("reference", len(tokens)) as progress:
            expected = blockwise.observe_reference(reference, tokens, progress.advance)
        steps = len(list(blockwise.chunks(tokens, model.chunk))) * (len(expected.stream) + 1)
        with Progress("comparing", steps) as progress:
            seen = blockwise.observe(model, tokens, expected, args.chained, progress.advance)
        blocks = blockwise.judge(seen, expected, blockwise.kinds(model), tolerance, args.chained)
        if args.chained:
            whole = model.verify(model.new_state(), tokens)
            blocks.append(blockwise.judge_logits("model", whole, expected.logits, tolerance))
    print(blockwise.report(blocks, len(tokens), args.chained))
    return int(any(block.beyond for block in blocks))


def _reference(args, context=None):
    """The reference's view of the file, which checks it and the options, and of the arguments what can be checked now."""
    if args.chunk < 1:
        raise UsageError(f"--chunk must be at least 1, got {args.chunk}")
    options = options_of(args.option)
    return Reference.open(args.model, context=options.pop("context", context), **options)


def _tokens(args, model):
    """The token ids that are compared, a list."""
    if args.tokens is not None:
        return token_ids(args.tokens, model).tolist()
    if args.prompt is None:
        if not 1 <= args.random <= model.context_cap:
            raise UsageError(f"--random must be from 1 to {model.context_cap} for this file, got {args.random}")
        if args.seed < 0:
            raise UsageError(f"--seed must be at least 0, got {args.seed}")
        return np.random.default_rng(args.seed).integers(0, model.vocabulary, args.random).tolist()
    tokenizer = Tokenizer.from_artifact(model.artifact)
    ids = tokenizer.with_bos(tokenizer.encode(args.prompt))
    if not 0 < len(ids) <= model.context_cap:
        raise UsageError(f"the prompt has {len(ids)} tokens; from 1 to {model.context_cap} fit this file")
    return ids


@contextmanager
def _device(args):
    """Inside, JAX computes where ``--platform`` says, and ``load(artifact, context)`` gives the model, loaded with a progress
    line; ``--option context=`` goes before ``context``. At the end a line tells how long loading and compiling took.
    """
    if args.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")  # an accelerator would be started, and hold memory, for nothing
    try:
        platform = platforms.choose(args.platform)
    except platforms.PlatformError as error:
        raise UsageError(f"--platform: {error}") from None
    enable_cache()
    before, times = len(_compile_seconds()), []

    def load(artifact, context):
        start, options = time.monotonic(), options_of(args.option)
        context = options.pop("context", context)
        with Progress("loading", sum(tensor.nbytes for tensor in artifact.tensors.values())) as progress:
            model = Model(
                artifact, context=context, dtype=args.dtype, layout=platform.layout, chunk=args.chunk,
                did=lambda tensor: progress.advance(tensor.nbytes), **options,
            )  # fmt: skip
        times.append(time.monotonic() - start)
        return model

    with platform.active():
        yield load
    compiled = sum(_compile_seconds()[before:])
    print(f"{platform.name}: loaded in {sum(times):.2f} s, compiled for {compiled:.2f} s", file=sys.stderr)


@cache
def _compile_seconds():
    """Seconds of every compilation in this process from the first call on; the list grows."""
    seconds = []

    def note(event, duration, **_):
        if event.startswith("/jax/core/compile/"):
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(note)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
