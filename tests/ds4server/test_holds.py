"""A bank that owes the turn after tool calls is not given up for a while, and never for long."""

import pytest

from ds4ref.chat import CallBegin
from ds4server.holds import Holds
from ds4server.lanes import Environment

from .test_scheduler import arrive, check_answer, one_pass, scheduler
from .toymodel import job

LONG = list(range(100, 140))


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def found(clock):
    return scheduler(width=2, env=Environment(driver=True, width=2), holds=Holds(tokens=20, clock=clock))


def finished(found, done, calls=True):
    """Run a job to its end; with calls, as if its answer had called a tool."""
    arrive(found, done)
    if calls:
        done.calls.append(CallBegin(0, "tide"))
    for _ in range(100):
        if done.outcome:
            return done
        one_pass(found)
    raise AssertionError("the job did not end")


def bank_of(found, done):
    """The bank that holds a job's sequence."""
    tokens = done.generation.prompt
    return next((bank for bank in found.reuser.banks if bank.state.tokens[: len(tokens)] == tokens), None)


def waits(found, arrived):
    """A job that no bank holds anything of, and that has been waiting since ``arrived``."""
    stranger = job([1, 2, 3], budget=2)
    stranger.arrived = arrived
    arrive(found, stranger)
    return stranger


def test_other_conversations_take_other_banks(found):
    owed = finished(found, job(LONG))
    for n in range(5):
        finished(found, job([n, n + 1, n + 2]), calls=False)
    bank = bank_of(found, owed)
    assert bank.protected and bank in found.holds
    turn = finished(found, job([*bank.state.tokens, 7, 8]), calls=False)
    assert turn.reuse_kind in ("exact", "fork") and turn.computed == 2
    check_answer("rows", turn)
    assert not any(bank.protected for bank in found.reuser.banks)


@pytest.mark.parametrize(("prompt", "calls"), [(LONG, False), (LONG[:10], True)], ids=["no call", "short"])
def test_what_is_not_held(found, prompt, calls):
    done = finished(found, job(prompt), calls)
    assert not bank_of(found, done).protected and found.holds.expire() is None


def test_a_hold_ends_in_time(found, clock):
    done = finished(found, job(LONG))
    assert found.holds.expire() == pytest.approx(10_000)
    clock.now = 9.9
    found.holds.expire()
    assert bank_of(found, done).protected
    clock.now = 10.0
    assert found.holds.expire() is None and not bank_of(found, done).protected


def test_who_finds_every_bank_held_waits_a_moment_and_takes_the_oldest(found, clock):
    first = finished(found, job(LONG))
    clock.now = 1.0
    second = finished(found, job([t + 200 for t in LONG]))
    clock.now = 2.0
    stranger = waits(found, arrived=2.0)
    assert found.refill() == pytest.approx(1000) and not found.rows
    clock.now = 3.0
    found.refill()
    assert [row.job for row in found.rows] == [stranger]
    assert bank_of(found, first) is None and bank_of(found, second).protected


def test_the_owed_turn_passes_who_waits(found, clock):
    owed = finished(found, job(LONG))
    finished(found, job([t + 200 for t in LONG]))
    stranger = waits(found, arrived=0.0)
    turn = job([*bank_of(found, owed).state.tokens, 7], budget=3)
    arrive(found, turn)
    found.refill()
    assert [row.job for row in found.rows] == [turn] and turn.computed == 0 and turn.cached == len(turn.generation.prompt) - 1
    clock.now = 1.0
    for _ in range(30):
        one_pass(found)
    assert turn.outcome == stranger.outcome == "completed"
    check_answer("rows", turn)
    check_answer("rows", stranger)
