"""The disk store: what is found, what is refused and why, the budget, damage of every kind, and processes that die."""

import errno
import logging
import os
import shutil
import struct
import subprocess
import sys
import time
from dataclasses import replace
from hashlib import sha1
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4ref import reuse, snapshots
from ds4ref.snapshots import Identity
from ds4server import kvfiles, kvstore
from ds4server.kvpolicy import eviction_score
from ds4server.kvrecord import Flag, Header, Reason
from ds4server.kvstore import Candidate, Form, Loaded, Miss, Refused, Saved, Store, StoreError

sys.path.append(str(Path(__file__).parent))
import kvtoy
from kvtoy import DIGEST, bytes_of, form, opened, query, records, right, snapshot_of, state_of

BIG, OPTIONS, ROWS, WINDOW = kvtoy.BIG, kvtoy.OPTIONS, kvtoy.ROWS, kvtoy.WINDOW

QUIET = settings(suppress_health_check=list(HealthCheck))


@pytest.fixture
def store(tmp_path):
    return opened(tmp_path / "kv")


def save(store, text, reason=Reason.COLD, **more):
    """Save the state of a text."""
    saved = store.save(text, snapshot_of(text, store.form.layout), reason, **more)
    assert isinstance(saved, Saved), saved
    return saved


def path_of(store, saved):
    return store.directory / saved.name


def missed(store, text, **more):
    result = store.restore(query(text, **more))
    assert isinstance(result, Miss), result
    return result.reason


# Writing


def test_a_file_by_hand(store):
    text = b"hello world <call>"
    saved = save(store, text, Reason.BANK_EVICT, tool_map={b"call_1": b"<call>", b"call_2": b"<other>"})
    data = path_of(store, saved).read_bytes()
    payload = snapshots.encode(snapshot_of(text), store.form.identity)
    tools = b"KTM\x01" + struct.pack("<III", 1, 6, 6) + b"call_1<call>"
    header = b"KVC\x01" + bytes([4, 7, 1 | 16 | 64, 3]) + struct.pack("<III", 18, 0, 4096) + bytes([80, 0, 0, 0])
    header += struct.pack("<QQQI", 1000, 1000, len(payload), 18)
    assert data == header + text + payload + tools + b"KVI\x01" + DIGEST + b"KVI!"
    assert saved == Saved(sha1(DIGEST + text).hexdigest() + ".kv", len(data))
    assert oct(path_of(store, saved).stat().st_mode & 0o777) == "0o600"
    assert oct(store.directory.stat().st_mode & 0o777) == "0o700"
    assert sorted(os.listdir(store.directory)) == [".lock", saved.name]


def test_without_identity_names_and_rules_omit_it(tmp_path):
    store = opened(tmp_path, identity=None)
    saved = save(store, b"hello")
    data = path_of(store, saved).read_bytes()
    assert saved.name == sha1(b"hello").hexdigest() + ".kv" and data[6] == 0 and b"KVI" not in data
    assert right(store.restore(query(b"hello")), b"hello")


def test_written_beside_then_flushed_then_renamed_then_flushed(store, monkeypatch):
    calls = []

    def note(name):
        real = getattr(os, name)

        def noted(*args, **kwargs):
            result = real(*args, **kwargs)
            calls.append((name, args, result))
            return result

        monkeypatch.setattr(os, name, noted)

    for name in ("open", "write", "fsync", "rename"):
        note(name)
    saved = save(store, b"hello")
    made = next(i for i, (name, args, _) in enumerate(calls) if name == "open" and ".tmp." in str(args[0]))
    path, flags = calls[made][1][:2]
    assert flags & os.O_EXCL and flags & os.O_CREAT
    assert str(path).startswith(f"{store.directory / saved.name}.tmp.{os.getpid()}.")
    fd, steps = calls[made][2], calls[made + 1 :]
    names = [name for name, _, _ in steps if name != "open"]
    assert names == ["write"] * (len(names) - 3) + ["fsync", "rename", "fsync"]
    assert [args[0] for name, args, _ in steps if name in ("write", "fsync")][:-1] == [fd] * (len(names) - 2)
    assert next(args for name, args, _ in steps if name == "rename") == (path, store.directory / saved.name)
    assert steps[-2][:2] == ("open", (store.directory, os.O_RDONLY | os.O_CLOEXEC)) and steps[-1][1] == (steps[-2][2],)


@pytest.mark.parametrize(
    ("text", "budget", "sentence"),
    [
        (b"abc", BIG, "3 tokens, records have 4 to 4096"),
        (b"x" * 5000, BIG, "5000 tokens"),
        (b"hello", 1500, "exceeds the budget of 1500"),
    ],
)
def test_not_worth_writing(tmp_path, text, budget, sentence):
    store = opened(tmp_path, budget)
    refused = store.save(text, snapshot_of(text), Reason.COLD)
    assert isinstance(refused, Refused) and sentence in refused.reason and not records(tmp_path)


