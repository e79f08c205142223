"""What was asked for, what is in effect, what has been verified: the resolved plan of this process.

A pure function of flags and facts. It is printed at start and served as ``serving`` in ``GET /v1/stats``. Level "error"
means that the server must not listen.
"""

from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Issue:
    """``level``: "error" or "warn"; ``code`` is stable, ``message`` one sentence."""

    level: str
    code: str
    message: str


@dataclass(frozen=True)
class Plan:
    family: str
    requested: dict
    effective: dict
    qualified: dict
    issues: tuple[Issue, ...] = field(default=())

    @property
    def errors(self):
        return [issue for issue in self.issues if issue.level == "error"]

    def as_json(self):
        return asdict(self) | {"issues": [asdict(issue) for issue in self.issues]}


def resolve(*, family, ctx, context_cap, backend_requested, backend, prefix_reuse="auto", resident_banks=1, toy=False):
    """The plan of a serial server without disk or speculation, which is what this version has.

    ctx: tokens a sequence may have, as asked for; context_cap: what the artifact allows; backend: a ``backend.Backend``;
    prefix_reuse: "off", "exact", "partial" or "auto", which is partial; resident_banks: sequences kept for reuse.
    """
    issues = []
    if ctx <= 0:
        issues.append(Issue("error", "ctx_invalid", f"--ctx must be at least 1, got {ctx}"))
    elif ctx > context_cap:
        message = f"--ctx {ctx} is above the {context_cap} tokens that this file's sequences can have"
        issues.append(Issue("error", "ctx_unavailable", message))
    if backend_requested == "auto" and backend.name != "jax":
        issues.append(Issue("warn", "backend_absent", f"--backend auto took the reference: {backend.reason}"))
    if toy:
        message = "no -m was given: serving the embedded random toy, whose answers are noise"
        issues.append(Issue("warn", "artifact_unqualified", message))
    reuse = "partial" if prefix_reuse == "auto" else prefix_reuse
    return Plan(
        family=family,
        requested={"backend": backend_requested, "ctx": ctx, "prefix_reuse": prefix_reuse},
        effective={"backend": backend.name, "ctx": ctx, "lane": "serial", "max_seqs": 1, "resident_banks": resident_banks,
                   "prefix_reuse": reuse, "mtp_mode": "off", "disk": False},
        qualified={"prefix_reuse": "none", "disk": "none", "mtp": "none", "banks": "none", "ctx": None},
        issues=tuple(issues),
    )
