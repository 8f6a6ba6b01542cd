"""The first minutes on a GPU, then the first day: stages of cells, the cheapest and most telling first.

    python -m benchmarks.gpu --kit correctness --output results
    python -m benchmarks.gpu --kit times --output results
    python -m benchmarks.gpu --output results    # all stages, for a day
    python -m benchmarks.gpu --stage costs --stage profile --output results --model MODEL --drafter HEAD
    python -m benchmarks.gpu --kit times --output results --tiny    # on a CPU, to see that everything runs

Each result is written as soon as it is there, and after each of them `gpu.md` in the folder has all tables. The same
command goes on where the last one was interrupted or was out of time; what has failed is tried again.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import drafter  # noqa: F401  before torch, because it decides how torch's threads wait
from benchmarks.gpu import page
from benchmarks.gpu.cells import ATTEMPTS, CellFile, Key, Plan, Stage
from drafter.embedded import EMBEDDED_BASE
from drafter.errors import LoadError, first_line
from drafter.evaluation.environment import surroundings, without_folders
from drafter.target_model.loading import pick_device

STAGES: dict[str, Stage] = {one.name: one for one in page.STAGES}
KITS = {
    "correctness": (
        "operators",
        "capture:first",
        "families:first",
        "identity:first",
        "capture",
        "identity",
        "families",
    ),
    "times": ("choices", "costs:first", "steps", "costs", "profile"),
}
"""Stages of each of the two commands that a borrowed machine is given first; `:first` are the most telling cells."""
_DONE, _LEFT, _BROKEN = 0, 1, 3
"""Exit codes: nothing is left; something is; the process cannot go on, but another can."""
_KIT_MINUTES, _STAGE_MINUTES = 4.0, 9.0
_CRASHES = (-signal.SIGSEGV, -signal.SIGABRT)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stages, several of them in a process each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    parser.add_argument("--stage", choices=STAGES, action="append", help="one of them (default: all)")
    parser.add_argument("--kit", choices=KITS, help="those of a prepared command")
    parser.add_argument("--model", default=str(EMBEDDED_BASE), help="base (default: the embedded one)")
    parser.add_argument("--drafter", default="ctc", help="its drafter, for example a head's folder (default: ctc)")
    parser.add_argument("--tiny", action="store_true", help="few and small cells")
    parser.add_argument("--minutes", type=float, help="no cell begins later (default: 4 for a kit, 9 for a stage)")
    parser.add_argument("--first", action="store_true", help="only the most telling cells of a stage")
    parser.add_argument("--run", default=datetime.now(UTC).isoformat(), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.output.mkdir(parents=True, exist_ok=True)
    names = args.stage or list(KITS[args.kit] if args.kit else STAGES)
    args.minutes = args.minutes or (_KIT_MINUTES if args.kit else _STAGE_MINUTES)
    if len(names) > 1:
        codes, end = {}, time.monotonic() + 60 * args.minutes
        for name in names:
            if args.kit:  # its stages share the time
                args.minutes = max(end - time.monotonic(), 1.0) / 60
            stage, _, part = name.partition(":")
            part_of_it = ["--first"] * bool(part)
            codes[stage] = _in_process(stage, args.output, [*part_of_it, *_asked(args), "--run", args.run])
        left = [name for name, code in codes.items() if code]
    else:
        signal.signal(signal.SIGTERM, _interrupt)
        plan = Plan(args.model, args.drafter, args.tiny)
        command = shlex.join(["python", "-m", "benchmarks.gpu", "--stage", names[0], *_asked(args)])
        code = run(STAGES[names[0]], plan, args.output, args.minutes, args.run, command, only_first=args.first)
        if code == _BROKEN:
            sys.exit(_BROKEN)
        left = names if code else []
    if left:
        raise SystemExit(f"not all has a result: {', '.join(left)}. The same command goes on.")


def run(
    stage: Stage, plan: Plan, output: Path, minutes: float, run_name: str, command: str, *, only_first: bool = False
) -> int:
    """Measure the cells of a stage that have no result yet. Return an exit code."""
    device, end = pick_device(), time.monotonic() + 60 * minutes
    about = surroundings(device, command)
    same = {name: about[name] for name in ("commit", "hardware", "threads", "versions")}
    asked = asdict(plan) | {"model": without_folders(plan.model), "drafter": without_folders(plan.drafter)}
    file = CellFile(output, stage.name, same | asked)
    left = file.left([cell for cell in stage.cells(plan) if stage.first(cell) or not only_first], run_name)
    failed, measure = 0, None
    for place, cell in enumerate(left, start=1):
        if time.monotonic() > end:
            print(f"{stage.name}: {minutes:g} minutes are over, and {len(left) - place + 1} cells are left", flush=True)
            return _LEFT
        print(f"{stage.name} {place}/{len(left)}: {named(cell)}", flush=True)
        started = time.monotonic()
        with file.begun(cell) as worth_it:
            outcome: dict[str, Any] = {"error": "the process died in this cell"}
            if worth_it:
                try:
                    measure = measure or stage.prepare(plan)
                    outcome = {"values": measure(cell)}
                except LoadError as error:
                    outcome = {"error": str(error)}
                except Exception as error:  # whatever it is, the other cells are measured
                    traceback.print_exc()
                    outcome = {"error": f"{type(error).__name__}: {first_line(error)}"}
            file.write(cell, run_name, about, outcome | {"seconds": round(time.monotonic() - started, 3)})
        page.write_page(output)
        if "error" in outcome:
            failed += 1
            print(f"  {outcome['error']}", flush=True)
            if device.type == "cuda" and "CUDA error" in outcome["error"]:
                return _BROKEN
    return _LEFT if failed else _DONE


def named(cell: Key) -> str:
    """A cell in a line."""
    return ", ".join(f"{name} {value}" for name, value in cell.items())


def _asked(args: argparse.Namespace) -> list[str]:
    """The arguments that a stage has from the command line."""
    named = {name: getattr(args, name) for name in ("output", "model", "drafter", "minutes")}
    return [*(part for name, value in named.items() for part in (f"--{name}", str(value))), *["--tiny"] * args.tiny]


def _in_process(name: str, output: Path, arguments: list[str]) -> int:
    """Run one stage in a process of its own, and in another one where that breaks. Return an exit code."""
    code, results, fruitless = _BROKEN, CellFile(output, name, {}), 0
    # A cell that the process dies in has a result after `ATTEMPTS` deaths. Who dies before any cell never gets there.
    while code in (_BROKEN, *_CRASHES) and fruitless <= ATTEMPTS:
        before = results.size
        code = subprocess.run([sys.executable, "-m", "benchmarks.gpu", "--stage", name, *arguments]).returncode
        fruitless = 0 if results.size > before else fruitless + 1
    if code < 0:
        print(f"{name}: the process died by signal {-code}", flush=True)
    return code


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