def test_not_able_to_be_written(store, monkeypatch):
    assert "key text of 0 bytes" in store.save(b"", snapshot_of(b"hello"), Reason.COLD).reason
    odd = replace(snapshot_of(b"hello"), logits=np.zeros(256, np.int64))
    assert "'logits' of int64" in store.save(b"hello", odd, Reason.COLD).reason
    assert "id has 1 to 256 bytes" in store.save(b"hello", snapshot_of(b"hello"), Reason.COLD, tool_map={b"": b"h"}).reason
    monkeypatch.setattr(kvstore, "TOOL_MAP_IDS", 1)
    two = {b"a": b"h", b"b": b"h"}
    assert "tool map of 2 ids" in store.save(b"hello", snapshot_of(b"hello"), Reason.COLD, tool_map=two).reason
    assert not records(store.directory)


def test_a_record_of_a_hundredth_less_than_the_budget(tmp_path):
    size = save(opened(tmp_path / "a"), b"hello").nbytes
    fits, not_quite = -(-size * 101 // 100), -(-size * 101 // 100) - 1
    assert isinstance(opened(tmp_path / "b", fits).save(b"hello", snapshot_of(b"hello"), Reason.COLD), Saved)
    assert isinstance(opened(tmp_path / "c", not_quite).save(b"hello", snapshot_of(b"hello"), Reason.COLD), Refused)


def test_a_record_that_is_there_is_kept(store):
    saved = save(store, b"hello")
    before = path_of(store, saved).stat()
    assert store.save(b"hello", snapshot_of(b"hello"), Reason.EVICT) == replace(saved, kept=True)
    assert path_of(store, saved).stat() == before


def test_only_the_tool_map_grows(store):
    text = b"hello <a> <b>"
    first = save(store, text, tool_map={b"1": b"<a>"})
    store.restore(query(text))
    before = path_of(store, first).read_bytes()
    more = save(store, text, tool_map={b"2": b"<b>"})
    after = path_of(store, more).read_bytes()
    assert not more.kept and after[: 52 + 13] == before[: 52 + 13] and before[12] == 1  # hits and times too
    assert store.restore(query(text)).tool_map == {b"1": b"<a>", b"2": b"<b>"}
    assert save(store, text, tool_map={b"1": b"<a>"}).kept


def test_a_record_that_does_not_serve_is_replaced(tmp_path):
    """Of a larger context, or damaged, or of another number of tokens."""
    large = opened(tmp_path, context=8192)
    saved = save(large, b"hello")
    store = opened(tmp_path)
    assert missed(store, b"hello") == reuse.MISMATCH
    assert not save(store, b"hello").kept and right(store.restore(query(b"hello")), b"hello")
    flip(path_of(store, saved), 53, 1)
    assert not save(store, b"hello").kept and right(store.restore(query(b"hello")), b"hello")
    store.save(b"hello", snapshot_of(b"hello", tokens=b"hel|lo"), Reason.COLD)
    assert not save(store, b"hello").kept


# Finding and loading


def test_what_was_saved_is_loaded(store):
    save(store, b"hello")
    loaded = store.restore(query(b"hello world"))
    assert right(loaded, b"hello") and loaded.cached == 5
    assert (loaded.reason, loaded.flags, loaded.tool_map) == (Reason.COLD, Flag.IDENTITY, {})
    state = state_of(b"")
    state.restore(loaded.snapshot)
    assert state.tokens == list(b"hello")
    assert store.counts["hits"] == 1


def test_a_record_survives_the_process(store):
    save(store, b"hello")
    assert right(opened(store.directory).restore(query(b"hello")), b"hello")


def test_the_longest_text_wins(store):
    for text in (b"hello", b"hello wor", b"hello world!", b"hullo world"):
        save(store, text)
    found = store.find(query(b"hello world"))
    assert isinstance(found, Candidate) and (found.tokens, found.common) == (9, 9)
    assert right(store.load(found), b"hello wor")


def test_bank_records_and_banks_leave_a_suffix(store):
    save(store, b"hello")
    save(store, b"hello world", Reason.BANK_CHECKPOINT)
    assert store.restore(query(b"hello world")).key_text == b"hello"
    assert store.restore(query(b"hello world!")).key_text == b"hello world"
    assert store.restore(query(b"hello")).key_text == b"hello"
    assert missed(store, b"hello", bank=True) == reuse.NO_CHECKPOINT


def test_a_hit_is_counted_in_place(tmp_path):
    now = [1000]
    store = opened(tmp_path, clock=lambda: now[0])
    saved = save(store, b"hello")
    path, before = path_of(store, saved), path_of(store, saved).stat().st_ino
    now[0] = 5000
    store.restore(query(b"hello"))
    header = Header.decode(path.read_bytes(), saved.nbytes)
    assert (header.hits, header.last_used, header.created, path.stat().st_ino) == (1, 5000, 1000, before)
    with kvfiles.opened(path) as fd:
        assert kvfiles.try_lock(fd)  # as another server does at this moment
        assert right(store.restore(query(b"hello")), b"hello")
    with open(path, "r+b") as file:
        file.seek(12)
        file.write(b"\xff" * 4)
    assert right(store.restore(query(b"hello")), b"hello") and path.read_bytes()[12:16] == b"\xff" * 4


def test_a_directory_that_only_can_be_read_still_serves(store, monkeypatch):
    save(store, b"hello")
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *mode: real(path, flags, *mode) if not flags & os.O_RDWR else deny())
    assert right(store.restore(query(b"hello")), b"hello")


