"""What a GGUF holds, as data and as text: architecture, config, tensors, state, and where file and family disagree.

Never raises for a file that merely does not fit: what is amiss is part of the answer.
"""

from collections import Counter
from dataclasses import asdict

from . import drafting, families
from .gguf import ArtifactError
from .state import memory
from .weights import check


def inspect(artifact, itemsize=4):
    """A JSON-able description of ``artifact``. State bytes are for ``itemsize`` bytes per number (4: the reference's)."""
    found = {
        "file": artifact.path.name,
        "shards": [path.name for path in artifact.shards],
        "bytes": artifact.nbytes,
        "architecture": artifact.metadata.get("general.architecture"),
        "name": artifact.metadata.get("general.name"),
        "tensors": [
            {"name": t.name, "type": t.type.name, "shape": list(t.shape), "bytes": t.nbytes} for t in artifact.tensors.values()
        ],
        "config": None,
        "state": None,
        "predictor": None,
        "sidecar_of": drafting.sidecar_of(artifact),
        "problems": [],
    }
    if found["sidecar_of"]:
        return found
    try:
        family = families.of(artifact)
        config = family.Config.from_metadata(artifact)
    except ArtifactError as error:
        found["problems"].append(str(error))
        return found
    found["config"] = asdict(config)
    found["problems"] += check(artifact, *family.tensors(config))
    if predictors := getattr(config, "predictors", 0):
        found["predictor"] = {"blocks": predictors, "unused": drafting.unused(family, config)}
    layout = family.layout(config)
    at_1000, growth = memory(layout, itemsize)
    found["state"] = {
        "components": [
            {"name": name, "kind": type(kind).__name__, **asdict(kind), "bytes_at_1000_tokens": at_1000[name]}
            for name, kind in layout.items()
        ],
        "bytes_per_token": growth,
        "bytes_at_1000_tokens": sum(at_1000.values()),
        "item_bytes": itemsize,
    }
    return found


def report(found):
    """:func:`inspect` as text for a terminal."""
    lines = [
        f"{found['file']}: {found['architecture']}" + (f" — {found['name']}" if found["name"] else ""),
        f"{len(found['shards'])} file(s), {_size(found['bytes'])}, {len(found['tensors'])} tensors",
    ]
    types = Counter()
    for tensor in found["tensors"]:
        types[tensor["type"]] += tensor["bytes"]
    lines.append("types: " + ", ".join(f"{name} {_size(size)}" for name, size in types.most_common()))
    if found["config"] is not None:
        lines += ["", "config"] + [f"  {name:<20} {value}" for name, value in found["config"].items()]
    lines += ["", "tensors"]
    lines += [f"  {t['name']:<44} {t['type']:<8} {_shape(t['shape']):<20} {_size(t['bytes']):>10}" for t in found["tensors"]]
    if state := found["state"]:
        lines += ["", f"state, {state['item_bytes']} bytes per number"]
        for c in state["components"]:
            size = _size(c["bytes_at_1000_tokens"])
            lines.append(f"  {c['name']:<20} {c['kind']:<11} {_shape(c['shape']):<16} {size:>10} at 1,000 tokens")
        total = state["bytes_at_1000_tokens"]
        lines.append(f"  {state['bytes_per_token']:,.1f} bytes per further token; {_size(total)} at 1,000 tokens")
    if found["sidecar_of"]:
        lines += ["", f"a draft sidecar of {found['sidecar_of']}; it is checked when it is opened with its model"]
        return "\n".join(lines)
    if predictor := found["predictor"]:
        count = "1 block" if predictor["blocks"] == 1 else f"{predictor['blocks']} blocks"
        use = f"bound and not used: {predictor['unused']}" if predictor["unused"] else "which draft where asked to"
        lines += ["", f"predictor: {count}, {use}"]
    lines += [""] + ([f"problem: {p}" for p in found["problems"]] or ["every tensor the family binds is there, and no other"])
    return "\n".join(lines)


def _shape(shape):
    return "×".join(map(str, shape))


def _size(n):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
