"""Print the reuse table of ``bench/RESULTS.md``: ``python bench/reuse_table.py``.

Every family's tiny golden artifact answers the same 20-turn conversation of an agent: a system prompt of 40 tokens; per turn 6
new ones, 2 that open the reasoning, and an answer of 6 whose first 3 count as reasoning. Two banks, a checkpoint every 16
tokens. Three kinds of history: *kept*, all of it is sent again; *dropped*, the next turn lacks the opening and the reasoning;
*marked*, the same, with the end of what is sent again marked for a checkpoint. Counted over all 20 prompts; the sum of a
cell is the number of prompt tokens that were sent.
"""

import sys
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))

from runs import available, reference, runs

from ds4ref.reuse import Policy, Reuser

TURNS, SYSTEM, NEW, ANSWER, REASONING, OPENING, EVERY = 20, 40, 6, 6, 3, (1, 2), 16
HISTORIES = ("kept", "dropped", "marked")


def ask(model, reuser, prompt, marks=()):
    """(decision, answer) of one request, greedy."""
    admission = reuser.admit(prompt, marks=marks)
    state, answer = admission.bank.state, []
    for token in admission.remaining:
        admission.progress()
        model.step(state, token)
    admission.progress()
    while len(answer) < ANSWER:
        answer.append(int(np.argmax(state.logits)))
        if len(answer) < ANSWER:
            model.step(state, answer[-1])
    reuser.retire(admission.bank)
    return admission.decision, answer


def reuser_of(model):
    return Reuser(model.new_state, model.context_cap, 2, Policy(minimum=1), every=EVERY)


def conversation(model, history):
    """(prompt tokens cached, computed anew, replayed; bytes of the checkpoints at the end)."""
    rng, reuser = np.random.default_rng(4), reuser_of(model)
    tokens = rng.integers(0, model.vocabulary, SYSTEM).tolist()
    cached = computed = replayed = 0
    for _ in range(TURNS):
        tokens += rng.integers(0, model.vocabulary, NEW).tolist()
        prompt = [*tokens, *OPENING]
        decision, answer = ask(model, reuser, prompt, (len(tokens),) if history == "marked" else ())
        cached += decision.cached
        computed += decision.computed - decision.replayed
        replayed += decision.replayed
        tokens = prompt + answer if history == "kept" else tokens + answer[REASONING:]
    return cached, computed, replayed, reuser.pool.nbytes


def rewind(model):
    """Prompt tokens computed when the same prompt is sent again, and when one is sent that lacks its last 5 tokens."""
    prompt, reuser = np.random.default_rng(4).integers(0, model.vocabulary, 90).tolist(), reuser_of(model)
    ask(model, reuser, prompt)
    return ask(model, reuser, prompt)[0].computed, ask(model, reuser, prompt[:-5])[0].computed


def components(layout):
    """What a sequence keeps, by kind: ``6 Rows, 4 Ring``."""
    return ", ".join(f"{n} {kind}" for kind, n in sorted(Counter(type(kind).__name__ for kind in layout.values()).items()))


def rows():
    histories = " | ".join(f"{history}: cached / new / replayed" for history in HISTORIES)
    yield f"| family | components | {histories} | same prompt | 5 shorter | pool, KiB |"
    yield "|---|---|---|---|---|---|---|---|"
    for run in runs():
        if (run.artifact, run.cases) != ("model.gguf", "cases.npz") or not available(run.arch, run.artifact):
            continue
        model = reference(run)
        counts = [conversation(model, history) for history in HISTORIES]
        cells = [f"{cached} / {new} / {replayed}" for cached, new, replayed, _ in counts]
        again, shorter = rewind(model)
        cells += [str(again), str(shorter), f"{counts[-1][-1] / 1024:.0f}"]
        yield f"| {run.arch} | {components(model.layout)} | {' | '.join(cells)} |"


if __name__ == "__main__":
    for row in rows():
        print(row, flush=True)
