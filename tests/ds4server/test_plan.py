"""The plan: every case of the contract's table, and its laws over any command line, environment and facts."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ds4server import capabilities, cases, options, report
from ds4server.plan import Facts, resolve
from ds4server.quote import Budgets

DATA = Path(__file__).parent / "data"
TABLE = json.loads((DATA / "capabilities.json").read_text())
CASES = json.loads((DATA / "plan-cases.json").read_text())["cases"]
KEYS = [family["key"] for family in TABLE["families"]]
PRODUCT = [family["key"] for family in capabilities.table()["families"]]
REUSE, LEVELS = ("off", "exact", "partial"), capabilities.LEVELS
GB = 1 << 30


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_case(case):
    assert list(cases.mismatches(case, TABLE)) == []


def test_the_table_is_whole():
    assert len(CASES) == 139
    codes = {code for case in CASES for code in case["expect"]["issues"]}
    assert {"quote_overflow", "mtp_lane", "chunk_past_native", "partial_runtime"} <= codes


@pytest.mark.parametrize(
    "change", [{"issues": ["mtp_lane"]}, {"exit": 1}, {"effective": {"max_seqs": 3}}, {"quote_mib": {"banks": 1}}]
)
def test_a_mismatch_is_seen(change, tmp_path, capsys):
    case = CASES[0] | {"expect": CASES[0]["expect"] | change}
    assert len(list(cases.mismatches(case, TABLE))) == 1
    for name, content in (("capabilities.json", TABLE), ("cases.json", {"cases": [case, CASES[1]]})):
        (tmp_path / name).write_text(json.dumps(content))
    assert cases.main(["--cases", str(tmp_path / "cases.json")]) == 1
    assert capsys.readouterr().out.startswith(f"{case['name']}: ")
    assert cases.main(["--cases", str(DATA / "plan-cases.json")]) == 0


# Any command line, any environment, any facts.

OTHERS = [
    "DS4_SERVER_MAX_QUEUE",
    "DS4_SERVER_MAX_QUEUE_AGE_S",
    "DS4_SERVER_DEFAULT_TEMP",
    "DS4_CUDA_WEIGHT_IPC_SCOPE",
    "DS4_SERVER_FORK_PARTIAL_MIN",
    "DS4_SERVER_PIN_MIN_TOKENS",
]
SIZES = ["1", "96", "128", "255", "256", "300", "512", "2048", "4096", "8192", "9000", "16384"]
VALUES = {
    "-c": ["-1", "0", "1", "128", "2048", "8192", "65536", "262144", "524288", "1048576", "1048577"],
    "--max-seqs": ["auto", "1", "2", "3", "64"],
    "--cont-width": ["auto", "0", "1", "2"],
    "--batched-session": ["1", "2", "4"],
    "--prefix-reuse": options.REUSES,
    "--mtp-mode": options.MODES,
    "--mtp-draft": ["1", "2", "3", "9"],
    "--mtp": ["m.gguf"],
    "--prefill-chunk": SIZES,
    "--prefill-chunk-live": SIZES,
    "--mixed-prefill-quantum": SIZES,
    "--native-chunk": SIZES,
    "--mem-floor-gb": ["0", "1", "12"],
    "--kv-disk-dir": ["kv"],
    "--backend": options.BACKENDS,
    "--tensor-parallel": ["1", "2"],
    "--vision": ["v.gguf"],
}
JUNK = [
    *(
        (flag, value)
        for flag in (*VALUES, "--mtp-margin", "--kv-disk-space", "--kv-cache-min-tokens")
        for value in ("x", "", "-7", "0")
    ),
    *((flag,) for flag in ("--nonsense", "--ctx", "stray", "--prefix-reuse=exact", "", "--", "-m", "--expect-plan")),
]
SWITCHES = [
    "--cuda",
    "--cpu",
    "--metal",
    "--check-config",
    "--print-plan",
    "--ignore-eos",
    "--ignore-eos-in-reasoning",
    "--quality",
    "--ssd-streaming",
    "--ssd-streaming-cold",
    "--kv-cache-reject-different-quant",
]
NATIVE = sorted({f["native_prefill"]["env"] for f in TABLE["families"] if f["native_prefill"]["env"]})
TEXTS = {
    "DS4_SERVER_COALESCE_MAX": ["0", "1", "2", "auto", "many"],
    "DS4_SERVER_CONTINUOUS": ["0", "1"],
    "DS4_SERVER_FORK": ["0", "1"],
    "DS4_SERVER_FORK_PARTIAL": ["0", "1", "2"],
    "DS4_MTP_SPEC_DISABLE": ["", "0"],
    "DS4_MEM_FLOOR_GB": ["-1", "0", "6"],
    "DS4_SERVER_PERSIST_MIN_TOKENS": ["-5", "4096"],
    "DS4_CONT_PREFILL_CHUNK": ["-1", "0", *SIZES],
    "DS4_CONT_PREFILL_CHUNK_LIVE": ["-1", "0", *SIZES],
    "DS4_CONT_PREFILL_NOFENCE": ["0", "1"],
    "DS4_NATIVE_PREFILL_CHUNK": ["x", *SIZES],
    "DS4_BATCH_FIT_HEADROOM_MB": ["-1", "0", "1024"],
    "DS4_BATCH_FIT_HEADROOM_DERIVED": ["0", "1"],
    "DS4_BATCH_FIT_BURST_MB": ["", "512"],
    "DS4_SESSION_GRAPH_HEADROOM_MB": ["-0", "3072"],
    "DS4_SESSION_GRAPH_FIT": ["0", "1"],
    **dict.fromkeys(NATIVE, ["0", *SIZES]),
}

valued = st.sampled_from(sorted(VALUES)).flatmap(lambda flag: st.tuples(st.just(flag), st.sampled_from(VALUES[flag])))
readable = st.one_of(valued, valued, valued, st.tuples(st.sampled_from(SWITCHES)))
unreadable = st.one_of(readable, readable, st.sampled_from(JUNK), st.tuples(st.text(max_size=6)))


def command_lines(flags):
    """Lists of words that name a model."""
    return st.lists(flags, max_size=6).map(lambda parts: ["-m", "model.gguf", *(word for part in parts for word in part)])


argvs, any_argvs = command_lines(readable), command_lines(unreadable)
variables = st.sampled_from(sorted(TEXTS)).flatmap(lambda name: st.tuples(st.just(name), st.sampled_from(TEXTS[name])))
environments = st.lists(variables, max_size=4).map(dict)
any_environments = st.one_of(environments, st.dictionaries(st.sampled_from([*TEXTS, *OTHERS]), st.text(max_size=4), max_size=4))
truth = st.sampled_from([None, True, False])
amounts = st.integers(0, 40 * GB) | st.sampled_from([0, 2**62, 2**63, 2**70])
budgets = st.none() | st.builds(
    Budgets,
    st.none() | amounts,
    amounts,
    amounts,
    amounts,
    amounts,
    amounts,
    amounts,
    amounts,
    amounts,
    st.sampled_from(["host", "device", "unified"]),
    amounts,
    st.none() | amounts,
    amounts,
    st.integers(0, GB),
)
facts = st.builds(
    Facts,
    platform=st.sampled_from(["cuda", "metal", "cpu", "reference"]),
    mtp_path_ok=truth,
    vision_path_ok=truth,
    dspark_ok=truth,
    artifact_ok=truth,
    artifact_qualified=truth,
    has_eos=truth,
    disk_ready=truth,
    cont_lane=truth,
    partial_reuse=truth,
    mtp_loaded=truth,
    vision_loaded=truth,
    ipc_pending=st.booleans(),
    capacity=st.sampled_from([None, 1, 8192]),
    banks_fitted=st.sampled_from([None, 1, 2, 5]),
    native_chunk=st.sampled_from([None, 1, 128, 200, 300, 1024, 4096]),
    native_wanted=st.sampled_from([None, 1, 256, 1024]),
    budgets=budgets,
    mapped_weights=st.none() | amounts,
)
rows = st.sampled_from([None, *KEYS, *(f"product {key}" for key in PRODUCT)])


def row_of(key):
    if key is None:
        return None
    return (
        capabilities.product(key.removeprefix("product "), "cpu")
        if key.startswith("product ")
        else cases.record_row(TABLE, key)
    )


def read(argv, env):
    """The request, or None after a command-line error, which must be one sentence."""
    try:
        return options.read(argv, env)
    except options.UsageError as error:
        assert str(error).strip() and "\n" not in str(error)
        return None


PATTERN = resolve(options.read([], {}), None, Facts()).as_json()


@given(any_argvs, any_environments, rows, facts)
def test_any_request_is_refused_or_has_a_whole_plan(argv, env, key, known):
    request, row = read(argv, env), row_of(key)
    if request is None:
        assert read(argv, env) is None
        return
    plan = resolve(request, row, known)
    found = plan.as_json()
    assert json.loads(json.dumps(found)) == found
    assert found.keys() == PATTERN.keys()
    for view in ("controls", "requested", "effective", "qualified"):
        assert found[view].keys() == PATTERN[view].keys()
    assert resolve(request, row, known) == plan and read(argv, env) == request
    assert all(issue.message and "\n" not in issue.message for issue in plan.issues)
    assert bool(plan.errors) == (cases.exit_code(request, row, plan) == 2)
    assert list(report.lines(plan))[-1].startswith(("warn: ", "error: ")) or not plan.issues


@given(argvs, environments, rows.filter(bool), facts)
def test_no_plan_claims_more_than_there_is(argv, env, key, known):
    request, row = read(argv, env), row_of(key)
    assume(request is not None)
    plan = resolve(request, row, known)
    effective, qualified = plan.effective, plan.qualified
    offers = {"none": "off"}.get(row.reuse, row.reuse)
    assert REUSE.index(effective["prefix_reuse"]) <= REUSE.index(offers)
    if request.reuse != "auto":
        assert REUSE.index(effective["prefix_reuse"]) <= REUSE.index(request.reuse)
    assert effective["max_seqs"] >= 1 and (request.named_width is None or effective["max_seqs"] <= request.named_width)
    live, sched, native = (effective[name] for name in ("sched_chunk_live", "sched_chunk", "native_chunk"))
    assert live <= sched or sched == 0
    assert native is None or sched <= native
    modes = {"off": {"off"}, "auto": {"off", "auto"}, "on": {"off", "on"}}
    assert effective["mtp_mode"] in modes[request.mtp_mode]
    assert (effective["mtp_draft"] is None) == (effective["mtp_mode"] == "off")
    assert effective["mtp_mode"] == "off" or effective["mtp_weights"]
    if effective["mtp_mode"] == "auto":
        assert row.mtp_support == "qualified"
    for name, level in (("disk", row.disk), ("mtp", row.mtp_support)):
        assert LEVELS.index(qualified[name]) <= LEVELS.index(level)
    assert not effective["disk"] or request.disk_dir is not None
    # What was forced and is not in effect is an error.
    if request.reuse in ("exact", "partial") and effective["prefix_reuse"] != request.reuse:
        assert plan.errors
    if request.named_width is not None and effective["max_seqs"] < request.named_width:
        assert plan.errors
    if request.mtp_mode == "on" and effective["mtp_mode"] != "on":
        assert plan.errors
    if request.disk_dir is not None and not effective["disk"]:
        assert plan.errors


HELPFUL = {
    "mtp_path_ok": True,
    "dspark_ok": True,
    "mtp_loaded": True,
    "has_eos": True,
    "disk_ready": True,
    "artifact_ok": True,
    "vision_path_ok": True,
    "partial_reuse": True,
    "cont_lane": True,
    "artifact_qualified": True,
}


@given(argvs, environments, rows.filter(bool), facts, st.sampled_from(sorted(HELPFUL)))
def test_less_known_is_no_reason_to_be_silent(argv, env, key, known, name):
    """A fact that spoke for the request, taken away, silences no error."""
    request, row = read(argv, env), row_of(key)
    assume(request is not None)
    with_it, without = (resolve(request, row, replace(known, **{name: value})) for value in (HELPFUL[name], None))
    assert {i.code for i in with_it.errors} <= {i.code for i in without.errors}


NAMED = (
    "--max-seqs",
    "--cont-width",
    "--prefix-reuse",
    "--prefill-chunk",
    "--prefill-chunk-live",
    "--native-chunk",
    "--mem-floor-gb",
)


@given(argvs, environments, rows.filter(bool), facts, st.booleans())
@example(["-m", "m", "--native-chunk", "16384"], {}, "product glm-5.2", Facts(), True)  # a family without a variable of its own
@example(
    ["-m", "m", "--native-chunk", "8192"], {}, "step-3.7-flash", Facts(platform="cuda"), True
)  # above the family's maximum
@example(["-m", "m"], {}, "naive-n0.5-flash", Facts(platform="cuda"), False)  # a width of 1 is one thing, a named one another
@example(
    ["-m", "m", "--mtp-draft", "1"], {}, "qwen38-flash-next", Facts(platform="cuda"), False
)  # the draft turns drafting off
@example(["-m", "m", "--batched-session", "4"], {}, "qwen38-flash-next", Facts(platform="cuda"), False)
@example(["-m", "m", "--mixed-prefill-quantum", "96"], {}, "qwen38-flash-next", Facts(platform="cuda"), True)
def test_the_written_environment_leads_to_the_same_plan(argv, env, key, known, dropped):
    """With the same command line, and with one that has lost the flags which a variable stands for."""
    request, row = read(argv, env), row_of(key)
    assume(request is not None)
    assume(not dropped or not {"--batched-session", "--mtp-mode"} & set(argv))
    plan = resolve(request, row, known)
    written = dict(env)
    for name, value in options.written(request, plan, row.native_prefill.env).items():
        written.pop(name, None) if value is None else written.update({name: value})
    if dropped:
        argv = [word for i, word in enumerate(argv) if word not in NAMED and (i == 0 or argv[i - 1] not in NAMED)]
    again = read(argv, written)
    assert resolve(again, row, known).effective == plan.effective


@given(argvs, environments, rows.filter(bool), facts)
def test_the_quote_hosts_the_most_banks_that_fit(argv, env, key, known):
    request, row = read(argv, env), row_of(key)
    assume(request is not None and known.budgets is not None and known.budgets.available is not None and not known.ipc_pending)
    plan = resolve(request, row, known)
    quote = plan.quote
    assert quote["banks"] == plan.effective["max_seqs"]
    fits = quote["total"] <= quote["available"]
    if "host" in quote and quote["host"]["available"] is not None:
        fits = fits and quote["host"]["total"] <= quote["host"]["available"]
    assert fits != ("quote_overflow" in [issue.code for issue in plan.issues])
    assert fits or quote["banks"] == 1
    unlimited = resolve(request, row, replace(known, budgets=replace(known.budgets, available=None)))
    assert plan.effective["max_seqs"] <= unlimited.effective["max_seqs"]


def test_facts_of_a_case_are_the_facts_of_a_plan():
    known = {f.name for f in fields(Facts)} | {"family", "caps", "memory_mib"}
    assert {name for case in CASES for name in case["facts"]} <= known


MB = 1 << 20
WEIGHTS = Budgets(1000 * MB, shared_weights=500 * MB, per_bank=100 * MB, scratch=260 * MB, scratch_per_row=MB)


def with_banks(width, key="glm-5.3-flash", native=256, **known):
    """A plan of so many banks on 1000 MB, of which weights take 500, a bank 100, 4 scratch, and a row of the native chunk 1."""
    request = options.read(["-m", "m", "--mem-floor-gb", "0", "-c", "2048", *(["--max-seqs", width] if width else [])], {})
    facts = Facts(platform="cpu", native_chunk=native, native_wanted=native, budgets=WEIGHTS, has_eos=True)
    return resolve(request, capabilities.product(key, "cpu"), replace(facts, **known))


def halved(plan):
    return [issue.message for issue in plan.issues if issue.code == "native_chunk"]


@pytest.mark.parametrize(
    ("width", "rows", "error"),
    [(None, 256, None), ("2", 256, None), ("3", 128, None), ("4", 64, None), ("5", 256, "banks_not_quoted")],
)
def test_the_native_chunk_is_halved_until_a_named_width_fits(width, rows, error):
    """300 MB beside 2 banks hold 256 rows, 196 beside 3 hold 128, 96 beside 4 hold 64; 5 banks leave no memory for any row."""
    plan = with_banks(width)
    assert plan.effective["native_chunk"] == rows and plan.quote["scratch"] == (4 + rows) * MB
    assert [issue.code for issue in plan.errors] == ([error] if error else [])
    said = f"one forward pass takes {rows} rows instead of 256, so that --max-seqs {width} fits"
    assert halved(plan) == ([said] if rows < 256 else [])
    assert plan.effective["sched_chunk"] <= rows


def test_who_halves_no_native_chunk():
    for plan in (with_banks("3", "step-3.7-flash"), with_banks("3", budgets=replace(WEIGHTS, scratch_per_row=0))):
        assert [issue.code for issue in plan.errors] == ["banks_not_quoted"] and plan.effective["native_chunk"] == 256
    assert with_banks("4", native=None).effective["native_chunk"] is None


def test_an_opened_engine_still_tells_that_its_chunk_was_halved():
    opened = {"native_chunk": 64, "native_wanted": 256, "banks_fitted": 4, "mapped_weights": 0}
    settled = replace(WEIGHTS, available=700 * MB, scratch=60 * MB, scratch_per_row=0)
    plan = with_banks("4", budgets=settled, **opened)
    assert not plan.errors and plan.effective["native_chunk"] == 64 and len(halved(plan)) == 1
