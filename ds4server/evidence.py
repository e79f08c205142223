"""The facts that a plan is resolved from: what files and the host tell before a model is opened, and the engine after.

Before: of the model file only its header (metadata and tensor directory) is read, and samples for its fingerprint; no
weights, no device. Everything that is found is a ``plan.Facts`` or a sentence in it.
"""

from dataclasses import dataclass, replace

from ds4ref import families
from ds4ref.conversation import Conversation
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.reuse import SLOTS, needs_checkpoints
from ds4ref.weights import CACHE_BYTES, check

from . import backend as backends
from . import capabilities, chunks, host, kvstore, pricing
from . import drafter as drafters
from .owner.fingerprint import Logical, fingerprint
from .plan import Facts, resolve
from .quote import Budgets

RESIDENT_BANKS = 2  # sequences kept for reuse where there is no bank lane: a conversation and whatever is asked beside it
DEVICE_CHUNK = 512  # rows of a forward pass on JAX where neither flag nor variable names them


@dataclass(frozen=True)
class Drafting:
    """What drafting takes. tensors: of a drafter's own file, where it is loaded; layouts: of the blocks in use; length: of the
    drafts, None where nobody drafts."""

    tensors: tuple = ()
    layouts: tuple = ()
    length: int | None = None

    @classmethod
    def of(cls, drafter, plan):
        effective = plan.effective
        if drafter is None or not effective["mtp_weights"]:
            return cls()
        tensors = () if drafter.artifact is None else tuple(drafter.artifact.tensors.values())
        return cls(tensors, drafter.layouts if effective["mtp_draft"] else (), effective["mtp_draft"])


@dataclass
class Found:
    """What is known before open. row and artifact are None where no GGUF of a known family was identified; failure then says
    why, one sentence. config: the family's; backend, drafter: None where there is none; drafts: what drafting takes."""

    facts: Facts
    row: capabilities.Row | None = None
    artifact: Artifact | None = None
    config: object = None
    backend: backends.Backend | None = None
    failure: str | None = None
    drafter: drafters.Drafter | None = None
    drafts: Drafting = Drafting()


def before_open(request, path, toy=False):
    """:class:`Found` for a request and the model file it leads to. BackendError where ``--backend`` cannot be had.

    toy: the file is the package's own.
    """
    try:
        artifact = Artifact.open(path)
        families.of(artifact)
    except ArtifactError as error:
        return _unidentified(str(error))
    key = capabilities.architectures()[artifact.architecture]
    backend = backends.choose(request.backend, artifact.architecture)
    row = capabilities.product(key, backend.name)
    config, problem = _config(artifact, request)
    told, because = {"artifact_ok": problem is None}, {"artifact_ok": problem}
    if request.backend == "auto" and backend.fell_back:
        because["platform"] = backend.reason
    told["artifact_qualified"] = not toy and _fingerprint(artifact) in capabilities.artifacts(key, backend.name)
    if toy:
        because["artifact_qualified"] = "no -m was given: serving the toy inside the package, which knows one book"
    drafter, named = drafters.look(request, row, artifact, None if problem else config)
    for fact, problem in (*named.items(), *_encoder(request, artifact), *_disk(request)):
        told[fact], because[fact] = problem is None, problem
    told["draft_longest"] = None if drafter is None else _longest(drafter, backend)
    if request.eos_policy != "model":
        told["has_eos"] = _has_eos(artifact)
    if config is not None:
        told["capacity"] = getattr(config, "context_cap", config.context)
        told["native_chunk"] = told["native_wanted"] = _native(request, row, backend)
    facts = Facts(
        **told, platform=backend.platform, ipc_pending=request.manifest is not None,
        because={fact: why for fact, why in because.items() if why is not None},
    )  # fmt: skip
    drafts = Drafting.of(drafter, resolve(request, row, facts))  # speculation does not depend on the memory
    if config is not None and request.ctx > 0:
        budgets = _budgets(request, row, artifact, config, backend, facts.native_chunk or 1, drafter, drafts)
        facts = replace(facts, budgets=budgets)
    return Found(facts, row, artifact, config, backend, drafter=drafter, drafts=drafts)


