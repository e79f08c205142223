"""Writes grammars in llguidance's dialect of Lark, rule by rule.

A *terminal* (upper case) is a regular expression, matched by a lexer that takes the longest match, or the shortest where its
rule says `[lazy]`; a *rule* (lower case) combines terminals, literals, special tokens `<[id]>` and JSON schemas `%json {…}`.
No terminal can hold a special token, so a marker that is one token is written by its id, and text in front of it is a terminal
of its own.

Knows nothing about calls or schemas. Source: the dialect's published description.
"""
import json
from collections.abc import Iterable, Mapping

import regex

_META = regex.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")
ANY = "/(?s:.*)/"


def escape(text: str) -> str:
    """The regular expression of a text, for use inside `/…/`."""
    return _META.sub(lambda m: "\\" + m[0], text).replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def quoted(text: str) -> str:
    """A literal."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Mapping) -> str:
    """The expression for a JSON value of a schema."""
    return f"%json {json.dumps(schema)}"


def choice(expressions: Iterable[str]) -> str:
    """One of several expressions."""
    unique = list(dict.fromkeys(expressions))
    return unique[0] if len(unique) == 1 else f"({' | '.join(unique)})"


class Writer:
    """The rules of one grammar. specials: text → id of the special tokens that markers are made of."""

    def __init__(self, specials: Mapping[str, int]):
        self._specials = specials
        self._find = regex.compile("|".join(map(regex.escape, sorted(specials, key=len, reverse=True))) or r"(?!)")
        self._names: dict[str, str] = {}  # Body → name.

    def text(self, start: str) -> str:
        """The whole grammar, which begins with the expression `start`."""
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for body, name in self._names.items())])

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """The name of a rule with this body."""
        return self._named(body, f"r{len(self._names)}" + ("[lazy]" if lazy else "")).removesuffix("[lazy]")

    def terminal(self, body: str) -> str:
        """The name of a terminal with this body: literals, `/…/` and terminals, with `|`, `&`, `~` and parentheses."""
        return self._named(body, f"T{len(self._names)}")

    def _named(self, body: str, name: str) -> str:
        return self._names.setdefault(body, name)

    def id_of(self, text: str) -> int | None:
        """The id of a text that is one special token."""
        return self._specials.get(text)

    def cut(self, text: str) -> tuple[str, str]:
        """A text at its first special token: what stands before, and the rest."""
        found = self._find.search(text)
        return (text, "") if found is None else (text[:found.start()], text[found.start():])

    def literal(self, text: str) -> str:
        """The expression for markup: special tokens by id, the rest as it stands; "" for no text."""
        parts = []
        while text:
            head, text = self.cut(text)
            if head:
                parts.append(quoted(head))
            if text:
                token = self._find.match(text)[0]
                parts.append(f"<[{self._specials[token]}]>")
                text = text[len(token):]
        return " ".join(parts)

    def until(self, body: str, closing: str) -> str:
        """The expression for text of a terminal's body with the markup behind it. Text of the body must
        hold no such markup."""
        head, rest = self.cut(closing)
        if not rest:
            return self.rule(f"{self.terminal(body)} {quoted(head)}", lazy=True)
        if head:
            return f"{self.terminal(f'({body}) {quoted(head)}')} {self.literal(rest)}"
        return f"{self.terminal(body)} {self.literal(rest)}"
