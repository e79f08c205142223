"""Drafts never change a greedy answer: on every family, with any drafter, width and history, it is a plain run's to the bit."""

import json
import pickle
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import GOLDEN, _model

from ds4ref import drafting, gguf_writer
from ds4ref.drafting import Draft, follow
from ds4ref.families import bailingmoe3, qwen4exp, qwen35
from ds4ref.generation import Generation
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.reuse import Policy, Reuser
from ds4ref.sampling import SamplingParams
from ds4ref.speculative import Speculator, Stepwise, run
from ds4ref.state import Recurrent
from ds4ref.stop import StopPolicy

LONG_RUN = settings.default.max_examples > 50
GREEDY = SamplingParams(temperature=0)

# architecture → (artifact, the sidecars of its real drafters; None is the predictor in the file)
FAMILIES = {
    "bailingmoe3": ("model.gguf", []),
    "deepseek4": ("model.gguf", ["mtp.gguf", "dspark.gguf"]),
    "dots3note": ("model.gguf", [None]),
    "exaone-moe": ("model.gguf", [None]),
    "glm-dsa": ("model.gguf", [None]),
    "glm5-next": ("model.gguf", [None]),
    "inkling": ("model.gguf", ["mtp.gguf"]),
    "k2-horizon": ("model.gguf", []),
    "mimo2": ("model.gguf", [None, "dflash.gguf"]),
    "motif3": ("model.gguf", []),
    "naive_n05_flash": ("model.gguf", ["draft.gguf"]),
    "qwen35": ("model-mtp.gguf", [None]),
    "qwen4exp": ("model.gguf", [None]),
    "solar-open2": ("model.gguf", []),
    "step35": ("model.gguf", ["mtp.gguf"]),
}


def opened(arch):
    return _model(GOLDEN / arch / FAMILIES[arch][0], np.float32, ())


def attached(arch, sidecar):
    return drafting.attach(opened(arch), sidecar and GOLDEN / arch / sidecar)


class Cold:
    """Logits of plain runs, kept per token sequence. A run goes on from a pickled copy of an earlier one's memory, so that it
    shares nothing with the code under test."""

    def __init__(self, model):
        self.model, self.kept = model, {(): (pickle.dumps(model.new_state()), None)}

    def __call__(self, tokens):
        tokens = tuple(tokens)
        if tokens not in self.kept:
            self(tokens[:-1])
            state = pickle.loads(self.kept[tokens[:-1]][0])
            self.kept[tokens] = None, self.model.step(state, tokens[-1])
            self.kept[tokens] = pickle.dumps(state), state.logits
        return self.kept[tokens][1]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request):
    """(architecture, model, its plain runs)."""
    model = opened(request.param)
    return request.param, model, Cold(model)


class Fake:
    """A drafter that knows the target: always right, always wrong, wrong now and then, or guessing."""

    taps, longest = (), 8

    def __init__(self, cold, kind):
        self.cold, self.kind = cold, kind

    def new(self, start=0):
        return Draft([], [], start)

    def extend(self, draft, token, taps):
        draft.tokens.append(int(token))

    def propose(self, draft, token, count, choose):
        assert draft.start == 0, "in these tests a fake knows the sequence from its beginning"
        drafts = []
        for n in range(count):
            sequence = [*draft.tokens, int(token), *drafts]
            rng = np.random.default_rng(sequence)
            right = self.kind == "right" or (self.kind == "half" and rng.random() < 0.7)
            row = self.cold(sequence) if self.kind != "guess" and n < 4 else rng.normal(size=self.cold.model.vocabulary)
            chosen = choose(row if right or self.kind == "guess" else -row)
            if chosen is None:
                break
            drafts.append(chosen)
        return drafts


@dataclass
class Letters:
    """A tokenizer that spells every id with one of eight letters, so that stop strings are found."""

    vocab_size: int
    specials = {}

    def token_bytes(self, token):
        return b"abcdefgh"[token % 8 : token % 8 + 1]

    def piece(self, token):
        return self.token_bytes(token).decode()

    def is_control(self, token):
        return False


