"""What a newcomer sees: ``ds4server`` without a model answers the README's first request in words."""

import json
import re
from pathlib import Path

import httpx

from .conftest import launch

ROOT = Path(__file__).parents[2]


def test_the_first_answer_is_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no ds4flash.gguf lies
    book = set(re.findall("[a-z]+", (ROOT / "bench" / "alice29.txt").read_text("ascii").lower()))
    request = re.search(r"curl http://\S+/v1/chat/completions -d '(.*)'", (ROOT / "README.md").read_text())[1]
    server = launch("--mem-floor-gb", "1", embedded=True)
    try:
        seeded = json.loads(request) | {"seed": 1}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=seeded, timeout=60).json()
        card = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    finally:
        server.process.kill()
    message = answer["choices"][0]["message"]
    words = re.findall("[a-z]+", message["content"].lower())
    assert len(words) >= 5 and sum(word in book for word in words) >= 0.9 * len(words), message
    assert card["id"] == "ds4-tiny" and "Alice" in card["description"]
