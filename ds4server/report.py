"""A plan for people: a line each for family, requested, effective and qualified, the note, and every issue."""


def lines(plan):
    """The report, one string a line."""
    yield f"family: {plan.family}"
    for name in ("requested", "effective", "qualified"):
        yield f"{name}: {_pairs(getattr(plan, name))}"
    if plan.quote is not None:
        yield f"quote: {_pairs({name: plan.quote[name] for name in ('banks', 'total', 'available', 'floor', 'domain')})}"
    if plan.qualified["note"]:
        yield f"note: {plan.qualified['note']}"
    for issue in plan.issues:
        yield line(issue)


def line(issue):
    """``error: sentence (code)`` or ``warn: sentence (code)``."""
    return f"{issue.level}: {issue.message} ({issue.code})"


def _pairs(view):
    """What a view says; what is null, and streaming, which this product never does, is left out."""
    shown = {n: v for n, v in view.items() if v is not None and n != "note" and not n.startswith("ssd_")}
    return " ".join(f"{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in shown.items())