def failing(code):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    return fail


deny = failing(errno.EACCES)


@pytest.mark.parametrize("kind", [{"family": 4}, {"context": 2048}, {"identity": None}, {"identity": bytes(32)}])
def test_records_of_another_form_are_refused(store, kind):
    save(store, b"hello")
    other = opened(store.directory, **kind)
    assert missed(other, b"hello world") == reuse.MISMATCH
    assert missed(other, b"something else") == reuse.NO_CHECKPOINT
    assert right(store.restore(query(b"hello")), b"hello"), "a record of others was touched"


def test_media_is_part_of_identity(store):
    save(store, b"hello", key_flags=Flag.MEDIA)
    assert missed(store, b"hello") == reuse.MISMATCH
    assert right(store.restore(query(b"hello", media=True)), b"hello")


def test_another_quantization(tmp_path):
    save(opened(tmp_path, identity=None), b"hello")
    two_bits = opened(tmp_path, identity=None, quant_bits=2)
    assert right(two_bits.restore(query(b"hello")), b"hello")
    strict = opened(tmp_path, identity=None, quant_bits=2, options=replace(OPTIONS, reject_different_quant=True))
    assert missed(strict, b"hello") == reuse.MISMATCH


def test_another_layout_is_not_tried_again_and_not_deleted(tmp_path, monkeypatch):
    """Without identity only the payload tells."""
    save(opened(tmp_path, identity=None), b"hello")
    store = opened(tmp_path, identity=None, layout=WINDOW)
    assert missed(store, b"hello") == reuse.MISMATCH and len(records(tmp_path)) == 1
    monkeypatch.setattr(snapshots, "decode", deny)
    assert missed(store, b"hello") == reuse.MISMATCH
    assert store.counts["error.damaged"] == store.counts["error.read"] == 0


def test_records_below_the_minimum(store):
    save(store, b"hello")
    strict = opened(store.directory, options=replace(OPTIONS, min_tokens=6))
    assert missed(strict, b"hello world") == reuse.SHORT
    assert missed(strict, b"nothing like it") == reuse.NO_CHECKPOINT
    assert missed(strict, b"other") == reuse.SHORT
    assert missed(store, b"x") == reuse.SHORT


def test_a_mismatch_is_named_before_a_short_record(store):
    save(store, b"hello")
    save(opened(store.directory, identity=bytes(32)), b"hello w")
    assert missed(opened(store.directory, options=replace(OPTIONS, min_tokens=6)), b"hello world") == reuse.MISMATCH


def test_an_empty_directory_has_no_checkpoint(store):
    assert missed(store, b"hello") == reuse.NO_CHECKPOINT
    assert store.counts[f"miss.{reuse.NO_CHECKPOINT}"] == 1
    shutil.rmtree(store.directory)
    assert missed(store, b"hello") == reuse.NO_CHECKPOINT and store.usage() == (0, 0) and store.tool_blocks([b"x"]) == {}
    assert isinstance(store.save(b"hello", snapshot_of(b"hello"), Reason.COLD), Refused)


def test_tokens_decide(store):
    """The text is the prompt's beginning, its tokens are not: the next shorter record serves, or none."""
    store.save(b"hello w", snapshot_of(b"hello w", tokens=b"hel|o w"), Reason.COLD)
    assert missed(store, b"hello world") == reuse.CHANGED
    save(store, b"hello")
    assert right(store.restore(query(b"hello world")), b"hello")
    assert store.counts[f"miss.{reuse.CHANGED}"] == 1


def test_a_whole_prompt_without_logits_is_cut_or_replayed(tmp_path):
    for layout, cached in ((ROWS, 4), (WINDOW, 4)):
        store = opened(tmp_path / str(len(records(tmp_path)) + cached + len(layout)), layout=layout)
        text = b"hello" if layout is ROWS else b"hi!!!"
        store.save(text, replace(snapshot_of(text, layout), logits=None), Reason.COLD)
        assert store.restore(query(text)).cached == cached
        assert store.restore(query(text + b"?")).cached == 5


