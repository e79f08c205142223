"""The fields that every generating request shares, and pydantic's complaints as sentences.

Rules of the API: unknown fields are ignored, null means absent, a wrong JSON type or a number outside its range is refused. The
OpenAPI document is generated from these models and those that extend them, one per surface.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ds4ref.chat.request import LEVELS
from ds4ref.sampling import SamplingParams, fresh_seed

from .chat_messages import kind
from .errors import bad_request

MAX_STOPS = 16
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


def whole(value):
    """An integer field takes 16.0 but not 16.5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]
Budget = Annotated[Whole, Field(ge=0)]


class Fields(BaseModel):
    """A JSON object of which unknown members are ignored and known ones have exactly their type."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Fields):
    include_usage: bool | None = None


class Common(Fields):
    """What a request of any surface may say about sampling, thinking and transport."""

    model: str | None = None
    stream: bool | None = None
    max_tokens: Budget | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1)] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    ignore_eos: bool | None = None
    think: bool | None = None
    enable_thinking: bool | None = None
    thinking: bool | dict[str, Any] | None = None
    thinking_budget: Budget | None = None

    def heat(self, service):
        """The temperature in effect."""
        return service.default_temperature if self.temperature is None else self.temperature

    def thinking_tokens(self):
        """The reasoning budget in tokens, or None: ``thinking_budget`` or ``thinking.budget_tokens``."""
        if self.thinking_budget is not None or not isinstance(self.thinking, dict):
            return self.thinking_budget
        found = whole(self.thinking.get("budget_tokens"))
        if found is not None and (isinstance(found, bool) or not isinstance(found, int) or found < 0):
            path = "thinking.budget_tokens"
            raise bad_request(f"{path} must be an integer of at least 0, got {shown(found)}", path)
        return found

    def sampling(self, service, logprobs=False, top_logprobs=0):
        """The :class:`SamplingParams` asked for, with a fresh seed where none is named and the server's temperature, where it
        has one. ApiError 400 naming the field."""
        chosen = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        chosen["temperature"] = self.heat(service)
        try:
            params = SamplingParams(
                **chosen, seed=fresh_seed() if self.seed is None else self.seed, logit_bias=_biases(self.logit_bias),
                logprobs=logprobs, top_logprobs=top_logprobs, repeats=self.seed is not None,
            )  # fmt: skip
            params.check_vocabulary(service.vocabulary)
        except ValueError as error:
            raise bad_request(str(error), str(error).split()[0]) from None
        return params


def _biases(biases):
    out = {}
    for key, value in (biases or {}).items():
        if not key.isascii() or not key.isdigit():
            raise bad_request(f"logit_bias must have token ids as keys, got {key[:40]!r}", "logit_bias")
        out[int(key)] = value
    return out


def stop_strings(stop, field="stop"):
    """The stop strings of a request, empty ones dropped."""
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise bad_request(f"{field} must have at most {MAX_STOPS} strings, got {len(stops)}", field)
    return tuple(text for text in stops if text)


def check_effort(effort, path):
    """ApiError 400 for a level of thinking that is none of those in ``LEVELS``, or None."""
    if effort is not None and (not isinstance(effort, str) or effort not in LEVELS):
        found = repr(effort)[:60] if isinstance(effort, str) else kind(effort)
        raise bad_request(f"{path} must be one of {', '.join(LEVELS)}, got {found}", path)


def parse(model, body, refused=()):
    """``body`` as a ``model``. :class:`ApiError` 400 naming the field.

    refused: field → why its presence is refused.
    """
    for name, message in dict(refused).items():
        if body.get(name) is not None:
            raise bad_request(message, name)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _sentence(error.errors()[0]) from None


PHRASES = {
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "list_type": "must be an array",
}
BOUNDS = {"greater_than_equal": "ge", "less_than_equal": "le", "greater_than": "gt"}
WORDS = {"ge": "must be at least", "le": "must be at most", "gt": "must be greater than"}
BRANCHES = {"str", "list[str]", "bool", "dict[str,any]"}  # names pydantic gives to the alternatives of a union
UNIONS = {"stop": "a string or an array of strings", "thinking": "true, false, null or an object"}


def _sentence(found):
    path = ""
    for part in found["loc"]:
        if part in BRANCHES:
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    what, given = found["type"], found["input"]
    if what in BOUNDS:
        bound = BOUNDS[what]
        phrase = f"{WORDS[bound]} {found['ctx'][bound]:g}" if bound == "gt" else f"{WORDS[bound]} {found['ctx'][bound]}"
    elif path in UNIONS:
        phrase = f"must be {UNIONS[path]}"
    elif what == "literal_error":
        phrase = f"must be {found['ctx']['expected']}"
    else:
        phrase = PHRASES.get(what, found["msg"].replace("Input should be", "must be"))
    return bad_request(f"{path} {phrase}, got {shown(given)}", path)


def shown(value):
    """A found value as error messages have it: short, and objects by their type."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)[:60] if isinstance(value, (int, float, str)) else kind(value)
