"""A model on the device: the verbs of :mod:`ds4ref.model` over banks that share one set of arrays.

Configs, tensor names and state layout are ds4ref's; a family module here only has the arithmetic (``trunk`` and ``head``).
One program advances any of its banks by a chunk; chunk sizes, numbers of banks and lengths of the past are rounded up to a
few steps, so the number of compilations is small and known. State is donated from call to call.

A :class:`Bank` is what ds4ref calls a state: it has tokens and logits, can be truncated, snapshot and restored, and its
snapshots are those of ds4ref, so they cross backends.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ds4ref import families as reference_families
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.state import Compressed, Recurrent, Ring, Rows, Snapshot, State
from ds4ref.weights import Weights, check

from . import families, primitives, trials
from .compilation import Programs, call
from .layers import Plan, of_layers
from .state import Chunk, from_snapshot, to_snapshot
from .trials import Seen, Trial
from .weights import pack, roomy

SIZES = (1, 16, 64, 256, 512, 1024, 4096)
TRIAL_SIZES = (1, 2, 3, 4, 6, 8, 16, 32)
LEAST_BUCKET = 256
DTYPES = ("float32", "bfloat16")


def rounded(n, steps, most):
    """The smallest of ``steps`` (rising) that is at least n, but no more than ``most``."""
    return min(most, next((step for step in steps if step >= n), most))


def sizes_used(steps, most):
    """How many of ``steps`` the numbers from 1 to ``most`` are rounded up to."""
    return len({rounded(n, steps, most) for n in range(1, most + 1)})


def buckets(least, most):
    """Lengths of the past that programs are made for: powers of four from ``least``, then ``most`` itself."""
    steps = [least]
    while steps[-1] < most:
        steps.append(min(most, 4 * steps[-1]))
    return tuple(steps)


class Model:
    """An artifact of a known family on the default device, with room for ``banks`` sequences of ``context`` tokens.

    Logits and snapshots are float32. With dtype "bfloat16" products round their operands to it (but a router's, which decide),
    rows of the state are kept in it, and everything else, the residual stream and the sums of products too, stays float32.
    """

    dtype = np.float32

    def __init__(
        self,
        artifact,
        *,
        context,
        banks=1,
        fewest=None,
        dtype="float32",
        layout="cpu",
        profile=None,
        chunk=512,
        sizes=SIZES,
        trial_sizes=TRIAL_SIZES,
        least_bucket=LEAST_BUCKET,
        did=lambda _: None,
        **options,
    ):
        """ArtifactError, one sentence, for a file that does not fit; ``options`` as in :class:`ds4ref.model.Model`.

        fewest: banks to be content with where the device has no memory for ``banks``; the attribute says how many there are.
        dtype: "float32" or "bfloat16"; layout: of the weights, see :mod:`ds4jax.weights`; "cpu" becomes "wide" on CPUs where
        that is faster and fits, and ``weights_layout`` says so. profile: of :mod:`ds4jax.primitives`, that of the device where
        None. chunk: tokens per call in prefill; sizes, trial_sizes and least_bucket: sizes of chunks and of trials and the
        shortest length of the past that programs are compiled for (fewer means fewer programs and more padding). did: called
        for every tensor loaded.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is unknown; {' or '.join(DTYPES)} is accepted")
        self.artifact, self.profile = artifact, profile or primitives.profile()
        self.family = reference_families.of(artifact)
        self.arithmetic = families.of(artifact)
        if "context" in self.family.OPTIONS:
            options["context"] = context
        self.config = self.family.Config.from_metadata(artifact, **options)
        if problems := check(artifact, *self.family.tensors(self.config)):
            raise ArtifactError(f"{artifact.path.name}: {problems[0]}")
        self.layout = self.family.layout(self.config)
        self.context, self.chunk = context, min(chunk, context)
        self._sizes, self._buckets = tuple(sorted(sizes)), buckets(min(least_bucket, context), context)
        self.trial_sizes = tuple(sorted(trial_sizes))
        tensors = families.tensors(artifact, self.config)
        prefix = getattr(self.arithmetic, "LAYER_PREFIX", "blk.{i}.")
        homes = getattr(self.arithmetic, "homes", lambda config: {})(self.config)
        self.plan = Plan.of(self.config, tensors, self.layout, prefix, homes)
        top = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix.split("{i}")[0])}
        layout = self.weights_layout = roomy(layout, tensors.values())
        self._weights = {
            "top": {name: pack(tensor, layout, _operands([tensor], dtype)) for name, tensor in top.items()},
            "layers": self.plan.load(tensors, layout, partial(_operands, dtype=dtype), did),
        }
        self.rows_in = jnp.dtype(dtype)
        allocate = partial(self.plan.allocate, context=context, dtype=self.rows_in)
        self.banks, held = _most(allocate, banks, banks if fewest is None else fewest)
        self._state, self._kept = held, []
        self.taps = ()
        self._free = list(range(self.banks))
        self._programs = Programs()
        self._host = Weights(artifact, np.float32, cache_bytes=0)

    @classmethod
    def open(cls, path, **kwargs):
        return cls(Artifact.open(path), **kwargs)

    @property
    def vocabulary(self):
        """Rows of the logits."""
        return self.config.vocabulary

    @property
    def context_cap(self):
        """Tokens that one sequence may have at most in this model."""
        return min(self.context, getattr(self.config, "context_cap", self.config.context))

    @property
    def compiled(self):
        """Programs compiled so far, but for those let go since."""
        return self._programs.compiled

    @property
    def most_programs(self):
        """Programs there can be: one per chunk size, length of the past, number of rows, and kind of logits; of trials one per
        size, length and number of rows, and one that keeps per size and number."""
        rows = {min(self.banks, 1 << (n - 1).bit_length()) for n in range(1, self.banks + 1)}
        trials = len(self.trial_sizes) * (len(self._buckets) + 1)
        return len(rows) * (2 * sizes_used(self._sizes, self.chunk) * len(self._buckets) + trials)

    def new_state(self):
        """An empty sequence in a free bank. ValueError when all are taken (``Bank.release`` gives one back)."""
        if not self._free:
            raise ValueError(f"all {self.banks} banks are taken")
        bank = Bank(self, self._free.pop())
        bank.clear()
        return bank

    def step(self, bank, token):
        """Consume one token id and return its logits [V]."""
        return self.decode([bank], [token])[0]

    def prefill(self, bank, tokens):
        """Consume ``tokens`` and return the logits [V] after the last (those already known when there are none)."""
        tokens = self._checked(tokens, bank)
        for at in range(0, len(tokens), self.chunk):
            part = tokens[at : at + self.chunk]
            bank.logits = self._advance([bank], [part], every=False)[0]
        if bank.logits is None:
            raise ValueError("prefill needs at least one token: this state has no logits yet")
        return bank.logits

    def verify(self, bank, tokens):
        """Consume ``tokens`` and return the logits after every one of them: [T, V]."""
        tokens, rows = self._checked(tokens, bank), []
        for at in range(0, len(tokens), self.chunk):
            part = tokens[at : at + self.chunk]
            rows.append(self._advance([bank], [part], every=True)[0][: len(part)])
            bank.logits = rows[-1][-1]
        return np.concatenate(rows)

    def decode(self, banks, tokens):
        """One token for each of several banks, in one program: logits [len(banks), V]."""
        logits = self._advance(banks, [[t] for t in self._checked(tokens)], every=False)
        for bank, row in zip(banks, logits, strict=True):
            bank.logits = row
        return logits

    def watch(self, layers):
        """From now on every call leaves the residual after these layers in its banks' ``seen``, in this order."""
        self.taps = tuple(layers)

    def verify_rows(self, banks, parts):
        """Consume each bank's part on trial, all in one program: list of logits [T_b, V].

        The banks stay where they are until :meth:`keep`, or any other call, says how many of the tokens they have; one that
        never does has had none.
        """
        parts = [self._checked(part, bank) for bank, part in zip(banks, parts, strict=True)]
        if not all(1 <= len(part) <= self.trial_sizes[-1] for part in parts):
            found = ", ".join(str(len(part)) for part in parts)
            raise ValueError(f"a trial has 1 to {self.trial_sizes[-1]} tokens for each bank, not {found}")
        logits, tried = self._call(banks, parts, every=True, trial=True)
        rows = [logits[row, : len(part)] for row, part in enumerate(parts)]
        for row, (bank, part) in enumerate(zip(banks, parts, strict=True)):
            bank.trial = Trial(part, rows[row], tried, row, len(logits))
        return rows

    def keep(self, banks, counts):
        """Consume for good the first ``counts[b]`` ≥ 1 tokens of each bank's trial. ValueError where it has none so long."""
        for bank, count in zip(banks, counts, strict=True):
            if bank.trial is None or not 1 <= count <= len(bank.trial.tokens):
                on_trial = 0 if bank.trial is None else len(bank.trial.tokens)
                raise ValueError(f"a bank with {on_trial} tokens on trial cannot keep {count}")
        for bank, count in zip(banks, counts, strict=True):
            trial = bank.trial
            if trials.holds(trial.tried):
                self._kept.append((trial, bank.slot, bank.length, count))
            bank._extend(trial.tokens[:count])
            bank.logits = trial.logits[count - 1]

    @property
    def _arrays(self):
        """The state, in which everything that was kept is written."""
        while self._kept:
            tried = self._kept[0][0].tried
            together = [kept for kept in self._kept if kept[0].tried is tried]
            self._kept = [kept for kept in self._kept if kept[0].tried is not tried]
            self._state = self._written(tried, together)
        return self._state

    @_arrays.setter
    def _arrays(self, arrays):
        self._state = arrays

    def _written(self, tried, together):
        """The state with what was kept of one program's trials."""
        rows = together[0][0].rows
        lengths, counts, slots = np.zeros(rows, np.int32), np.zeros(rows, np.int32), np.full(rows, self.banks, np.int32)
        for trial, slot, length, count in together:
            lengths[trial.row], counts[trial.row], slots[trial.row] = length, count, slot
        program = self._programs.jitted("keep", partial(_write, self.plan, self.profile), donated=0)
        return call(program, self._state, tried, lengths, counts, slots)

    def _checked(self, tokens, bank=None):
        """The tokens as a list of int; ValueError before anything is computed."""
        tokens = [int(token) for token in tokens]
        if bank is not None and bank.length + len(tokens) > self.context:
            raise ValueError(f"{bank.length + len(tokens)} tokens exceed the context of {self.context}")
        for token in tokens:
            if not 0 <= token < self.vocabulary:
                raise ValueError(f"token id {token} is outside the vocabulary of {self.vocabulary}")
        return tokens

    def _advance(self, banks, parts, every):
        """Advance each bank by its part, for good: logits as :func:`_run` has them, of these banks."""
        logits, _ = self._call(banks, parts, every)
        for bank, part in zip(banks, parts, strict=True):
            bank._extend(part)
        return logits[: len(banks)]

    def _call(self, banks, parts, every, trial=False):
        """Run each bank's part through the layers: (logits, what a trial left). Padding rows stand for idle banks; they change
        nothing."""
        longest = max(len(part) for part in parts)
        reach = max(bank.length + len(part) for bank, part in zip(banks, parts, strict=True))
        if reach > self.context:
            raise ValueError(f"{reach} tokens exceed the context of {self.context}")
        size = rounded(longest, self.trial_sizes, self.context) if trial else rounded(longest, self._sizes, self.chunk)
        bucket = rounded(reach, self._buckets, self.context)
        rows = min(self.banks, 1 << (len(banks) - 1).bit_length())
        tokens = np.zeros((rows, size), np.int32)
        valid, lengths, slots = (np.zeros(rows, np.int32) for _ in range(3))
        slots[:] = self.banks  # out of range: reads are clipped, writes dropped
        for row, (bank, part) in enumerate(zip(banks, parts, strict=True)):
            tokens[row, : len(part)] = part
            valid[row], lengths[row], slots[row] = len(part), bank.length, bank.slot
        program = self._program(bucket, every, trial)
        prepared = self._prepared(banks, parts, rows, size)
        called = call(program, self._weights, self._arrays, tokens, lengths, valid, slots, *prepared)
        logits, self._arrays, seen, tried = called
        for row, bank in enumerate(banks):
            bank.trial, bank.seen = None, Seen(seen, row)
        return np.asarray(logits), tried

    def scratch(self):
        """Bytes that the largest program takes beside weights and state: a whole chunk at the end of a full context, which is
        compiled for it. State whose donation XLA does not use counts too. None where the platform does not tell."""
        size, none = rounded(self.chunk, self._sizes, self.chunk), np.zeros(1, np.int32)
        prepared = self._prepared([Bank(self, 0)], [[0] * size], 1, size)
        arguments = np.zeros((1, size), np.int32), none, none, none, *prepared
        program = self._program(self._buckets[-1], False).lower(self._weights, self._arrays, *arguments).compile()
        found = program.memory_analysis()
        if found is None:
            return None
        return found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes

    def _prepared(self, banks, parts, rows, size):
        """What the family computes on the host for the tokens of this call: nothing, or one array [rows, size, …]."""
        prepare = getattr(self.arithmetic, "prepare", None)
        if prepare is None:
            return ()
        made = [prepare(self.config, self._host, bank.tokens, part) for bank, part in zip(banks, parts, strict=True)]
        out = np.zeros((rows, size, *made[0].shape[1:]), np.float32)
        for row, values in enumerate(made):
            out[row, : len(values)] = values
        return (out,)

    def _program(self, bucket, every, trial=False):
        run = partial(_run, self.arithmetic, self.config, self.plan, self.profile, bucket, every, self.taps, trial)
        return self._programs.jitted((bucket, every, trial, self.taps), run, donated=1)


