"""Write all tables again, from the committed JSON alone.

python -m benchmarks.report                     # everything in benchmarks/results
python -m benchmarks.report build/evaluation    # or an evaluation of your own
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import costs, never_slower, speed, trees
from benchmarks.endpoint import serving
from benchmarks.generation_jobs import scale
from benchmarks.gpu import page
from benchmarks.heads import HEADS_FILE, write_table
from drafter.evaluation.results import RESULTS_FILE, Results
from drafter.evaluation.tables import write_report

_RESULTS = Path(__file__).parent / "results"


def _write_evaluation(folder: Path) -> None:
    if (folder / trees.TABLE_FILE).exists():
        trees.write_table(folder)
    else:
        write_report(Results.load(folder), folder)


_REPORTS: dict[str, Callable[[Path], object]] = {
    RESULTS_FILE: _write_evaluation,
    HEADS_FILE: write_table,
    scale.SCALE_FILE: scale.write_table,
    serving.SERVING_FILE: serving.write_table,
    speed.SPEED_FILE: speed.write_table,
    never_slower.RECORD_FILE: never_slower.write_table,
    costs.COSTS_FILE: costs.write_report,
    page.PAGE_FILE: page.write_page,
}
"""Functions that write a folder's tables and plots, by a file that is there."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the tables and plots of each folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", help="folders of results (default: all in benchmarks/results)")
    args = parser.parse_args(arguments)
    for folder in args.folders or sorted(path for path in _RESULTS.iterdir() if path.is_dir()):
        reports = [report for name, report in _REPORTS.items() if (folder / name).is_file()]
        if not reports and args.folders:
            raise SystemExit(f"error: {folder} has none of {', '.join(_REPORTS)}: give a folder of results")
        for report in reports:
            report(folder)
        print(f"made again: {folder}" if reports else f"as it is: {folder}, which has but what its command wrote")


if __name__ == "__main__":
    main()
