"""What holds an answer to a grammar and its reasoning to a budget: which tokens may come next, and which one must.

Theory of operation
-------------------
    state      next token                                        leaves on
    REASONING  free, but no marker of calls, and no end token    the closing marker → ANSWER
               if the grammar demands an answer; the closing
               marker, once the budget is used up
    BEGINNING  the grammar's, or one that opens reasoning        that one → REASONING; any other → ANSWER
    ANSWER     the grammar's                                     the grammar is complete: the answer ends

A grammar is any object with ``begin(after_reasoning) → guide`` and ``demanding``, whether an answer has to come. A guide has
``banned()`` → bool [V], true where a token may not come next; ``accept(token)``; ``complete``, whether nothing but the end
may follow; ``copy()``, another that goes on from there. End tokens are among its tokens: banned until the grammar may stop.
So the grammar speaks of what stands behind the reasoning, in tokens, markers included.

In ANSWER text that spells a reasoning marker is text. Without a grammar only the budget counts, in whatever state.

Knows nothing about how grammars are written or compiled, and nothing about sampling.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class ReasoningTokens:
    """The tokens around a family's reasoning.

    opening: the special tokens that open it, each with the ids of its closing marker. refused: the markers of calls,
    which may not be sampled in reasoning that a grammar follows; ends: the end tokens. straddling: (what a text may end
    with, the tokens that complete a closing marker there and go on behind it); a grammar begins at a token of its own.
    """

    opening: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    refused: frozenset[int] = frozenset()
    ends: frozenset[int] = frozenset()
    straddling: tuple[tuple[bytes, frozenset[int]], ...] = ()


def straddling(tokens, closings):
    """``ReasoningTokens.straddling`` of a vocabulary. tokens: the bytes of each, by id; closings: the closing markers."""
    found = {}
    for marker in closings:
        able = [(i, token) for i, token in enumerate(tokens) if marker[-1:] in token and token != marker]
        for known in range(len(marker)):
            rest = marker[known:]
            ids = {i for i, token in able if token != rest and (token.startswith(rest) if known else rest in token)}
            if ids:
                found.setdefault(marker[:known], set()).update(ids)
    return tuple((head, frozenset(ids)) for head, ids in found.items())


def excluded(masked, banned, rows):
    """What may not come next: ids, or bool [rows] under a grammar. masked: ids, the stop policy's; banned: the guidance's, ids
    or bool [V] with V ≤ rows."""
    if not isinstance(banned, np.ndarray):
        return masked.union(banned) if banned else masked
    out = np.ones(rows, dtype=bool)
    out[: len(banned)] = banned
    ends = list(masked)
    allowed = out[ends].copy()
    out[ends] = True
    if out.all():  # nothing but the end may come, so no policy keeps it away
        out[ends] = allowed
    return out


class Guidance:
    """The guidance of one answer. reasoning_open: whether the prompt ends inside reasoning, and ``closing`` the ids of the
    marker that closes it; may_open: whether the answer may open reasoning itself. budget: reasoning tokens, None for any
    number."""

    def __init__(self, tokens=None, grammar=None, budget=None, *, reasoning_open=False, may_open=False, closing=()):
        self._tokens = tokens or ReasoningTokens()
        self._grammar, self._budget = grammar, budget
        self._open, self._may_open, self._closing = reasoning_open, may_open and not reasoning_open, tuple(closing)
        self._forced = []
        self._guide = None if grammar is None or reasoning_open else grammar.begin(False)

    @property
    def in_answer(self):
        """Whether a grammar has taken over, so that reasoning is closed for good."""
        return self._guide is not None and not self._may_open

    @property
    def complete(self):
        """Whether the grammar leaves nothing but the end."""
        return self.in_answer and self._guide.complete

    def forced(self, reasoning_tokens):
        """The id that must come next, given the reasoning tokens so far; None where the sampler chooses."""
        spent = self._budget is not None and reasoning_tokens >= self._budget
        if self._open and spent and not self._forced:
            self._forced = list(self._closing)
        return self._forced[0] if self._forced else None

    def banned(self, text):
        """What may not come next behind ``text`` (the bytes at its end): ids, or a bool array [V]."""
        if self._grammar is None:
            return ()
        if self._open:
            crossing = [ids for head, ids in self._tokens.straddling if text.endswith(head)]
            return self._tokens.refused.union(*crossing, self._tokens.ends if self._grammar.demanding else ())
        banned = self._guide.banned()
        if self._may_open:
            banned = banned.copy()
            banned[list(self._tokens.opening)] = False
        return banned

    def accept(self, token, reasoning_open):
        """``token`` has come; reasoning_open: whether reasoning is open behind it."""
        if self._forced:
            self._forced.pop(0)
        if reasoning_open and token in self._tokens.opening:
            self._closing = self._tokens.opening[token]
        if self._grammar is None:
            self._open = reasoning_open
        elif self._open:
            self._open = reasoning_open
            if not reasoning_open:
                self._guide = self._grammar.begin(True)
                self._may_open = False
        elif self._may_open and token in self._tokens.opening:
            self._open = reasoning_open
        else:
            self._may_open = False
            self._guide.accept(token)

    def copy(self):
        """Another that goes on from here."""
        twin = copy(self)
        twin._forced = list(self._forced)
        twin._guide = None if self._guide is None else self._guide.copy()
        return twin


class Ahead:
    """What the guidance of an answer excludes behind tokens that are not the answer's yet: a ``speculative.Speculator.mask``.

    Called with no tokens, then with one more each time; it begins anew where they are others.
    """

    def __init__(self, generation):
        self._generation, self._tokens = generation, None

    def __call__(self, tokens):
        """Ids or bool [V]; None where nothing can be drafted: the grammar is complete, or the next token is settled."""
        known = len(tokens) - 1
        if known < 0 or self._tokens != tokens[:known]:
            made, known = self._generation, 0
            self._guidance, self._tracker, self._reasoning = made.guidance.copy(), made.tracker, made.reasoning_tokens
        for token in tokens[known:]:
            self._accept(token)
        self._tokens = tokens
        if self._guidance.complete or self._guidance.forced(self._reasoning) is not None:
            return None
        return self._guidance.banned(self._tracker.tail if self._tracker else b"")

    def _accept(self, token):
        if self._tracker is not None and not self._guidance.in_answer:
            self._tracker = self._tracker.after(self._generation.tokenizer.token_bytes(token))
        thinks = self._tracker is not None and self._tracker.is_open
        self._guidance.accept(token, thinks)
        self._reasoning += thinks
