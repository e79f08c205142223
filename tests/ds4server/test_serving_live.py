"""Conversations against a real server process: banks, forks, edits, records, restarts and a kill.

Every greedy answer is that of a server that has never seen anything, and what is reported is what was counted.
"""

import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from .conftest import launch
from .test_chat import PATH

FLAGS = ("--mem-floor-gb", "1", "--prefix-reuse", "partial")
ANSWER = 6
PATIENCE = 900  # seconds, in which a device may have to compile several programs
LETTERS = {str(ord(letter)): 100 for letter in "QZXJVKWY"}
"""Tokens that stay apart, so that the text of an answer has the tokens of the answer."""


class Talks:
    """Several conversations that grow, fork and are edited, the same in every run of one seed."""

    def __init__(self, number, words, seed=5):
        self._random, self._long = random.Random(seed), words
        self.messages = [[{"role": "user", "content": f"talk {n} " + self._words(words)}] for n in range(number)]

    def _words(self, n):
        return " ".join(self._random.choice(["harbour", "tide", "mole", "buoy", "ebb", "fog"]) for _ in range(n))

    def turn(self, n, answer):
        """What comes after ``answer`` in conversation n: mostly the next question, sometimes an edit or another's history."""
        kind = self._random.choice(["next", "next", "next", "edit", "fork"])
        if kind == "fork":
            self.messages[n] = list(self._random.choice(self.messages))
        if kind == "edit":
            *self.messages[n], last = self.messages[n]
            self.messages[n].append({"role": "user", "content": last["content"][: len(last["content"]) // 2] + self._words(3)})
        elif self.messages[n][-1]["role"] == "user":
            self.messages[n] = [*self.messages[n], answer, {"role": "user", "content": self._words(self._long // 3)}]
        else:
            self.messages[n] = [*self.messages[n], {"role": "user", "content": self._words(self._long // 3)}]


def body(messages, **more):
    return {"messages": messages, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "think": False,
            "logit_bias": LETTERS} | more  # fmt: skip


def ask(server, messages, **more):
    response = httpx.post(server.url + PATH, json=body(messages, **more), timeout=PATIENCE)
    assert response.status_code == 200, response.text
    return response.json()


class Truth:
    """Answers of a server that reuses nothing, remembered."""

    def __init__(self, backend, context):
        self.server = launch("--ctx", str(context), "--mem-floor-gb", "1", "--prefix-reuse", "off", backend=backend)
        self._known = {}

    def answer(self, messages):
        key = repr(messages)
        if key not in self._known:
            self._known[key] = ask(self.server, messages)["choices"]
        return self._known[key]


def settled(server):
    """The stats of a server at rest."""
    deadline = time.monotonic() + 30
    while (stats := server.stats())["requests"]["inflight"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return stats


def check_counts(stats, answers):
    """The counters are the sums of what every answer reported."""
    assert stats["requests"]["started"] == len(answers) == stats["requests"]["completed"]
    timings = [answer["timings"] for answer in answers]
    assert stats["tokens"]["prefill_cached"] == sum(t["prefill_cached_tokens"] for t in timings)
    assert stats["tokens"]["prefill_computed"] == sum(t["prefill_tokens"] for t in timings)
    for answer in answers:
        usage, spent = answer["usage"], answer["timings"]
        assert spent["prefill_tokens"] + spent["prefill_cached_tokens"] == usage["prompt_tokens"]
        assert (spent["reuse_kind"] == "cold") == (spent["prefill_cached_tokens"] == 0)
        assert usage["prompt_tokens_details"]["cached_tokens"] == spent["prefill_cached_tokens"]
    assert stats["tokens"]["decoded"] == sum(answer["usage"]["completion_tokens"] for answer in answers)


def converse(directory, backend, number, turns, lane, words=14, context=1024):
    """Turns in rounds, all conversations of a round at once, over starts that end in SIGINT, SIGKILL and SIGINT."""
    disk = ("--kv-disk-dir", str(directory), "--kv-disk-space-mb", "1", "--kv-cache-min-tokens", "24",
            "--kv-cache-boundary-align-tokens", "16", "--kv-cache-continued-interval-tokens", "32")  # fmt: skip
    width = ("--max-seqs", "2", "--mixed-prefill-quantum", "16") if lane == "continuous" else ("--cont-width", "0")
    flags = (*FLAGS, "--ctx", str(context), *disk, *width)
    truth, talks, kinds = Truth(backend, context), Talks(number, words), set()
    server = None
    try:
        for start, ending in enumerate([signal.SIGINT, signal.SIGKILL, signal.SIGINT]):
            server = launch(*flags, backend=backend)
            answers = []
            for _ in range(turns[start]):
                with ThreadPoolExecutor(4) as pool:
                    got = list(pool.map(partial(ask, server), talks.messages))
                for n, answer in enumerate(got):
                    assert answer["choices"] == truth.answer(talks.messages[n]), talks.messages[n]
                    assert answer["timings"]["effective_lane"] == lane
                    kinds.add(answer["timings"]["reuse_kind"])
                    talks.turn(n, {"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
                answers += got
            stats = settled(server)
            check_counts(stats, answers)
            last = stats["last_request"]
            assert last["effective_lane"] == lane and last["fallback_reason"] is None
            records = [path.stat().st_size for path in directory.glob("*.kv")]
            assert sum(records) <= 1 << 20
            if start:
                first = answers[: len(talks.messages)]
                kinds |= {"restored"} if any(a["timings"]["prefill_cached_tokens"] for a in first) else set()
            code = server.stop(ending)
            assert code == (0 if ending == signal.SIGINT else -9)
            assert not [line for line in server.lines if "Traceback" in line], "".join(server.lines)[-3000:]
        assert list(directory.glob("*.kv")), "something was written"
    finally:
        for process in (server, truth.server):
            if process is not None and process.process.poll() is None:
                process.process.kill()
    return kinds


@pytest.mark.parametrize("lane", ["continuous", pytest.param("serial", marks=pytest.mark.slow)])
def test_conversations_over_restarts(tmp_path, monkeypatch, lane):
    monkeypatch.setenv("DS4_SERVER_PERSIST_MIN_TOKENS", "24")
    kinds = converse(tmp_path, "numpy", number=2, turns=(2, 1, 1), lane=lane)
    assert "restored" in kinds and kinds & {"exact", "fork"}, kinds


@pytest.mark.slow
@pytest.mark.parametrize("lane", ["continuous", "serial"])
@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_ten_conversations_of_ten_turns(tmp_path, monkeypatch, backend, lane):
    if backend == "jax":
        pytest.importorskip("jax", reason="JAX is not installed")
    monkeypatch.setenv("DS4_SERVER_PERSIST_MIN_TOKENS", "24")
    monkeypatch.setenv("DS4_SERVER_FORK_PARTIAL_MIN", "136")
    kinds = converse(tmp_path, backend, number=10, turns=(4, 3, 3), lane=lane, words=12)
    assert {"cold", "partial", "restored"} <= kinds and kinds & {"exact", "fork"}, kinds


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("numpy", 200),
        pytest.param("numpy", 2000, marks=pytest.mark.slow),
        pytest.param("jax", 2000, marks=pytest.mark.slow),
    ],
    ids=["numpy-500", "numpy-4000", "jax-4000"],
)
def test_a_short_request_does_not_wait_for_a_long_prompt(backend, words):
    """While a long prompt is prefilled, a running answer goes on and a new short one begins after about one chunk.

    Times are in passes, each a chunk of the long prompt and a token of the running answer: the short answer begins within a few
    of them beyond those of its own prompt, and there is about one token in each.
    """
    if backend == "jax":
        pytest.importorskip("jax", reason="JAX is not installed")
    quantum = 16
    flags = ("--ctx", "4096", "--max-seqs", "3", "--mixed-prefill-quantum", str(quantum), "--prefill-chunk", "256")
    server = launch(*FLAGS, *flags, backend=backend)

    def talk(text):
        return [{"role": "user", "content": text}]

    def run(arrived, done):
        more = {"max_tokens": 3000, "stream": True}
        with httpx.stream("POST", server.url + PATH, json=body(talk("Husum?"), **more), timeout=PATIENCE) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    arrived.append(time.monotonic())
                if done.is_set():
                    return

    def computed():
        time.sleep(0.05)
        return server.stats()["tokens"]["prefill_computed"]

    def measured(long, short):
        """Beside a running answer: (timings of a long request, of a short one beside it, prompt tokens computed between both,
        tokens of the running answer during the long one's prefill)."""
        arrived, done = [], threading.Event()
        with ThreadPoolExecutor(2) as pool:
            try:
                running = pool.submit(run, arrived, done)
                while len(arrived) < 3:
                    computed()
                    assert not running.done(), running.result()
                before, heard = computed(), len(arrived)
                prefill = pool.submit(ask, server, talk(long), max_tokens=1)
                while (begun := computed()) == before:
                    assert not prefill.done(), prefill.result()
                answer = ask(server, talk(short), max_tokens=2, seed=2)["timings"]
                meanwhile = computed() - begun
                found = prefill.result()["timings"], answer, meanwhile, len(arrived) - heard
                assert not running.done(), "the running answer has to be longer"
                return found
            finally:
                done.set()

    try:
        if backend == "jax":
            measured("Ebb: " + "tide " * words, "Where?")  # compiles what the measurement needs
        long, short, meanwhile, heard = measured("tide " * words, "Tönning?")
        assert long["effective_lane"] == short["effective_lane"] == "continuous"
        chunks, own = long["prefill_tokens"] / quantum, -(-short["prefill_tokens"] // quantum)
        one_pass = long["prefill_tokens"] / long["prefill_tok_s"] / chunks
        print(f"{chunks:.0f} chunks of {1000 * one_pass:.0f} ms, {heard} tokens meanwhile, {short['ttft_ms']:.0f} ms for {own}")
        assert chunks > 25 and meanwhile < long["prefill_tokens"] / 2, "the short request did not wait for the long one"
        assert short["ttft_ms"] / 1000 < 3 * (1 + own) * one_pass, "a chunk of another, its own, and a pass to sample"
        assert heard >= chunks / 2, "the running answer went on"
    finally:
        server.process.kill()
