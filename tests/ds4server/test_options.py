"""The command line and the environment: precedence, aliases, numbers, and one sentence for every mistake."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4server import options
from ds4server.options import UsageError, c_number, disk_space, read, reserve

MODEL = ("-m", "model.gguf")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--max-seqs", "0"], "--max-seqs must be 1 to 64 or auto, got '0'"),
        (["--cont-width", "65"], "--cont-width must be 0, 1 to 64 or auto, got '65'"),
        (["--batched-session", "65"], "--batched-session must be at most 64, got 65"),
        (["--batched-session", "4", "--max-seqs", "2"], "--batched-session 4 and --max-seqs 2 differ; name one width"),
        (["--cont-width", "0", "--batched-session", "4"], "--batched-session 4 and --max-seqs 0 differ; name one width"),
        (["--prefix-reuse", "maybe"], "--prefix-reuse must be one of off, exact, partial, auto, got 'maybe'"),
        (["--ctx", "many"], "--ctx must be an integer, got 'many'"),
        (["--ctx", "1_000"], "--ctx must be an integer, got '1_000'"),
        (["--prefill-chunk", "0"], "--prefill-chunk must be at least 1, got 0"),
        (["--port", "65536"], "--port must be at most 65535, got 65536"),
        (["--mtp-margin", "1001"], "--mtp-margin must be from 0 to 1000, got 1001"),
        (["--mtp-margin", "nan"], "--mtp-margin must be from 0 to 1000, got nan"),
        (["--grace-seconds", "inf"], "--grace-seconds must be at least 0, got inf"),
        (["--backend", "tpu"], "--backend must be one of auto, jax, numpy, cuda, metal, cpu, reference, got 'tpu'"),
        (
            ["--kv-disk-space", "32X"],
            "--kv-disk-space must be an integer with an optional unit k, m, g or t (…b, …ib), got '32X'",
        ),
        (["--kv-disk-space", "4096TiB"], "--kv-disk-space must be 1 to 2147483647 MiB, got '4096TiB'"),
        (
            ["--kv-cache-min-tokens", "1024", "--kv-cache-cold-max-tokens", "512"],
            "--kv-cache-cold-max-tokens is 512, below --kv-cache-min-tokens 1024; 0 or at least 1024 is accepted",
        ),
        (
            ["--mixed-prefill-quantum", "96", "--prefill-chunk-live", "512"],
            "--mixed-prefill-quantum and --prefill-chunk-live set the same chunk; name one of them",
        ),
        (["--expect-plan", "a", "--expect-plan", "b"], "--expect-plan may be given once, and a second file 'b' was found"),
        (["--ctx"], "-c/--ctx: expected one argument"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--prefix", "off"], "unrecognized arguments: --prefix off"),
        (["--role", "x"], "unrecognized arguments: --role x"),
    ],
)
def test_mistakes(argv, sentence):
    with pytest.raises(UsageError) as error:
        read([*MODEL, *argv], {})
    assert str(error.value) == sentence


@pytest.mark.parametrize("flags", [["--ignore-eos"], ["--ignore-eos-in-reasoning"], ["--mtp", "m.gguf"]])
def test_flags_that_need_a_model(flags):
    with pytest.raises(UsageError, match=f"{flags[0]} needs -m"):
        read(flags, {})
    read([*MODEL, *flags], {})


def test_quality_does_not_go_with_approximations():
    for flags in ("--xla_cpu_enable_fast_math", "--a=b --xla_gpu_enable_fast_math=true", "--xla_cpu_enable_fast_math=1 --c"):
        with pytest.raises(UsageError, match="--quality and --xla_.pu_enable_fast_math.* exclude each other"):
            read(["--quality"], {"XLA_FLAGS": flags})
        assert not read([], {"XLA_FLAGS": flags}).quality
    assert read(["--quality"], {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}).quality


def test_values_and_their_other_spelling():
    assert read(["--ctx=512"], {}).ctx == read(["-c", "512"], {}).ctx == read(["-c512"], {}).ctx == 512
    assert read(["-c", "-5"], {}).ctx == -5
    request = read([*MODEL, "--ignore-eos", "--ignore-eos-in-reasoning"], {})
    assert request.eos_policy == "global"
    assert read(["--no-update-check"], {}) == read([], {})
    assert [read(["--backend", word], {}).requested_backend for word in ("jax", "numpy", "cpu")] == ["auto", "reference", "cpu"]
    assert read(["--cuda", "--backend", "metal"], {}).backend == "metal" and read(["--cuda"], {}).backend == "cuda"


def test_flag_over_environment_over_default():
    cases = [
        ("floor_gb", "--mem-floor-gb", "DS4_MEM_FLOOR_GB", 12, 6, 4),
        ("sched_chunk", "--prefill-chunk", "DS4_CONT_PREFILL_CHUNK", 512, 1024, None),
        ("live_chunk", "--prefill-chunk-live", "DS4_CONT_PREFILL_CHUNK_LIVE", 256, 512, None),
        ("native_chunk", "--native-chunk", "DS4_NATIVE_PREFILL_CHUNK", 128, 2048, None),
        ("width", "--max-seqs", "DS4_SERVER_COALESCE_MAX", 3, 2, "auto"),
        ("max_queue", "--max-queue", "DS4_SERVER_MAX_QUEUE", 7, 9, 64),
    ]
    for name, flag, variable, by_flag, by_variable, default in cases:
        env = {variable: str(by_variable)}
        assert getattr(read([flag, str(by_flag)], env), name) == by_flag, flag
        assert getattr(read([], env), name) == by_variable, flag
        assert getattr(read([], {}), name) == default, flag
    assert read(["--prefix-reuse", "auto"], {"DS4_SERVER_FORK": "0"}).reuse == "auto"
    assert read(["--mtp-mode", "on"], {"DS4_MTP_SPEC_DISABLE": ""}).mtp_mode == "on"
    assert read([], {"DS4_MTP_SPEC_DISABLE": ""}).mtp_mode == "off"


def test_the_width_has_three_names():
    assert read(["--max-seqs", "2", "--cont-width", "0"], {}).width == "off"
    assert read(["--cont-width", "0", "--max-seqs", "auto"], {}).width == "auto"
    batched = read(["--batched-session", "4", "--max-seqs", "4"], {"DS4_SERVER_COALESCE_MAX": "0"})
    assert (batched.named_width, batched.batched, batched.fixed_live) == (4, True, 128)
    assert read(["--batched-session", "4"], {"DS4_CONT_PREFILL_CHUNK_LIVE": "512"}).fixed_live is None
    assert read(["--batched-session", "4", "--mixed-prefill-quantum", "7"], {}).fixed_live == 7
    assert read([], {"DS4_SERVER_COALESCE_MAX": "0"}).width == "off"


@pytest.mark.parametrize(
    ("env", "reuse"),
    [
        ({"DS4_SERVER_FORK": "0", "DS4_SERVER_FORK_PARTIAL": "1"}, "off"),
        ({"DS4_SERVER_FORK": "1", "DS4_SERVER_FORK_PARTIAL": "1"}, "partial"),
        ({"DS4_SERVER_FORK_PARTIAL": "0"}, "exact"),
        ({"DS4_SERVER_FORK_PARTIAL": "2"}, "auto"),
        ({"DS4_SERVER_FORK": "00"}, "auto"),
    ],
)
def test_reuse_by_variable(env, reuse):
    assert read([], env).reuse == reuse


def test_variables_that_cannot_be_read_are_named():
    env = {
        "DS4_SERVER_COALESCE_MAX": "many",
        "DS4_MEM_FLOOR_GB": "-1",
        "DS4_CONT_PREFILL_CHUNK": "-2",
        "DS4_NATIVE_PREFILL_CHUNK": "x",
        "DS4_CUDA_WEIGHT_IPC_SCOPE": "all",
        "DS4_SERVER_MAX_CLIENTS": "few",
        "DS4_SERVER_DEFAULT_TEMP": "warm",
    }
    request = read([], env)
    assert len(request.ignored) == len(env)
    for (name, held), sentence in zip(env.items(), request.ignored, strict=True):
        assert sentence.startswith(f"{name} is ignored: it holds {held!r}; ") and sentence.endswith(" is accepted")
    assert request.ignored and read([], {}).ignored == ()
    assert (request.width, request.floor_gb, request.sched_chunk, request.native_chunk) == ("auto", 4, None, None)


def test_bounds_that_zero_removes():
    env = {f"DS4_SERVER_{name}": "0" for name in ("MAX_CLIENTS", "MAX_QUEUE", "MAX_QUEUE_BYTES", "MAX_QUEUE_AGE_S")}
    request = read([], env)
    assert [request.max_clients, request.max_queue, request.max_queue_bytes, request.max_queue_age] == [None] * 4
    assert read(["--max-queue", "0"], env).max_queue == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [("12", 12), ("  12", 12), ("\t-3rest", -3), ("+4", 4), ("", 0), ("x9", 0), ("- 3", 0), ("1e3", 1), ("0x10", 0)],
)
def test_c_style_numbers(text, number):
    assert c_number(text) == number


@pytest.mark.parametrize(("text", "mib"), [("", None), (" ", None), ("-1", None), ("-0", 0), ("512", 512), ("x", 0)])
def test_reserves(text, mib):
    assert reserve(text) == mib


def test_reserves_by_variable():
    assert read([], {}).reserves == options.FitReserves(None, True, 2048, 1024)
    env = {
        "DS4_BATCH_FIT_HEADROOM_MB": "-1",
        "DS4_BATCH_FIT_HEADROOM_DERIVED": "0",
        "DS4_BATCH_FIT_BURST_MB": "",
        "DS4_SESSION_GRAPH_HEADROOM_MB": "3000",
    }
    assert read([], env).reserves == options.FitReserves(None, False, 2048, 3000)
    assert read([], env | {"DS4_SESSION_GRAPH_FIT": "0"}).reserves.serial == 0


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("7", 7),
        ("7M", 7),
        ("7mib", 7),
        ("2g", 2048),
        ("2 GiB", 2048),
        ("8TiB", 8 << 20),
        ("1k", 1),
        ("1024KB", 1),
        ("1025k", 2),
    ],
)
def test_disk_space(text, mib):
    assert disk_space(text) == mib
    assert read(["--kv-disk-space-mb", "9", "--kv-disk-space", text], {}).disk_mb == mib


@given(st.text(max_size=12))
def test_any_disk_space_is_a_budget_or_a_sentence(text):
    try:
        assert 1 <= disk_space(text) <= options.LARGEST
    except UsageError as error:
        assert "\n" not in str(error)


@given(st.lists(st.text(max_size=8), max_size=4), st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3))
def test_any_words_are_read_or_refused(argv, env):
    try:
        read([word for word in argv if word not in ("-h", "--help", "--version")], env)
    except UsageError as error:
        assert str(error)


HELP = {
    "--ctx": "8192",
    "--max-seqs": "auto",
    "--batched-session": "off",
    "--prefix-reuse": "auto",
    "--prefill-chunk": "4096",
    "--prefill-chunk-live": "512",
    "--mixed-prefill-quantum": "128",
    "--native-chunk": "family",
    "--mem-floor-gb": "4",
    "--kv-disk-dir": "none",
    "--kv-disk-space-mb": "4096",
    "--kv-cache-min-tokens": "512",
    "--kv-cache-cold-max-tokens": "30000",
    "--kv-cache-continued-interval-tokens": "10000",
    "--kv-cache-boundary-trim-tokens": "32",
    "--kv-cache-boundary-align-tokens": "2048",
    "--kv-cache-reject-different-quant": "off",
    "--ignore-eos": "off",
    "--ignore-eos-in-reasoning": "off",
    "--print-plan": "off",
    "--check-config": "off",
    "--expect-plan": "none",
    "--backend": "auto",
    "--tensor-parallel": "1",
    "--pipeline-parallel": "1",
    "--host": "127.0.0.1",
    "--port": "8000",
    "--cors": "off",
    "--tokens": "393216",
    "--threads": "libraries",
    "--chdir": "stay",
    "--trace": "none",
    "--tool-memory-max-ids": "100000",
    "--disable-exact-dsml-tool-replay": "off",
    "--max-queue": "64",
    "--model": "ds4flash.gguf",
    "--model-id": "file name",
    "--vision": "none",
    "--mtp": "none",
    "--mtp-mode": "auto",
    "--mtp-draft": "minimum",
    "--mtp-margin": "3",
    "--max-body-mb": "64",
    "--sse-keepalive-seconds": "5",
    "--grace-seconds": "5",
}


def test_help_states_every_default():
    shown = {flag: action.help for action in options.parser()._actions for flag in action.option_strings}
    for flag, default in HELP.items():
        assert "default" in shown[flag] and default in shown[flag].split("(default")[-1], flag
    text = options.parser().format_help()
    assert all(flag in text for flag in (*HELP, "--cont-width", "--kv-disk-space", "--cuda", "--metal", "--cpu", "--quality"))


def test_the_requests_defaults_are_those_of_the_help():
    request = read([], {})
    for name in (
        "ctx",
        "floor_gb",
        "disk_mb",
        "disk_min",
        "disk_cold_max",
        "disk_continued",
        "disk_trim",
        "disk_align",
        "tool_ids",
        "port",
        "host",
        "tokens",
        "max_queue",
        "max_body_mb",
    ):
        flag = next(a for a in options.parser()._actions if a.dest == name and a.option_strings)
        assert str(getattr(request, name)) in flag.help


def reads(holder):
    """Names that some module of the package, but options.py, reads of what it calls ``holder``."""
    found = set()
    for path in Path(options.__file__).parent.rglob("*.py"):
        if path.name != "options.py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == holder:
                    found.add(node.attr)
    return found


def test_every_option_takes_effect_or_is_refused():
    """A field that nobody reads would be a flag that is parsed and ignored."""
    assert {field.name for field in fields(options.Request)} <= reads("request")
    assert {field.name for field in fields(options.FitReserves)} <= reads("reserves")
