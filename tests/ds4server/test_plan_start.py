"""The plan of a real process: what it checks before opening, what it serves, and its exit codes."""

import json
import shutil

import httpx
import pytest

from ds4ref import tiny
from ds4ref.gguf import Artifact
from ds4ref.model import Model
from ds4ref.reuse import Reuser
from ds4server import cli, evidence, expected, host, options
from ds4server.cli import main
from ds4server.plan import resolve

from .conftest import launch

NUMPY = ("--backend", "numpy")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "tiny.gguf"
    tiny.write("deepseek4", path)
    return str(path)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    """A process writes its plan into the environment; a test gets it back as it was."""
    monkeypatch.setattr(cli.os, "environ", dict(cli.os.environ))


def check(capsys, *argv):
    """(exit code, the plan on stdout, codes of its issues, stderr)."""
    code = main(["--check-config", *argv])
    out, err = capsys.readouterr()
    plan = json.loads(out)
    return code, plan, [issue["code"] for issue in plan["issues"]], err


def test_a_check_prints_one_line_and_a_report(model, capsys):
    code = main(["--check-config", "-m", model, *NUMPY])
    out, err = capsys.readouterr()
    assert code == 0 and out.count("\n") == 1
    assert err.splitlines()[0] == "family: deepseek4" and "warn: this artifact has no workload qualification" in err
    assert json.loads(out)["quote"]["shared_weights"] == sum(t.nbytes for t in Artifact.open(model).tensors.values())


def test_a_check_of_no_model(tmp_path, capsys):
    code, plan, codes, err = check(capsys, "-m", str(tmp_path / "none.gguf"))
    assert (code, codes, plan["family"]) == (2, ["family_unknown"], "unknown") and "no such file" in err
    (tmp_path / "text.gguf").write_text("no model")
    assert check(capsys, "-m", str(tmp_path / "text.gguf"))[2] == ["family_unknown"]


def test_a_model_that_cannot_load(tmp_path, capsys):
    with_hole = tmp_path / "hole.gguf"
    tiny.write("deepseek4", with_hole)
    raw = with_hole.read_bytes().replace(b"output_norm.weight", b"output_morn.weight")
    with_hole.write_bytes(raw)
    code, _, codes, err = check(capsys, "-m", str(with_hole), *NUMPY)
    assert code == 2 and "artifact_invalid" in codes and "'output_norm.weight' is missing" in err
    assert main(["-m", str(with_hole), *NUMPY]) == 2


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--mtp", "none.gguf"], "mtp_sidecar"),
        (["--mtp-mode", "on"], "mtp_sidecar"),
        (["--vision", "none.gguf"], "vision_artifact"),
        (["--ctx", "65537"], "ctx_unavailable"),
        (["--tensor-parallel", "2"], "family_host"),
        (["--ssd-streaming"], "ssd_unsupported"),
    ],
)
def test_what_this_product_does_not_do_is_refused(model, capsys, flags, code):
    status, _, codes, err = check(capsys, "-m", model, *NUMPY, *flags)
    assert status == 2 and code in codes and "Traceback" not in err
    assert main(["-m", model, *NUMPY, "--print-plan", *flags]) == 2
    out, err = capsys.readouterr()
    assert code in [issue["code"] for issue in json.loads(out)["issues"]]
    assert err.splitlines()[-1].startswith("ds4server: ")


