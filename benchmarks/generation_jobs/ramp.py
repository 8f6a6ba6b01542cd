"""How long a job needs until all engines of a cluster that grows from nothing decode.

    python -m benchmarks.generation_jobs.ramp --nodes 8 --start-seconds 60 --output benchmarks/results/ramp

A real autoscaler starts nodes on this machine, each with one logical GPU. Engines sleep for the time that models take
to load, and then for each row; everything else is the job's own. The time begins with the job's command, and so has the
nodes' start in it.
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
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.generation_jobs.fake_engines import FakeSpec
from drafter.evaluation.environment import surroundings
from drafter.evaluation.results import write_json
from examples.local_cluster import LocalCluster, NodeType
from pipeline.command_line import run_job
from pipeline.generate.config import parse_config
from pipeline.generate.job import generate

SUMMARY_FILE = "summary.json"
_ROWS_PER_PART, _PARTS_PER_ENGINE = 4, 12
_ROW_SECONDS = 10.0  # long enough that the first engines do not take all rows before the last ones are there
_BACK_SECONDS = 120.0  # to wait for the nodes to be given back
_NODE_CPUS = 1
_IDLE_SECONDS = 30.0  # until an idle node ends; on a busy machine, an engine's process takes some seconds to begin
_PATIENCE = {"RAY_raylet_start_wait_time_s": "300", "RAY_agent_register_timeout_ms": "300000"}  # nodes start together
_ROW_BYTES = 32 << 10  # so that the input is one for which a job asks for all nodes while it is staged


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8, help="nodes that the autoscaler may start")
    parser.add_argument(
        "--start-seconds", type=float, default=60.0, help="seconds that an engine's models take to load"
    )
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {SUMMARY_FILE}")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)  # what the driver's process is started with
    args = parser.parse_args(arguments)
    if args.job is not None:
        raise SystemExit(run_driver(args.job, args.nodes, args.start_seconds))
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = shlex.join(["python", "-m", "benchmarks.generation_jobs.ramp", *given])
    with tempfile.TemporaryDirectory() as folder:
        summary = surroundings(torch.device("cpu"), command) | measure(Path(folder), args.nodes, args.start_seconds)
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / SUMMARY_FILE, summary)
    print(f"{summary['seconds_until_all_decode']:.0f} s until {args.nodes} engines decoded")


def measure(folder: Path, nodes: int, start_seconds: float) -> dict[str, Any]:
    """Run the job on a cluster that grows to `nodes` nodes, and return when which engine decoded its first row."""
    (folder / "marks").mkdir()
    rows = nodes * _PARTS_PER_ENGINE * _ROWS_PER_PART
    (folder / "in.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}", "beside": "x" * _ROW_BYTES}) + "\n" for n in range(rows))
    )
    load_before = os.getloadavg()[0]
    growing = {"gpu": NodeType(cpus=_NODE_CPUS, gpus=1, most=nodes)}
    with LocalCluster(growing=growing, idle_seconds=_IDLE_SECONDS, head_environment=_PATIENCE) as cluster:
        begun = time.time()
        driver = [
            sys.executable,
            "-m",
            "benchmarks.generation_jobs.ramp",
            "--job",
            str(folder),
            "--output",
            str(folder),
        ]
        driver += ["--nodes", str(nodes), "--start-seconds", str(start_seconds)]
        subprocess.run(driver, env=cluster.environment, check=True)
        ended = time.time()
        while cluster.nodes() and time.time() - ended < _BACK_SECONDS:
            time.sleep(0.5)
        back = None if cluster.nodes() else time.time() - ended
    first_rows = sorted(float(mark.read_text()) - begun for mark in (folder / "marks").iterdir())
    if len(first_rows) != nodes:
        raise SystemExit(f"error: {len(first_rows)} engines decoded, and not {nodes}")
    return {
        "nodes": nodes,
        "start_seconds": start_seconds,
        "load_average_before": round(load_before, 2),
        "seconds_until_first_decodes": round(first_rows[0], 1),
        "seconds_until_all_decode": round(first_rows[-1], 1),
        "starts_until_all_decode": round(first_rows[-1] / start_seconds, 2),
        "seconds_until_each_decodes": [round(one, 1) for one in first_rows],
        "seconds_until_nodes_are_given_back": None if back is None else round(back, 1),
    }


def run_driver(folder: Path, nodes: int, start_seconds: float) -> int:
    """Run the job in this process, and return its exit code."""
    settings = ["--input", folder / "in.jsonl", "--output", folder / "out", "--drafter", "none"]
    settings += ["--resources.gpus_per_actor", 1, "--resources.cpus_per_actor", 0.5, "--resources.max_actors", nodes]
    settings += ["--writing.rows_per_file", _ROWS_PER_PART, "--engine.max_num_seqs", _ROWS_PER_PART]
    spec = partial(
        FakeSpec,
        start_seconds=start_seconds,
        row_seconds=_ROW_SECONDS,
        marks=folder / "marks",
        engines=nodes,
        slots=_ROWS_PER_PART,
    )
    with patch("pipeline.engines.models.EngineSpec", spec):
        return run_job(lambda given: generate(parse_config(given)), [str(one) for one in settings])


if __name__ == "__main__":
    main()
