"""Drafters held to the goldens: the logits of every draft that an implementation other than ours computed.

The drafters are driven as decoding drives them, from the model's own trunk.
"""

import numpy as np
import pytest
from runs import GOLDEN, _model, available

from ds4ref import drafting

TOLERANCE = 2e-4


def opened(arch, artifact="model.gguf", sidecar=None):
    """(model, its drafter)."""
    path = available(arch, artifact)
    if path is None:
        pytest.skip(f"{arch}/{artifact} is not in golden/ and the shared oracle folder is absent")
    model = _model(path, np.float32, ())
    return model, drafting.attach(model, sidecar and GOLDEN / arch / sidecar)


def arrays(arch, name="mtp.npz"):
    with np.load(GOLDEN / arch / name) as data:
        return dict(data)


def traced(model, tokens, names):
    """The named parts of the trunk's trace at every token."""
    state, steps = model.new_state(), []
    for token in tokens:
        seen = {}
        model.step(state, token, lambda name, array, seen=seen: seen.__setitem__(name, np.array(array)))
        steps.append({name: seen[name] for name in names})
    return steps


def close(ours, expected):
    assert ours.shape == expected.shape
    error = np.max(np.abs(ours - expected))
    assert error <= TOLERANCE, error


# arch, artifact, sidecar, names of (tokens, trunk rows, first logits, first rows, chained logits) in the oracle
CHAINS = [
    ("deepseek4", "model.gguf", "mtp.gguf", ("tokens", "hidden", "logits_1", "hidden_1", "logits_2")),
    ("dots3note", "model.gguf", None, ("tokens", "trunk_hidden", "logits", "hidden", None)),
    ("dots3note", "model-llamacpp.gguf", None, ("tokens", "trunk_hidden", "logits", "hidden", None)),
    ("exaone-moe", "model.gguf", None, ("tokens_short", None, "logits_short", None, None)),
    ("exaone-moe", "model.gguf", None, ("tokens_medium", None, "logits_medium", None, None)),
    ("glm-dsa", "model.gguf", None, ("tokens", "trunk_hidden", "logits", "hidden", None)),
    ("glm5-next", "model.gguf", None, ("tokens", "trunk_hidden", "logits", "hidden", None)),
    ("glm5-next", "model-llamacpp.gguf", None, ("tokens", "trunk_hidden", "logits", "hidden", None)),
    ("qwen35", "model-mtp.gguf", None, ("tokens", "hidden", "logits_1", "hidden_1", "logits_2")),
    ("qwen4exp", "model.gguf", None, ("tokens", "streams", "logits_1", "streams_1", "logits_2")),
]


def named(chain):
    arch, artifact, _, (tokens, *_) = chain
    return f"{arch}-{artifact.removesuffix('.gguf')}{tokens.removeprefix('tokens').replace('_', '-')}"


@pytest.mark.parametrize(("arch", "artifact", "sidecar", "names"), CHAINS, ids=map(named, CHAINS))
def test_one_block(arch, artifact, sidecar, names):
    """Every row of the block, from the model's own trunk."""
    model, chain = opened(arch, artifact, sidecar)
    oracle = arrays(arch)
    tokens, trunk, logits, rows, _ = names
    tokens = oracle[tokens]
    draft, seen, ours = chain.new(), [], []
    for token, taps in zip(tokens, traced(model, tokens, chain.taps), strict=True):
        ours += chain.extend(draft, token, taps)
        seen.append(draft.hidden[0])
    if trunk:
        close(np.stack(seen), oracle[trunk])
    if rows:
        close(np.stack(ours), oracle[rows])
    close(np.stack([chain.module.draft_logits(chain.config, chain.weights, 0, row) for row in ours]), oracle[logits])


CHAINED = [chain for chain in CHAINS if chain[3][4]]


@pytest.mark.parametrize(("arch", "artifact", "sidecar", "names"), CHAINED, ids=[chain[0] for chain in CHAINED])
def test_chained_step(arch, artifact, sidecar, names):
    """The second step reads the first one's rows in the place of the trunk's, in a cache of its own."""
    _, chain = opened(arch, artifact, sidecar)
    oracle = arrays(arch)
    *_, rows, logits = names
    c, w, draft = chain.config, chain.weights, chain.new()
    ours = []
    for t, row in enumerate(oracle[rows][:-1]):
        row = chain._advance(draft, 0, row, oracle["tokens"][t + 2])
        ours.append(chain.module.draft_logits(c, w, 0, row))
    close(np.stack(ours), oracle[logits])


def test_dots3note_proposes_the_oracles_chain():
    model, chain = opened("dots3note")
    oracle = arrays("dots3note")
    base = int(oracle["chain_base"])
    draft = followed(model, chain, oracle["tokens"][:base])
    seen = []
    drafts = chain.propose(draft, oracle["tokens"][base], 3, lambda logits: seen.append(logits) or int(np.argmax(logits)))
    assert drafts == oracle["chain_drafts"].tolist()
    close(np.stack(seen), oracle["chain_logits"])


def followed(model, drafter, tokens):
    draft = drafter.new()
    for token, taps in zip(tokens, traced(model, tokens, drafter.taps), strict=True):
        drafter.extend(draft, token, taps)
    return draft


