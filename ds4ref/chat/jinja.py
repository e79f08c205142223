"""Renders the chat template that an artifact carries, in a sandbox.

The dialect is the one templates are published for (documentation of `transformers`, "Writing a chat template"): Jinja
with trim_blocks and lstrip_blocks, `break` and `continue`, `{% generation %}` blocks that change nothing,
`raise_exception(text)`, `strftime_now(format)`, and `tojson` as plain JSON; besides these the filter `from_json`. A
template comes out of a file that somebody else wrote, so it can reach no attribute, module or file, and its size, its
loops, its strings and its output are bounded. Knows nothing about any family's format.
"""
import datetime
import functools
import re
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

from ds4ref.chat import jsontext
from ds4ref.chat.errors import ChatError

MAX_TEMPLATE_CHARS = 1 << 20
MAX_STEPS = 2_000_000
"""Loop turns and macro calls in one rendering."""
MAX_OUTPUT_CHARS = 1 << 25
"""Characters of the result, and of any string built on the way (a context of a million tokens has about 2^22)."""

# They build a string of any length from a few characters; no chat template pads its text.
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "format_map"})
_PADDING_FILTERS = ("center", "wordwrap", "urlize", "xmlattr", "slice", "batch", "round")
_WIDE_FORMAT = re.compile(r"\d{4}|%[^a-zA-Z]*\*|\{[^}]*\{")
"""A field width of four digits, or one that comes out of the values."""


def render(template: str, variables: Mapping[str, Any], *, now: datetime.datetime | None = None) -> str:
    """Render a template's source with the given variables (`messages`, `tools`, `bos_token` …; a name not given is
    undefined in the template). now: what `strftime_now` tells, the present if None. Raises ChatError."""
    compiled = compile_template(template)
    steps = _Steps()
    clock = functools.partial(_strftime, now)
    out, size = [], 0
    try:
        for piece in compiled.generate({**variables, "strftime_now": clock, _STEP: steps.take}):
            size += len(piece)
            _bound(size)
            out.append(piece)
    except ChatError:
        raise
    except jinja2.TemplateError as error:
        raise ChatError(f"the chat template cannot render these messages: {_sentence(error)}") from error
    except RecursionError:
        raise ChatError("the chat template calls itself too deeply") from None
    except Exception as error:  # A template can raise anything that the values it touches raise.
        found = f"{type(error).__name__}: {_sentence(error)}"
        raise ChatError(f"the chat template fails on these messages: {found}") from error
    return "".join(out)


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Compile a template's source, once per source. Raises ChatError naming the line if it is no template."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ChatError(f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are accepted")
    try:
        tree = _ENVIRONMENT.parse(source)
        tree = _Instrument().visit(tree)
        tree.set_environment(_ENVIRONMENT)
        code = _ENVIRONMENT.compile(tree)
        return jinja2.Template.from_code(_ENVIRONMENT, code, _ENVIRONMENT.make_globals(None))
    except jinja2.TemplateSyntaxError as error:
        raise ChatError(f"the chat template is not valid Jinja: line {error.lineno}: {_sentence(error)}") from error
    except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
        raise ChatError(f"the chat template cannot be compiled: {type(error).__name__}: {_sentence(error)}") from error


def _sentence(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:500]


def _bound(size: int) -> None:
    if size > MAX_OUTPUT_CHARS:
        raise ChatError(f"the chat template builds a text of more than {MAX_OUTPUT_CHARS} characters")


class _Steps:
    """Counts down the steps of one rendering."""

    def __init__(self) -> None:
        self.left = MAX_STEPS

    def take(self) -> str:
        self.left -= 1
        if self.left < 0:
            raise ChatError(f"the chat template loops more than {MAX_STEPS} times")
        return ""


_STEP, _CONCAT = "ds4_step", "ds4_concat"


class _Instrument(jinja2.visitor.NodeTransformer):
    """Counts every turn of a loop and every call of a macro, and bounds every `~`."""

    def _counted(self, node: Any) -> Any:
        self.generic_visit(node)
        step = jinja2.nodes.Call(jinja2.nodes.Name(_STEP, "load"), [], [], None, None)
        node.body.insert(0, jinja2.nodes.ExprStmt(step).set_lineno(node.lineno, override=True))
        return node

    visit_For = visit_Macro = visit_CallBlock = _counted

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        call = jinja2.nodes.Call(jinja2.nodes.Name(_CONCAT, "load"), node.nodes, [], None, None)
        return call.set_lineno(node.lineno, override=True)


class _Generation(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks training targets; for a prompt it is its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, (str, bytes)) and attr in _PADDING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _bound(_length(left) + _length(right))
        elif operator == "*":
            if _length(left) or _length(right):
                _bound(max(_length(left), 1) * max(_length(right), 1) * max(_count(left), _count(right), 1))
            else:
                _bound(_bits(left) + _bits(right))
        elif operator == "**":
            _bound(_bits(left) * max(_count(right), 1))
        elif isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str) and getattr(obj, "__name__", "") == "replace" and len(args) >= 2:
            _bound_replace(owner, *args[:2])
        elif isinstance(owner, str) and getattr(obj, "__name__", "") == "join" and args:
            args = (list(args[0]), *args[1:])
            _bound(sum(map(_length, args[0])) + len(owner) * len(args[0]))
        return super().call(context, obj, *args, **kwargs)


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise ChatError(f"the chat template pads its text with the format {text[:40]!r}")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _bound_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _bound(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _concat(*values: Any) -> str:
    texts = [str(v) for v in values]
    _bound(sum(map(len, texts)))
    return "".join(texts)


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(text)
    _bound_replace(text, old, new)
    return text.replace(old, new, -1 if count is None else count)


def _format(text: str, *args: Any, **kwargs: Any) -> str:
    _check_format(text)
    return jinja2.filters.do_format(text, *args, **kwargs)


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    if not isinstance(width, int) or width > 64:
        raise ChatError(f"the chat template indents by {width!r}; at most 64 is accepted")
    _bound(len(text) + width * (text.count("\n") + 1))
    return jinja2.filters.do_indent(text, width, first, blank)


@jinja2.pass_environment
def _join(environment: Any, value: Any, d: str = "", attribute: Any = None) -> str:
    get = jinja2.filters.make_attrgetter(environment, attribute) if attribute is not None else (lambda item: item)
    texts = [str(get(item)) for item in value]
    _bound(sum(map(len, texts)) + len(str(d)) * len(texts))
    return str(d).join(texts)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    if isinstance(value, jinja2.Undefined):
        value._fail_with_undefined_error()
    text = jsontext.dumps(value, indent=None if indent is None else min(int(indent), 16), separators=separators,
                          sort_keys=sort_keys)
    if ensure_ascii:
        text = re.sub("[^\0-\x7f]", _escaped, text)
    return text


def _escaped(match: re.Match) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i:i + 4]}" for i in range(0, len(units), 4))


def _from_json(text: str) -> Any:
    try:
        return jsontext.loads(text)
    except (TypeError, ValueError):
        raise ChatError(f"the chat template expects JSON text, not {str(text)[:60]!r}") from None


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime(now: datetime.datetime | None, format: str) -> str:
    return (now or datetime.datetime.now()).strftime(format)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, cache_size=0,
                               extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters.update(tojson=_tojson, from_json=_from_json, join=_join, replace=_replace, format=_format,
                               indent=_indent)
    for name in _PADDING_FILTERS:
        environment.filters.pop(name)
    environment.globals.update(raise_exception=_raise, **{_CONCAT: _concat})
    environment.globals.pop("lipsum")
    return environment


_ENVIRONMENT: _Environment = _environment()
