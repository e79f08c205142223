"""Time ds4jax and llama.cpp in turns on GGUF files: both loaded and warm, each in a process of its own, one of which computes.

    python bench/turns.py -m step35.gguf [more.gguf …] [--rounds 5] [--tokens 24] [--prefill 512]

A machine that others use changes from minute to minute. So nothing is compared but turns that follow each other: peer, ours,
peer, ours, … peer. A turn is ``--tokens`` single tokens after a prompt of 64 (decode), or ``--prefill`` tokens from an empty
state. Printed for each: tokens per second of every turn (of decode the median over its tokens but the first), the ratio of each
of our turns to the mean of the peer's turns around it, and the median of these ratios.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from end_to_end import CONTEXT, PROMPT, Jax, options, pin, step_seconds
from llamacpp import LlamaCpp


def serve(pipe, engine, path, threads, given):
    """A process: answers ("decode" or "prefill", how many tokens) with tokens per second. given: options of ``Model.open``."""
    pin(threads)
    peer = LlamaCpp(path, CONTEXT, threads) if engine == "llama.cpp" else Jax(path, CONTEXT, given)
    tokens = np.random.default_rng(0).integers(0, peer.vocabulary, CONTEXT).tolist()
    pipe.send(peer.version)
    while (asked := pipe.recv()) is not None:
        what, count = asked
        peer.reset()
        if what == "prefill":
            begin = time.perf_counter()
            peer.advance(tokens[:count])
            pipe.send(count / (time.perf_counter() - begin))
            continue
        peer.advance(tokens[:PROMPT])
        pipe.send(1 / step_seconds(peer, tokens[PROMPT : PROMPT + 1 + count]))


def turns(peer, ours, what, count, rounds):
    """(tokens per second of the peer's turns, of ours), the peer's first and last."""

    def turn(pipe):
        pipe.send((what, count))
        return pipe.recv()

    turn(ours), turn(peer)
    theirs, own = [turn(peer)], []
    for _ in range(rounds):
        own.append(turn(ours))
        theirs.append(turn(peer))
    return theirs, own


def main(argv=None):
    top = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    top.add_argument("-m", "--model", nargs="+", type=Path, required=True, metavar="FILE")
    top.add_argument("--rounds", type=int, default=5)
    top.add_argument("--tokens", type=int, default=24)
    top.add_argument("--prefill", type=int, nargs="*", default=[512])
    top.add_argument("--threads", type=int, default=2)
    top.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="for ds4jax's Model.open")
    args = top.parse_args(argv)
    spawn = multiprocessing.get_context("spawn")
    for path in args.model:
        pipes, processes = [], []
        for engine in ("llama.cpp", "ds4jax"):
            pipe, far = spawn.Pipe()
            process = spawn.Process(target=serve, args=(far, engine, path, args.threads, options(args.option)), daemon=True)
            process.start()
            far.close()
            pipes.append(pipe), processes.append(process)
            try:
                print(f"{path.name}: {pipe.recv()}", file=sys.stderr, flush=True)
            except EOFError:
                sys.exit(f"turns: {engine} failed on {path}")
        for what, count in [("decode", args.tokens), *(("prefill", length) for length in args.prefill)]:
            theirs, own = turns(*pipes, what, count, args.rounds)
            ratios = [2 * mine / (theirs[n] + theirs[n + 1]) for n, mine in enumerate(own)]
            print(f"{path.name} {what} {count}: llama.cpp {' '.join(f'{x:.1f}' for x in theirs)} tok/s; "
                  f"ds4jax {' '.join(f'{x:.1f}' for x in own)}; ratios {' '.join(f'{x:.2f}' for x in ratios)}; "
                  f"median {statistics.median(ratios):.2f}", flush=True)  # fmt: skip
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join()


if __name__ == "__main__":
    main()
