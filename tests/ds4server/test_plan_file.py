"""``--expect-plan``: what a file must hold, and the first key in which a plan differs from it."""

import json

import pytest

from ds4server import capabilities, expected, options
from ds4server.options import UsageError
from ds4server.plan import Facts, resolve
from ds4server.quote import GIB, Budgets

ROW = capabilities.product("qwen38-flash-next", "cpu", [])
REQUEST = options.read(["-m", "m.gguf", "-c", "2048"], {})
CLOSED = Facts(platform="cpu")
OPENED = Facts(platform="cpu", native_chunk=512, layout="cpu", decode_execution="grouped",
               budgets=Budgets(90 * GIB, shared_weights=GIB), mapped_weights=GIB)  # fmt: skip


def plan(facts):
    return resolve(REQUEST, ROW, facts)


@pytest.fixture
def wanted(tmp_path):
    """A file that expects the opened plan, with changes."""

    def write(**changes):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(expected.of(plan(OPENED)) | changes))
        return expected.load(path)

    return write


def test_what_only_an_open_engine_knows_is_skipped_by_the_check(wanted):
    sched = plan(CLOSED).effective["sched_chunk"]
    file = wanted(effective=plan(OPENED).effective | {"sched_chunk": sched})
    assert expected.difference(file, plan(CLOSED), opened=False) is None
    assert "effective.sched_chunk" in expected.difference(file, plan(OPENED), opened=True)
    assert expected.difference(wanted(), plan(OPENED), opened=True) is None


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"family": "other"}, "family"),
        ({"backend": "cuda"}, "backend"),
        ({"effective": {"max_seqs": 1}}, "effective.prefix_reuse"),
        ({"qualified": {**plan(OPENED).qualified, "note": "x"}}, "qualified.note"),
        ({"controls": {**plan(OPENED).controls, "extra": 1}}, "controls.extra"),
        ({"effective": {**plan(OPENED).effective, "max_seqs": True}}, "effective.max_seqs"),
        ({"effective": {**plan(OPENED).effective, "layout": "gpu"}}, "effective.layout"),
        ({"effective": {**plan(OPENED).effective, "decode_execution": None}}, "effective.decode_execution"),
        ({"post_open_quote": None}, "post_open_quote"),
        ({"post_open_quote": {**expected.of(plan(OPENED))["post_open_quote"], "floor": 1}}, "post_open_quote.floor"),
    ],
)
def test_the_key_is_named(wanted, changes, key):
    sentence = expected.difference(wanted(**changes), plan(OPENED), opened=True)
    assert f"the plan differs in {key}: expected " in sentence


def test_the_ceiling_itself_is_no_part_of_it(wanted):
    richer = Facts(**{**vars(OPENED), "budgets": Budgets(91 * GIB, shared_weights=GIB)})
    assert expected.difference(wanted(), plan(richer), opened=True) is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is no JSON"),
        ("\xff", "is no JSON"),
        ("[]", "must be an object of exactly family, backend, effective"),
        ('{"family": "x"}', "found family"),
        (json.dumps(dict.fromkeys(expected.KEYS)), "family must be text, got NoneType"),
        (json.dumps(dict.fromkeys(expected.KEYS, "x")), "effective must be an object, got str"),
        (" " * 70000, "is larger than 65536 bytes"),
        ("[" * 60000, "is no JSON"),
    ],
)
def test_a_wrong_shape_is_a_command_line_error(tmp_path, text, sentence):
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match="--expect-plan") as error:
        expected.load(path)
    assert sentence in str(error.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        expected.load(tmp_path / "none.json")
