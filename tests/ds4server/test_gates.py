"""Gates of the capability table that no other test stands for; ``python -m ds4server.qualify`` records what holds."""

from functools import cache

import numpy as np
import pytest
from runs import _model, reference, runs

from ds4ref import drafting
from ds4ref.generation import Generation
from ds4ref.reuse import Policy, Reuser
from ds4ref.sampling import SamplingParams
from ds4ref.snapshots import Identity
from ds4ref.speculative import Stepwise
from ds4ref.stop import StopPolicy
from ds4ref.tokenizer import Tokenizer
from ds4server import assembly
from ds4server.drafts import Drafts
from ds4server.jobs import Job
from ds4server.keeper import Keeper
from ds4server.kvpolicy import Options
from ds4server.kvstore import Form, Store
from ds4server.lanes import CONTINUOUS, Environment, Needs
from ds4server.qualify import MODEL, PREDICTORS
from ds4server.scheduler import Schedule, Scheduler

from .test_scheduler import arrive, drain, one_pass

RUNS = {run.arch: run for run in runs() if run.artifact == "model.gguf" and run.cases == "cases.npz"}
CONTEXT = 256
TOLERANCE = {"reference": 0, "cpu": 1e-3}
OPTIONS = Options(min_tokens=8, cold_max=100, continued_interval=16, trim=2, align=8, persist_min=8)
QUICK = ("reference", "step35")  # what runs always


@cache
def on_device(arch):
    """A golden artifact with two banks, for which few programs are compiled. Kept, since several tests share it."""
    pytest.importorskip("jax", reason="JAX is not installed")
    from ds4jax.model import Model

    path = RUNS[arch].path("model.gguf")
    return Model.open(path, context=CONTEXT, banks=2, chunk=16, sizes=(16,), least_bucket=CONTEXT)


def opened(backend, arch):
    """A golden artifact on a backend, all of its banks free."""
    if backend == "reference":
        return reference(RUNS[arch])
    model = on_device(arch)
    model._free = list(range(model.banks))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("arch", sorted(RUNS))
