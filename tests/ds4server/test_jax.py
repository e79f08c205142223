"""The same server on the JAX backend: same answers where greedy choices are clear, and it says what runs."""

import httpx
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

from ds4jax import FAMILIES

from .conftest import launch
from .test_chat import HELLO, PATH, joined, stream

pytestmark = pytest.mark.skipif("deepseek4" not in FAMILIES, reason="the toy's family has no JAX twin")


@pytest.fixture(scope="module")
def device():
    running = launch("--ctx", "1024", backend="jax")
    yield running
    running.process.kill()


def test_the_plan_says_so(device):
    serving = device.stats()["serving"]
    assert serving["requested"]["backend"] == "auto" and serving["effective"]["backend"] in ("cpu", "cuda", "metal")
    assert serving["effective"]["native_chunk"] == 512 and serving["effective"]["layout"]


def test_greedy_answers_equal_the_references(device, server):
    fields = HELLO | {"max_tokens": 24, "temperature": 0}
    answers = [httpx.post(s.url + PATH, json=fields, timeout=300).json() for s in (device, server)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]


def test_streamed_equals_buffered_and_a_second_turn_reuses_the_first(device):
    messages = [{"role": "user", "content": "the harbour and its tides " * 30}]
    fields = {"messages": messages, "max_tokens": 10, "temperature": 0, "think": False}
    with httpx.Client(base_url=device.url, timeout=300) as api:
        buffered = api.post(PATH, json=HELLO | fields).json()
        raw, _ = stream(api, **fields)
        assert joined(raw, "content") == buffered["choices"][0]["message"]["content"]
        messages += [buffered["choices"][0]["message"], {"role": "user", "content": "and then?"}]
        second = api.post(PATH, json=HELLO | fields).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= buffered["usage"]["prompt_tokens"] - 2
