"""Notes of `datasets` and pandas about an input's columns are true of the output's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import ClassLabel, Dataset, Features, Value, load_dataset

from pipeline.io.column_notes import with_column_notes
from pipeline.io.files import locate
from pipeline.output.columns import column_values, columns_type
from pipeline.output.folder import OutputFolder
from pipeline.output.part_files import commit_part
from tests.support.parts import RUN, made_generation
from tests.support.staging import read_parts, staged_input


def answered(source: Path, folder: Path, **settings: Any) -> OutputFolder:
    """The output of a job on an input, whose answers are all alike."""
    staged = staged_input(source, folder / "staged", **settings)
    output = OutputFolder(locate(str(folder / "out")))
    output.create()
    for part, rows in zip(staged.parts, read_parts(staged), strict=True):
        values = [column_values(*made_generation(), RUN)] * rows.num_rows
        commit_part(output, part.name, rows.append_column("generated", pa.array(values, columns_type())))
    output.describe()
    return output


def labelled(path: Path, names: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    features = Features({name: ClassLabel(names=names) for name in ("label", "text")} | {"prompt": Value("string")})
    rows = {"label": [0, 1, 1, 0], "text": [1, 0, 1, 0], "prompt": ["a", "b", "c", "d"]}
    Dataset.from_dict(rows, features=features).to_parquet(str(path))


@pytest.mark.parametrize("samples", [1, 2])
def test_classes_have_their_names(tmp_path: Path, samples: int) -> None:
    labelled(tmp_path / "in" / "a.parquet", ["no", "yes"])
    labelled(tmp_path / "in" / "b.parquet", ["no", "yes"])
    output = answered(tmp_path / "in", tmp_path, samples=samples)
    found = load_dataset(output.root.path, cache_dir=str(tmp_path / "cache"))["train"]
    assert len(found) == 8 * samples
    assert found.features["label"] == found.features["input_text"] == ClassLabel(names=["no", "yes"])
    assert found.features["text"] == Value("string")


def test_notes_that_files_disagree_on_are_left_out(tmp_path: Path) -> None:
    labelled(tmp_path / "in" / "a.parquet", ["no", "yes"])
    labelled(tmp_path / "in" / "b.parquet", ["yes", "no"])
    output = answered(tmp_path / "in", tmp_path)
    features = load_dataset(output.root.path, cache_dir=str(tmp_path / "cache"))["train"].features
    assert (features["label"], features["prompt"]) == (Value("int64"), Value("string"))


def test_pandas_finds_its_index(tmp_path: Path) -> None:
    index = pandas.MultiIndex.from_tuples([("k", 1), ("l", 2)], names=["key", None])
    frame = pandas.DataFrame({"prompt": ["a", "b"], "n": pandas.array([1, None], dtype="Int64")}, index=index)
    frame.to_parquet(tmp_path / "in.parquet")
    found = pandas.read_parquet(answered(tmp_path / "in.parquet", tmp_path).data.path)
    assert found.index.equals(index)
    assert list(found.index.names) == ["key", None]
    assert found["n"].dtype == "Int64"
    assert found["text"].tolist() == ["text", "text"]


def test_a_range_is_no_index_of_the_output(tmp_path: Path) -> None:
    pandas.DataFrame({"prompt": ["a", "b"]}, index=pandas.RangeIndex(5, 7)).to_parquet(tmp_path / "in.parquet")
    found = pandas.read_parquet(answered(tmp_path / "in.parquet", tmp_path).data.path)
    assert found.index.tolist() == [0, 1]


@pytest.mark.parametrize(
    "metadata",
    [
        {b"huggingface": b"{"},
        {b"huggingface": b'{"info": [1]}', b"pandas": b'{"columns": 5}'},
        {b"huggingface": b'{"info": {"features": {"other": 1}}}', b"pandas": b'{"columns": [5, {"name": ["a"]}]}'},
    ],
)
def test_what_somebody_else_means_by_these_keys_is_nothing(metadata: dict[bytes, bytes]) -> None:
    table = pa.table({"a": [1]}).replace_schema_metadata(metadata)
    noted = with_column_notes(table)
    assert noted.equals(table)
    assert not noted.schema.field("a").metadata
