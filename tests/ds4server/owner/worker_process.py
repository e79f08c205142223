"""A worker as a process of its own, for the tests of the owner: ``python worker_process.py FILE [model]``.

Opens FILE as the environment says and prints a JSON line of facts, then answers each line on stdin with one: ``logits PATH``
saves the logits of a few tokens, ``touch`` reads every tensor's bytes and tells the sizes of the owner's maps.
"""

import json
import os
import sys
import time

import numpy as np

import ds4ref.families.step35  # noqa: F401  (what is imported later would be counted as read)
from ds4ref.gguf import Artifact
from ds4ref.model import Model
from ds4server import options
from ds4server.owner import worker
from ds4server.owner.manifest import OwnerError

TOKENS = [5, 17, 300, 42, 7, 7, 99]


def read_so_far():
    """Bytes that this process has read by system calls."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("rchar:"))


def maps_of(part):
    """(inodes, Rss, Pss) in bytes, over the maps whose name has ``part``."""
    inodes, total, inside = set(), {"Rss": 0, "Pss": 0}, False
    with open("/proc/self/smaps") as file:
        for line in file:
            fields = line.split()
            if "-" in fields[0]:
                inside = part in line
                if inside:
                    inodes.add(int(fields[4]))
            elif inside and (name := fields[0].rstrip(":")) in total:
                total[name] += int(fields[1]) << 10
    return sorted(inodes), total["Rss"], total["Pss"]


def main(path, name="base"):
    warnings = []
    before, start = read_so_far(), time.monotonic()
    artifact = Artifact.open(path)
    try:
        shared = worker.shared(options.read([], os.environ), artifact, name, warnings.append)
    except OwnerError as error:
        print(f"worker: {error}", file=sys.stderr)
        return 1
    facts = {"shared": shared is not None, "warnings": warnings, "read": read_so_far() - before}
    facts["file_resident"] = maps_of(str(path))[1]
    if shared is not None:
        artifact.close()
        artifact = shared
    facts["file_mapped"] = bool(maps_of(str(path))[0])
    model = Model.from_artifact(artifact)
    print(json.dumps(facts | {"seconds": time.monotonic() - start}), flush=True)
    for line in sys.stdin:
        verb, *where = line.split()
        if verb == "logits":
            np.save(where[0], model.verify(model.new_state(), TOKENS))
            print("{}", flush=True)
        else:
            total = sum(int(tensor.data[:: 1 << 10].sum()) for tensor in artifact.tensors.values())
            inodes, rss, pss = maps_of("memfd:ds4-base")
            print(json.dumps({"sum": total, "inodes": inodes, "rss": rss, "pss": pss}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
