"""A generation job whose processes are killed again and again, compared with the same job undisturbed.

    python -m benchmarks.generation_jobs.chaos --output benchmarks/results/chaos.json
    python -m benchmarks.generation_jobs.chaos --images --engine-kills 3 --output benchmarks/results/chaos-images.json

With `--images` the prompts are questions about sheets of digits, an image a row, for the embedded model that sees.

The job runs unchanged: its processes are found by their names and killed by SIGKILL, and the results are read from the
files. Losses of machines are in `tests/pipeline/generate/test_chaos.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow.dataset
import pyarrow.parquet

from drafter.embedded import EMBEDDED_BASE, EMBEDDED_DIGITS
from drafter.evaluation.environment import environment
from drafter.evaluation.results import write_json
from drafter.target_model.loading import load_base
from examples.demo_images import CONFIG as IMAGES_CONFIG
from examples.demo_images import QUESTIONS, draw
from pipeline.engines.engine_actor import EngineActor

_QUESTIONS = Path(__file__).resolve().parents[2] / "data" / "gsm8k" / "train.jsonl.gz"
_ENGINE = EngineActor.__name__
"""Part of the title of an engine's process."""
_KEPT = {"README.md", "data", "errors", "run.json", "run.json.copy", "status.json", "_staged", "_temporary"}
"""All that may be in the output of a finished job."""
_LOOK_SECONDS = 0.2


def submit(settings: Sequence[object], output: Path, rows: int, rows_per_file: int, log: Path) -> Any:
    """Start the job in its own process."""
    arguments = [*settings, "--output", output, "--reading.limit", rows, "--writing.rows_per_file", rows_per_file]
    with log.open("a", encoding="utf-8") as file:
        return psutil.Popen(
            [sys.executable, "-m", "jobs.generate", *map(str, arguments)],
            env={**os.environ, "RAY_ADDRESS": "local"},
            stdout=file,
            stderr=file,
        )


def committed(output: Path) -> int:
    """Count the files in `data/`."""
    return len(list((output / "data").glob("*.parquet")))


def read(output: Path) -> dict[str, list[list[int]]]:
    """Read the tokens of each row, once for each time that the row is there."""
    found: dict[str, list[list[int]]] = {}
    for path in sorted((output / "data").iterdir()):
        table = pyarrow.parquet.read_table(path, columns=["request_id", "token_ids"])
        for request_id, tokens in zip(*(column.to_pylist() for column in table.columns), strict=True):
            found.setdefault(request_id, []).append(tokens)
    return found


def unoccupied(output: Path) -> float:
    """Return the share of the time from the first row's start to the last one's end in which no row was decoded."""
    columns = ["finished_at", "generation_seconds"]
    table = pyarrow.dataset.dataset(output / "data").to_table(columns)
    ends = [at.timestamp() for at in table["finished_at"].to_pylist()]
    spans: list[tuple[float, float]] = sorted(
        (end - took, end) for end, took in zip(ends, table["generation_seconds"].to_pylist(), strict=True)
    )
    first, until = spans[0]
    without = 0.0
    for start, end in spans:
        without += max(0.0, start - until)
        until = max(until, end)
    return round(without / (until - first), 4)


def kill_engines(job: Any, output: Path, step: int, times: int) -> int:
    """Kill the engine's process `times` times, each time after `step` more files; return how often it was killed."""
    killed, mark = 0, committed(output) + step
    while killed < times and job.poll() is None:
        time.sleep(_LOOK_SECONDS)
        if committed(output) < mark:
            continue
        engines = [one for one in job.children(recursive=True) if _is_engine(one)]
        for engine in engines:
            engine.send_signal(signal.SIGKILL)
        killed += bool(engines)
        mark = committed(output) + step
    return killed


def kill_all(job: Any, output: Path, step: int) -> bool:
    """Kill the driver and all of Ray after `step` more files; return False if the job had ended before."""
    mark = committed(output) + step
    while committed(output) < mark:
        if job.poll() is not None:
            return False
        time.sleep(_LOOK_SECONDS)
    for process in [*job.children(recursive=True), job]:
        process.send_signal(signal.SIGKILL)
    job.wait()
    return True


