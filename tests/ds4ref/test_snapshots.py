"""The snapshot codec: every family's state through bytes and back, and bytes that must not become a state."""

import dataclasses
import json

import numpy as np
import pytest
from runs import reference, runs

from ds4ref import snapshots
from ds4ref.snapshots import HEAD, Identity, SnapshotError, decode, encode
from ds4ref.state import Recurrent, Ring, Rows, Snapshot, State

RUNS = [run for run in runs() if run.artifact == "model.gguf" and run.cases == "cases.npz"]
MUTATIONS = 10_000
LAYOUT = {"a": Rows((2,)), "b": Rows((2,)), "w": Ring(3, (1,))}
IDENTITY = Identity("toy", snapshots.layout_digest(LAYOUT), "0", "float32", 9)


def toy(tokens=(1, 2, 3, 4, 5)):
    state = State(LAYOUT)
    for token in tokens:
        state["a"].append([token, 0])
        state["b"].append([0, token])
        state["w"].append([token])
        state.tokens.append(token)
    state.logits = np.arange(9, dtype=np.float32)
    return state


def same(a, b):
    """Whether two snapshots hold the same bits."""

    def flat(snapshot):
        yield from {"tokens": snapshot.tokens, "logits": snapshot.logits}.items()
        for name, arrays in snapshot.components.items():
            yield from ((f"{name}/{part}", array) for part, array in arrays.items())

    x, y = dict(flat(a)), dict(flat(b))
    return x.keys() == y.keys() and all(
        x[n] is y[n] if x[n] is None or y[n] is None else x[n].dtype == y[n].dtype and np.array_equal(x[n], y[n]) for n in x
    )


@pytest.fixture(scope="module", params=RUNS, ids=str)
def model(request):
    return reference(request.param)


@pytest.fixture(scope="module")
def taken(model):
    """(snapshot, its bytes) of a sequence that passes the tiny models' windows."""
    state = model.new_state()
    model.prefill(state, np.random.default_rng(3).integers(0, model.vocabulary, 40).tolist())
    snapshot = state.snapshot()
    return snapshot, encode(snapshot, Identity.of(model))


@pytest.mark.parametrize("length", [0, 1, 5, 40])
def test_any_state_comes_back(model, length):
    state, identity = model.new_state(), Identity.of(model)
    for token in range(length):
        model.step(state, token)
    data = encode(state.snapshot(), identity)
    decoded = decode(data, model.layout, identity)
    assert same(decoded, state.snapshot()) and encode(decoded, identity) == data
    twin = model.new_state()
    twin.restore(decoded)
    assert np.array_equal(model.step(twin, 7), model.step(state, 7))


def test_a_truncated_state_comes_back(model):
    """A ring then holds one row fewer than its window, and the logits are gone."""
    state, identity = model.new_state(), Identity.of(model)
    model.prefill(state, range(40))
    if not state.can_truncate(39):
        pytest.skip("a recurrent component cannot be truncated")
    state.truncate(39)
    assert same(decode(encode(state.snapshot(), identity), model.layout, identity), state.snapshot())


def test_float64_states_come_back(model):
    exact = reference(next(run for run in RUNS if run.arch == model.artifact.architecture), np.float64)
    state, identity = exact.new_state(), Identity.of(exact)
    exact.prefill(state, [1, 2, 3])
    data = encode(state.snapshot(), identity)
    assert same(decode(data, exact.layout, identity), state.snapshot())
    with pytest.raises(SnapshotError, match="snapshot of dtype 'float64', expected 'float32'"):
        decode(data, model.layout, Identity.of(model))


def mutated(data, rng):
    """One of many ways to damage ``data``; half of them aim at the head and directory."""
    edge = HEAD.size + HEAD.unpack_from(data)[2]
    end = edge if rng.random() < 0.5 else len(data)
    at = int(rng.integers(end))
    match rng.integers(8):
        case 0:
            return data[:at]
        case 1:
            return data + rng.bytes(1 + at % 70)
        case 2:  # one bit
            return data[:at] + bytes([data[at] ^ 1 << rng.integers(8)]) + data[at + 1 :]
        case 3:  # a run of other bytes
            run = rng.bytes(int(rng.integers(1, 9)))
            return data[:at] + run + data[at + len(run) :]
        case 4:  # bytes missing
            return data[:at] + data[at + int(rng.integers(1, 65)) :]
        case 5:  # bytes inserted
            return data[:at] + rng.bytes(int(rng.integers(1, 65))) + data[at:]
        case 6:  # another digit where there is one: lengths, offsets and checksums that remain JSON
            digits = [i for i in range(HEAD.size, edge) if data[i : i + 1].isdigit()]
            at = int(rng.choice(digits))
            return data[:at] + str(rng.integers(10)).encode() + data[at + 1 :]
        case _:  # two equally long pieces exchanged
            size = int(rng.integers(1, 65))
            a, b = sorted(int(i) for i in rng.integers(0, max(1, end - size), 2))
            if b < a + size:
                return data[:at]
            return data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size] + data[b + size :]


