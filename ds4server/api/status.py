"""``GET /v1/models[/id]``, ``/health`` and ``/v1/stats``. None of them ever waits for the engine."""

import time
from datetime import UTC, datetime

from .errors import ApiError

SUPPORTED = ["tools", "tool_choice", "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "stream",
             "reasoning_effort", "logprobs"]  # fmt: skip


class _Get:
    """A resource with GET and, since Falcon does not derive it, HEAD."""

    def __init__(self, service):
        self._service = service

    def on_head(self, req, resp, **params):
        self.on_get(req, resp, **params)


class Models(_Get):
    def on_get(self, req, resp):
        service = self._service
        card = model_card(service, service.model_id)
        resp.media = {"object": "list", "data": [card], "has_more": False, "first_id": card["id"], "last_id": card["id"]}


class Model(_Get):
    def on_get(self, req, resp, name):
        if name not in self._service.names:
            known = ", ".join(sorted(self._service.names))
            raise ApiError(404, f"model {name!r} is not served here (known: {known})", "model", "model_not_found")
        resp.media = model_card(self._service, name)


def model_card(service, name):
    created = datetime.fromtimestamp(service.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    completion = min(service.default_budget, service.context)
    card = {
        "id": name, "object": "model", "created": service.created, "owned_by": "ds4", "name": name, "type": "model",
        "display_name": name, "created_at": created, "lifecycle": "active", "context_length": service.context,
        "max_model_len": service.context, "max_input_tokens": service.context - 1, "max_tokens": service.context,
        "top_provider": {
            "context_length": service.context, "max_completion_tokens": completion, "is_moderated": False,
        },
        "input_modalities": ["text"],
        "supported_parameters": SUPPORTED,
    }  # fmt: skip
    if service.toy:
        card["description"] = "random toy weights inside the package, for trying the interface; its answers are noise"
    return card


class Health(_Get):
    def on_get(self, req, resp):
        if self._service.engine.stopping:
            resp.status = "503 Service Unavailable"
            resp.media = {"status": "stopping"}
        else:
            resp.media = {"status": "ok"}


class Stats(_Get):
    def on_get(self, req, resp):
        service = self._service
        counts, waiting, busy, last = service.engine.snapshot()
        done = sum(counts[name] for name in ("completed", "failed", "canceled"))
        resp.media = {
            "uptime_seconds": round(time.monotonic() - service.started, 3),
            "version": service.version,
            "model": service.model_id,
            "requests": {
                "started": counts["started"], "completed": counts["completed"], "failed": counts["failed"],
                "canceled": counts["canceled"], "inflight": counts["started"] - done,
            },
            "routes": {name.removeprefix("route."): n for name, n in counts.items() if name.startswith("route.")},
            "sheds": {name.removeprefix("shed."): n for name, n in counts.items() if name.startswith("shed.")},
            "queue_depth": waiting,
            "banks": {"total": service.plan.effective["max_seqs"], "busy": int(busy),
                      "resident": service.plan.effective["resident_banks"]},
            "tokens": {name: counts[name] for name in ("prefill_computed", "prefill_cached", "decoded")},
            "serving": service.plan.as_json(),
        } | ({"last_request": last} if last else {})  # fmt: skip
