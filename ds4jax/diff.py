"""ds4jax beside ds4ref, block by block: which part of a model is the first whose output departs, and by how much.

The reference's residual stream after every layer is both input and expectation. *Isolated*, every block gets the
reference's input, so each is judged alone and the first that departs is the one at fault. *Chained*, every block gets what
the one before it made, as when the model runs; then errors accumulate, and what departs may only be where they became
visible. What a family carries from layer to layer beside the residual (a selection, angles, token ids) is JAX's own in
both, and so is the state, which thus follows from the inputs.

The tokens but the last go in chunks, as in prefill; the last goes alone, as in decoding, which has products of its own.
Layers of a kind share a program, so the number of compilations does not grow with depth.

Letters: L layers, T tokens, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ds4ref.weights import Weights

from .compilation import compile_options
from .layers import select_layer, signature
from .state import Chunk, Sequences

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.2}
"""Relative errors that blocks may have; rounding alone gives random models up to 5e-6 and 6e-2."""
CHAINED = 10
"""How many times as much may accumulate."""
RESOLUTION = 2.0**-10
"""The part of a row below which what a block adds to it drowns in the row's own float32 rounding."""


@dataclass(frozen=True)
class Observed:
    """What a package makes of a sequence of T tokens."""

    stream: np.ndarray
    """The residual [L + 1, T, …]: what enters the first layer, then what leaves each."""
    logits: np.ndarray
    """[T, V]"""


@dataclass(frozen=True)
class Block:
    """The verdict on one block: the embedding, a layer, the head."""

    name: str
    kind: str
    """Of a layer: a letter, the same for all that share a program, and what it is made of."""
    error: float
    """Largest absolute error."""
    relative: float
    """The largest of the tokens' errors, each over its own scale."""
    token: int
    """The token where that is."""
    beyond: int
    """Tokens whose relative error exceeds the tolerance; the block departs if there is any."""


def observe_reference(model, tokens, did=lambda: None):
    """Run a :class:`ds4ref.model.Model` over ``tokens``. did: called after every token."""
    state, streams, logits = model.new_state(), [], []
    names = ["embed", *(f"h_{i}" for i in range(model.config.layers))]
    for token in tokens:
        seen = {}
        row = model.step(state, token, lambda name, array, seen=seen: seen.__setitem__(name, np.array(array)))
        streams.append(np.stack([seen[name] for name in names]))
        logits.append(row)
        did()
    return Observed(np.stack(streams, axis=1), np.stack(logits))


def observe(model, tokens, reference, chained=False, did=lambda: None):
    """Run the blocks of a :class:`ds4jax.model.Model` over ``tokens``, one program after the other, in a bank of its own.

    reference: what the reference made of the same tokens; its residual enters every block unless ``chained``. Chunks are of
    ``model.chunk`` tokens. did: called after every block of every chunk.
    """
    bank, blocks = model.new_state(), _Blocks(model)
    state = [list(places) for places in model._arrays]
    seen = Observed(np.empty_like(reference.stream), np.empty_like(reference.logits))
    for at, part, size in chunks(tokens, model.chunk):
        rows = slice(at, at + len(part))

        def note(n, x, rows=rows, size=size):
            """Keep the residual of x as what left block n − 1; returns what enters block n."""
            residual, replace = _residual(x, reference.stream.shape[2:])
            seen.stream[n, rows] = np.asarray(residual, np.float32)[0, : rows.stop - rows.start]
            did()
            return x if chained else replace(_padded(reference.stream[n, rows], size))

        chunk = tuple(np.array([n], np.int32) for n in (at, len(part), bank.slot))
        x = note(0, blocks.start(tokens[:at], part, size, chunk))
        for i, (r, j, l) in enumerate(_places(model.plan)):
            x, state[r][j] = blocks.layer(r, j, l, state[r][j], x, chunk)
            x = note(i + 1, x)
        seen.logits[rows] = np.asarray(blocks.finish(x), np.float32)[0, : len(part)]
        did()
    bank.release()
    return seen


