"""Make all tables and plots again, from the committed JSON alone.

python -m benchmarks.report                     # everything in benchmarks/results
python -m benchmarks.report build/evaluation    # or an evaluation of your own
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import scale, serving
from benchmarks.heads import HEADS_FILE, write_table
from drafter.evaluation.report import write_report
from drafter.evaluation.results import RESULTS_FILE, Results

_RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write what the folders' JSON allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", help="folders of results (default: all in benchmarks/results)")
    args = parser.parse_args(arguments)
    for folder in args.folders or sorted(path for path in _RESULTS.iterdir() if path.is_dir()):
        if (folder / RESULTS_FILE).is_file():
            write_report(Results.load(folder), folder)
        elif (folder / HEADS_FILE).is_file():
            write_table(folder)
        elif (folder / scale.SCALE_FILE).is_file():
            scale.write_table(folder)
        elif (folder / serving.SERVING_FILE).is_file():
            serving.write_table(folder)
        else:
            known = ", ".join((RESULTS_FILE, HEADS_FILE, scale.SCALE_FILE, serving.SERVING_FILE))
            raise SystemExit(f"error: {folder} has none of {known}: give a folder of results")
        print(f"made again: {folder}")


if __name__ == "__main__":
    main()
