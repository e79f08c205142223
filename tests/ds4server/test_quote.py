"""The memory quote: its arithmetic, its reserves, and prices that are what states really take."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ds4ref import drafting, families, quants, tiny
from ds4ref.gguf import Artifact, Tensor
from ds4ref.model import Model
from ds4ref.quants import BLOCK, TensorType
from ds4ref.reuse import SLOTS
from ds4ref.speculative import Speculator, Stepwise
from ds4ref.state import Compressed, Recurrent, Ring, Rows, State
from ds4server import evidence, host, options, pricing, quote
from ds4server.options import FitReserves
from ds4server.quote import GIB, LARGEST, MIB, Budgets, credited, headroom, quoted, widest

from .artifact import toy

amounts = st.integers(0, 1 << 40) | st.sampled_from([2**62, 2**63, 2**65])
costs = st.builds(Budgets, amounts, amounts, amounts, amounts, amounts, amounts, amounts, amounts, amounts)


def test_every_part_counts_once():
    parts = quoted(Budgets(1000, 1, 10, 100, 1000, 10_000, 100_000, 1_000_000, 10_000_000), 3, 500_000_000).parts
    assert parts["media_reserve"] == 21_000_000
    assert parts["total"] == 1 + 30 + 100 + 1000 + 10_000 + 100_000 + 21_000_000 + 500_000_000
    assert [parts[f"expert_{name}"] for name in ("cache", "staging", "metadata")] == [0, 0, 0]


@given(costs, amounts, st.integers(1, 63))
def test_a_quote_grows_with_the_width(budgets, floor, n):
    less, more = (quoted(budgets, width, floor) for width in (n, n + 1))
    assert less.total <= more.total <= LARGEST
    if budgets.per_bank and more.total < LARGEST:
        assert less.total < more.total
    assert less.fits or not more.fits


@given(costs, amounts, st.integers(1, 64))
def test_the_widest_that_fits_is_chosen(budgets, floor, wanted):
    found = widest(budgets, wanted, lambda n: floor)
    fitting = [n for n in range(1, wanted + 1) if quoted(budgets, n, floor).fits]
    assert (found.banks, found.fits) == ((max(fitting), True) if fitting else (1, False))


def test_the_hosts_part_of_a_devices_quote():
    budgets = Budgets(100, shared_weights=60, checkpoint_pool=20, domain="device", host_staging=5, host_available=30)
    found = quoted(budgets, 1, 10, host_floor=4)
    assert found.parts["host"] == {"staging": 5, "checkpoint_pool": 20, "floor": 4, "available": 30, "total": 29} and found.fits
    assert not quoted(budgets, 1, 10, host_floor=6).fits
    assert quoted(Budgets(100, shared_weights=60, domain="device", host_available=None), 1, 10, 1 << 40).fits


@given(costs, amounts, st.none() | st.integers(1, 4))
def test_what_was_taken_is_credited_once(budgets, mapped, fitted):
    back = credited(budgets, mapped, fitted).available - min(budgets.available, LARGEST)
    taken = 0 if fitted is None else budgets.per_bank * fitted + budgets.mtp_state + budgets.scratch + budgets.ple
    assume(budgets.available + mapped + taken < LARGEST)
    assert back == mapped + taken
    assert credited(Budgets(), mapped, fitted) == Budgets()


@pytest.mark.parametrize(
    ("reserves", "floor_gb", "cuda", "planned", "expected"),
    [
        (FitReserves(), 4, True, False, GIB),
        (FitReserves(), 4, False, False, 0),
        (FitReserves(serial=0), 0, True, False, 0),
        (FitReserves(), 4, True, True, 6 * GIB),
        (FitReserves(burst=512), 4, False, True, 4 * GIB + 512 * MIB),
        (FitReserves(batch=100, serial=3072), 4, True, True, 3 * GIB),
        (FitReserves(batch=0), 4, False, True, 0),
        (FitReserves(derived=False), 8, False, True, 6 * GIB),
    ],
)
def test_reserves(reserves, floor_gb, cuda, planned, expected):
    assert headroom(reserves, floor_gb, cuda=cuda, batch_planned=planned) == expected


def test_the_largest_parts_are_named():
    found = quoted(Budgets(0, shared_weights=50, per_bank=30, scratch=7), 2, 40)
    assert found.largest() == [("per_bank", 60), ("shared_weights", 50), ("floor", 40)]


# Prices.

KINDS = {"rows": Rows((3, 2)), "ring": Ring(7, (4,)), "matrix": Recurrent((2, 5)), "blocks": Compressed(4, (3,), (2,), 8)}


def test_a_price_by_hand():
    assert pricing.price(KINDS, 10, vocabulary=11).per_bank == 4 * (10 * 6 + 7 * 4 + 10 + 3 * 3 + 8 * 2 + 11)
    assert pricing.price(KINDS, 10, vocabulary=11, native=2).per_bank == 4 * (10 * 6 + 9 * 4 + 10 + 3 * 3 + 8 * 2 + 11)
    assert pricing.price(KINDS, 5, vocabulary=0, native=9).per_bank == 4 * (5 * 6 + 5 * 4 + 10 + 2 * 3 + 5 * 2)
    assert pricing.price(KINDS, 10, vocabulary=11, itemsize=2).per_bank * 2 == pricing.price(KINDS, 10, vocabulary=11).per_bank
    uncut = 4 * (7 * 4 + 10 + 8 * 2)
    drafting = pricing.price(KINDS, 10, vocabulary=11, drafts=3)
    assert drafting.per_bank - pricing.price(KINDS, 10, vocabulary=11).per_bank == 4 * (uncut + 44 + 80)
    assert drafting.checkpoint == uncut + 44 + 80 and drafting.pool(32) == 32 * drafting.checkpoint
    assert pricing.price({"rows": Rows((3,))}, 10, vocabulary=11).checkpoint == 0


@given(st.integers(1, 600))
def test_a_price_grows_with_the_context(context):
    prices = [pricing.price(KINDS, n, vocabulary=11, grown=grown).per_bank for n in (context, context + 1) for grown in (0, 1)]
    assert prices[0] <= prices[2] and prices[1] <= prices[3] and prices[0] <= prices[1]


@pytest.mark.parametrize("context", [1, 16, 40, 100])
def test_a_price_is_what_a_state_takes(context):
    """The arrays of a reference state at full context, its logits, and a checkpoint of it."""
    state = State(KINDS)
    for token in range(context):
        state["rows"].append(np.zeros((3, 2), np.float32))
        state["ring"].append(np.zeros(4, np.float32))
        state["matrix"].replace(np.zeros((2, 5), np.float32))
        state["blocks"].append(np.zeros(2, np.float32), lambda rows, index: np.zeros(3, np.float32))
        state.tokens.append(token)
    state.logits = np.zeros(11, np.float32)
    held = sum(a.nbytes for name in KINDS for a in _arrays(state[name])) + state.logits.nbytes
    price = pricing.price(KINDS, context, vocabulary=11, grown=True)
    assert held <= price.per_bank
    if context >= 16:  # an open block, and a first row that its array rounds up, are priced in full
        assert price.per_bank - held <= 4 * 3 * 16
    assert state.checkpoint().nbytes == price.checkpoint


def _arrays(component):
    for value in vars(component).values():
        if isinstance(value, np.ndarray):
            yield value
        elif hasattr(value, "_data"):
            yield value._data


GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize(
    ("model", "sidecar"),
    [("qwen35/model-mtp.gguf", None), ("step35/model.gguf", "step35/mtp.gguf"), ("mimo2/model.gguf", "mimo2/dflash.gguf"),
     ("deepseek4/model.gguf", "deepseek4/mtp.gguf")],
)  # fmt: skip
def test_drafting_is_priced_as_it_is_allocated(model, sidecar):
    """The checkpoints of a trial at the end of a full context, and what the drafter keeps of the sequence."""
    context, drafts = 64, 3
    opened = Model.open(GOLDEN / model, context=context)
    drafter = drafting.attach(opened, sidecar and GOLDEN / sidecar)
    target = Stepwise(opened, opened.new_state())
    speculator, tokens = Speculator(target, drafter, 1), [token % 50 for token in range(context)]
    speculator.prefill(tokens[: -drafts - 1])
    _, taps = target.verify(tokens[-drafts - 1 :], drafter.taps)
    plain, priced = (
        pricing.price(opened.layout, context, vocabulary=opened.vocabulary, grown=True, drafts=n) for n in (None, drafts)
    )
    rollback = priced.per_bank - plain.per_bank
    held = sum(mark.nbytes for mark in target._marks)
    shorter = 8 * sum(range(drafts + 1))  # tokens that the earlier ones do not hold yet
    assert len(target._marks) == drafts + 1 and 0 <= rollback - held - shorter <= rollback / 50
    target.keep(drafts + 1)
    for token, seen in zip(tokens[-drafts - 1 :], taps, strict=True):
        drafter.extend(speculator.draft, token, seen)
    kept = sum(a.nbytes for block in speculator.draft.blocks for name in block.layout for a in _arrays(block[name]))
    assert kept == pricing.drafter(drafter.layouts, context)


def test_weights_and_activations_of_an_artifact(tmp_path):
    tiny.write("deepseek4", tmp_path / "tiny.gguf")
    with Artifact.open(tmp_path / "tiny.gguf") as artifact:
        tensors = list(artifact.tensors.values())
        assert pricing.weights(tensors) == sum(t.nbytes for t in tensors) <= (tmp_path / "tiny.gguf").stat().st_size
        assert 0 < pricing.activations(tensors, 1) * 7 == pricing.activations(tensors, 7)
        family = families.of(artifact)
        config = family.Config.from_metadata(artifact)
        prices = [pricing.price(family.layout(config), n, vocabulary=config.vocabulary).per_bank for n in (256, 512)]
        assert prices[0] < prices[1]


def tensor(type, *shape):
    return Tensor("blk.0.x.weight", shape, type, np.zeros(quants.nbytes(type, shape), np.uint8))


def test_what_the_file_holds_as_it_is_computed_with_is_not_copied():
    tensors = [tensor(TensorType.F32, 4, 256), tensor(TensorType.I32, 9), tensor(TensorType.Q8_0, 2, 256),
               tensor(TensorType.BF16, 3)]  # fmt: skip
    assert pricing.dequantized(tensors, 1 << 40) == 4 * (512 + 3) and pricing.dequantized(tensors, 5) == 5


@pytest.mark.parametrize("layout", ["cpu", "lean", "gpu"])
def test_weights_are_priced_as_they_are_packed(layout):
    """Every type that there is, as a matrix, a stack whose rows get padding, and a vector."""
    weights = pytest.importorskip("ds4jax.weights", reason="JAX is not installed")
    for type, (values, _) in BLOCK.items():
        for shape in ((24, 3 * values), (2, 1024, values), (4 * values,)):
            found = tensor(type, *shape)
            assert pricing.packed([found], layout) == weights.nbytes(weights.pack(found, layout)), (type.name, shape)


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("context", [1, 7, 100])
def test_a_bank_is_priced_as_it_is_allocated(dtype, itemsize, context):
    allocate = pytest.importorskip("ds4jax.state", reason="JAX is not installed").allocate
    arrays = [array for kind in KINDS.values() for array in allocate(kind, 3, 5, context, dtype).values()]
    price = pricing.price_on_device(KINDS, context, vocabulary=0, itemsize=itemsize)
    assert 3 * 5 * price.per_bank == sum(array.nbytes for array in arrays)
    assert price.checkpoint == pricing.price(KINDS, context, vocabulary=0).checkpoint


# Use. docs/memory.md says what counts.


def used(backend, path, *numbers):
    """What ``usage.py`` tells of a process of its own. numbers: context, banks, slots and, where there are, drafts."""
    script, numbers = Path(__file__).with_name("usage.py"), map(str, numbers)
    command = [sys.executable, str(script), backend, str(path), *numbers]
    out = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    assert out.returncode == 0, out.stderr[-3000:]
    found = json.loads(out.stdout)
    assert found["errors"] == []
    return found


def check_use(found, slots, states):
    """The quote of an opened model is within 10 % of what the model takes, in all and by every item that is much of it."""
    quoted, items = found["quote"], found["items"]
    pool = quoted["checkpoint_pool"] // SLOTS * slots
    said = {"shared_weights": quoted["shared_weights"], "banks": quoted["per_bank"] * states, "checkpoint_pool": pool,
            "scratch": quoted["scratch"] - quoted["per_bank"] * (states - quoted["banks"])}  # fmt: skip
    if "mtp_state" in items:
        said["mtp_state"] = quoted["mtp_state"]
    total = sum(items.values())
    assert abs(sum(said.values()) - total) <= total / 10, (said, items)
    for name, n in items.items():
        assert abs(said[name] - n) <= max(n, total / 10) / 10, (name, said, items)
    return sum(said.values())


def check_growth(found, said, slack=0):
    """It is also within 10 % of what the process grew by, apart from what compiling leaves behind. slack: bytes of Python's
    own objects, which are much of a tiny model's."""
    grown = found["phases"]["load"] + found["phases"]["use"] + found["file"]
    assert abs(grown - said) <= grown / 10 + slack, (grown, said, found)


