"""Hugging Face datasets as input: saved folders, repositories on disk, and the hub with its download stubbed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry

from pipeline.errors import InputError
from pipeline.io.apart import Apart
from pipeline.io.listing import list_input
from tests.support.staging import staged, write_input

datasets.disable_progress_bars()


def rows(*prompts: str) -> list[dict[str, Any]]:
    return [{"prompt": prompt} for prompt in prompts]


def names(source: Any, **settings: Any) -> list[str]:
    return [file.name for file in list_input(str(source), **settings).files]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `one`, of a dataset in two files, and `splits`, of several."""
    folder = tmp_path_factory.mktemp("saved")
    one = datasets.Dataset.from_list(rows("a", "b", "c"))
    one.save_to_disk(folder / "one", num_shards=2)
    datasets.DatasetDict(
        {"train": one.filter(lambda row: row["prompt"] > "a"), "test": datasets.Dataset.from_list(rows("t"))}
    ).save_to_disk(folder / "splits")
    return folder


def test_a_saved_dataset(saved: Path, tmp_path: Path) -> None:
    (saved / "one" / "cache-0123456789abcdef.arrow").write_bytes(b"of some map, and no part of the dataset")
    ids, read, problems = staged(saved / "one", tmp_path / "staged")
    assert ids == [[f"data-0000{file}-of-00002.arrow:{n}" for file, n in ((0, 1), (0, 2), (1, 1))]]
    assert read == rows("a", "b", "c")
    assert not problems


