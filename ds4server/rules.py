"""The steps of the plan, one function each, in the contract's order: a decision returned, what is amiss appended to ``issues``.

Arguments throughout: request (``options.Request``), row (``capabilities.Row``), facts (``plan.Facts``), backend (the one in
effect), issues (``error``, ``warn`` and ``note``). Pure.
"""

from dataclasses import dataclass, replace

from . import chunks
from . import quote as quotes
from .capabilities import LEVELS, NONE, QUALIFIED, UNVERIFIED
from .capabilities import host as takes

MANIFEST = "DS4_CUDA_WEIGHT_IPC_MANIFEST"
SIDECARS = ("sidecar", "deepseek")


def environment(request, row, facts, issues):
    family = chunks.family_variable(request, row)[1] if row is not None else None
    for message in (*request.ignored, *([family] if family else [])):
        issues.warn("env_ignored", message)


def backend(request, facts, issues):
    asked = request.requested_backend
    if asked in ("cuda", "metal") and asked != facts.platform:
        issues.warn("backend_absent", f"--backend {asked} is not visible here; auto would take {facts.platform}")
    elif asked == "auto" and "platform" in facts.because:
        issues.warn("backend_absent", f"--backend auto took {facts.platform}: {facts.because['platform']}")


def artifact(row, facts, issues):
    """The row as far as it holds for this artifact."""
    if facts.artifact_qualified is not False:
        return row
    why = "this artifact has no workload qualification: what is known of the family was measured on other artifacts"
    issues.warn("artifact_unqualified", facts.why("artifact_qualified", why))
    unknown = dict.fromkeys(("qualified_ctx", "qualified_prompt", "qualified_banks", "qualified_native_chunk"))
    return replace(row, **unknown, measured=(), bank_support=capped(row.bank_support, facts))


def capped(level, facts):
    """A level of the banks as far as this artifact has it: at most unverified without a workload qualification."""
    return min(level, UNVERIFIED, key=LEVELS.index) if facts.artifact_qualified is False else level


def streaming(request, issues):
    if request.ssd_options and not request.ssd_streaming:
        issues.error("ssd_options", "an option of --ssd-streaming was given without it; drop the option")
    if request.ssd_streaming:
        issues.error("ssd_unsupported", "--ssd-streaming is not implemented: weights stay in memory or in the mapped file")


def width(request, row, facts, backend, issues):
    """Banks before the quote, at least 1."""
    named = request.named_width
    if request.width == "off":
        return 1
    if not takes(backend, row.bank_hosts):
        if named is not None and named > 1:
            hosts = ", ".join(row.bank_hosts) or "no backend"
            issues.error("banks_cuda", f"--max-seqs {named} needs a backend with banks ({hosts}), and this one is {backend}")
        return 1
    if row.banks == "serial":
        if named is not None and named > 1:
            issues.error(
                "banks_unsupported", f"--max-seqs {named}: {row.reported} is served one request at a time; 1 is accepted"
            )
        return 1
    wanted = _wanted(row, facts) if named is None else named
    fitted = wanted if facts.banks_fitted is None else max(1, facts.banks_fitted)
    if facts.cont_lane is False and facts.banks_fitted is None:
        fitted = 1
    if named is not None and fitted < named:
        issues.error("banks_not_fitted", f"--max-seqs {named} was asked for and {fitted} could be allocated")
    n = min(fitted, wanted)
    if row.qualified_banks is not None and n > row.qualified_banks:
        issues.warn("banks_unqualified", f"{n} banks are more than the {row.qualified_banks} that were verified")
    return n


def _wanted(row, facts):
    """Banks that ``auto`` asks for."""
    media_quoted = facts.budgets is not None and not facts.ipc_pending and facts.budgets.media_reserve > 0
    if row.banks == "opt_in" or (row.media_serial and not media_quoted):
        return 1
    return 2 if row.qualified_banks is None else row.qualified_banks


