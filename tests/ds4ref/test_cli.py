"""The command line as a user has it: subprocess or main(), outputs, and one sentence with exit code 2 for every mistake."""

import json
import subprocess
import sys

import numpy as np
import pytest

from ds4ref import gguf_writer, tiny
from ds4ref.__main__ import main
from ds4ref.gguf import Artifact
from ds4ref.model import Model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    tiny.write("deepseek4", folder / "tiny.gguf", seed=1)
    np.save(folder / "ids.npy", np.array([5, 80, 300, 2]))
    return folder


def changed(folder, name, *, architecture="deepseek4", metadata=(), tensors=()):
    """A copy of the tiny artifact with keys or tensors replaced; a value of None removes one."""
    artifact = Artifact.open(folder / "tiny.gguf")
    keys = {k: (v, artifact.types[k]) for k, v in artifact.metadata.items() if k != "general.architecture"}
    arrays = {n: t.dequantize() if t.type.name == "F32" else np.array(t.dequantize()) for n, t in artifact.tensors.items()}
    for target, edits in ((keys, metadata), (arrays, tensors)):
        for key, value in dict(edits).items():
            target.pop(key, None)
            if value is not None:
                target[key] = value
    gguf_writer.write(folder / name, architecture, keys, arrays)
    return str(folder / name)


def fails(capsys, *argv):
    """The one sentence that a mistake prints."""
    assert main(list(map(str, argv))) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("ds4ref: ") and printed.err.count("\n") == 1
    return printed.err


def test_logits_are_the_models(folder):
    command = [sys.executable, "-m", "ds4ref", "logits", "-m", "tiny.gguf", "--tokens", "ids.npy", "-o", "out.npz"]
    subprocess.run(command, cwd=folder, check=True)
    with np.load(folder / "out.npz") as out:
        logits = out["logits"]
    model = Model.open(folder / "tiny.gguf")
    assert logits.dtype == np.float32 and np.array_equal(logits, model.verify(model.new_state(), [5, 80, 300, 2]))
    assert sorted(p.name for p in folder.glob(".*")) == []


def test_trace_names_every_layer(folder, capsys):
    model, ids, out = (str(folder / name) for name in ("tiny.gguf", "ids.npy", "t.npz"))
    assert main(["trace", "-m", model, "--tokens", ids, "-o", out]) == 0
    with np.load(folder / "t.npz") as out:
        assert {f"{what}_{i}" for what in ("h", "attn", "ffn") for i in range(4)} <= set(out.files)
        assert out["h_3"].shape == (4, 4, 64) and out["select_1.3"].tolist() == [0]


