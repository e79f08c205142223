"""Components against a list that forgets nothing: reads, truncation, snapshots."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4ref.state import Compressed, Recurrent, Ring, Rows, Snapshot, State, memory

LAYOUT = {
    "rows": Rows((2,)),
    "ring": Ring(5, (3,)),
    "overlapping": Compressed(4, (1,), (2, 2), 8),
    "plain": Compressed(6, (1,), (1,), 6),
}


def feed(state, token):
    """One step of a toy family: every component takes a row made of the token."""
    state["rows"].append(np.full(2, token))
    state["ring"].append(np.full(3, token))
    state["overlapping"].append(np.full((2, 2), token), lambda tokens, b: np.array([tokens.sum() + b]))
    state["plain"].append(np.full(1, token), lambda tokens, b: np.array([tokens.sum() * (b + 1)]))
    state.tokens.append(token)


def view(state):
    return {
        "rows": state["rows"].rows(),
        "ring": state["ring"].rows()[-4:],
        "overlapping": state["overlapping"].rows(),
        "open": state["overlapping"].pending(),
        "plain": state["plain"].rows(),
        "plain open": state["plain"].pending(),
    }


def same(a, b):
    return all(np.array_equal(view(a)[name], view(b)[name]) for name in view(a)) and a.tokens == b.tokens


def replay(tokens):
    state = State(LAYOUT)
    for token in tokens:
        feed(state, token)
    return state


@given(st.lists(st.integers(1, 99), max_size=40), st.data())
def test_truncate_is_refused_or_equals_a_replay(tokens, data):
    state = replay(tokens)
    for _ in range(data.draw(st.integers(0, 6))):
        n = data.draw(st.integers(0, state.length))
        before = list(state.tokens)
        if state.can_truncate(n):
            state.truncate(n)
            assert same(state, replay(before[:n]))
        else:
            with pytest.raises(ValueError, match="cannot truncate"):
                state.truncate(n)
            assert same(state, replay(before))
        for token in data.draw(st.lists(st.integers(1, 99), max_size=9)):
            feed(state, token)
        assert same(state, replay(state.tokens))


@given(st.lists(st.integers(1, 99), min_size=1, max_size=40))
def test_the_newest_token_can_always_be_dropped_without_recurrence(tokens):
    assert replay(tokens).can_truncate(len(tokens) - 1)


@given(st.lists(st.integers(1, 99), max_size=30), st.lists(st.integers(1, 99), max_size=20))
def test_snapshot_restores_elsewhere_and_shares_nothing(tokens, more):
    state = replay(tokens)
    snapshot = state.snapshot()
    other = State(LAYOUT)
    other.restore(snapshot)
    for token in more:
        feed(state, token)
        feed(other, token)
    assert same(state, other)
    third = State(LAYOUT)
    third.restore(snapshot)
    assert same(third, replay(tokens))


@given(st.lists(st.integers(1, 99), min_size=1, max_size=30), st.data())
def test_snapshot_of_a_truncated_state(tokens, data):
    state = replay(tokens)
    n = data.draw(st.integers(0, len(tokens)).filter(state.can_truncate))
    state.truncate(n)
    twin = state.copy()
    for token in range(10):
        feed(state, token)
        feed(twin, token)
    assert same(state, twin) and same(twin, replay(tokens[:n] + list(range(10))))


@given(st.lists(st.integers(1, 99), max_size=30), st.data())
def test_rewinding_to_a_checkpoint_equals_a_replay(tokens, data):
    """To any of them, again and again, with other tokens tried in between; refused once the past is another."""
    state, held = State(LAYOUT), []
    for token in tokens:
        held.append(state.checkpoint())
        feed(state, token)
    for _ in range(data.draw(st.integers(1, 5))):
        for token in data.draw(st.lists(st.integers(1, 99), max_size=12)):
            held.append(state.checkpoint())
            feed(state, token)
        checkpoint = data.draw(st.sampled_from([state.checkpoint(), *held]))
        past, before = checkpoint.tokens.tolist(), list(state.tokens)
        if before[: len(past)] == past:
            state.rewind(checkpoint)
            assert same(state, replay(past))
        else:
            with pytest.raises(ValueError, match=f"do not begin with the {len(past)} of the checkpoint"):
                state.rewind(checkpoint)
            assert same(state, replay(before))


def test_rewinding_brings_a_recurrence_and_the_logits_back():
    state = State({"s": Recurrent((2,))})
    state["s"].replace(np.ones(2))
    state.tokens.append(1)
    state.logits = np.arange(3)
    checkpoint = state.checkpoint()
    for _ in range(2):
        state["s"].replace(np.full(2, 9.0))
        state.tokens.append(2)
        state.logits = np.zeros(3)
        state.rewind(checkpoint)
        assert state["s"].value.tolist() == [1, 1] and state["s"].length == 1 == state.length
        assert state.logits.tolist() == [0, 1, 2]


def test_recurrent_goes_back_only_to_nothing():
    state = State({"s": Recurrent((2,))})
    for token in range(3):
        state["s"].replace(state["s"].value + token)
        state.tokens.append(token)
    assert [n for n in range(4) if state.can_truncate(n)] == [0, 3]
    with pytest.raises(ValueError, match="cannot truncate 3 tokens to 2: s forbids it"):
        state.truncate(2)
    state.truncate(0)
    assert state.length == 0 and not state["s"].value.any()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: c.pop("ring"), "differ in component 'ring'"),
        (lambda c: c["rows"].update(rows=np.zeros((3, 2), np.float32)), "component 'rows'.*expected 7 rows"),
        (lambda c: c["rows"].update(rows=np.zeros((7, 2))), "holds float64"),
        (lambda c: c["ring"].update(rows=np.zeros((6, 3), np.float32)), "expected 4 to 5 rows"),
        (lambda c: c["ring"].clear(), "has no array 'rows'"),
        (lambda c: c["plain"].update(pending=np.zeros((0, 1), np.float32)), "expected 1 to 6 rows"),
    ],
)
def test_a_snapshot_that_does_not_fit_changes_nothing(change, sentence):
    snapshot = replay(range(7)).snapshot()
    components = {name: dict(arrays) for name, arrays in snapshot.components.items()}
    change(components)
    state = replay([5, 6])
    with pytest.raises(ValueError, match=sentence):
        state.restore(Snapshot(snapshot.tokens, components))
    assert same(state, replay([5, 6]))


def test_memory_counts_values():
    at_1000, growth = memory(LAYOUT, itemsize=2)
    assert at_1000 == {"rows": 4000, "ring": 30, "overlapping": 2 * (250 + 8 * 4), "plain": 2 * (166 + 6)}
    assert growth == pytest.approx(2 * (2 + 1 / 4 + 1 / 6), rel=1e-5)
