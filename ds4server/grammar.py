"""Grammars for constrained sampling, compiled by llguidance (an optional package).

    grammar = for_calls(conversation, tools, choice, parallel)      None where nothing is constrained
    grammar = for_format(conversation, schema)                      visible text that is JSON
    generation = conversation.generation(…, grammar=grammar)

A ``Grammar`` may be shared by the choices of a request; each generation begins it anew. What cannot be enforced is a
``GrammarError`` with one sentence for the client.

The texts of the call grammars are the protocols' own (``ds4ref.chat``); here they meet a tokenizer. Mask computation is
llguidance's: a bit per token of the vocabulary, end tokens where the grammar may stop.
"""

import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np

from ds4ref.chat import ChatError, Options, constraints, grammars, lark, reasoning_tags

MISSING = "constrained output needs the package llguidance, which is not installed; install it with pip install 'ds4[grammar]'"
MAX_BYTES = 1 << 20
"""Of the text of a grammar."""
KEPT = 16
"""Compiled grammars that are kept: clients send the same tools and formats again and again."""


class GrammarError(ValueError):
    """What is asked for cannot be enforced: one sentence for the client."""


class Grammar:
    """A compiled grammar: ``begin`` makes the guide (``ds4ref.guidance``) of one answer.

    text: the grammar of an answer without reasoning; after: that behind reasoning, where it is another. demanding: whether
    an answer has to come.
    """

    def __init__(self, compiler, text, after=None, demanding=True):
        self._compiler, self.demanding = compiler, demanding
        self._first = compiler.matcher(text)
        self._after = self._first if after is None or after == text else compiler.matcher(after)

    def begin(self, after_reasoning=False):
        return Guide(self._compiler, (self._after if after_reasoning else self._first).deep_copy())


