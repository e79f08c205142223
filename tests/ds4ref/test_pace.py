"""How many drafts a trial has follows what is kept of them and what they cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4ref.speculative import Cost, Pace


def test_pace_follows_acceptance():
    pace = Pace(6)
    assert pace.width() == 6
    for _ in range(40):
        pace.judged(1, 1)  # half are kept
    assert 0.4 < pace.rate < 0.6 and pace.width() in (1, 2)
    for _ in range(40):
        pace.judged(4, 0)
    assert pace.width() == 6


def test_pace_pauses_where_nothing_is_kept_and_tries_again():
    pace = Pace(4, rest=5)
    widths = []
    for _ in range(60):
        widths.append(pace.width())
        if widths[-1]:
            pace.judged(0, 1)
    assert pace.paused >= 3 and set(widths[-12:]) == {0, 1}
    assert widths[-12:].count(1) == 2


def test_cost_is_what_drafts_make_a_pass_longer_by():
    cost = Cost()
    assert cost.due(1) and cost.per_draft == 0.3
    for seconds in (50.0, 1.0):  # the first compiles
        assert cost.due(1)
        cost.took([0], seconds)
    assert not cost.due(1) and cost.due(2), "two sequences are compared with two"
    for seconds in (40.0, 2.5, 9.0):
        cost.took([3], seconds)
    assert cost.per_draft == pytest.approx(0.5)
    cost.took([0, 0], 1.0)
    cost.took([1, 3], 2.0)
    assert cost.per_draft == pytest.approx(0.5), "a pass of two with four drafts costs one step more for each"
    for _ in range(cost.newest):
        cost.took([3], 7.0)
    assert cost.per_draft == pytest.approx(2.0), "what is old is forgotten"
    while not cost.due(1):
        cost.took([3], 0.1)
    assert cost.per_draft == 0


def test_drafts_that_cost_more_than_they_give_are_paused():
    dear = Pace(4, Cost(1.1))
    dear.judged(4, 0)
    assert dear.paused == 1 and dear.width() == 0
    fair = Pace(4, Cost(0.6))
    fair.judged(4, 0)
    assert fair.paused == 0 and fair.width() == 4
    for _ in range(40):
        fair.judged(2, 1)
    assert 0 < fair.width() < 4, "a third of the drafts are wrong: long trials would be in vain"


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=80))
def test_pace_stays_in_bounds(most, trials):
    pace = Pace(most)
    for kept, rejected in trials:
        assert 0 <= pace.width() <= most
        pace.judged(min(kept, most), int(rejected))
        assert 0 <= pace.rate <= 1
