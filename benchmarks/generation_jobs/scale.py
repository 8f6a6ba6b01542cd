"""What a generation job costs beside its engines: seconds and bytes for each part, as the number of parts grows.

    python -m benchmarks.generation_jobs.scale --output benchmarks/results/scale
    python -m benchmarks.generation_jobs.scale --fake-engines 800 --output benchmarks/results/fleet

Everything is measured with the job's own code, on local disk and in one driver. A second table multiplies it up to a
job of many rows on many GPUs, to show on paper what would break first. With `--fake-engines`, a job of so many engines
that sleep runs in place of these; see `fleet`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import ray
import torch

from benchmarks.generation_jobs.fleet import measure_fleet
from drafter.embedded import EMBEDDED_BASE
from drafter.evaluation.environment import environment, surroundings
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.requests import Generation, Request, SamplingParams
from drafter.statistics import DecodeCounts
from drafter.target_model.loading import load_base
from pipeline.cluster.ray_cluster import HELPER_CPUS, connect
from pipeline.command_line import run_job
from pipeline.generate.config import parse_config
from pipeline.generate.job import generate
from pipeline.generate.staging import StagingPlan, stage_files
from pipeline.io.files import locate
from pipeline.io.listing import find_prompts, list_input
from pipeline.io.parts import PROBLEM_TYPE, Part, StagedInput, StagedParts
from pipeline.output.columns import RunTraits, column_values, columns_type
from pipeline.output.folder import OutputFolder
from pipeline.output.part_files import commit_part
from pipeline.settings import ReadingConfig

SCALE_FILE = "scale.json"
TABLE_FILE = "scale.md"
SUMMARY_FILE = "summary.json"
ROWS_PER_PART = 128  # as a job of few rows has
_PROMPT = "Tom has 3 boxes of 12 pens and gives 5 pens to each of his 4 friends. How many pens are left? " * 4
_PROMPT_TOKENS, _OUTPUT_TOKENS = 100, 256
_JOB_ROWS_PER_PART = 2
_MIB = 1 << 20


@dataclass(frozen=True)
class Costs:
    """Measured costs of one part. Seconds are processor seconds; waiting for disks and networks comes on top.

    Args:
        stage_seconds: To stage it.
        staged_bytes: Its size on disk when staged.
        list_bytes: Size of its entry in the list of parts, on disk.
        list_memory_bytes: Size of its entry in the list of parts, in memory.
        list_seconds: To read its entry.
        look_seconds: To find out whether it is committed, on local disk.
        task_bytes: Size of its read task.
        begin_seconds: Of the driver, before the first part is read.
        requests_bytes: Size of its requests in the object store.
        results_bytes: Size of its results in the object store.
        commit_seconds: To write and commit it.
        committed_bytes: Its size on disk when committed.
        driver_seconds: Of the driver, while the part goes through the job.
    """

    stage_seconds: float
    staged_bytes: float
    list_bytes: float
    list_memory_bytes: float
    list_seconds: float
    look_seconds: float
    task_bytes: float
    begin_seconds: float
    requests_bytes: float
    results_bytes: float
    commit_seconds: float
    committed_bytes: float
    driver_seconds: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the record and its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for scale.json and scale.md")
    parser.add_argument("--staged-parts", type=int, default=1_000, help="parts to stage (default: %(default)s)")
    parser.add_argument("--listed-parts", type=int, default=100_000, help="parts to list (default: %(default)s)")
    parser.add_argument("--begun-parts", type=int, default=20_000, help="parts of a dataset (default: %(default)s)")
    parser.add_argument("--job-parts", type=int, default=500, help="parts to run as a job (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the job on paper")
    parser.add_argument("--gpus", type=int, default=100, help="GPUs of the job on paper")
    parser.add_argument("--rate", type=float, default=5.0, help="rows/s of a GPU of the job on paper")
    parser.add_argument("--fake-engines", type=int, help="run so many sleeping engines, and measure nothing else")
    parser.add_argument("--fake-rate", type=float, default=0.2, help="rows/s of each of them (default: %(default)s)")
    args = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", "benchmarks.generation_jobs.scale", *given])
    args.output.mkdir(parents=True, exist_ok=True)
    if args.fake_engines is not None:
        load = {"load_average_before": round(os.getloadavg()[0], 2)}
        fleet = measure_fleet(args.fake_engines, args.fake_rate)
        write_json(args.output / SUMMARY_FILE, surroundings(torch.device("cpu"), command) | load | fleet)
        print(json.dumps(fleet, indent=1))
        return
    with tempfile.TemporaryDirectory() as name:
        costs = measure(Path(name), args)
    record = {
        "environment": environment(load_base(EMBEDDED_BASE), command),
        "rows_per_part": ROWS_PER_PART,
        "parts": {
            "staged": args.staged_parts,
            "listed": args.listed_parts,
            "begun": args.begun_parts,
            "job": args.job_parts,
        },
        "costs": asdict(costs),
        "on_paper": on_paper(costs, args.rows, args.gpus, args.rate),
    }
    write_json(args.output / SCALE_FILE, record)
    write_table(args.output)


def measure(folder: Path, args: argparse.Namespace) -> Costs:
    """Measure everything, in `folder`."""
    measured = staging_costs(folder, args.staged_parts)
    measured |= listing_costs(folder, args.listed_parts)
    measured |= writing_costs(folder, args.staged_parts // 4)
    measured |= driver_costs(folder, args.job_parts)
    connect()
    measured |= dataset_costs(folder, args.begun_parts)
    return Costs(**measured)


def staging_costs(folder: Path, parts: int) -> dict[str, float]:
    """Measure the staging of this many parts in one task."""
    source = folder / "input.jsonl"
    with source.open("w") as file:
        file.writelines(json.dumps({"prompt": f"{_PROMPT} {n}"}) + "\n" for n in range(parts * ROWS_PER_PART))
    listing, reading = list_input(str(source)), ReadingConfig()
    staged = locate(str(folder / "staged"))
    staged.filesystem.create_dir(staged.path)
    plan = StagingPlan(staged, reading, find_prompts(listing, reading), ROWS_PER_PART)
    seconds = timed(lambda: stage_files(listing, "0", plan))
    return {
        "stage_seconds": seconds / parts,
        "staged_bytes": sum(file.stat().st_size for file in Path(staged.path).iterdir()) / parts,
    }


def listing_costs(folder: Path, parts: int) -> dict[str, float]:
    """Measure the list of the parts, and finding out which of them are committed."""
    staged = folder / "listed"
    staged.mkdir()
    prompts_type = pa.struct([("prompt", pa.string())])
    listed = StagedInput(locate(str(staged)), some_parts(parts), prompts_type)
    listed.save()
    tracemalloc.start()
    seconds = timed(lambda: StagedInput.load(listed.folder))
    loaded = StagedInput.load(listed.folder)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert loaded == listed
    output = OutputFolder(locate(str(folder / "committed")))
    Path(output.data.path).mkdir(parents=True)
    for part in listed.parts[: parts // 2]:
        (Path(output.data.path) / f"{part.name}.parquet").touch()
    return {
        "list_bytes": (staged / "parts.json").stat().st_size / parts,
        "list_memory_bytes": memory / parts,
        "list_seconds": seconds / parts,
        "look_seconds": timed(lambda: listed.without(output.committed())) / parts,
    }


def writing_costs(folder: Path, parts: int) -> dict[str, float]:
    """Measure the commit of this many parts of typical results, and their size in the object store."""
    output = OutputFolder(locate(str(folder / "written")))
    output.create()
    requests, results = typical_part()

    def commit_all() -> None:
        for part in some_parts(parts):
            commit_part(output, part.name, results)

    seconds = timed(commit_all)
    return {
        "requests_bytes": requests.nbytes,
        "results_bytes": results.nbytes,
        "commit_seconds": seconds / parts,
        "committed_bytes": sum(file.stat().st_size for file in Path(output.data.path).iterdir()) / parts,
    }


def driver_costs(folder: Path, parts: int) -> dict[str, float]:
    """Measure the driver's processor time in a job whose engine has next to nothing to do."""
    source = folder / "short.jsonl"
    with source.open("w") as file:
        file.writelines(json.dumps({"prompt": f"{n}"}) + "\n" for n in range((parts + 1) * _JOB_ROWS_PER_PART))
    settings = ["--drafter", "none", "--sampling.max_new_tokens", "1", "--engine.max_num_seqs", "8"]
    settings += ["--writing.rows_per_file", str(_JOB_ROWS_PER_PART)]

    def run(name: str, rows: int) -> float:
        before = processor_seconds()
        command = ["--input", str(source), "--output", str(folder / name), "--reading.limit", str(rows), *settings]
        if run_job(lambda given: generate(parse_config(given)), command) != 0:
            raise SystemExit("error: the job did not run")
        return processor_seconds() - before

    run("first", _JOB_ROWS_PER_PART)  # imports, and Ray's start
    one = run("one", _JOB_ROWS_PER_PART)
    many = run("many", (parts + 1) * _JOB_ROWS_PER_PART)
    return {"driver_seconds": (many - one) / parts}


