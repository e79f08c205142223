"""The routing table, row by row, and the gathering of static rows."""

from dataclasses import replace

import pytest

from ds4server.lanes import LANES, REASONS, SURFACES, Environment, Needs, fallback, gather, route

CHAT = Needs(prompt=10, budget=5)
PLAIN = replace(CHAT, greedy=True, stream=False)
SERIAL = Environment()
DRIVER = Environment(driver=True, width=2, capacity=100)
BANKS = Environment(width=2)


@pytest.mark.parametrize(
    ("needs", "env", "surface", "expected"),
    [
        (CHAT, SERIAL, "openai_chat", ("serial", "cont_unavailable")),
        (CHAT, DRIVER, "openai_chat", ("continuous", "continuous")),
        (PLAIN, DRIVER, "openai_chat", ("continuous", "continuous")),
        (replace(CHAT, frontier="bank"), DRIVER, "openai_chat", ("continuous", "continuous_bank_continuation")),
        (replace(CHAT, frontier="serial"), DRIVER, "openai_chat", ("serial", "need_live_frontier")),
        (replace(CHAT, frontier="serial", budget=0), DRIVER, "openai_chat", ("serial", "need_live_frontier")),
        (replace(CHAT, budget=0), DRIVER, "openai_chat", ("serial", "need_prefill_only")),
        (replace(PLAIN, budget=0), BANKS, "openai_chat", ("serial", "need_prefill_only")),
        (replace(CHAT, audio=True), DRIVER, "openai_chat", ("serial", "cont_unavailable")),
        (replace(CHAT, images=True), DRIVER, "openai_chat", ("continuous", "continuous")),
        (replace(CHAT, images=True), replace(DRIVER, media_serial=True), "openai_chat", ("serial", "cont_unavailable")),
        (CHAT, replace(DRIVER, serial_speculation=True), "openai_chat", ("serial", "cont_unavailable")),
        (CHAT, replace(DRIVER, serial_surfaces=frozenset({"anthropic_messages"})), "anthropic_messages", ("serial", "surface")),
        (CHAT, replace(DRIVER, serial_surfaces=frozenset({"anthropic_messages"})), "openai_chat", ("continuous", "continuous")),
        (PLAIN, Environment(off=True, width=1), "openai_chat", ("serial", "coalesce_off")),
        (PLAIN, BANKS, "openai_chat", ("static", "static_no_cont")),
        (CHAT, BANKS, "openai_chat", ("serial", "cont_unavailable")),
        (replace(PLAIN, prompt=101), DRIVER, "openai_chat", ("static", "static_prompt_bounds")),
        (replace(CHAT, prompt=101), DRIVER, "openai_chat", ("serial", "cont_unavailable")),
        (replace(CHAT, prompt=100), DRIVER, "openai_chat", ("continuous", "continuous")),
        (CHAT, Environment(driver=True), "openai_chat", ("continuous", "continuous")),
        (PLAIN, replace(BANKS, width=1), "openai_chat", ("serial", "cont_unavailable")),
    ],
)
def test_the_table(needs, env, surface, expected):
    assert route(needs, surface, env) == expected
    assert expected[0] in LANES and expected[1] in REASONS and surface in SURFACES


@pytest.mark.parametrize("name", ["stream", "thinks", "stops", "tools", "images", "audio", "token_ids"])
def test_what_a_static_row_cannot_have(name):
    assert PLAIN.static and not replace(PLAIN, **{name: True}).static
    assert not replace(PLAIN, greedy=False).static and not replace(PLAIN, budget=0).static


def test_a_replaced_path_is_named_and_an_absent_one_is_not():
    assert fallback(CHAT, DRIVER) is None and fallback(replace(CHAT, audio=True), SERIAL) is None
    assert "audio" in fallback(replace(CHAT, audio=True), DRIVER)
    assert "images" in fallback(replace(CHAT, images=True), replace(DRIVER, media_serial=True))
    assert "speculation" in fallback(CHAT, replace(DRIVER, serial_speculation=True))
    assert "101" in fallback(replace(CHAT, prompt=101), DRIVER)


@pytest.mark.parametrize(
    ("lanes", "width", "waited", "rows"),
    [
        (["static"] * 3, 2, 0, 2),
        (["static"] * 2, 3, 0, 0),
        (["static"] * 2, 3, 9, 0),
        (["static"] * 2, 3, 10, 2),
        (["static", "serial", "static"], 3, 0, 1),
        (["static"], 2, 10, 1),
        (["serial", "static"], 2, 0, 0),
    ],
)
def test_gathering(lanes, width, waited, rows):
    assert gather(lanes, width, waited, wait=10) == rows
