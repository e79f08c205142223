"""Measure what drafts are worth on ds4jax: tokens per second with and without them, of the same answers, in turns.

    python bench/speculation.py [-m model.gguf] [--mtp drafter.gguf] [--draft 1 2 3] [-n 64] [--prompts FILE]

Without -m it is the artifact inside ds4server. Every prompt is a chat's first question (a line of FILE), answered greedily; an
answer with drafts must be the answer without, token for token, or the run fails. Each width is timed between two runs without
drafts, all in one process and after a first run of everything, so that nothing compiles. Also printed: how many of the judged
drafts were kept (*kept*), and tokens that a trial gave.
"""

import argparse
import statistics
import sys
import time
from importlib.resources import as_file, files

from ds4jax import compilation, drafting
from ds4jax.model import Model
from ds4jax.speculative import Target
from ds4ref.chat import Options
from ds4ref.conversation import Conversation
from ds4ref.generation import run
from ds4ref.sampling import SamplingParams
from ds4ref.speculative import Speculator
from ds4ref.speculative import run as run_with_drafts

PROMPTS = (
    "Hello", "Who are you?", "What did the Queen say?", "Tell me about the garden.", "What happened next?",
    "Where is the rabbit?", "Why did she cry?", "What did the Cat say?",
)  # fmt: skip
CONTEXT = 512


class Runner:
    def __init__(self, model, drafter, prompts, most):
        self.model, self.drafter, self.most = model, drafter, most
        self.conversation = Conversation(model.artifact)
        self.prompts = prompts

    def answer(self, text, width):
        """(ids, seconds after the prefill, the speculator or None) of an answer with ``width`` drafts a trial, 0 none."""
        prompt = self.conversation.render([{"role": "user", "content": text}], None, Options(thinking=False))
        ids = self.conversation.encode(prompt)
        generation = self.conversation.generation(
            ids, SamplingParams(temperature=0), budget=self.most, context=CONTEXT, prompt=prompt
        )  # fmt: skip
        bank = self.model.new_state()
        try:
            if width:
                speculator = Speculator(Target(self.model, bank), self.drafter, width)
                speculator.prefill(ids)
                steps = run_with_drafts(speculator, generation, prompt=())
            else:
                speculator = None
                self.model.prefill(bank, ids)
                steps = run(self.model, bank, generation, prompt=())
            begin = time.perf_counter()
            for _ in steps:
                pass
            return generation.generated, time.perf_counter() - begin, speculator
        finally:
            bank.release()

    def run(self, width):
        """Of all prompts: (answers, tokens per second, speculators)."""
        found = [self.answer(text, width) for text in self.prompts]
        tokens, seconds = sum(len(ids) for ids, *_ in found), sum(spent for _, spent, _ in found)
        return [ids for ids, *_ in found], tokens / seconds, [speculator for *_, speculator in found]


def main(argv=None):
    top = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    top.add_argument("-m", "--model", metavar="FILE")
    top.add_argument("--mtp", metavar="FILE")
    top.add_argument("--draft", type=int, nargs="+", default=[1, 2, 3])
    top.add_argument("-n", type=int, default=64, help="tokens of an answer at most")
    top.add_argument("--prompts", metavar="FILE", type=argparse.FileType(), help="a question a line")
    top.add_argument("--rounds", type=int, default=3)
    args = top.parse_args(argv)
    compilation.enable_cache()
    with as_file(files("ds4server") / "tiny.gguf") as embedded:
        model = Model.open(args.model or embedded, context=CONTEXT, banks=1)
    drafter = drafting.attach(model, args.mtp)
    prompts = [line.strip() for line in args.prompts if line.strip()] if args.prompts else PROMPTS
    runner = Runner(model, drafter, prompts, args.n)
    widths = [width for width in args.draft if width <= drafter.longest]
    truth = runner.run(0)[0]
    for width in widths:
        if runner.run(width)[0] != truth:
            sys.exit(f"speculation: answers with {width} drafts are not those without")
    print(f"{model.artifact.path.name}: {len(prompts)} answers of {sum(map(len, truth))} tokens")
    print("drafts   tok/s without / with / without   ratio    kept   tokens a trial")
    for width in widths:
        rounds = [(runner.run(0)[1], runner.run(width), runner.run(0)[1]) for _ in range(args.rounds)]
        if any(drafted[0] != truth for _, drafted, _ in rounds):
            sys.exit(f"speculation: answers with {width} drafts are not those without")
        before, after = (statistics.median(r[i] for r in rounds) for i in (0, 2))
        speed = statistics.median(r[1][1] for r in rounds)
        seen = rounds[0][1][2]
        drafted, kept, trials = (sum(getattr(s, name) for s in seen) for name in ("drafted", "accepted", "trials"))
        ratio = 2 * speed / (before + after)
        print(f"{width:6}   {before:10.1f} / {speed:5.1f} / {after:7.1f}   {ratio:12.2f}   {kept / max(1, drafted):5.0%}"
              f"   {(kept + trials) / max(1, trials):10.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
