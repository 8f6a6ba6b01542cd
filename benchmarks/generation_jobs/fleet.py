"""A job of hundreds of engines that sleep: the calls and processor time that they cost its one driver.

Run it by `python -m benchmarks.generation_jobs.scale --fake-engines 800 --output DIR`. Board, ledger, driver and engine
actors are the job's own, but an engine's process would take 100 MB. So one process has many whole `EngineActor`, which
share its feeding by Ray Data: the driver has as many calls under way as with 800 actors, and fewer actors to look at.
"""

from __future__ import annotations

import json
import math
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray

from benchmarks.generation_jobs.fake_engines import EngineHost, FakeSpec
from drafter.embedded import EMBEDDED_BASE
from drafter.engine.config import EngineConfig
from drafter.errors import one_line
from pipeline.command_line import run_job, say
from pipeline.generate.config import parse_config
from pipeline.generate.job import generate

_HOSTED = 100  # engines of a process
_SLOTS = 16
_ROWS_PER_PART = 64
_PARTS_PER_ENGINE = 4
_LOOK_SECONDS = 5.0
_STEADY_SECONDS = 120.0  # with all engines at work; then the job is stopped
_LEFT = 0.25  # share of the rows that are left when engines run out of parts, if the job comes to that
_STOPPED = 143  # the job's exit code
_HELPERS = 1  # logical cores for reading and tokenising: four processes


class Counted:
    """Counts an actor's calls, and tells its processor seconds."""

    def used(self) -> tuple[Counter[str], float]:
        return self.__dict__.get("_calls", Counter()), time.process_time()


def counted(kind: type, *methods: str) -> type:
    """Return the class of an actor whose calls of `methods` are counted."""

    def counting(name: str) -> Any:
        def call(self: Any, *arguments: Any) -> Any:
            outer = not self.__dict__.get("_inside")  # a call, and not one that another makes in turn
            if outer:
                self.__dict__.setdefault("_calls", Counter())[name] += 1
            self._inside = True
            try:
                return getattr(kind, name)(self, *arguments)
            finally:
                self._inside = not outer

        return call

    return type(f"Counted{kind.__name__}", (kind, Counted), {name: counting(name) for name in methods})


@dataclass(frozen=True)
class Look:
    """The state of a job at a moment; seconds are processor seconds but for `time`."""

    time: float
    rows: int
    engines: int
    calls: dict[str, Counter[str]]
    actor_seconds: dict[str, float]
    driver_seconds: float


class Watch:
    """Looks at the job's actors and its driver now and then, while the job runs in this process."""

    def __init__(self, folder: Path, engines: int) -> None:
        self._folder, self._engines = folder, engines
        self._actors: dict[str, Any] = {}
        self._over = threading.Event()
        self.looks: list[Look] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def start(self, start: Any, kind: type, *arguments: Any) -> Any:
        """Start an actor beside the driver, and keep it."""
        methods = {"StatusBoard": ("beat", "put", "mail"), "Ledger": ("exchange", "open_part", "commit", "arrive")}
        name = kind.__name__
        self._actors[name] = start(counted(kind, *methods[name]) if name in methods else kind, *arguments)
        return self._actors[name]

    def _run(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            status = self._folder / "status.json"
            if len(self._actors) < 2 or not status.exists():
                continue
            try:
                used = ray.get([actor.used.remote() for actor in self._actors.values()], timeout=60)
            except ray.exceptions.RayError as error:  # the machine is busy, or the job over
                say(f"no look at the job's actors: {one_line(error)}")
                continue
            state = json.loads(status.read_text())
            calls, seconds = (
                {name: one[place] for name, one in zip(self._actors, used, strict=True)} for place in (0, 1)
            )
            now = time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)
            self.looks.append(Look(time.monotonic(), state["rows_done"], state["engines"], calls, seconds, now))
            full = [look.time for look in self.looks if look.engines == self._engines and look.rows]
            if full and time.monotonic() - full[0] > _STEADY_SECONDS:
                os.kill(os.getpid(), signal.SIGTERM)
                return


