"""``GET /metrics``: names and labels of the API, every combination from the start, and the identity of the counters."""

import threading
from collections import Counter
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ds4ref.reuse import MISSES
from ds4server.banks import REFUSALS, STATES
from ds4server.lanes import LANES, REASONS, SURFACES
from ds4server.metrics import KINDS, OUTCOMES, SECONDS, SHEDS, THINK_MODES, Durations, Histogram, Seen, render
from ds4server.scheduler import COUNTERS

from .inprocess import Scripted, running
from .test_chat import wait_for
from .toymodel import tokenizer

LABELS = {
    "ds4_uptime_seconds": {}, "ds4_requests_started_total": {}, "ds4_requests_total": {"outcome": OUTCOMES},
    "ds4_requests_inflight": {}, "ds4_route_requests_total": {"surface": SURFACES, "lane": LANES},
    "ds4_route_decisions_total": {"reason": REASONS}, "ds4_requests_shed_total": {"reason": SHEDS},
    "ds4_requests_rejected_total": {"lane": LANES, "reason": REFUSALS}, "ds4_admits_total": {"kind": KINDS},
    "ds4_requests_think_total": {"mode": THINK_MODES}, "ds4_clients_connected": {}, "ds4_queue_depth": {},
    "ds4_inflight_body_bytes": {}, "ds4_tokens_prefilled_total": {"source": ("computed", "cached")},
    "ds4_tokens_decoded_total": {}, "ds4_speculation_tokens_total": {"result": ("drafted", "accepted")},
    "ds4_spec_quench_total": {}, "ds4_banks": {"state": STATES}, "ds4_kv_disk_bytes": {}, "ds4_kv_records": {},
    "ds4_kv_hits_total": {}, "ds4_kv_misses_total": {"reason": MISSES}, "ds4_kv_evictions_total": {},
    "ds4_kv_errors_total": {"kind": ("read", "write", "full", "damaged")},
}  # fmt: skip
HISTOGRAMS = ("ds4_ttft_seconds", "ds4_prefill_seconds", "ds4_request_seconds")


