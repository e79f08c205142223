"""The OpenAPI document against the routes, and requests made from it at random: whatever a client sends, it is never a 5xx. The
web page loads nothing from elsewhere."""

import json
import re

import falcon.inspect
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4server.api.openapi import POSTS, document
from ds4server.app import application

from .inprocess import Babbler, running

DOCUMENT = document("0")
SCHEMAS = DOCUMENT["components"]["schemas"]


@pytest.fixture(scope="module")
def toy():
    with running(Babbler(), width=2, max_queue=1000) as found:
        found.service.default_budget = 3
        yield found


def test_the_document_has_every_route_and_no_other(toy):
    routes = {}
    for route in falcon.inspect.inspect_routes(application(toy.service)):
        methods = {method.method.lower() for method in route.methods if not method.internal} - {"head", "options"}
        routes[route.path.replace("{name:path}", "{name}")] = methods
    assert {path: set(operations) for path, operations in DOCUMENT["paths"].items()} == routes
    answer = toy.client.simulate_get("/openapi.json")
    assert answer.headers["content-type"].startswith("application/json") and answer.json["openapi"].startswith("3.1")
    assert answer.json["paths"] == DOCUMENT["paths"]


def test_every_schema_is_json_schema_and_every_reference_leads_somewhere():
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for name in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT)):
        assert name in SCHEMAS
    assert not re.search(r'"(ge|le|gt|lt|title)":', json.dumps(SCHEMAS)), "pydantic's own words"
    chat = SCHEMAS["ChatRequest"]["properties"]
    assert chat["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 16}
    assert chat["messages"] == {"type": "array", "items": {"type": "object"}}


def test_what_the_document_allows_is_what_is_accepted(toy):
    needs = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x", "tokens": [1], "content": "x"}
    common = {"max_tokens": 0, "temperature": None, "stop": ["a"], "seed": -5, "n": 2.0, "unknown": {}}
    for path, (_, model, needed) in POSTS.items():
        needed = needed or "content"
        body = common | {needed: needs[needed]}
        validator = jsonschema.Draft202012Validator(SCHEMAS[model.__name__] | {"components": DOCUMENT["components"]})
        assert validator.is_valid(body) and post(toy, path, body).status_code == 200, path
        wrong = body | {needed: 5}
        assert not validator.is_valid(wrong) and post(toy, path, wrong).status_code == 400, path


def post(found, path, body):
    return found.client.simulate_post(path, body=json.dumps(body))


# --- requests at random -------------------------------------------------------------------------------------------------

WORDS = """user assistant tool system text function auto none low tool_use tool_result image image_url thinking message any
    reasoning function_call function_call_output json_object json_schema disabled enabled call_1 {} tide required custom"""
KEYS = """type role content text name function arguments id tool_calls tool_call_id tool_use_id input call_id output namespace
    parameters input_schema schema format effort summary thinking signature strict budget_tokens reasoning_content image_url
    url source 0 encrypted_content json_schema mode tools description properties enum is_error display action status"""
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 20), st.integers(-(2**70), 2**70), st.floats(-1e300, 1e300), st.text(max_size=6),
    st.sampled_from(WORDS.split()),
)  # fmt: skip
NAMES = st.sampled_from(KEYS.split())
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=5), max_leaves=12
)
PARTS = st.dictionaries(NAMES, ANYTHING, max_size=4) | st.builds(
    lambda kind, text: {"type": kind, "text": text}, st.sampled_from(["text", "input_text", "output_text"]), st.text(max_size=9)
)
TURNS = st.lists(st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=9) | st.lists(PARTS, max_size=2)},
    optional={"tool_calls": ANYTHING, "type": SCALARS, "tool_call_id": SCALARS, "reasoning_content": st.text(max_size=3)},
), max_size=3)  # fmt: skip
TOOL = {"name": "tide", "description": "Tides.", "parameters": {"type": "object", "properties": {"day": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": TOOL}, TOOL | {"type": "function"}, TOOL | {"type": "custom"}]


def values(schema):
    """What a schema allows, as far as it tells."""
    if "$ref" in schema:
        return values(SCHEMAS[schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return st.one_of([values(one) for one in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    kinds = schema.get("type", "any")
    if isinstance(kinds, list):
        return st.one_of([values(schema | {"type": kind}) for kind in kinds])
    match kinds:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(schema.get("minimum", -(2**63)), schema.get("maximum", 2**64)) | st.integers(0, 3)
        case "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum", -100))
            return st.floats(low, schema.get("maximum", 1000), exclude_min="exclusiveMinimum" in schema)
        case "string":
            return st.text(max_size=8)
        case "array":
            return st.lists(values(schema.get("items", {})), max_size=4)
        case "object":
            if isinstance(more := schema.get("additionalProperties"), dict):
                return st.dictionaries(st.integers(0, 550).map(str), values(more), max_size=3)
            return fields(schema["properties"]) if "properties" in schema else st.dictionaries(NAMES, ANYTHING, max_size=4)
    return ANYTHING


def fields(properties):
    """Some of them."""
    names = st.lists(st.sampled_from(sorted(properties)), max_size=5, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: values(properties[name]) for name in chosen}))


@st.composite
def requests(draw):
    """(path, body): mostly what the document allows, now and then with a field of any kind."""
    path = draw(st.sampled_from(sorted(POSTS)))
    _, model, needed = POSTS[path]
    properties = SCHEMAS[model.__name__]["properties"]
    body = draw(fields(properties))
    if needed is not None and draw(st.integers(0, 9)):
        body[needed] = draw(TURNS if needed in ("messages", "input") else values(properties[needed]))
    if "tools" in body and draw(st.booleans()):
        body["tools"] = [draw(st.sampled_from(TOOLS))]
    if draw(st.integers(0, 3)) == 3:
        body[draw(st.sampled_from(sorted(properties)))] = draw(ANYTHING)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int) and body[name] > 3:
            body[name] = 3  # the toy is quick, not endless
    return path, body


def never_a_5xx(found, request):
    path, body = request
    answer = post(found, path, body)
    assert answer.status_code in (200, 400), (path, body, answer.text)
    if answer.status_code == 400:
        error = answer.json["error"]
        assert error["type"] == "invalid_request_error" and error["message"] and "\n" not in error["message"]
        assert ("request_id" in answer.json) == path.startswith("/v1/messages") or "param" in error
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert "event: error" not in answer.text, (path, body, answer.text)


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@settings(max_examples=200, **QUIET)
@given(request=requests())
def test_no_request_is_a_5xx(toy, request):
    never_a_5xx(toy, request)


@pytest.mark.slow
@settings(max_examples=10_000, **QUIET)
@given(request=requests())
def test_none_of_ten_thousand_requests_is_a_5xx(toy, request):
    never_a_5xx(toy, request)


@given(st.sampled_from(sorted(POSTS)), st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
@settings(max_examples=100, **QUIET)
def test_no_body_is_a_5xx(toy, path, raw):
    assert toy.client.simulate_post(path, body=raw).status_code == 400


# --- page ---------------------------------------------------------------------------------------------------------------


def test_the_page_stands_alone(toy):
    answer = toy.client.simulate_get("/", headers={"Accept": "text/html"})
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    page = answer.text
    assert not re.search(r"""(src|href|action)=["'](?!data:,)|url\(|@import|https?:|innerHTML""", page)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    named, used = set(re.findall(r'id="(\w+)"', page)), set(re.findall(r'\$\("(\w+)"\)', page))
    assert used == named and toy.client.simulate_head("/").status_code == 200
    for path in re.findall(r'fetch\("([^"]+)"', page):
        assert f"/{path}" in DOCUMENT["paths"]


def test_the_page_needs_no_key(toy):
    client = falcon.testing.TestClient(application(toy.service, api_key="k"))
    assert client.simulate_get("/").status_code == 200 and client.simulate_get("/openapi.json").status_code == 401