def test_the_quote_of_a_tiny_artifact_is_what_it_takes_on_the_reference():
    found = used("reference", toy(), 64, 2, 6)
    check_growth(found, check_use(found, 6, 2), slack=1 << 20)


def test_the_quote_of_a_model_that_drafts_is_what_it_takes_on_the_reference():
    found = used("reference", GOLDEN / "qwen35" / "model-mtp.gguf", 64, 2, 6, 3)
    check_growth(found, check_use(found, 6, 2), slack=1 << 20)
    assert found["items"]["mtp_state"] == found["quote"]["mtp_state"] > 0


def test_a_drafter_is_priced_as_it_is_allocated_on_a_device():
    """A sidecar with several blocks, a block drafter, and predictors that the model itself leaves out."""
    pytest.importorskip("jax", reason="JAX is not installed")
    import jax

    from ds4jax import drafting as on_device
    from ds4jax.model import Model as OnDevice

    for model, flags in (("qwen35/model-mtp.gguf", ["--mtp-mode", "on"]), ("step35/model.gguf", ["--mtp", "step35/mtp.gguf"]),
                         ("mimo2/model.gguf", ["--mtp", "mimo2/dflash.gguf"])):  # fmt: skip
        flags = [str(GOLDEN / flag) if flag.endswith(".gguf") else flag for flag in flags]
        argv = ["-m", str(GOLDEN / model), "--cpu", "-c", "64", "--mem-floor-gb", "0", "--mtp-mode", "on", *flags]
        found = evidence.before_open(options.read(argv, {}), GOLDEN / model)
        opened = OnDevice(found.artifact, context=64, banks=3)
        before = {id(array) for array in jax.live_arrays()}
        drafter = on_device.attach(opened, found.drafter.artifact)
        held = sum(array.nbytes for array in jax.live_arrays() if id(array) not in before)
        weights = pricing.packed(evidence._drafters(found.artifact, found.drafter, found.drafts), opened.weights_layout)
        said = weights + 3 * found.facts.budgets.mtp_per_bank
        assert abs(held - said) <= held / 50, (model, held, said)
        del drafter


