"""What a process takes of memory when a model is used to the full, beside what its plan quotes: JSON on stdout.

``python tests/ds4server/usage.py BACKEND FILE CONTEXT BANKS SLOTS [DRAFTS]``. The banks are filled to the context, in turn,
until SLOTS sequences have left a checkpoint; on the reference with a trial of so many DRAFTS at the end of each. Use is
measured twice: by item, as the bytes of the arrays that are alive and of the largest program's temporaries by XLA's own
account; and as the growth of the process while the model is loaded and while it is used: anonymous memory, of which the most is
taken, and resident pages of the model file where the backend computes with them. What compiling a program leaves behind is
between the two phases and counted in neither (``programs``); a model is loaded on JAX twice, as loading compiles many small
ones.
"""

import ctypes
import gc
import json
import re
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ds4ref import reuse
from ds4ref.model import Model
from ds4ref.speculative import Speculator
from ds4server import assembly, evidence, options
from ds4server.plan import resolve


def anonymous():
    """Bytes of anonymous memory of this process, after all that is free has been given back."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    return _anonymous()


def _anonymous():
    return 1024 * int(re.search(r"^RssAnon:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)[1])


def mapped(path):
    """Resident bytes of the maps of a file."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


@contextmanager
def growth(into, name):
    """Enter under ``name`` the most that anonymous memory grows by inside."""
    before, done, most = anonymous(), threading.Event(), 0

    def watch():
        nonlocal most
        while not done.wait(0.005):
            most = max(most, _anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        into[name] = max(most, _anonymous()) - before


def opened(backend, artifact, request, plan, count):
    """The model with ``count`` banks, as the server opens it."""
    if backend == "reference":
        return Model.from_artifact(artifact, context=request.ctx)
    import jax

    from ds4jax.model import Model as OnDevice
    from ds4jax.platforms import defaults

    layout, dtype = defaults(backend)
    chunk = plan.effective["native_chunk"]
    model = OnDevice(artifact, context=request.ctx, banks=count, dtype=dtype, layout=layout, chunk=chunk)
    jax.block_until_ready(model._weights)
    return model


def held(backend, model, states, pool, drafting):
    """Bytes of the arrays that are alive, by item, and of what the largest program takes beside them."""
    if backend == "reference":
        weights = sum(tensor.nbytes for tensor in model.artifact.tensors.values())
        arrays = [array for state in states for component in state._components.values() for array in own_arrays(component)]
        banks = sum(array.nbytes for array in arrays)
        scratch = sum(array.nbytes for array in model.weights._cache.values() if not lies_in_file(array))
    else:
        from ds4jax.weights import nbytes

        weights, banks, scratch = nbytes(model._weights), nbytes(model._arrays), model.scratch()
    banks += sum(state.logits.nbytes for state in states)
    items = {"shared_weights": weights, "banks": banks, "scratch": scratch, "checkpoint_pool": pool.nbytes}
    if drafting:
        items["banks"] += sum(mark.nbytes for going in drafting for mark in going.target._marks)
        blocks = [block for going in drafting for block in going.draft.blocks]
        items["mtp_state"] = sum(array.nbytes for block in blocks for name in block.layout for array in own_arrays(block[name]))
    return items


def lies_in_file(array):
    """Whether an array is a view of the mapped file and not memory of its own."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return not array.flags.owndata


def own_arrays(component):
    for value in vars(component).values():
        if isinstance(value, np.ndarray):
            yield value
        elif hasattr(value, "_data"):
            yield value._data


def use(model, states, pool, context, slots, rng, begin=None):
    """Fill the states to the context, in turn, with a checkpoint of each sequence: so many in all, and no state left out.
    begin: state → speculator. → the speculators of the last sequences."""
    going = {}
    for n in range(max(slots, len(states))):
        state = states[n % len(states)]
        state.truncate(0)
        tokens = rng.integers(0, model.vocabulary, context).tolist()
        if begin is None:
            model.prefill(state, tokens)
        else:
            going[n % len(states)] = speculator = begin(state)
            fill(speculator, tokens)
        pool.capture(state)
    return list(going.values())


def fill(speculator, tokens):
    """Let it consume all tokens, the last of them in a trial as wide as it makes."""
    *prompt, newest = tokens[: len(tokens) - speculator.width]
    trial = [newest, *tokens[len(prompt) + 1 :]]
    speculator.prefill(prompt)
    _, taps = speculator.target.verify(trial, speculator.drafter.taps)
    speculator.target.keep(len(trial))
    for token, seen in zip(trial, taps, strict=True):
        speculator.drafter.extend(speculator.draft, token, seen)


def main(backend, path, context, banks, slots, drafts=0):
    name = "cpu" if backend == "jax" else "reference"
    argv = ["-m", path, "--backend", "cpu" if backend == "jax" else "numpy", "--ctx", str(context), "--max-seqs", str(banks),
            "--prefix-reuse", "partial", "--mem-floor-gb", "0"]  # fmt: skip
    argv += ["--mtp-mode", "on", "--mtp-draft", str(drafts)] if drafts else ["--mtp-mode", "off"]
    request = options.read(argv, {})
    if backend == "jax":
        import jax.numpy as jnp

        from ds4jax.compilation import enable_cache
        from ds4jax.model import Model as OnDevice

        enable_cache()
        jnp.dot(jnp.ones((64, 64)), jnp.ones((64, 64))).block_until_ready()
        OnDevice.open(path, context=16)  # what its small programs leave behind; the model itself is let go
    np.dot(np.ones((512, 512), np.float32), np.ones((512, 512), np.float32))
    phases, rng = {}, np.random.default_rng(3)
    found = evidence.before_open(request, Path(path))
    plan = resolve(request, found.row, found.facts)
    with growth(phases, "load"):
        model = opened(name, found.artifact, request, plan, assembly.slots(plan))
        reuser = reuse.Reuser(model.new_state, context, assembly.slots(plan), reuse.Policy("partial"), slots=slots)
        states = [bank.state for bank in reuser.banks]
        loaded = found.drafter.load(request, model) if drafts else None
        time.sleep(0.01)
    before = anonymous()
    facts = evidence.after_open(found, model, reuser, None, plan.effective["max_seqs"], loaded)
    after = resolve(request, found.row, facts)
    if backend == "jax":  # every program once, before its use is measured
        use(model, states[:1], reuse.CheckpointPool(0), context, 1, rng)
        states[0].truncate(0)
    phases["programs"] = anonymous() - before
    with growth(phases, "use"):
        begin = None if loaded is None else lambda state: Speculator(loaded.target(model, state), loaded.drafter, drafts)
        drafting = use(model, states, reuser.pool, context, slots, rng, begin)
    items = held(name, model, states, reuser.pool, drafting)
    file = mapped(found.artifact.path.resolve()) if backend == "reference" else 0
    print(json.dumps({"before": plan.quote, "quote": after.quote, "items": items, "phases": phases, "file": file,
                      "errors": [issue.message for issue in after.errors]}))  # fmt: skip


if __name__ == "__main__":
    backend, path, *numbers = sys.argv[1:]
    main(backend, path, *map(int, numbers))
