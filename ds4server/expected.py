"""``--expect-plan``: a plan kept in a file, and the first thing in which the plan of this process differs from it.

The file is one JSON object of at most 64 KiB with exactly the keys of ``KEYS``; ``post_open_quote`` is the quote after open
without ``available``, or null. Pure but for reading the file.
"""

import json

from .options import UsageError

KEYS = ("family", "backend", "effective", "qualified", "controls", "post_open_quote")
LARGEST = 64 << 10


def load(path):
    """The object in the file. UsageError, one sentence, for anything that is not of the expected shape."""
    try:
        with open(path, "rb") as file:
            raw = file.read(LARGEST + 1)
    except OSError as error:
        raise UsageError(f"--expect-plan {path}: cannot be read ({error.strerror or error})") from None
    if len(raw) > LARGEST:
        raise UsageError(f"--expect-plan {path}: is larger than {LARGEST} bytes")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--expect-plan {path}: is no JSON ({error})") from None
    if not isinstance(found, dict) or found.keys() != set(KEYS):
        keys = ", ".join(sorted(found)) if isinstance(found, dict) else type(found).__name__
        raise UsageError(f"--expect-plan {path}: must be an object of exactly {', '.join(KEYS)}; found {keys or 'no key'}")
    for key, kinds, what in (
        *((key, str, "text") for key in ("family", "backend")),
        *((key, dict, "an object") for key in ("effective", "qualified", "controls")),
        ("post_open_quote", dict | None, "an object or null"),
    ):
        if not isinstance(found[key], kinds):
            raise UsageError(f"--expect-plan {path}: {key} must be {what}, got {type(found[key]).__name__}")
    return found


def of(plan):
    """What a file that expects exactly this plan holds. ``plan``: of an opened process."""
    quote = None if plan.quote is None else {name: value for name, value in plan.quote.items() if name != "available"}
    views = {name: getattr(plan, name) for name in ("family", "effective", "qualified", "controls")}
    return views | {"backend": plan.requested["backend"], "post_open_quote": quote}


def difference(expected, plan, opened):
    """One sentence about the first key in which the plan differs, or None.

    opened: whether the engine is open; before, what only it knows is skipped, and so is the quote.
    """
    found = of(plan)
    skipped = set()
    if not opened:
        skipped = {"post_open_quote", "effective.layout", "effective.decode_execution"}
        if plan.effective["native_chunk"] is None:
            skipped |= {"effective.native_chunk", "controls.scheduler_chunks"}
    for key, want, have in _leaves(expected, found):
        if key not in skipped and not _same(want, have):
            return f"--expect-plan: the plan differs in {key}: expected {_shown(want)}, found {_shown(have)}"
    return None


_ABSENT = object()


def _leaves(expected, found):
    """(dotted key, expected, found) for every key that either has, one level deep in objects."""
    for key in KEYS:
        want, have = expected[key], found[key]
        if isinstance(want, dict) and isinstance(have, dict):
            for name in [*have, *(name for name in want if name not in have)]:
                yield f"{key}.{name}", want.get(name, _ABSENT), have.get(name, _ABSENT)
        else:
            yield key, want, have


def _same(a, b):
    """Equality in which true is not 1."""
    if a is _ABSENT or b is _ABSENT:
        return a is b
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _shown(value):
    return "no such key" if value is _ABSENT else json.dumps(value)
