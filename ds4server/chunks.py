"""Prefill chunks: how many prompt tokens are computed before the scheduler looks up again.

Three numbers stay apart: *native*, the rows one forward pass was allocated for; *sched*, the yield while nobody is answered;
*live*, the yield while somebody is. Pure.
"""

from dataclasses import dataclass

from .capabilities import VERIFIED_CHUNKS
from .options import LIVE_CHUNK, SCHED_CHUNK, c_number

FENCE = 8192
LEAST = VERIFIED_CHUNKS[0]


@dataclass(frozen=True)
class Chunks:
    """native: None where it is not known yet. findings: (level, code, message), in the contract's order."""

    native: int | None
    sched: int
    live: int
    findings: tuple = ()

    @property
    def verified(self):
        """The verified sizes that the native capacity allows; none while it is unknown."""
        return [size for size in VERIFIED_CHUNKS if self.native is not None and size <= self.native]


def family_variable(request, row):
    """(value, None) of the family's own native chunk variable, clamped to the family's maximum and the context; (None, a
    sentence) where it holds no positive number; (None, None) where it is not set."""
    name = row.native_prefill.env
    text = request.environment.get(name) if name else None
    if text is None:
        return None, None
    value = c_number(text)
    if value < 1:
        return None, f"{name} is ignored: it holds {text!r}; a number of at least 1 is accepted"
    bounds = [bound for bound in (row.native_prefill.max, request.ctx) if bound is not None and bound > 0]
    return min([value, *bounds]), None


def requested_native(request, row):
    """The native chunk that was asked for by flag or variable, or None."""
    if request.native_chunk is not None or row is None:
        return request.native_chunk
    return family_variable(request, row)[0]


def resolve(request, row, engine_native):
    """The :class:`Chunks` of a request. engine_native: what the engine has allocated, None while that is unknown."""
    native = engine_native or requested_native(request, row)
    findings = []
    rows, asked = row and row.native_rows, request.native_chunk
    if rows and asked is not None and not rows[0] <= asked <= rows[1]:
        findings.append(("error", "native_chunk", f"--native-chunk {asked} is outside the {rows[0]} to {rows[1]} rows that "
                         f"{row.reported} allocates"))  # fmt: skip
    sched = SCHED_CHUNK if request.sched_chunk is None else request.sched_chunk
    live = LIVE_CHUNK if request.live_chunk is None else request.live_chunk
    if request.fence and sched > FENCE:
        findings.append(("warn", "chunk_fenced", f"a prefill chunk of {sched} tokens is held to {FENCE}"))
    chosen = [("--prefill-chunk", sched, request.sched_chunk is not None)]
    if request.fixed_live is None:
        chosen.append(("--prefill-chunk-live", live, request.live_chunk is not None))
    for flag, wanted, explicit in chosen:
        if explicit and native is not None and wanted > native:
            findings.append(("error", "chunk_past_native", f"{flag} {wanted} exceeds the {native} rows of one forward pass; "
                             f"name at most {native}, or a larger --native-chunk"))  # fmt: skip
    for flag, wanted, _ in chosen:
        cap = _cap(wanted, native, request.fence)
        if request.fence and 0 < cap < LEAST and cap != native:
            findings.append(("error", "chunk_unverified", f"{flag} {wanted} is below the verified chunk sizes, which start at "
                             f"{LEAST}"))  # fmt: skip
    sched = _effective(sched, native, request.fence)
    if request.fixed_live is None:
        live = min(sched, _effective(live, native, request.fence))
    else:
        live = min([request.fixed_live, *([native] if native else []), *([sched] if sched else [])])
    return Chunks(native, sched, live, tuple(findings))


def _cap(wanted, native, fence):
    return min([wanted, *([FENCE] if fence else []), *([native] if native is not None else [])])


def _effective(wanted, native, fence):
    cap = _cap(wanted, native, fence)
    if cap == 0 or not fence or (cap < LEAST and cap == native):
        return cap
    snapped = max((size for size in VERIFIED_CHUNKS if size <= cap), default=LEAST)
    return snapped if native is None else min(snapped, native)