def samples(text):
    """{(name, label values in order of the labels' names): value}; no sample twice."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type in ("counter", "gauge", "histogram"), family.name
        for sample in family.samples:
            key = (sample.name, *(sample.labels[label] for label in sorted(sample.labels)))
            assert key not in found, key
            found[key] = sample.value
    return found


def page(seen, durations=None):
    return samples(render(seen, durations or Durations()).decode())


def cells(name, labels):
    rows = [(name,)]
    for label in sorted(labels):
        rows = [(*row, value) for row in rows for value in labels[label]]
    return rows


def test_every_combination_is_there_from_the_start_and_no_other():
    expected = {cell for name, labels in LABELS.items() for cell in cells(name, labels)}
    for name in HISTOGRAMS:
        expected |= {(f"{name}_bucket", bound) for bound in (*map(repr, SECONDS), "+Inf")}
        expected |= {(f"{name}_sum",), (f"{name}_count",)}
    found = page(Seen({}))
    assert set(found) == expected and set(found.values()) == {0}
    assert len(cells("ds4_route_requests_total", LABELS["ds4_route_requests_total"])) == 12


def test_every_counter_of_the_engine_has_a_place_of_its_own():
    """Each counter set to another number shows that number, once."""
    counts = {name: 1000 + i for i, name in enumerate(COUNTERS)}
    shown = Counter(page(Seen(counts)).values())
    assert {name: n for name, n in counts.items() if shown[n] != 1} == {}


def test_what_is_no_counter_of_the_engine():
    kv = {"hits": 3, "evictions": 4, f"miss.{MISSES[2]}": 5, "error.full": 6}
    banks = [{"state": "deep"}, {"state": "empty"}, {"state": "empty"}]
    counts = {"think.max": 9, "spec.drafted": 10, "spec.accepted": 11, "spec.quench": 12}
    found = page(Seen(counts, 1.5, 2, 1, banks, 77, 8, kv, 13, 4096, 1 << 20))
    assert found["ds4_uptime_seconds",] == 1.5 and found["ds4_queue_depth",] == 2 and found["ds4_clients_connected",] == 8
    assert found["ds4_inflight_body_bytes",] == 77 and found["ds4_kv_records",] == 13 and found["ds4_kv_disk_bytes",] == 4096
    assert found["ds4_kv_hits_total",] == 3 and found["ds4_kv_evictions_total",] == 4
    assert found["ds4_kv_misses_total", MISSES[2]] == 5 and found["ds4_kv_errors_total", "full"] == 6
    assert found["ds4_banks", "empty"] == 2 and found["ds4_banks", "deep"] == 1 and found["ds4_banks", "protected"] == 0
    assert found["ds4_requests_think_total", "max"] == 9 and found["ds4_spec_quench_total",] == 12
    assert found["ds4_speculation_tokens_total", "accepted"] == 11


def test_a_histogram_counts_up_to_and_including_its_bounds():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.read() == ([("1.0", 2), ("2.0", 4), ("+Inf", 5)], 14.0)


def test_durations_of_a_job_that_got_nowhere():
    job = SimpleNamespace(arrived=1.0, admitted_at=None, prefilled_at=None, first_token_at=None, ended_at=4.0)
    durations = Durations()
    durations.add(job)
    found = page(Seen({}), durations)
    assert [found[f"{name}_count",] for name in HISTOGRAMS] == [0, 0, 1] and found["ds4_request_seconds_sum",] == 3


def scrape(server):
    answer = server.client.simulate_get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = samples(answer.text)
    ended = sum(found["ds4_requests_total", outcome] for outcome in OUTCOMES)
    assert ended + found["ds4_requests_inflight",] == found["ds4_requests_started_total",]
    return found


def test_a_scripted_mix_adds_up():
    """Completed, failed, cancelled and refused requests: at every moment completed + failed + canceled + in flight = started,
    and what each answer said is what was counted."""
    broken = tokenizer().encode("~")
    assert len(broken) == 1
    model = Scripted("about the tides of this harbour", bad=broken)
    with running(model, max_queue=0) as server:
        first = server.chat()
        assert first.status_code == 200
        again = server.chat()
        assert again.status_code == 200
        failed = server.chat("~")
        assert failed.status_code == 500
        model.gate.clear()
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(server.chat("the third one", gone=True)))
        waiting.start()
        wait_for(lambda: scrape(server)["ds4_requests_inflight",] == 1)
        assert scrape(server)["ds4_inflight_body_bytes",] > 0
        refused = server.chat("no place for this one")
        assert refused.status_code == 429
        waiting.join(20)
        assert answers[0].status_code == 499
        model.gate.set()
        wait_for(lambda: scrape(server)["ds4_requests_inflight",] == 0)
        server.engine.stop(0)
        assert server.chat().status_code == 503
        found = scrape(server)
    assert found["ds4_requests_started_total",] == 4
    assert [found["ds4_requests_total", outcome] for outcome in OUTCOMES] == [2, 1, 1]
    assert found["ds4_requests_shed_total", "queue_full"] == found["ds4_requests_shed_total", "shutdown"] == 1
    assert found["ds4_route_requests_total", "serial", "openai_chat"] == 4
    assert found["ds4_route_decisions_total", "cont_unavailable"] == 4
    assert sum(found["ds4_admits_total", kind] for kind in KINDS) == 4
    assert found["ds4_inflight_body_bytes",] == found["ds4_queue_depth",] == 0
    usages = [answer.json["usage"] for answer in (first, again)]
    assert found["ds4_tokens_decoded_total",] >= sum(usage["completion_tokens"] for usage in usages) > 0
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert found["ds4_tokens_prefilled_total", "cached"] >= cached > 0
    assert found["ds4_request_seconds_count",] == 4 and found["ds4_ttft_seconds_count",] == 2
    assert found["ds4_prefill_seconds_count",] == 2 <= found["ds4_request_seconds_count",]
    assert found["ds4_request_seconds_sum",] >= found["ds4_ttft_seconds_sum",] > 0


def test_reading_changes_nothing_and_never_waits():
    model = Scripted("about the tides")
    with running(model) as server:
        model.gate.clear()
        asking = threading.Thread(target=server.chat)
        asking.start()
        wait_for(lambda: server.stats()["banks"]["busy"] == 1)
        before = {key: n for key, n in scrape(server).items() if key != ("ds4_uptime_seconds",)}
        assert server.stats()["requests"]["inflight"] == 1
        after = {key: n for key, n in scrape(server).items() if key != ("ds4_uptime_seconds",)}
        assert before == after and after["ds4_banks", "protected"] == 1
        model.gate.set()
        asking.join(20)


def test_a_real_server(server, api):
    before = samples(httpx.get(f"{server.url}/metrics").text)
    answer = api.post("/v1/chat/completions", json={"messages": [{"content": "Hello"}], "max_tokens": 3, "ignore_eos": True})
    assert answer.status_code == 200
    response = httpx.get(f"{server.url}/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert httpx.head(f"{server.url}/metrics").status_code == 200 and httpx.post(f"{server.url}/metrics").status_code == 405
    after = samples(response.text)
    assert set(after) == set(before)

    def grown(*key):
        return after[key] - before[key]

    assert grown("ds4_requests_started_total") == grown("ds4_requests_total", "completed") == 1
    assert grown("ds4_tokens_decoded_total") == 3 and grown("ds4_uptime_seconds") > 0
    stats = server.stats()
    for outcome in OUTCOMES:
        assert after["ds4_requests_total", outcome] == stats["requests"][outcome]
    assert {"_".join(key[:0:-1]): n for key, n in after.items() if key[0] == "ds4_route_requests_total"} == stats["routes"]


@pytest.mark.parametrize("label", ["surface", "lane", "reason", "mode", "kind", "outcome"])
def test_no_label_comes_from_a_request(label):
    """A counter nobody knows, whatever its name, shows up nowhere."""
    assert page(Seen({f"{label}.evil": 5, "route.evil_serial": 5, "shed.evil": 5})) == page(Seen({}))
