"""Rows that draft, on a toy model: every greedy answer is the one without drafts, in any company, and is accounted for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4ref.speculative import Cost
from ds4server import scheduler as scheduling
from ds4server.banks import Memory
from ds4server.drafts import LANE, SAMPLED, Drafts
from ds4server.jobs import BACKLOG, Ended, Failed
from ds4server.lanes import CONTINUOUS, SERIAL, Environment
from ds4server.scheduler import Schedule

from . import test_keeper
from .test_scheduler import ENVIRONMENTS, PROMPTS, arrive, check_answer, check_law_9, drain, one_pass, played, scheduler
from .toymodel import LAYOUTS, Drafter, Target, Toy, TrialToy, cold, heard, job

JOBS = st.fixed_dictionaries({
    "prompt": PROMPTS, "budget": st.integers(0, 14), "stream": st.booleans(), "temperature": st.sampled_from([0, 0, 0, 1]),
    "surface": st.sampled_from(["openai_chat", "anthropic_messages"]), "stops": st.sampled_from([(), (), ("e",), (" t", "an")]),
    "repeats": st.booleans(),
})  # fmt: skip
STEPS = st.lists(st.one_of(JOBS, st.just("pass"), st.just("pass"), st.integers(0, 9)), max_size=30)


def opened(model=None, right=1.0, length=3, margin=0.0, lanes=("serial", "continuous", "static"), **more):
    """A scheduler whose rows draft."""
    model = model or TrialToy()
    layout = next(name for name, kinds in LAYOUTS.items() if kinds == model.layout)
    drafts = Drafts(Drafter(layout, right), Target, length, margin, lanes=frozenset(lanes), **more.pop("policy", {}))
    return scheduler(model, drafts=drafts, **more)


def ask(found, prompt, budget=9, **more):
    done = job(prompt, budget, **more)
    arrive(found, done)
    drain(found)
    return done


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@given(
    steps=STEPS,
    env=ENVIRONMENTS,
    live=st.integers(1, 6),
    sched=st.integers(0, 12),
    chunk=st.integers(1, 5),
    grouped=st.sampled_from([None, TrialToy, Toy]),
    length=st.integers(1, 8),
    right=st.sampled_from([0.0, 0.6, 1.0]),
    margin=st.sampled_from([0.0, 0.01]),
    lanes=st.sampled_from([("serial", "continuous", "static"), ("continuous",)]),
)
def test_any_company_gives_the_answer_without_drafts(
    layout, steps, env, live, sched, chunk, grouped, length, right, margin, lanes
):
    """Reuse, forks, cancellation, stop strings, sampled rows beside greedy ones: tokens, reasons to end and what is kept."""
    model = (grouped or Toy)(layout, chunk)
    found = opened(model, right, length, margin, lanes, width=max(2, env.width), env=env, schedule=Schedule(sched, live),
                   grouped=grouped is not None)  # fmt: skip

    def stepped():
        for row in found.rows:
            if row.speculator is not None and row.job.generation.generated:
                assert row.state.tokens == [*row.job.generation.prompt, *row.job.generation.generated[:-1]]
                assert row.speculator.draft.length == row.state.length

    jobs, cancelled = played(found, steps, stepped)
    for done in jobs:
        generation = done.generation
        if done.outcome != "completed":
            assert done in cancelled and isinstance(heard(done)[1], Failed)
        elif generation.params.temperature == 0 or generation.params.repeats:
            tokens, last = heard(done)
            params = {name: getattr(generation.params, name) for name in ("temperature", "seed")}
            expected = cold(layout, generation.prompt, generation.budget, stops=generation.stop_strings, **params)
            assert tokens == generation.generated == expected
            assert isinstance(last, Ended) and done.cached + done.computed == len(generation.prompt)
            assert done.accepted <= done.drafted <= length * done.passes and done.sampled == len(tokens)
    check_law_9(model.log, live)
    assert found.counts["spec.drafted"] == sum(done.drafted for done in jobs)
    assert found.counts["spec.accepted"] == sum(done.accepted for done in jobs)
    assert found.counts["decoded"] == sum(done.sampled for done in jobs)


def test_what_was_done_is_told():
    found = opened()
    done = ask(found, range(20), 13)
    check_answer("rows", done)
    assert (done.drafted, done.accepted, done.passes, done.sampled) == (9, 9, 4, 13)
    assert found.counts["spec.drafted"] == found.counts["spec.accepted"] == 9 and found.counts["spec.quench"] == 0
    assert done.summary()["speculation_active"] and done.record()["speculation_active"] and done.fallback_reason is None
    assert done.timings()["tok_per_step"] == 3.25 and done.timings()["speculation_active"]
    short = ask(found, range(100, 110), 1)
    assert not short.summary()["speculation_active"] and short.drafted == 0, "no draft was verified for it"


def test_a_drafter_that_is_never_right_is_paused_and_counted_once_a_request():
    found = opened(right=0.0)
    for n in (100, 200):
        done = ask(found, range(n, n + 10), 80)
        check_answer("rows", done)
        assert done.accepted == 0 < done.drafted < 30
    assert found.counts["spec.quench"] == 2 and done.timings()["tok_per_step"] == 1


@pytest.mark.parametrize(("a_token", "quenched"), [(0.1, 0), (1.0, 1)])
def test_drafts_are_paused_where_passes_with_them_take_too_long(monkeypatch, a_token, quenched):
    """Each token on trial beyond the first takes so many steps, and all are right."""
    now, verify = 0.0, Target.verify

    def slow(target, tokens, names):
        nonlocal now
        now += 1 + a_token * (len(tokens) - 1)
        return verify(target, tokens, names)

    monkeypatch.setattr(Target, "verify", slow)
    monkeypatch.setattr(scheduling.time, "perf_counter", lambda: now)
    found = opened(policy={"cost": Cost()})
    done = ask(found, range(20), 60)
    check_answer("rows", done)
    assert done.accepted == done.drafted > 0 and found.counts["spec.quench"] == quenched
    assert found.drafts.cost.per_draft == pytest.approx(a_token)
    assert (done.drafted < 10) == (quenched == 1)


def test_a_bank_keeps_its_draft_from_turn_to_turn():
    found = opened(width=1, env=Environment(driver=True, width=1))
    drafter, prompt = found.drafts.drafter, list(range(20))
    for turn in range(3):
        done = ask(found, prompt)
        prompt = [*prompt, *done.generation.generated, 7, 8, turn]
        assert done.accepted == done.drafted > 0
    assert drafter.begun == 1 and done.reuse_kind == "exact"
    ask(found, prompt[:-9])
    assert drafter.begun == 2, "an earlier turn, edited: the sequence was cut, and another draft begins there"


def test_other_sequences_begin_other_drafts():
    found = opened(right=1.0)
    first = ask(found, range(20))
    forked = ask(found, [*range(20), *first.generation.generated, 3])
    assert forked.reuse_kind == "fork" and found.drafts.drafter.begun == 2
    check_answer("rows", forked)
    assert forked.drafted > 0


def test_a_request_that_does_not_draft_says_why_where_drafting_was_forced():
    for forced in (False, True):
        found = opened(policy={"forced": forced, "sampled": False}, lanes=(CONTINUOUS,))
        serial, sampled, good = ask(found, [1, 2], 0), ask(found, [3, 4], temperature=1), ask(found, [5, 6])
        assert [done.drafted > 0 for done in (serial, sampled, good)] == [False, False, True]
        reasons = [LANE.format(SERIAL), SAMPLED, None] if forced else [None] * 3
        assert [done.fallback_reason for done in (serial, sampled, good)] == reasons


def test_sampled_requests_draft_and_have_one_answer_for_a_seed():
    answers = []
    for _ in range(2):
        done = ask(opened(), range(10), 30, temperature=1, seed=5)
        assert done.drafted > 0 and done.outcome == "completed"
        answers.append(done.generation.generated)
    assert answers[0] == answers[1]


def test_scores_of_a_prompt_and_drafts_of_its_answer():
    found = opened()
    done = job(range(20), 9)
    done.scores = []
    arrive(found, done)
    drain(found)
    check_answer("rows", done)
    assert len(done.scores) == 19 and done.drafted > 0


@pytest.mark.parametrize("grouped", [False, True])
def test_a_row_that_fails_in_a_trial_ends_alone(grouped):
    model = TrialToy()
    found = opened(model, grouped=grouped)
    good, bad = job([1, 2, 3], budget=20), job([4, 5], budget=20)
    arrive(found, good, bad)
    for _ in range(2):
        one_pass(found)
    model.bad |= set(cold("rows", [4, 5], 20)) - set(cold("rows", [1, 2, 3], 20))
    assert model.bad
    drain(found)
    check_answer("rows", good)
    tokens, last = heard(bad)
    assert tokens and isinstance(last, Failed) and bad.outcome == "failed" and good.drafted > 0
    model.bad.clear()
    check_answer("rows", ask(found, [4, 5]))


def test_a_drafter_that_fails_ends_its_row_alone():
    found = opened()
    good, bad = job([1, 2, 3], budget=20), job([4, 5], budget=20)
    propose = found.drafts.drafter.propose

    def failing(draft, *rest):
        if draft.everything[0] == 4:
            raise RuntimeError("no idea")
        return propose(draft, *rest)

    found.drafts.drafter.propose = failing
    arrive(found, good, bad)
    drain(found)
    check_answer("rows", good)
    assert bad.outcome == "failed" and isinstance(heard(bad)[1], Failed)


def test_what_fails_together_is_verified_one_by_one():
    found = opened(TrialToy(together=False), grouped=True)
    jobs = [job([n, 2, 3], budget=12) for n in range(3)]
    arrive(found, *jobs)
    drain(found)
    for done in jobs:
        check_answer("rows", done)
        assert done.drafted > 0


def test_a_slow_reader_is_cut_off_within_a_trial():
    found = opened()
    slow, good = job([1, 2, 3], budget=400), job([4, 5], budget=16)
    arrive(found, slow, good)
    one_pass(found)
    slow._backlog = BACKLOG
    drain(found)
    check_answer("rows", good)
    assert slow.outcome == "canceled" and found.counts["shed.slow_reader"] == 1
    follow = ask(found, [1, 2, 3, *slow.generation.generated, 9])
    check_answer("rows", follow)
    assert follow.cached >= 4, "what was computed stays"


def test_time_runs_out_for_rows_that_draft():
    late = []
    found = opened(stopped=lambda: bool(late))
    done = job([1, 2], budget=50)
    arrive(found, done)
    for _ in range(3):
        one_pass(found)
    late.append(1)
    drain(found)
    assert done.outcome == "failed" and done.drafted > 0


def test_memory_is_held_and_released_for_rows_that_draft():
    found = opened()
    found.memory = Memory(price=lambda n: n, free=lambda: 1000, limit=10_000)
    check_answer("rows", ask(found, range(20)))
    assert not found.memory.targets


@pytest.mark.parametrize("right", [0.6, 1.0])
def test_a_serial_answer_is_saved_at_every_frontier_although_it_drafts(tmp_path, right):
    """A trial ends at the frontier where a record is due at the latest, so the same records come as without drafts."""
    records = []
    for drafts in (None, Drafts(Drafter(right=right), Target, 5)):
        folder = tmp_path / str(len(records))
        found = test_keeper.opened(folder)
        found.drafts = drafts
        done = test_keeper.ask(found, range(100, 110), budget=70)
        records.append(test_keeper.written(folder))
    assert records[0] == records[1] and ("CONTINUED", 64) in records[0]
    assert done.drafted > 0
    again = test_keeper.opened(folder)
    again.drafts = drafts
    follow = test_keeper.ask(again, [*done.generation.prompt, *done.generation.generated, 9], budget=9)
    assert follow.cached == 64 and follow.drafted > 0, "after a restore a draft begins anew"


def test_the_answer_of_a_chosen_prompt_is_not_trivial():
    """The toy says different things, so that equal answers mean something."""
    assert len(np.unique(cold("rows", range(20), 40))) > 10
