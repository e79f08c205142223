"""Write a tiny random artifact of any family: real keys, names and shapes, a small byte-level vocabulary, random weights.

It answers with noise. It exists to try interfaces, to test, and as a template of what a family's file holds.
"""

import json
from collections import Counter

import numpy as np

from . import families, gguf, gguf_writer
from .gguf import ArtifactError
from .pretokenizers import O200K
from .tokenizer import ALPHABET, CONTROL, NORMAL, UNUSED, USER_DEFINED

# What the chat protocols need of a vocabulary, in the order of the ids: (control tokens, user-defined tokens). The first
# control token ends a turn.
_CHATML = (("<|im_end|>", "<|endoftext|>", "<|im_start|>"), ("<think>", "</think>", "<tool_call>", "</tool_call>"))
_QWEN = (_CHATML[0], (*_CHATML[1], "<tool_response>", "</tool_response>"))
_GLM = (
    ("<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>", "<|system|>", "[gMASK]", "<sop>"),
    ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>",
     "<arg_value>", "</arg_value>"),
)  # fmt: skip
_DOTS = (
    ("<|endofassistant|>", "<|endoftext|>", "<|system|>", "<|endofsystem|>", "<|user|>", "<|endofuser|>", "<|assistant|>"),
    ("<think>", "</think>", "<no_think>"),
)
SPECIALS = {
    "bailingmoe3": (
        ("<|role_end|>", "<|endoftext|>", "<|startoftext|>", "<role>", "</role>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>",
         "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "deepseek4": (
        ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        ("<think>", "</think>", "｜DSML｜"),
    ),
    "dots3-note": _DOTS,
    "dots3note": _DOTS,
    "exaone-moe": (
        ("<|endofturn|>", "[EOS]", "[BOS]", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tool_declare|>"),
        ("<think>", "</think>", "<tool>", "</tool>", "<tool_call>", "</tool_call>", "<tool_result>", "</tool_result>"),
    ),
    "glm-dsa": _GLM,
    "glm5-next": _GLM,
    "inkling": (
        ("<|content_model_end_sampling|>", "<|begin_of_text|>", "<|message_user|>", "<|message_model|>", "<|message_system|>",
         "<|message_tool|>", "<|content_text|>", "<|content_thinking|>", "<|end_message|>", "<|content_xml|>",
         "<|content_tool_error|>", "<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>"),
        (),
    ),
    "k2-horizon": (
        ("<|ifm|im_end|>", "<|ifm|endoftext|>", "<|ifm|begin_of_text|>", "<|ifm|im_start|>"),
        tuple(f"<{slash}ifm|{name}>" for name in ("think", "think_fast", "think_faster", "tools", "tool_calls", "tool_call",
                                                  "arg_key", "arg_type", "arg_value") for slash in ("", "/")),
    ),
    "mimo2": (_QWEN[0], (*_QWEN[1], "<|mimo_audio_eod|>")),
    "motif3": (
        ("<|endofturn|>", "<|endoftext|>", "<|beginoftext|>", "<|startofturn|>", "<|system|>", "<|user|>", "<|assistant|>",
         "<|tool|>"),
        _QWEN[1],
    ),
    "naive_n05_flash": _QWEN,
    "qwen35": _QWEN,
    "qwen4exp": _QWEN,
    "solar-open2": (
        ("<|im:end|>", "<|endoftext|>", "<|startoftext|>", "<|im:start|>", "<|im:content|>"),
        tuple(f"<|{name}|>" for name in ("think:start", "think:end", "tool:start", "tool:end", "tool_call:start",
                                         "tool_call:end", "tool_arg:start", "tool_arg:value", "tool_arg:end",
                                         "tool_response:start", "tool_response:end")),
    ),
    "step35": (("<|im_end|>", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<|im_start|>"), _QWEN[1]),
}  # fmt: skip

SAMPLE = """
The tide comes in twice a day and leaves twice a day. Whoever keeps a boat in the harbour learns to read the table of the
tides before anything else: when the water stands high, how long it stands, and what the wind from the west adds to it. A
table is only an average. The water that is really there is measured at the gauge, and the two are compared every morning.
When they differ by more than a hand, somebody walks out to look at the gauge, since it is more often the gauge than the sea.
So the keeper writes both numbers down, with the time and the weather, and never corrects one of them to please the other.
After a year the differences say more about the harbour than the table does, and after ten years there is a better table.
Nobody thanks the keeper for a number that was right. A boat that comes home on time is not news. But a wrong number is soon
known in every kitchen of the town: which stone it struck, who stood at the wheel, and what the water should have been. For
this reason the book is kept in ink, both columns, and when a page is full the next keeper signs under the last line of it.
"""


def write(architecture, path, seed=0):
    """Write a tiny artifact of ``architecture`` to ``path``. The same seed gives the same file."""
    family = families.FAMILIES.get(architecture)
    if family is None:
        raise ArtifactError(f"unknown architecture {architecture!r} (known: {', '.join(sorted(families.FAMILIES))})")
    metadata = {
        "general.name": f"ds4 tiny {architecture} (random toy)",
        "general.description": "random weights, for trying the interface; its answers are noise",
    } | family.tiny_metadata()
    described = Described(architecture, metadata)
    config = family.Config.from_metadata(described)
    metadata |= vocabulary(architecture, config.vocabulary)
    required, _ = family.tensors(config)
    rng = np.random.default_rng(seed)
    tensors = {name: random_tensor(family, name, first(shape), rng) for name, shape in required.items()}
    gguf_writer.write(path, architecture, metadata, tensors)


class Described:
    """Metadata without a file, enough for a family's ``Config.from_metadata``."""

    def __init__(self, architecture, metadata):
        self.architecture = architecture
        self.metadata = {"general.architecture": architecture} | metadata
        self.types = {}
        self.path = gguf.Path("tiny.gguf")
        self.tensors = {}


def vocabulary(architecture, size):
    """Tokenizer keys: 256 byte tokens, merges learnt from a short sample, the family's special tokens last.

    Where the sample has fewer merges than ``size`` asks for, unused tokens fill the gap.
    Inkling's vocabulary is a whole ``tokenizer.json`` under a key of its own.
    """
    control, user_defined = SPECIALS[architecture]
    merges = learn_merges(SAMPLE, size - 256 - len(control) - len(user_defined))
    fillers = [f"<|unused_{i}|>" for i in range(size - 256 - len(merges) - len(control) - len(user_defined))]
    tokens = [*ALPHABET, *("".join(pair) for pair in merges), *fillers, *control, *user_defined]
    if architecture == "inkling":
        return {"inkling.tokenizer.json": _tokenizer_json(tokens, merges, (*control, *user_defined))}
    types = [NORMAL] * (256 + len(merges)) + [UNUSED] * len(fillers)
    types += [CONTROL] * len(control) + [USER_DEFINED] * len(user_defined)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.eos_token_id": tokens.index(control[0]),
        "tokenizer.ggml.add_bos_token": False,
    }


def _tokenizer_json(tokens, merges, specials):
    """A complete Hugging Face ``tokenizer.json`` with Inkling's rules."""
    vocabulary = {token: i for i, token in enumerate(tokens) if token not in specials}
    added = [
        {"id": tokens.index(text), "content": text, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for text in specials
    ]  # fmt: skip
    split = {"type": "Split", "pattern": {"Regex": O200K}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
             "fuse_unk": False, "byte_fallback": False, "ignore_merges": True, "vocab": vocabulary,
             "merges": [list(pair) for pair in merges]}  # fmt: skip
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
             "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}, "post_processor": None,
             "decoder": {"type": "ByteLevel"}, "model": model}  # fmt: skip
    return json.dumps(whole, ensure_ascii=False)


def learn_merges(text, count):
    """The first ``count`` merges of byte-pair encoding (Sennrich et al. 2016) on ``text``; words keep their leading space.

    Fewer where every word has become one symbol.
    """
    words = Counter(tuple(ALPHABET[b] for b in f" {word}".encode()) for word in text.split())
    merges = []
    while len(merges) < count:
        pairs = Counter()
        for word, n in words.items():
            for pair in zip(word, word[1:], strict=False):
                pairs[pair] += n
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = Counter({_merged(word, best): n for word, n in words.items()})
    return merges


def _merged(word, pair):
    out = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return tuple(out)


def first(shape):
    """The shape, or the first of those that a family accepts."""
    return shape[0] if isinstance(shape[0], tuple) else shape


def random_tensor(family, name, shape, rng):
    """Random values by the role that the name tells; a family's ``tiny_tensor`` decides where a role is special."""
    special = getattr(family, "tiny_tensor", lambda name, shape, rng: None)(name, shape, rng)
    if special is not None:
        return special
    if "norm" in name and name.endswith(".weight"):
        values = 1 + 0.1 * rng.standard_normal(shape)
    elif len(shape) == 1 or name.endswith(".bias"):
        values = 0.1 * rng.standard_normal(shape)
    else:
        values = rng.standard_normal(shape) / np.sqrt(shape[-1])
    return values.astype(np.float32)
