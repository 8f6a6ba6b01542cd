"""Cells of a stage: what is measured one after another, and the file in which each is as soon as it is measured."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Key = dict[str, Any]
"""What a cell is of: names and numbers."""
Values = dict[str, Any]
"""What was measured."""

ATTEMPTS = 2
"""How often a cell is begun: one with which the process has died as often is passed over."""


@dataclass(frozen=True)
class Plan:
    """What is measured, of all stages.

    Args:
        model: The base: folder or hub id.
        drafter: Name of its drafter, as the engine knows it.
        tiny: Whether everything is to be small, to see that it runs.
    """

    model: str
    drafter: str
    tiny: bool


Measure = Callable[[Key], Values]


@dataclass(frozen=True)
class Stage:
    """A part of the day.

    Args:
        name: What it is called, and its file.
        about: One sentence for people.
        cells: What it measures, cheap to ask.
        prepare: Loads what all cells need, and returns what measures one.
        row: A row of the stage's table, of a cell and its values.
        first: Whether a cell tells most, so that a kit measures it before other stages' rest.
    """

    name: str
    about: str
    cells: Callable[[Plan], list[Key]]
    prepare: Callable[[Plan], Measure]
    row: Callable[[Key, Values], dict[str, object]]
    first: Callable[[Key], bool] = lambda cell: True


class CellFile:
    """`NAME.jsonl`: a line a cell, written when it is measured. Who is killed while writing leaves a torn line.

    Args:
        folder: Where it is.
        name: Of the stage.
        identity: What must agree for a cell to count as measured.
    """

    def __init__(self, folder: Path, name: str, identity: dict[str, Any]) -> None:
        self.path, self._begun = folder / f"{name}.jsonl", folder / f"{name}.begun"
        self._identity = identity

    @property
    def size(self) -> int:
        """Bytes of the file; 0 where there is none yet."""
        return self.path.stat().st_size if self.path.exists() else 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """All whole lines, oldest first."""
        for line in self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else ():
            if line.endswith(b"\n"):
                yield json.loads(line)

    def left(self, cells: list[Key], run: str) -> list[Key]:
        """The cells without a result. One that has failed is tried again, but not in the same `run`."""
        done = [
            line["cell"]
            for line in self.lines()
            if line["identity"] == self._identity and ("values" in line or line["run"] == run)
        ]
        return [cell for cell in cells if cell not in done]

    def write(self, cell: Key, run: str, about: dict[str, Any], outcome: dict[str, Any]) -> None:
        """Write the line of a cell, with `values` or an `error` as `outcome`, to the disk."""
        line = {"cell": cell, **outcome, "run": run, "identity": self._identity, "environment": about}
        whole = self.path.read_bytes() if self.path.exists() else b""
        with self.path.open("r+b" if whole else "wb") as file:
            file.truncate(whole.rfind(b"\n") + 1)
            file.seek(0, os.SEEK_END)
            file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def begun(self, cell: Key) -> Iterator[bool]:
        """Note that a cell is under way, and say whether it is worth it: not if the process died with it each time."""
        try:
            before = json.loads(self._begun.read_bytes())
        except (FileNotFoundError, ValueError):  # a machine that went down may have left half of it
            before = {}
        times = before["times"] if before.get("cell") == cell else 0
        beside = self._begun.with_name(self._begun.name + ".tmp")
        beside.write_text(json.dumps({"cell": cell, "times": times + 1}), encoding="utf-8")
        beside.replace(self._begun)
        try:
            yield times < ATTEMPTS
        finally:
            self._begun.unlink()