def generation(model, prompt, budget, stops=(), ends=(), context=10_000):
    return Generation(
        Letters(model.vocabulary), list(prompt), GREEDY, budget, context, StopPolicy(frozenset(ends)), stop_strings=stops
    )


def plain(model, cold, prompt, *how):
    """The answer and its steps, by plain runs alone."""
    made, steps = generation(model, prompt, *how), []
    while made.finish is None:
        steps.append(made.accept(cold([*prompt, *made.generated])))
    return made, steps


def base_of(model):
    """A prompt after which every window of the model has moved, where that is within 40 tokens."""
    sizes = [getattr(kind, "window", getattr(kind, "ratio", 1)) for kind in model.layout.values()]
    return np.random.default_rng(5).integers(0, 100, min(max(sizes) + 4, 40)).tolist()


def test_a_rolled_back_state_is_bit_for_bit_what_it_was(family):
    """From every position of a trial, with other tokens and with the same."""
    _, model, cold = family
    base, drafts = base_of(model), [3, 1, 4, 1]
    state = model.new_state()
    model.prefill(state, base)
    for kept in range(len(drafts)):
        marks = [state.checkpoint()]
        for token in drafts:
            model.step(state, token)
            marks.append(state.checkpoint())
        state.rewind(marks[kept])
        assert state.tokens == [*base, *drafts[:kept]] and np.array_equal(state.logits, cold(state.tokens))
        assert np.array_equal(model.step(state, 59), cold([*base, *drafts[:kept], 59]))
        state.rewind(marks[0])
    assert np.array_equal(model.verify(state, drafts), np.stack([cold([*base, *drafts[: n + 1]]) for n in range(4)]))


def test_a_state_that_forgets_its_recurrence_would_be_noticed():
    """The same comparison fails where a roll back leaves one matrix as the drafts left it."""
    model = opened("qwen35")
    cold, state = Cold(model), model.new_state()
    model.prefill(state, [5, 6, 7])
    mark = state.checkpoint()
    model.verify(state, [3, 1])
    name = next(name for name, kind in model.layout.items() if isinstance(kind, Recurrent))
    stale = state[name].value.copy()
    state.rewind(mark)
    assert np.array_equal(state.logits, cold([5, 6, 7]))
    state[name].value = stale
    assert not np.array_equal(model.step(state, 9), cold([5, 6, 7, 9]))


def test_rewinding_refuses_another_sequence():
    model = opened("k2-horizon")
    state, other = model.new_state(), model.new_state()
    model.prefill(state, [1, 2, 3])
    model.prefill(other, [1, 4])
    with pytest.raises(ValueError, match="do not begin with the 2 of the checkpoint"):
        state.rewind(other.checkpoint())
    assert state.tokens == [1, 2, 3]


QUICK = ("k2-horizon", "mimo2", "qwen35")  # rows alone, rings, recurrences: the families of short runs
REAL = [(arch, sidecar) for arch, (_, sidecars) in FAMILIES.items() for sidecar in sidecars]


def best(logits):
    return int(np.argmax(logits))


def memory(draft):
    """All that a drafter keeps, as bytes."""
    blocks = [{name: block[name].snapshot() for name in block.layout} for block in draft.blocks]
    return pickle.dumps((draft.tokens, blocks, draft.hidden))


@pytest.mark.parametrize(("arch", "sidecar"), REAL, ids=[f"{arch}-{sidecar or 'embedded'}" for arch, sidecar in REAL])
def test_a_drafter_leaves_no_trace_and_meets_the_target(arch, sidecar):
    """Proposing changes nothing; a draft that began late proposes too; what it proposes is judged, and the answer is plain."""
    model, drafter = opened(arch), attached(arch, sidecar)
    cold = Cold(model)
    prompt = base_of(model)[:12]
    expected, steps = plain(model, cold, prompt, 9)
    made, state = generation(model, prompt, 9), model.new_state()
    speculator = Speculator(Stepwise(model, state), drafter, min(3, drafter.longest))
    assert list(run(speculator, made)) == steps and made.generated == expected.generated
    assert state.tokens == [*prompt, *made.generated[:-1]] and np.array_equal(state.logits, cold(state.tokens))
    assert speculator.drafted > 0 and speculator.draft.tokens == state.tokens
    straight = Speculator(Stepwise(model, model.new_state()), drafter, 1)
    for token in state.tokens:
        straight.feed(token)
    assert memory(speculator.draft) == memory(straight.draft), "trials leave the drafter where plain feeding does"
    before = memory(speculator.draft)
    first, again = (drafter.propose(speculator.draft, 3, drafter.longest, best) for _ in range(2))
    assert first == again and len(first) == drafter.longest
    assert memory(speculator.draft) == before
    late = Speculator(Stepwise(model, state), drafter, 1)
    assert late.draft.start == state.length and drafter.propose(late.draft, 5, 1, best) == []
    waits = sidecar == "dflash.gguf"  # until it has seen its window
    for token in range(4):
        late.feed(token)
        assert len(drafter.propose(late.draft, 5, drafter.longest, best)) == (0 if waits else drafter.longest)


