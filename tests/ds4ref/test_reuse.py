"""The reuse decision and its bookkeeping on toy states, whose logits are a function of all that they keep."""

import numpy as np
import pytest

from ds4ref.reuse import (
    CHANGED,
    NO_CHECKPOINT,
    REPLAY,
    SHORT,
    Bank,
    CheckpointPool,
    Policy,
    Reuser,
    decide,
    stride,
    victim,
)
from ds4ref.state import Compressed, Recurrent, Ring, Rows, State

ANY = Policy(minimum=1)

ROWS = {"rows": Rows((1,))}
RING = {"rows": Rows((1,)), "ring": Ring(3, (1,))}
BLOCKS = {"blocks": Compressed(4, (1,), (1,), 8)}
MATRIX = {"rows": Rows((1,)), "matrix": Recurrent((1,))}


def feed(state, token):
    """One step of a toy family; the logits are a function of all that it keeps."""
    total = float(token)
    for name, kind in state.layout.items():
        component = state[name]
        match kind:
            case Compressed():
                component.append([token], lambda rows, block: rows.sum(0) + block)
                total += component.rows().sum() + component.pending().sum()
            case Recurrent():
                component.replace(component.value * 0.5 + token)
                total += component.value.sum()
            case Ring():
                component.append([token])
                total += component.rows()[-2:].sum()
            case Rows():
                component.append([token])
                total += component.rows().sum()
    state.tokens.append(token)
    state.logits = np.array([total])


def toy(layout, tokens, logits=True):
    state = State(layout)
    for token in tokens:
        feed(state, token)
    if not logits:
        state.logits = None
    return state


def bank(layout, tokens, logits=True, **fields):
    return Bank(toy(layout, tokens, logits), **fields)


def pool(layout, *sequences):
    held = CheckpointPool()
    for tokens in sequences:
        held.capture(toy(layout, tokens))
    return held


def kinds(decision):
    return decision.kind, decision.cached, decision.computed, decision.replayed


LONG = list(range(1, 11))


@pytest.mark.parametrize("layout", [ROWS, RING, BLOCKS, MATRIX], ids=["rows", "ring", "blocks", "matrix"])
def test_a_frontier_is_continued_by_every_kind(layout):
    assert kinds(decide([*LONG, 50, 51], [bank(layout, LONG)], pool(layout), ANY)) == ("exact", 10, 2, 0)
    assert kinds(decide(LONG, [bank(layout, LONG)], pool(layout), ANY)) == ("exact", 10, 0, 0)


@pytest.mark.parametrize(
    ("layout", "prompt", "expected"),
    [
        (ROWS, LONG[:7], ("partial", 6, 1, 1)),  # rewind: only the last token, whose logits are gone
        (ROWS, [*LONG[:5], 50, 51], ("partial", 5, 2, 0)),  # an edit
        (ROWS, [1], ("cold", 0, 1, 0)),
        (RING, [*LONG[:9], 50], ("partial", 9, 1, 0)),  # one token back is still held
        (RING, [*LONG[:8], 50], ("partial", 5, 4, 3)),  # two are not: the checkpoint at 5
        (RING, LONG[:8], ("partial", 5, 3, 3)),
        (RING, LONG[:5], ("partial", 5, 0, 0)),  # a checkpoint keeps its logits
        (RING, LONG[:4], ("cold", 0, 4, 0)),
        (BLOCKS, [*LONG[:8], 50], ("partial", 8, 1, 0)),
        (BLOCKS, [*LONG[:7], 50], ("partial", 5, 3, 2)),  # the block before the open one is no longer held whole
        (MATRIX, [*LONG[:9], 50], ("partial", 5, 5, 4)),
        (MATRIX, [*LONG[:5], 50], ("partial", 5, 1, 0)),
        (MATRIX, LONG[:5], ("partial", 5, 0, 0)),
        (MATRIX, [*LONG[:4], 50], ("cold", 0, 5, 0)),
    ],
)
def test_the_deepest_cut_is_taken(layout, prompt, expected):
    checkpoints = pool(layout, [9, 9, 9, 9, 9], LONG[:5], [9, 9, 9, 9, 9, 9]) if layout != ROWS else pool(layout)
    assert kinds(decide(prompt, [bank(layout, LONG)], checkpoints, ANY)) == expected