def test_the_quote_of_a_tiny_artifact_is_what_it_takes_on_jax():
    """By item alone: a process whose model takes seven megabytes grows by hundreds as XLA compiles."""
    pytest.importorskip("jax", reason="JAX is not installed")
    check_use(used("jax", toy(), 256, 2, 6), 6, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "context", "banks", "slots"), [("reference", 8, 1, 2), ("jax", 256, 1, 4)])
def test_the_quote_of_a_large_artifact_is_what_it_takes(tmp_path, backend, context, banks, slots):
    """More than 1 GB on disk: the reference fills its cache of dequantised tensors, JAX packs to another size."""
    if backend == "jax":
        pytest.importorskip("jax", reason="JAX is not installed")
    command = [sys.executable, "-m", "ds4ref", "tiny", "step35", "-o", str(tmp_path / "large.gguf"), "--scale", "1.2G"]
    subprocess.run(command, check=True)
    assert (tmp_path / "large.gguf").stat().st_size > 1e9
    found = used(backend, tmp_path / "large.gguf", context, banks, slots)
    check_growth(found, check_use(found, slots, max(banks, 2)))


# Ceilings.


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("", {}, 1000),
        ("0::/a/b\n", {"a/b/memory.max": "500\n", "a/b/memory.current": "100\n"}, 400),
        (
            "0::/a/b\n",
            {"a/b/memory.max": "max\n", "a/b/memory.current": "1\n", "a/memory.high": "300\n", "a/memory.current": "60"},
            240,
        ),
        ("0::/a\n", {"a/memory.max": "500\n", "a/memory.current": "900\n"}, 0),
        ("4:memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": "700", "memory/x/memory.usage_in_bytes": "200"}, 500),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.usage_in_bytes": "2"}, 1000),
        ("0::/a\n", {"a/memory.max": "500\n"}, 1000),
    ],
)
def test_the_ceiling_is_the_lowest_of_the_tree(tmp_path, group, files, expected):
    tree(tmp_path / "proc", {"meminfo": "MemTotal: 9 kB\nMemAvailable:   1000 kB\n", "self/cgroup": group})
    scaled = {n: str(int(t) * 1024) if t.strip().isdigit() and int(t) < 10**6 else t for n, t in files.items()}
    tree(tmp_path / "cgroup", scaled)
    assert host.available(tmp_path / "proc", tmp_path / "cgroup") == expected * 1024


