"""When a state is saved, and which record goes first: pure functions against the contract's examples and plain models."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4server import kvpolicy
from ds4server.kvpolicy import Options

DEFAULTS = Options()
OPTIONS = st.builds(Options, st.integers(1, 900), st.integers(0, 40000), st.integers(0, 5000), st.integers(0, 100),
                    st.integers(0, 3000), st.integers(0, 9000))  # fmt: skip


@pytest.mark.parametrize(("n", "kept"), [(11011, 10240), (1695, 1695), (2080, 2048), (2079, 2079), (100, 100)])
def test_store_len_of_the_contract(n, kept):
    assert kvpolicy.store_len(n, DEFAULTS) == kept


def test_store_len_without_alignment():
    assert kvpolicy.store_len(11011, replace(DEFAULTS, align=0)) == 10979
    assert kvpolicy.store_len(544, replace(DEFAULTS, align=0)) == 544  # 512 + 32 is not more than 512 + 32
    assert kvpolicy.store_len(545, replace(DEFAULTS, align=0)) == 513


@given(st.integers(1, 50_000), OPTIONS)
def test_store_len_is_the_aligned_trimmed_prompt_or_all_of_it(n, options):
    kept = kvpolicy.store_len(n, options)
    aligned = not options.align or kept % options.align == 0
    assert kept == n or (aligned and options.min_tokens <= kept <= n - options.trim < kept + max(1, options.align))


def test_cold_target():
    assert kvpolicy.cold_target(11011, DEFAULTS) == 10240
    assert kvpolicy.cold_target(11011, DEFAULTS, marker=700) == 700
    assert kvpolicy.cold_target(11011, DEFAULTS, marker=511) == 10240
    assert kvpolicy.cold_target(511, DEFAULTS) is None and kvpolicy.cold_target(512, DEFAULTS) == 512
    assert kvpolicy.cold_target(30_001, DEFAULTS) is None and kvpolicy.cold_target(30_000, DEFAULTS) == 28672
    assert kvpolicy.cold_target(11011, replace(DEFAULTS, cold_max=0)) is None


def test_continued_frontiers():
    assert kvpolicy.continued_step(DEFAULTS) == 10240
    assert kvpolicy.continued_frontiers(0, 31_000, DEFAULTS) == (10240, 20480, 30720)
    assert kvpolicy.continued_frontiers(10240, 20480, DEFAULTS) == (20480,)
    assert kvpolicy.continued_frontiers(20480, 20481, DEFAULTS) == ()
    assert kvpolicy.continued_frontiers(0, 10**6, replace(DEFAULTS, continued_interval=0)) == ()
    assert kvpolicy.continued_frontiers(0, 900, replace(DEFAULTS, align=0, continued_interval=300)) == (600, 900)


@given(st.integers(0, 6000), st.integers(0, 6000), OPTIONS)
def test_continued_frontiers_are_where_the_contract_saves(saved, end, options):
    step = kvpolicy.continued_step(options)
    due = [n for n in range(1, end + 1) if step and n >= options.min_tokens and n % step == 0 and n > saved]
    assert list(kvpolicy.continued_frontiers(saved, end, options)) == due


@pytest.mark.parametrize(
    ("committed", "saved", "tools", "due"),
    [
        (10240, 0, False, True), (10239, 0, False, False), (10239, 0, True, True), (8191, 0, True, False),
        (20479, 10240, False, False), (20480, 10240, False, True), (20480, 10241, False, True),
    ],
)  # fmt: skip
def test_checkpoints_at_retirement(committed, saved, tools, due):
    assert kvpolicy.checkpoint_due(committed, saved, DEFAULTS, tools) == due
    assert not kvpolicy.checkpoint_due(committed, saved, replace(DEFAULTS, persist_min=0), tools)


def test_the_persist_threshold_and_the_record_minimum_both_hold():
    assert kvpolicy.bank_persists(8192, DEFAULTS) and not kvpolicy.bank_persists(8191, DEFAULTS)
    assert not kvpolicy.bank_persists(8192, replace(DEFAULTS, min_tokens=9000))


def test_eviction_scores():
    assert kvpolicy.eviction_score(1000, 0, 0, 500) == 2
    assert kvpolicy.eviction_score(1000, 3, 0, 500) == 8
    assert kvpolicy.eviction_score(1000, 3, 21_600, 500) == 5
    assert kvpolicy.eviction_score(1000, 1, 21_600 * 6.6, 500) > 2
    assert kvpolicy.eviction_score(1000, 1, 21_600 * 6.7, 500) == 2  # a hundredth of a hit is none
    assert kvpolicy.eviction_score(1000, 2**32 - 1, 2.0**64, 500) == 2
    assert kvpolicy.eviction_score(1000, 3, -(2.0**64), 500) == 8  # a clock that was set back