def _most(allocate, banks, fewest):
    """(how many, their arrays): as many of ``banks`` as the device has memory for, at least ``fewest``."""
    for count in range(banks, fewest - 1, -1):
        try:
            return count, jax.block_until_ready(allocate(count))
        except jax.errors.JaxRuntimeError as error:
            if count == fewest or "RESOURCE_EXHAUSTED" not in str(error):
                raise
    raise ValueError(f"a model needs at least one bank and no more in fewest than in banks, got {banks} and {fewest}")


def _operands(tensors, dtype):
    """What products with these tensors (a stack of one name) multiply. Routers choose, so they stay in float32."""
    return "float32" if tensors[0].name.endswith("ffn_gate_inp.weight") else dtype


def _run(arithmetic, config, plan, profile, bucket, every, taps, trial, weights, arrays, tokens, lengths, valid, banks, *given):
    """The traced program: embeddings, layers, head.

    → (logits [B, V] of the last real token, or [B, T, V]; state; residuals [B, T, …] after the layers ``taps``; what was
    tried). profile: of :mod:`ds4jax.primitives`; whichever thread traces. given: what :meth:`Model._prepared` gives.
    """
    with primitives.using(profile):
        chunk = Chunk(lengths, valid, tokens.shape[1], bucket, banks)
        x = arithmetic.start(config, weights["top"], tokens, chunk, *given)
        x, arrays, seen, tried = plan.apply(arithmetic.layer, config, weights["layers"], arrays, chunk, x, taps, trial)
        if not every:
            last = jnp.maximum(valid - 1, 0)
            x = jax.tree.map(lambda a: jnp.take_along_axis(a, last.reshape(-1, *(1,) * (a.ndim - 1)), axis=1), x)
        logits = arithmetic.finish(config, weights["top"], x)
        return (logits if every else logits[:, 0]), arrays, seen, tried


