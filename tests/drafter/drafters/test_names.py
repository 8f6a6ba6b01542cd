from __future__ import annotations

from pathlib import Path

from drafter.drafters.names import kind_and_rest, merged_names


def test_plus_merges_and_a_path_is_one_name(tmp_path: Path) -> None:
    folder = tmp_path / "a+b"
    folder.mkdir()
    assert merged_names("ctc") == ["ctc"]
    assert merged_names("ctc+ngram+memory") == ["ctc", "ngram", "memory"]
    assert merged_names(str(folder)) == [str(folder)]
    assert merged_names(f"model:{folder}") == [f"model:{folder}"]


def test_a_kind_comes_before_the_first_colon(tmp_path: Path) -> None:
    assert kind_and_rest("model:/a/b:c") == ("model", "/a/b:c")
    assert kind_and_rest("ngram") == ("", "ngram")
    assert kind_and_rest("/with:colon/head") == ("", "/with:colon/head")
    (tmp_path / "x:y").mkdir()
    assert kind_and_rest(str(tmp_path / "x:y")) == ("", str(tmp_path / "x:y"))
