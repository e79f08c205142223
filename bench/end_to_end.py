"""Measure ds4jax end to end on GGUF files, llama.cpp before and after it, all on the CPU.

    python -m ds4ref tiny step35 -o step35.gguf --scale 1.6G
    python bench/end_to_end.py -m step35.gguf [more.gguf …] [-o end_to_end.json]

Every engine runs in a process of its own, one after the other, on the same tokens and the same number of threads, with the file
in the page cache: llama.cpp, ds4jax with an empty compilation cache (cold), ds4jax with the cache that this left (warm),
llama.cpp again, and ds4ref where the file is small. Prefill is timed the second time, from an empty state. Decode is the
median over single tokens after a prompt. *Load* ends with weights and state in place; *first token* counts from the same start
to the logits of the prompt; *compile* is what JAX reports for tracing, lowering and compiling (or reading its cache), all
programs together. Agreement is of the logits after each of 16 tokens, fed one by one: llama.cpp rounds activations to 8 bits,
and a router's near tie that this flips shows as a single large difference. KL in nats, of llama.cpp's distribution from ours.
"""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from llamacpp import LlamaCpp, PeerError

CONTEXT, PREFILLS, PROMPT, AGREEMENT = 1024, (128, 512), 64, 16
DISTURBED = 0.2  # peers that differ by more make the run doubtful


class Jax:
    """ds4jax behind the peer's two verbs."""

    def __init__(self, path, context, options):
        import jax

        from ds4jax import compilation
        from ds4jax.model import Model

        self._compiling, self.cache_misses = [], 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        jax.monitoring.register_event_listener(self._counted)
        compilation.enable_cache()
        self.model = Model.open(path, context=context, banks=1, **options)
        self.state, self.vocabulary = self.model.new_state(), self.model.vocabulary
        jax.block_until_ready(jax.live_arrays())
        self.version = f"jax {jax.__version__}"

    def _heard(self, event, seconds, **_):
        if event.startswith("/jax/core/compile/"):
            end = time.perf_counter()
            self._compiling.append((end - seconds, end))

    def _counted(self, event, **_):
        self.cache_misses += event == "/jax/compilation_cache/cache_misses"

    def compile_seconds(self):
        """Time that JAX traced, lowered or compiled; a function traced inside another counts once."""
        total = reach = 0.0
        for start, end in sorted(self._compiling):
            total += max(0.0, end - max(start, reach))
            reach = max(reach, end)
        return total

    def reset(self):
        self.state.clear()

    def advance(self, tokens):
        return self.model.prefill(self.state, tokens)


class Reference:
    """ds4ref behind the peer's two verbs."""

    def __init__(self, path):
        from ds4ref.model import Model

        self.model = Model.open(path)
        self.vocabulary, self.version = self.model.vocabulary, f"numpy {np.__version__}"
        self.reset()

    def reset(self):
        self.state = self.model.new_state()

    def advance(self, tokens):
        return self.model.prefill(self.state, tokens)


def work(engine, path, args):
    """What one process measures of one engine: (figures, logits [16, V])."""
    start = time.perf_counter()
    if engine == "llama.cpp":
        peer = LlamaCpp(path, CONTEXT, args.threads)
    else:
        peer = Jax(path, CONTEXT, options(args.option)) if engine == "ds4jax" else Reference(path)
    found = {"engine": engine, "version": peer.version, "load_s": time.perf_counter() - start}
    tokens = np.random.default_rng(0).integers(0, peer.vocabulary, CONTEXT).tolist()
    peer.advance(tokens[: 1 if engine == "ds4ref" else PROMPT])
    found["first_token_s"] = time.perf_counter() - start
    if engine == "ds4ref":
        found["decode_tok_s"] = 1 / step_seconds(peer, tokens[1 : 2 + args.reference_tokens])
        return found, None
    for length in PREFILLS:
        for _ in range(2):
            peer.reset()
            begin = time.perf_counter()
            peer.advance(tokens[:length])
            found[f"prefill_{length}_tok_s"] = length / (time.perf_counter() - begin)
    peer.reset()
    logits = np.stack([peer.advance([token]) for token in tokens[:AGREEMENT]])
    peer.advance(tokens[AGREEMENT:PROMPT])
    found["decode_tok_s"] = 1 / step_seconds(peer, tokens[PROMPT : PROMPT + 1 + args.tokens])
    if engine == "ds4jax":
        found |= {"compile_s": peer.compile_seconds(), "cache_misses": peer.cache_misses}
    return found, logits