def dataset_costs(folder: Path, parts: int) -> dict[str, float]:
    """Measure what Ray Data does with all parts before it reads the first."""
    staged = folder / "dataset"
    staged.mkdir()
    first = pyarrow.parquet.read_table(next(iter(sorted((folder / "staged").iterdir()))))
    pyarrow.parquet.write_table(first, staged / f"{some_parts(1)[0].name}.parquet")
    listed = StagedInput(locate(str(staged)), some_parts(parts), first.schema.field("row").type)
    source = StagedParts(listed, list(listed.parts))
    size = len(ray.cloudpickle.dumps(source.get_read_tasks(1)[0]))

    def begin() -> None:
        dataset = ray.data.read_datasource(source, override_num_blocks=parts, num_cpus=HELPER_CPUS)
        next(iter(dataset.iter_internal_ref_bundles()))

    return {"task_bytes": size, "begin_seconds": timed(begin) / parts}


def on_paper(costs: Costs, rows: int, gpus: int, rate: float) -> dict[str, Any]:
    """Multiply the costs up to a large job with default settings.

    Args:
        costs: Costs of one part.
        rows: Rows of the job.
        gpus: GPUs, each with one engine.
        rate: Rows a second of an engine.
    """
    parts = -(-rows // ROWS_PER_PART)
    parts_a_second = gpus * rate / ROWS_PER_PART
    in_flight = gpus * 2 * 3  # calls of an engine and as many again, so that the pool may grow
    return {
        "rows": rows,
        "gpus": gpus,
        "rows_a_second_and_gpu": rate,
        "hours": rows / (gpus * rate) / 3600,
        "parts": parts,
        "parts_a_second": parts_a_second,
        "staging_core_hours": parts * costs.stage_seconds / 3600,
        "staged_gib": parts * costs.staged_bytes / (1 << 30),
        "list_mib": parts * costs.list_bytes / _MIB,
        "list_memory_mib": parts * costs.list_memory_bytes / _MIB,
        "resubmission_seconds": parts * (costs.list_seconds + costs.look_seconds),
        "begin_seconds": parts * costs.begin_seconds,
        "tasks_mib": parts * costs.task_bytes / _MIB,
        "object_store_mib": in_flight * (costs.requests_bytes + costs.results_bytes) / _MIB,
        "writers": parts_a_second * costs.commit_seconds,
        "committed_gib": parts * costs.committed_bytes / (1 << 30),
        "driver_share_of_a_core": parts_a_second * costs.driver_seconds,
    }


def write_table(folder: Path) -> None:
    """Write the tables of the record in `folder`, and print them."""
    text = tables(json.loads((folder / SCALE_FILE).read_text(encoding="utf-8")))
    (folder / TABLE_FILE).write_text(text, encoding="utf-8")
    print(text)


def tables(record: dict[str, Any]) -> str:
    """Return the record as tables."""
    measured = [{"for each part": _words(name), "measured": f"{value:.3g}"} for name, value in record["costs"].items()]
    paper = [{"the whole job": _words(name), "on paper": f"{value:,.5g}"} for name, value in record["on_paper"].items()]
    return f"{markdown_table(measured)}\n\n{markdown_table(paper)}\n"


def _words(name: str) -> str:
    return name.replace("_", " ").replace("mib", "MiB").replace("gib", "GiB").replace("gpu", "GPU")


def typical_part() -> tuple[pa.Table, pa.Table]:
    """Rows of a part as the engines take them and as they leave them."""
    shared = {
        "request_id": [f"questions-0000.jsonl:{n}" for n in range(ROWS_PER_PART)],
        "row": [{"prompt": f"{_PROMPT} {n}"} for n in range(ROWS_PER_PART)],
        "problem": pa.nulls(ROWS_PER_PART, PROBLEM_TYPE),
    }
    prompt, output = list(range(_PROMPT_TOKENS)), list(range(1000, 1000 + _OUTPUT_TOKENS))
    request = Request(prompt, SamplingParams(max_new_tokens=_OUTPUT_TOKENS, seed=1))
    traits = RunTraits(request.sampling, rows_have_settings=False)
    generation = Generation("", output, "word " * _OUTPUT_TOKENS, "length", len(prompt), DecodeCounts())
    generated = pa.array([column_values(generation, request, traits)] * ROWS_PER_PART, columns_type())
    sampling = [json.dumps(asdict(request.sampling))] * ROWS_PER_PART
    prompt_ids = pa.array([prompt] * ROWS_PER_PART, pa.list_(pa.int32()))
    requests = pa.table({**shared, "prompt_ids": prompt_ids, "sampling": sampling})
    return requests, pa.table({**shared, "generated": generated})


def some_parts(count: int) -> tuple[Part, ...]:
    """Return parts as staging names them."""
    return tuple(Part(f"00000-{n:06d}", ROWS_PER_PART) for n in range(count))


def timed(work: Callable[[], object]) -> float:
    """Return the processor seconds that `work` takes in this process; other processes do not count."""
    begun = processor_seconds()
    work()
    return processor_seconds() - begun


def processor_seconds() -> float:
    """Return the processor seconds of this process until now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