def test_inspect_tells_config_tensors_and_state(folder, capsys):
    assert main(["inspect", "-m", str(folder / "tiny.gguf"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["architecture"] == "deepseek4" and found["problems"] == [] and found["config"]["layers"] == 4
    names = {tensor["name"] for tensor in found["tensors"]}
    assert len(names) == len(Artifact.open(folder / "tiny.gguf").tensors)
    assert found["state"]["bytes_per_token"] == pytest.approx(4 * 32 * (2 * 2 / 4 + 1 / 128), rel=1e-3)
    broken = changed(folder, "odd.gguf", tensors={"output_norm.weight": None, "extra.weight": np.zeros(3, np.float32)})
    assert main(["inspect", "-m", broken]) == 0
    text = capsys.readouterr().out
    assert "problem: tensor 'output_norm.weight' is missing" in text and "problem: tensor 'extra.weight' [3]" in text


def test_tokenize_and_render(folder, capsys):
    assert main(["tokenize", "-m", str(folder / "tiny.gguf"), "The <think> tide"]) == 0
    ids = json.loads(capsys.readouterr().out)
    assert main(["tokenize", "-m", str(folder / "tiny.gguf"), "--no-special", "The <think> tide"]) == 0
    assert len(json.loads(capsys.readouterr().out)) > len(ids)
    (folder / "request.json").write_text('{"messages": [{"role": "user", "content": "Hi"}], "think": false}')
    assert main(["render", "-m", str(folder / "tiny.gguf"), str(folder / "request.json")]) == 0
    assert capsys.readouterr().out == "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"


def test_generate_repeats_with_a_seed_and_honours_its_flags(folder, capsys):
    def text(*flags):
        assert main(["generate", "-m", str(folder / "tiny.gguf"), "-p", "The tide", "-n", "12", "--ignore-eos", *flags]) == 0
        return capsys.readouterr().out

    assert text("--seed", "4") == text("--seed", "4")
    greedy = text("--temperature", "0").rstrip("\n")
    assert text("--top-k", "1", "--seed", "9").rstrip("\n") == greedy
    assert text("--temperature", "0", "--stop", greedy[2:4]).rstrip("\n") == greedy[: greedy.index(greedy[2:4])]
    assert text("--temperature", "0", "--logit-bias", "65=100") == "A" * 12 + "\n"
    assert main(["generate", "-m", str(folder / "tiny.gguf"), "--chat", "Hi", "-n", "3", "--logprobs", "2"]) == 0
    assert "prompt tokens" in capsys.readouterr().err


def test_tiny_repeats_with_a_seed(folder, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        assert main(["tiny", "deepseek4", "-o", str(tmp_path / name), "--seed", "1"]) == 0
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_files_that_do_not_fit_are_one_sentence(folder, capsys):
    tokens = ["--tokens", folder / "ids.npy", "-o", folder / "x.npz"]

    def sentence(name, **edits):
        return fails(capsys, "logits", "-m", changed(folder, name, **edits), *tokens)

    assert "tensor 'blk.0.attn_kv.weight' is missing" in sentence("a.gguf", tensors={"blk.0.attn_kv.weight": None})
    misshapen = sentence("b.gguf", tensors={"blk.0.attn_kv.weight": np.zeros((3, 4), np.float32)})
    assert "tensor 'blk.0.attn_kv.weight' has shape [3, 4], expected [32, 64]" in misshapen
    assert "'stray.weight' [2] is not part of" in sentence("c.gguf", tensors={"stray.weight": np.zeros(2, np.float32)})
    assert "unknown architecture 'llama' (known: " in sentence("d.gguf", architecture="llama")
    assert "'deepseek4.block_count'" in sentence("e.gguf", metadata={"deepseek4.block_count": None})
    assert "'deepseek4.expert_used_count'" in sentence("f.gguf", metadata={"deepseek4.expert_used_count": 99})
    raw = (folder / "tiny.gguf").read_bytes()
    at = raw.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    (folder / "g.gguf").write_bytes(raw[:at] + (77).to_bytes(4, "little") + raw[at + 4 :])
    unknown = fails(capsys, "logits", "-m", folder / "g.gguf", *tokens)
    assert "token_embd.weight" in unknown and "77" in unknown
    assert "no such file" in fails(capsys, "inspect", "-m", folder / "none.gguf")
    assert not (folder / "x.npz").exists()


def test_arguments_that_do_not_fit_are_one_sentence(folder, capsys):
    model = folder / "tiny.gguf"
    np.save(folder / "far.npy", np.array([512]))
    np.save(folder / "long.npy", np.zeros(70000, np.int64))
    np.save(folder / "floats.npy", np.zeros(3))
    run = ["logits", "-m", model, "-o", folder / "x.npz", "--tokens"]
    assert "id 512 is outside the vocabulary of 512" in fails(capsys, *run, folder / "far.npy")
    assert "70000 tokens exceed the context of 65536" in fails(capsys, *run, folder / "long.npy")
    assert "found float64 [3]" in fails(capsys, *run, folder / "floats.npy")
    assert "not an array of token ids" in fails(capsys, *run, model)
    assert "has no option 'fast' (accepted: qat)" in fails(capsys, *run, folder / "ids.npy", "--option", "fast=true")
    assert "qat" in fails(capsys, *run, folder / "ids.npy", "--option", "qat=true")
    generate = ["generate", "-m", model, "-p", "x"]
    assert "--ctx must be from 1 to 65536" in fails(capsys, *generate, "--ctx", "65537")
    assert "temperature must be a number from 0 to 100" in fails(capsys, *generate, "--temperature", "-1")
    assert "logit_bias" in fails(capsys, *generate, "--logit-bias", "600=1")
    assert "cannot be written" in fails(capsys, "tiny", "deepseek4", "-o", folder / "no" / "x.gguf")
    assert "unknown architecture 'x' (known: " in fails(capsys, "tiny", "x", "-o", folder / "x.gguf")
    assert "ID=BIAS" in fails(capsys, *generate, "--logit-bias", "a")
    (folder / "bad.json").write_text("{")
    assert "not a JSON request" in fails(capsys, "render", "-m", model, folder / "bad.json")
    (folder / "role.json").write_text('{"messages": 5}')
    assert "messages must be an array" in fails(capsys, "render", "-m", model, folder / "role.json")


def test_help_is_complete(capsys):
    for command in ("logits", "trace", "inspect", "tokenize", "render", "generate", "tiny"):
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0 and "show this help" in capsys.readouterr().out


def test_the_reference_needs_no_jax_and_no_server():
    code = (
        "import sys; sys.modules['jax'] = None; import ds4ref.__main__, ds4ref.generation, ds4ref.conversation\n"
        "assert not [m for m in sys.modules if m.startswith(('ds4jax', 'ds4server', 'falcon', 'waitress', 'pydantic'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
