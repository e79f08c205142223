"""What a bank is, what memory a request may claim, and cuts of snapshots."""

import numpy as np
import pytest

from ds4ref.reuse import Bank, Policy
from ds4ref.state import Compressed, Recurrent, Ring, Rows, State
from ds4server.banks import Claim, Credits, Memory, cut, describe, refusal, state_of

from .toymodel import Toy

POLICY = Policy(pin=100)


def bank(n, first=1, **fields):
    state = Toy().new_state()
    for token in range(n):
        Toy().feed(state, token + first)
    return Bank(state, **fields)


def test_what_a_bank_is():
    banks = [bank(0), bank(5), bank(8), bank(100, first=9), bank(4, first=7, protected=True)]
    assert [state_of(b, banks, POLICY) for b in banks] == ["empty", "superseded", "shallow", "deep", "protected"]
    assert describe(banks, POLICY)[1] == {"id": 1, "state": "superseded", "tokens": 5, "reusable": True}
    assert not any(entry["reusable"] for entry in describe(banks, Policy("off")))


CREDITS = Credits({"boot": Claim(10000, 10000), "prewarm": Claim(200, 200), "banks": Claim(1200, 1000)}, 200, 600, 50)


@pytest.mark.parametrize(
    ("proposed", "free", "why"),
    [
        (1500, 1350, None), (1500, 1349, "live_headroom"), (2500, 1 << 40, "class_budget"), (2500, 0, "class_budget"),
        (1500, None, None), (2000, 1850, None),
    ],
)  # fmt: skip
def test_the_contracts_example(proposed, free, why):
    assert refusal(CREDITS, "banks", proposed, 2000, free) == why


def test_what_others_were_promised_is_not_free():
    held = Credits({"banks": Claim(100, 100), "serial": Claim(300, 100)}, transient=5)
    assert refusal(held, "banks", 150, 1000, 255) is None and refusal(held, "banks", 150, 1000, 254) == "live_headroom"


def test_a_bank_may_grow_to_what_it_was_promised():
    banks = [bank(10), bank(20)]
    memory = Memory(price=lambda n: 10 * n, free=lambda: 400, limit=1000, floor=50)
    assert memory.refusal(banks, banks[0], 45) is None, "35 more tokens beside the floor"
    assert memory.refusal(banks, banks[0], 46) == "live_headroom"
    memory.hold(banks[1], 30)
    assert memory.refusal(banks, banks[0], 35) is None and memory.refusal(banks, banks[0], 36) == "live_headroom"
    memory.release(banks[1])
    assert memory.refusal(banks, banks[0], 45) is None
    assert memory.refusal(banks, banks[0], 81) == "class_budget"


LAYOUT = {"rows": Rows((2,)), "ring": Ring(3, (1,)), "matrix": Recurrent((2,)), "blocks": Compressed(4, (1,), (1,), 8)}


def test_a_cut_is_the_state_that_was():
    def grow(state, tokens):
        for token in tokens:
            state["rows"].append([token, token])
            state["ring"].append([token])
            state["matrix"].replace(state["matrix"].value / 2 + token)
            state["blocks"].append([token], lambda rows, block: rows.sum(0) + block)
            state.tokens.append(token)
        state.logits = np.full(4, state.length, np.float32)

    state = State(LAYOUT)
    grow(state, range(1, 11))
    checkpoint, then = state.checkpoint(), state.snapshot()
    grow(state, range(11, 30))
    made = cut(state.snapshot(), 10, LAYOUT, checkpoint)
    State(LAYOUT).restore(made)
    assert np.array_equal(made.tokens, then.tokens) and np.array_equal(made.logits, then.logits)
    for name, arrays in then.components.items():
        assert all(np.array_equal(array, made.components[name][key]) for key, array in arrays.items()), name
    assert cut(state.snapshot(), 10, LAYOUT) is None
    assert len(cut(bank(9).state.snapshot(), 4, Toy().layout).components["a"]["rows"]) == 4
