"""A server that asks for a key answers nobody without it, in the envelope of each surface."""

import falcon.testing
import pytest

from ds4server.app import application
from ds4server.options import UsageError, read

from .inprocess import InProcess, Scripted

KEY = "sk-tide-5f1"


@pytest.fixture
def client():
    return falcon.testing.TestClient(application(InProcess(Scripted()).service, cors=True, api_key=KEY))


@pytest.mark.parametrize("path", ["/v1/models", "/v1/stats", "/metrics", "/nowhere"])
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-tide-5f"}, {"x-api-key": ""}, {"Authorization": KEY},
                                     {"Authorization": "Bearer schlüssel"}])  # fmt: skip
def test_nothing_without_the_key(client, path, headers):
    answer = client.simulate_get(path, headers=headers)
    assert answer.status_code == 401 and answer.json["error"]["type"] == "authentication_error"
    assert KEY not in answer.text and answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    "headers", [{"Authorization": f"Bearer {KEY}"}, {"authorization": f"bearer {KEY}"}, {"x-api-key": KEY}]
)
def test_with_the_key(client, headers):
    assert client.simulate_get("/v1/models", headers=headers).status_code == 200


def test_what_needs_none(client):
    assert client.simulate_get("/health").status_code == 200
    assert client.simulate_options("/v1/chat/completions").status_code == 204


def test_the_envelope_of_messages(client):
    answer = client.simulate_post("/v1/messages", body="{}")
    assert answer.status_code == 401 and answer.json["type"] == "error"
    assert answer.json["error"]["type"] == "authentication_error" and answer.json["request_id"].startswith("req_")


def test_the_key_comes_from_flag_or_variable():
    assert read([], {}).api_key is None
    assert read([], {"DS4_SERVER_API_KEY": "a"}).api_key == "a"
    assert read(["--api-key", "b"], {"DS4_SERVER_API_KEY": "a"}).api_key == "b"
    assert KEY not in repr(read(["--api-key", KEY], {}))
    with pytest.raises((UsageError, SystemExit)):
        read(["--api-key", "two words"], {})