@pytest.mark.parametrize(("arch", "sidecar"), [("mimo2", None), ("step35", "mtp.gguf")])
def test_several_blocks(arch, sidecar):
    """Row t of block d reads token t + d + 1 and the row of block d − 1."""
    model, chain = opened(arch, sidecar=sidecar)
    oracle = arrays(arch)
    tokens, depth = oracle["tokens"], len(oracle["logits"])
    draft, seen, rows = chain.new(), [], [[] for _ in range(depth)]
    for token, taps in zip(tokens, traced(model, tokens, chain.taps), strict=True):
        for d, row in enumerate(chain.extend(draft, token, taps)):
            rows[d].append(row)
        seen.append(draft.hidden[0])
    close(np.stack(seen), oracle["trunk_hidden"])
    for d in range(depth):
        close(np.stack(rows[d])[: oracle["hidden"].shape[1]], oracle["hidden"][d])
        logits = [chain.module.draft_logits(chain.config, chain.weights, d, row) for row in rows[d]]
        close(np.stack(logits)[: oracle["logits"].shape[1]], oracle["logits"][d])


def test_inkling_proposes_the_oracles_drafts():
    model, chain = opened("inkling", sidecar="mtp.gguf")
    oracle = arrays("inkling")
    tokens = oracle["tokens"]
    draft = followed(model, chain, tokens[:-1])
    seen = []
    drafts = chain.propose(draft, tokens[-1], 3, lambda logits: seen.append(logits) or int(np.argmax(logits)))
    assert drafts == oracle["draft_ids"].tolist()
    close(np.stack(seen), oracle["draft_logits"])


def test_motif3_describes_a_block_that_it_does_not_use():
    model = _model(GOLDEN / "motif3" / "model.gguf", np.float32, ())
    with pytest.raises(drafting.ArtifactError, match="bound and not used: the published model is served without drafts"):
        drafting.attach(model)
    chain = drafting.Chain(model.family, model.config, model.weights, model.config.layers)
    oracle = arrays("motif3")
    draft, rows = chain.new(), []
    for token, taps in zip(oracle["tokens"], traced(model, oracle["tokens"], chain.taps), strict=True):
        rows += chain.extend(draft, token, taps)
    close(np.stack(rows), oracle["draft_hidden"])
    close(np.stack([model.family.draft_logits(chain.config, chain.weights, 0, row) for row in rows]), oracle["draft_logits"])


@pytest.mark.parametrize("committed", [6, 20, 47])
def test_deepseek4_dspark(committed):
    model, block = opened("deepseek4", sidecar="dspark.gguf")
    oracle = arrays("deepseek4", "dspark.npz")
    tokens = oracle["tokens"]
    steps = traced(model, tokens[:committed], block.taps)
    mains = np.stack([np.concatenate([step[name].mean(axis=0) for name in block.taps]) for step in steps])
    close(mains, oracle["main_hidden"][:committed])
    logits, confidence, drafts = proposed(block, followed(model, block, tokens[:committed]), tokens[committed])
    assert drafts == oracle[f"drafts_{committed}"].tolist()
    close(logits, oracle[f"logits_{committed}"])
    close(confidence, oracle[f"confidence_{committed}"])


@pytest.mark.parametrize("case", ["short", "medium"])
def test_naive_dspark(case):
    model, block = opened("naive_n05_flash", sidecar="draft.gguf")
    oracle = arrays("naive_n05_flash")
    *tokens, anchor = oracle[f"tokens_{case}"]
    draft = followed(model, block, tokens)
    close(block._rows(draft, int(anchor), block.longest), oracle[f"hidden_{case}"][1:])
    logits, confidence, drafts = proposed(block, draft, anchor)
    assert [anchor, *drafts] == oracle[f"draft_ids_{case}"].tolist()
    close(logits, oracle[f"draft_logits_{case}"])
    close(confidence, oracle[f"confidence_{case}"])


def proposed(block, draft, anchor):
    """(logits, confidence, drafts) of a greedy proposal."""
    logits = []
    drafts = block.propose(draft, anchor, block.longest, lambda row: logits.append(row) or int(np.argmax(row)))
    rows = block._rows(draft, int(anchor), block.longest)
    before = [int(anchor), *drafts]
    sure = [block.module.confidence(block.config, block.weights, row, t) for row, t in zip(rows, before, strict=False)]
    return np.stack(logits), np.array(sure), drafts


def test_mimo2_dflash():
    model, block = opened("mimo2", sidecar="dflash.gguf")
    oracle = arrays("mimo2", "dflash.npz")
    assert block.taps == tuple(f"h_{i}" for i in oracle["taps"])
    steps = traced(model, oracle["context_tokens"], block.taps)
    close(np.stack([np.concatenate([step[name] for name in block.taps]) for step in steps]), oracle["features"])
    draft, (anchor, *masks) = followed(model, block, oracle["context_tokens"]), oracle["block"]
    assert set(masks) == {block.config.mask}
    logits = []
    block.propose(draft, anchor, len(masks), lambda row: logits.append(row) or int(np.argmax(row)))
    close(np.stack(logits), oracle["logits"][1:])
