"""What was asked for, what is in effect, what has been verified: the resolved plan of a process.

``resolve(request, row, facts)`` is pure and total: the same arguments give the same plan, every plan has every key, and
whatever cannot be done as asked is an issue with a stable code. It runs before the model is opened, with facts from files and
the host, and again after, with what only the engine knows. The steps of the contract are the functions of :mod:`rules`;
issues come in the order of the steps. A plan with an error must never listen.

``python -m ds4server.plan --cases FILE.json`` evaluates a table of cases.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from . import chunks, rules
from .capabilities import NONE, QUALIFIED
from .quote import Budgets

STREAMING = {"ssd_streaming": False, "ssd_streaming_cold": False, "ssd_streaming_cache_experts": None,
             "ssd_streaming_cache_bytes": None, "ssd_streaming_cache_policy": None}  # fmt: skip


@dataclass(frozen=True)
class Issue:
    """``level``: "error" or "warn"; ``code`` is stable, ``message`` one sentence."""

    level: str
    code: str
    message: str


@dataclass(frozen=True)
class Facts:
    """What files, host and engine have told. None is "unknown", which is neither yes nor no.

    platform: the backend that "auto" finds. cont_lane: false where an engine has no memory for a bank lane beside its serial
    session; here both compute on the same states, so that a fit allows fewer banks (banks_fitted) and never refuses the lane.
    banks_fitted … decode_execution are known after open; mapped_weights: bytes of weights that have left the available memory
    by then. native_wanted: rows of the native chunk if the memory did not matter. because: fact → why it is as it
    is, for the messages.
    draft_longest: most drafts of one trial of the drafter that was found.
    """

    platform: str = "reference"
    mtp_path_ok: bool | None = None
    vision_path_ok: bool | None = None
    dspark_ok: bool | None = None
    artifact_ok: bool | None = None
    artifact_qualified: bool | None = None
    has_eos: bool | None = None
    disk_ready: bool | None = None
    ipc_pending: bool = False
    capacity: int | None = None
    budgets: Budgets | None = None
    banks_fitted: int | None = None
    cont_lane: bool | None = None
    partial_reuse: bool | None = None
    mtp_loaded: bool | None = None
    draft_longest: int | None = None
    vision_loaded: bool | None = None
    native_chunk: int | None = None
    native_wanted: int | None = None
    mapped_weights: int | None = None
    layout: str | None = None
    decode_execution: str | None = None
    because: Mapping = field(default_factory=dict)

    def why(self, fact, otherwise):
        """Why a fact is as it is, or ``otherwise`` where nobody said."""
        return self.because.get(fact, otherwise)


@dataclass(frozen=True)
class Plan:
    """The three views, what they were resolved from, and what is amiss. ``as_json`` is what is printed and served."""

    family: str
    controls: dict
    requested: dict
    effective: dict
    qualified: dict
    quote: dict | None
    issues: tuple[Issue, ...] = ()

    @property
    def errors(self):
        return [issue for issue in self.issues if issue.level == "error"]

    def as_json(self):
        views = ("family", "controls", "requested", "effective", "qualified", "quote")
        issues = [{"level": i.level, "code": i.code, "message": i.message} for i in self.issues]
        return {name: getattr(self, name) for name in views} | {"issues": issues}


class _Issues(list):
    def error(self, code, message):
        self.append(Issue("error", code, message))

    def warn(self, code, message):
        self.append(Issue("warn", code, message))

    def note(self, forced, code, message):
        """An error where what fails was forced, else a warning."""
        self.append(Issue("error" if forced else "warn", code, message))


def resolve(request, row, facts):
    """The :class:`Plan` of a ``Request`` on a family's ``Row`` (None: no GGUF was identified) under ``facts``."""
    issues = _Issues()
    rules.environment(request, row, facts, issues)
    backend = facts.platform if request.requested_backend == "auto" else request.requested_backend
    if row is None:
        return _unidentified(request, facts, backend, issues)
    rules.backend(request, facts, issues)
    row = rules.artifact(row, facts, issues)
    rules.streaming(request, issues)
    width = rules.width(request, row, facts, backend, issues)
    facts = rules.native(request, row, facts, backend, width, issues)
    quote, width = rules.quote(request, row, facts, backend, width, issues)
    driver = rules.driver(request, row, facts, backend, width)
    reuse = rules.reuse(request, row, facts, driver, issues)
    spec = rules.speculation(request, row, facts, backend, driver, issues)
    spec = rules.draft(request, row, facts, spec, issues)
    disk = rules.disk(request, row, facts, issues)
    rules.host(request, row, backend, issues)
    chunk = chunks.resolve(request, row, facts.native_chunk)
    limits = rules.limits(request, row, facts, width, driver, spec, chunk)
    prompt = rules.context(request, row, facts, limits, issues)
    rules.media(row, width, issues)
    rules.weights(request, facts, issues)
    rules.artifacts(facts, issues)
    rules.stop_policy(request, facts, issues)
    issues += [Issue(*finding) for finding in chunk.findings]
    bank_level = QUALIFIED if width == 1 else row.bank_support
    return Plan(
        family=row.reported,
        controls={
            "native_prefill_env": row.native_prefill.env, "scheduler_chunks": chunk.verified, "prefix_reuse": row.reuse,
            "banks": row.banks, "mtp": row.mtp_support, "disk": row.disk,
        },
        requested=_requested(request, row),
        effective=_effective(
            request, facts, backend, chunk, prefix_reuse=reuse, mtp_mode=spec.mode, mtp_weights=spec.weights,
            mtp_draft=spec.draft, max_seqs=width, disk=disk, banks_opt_in=row.banks == "opt_in" and width > 1,
            bank_driver=driver, think_max_ctx=row.think_max_ctx,
        ),
        qualified=_qualified(
            prefix_reuse=rules.reuse_level(row, reuse), disk=row.disk if disk else NONE,
            mtp=row.mtp_support if spec.weights else NONE, banks=rules.capped(bank_level, facts), ctx=limits.ctx,
            banks_n=row.qualified_banks, prompt=prompt, native_chunk=row.qualified_native_chunk, note=row.note,
        ),
        quote=quote,
        issues=tuple(issues),
    )  # fmt: skip


