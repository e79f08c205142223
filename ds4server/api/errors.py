"""Errors in the envelope of their surface: one sentence with the field, what was found, what is accepted."""

import logging
from contextlib import contextmanager

import falcon

from ..jobs import QueueFull, Stopping


class ApiError(Exception):
    """An answer that is an error. ``param``: the field with its path; ``extra``: further keys inside ``error``."""

    def __init__(self, status, message, param=None, code=None, headers=None, **extra):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}
        self.extra = extra


def bad_request(message, param=None, code=None, **extra):
    return ApiError(400, message, param, code, **extra)


def unknown_model(service, name):
    known = ", ".join(sorted(service.names))
    return ApiError(404, f"model {repr(name)[:80]} is not served here (known: {known})", "model", "model_not_found")


@contextmanager
def admission():
    """What the engine refuses inside, as the answer that the client gets."""
    try:
        yield
    except QueueFull:
        message = "the queue is full; try again later"
        raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"}) from None
    except Stopping:
        raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5"}) from None


def failure(failed):
    """The answer of a job that ended with ``jobs.Failed`` before any of its answer was sent."""
    headers = {} if failed.retry is None else {"Retry-After": str(failed.retry)}
    return ApiError(failed.status, failed.message, code=failed.code, headers=headers)


def kind(status):
    """The OpenAI error type of a status."""
    named = {401: "authentication_error", 429: "rate_limit_error"}
    return named.get(status, "server_error" if status >= 500 else "invalid_request_error")


def envelope(status, message, param=None, code=None, **extra):
    return {"error": {"message": message, "type": kind(status), "param": param, "code": code, **extra}}


ANTHROPIC_TYPES = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error",
}  # fmt: skip


def anthropic_kind(status):
    """The Anthropic error type of a status."""
    return ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def _envelope_of(req, status, message, param=None, code=None, **extra):
    """The envelope of the surface that ``req`` came in on."""
    if req.path != "/v1/messages" and not req.path.startswith("/v1/messages/"):
        return envelope(status, message, param, code, **extra)
    error = {"type": anthropic_kind(status), "message": message, **extra}
    return {"type": "error", "error": error, "request_id": req.context.request_id}


def render_api_error(req, resp, error, params):
    resp.status = falcon.code_to_http_status(error.status)
    resp.media = _envelope_of(req, error.status, error.message, error.param, error.code, **error.extra)
    resp.set_headers(error.headers)


def render_http_error(req, resp, error, params):
    """Falcon's own errors (unknown path, method not allowed) in the same envelope."""
    messages = {
        404: f"{req.path} does not exist on this server",
        405: f"{req.method} is not allowed on {req.path}",
    }
    resp.status = error.status
    status = error.status_code
    resp.media = _envelope_of(req, status, messages.get(status, error.title or "the request failed"))
    if error.headers:
        resp.set_headers(error.headers)


def render_failure(req, resp, error, params):
    """Anything unforeseen: logged with its traceback, answered without."""
    logging.getLogger("ds4server").exception("unhandled error on %s %s", req.method, req.path)
    resp.status = falcon.HTTP_500
    resp.media = _envelope_of(req, 500, "the server failed to handle this request")
