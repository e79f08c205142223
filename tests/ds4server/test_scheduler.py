"""The bank driver on a toy model: every answer is its cold answer, rows do not hurt each other, and law 9."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4server.banks import Memory
from ds4server.jobs import BACKLOG, Admitted, Ended, Failed, Produced
from ds4server.keeper import Keeper
from ds4server.lanes import FAILED, REJECTED, Environment
from ds4server.scheduler import Schedule, Scheduler

from .toymodel import LAYOUTS, Toy, cold, heard, job, reuser, text_of

DRIVER = Environment(driver=True, width=3)


def scheduler(model=None, width=3, mode="partial", **more):
    model = model or Toy()
    made = reuser(model, width, mode)
    settled = []

    def settle(done, event):
        settled.append(done)
        done.tell(event)

    retire = made.retire

    def retired(bank, *rest):
        model.log.append(("retired", id(bank.state)))
        return retire(bank, *rest)

    made.retire = retired
    fields = {"env": DRIVER, "schedule": Schedule(8, 3)} | more
    found = Scheduler(model, made, Keeper(None, made, text_of), settle, **fields)
    found.settled = settled
    return found


def arrive(found, *jobs):
    for made in jobs:
        found.counts["started"] += 1
        found.route(made)
        found.waiting.append(made)


def one_pass(found):
    found.sweep(oldest=0)
    found.refill()
    found.turn()


def drain(found, passes=3000):
    for _ in range(passes):
        if not found.rows and not found.waiting:
            break
        one_pass(found)
    assert not found.rows and not found.waiting
    counts = found.counts
    assert counts["started"] == counts["completed"] + counts["failed"] + counts["canceled"] == len(found.settled)
    assert not any(bank.protected for bank in found.reuser.banks)


def played(found, steps, stepped):
    """Take ``steps``, each followed by ``stepped()``, and all jobs to their end: (jobs, those that were cancelled).

    A step is a job's arguments, "pass", or the number of a job to cancel.
    """
    jobs, cancelled = [], set()
    for step in steps:
        if isinstance(step, dict):
            jobs.append(job(**step))
            arrive(found, jobs[-1])
        elif step == "pass":
            one_pass(found)
        elif step < len(jobs):
            cancelled.add(jobs[step])
            jobs[step].cancel()
            one_pass(found)
            assert jobs[step].outcome is not None, "cancellation within a pass"
        stepped()
    drain(found)
    return jobs, cancelled


def check_answer(layout, done):
    tokens, last = heard(done)
    assert isinstance(last, Ended) and done.outcome == "completed"
    generation = done.generation
    params = {"temperature": generation.params.temperature, "seed": generation.params.seed}
    assert tokens == cold(layout, generation.prompt, generation.budget, **params)
    assert done.cached + done.computed == len(generation.prompt)
    assert (done.reuse_kind == "cold") == (done.cached == 0)


def check_law_9(log, live):
    """Between two tokens of a row at most one live chunk was prefilled."""
    since = Counter()
    for kind, what, *n in log:
        if kind == "prefill":
            for state in since:
                since[state] += n[0]
            since.pop(what, None)  # the bank of another row from here on
        elif kind == "retired":
            since.pop(what, None)  # whoever gets it next may have nothing to prefill
        else:
            for state in what:
                assert since[state] <= live, log
                since[state] = 0


PROMPTS = st.builds(
    lambda base, keep, tail: [base + i for i in range(keep)] + tail,
    st.sampled_from([10, 40, 70]), st.integers(1, 60), st.lists(st.integers(0, 9), max_size=3),
)  # fmt: skip
JOBS = st.fixed_dictionaries({
    "prompt": PROMPTS, "budget": st.integers(0, 8), "stream": st.booleans(), "temperature": st.sampled_from([0, 0, 1]),
    "surface": st.sampled_from(["openai_chat", "anthropic_messages"]),
})  # fmt: skip
STEPS = st.lists(st.one_of(JOBS, st.just("pass"), st.just("pass"), st.integers(0, 9)), max_size=40)
ENVIRONMENTS = st.sampled_from([
    DRIVER, Environment(driver=True, width=1), Environment(), Environment(width=2),
    Environment(driver=True, width=2, capacity=30),
    Environment(driver=True, width=3, serial_surfaces=frozenset({"openai_chat"})),
])  # fmt: skip


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@given(
    steps=STEPS,
    env=ENVIRONMENTS,
    live=st.integers(1, 6),
    sched=st.integers(0, 12),
    chunk=st.integers(1, 5),
    grouped=st.booleans(),
)
def test_any_company_gives_the_cold_answer(layout, steps, env, live, sched, chunk, grouped):
    model = Toy(layout, chunk)
    found = scheduler(model, max(2, env.width), env=env, schedule=Schedule(sched, live), grouped=grouped)
    decoded = [0]

    def stepped():
        decoded.append(found.counts["decoded"])
        assert decoded[-1] - decoded[-2] <= env.width + 1

    jobs, cancelled = played(found, steps, stepped)
    for done in jobs:
        if done.outcome == "completed":
            check_answer(layout, done)
        else:
            assert done in cancelled and isinstance(heard(done)[1], Failed)
    check_law_9(model.log, live)
    completed = [done for done in jobs if done.outcome == "completed"]
    if not cancelled:
        assert found.counts["prefill_computed"] == sum(done.computed for done in completed)
        assert found.counts["prefill_cached"] == sum(done.cached for done in completed)
        assert found.counts["decoded"] == sum(len(done.generation.generated) for done in completed)


def test_jobs_begin_in_order_of_arrival():
    found = scheduler(width=2, env=Environment(driver=True, width=2))
    jobs = [job([n, n + 1, n + 2], budget=2 + n % 3) for n in range(8)]
    arrive(found, *jobs)
    began = []
    while found.rows or found.waiting:
        one_pass(found)
        began += [j for j in jobs if j.admitted.is_set() and j not in began]
        assert len(found.rows) <= 2
    assert began == jobs and all(isinstance(j.next(0), Admitted) for j in jobs)


def test_a_serial_job_waits_for_no_bank_lane_and_lets_others_pass():
    found = scheduler()
    first, second, third = job([1, 2], budget=0), job([3, 4], budget=0), job([5, 6], budget=3)
    arrive(found, first, second, third)
    found.refill()
    assert [row.job for row in found.rows] == [first, third]
    assert [j.lane for j in (first, second, third)] == ["serial", "serial", "continuous"]
    drain(found)
    assert heard(second)[0] == [] and second.route_reason == "need_prefill_only"


def test_a_long_prompt_delays_a_short_one_by_one_chunk():
    """A request beside a long prefill gets its first token after one more chunk, and goes on while the rest is prefilled."""
    found = scheduler(schedule=Schedule(512, 16), width=2, env=Environment(driver=True, width=2))
    long, short = job(range(200), budget=1), job([300, 301, 302], budget=10)
    found.arriving = lambda: short.arrived is None
    arrive(found, long)
    short.arrived = None  # arrives while the first chunk is computed
    one_pass(found)
    assert long.computed == 16, "a long chunk ends early for a job that may join"
    short.arrived = 0.0
    arrive(found, short)
    one_pass(found)
    assert len(short.generation.generated) == 1 and long.computed == 16
    for n in range(2, 9):
        one_pass(found)
        assert len(short.generation.generated) == n and long.computed == 16 * n
    drain(found)


def test_a_chunk_ends_at_every_position_to_keep():
    model = Toy("matrix", chunk=64)
    found = scheduler(model, schedule=Schedule(0, 3))
    arrive(found, job(range(100), budget=1, marks=(37,)))
    drain(found)
    ends, at = [], 0
    for kind, _, *n in model.log:
        if kind == "prefill":
            at += n[0]
            ends.append(at)
    assert {16, 32, 37, 48, 64, 80, 96, 100} <= set(ends)


def test_no_interleaving_drains_prefills_first():
    model = Toy(chunk=4)
    found = scheduler(model, schedule=Schedule(4, 0))
    arrive(found, job([1, 2], budget=6))
    one_pass(found)
    arrive(found, job(range(50, 80), budget=2), job(range(100, 130), budget=2))
    found.refill()
    found.turn()
    assert all(row.remaining == 0 for row in found.rows)
    drain(found)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_failing_row_ends_alone(grouped):
    model = Toy(bad={77})
    found = scheduler(model, grouped=grouped)
    good, bad, other = job([1, 2, 3]), job([4, 5, 77, 6]), job([7, 8])
    arrive(found, good, bad, other)
    drain(found)
    for done in (good, other):
        check_answer("rows", done)
    tokens, last = heard(bad)
    assert tokens == [] and isinstance(last, Failed) and last.status == 500 and bad.outcome == "failed"
    assert bad.lane == "serial" and bad.fallback_reason == FAILED
    assert found.counts["route.openai_chat_continuous"] == 3 and found.counts["route.openai_chat_serial"] == 1


def test_rows_that_fail_together_go_on_one_by_one():
    model = Toy(together=False)
    found = scheduler(model, grouped=True)
    jobs = [job([n, 2, 3]) for n in range(3)]
    arrive(found, *jobs)
    drain(found)
    for done in jobs:
        check_answer("rows", done)


def test_a_failure_while_decoding_ends_that_row_alone():
    model = Toy()
    found = scheduler(model)
    good, bad = job([1, 2, 3], budget=9), job([4, 5], budget=9)
    arrive(found, good, bad)
    for _ in range(4):
        one_pass(found)
    model.bad.add(bad.generation.generated[-1])
    model.bad |= set(cold("rows", [4, 5], 9)) - set(cold("rows", [1, 2, 3], 9))
    drain(found)
    check_answer("rows", good)
    tokens, last = heard(bad)
    assert tokens and isinstance(last, Failed) and bad.lane == "continuous"


def test_a_slow_reader_is_cut_off_and_nobody_else():
    found = scheduler()
    slow, good = job([1, 2, 3], budget=400), job([4, 5], budget=6)
    arrive(found, slow, good)
    slow._backlog = BACKLOG
    drain(found)
    check_answer("rows", good)
    assert slow.outcome == "canceled" and found.counts["shed.slow_reader"] == 1


def test_waiting_too_long_and_leaving_while_waiting():
    found = scheduler(width=1, env=Environment(driver=True, width=1))
    jobs = [job([n, 2], budget=5) for n in range(3)]
    arrive(found, *jobs)
    one_pass(found)
    jobs[1].arrived = -5.0
    jobs[2].cancel()
    found.sweep(oldest=0.0)
    assert jobs[1].outcome == "failed" and heard(jobs[1])[1].status == 429 and jobs[2].outcome == "canceled"
    assert found.counts["shed.queue_full"] == 1
    drain(found)


def test_out_of_time_ends_running_and_waiting_rows():
    late = []
    found = scheduler(width=1, env=Environment(driver=True, width=1), stopped=lambda: bool(late))
    jobs = [job([n, 2], budget=50) for n in range(2)]
    arrive(found, *jobs)
    one_pass(found)
    found.refuse()
    assert jobs[1].outcome == "failed" and heard(jobs[1])[1].status == 503
    one_pass(found)
    assert found.rows, "grace"
    late.append(1)
    drain(found)
    assert jobs[0].outcome == "failed" and "shutting down" in heard(jobs[0])[1].message


def test_static_rows_begin_together_and_alone_they_are_serial():
    found = scheduler(env=Environment(width=2))
    plain = {"stream": False}
    jobs = [job([n, 1, 2], **plain) for n in range(3)] + [job([9, 1], stream=True), job([8, 1], **plain)]
    arrive(found, *jobs)
    found.refill()
    assert [row.job for row in found.rows] == jobs[:2]
    drain(found)
    assert [j.lane for j in jobs] == ["static", "static", "serial", "serial", "serial"]
    assert [j.route_reason for j in jobs[:4]] == ["static_no_cont"] * 3 + ["cont_unavailable"]
    for done in jobs:
        check_answer("rows", done)


def test_static_rows_wait_for_company_as_long_as_told():
    found = scheduler(env=Environment(width=2), coalesce_ms=60_000)
    arrive(found, job([1, 2], stream=False))
    assert 0 < found.refill() <= 60_000 and not found.rows
    arrive(found, job([3, 4], stream=False))
    assert found.refill() is None and len(found.rows) == 2
    drain(found)


def memory(found, total, limit=10_000):
    """``found`` on a machine of total[0] bytes, of which a token takes one."""

    def free():
        return total[0] - sum(bank.state.length for bank in found.reuser.banks)

    found.memory = Memory(price=lambda n: n, free=free, limit=limit)
    return found


def test_what_the_memory_does_not_hold_waits_for_the_serial_lane():
    found = memory(scheduler(), [100])
    first, second, third = job(range(40), budget=20), job(range(50, 100), budget=20), job([1, 2, 3], budget=2)
    arrive(found, first, second, third)
    one_pass(found)
    assert second.lane == "serial" and second.fallback_reason == REJECTED and not second.admitted.is_set()
    drain(found)
    assert found.counts["reject.continuous.live_headroom"] == 1
    for done in (first, second, third):
        check_answer("rows", done)
    assert not found.memory.targets


def test_what_no_lane_holds_is_503_after_giving_up_what_is_kept():
    total = [100]
    found = memory(scheduler(), total)
    arrive(found, job(range(30), budget=5))
    drain(found)
    total[0] = 70
    fits, large = job(range(50, 90), budget=20), job(range(100, 190), budget=20)
    arrive(found, fits)
    drain(found)
    check_answer("rows", fits)
    arrive(found, large)
    drain(found)
    assert large.outcome == "failed" and heard(large)[1].status == 503 and found.counts["shed.memory"] == 1
    assert found.counts["reject.serial.live_headroom"] == 1 and all(bank.state.length == 0 for bank in found.reuser.banks)


@pytest.mark.parametrize("budget", [0, 1])
def test_an_identical_prompt_is_a_full_hit(budget):
    found = scheduler()
    first, again = job([1, 2, 3, 4, 5], budget), job([1, 2, 3, 4, 5], budget)
    for done in (first, again):
        arrive(found, done)
        drain(found)
        check_answer("rows", done)
    assert again.cached == 5 and again.computed == 0


def test_records_are_what_ran():
    found = scheduler()
    done = job(range(20), budget=3)
    arrive(found, done)
    drain(found)
    follow = job([*range(20), *done.generation.generated, 7], budget=3)
    arrive(found, follow)
    drain(found)
    record = follow.record()
    assert record["reuse_kind"] in ("exact", "fork") and record["cached"] == 22 and record["computed"] == 2
    assert record["lane"] == "continuous" == record["route_reason"] and record["outcome"] == "completed"
    times = [record[name] for name in ("arrived", "admitted", "prefilled", "first_token", "ended")]
    assert times == sorted(times) and follow.summary()["fallback_reason"] is None and "reuse_miss" not in follow.summary()
    timings = heard(follow)[1].timings
    assert timings["prefill_tokens"] == 2 and timings["effective_lane"] == "continuous"
    assert found.counts["admit.cold"] == 1 == found.counts[f"admit.{record['reuse_kind']}"]


def test_produced_events_are_whole():
    found = scheduler()
    done = job([1, 2, 3], budget=4)
    arrive(found, done)
    drain(found)
    events = []
    while (event := done.next(0)) is not None:
        events.append(type(event))
    assert events == [Admitted, *[Produced] * 4, Ended]
