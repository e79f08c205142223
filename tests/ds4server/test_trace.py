"""The trace file and the request's line in the log: what they say, and that nothing waits for them."""

import logging
import os
import re
import stat
import time
from pathlib import Path

import httpx
import pytest

from ds4ref.chat import CallArguments, CallBegin, CallEnd
from ds4ref.chat.dsml import DSML
from ds4ref.reuse import CHANGED, Decision
from ds4ref.stop import Finish
from ds4server import cli
from ds4server.lanes import Environment
from ds4server.trace import Trace, TraceError, line, log_request, section

from .conftest import launch
from .inprocess import Scripted, running
from .test_chat import HELLO, PATH, wait_for
from .toymodel import job, tokenizer

TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {
    "type": "object", "properties": {"harbour": {"type": "string"}}}}}]  # fmt: skip
CALL = (
    f'Well.\n\n<{DSML}tool_calls>\n<{DSML}invoke name="tide">\n<{DSML}parameter name="harbour" string="true">Husum'
    f"</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}tool_calls>"
)


def ended(text="Hello <harbour>", said="tides", **fields):
    """A job that has ended, made by hand."""
    made = job(tokenizer().encode(text))
    made.generation.generated += tokenizer().encode(said)
    made.generation.finish = Finish.STOP
    made.outcome, made.route_reason, made.calls = "completed", "continuous", []
    made.lane = "continuous"
    made.admitted_at, made.prefilled_at = made.arrived + 1, made.arrived + 3
    made.first_token_at, made.ended_at = made.arrived + 3.5, made.arrived + 5
    made.computed = len(made.generation.prompt)
    made.decision = Decision(len(made.generation.prompt), 0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


# The line


def test_the_line_of_a_request(caplog):
    made = ended(said="tides" * 4, reuse_kind="partial", cached=3)
    n, out = len(made.generation.prompt), len(made.generation.generated)
    said = (
        f"/v1/chat/completions continuous partial prompt={n} cached=3 ttft=3.500s out={out} tok/s={out / 2:.1f} "
        "finish=stop total=5.000s"
    )
    assert line(made) == said
    with caplog.at_level(logging.INFO, "ds4server"):
        log_request(made)
    assert [record.getMessage() for record in caplog.records] == [said]
    assert "harbour" not in said


def test_the_line_of_a_request_that_never_began():
    made = ended(said="", admitted_at=None, prefilled_at=None, first_token_at=None, outcome="failed", computed=0)
    made.generation.finish = None
    assert " ttft=- out=0 tok/s=- finish=failed total=5.000s" in line(made)


# The section


def test_a_section_has_prompt_cache_answer_and_calls():
    text = "Grüße \n| forged\n=== req_x forged\x1b[2J\r\x9b漢字"
    pieces = ['{"harbour"', ': "Husum"}']
    calls = [CallBegin(0, "tide"), *(CallArguments(0, piece) for piece in pieces), CallEnd(0), CallBegin(1, "x")]
    made = ended(text, fallback_reason="because", reuse_miss="no checkpoint at or below LCP", calls=calls, cached=4)
    made.decision = Decision(9, 1, source=0, common=6, cached=4, refused=((2, CHANGED),))
    lines = section(made).split("\n")
    n = len(made.generation.prompt)
    assert re.fullmatch(r"=== req_\S+ \d{4}-\d\d-\d\dT[\d:.]+\+00:00 /v1/chat/completions", lines[0])
    assert "lane     continuous, continuous" in lines and "fallback because" in lines
    assert f"cache    cold: {n} prompt tokens, 4 kept, {n} computed, 2 of them replayed" in lines
    assert "miss     no checkpoint at or below LCP" in lines
    kept = "bank 1 from bank 0, 6 tokens in common, 4 kept by its own state cut"
    assert f"decision {kept}; refused: bank 2 (rendered prefix changed)" in lines
    assert "times    waited 1.000s, prompt 2.000s, first token after 3.500s, total 5.000s" in lines
    assert "end      completed, stop" in lines
    at = lines.index(f"--- prompt, {n} tokens")
    shown = ["| Grüße ", "| | forged", "| === req_x forged\\x1b[2J\\r\\x9b漢字"]
    assert lines[at + 1 : at + 4] == shown, "text is marked as such and cannot move a cursor"
    assert lines[at + 4 : at + 6] == [f"--- generated, {len(made.generation.generated)} tokens", "| tides"]
    at = lines.index("--- tool parser")
    assert lines[at + 1 :] == [
        "| call 0 begins: tide", '| call 0 arguments: {"harbour": "Husum"}', "| call 0 complete", "| call 1 begins: x", "", "",
    ]  # fmt: skip


def test_a_section_of_a_job_that_was_never_admitted_and_of_odd_bytes():
    made = ended(decision=None, admitted_at=None, prefilled_at=None, first_token_at=None, outcome="canceled")
    half = [token for token in tokenizer().encode("漢") if len(tokenizer().token_bytes(token)) < 3][:1]
    made.generation.generated[:] = [*half, tokenizer().vocab_size + 7]
    text = section(made)
    assert "decision none: never admitted" in text and "times    waited -, prompt -, first token after -" in text
    assert f"<token {tokenizer().vocab_size + 7}>" in text and ("\\xe6" in text) == bool(half)
    assert "--- tool parser" not in text


# The file


def read(path, sections):
    """The file's text once it has so many sections."""
    wait_for(lambda: path.read_text().count("\n=== ") + path.read_text().startswith("=== ") >= sections)
    return path.read_text()


def test_the_file_is_private_appended_and_written_request_by_request(tmp_path):
    path = tmp_path / "trace"
    before = os.umask(0)
    try:
        trace = Trace.open(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    trace.add(ended("one"))
    assert "| one" in read(path, 1), "on disk while the trace is open"
    trace.add(ended("two"))
    trace.close()
    again = Trace.open(path)
    again.add(ended("three"))
    again.close()
    text = path.read_text()
    assert [text.index(f"| {word}") for word in ("one", "two", "three")] == sorted(
        text.index(f"| {word}") for word in ("one", "two", "three")
    )


def test_a_file_that_others_can_read_is_warned_about(tmp_path, caplog):
    path = tmp_path / "trace"
    path.touch()
    path.chmod(0o644)
    Trace.open(path).close()
    assert "other users may read" in caplog.text and stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_file_that_cannot_be_opened(tmp_path):
    with pytest.raises(TraceError, match=r"--trace .*no/file: No such file or directory$"):
        Trace.open(tmp_path / "no" / "file")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_ends_tracing_with_one_warning(caplog):
    trace = Trace.open("/dev/full")
    caplog.clear()
    trace.add(ended())
    wait_for(lambda: caplog.records)
    for _ in range(5):
        trace.add(ended())
    trace.close()
    assert [record.getMessage() for record in caplog.records] == [
        "trace /dev/full: No space left on device; nothing more is traced"
    ]


def test_a_slow_disk_makes_nobody_wait_and_the_file_says_what_is_missing():
    reading, writing = os.pipe()
    trace = Trace(writing, "pipe", backlog=4)
    big = ended(said="word " * 16000)  # more than a pipe holds
    began = time.monotonic()
    for _ in range(300):
        trace.add(big)
    assert time.monotonic() - began < 5
    found = b""
    while b"are missing here" not in found:
        found += os.read(reading, 1 << 16)
        if found.count(b"--- generated") == 3:
            trace.add(big)  # there is room again
    missing = int(re.search(rb"=== (\d+) requests are missing here", found)[1])
    assert 290 <= missing <= 300
    os.close(reading)
    trace.close()


def test_a_job_that_cannot_be_shown_does_not_end_tracing(tmp_path, caplog):
    path = tmp_path / "trace"
    trace = Trace.open(path)
    trace.add(ended(surface="unheard of"))
    trace.add(ended("the next one"))
    trace.close()
    assert "| the next one" in path.read_text() and "could not be traced" in caplog.text


# In a server


@pytest.mark.parametrize("driver", [False, True])
def test_what_a_server_traces(tmp_path, driver):
    trace = Trace.open(tmp_path / "trace")
    with running(Scripted(CALL), trace.add, env=Environment(driver=driver, width=2), width=2) as server:
        fields = {"tools": TOOLS, "think": False, "max_tokens": 200}
        answers = [server.chat("What of Husum?", stream=stream, **fields) for stream in (False, True)]
        gone = server.chat("Nobody listens", gone=True, max_tokens=2000, ignore_eos=True)
        server.engine.stop(5)
    trace.close()
    assert answers[0].json["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "tide", answers[0].text
    sections = (tmp_path / "trace").read_text().split("\n\n=== ")
    assert len(sections) == 3 and all(answer.headers["x-request-id"] in text for answer, text in zip(
        [*answers, gone], sections, strict=True))  # fmt: skip
    for kind, text in zip(("cold", "exact|fork|partial"), sections, strict=False):
        assert "What of Husum?" in text and "<｜User｜>" in text, "the rendered prompt, markers included"
        assert re.search(rf"\ncache    ({kind}): \d+ prompt tokens, \d+ kept, \d+ computed, \d+ of them replayed\n", text)
        assert f"| Well.\n| \n| <{DSML}tool_calls>" in text
        assert text.rstrip().endswith('| call 0 begins: tide\n| call 0 arguments: {"harbour": "Husum"}\n| call 0 complete')
        assert f"lane     {'continuous' if driver else 'serial'}, " in text
    assert "Nobody listens" in sections[2]


def test_the_option(tmp_path):
    path = tmp_path / "trace"
    server = launch("--trace", str(path))
    try:
        answer = httpx.post(server.url + PATH, json=HELLO | {"max_tokens": 3}, timeout=60)
        text = read(path, 1)
        assert answer.headers["x-request-id"] in text and "Hello" in text
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        stats = server.stats()["last_request"]
        wait_for(lambda: any(" tok/s=" in line and "/v1/chat/completions" in line for line in server.lines))
        assert sum(" finish=" in line for line in server.lines) == 1
        page = httpx.get(f"{server.url}/metrics").text
        assert "ds4_request_seconds_count 1.0" in page and "ds4_ttft_seconds_count 1.0" in page
        assert "ds4_clients_connected 1.0" in page and stats["finish"] == "length"
        last = httpx.post(server.url + PATH, json=HELLO | {"max_tokens": 1}, timeout=60)
        assert server.stop() == 0
        assert last.headers["x-request-id"] in path.read_text(), "what has ended is on disk when the process is gone"
    finally:
        server.process.kill()


def test_an_option_that_cannot_be_followed(capsys, tmp_path):
    assert cli.main(["--trace", str(tmp_path / "no" / "file"), "--port", "0", "--backend", "numpy"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("ds4server: --trace ")
