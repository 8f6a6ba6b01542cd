"""What Ray costs: the same prompts go through `drafter generate` and the bare engine, in turns and in one process.

    python -m benchmarks.generation_jobs.overhead --output benchmarks/results/overhead.json

Both engines' states are recorded while they run. The steady state is the time with all slots taken and rows waiting.
Both engines generate the same tokens, so tokens a second compare as rows a second do. The number of draft nodes is
fixed, because an adaptive number would differ between the two.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("RAY_ADDRESS", "local")

import pyarrow.parquet
import ray
import torch

from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.evaluation.environment import environment
from drafter.evaluation.questions import read_questions
from drafter.evaluation.results import write_json
from drafter.llm import SpeculativeLM
from drafter.requests import SamplingParams
from pipeline.engines.models import EngineSpec
from pipeline.generate.config import parse_config
from pipeline.generate.job import generate

_QUESTIONS = Path(__file__).resolve().parents[2] / "data" / "gsm8k" / "train.jsonl.gz"
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class WatchedEngine(EngineSpec):
    """An engine whose state is recorded every tenth of a second.

    Args:
        looks: File that gets one JSON line for each look.
    """

    looks: Path = Path()

    def load(self, on_stage: Callable[[str], None] | None = None) -> SpeculativeLM:
        """See `EngineSpec.load`."""
        lm = super().load(on_stage)
        threading.Thread(target=look, args=[lm.engine, self.looks], daemon=True).start()
        return lm


def look(engine: Engine, looks: Path) -> None:
    """Record an engine's state for as long as its process lives."""
    with looks.open("w", encoding="utf-8") as file:
        while True:
            state = engine.state()
            kept = {name: getattr(state, name) for name in ("active", "slots", "waiting", "steps", "row_steps")}
            print(json.dumps({"time": time.monotonic(), **kept, "tokens": state.output_tokens}), file=file, flush=True)
            time.sleep(_LOOK_SECONDS)


@dataclass(frozen=True)
class Steady:
    """The steady state of one run.

    Args:
        seconds: How long it lasted.
        tokens: Tokens generated in it.
        steps: Steps of the engine.
        row_steps: Steps counted once for each row that takes part: at most `steps × slots`.
        slots: Slots of the engine.
    """

    seconds: float
    tokens: int
    steps: int
    row_steps: int
    slots: int

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def occupancy(self) -> float:
        """Share of the slots that were taken."""
        return self.row_steps / (self.steps * self.slots)


def steady(looks: Path) -> Steady:
    """Read the steady state: from the first look with all slots taken to the last one with rows waiting."""
    seen = [json.loads(line) for line in looks.read_text(encoding="utf-8").splitlines()]
    first = next(index for index, one in enumerate(seen) if one["active"] == one["slots"])
    last = max(index for index, one in enumerate(seen) if one["waiting"])
    begin, end = seen[first], seen[last]
    if last <= first:
        raise SystemExit("error: the run was too short for a steady state: give more --rows")
    change = {name: end[name] - begin[name] for name in ("time", "tokens", "steps", "row_steps")}
    return Steady(change["time"], change["tokens"], change["steps"], change["row_steps"], end["slots"])


def run_bare(spec: WatchedEngine, questions: list[Any], sampling: SamplingParams, folder: Path) -> list[list[int]]:
    """Generate for all questions with an engine in this process; `folder` is not needed."""
    with spec.load() as lm:
        return [one.token_ids for one in lm.generate(questions, sampling)]


def run_job(spec: WatchedEngine, questions: list[Any], sampling: SamplingParams, folder: Path) -> list[list[int]]:
    """Generate for all questions with the job."""
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps({"messages": one}) + "\n" for one in questions), encoding="utf-8")

    arguments = ["--input", source, "--output", folder / "out", "--drafter", spec.drafter]
    arguments += [
        "--sampling.max_new_tokens",
        sampling.max_new_tokens,
        "--engine.max_num_seqs",
        spec.config.max_num_seqs,
    ]
    arguments += ["--engine.num_draft_tokens", spec.config.num_draft_tokens, "--resources.cpus_per_actor", spec.threads]
    with patch("pipeline.engines.models.EngineSpec", partial(WatchedEngine, looks=spec.looks)):
        generate(parse_config([str(one) for one in arguments]))
    ray.shutdown()
    paths = sorted((folder / "out" / "data").iterdir())
    return [ids for path in paths for ids in pyarrow.parquet.read_table(path)["token_ids"].to_pylist()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the record")
    parser.add_argument("--rows", type=int, default=400, help="questions (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of both (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--nodes", type=int, default=16, help="draft nodes a step (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    cores = os.cpu_count() or 1
    help_threads = "of either engine (default: all cores but one, which is Ray's)"
    parser.add_argument("--threads", type=int, default=max(1, cores - 1), help=help_threads)
    args = parser.parse_args(arguments)
    questions = [[{"role": "user", "content": one.turns[0]}] for one in read_questions(_QUESTIONS, args.rows)]
    sampling = SamplingParams(max_new_tokens=args.max_new_tokens)
    runs: dict[str, list[Steady]] = {"bare": [], "job": []}
    tokens: dict[str, list[list[int]]] = {}
    for _ in range(args.rounds):
        for name, run in (("bare", run_bare), ("job", run_job)):
            with tempfile.TemporaryDirectory() as folder:
                config = EngineConfig(max_num_seqs=args.slots, num_draft_tokens=args.nodes)
                spec = WatchedEngine(None, "auto", {}, config, args.threads, looks=Path(folder) / "looks.jsonl")
                tokens[name] = run(spec, questions, sampling, Path(folder))
                runs[name].append(steady(spec.looks))
            print(f"{name}: {runs[name][-1].rate:.0f} tokens/s, {runs[name][-1].occupancy:.1%} of slots", flush=True)
    rates = {name: sum(one.tokens for one in some) / sum(one.seconds for one in some) for name, some in runs.items()}
    given_arguments = sys.argv[1:] if arguments is None else list(arguments)
    base = SpeculativeLM.from_pretrained(None, "none", config=EngineConfig(max_num_seqs=1))
    record = {
        "environment": environment(
            base.base, shlex.join(["python", "-m", "benchmarks.generation_jobs.overhead", *given_arguments])
        )
        | {"threads": args.threads},
        "ray": ray.__version__,
        "rows": args.rows,
        "same_tokens": tokens["bare"] == tokens["job"],
        "runs": {name: [asdict(one) for one in some] for name, some in runs.items()},
        "tokens_per_second": rates,
        "slot_occupancy": {name: [one.occupancy for one in some] for name, some in runs.items()},
        "job_to_bare": rates["job"] / rates["bare"],
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.output, record)
    print(f"{record['job_to_bare']:.3f} of the bare engine's rows/s, same tokens: {record['same_tokens']}")


if __name__ == "__main__":
    torch.set_num_interop_threads(1)
    main()
