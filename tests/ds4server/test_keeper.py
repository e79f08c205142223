"""When states go to disk and come back, on a toy model: every reason, every threshold, and answers over restarts."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4ref import reuse, snapshots
from ds4ref.state import State
from ds4server import kvrecord
from ds4server.keeper import Keeper
from ds4server.kvpolicy import Options
from ds4server.kvrecord import Flag, Header, Reason
from ds4server.kvstore import Form, Store
from ds4server.lanes import Environment

from .test_scheduler import arrive, check_answer, drain, scheduler
from .toymodel import CONTEXT, LAYOUTS, Toy, job, reuser, text_of, tokenizer

OPTIONS = Options(min_tokens=8, cold_max=100, continued_interval=16, trim=2, align=8, persist_min=24)
SERIAL, DRIVER = Environment(), Environment(driver=True, width=2)


def store(directory, layout="rows", options=OPTIONS, budget=1 << 30, identity=bytes(32), vocabulary=None):
    components = LAYOUTS[layout]
    about = {"family": "toy", "layout": snapshots.layout_digest(components), "config": "0", "dtype": "float32"}
    form = Form(1, 4, CONTEXT, components, snapshots.Identity(**about, vocabulary=vocabulary or Toy().vocabulary))
    return Store.open(directory, budget, form, options, identity, log=logging.getLogger("test"))


def opened(directory, env=SERIAL, layout="rows", width=2, mode="partial", options=OPTIONS, checkpoints=True, **kept):
    """A scheduler with a disk, as after a start."""
    model = Toy(layout, chunk=5)
    found = scheduler(model, env=env)
    found.reuser = reuser(model, width, mode)
    found.keeper = Keeper(store(directory, layout, options, **kept), found.reuser, text_of, options, 4, checkpoints=checkpoints)
    return found


def ask(found, prompt, budget=3, **more):
    done = job(prompt, budget, **more)
    arrive(found, done)
    drain(found)
    layout = next(name for name, kinds in LAYOUTS.items() if kinds == found.model.layout)
    check_answer(layout, done)
    return done


def written(directory):
    """(reason, tokens) of every record."""
    headers = [Header.decode((data := path.read_bytes())[: kvrecord.HEADER.size], len(data)) for path in directory.glob("*.kv")]
    assert all(bool(header.flags & Flag.BANK) == Reason(header.reason).bank for header in headers)
    return sorted((Reason(header.reason).name, header.tokens) for header in headers)


def test_a_serial_prompt_is_saved_cold_where_a_longer_one_shares_it(tmp_path):
    found = opened(tmp_path)
    ask(found, range(13))
    assert written(tmp_path) == [("COLD", 8)]
    ask(opened(tmp_path), [*range(8), 99, 98])
    assert written(tmp_path) == [("COLD", 8)], "something was reused, so nothing is saved cold"


def test_continued_frontiers_are_saved_in_prompt_and_answer(tmp_path):
    found = opened(tmp_path)
    ask(found, range(100, 140), budget=10)
    assert written(tmp_path) == [("COLD", 32), ("CONTINUED", 16), ("CONTINUED", 48)]


def test_the_opening_of_a_prompt_is_a_better_place_for_a_cold_save(tmp_path):
    found = opened(tmp_path)
    arrive(found, made := job(range(30), 1))
    made.opening = 11
    drain(found)
    assert ("COLD", 11) in written(tmp_path)


@pytest.mark.parametrize("short", [True, False])
def test_a_serial_session_is_saved_when_another_takes_its_bank(tmp_path, short):
    found = opened(tmp_path, width=1, options=Options(min_tokens=8, cold_max=0, continued_interval=0, align=0, trim=0))
    ask(found, range(5 if short else 12), budget=2)
    ask(found, [200, 201, 202])
    assert written(tmp_path) == ([] if short else [("EVICT", 13)])


def test_what_is_resident_is_saved_at_the_end_and_serves_the_next_start(tmp_path):
    quiet = Options(min_tokens=8, cold_max=0, continued_interval=0, persist_min=24)
    found = opened(tmp_path, options=quiet)
    first = ask(found, range(30), budget=3)
    ask(found, [200, 201])
    found.keeper.close()
    assert written(tmp_path) == [("SHUTDOWN", 32)]
    again = opened(tmp_path, options=quiet)
    second = ask(again, [*range(30), *first.generation.generated, 9])
    assert (second.reuse_kind, second.cached, second.reuse_miss) == ("exact", 32, None)
    again.keeper.close()
    assert ("SHUTDOWN", 36) in written(tmp_path)


def test_a_bank_is_saved_when_it_retires_past_a_frontier_and_the_threshold(tmp_path):
    found = opened(tmp_path, DRIVER)
    first = ask(found, range(20), budget=2)
    assert written(tmp_path) == [], "21 tokens are below the threshold"
    second = ask(found, [*range(20), *first.generation.generated, *range(40, 50)], budget=2)
    assert written(tmp_path) == [("BANK_CHECKPOINT", 33)]
    ask(found, [*second.generation.prompt, *second.generation.generated, 5], budget=2)
    assert written(tmp_path) == [("BANK_CHECKPOINT", 33)], "no frontier was passed since"


def test_banks_that_are_taken_over_or_resident_at_the_end(tmp_path):
    found = opened(tmp_path, DRIVER, width=1, checkpoints=False)
    ask(found, range(40), budget=2)
    ask(found, range(200, 240), budget=2)
    assert written(tmp_path) == [("BANK_EVICT", 41)]
    found.keeper.close()
    assert written(tmp_path) == [("BANK_EVICT", 41), ("BANK_SHUTDOWN", 41)]
    kept = opened(tmp_path / "none", DRIVER, width=1, options=Options(min_tokens=8, persist_min=0))
    ask(kept, range(40))
    ask(kept, range(200, 240))
    kept.keeper.close()
    assert written(tmp_path / "none") == [], "0: nothing is persisted by the bank lanes"


def test_tool_calls_travel_with_the_records(tmp_path):
    """Those of the prompt, and those of the answer, whose ids are known only after the bank was written."""
    found = opened(tmp_path, DRIVER)
    done = job(range(65, 105), 3)
    done.blocks["call_a"] = text_of(range(70, 75)).decode()
    done.blocks["call_x"] = "not in the sequence"
    arrive(found, done)
    drain(found)
    assert written(tmp_path) == [("BANK_CHECKPOINT", 42)]
    assert found.keeper.store.tool_blocks([b"call_a", b"call_x", b"call_b"]) == {b"call_a": text_of(range(70, 75))}
    done.blocks["call_b"] = text_of(range(80, 84)).decode()
    found.keeper.close()
    assert written(tmp_path) == [("BANK_SHUTDOWN", 42)], "the same record, which names another call"
    again = opened(tmp_path, DRIVER)
    assert set(again.keeper.store.tool_blocks([b"call_a", b"call_b"])) == {b"call_a", b"call_b"}


def test_a_bank_with_new_tool_calls_is_saved_before_the_next_frontier(tmp_path):
    found = opened(tmp_path, DRIVER)
    first = ask(found, range(65, 105), budget=2)
    follow = job([*first.generation.prompt, *first.generation.generated, 5], 2)
    follow.blocks["call_a"] = text_of(range(70, 75)).decode()
    arrive(found, follow)
    drain(found)
    assert [tokens for _, tokens in written(tmp_path)] == [41, 44]


def test_the_shared_part_of_a_turn_has_a_record_of_its_own(tmp_path):
    """A state that cannot be cut: the next turn departs from this one at the mark, and finds that after a restart."""
    found = opened(tmp_path, DRIVER, layout="matrix")
    ask(found, range(40), budget=3, marks=(37,))
    assert written(tmp_path) == [("BANK_CHECKPOINT", 37), ("BANK_CHECKPOINT", 42)]
    again = opened(tmp_path, DRIVER, layout="matrix")
    follow = ask(again, [*range(37), 99, 98], budget=3)
    assert (follow.cached, follow.reuse_kind) == (37, "exact")


def test_a_record_is_cut_where_states_can_be(tmp_path):
    found = opened(tmp_path, DRIVER)
    ask(found, range(40), budget=3)
    follow = ask(opened(tmp_path, DRIVER), [*range(37), 99, 98], budget=3)
    assert (follow.cached, follow.reuse_kind) == (37, "partial")
    exact = ask(opened(tmp_path, DRIVER, mode="exact"), [*range(37), 99, 98], budget=3)
    assert (exact.cached, exact.reuse_miss) == (0, reuse.NO_CHECKPOINT)


def damage(directory):
    for path in directory.glob("*.kv"):
        data = bytearray(path.read_bytes())
        data[-60] ^= 1
        path.write_bytes(bytes(data))


def test_a_refusal_is_recorded_where_it_happens(tmp_path):
    """Of the five reasons those that serving can meet; none where reuse is off or something was taken."""
    found = opened(tmp_path, DRIVER, mode="exact")
    ask(found, range(40), budget=3)
    assert ask(opened(tmp_path, DRIVER, mode="exact"), [1, 2]).reuse_miss == reuse.SHORT
    assert ask(opened(tmp_path, DRIVER, mode="exact"), range(200, 240)).reuse_miss == reuse.NO_CHECKPOINT
    assert ask(opened(tmp_path, DRIVER, mode="off"), range(40)).reuse_miss is None
    assert ask(found, [*range(40), 77]).reuse_miss == reuse.NO_CHECKPOINT, "a live bank holds more than what is shared"
    other = opened(tmp_path, DRIVER, mode="exact", identity=bytes([1] * 32))
    whole = [*range(40), *ask(opened(tmp_path, DRIVER), range(40), budget=3).generation.generated]
    assert ask(other, [*whole, 7]).reuse_miss == reuse.MISMATCH
    damage(tmp_path)
    damaged = opened(tmp_path, DRIVER, mode="exact")
    assert ask(damaged, [*whole, 8]).reuse_miss == reuse.MISMATCH
    matrix = opened(tmp_path / "m", DRIVER, layout="matrix", mode="exact")
    ask(matrix, range(30), budget=3)
    assert ask(matrix, range(29)).reuse_miss == reuse.NO_CHECKPOINT


def test_a_conversation_whose_tokens_changed_is_named(tmp_path):
    """Two entries of the vocabulary that together have the text of a third: the text leads the prompt, the tokens do not."""
    known = tokenizer()
    whole = next(i for i in range(known.vocab_size) if len(known.token_bytes(i)) == 2 and not known.is_control(i))
    parts = [known.id_of(chr_of) for chr_of in known.piece(whole)]
    found = opened(tmp_path, DRIVER, mode="exact")
    first = ask(found, [*range(20, 40), *parts], budget=1)
    assert ask(found, [*range(20, 40), whole, *first.generation.generated, 3]).reuse_miss == reuse.CHANGED


def test_records_from_which_nothing_can_be_computed_are_quarantined(tmp_path):
    """Each is tried once; then the prompt is computed from its beginning."""
    ask(opened(tmp_path), range(40))
    records = len(written(tmp_path))
    found, sound = opened(tmp_path), set()
    feed = found.model.feed

    def only_what_was_computed_here(state, token):
        if state.length == 0:
            sound.add(id(state))
        assert id(state) in sound
        feed(state, token)

    found.model.feed = only_what_was_computed_here
    for attempt in range(records):
        done = job([*range(40), 99], 3)
        arrive(found, done)
        drain(found)
        assert done.outcome == "failed" and found.keeper.store.counts["hits"] == attempt + 1
    assert ask(found, [*range(40), 99]).cached == 0 and found.keeper.store.counts["hits"] == records
    found.keeper.close()
    assert ask(opened(tmp_path), [*range(40), 97]).cached > 0, "what this process has written since"


def test_a_state_that_cannot_be_restored_is_quarantined(tmp_path, monkeypatch):
    ask(opened(tmp_path), range(40))
    found = opened(tmp_path)
    monkeypatch.setattr(found.reuser, "adopt", lambda *_: [].index("no such layout"))
    records = len(written(tmp_path))
    for n in range(records + 1):
        assert found.keeper.restore([*range(40), 99], text_of([*range(40), 99]), 0, False)[0] is None
        assert found.keeper.store.counts["hits"] == min(n + 1, records)


@pytest.mark.parametrize(("kept", "sentence"), [({"budget": 30}, "exceeds the budget"), ({"broken": "full"}, "full")])
def test_no_state_is_copied_for_a_store_that_refuses(tmp_path, monkeypatch, kept, sentence):
    broken = kept.pop("broken", None)
    found = opened(tmp_path, **kept)
    found.keeper.store._disabled = broken
    assert sentence in found.keeper.store.refusal(text_of(range(80)), 80)

    def never(state):
        raise AssertionError("the state was copied")

    monkeypatch.setattr(State, "snapshot", never)
    ask(found, range(80))
    found.keeper.close()
    assert written(tmp_path) == []


TURNS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 2), st.sampled_from(["go on", "edit", "again"]), st.integers(1, 12)),
        st.sampled_from(["restart", "crash", "damage"]),
    ),
    min_size=4,
    max_size=24,
)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("env", [SERIAL, DRIVER], ids=["serial", "driver"])
@given(turns=TURNS, budget=st.sampled_from([3000, 12000, 1 << 30]), mode=st.sampled_from(["exact", "partial"]))
def test_no_restart_changes_an_answer(tmp_path_factory, layout, env, turns, budget, mode):
    directory = tmp_path_factory.mktemp("kv")
    found = opened(directory, env, layout, mode=mode, budget=budget)
    talks = {n: list(range(20 * n, 20 * n + 14)) for n in range(3)}
    for turn in turns:
        if isinstance(turn, str):
            if turn == "restart":
                found.keeper.close()
            elif turn == "damage":
                damage(directory)
            found = opened(directory, env, layout, mode=mode, budget=budget)
            continue
        n, what, size = turn
        if what == "go on":
            talks[n] = talks[n] + list(range(300, 300 + size))
        elif what == "edit":
            talks[n] = talks[n][: max(1, len(talks[n]) - size)] + [500 - size]
        done = ask(found, talks[n], budget=4, marks=(len(talks[n]) - 1,))
        talks[n] = talks[n] + done.generation.generated
        assert sum(path.stat().st_size for path in directory.glob("*.kv")) <= budget