def _write(plan, profile, *kept):
    """The traced program of what was kept, :func:`ds4jax.trials.write`."""
    with primitives.using(profile):
        return trials.write(plan, *kept)


@dataclass
class Bank:
    """One sequence in a slot of a :class:`Model`: what :class:`ds4ref.state.State` is to the reference."""

    model: Model
    slot: int
    tokens: list[int] = field(default_factory=list)
    logits: np.ndarray | None = None
    seen: Seen | None = None
    """What the model watches, at the tokens of the last call."""
    trial: Trial | None = None

    @property
    def layout(self):
        """State components: name → kind."""
        return self.model.layout

    @property
    def length(self):
        """Tokens consumed."""
        return len(self.tokens)

    def clear(self):
        """Forget everything."""
        self._start = {}
        self.tokens, self.logits, self.trial = [], None, None
        self.model._arrays = _cleared(self.model._arrays, self.slot)

    def release(self):
        """Give the slot back; this object must not be used afterwards."""
        self.model._free.append(self.slot)

    def _extend(self, tokens):
        self.tokens += tokens
        self.trial = None
        for name, kind in self.model.layout.items():
            held = _held(kind)
            if held is not None:
                self._start[name] = max(self._start.get(name, 0), self.length - held)

    def can_truncate(self, n):
        """Whether the sequence can be cut back to its first n tokens without recomputing anything."""
        if not 0 <= n <= self.length:
            return False
        return n in (0, self.length) or all(
            not isinstance(kind, Recurrent) and self._start.get(name, 0) <= _needed(kind, n)
            for name, kind in self.model.layout.items()
        )

    def truncate(self, n):
        """Cut back to the first n tokens. ValueError, and no change, where a component no longer holds what n needs."""
        if not self.can_truncate(n):
            raise ValueError(f"cannot truncate {self.length} tokens to {n}: a component no longer holds what that needs")
        if n == 0:
            self.clear()
        elif n < self.length:
            del self.tokens[n:]
            self.logits = self.trial = None

    def snapshot(self):
        """This moment as :class:`ds4ref.state.Snapshot`: NumPy arrays that any backend can restore."""
        return self._taken(lambda kind, key: True)

    def checkpoint(self):
        """A snapshot without what every longer sequence still holds; see :meth:`ds4ref.state.State.checkpoint`."""
        return self._taken(_passes)

    def _taken(self, wanted):
        """A snapshot of the arrays that ``wanted(kind, array name)`` names. Only these leave the device."""
        model, components = self.model, {}
        for i, name, kind, (r, j, l) in of_layers(model.plan):
            held = {key: a for key, a in model._arrays[r][j][name].items() if wanted(kind, key)}
            entry = {key: _entry(array, l, self.slot) for key, array in held.items()}
            full = model.plan.component(i, name)
            components[full] = self._trimmed(full, kind, to_snapshot({name: kind}, {name: entry}, 0, self.length)[name])
        logits = None if self.logits is None else np.array(self.logits)
        return Snapshot(np.array(self.tokens, np.int64), _float32(components), logits)

    def _trimmed(self, name, kind, arrays):
        """Drop ring rows that a truncation has left behind."""
        if (held := _held(kind)) is None:
            return arrays
        key, _ = _newest(kind)
        count = min(self.length, held, self.length - self._start.get(name, 0))
        return arrays | {key: arrays[key][len(arrays[key]) - count :]}

    def resume(self, checkpoint, source):
        """Become ``checkpoint`` with what it left out copied on the device from ``source``: a bank of the same model, this one
        too, whose tokens begin with the checkpoint's. ValueError, and no change, when they do not or an array does not fit."""
        n, model = len(checkpoint.tokens), self.model
        if source.tokens[:n] != checkpoint.tokens.tolist():
            raise ValueError(f"the source's tokens do not begin with the {n} of the checkpoint")
        state = _float32(checkpoint.components)
        if state.keys() != self.layout.keys():
            raise ValueError(f"checkpoint and layout differ in component {min(state.keys() ^ self.layout.keys())!r}")
        for name, kind in self.layout.items():
            _check_checkpoint(name, kind, state[name], n)
        if source.slot != self.slot:
            model._arrays = _copied(model._arrays, source.slot, self.slot)
        self._put(checkpoint, state)

    def _put(self, snapshot, state):
        """Write ``state``, float32 arrays that fit, into the device's and take over the rest of ``snapshot``."""
        length, model = len(snapshot.tokens), self.model
        for i, name, kind, (r, j, l) in of_layers(model.plan):
            held = state[model.plan.component(i, name)]
            place = model._arrays[r][j][name]
            for key, value in from_snapshot({name: kind}, {name: held}, length, model.context, model.rows_in)[name].items():
                if key in held:
                    place[key] = _written(place[key], value, l, self.slot)
        self.tokens, self.trial = snapshot.tokens.tolist(), None
        self.logits = None if snapshot.logits is None else snapshot.logits.astype(np.float32)
        self._start = {}
        for name, kind in self.layout.items():
            if _held(kind) is not None:
                self._start[name] = length - len(state[name][_newest(kind)[0]])

    def restore(self, snapshot):
        """Become ``snapshot``. ValueError, and no change, when it does not belong to this layout."""
        state = _float32(snapshot.components)
        State(self.layout, np.float32).restore(Snapshot(snapshot.tokens, state))  # ds4ref checks it against the layout
        if len(snapshot.tokens) > self.model.context:
            raise ValueError(f"a snapshot of {len(snapshot.tokens)} tokens exceeds the context of {self.model.context}")
        self._put(snapshot, state)