def test_a_live_state_that_serves_as_much_is_preferred(store):
    save(store, b"hello")
    assert missed(store, b"hello world", resident=5) is None
    assert store.restore(query(b"hello world", resident=4)).cached == 5


def test_a_record_that_departs_is_cut_where_states_can_be(store):
    save(store, b"hello there")
    assert missed(store, b"hello world") == reuse.NO_CHECKPOINT
    loaded = store.restore(query(b"hello world", partial=True))
    assert right(loaded, b"hello there") and loaded.cached == 6
    assert missed(store, b"hello world", partial=True, partial_min=7) == reuse.NO_CHECKPOINT
    save(store, b"hello")
    assert store.find(query(b"hello world", partial=True)).common == 6
    assert store.find(query(b"hello world")).common == 5
    assert store.find(query(b"hello", partial=True, bank=True)).tokens == 11, "shares the whole prompt"


def test_of_two_that_share_as_much_the_shorter(store):
    save(store, b"hello there, you")
    save(store, b"hello you")
    assert store.find(query(b"hello world", partial=True)).tokens == 9


def test_texts_of_too_different_length_are_not_cut(store):
    save(store, b"hello" + b"x" * 36)  # 8·5 < 41
    assert missed(store, b"hello, this is a different prompt", partial=True) == reuse.NO_CHECKPOINT
    save(store, b"hello" + b"y" * 35)
    assert store.restore(query(b"hello, this is a different prompt", partial=True)).cached == 5
    assert missed(store, b"helly", partial=True) == reuse.NO_CHECKPOINT  # 40 = 8·5, but 8·4 < 40


def test_states_that_cannot_be_cut_are_not_read_for_it(tmp_path, monkeypatch):
    store = opened(tmp_path, layout=WINDOW)
    save(store, b"hello there")
    monkeypatch.setattr(kvstore.Store, "load", deny)
    assert missed(store, b"hello world", partial=True) == reuse.NO_CHECKPOINT


def test_too_few_common_tokens_under_enough_common_text(store):
    """Two bytes a token: text reaches the minimum, tokens do not."""
    store.save(b"hello there", snapshot_of(b"hello there", tokens=[1, 2, 3, 4, 5]), Reason.COLD)
    asked = kvstore.Query(b"hello world", [1, 2, 3, 9], partial=True, partial_min=4)
    assert store.restore(asked) == Miss(reuse.SHORT)


WORDS = st.text("ab", min_size=1, max_size=14)


@QUIET
@given(st.lists(WORDS, max_size=8, unique=True), WORDS, st.booleans())
def test_find_equals_a_plain_search(tmp_path_factory, texts, prompt, partial):
    store = opened(tmp_path_factory.mktemp("kv"), options=replace(OPTIONS, min_tokens=1))
    texts, prompt = [text.encode() for text in texts], prompt.encode()
    for text in texts:
        save(store, text)
    asked = query(prompt, partial=partial, partial_min=3)

    def common(text):
        return next((i for i, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), min(len(text), len(prompt)))

    def serves(text):
        cut = partial and common(text) >= 3 and 8 * common(text) >= len(text) <= 8 * len(prompt)
        return prompt.startswith(text) or cut

    best = max(filter(serves, texts), key=lambda text: (common(text), -len(text)), default=None)
    found = store.find(asked)
    assert isinstance(found, Miss) if best is None else (found.common, found.tokens) == (common(best), len(best))


def test_long_texts_are_compared_in_blocks(store):
    text = bytes(np.random.default_rng(5).integers(1, 255, 1 << 18, np.uint8))
    save_long = store.save(text, snapshot_of(b"hello"), Reason.COLD)
    assert isinstance(save_long, Saved)
    for at in (100, 300, 65536 + 256, 200_000):
        other = text[:at] + b"\xff" + text[at + 1 :]
        assert store.find(kvstore.Query(other, [1] * 5, partial=True, resident=0)).common == at if at > 32768 else True
    foreign = opened(store.directory, identity=bytes(32))
    assert foreign.find(kvstore.Query(text + b"!", [1] * 5)) == Miss(reuse.MISMATCH)
    assert foreign.find(kvstore.Query(text[:-1] + b"\xff!", [1] * 5)) == Miss(reuse.NO_CHECKPOINT)


@pytest.mark.parametrize("name", ["qwen35", "deepseek4"])
def test_states_of_real_families_continue_bit_for_bit(name, tmp_path):
    from runs import reference, runs

    model = reference(next(run for run in runs() if (run.arch, run.artifact, run.cases) == (name, "model.gguf", "cases.npz")))
    kind = Form(1, 8, 64, model.layout, Identity.of(model))
    store = Store.open(tmp_path, BIG, kind, OPTIONS, DIGEST)
    state, prompt = model.new_state(), [3, 1, 4, 1, 5, 9, 2, 6]
    model.prefill(state, prompt[:6])
    assert isinstance(store.save(b"314159", state.snapshot(), Reason.COLD), Saved)
    loaded = Store.open(tmp_path, BIG, kind, OPTIONS, DIGEST).restore(kvstore.Query(b"31415926", prompt))
    twin = model.new_state()
    twin.restore(loaded.snapshot)
    for token in prompt[6:]:
        assert np.array_equal(model.step(twin, token), model.step(state, token))