def _unidentified(request, facts, backend, issues):
    """The plan without a family: the request with nothing that only a family could grant."""
    message = facts.why("family", "no GGUF of a known family was identified, so its limits are unknown")
    issues.note(request.check, "family_unknown", message)
    on = request.mtp_mode != "off"
    return Plan(
        family="unknown",
        controls=dict.fromkeys(("native_prefill_env", "prefix_reuse", "banks", "mtp", "disk")) | {"scheduler_chunks": None},
        requested=_requested(request, None),
        effective=_effective(
            request, facts, backend, chunks.resolve(request, None, facts.native_chunk), prefix_reuse="off",
            mtp_mode=request.mtp_mode, mtp_weights=False, mtp_draft=request.mtp_draft if on else None,
            max_seqs=request.named_width or 1, disk=request.disk_dir is not None, banks_opt_in=False, bank_driver=False,
            think_max_ctx=None,
        ),
        qualified=_qualified(),
        quote=None,
        issues=tuple(issues),
    )  # fmt: skip


def _requested(request, row):
    return {
        "prefix_reuse": request.reuse, "mtp_mode": request.mtp_mode, "max_seqs": str(request.width),
        "lane": "serial" if request.serial_lane else "auto", "ctx": request.ctx,
        "native_chunk": chunks.requested_native(request, row), "mem_floor_gb": request.floor_gb,
        "disk": request.disk_dir is not None, "mtp_path": request.mtp is not None, "backend": request.requested_backend,
        **STREAMING,
    }  # fmt: skip


def _effective(request, facts, backend, chunk, *, disk, **resolved):
    return {
        **resolved, "ctx": request.ctx, "mem_floor_gb": request.floor_gb, "disk": disk, "sched_chunk": chunk.sched,
        "sched_chunk_live": chunk.live, "native_chunk": chunk.native, "prefill_window": None,
        "bank_persist_min_tokens": request.persist_min, "disk_min_tokens": request.disk_min if disk else None,
        "pin_min_tokens": request.pin_min, "disk_budget_mb": request.disk_mb if disk else None,
        "disk_quant": "same" if request.disk_same_quant else "identity", "disk_is_offload": False,
        "eos_policy": request.eos_policy, "backend": backend, "decode_execution": facts.decode_execution,
        "layout": facts.layout, "tensor_parallel": request.tensor_parallel, "pipeline_parallel": request.pipeline_parallel,
        **STREAMING,
    }  # fmt: skip


def _qualified(*, prefix_reuse=NONE, disk=NONE, mtp=NONE, banks=NONE, ctx=None, banks_n=None, prompt=None, native_chunk=None,
               note=""):  # fmt: skip
    return {
        "prefix_reuse": prefix_reuse, "disk": disk, "mtp": mtp, "banks": banks, "ssd_streaming": NONE, "ctx": ctx,
        "banks_n": banks_n, "prompt": prompt, "native_chunk": native_chunk, "ssd_streaming_cache_experts": None, "note": note,
    }  # fmt: skip


if __name__ == "__main__":
    from .cases import main

    sys.exit(main())