def test_a_draft_is_followed_only_where_its_sequence_is():
    model, drafter = opened("exaone-moe"), attached("exaone-moe", None)
    state = model.new_state()
    speculator = Speculator(Stepwise(model, state), drafter, 2)
    for token in (1, 2, 3):
        speculator.feed(token)
    assert follow(drafter, speculator.draft, state) is speculator.draft
    copy = state.copy()
    model.step(copy, 4)
    assert follow(drafter, speculator.draft, copy).start == 4
    state.truncate(2)
    assert follow(drafter, speculator.draft, state).start == 2
    other = model.new_state()
    model.prefill(other, [1, 2, 4])
    assert follow(drafter, speculator.draft, other).start == 3


REQUEST = st.fixed_dictionaries({
    "of": st.integers(0, 99),
    "cut": st.integers(0, 99),
    "more": st.lists(st.integers(0, 99), min_size=1, max_size=4),
    "drafter": st.integers(0, 99),
    "width": st.integers(1, 8),
    "budget": st.integers(1, 9),
    "stops": st.sampled_from([(), ("b",), ("ab", "dc"), ("ha",)]),
    "taken": st.sampled_from([None, None, None, 1, 2, 4]),
})  # fmt: skip




def request(of, cut, more, drafter, width, budget, stops=(), taken=None):
    keys = ("of", "cut", "more", "drafter", "width", "budget", "stops", "taken")
    return dict(zip(keys, (of, cut, more, drafter, width, budget, stops, taken), strict=True))


# Drafters 0 to 3 are fakes, the family's own come after them.
SCRIPT = [
    request(0, 0, [5], 4, 3, 7),
    request(1, 0, [7, 8], 4, 8, 9, taken=3),  # goes on from the whole answer, and is cancelled
    request(2, 3, [1], 2, 8, 9),  # departs inside the cancelled one
    request(0, 0, [9], 0, 6, 9, ("b",)),
    request(1, 1, [2], 6, 4, 6, ("ha", "dc")),
    request(3, 0, [4], 3, 2, 5),
]


@dataclass
class Service:
    """Requests one after another on two banks with reuse, each answered with some drafter; conversations grow and fork."""

    arch: str
    model: object
    cold: Cold

    def __post_init__(self):
        sidecars = FAMILIES[self.arch][1]
        self.drafters = [Fake(self.cold, kind) for kind in ("right", "wrong", "half", "guess")]
        self.drafters += 2 * [attached(self.arch, sidecar) for sidecar in sidecars]
        self.reuser = Reuser(self.model.new_state, 1000, 2, Policy(minimum=1), 4, every=8)
        self.conversations, self.kept, self.kinds = [base_of(self.model)], {}, set()

    def answer(self, of, cut, more, drafter, width, budget, stops, taken):
        history = self.conversations[of % len(self.conversations)]
        prompt = history[: len(history) - cut % 6 or 1] + more
        drafter = self.drafters[drafter % len(self.drafters)]
        admission = self.reuser.admit(prompt)
        state = admission.bank.state
        draft = self.kept.get((id(admission.bank), id(drafter)))
        if isinstance(drafter, Fake):  # it knows the past without having seen it
            draft = Draft([], [], 0, list(state.tokens))
        made = generation(self.model, prompt, budget, stops)
        speculator = Speculator(Stepwise(self.model, state), drafter, min(width, drafter.longest), draft=draft)
        expected, steps = plain(self.model, self.cold, prompt, budget, stops)
        seen = []
        for step in run(speculator, made, admission.remaining, admission.progress):
            seen.append(step)
            if len(seen) == taken:
                break
        assert seen == steps[: len(seen)] and (taken is not None or len(seen) == len(steps))
        assert made.generated == expected.generated[: len(made.generated)]
        assert state.tokens == [*prompt, *made.generated][: state.length] and state.length >= len(prompt) + len(seen) - 1
        assert np.array_equal(state.logits, self.cold(state.tokens))
        self.kept[id(admission.bank), id(drafter)] = speculator.draft
        self.reuser.retire(admission.bank)
        self.conversations.append(prompt + made.generated)
        self.kinds.add(admission.decision.kind)