def measure_fleet(engines: int, rate: float) -> dict[str, Any]:
    """Run a job on `engines` sleeping engines of `rate` rows a second each for a while, and return what it cost."""
    rows = engines * _PARTS_PER_ENGINE * _ROWS_PER_PART
    processes = math.ceil(engines / _HOSTED)
    hosted = math.ceil(engines / processes)
    calls = 2 + math.ceil(_SLOTS / _ROWS_PER_PART)  # of an engine, as `engine_stage` has it
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "marks").mkdir()
        with (folder / "in.jsonl").open("w") as file:
            file.writelines(json.dumps({"prompt": f"Question number {n}"}) + "\n" for n in range(rows))
        ray.init(num_cpus=processes + _HELPERS, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        # So many slots that the stage gives a process the calls of all of its engines.
        config = partial(EngineConfig, max_num_seqs=(hosted * calls - 2) * _ROWS_PER_PART, max_queue=hosted * _SLOTS)
        spec = _spec(folder, hosted, rate, config())
        watch = Watch(folder / "out", processes * hosted)
        start = partial(watch.start, ray_start())
        with (
            patch("pipeline.generate.job.engine_spec", lambda *_, **__: spec),
            patch("pipeline.generate.job.start_beside_driver", start),
            patch("pipeline.engines.engine_actor.EngineActor", EngineHost),
            watch,
        ):
            code = run_job(lambda given: generate(parse_config(given)), _command(folder, processes))
        ray.shutdown()
    if code not in (0, _STOPPED):
        raise SystemExit("error: the job did not run")
    return summary(watch.looks, processes * hosted, processes, rows)


def ray_start() -> Any:
    """Return the job's own way to start an actor, before it is replaced."""
    from pipeline.cluster.ray_cluster import start_beside_driver

    return start_beside_driver


def _spec(folder: Path, hosted: int, rate: float, config: EngineConfig) -> FakeSpec:
    return FakeSpec(
        str(EMBEDDED_BASE),
        "none",
        {},
        config,
        threads=1,
        row_seconds=_SLOTS / rate,
        marks=folder / "marks",
        hosted=hosted,
        slots=_SLOTS,
    )


def _command(folder: Path, processes: int) -> list[str]:
    settings: list[Any] = ["--input", folder / "in.jsonl", "--output", folder / "out", "--drafter", "none"]
    settings += ["--sampling.max_new_tokens", 256, "--writing.rows_per_file", _ROWS_PER_PART]
    settings += ["--resources.cpus_per_actor", 1, "--resources.gpus_per_actor", 0]
    settings += ["--resources.min_actors", processes, "--resources.max_actors", processes]
    settings += ["--limits.drain_seconds", 1]
    return [str(one) for one in settings]


def summary(looks: Sequence[Look], engines: int, processes: int, rows: int) -> dict[str, Any]:
    """Return rates between the first look at all engines and the last one before they run out of parts."""
    steady = [look for look in looks if look.engines == engines and 0 < look.rows < (1 - _LEFT) * rows]
    if len(steady) < 2:
        seen = ", ".join(f"{look.engines} engines after {look.rows} rows" for look in looks)
        raise SystemExit(f"error: there was no time with all {engines} engines at work: {seen}")
    first, last = steady[0], steady[-1]
    seconds = last.time - first.time

    def calls(actor: str) -> dict[str, float]:
        change = last.calls[actor] - first.calls[actor]
        return {name: round(count / seconds, 1) for name, count in change.items()}

    def cores(actor: str) -> float:
        return round((last.actor_seconds[actor] - first.actor_seconds[actor]) / seconds, 3)

    board, ledger = calls("StatusBoard"), calls("Ledger")
    return {
        "engines": engines,
        "processes": processes,
        "arrangement": f"{engines // processes} whole EngineActor in each process, with fake models that sleep",
        "rows": rows,
        "rows_per_part": _ROWS_PER_PART,
        "seconds": round(seconds, 1),
        "rows_per_s": round((last.rows - first.rows) / seconds, 1),
        "parts_per_s": round((last.rows - first.rows) / seconds / _ROWS_PER_PART, 2),
        "board_calls_per_s": round(sum(board.values()), 1),
        "board_calls": board,
        "board_cores": cores("StatusBoard"),
        "ledger_calls_per_s": round(sum(ledger.values()), 1),
        "ledger_calls": ledger,
        "ledger_cores": cores("Ledger"),
        "driver_cores": round((last.driver_seconds - first.driver_seconds) / seconds, 3),
    }