def test_splits_of_a_saved_dataset(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has several splits \(train, test\): set reading.split"):
        list_input(str(saved / "splits"))
    with pytest.raises(InputError, match=r"has no split 'dev' \(there are: train, test\)"):
        list_input(str(saved / "splits"), split="dev")
    assert staged(saved / "splits", tmp_path / "staged", split="train")[1] == rows("b", "c")
    assert staged(saved / "splits" / "test", tmp_path / "other")[1] == rows("t")


@pytest.mark.parametrize(
    ("folder", "lost", "message"),
    [
        (
            "one",
            "data-00001-of-00002.arrow",
            "it has no data-00001-of-00002.arrow, and 1 of the 2 files that state.json lists are missing",
        ),
        (
            "splits",
            "train/data-00000-of-00001.arrow",
            "it has no train/data-00000-of-00001.arrow, and 1 of the 1 files",
        ),
        ("splits", "train/state.json", "it has no train/state.json"),
    ],
)
def test_a_saved_dataset_without_one_of_its_files(
    saved: Path, tmp_path: Path, folder: str, lost: str, message: str
) -> None:
    copy = shutil.copytree(saved / folder, tmp_path / folder)
    (copy / lost).unlink()
    with pytest.raises(InputError, match=f"is incomplete: {message}"):
        list_input(str(copy), split="train" if folder == "splits" else None)


def repository(folder: Path, *files: str, readme: str | None = None) -> Path:
    """Parquet files whose only prompt is their own name."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pa.parquet.write_table(pa.Table.from_pylist(rows(name)), folder / name)
    if readme is not None:
        (folder / "README.md").write_text(readme)
    return folder


SHARDS = [
    "data/train-00000-of-00002.parquet",
    "data/train-00001-of-00002.parquet",
    "data/test-00000-of-00001.parquet",
]


def test_a_repository_by_the_names_of_its_files(tmp_path: Path) -> None:
    source = repository(tmp_path / "repository", *SHARDS, readme="---\nlicense: mit\n---\n# Questions\n")
    assert names(source, split="train") == SHARDS[:2]
    assert names(source, split="test") == SHARDS[2:]
    with pytest.raises(InputError, match=r"has several splits \(train, test\): set reading\.split"):
        list_input(str(source))
    with pytest.raises(InputError, match="does not declare subsets"):
        list_input(str(source), subset="main")
    with pytest.raises(InputError, match=r"leave out reading\.split"):
        list_input(f"{source}/data/*.parquet", split="train")
    assert names(f"{source}/data/*.parquet") == sorted(shard.removeprefix("data/") for shard in SHARDS)


def test_splits_are_those_of_the_library(tmp_path: Path) -> None:
    """What the library resolves for the same folder, with its own finder of files."""
    files = ["questions/train/a.jsonl", "questions/train/b.jsonl", "questions/dev/eval-notes.jsonl", "my_test.jsonl"]
    for name in files:
        write_input(tmp_path / "in" / name, rows(name))
    builder = datasets.load_dataset_builder(str(tmp_path / "in"), cache_dir=str(tmp_path / "cache"))
    for split, paths in builder.config.data_files.items():
        theirs = [str(Path(path).relative_to(tmp_path / "in")) for path in paths]
        assert names(tmp_path / "in", split=str(split)) == sorted(theirs)
    with pytest.raises(InputError, match="several splits"):
        list_input(str(tmp_path / "in"))


def test_files_beside_the_only_split_are_asked_about(tmp_path: Path) -> None:
    source = repository(tmp_path / "repository", "train.parquet", "other.parquet")
    with pytest.raises(InputError, match=r"has the split train by .*, and others beside it, such as other"):
        list_input(str(source))
    assert names(source, split="train") == ["train.parquet"]
    assert names(f"{source}/*") == ["other.parquet", "train.parquet"]


def test_a_folder_whose_names_tell_no_split_needs_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.io.splits.Apart", None)
    source = repository(tmp_path / "repository", "a.parquet", "deep/b.parquet", readme="---\nlicense: mit\n---\n")
    assert names(source) == ["a.parquet", "deep/b.parquet"]


def test_a_folder_without_one_of_its_shards(tmp_path: Path) -> None:
    files = ["data/part-00000-of-00003.parquet", "data/part-00002-of-00003.parquet"]
    source = repository(tmp_path / "repository", *files)
    for place in (source, source / "data"):
        with pytest.raises(InputError, match=r"has no (data/)?part-00001-of-00003, and 1 of 3 such files are missing"):
            list_input(str(place))
    # Who gives a pattern means the files that are there.
    assert names(f"{source}/data/part-*.parquet") == [file.removeprefix("data/") for file in files]


CONFIGS = """\
---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*.parquet
  - split: test
    path: [main/t1.parquet, "main/t2.parquet"]
- config_name: socratic
  data_files: socratic/**
- config_name: whole
  data_dir: main
---
"""


def test_a_repository_that_declares_subsets_and_splits(tmp_path: Path) -> None:
    files = ["main/train-1.parquet", "main/t1.parquet", "main/t2.parquet", "socratic/x.parquet", "stray.parquet"]
    source = repository(tmp_path / "repository", *files, readme=CONFIGS)
    assert names(source, subset="main", split="train") == ["main/train-1.parquet"]
    assert names(source, subset="main", split="test") == ["main/t1.parquet", "main/t2.parquet"]
    assert names(source, subset="socratic") == ["socratic/x.parquet"]
    assert names(source, subset="whole", split="train") == ["main/train-1.parquet"]
    with pytest.raises(InputError, match=r"several subsets \(main, socratic, whole\): set reading.subset"):
        list_input(str(source))
    with pytest.raises(InputError, match="several splits"):
        list_input(str(source), subset="main")
    with pytest.raises(InputError, match="no subset 'other'"):
        list_input(str(source), subset="other")
    (source / "main" / "t2.parquet").unlink()
    with pytest.raises(InputError, match=r"has no main/t2\.parquet, which its README\.md lists"):
        list_input(str(source), subset="main", split="test")


def test_the_subset_that_says_it_is_the_default(tmp_path: Path) -> None:
    readme = "---\nconfigs:\n- config_name: a\n  data_dir: p\n- config_name: b\n  data_dir: q\n  default: true\n---\n"
    source = repository(tmp_path / "repository", "p/x.parquet", "q/x.parquet", readme=readme)
    assert names(source) == ["q/x.parquet"]
    assert names(source, subset="a") == ["p/x.parquet"]


def test_splits_that_are_declared_elsewhere_are_not_missed(tmp_path: Path) -> None:
    source = repository(tmp_path / "repository", "a.parquet")
    (source / ".huggingface.yaml").write_text("configs: []")
    with pytest.raises(InputError, match=r"declares its splits in \.huggingface\.yaml, which is not read"):
        list_input(str(source))
    assert names(f"{source}/*.parquet") == ["a.parquet"]


@pytest.mark.parametrize("readme", ["# No front matter", "---\nlicense: mit\n---\n", "---\nx\n---\n"])
def test_other_readmes_say_nothing(tmp_path: Path, readme: str) -> None:
    source = repository(tmp_path / "repository", "a.parquet", readme=readme)
    assert names(source) == ["a.parquet"]


DEEP = "[" * 20_000
LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 12))


@pytest.mark.parametrize(
    ("configs", "reason"),
    [
        ("configs: 5", "whose front matter `datasets` refuses"),
        ("configs: [", "whose front matter `datasets` refuses"),
        (f"configs: {DEEP}", "whose front matter `datasets` refuses"),
        (f"{LAUGHS}configs: *a11", "it takes more than"),
        (f"configs:\n- config_name: x\n  data_files: '{'**/*' * 12}z'", "cannot be listed|its README.md lists"),
        (f"configs:\n- config_name: x\n  data_files: '{'**/*a*/' * 12}z'", "its README.md lists|it takes more than"),
        ("configs:\n- config_name: x\n  data_files: https://example.com/x.parquet", "outside of it"),
        ("configs:\n- config_name: x\n  data_files: /etc/passwd", "outside of it"),
        ("configs:\n- config_name: x\n  data_files: ../b.parquet", r"has no \.\./b\.parquet, which its README"),
    ],
    ids=["no list", "no YAML", "deep", "laughs", "stars", "more stars", "URL", "absolute", "above"],
)
@pytest.mark.slow
def test_hostile_readmes_are_refused(
    configs: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.io.splits.Apart", Apart)
    monkeypatch.setattr("pipeline.io.splits._SECONDS", 3 if configs.startswith("a0") else 60)
    source = repository(tmp_path / "repository", "a" * 30 + ".parquet", "b.parquet", readme=f"---\n{configs}\n---\n")
    with pytest.raises(InputError, match=reason):
        list_input(str(source))


@pytest.mark.parametrize("content", ["", "[]", '{"splits": 5}', "{", "[" * 20_000])
def test_a_damaged_dataset(tmp_path: Path, content: str) -> None:
    source = repository(tmp_path / "repository", "a.parquet")
    (source / "dataset_dict.json").write_text(content)
    with pytest.raises(InputError, match="cannot be listed"):
        list_input(str(source))


def test_a_dataset_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(
        tmp_path / "hub" / "datasets" / "owner" / "name",
        "data/train-00000-of-00001.parquet",
        "data/test-00000-of-00001.parquet",
    )

    class Stub(DirFileSystem):
        """The hub's files, on disk."""

        protocol = "hf"

        def __init__(self) -> None:
            super().__init__(path=str(tmp_path / "hub"), fs=LocalFileSystem())

    monkeypatch.setitem(_registry, "hf", Stub)
    uri = "hf://datasets/owner/name"
    with pytest.raises(InputError, match=r"several splits \(train, test\): set reading.split"):
        list_input(uri)
    ids, read, _ = staged(uri, tmp_path / "staged", split="train")
    assert ids == [["data/train-00000-of-00001.parquet:1"]]
    assert read == rows("data/train-00000-of-00001.parquet")
    assert names(f"{uri}/data/test-*.parquet") == ["test-00000-of-00001.parquet"]


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable(Exception):  # noqa: N818 - as the hub's client has them: of no kind that is known here
        pass

    def refuse(*_: Any, **__: Any) -> None:
        raise Unreachable("no route to host")

    monkeypatch.setattr(huggingface_hub.HfFileSystem, "info", refuse)
    with pytest.raises(InputError, match="hf://datasets/owner/name cannot be listed: no route to host"):
        list_input("hf://datasets/owner/name")
