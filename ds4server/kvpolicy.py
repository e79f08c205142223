"""When a state is worth a record, and which record is worth least.

Pure functions of token counts and of the operator's :class:`Options`. A state is saved only where it already stands: what
these functions name are positions to stop at on the way, never work to do again. The serial session saves *cold* prompts, at
a position that a longer prompt will share too, and goes on saving at *continued* frontiers; a bank saves when it retires.

Knows nothing about files.
"""

from dataclasses import dataclass

HALF_LIFE = 21_600  # seconds in which a hit loses half its weight


@dataclass(frozen=True)
class Options:
    """What is worth writing and reading, in tokens.

    min_tokens: of any record; cold_max: longest prompt saved as ``cold``, 0 for none; continued_interval: between ``continued``
    saves, 0 for none; trim: tail that a cold save leaves out; align: cold saves align down to it, continued ones up, 0 for no
    alignment; persist_min: of a bank's records, 0 for none. reject_different_quant: read records of the same quantization only.
    """

    min_tokens: int = 512
    cold_max: int = 30_000
    continued_interval: int = 10_000
    trim: int = 32
    align: int = 2048
    persist_min: int = 8192
    reject_different_quant: bool = False


def store_len(n, options):
    """How many of a prompt's ``n`` tokens a cold record keeps: trimmed and aligned, since a tokenizer may merge across the
    end of what is appended to; all of them where that leaves too little."""
    kept = n - options.trim
    if options.align:
        kept -= kept % options.align
    return kept if n > options.min_tokens + options.trim and kept >= options.min_tokens else n


def cold_target(n, options, marker=None):
    """The position at which a cold prompt of ``n`` tokens is saved, or None. marker: the position of the last user marker
    before the first assistant marker, if there is one."""
    if not options.min_tokens <= n <= options.cold_max:
        return None
    return marker if marker is not None and options.min_tokens <= marker <= n else store_len(n, options)


def continued_step(options):
    """Tokens between two ``continued`` saves; 0 for none."""
    step, align = options.continued_interval, options.align
    return -(-step // align) * align if align else step


def continued_frontiers(saved, end, options):
    """The positions after ``saved``, the last saved one, up to ``end`` at which a state is saved as ``continued``."""
    step = continued_step(options)
    return tuple(n for n in range(step, end + 1, step) if n > saved and n >= options.min_tokens) if step else ()


def bank_persists(committed, options):
    """Whether a bank of so many tokens may be written at all."""
    return 0 < options.persist_min <= committed and committed >= options.min_tokens


def checkpoint_due(committed, saved, options, tools_grew=False):
    """Whether a retiring bank is written: it passed a frontier since its last save, or has tool calls that no record has."""
    step = continued_step(options)
    passed = step > 0 and committed // step > saved // step
    return bank_persists(committed, options) and committed > 0 and (passed or tools_grew)


def eviction_score(tokens, hits, idle, size):
    """What a record is worth: tokens per byte, times its hits and one, where hits fade. idle: seconds since its last use;
    size: bytes."""
    faded = hits * 2.0 ** (-max(0.0, idle) / HALF_LIFE)
    return ((faded if faded >= 0.01 else 0.0) + 1) * tokens / size
