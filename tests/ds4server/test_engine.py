"""The engine's thread and its bounds, on a toy model."""

import threading
import time
from contextlib import contextmanager

import pytest

from ds4server.engine import Engine
from ds4server.jobs import Ended, Failed, QueueFull, Stopping
from ds4server.lanes import Environment

from .test_scheduler import check_answer
from .toymodel import Toy, job, reuser

TWO = Environment(driver=True, width=2)


class Held(Toy):
    """A toy that computes only while it is let."""

    def __init__(self):
        super().__init__()
        self.let = threading.Event()

    def feed(self, state, token):
        assert self.let.wait(20)
        super().feed(state, token)


@contextmanager
def engine(model=None, **more):
    model = model or Toy()
    found = Engine(model, reuser(model, 2), **{"env": TWO} | more)
    found.start()
    try:
        yield found
    finally:
        if isinstance(model, Held):
            model.let.set()
        found.stop(0)


def last(done, seconds=20):
    """The event that ended a job, put back with all others for who reads it next."""
    events = []
    deadline = time.monotonic() + seconds
    while not events or not isinstance(events[-1], (Ended, Failed)):
        assert time.monotonic() < deadline
        if (event := done.next(0.1)) is not None:
            events.append(event)
    for event in events:
        done.tell(event)
    return events[-1]


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_jobs_of_many_threads_are_all_answered():
    ended = []
    with engine(ended=ended.append) as found:
        jobs = [job(range(n, n + 9), budget=6) for n in range(24)]
        threads = [threading.Thread(target=found.submit, args=(made,)) for made in jobs]
        for thread in threads:
            thread.start()
        for made in jobs:
            last(made)
            check_answer("rows", made)
        counts, waiting, running, summary = found.snapshot()
        assert counts["started"] == counts["completed"] == 24 and waiting == running == 0
        assert counts["route.openai_chat_continuous"] == counts["decision.continuous"] == 24
        assert summary == found.recent()[0] and len(found.recent()) == 24
        assert sorted(map(id, ended)) == sorted(map(id, jobs))
        assert [bank["id"] for bank in found.banks()] == [0, 1] and all(bank["reusable"] for bank in found.banks())


@pytest.mark.parametrize("cancel", [True, False])
def test_a_lane_that_empties_takes_the_next_job(cancel):
    """Nothing arrives any more, and what runs is one job at a time."""
    with engine(env=Environment()) as found:
        jobs = [job([n, 2, 3], budget=4000 if cancel and not n else 3) for n in range(4)]
        for made in jobs:
            found.submit(made)
        if cancel:
            assert jobs[0].admitted.wait(20)
            jobs[0].cancel()
            assert isinstance(last(jobs[0]), Failed)
        for made in jobs[cancel:]:
            last(made)
            check_answer("rows", made)


def test_static_rows_begin_when_their_time_is_over():
    with engine(env=Environment(width=2), coalesce_ms=30) as found:
        alone = job([1, 2, 3], stream=False)
        found.submit(alone)
        last(alone)
        check_answer("rows", alone)
        assert alone.lane == "serial" and alone.admitted_at - alone.arrived >= 0.03


def test_the_bounds_of_the_queue():
    model = Held()
    with engine(model, max_queue=1, max_bytes=100) as found:
        running = [job([n, 2], budget=4) for n in range(2)]
        for made in running:
            found.submit(made)
        wait_for(lambda: found.snapshot()[2] == 2)
        waits, over = job([5, 6]), job([7, 8])
        waits.nbytes = 60
        found.submit(waits)
        with pytest.raises(QueueFull):
            found.submit(over)
        assert found.snapshot()[1] == 1 and found.body_bytes == 60
        model.let.set()
        last(waits)
        assert found.body_bytes == 0
        over.nbytes = 101
        with pytest.raises(QueueFull):
            found.check(101)
        with pytest.raises(QueueFull):
            found.submit(over)
        assert found.counts["shed.queue_full"] == 3 and found.counts["started"] == 3


def test_a_job_that_waits_too_long_is_429():
    model = Held()
    with engine(model, env=Environment(), max_age=0.05) as found:
        first, second = job([1, 2], budget=30), job([3, 4])
        found.submit(first)
        wait_for(lambda: found.snapshot()[2] == 1)
        found.submit(second)
        time.sleep(0.1)
        model.let.set()
        event = last(second)
        assert (event.status, event.code) == (429, "queue_full") and isinstance(last(first), Ended)


@pytest.mark.parametrize("grace", [0, 20])
def test_running_answers_get_their_grace(grace):
    model = Held()
    with engine(model, env=Environment()) as found:
        first, second = job([1, 2], budget=8), job([3, 4])
        found.submit(first)
        wait_for(lambda: found.snapshot()[2] == 1)
        found.submit(second)
        stopper = threading.Thread(target=found.stop, args=(grace,))
        stopper.start()
        wait_for(lambda: found.stopping)
        with pytest.raises(Stopping):
            found.submit(job([5]))
        time.sleep(0.02)
        model.let.set()
        stopper.join(20)
        assert isinstance(last(second), Failed) and isinstance(last(first), Ended if grace else Failed)
        assert found.counts["shed.shutdown"] == 1


def test_a_job_whose_client_left_ends_or_goes_on_unheard():
    with engine() as found:
        gone, goes_on = job([1, 2, 3], budget=3000), job([4, 5], budget=40)
        goes_on.outlives_reader = True
        for made in (gone, goes_on):
            found.submit(made)
            assert made.admitted.wait(20)
            made.leave()
        wait_for(lambda: gone.outcome and goes_on.outcome)
        assert (gone.outcome, goes_on.outcome) == ("canceled", "completed")
        assert len(goes_on.generation.generated) == 40


def test_an_engine_that_never_started_stops():
    model = Toy()
    Engine(model, reuser(model, 1)).stop(0)
