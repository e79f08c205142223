"""``GET /openapi.json``: what the server offers, as an OpenAPI 3.1 document. The bodies of requests are described by the models
that validate them; of what those leave to later checks, the shape is told here."""

from functools import cached_property

from pydantic.json_schema import models_json_schema

from .anthropic import MessagesRequest
from .chat import ChatRequest
from .completions import MAX_PROMPTS, CompletionRequest
from .responses import ResponsesRequest
from .status import Get
from .tokens import DetokenizeRequest, TokenizeRequest

POSTS = {
    "/v1/chat/completions": ("OpenAI Chat Completions", ChatRequest, "messages"),
    "/v1/completions": ("OpenAI text completions: raw prompts", CompletionRequest, "prompt"),
    "/v1/responses": ("OpenAI Responses", ResponsesRequest, "input"),
    "/v1/responses/input_tokens": ("Tokens of a Responses request", ResponsesRequest, "input"),
    "/v1/messages": ("Anthropic Messages", MessagesRequest, "messages"),
    "/v1/messages/count_tokens": ("Tokens of a Messages request", MessagesRequest, "messages"),
    "/tokenize": ("Token ids of a text, or of messages", TokenizeRequest, None),
    "/detokenize": ("Text of token ids", DetokenizeRequest, "tokens"),
}
"""Path → what it is, the model of its body, the field it cannot do without."""

GETS = {
    "/v1/models": ("The loaded model", "application/json"),
    "/v1/models/{name}": ("The loaded model by its id or an alias", "application/json"),
    "/v1/stats": ("Plan, counters, banks, cache and recent requests", "application/json"),
    "/metrics": ("Counters and histograms for Prometheus", "text/plain"),
    "/health": ("Whether requests are accepted", "application/json"),
    "/openapi.json": ("This document", "application/json"),
    "/": ("A page to chat and to look at the server", "text/html"),
}

STREAMED = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
ERRORS = {
    "400": "The request is at fault: the message names the field",
    "401": "The API key is missing or wrong",
    "404": "An unknown path or model",
    "413": "The body is too large",
    "415": "The body is compressed",
    "429": "The queue is full",
    "500": "The engine failed",
    "503": "The server is shutting down",
}

OBJECTS = {"type": "array", "items": {"type": "object"}}
TEXT_OR_OBJECTS = {"anyOf": [{"type": "string"}, OBJECTS, {"type": "null"}]}
OBJECT = {"type": ["object", "null"]}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
SHAPES = {
    "messages": OBJECTS,
    "tools": {"anyOf": [OBJECTS, {"type": "null"}]},
    "tool_choice": {"type": ["string", "object", "null"]},
    "response_format": OBJECT,
    "output_format": OBJECT,
    "format": OBJECT,
    "system": TEXT_OR_OBJECTS,
    "input": TEXT_OR_OBJECTS,
    "tokens": IDS,
    "prompt": {"anyOf": [
        {"type": "string"}, IDS, {"type": "array", "items": {"type": "string"}, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": IDS, "maxItems": MAX_PROMPTS},
    ]},
}  # fmt: skip
"""Fields whose contents the models leave to later checks."""

WORDS = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}
"""JSON Schema's words for bounds where pydantic, behind a function that looks at the value first, leaves its own."""


DROPPED = {"title", "description", "default"}


class OpenApi(Get):
    """The resource. ``service`` is the running server's context (``app.Service``)."""

    def on_get(self, req, resp):
        resp.media = self._document

    @cached_property
    def _document(self):
        return document(self._service.version)


def document(version):
    """The OpenAPI document as a dict."""
    paths = {path: {"post": _post(path, *told)} for path, told in POSTS.items()}
    paths |= {f"/v1{path}": paths[path] for path in ("/tokenize", "/detokenize")}
    for path, (summary, kind) in GETS.items():
        paths[path] = {"get": _get(path, summary, kind)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ds4", "version": version},
        "paths": paths,
        "components": {"schemas": _schemas()},
    }


def _post(path, summary, model, needed):
    content = {"application/json": {"schema": {"type": "object"}}}
    if path in STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    body = {"$ref": f"#/components/schemas/{model.__name__}"}
    schema = body if needed is None else {"allOf": [body, {"required": [needed]}]}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "The answer", "content": content}} | _errors(path, ERRORS),
    }


def _get(path, summary, kind):
    found = {"200": {"description": summary, "content": {kind: {"schema": {}}}}}
    operation = {"summary": summary, "responses": found}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        found |= _errors(path, ("404",))
    if path == "/health":
        found["503"] = {"description": "Requests are not accepted", "content": {kind: {"schema": {}}}}
    return operation


def _errors(path, statuses):
    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {
        status: {"description": ERRORS[status], "content": {"application/json": {"schema": schema}}} for status in statuses
    }


def _schemas():
    models = [(model, "validation") for model in dict.fromkeys(model for _, model, _ in POSTS.values())]
    _, found = models_json_schema(models, ref_template="#/components/schemas/{model}")
    error = {"message": {"type": "string"}, "type": {"type": "string"}}
    openai = error | {"param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]}}
    outer = {"type": {"const": "error"}, "request_id": {"type": "string"}}
    return {name: _cleaned(schema) for name, schema in found["$defs"].items()} | {
        "Error": _object({"error": _object(openai)}),
        "AnthropicError": _object(outer | {"error": _object(error)}),
    }


def _object(properties):
    return {"type": "object", "properties": properties, "required": list(properties)}


def _cleaned(schema, name=None):
    """A schema of pydantic's in JSON Schema's own words, without what only repeats names or explains the code."""
    if isinstance(schema, list):
        return [_cleaned(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {WORDS.get(key, key): _cleaned(value) for key, value in schema.items() if key not in DROPPED}
    if "properties" in schema:
        out["properties"] = {name: _cleaned(item, name) for name, item in schema["properties"].items()}
    return out or SHAPES.get(name, {})
