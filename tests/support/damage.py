"""Files that a machine which lost its power, or a copy that broke off, leaves behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

Damage = Callable[[Path], None]


def empty(file: Path) -> None:
    """The name is there, and no bytes."""
    file.write_bytes(b"")


def cut(file: Path) -> None:
    """Only the first half is there."""
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def files_below(folder: Path) -> set[str]:
    """Paths of all files in a folder, as the folder sees them."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def tear(folder: Path, files: str, first: Damage) -> None:
    """Damage several files, given with spaces between: one in the first way, the next in the other, and so on."""
    ways = itertools.cycle([first, cut if first is empty else empty])
    for name, damage in zip(files.split(), ways, strict=False):
        (file,) = folder.glob(name)
        damage(file)


def end_reader(path: Path) -> None:
    """Write a Parquet file that ends the process that reads it: its schema says that no prompt is null.

    The levels that its footer counts do not fit that, by which Arrow ends the process.
    """
    pa.parquet.write_table(pa.table({"prompt": ["text"]}), path)
    optional, required = (b"\x25" + repetition + b"\x18\x06prompt" for repetition in (b"\x02", b"\x00"))
    content = path.read_bytes()
    assert content.count(optional) == 1
    path.write_bytes(content.replace(optional, required))