def _float32(components):
    return {name: {key: np.asarray(a, np.float32) for key, a in arrays.items()} for name, arrays in components.items()}


def _passes(kind, key):
    """Whether a longer sequence no longer holds this array of a component, so that a checkpoint keeps it."""
    return not isinstance(kind, Rows) and key != "blocks"


def _check_checkpoint(name, kind, arrays, n):
    """ValueError unless ``arrays`` are those of a checkpoint of n tokens."""
    found = {key: array.shape for key, array in arrays.items()}
    if isinstance(kind, Rows):
        accepted, fits = "none", not found
    elif isinstance(kind, Recurrent):
        accepted = {"value": kind.shape}
        fits = found == accepted
    else:
        key, shape = _newest(kind)
        least, most = n - _needed(kind, n), min(n, _held(kind))
        accepted = f"{key!r}, {least} to {most} rows of {shape}"
        fits = found.keys() == {key} and found[key][1:] == shape and least <= found[key][0] <= most
    if not fits:
        raise ValueError(f"component {name!r} of a checkpoint of {n} tokens has arrays {found}; accepted: {accepted}")


def _newest(kind):
    """(name, row shape) of the array that holds the newest token rows of a ``Ring`` or a ``Compressed``."""
    return ("pending", kind.pending) if isinstance(kind, Compressed) else ("rows", kind.shape)


