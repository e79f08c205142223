import time
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4ref.stop import Finish, ReasoningTracker, StopPolicy, StopStrings, eos_policy

TAPE = ["alpha", " beta", " gam", "ma", " delta"]


def run(stops, pieces):
    """(deltas, matched) of a whole answer; the end is included, and nothing may follow a match."""
    search, deltas, matched = StopStrings(stops), [], None
    for piece in pieces:
        delta, matched = search.feed(piece)
        deltas.append(delta)
        if matched is not None:
            break
    delta, final = search.flush()
    assert matched is None or (delta, final) == ("", matched)
    return [*deltas, delta], final


def whole_text_search(stops, text):
    """The definition: earliest begin, then first listed; everything before it is delivered."""
    found = [(at, i) for i, s in enumerate(stops) if s and (at := text.find(s)) >= 0]
    if not found:
        return text, None
    at, i = min(found)
    return text[:at], stops[i]


def cut(text, places):
    edges = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    return [text[a:b] for a, b in pairwise(edges)] or [text]


@pytest.mark.parametrize(
    "stops, delivered, matched",
    [
        (["beta gamma"], "alpha ", "beta gamma"),
        (["gamma"], "alpha beta ", "gamma"),
        (["gamble"], "alpha beta gamma delta", None),
        (["delta!"], "alpha beta gamma delta", None),
        (["delta", "beta"], "alpha ", "beta"),
        (["ma delta", "gamma"], "alpha beta ", "gamma"),
    ],
)
def test_a_stop_string_over_several_tokens(stops, delivered, matched):
    deltas, found = run(stops, TAPE)
    assert ("".join(deltas), found) == (delivered, matched)
    assert all(delivered.startswith("".join(deltas[: i + 1])) for i in range(len(deltas)))


def test_text_is_held_only_while_it_may_begin_a_stop_string():
    search = StopStrings(["gamma", "x"])
    assert [search.feed(t) for t in ["a g", "am", "ble", "ga", "mmo"]] == [
        ("a ", None), ("", None), ("gamble", None), ("", None), ("gammo", None),
    ]  # fmt: skip
    assert search.feed("no gam") == ("no ", None)
    assert search.flush() == ("gam", None)


@pytest.mark.parametrize("pieces", [["abcd"], ["abc", "d"], list("abcd")])
def test_an_earlier_match_wins_even_if_a_later_one_is_complete_first(pieces):
    assert run(["bc", "abcd"], pieces) == ([*[""] * len(pieces), ""], "abcd")


def test_a_waiting_match_counts_when_the_earlier_one_fails_or_the_text_ends():
    assert run(["bc", "abcd"], ["abc", "x"]) == (["", "a", ""], "bc")
    assert run(["bc", "abcd"], ["abc"]) == (["", "a"], "bc")


def test_at_one_place_the_string_listed_first_wins():
    assert run(["\n\n", "\n"], ["a", "\n", "\n"])[1] == "\n\n"
    assert run(["\n\n", "\n"], ["a", "\n", "b"])[1] == "\n"
    assert run(["\n", "\n\n"], ["a", "\n\n"])[1] == "\n"


def test_after_a_match_nothing_is_delivered():
    search = StopStrings(["b"])
    assert search.feed("abc") == ("a", "b")
    assert search.feed("more") == ("", "b")
    assert search.flush() == ("", "b")


def test_number_of_strings():
    assert StopStrings(["", ""]).feed("anything") == ("anything", None)
    assert StopStrings(["x"] * 16).feed("ax") == ("a", "x")
    with pytest.raises(ValueError, match=r"^stop must hold at most 16 strings, got 17$"):
        StopStrings(["x"] * 17)


def words(longest):
    return ["".join(w) for n in range(1, longest + 1) for w in product("ab", repeat=n)]


def test_every_small_text_one_character_at_a_time():
    """All single stop strings of up to 5 letters in all texts of 8, and all pairs of up to 3: every self-overlap."""
    for stops in [*([s] for s in words(5)), *([s, t] for s in words(3) for t in words(3) if s != t)]:
        for text in map("".join, product("ab", repeat=8)):
            deltas, found = run(stops, text)
            assert ("".join(deltas), found) == whole_text_search(stops, text), (stops, text)


