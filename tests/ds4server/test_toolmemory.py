"""What is remembered about calls by their ids, against a plain model of it."""

from hypothesis import given
from hypothesis import strategies as st

from ds4server.assembly import tool_memory
from ds4server.options import read
from ds4server.toolmemory import MAX_PENDING, Pending, ToolMemory

from .inprocess import CONVERSATION


def history(*ids):
    return [{"role": "assistant", "tool_calls": [{"id": name} for name in ids]}]


def remember(memory, ids, text):
    memory.remember(ids, text, Pending(history(*ids), "bank", 1))


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
    stored = lambda ids: {name: texts[name] for name in ids if name in texts}  # noqa: E731
    memory = ToolMemory(stored=stored, calls_in=lambda text, tools: len(text))
    found = memory.blocks([*history("a"), *history("b"), *history("c", "d"), *history("e")])
    assert {name: block.ids for name, block in found.items()} == {"a": ("a",), "b": ("b",), "c": ("c", "d"), "d": ("c", "d")}


def test_what_waits_for_results():
    memory = ToolMemory()
    for i in range(MAX_PENDING + 1):
        remember(memory, [f"{i}a", f"{i}b"], None)
    assert memory.pending(["0a", "0b"]) is None, "forgotten"
    assert memory.pending(["1b", "1a"]).messages == history("1a", "1b")
    assert memory.pending(["1a"]) is None, "all results belong together"
    assert memory.known() == (0, 0)


def test_the_calls_of_a_block_are_counted_by_the_protocol():
    one = '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n'
    texts = {f"id{n}": f"\n\n<｜DSML｜tool_calls>\n{one * 2}</｜DSML｜tool_calls>" for n in range(4)}

    class Store:
        def tool_blocks(self, ids):
            return {name: texts[name.decode()].encode() for name in ids if name.decode() in texts}

    memory = tool_memory(read([], {}), Store(), CONVERSATION)
    found = memory.blocks(history(*texts), [{"type": "function", "function": {"name": "f"}}])
    assert [block.ids for block in found.values()] == [("id0", "id1")] * 2 + [("id2", "id3")] * 2
    assert tool_memory(read(["--disable-exact-dsml-tool-replay"], {}), Store(), CONVERSATION).blocks(history("id0")) == {}
    assert tool_memory(read(["--tool-memory-max-ids", "2"], {}), None, CONVERSATION).blocks(history("id0")) == {}
