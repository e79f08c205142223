"""A real server that drafts: the answers of one that does not, and what it tells about it."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from .conftest import launch
from .test_serving_live import ask, body

SAYS = [{"role": "user", "content": "a harbour at low tide"}]
FLAGS = ("--mem-floor-gb", "0", "-c", "512", "--max-seqs", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A toy with a predictor in its file."""
    path = tmp_path_factory.mktemp("drafts") / "toy.gguf"
    subprocess.run([sys.executable, "-m", "ds4ref", "tiny", "exaone-moe", "-o", str(path)], check=True)
    return str(path)


@pytest.mark.parametrize("backend", ["numpy", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_server_that_drafts(model, tmp_path, backend):
    if backend == "jax":
        pytest.importorskip("jax", reason="JAX is not installed")
    drafts = ("--mtp-mode", "on", "--mtp-draft", "3", "--mtp-margin", "0", "--trace", str(tmp_path / "trace"))
    running, plain = (launch("-m", model, *FLAGS, *more, backend=backend) for more in (drafts, ("--mtp-mode", "off")))
    try:
        talks = [[{"role": "user", "content": f"{n} {SAYS[0]['content']}"}] for n in range(3)]
        for _ in range(2):  # a second turn goes on with what is resident
            with ThreadPoolExecutor(3) as pool:
                answers, expected = ([*pool.map(lambda m, s=s: ask(s, m, max_tokens=24), talks)] for s in (running, plain))
            for talk, answer, other in zip(talks, answers, expected, strict=True):
                assert answer["choices"] == other["choices"]
                assert answer["timings"]["speculation_active"] and not other["timings"]["speculation_active"]
                assert answer["timings"]["tok_per_step"] >= other["timings"]["tok_per_step"] == 1
                talk += [answer["choices"][0]["message"], {"role": "user", "content": "and then?"}]
        for seed in (3, 4, 4):  # a seed gives one answer, whatever is resident or drafted
            seeded, other = (ask(server, SAYS, temperature=1, seed=seed, max_tokens=24) for server in (running, plain))
            assert seeded["choices"] == other["choices"] and seeded["timings"]["speculation_active"]
        assert ask(running, SAYS, temperature=1, max_tokens=24)["timings"]["speculation_active"]
        stats = running.stats()
        counted = stats["tokens"]["speculation"]
        assert counted["drafted"] > 0 < counted["accepted"] and plain.stats()["tokens"]["speculation"]["drafted"] == 0
        assert stats["last_request"]["speculation_active"] is True and stats["last_request"]["fallback_reason"] is None
        assert stats["serving"]["effective"]["mtp_draft"] == 3 and stats["serving"]["quote"]["mtp_state"] > 0
        page = httpx.get(f"{running.url}/metrics").text
        for result, n in counted.items():
            assert f'ds4_speculation_tokens_total{{result="{result}"}} {float(n)}' in page
        assert "ds4_spec_quench_total" in page
        assert ("steps_per_draft" in stats) == (backend == "jax"), "trials are timed where they may be worth it"
    finally:
        for server in (running, plain):
            assert server.stop() == 0
    assert "judged" in (tmp_path / "trace").read_text()


def test_a_stream_that_drafts_has_the_same_pieces(model):
    """One event a token: readers do not notice how many came of one pass."""
    pieces = []
    for mode in ("on", "off"):
        server = launch("-m", model, *FLAGS, "--mtp-mode", mode, "--mtp-draft", "3", "--mtp-margin", "0", backend="numpy")
        try:
            wanted = body(SAYS, stream=True, max_tokens=16)
            with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=wanted, timeout=120) as response:
                lines = [line for line in response.iter_lines() if '"content"' in line]
            pieces.append([line.split('"choices"')[1] for line in lines])
        finally:
            server.stop()
    assert pieces[0] == pieces[1] and len(pieces[0]) > 4
