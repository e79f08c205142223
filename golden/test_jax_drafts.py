"""Drafters of ds4jax held to the goldens of test_drafts.py, chunk by chunk and token by token, behind the reference's trunk."""

from functools import cache, partial

import numpy as np
import pytest
from runs import GOLDEN, QUICK, _model, available
from test_drafts import CHAINED, CHAINS, arrays, named, opened, traced

pytest.importorskip("jax", reason="JAX is not installed")

import jax
import jax.numpy as jnp

from ds4jax import compilation, drafting, families
from ds4jax.model import Model
from ds4jax.speculative import Tap
from ds4jax.state import Chunk, Sequences, allocate
from ds4jax.weights import pack
from ds4ref import drafting as reference
from ds4ref.gguf import ArtifactError

TOLERANCE = 1e-3
CONTEXT, CHUNK, PART = 64, 16, 12
CHUNKS_ALWAYS = ("dots3note-model", "glm-dsa-model", "qwen35-model-mtp", "mimo2", "naive_n05_flash-medium", "mimo2-block")
TOKENS_ALWAYS = ("qwen35-model-mtp", "naive_n05_flash-medium")


@pytest.fixture(autouse=True)
def quick_compilation(monkeypatch):
    """What is held to an oracle here is arithmetic; XLA need not make it fast."""
    monkeypatch.setattr(compilation, "compile_options", lambda: QUICK)


def by_size(cases, name):
    """Each case in chunks and token by token, some of them always and all in the slow profile."""

    def case_of(case, size, way, slow):
        return pytest.param(*case, size, id=f"{name(case)}-{way}", marks=pytest.mark.slow if slow else ())

    chunks = [case_of(case, PART, "chunks", name(case) not in CHUNKS_ALWAYS) for case in cases]
    return chunks + [case_of(case, 1, "tokens", name(case) not in TOKENS_ALWAYS) for case in cases]