def test_a_frontier_without_logits_computes_the_last_token():
    found = decide(LONG, [bank(RING, LONG, logits=False)], pool(RING), Policy(mode="exact"))
    assert kinds(found) == ("exact", 9, 1, 1)
    found = decide(LONG, [bank(MATRIX, LONG, logits=False)], pool(MATRIX, LONG[:5]), ANY)
    assert kinds(found) == ("partial", 5, 5, 5)


@pytest.mark.parametrize(
    ("held", "prompt", "policy", "text", "miss"),
    [
        (bank(MATRIX, LONG), [*LONG[:9], 50], ANY, None, NO_CHECKPOINT),
        (bank(MATRIX, LONG), [50, 51], ANY, None, NO_CHECKPOINT),
        (bank(ROWS, LONG), [*LONG[:9], 50], Policy(mode="exact"), None, NO_CHECKPOINT),
        (bank(ROWS, LONG), [*LONG[:9], 50], Policy(minimum=10), None, SHORT),
        (bank(ROWS, LONG), [*LONG[:9], 50], Policy(minimum=9), None, None),
        (bank(MATRIX, LONG, logits=False), LONG, ANY, None, REPLAY),
        (bank(MATRIX, LONG, text="a b"), [*LONG[:9], 50], ANY, "a b c", CHANGED),
        (bank(MATRIX, LONG, text="a b"), [*LONG[:9], 50], ANY, "a c", NO_CHECKPOINT),
        (bank(ROWS, LONG), LONG, Policy(mode="off"), None, None),
        (bank(ROWS, []), LONG, ANY, None, None),
    ],
)
def test_every_refusal_has_its_reason(held, prompt, policy, text, miss):
    found = decide(prompt, [held], pool(held.state.layout), policy, text)
    assert found.miss == miss and [reason for _, reason in found.refused] == ([miss] if miss else [])
    assert (found.kind == "cold") == (miss is not None or policy.mode == "off" or not held.state.length)


def test_a_refusal_is_dropped_when_another_bank_serves():
    found = decide([*LONG, 50], [bank(MATRIX, [*LONG, 60]), bank(MATRIX, LONG)], pool(MATRIX), Policy(minimum=1, fork=False))
    assert (found.kind, found.target, found.miss, found.refused) == ("exact", 1, None, ((0, NO_CHECKPOINT),))


def test_refusals_start_with_the_closest_bank():
    banks = [bank(MATRIX, [50, 51]), bank(MATRIX, LONG)]
    assert decide([*LONG[:9], 50], banks, pool(MATRIX), Policy(minimum=10)).refused == ((1, SHORT), (0, NO_CHECKPOINT))


def test_the_cut_that_keeps_most_wins_then_the_frontier():
    deeper = decide([*LONG, 50], [bank(ROWS, LONG[:4]), bank(ROWS, [*LONG, 60])], pool(ROWS), ANY)
    assert (deeper.source, deeper.cached) == (1, 10)
    tie = decide(
        [*LONG, 50], [bank(ROWS, [*LONG, 60]), bank(ROWS, LONG, last_used=9)], pool(ROWS), Policy(minimum=1, fork=False)
    )
    assert (tie.source, tie.kind) == (1, "exact")


def place(banks, policy=ANY, prompt=(*LONG, 50)):
    found = decide(prompt, banks, pool(ROWS), policy)
    return found.kind, found.source, found.target


def test_a_cut_is_copied_where_nobody_loses():
    other = bank(ROWS, [7, 8], last_used=5)
    assert place([bank(ROWS, LONG), bank(ROWS, [])]) == ("fork", 0, 1)
    assert place([bank(ROWS, LONG), other, bank(ROWS, LONG[:3])]) == ("fork", 0, 2)  # superseded
    assert place([bank(ROWS, LONG), other]) == ("exact", 0, 0)  # another conversation is not given up for a copy
    assert place([bank(ROWS, LONG), bank(ROWS, [])], Policy(fork=False)) == ("exact", 0, 0)
    assert place([bank(ROWS, LONG), bank(ROWS, [])], Policy(pin=10)) == ("exact", 0, 0)  # too deep to copy
    assert place([bank(ROWS, LONG), bank(ROWS, [])], Policy(pin=0)) == ("fork", 0, 1)
    assert place([bank(ROWS, LONG, protected=True), bank(ROWS, [])]) == ("fork", 0, 1)


