"""What is written about a request that has ended: a line in the log, and a section in the file of ``--trace``.

The line has numbers only. The section also has the rendered prompt, what the cache decided and why, the sampled text and what
the tool parser made of it; it holds whatever users sent, so the file is created for its owner alone (0600). Both read what was
written into the job where it was decided; nothing is found out again.

The engine's thread only hands the job over (:meth:`Trace.add`); a thread of its own turns tokens into text and writes. When
that thread falls behind, requests are left out and the file says how many; when the file cannot be written, tracing ends with
one warning. A request that is refused before it becomes a job (a mistake in it, a full queue) has no section.
"""

import logging
import os
import queue
import threading
from datetime import UTC, datetime

from ds4ref.chat import CallArguments, CallBegin, CallEnd
from ds4ref.chat.events import joined

log = logging.getLogger("ds4server")

ENDPOINTS = {
    "openai_chat": "/v1/chat/completions", "openai_completion": "/v1/completions", "anthropic_messages": "/v1/messages",
    "openai_responses": "/v1/responses",
}  # fmt: skip
BACKLOG = 64
"""Ended jobs that wait for the writer at most."""


# The log


def log_request(job):
    """Log a job that has ended."""
    log.info("%s", line(job))


def line(job):
    """One line about a job that has ended, without text of anybody's. Times in seconds."""
    generation, out = job.generation, len(job.generation.generated)
    decoding = None if job.prefilled_at is None else job.ended_at - job.prefilled_at
    rate = f"{out / decoding:.1f}" if out and decoding else "-"
    return (
        f"{ENDPOINTS[job.surface]} {job.lane} {job.reuse_kind} prompt={len(generation.prompt)} cached={job.cached} "
        f"ttft={_seconds(job.arrived, job.first_token_at)} out={out} tok/s={rate} finish={generation.finish or job.outcome} "
        f"total={_seconds(job.arrived, job.ended_at)}"
    )


def _seconds(begin, end):
    return "-" if begin is None or end is None else f"{end - begin:.3f}s"


# The trace


def section(job):
    """Everything about a job that has ended, for people. Text of prompts and answers stands after ``| `` only."""
    generation, decision = job.generation, job.decision
    arrived = datetime.fromtimestamp(job.record()["arrived"], UTC).isoformat(timespec="milliseconds")
    prompt, generated = generation.prompt, generation.generated
    calls = joined(job.calls)
    facts = {
        "lane": f"{job.lane}, {job.route_reason}",
        "fallback": job.fallback_reason,
        "cache": f"{job.reuse_kind}: {len(prompt)} prompt tokens, {job.cached} kept, {job.computed} computed, "
                 f"{job.replayed} of them replayed",
        "miss": job.reuse_miss,
        "decision": "none: never admitted" if decision is None else _decision(decision),
        "times": f"waited {_seconds(job.arrived, job.admitted_at)}, prompt {_seconds(job.admitted_at, job.prefilled_at)}, "
                 f"first token after {_seconds(job.arrived, job.first_token_at)}, total {_seconds(job.arrived, job.ended_at)}",
        "drafts": f"{job.drafted} judged, {job.accepted} kept" if job.speculated else None,
        "end": f"{job.outcome}, {generation.finish or '-'}",
    }  # fmt: skip
    lines = [f"=== {job.request_id} {arrived} {ENDPOINTS[job.surface]}"]
    lines += [f"{name:9}{value}" for name, value in facts.items() if value is not None]
    lines += [f"--- prompt, {len(prompt)} tokens", *_quoted(_text(generation.tokenizer, prompt))]
    lines += [f"--- generated, {len(generated)} tokens", *_quoted(_text(generation.tokenizer, generated))]
    if calls:
        lines += ["--- tool parser", *(quoted for event in calls for quoted in _quoted(_said(event)))]
    return "\n".join(lines) + "\n\n"


def _decision(decision):
    """Where the prompt's state came from and went, in tokens and indices of banks."""
    if decision.source is None:
        found = f"bank {decision.target} from nothing"
    else:
        how = "its frontier" if decision.whole else "its own state cut" if decision.checkpoint is None else "a checkpoint"
        found = (f"bank {decision.target} from bank {decision.source}, {decision.common} tokens in common, "
                 f"{decision.cached} kept by {how}")  # fmt: skip
    refused = ", ".join(f"bank {bank} ({why})" for bank, why in decision.refused)
    return found + (f"; refused: {refused}" if refused else "")


def _text(tokenizer, tokens):
    """The text of tokens, those of the protocol included; bytes that are no UTF-8 as ``\\xNN``, ids that the vocabulary does
    not name by their number."""
    names = tokenizer.vocab_size
    raw = (tokenizer.token_bytes(token) if token < names else f"<token {token}>".encode() for token in tokens)
    return b"".join(raw).decode("utf-8", "backslashreplace")


def _said(event):
    match event:
        case CallBegin(index, name):
            return f"call {index} begins: {name}"
        case CallArguments(index, fragment):
            return f"call {index} arguments: {fragment}"
        case CallEnd(index):
            return f"call {index} complete"


def _quoted(text):
    """The lines of ``text``, marked as such; control characters, which a terminal would obey, by their codes."""
    for row in text.split("\n"):
        yield "| " + "".join(c if c.isprintable() or c in "\t " else repr(c)[1:-1] for c in row)


class TraceError(Exception):
    """The file cannot be opened. One sentence."""


class Trace:
    """The open trace file and its writer. ``add`` is for the engine's thread, ``close`` for whoever made it."""

    def __init__(self, fd, name, backlog=BACKLOG):
        self._fd, self._name = fd, name
        self._ended = queue.Queue(backlog)
        self._missed = 0
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="ds4-trace", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path):
        """Append to ``path``, made for its owner alone if missing. TraceError."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TraceError(f"--trace {path}: {error.strerror}") from None
        if os.fstat(fd).st_mode & 0o077:
            log.warning("trace %s: other users may read or write this file, and it will hold private text", path)
        return cls(fd, path)

    def add(self, job):
        """A job has ended. Returns at once, always."""
        if self._broken:
            return
        try:
            self._ended.put_nowait(job)
        except queue.Full:
            self._missed += 1

    def close(self, seconds=5.0):
        """Write what is waiting, for at most so long, and close the file."""
        try:
            self._ended.put(None, timeout=seconds)
        except queue.Full:
            return  # stuck in a write; the file is closed with the process
        self._thread.join(seconds)

    def _run(self):
        told = 0
        while (job := self._ended.get()) is not None:
            if self._broken:
                continue
            missed = self._missed
            if missed > told:
                self._write(f"=== {missed - told} requests are missing here: they ended faster than they could be written\n\n")
                told = missed
            try:
                text = section(job)
            except Exception:
                log.exception("request %s could not be traced", job.request_id)
            else:
                self._write(text)
        if not self._broken:
            os.close(self._fd)

    def _write(self, text):
        data = text.encode("utf-8", "backslashreplace")
        try:
            while data and not self._broken:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self._broken = True
            os.close(self._fd)
            log.warning("trace %s: %s; nothing more is traced", self._name, error.strerror)
