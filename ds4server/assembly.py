"""From a plan to the parts that carry it out: the lanes, the schedule, the banks' memory and the disk store of one process.

Every option of the plan that the engine acts on is read here and nowhere else.
"""

from functools import cache
from math import prod

from ds4ref import snapshots
from ds4ref.chat import CallBegin, Prompt
from ds4ref.speculative import Cost, Stepwise

from . import banks, capabilities, host, identity, kvpolicy, pricing
from .drafts import Drafts
from .evidence import RESIDENT_BANKS
from .keeper import Keeper
from .kvstore import Form, Store
from .lanes import CONTINUOUS, LANES, SERIAL, STATIC, SWITCHES, Environment
from .scheduler import Schedule
from .toolmemory import ToolMemory


def slots(plan):
    """Sequences that are resident: those that serve at once, and where that is one, another that is kept for reuse."""
    return max(plan.effective["max_seqs"], RESIDENT_BANKS)


def environment(request, plan, row):
    """The :class:`lanes.Environment` of a plan."""
    effective = plan.effective
    return Environment(
        driver=effective["bank_driver"],
        width=effective["max_seqs"],
        off=request.width == "off",
        capacity=effective["ctx"],
        media_serial=row.media_serial,
        serial_speculation=row.spec_lane == "serial" and effective["mtp_mode"] != "off",
        serial_surfaces=frozenset(SWITCHES[name] for name in request.serial_surfaces),
    )


def schedule(plan):
    """The :class:`Schedule` of a plan."""
    return Schedule(plan.effective["sched_chunk"], plan.effective["sched_chunk_live"])


def drafts(request, plan, row, loaded):
    """The :class:`Drafts` of a plan, or None where nobody drafts. loaded: ``drafter.Loaded`` or None."""
    effective = plan.effective
    if effective["mtp_mode"] == "off":
        return None
    lanes = set({"serial": [SERIAL], "bank": [CONTINUOUS, STATIC], "both": LANES}[row.spec_lane])
    if loaded.role == "drafter" and not request.dspark_trials:
        lanes &= {SERIAL}
    forced, sampled = effective["mtp_mode"] == "on", row.sampled_speculation is not False
    length, margin = effective["mtp_draft"], request.mtp_margin
    cost = None if loaded.target is Stepwise else Cost()  # the reference computes token by token: drafts never pay there
    return Drafts(loaded.drafter, loaded.target, length, margin, forced, frozenset(lanes), sampled, cost)


def memory(plan, model, count, loaded=None):
    """The :class:`banks.Memory` of ``count`` sequences that grow, or None where the backend allocates them at the start."""
    effective = plan.effective
    if effective["backend"] != "reference":
        return None

    @cache
    def price(tokens):
        if not tokens:
            return 0
        price = pricing.price(model.layout, tokens, vocabulary=model.vocabulary, grown=True, drafts=effective["mtp_draft"])
        return price.per_bank + (pricing.drafter(loaded.drafter.layouts, tokens) if effective["mtp_draft"] else 0)

    def free():
        return host.memory(effective["backend"]).available

    return banks.Memory(price, free, count * price(effective["ctx"]), effective["mem_floor_gb"] << 30)


def engine_options(request, plan, row, model, count, loaded=None):
    """What :class:`engine.Engine` takes beside the model, its banks and the disk. count: banks; loaded: ``drafter.Loaded``."""
    return {
        "max_queue": request.max_queue,
        "max_bytes": request.max_queue_bytes,
        "max_age": request.max_queue_age,
        "env": environment(request, plan, row),
        "schedule": schedule(plan),
        "memory": memory(plan, model, count, loaded),
        "drafts": drafts(request, plan, row, loaded),
        "grouped": plan.effective["decode_execution"] == "grouped",
        "coalesce_ms": request.coalesce_wait_ms,
    }


# Tool calls