def test_mutations_are_refused(model, taken):
    """10,000 over all families: a reason, or nothing was changed."""
    snapshot, data = taken
    identity, rng, refused = Identity.of(model), np.random.default_rng(11), 0
    for _ in range(-(-MUTATIONS // len(RUNS))):
        other = mutated(data, rng)
        try:
            decoded = decode(other, model.layout, identity)
        except SnapshotError as error:
            assert str(error).startswith("snapshot") and "\n" not in str(error)
            refused += 1
        else:
            assert other == data and same(decoded, snapshot)
    assert refused > MUTATIONS // len(RUNS) // 2


def test_a_snapshot_of_another_model_is_refused(taken, model):
    other = next(reference(run) for run in RUNS if run.arch != model.artifact.architecture)
    with pytest.raises(SnapshotError, match="snapshot of family"):
        decode(taken[1], other.layout, Identity.of(other))
    for name in ("layout", "config"):
        with pytest.raises(SnapshotError, match=f"snapshot of {name}"):
            decode(taken[1], model.layout, dataclasses.replace(Identity.of(model), **{name: "0"}))


def test_layout_digests_differ():
    layouts = [
        {}, {"a": Rows((2,))}, {"b": Rows((2,))}, {"a": Rows((3,))}, {"a": Recurrent((2,))}, {"a": Ring(2, (2,))},
        {"a": Ring(3, (2,))}, {"a": Rows((2,)), "b": Rows((2,))}, {"b": Rows((2,)), "a": Rows((2,))},
    ]  # fmt: skip
    assert len({snapshots.layout_digest(layout) for layout in layouts}) == len(layouts)


def rewritten(change):
    """The toy's bytes with its directory changed by hand, lengths put right and everything else as it was."""
    data = encode(toy().snapshot(), IDENTITY)
    size = HEAD.unpack_from(data)[2]
    directory = json.loads(data[HEAD.size : HEAD.size + size])
    blobs = data[HEAD.size + size + -(HEAD.size + size) % 64 :]
    directory = change(directory) or directory
    text = directory if isinstance(directory, bytes) else json.dumps(directory, sort_keys=True, separators=(",", ":")).encode()
    head = HEAD.pack(b"DS4P", 1, len(text)) + text
    return head + bytes(-len(head) % 64) + blobs


def blob(directory, name):
    return next(entry for entry in directory["blobs"] if entry["name"] == name)


def exchange(directory):
    """Two components of equal shape under each other's names, checksums included."""
    a, b = blob(directory, "a/rows"), blob(directory, "b/rows")
    a["name"], b["name"] = b["name"], a["name"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (exchange, "not describe its blobs in the one form"),
        (lambda d: d.update(tokens=4), "one form"),
        (lambda d: d.update(tokens=True), "one form"),
        (lambda d: d.update(more=1), "not an object of"),
        (lambda d: d.update(blobs={}), "not an object of"),
        (lambda d: d.update(blobs=[]), "bytes after its last blob"),
        (lambda d: d.update(vocabulary="9"), "vocabulary '9', expected 9"),
        (lambda d: d.update(family=["x" * 999]), "snapshot of family"),
        (lambda d: d["blobs"].append(3), "entry that is not an object"),
        (lambda d: blob(d, "tokens").update(name="a/x"), "no row of token ids"),
        (lambda d: blob(d, "tokens").update(offset=1), "one form"),
        (lambda d: blob(d, "tokens").update(crc32=0), "checksum"),
        (lambda d: blob(d, "tokens").update(bytes=10**15, shape=[10**15 // 4]), "ends beyond"),
        (lambda d: blob(d, "tokens").update(bytes=24), "needs another number"),
        (lambda d: blob(d, "a/rows").update(shape=[2, 5]), "component 'a'.*expected 5 rows of"),
        (lambda d: blob(d, "a/rows").update(shape=[5.0, 2]), "which no array has"),
        (lambda d: blob(d, "a/rows").update(shape=[-5, -2]), "which no array has"),
        (lambda d: blob(d, "a/rows").update(shape=[10, True]), "which no array has"),
        (lambda d: blob(d, "a/rows").update(shape=[1] * 99), "which no array has"),
        (lambda d: blob(d, "a/rows").update(dtype="object"), "accepted are float16"),
        (lambda d: blob(d, "a/rows").update(dtype=[1]), "accepted are float16"),
        (lambda d: blob(d, "a/rows").update(dtype="int32"), "component 'a'.*holds int32"),
        (lambda d: blob(d, "logits").update(shape=[3, 3]), "logits float32 of shape"),
        (lambda d: blob(d, "logits").update(name="logitz"), "one form"),
        (lambda d: blob(d, "w/rows").update(name="x/rows"), "differ in component 'w'"),
        (lambda d: blob(d, "w/rows").update(name="w/lines"), "component 'w': snapshot has no array 'rows'"),
        (lambda d: blob(d, "b/rows").update(name="a/rows"), "names a blob twice"),
        (lambda d: json.dumps(d).encode(), "one form"),
        (lambda d: b"[" * 100_000, "not JSON"),
        (lambda d: b'{"blobs": ' + b"9" * 5000 + b"}", "not JSON"),
        (lambda d: b"\xff\xfe", "not JSON"),
    ],
)
def test_a_directory_that_lies_is_refused(change, sentence):
    with pytest.raises(SnapshotError, match=sentence):
        decode(rewritten(change), LAYOUT, IDENTITY)


def test_the_rewriting_itself_is_harmless():
    assert same(decode(rewritten(lambda d: None), LAYOUT, IDENTITY), toy().snapshot())


def test_heads_are_refused():
    data = encode(toy().snapshot(), IDENTITY)
    for other, sentence in [
        (b"", "has 0 bytes"),
        (b"GGUF" + data[4:], "begins with b'GGUF'"),
        (data[:4] + b"\2" + data[5:], "version 2, this program reads 1"),
        (data[:8] + b"\xff\xff\xff\xff" + data[12:], "directory of 4294967295 bytes"),
        (data + b"\0", "1 bytes after its last blob"),
        (data[:-1], "ends beyond"),
    ]:
        with pytest.raises(SnapshotError, match=sentence):
            decode(other, LAYOUT, IDENTITY)


def test_padding_must_be_zero():
    data = bytearray(encode(toy().snapshot(), IDENTITY))
    at = HEAD.size + HEAD.unpack_from(data)[2]
    assert at % 64 and data[at] == 0
    data[at] = 1
    with pytest.raises(SnapshotError, match="other bytes than zeros before blob 'tokens'"):
        decode(data, LAYOUT, IDENTITY)


def test_tokens_outside_the_vocabulary_are_refused():
    with pytest.raises(SnapshotError, match="token ids from 1 to 9, accepted are 0 to 8"):
        decode(encode(toy([1, 9]).snapshot(), IDENTITY), LAYOUT, IDENTITY)


def test_only_states_can_be_encoded():
    with pytest.raises(ValueError, match="below 2\\^31, got 4294967296"):
        encode(Snapshot(np.array([1 << 32]), {}), IDENTITY)
    with pytest.raises(ValueError, match="'a/rows' of complex128"):
        encode(Snapshot(np.array([1]), {"a": {"rows": np.zeros(1, complex)}}), IDENTITY)


def test_blobs_lie_as_the_directory_says():
    """Read with nothing but the format's description: another program could."""
    data = encode(toy().snapshot(), IDENTITY)
    magic, version, size = HEAD.unpack_from(data)
    directory = json.loads(data[12 : 12 + size])
    start = -(-(12 + size) // 64) * 64
    assert (magic, version, directory["tokens"]) == (b"DS4P", 1, 5)
    assert [entry["name"] for entry in directory["blobs"]] == ["tokens", "logits", "a/rows", "b/rows", "w/rows"]
    assert all((start + entry["offset"]) % 64 == 0 for entry in directory["blobs"])
    entry = blob(directory, "b/rows")
    rows = np.frombuffer(data, "<f4", 10, start + entry["offset"]).reshape(entry["shape"])
    assert rows.tolist() == [[0, n] for n in (1, 2, 3, 4, 5)]