# Tool calls


def test_blocks_are_found_by_id_whatever_the_identity(store):
    save(store, b"one <a>", tool_map={b"1": b"<a>"})
    save(opened(store.directory, identity=bytes(32)), b"two <b> <c>", tool_map={b"2": b"<b>", b"3": b"<c>", b"4": b"not there"})
    save(opened(store.directory, family=9), b"six <d>", tool_map={b"6": b"<d>"})
    fresh = opened(store.directory)
    assert fresh.tool_blocks([b"1", b"2", b"4", b"5", b"6"]) == {b"1": b"<a>", b"2": b"<b>"}
    assert fresh.tool_blocks([]) == {}
    save(store, b"five <e>", tool_map={b"5": b"<e>"})
    assert fresh.tool_blocks([b"5", b"3"]) == {b"5": b"<e>", b"3": b"<c>"}


def test_a_block_that_the_text_has_not_is_damage(store):
    saved = save(store, b"one <a>", tool_map={b"1": b"<a>"})
    flip(path_of(store, saved), saved.nbytes - 42, 1)
    assert opened(store.directory).tool_blocks([b"1"]) == {} and records(store.directory) == []


# Damage


def flip(path, at, mask):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


HARMLESS = {4, 5, *range(12, 20), *range(24, 40)}  # quantization, reason, hits, context, times: none of them changes the state
ID_AT = -40 - 6 - 1  # of the tool call in the record below: it then names a call that nobody made


@pytest.mark.parametrize("identity", [DIGEST, None], ids=["identity", "none"])
def test_every_flipped_byte_is_a_miss(tmp_path, identity, request):
    """Every byte of a record: the same state, or a miss; and damage is not met twice."""
    text = b"hello <call>"
    store = opened(tmp_path, identity=identity)
    saved = save(store, text, tool_map={b"i": b"<call>"})
    whole = path_of(store, saved).read_bytes()
    harmless = HARMLESS | {len(whole) + ID_AT + (0 if identity else 40)}
    refused, slow = 0, request.config.getoption("--slow")
    for at in range(len(whole)):
        for mask in (1, 0x10, 0x80, 0xFF) if slow else [1 << at % 8]:
            damaged = bytearray(whole)
            damaged[at] ^= mask
            path_of(store, saved).write_bytes(damaged)
            result = store.restore(query(text + b"more"))
            assert isinstance(store.tool_blocks([b"i"]).get(b"i", b"<call>"), bytes)
            if isinstance(result, Loaded):
                assert at in harmless and right(result, text), at
                continue
            assert result.reason in (reuse.MISMATCH, reuse.NO_CHECKPOINT), (at, mask, result)
            assert at in harmless or at < 24 or at >= 40
            again = store.restore(query(text + b"more"))
            assert isinstance(again, Miss)
            refused += 1
    assert refused >= (len(whole) - len(harmless)) * (4 if slow else 1)
    path_of(store, saved).write_bytes(whole)
    assert right(store.restore(query(text + b"more")), text)


@QUIET
@given(st.data())
def test_any_bytes_are_survived(tmp_path_factory, data):
    """Cut, extended, overwritten, with other lengths: never an exception, never another state."""
    store = opened(tmp_path_factory.mktemp("kv"))
    text = b"hello <call>"
    path = path_of(store, save(store, text, tool_map={b"i": b"<call>"}))
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged)))
        match data.draw(st.sampled_from(["cut", "insert", "overwrite", "u32", "u64"])):
            case "cut":
                del damaged[at : at + data.draw(st.integers(1, 2000))]
            case "insert":
                damaged[at:at] = data.draw(st.binary(min_size=1, max_size=64))
            case "overwrite":
                run = data.draw(st.binary(min_size=1, max_size=64))
                damaged[at : at + len(run)] = run
            case "u32":
                damaged[48:52] = struct.pack("<I", data.draw(st.integers(0, 2**32 - 1)))
            case _:
                damaged[40:48] = struct.pack("<Q", data.draw(st.integers(0, 2**64 - 1)))
    path.write_bytes(damaged)
    for asked in (query(text), query(b"hello, you", partial=True)):
        result = store.restore(asked)
        assert right(result, text) if isinstance(result, Loaded) else result.reason in (reuse.MISMATCH, reuse.NO_CHECKPOINT)
    store.tool_blocks([b"i"])
    assert isinstance(store.save(text, snapshot_of(text), Reason.COLD), Saved)
    assert right(store.restore(query(text)), text)


