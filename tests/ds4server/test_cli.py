"""Flags of ``ds4server``: every mistake is one sentence and exit code 2, before anything listens."""

import pytest

from ds4ref import tiny
from ds4server import backend
from ds4server.cli import main, model_id
from ds4server.options import parser


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("server") / "tiny.gguf"
    tiny.write("deepseek4", path)
    return path


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--ctx", "65537"], "--ctx 65537 is above the 65536 tokens"),
        (["--ctx", "0"], "--ctx must be at least 1"),
        (["--port", "70000"], "--port must be at most 65535"),
        (["--chdir", "/no/such/folder"], "--chdir /no/such/folder"),
        (["--tokens", "-1"], "--tokens must be at least 0"),
        (["--sse-keepalive-seconds", "0"], "--sse-keepalive-seconds must be greater than 0"),
    ],
)
def test_mistakes(model, capsys, flags, sentence):
    assert main(["-m", str(model), *flags]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("ds4server: ") and sentence in last


def test_a_backend_that_is_not_there(model, capsys, monkeypatch):
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert main(["-m", str(model), "--backend", "jax"]) == 2
    assert "--backend jax cannot run this file: JAX is not installed" in capsys.readouterr().err


def test_an_address_of_another_machine(model, capsys):
    assert main(["-m", str(model), "--backend", "numpy", "--host", "256.0.0.1"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "ds4server: --host 256.0.0.1 is no address of this machine"


def test_a_missing_model(capsys):
    assert main(["-m", "none.gguf"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "ds4server: none.gguf: no such file"


def test_backend_choice():
    assert backend.choose("numpy", "deepseek4").name == "reference"
    absent = backend.choose("auto", "deepseek4", jax_installed=False)
    assert absent.name == "reference" and absent.fell_back and "JAX is not installed" in absent.reason
    unknown = backend.choose("auto", "deepseek4", jax_installed=True, jax_families=frozenset())
    assert unknown.name == "reference" and "ds4jax does not implement architecture 'deepseek4' yet" in unknown.reason
    here = {"jax_installed": True, "jax_families": {"x"}, "platform": "metal"}
    assert backend.choose("auto", "x", **here).name == backend.choose("jax", "x", **here).name == "metal"
    assert backend.choose("cuda", "x", **here) == backend.Backend(
        "cuda", "JAX is installed and ds4jax runs this family", "metal"
    )
    for word in ("jax", "cpu"):
        with pytest.raises(backend.BackendError, match="JAX is not installed"):
            backend.choose(word, "deepseek4", jax_installed=False)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/a-b.gguf", "a-b"),
        ("models/X-00001-of-00003.gguf", "X"),
        ("Qwen-Mixed-Quant-v1/part-00001-of-00002.gguf", "Qwen-Mixed-Quant-v1"),
        ("Name-GGUF/q4.gguf", "Name-GGUF"),
        ("gguf/q4.gguf", "q4"),
    ],
)
def test_model_id(tmp_path, path, name):
    assert model_id(tmp_path / path) == name


def test_help_states_every_default():
    text = parser().format_help()
    for expected in ("8192", "127.0.0.1", "8000", "auto", "393216", "embedded"):
        assert expected in text