def test_a_device_that_does_not_hold_the_model(model, capsys, monkeypatch):
    jax = pytest.importorskip("jax", reason="JAX is not installed")

    def full(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nand much more")

    monkeypatch.setattr("ds4jax.model.Model", full)
    assert main(["-m", model, "--backend", "cpu", "--ctx", "256", "--mem-floor-gb", "0"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "ds4server: tiny.gguf cannot be loaded on cpu: RESOURCE_EXHAUSTED: out of memory"


@pytest.mark.parametrize(
    ("flags", "dtype", "layout"), [([], "bfloat16", "gpu"), (["--quality"], "float32", "gpu, exact float32")]
)
def test_quality_loads_an_exact_model(model, capsys, monkeypatch, flags, dtype, layout):
    """On a platform whose default is less."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    from ds4jax import platforms

    seen = {}

    class Loaded(Exception):
        pass

    def load(artifact, **options):
        seen.update(options, precision=jax.config.jax_default_matmul_precision)
        raise Loaded

    chosen = platforms.Platform("cuda", "gpu", "a plugin", "default", "gpu", "bfloat16", "it is here")
    monkeypatch.setattr(platforms, "choose", lambda name: chosen)
    monkeypatch.setattr("ds4jax.model.Model", load)
    before = jax.config.jax_default_matmul_precision
    try:
        with pytest.raises(Loaded):
            main(["-m", model, "--backend", "cpu", "--ctx", "256", "--mem-floor-gb", "0", *flags])
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    assert (seen["dtype"], seen["precision"]) == (dtype, "highest" if flags else before)
    assert cli.shown_layout(options.read(["-m", model, *flags], {}), "gpu") == layout


def test_quality_is_priced_and_reported(model, monkeypatch):
    """Rows of four bytes where a platform's default keeps two; the reference is exact already and says so."""
    pytest.importorskip("jax", reason="JAX is not installed")
    monkeypatch.setattr(evidence.backends.host, "platform", lambda: "cuda")
    banks = [
        evidence.before_open(options.read(["-m", model, "--cuda", *flags], {}), cli.Path(model)).facts.budgets.per_bank
        for flags in ([], ["--quality"])
    ]
    assert banks[0] < banks[1] < 2 * banks[0]
    running = launch("--quality", backend="numpy")
    try:
        assert running.stats()["serving"]["effective"]["layout"] == "file, exact float32"
    finally:
        running.process.kill()


def test_a_device_that_holds_fewer_banks_than_were_named(model, capsys, monkeypatch):
    """What was allocated decides: a named width is refused; one bank, and none beside it for reuse, serves."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    from ds4jax.layers import Plan
    from ds4jax.model import Model as OnDevice

    allocate, room, tried = Plan.allocate, 2, []

    def short(self, banks, context, dtype):
        tried.append(banks)
        if banks > room:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return allocate(self, banks, context, dtype)

    monkeypatch.setattr(Plan, "allocate", short)
    monkeypatch.setattr(OnDevice, "scratch", lambda self: None)
    before = dict(cli.os.environ)

    def start(*flags):
        monkeypatch.setattr(cli.os, "environ", dict(before))
        return main(["-m", model, "--backend", "cpu", "--ctx", "256", "--mem-floor-gb", "0", *flags])

    assert start("--max-seqs", "4") == 2 and tried == [4, 3, 2]
    assert "--max-seqs 4 was asked for and 2 could be allocated" in capsys.readouterr().err.splitlines()[-1]
    room, served = 1, []
    monkeypatch.setattr(cli, "_listen", lambda request, service: served.append(service) or 0)
    assert start() == 0
    found = served[0]
    assert (found.plan.effective["max_seqs"], len(found.engine._reuser.banks), found.plan.quote["banks"]) == (1, 1, 1)
    room = 0
    assert start() == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("cannot be loaded on cpu: RESOURCE_EXHAUSTED: out of memory")


def test_a_smaller_native_chunk_is_priced_as_if_it_were_named(tmp_path):
    pytest.importorskip("jax", reason="JAX is not installed")
    tiny.write("glm5-next", tmp_path / "glm.gguf")
    by_rows = {}
    for rows in (64, 256):
        argv = ["-m", "glm.gguf", "--backend", "cpu", "--ctx", "512", "--native-chunk", str(rows)]
        by_rows[rows] = evidence.before_open(options.read(argv, {}), tmp_path / "glm.gguf").facts
    assert all(facts.native_chunk == facts.native_wanted == rows for rows, facts in by_rows.items())
    assert by_rows[256].budgets.with_rows(256, 64).scratch == by_rows[64].budgets.scratch < by_rows[256].budgets.scratch


def test_a_drafter_or_encoder_is_never_ignored(model, capsys, tmp_path):
    shutil.copy(model, tmp_path / "good.gguf")
    cli.os.environ["DS4_DSPARK_MODEL"] = str(tmp_path / "good.gguf")
    code, plan, codes, _ = check(capsys, "-m", model, *NUMPY, "--vision", str(tmp_path / "good.gguf"))
    assert code == 2 and codes[-2:] == ["dspark_artifact", "vision_artifact"]
    assert plan["issues"][-1]["message"].endswith("are not run by this version")


def test_shared_weights_wait_for_the_open(model, capsys):
    cli.os.environ["DS4_CUDA_WEIGHT_IPC_MANIFEST"] = "/none.manifest"
    code, plan, codes, _ = check(capsys, "-m", model, *NUMPY)
    assert code == 2 and codes[-1] == "ipc_unverified" and plan["quote"] is None
    assert main(["-m", model, *NUMPY]) == 1
    assert "/none.manifest" in capsys.readouterr().err.splitlines()[-1]


def test_the_disk_is_tried_and_left_as_it_was(model, capsys, tmp_path, monkeypatch):
    row = evidence.capabilities.product("deepseek-v4", "reference")
    able = evidence.replace(row, disk="unverified")
    monkeypatch.setattr(evidence.capabilities, "product", lambda key, backend: able)
    code, plan, codes, _ = check(capsys, "-m", model, *NUMPY, "--kv-disk-dir", str(tmp_path / "a" / "kv"))
    assert code == 0 and "disk_unverified" in codes and plan["effective"]["disk"] and not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    code, plan, codes, _ = check(capsys, "-m", model, *NUMPY, "--kv-disk-dir", str(tmp_path / "file"))
    assert code == 2 and "disk_open" in codes and not plan["effective"]["disk"]


def test_too_little_memory_is_refused_before_opening(model, capsys, monkeypatch):
    monkeypatch.setattr(host, "memory", lambda backend: host.Memory(5 << 30))
    assert check(capsys, "-m", model, *NUMPY)[0] == 0
    code, plan, codes, err = check(capsys, "-m", model, *NUMPY, "--mem-floor-gb", "5")
    assert code == 2 and "quote_overflow" in codes and plan["quote"]["floor"] == 5 << 30 and "floor 5.00 GiB" in err
    monkeypatch.setattr(host, "memory", lambda backend: host.Memory(None))
    assert check(capsys, "-m", model, *NUMPY)[1]["quote"] is None


def test_expectations_are_checked_before_anything_opens(model, capsys, tmp_path):
    argv = ["-m", model, *NUMPY, "-c", "4096"]
    request = options.read(argv, {})
    found = evidence.before_open(request, cli.Path(model))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(expected.of(resolve(request, found.row, found.facts))))
    expect = ["--expect-plan", str(path)]
    assert check(capsys, *argv, *expect)[0] == 0
    assert main(["--check-config", *argv, "--prefix-reuse", "off", *expect]) == 2
    assert "the plan differs in effective.prefix_reuse" in capsys.readouterr().err.splitlines()[-1]
    assert main([*argv, *expect, "-c", "2048"]) == 2
    assert "effective.ctx" in capsys.readouterr().err.splitlines()[-1]
    # Before open nothing was quoted with an opened engine's memory, so a start with this file ends after open.
    assert main([*argv, *expect, "--port", "0"]) == 2
    assert "effective.decode_execution" in capsys.readouterr().err.splitlines()[-1]


def test_what_is_printed_is_what_is_served(model, tmp_path):
    flags = ("-m", model, "-c", "4096", "--mem-floor-gb", "1", "--warm-weights")
    with open(tmp_path / "out", "w") as out:
        running = launch(*flags, "--print-plan", stdout=out)
    try:
        printed = json.loads((tmp_path / "out").read_text())
        assert httpx.get(f"{running.url}/v1/stats").json()["serving"] == printed
        assert printed["effective"]["layout"] == "file" and printed["effective"]["decode_execution"] == "ordered"
    finally:
        assert running.stop() == 0
    known = {name: printed[name] for name in ("family", "effective", "qualified", "controls")}
    quote = {name: value for name, value in printed["quote"].items() if name != "available"}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(known | {"backend": "reference", "post_open_quote": quote}))
    launch(*flags, "--expect-plan", str(path)).stop()


@pytest.mark.parametrize("imported", [False, True])
def test_weights_of_an_owner_are_not_quoted_again(model, imported):
    request = options.read(["-m", model, *NUMPY, "--mem-floor-gb", "0"], {})
    found = evidence.before_open(request, cli.Path(model))
    data = {name: tensor.data.copy() for name, tensor in found.artifact.tensors.items()}
    artifact = found.artifact.with_data(data) if imported else found.artifact
    opened = Model.from_artifact(artifact, context=request.ctx)
    facts = evidence.after_open(found, opened, Reuser(opened.new_state, request.ctx), "file")
    weights = 0 if imported else sum(tensor.nbytes for tensor in found.artifact.tensors.values())
    assert resolve(request, found.row, facts).quote["shared_weights"] == weights


def test_the_environment_tells_children_the_plan(model, monkeypatch, capsys):
    def no_further(*_):
        raise cli.StartError("enough")

    monkeypatch.setattr(cli, "_open", no_further)
    cli.os.environ["DS4_MTP_SPEC_DISABLE"] = "1"
    assert main(["-m", model, *NUMPY, "--mem-floor-gb", "1", "--prefix-reuse", "exact", "--native-chunk", "512"]) == 1
    told = {name: value for name, value in cli.os.environ.items() if name.startswith("DS4_")}
    assert told == {
        "DS4_MEM_FLOOR_GB": "1", "DS4_SERVER_COALESCE_MAX": "0", "DS4_SERVER_FORK": "1", "DS4_SERVER_FORK_PARTIAL": "0",
        "DS4_CONT_PREFILL_CHUNK": "512", "DS4_CONT_PREFILL_CHUNK_LIVE": "512", "DS4_NATIVE_PREFILL_CHUNK": "512",
        "DS4_METAL_PREFILL_CHUNK": "512", "DS4_MTP_SPEC_DISABLE": "1",
    }  # fmt: skip


def test_threads_are_bounded_before_libraries_load(model, capsys):
    assert main(["--check-config", "-m", model, *NUMPY, "--threads", "3"]) == 0
    assert {cli.os.environ[name] for name in cli.THREAD_VARIABLES} == {"3"}
