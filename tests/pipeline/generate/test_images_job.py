"""A job whose rows have images, from a column of paths to the report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from drafter import SpeculativeLM
from jobs.report import main as report
from tests.pipeline.conftest import Run, untimed, write_jsonl
from tests.support.images import asked, picture


def test_rows_have_images(run: Run, seeing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(3):
        picture(n, 30 + 5 * n, 40).save(tmp_path / f"{n}.png")
    (tmp_path / "torn.png").write_bytes((tmp_path / "0.png").read_bytes()[:-50])
    images = [["0.png"], ["1.png"], [], ["0.png", "2.png"], ["torn.png"], ["2.png"]]
    rows = [{"prompt": "What?", "picture": some, "number": n} for n, some in enumerate(images)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    settings = ("--reading.images_column", "picture", "--writing.rows_per_file", 3)
    done = run(source, *settings, base=seeing)
    assert done.code == 0, done.stderr
    before = {row["number"]: untimed(row) for row in done.rows}
    (broken,) = done.errors
    assert broken["error_type"] == "BadPrompt"
    assert re.search(r"torn\.png': it is damaged", broken["message"])
    with SpeculativeLM.from_pretrained(seeing, "none") as lm:
        for row in done.rows:
            opened = [picture(int(name[0]), 30 + 5 * int(name[0]), 40) for name in row["picture"]]
            prompt = lm.encode(asked("What?", len(opened)), images=opened)
            (plain,) = lm.generate([prompt], max_new_tokens=12)
            assert row["token_ids"] == plain.token_ids
            assert len(row["prompt_images"]) == len(opened)
    assert len({tuple(row["token_ids"]) for row in done.rows}) > 2  # the images matter

    # Rows are known by their images: a changed one is generated again, and a moved one is not.
    picture(7, 30, 40).save(tmp_path / "1.png")
    (tmp_path / "moved.png").write_bytes((tmp_path / "0.png").read_bytes())
    rows[0]["picture"] = ["moved.png"]
    write_jsonl(source, rows)
    more = run(source, *settings, base=seeing)
    assert "6 rows: 5 kept, 1 changed\n" in more.stderr
    after = {row["number"]: untimed(row) for row in more.rows}
    assert after[1]["prompt_images"] != before[1]["prompt_images"]
    assert after[0] == before[0] | {"picture": ["moved.png"]}

    assert "nothing is left to do" in run(source, *settings, base=seeing).stdout

    assert report([str(more.folder)]) == 0
    page = (more.folder / "report.html").read_text()
    assert page.count('<img src="data:image/png;base64,') == 5
    assert "What?" in page
    assert "[image][image]" in re.sub(r"\s", "", page)

    # A job of which only a file is another one has something to do.
    picture(8, 40, 40).save(tmp_path / "2.png")
    assert "6 rows: 4 kept, 2 changed" in run(source, *settings, "--dry_run", base=seeing).stdout
    monkeypatch.setattr("pipeline.generate.job.connect", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(source, *settings, base=seeing).code == 130
