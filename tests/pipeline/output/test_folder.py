"""An output belongs to a job as soon as it has a result of it, and not before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import load_dataset

from pipeline.errors import InputError
from pipeline.io.files import locate
from pipeline.io.listing import list_input
from pipeline.output.folder import OutputFolder, check_output, save_run, take_output
from pipeline.training.folder import TrainingFolder
from tests.pipeline.conftest import Run, write_jsonl

OURS, THEIRS = {"seed": 1, "sampling": {"top_k": 5}}, {"seed": 1, "sampling": {"top_k": 7}}
FOLDERS: dict[str, Any] = {"generation": OutputFolder, "training": TrainingFolder}
LEFT = {"generation": ["_staged/parts.json", "errors/a.parquet"], "training": ["_staged/texts.json"]}
RESULTS = [
    ("generation", "data/00000-000000.parquet"),
    ("generation", "_unfinished.parquet"),
    ("training", "head/model.safetensors"),
    ("training", "_checkpoints/step-00000004/progress.json"),
]


def test_credentials_are_not_kept(tmp_path: Path) -> None:
    file = locate(str(tmp_path)) / "run.json"
    save_run(file, {"input": "s3://KEY:SECRET@bucket/in", "reading": {"format": "auto"}}, {}, state="running")
    for name in ("run.json", "run.json.copy"):
        kept = (tmp_path / name).read_text()
        assert '"input": "s3://***@bucket/in"' in kept
        assert "SECRET" not in kept


def make(kind: str, root: Path, *files: str) -> Any:
    """Make the output of a job that means `THEIRS`, and put files into it."""
    folder = FOLDERS[kind](locate(str(root)))
    folder.create()
    save_run(folder.run_file, {}, THEIRS, state="running")
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("{}")
    return folder


@pytest.mark.parametrize("kind", FOLDERS)
def test_an_output_without_results_is_taken_over(kind: str, tmp_path: Path) -> None:
    folder = make(kind, tmp_path, *LEFT[kind])
    check_output("out", folder, OURS)
    assert take_output("out", folder, OURS)
    # What the other job had prepared is of no use to this one.
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"run.json", "run.json.copy"}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_new_output_is_taken_by_who_holds_its_lease(kind: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](locate(str(tmp_path)))
    folder.create()
    (tmp_path / "_lease.json").write_text("{}")
    assert take_output("out", folder, OURS)
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(InputError, match=r"is not empty and has no run\.json"):
        take_output("out", folder, OURS)


@pytest.mark.parametrize("kind", FOLDERS)
def test_what_the_same_job_has_prepared_stays(kind: str, tmp_path: Path) -> None:
    folder = make(kind, tmp_path, *LEFT[kind])
    assert not take_output("out", folder, THEIRS)
    assert all((tmp_path / name).exists() for name in LEFT[kind])


@pytest.mark.parametrize(("kind", "result"), RESULTS)
def test_an_output_with_a_result_is_refused(kind: str, result: str, tmp_path: Path) -> None:
    folder = make(kind, tmp_path, result)
    for refuse in (check_output, take_output):
        with pytest.raises(InputError, match=r"output out belongs to another job \(sampling\.top_k was 7, is now 5\)"):
            refuse("out", folder, OURS)
    assert (tmp_path / result).exists()


@pytest.mark.parametrize(("kind", "result"), RESULTS)
def test_an_output_of_another_kind_of_job_is_refused(kind: str, result: str, tmp_path: Path) -> None:
    made, makes = (THEIRS, OURS | {"training": {"steps": 1}})[:: 1 if kind == "generation" else -1]
    save_run(make(kind, tmp_path, result).run_file, {}, made, state="finished")
    other = next(FOLDERS[one] for one in FOLDERS if one != kind)(locate(str(tmp_path)))
    for refuse in (check_output, take_output):
        with pytest.raises(InputError, match=r"output out is of a job that (trained a head|generated rows)"):
            refuse("out", other, makes)
    assert (tmp_path / result).exists()


@pytest.mark.slow
def test_a_generation_that_failed_on_its_settings_is_mended_in_place(run: Run, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"how many {n}", "id": 1} for n in range(3)])
    refused = run(source)
    assert "1 ids stand for several rows" in refused.error
    mended = run(source, "--reading.id_column", "")
    assert mended.code == 0, mended.stderr
    assert [row["request_id"] for row in mended.rows] == [f"in.jsonl:{line}" for line in (1, 2, 3)]
    # Now there are results.
    assert (
        "sampling.temperature was 0.0, is now 0.5"
        in run(source, "--reading.id_column", "", "--sampling.temperature", 0.5).error
    )


def test_the_card_is_of_this_edition_alone(tmp_path: Path) -> None:
    """The cache of `datasets` knows a folder with a card by its name and its card, not by its rows."""

    def loaded(output: OutputFolder) -> list[str]:
        return list(load_dataset(output.root.path, cache_dir=str(tmp_path / "cache"))["train"]["prompt"])

    for name in ("first", "second"):
        output = OutputFolder(locate(str(tmp_path / name / "out")))
        output.create()
        output.status_file.write_text("{}")
        (output.data / "0.parquet").write_parquet(pa.table({"prompt": [name]}))
        output.describe()
        assert loaded(output) == [name]
    (output.data / "1.parquet").write_parquet(pa.table({"prompt": ["third"]}))
    output.describe()
    assert loaded(output) == ["second", "third"]
    assert [file.name for file in list_input(output.root.path).files] == ["data/0.parquet", "data/1.parquet"]


@pytest.mark.parametrize("theirs", [b"# Mine\n", b"---\nlicense: mit\n---\n", b"caf\xe9"])
def test_a_readme_of_the_user_stays(tmp_path: Path, theirs: bytes) -> None:
    output = OutputFolder(locate(str(tmp_path)))
    (tmp_path / "README.md").write_bytes(theirs)
    output.describe()
    assert (tmp_path / "README.md").read_bytes() == theirs
