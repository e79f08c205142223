"""``ds4ref tiny`` for every family: it opens, runs, inspects, tokenises, and repeats with its seed."""

import numpy as np
import pytest

from ds4ref import families, tiny
from ds4ref.gguf import ArtifactError
from ds4ref.inspection import inspect, report
from ds4ref.model import Model
from ds4ref.tokenizer import Tokenizer


@pytest.mark.parametrize("architecture", sorted(families.FAMILIES))
def test_every_family(architecture, tmp_path):
    path = tmp_path / "tiny.gguf"
    tiny.write(architecture, path, seed=3)
    assert path.stat().st_size < 3 << 20
    model = Model.open(path)
    text = "The tide <think> is 12 cm higher\n\n漢字"
    tokenizer = Tokenizer.from_artifact(model.artifact)
    ids = tokenizer.encode(text, parse_special=False)
    assert tokenizer.decode(ids) == text
    state = model.new_state()
    logits = model.verify(state, ids[:40])
    assert logits.shape == (len(ids[:40]), model.vocabulary) and np.isfinite(logits).all()
    assert 0.1 < logits.std() < 30
    found = inspect(model.artifact)
    assert found["problems"] == [] and found["architecture"] == architecture
    assert {c["name"] for c in found["state"]["components"]} == set(model.layout)
    assert found["state"]["bytes_at_1000_tokens"] > 0 and "random toy" in report(found)
    again = tmp_path / "again.gguf"
    tiny.write(architecture, again, seed=3)
    assert again.read_bytes() == path.read_bytes()
    tiny.write(architecture, again, seed=4)
    assert again.read_bytes() != path.read_bytes()


def test_an_unknown_family_lists_the_known(tmp_path):
    with pytest.raises(ArtifactError, match="unknown architecture 'llama' .known: .*deepseek4"):
        tiny.write("llama", tmp_path / "x.gguf")
