"""What is remembered about calls by their ids, against a plain model of it."""

from hypothesis import given
from hypothesis import strategies as st

from ds4server.toolmemory import MAX_PENDING, ToolMemory


def history(*ids):
    return [{"role": "assistant", "tool_calls": [{"id": name} for name in ids]}]


def remember(memory, ids, text):
    memory.remember(ids, text, history(*ids), 1)


def test_a_block_belongs_to_all_its_ids():
    memory = ToolMemory()
    remember(memory, ["a", "b"], "<two calls>")
    found = memory.blocks(history("a", "b"))
    assert found["a"] is found["b"] and found["a"].ids == ("a", "b") and found["a"].text == "<two calls>"
    assert memory.blocks(history("c")) == {} and memory.blocks([{"role": "user"}]) == {}


def test_without_exact_replay_nothing_is_kept():
    memory = ToolMemory(exact=False, stored=lambda ids: dict.fromkeys(ids, "disk"))
    remember(memory, ["a"], "x")
    assert memory.blocks(history("a")) == {} and memory.known() == (0, 0)
    assert memory.pending(["a"]), "a continuation needs no block"


@given(st.lists(st.tuples(st.sampled_from(["keep", "use"]), st.integers(0, 9), st.integers(1, 3)), max_size=40))
def test_the_one_used_longest_ago_goes_first(script):
    memory, model = ToolMemory(max_ids=6), []
    for verb, n, calls in script:
        ids = tuple(f"{n}.{i}" for i in range(calls))
        known = next((kept for kept in model if kept[0] == ids[0]), None)
        if verb == "keep" and known is None:
            remember(memory, ids, "x" * n)
            model.append(ids)
            while sum(map(len, model)) > 6:
                model.pop(0)
        elif known is not None:
            assert memory.blocks(history(*known)).keys() == set(known)
            model.append(model.pop(model.index(known)))
        else:
            assert memory.blocks(history(*ids)) == {}
    assert memory.known()[0] == sum(map(len, model))


def test_blocks_come_back_from_disk_in_their_groups():
    """Two answers with the same text of one call, then one of two calls."""
    texts = {"a": "f", "b": "f", "c": "gg", "d": "gg"}
    memory = ToolMemory(stored=lambda ids: {name: texts[name] for name in ids if name in texts}, calls_in=len)
    found = memory.blocks([*history("a"), *history("b"), *history("c", "d"), *history("e")])
    assert {name: block.ids for name, block in found.items()} == {"a": ("a",), "b": ("b",), "c": ("c", "d"), "d": ("c", "d")}


def test_what_waits_for_results():
    memory = ToolMemory()
    for i in range(MAX_PENDING + 1):
        remember(memory, [f"{i}a", f"{i}b"], None)
    assert memory.pending(["0a", "0b"]) is None, "forgotten"
    assert memory.pending(["1b", "1a"]) == history("1a", "1b")
    assert memory.pending(["1a"]) is None, "all results belong together"
    assert memory.known() == (0, 0)