class Guide:
    """Where one answer stands in its grammar. ValueError when llguidance gives up on it."""

    def __init__(self, compiler, matcher):
        self._compiler, self._matcher = compiler, matcher

    def banned(self):
        """bool [V], true for tokens that may not come next."""
        bits = np.empty((1, (self._compiler.size + 31) // 32), dtype=np.int32)
        self._compiler.numpy.fill_next_token_bitmask(self._matcher, bits)
        self._check()
        return np.unpackbits(bits.view(np.uint8)[0], count=self._compiler.size, bitorder="little") == 0

    def accept(self, token):
        """``token`` has been sampled."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def complete(self):
        """Whether nothing but the end may follow."""
        return self._matcher.is_stopped()

    def copy(self):
        """Another that goes on from here."""
        return Guide(self._compiler, self._matcher.deep_copy())

    def _check(self):
        if self._matcher.is_error():
            raise ValueError(f"the grammar of an answer failed: {self._matcher.get_error()}")


class Compiler:
    """llguidance on one tokenizer. GrammarError where the package is not installed."""

    def __init__(self, tokenizer, end_ids):
        try:
            import llguidance
            import llguidance.numpy
        except ImportError:
            raise GrammarError(MISSING) from None
        self._llguidance, self.numpy = llguidance, llguidance.numpy
        self.size = tokenizer.vocab_size
        wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, min(end_ids)))
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=self.size, eos_token=sorted(end_ids))

        self.matcher = lru_cache(maxsize=KEPT)(self._matcher)

    def _matcher(self, text):
        """A matcher at the beginning of a grammar (Lark), to be copied. GrammarError if it cannot be compiled."""
        if len(text) > MAX_BYTES:
            raise GrammarError(f"the schema makes a grammar of {len(text)} characters; at most {MAX_BYTES} are accepted")
        matcher = self._llguidance.LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"the schema cannot be enforced: {_reason(matcher.get_error())}")
        return matcher


_PLACE = re.compile(r"(at )?\d+\(\d+\): |failed to compile JSON schema: ")
_LISTING = re.compile(r"\n *\d+ \| .*", re.DOTALL)


def _reason(text):
    """The reason in an error of llguidance, without the place in a grammar that the client has not written."""
    return " ".join(_PLACE.sub("", _LISTING.sub("", text)).split())[:300] or "the reason is not known"


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer, end):
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = end, tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        blank = {i for text, i in tokenizer.specials.items() if text.isspace()}
        self.special_token_ids = sorted(set(tokenizer.specials.values()) - blank)

    def __call__(self, text):
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, parse_special=False)


_compilers = WeakKeyDictionary()
_lock = threading.Lock()


def compiler(conversation):
    """The compiler of a conversation, made once: reading a vocabulary of 150,000 tokens takes about a second."""
    with _lock:
        found = _compilers.get(conversation)
        if found is None:
            found = _compilers[conversation] = Compiler(conversation.tokenizer, conversation.end_ids)
        return found


def warm(conversation):
    """Make the compiler now, so that no request waits for it; nothing where llguidance is not installed."""
    with suppress(GrammarError):
        compiler(conversation)


# --- what requests ask for ------------------------------------------------------------------------------------------

_PRETTY = {"whitespace_pattern": r"([ \t]{1,2}|\r?\n[ \t]{0,12})"}
"""White space between the parts of a JSON text: enough for indented forms, too little for an answer of nothing else."""


@dataclass(frozen=True)
class Choice:
    """Which tools may or must be called. mode: "auto", "none" or "required"; names: only these, None for all; single: whether
    it is one call that is asked for, of the tool that is named."""

    mode: str = "auto"
    names: tuple[str, ...] | None = None
    single: bool = False

    def among(self, tools):
        """Those of the tools (as Chat Completions has them, or None) that may be called."""
        return [tool for tool in tools or () if self.names is None or tool["function"]["name"] in self.names]


def for_calls(conversation, tools, choice, parallel=True, options=None):
    """The grammar of an answer under a :class:`Choice`; None where nothing is constrained.

    tools: those of the prompt, as Chat Completions has them. With "required" the answer is calls of allowed tools and nothing
    else; with "auto" and a ``strict`` tool or a subset it is free, but whatever begins like a call is a call of an allowed
    tool, with arguments valid for its schema if it is strict. parallel: whether several calls may come. options: the
    ``chat.Options`` of the rendering. GrammarError for what cannot be enforced.
    """
    tools, mode = list(tools or ()), choice.mode
    allowed = choice.among(tools)
    strict = any(_strict(tool["function"]) for tool in allowed)
    if mode == "none" or (mode == "auto" and not strict and len(allowed) == len(tools)):
        return None
    compiled = compiler(conversation)
    calls = conversation.chat.calls(options or Options())
    free = _free(conversation)

    def text(after_reasoning, tools=allowed):
        functions = grammars.functions(tools, constrained=_strict if mode == "auto" else lambda function: True)
        writer = lark.Writer(_markers(conversation))
        if mode == "required":
            return writer.text(grammars.forced(writer, calls, functions, parallel, after_reasoning))
        return writer.text(grammars.guarded(writer, calls, functions, parallel, after_reasoning, free))

    try:
        return _compiled(compiled, calls, text, mode == "required")
    except GrammarError as error:
        raise _blame(compiled, allowed, text) or error from None


def _blame(compiled, tools, text):
    """The GrammarError of the first of several tools that cannot be enforced alone, None if each can."""
    for tool in tools if len(tools) > 1 else ():
        try:
            compiled.matcher(text(False, [tool]))
        except (ChatError, GrammarError) as error:
            return GrammarError(f"tool {tool['function']['name']!r}: {error}")
    return None


def for_format(conversation, schema, raw=False, options=None, tools=None, parallel=True):
    """The grammar of visible text that is valid for a JSON schema (a dict). raw: for an answer without a chat protocol. With
    tools (those of the prompt, none of them required) an answer may be calls instead, of which those of ``strict`` tools are
    held to their schemas. GrammarError for what cannot be enforced.
    """
    compiled = compiler(conversation)
    body = lark.json_rule({**_document(schema), "x-guidance": _PRETTY})
    if raw:
        return Grammar(compiled, lark.Writer({}).text(body))
    calls = conversation.chat.calls(options or Options())

    def text(after_reasoning):
        writer = lark.Writer(_markers(conversation))
        start = grammars.visible(writer, calls, body, after_reasoning)
        if tools:
            functions = grammars.functions(tools, constrained=_strict)
            start = f"({start} | {grammars.forced(writer, calls, functions, parallel, after_reasoning)})"
        return writer.text(start)

    return _compiled(compiled, calls, text)


def _strict(function):
    return function.get("strict") is True


def _document(schema):
    """A schema that stands alone. GrammarError where it is none or cannot be enforced."""
    try:
        constraints.check(schema)
        return constraints.document(schema, schema)
    except ChatError as error:
        raise GrammarError(f"the schema cannot be enforced: {error}") from None


def _compiled(compiled, calls, text, demanding=True):
    try:
        return Grammar(compiled, text(False), text(True) if calls.turn or calls.own_lines else None, demanding)
    except ChatError as error:
        raise GrammarError(f"the tools cannot be enforced: {error}") from None


def _markers(conversation):
    """The protocol's markers that are special tokens, by their text."""
    specials = conversation.tokenizer.specials
    return {text: specials[text] for text in conversation.chat.protocol.MARKERS if text in specials}


def _free(conversation):
    """The special tokens that free text may hold: none that ends the answer or belongs to calls."""
    tokenizer = conversation.tokenizer
    tags = {tag for tags in reasoning_tags(conversation.chat.protocol) for tag in tags}
    calls = {i for text, i in _markers(conversation).items() if text not in tags}
    blank = {i for text, i in tokenizer.specials.items() if text.isspace()}
    return sorted(set(tokenizer.specials.values()) - calls - blank - conversation.end_ids)
