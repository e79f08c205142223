"""The artifact inside the package, which ``bench/train_tiny.py`` made: whole, right, and saying words of its book."""

import hashlib
import re
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import pytest

from ds4ref import drafting
from ds4ref.chat import Options
from ds4ref.conversation import Conversation
from ds4ref.generation import Finish
from ds4ref.gguf import Artifact
from ds4ref.inspection import inspect
from ds4ref.model import Model
from ds4ref.sampling import SamplingParams
from ds4ref.speculative import Speculator, Stepwise, run

SHA256 = "a03148cc5b604478c4ddd5d103bc8592ab285e519f5c6044640fdf483cf0e30f"
BOOK = Path(__file__).parents[2] / "bench" / "alice29.txt"


@pytest.fixture(scope="module")
def embedded():
    with as_file(files("ds4server") / "tiny.gguf") as path:
        yield path


@pytest.fixture(scope="module")
def model(embedded):
    return Model.open(embedded)


def test_it_is_the_file_that_was_measured(embedded):
    """A new one needs new logits (below), new figures in bench/RESULTS.md and this digest."""
    assert embedded.stat().st_size <= 3_000_000
    assert hashlib.sha256(embedded.read_bytes()).hexdigest() == SHA256


def test_it_is_sound(embedded):
    found = inspect(Artifact.open(embedded))
    assert found["problems"] == [] and found["architecture"] == "exaone-moe"


def test_its_logits_are_those_of_another_implementation(model):
    """llama.cpp (October 2026) on the same weights expanded to float32, of tokens that cross the sliding window."""
    with np.load(Path(__file__).with_name("embedded.npz")) as data:
        tokens, at, logits = (data[name] for name in ("tokens", "positions", "logits"))
    assert len(tokens) > model.config.window + 20
    assert np.abs(model.verify(model.new_state(), tokens.tolist())[at] - logits).max() < 2e-4


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("said", ["Hello", "Who are you?", "What did the Cat say?"])
def test_it_answers_in_words_and_its_drafts_are_kept(model, said, thinking):
    conversation, drafter = Conversation(model.artifact), drafting.attach(model)
    prompt = conversation.render([{"role": "user", "content": said}], None, Options(thinking=thinking))
    answer = conversation.generation(
        conversation.encode(prompt), SamplingParams(temperature=0.0), budget=160, context=512, prompt=prompt,
        vocabulary=model.vocabulary,
    )  # fmt: skip
    speculator = Speculator(Stepwise(model, model.new_state()), drafter, 1)
    message = [event for step in run(speculator, answer) for event in step.events]
    text = "".join(event.text for event in message if type(event).__name__ == "Text")
    book = set(re.findall("[a-z]+", BOOK.read_text("ascii").lower()))
    words = re.findall("[a-z]+", text.lower())
    assert answer.finish is Finish.STOP and len(words) >= 8
    assert sum(word in book for word in words) >= 0.9 * len(words), text
    assert speculator.drafted >= 8 and speculator.accepted >= 0.6 * speculator.drafted
