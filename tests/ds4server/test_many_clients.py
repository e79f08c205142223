"""Many streaming clients at once, some of which leave: every whole answer is the cold one, and nothing is left behind."""

import asyncio
import json
import random
import time
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from ds4ref import generation
from ds4ref.chat import Reasoning, Text
from ds4ref.conversation import Conversation
from ds4ref.gguf import Artifact
from ds4ref.model import Model
from ds4ref.sampling import SamplingParams

from .artifact import toy
from .conftest import launch

BANKS, BUDGET, CONTEXT = 2, 8, 1024
OPENINGS = ["You keep the tide tables.", "You answer in one word.", "Count the gulls."]
PROMPTS = [f"{i}: {'high water? ' * (i % 3)}" for i in range(8)]


def body(i):
    """Request number ``i``: some greedy, some sampled with a seed; they share beginnings."""
    messages = [{"role": "system", "content": OPENINGS[i % 3]}, {"role": "user", "content": PROMPTS[i % len(PROMPTS)]}]
    return {
        "messages": messages, "max_tokens": BUDGET, "temperature": i % 2, "seed": 5, "stream": True, "ignore_eos": True,
        "think": i % 4 == 0,
    }  # fmt: skip


@cache
def reference():
    artifact = Artifact.open(toy())
    return Model.from_artifact(artifact, context=CONTEXT), Conversation(artifact)


@cache
def cold(i):
    """The answer to ``body(i)`` from nothing, in this process: all its text."""
    model, conversation = reference()
    request = body(i)
    prompt = conversation.render_request(request)
    ids = conversation.encode(prompt)
    params = SamplingParams(temperature=request["temperature"], seed=request["seed"])
    answer = conversation.generation(ids, params, budget=BUDGET, context=CONTEXT, prompt=prompt, eos="global", stream=True,
                                     vocabulary=model.vocabulary)  # fmt: skip
    steps = list(generation.run(model, model.new_state(), answer))
    return "".join(event.text for step in steps for event in step.events if isinstance(event, (Text, Reasoning)))


class Crowd:
    """Clients on one server. answers: (number of the request, text) of all that were read to their end."""

    def __init__(self, url):
        parts = urlsplit(url)
        self.address = parts.hostname, parts.port
        self.answers, self.left, self.refused = [], 0, 0

    async def client(self, seed, until):
        """One client after another on the same place, until the time is over."""
        rng = random.Random(seed)
        while time.monotonic() < until:
            i = rng.randrange(2 * len(PROMPTS))
            await self.ask(i, leaves_after=rng.randrange(1, 12) if rng.random() < 0.3 else None)

    async def ask(self, i, leaves_after=None):
        """Send request ``i``; leave after so many lines of the answer, or read it to its end."""
        reader, writer = await asyncio.open_connection(*self.address)
        raw = json.dumps(body(i)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        text, lines, done = "", 0, False
        try:
            while line := await reader.readline():
                lines += 1
                if leaves_after is not None and lines > leaves_after + 8:
                    self.left += 1
                    return
                if line.startswith(b"HTTP/1.1 429"):
                    self.refused += 1
                    return
                done = done or line == b"data: [DONE]\n"
                if line.startswith(b"data: {"):
                    delta = json.loads(line[6:])["choices"][0]["delta"]
                    text += delta.get("content") or delta.get("reasoning_content") or ""
            assert done, "the stream ended early"
            self.answers.append((i, text))
        finally:
            writer.close()


def left_behind(server):
    """(threads, open files, resident bytes) of the server's process."""
    proc = Path(f"/proc/{server.process.pid}")
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    return int(status["Threads"]), len(list((proc / "fd").iterdir())), 1024 * int(status["VmRSS"].split()[0])


def settled(server):
    """Wait until nothing runs, then the stats."""
    for _ in range(200):
        stats = server.stats()
        if not stats["requests"]["inflight"] and not stats["queue_depth"] and not stats["banks"]["busy"]:
            break
        time.sleep(0.1)
    time.sleep(1)  # waitress closes what nobody reads any more
    return stats


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts threads and files in /proc")
@pytest.mark.parametrize(
    ("clients", "seconds"), [(16, 3), pytest.param(256, 600, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_a_crowd(clients, seconds):
    server = launch("--ctx", str(CONTEXT), "--max-seqs", str(BANKS), "--max-queue", str(2 * clients), "--mem-floor-gb", "1")
    try:
        crowd = Crowd(server.url)

        async def run(length, first):
            until = time.monotonic() + length
            await asyncio.gather(*(crowd.client(first + k, until) for k in range(clients)))

        asyncio.run(run(seconds / 4, 0))  # every thread has worked once, every pool is filled
        settled(server)
        threads, opened, resident = left_behind(server)
        asyncio.run(run(seconds, clients))
        stats = settled(server)
        now = left_behind(server)
        requests = stats["requests"]
        assert requests["failed"] == 0 and requests["started"] == requests["completed"] + requests["canceled"]
        assert crowd.answers and crowd.left and not crowd.refused
        assert requests["completed"] >= len(crowd.answers)
        assert now[0] <= threads and now[1] <= opened and now[2] <= 1.1 * resident + (16 << 20)
        assert all(text == cold(i) for i, text in crowd.answers)
    finally:
        server.process.kill()


@pytest.mark.parametrize("places", [32, pytest.param(256, marks=pytest.mark.slow)])
def test_the_client_after_the_last_place(places, monkeypatch):
    """So many streams are held at once, all of them told that they wait; the next client gets 429 and when to come back."""
    monkeypatch.setenv("DS4_SERVER_MAX_CLIENTS", "0")
    server = launch("--ctx", str(CONTEXT), "--max-queue", str(places), "--mem-floor-gb", "1", "--sse-keepalive-seconds", "1",
                    "--max-seqs", "1")  # fmt: skip
    try:
        asyncio.run(asyncio.wait_for(hold(server, places + 1), 30 + places))
        assert settled(server)["requests"]["canceled"] >= places - 6
    finally:
        server.process.kill()


def test_more_clients_than_may_be(monkeypatch):
    """Beyond ``DS4_SERVER_MAX_CLIENTS`` nothing is generated, and who only looks is answered."""
    monkeypatch.setenv("DS4_SERVER_MAX_CLIENTS", "6")
    server = launch("--ctx", str(CONTEXT), "--mem-floor-gb", "1", "--sse-keepalive-seconds", "1")
    try:
        asyncio.run(asyncio.wait_for(hold(server, 6), 60))
    finally:
        server.process.kill()


async def hold(server, streams):
    """Open so many streams, see that all are held, and what happens to the next client."""
    request = json.dumps(body(0) | {"max_tokens": 900}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(request)}\r\n\r\n".encode()
    opened = []
    for _ in range(streams):
        reader, writer = await asyncio.open_connection(*urlsplit(server.url).netloc.split(":"))
        writer.write(head + request)
        opened.append((reader, writer))
    lines = await asyncio.gather(*(reader.readline() for reader, _ in opened))
    assert set(lines) == {b"HTTP/1.1 200 OK\r\n"}, "all are held"
    answer = await asyncio.to_thread(httpx.post, f"{server.url}/v1/chat/completions", content=request, timeout=30)
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "queue_full"
    assert (await asyncio.to_thread(httpx.get, f"{server.url}/health", timeout=30)).status_code == 200
    for _, writer in opened:
        writer.close()