def _longest(drafter, backend):
    """Drafts of one trial at most: the drafter's bound, and on a device that of the programs that verify them."""
    if backend.name == "reference":
        return drafter.longest
    from ds4jax.model import TRIAL_SIZES

    return min(drafter.longest, TRIAL_SIZES[-1] - 1)


def _unidentified(failure):
    return Found(Facts(platform=backends.platform(), because={"family": failure}), failure=failure)


def _config(artifact, request):
    """(the family's config, None), or (the config or None, what is amiss)."""
    family = families.of(artifact)
    options = {"context": request.ctx} if "context" in family.OPTIONS and request.ctx > 0 else {}
    try:
        config = family.Config.from_metadata(artifact, **options)
    except ArtifactError as error:
        return None, str(error)
    problems = check(artifact, *family.tensors(config))
    return config, f"{artifact.path.name}: {problems[0]}" if problems else None


def _encoder(request, artifact):
    """("vision_path_ok", why it does not attach) where an image encoder is named. This version runs none, so a good file
    attaches no more than a bad one."""
    if request.vision is not None:
        try:
            Artifact.open(request.vision).close()
            yield "vision_path_ok", f"{request.vision}: image encoders of {artifact.architecture} are not run by this version"
        except ArtifactError as error:
            yield "vision_path_ok", str(error)


def _disk(request):
    """Whether the disk directory that is named can be used: ("disk_ready", why not or None)."""
    if request.disk_dir is not None:
        try:
            kvstore.check(request.disk_dir)
            yield "disk_ready", None
        except kvstore.StoreError as error:
            yield "disk_ready", str(error)


def _fingerprint(artifact):
    logical = Logical.of(artifact.shards)
    return fingerprint(logical.nbytes, logical.read)


def _has_eos(artifact):
    """Whether there is a token that ends an answer; None where the file's vocabulary or template cannot be used."""
    try:
        return bool(Conversation(artifact).end_ids)
    except ArtifactError:
        return None


def _native(request, row, backend):
    """Rows of one forward pass as they will be allocated. The reference computes one token at a time, so that for it a chunk is
    only a yield and nothing bounds it."""
    if backend.name == "reference":
        return None
    return max(1, min(chunks.requested_native(request, row) or row.native_prefill.default or DEVICE_CHUNK, max(1, request.ctx)))


def _budgets(request, row, artifact, config, backend, native, drafter, drafts):
    """The :class:`Budgets` of serving this artifact. The states that are resident for reuse count as the serial session's."""
    layout = families.of(artifact).layout(config)
    if backend.name == "reference":
        tensors = list(artifact.tensors.values())
        shared = pricing.weights([*tensors, *drafts.tensors])
        scratch = pricing.dequantized(tensors, CACHE_BYTES) + pricing.dequantized(drafts.tensors, CACHE_BYTES)
        idle = pricing.price(layout, request.ctx, vocabulary=config.vocabulary, grown=True)
        price = pricing.price(layout, request.ctx, vocabulary=config.vocabulary, grown=True, drafts=drafts.length)
        predictor = pricing.drafter(drafts.layouts, request.ctx)
    else:
        from ds4jax.platforms import defaults
        from ds4jax.weights import roomy

        tensors, (packing, dtype) = _on_device(artifact, config), defaults(backend.name)
        shared = pricing.packed([*tensors, *_drafters(artifact, drafter, drafts)], roomy(packing, tensors))
        scratch = 0
        itemsize = 2 if dtype == "bfloat16" and not request.quality else 4
        how = {"vocabulary": config.vocabulary, "itemsize": itemsize}
        idle = pricing.price_on_device(layout, request.ctx, **how)
        price = pricing.price_on_device(layout, request.ctx, **how, trial=1 + drafts.length if drafts.length else 0)
        predictor = sum(pricing.price_on_device(blocks, request.ctx, vocabulary=0, itemsize=itemsize).per_bank
                        for blocks in drafts.layouts)  # fmt: skip
    partial = request.reuse in ("partial", "auto") and row.reuse == "partial" and needs_checkpoints(layout)
    memory = host.memory(backend.name)
    several = row.banks == "persistent" or (request.named_width or 1) >= RESIDENT_BANKS
    spare = 0 if several and row.banks != "serial" else RESIDENT_BANKS - 1
    return Budgets(
        available=memory.available,
        shared_weights=shared,
        per_bank=price.per_bank,
        mtp_state=spare * predictor,
        mtp_per_bank=predictor,
        scratch=scratch + pricing.activations(tensors, native) + spare * idle.per_bank,
        checkpoint_pool=price.pool(SLOTS) if partial else 0,
        domain=memory.domain,
        host_available=memory.host_available,
        scratch_per_row=0 if backend.name == "reference" else pricing.activations(tensors, 1),
    )