def test_a_protected_bank_is_passed_over():
    busy = bank(ROWS, LONG, protected=True)
    assert place([busy, bank(ROWS, [7, 8])]) == ("cold", None, 1)
    assert place([busy, bank(ROWS, [1, 2, 9])]) == ("partial", 1, 1)
    assert place([busy]) == ("cold", None, None)


def test_victims_in_order():
    banks = [
        bank(ROWS, [1, 2, 3, 4], last_used=1),  # deep
        bank(ROWS, [5, 6], last_used=4),
        bank(ROWS, [7, 8], last_used=3),
        bank(ROWS, [7], last_used=9),  # superseded
        bank(ROWS, []),
    ]
    policy, order = Policy(pin=4), []
    for _ in banks:
        order.append(victim(banks, policy))
        assert victim(banks, policy, spare=order[-1]) != order[-1]
        banks[order[-1]].protected = True
    assert order == [4, 3, 2, 1, 0] and victim(banks, policy) is None
    banks[0].protected = False
    assert victim(banks, policy, deep=False) is None and victim(banks, policy, lru=False) is None


def test_of_two_equal_banks_the_older_is_superseded():
    assert victim([bank(ROWS, LONG, last_used=2), bank(ROWS, LONG, last_used=1)], lru=False) == 1


def test_the_pool_gives_up_the_least_recently_used():
    held = CheckpointPool(2)
    for n in (3, 4):
        held.capture(toy(RING, LONG[:n]))
    held.renew(held.best(np.array(LONG), 3))
    held.capture(toy(RING, LONG[:5]))
    assert sorted(len(c.tokens) for c in held) == [3, 5]
    held.capture(toy(RING, LONG[:3]))
    held.capture(toy(RING, LONG[:6]))
    assert sorted(len(c.tokens) for c in held) == [3, 6]
    assert held.nbytes == 8 * (3 + 6) + 4 * (3 + 3) + 2 * 4  # tokens, rings of three, logits; no rows


def test_a_checkpoint_without_logits_is_completed():
    held = CheckpointPool()
    held.capture(toy(RING, LONG, logits=False))
    assert held.best(np.array(LONG), 10) is None and held.best(np.array([*LONG, 50]), 10) is not None
    held.capture(toy(RING, LONG))
    assert held.best(np.array(LONG), 10).logits is not None and len(held) == 1


def test_a_checkpoint_of_blocks_leaves_the_blocks_out():
    state = toy(BLOCKS, range(1, 400))
    assert state.checkpoint().components["blocks"].keys() == {"pending"}
    assert len(state.checkpoint().components["blocks"]["pending"]) == 8


def test_resume_refuses_another_past_and_changes_nothing():
    checkpoint, state = toy(RING, LONG[:5]).checkpoint(), toy(RING, [1, 2])
    for source in (toy(RING, [1, 2, 3, 4, 6, 7]), toy(RING, LONG[:4])):
        with pytest.raises(ValueError, match="do not begin with the 5 of the checkpoint"):
            state.resume(checkpoint, source)
    with pytest.raises(ValueError, match="differ in component 'ring'"):
        state.resume(toy(ROWS, LONG[:5]).checkpoint(), toy(RING, LONG))
    assert state.tokens == [1, 2] and state["rows"].length == 2


@pytest.mark.parametrize("layout", [ROWS, RING, BLOCKS, MATRIX], ids=["rows", "ring", "blocks", "matrix"])
def test_resume_goes_on_like_the_prefix(layout):
    source = toy(layout, range(1, 30))
    for n in range(30):
        checkpoint = toy(layout, range(1, 30)[:n]).checkpoint()
        for state in (State(layout), source.copy()):
            state.resume(checkpoint, state if state.length else source)
            straight = toy(layout, range(1, 30)[:n])
            for token in (5, 6, 7):
                feed(state, token)
                feed(straight, token)
            assert np.array_equal(state.logits, straight.logits) and state.tokens == straight.tokens


def test_strides():
    assert [stride(n) for n in (1000, 8192, 32768, 100_000, 262_144)] == [256, 256, 1024, 3328, 8192]
    assert stride(262_144, slots=8) == 32768


