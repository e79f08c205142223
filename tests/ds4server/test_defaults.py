"""What a request gets that does not say: the server's temperature."""

import json

import pytest

from ds4server import options

from .inprocess import Babbler, running

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 12},
    "/v1/messages": {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 12},
}


def said(found, path, **fields):
    answer = found.client.simulate_post(path, body=json.dumps(BODIES[path] | fields))
    assert answer.status_code == 200, answer.text
    return found.engine.recent()[0], answer.json


@pytest.mark.parametrize("path", BODIES)
def test_the_servers_temperature_is_that_of_requests_without_one(path):
    jobs = []
    with running(Babbler(), jobs.append) as found:
        found.service.default_temperature = 0.0
        for fields in ({}, {"temperature": 0}, {}, {"temperature": 1.0, "seed": 3}):
            said(found, path, **fields)
    silent, greedy, again, sampled = (job.generation.generated for job in jobs)
    assert silent == greedy == again != sampled
    assert [job.generation.params.temperature for job in jobs] == [0, 0, 0, 1]


def test_a_response_names_the_temperature_in_effect():
    with running(Babbler()) as found:
        found.service.default_temperature = 0.5
        assert said(found, "/v1/responses")[1]["temperature"] == 0.5
        assert said(found, "/v1/responses", temperature=0.25)[1]["temperature"] == 0.25


def test_the_variable_is_read():
    assert options.read([], {"DS4_SERVER_DEFAULT_TEMP": "0.25"}).default_temperature == 0.25
    assert options.read([], {}).default_temperature is None
