"""What the user's functions are called with."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.generate.user_functions import PartCalls
from pipeline.io.files import locate
from pipeline.output.folder import OutputFolder

called: list[str] = []


def tell(path: str) -> None:
    called.append(path)


@pytest.mark.parametrize("output", ["~/out", "~/out?1"])
def test_on_part_gets_a_path_that_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = OutputFolder(locate(output))
    folder.create()
    part = folder.data / "00000-000000.parquet"
    part.write_text("rows")
    called.clear()
    PartCalls(f"{__name__}:tell", output, folder).end()
    assert called == [part.path]
    assert Path(called[0]).read_text() == "rows"
