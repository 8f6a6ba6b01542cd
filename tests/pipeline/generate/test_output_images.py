"""The images of an output's rows are found in its staged input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from pyarrow import fs

from pipeline.generate.output_images import OutputImages


def staged(path: Path, rows: list[dict[str, Any]], images: list[list[str | None] | None]) -> str:
    columns = {
        "request_id": [f"{path.stem}:{n}" for n in range(len(rows))],
        "row": pa.array(rows),
        "images": pa.array(images, pa.list_(pa.string())),
    }
    pyarrow.parquet.write_table(pa.table(columns), path)
    return str(path)


def test_rows_have_addresses_and_bytes(tmp_path: Path) -> None:
    """Parts differ in the type of a column; a file that is damaged hides its own rows alone."""
    column = [{"path": None, "bytes": b"one"}, {"path": "b.png", "bytes": None}]
    files = {
        "a": staged(tmp_path / "a", [{"sheet": column}, {"sheet": []}], [[None, "/d/b.png"], None]),
        "b": staged(tmp_path / "b", [{"sheet": "c.png"}], [["/d/c.png"]]),
        "c": str(tmp_path / "c"),
        "d": staged(tmp_path / "d", [{"other": 1}], [["data:,"]]),
    }
    (tmp_path / "c").write_bytes(b"torn")
    images = OutputImages(fs.LocalFileSystem(), files, "sheet")
    found = images.sources(["a:0", "a:1", "b:0", "c:0", "d:0", "e:0"])
    assert found == {"a:0": [column[0], "/d/b.png"], "a:1": [], "b:0": ["/d/c.png"], "d:0": ["data:,"]}
    assert images.sources(["a:0", "b:0"], ["b", "e"]) == {"b:0": ["/d/c.png"]}


def test_requests_of_a_batch_have_their_images(tmp_path: Path) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    body = json.dumps({"messages": [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]})
    file = staged(tmp_path / "a", [{"custom_id": "x", "body": body}], [[None]])
    images = OutputImages(fs.LocalFileSystem(), {"a": file}, None)
    assert images.sources(["a:0"]) == {"a:0": ["data:image/png;base64,AA=="]}
