"""The typed request of ``POST /v1/chat/completions``, and pydantic's complaints as sentences.

Rules of the API: unknown fields are ignored, null means absent, a wrong JSON type or a number outside its range is refused.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from .errors import bad_request
from .messages import kind


def _whole(value):
    """An integer field takes 16.0 but not 16.5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Budget = Annotated[Whole, Field(ge=0)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool | None = None


class ChatRequest(BaseModel):
    """Fields of a chat request that this server acts on. ``messages`` and ``tools`` are validated in ``messages.py``."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    messages: Any
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Budget | None = None
    max_completion_tokens: Budget | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1)] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    n: Annotated[Whole, Field(ge=1, le=16)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    thinking_budget: Budget | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None


REFUSED = {
    "functions": "functions is not supported; use tools",
    "function_call": "function_call is not supported; use tool_choice",
    "audio": "audio output is not supported",
}


def parse(body):
    """``body`` as a :class:`ChatRequest`. :class:`ApiError` 400 naming the field."""
    for name, message in REFUSED.items():
        if body.get(name) is not None:
            raise bad_request(message, name)
    if body.get("messages") is None:
        raise bad_request("messages is required: an array of messages", "messages")
    try:
        request = ChatRequest.model_validate(body)
    except ValidationError as error:
        raise _sentence(error.errors()[0]) from None
    _refuse_what_is_not_offered(request, body)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    return request


def _refuse_what_is_not_offered(request, body):
    """Fields whose meaning this version cannot honour are errors, never ignored."""
    if request.n not in (None, 1):
        raise bad_request(f"n must be 1: this version offers one choice per request, got {request.n}", "n")
    if body.get("best_of") not in (None, 1):
        raise bad_request("best_of must be absent or equal to n", "best_of")
    form = request.response_format
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        raise bad_request("response_format must be text: this version does not constrain sampling", "response_format")
    thinking = body.get("thinking")
    budget = isinstance(thinking, dict) and thinking.get("budget_tokens") is not None
    if request.thinking_budget is not None or budget:
        name = "thinking_budget" if request.thinking_budget is not None else "thinking.budget_tokens"
        raise bad_request(f"{name} is not supported by this version", name)
    if request.tool_choice not in (None, "auto", "none"):
        raise bad_request("tool_choice must be auto or none: this version does not force calls", "tool_choice")
    for i, tool in enumerate(request.tools if isinstance(request.tools, list) else ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("strict"):
            path = f"tools[{i}].function.strict"
            raise bad_request(f"{path} must be false: this version does not constrain sampling", path)


PHRASES = {
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "list_type": "must be an array",
}
BOUNDS = {"greater_than_equal": "ge", "less_than_equal": "le", "greater_than": "gt"}
WORDS = {"ge": "must be at least", "le": "must be at most", "gt": "must be greater than"}
BRANCHES = {"str", "list[str]"}  # names pydantic gives to the alternatives of a union


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
    elif path == "stop":
        phrase = "must be a string or an array of strings"
    elif what == "literal_error":
        phrase = f"must be {found['ctx']['expected']}"
    else:
        phrase = PHRASES.get(what, found["msg"].replace("Input should be", "must be"))
    return bad_request(f"{path} {phrase}, got {_shown(given)}", path)


def _shown(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)[:60] if isinstance(value, (int, float, str)) else kind(value)