def tool_memory(request, store, conversation):
    """The :class:`ToolMemory` of a process. store: the disk store, or None."""

    def stored(ids):
        found = store.tool_blocks([name.encode() for name in ids])
        return {name.decode(): block.decode() for name, block in found.items()}

    def calls_in(text, tools):
        parser = conversation.chat.parser(Prompt(""), tools)
        return sum(isinstance(event, CallBegin) for event in [*parser.feed(text), *parser.finish("stop")])

    known = {} if store is None else {"stored": stored}
    return ToolMemory(request.tool_ids, request.exact_tool_replay, calls_in=calls_in, **known)


# The disk store


def keeper(request, plan, row, model, reuser, tokenizer, digest):
    """The :class:`Keeper` of a plan: with the store that it names, or with none, also where the plan is refused. StoreError.

    digest: of the process's identity (:mod:`identity`).
    """
    opts = policy(request, plan)
    store = None
    if plan.effective["disk"] and not plan.errors:
        form = Form(
            family=family_number(row.key), quant_bits=quant_bits(model.artifact), context=request.ctx, layout=model.layout,
            identity=snapshots.Identity.of(model),
        )  # fmt: skip
        store = Store.open(request.disk_dir, request.disk_mb << 20, form, opts, digest)
    return Keeper(store, reuser, text_of(tokenizer), opts, request.partial_min, request.disk_partial, request.bank_checkpoint)


def policy(request, plan):
    """The :class:`kvpolicy.Options` that a request asks for."""
    return kvpolicy.Options(
        min_tokens=request.disk_min, cold_max=request.disk_cold_max, continued_interval=request.disk_continued,
        trim=request.disk_trim, align=request.disk_align, persist_min=plan.effective["bank_persist_min_tokens"],
        reject_different_quant=request.disk_same_quant,
    )  # fmt: skip


def family_number(key):
    """A family as records name it: its place in the table, which only grows at the end."""
    return 1 + [family["key"] for family in capabilities.table()["families"]].index(key)


def quant_bits(artifact):
    """Bits of a weight of the routed experts, of all matrices where there are none; 1 to 32."""
    tensors = [tensor for tensor in artifact.tensors.values() if len(tensor.shape) >= 2]
    experts = [tensor for tensor in tensors if "_exps." in tensor.name] or tensors
    numbers = sum(prod(tensor.shape) for tensor in experts)
    return min(32, max(1, round(8 * sum(tensor.nbytes for tensor in experts) / max(1, numbers))))


def text_of(tokenizer):
    """A function from token ids to the bytes of their entries, specials included; ids that the vocabulary does not name have
    none."""
    names = tokenizer.vocab_size

    @cache
    def entry(token):
        return tokenizer.token_bytes(token) if token < names else b""

    return lambda tokens: b"".join(map(entry, tokens))


class Watch:
    """Whether what a process computes with (``evidence.Found``) stays the same while its model is opened: made before, asked
    after."""

    def __init__(self, found):
        drafter = found.drafter
        sidecar = {} if drafter is None or drafter.artifact is None else {drafter.role: drafter.artifact.shards}
        self._files = {"model": found.artifact.shards} | sidecar
        self._before = identity.take(self._files, {})

    def digest(self, settings):
        """(the digest of the identity with ``settings``, None), or (None, what has changed, one sentence). IdentityError."""
        changed = identity.changed(self._before, identity.take(self._files, {}))
        return (None, changed) if changed is not None else (identity.take(self._files, settings).digest, None)


SETTINGS = (
    "backend", "layout", "ctx", "max_seqs", "native_chunk", "sched_chunk", "sched_chunk_live", "bank_driver", "mtp_mode",
    "mtp_weights", "mtp_draft", "tensor_parallel", "pipeline_parallel",
)  # fmt: skip


def settings(plan, dtype):
    """What decides about a state beside the files, as JSON values. dtype: of the arithmetic."""
    return {name: plan.effective[name] for name in SETTINGS} | {"dtype": dtype}