def pin(threads):
    """Keep this process, and so each engine in it, to as many CPUs, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def step_seconds(peer, tokens):
    """Median seconds of a step; the first is not counted."""
    taken = []
    for token in tokens:
        begin = time.perf_counter()
        peer.advance([token])
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken[1:]))


def options(pairs):
    from ds4ref.__main__ import options_of

    return options_of(pairs)


def worker(args):
    """Inside a measuring process: figures to standard output as JSON, logits to a file."""
    pin(args.threads)
    try:
        found, logits = work(args.worker, args.model[0], args)
    except PeerError as error:
        sys.exit(f"bench: {error}")
    unit = 1 if sys.platform == "darwin" else 1024
    found["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
    if logits is not None:
        np.save(args.output, logits)
    print(json.dumps(found))


def run(engine, path, args, folder, label):
    """(figures, logits) of one engine, measured in a process of its own."""
    print(f"{path.name}: {label} …", file=sys.stderr, flush=True)
    logits = folder / f"{label.replace(' ', '-')}.npy"
    threads = str(args.threads)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "OPENBLAS_NUM_THREADS": threads,
        "OMP_NUM_THREADS": threads,
    }
    command = [sys.executable, __file__, "--worker", engine, "-m", path, "-o", logits, "--threads", threads]
    command += ["--tokens", str(args.tokens), "--reference-tokens", str(args.reference_tokens)]
    command += [word for pair in args.option for word in ("--option", pair)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit("\n".join([f"bench: {label} failed on {path}", *done.stderr.splitlines()[-12:]]))
    found = json.loads(done.stdout.splitlines()[-1]) | {"label": label}
    return found, np.load(logits) if logits.exists() else None


def measure(path, args):
    """All engines on one file."""
    with open(path, "rb") as file:  # into the page cache
        while file.read(1 << 24):
            pass
    plan = [("llama.cpp", "llama.cpp before"), ("ds4jax", "ds4jax cold"), ("ds4jax", "ds4jax warm"),
            ("llama.cpp", "llama.cpp after")]  # fmt: skip
    size = path.stat().st_size
    if size < args.reference_below * 1e6:
        plan.append(("ds4ref", "ds4ref"))
    with tempfile.TemporaryDirectory() as folder:
        runs = {label: run(engine, path, args, Path(folder), label) for engine, label in plan}
    before, ours = runs["llama.cpp before"], runs["ds4jax warm"]
    figures = {label: found for label, (found, _) in runs.items()}
    return {
        "file": path.name,
        "bytes": size,
        "threads": args.threads,
        "engines": list(figures.values()),
        "agreement": agreement(ours[1], before[1]),
        "warnings": warnings(before[0], figures["llama.cpp after"], ours[0]),
    }


def agreement(ours, peer):
    """How the two engines' logits [T, V] differ."""
    p, q = (_log_softmax(x.astype(np.float64)) for x in (ours, peer))
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    return {
        "max_abs_difference": float(np.abs(ours - peer).max()),
        "median_abs_difference": float(np.median(np.abs(ours - peer))),
        "median_kl": float(np.median(kl)),
        "max_kl": float(kl.max()),
        "same_top": int((ours.argmax(axis=1) == peer.argmax(axis=1)).sum()),
        "positions": len(ours),
        "logits_std": float(ours.std()),
    }


def _log_softmax(x):
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


SPEEDS = (*(f"prefill_{length}_tok_s" for length in PREFILLS), "decode_tok_s")
COLUMNS = {
    "load_s": "load s",
    "first_token_s": "first token s",
    "compile_s": "compile s",
    **{f"prefill_{length}_tok_s": f"prefill {length}, tok/s" for length in PREFILLS},
    "decode_tok_s": "decode tok/s",
    "peak_rss_mb": "peak RSS MB",
}


def warnings(before, after, warm):
    """A sentence for every speed at which the peer changed while we measured, and for a warm run that was not."""
    found = []
    if warm["cache_misses"]:
        found.append(f"the warm run compiled {warm['cache_misses']} programs that the cold one had not left in the cache")
    for key in SPEEDS:
        change = after[key] / before[key] - 1
        if abs(change) > DISTURBED:
            found.append(
                f"llama.cpp's {COLUMNS[key]} went from {before[key]:.1f} to {after[key]:.1f} ({change:+.0%}) between its two "
                "runs: the machine was not quiet, so do not compare this column"
            )
    return found


def table(result):
    """Lines of markdown."""
    yield f"### {result['file']}, {result['bytes'] / 1e6:.0f} MB, {result['threads']} threads"
    yield ""
    yield f"| engine | {' | '.join(COLUMNS.values())} |"
    yield "|---" * (1 + len(COLUMNS)) + "|"
    rows = {found["label"]: found for found in result["engines"]}
    for label, found in rows.items():
        cells = [f"{found[key]:.4g}" if key in found else "" for key in COLUMNS]
        yield f"| {label} | {' | '.join(cells)} |"
    ratios = {key: _ratio(rows, key) for key in (*SPEEDS, "peak_rss_mb")}
    cells = [f"{ratios[key]:.2f} ×" if key in ratios else "" for key in COLUMNS]
    yield f"| ds4jax warm ÷ llama.cpp | {' | '.join(cells)} |"
    yield ""
    same = result["agreement"]
    yield (
        f"Logits after each of {same['positions']} tokens, ds4jax and llama.cpp: largest difference "
        f"{same['max_abs_difference']:.3g}, median {same['median_abs_difference']:.2g} (logits have deviation "
        f"{same['logits_std']:.2g}); KL median {same['median_kl']:.2g}, largest {same['max_kl']:.2g}; same top token "
        f"{same['same_top']}/{same['positions']}."
    )
    for sentence in result["warnings"]:
        yield f"\n**Warning**: {sentence}."
    yield ""


def _ratio(rows, key):
    return rows["ds4jax warm"][key] / np.mean([rows[f"llama.cpp {when}"][key] for when in ("before", "after")])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", nargs="+", type=Path, required=True, metavar="FILE")
    parser.add_argument("-o", "--output", type=Path, default=Path("end_to_end.json"), help="all figures, as JSON")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48, help="single tokens that decode is timed over")
    parser.add_argument("--reference-below", type=float, default=500, metavar="MB", help="run ds4ref on smaller files")
    parser.add_argument("--reference-tokens", type=int, default=6, help="single tokens of ds4ref")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="for ds4jax's Model.open")
    parser.add_argument("--worker", choices=("llama.cpp", "ds4jax", "ds4ref"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    if missing := [path for path in args.model if not path.is_file()]:
        sys.exit(f"bench: no such file: {missing[0]}")
    results = []
    for path in args.model:
        results.append(measure(path, args))
        print("\n".join(table(results[-1])), flush=True)
        args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