def _is_engine(process: Any) -> bool:
    try:
        return _ENGINE in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def judge(output: Path, undisturbed: dict[str, list[list[int]]], log: str) -> dict[str, Any]:
    """Compare the output of a disturbed run with that of the undisturbed one."""
    found = read(output)
    counts = Counter({name: len(times) for name, times in found.items()})
    staged = {path.name for path in (output / "_staged").iterdir()} - {"parts.json"}
    data = {path.name for path in (output / "data").iterdir()}
    left = {path.name for path in output.iterdir()} - _KEPT
    deaths = re.findall(r"(\d+) times an engine's process ended and was replaced; (\d+) rows were generated again", log)
    return {
        "lost": len(undisturbed.keys() - found.keys()),
        "duplicated": sum(number - 1 for number in counts.values()),
        "other_tokens": sum(found[name] != tokens for name, tokens in undisturbed.items() if name in found),
        "orphans": sorted(data - staged) + sorted(left) + [path.name for path in (output / "_temporary").glob("*")],
        "engine_deaths": int(deaths[-1][0]) if deaths else 0,
        "rows_again_after_engine_deaths": int(deaths[-1][1]) if deaths else 0,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the job undisturbed and disturbed, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the record")
    parser.add_argument("--rows", type=int, default=2000, help="rows of the input (default: %(default)s)")
    parser.add_argument("--images", action="store_true", help="an image a row, for the embedded model that sees")
    parser.add_argument("--engine-kills", type=int, default=10)
    parser.add_argument("--driver-kills", type=int, default=3)
    args = parser.parse_args(arguments)
    rows_per_file = max(1, args.rows // 60)
    record: dict[str, Any] = {"rows": args.rows, "rows_per_file": rows_per_file}

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings: list[object] = ["--input", _QUESTIONS, "--reading.prompt_column", "question"]
        settings += ["--sampling.max_new_tokens", 64]
        if args.images:
            draw(folder, args.rows)
            settings = ["--config", IMAGES_CONFIG, "--input", folder / QUESTIONS]

        def run(what: str, disturb: Callable[[Callable[[], Any], Path], dict[str, Any]]) -> dict[str, list[list[int]]]:
            output, log = folder / what, folder / f"{what}.log"
            given = (settings, output, args.rows, rows_per_file, log)
            begun = time.monotonic()
            facts = disturb(lambda: submit(*given), output)
            code = submit(*given).wait() if facts.pop("submit_again", False) else facts.pop("code")
            if code:
                raise SystemExit(f"error: {what}: exit code {code}: {log.read_text(encoding='utf-8')[-2000:]}")
            seconds = time.monotonic() - begun
            record[what] = {"seconds": seconds, "share_without_a_row": unoccupied(output), **facts}
            if what != "undisturbed":
                record[what] |= judge(output, undisturbed, log.read_text(encoding="utf-8"))
            print(what, json.dumps(record[what]), flush=True)
            return read(output)

        def nothing(start: Callable[[], Any], output: Path) -> dict[str, Any]:
            return {"code": start().wait()}

        def engines(start: Callable[[], Any], output: Path) -> dict[str, Any]:
            job = start()
            killed = kill_engines(job, output, 60 // (args.engine_kills + 2), args.engine_kills)
            return {"killed": killed, "code": job.wait()}

        def drivers(start: Callable[[], Any], output: Path) -> dict[str, Any]:
            step = 60 // (args.driver_kills + 1) - 1
            killed = sum(kill_all(start(), output, step) for _ in range(args.driver_kills))
            return {"killed": killed, "submit_again": True}

        undisturbed: dict[str, list[list[int]]] = {}
        undisturbed = run("undisturbed", nothing)
        if args.engine_kills:
            run("engines", engines)
        if args.driver_kills:
            run("drivers", drivers)

    given = sys.argv[1:] if arguments is None else list(arguments)
    command = shlex.join(["python", "-m", "benchmarks.generation_jobs.chaos", *given])
    args.output.parent.mkdir(parents=True, exist_ok=True)
    base = load_base(EMBEDDED_DIGITS if args.images else EMBEDDED_BASE)
    write_json(args.output, {"environment": environment(base, command), **record})


if __name__ == "__main__":
    main()
