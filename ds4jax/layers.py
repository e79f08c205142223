"""Layers of a kind, stacked: which ones repeat, their weights and state as stacks, and the loop over them.

A program of N unrolled layers takes N times as long to trace and compile. So the layers are cut into runs of a repeating
pattern (K-EXAONE's LLLG twelve times is one run of period 4); a run's weights and state are stacked along a leading axis
and one loop goes over its repeats. Two layers are alike when their config entries, their tensors (names, shapes, types)
and their state components are.

A family's layer is a function ``layer(c, i, w, state, x) → x``: i is the number of a layer *of this kind* (static, for the
config), w its weights by their name without the block prefix, state its components without the layer's number, x whatever
the family carries from layer to layer (a pytree): the residual stream, or a tuple that begins with it.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from ds4ref.state import Recurrent

from .state import Sequences, allocate
from .weights import embed_rows, fit_beside, pack_beside, pack_stack, select_layer

LONGEST_PERIOD = 8
SAME_INPUT = [
    [f"{name}.weight" for name in names.split()]
    for names in (
        "attn_q attn_k attn_v attn_gate",
        "attn_q attn_k attn_v",
        "attn_qkv attn_gate",
        "attn_q_a attn_kv",
        "attn_compressor_kv attn_compressor_gate",
        "indexer_compressor_kv indexer_compressor_gate",
        "ffn_gate ffn_up",
        "ffn_gate_shexp ffn_up_shexp",
        "ffn_gate_exps ffn_up_exps",
    )
]
"""Matrices of a layer that meet the same input, and so are packed side by side where they can be (``weights.linears``)."""


def embed(weights, tokens):
    """Embedding rows of token ids of any shape: [V, D], int32 [...] → [..., D]."""
    return embed_rows(weights, tokens.reshape(-1)).reshape(*tokens.shape, -1)


def block_number(name):
    """Number i of the block of a tensor ``blk.{i}.…``; −1 for one at the model's ends."""
    head, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if head == "blk" else -1


@dataclass(frozen=True)
class Run:
    """Layers start … start + period · repeats − 1: a pattern of ``period`` layers, ``repeats`` times."""

    start: int
    period: int
    repeats: int

    def members(self, j):
        """Numbers of the layers at place j of the pattern."""
        return range(self.start + j, self.start + self.period * self.repeats, self.period)


def runs_of(signatures):
    """Cut a list of hashable layer signatures into runs, longest repetition first at every point."""
    runs, at = [], 0
    while at < len(signatures):
        best = Run(at, 1, 1)
        for period in range(1, min(LONGEST_PERIOD, len(signatures) - at) + 1):
            repeats = 1
            while signatures[at + repeats * period : at + (repeats + 1) * period] == signatures[at : at + period]:
                repeats += 1
            if repeats > 1 and period * repeats > best.period * best.repeats:
                best = Run(at, period, repeats)
        runs.append(best)
        at += best.period * best.repeats
    return runs


def signature(config, tensors, layout, prefix, i):
    """What makes layer i's program: config entries per layer, tensors, state components."""
    per_layer = tuple(
        value[i]
        for field in dataclasses.fields(config)
        if isinstance(value := getattr(config, field.name), tuple) and len(value) >= config.layers
    )
    held = tuple(sorted((name, str(t.type), t.shape) for name, t in layer_tensors(tensors, prefix, i).items()))
    return per_layer, held, tuple(sorted(layer_layout(layout, i).items(), key=lambda item: item[0]))


def layer_tensors(tensors, prefix, i):
    """Tensors of layer i by their name without the layer's prefix (``blk.{i}.``)."""
    prefix = prefix.format(i=i)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def layer_layout(layout, i):
    """Components of layer i by their name without the number."""
    return {name.split(".", 1)[1]: kind for name, kind in layout.items() if name.split(".", 1)[0] == str(i)}