@given(
    st.lists(st.text("ab", max_size=5), max_size=4),
    st.text("ab", max_size=30),
    st.lists(st.integers(0, 99), max_size=12),
)
def test_equals_a_search_of_the_whole_text_for_any_cut(stops, text, places):
    delivered, matched = whole_text_search(stops, text)
    deltas, found = run(stops, cut(text, places))
    assert ("".join(deltas), found) == (delivered, matched)


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=3), st.text("ab", max_size=20))
def test_holds_back_no_more_than_it_must(stops, text):
    """Without a match in sight, what is held is the longest tail that begins a stop string."""
    search, delivered = StopStrings(stops), ""
    for n, char in enumerate(text, 1):
        delta, matched = search.feed(char)
        delivered += delta
        if matched or any(s in text[:n] for s in stops):
            break
        tails = [k for k in range(1, n + 1) if any(s.startswith(text[n - k : n]) for s in stops)]
        assert len(delivered) == n - max(tails, default=0)


@given(st.lists(st.text(min_size=1, max_size=3), max_size=3), st.text(max_size=20), st.lists(st.integers(0, 99)))
def test_any_unicode(stops, text, places):
    deltas, found = run(stops, cut(text, places))
    assert ("".join(deltas), found) == whole_text_search(stops, text)


def test_time_is_linear_and_unmatched_stop_strings_cost_nothing():
    """Held tails of 100,000 characters that fall back at every step, and stop strings of 4 MB that never begin."""
    began = time.perf_counter()
    hard = ["ab" * 50_000 + "x", "a" * 50_000]
    deltas, found = run([*hard, *["z" * 2**22] * 4], ["ab"] * 100_000)
    assert found is None and "".join(deltas) == "ab" * 100_000
    assert time.perf_counter() - began < 5  # about 0.3 s; a rescan of the held tail takes minutes


def test_eos_policies():
    assert (eos_policy(), eos_policy(False, True)) == ("model", "reasoning")
    assert eos_policy(True) == eos_policy(True, True) == "global"
    ends, others = frozenset({1, 7}), frozenset({9})
    table = {"model": (set(), set()), "reasoning": (set(), ends), "global": (ends, ends)}
    for eos, masks in table.items():
        policy = StopPolicy(ends, others, eos)
        assert (policy.masked(False), policy.masked(True)) == masks
        assert [t for t in range(12) if policy.is_end(t)] == [1, 7, 9]
    with pytest.raises(ValueError, match="one of model, reasoning, global, got 'never'"):
        StopPolicy(ends, eos="never")


THINK = ReasoningTracker((b"<think>",), (b"</think>",))


def test_reasoning_opens_and_closes_at_the_last_byte_of_a_marker():
    tracker = THINK.after(b"<assistant><think>\n")
    assert tracker.is_open
    opens = []
    for piece in [b"so", b"</", b"thi", b"nk", b">", b"42"]:
        tracker = tracker.after(piece)
        opens.append(tracker.is_open)
    assert opens == [True, True, True, True, False, False]


def test_a_block_that_the_suffix_closes_or_the_model_opens():
    assert not THINK.after(b"<think>\n\n</think>\n\n").is_open
    assert not THINK.is_open
    assert THINK.after(b"<th").after(b"ink>").is_open
    assert not THINK.after(b"</think>").is_open
    assert THINK.after(b"<think></think><think>").is_open


def test_a_drafted_token_can_be_forgotten():
    tracker = THINK.after(b"<think>a</thin")
    policy = StopPolicy(frozenset({1}), eos="reasoning")
    assert policy.masked(tracker.is_open) == {1}
    assert policy.masked(tracker.after(b"k>").is_open) == set()
    assert policy.masked(tracker.after(b"g>").is_open) == {1}


def test_several_markers():
    fast = ReasoningTracker((b"<think>", b"<think_fast>"), (b"</think>", b"</think_fast>")).after(b"<think_fast>")
    assert fast.is_open and not fast.after(b"x</think>").is_open and not fast.after(b"x</think_fast>").is_open
    with pytest.raises(ValueError, match="non-empty"):
        ReasoningTracker((b"<think>",), (b"",))


@given(
    st.lists(st.sampled_from([b"<t>", b"</t>", b"<", b"</", b"t>", b"/", b"a", b"<<t>"]), max_size=15),
    st.lists(st.integers(0, 99), max_size=10),
)
def test_the_tracker_does_not_depend_on_how_tokens_cut_the_text(parts, places):
    text = b"".join(parts)
    is_open, at = False, 0  # the definition, on the whole text
    while (found := text.find(b"</t>" if is_open else b"<t>", at)) >= 0:
        at = found + (4 if is_open else 3)
        is_open = not is_open
    tracker = ReasoningTracker((b"<t>",), (b"</t>",))
    for piece in cut(text, places):
        tracker = tracker.after(piece)
    assert tracker.is_open == is_open


def test_finish_is_text():
    names = {"stop", "stop_string", "length", "context", "tool_calls", "error", "cancelled"}
    assert {str(f) for f in Finish} == names and Finish("stop_string") is Finish.STOP_STRING