def test_reuse_on_the_device(arch):
    """Appends, edits and repetitions over two device banks: every admission's logits are those of the reference, cold."""
    cold, model = reference(RUNS[arch]), opened("cpu", arch)
    reuser = Reuser(model.new_state, CONTEXT, 2, Policy("partial", minimum=4), slots=6, every=16)
    rng, prompt, kinds = np.random.default_rng(6), [1, 2, 3, 4, 5, 6], set()
    for turn in range(14):
        more = rng.integers(0, min(500, model.vocabulary), 12).tolist()
        if turn % 4 < 2:
            prompt = prompt + more[:9]
        elif turn % 4 == 2:
            prompt = prompt[: len(prompt) * 2 // 3] + more
        admission = reuser.admit(prompt)
        kinds.add(admission.decision.kind)
        state, rest = admission.bank.state, admission.remaining
        while rest:
            end = next((stop for stop in admission.stops if stop > state.length), len(prompt))
            part, rest = rest[: end - state.length], rest[end - state.length :]
            model.prefill(state, part)
            admission.progress()
        assert state.tokens == prompt
        assert np.abs(state.logits - cold.prefill(cold.new_state(), prompt)).max() <= 1e-3
        reuser.retire(admission.bank)
    assert {"cold", "partial"} <= kinds and kinds & {"exact", "fork"}, kinds


# Two banks, and a disk


@cache
def tokenizer(arch):
    return Tokenizer.from_artifact(reference(RUNS[arch]).artifact)


def served(backend, arch, directory=None, model=None, drafts=None):
    """A scheduler over two banks of a golden artifact, with the records in ``directory``, whose rows draft with ``drafts``."""
    model = model or opened(backend, arch)
    reuser = Reuser(model.new_state, CONTEXT, 2, Policy("partial", minimum=4), slots=6, every=16)
    store = None
    if directory is not None:
        form = Form(1, 8, CONTEXT, model.layout, Identity.of(model))
        store = Store.open(directory, 1 << 30, form, OPTIONS, bytes(32))
    text_of = assembly.text_of(tokenizer(arch))
    found = Scheduler(
        model, reuser, Keeper(store, reuser, text_of, OPTIONS, 4), lambda job, event: found.settled.append(job),
        Environment(driver=True, width=2), Schedule(16, 8), grouped=backend != "reference", drafts=drafts,
    )  # fmt: skip
    found.settled = []
    return found


def job(arch, prompt, budget):
    generation = Generation(tokenizer(arch), prompt, SamplingParams(temperature=0), budget, CONTEXT, StopPolicy(frozenset()))
    return Job(generation, "openai_chat", "gate", needs=Needs(len(prompt), budget, greedy=True))


def check(backend, arch, done, cold=None):
    """Every token of an answer is what the reference, which has seen nothing else, thinks best or as good as that."""
    assert done.outcome == "completed" and done.lane == CONTINUOUS
    generation, cold = done.generation, cold or reference(RUNS[arch])
    state = cold.new_state()
    logits = cold.prefill(state, generation.prompt)
    assert len(generation.generated) == generation.budget
    for token in generation.generated:
        assert logits[token] >= logits.max() - 2 * TOLERANCE[backend]
        logits = cold.step(state, token)
    assert done.cached + done.computed == len(generation.prompt)


def gate(test):
    """``test`` on every family and backend: always where that is quick, else in long runs."""
    cases = [(backend, arch) for backend in TOLERANCE for arch in sorted(RUNS)]
    params = [pytest.param(*case, marks=() if case == QUICK else pytest.mark.slow, id="-".join(case)) for case in cases]
    return pytest.mark.parametrize(("backend", "arch"), params)(test)


@gate
def test_two_banks(backend, arch):
    """Rows join two banks while others prefill and decode, continue each other's sequences, and are cold runs all the same."""
    found, rng = served(backend, arch), np.random.default_rng(8)
    new = lambda n: rng.integers(0, 500, n).tolist()  # noqa: E731
    first, second = new(20), new(9)
    prompts = [first, second, first[:14] + new(5), second + new(12), new(6), first + new(4)]
    jobs, together = [job(arch, prompt, 5) for prompt in prompts], 0
    for made in jobs:
        arrive(found, made)
        for _ in range(4):
            one_pass(found)
            together = max(together, len(found.rows))
    drain(found)
    assert together == 2 and {done.reuse_kind for done in jobs} >= {"cold", "partial"} and len(found.settled) == len(jobs)
    for done in jobs:
        check(backend, arch, done)


@gate
def test_records_over_restarts(backend, arch, tmp_path):
    """A conversation over a clean end and an abrupt one: each time a record serves, and no answer changes."""
    rng, prompt = np.random.default_rng(9), np.random.default_rng(9).integers(0, 500, 20).tolist()
    for start in range(3):
        found = served(backend, arch, tmp_path)
        done = job(arch, prompt, 4)
        arrive(found, done)
        drain(found)
        check(backend, arch, done)
        assert (done.cached > 0) == (start > 0), (start, done.reuse_miss)
        prompt = prompt + done.generation.generated + rng.integers(0, 500, 6).tolist()
        if start == 0:
            found.keeper.close()
    assert list(tmp_path.glob("*.kv"))


# Drafts

DRAFTERS = {
    "deepseek4": ("mtp.gguf", "dspark.gguf"), "dots3note": (None,), "exaone-moe": (None,), "glm-dsa": (None,),
    "glm5-next": (None,), "inkling": ("mtp.gguf",), "mimo2": (None, "dflash.gguf"), "naive_n05_flash": ("draft.gguf",),
    "qwen35": (None,), "qwen4exp": (None,), "step35": ("mtp.gguf",),
}  # fmt: skip
"""Golden folder → its drafters: sidecars, or None for the predictor in the model's file."""


class Helped:
    """A family's drafter, whose choices are made right now and then, so that some drafts are kept and some are not."""

    def __init__(self, drafter, cold):
        self._drafter, self._cold, self._answers = drafter, cold, {}

    def __getattr__(self, name):
        return getattr(self._drafter, name)

    def learn(self, prompt, budget):
        """What comes after a prompt, as the reference has it."""
        state, tokens = self._cold.new_state(), list(prompt)
        logits = self._cold.prefill(state, prompt)
        for _ in range(budget + self.longest):
            tokens.append(int(logits.argmax()))
            self._answers[tuple(tokens[-6:-1])] = tokens[-1]
            logits = self._cold.step(state, tokens[-1])
        return tokens[len(prompt) : len(prompt) + budget]

    def propose(self, draft, token, count, choose):
        drafts = []

        def helped(logits):
            right = self._answers.get(tuple([*draft.tokens, token, *drafts][-5:]))
            if right is not None and right % 3:
                logits = np.where(np.arange(len(logits)) == right, np.max(logits) + 1, logits)
            chosen = choose(logits)
            if chosen is not None:
                drafts.append(chosen)
            return chosen

        return self._drafter.propose(draft, token, count, helped)


def drafting_on(backend, arch, sidecar):
    """(a golden model on a backend, its cold reference, its drafter, what it drafts for)."""
    file, sidecar = RUNS[arch].path(PREDICTORS.get(arch, MODEL)), sidecar and RUNS[arch].path(sidecar)
    cold = _model(file, np.float32, ())
    if backend == "reference":
        return cold, cold, drafting.attach(cold, sidecar), Stepwise
    pytest.importorskip("jax", reason="JAX is not installed")
    from ds4jax import drafting as on_jax
    from ds4jax.model import Model
    from ds4jax.speculative import Target

    model = Model.open(file, context=CONTEXT, banks=2, chunk=16, sizes=(16,), least_bucket=CONTEXT)
    return model, cold, on_jax.attach(model, sidecar), Target


def ask_drafting(found, drafter, arch, prompt, budget=14):
    """A job whose answer the drafter is helped with."""
    drafter.learn(prompt, budget)
    done = job(arch, prompt, budget)
    arrive(found, done)
    return done


def drafting_gate(test):
    cases = [(backend, arch) for backend in TOLERANCE for arch in sorted(DRAFTERS)]
    params = [pytest.param(*case, marks=() if case == QUICK else pytest.mark.slow, id="-".join(case)) for case in cases]
    return pytest.mark.parametrize(("backend", "arch"), params)(test)


@drafting_gate
def test_drafts(backend, arch, tmp_path):
    """With every drafter of the family: rows that draft side by side, continue, fork and cut each other's sequences, are
    cancelled and restored from records. Every answer is that of a run without drafts; some drafts are kept, some are not."""
    for n, sidecar in enumerate(DRAFTERS[arch]):
        model, cold, attached, target = drafting_on(backend, arch, sidecar)
        drafter, rng, done = Helped(attached, cold), np.random.default_rng(n), []
        new = lambda n, rng=rng: rng.integers(0, 500, n).tolist()  # noqa: E731

        def start(model=model, drafter=drafter, target=target, n=n):
            if hasattr(model, "banks"):
                model._free = list(range(model.banks))
            return served(backend, arch, tmp_path / str(n), model, Drafts(drafter, target, min(3, drafter.longest)))

        found = start()
        first, second = new(20), new(9)
        done += [ask_drafting(found, drafter, arch, prompt) for prompt in (first, second)]
        for _ in range(5):
            one_pass(found)
        assert all(row.speculator is not None for row in found.rows) and len(found.rows) == 2
        drain(found)
        for prompt in (first + done[0].generation.generated + new(3), first + done[0].generation.generated + new(4),
                       first[:14] + new(5), second + new(6)):  # fmt: skip
            done.append(ask_drafting(found, drafter, arch, prompt))
            drain(found)
        left = ask_drafting(found, drafter, arch, second + new(3), 60)
        while left.drafted < 4:
            one_pass(found)
        left.cancel()
        drain(found)
        assert left.outcome == "canceled"
        done.append(ask_drafting(found, drafter, arch, left.generation.prompt + left.generation.generated + new(2)))
        drain(found)
        last = done[-1].generation
        found.keeper.close()
        restored = start()
        done.append(ask_drafting(restored, drafter, arch, last.prompt + last.generated + new(2)))
        drain(restored)
        assert done[-1].cached > 0
        kinds = {made.reuse_kind for made in done}
        assert kinds >= {"cold", "partial"} and kinds & {"exact", "fork"}
        for made in done:
            check(backend, arch, made, cold)
            # A block drafter that begins late waits until it has seen enough.
            assert made.drafted > 0 or (sidecar is not None and made.reuse_kind != "cold")
        drafted, accepted = sum(made.drafted for made in done), sum(made.accepted for made in done)
        assert 0 < accepted < drafted, (accepted, drafted)