def chunks(tokens, size):
    """Cut ``tokens`` into (where, part, length of the chunk that it is padded to): the last token stands alone."""
    last = len(tokens) - 1
    size = max(1, min(size, last))
    for at in range(0, last, size):
        yield at, tokens[at : min(at + size, last)], size
    yield last, tokens[last:], 1


def judge(seen, reference, kinds, tolerance, chained=False):
    """The :class:`Block` of the embedding, every layer and the head, in order.

    A token's error is its largest absolute one. It is measured by the largest magnitude of what the block is there for: the
    embedding, the logits, what a layer adds to the residual. Chained, a layer's error is that of all before it too, and is
    measured by the residual.
    """
    before, after = reference.stream[:-1], reference.stream[1:]
    blocks = [_judged("embedding", "", seen.stream[0], reference.stream[0], _largest(reference.stream[0]), tolerance)]
    for i, kind in enumerate(kinds):
        whole = _largest(after[i])
        scale = whole if chained else np.maximum(_largest(after[i] - before[i]), RESOLUTION * whole)
        blocks.append(_judged(f"block {i}", kind, seen.stream[i + 1], after[i], scale, tolerance))
    return [*blocks, judge_logits("head", seen.logits, reference.logits, tolerance)]


def judge_logits(name, logits, expected, tolerance):
    """The :class:`Block` of logits [T, V]."""
    return _judged(name, "", logits, expected, _largest(expected), tolerance)


def _judged(name, kind, seen, expected, scale, tolerance):
    """Errors of ``seen`` [T, …] over ``scale`` [T]. What is not a number departs."""
    errors = _largest(seen - expected)
    relative = errors / np.maximum(scale, np.finfo(np.float32).tiny)
    token = int(np.argmax(relative))  # of a NaN, if there is one
    return Block(name, kind, float(np.max(errors)), float(relative[token]), token, int(np.sum(~(relative <= tolerance))))


def _largest(rows):
    """Largest magnitude of each row of [T, …]: [T]."""
    return np.max(np.abs(rows).reshape(len(rows), -1), axis=1)


def report(blocks, tokens, chained=False):
    """The table as text, and in a sentence what to look at. tokens: their number."""
    width = max(len(block.kind) for block in blocks)
    lines = [f"{'block':<10} {'kind':<{width}}  max error   relative  at token"]
    for b in blocks:
        verdict = "DEPARTS" if b.beyond else "OK"
        lines.append(f"{b.name:<10} {b.kind:<{width}}  {b.error:9.2e}  {b.relative:9.2e}  {b.token:8}  {verdict}")
    return "\n".join([*lines, _summary(blocks, tokens, chained)])


def _summary(blocks, tokens, chained):
    wrong = [block for block in blocks if block.beyond]
    if not wrong:
        return f"No block departs, over {tokens} tokens."
    first = wrong[0]
    alone = ", the one decoded alone" if first.token == tokens - 1 else ""
    text = f"{first.name} is the first that departs: by {first.error:.2e} ({first.relative:.2e} of its scale) at token "
    text += f"{first.token}{alone}; {first.beyond} of {tokens} tokens are beyond the tolerance."
    alike = [block for block in blocks if block.kind == first.kind]
    if first.kind and len(alike) > 1:
        text += f" Of the {len(alike)} blocks of its kind, {sum(block.beyond > 0 for block in alike)} depart."
    return text + (" Errors accumulate here: without --chained each block is judged alone." if chained else "")


def kinds(model):
    """Of each layer: the letter of its program and what it is made of, such as ``B: Ring k v, experts``."""
    letters, out = {}, []
    for i, (r, j, _) in enumerate(_places(model.plan)):
        key = _program_key(model, i, r, j)
        letter = letters.setdefault(key, _letter(len(letters)))
        by_kind = {}
        for name, kind in model.plan.layouts[r][j].items():
            by_kind.setdefault(type(kind).__name__, []).append(name)
        state = [" ".join([kind, *names]) for kind, names in by_kind.items()]
        feed_forward = "experts" if any("exps" in name for name in model._weights["layers"][r][j]) else "dense"
        out.append(f"{letter}: {', '.join([*state, feed_forward])}")
    return out


