from __future__ import annotations

from pathlib import Path

from drafter.drafters.names import kind_and_rest, leaf_names, merged_names


def test_plus_merges_and_a_path_is_one_name(tmp_path: Path) -> None:
    folder = tmp_path / "a+b"
    folder.mkdir()
    assert merged_names("ctc") == ["ctc"]
    assert merged_names("ctc+ngram+memory") == ["ctc", "ngram", "memory"]
    assert merged_names(str(folder)) == [str(folder)]
    assert merged_names(f"model:{folder}") == [f"model:{folder}"]
    assert merged_names(f"ngram+model:{tmp_path}") == ["ngram", f"model:{tmp_path}"]


def test_a_kind_comes_before_the_first_colon(tmp_path: Path) -> None:
    assert kind_and_rest("model:/a/b:c") == ("model", "/a/b:c")
    assert kind_and_rest("ngram") == ("", "ngram")
    assert kind_and_rest("/with:colon/head") == ("", "/with:colon/head")
    (tmp_path / "x:y").mkdir()
    assert kind_and_rest(str(tmp_path / "x:y")) == ("", str(tmp_path / "x:y"))


def test_a_stack_takes_the_rest_of_the_name() -> None:
    assert merged_names("stack:ngram+memory>model:a") == ["stack:ngram+memory>model:a"]
    assert merged_names("ctc+stack:ngram+memory>model:a") == ["ctc", "stack:ngram+memory>model:a"]
    assert kind_and_rest("stack:ngram>model:a") == ("stack", "ngram>model:a")


def test_the_drafters_that_a_name_is_made_of() -> None:
    assert leaf_names("ngram") == ["ngram"]
    assert leaf_names("model:a@cpu+model:b+ngram") == ["model:a@cpu", "model:b", "ngram"]
    assert leaf_names("memory+stack:ngram+memory>model:a>model:b") == ["memory", "ngram", "model:a", "model:b"]


def test_candidates_may_be_merged_themselves() -> None:
    assert merged_names("auto:ctc+memory,ngram") == ["auto:ctc+memory,ngram"]
    assert leaf_names("auto:ctc+memory,stack:cacheback>model:a,ngram") == [
        "ctc",
        "memory",
        "cacheback",
        "model:a",
        "ngram",
    ]