def parts(tokens, seen, size):
    """Pairs of a token and its taps, in parts of about so many."""
    pairs = list(zip(tokens, seen, strict=True))
    cuts = np.linspace(0, len(pairs), -(-len(pairs) // size) + 1).astype(int)
    return [pairs[begin:end] for begin, end in zip(cuts, cuts[1:], strict=False)]


@cache
def device(arch, artifact="model.gguf", sidecar=None):
    """ds4jax's drafter of a golden model that has room for two sequences; nothing of its trunk is ever compiled."""
    return drafting.attach(trunk(arch, artifact), sidecar and GOLDEN / arch / sidecar)


def trunk(arch, artifact="model.gguf"):
    shapes = {"context": CONTEXT, "chunk": CHUNK, "sizes": (1, CHUNK), "least_bucket": CONTEXT}
    return Model.open(available(arch, artifact), banks=2, **shapes)


def taps(steps, names):
    """What the reference traced at every token, as ds4jax's drafters read it."""
    whole = {name: jnp.asarray(np.stack([step[name] for step in steps]))[None] for name in names}
    return [{name: Tap(whole[name], 0, t) for name in names} for t in range(len(steps))]


def close(ours, expected):
    assert ours.shape == expected.shape
    error = np.max(np.abs(ours - expected))
    assert error <= TOLERANCE, error


def rows_of(chain, tokens, seen, size):
    """Rows of every block after ``tokens`` have been followed, computed ``size`` at a time."""
    draft, rows = chain.new(), [[] for _ in chain.layouts]
    for part in parts(tokens, seen, size):
        for token, tap in part:
            chain.extend(draft, token, tap)
        if (made := chain.flush(draft)) is not None:
            outs, skips, count, _ = made
            for d, (out, skip) in enumerate(zip(outs, skips, strict=True)):
                rows[d].append(out[0, : count - skip])
    return [np.concatenate(made) for made in rows]


def logits_of(chain, d, rows):
    run = partial(chain.module.draft_logits, chain.config, d)
    return np.asarray(jax.jit(run)(chain._weights["top"], chain._weights["blocks"][d], jnp.asarray(rows)))


def inputs_of(chain, steps):
    """Block 0's hidden rows from what the reference traced."""
    trunk = jnp.asarray(np.stack([step[chain.taps[0]] for step in steps]))[None]
    return np.asarray(chain.module.draft_input(chain.config, chain._weights["top"], trunk))[0]


@pytest.mark.parametrize(("arch", "artifact", "sidecar", "names", "size"), by_size(CHAINS, named))
def test_one_block(arch, artifact, sidecar, names, size):
    model, _ = opened(arch, artifact, sidecar)
    chain, oracle = device(arch, artifact, sidecar), arrays(arch)
    tokens, trunk, logits, rows, _ = names
    tokens = oracle[tokens]
    steps = traced(model, tokens, chain.taps)
    if trunk:
        close(inputs_of(chain, steps), oracle[trunk])
    (ours,) = rows_of(chain, tokens, taps(steps, chain.taps), size)
    if rows:
        close(ours, oracle[rows])
    close(logits_of(chain, 0, ours), oracle[logits])


@pytest.mark.parametrize(
    ("arch", "artifact", "sidecar", "names"),
    [pytest.param(*case, id=case[0], marks=() if case[0] == "qwen35" else pytest.mark.slow) for case in CHAINED],
)
def test_chained_step(arch, artifact, sidecar, names):
    """The second step reads the first one's rows in the place of the trunk's, in a cache of its own."""
    opened(arch, artifact, sidecar)
    chain, oracle = device(arch, artifact, sidecar), arrays(arch)
    *_, rows, logits = names
    hidden, tokens = oracle[rows][:-1], oracle["tokens"][2:]
    (layout,) = chain.layouts
    empty = {name: allocate(kind, 1, 1, CONTEXT) for name, kind in layout.items()}

    @jax.jit
    def run(weights, hidden, tokens):
        nothing, size = jnp.zeros(1, jnp.int32), tokens.shape[1]
        state = Sequences(layout, empty, Chunk(nothing, nothing + size, size, CONTEXT))
        return chain.module.draft_block(chain.config, 0, weights["top"], weights["blocks"][0], state, hidden, tokens)

    close(logits_of(chain, 0, run(chain._weights, hidden[None], tokens[None].astype(np.int32))[0]), oracle[logits])


def followed(drafter, model, tokens, size):
    draft, seen = drafter.new(), taps(traced(model, tokens, drafter.taps), drafter.taps)
    for part in parts(tokens, seen, size):
        drafter.flush(draft)
        for token, tap in part:
            drafter.extend(draft, token, tap)
    return draft


def proposed(drafter, draft, token, count):
    """(drafts, logits of each) of a greedy proposal."""
    seen = []
    drafts = drafter.propose(draft, token, count, lambda logits: seen.append(logits) or int(np.argmax(logits)))
    return drafts, np.stack(seen)


@pytest.mark.slow
def test_dots3note_proposes_the_oracles_chain():
    (model, _), chain, oracle = opened("dots3note"), device("dots3note"), arrays("dots3note")
    base = int(oracle["chain_base"])
    draft = followed(chain, model, oracle["tokens"][:base], PART)
    drafts, logits = proposed(chain, draft, oracle["tokens"][base], 3)
    assert drafts == oracle["chain_drafts"].tolist()
    close(logits, oracle["chain_logits"])


@pytest.mark.parametrize(("arch", "sidecar", "size"), by_size([("mimo2", None), ("step35", "mtp.gguf")], lambda case: case[0]))
def test_several_blocks(arch, sidecar, size):
    """Row t of block d reads token t + d + 1 and the row of block d − 1."""
    (model, _), chain, oracle = opened(arch, sidecar=sidecar), device(arch, sidecar=sidecar), arrays(arch)
    steps = traced(model, oracle["tokens"], chain.taps)
    close(inputs_of(chain, steps), oracle["trunk_hidden"])
    count = oracle["hidden"].shape[1]
    for d, rows in enumerate(rows_of(chain, oracle["tokens"], taps(steps, chain.taps), size)):
        close(rows[:count], oracle["hidden"][d])
        close(logits_of(chain, d, rows[:count]), oracle["logits"][d])


@pytest.mark.slow
@pytest.mark.parametrize("size", [PART, 1])
def test_inkling_proposes_the_oracles_drafts(size):
    (model, _), chain = opened("inkling", sidecar="mtp.gguf"), device("inkling", sidecar="mtp.gguf")
    oracle = arrays("inkling")
    *tokens, newest = oracle["tokens"]
    drafts, logits = proposed(chain, followed(chain, model, tokens, size), newest, 3)
    assert drafts == oracle["draft_ids"].tolist()
    close(logits, oracle["draft_logits"])


@pytest.mark.slow
@pytest.mark.parametrize("size", [PART, 1])
def test_motif3_describes_a_block_that_it_does_not_use(size):
    with pytest.raises(ArtifactError, match="bound and not used: the published model is served without drafts"):
        device("motif3")
    model, oracle = _model(GOLDEN / "motif3" / "model.gguf", np.float32, ()), arrays("motif3")
    like = reference.Chain(model.family, model.config, model.weights, model.config.layers)
    module = families.drafter(model.family)
    _, (block,) = module.draft_tensors(model.config, model.artifact)
    chain = drafting.Chain(trunk("motif3"), like, module, {}, [{name: pack(tensor) for name, tensor in block.items()}])
    (rows,) = rows_of(chain, oracle["tokens"], taps(traced(model, oracle["tokens"], chain.taps), chain.taps), size)
    close(rows, oracle["draft_hidden"])
    close(logits_of(chain, 0, rows), oracle["draft_logits"])


BLOCKS = [
    *(("deepseek4", "dspark.gguf", str(committed)) for committed in (6, 20, 47)),
    *(("naive_n05_flash", "draft.gguf", case) for case in ("short", "medium")),
    ("mimo2", "dflash.gguf", "block"),
]


def block_oracle(arch, case):
    """(committed tokens, the token after them, logits of each draft)."""
    if arch == "deepseek4":
        oracle, committed = arrays(arch, "dspark.npz"), int(case)
        return oracle["tokens"][:committed], oracle["tokens"][committed], oracle[f"logits_{case}"]
    if arch == "naive_n05_flash":
        oracle = arrays(arch)
        *tokens, anchor = oracle[f"tokens_{case}"]
        return tokens, anchor, oracle[f"draft_logits_{case}"]
    oracle = arrays(arch, "dflash.npz")
    return oracle["context_tokens"], oracle["block"][0], oracle["logits"][1:]


@pytest.mark.parametrize(("arch", "sidecar", "case", "size"), by_size(BLOCKS, lambda case: f"{case[0]}-{case[2]}"))
def test_blocks(arch, sidecar, case, size):
    (model, _), block = opened(arch, sidecar=sidecar), device(arch, sidecar=sidecar)
    tokens, anchor, expected = block_oracle(arch, case)
    drafts, logits = proposed(block, followed(block, model, tokens, size), anchor, len(expected))
    assert drafts == expected.argmax(axis=1).tolist()
    close(logits, expected)


def test_late_and_crowded():
    """Three drafts on two slots, begun at different tokens: each proposes what the reference does, or begins anew."""
    (model, like), block = opened("mimo2", sidecar="dflash.gguf"), device("mimo2", sidecar="dflash.gguf")
    tokens, window = arrays("mimo2", "dflash.npz")["context_tokens"], block.config.layers.window
    steps = traced(model, tokens, block.taps)
    seen, late = taps(steps, block.taps), len(tokens) - window
    first, second, third = drafts = [block.new(n) for n in (0, late, late + 1)]
    theirs = like.new(late)
    for draft in drafts:
        for token, tap in zip(tokens[draft.start :], seen[draft.start :], strict=True):
            block.extend(draft, token, tap)
    for token, step in zip(tokens[late:], steps[late:], strict=True):
        like.extend(theirs, token, step)
    expected = []
    like.propose(theirs, 7, 2, lambda logits: expected.append(logits) or int(np.argmax(logits)))
    close(proposed(block, second, 7, 2)[1], np.stack(expected))
    assert block.propose(third, 7, 2, lambda logits: 0) == []  # it does not know its whole window yet
    assert first.start == len(tokens) and first.tokens == []  # its slot was the one used longest ago
    assert block.propose(first, 7, 2, lambda logits: 0) == []