@dataclass(frozen=True)
class Plan:
    """How a model's layers are run: static, the same for weights, state and program."""

    runs: tuple[Run, ...]
    layouts: tuple[tuple[dict, ...], ...]
    """Per run and place of its pattern: component name → kind."""
    prefix: str
    """How the names of a layer's tensors begin, with {i} for its number."""
    homes: dict
    """State components that the reference names without a layer's number → the layer that holds them."""

    @classmethod
    def of(cls, config, tensors, layout, prefix="blk.{i}.", homes=None):
        homes = homes or {}
        layout = {f"{homes[name]}.{name}" if name in homes else name: kind for name, kind in layout.items()}
        runs = runs_of([signature(config, tensors, layout, prefix, i) for i in range(config.layers)])
        layouts = tuple(tuple(layer_layout(layout, run.start + j) for j in range(run.period)) for run in runs)
        return cls(tuple(runs), layouts, prefix, homes)

    def component(self, i, name):
        """The reference's name of layer i's component ``name``."""
        return name if name in self.homes else f"{i}.{name}"

    def load(self, tensors, layout, operands, did=lambda tensor: None):
        """Weights of every run, stacked: [run][place][name] → [repeats, …]. Streams tensor by tensor.

        layout: see :mod:`ds4jax.weights`; operands: function of a stack's tensors; did: called for every tensor.
        """

        def place(run, j):
            loaded = {}
            for names in self._together(tensors, run.start + j, layout):
                members = [{name: tensors[self.prefix.format(i=i) + name] for name in names} for i in run.members(j)]
                own = [tensor for member in members for tensor in member.values()]
                if len(names) > 1:
                    loaded["+".join(names)] = pack_beside(members, layout, operands(own))
                else:
                    loaded[names[0]] = pack_stack(own, layout, operands(own))
                for tensor in own:
                    did(tensor)
            return loaded

        return [[place(run, j) for j in range(run.period)] for run in self.runs]

    def _together(self, tensors, i, layout):
        """Lists of the names of layer i's tensors: those that lie side by side, and the others each by itself."""
        held = layer_tensors(tensors, self.prefix, i)
        for names in SAME_INPUT:
            if all(name in held for name in names) and fit_beside([held[name] for name in names], layout):
                held = {name: tensor for name, tensor in held.items() if name not in names}
                yield names
        yield from ([name] for name in held)

    def allocate(self, banks, context, dtype=jnp.float32):
        """State of every run: [run][place][component] → arrays [repeats, banks, …]. Recurrent state is always float32."""

        def component(kind, repeats):
            return allocate(kind, repeats, banks, context, jnp.float32 if isinstance(kind, Recurrent) else dtype)

        return [
            [{name: component(kind, run.repeats) for name, kind in layout.items()} for layout in layouts]
            for run, layouts in zip(self.runs, self.layouts, strict=True)
        ]

    def apply(self, layer, config, weights, arrays, chunk, x, taps=(), trial=False):
        """Run every layer over ``x``. → (x, new state arrays, the residual after each of the layers ``taps``, what was tried).

        What was tried: [run][place] → ``Sequences.tried`` of the stack, a leading axis more; nothing but on trial.
        """
        after, seen, tried = [], {}, []
        for run, layouts, held, state in zip(self.runs, self.layouts, weights, arrays, strict=True):
            last = run.start + run.period * run.repeats - 1
            wanted = {i: divmod(i - run.start, run.period) for i in taps if run.start <= i < last}

            def repeat(carry, _, run=run, layouts=layouts, held=held, wanted=wanted):
                l, x, state, seen = carry
                new, tried, seen = [], [], dict(seen)
                for j, layout in enumerate(layouts):
                    sequences = Sequences(layout, state[j], chunk, l, trial)
                    x = layer(config, run.start + j, select_layer(held[j], l), sequences, x)
                    new.append(sequences.arrays)
                    tried.append(sequences.tried)
                    for i, (repeat, place) in wanted.items():
                        if place == j:
                            seen[i] = jnp.where(l == repeat, residual(x), seen[i])
                return (l + 1, x, new, seen), tried

            carry = (jnp.int32(0), x, state, {i: jnp.zeros_like(residual(x)) for i in wanted})
            if run.repeats == 1:
                (_, x, state, rows), kept = repeat((0, *carry[1:]), None)
                kept = jax.tree.map(lambda a: a[None], kept)
            else:
                (_, x, state, rows), kept = lax.scan(repeat, carry, length=run.repeats)
            after.append(state)
            tried.append(kept)
            seen |= rows | {last: residual(x)}
        return x, after, tuple(seen[i] for i in taps), tried


def residual(x):
    """The residual stream [B, T, …] of what a family carries from layer to layer: all of it, or the first of several."""
    return x[0] if isinstance(x, tuple) else x


def of_layers(plan):
    """Walk the state: (layer number, component name, kind, (run, place, layer of the stack)) of every component."""
    for r, (run, layouts) in enumerate(zip(plan.runs, plan.layouts, strict=True)):
        for j, layout in enumerate(layouts):
            for l, i in enumerate(run.members(j)):
                for name, kind in layout.items():
                    yield i, name, kind, (r, j, l)
