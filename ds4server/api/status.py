"""``GET /v1/models[/id]``, ``/health``, ``/v1/stats`` and ``/metrics``. None of them ever waits for the engine, none changes a
counter."""

import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from .. import host, metrics
from ..lanes import REASONS
from .errors import unknown_model

SUPPORTED = ["tools", "tool_choice", "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "stream",
             "reasoning_effort", "logprobs"]  # fmt: skip


class Get:
    """A resource with GET and, since Falcon does not derive it, HEAD."""

    def __init__(self, service):
        self._service = service

    def on_head(self, req, resp, **params):
        self.on_get(req, resp, **params)


class Models(Get):
    def on_get(self, req, resp):
        service = self._service
        card = model_card(service, service.model_id)
        catalog = {} if service.catalog is None else {"models": service.catalog}
        resp.media = {
            "object": "list", "data": [card], **catalog, "has_more": False, "first_id": card["id"], "last_id": card["id"],
        }  # fmt: skip


class Model(Get):
    def on_get(self, req, resp, name):
        if name not in self._service.names:
            raise unknown_model(self._service, name)
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
        card["description"] = "a toy inside the package, to try the interface; it answers with passages of Alice in Wonderland"
    return card


class Health(Get):
    def on_get(self, req, resp):
        if self._service.engine.stopping:
            resp.status = "503 Service Unavailable"
            resp.media = {"status": "stopping"}
        else:
            resp.media = {"status": "ok"}


class Stats(Get):
    def on_get(self, req, resp):
        service = self._service
        seen, recent, cost = look(service), service.engine.recent(), service.engine.draft_cost
        resp.media = {
            "uptime_seconds": round(seen.uptime, 3),
            "version": service.version,
            "model": service.model_id,
            "requests": {name: seen.count(name) for name in ("started", *metrics.OUTCOMES)} | {"inflight": seen.inflight},
            "routes": {f"{surface}_{lane}": n for (surface, lane), n in seen.routes.items()},
            "route_decisions": seen.by("decision", REASONS),
            "think_modes": seen.by("think", metrics.THINK_MODES),
            "sheds": seen.by("shed", metrics.SHEDS),
            "clients": seen.clients,
            "queue_depth": seen.waiting,
            "inflight_body_bytes": seen.body_bytes,
            # Items are all resident sequences, also those that only wait to be reused; total is what runs at once.
            "banks": {"total": service.plan.effective["max_seqs"], "busy": seen.running,
                      "warm": sum(bank["reusable"] for bank in seen.banks), "items": seen.banks},
            "tokens": {name: seen.count(name) for name in ("prefill_computed", "prefill_cached", "decoded")}
            | {"speculation": seen.by("spec", ("drafted", "accepted"))},
            "cache": {"entries": seen.records, "bytes": seen.disk_bytes, "budget_bytes": seen.disk_budget,
                      "hits": seen.store.get("hits", 0), "misses": sum(seen.misses.values()), "misses_by_reason": seen.misses},
            "memory": memory(),
            "serving": service.plan.as_json(),
            "recent": recent,
        }  # fmt: skip
        resp.media |= {"last_request": recent[0]} if recent else {}
        resp.media |= {} if cost is None else {"steps_per_draft": round(cost, 3)}


class Metrics(Get):
    def on_get(self, req, resp):
        resp.content_type = metrics.CONTENT_TYPE
        resp.data = metrics.render(look(self._service), self._service.durations)


def look(service):
    """What a running server has counted, at this moment: :class:`metrics.Seen`."""
    engine = service.engine
    counts, waiting, running, _ = engine.snapshot()
    store = {}
    if engine.store is not None:
        records, size = engine.store.usage()
        store = {"store": dict(engine.store.counts), "records": records, "disk_bytes": size, "disk_budget": engine.store.budget}
    return metrics.Seen(
        counts, time.monotonic() - service.started, waiting, running, engine.banks(), engine.body_bytes, service.clients(),
        **store,
    )  # fmt: skip


def memory(proc=Path("/proc")):
    """Bytes that this process has resident and that the machine could still give, each where the system tells."""
    found = {"available": host.available(proc)}
    with suppress(OSError, ValueError, IndexError):  # not every system has the file
        found["resident"] = int((proc / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {f"{name}_bytes": n for name, n in found.items() if n is not None}
