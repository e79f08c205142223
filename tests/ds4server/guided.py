"""Answers of models that know nothing, under a grammar: each family's tokenizer and protocol without a model."""

import functools
import json
import random
import re

import numpy as np

from ds4ref import tiny
from ds4ref.chat import Options, collect, lark
from ds4ref.chat.grammars import Function
from ds4ref.conversation import Conversation
from ds4ref.families import FAMILIES
from ds4ref.sampling import SamplingParams
from ds4ref.tokenizer import ALPHABET

GREEDY = SamplingParams(temperature=0)


@functools.cache
def conversation(architecture):
    family = FAMILIES[architecture]
    described = tiny.Described(architecture, family.tiny_metadata())
    size = family.Config.from_metadata(described).vocabulary
    return Conversation(tiny.Described(architecture, family.tiny_metadata() | tiny.vocabulary(architecture, size)))


def tool(name, parameters=None, **more):
    more |= {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **more}}


class Noise:
    """Logits of a random model, uniform over what is allowed, with a growing inclination to close what is open."""

    def __init__(self, conversation, seed):
        self._tokenizer = tokenizer = conversation.tokenizer
        self._random = np.random.default_rng(seed)
        self._bias = np.zeros(tokenizer.vocab_size)
        special = set(tokenizer.specials.values())
        for i in range(tokenizer.vocab_size):
            ends = any(char in tokenizer.token_bytes(i) for char in b'"}]<>/')
            self._bias[i] = 2 if i in conversation.end_ids else 1 if i in special or ends else 0
        self._closers = closers(conversation)

    def __call__(self, generated):
        x = self._random.random(len(self._bias)) + self._bias * min(1, len(generated) / 60)
        tail = b"".join(map(self._tokenizer.token_bytes, generated[-60:]))
        for closer in self._closers:
            known = next((k for k in range(min(len(closer) - 1, len(tail)), -1, -1) if tail.endswith(closer[:k])), 0)
            if len(generated) > 30 or known > 2:
                x[self._tokenizer.id_of(ALPHABET[closer[known]])] += 3 if known else 0.97
        return x


@functools.cache
def closers(conversation):
    """Closing tags, or what stands in front of their marker, that take many tokens, which noise would hardly ever spell."""
    specials = conversation.tokenizer.specials
    markers = {text: specials[text] for text in conversation.chat.protocol.MARKERS if text in specials}
    calls, writer = conversation.chat.calls(Options()), lark.Writer(markers)
    text = calls.call(writer, Function("f", {"properties": {"v": {"type": "string"}}})) + "\n" + writer.text("x")
    found = {json.loads(literal) for literal in re.findall(r'"(?:[^"\\]|\\.)*"', text)}
    heads = {writer.cut(text)[0] for text in found if "</" in text}
    return [head.encode() for head in sorted(heads - {""})]


def begin(conversation, tools=None, *, thinking=None, messages=None, budget=600, **more):
    """A generation behind a short prompt; its prompt."""
    prompt = conversation.render(messages or [{"role": "user", "content": "x"}], tools, Options(thinking=thinking))
    ids = conversation.encode(prompt)
    params = more.pop("params", GREEDY)
    generation = conversation.generation(ids, params, budget=budget, context=1 << 16, prompt=prompt, tools=tools, **more)
    return prompt, generation


def noise(conversation, generation, seed, wanted=()):
    """Run a generation on noise to its end, after the tokens ``wanted``; the answer (``chat.Message``)."""
    model, steps = Noise(conversation, seed), [generation.start()]
    wanted = list(wanted)
    while generation.finish is None:
        logits = model(generation.generated)
        if wanted and generation.forced is None:
            logits[wanted.pop(0)] = 9
        steps.append(generation.accept(logits))
    return collect(event for step in steps for event in step.events)


def tape(conversation, generation, tokens):
    """Run a generation on a model that wants these tokens, behind those that are forced, and then to end; the answer.
    AssertionError where one is refused."""
    steps = [generation.start()]
    while generation.forced is not None:
        steps.append(generation.accept(np.zeros(conversation.tokenizer.vocab_size)))
    for token in [*tokens, conversation.tokenizer.eos_id]:
        if generation.finish is not None:
            break
        logits = np.zeros(conversation.tokenizer.vocab_size)
        logits[token] = 9
        step = generation.accept(logits)
        assert step.token in (token, None), (conversation.tokenizer.piece(token), conversation.tokenizer.piece(step.token))
        steps.append(step)
    return collect(event for step in steps for event in step.events)


def random_tool(seed):
    """A tool with a schema of many kinds of values."""
    r = random.Random(seed)
    names = r.sample(["alpha", "beta", "ga-mma", "d e", "ünï"], r.randint(0, 4))
    properties = {name: _schema(r, 0) for name in names}
    defs = {"S": {"type": "string"}, "N": {"type": ["integer", "null"]},
            "O": {"type": "object", "properties": {"o": {"$ref": "#/$defs/S"}, "n": {"$ref": "#/$defs/O"}}, "required": ["o"]}}
    schema = {"type": "object", "properties": properties, "required": [n for n in names if r.random() < 0.7], "$defs": defs}
    if r.random() < 0.3:
        schema["additionalProperties"] = r.choice([True, False, {"type": "integer"}])
    return tool("f", schema)


_VALUES = [1, -2, "a", "b c", "5", "null", "<x>", None, True, 2.5, "", [1], {"a": 1}, "true", " x "]
_LIMITED = [
    {"type": "string", "minLength": 1, "maxLength": 4}, {"type": "string", "pattern": "^[a-z]{1,3}$"},
    {"type": "string", "pattern": "b"}, {"type": ["string", "null"], "maxLength": 3}, {"type": "string", "format": "date"},
    {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "number", "minimum": -1.5},
    {"type": ["integer", "string"], "minimum": 3}, {}, True, {"description": "any"},
]  # fmt: skip
_BOTH = {"allOf": [{"type": "object", "properties": {"p": {"type": "integer"}}, "required": ["p"]},
                   {"type": "object", "properties": {"q": {"type": "string"}}}]}  # fmt: skip


def _schema(r, depth):
    flat = ["string", "integer", "number", "boolean", "null", "enum", "const", "types", "ref", "limited"]
    match r.choice(flat if depth > 2 else [*flat, "array", "object", "anyOf", "allOf"]):
        case "array":
            return {"type": "array", "items": _schema(r, depth + 1), "maxItems": r.randint(1, 3)}
        case "object":
            properties = {name: _schema(r, depth + 1) for name in r.sample(["a", "c d", "näme", "x.y", "$k"], r.randint(0, 3))}
            schema = {"type": "object", "properties": properties, "required": [n for n in properties if r.random() < 0.6]}
            return schema | ({"additionalProperties": r.choice([True, False, {"type": "integer"}])} if r.random() < 0.4 else {})
        case "enum":
            return {"enum": r.sample(_VALUES, r.randint(1, 4))}
        case "const":
            return {"const": r.choice([1, "x", "7", None, False])}
        case "anyOf":
            return {"anyOf": [_schema(r, depth + 1) for _ in range(r.randint(1, 3))]}
        case "types":
            return {"type": r.sample(["string", "integer", "number", "boolean", "null"], r.randint(1, 3))}
        case "ref":
            return {"$ref": "#/$defs/" + r.choice("SNO")}
        case "limited":
            return r.choice(_LIMITED)
        case "allOf":
            return _BOTH
        case kind:
            return {"type": kind}