def _letter(n):
    return chr(ord("A") + n) if n < 26 else f"{_letter(n // 26 - 1)}{_letter(n % 26)}"


def _program_key(model, i, r, j):
    """What layer i, at place j of run r, has in common with those that share its program."""
    layout, held = model.plan.layouts[r][j], model._weights["layers"][r][j]
    shapes = tuple((leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(held))
    own = signature(model.config, {}, {}, model.plan.prefix, i)
    return own, tuple(sorted(layout.items())), jax.tree.structure(held), shapes


def _places(plan):
    """Of each layer, in order: number of its run, its place in the pattern, the repeat."""
    for r, run in enumerate(plan.runs):
        yield from ((r, j, l) for l in range(run.repeats) for j in range(run.period))


class _Blocks:
    """A model's blocks as programs of their own. chunk: the tokens before it, those in it, the bank; arrays of one entry."""

    def __init__(self, model):
        self._model, self._host = model, Weights(model.artifact, np.float32, cache_bytes=0)
        self._jit = partial(jax.jit, compiler_options=compile_options())
        self._start = self._jit(partial(_start, model.arithmetic, model.config, model.context))
        self._finish = self._jit(partial(model.arithmetic.finish, model.config))
        self._layers = {}
        self._keys = {(r, j): _program_key(model, i, r, j) for i, (r, j, _) in enumerate(_places(model.plan))}

    def start(self, before, part, size, chunk):
        """What enters the first layer, for the tokens ``part`` padded to ``size``."""
        prepare = getattr(self._model.arithmetic, "prepare", None)
        made = () if prepare is None else (_padded(prepare(self._model.config, self._host, before, part), size)[None],)
        return self._start(self._model._weights["top"], _padded(np.array(part, np.int32), size)[None], *chunk, *made)

    def layer(self, r, j, l, state, x, chunk):
        """Repeat l of the layer at place j of run r: (x, new state arrays)."""
        key, model = self._keys[r, j], self._model
        if key not in self._layers:
            i, layout = model.plan.runs[r].start + j, model.plan.layouts[r][j]
            run = partial(_layer, model.arithmetic, model.config, layout, model.context, i)
            self._layers[key] = self._jit(run)
        return self._layers[key](model._weights["layers"][r][j], state, l, x, *chunk)

    def finish(self, x):
        """Logits [1, size, V]."""
        return self._finish(self._model._weights["top"], x)


def _start(arithmetic, config, context, top, tokens, lengths, valid, banks, *prepared):
    return arithmetic.start(config, top, tokens, Chunk(lengths, valid, tokens.shape[1], context, banks), *prepared)


def _layer(arithmetic, config, layout, context, i, weights, state, l, x, lengths, valid, banks):
    size = jax.tree.leaves(x)[0].shape[1]
    sequences = Sequences(layout, state, Chunk(lengths, valid, size, context, banks), l)
    return arithmetic.layer(config, i, select_layer(weights, l), sequences, x), sequences.arrays


def _residual(x, shape):
    """The leaf [1, T, *shape] of what a family carries that is the residual, and a function that puts rows in its place."""
    leaves, tree = jax.tree.flatten(x)
    at = next(n for n, leaf in enumerate(leaves) if leaf.shape[2:] == shape and jnp.issubdtype(leaf.dtype, jnp.floating))

    def replace(rows):
        return tree.unflatten([*leaves[:at], jnp.asarray(rows[None], leaves[at].dtype), *leaves[at + 1 :]])

    return leaves[at], replace


def _padded(rows, size):
    """Rows [N, …] with the last repeated up to ``size``: padding must be finite, and is otherwise of no account."""
    return np.pad(rows, [(0, size - len(rows)), *[(0, 0)] * (rows.ndim - 1)], mode="edge")