@pytest.mark.parametrize("arch", sorted(FAMILIES))
def test_no_history_and_no_drafter_changes_an_answer(arch):
    model = opened(arch)
    cold = Cold(model)

    def serve(requests):
        service = Service(arch, model, cold)
        for asked in requests:
            service.answer(**asked)
        return service

    @settings(max_examples=60 if LONG_RUN else 6, deadline=None)
    @given(st.lists(REQUEST, min_size=2, max_size=4))
    def served(requests):
        serve(requests)

    service = serve(SCRIPT)
    assert service.kinds == {"cold", "fork", "partial"}
    if LONG_RUN or arch in QUICK:
        served()


# Identity of sidecars -------------------------------------------------------------------------------------------------

NOT_ONE = [
    ("deepseek4", "step35/mtp.gguf", "a file of architecture 'step35', no draft sidecar of deepseek4"),
    ("mimo2", "naive_n05_flash/draft.gguf", r"no draft sidecar of mimo2 \(accepted: architecture 'dflash'\)"),
    ("glm-dsa", "step35/mtp.gguf", "mtp.gguf: glm-dsa takes no draft sidecar"),
    ("step35", "step35/model.gguf", "a file of architecture 'step35', no draft sidecar of step35"),
    ("inkling", "inkling/model.gguf", "no draft sidecar of inkling .*mtp.sidecar true"),
]


@pytest.mark.parametrize(("arch", "path", "reason"), NOT_ONE)
def test_a_file_that_is_no_sidecar_of_the_family_is_refused(arch, path, reason):
    with pytest.raises(ArtifactError, match=reason):
        drafting.attach(opened(arch), GOLDEN / path)


@pytest.mark.parametrize("arch", ["bailingmoe3", "k2-horizon", "solar-open2"])
def test_a_model_without_a_predictor_says_so(arch):
    with pytest.raises(ArtifactError, match="holds no predictor block$"):
        drafting.attach(opened(arch))


def test_blocks_whose_use_is_not_described_are_said_to_be_unused():
    assert "no use of it is described" in drafting.unused(bailingmoe3, replace(opened("bailingmoe3").config, predictors=1))
    qwen = opened("qwen4exp").config
    assert drafting.unused(qwen4exp, qwen) is None and "no mixer" in drafting.unused(qwen4exp, replace(qwen, published=False))
    qwen = opened("qwen35").config
    assert drafting.unused(qwen35, qwen) is None and "2 blocks" in drafting.unused(qwen35, replace(qwen, predictors=2))


def test_a_family_of_sidecars_names_them():
    with pytest.raises(ArtifactError, match=r"holds no predictor block; it drafts from a sidecar: .*mtp\.0.* or .*dspark"):
        drafting.attach(opened("deepseek4"))


def changed(path, source, metadata=(), tensors=()):
    """A copy of a sidecar with keys or tensors replaced."""
    artifact = Artifact.open(source)
    keys = {k: (v, artifact.types[k]) for k, v in artifact.metadata.items() if k != "general.architecture"}
    for key, value in dict(metadata).items():
        keys[key] = (value(keys[key][0]) if callable(value) else value, keys[key][1])
    arrays = {name: np.array(tensor.dequantize()) for name, tensor in artifact.tensors.items()}
    for name, change in dict(tensors).items():
        arrays[name] = np.ascontiguousarray(change(arrays[name]))
    gguf_writer.write(path, artifact.architecture, keys, arrays)
    return path


