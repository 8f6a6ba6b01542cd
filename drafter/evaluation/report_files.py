"""An evaluation's report: its results as tables and plots."""

from __future__ import annotations

from pathlib import Path

from drafter.evaluation.plots import plots
from drafter.evaluation.results import Results
from drafter.evaluation.tables import page

TABLE_FILE = "table.md"


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write `table.md` and the plots to `folder`. Return their paths."""
    files = [folder / TABLE_FILE]
    files[0].write_text(page(results), encoding="utf-8")
    for name, figure in plots(results).items():
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=150)
    return files