def native(request, row, facts, backend, width, issues):
    """The facts with the largest native chunk, halved from what it would be, that leaves memory for a named width; as they are
    where none does or the family halves none."""
    named = request.named_width
    if not row.native_halves or named is None:
        return facts
    found = facts
    while not _fits(request, row, found, backend, width):
        rows = found.native_chunk
        if rows is None or rows < 2 or not found.budgets.scratch_per_row:
            found = facts
            break
        found = replace(found, native_chunk=rows // 2, budgets=found.budgets.with_rows(rows, rows // 2))
    rows, wanted = found.native_chunk, facts.native_wanted
    if rows is not None and wanted is not None and rows < wanted:
        issues.warn("native_chunk", f"one forward pass takes {rows} rows instead of {wanted}, so that --max-seqs {named} fits")
    return found


def _fits(request, row, facts, backend, width):
    """Whether the memory, as far as it is known, holds so many banks."""
    found = _priced(request, row, facts, backend, width)
    return found is None or (found.fits and found.banks == width)


def quote(request, row, facts, backend, wanted, issues):
    """(the plan's quote or None, the banks it hosts)."""
    found, named = _priced(request, row, facts, backend, wanted), request.named_width
    if found is None:
        return None, wanted
    if not found.fits:
        parts = ", ".join(f"{name} {_size(n)}" for name, n in found.largest())
        room = f"{_size(found.total)} for one bank, {_size(found.parts['available'])} available"
        issues.error("quote_overflow", f"the model does not fit: {room}; the largest parts are {parts}")
    elif named is not None and found.banks < wanted:
        issues.error("banks_not_quoted", f"--max-seqs {named} was asked for and the memory holds {found.banks}")
    return found.parts, found.banks


def _priced(request, row, facts, backend, wanted):
    """The quote of the most banks up to ``wanted`` that fit, None where the memory or the weights' owner is not known."""
    budgets = facts.budgets
    if budgets is None or budgets.available is None or facts.ipc_pending:
        return None
    if facts.mapped_weights is not None:
        allocated = None if facts.cont_lane is False else facts.banks_fitted
        budgets = quotes.credited(budgets, facts.mapped_weights, allocated)

    def floor(banks):
        planned = row.fit_reserve and _allocates_banks(request, row, facts, backend, banks)
        reserve = quotes.headroom(request.reserves, request.floor_gb, cuda=backend == "cuda", batch_planned=planned)
        return min(quotes.LARGEST, max(request.floor_gb * quotes.GIB, reserve))

    return quotes.widest(budgets, wanted, floor, min(quotes.LARGEST, request.floor_gb * quotes.GIB))


def _size(n):
    return f"{n / quotes.GIB:.2f} GiB" if n >= quotes.GIB else f"{n / quotes.MIB:.1f} MiB"


def _allocates_banks(request, row, facts, backend, width):
    """Whether banks are allocated beside the serial session at all."""
    if request.width == "off" or facts.cont_lane is False or row.banks == "serial" or not takes(backend, row.bank_hosts):
        return False
    return row.banks == "persistent" or width >= 2 or (row.single_bank_driver and request.named_width == 1)


def driver(request, row, facts, backend, width):
    """Whether the bank driver is present."""
    return not request.serial_lane and _allocates_banks(request, row, facts, backend, width)


def reuse(request, row, facts, driver, issues):
    """off, exact or partial."""
    asked, best = request.reuse, row.reuse
    off = "off" if best == "none" else best
    if asked == "off":
        return "off"
    if asked == "exact":
        if best == "none":
            issues.error("reuse_unsupported", f"--prefix-reuse exact: {row.reported} reuses no prefix; off or auto is accepted")
            return "off"
        return "exact"
    if best != "partial":
        if asked == "partial":
            issues.error("partial_unsupported", f"--prefix-reuse partial: the best that {row.reported} has is {off}")
        return off
    forced = asked == "partial"
    if not forced and row.reuse_support != QUALIFIED:
        issues.warn("partial_unqualified", f"partial reuse of {row.reported} is implemented and not qualified; exact is used")
        return "exact"
    if not driver and row.reuse_lane == "bank":
        issues.note(forced, "partial_lane", "partial reuse runs in the bank lane, and this plan has none; exact is used")
        return "exact"
    if facts.partial_reuse is False:
        issues.note(forced, "partial_runtime", "the opened engine keeps no checkpoints for partial reuse; exact is used")
        return "exact"
    return "partial"


def reuse_level(row, reuse):
    """The level of the reuse in effect."""
    if reuse == "off":
        return NONE
    if reuse == "exact" and row.exact_support is not None:
        return row.exact_support
    return row.reuse_support


@dataclass(frozen=True)
class Speculation:
    mode: str = "off"
    weights: bool = False
    draft: int | None = None


OFF = Speculation()


def speculation(request, row, facts, backend, driver, issues):
    """Mode and weights, without the draft length."""
    on, path, kind = request.mtp_mode == "on", request.mtp is not None, row.mtp
    broken = path and facts.mtp_path_ok is False

    def refuse(code, message, forced=on):
        if forced:
            issues.error(code, message)
        return OFF

    if request.batched:
        return refuse("mtp_lane", "--mtp-mode on and --batched-session exclude each other: it decodes ordinarily")
    if not takes(backend, row.mtp_hosts) and not broken:
        hosts = ", ".join(row.mtp_hosts) or "none"
        return refuse("mtp_cuda", f"--mtp-mode on needs a backend with speculation ({hosts}), and this one is {backend}")
    if path and row.takes_sidecar is False:
        return refuse("mtp_contract", f"--mtp {request.mtp}: {row.reported} takes no sidecar; drop --mtp", forced=True)
    if broken:
        why = facts.why("mtp_path_ok", "it is missing, no GGUF, or does not belong to the model")
        return refuse("mtp_sidecar", f"--mtp {request.mtp} cannot be attached: {why}", forced=True)
    if kind == "external" and on and facts.dspark_ok is not True:
        return refuse("mtp_sidecar", f"--mtp-mode on: {row.reported} drafts with DS4_DSPARK_MODEL, which names no drafter that "
                      "attaches")  # fmt: skip
    if row.spec_lane == "bank" and not driver:
        return refuse("mtp_lane", f"--mtp-mode on: {row.reported} speculates in the bank lane, and this plan has none")
    if row.spec_lane == "serial" and driver:
        return refuse("mtp_lane", f"--mtp-mode on: {row.reported} speculates in the serial lane, and this plan has banks")
    if on and kind == "bound_only":
        return refuse("mtp_unexecuted", f"--mtp-mode on: the predictor of {row.reported} is loaded and never executed")
    if kind in ("none", "bound_only") or row.mtp_support == NONE:
        return refuse("mtp_unsupported", f"--mtp-mode on: there is no predictor for {row.reported}; off or auto is accepted")
    if kind == "embedded" and facts.mtp_loaded is False:
        why = facts.why("mtp_loaded", "this artifact holds no predictor")
        return refuse("mtp_unsupported", f"--mtp-mode on: {why}; off or auto is accepted")
    loaded = path or facts.mtp_loaded is True or (kind == "deepseek" and facts.dspark_ok is True)
    if on and kind in SIDECARS and not loaded:
        return refuse("mtp_sidecar", f"--mtp-mode on: {row.reported} drafts with a sidecar; name it with --mtp")
    good = row.mtp_support == QUALIFIED
    if kind == "embedded":
        weights = request.mtp_mode != "off" and (path or on or good)
    else:
        weights = loaded if kind in SIDECARS else facts.dspark_ok is True
    mode = "on" if on and weights else "auto" if request.mtp_mode == "auto" and weights and good else "off"
    if mode == "on" and row.mtp_support == UNVERIFIED:
        issues.warn("mtp_unverified", f"--mtp-mode on: drafting of {row.reported} is implemented and not qualified")
    return Speculation(mode, weights)


def draft(request, row, facts, spec, issues):
    """``spec`` with its draft length, or off where that is out of bounds: the family's, and those of the drafter there is."""
    if spec.mode == "off":
        return spec
    least, most = row.spec_draft_min, min((n for n in (row.spec_draft_max, facts.draft_longest) if n is not None), default=None)
    length = least if request.mtp_draft is None else request.mtp_draft
    accepted = f"{least} to {most}" if most is not None else f"at least {least}"
    if most is not None and length > most:
        issues.error("mtp_draft", f"--mtp-draft {length} is above what {row.reported} drafts; {accepted} is accepted")
    elif length < least:
        issues.note(
            spec.mode == "on", "mtp_draft", f"--mtp-draft {length} drafts nothing on {row.reported}; {accepted} is accepted"
        )
    else:
        return replace(spec, draft=length)
    # A predictor inside the model is loaded for drafting only; a file that was named is loaded whatever the mode.
    return Speculation(weights=spec.weights and row.mtp != "embedded")


def disk(request, row, facts, issues):
    """Whether the disk store is on."""
    if request.disk_dir is None:
        return False
    flag = f"--kv-disk-dir {request.disk_dir}"
    if NONE in (row.disk, row.snapshot):
        issues.error("disk_unsupported", f"{flag}: sequences of {row.reported} cannot be kept on disk in this version; drop it")
        return False
    if facts.disk_ready is False:
        issues.error("disk_open", f"{flag}: {facts.why('disk_ready', 'cannot be opened for writing')}")
        return False
    if row.disk == UNVERIFIED:
        issues.warn("disk_unverified", f"disk records of {row.reported} are implemented and not qualified")
    return True


def host(request, row, backend, issues):
    wrong = []
    if not takes(backend, row.hosts):
        wrong.append(f"{row.reported} does not run on {backend}; {', '.join(row.hosts) or 'no backend'} is accepted")
    sliced = {"--tensor-parallel": request.tensor_parallel, "--pipeline-parallel": request.pipeline_parallel}
    slices = [f"{flag} {n}" for flag, n in sliced.items() if n > 1]
    if slices and not row.distributed:
        wrong.append(f"{' and '.join(slices)}: {row.reported} runs on one device; 1 is accepted")
    if wrong:
        issues.error("family_host", "; ".join(wrong))


@dataclass(frozen=True)
class Limits:
    """Verified context and request length in tokens; None where nothing was recorded."""

    ctx: int | None
    prompt: int | None


def limits(request, row, facts, width, driver, spec, chunk):
    """The row's limits, or the first narrower record whose conditions all hold."""
    explicit = request.sched_chunk is not None and request.live_chunk is not None
    same = chunk.native if explicit and chunk.native == chunk.sched == chunk.live else None
    drafting = (request.mtp is not None or facts.dspark_ok is True or facts.mtp_loaded is True or spec.weights
                or request.mtp_mode == "on")  # fmt: skip
    vision = (request.vision is not None and facts.vision_path_ok is not False) or facts.vision_loaded is True
    shape = {"width": width, "driver": driver, "draft_loaded": drafting, "chunks": same, "mtp_path": request.mtp is not None,
             "vision": vision}  # fmt: skip
    for record in row.measured:
        if all(shape.get(name) == value for name, value in record["when"].items()):
            return Limits(record["ctx"], record["prompt"])
    return Limits(row.qualified_ctx, row.qualified_prompt)


def context(request, row, facts, limits, issues):
    """The verified request length where it is shorter than the context, else None."""
    ctx = request.ctx
    caps = [cap for cap in (row.ctx_max, facts.capacity) if cap is not None]
    if ctx <= 0:
        issues.error("ctx_invalid", f"--ctx must be at least 1, got {ctx}")
    elif caps and ctx > min(caps):
        issues.error(
            "ctx_unavailable", f"--ctx {ctx} is above the {min(caps)} tokens that sequences of {row.reported} can have"
        )
    elif limits.ctx is not None and ctx > limits.ctx:
        issues.warn("ctx_unqualified", f"--ctx {ctx} is above the {limits.ctx} tokens that were verified")
    if limits.prompt is None or limits.prompt >= ctx:
        return None
    issues.warn("prompt_bound", f"requests of up to {limits.prompt} tokens were verified, fewer than the context of {ctx}")
    return limits.prompt


def media(row, width, issues):
    if row.media_serial and width > 1:
        issues.warn("media_serial", f"image requests of {row.reported} run one at a time beside its {width} text banks")


def weights(request, facts, issues):
    if request.check and facts.ipc_pending:
        issues.error("ipc_unverified", f"{MANIFEST} names shared weights, which cannot be proven without opening the model")


def artifacts(facts, issues):
    for fact, code, what in (
        ("artifact_ok", "artifact_invalid", "the model file cannot be loaded"),
        ("dspark_ok", "dspark_artifact", "the drafter that DS4_DSPARK_MODEL names cannot be attached"),
        ("vision_path_ok", "vision_artifact", "the image encoder that --vision names cannot be attached"),
    ):
        if getattr(facts, fact) is False:
            issues.error(code, f"{what}: {facts.because[fact]}" if fact in facts.because else what)


def stop_policy(request, facts, issues):
    if request.eos_policy != "model" and facts.has_eos is False:
        flag = "--ignore-eos" if request.eos_policy == "global" else "--ignore-eos-in-reasoning"
        issues.error("eos_missing", f"{flag} needs a tokenizer with an end token, and this file names none")