def _held(kind):
    """How many of the newest token rows a component holds, or None where that is not what limits it."""
    return kind.window if isinstance(kind, Ring) else kind.span if isinstance(kind, Compressed) else None


def _needed(kind, n):
    """The oldest token row that a component of a sequence of n tokens still needs (see ds4ref.state)."""
    if isinstance(kind, Ring):
        return max(0, n - kind.window + 1)
    if isinstance(kind, Compressed):
        return max(0, n // kind.ratio * kind.ratio - (kind.span - kind.ratio))
    return n


@jax.jit
def _entry(stack, layer, slot):
    """What a stack [R, B, …] holds of one layer and bank: [1, …]."""
    return lax.dynamic_slice(stack, (layer, slot, *(0,) * (stack.ndim - 2)), (1, 1, *stack.shape[2:]))[0]


@partial(jax.jit, donate_argnums=0)
def _written(stack, value, layer, slot):
    """A stack [R, B, …] with ``value`` […] as that of one layer and bank."""
    return lax.dynamic_update_slice(stack, value[None, None], (layer, slot, *(0,) * value.ndim))


@partial(jax.jit, donate_argnums=0)
def _copied(arrays, source, target):
    """The state with what bank ``source`` holds in bank ``target`` too."""

    def copy(stack):
        return lax.dynamic_update_index_in_dim(stack, lax.dynamic_slice_in_dim(stack, source, 1, 1), target, 1)

    return jax.tree.map(copy, arrays)


@partial(jax.jit, donate_argnums=0)
def _cleared(arrays, slot):
    """Recurrent state starts from zero; every other row is hidden by its position until it is overwritten."""

    def clear(path, array):
        if path[-1].key != "value":
            return array
        return lax.dynamic_update_index_in_dim(array, jnp.zeros_like(array[:, :1]), slot, 1)

    return jax.tree_util.tree_map_with_path(clear, arrays)