def test_a_record_that_lies_about_its_tokens(store):
    saved = save(store, b"hello")
    flip(path_of(store, saved), 8, 2)  # 7 tokens
    assert missed(store, b"hello") == reuse.MISMATCH and records(store.directory) == []
    assert store.counts["error.damaged"] == 1 and missed(store, b"hello") == reuse.NO_CHECKPOINT


def test_a_damaged_record_that_cannot_be_deleted_is_not_read_again(store, monkeypatch, caplog):
    saved = save(store, b"hello")
    flip(path_of(store, saved), 200, 1)
    monkeypatch.setattr(os, "unlink", deny)
    assert missed(store, b"hello") == reuse.MISMATCH
    monkeypatch.setattr(snapshots, "decode", deny)
    assert missed(store, b"hello") == reuse.MISMATCH and store.counts["error.damaged"] == 1
    flip(path_of(store, saved), 0, 1)
    flip(path_of(store, saved), 0, 1)
    flip(path_of(store, saved), 21, 1)  # now its header too
    for _ in range(3):
        missed(store, b"hello")
    assert store.counts["error.damaged"] == 2


def test_a_device_that_fails(store, monkeypatch):
    save(store, b"hello")
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    assert missed(store, b"hello") == reuse.MISMATCH and len(records(store.directory)) == 1
    monkeypatch.undo()
    assert missed(store, b"hello") == reuse.MISMATCH, "not tried again while the file is the same"
    assert right(opened(store.directory).restore(query(b"hello")), b"hello")


def test_a_record_that_goes_away_between_finding_and_loading(store):
    saved = save(store, b"hello")
    found = store.find(query(b"hello"))
    path_of(store, saved).unlink()
    assert store.load(found) == Miss(reuse.MISMATCH)


def test_other_things_in_the_directory(store, tmp_path):
    """Files that are no records, and what only looks like one."""
    save(store, b"hello")
    name = sha1(DIGEST + b"hello w").hexdigest() + ".kv"
    outside = tmp_path / "outside"
    outside.write_bytes((store.directory / records(store.directory)[0]).read_bytes())
    for make in (
        lambda path: path.write_bytes(b"my notes"),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"KVC\x02"),
        lambda path: path.mkdir(),
        lambda path: os.mkfifo(path),
        lambda path: path.symlink_to(outside),
    ):
        path = store.directory / name
        make(path)
        (store.directory / "README").write_text("private")
        assert right(opened(store.directory).restore(query(b"hello w")), b"hello")
        assert store.tool_blocks([b"x"]) == {} and store.usage()[0] == 1
        assert path.is_symlink() or path.exists()
        path.rmdir() if path.is_dir() else path.unlink()


def test_allocations_are_bounded_by_the_file(store, monkeypatch):
    saved = save(store, b"hello", tool_map={b"i": b"hello"})
    data = path_of(store, saved).read_bytes()
    asked = []
    real = kvfiles.read
    monkeypatch.setattr(kvfiles, "read", lambda fd, at, size: asked.append(size) or real(fd, at, size))
    sections = saved.nbytes - 40 - (8 + 8 + 1 + 5)
    hostile = {48: 4, 40: 8, 52 + 5 + 8: 4, sections + 4: 4, sections + 8: 4, sections + 12: 4}  # where a size stands
    for at, size in hostile.items():
        value = b"\xff" * size
        path_of(store, saved).write_bytes(data[:at] + value + data[at + len(value) :])
        store.restore(query(b"hello"))
        store.tool_blocks([b"i"])
        assert isinstance(store.restore(query(b"hello")), Miss)
    assert max(asked) < saved.nbytes


# Budget


STEPS = st.lists(st.tuples(st.sampled_from(["save", "save", "load"]), st.integers(0, 9), st.integers(0, 20_000)), max_size=25)


