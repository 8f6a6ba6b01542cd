"""The memory of a job's driver and head while it goes through very many rows, and how quickly it goes.

    python -m benchmarks.generation_jobs.many_rows --rows 2000000 --output benchmarks/results/many-rows

The job is the real one, with engines that sleep for a moment and return the same few tokens for each row. Memory is
that of the driver's process, of Ray's processes on the head, and of the actors beside the driver; what the object
store shares is part of none of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pyarrow.compute
import pyarrow.dataset
import ray
import torch

from benchmarks.generation_jobs.fake_engines import FakeSpec
from drafter.evaluation.environment import surroundings
from drafter.evaluation.results import write_json
from pipeline.command_line import run_job
from pipeline.generate.config import parse_config
from pipeline.generate.job import generate
from pipeline.progress.watch import Pulse

SUMMARY_FILE = "summary.json"
_ENGINES, _SLOTS, _ROW_SECONDS, _TOKENS = 2, 256, 0.1, 16
_LOOK_SECONDS = 5.0
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.95)
"""Shares of the rows that are done, at which memory is told."""
_MIB = 1 << 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {SUMMARY_FILE}")
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    command = shlex.join(["python", "-m", "benchmarks.generation_jobs.many_rows", *given])
    load = {"load_average_before": round(os.getloadavg()[0], 2)}
    with tempfile.TemporaryDirectory() as folder:
        found = surroundings(torch.device("cpu"), command) | load | measure(Path(folder), args.rows)
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / SUMMARY_FILE, found)
    print(json.dumps(found, indent=1))


def measure(folder: Path, rows: int) -> dict[str, Any]:
    """Run the job on `rows` rows in this process, and return what it took.

    Raises:
        SystemExit: The job failed, or its output has not each row once.
    """
    with (folder / "in.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt": f"Question number {n}"}) + "\n" for n in range(rows))
    (folder / "marks").mkdir()
    settings = ["--input", folder / "in.jsonl", "--output", folder / "out", "--drafter", "none"]
    settings += ["--resources.cpus_per_actor", 0.5, "--resources.gpus_per_actor", 0]
    settings += ["--resources.max_actors", _ENGINES, "--engine.max_num_seqs", _SLOTS]
    spec = partial(FakeSpec, row_seconds=_ROW_SECONDS, tokens=_TOKENS, marks=folder / "marks", slots=_SLOTS)
    status, looks = folder / "out" / "status.json", list[tuple[int, dict[str, float]]]()

    def look() -> None:
        if status.exists():
            looks.append((json.loads(status.read_text(encoding="utf-8"))["rows_done"], _memory()))

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    begun = time.monotonic()
    with patch("pipeline.engines.models.EngineSpec", spec), Pulse(_LOOK_SECONDS, look):
        code = run_job(lambda arguments: generate(parse_config(arguments)), [str(one) for one in settings])
    seconds = time.monotonic() - begun
    ray.shutdown()
    output = pyarrow.dataset.dataset(folder / "out" / "data", format="parquet")
    written = output.count_rows()
    names = pyarrow.compute.count_distinct(output.to_table(["request_id"])["request_id"]).as_py()
    if (code, written, names) != (0, rows, rows):
        raise SystemExit(f"error: the job ended with {code} and has {written} rows of {names} names, not {rows}")
    return {
        "rows": rows,
        "parts": len(output.files),
        "engines": _ENGINES,
        "seconds": round(seconds, 1),
        "rows_per_s": round(rows / seconds, 1),
        "memory_mib": [memory_at(looks, share, rows) for share in _SHARES],
    }


def memory_at(looks: Sequence[tuple[int, dict[str, float]]], share: float, rows: int) -> dict[str, float]:
    """Return the look that is nearest to this share of the rows, in MiB by process."""
    done, found = min(looks, key=lambda look: abs(look[0] - share * rows))
    return {"rows_done": done, **{name: round(size, 1) for name, size in sorted(found.items())}}


def _memory() -> dict[str, float]:
    """Return MiB of memory that is not shared, by process: driver, Ray's own, actors beside the driver."""
    me = psutil.Process()
    found = {"driver": _own(me)}
    for process in me.children(recursive=True):
        try:
            name = process.cmdline()[0].rpartition("/")[2]
            if name in ("raylet", "gcs_server") or name.startswith(("ray::Ledger", "ray::StatusBoard")):
                found[name.partition(".")[0].removeprefix("ray::")] = _own(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess, IndexError):
            continue  # it ended while it was looked at
    return found


def _own(process: psutil.Process) -> float:
    used = process.memory_info()
    return float(used.rss - used.shared) / _MIB


if __name__ == "__main__":
    main()