def config_field(name, value):
    def change(text):
        config = json.loads(text)
        config["text_config"][name] = value
        return json.dumps(config)

    return change


def swapped(tokens):
    return [tokens[1], tokens[0], *tokens[2:]]


MISFITS = [
    ("deepseek4/mtp.gguf", {}, {"mtp.0.e_proj.weight": lambda a: a[:, :32]}, r"'mtp.0.e_proj.weight' has shape \[64, 32\]"),
    ("deepseek4/mtp.gguf", {}, {"mtp.0.ffn_gate_inp.weight": lambda a: a[:5]}, "mtp.0.exp_probs_b.bias.* has shape"),
    ("deepseek4/dspark.gguf", {"deepseek4.dspark.target_layers": np.array([1, 9], np.int32)}, {}, r"layers \[1, 9\] of"),
    ("deepseek4/dspark.gguf", {"deepseek4.dspark.noise_token_id": 512}, {}, "noise token 512 is outside the vocabulary of 512"),
    ("deepseek4/dspark.gguf", {}, {f"dspark.markov_w{n}.weight": lambda a: a[:500] for n in "12"}, "vocabulary is 500, the"),
    ("naive_n05_flash/draft.gguf", {"naive_draft.vocab_size": 511}, {}, "the vocabulary is 511, the model's is 512"),
    ("naive_n05_flash/draft.gguf", {"naive_draft.embedding_length": 32}, {}, "the width is 32, the model's is 64"),
    ("naive_n05_flash/draft.gguf", {"naive_draft.target.layer_ids": np.array([7], np.int32)}, {}, r"layers \[7\] of"),
    ("naive_n05_flash/draft.gguf", {"naive_draft.target.architecture": "mimo2"}, {}, "target.architecture' is 'mimo2'"),
    ("naive_n05_flash/draft.gguf", {"naive_draft.attention.causal": True}, {}, "attention.causal' is True; expected false"),
    ("mimo2/dflash.gguf", {"dflash.embedding_length": 32}, {}, "the width is 32, the model's is 64"),
    ("mimo2/dflash.gguf", {"dflash.target_layers": np.array([1, 99], np.int32)}, {}, r"layers \[0, 98\] of"),
    ("mimo2/dflash.gguf", {"tokenizer.ggml.tokens": swapped}, {}, "token 0 is .*, the model's is"),
    ("mimo2/dflash.gguf", {"tokenizer.ggml.mask_token_id": 512}, {}, "mask token 512 is outside the vocabulary"),
    ("inkling/mtp.gguf", {"inkling.config.json": config_field("hidden_size", 32)}, {}, "hidden_size is 32, the model's is 64"),
    ("inkling/mtp.gguf", {"inkling.config.json": config_field("vocab_size", 600)}, {}, "vocab_size is 600, the model's is 512"),
    ("step35/mtp.gguf", {"step35.rope.freq_base_swa": 5e4}, {}, "rope_base_sliding is 50000.0, the model's is 10000.0"),
    ("step35/mtp.gguf", {"step35.embedding_length": 32}, {}, "width is 32, the model's is 64"),
    ("step35/mtp.gguf", {"tokenizer.ggml.tokens": swapped}, {}, "token 0 is .*, the model's is"),
]


@pytest.mark.parametrize(("file", "metadata", "tensors", "reason"), MISFITS)
def test_a_sidecar_of_another_model_is_refused(tmp_path, file, metadata, tensors, reason):
    arch, name = file.split("/")
    with pytest.raises(ArtifactError, match=reason) as error:
        drafting.attach(opened(arch), changed(tmp_path / name, GOLDEN / file, metadata, tensors))
    assert str(error.value).startswith(f"{name}: ") and "\n" not in str(error.value)


def test_a_copy_of_a_sidecar_fits(tmp_path):
    for file in sorted({misfit[0] for misfit in MISFITS}):
        arch, name = file.split("/")
        assert drafting.attach(opened(arch), changed(tmp_path / name, GOLDEN / file)).longest >= 3