def test_no_ceiling_where_nothing_tells(tmp_path):
    assert host.available(tmp_path, tmp_path) is None
    assert host.macos_available("") is None and host.macos_available(None) is None and host.nvidia_memory("N/A, N/A") is None


def test_the_other_reports():
    report = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free:        10.\nPages active:   99.\n"
    report += "Pages inactive:    20.\nPages speculative:  3.\n"
    assert host.macos_available(report) == 33 * 16384
    assert host.nvidia_memory("81559, 80000\n1, 2\n") == (81559 * MIB, 80000 * MIB)


def test_whose_memory_it_is(monkeypatch):
    monkeypatch.setattr(host, "available", lambda: 5)
    monkeypatch.setattr(host.sys, "platform", "linux")
    monkeypatch.setattr(host, "_meminfo", lambda proc: {"MemTotal": 100 * GIB})
    for total, expected in ((50 * GIB, host.Memory(7, "device", 5)), (99 * GIB, host.Memory(5, "unified"))):
        monkeypatch.setattr(host, "_nvidia", lambda total=total: (total, 7))
        assert host.memory("cuda") == expected
    assert host.memory("cpu") == host.Memory(5, "host")


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"JAX_PLATFORMS": "cuda,cpu"}, "cuda"),
        ({"JAX_PLATFORMS": "cpu"}, "cpu"),
        ({"JAX_PLATFORMS": "METAL"}, "metal"),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
    ],
)
def test_the_platform_is_jaxs_own_choice(environ, found):
    assert host.platform(environ) == (found or ("metal" if host.sys.platform == "darwin" else "cpu"))


def test_sums_do_not_wrap():
    assert quote.add(LARGEST, LARGEST) == LARGEST
    assert not quoted(Budgets(LARGEST - 1, shared_weights=2**80), 1, 0).fits