@QUIET
@given(STEPS, st.integers(3000, 9000))
def test_the_budget_holds_and_the_least_worth_goes(tmp_path_factory, steps, budget):
    """Against a plain model of the directory: after every write the same records are there."""
    now, model = [1000], {}
    directory = tmp_path_factory.mktemp("kv")
    store = opened(directory, budget, clock=lambda: now[0])
    for action, number, later in steps:
        now[0] += later
        text = bytes([65 + number]) * (4 + 17 * number)
        if action == "load":
            if isinstance(store.restore(query(text + b"!")), Loaded):
                model[text][1:3] = [model[text][1] + 1, now[0]]
            else:
                assert text not in model
            continue
        size = save_size(text)
        saved = store.save(text, snapshot_of(text), Reason.COLD)
        if size * 1.01 > budget:
            assert isinstance(saved, Refused)
        elif text not in model:
            while sum(entry[0] for entry in model.values()) + size > budget:
                scores = {t: (eviction_score(len(t), hits, now[0] - used, n), used) for t, (n, hits, used) in model.items()}
                least = min(scores.values())
                del model[min((t for t in scores if scores[t] == least), key=lambda t: sha1(DIGEST + t).hexdigest())]
            model[text] = [size, 0, now[0]]
        assert bytes_of(directory) <= budget
        assert records(directory) == sorted(sha1(DIGEST + t).hexdigest() + ".kv" for t in model)
    reopened = opened(directory, budget // 2, clock=lambda: now[0])
    assert reopened.usage() == (len(records(directory)), bytes_of(directory)) and bytes_of(directory) <= budget // 2


def save_size(text):
    return 52 + len(text) + len(snapshots.encode(snapshot_of(text), form().identity)) + 40


def test_the_file_being_written_is_not_a_victim(tmp_path):
    text = b"hello <a> <b>"
    size = save(opened(tmp_path), text, tool_map={b"1": b"<a>"}).nbytes
    store = opened(tmp_path, size + 40)
    assert isinstance(store.save(text, snapshot_of(text), Reason.COLD, tool_map={b"2": b"<b>"}), Saved)
    assert store.counts["evictions"] == 0 and size < bytes_of(tmp_path) <= size + 40


def test_a_hit_counts_within_one_tick_of_the_clock(tmp_path):
    """A file's time may not tell that it was used this moment."""
    names = {save(opened(tmp_path), text).name: text for text in (b"hello", b"world")}
    used, unused = sorted(names)  # without the hit the first name would go first
    size = (tmp_path / used).stat().st_size
    store = opened(tmp_path, 2 * size + 100)
    before = (tmp_path / used).stat().st_mtime_ns
    assert isinstance(store.restore(query(names[used])), Loaded)
    os.utime(tmp_path / used, ns=(before, before))
    save(store, b"third")
    assert used in records(tmp_path) and unused not in records(tmp_path)


def test_all_identities_share_the_budget(tmp_path):
    first = save(opened(tmp_path, identity=bytes(32)), b"hello")
    store = opened(tmp_path, first.nbytes + 100)
    save(store, b"world")
    assert records(tmp_path) == [sha1(DIGEST + b"world").hexdigest() + ".kv"] and store.counts["evictions"] == 1


def test_what_another_server_writes_meanwhile_counts(tmp_path, monkeypatch):
    first, second = save_size(b"hello"), save_size(b"worlds")
    store, other = opened(tmp_path, first + second - 1), opened(tmp_path, first + second - 1)
    real = os.fsync

    def meanwhile(fd):
        monkeypatch.setattr(os, "fsync", real)
        save(other, b"worlds")
        real(fd)

    monkeypatch.setattr(os, "fsync", meanwhile)
    saved = save(store, b"hello")
    assert records(tmp_path) == [saved.name] and bytes_of(tmp_path) <= store.budget


def test_an_unlink_failure_stops_the_pass(tmp_path, monkeypatch):
    first = save(opened(tmp_path), b"hello")
    store = opened(tmp_path, first.nbytes + 100)
    monkeypatch.setattr(os, "unlink", deny)
    assert store.save(b"world", snapshot_of(b"world"), Reason.COLD) == Refused(kvstore.NO_ROOM)
    assert records(tmp_path) == [first.name] and store.counts["error.write"] == 1
    monkeypatch.undo()
    assert isinstance(store.save(b"world", snapshot_of(b"world"), Reason.COLD), Saved)


def test_a_full_disk_ends_saving_with_one_warning(store, monkeypatch, caplog):
    save(store, b"hello")
    with monkeypatch.context() as full, caplog.at_level(logging.WARNING):
        full.setattr(os, "write", failing(errno.ENOSPC))
        for _ in range(3):
            refused = store.save(b"world", snapshot_of(b"world"), Reason.COLD)
            assert isinstance(refused, Refused) and "No space left on device" in refused.reason
    assert len(caplog.records) == 1 and "nothing more is saved" in caplog.text
    assert isinstance(store.save(b"world", snapshot_of(b"world"), Reason.COLD), Refused)
    assert right(store.restore(query(b"hello")), b"hello")
    assert sorted(os.listdir(store.directory)) == [".lock", sha1(DIGEST + b"hello").hexdigest() + ".kv"]
    assert store.counts["error.full"] == 1


def test_another_failure_refuses_one_save(store, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", failing(errno.EIO))
        assert "Input/output error" in store.save(b"hello", snapshot_of(b"hello"), Reason.COLD).reason
    assert not records(store.directory)
    save(store, b"hello")


def test_whoever_cannot_have_the_lock_does_not_write(store, monkeypatch):
    monkeypatch.setattr(kvfiles, "LOCK_SECONDS", 0.02)
    with kvfiles.exclusive(store.directory):
        refused = store.save(b"hello", snapshot_of(b"hello"), Reason.COLD)
        assert "another process holds the directory's lock" in refused.reason
        with pytest.raises(StoreError, match="another process holds"):
            opened(store.directory)
    save(store, b"hello")


# Opening


def test_left_overs_go_and_files_being_written_stay(tmp_path):
    name = "a" * 40 + ".kv"
    left = [".payload.1.0", f"{name}.tmp.{os.getpid()}.7", f"{name}.tmp.99999999.7"]
    others = ["notes.tmp.1.1", f"{name}.tmp", f"{name}.tmp.1.1.old", ".payload"]
    for path in [*left, *others, f"{name}.tmp.1.2"]:
        (tmp_path / path).write_bytes(b"x")
    with kvfiles.opened(tmp_path / f"{name}.tmp.1.2") as fd:
        assert kvfiles.try_lock(fd)
        opened(tmp_path)
        assert sorted(os.listdir(tmp_path)) == sorted([*others, f"{name}.tmp.1.2", ".lock"])
    opened(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, ".lock"])


def test_directories_that_cannot_be_used(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        for use in (opened, kvstore.check):
            with pytest.raises(StoreError, match=r"store .*file.* cannot be used: (File exists|Not a directory); accepted"):
                use(path)
    monkeypatch.setattr(os, "open", deny)
    with pytest.raises(StoreError, match="Permission denied"):
        kvstore.check(tmp_path / "new" / "deep")
    assert os.listdir(tmp_path) == ["file"]


def test_checking_leaves_nothing_behind(tmp_path):
    kvstore.check(tmp_path / "new" / "deep")
    kvstore.check(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_directory_that_others_may_list_is_named_and_left_as_it_is(tmp_path, caplog):
    tmp_path.chmod(0o755)
    with caplog.at_level(logging.INFO, "ds4server"):
        opened(tmp_path)
    assert "other users may list the directory" in caplog.text and tmp_path.stat().st_mode & 0o777 == 0o755
    assert f"0 records, 0 bytes, identity {DIGEST.hex()}" in caplog.text


# Processes


@pytest.fixture
def apart(tmp_path):
    """Run a part of ``kvtoy`` in an interpreter of its own, in memory where there is such a file system."""
    memory = Path("/dev/shm")
    base = memory / tmp_path.parent.name / tmp_path.name if os.access(memory, os.W_OK) else tmp_path
    base.mkdir(parents=True, exist_ok=True)

    def run(what, number):
        command = [sys.executable, Path(__file__).with_name("kvtoy.py"), what, base, str(number)]
        env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        out = subprocess.run(command, capture_output=True, text=True, timeout=500, env=env)
        lines = out.stdout.splitlines()
        assert out.returncode == 0 and lines and lines[-1].startswith("done"), out.stdout + out.stderr
        assert len(lines) == 1, "\n".join(lines)
        return lines[0]

    yield run
    shutil.rmtree(base)


def test_a_process_that_ends_between_any_two_system_calls(apart, request):
    """Every visible record loads afterwards, nothing is left over, the budget holds."""
    every = 1 if request.config.getoption("--slow") else 8
    assert int(apart("crashes", every).split()[1]) >= 200 // every


def test_a_process_that_is_killed_at_any_moment(apart, request):
    apart("kills", 100 if request.config.getoption("--slow") else 8)


def test_two_processes_share_a_directory(apart, request):
    apart("sharing", 500 if request.config.getoption("--slow") else 40)


def test_a_thousand_records_are_searched_fast(tmp_path):
    """Headers are read once; a search then lists the directory and hashes the prompt once."""
    store = opened(tmp_path)
    whole = (tmp_path / save(store, b"start " * 50).name).read_bytes()
    header = Header.decode(whole, len(whole))
    for i in range(1000):
        text = b"start " * 50 + b"%4d" % i + b"." * (i % 50)
        body = replace(header, text_bytes=len(text)).encode() + text + whole[header.payload_at :]
        (tmp_path / (sha1(DIGEST + text).hexdigest() + ".kv")).write_bytes(body)
    prompt = b"start " * 50 + b" 777" + b"." * 27 + b"?" * 100_000
    store.find(query(prompt))
    seconds = []
    reads = []
    real = os.pread
    os.pread = lambda *args: reads.append(args) or real(*args)
    try:
        for _ in range(5):
            start = time.process_time()
            found = store.find(query(prompt))
            seconds.append(time.process_time() - start)
    finally:
        os.pread = real
    assert found.common == 304 + 27 and not reads
    assert min(seconds) < 0.25
    start = time.process_time()
    assert store.find(query(prompt, partial=True)) == replace(found, query=query(prompt, partial=True))
    partial = time.process_time() - start
    assert partial < 1
    print(f"\n1000 records: {1000 * min(seconds):.1f} ms of processor, {1000 * partial:.1f} ms with a look at every text")
