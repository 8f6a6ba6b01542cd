"""Memory and seconds of a driver whose input of many rows has changed, before it generates anything.

    python -m benchmarks.generation_jobs.changed_input --rows 2000000 --output benchmarks/results/changed-input

Every row has a made-up result. Then rows at the beginning are removed and as many are added at the end, so that each
part has other rows than before. The new input is staged, told apart and brought together with the old one's results by
the job's own code, in a process of its own, whose peak is measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from drafter.evaluation.environment import surroundings
from drafter.evaluation.results import write_json
from drafter.requests import Generation, Request, SamplingParams
from drafter.statistics import DecodeCounts
from pipeline.generate.checks import Job, input_source, job_meaning
from pipeline.generate.config import parse_config
from pipeline.generate.resuming import grow
from pipeline.generate.staging import StagingPlan, stage_files, told_apart
from pipeline.io.column_types import unify
from pipeline.io.files import locate
from pipeline.io.listing import find_prompts, list_input
from pipeline.io.parts import StagedInput, with_row_type
from pipeline.output.columns import RunTraits, column_values, columns_type, wanted_columns
from pipeline.output.folder import OutputFolder
from pipeline.output.part_files import commit_part

SUMMARY_FILE = "summary.json"
_TRAITS = RunTraits(SamplingParams(), rows_have_settings=False)
_MOVED = 1_000  # rows that go and come


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of the input (default: %(default)s)")
    parser.add_argument("--rows-per-file", type=int, default=2_048, help="rows of a part (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {SUMMARY_FILE}")
    args = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = shlex.join(["python", "-m", "benchmarks.generation_jobs.changed_input", *given])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        apart(partial(finish, folder, args.rows, args.rows_per_file))
        apart(partial(prepare, folder, args.rows, args.rows_per_file))
        measured = apart(partial(change, folder, args.rows_per_file))
    sizes = {"rows": args.rows, "rows_per_file": args.rows_per_file, "load_average": round(os.getloadavg()[0], 2)}
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / SUMMARY_FILE, surroundings(torch.device("cpu"), command) | sizes | measured)
    print(json.dumps(measured))


def apart(work: Any) -> Any:
    """Run `work` in a process of its own, and return its result."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work)


def staged(folder: Path, rows_per_file: int, revision: int) -> tuple[Job, StagedInput, StagingPlan]:
    """Stage the input in this process, all but for telling equal rows apart."""
    source = folder / "in.jsonl"
    config, listing = parse_config(["--input", str(source), "--output", str(folder / "out")]), list_input(str(source))
    prompts, output = find_prompts(listing, config.reading), OutputFolder(locate(str(folder / "out")))
    output.create()
    output.staged.make_folder()
    meaning = job_meaning(config, prompts, "base", {})
    job = Job(config, listing, prompts, output, meaning, {}, input_source(config, listing))
    plan = StagingPlan(output.staged, config.reading, prompts, rows_per_file, job.source, revision)
    parts, seen = stage_files(listing, f"{revision:03d}-00000" if revision else "00000", plan)
    row_type = unify(seen, json_objects=True)
    found = StagedInput(plan.folder, tuple(parts), row_type, rows_per_file, source=plan.source, revision=revision)
    return job, found, plan


def write_input(folder: Path, first: int, rows: int) -> None:
    with (folder / "in.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(first, first + rows))


def finish(folder: Path, rows: int, rows_per_file: int) -> None:
    """Stage the input, and commit a made-up result for each row."""
    write_input(folder, 0, rows)
    job, first, plan = staged(folder, rows_per_file, 0)
    told_apart(first, plan).save()
    generation = Generation("", [7, 8], "made up", "stop", 2, DecodeCounts(2, 2))
    values = column_values(generation, Request([1, 2], SamplingParams(seed=1)), _TRAITS, wanted_columns(_TRAITS))
    for part in first.parts:
        table = with_row_type(first.file(part).read_parquet(["request_id", "row", "problem"]), first.row_type)
        generated = pa.array([values], columns_type(wanted_columns(_TRAITS))).take(pa.array([0] * part.rows))
        commit_part(job.output, part.name, table.append_column("generated", generated))


def prepare(folder: Path, rows: int, rows_per_file: int) -> None:
    """Change the input, and stage it: what tasks on the cluster do."""
    write_input(folder, _MOVED, rows)
    _, now, _ = staged(folder, rows_per_file, 1)
    now_list = StagedInput(
        locate(str(folder)), now.parts, now.row_type, now.rows_per_part, source=now.source, revision=1
    )
    now_list.save()


def change(folder: Path, rows_per_file: int) -> dict[str, Any]:
    """Bring the results to the new input, and return what that took."""
    source = folder / "in.jsonl"
    config, listing = parse_config(["--input", str(source), "--output", str(folder / "out")]), list_input(str(source))
    prompts, output = find_prompts(listing, config.reading), OutputFolder(locate(str(folder / "out")))
    meaning = job_meaning(config, prompts, "base", {})
    job = Job(config, listing, prompts, output, meaning, {}, input_source(config, listing))
    before, now = StagedInput.load(output.staged), StagedInput.load(locate(str(folder)))
    assert before is not None
    assert now is not None
    now = StagedInput(output.staged, now.parts, now.row_type, now.rows_per_part, source=now.source, revision=1)
    plan = StagingPlan(output.staged, config.reading, prompts, rows_per_file, job.source, 1)
    begun, processor, memory = time.monotonic(), time.process_time(), peak_mib()
    grow(job, before, told_apart(now, plan), wanted_columns(_TRAITS))
    return {
        "peak_mib_before": round(memory),
        "peak_mib": round(peak_mib()),
        "seconds": round(time.monotonic() - begun, 1),
        "processor_seconds": round(time.process_time() - processor, 1),
    }


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
