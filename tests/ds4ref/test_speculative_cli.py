"""Drafts on the command line: the same answer, acceptance on stderr, what a file's predictor is used for, and refusals."""

import json
import re

import pytest
from runs import GOLDEN

from ds4ref.__main__ import main


def generated(capsys, arch, *argv):
    """(stdout, stderr) of a greedy answer."""
    answer = ["generate", "-m", str(GOLDEN / arch / "model.gguf"), "--ctx", "64", "-p", "Hello", "-n", "12", *map(str, argv)]
    assert main(answer) == 0
    return capsys.readouterr()


def fails(capsys, *argv):
    assert main(list(map(str, argv))) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("ds4ref: ") and printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("arch", "flags"),
    [
        ("dots3note", ["--draft", 2]),
        ("mimo2", ["--mtp", GOLDEN / "mimo2" / "dflash.gguf"]),
        ("step35", ["--mtp", GOLDEN / "step35" / "mtp.gguf", "--draft", 3]),
    ],
)
def test_generate_drafts_shows_acceptance_and_says_the_same(capsys, arch, flags):
    greedy = ["--temperature", 0, "--ignore-eos"]
    plain, drafted = generated(capsys, arch, *greedy), generated(capsys, arch, *greedy, *flags)
    assert drafted.out == plain.out
    judged = int(re.search(r"\d+ of (\d+) drafts kept \(\d+%\) in \d+ trials, \d+ pauses", drafted.err)[1])
    assert judged > 0 and "drafts" not in plain.err


def test_a_seed_repeats_a_drafted_answer(capsys):
    flags = ["--seed", 5, "--draft", 3, "--temperature", 1.2, "--top-k", 20, "--presence-penalty", 1, "--ignore-eos"]
    first, again = (generated(capsys, "dots3note", *flags) for _ in range(2))
    assert first.out == again.out


def test_what_does_not_fit_is_one_sentence(capsys):
    def run(arch, *argv):
        return fails(capsys, "generate", "-m", GOLDEN / arch / "model.gguf", "--ctx", 64, "-p", "x", *argv)

    assert "--draft must be from 1 to 3 with this drafter, got 4" in run("dots3note", "--draft", 4)
    assert "--draft must be at least 1, got 0" in run("dots3note", "--draft", 0)
    assert "--draft must be from 1 to 7 with this drafter, got 0" in run(
        "mimo2", "--mtp", GOLDEN / "mimo2" / "dflash.gguf", "--draft", 0
    )
    assert "holds no predictor block" in run("k2-horizon", "--draft", 1)
    assert "bound and not used" in run("motif3", "--draft", 1)
    assert "takes no draft sidecar" in run("dots3note", "--mtp", GOLDEN / "mimo2" / "dflash.gguf")
    assert "nowhere.gguf: no such file" in run("mimo2", "--mtp", "nowhere.gguf")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("motif3/model.gguf", "predictor: 1 block, bound and not used: the published model is served without drafts"),
        ("mimo2/model.gguf", "predictor: 3 blocks, which draft where asked to"),
        ("k2-horizon/model.gguf", None),
        ("step35/mtp.gguf", "a draft sidecar of step35"),
        ("deepseek4/dspark.gguf", "a draft sidecar of deepseek4"),
    ],
)
def test_inspect_says_what_predictors_are_used_for(capsys, file, said):
    path = str(GOLDEN / file)
    assert main(["inspect", "-m", path]) == 0
    text = capsys.readouterr().out
    assert (said in text) if said else ("predictor" not in text and "sidecar" not in text)
    assert main(["inspect", "-m", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert bool(found["predictor"]) == (said is not None and said.startswith("predictor"))
    assert bool(found["sidecar_of"]) == (said is not None and "sidecar" in said)