def test_bad_calls():
    with pytest.raises(ValueError, match="a prompt needs at least one token"):
        decide([], [bank(ROWS, LONG)], pool(ROWS))
    with pytest.raises(ValueError, match="must be one of off, exact, partial, got 'auto'"):
        Policy(mode="auto")
    with pytest.raises(ValueError, match="at least one bank, got 0"):
        Reuser(lambda: State(ROWS), 100, width=0)


def reuser_of(layout, **options):
    return Reuser(lambda: State(layout), 1000, **{"policy": ANY, "every": 4, **options})


def ask(reuser, prompt, answer=(), **options):
    """A whole request on toy states: the admission, retired."""
    admission = reuser.admit(prompt, **options)
    for token in admission.remaining:
        admission.progress()
        feed(admission.bank.state, token)
    admission.progress()
    for token in answer:
        feed(admission.bank.state, token)
    reuser.retire(admission.bank)
    return admission


def positions(reuser):
    return [len(checkpoint.tokens) for checkpoint in reuser.pool]


def test_checkpoints_stand_at_strides_marks_ends_and_retirement():
    reuser = reuser_of(MATRIX)
    admission = ask(reuser, range(10), answer=[50, 51], marks=(6, 0, 99))
    assert admission.stops == (4, 6, 8, 10) and positions(reuser) == [4, 6, 8, 10, 12]
    assert ask(reuser, [*range(10), 50, 51, 1, 2, 3]).stops == (15,)  # from 12 on: no multiple of 4 before the end
    assert reuser.pool.nbytes == sum(c.nbytes for c in reuser.pool)


@pytest.mark.parametrize(("layout", "policy"), [(ROWS, ANY), (MATRIX, Policy(mode="exact")), (MATRIX, Policy(mode="off"))])
def test_no_checkpoints_where_none_are_of_use(layout, policy):
    reuser = reuser_of(layout, policy=policy)
    assert ask(reuser, range(10)).stops == () and positions(reuser) == []


def test_a_checkpoint_survives_the_request_that_needs_it():
    """One slot: the replay's own captures push the checkpoint out, and the answer is still right."""
    reuser = reuser_of(MATRIX, slots=1, every=100)
    ask(reuser, range(1, 9))
    admission = ask(reuser, [*range(1, 9), 50], answer=[51])
    again = ask(reuser, [*range(1, 9), 60, 61])
    assert (admission.decision.kind, again.decision.kind) == ("exact", "cold")
    reuser = reuser_of(MATRIX, slots=1, every=8)
    admission = reuser.admit([*range(1, 13)])
    for token in range(1, 12):
        admission.progress()
        feed(admission.bank.state, token)  # captured at 8
    admission.bank.protected = False  # not retired: the only slot stays at 8
    admission = ask(reuser, [*range(1, 10), 50, 51])
    assert kinds(admission.decision) == ("partial", 8, 3, 1) and positions(reuser) == [11]
    assert np.array_equal(admission.bank.state.logits, toy(MATRIX, [*range(1, 10), 50, 51]).logits)


def test_a_fork_goes_on_using_its_sources_checkpoints():
    reuser = reuser_of(MATRIX, width=2)
    ask(reuser, range(1, 11))
    assert kinds(ask(reuser, [*range(1, 11), 50]).decision) == ("fork", 10, 1, 0)
    reuser.clear(reuser.banks[0])
    assert kinds(ask(reuser, [*range(1, 9), 60]).decision) == ("partial", 8, 1, 0)


def test_everything_busy_waits():
    reuser = reuser_of(ROWS, width=2)
    busy = [reuser.admit([1, 2]), reuser.admit([3])]
    assert reuser.admit([1, 2]) is None
    reuser.retire(busy[1].bank, text="3")
    assert reuser.admit([4]).bank is busy[1].bank and busy[1].bank.text is None


def test_a_snapshot_finds_a_bank():
    deep, shallow = toy(ROWS, LONG).snapshot(), toy(ROWS, [5]).snapshot()
    reuser = reuser_of(ROWS, policy=Policy(minimum=1, pin=10))
    assert reuser.adopt(deep, text="long") is reuser.banks[0] and reuser.banks[0].text == "long"
    assert reuser.adopt(shallow) is None and reuser.banks[0].state.tokens == LONG
    assert reuser.adopt(deep) is reuser.banks[0]
    with pytest.raises(ValueError, match="component 'ring'"):
        reuser.adopt(toy(RING, range(20)).snapshot())
    assert reuser.banks[0].state.tokens == LONG
