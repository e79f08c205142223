"""The Falcon application: routes, envelopes, CORS, and the context every resource shares."""

import hmac
import secrets
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version

import falcon

from ds4ref.conversation import Conversation

from .api import errors, status
from .api.anthropic import CountTokens, Messages
from .api.chat import ChatCompletions
from .api.completions import Completions
from .api.openapi import OpenApi
from .api.page import Page
from .api.responses import InputTokens, Responses
from .api.tokens import Detokenize, Tokenize
from .engine import Engine
from .metrics import Durations
from .plan import Plan
from .toolmemory import ToolMemory

ALIASES = {"deepseek4": ("deepseek-v4-flash", "deepseek-v4-pro", "deepseek-chat", "deepseek-reasoner")}
NO_THINKING = ("-chat", "-no-think", "-nothink")
THINKING = ("-reasoner",)


@dataclass
class Service:
    """What the resources of one running server share."""

    engine: Engine
    conversation: Conversation
    plan: Plan
    model_id: str
    architecture: str
    vocabulary: int
    context: int
    created: int
    toy: bool = False
    default_budget: int = 393216
    keepalive: float = 5.0
    ignore_eos: bool = False
    ignore_eos_in_reasoning: bool = False
    clients: object = lambda: 0
    """() → open connections."""
    max_clients: int = sys.maxsize
    """Connections beyond which nothing is generated; what only looks is always answered."""
    durations: Durations = field(default_factory=Durations)
    disconnect_abort: bool = True
    default_temperature: float = 1.0
    """Of requests that name none."""
    strict_model: bool = False
    """Whether a request for another model is refused."""
    catalog: list | None = None
    """What ``GET /v1/models`` lists beside the model, for clients that read their catalogue there."""
    tools: ToolMemory = field(default_factory=ToolMemory)
    version: str = field(default_factory=lambda: version("ds4"))
    started: float = field(default_factory=time.monotonic)

    @property
    def fingerprint(self):
        return f"ds4-{self.version}-{self.plan.effective['backend']}"

    @property
    def names(self):
        """The advertised id, its variants that switch thinking, and the family's public names."""
        return {self.model_id, *(self.model_id + s for s in NO_THINKING + THINKING), *ALIASES.get(self.architecture, ())}

    def alias(self, model):
        """Whether a model name asks for thinking: True, False, or None for names that say nothing."""
        if model is None or model not in self.names or model == self.model_id:
            return None
        if model.endswith(NO_THINKING):
            return False
        return True if model.endswith(THINKING) else None


OPEN = {"/health", "/"}


class Headers:
    """Request ids on every POST, CORS where it is on, OPTIONS on any path, and the key where one is asked for. The health
    check, the web page (which asks for the key) and preflights need none."""

    def __init__(self, cors, api_key):
        self._cors, self._api_key = cors, api_key

    def process_request(self, req, resp):
        req.context.request_id = f"req_{secrets.token_hex(12)}"
        if req.method == "OPTIONS":
            resp.status = falcon.HTTP_204
            resp.complete = True
        elif self._api_key is not None and req.path not in OPEN and not self._allowed(req):
            raise errors.ApiError(401, "the API key is missing or wrong: send it as bearer token or in x-api-key")

    def _allowed(self, req):
        scheme, _, bearer = (req.get_header("Authorization") or "").partition(" ")
        sent = bearer.strip() if scheme.lower() == "bearer" else req.get_header("x-api-key") or ""
        return hmac.compare_digest(sent.encode(), self._api_key.encode())

    def process_response(self, req, resp, resource, req_succeeded):
        if req.method == "POST":
            resp.set_headers({"x-request-id": req.context.request_id, "request-id": req.context.request_id})
        if self._cors:
            resp.set_header("Access-Control-Allow-Origin", "*")
            resp.set_header("Access-Control-Expose-Headers", "x-request-id, retry-after")
            if req.method == "OPTIONS":
                resp.set_header("Access-Control-Allow-Methods", "GET, POST, OPTIONS")
                resp.set_header("Access-Control-Allow-Headers", req.get_header("Access-Control-Request-Headers") or "*")
                resp.set_header("Access-Control-Max-Age", "600")


def application(service, cors=False, api_key=None):
    """The WSGI application over ``service``. api_key: what clients must know, if anything."""
    app = falcon.App(middleware=[Headers(cors, api_key)])
    app.req_options.strip_url_path_trailing_slash = True
    app.resp_options.media_handlers[falcon.MEDIA_JSON] = falcon.media.JSONHandler()
    app.resp_options.default_media_type = "application/json; charset=utf-8"
    app.add_error_handler(Exception, errors.render_failure)
    app.add_error_handler(falcon.HTTPError, errors.render_http_error)
    app.add_error_handler(errors.ApiError, errors.render_api_error)
    app.add_route("/v1/models", status.Models(service))
    app.add_route("/v1/models/{name:path}", status.Model(service))
    app.add_route("/v1/stats", status.Stats(service))
    app.add_route("/metrics", status.Metrics(service))
    app.add_route("/health", status.Health(service))
    app.add_route("/v1/chat/completions", ChatCompletions(service))
    app.add_route("/v1/responses", Responses(service))
    app.add_route("/v1/responses/input_tokens", InputTokens(service))
    app.add_route("/v1/completions", Completions(service))
    app.add_route("/v1/messages", Messages(service))
    app.add_route("/v1/messages/count_tokens", CountTokens(service))
    app.add_route("/openapi.json", OpenApi(service))
    app.add_route("/", Page())
    for prefix in ("", "/v1"):
        app.add_route(f"{prefix}/tokenize", Tokenize(service))
        app.add_route(f"{prefix}/detokenize", Detokenize(service))
    return app
