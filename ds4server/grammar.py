"""Grammars for constrained sampling, compiled by llguidance (an optional package).

    grammar = for_calls(conversation, tools, choice, parallel)      None where nothing is constrained
    grammar = for_format(conversation, response_format)             None for plain text
    generation = conversation.generation(…, grammar=grammar)

A ``Grammar`` may be shared by the choices of a request; each generation begins it anew. What cannot be enforced is a
``GrammarError`` with one sentence for the client.

The texts of the call grammars are the protocols' own (``ds4ref.chat``); here they meet a tokenizer. Mask computation is
llguidance's: a bit per token of the vocabulary, end tokens where the grammar may stop.
"""

import re
import threading
from contextlib import suppress
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
FORMATS = ("text", "json_object", "json_schema")


def for_calls(conversation, tools, choice="auto", parallel=True, options=None):
    """The grammar of an answer under a tool choice; None where nothing is constrained.

    tools: those of the prompt, as Chat Completions has them. choice: that surface's ``tool_choice`` ("auto", "none",
    "required", a named function, ``allowed_tools``). With "required", a name or a required subset the answer is calls and
    nothing else; with "auto" and a ``strict`` tool or a subset it is free, but whatever begins like a call is a call of an
    allowed tool, with arguments valid for its schema if it is strict. parallel: whether several calls may come. options: the
    ``chat.Options`` of the rendering. GrammarError for a choice that is none, and for what cannot be enforced.
    """
    tools = list(tools or ())
    mode, names = _chosen(choice, tools)
    allowed = [tool for tool in tools if tool["function"]["name"] in names]
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


def for_format(conversation, response_format, raw=False, options=None, tools=None, parallel=True):
    """The grammar of visible text in a ``response_format`` as Chat Completions spells it: ``{"type": "json_object"}``,
    ``{"type": "json_schema", "json_schema": {"schema": …}}`` (or the schema beside ``type``, as Responses and Messages have
    it); None for text. raw: for an answer without a chat protocol. With tools (those of the prompt, none of them required) an
    answer may be calls instead, of which those of ``strict`` tools are held to their schemas. GrammarError names what is wrong.
    """
    schema = schema_of(response_format)
    if schema is None:
        return None
    compiled = compiler(conversation)
    body = lark.json_rule({**schema, "x-guidance": _PRETTY})
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


def schema_of(response_format):
    """The JSON schema that a ``response_format`` asks for, None for text. GrammarError for anything else."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind not in FORMATS:
        raise GrammarError(f"response_format.type must be one of {', '.join(FORMATS)}, got {kind!r}")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    holder = response_format.get("json_schema")
    schema = (holder if isinstance(holder, dict) else response_format).get("schema")
    if not isinstance(schema, dict):
        raise GrammarError("the schema of a json_schema response_format must be an object")
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


def _chosen(choice, tools):
    """(none, auto or required; the names of the tools that may be called)."""
    names = [tool["function"]["name"] for tool in tools]
    if choice is None or choice in ("auto", "none", "required"):
        mode, chosen = choice or "auto", names
    elif isinstance(choice, dict) and choice.get("type") == "function":
        mode, chosen = "required", [_name(choice)]
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        subset = choice.get("allowed_tools") if isinstance(choice.get("allowed_tools"), dict) else choice
        mode, listed = subset.get("mode", "auto"), subset.get("tools")
        if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
            raise GrammarError("tool_choice of type allowed_tools must have a mode (auto or required) and a list of tools")
        chosen = list(map(_name, listed))
    else:
        raise GrammarError(f"tool_choice must be none, auto, required, a function or allowed_tools, got {str(choice)[:60]}")
    missing = [name for name in chosen if name not in names]
    if missing:
        raise GrammarError(f"tool_choice names {missing[0]!r}, which is none of the tools")
    if mode == "required" and not names:
        raise GrammarError("tool_choice requires a call, and there are no tools")
    return mode, set(chosen)


def _name(value):
    function = value.get("function") if isinstance(value, dict) and isinstance(value.get("function"), dict) else value
    return function.get("name") if isinstance(function, dict) else None


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
