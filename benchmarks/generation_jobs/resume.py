"""How much time and memory a job of very many rows takes to go on when nearly all of them are done.

    python -m benchmarks.generation_jobs.resume --output benchmarks/results/resume.json

The job itself stages the input. The finished rows are made up, but written and committed as the job does it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet

from drafter.embedded import EMBEDDED_BASE
from drafter.evaluation.environment import environment
from drafter.evaluation.results import write_json
from drafter.requests import Generation, Request
from drafter.statistics import DecodeCounts
from drafter.target_model.loading import load_base
from pipeline.io.files import locate
from pipeline.io.parts import Part, StagedInput
from pipeline.output.columns import RunTraits, column_values, columns_type
from pipeline.output.folder import OutputFolder
from pipeline.output.part_files import commit_part

_LOOK_SECONDS = 0.1


class Job:
    """The job as a process of its own, watched until it ends.

    Args:
        source: Its input.
        output: Its output.
    """

    def __init__(self, source: Path, output: Path) -> None:
        arguments = ["--input", source, "--output", output, "--sampling.max_new_tokens", 8, "--drafter", "none"]
        command = [sys.executable, "-m", "jobs.generate", *map(str, arguments)]
        self.begun = time.monotonic()
        self._process = psutil.Popen(command, env={**os.environ, "RAY_ADDRESS": "local"}, stdout=subprocess.DEVNULL)
        self.driver_bytes = self.all_bytes = 0

    def wait_for(self, files: list[Path]) -> float:
        """Return the seconds from the start until one of `files` is there.

        Raises:
            SystemExit: The job ended without it.
        """
        while not any(file.exists() for file in files):
            if not self._look():
                raise SystemExit(f"error: the job ended with {self._process.returncode} before it was so far")
        return time.monotonic() - self.begun

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        while self._look():
            pass
        return int(self._process.wait())

    def stop(self) -> None:
        """End it as the loss of its machine would."""
        for process in [*self._process.children(recursive=True), self._process]:
            process.kill()
        self._process.wait()

    def _look(self) -> bool:
        """Note the memory in use, and return whether the job is still there."""
        time.sleep(_LOOK_SECONDS)
        try:
            driver = self._process.memory_info().rss
            children = [process.memory_info().rss for process in self._process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return self._process.poll() is None
        self.driver_bytes = max(self.driver_bytes, driver)
        self.all_bytes = max(self.all_bytes, driver + sum(children))
        return self._process.poll() is None


def commit_made_up(output: OutputFolder, part: Part, staged: StagedInput) -> None:
    """Commit a part as if its rows had been generated."""
    rows = pa.parquet.read_table(staged.file(part).path)
    generation, request = Generation("", [5] * 8, "made up", "length", 10, DecodeCounts()), Request([1] * 10)
    values = column_values(generation, request, RunTraits(request.sampling, rows_have_settings=False))
    commit_part(output, part.name, rows.append_column("generated", pa.array([values] * part.rows, columns_type())))


def measure(rows: int, done: float, folder: Path) -> dict[str, Any]:
    """Stage an input, finish a share of its parts, and submit the job again."""
    source, out = folder / "in.jsonl", folder / "out"
    with source.open("w", encoding="utf-8") as file:
        file.writelines(
            json.dumps({"prompt": f"Tom has {number} pens. How many pens?"}) + "\n" for number in range(rows)
        )
    first = Job(source, out)
    staging_seconds = first.wait_for([out / "_staged" / "parts.json"])
    first.stop()
    output = OutputFolder(locate(str(out)))
    staged = StagedInput.load(output.staged)
    assert staged is not None
    finished = staged.without(output.committed())[: round(done * len(staged.parts))]
    for part in finished:
        commit_made_up(output, part, staged)
    before = output.committed()
    missing = staged.without(before)
    second = Job(source, out)
    seconds = second.wait_for([out / "data" / f"{part.name}.parquet" for part in missing])
    code = second.wait()
    new = output.committed() - before
    return {
        "rows": rows,
        "done_before": sum(part.rows for part in staged.parts if part.name in before),
        "staging_seconds": staging_seconds,
        "seconds_to_first_new_rows": seconds,
        "rows_missing": sum(part.rows for part in missing),
        "rows_written": sum(part.rows for part in staged.parts if part.name in new),
        "exit_code": code,
        "driver_peak_bytes": second.driver_bytes,
        "all_processes_peak_bytes": second.all_bytes,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the record")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the input (default: %(default)s)")
    parser.add_argument("--done", type=float, nargs="+", default=[0.99], help="shares done before (default: 0.99)")
    args = parser.parse_args(arguments)
    results = []
    for done in args.done:
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(args.rows, done, Path(folder)))
        print(json.dumps(results[-1]), flush=True)
    given = sys.argv[1:] if arguments is None else list(arguments)
    base = load_base(EMBEDDED_BASE)
    record = {
        "environment": environment(base, shlex.join(["python", "-m", "benchmarks.generation_jobs.resume", *given])),
        "resumes": results,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.output, record)


if __name__ == "__main__":
    main()