def _on_device(artifact, config):
    """The tensors that ds4jax loads."""
    from ds4jax import families as device

    return list(device.tensors(artifact, config).values())


def _drafters(artifact, drafter, drafts):
    """The tensors that ds4jax loads for a drafter, none where there is no use of it."""
    from ds4jax import drafting
    from ds4jax import families as device

    if not (drafts.tensors or drafts.layouts) or (module := device.drafter(drafter.found.module)) is None:
        return []
    ends, blocks = drafting.tensors(module, drafter.found, drafter.artifact or artifact)
    return [tensor for held in (ends, *blocks) for tensor in held.values()]


def after_open(found, model, reuser, layout, serving=None, loaded=None):
    """The facts of ``found`` with what the opened engine tells: its memory, its chunk, its checkpoints. serving: banks that
    were to serve at once (default: all), of which a device may hold fewer. On a device the largest program is compiled for it.
    loaded: ``drafter.Loaded``, None where there is no drafter."""
    device = found.backend.name != "reference"
    fitted = 1 if found.row.banks == "serial" else min(serving or len(reuser.banks), len(reuser.banks))
    facts, budgets = found.facts, found.facts.budgets
    drafts = Drafting() if loaded is None else found.drafts
    if budgets is not None:
        memory = host.memory(found.backend.name)
        budgets = replace(budgets, available=memory.available, domain=memory.domain, host_available=memory.host_available)
        if not device:  # what is in an owner's memory is taken already
            held = [] if model.artifact is found.artifact else [found.artifact]
            held += [found.drafter.artifact] if loaded is not None and loaded.imported else []
            taken = sum(pricing.weights(artifact.tensors.values()) for artifact in held)
            budgets = replace(budgets, shared_weights=budgets.shared_weights - taken)
        if device:  # the layout may have been chosen by the memory there was
            tensors = [*_on_device(found.artifact, found.config), *_drafters(found.artifact, found.drafter, drafts)]
            budgets = replace(budgets, shared_weights=pricing.packed(tensors, model.weights_layout))
            budgets = replace(budgets.with_rows(facts.native_chunk, model.chunk), scratch_per_row=0)
        if device and (scratch := model.scratch()) is not None:
            idle = budgets.per_bank * (len(reuser.banks) - fitted)
            budgets = replace(budgets, scratch=scratch + idle)
    return replace(
        facts,
        ipc_pending=False,
        budgets=budgets,
        mapped_weights=budgets.shared_weights if device and budgets is not None else 0,
        banks_fitted=fitted if device else None,
        partial_reuse=reuser.pool.slots > 0 or not needs_checkpoints(model.layout),
        mtp_loaded=loaded is not None,
        capacity=min(found.facts.capacity, model.context_cap),
        native_chunk=model.chunk if device else None,
        layout=layout,
        decode_execution="grouped" if device else "ordered",
    )
