r"""How each vocabulary cuts text into pieces before byte-pair merging.

A rule belongs to a `tokenizer.ggml.pre` name: one or more patterns, each applied inside the pieces that the one before it
left (matches and the text between them both become pieces), whether text is put into Unicode normal form C first, and
whether a piece that is itself a vocabulary entry is taken whole without merging (`ignore_merges`).

Patterns are those of the vendors' `tokenizer.json` files, quoted from the families' descriptions, in the regular-expression
language of Oniguruma, which the `tokenizers` library runs. The one exception is `motif3`, whose file is not public: its rule
is the o200k split with words joined by single spaces, as two independent public ports state it; its letters split by
case, digits by three, white space as in o200k. Knows nothing about vocabularies or special tokens.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """Patterns in order of application; ``nfc``: normalise first; ``ignore_merges``: known pieces are not merged."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False


CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

QWEN2 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"

QWEN35 = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)

GLM4 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
)

BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)

EXAONE = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)

K2_HORIZON = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}|\p{{M}}|\u200c|\u200d)+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
)

DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}",
)

# A word of the o200k split: upper-case letters then at least one lower-case one, or at least one upper-case one first.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LOWER_WORD, _UPPER_WORD = rf"{_UPPER}*{_LOWER}+", rf"{_UPPER}+{_LOWER}*"
_O200K_REST = rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"

O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LOWER_WORD}{CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_WORD}{CONTRACTION}?|{_O200K_REST}"
)

MOTIF3 = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LOWER_WORD}(?: {_LOWER_WORD})*{CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_WORD}(?: {_UPPER_WORD})*{CONTRACTION}?|{_O200K_REST}"
)

RULES = {
    "bailingmoe2": Rule((BAILING,)),
    "deepseek-v3": Rule(DEEPSEEK),
    "exaone-moe": Rule((EXAONE,)),
    "glm4": Rule((GLM4,), ignore_merges=True),
    "glm5": Rule((GLM4,), ignore_merges=True),
    "joyai-llm": Rule(DEEPSEEK),
    "k2-horizon": Rule((K2_HORIZON,)),
    "motif3": Rule((MOTIF3,)),
    "qwen2": Rule((QWEN2,), nfc=True),
    "qwen35": Rule((QWEN35,), nfc=True),
    "qwen4exp": Rule((QWEN35,), nfc=True),
    "solar-open": Rule((QWEN2,)),
}
