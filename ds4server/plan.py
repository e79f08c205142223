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


def resolve(*, family, ctx, context_cap, backend_requested, backend, toy=False):
    """The plan of a serial server without reuse, disk or speculation, which is what this version has.

    ctx: tokens a sequence may have, as asked for; context_cap: what the artifact allows; backend: a ``backend.Backend``.
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
    off = {"prefix_reuse": "off", "mtp_mode": "off", "disk": False}
    return Plan(
        family=family,
        requested={"backend": backend_requested, "ctx": ctx},
        effective={"backend": backend.name, "ctx": ctx, "lane": "serial", "max_seqs": 1, **off},
        qualified={"prefix_reuse": "none", "disk": "none", "mtp": "none", "banks": "none", "ctx": None},
        issues=tuple(issues),
    )
