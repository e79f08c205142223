"""The manifest's text."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4server.owner.manifest import Content, Derived, Manifest, OwnerError, Range, parse, read, write

CONTENTS = {"base": Content("base", 8192, "blake2b-p16m-v1", "00ff00ff00ff00ff"), "mtp": Content("mtp", 4096, "other", "x")}
RANGES = (Range(0, "base", 8192, 32, 4064, 4096), Range(1, "base", 8192, 4096, 100, 4096), Range(2, "mtp", 4096, 0, 4096, 4096))
PLAIN = Manifest(77, 1, "both", "/tmp/a lock", "/run/a socket", CONTENTS, RANGES, name="m")
DERIVED = Derived(3, "base", 8192, 5000, 96, "iq2-aligned", 256, 8, 4, 96, 4096, "blk.0.ffn_gate_exps.weight")


def test_text_is_the_documented_one():
    assert PLAIN.text.splitlines() == [
        "DS4_WEIGHT_SERVER_VMM_V1",
        "owner 77 1 both /tmp/a lock",
        "broker /run/a socket",
        "content base 8192 blake2b-p16m-v1 00ff00ff00ff00ff",
        "content mtp 4096 other x",
        "alloc 0 base 8192 32 4064 4096",
        "alloc 1 base 8192 4096 100 4096",
        "alloc 2 mtp 4096 0 4096 4096",
    ]
    derived = replace(PLAIN, derived=(DERIVED,), lock=None)
    assert derived.text.startswith("DS4_WEIGHT_SERVER_VMM_DERIVED_V1\nowner 77 1 both -\n")
    assert derived.text.endswith("derived-alloc 3 base 8192 5000 96 iq2-aligned 256 8 4 96 4096 blk.0.ffn_gate_exps.weight\n")
    assert parse(derived.text, "m") == derived


def test_file_round_trip_leaves_nothing_beside(tmp_path):
    path = tmp_path / "m"
    write(path, PLAIN)
    assert read(path) == replace(PLAIN, name=f"manifest {path}")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_comments_and_blank_lines_are_skipped():
    assert parse("# made by hand\n" + PLAIN.text.replace("alloc 1", "\n# alloc 9\nalloc 1"), "m") == PLAIN


def changed(old, new):
    assert PLAIN.text.count(old) == 1, old
    return PLAIN.text.replace(old, new)


BROKEN = {
    "begins with 'DS4_WEIGHT_SERVER_V9'; DS4_WEIGHT_SERVER_VMM_V1": changed("SERVER_VMM_V1", "SERVER_V9"),
    "begins with ''": "# nothing\n",
    "line 3 begins with 'brokers'": changed("broker ", "brokers "),
    "has 0 owner lines; exactly one": changed("owner 77 1 both /tmp/a lock\n", ""),
    "has 2 broker lines": changed("broker ", "broker x\nbroker "),
    "line 2: scope is 'all'; base, mtp, both": changed("both", "all"),
    "line 2: pid is '-7'; a whole number": changed("77", "-7"),
    "line 2: pid is 0": changed("77", "0"),
    "line 2: pid is '٧'": changed("77", "٧"),
    "line 2 has 3 fields; 4 are expected": changed(" both /tmp/a lock", " both"),
    "line 4: model is 'vision'; base, mtp, drafter": changed("content base", "content vision"),
    "line 4: logical_size is '8k'": changed("8192 blake", "8k blake"),
    "model 'base' has two content lines": changed("content mtp 4096", "content base 8192"),
    "range 2 is of model 'mtp', which has no content line": changed("content mtp 4096 other x\n", ""),
    "line 6: nbytes is '4k'": changed("32 4064", "32 4k"),
    "range 0 occurs twice": changed("alloc 1", "alloc 0"),
    "range 1 gives model 'base' 8191 bytes, its content line 8192": changed("alloc 1 base 8192", "alloc 1 base 8191"),
    "range 1 is bytes 4096 to 8193 of model 'base'": changed("4096 100 4096", "4096 4097 8192"),
    "range 1 is bytes 4096 to 4096": changed("4096 100 4096", "4096 0 4096"),
    "range 2 has 4096 bytes in an allocation of 4095": changed("0 4096 4096", "0 4096 4095"),
    "ranges 0 and 1 of model 'base' overlap": changed("4096 100 4096", "4095 100 4096"),
    "needs the header DS4_WEIGHT_SERVER_VMM_DERIVED_V1": PLAIN.text + "derived-alloc 3 base 8192 5000 96 k 1 1 1 96 4096 t\n",
    "ranges 1 and 3 of model 'base' overlap": "DS4_WEIGHT_SERVER_VMM_DERIVED_V1\n" + PLAIN.text.split("\n", 1)[1]
    + "derived-alloc 3 base 8192 4100 96 k 1 1 1 96 4096 t\n",
}  # fmt: skip


@pytest.mark.parametrize("sentence", BROKEN)
def test_what_is_wrong_is_named(sentence):
    with pytest.raises(OwnerError) as error:
        parse(BROKEN[sentence], "m")
    assert str(error.value).startswith("m: ") and sentence in str(error.value)


def test_unreadable_files_are_named(tmp_path):
    for path, sentence in ((tmp_path / "none", "No such file"), (tmp_path, "directory"), ("a\0b", "null")):
        with pytest.raises(OwnerError, match=sentence):
            read(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(OwnerError, match="not UTF-8"):
        read(tmp_path / "binary")
    with (tmp_path / "long").open("wb") as file:
        file.truncate(1 << 34)
    with pytest.raises(OwnerError, match="longer than"):
        read(tmp_path / "long")


def test_a_path_with_a_line_break_is_not_written(tmp_path):
    with pytest.raises(OwnerError, match="line break"):
        write(tmp_path / "m", replace(PLAIN, broker="a\nalloc 9"))
    assert not list(tmp_path.iterdir())


@given(st.data())
def test_any_mutation_is_read_or_refused(data):
    lines = replace(PLAIN, derived=(DERIVED,)).text.splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        fields = lines[at].split(" ")
        where = data.draw(st.integers(0, len(fields) - 1))
        fields[where] = data.draw(st.text(max_size=6) | st.integers(-5, 1 << 70).map(str) | st.sampled_from(["mtp", "-"]))
        lines[at] = " ".join(fields)
    try:
        found = parse("\n".join(lines))
    except OwnerError as error:
        assert "\n" not in str(error)
    else:
        assert parse(found.text) == found
