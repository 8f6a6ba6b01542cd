"""What a head that learns while its job runs brings and costs, beside the same job without it.

    python -m benchmarks.generation_jobs.learning --rows 2000 --rounds 3 --output benchmarks/results/learning-native
    python -m benchmarks.generation_jobs.learning --model-code --passes 2 --arms learning --output build/learning
    python -m benchmarks.generation_jobs.learning --model MODEL --head HEAD --arms fixed adapting --rows 150 \
        --then data/drafter-prompts/records.jsonl 450 --slots 4 --nodes 7 --max-new-tokens 64 --output build/adapting

Each run is `drafter generate` in a process of its own, on questions of GSM8K's training split; with `--then`, the job
changes its subject after them. The arms take turns. The head of `learning` starts from nothing, that of `adapting` from
the one that `fixed` drafts with.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow.dataset

from drafter.embedded import EMBEDDED_BASE
from drafter.evaluation.environment import environment
from drafter.evaluation.questions import read_questions
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.statistics import DecodeCounts, mean_acceptance_length, total
from drafter.target_model.loading import load_base

LEARNING_FILE = "learning.json"
TABLE_FILE = "learning.md"

_QUESTIONS = Path(__file__).resolve().parents[2] / "data" / "gsm8k" / "train.jsonl.gz"
_ARMS = ("none", "ngram", "memory", "auto", "learning", "fixed", "adapting")
_TENTHS = 10
_LOOK_SECONDS = 5.0
_MIB = 1 << 20


@dataclass(frozen=True)
class JobRun:
    """One run of a job.

    Args:
        arm: How it drafts.
        wall_seconds: From its start to its end, with all that Ray takes.
        tokens: New tokens of all rows.
        tokens_digest: Digest of all rows' tokens, in the order of the rows.
        beta_by_tenth: β of each tenth of the rows, in the order in which they ended.
        rate_by_tenth: New tokens per second of each tenth.
        memory: MiB of memory that a kind of process has for itself, by kind, every few seconds.
        beta_by_subject: β of the questions, and of what came after them.
        learning: What `run.json` says about the learner; None where there is none.
    """

    arm: str
    wall_seconds: float
    tokens: int
    tokens_digest: str
    beta_by_tenth: list[float]
    rate_by_tenth: list[float]
    memory: dict[str, list[int]]
    beta_by_subject: list[float] = field(default_factory=list)
    learning: dict[str, Any] | None = None


def settings_of(arm: str, head: str | None, share: float) -> list[str]:
    """Return how a job is told to draft.

    Raises:
        SystemExit: The arm needs a head, and there is none.
    """
    if arm in ("none", "ngram", "memory"):
        return ["--drafter", arm]
    if arm == "auto":
        return []
    if arm == "learning":
        return ["--learning", "true", "--learning.head", "new", "--learning.share", str(share)]
    if head is None:
        raise SystemExit(f"error: the arm {arm} starts from a head: give --head")
    learning = json.dumps({"enabled": True, "head": head, "share": share})
    return ["--drafter", head, *(["--learning", learning] if arm == "adapting" else [])]


def run_job(arm: str, source: Path, output: Path, settings: list[str], variables: dict[str, str]) -> JobRun:
    """Run a job, and read what it wrote.

    Raises:
        SystemExit: The job failed.
    """
    command = [sys.executable, "-m", "jobs.generate", "--input", source, "--output", output, *settings]
    begun = time.monotonic()
    with (
        output.with_suffix(".log").open("w", encoding="utf-8") as log,
        psutil.Popen([str(one) for one in command], env=os.environ | variables, stdout=log, stderr=log) as process,
    ):
        memory = watch(process)
        code = process.wait()
    wall = time.monotonic() - begun
    if code:
        said = output.with_suffix(".log").read_text(encoding="utf-8")[-2000:]
        raise SystemExit(f"error: the job of {arm} ended with {code}: {said}")
    columns = ["request_id", "token_ids", "num_output_tokens", "num_decode_steps", "finished_at", "subject"]
    rows = pyarrow.dataset.dataset(output / "data", format="parquet").to_table(columns=columns).to_pylist()
    tokens = sorted((row["request_id"], row["token_ids"]) for row in rows)
    betas, rates = by_tenth(rows)
    subjects = sorted({row["subject"] for row in rows})
    run = {
        "arm": arm,
        "wall_seconds": wall,
        "tokens": sum(row["num_output_tokens"] for row in rows),
        "tokens_digest": hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16],
        "beta_by_tenth": betas,
        "rate_by_tenth": rates,
        "beta_by_subject": [beta_of(row for row in rows if row["subject"] == one) for one in subjects],
        "memory": memory,
    }
    if arm not in ("learning", "adapting"):
        return JobRun(**run)
    return JobRun(**run, learning=json.loads((output / "run.json").read_text(encoding="utf-8"))["learning"])


def watch(process: psutil.Popen) -> dict[str, list[int]]:
    """Return the MiB that the job's processes had, by kind, until it ended."""
    looks: dict[str, list[int]] = {}
    while process.poll() is None:
        for kind, found in memory_of(process).items():
            looks.setdefault(kind, []).append(found // _MIB)
        try:
            process.wait(_LOOK_SECONDS)
        except psutil.TimeoutExpired:
            continue
    return looks


def memory_of(process: psutil.Process) -> dict[str, int]:
    """Return the bytes that the driver, its engine and its learner have, each for itself."""
    found: dict[str, int] = {}
    for one in [process, *process.children(recursive=True)]:
        try:
            title = " ".join(one.cmdline())
            kind = "driver" if one.pid == process.pid else next((k for k in ("Engine", "Learner") if k in title), "")
            if kind and (one.pid == process.pid or title.startswith("ray::")):
                found[kind.lower()] = found.get(kind.lower(), 0) + one.memory_full_info().uss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def by_tenth(rows: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Return β, and new tokens per second, of each tenth of rows, in the order in which they ended."""
    in_time = sorted(rows, key=lambda row: row["finished_at"])
    ends = [round(index * len(rows) / _TENTHS) for index in range(_TENTHS + 1)]
    betas, rates = [], []
    for begin, end in itertools.pairwise(ends):
        tenth = in_time[begin:end]
        betas.append(beta_of(tenth))
        before = in_time[begin - 1 if begin else 0]["finished_at"]
        seconds = max((tenth[-1]["finished_at"] - before).total_seconds(), 1e-3)
        rates.append(sum(row["num_output_tokens"] for row in tenth) / seconds)
    return betas, rates


def beta_of(rows: Iterable[dict[str, Any]]) -> float:
    """Return β of rows."""
    names = ("num_output_tokens", "num_decode_steps")
    return mean_acceptance_length(total(DecodeCounts(**{name: row[name] for name in names}) for row in rows))


def write_table(folder: Path) -> None:
    """Write the table of a record that `main` wrote."""
    record = json.loads((folder / LEARNING_FILE).read_text(encoding="utf-8"))
    runs = [JobRun(**run) for run in record["runs"]]
    arms = list(dict.fromkeys(run.arm for run in runs))
    lines = [
        f"{record['rows']:,} rows, {record['slots']} slots, up to {record['max_new_tokens']} new tokens; "
        + f"{'the same tokens' if record['same_tokens'] else 'DIFFERENT TOKENS'} in all runs.",
        "",
    ]
    first = statistics.median(run.wall_seconds for run in runs if run.arm == arms[0])
    summary = []
    for arm in arms:
        some = [run for run in runs if run.arm == arm]
        median = statistics.median(run.wall_seconds for run in some)
        row = {
            "arm": arm,
            "wall, s": " / ".join(f"{run.wall_seconds:.1f}" for run in some),
            "median": f"{median:.1f}",
            f"÷ {arms[0]}": f"{median / first:.3f}",
        }
        betas = zip(*(run.beta_by_subject for run in some), strict=True)
        if len(runs[0].beta_by_subject) > 1:
            row["β by subject"] = " / ".join(f"{statistics.median(each):.2f}" for each in betas)
        row["β, last tenth"] = f"{statistics.median(run.beta_by_tenth[-1] for run in some):.2f}"
        summary.append(row)
    lines += [markdown_table(summary)]
    for run in runs:
        lines += _learning_lines(run) if run.learning else []
    lines += [
        "",
        "MiB that each process has for itself, after a quarter of the time / half / three quarters / at most:",
        "",
    ]
    kinds = list(dict.fromkeys(kind for run in runs for kind in run.memory))
    looks = [{"arm": run.arm, **{kind: _looks(run.memory.get(kind, [])) for kind in kinds}} for run in runs]
    lines += [markdown_table(looks)]
    (folder / TABLE_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _learning_lines(run: JobRun) -> list[str]:
    """Return what a run's learner did, and the course of the run."""
    did = run.learning or {}
    course = [
        {"tenth of the rows": name, **{str(index + 1): f"{value:{form}}" for index, value in enumerate(values)}}
        for name, values, form in (("β", run.beta_by_tenth, ".2f"), ("tokens/s", run.rate_by_tenth, ".0f"))
    ]
    return [
        "",
        f"The learner made {did['version'] or 0} versions in {did['steps']} steps and {did['seconds']:.0f} s. "
        + f"At the end: {did['state']}, {did['reason']}.",
        "",
        markdown_table(course),
    ]


def _looks(looks: list[int]) -> str:
    """Return how much there was after a quarter of the time, half of it and three quarters, and at most."""
    if not looks:
        return ""
    return " / ".join(str(one) for one in [*(looks[len(looks) * quarter // 4] for quarter in (1, 2, 3)), max(looks)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the jobs, and write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {LEARNING_FILE} and {TABLE_FILE}")
    parser.add_argument("--arms", nargs="+", choices=_ARMS, default=["none", "auto", "learning"])
    parser.add_argument("--model", help="folder of the base (default: the embedded one)")
    parser.add_argument("--head", help="folder of the head of the arms fixed and adapting")
    parser.add_argument("--share", type=float, default=0.1, help="learner's share of the time (default: %(default)s)")
    parser.add_argument("--rows", type=int, help="questions (default: all)")
    parser.add_argument("--then", nargs=2, metavar=("FILE", "ROWS"), help="what comes after them, and how much of it")
    parser.add_argument("--passes", type=int, default=1, help="how often the file has them (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="turns of all arms (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--nodes", default="auto", help="draft nodes a step (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--model-code", action="store_true", help="run the base by its own code")
    parser.add_argument("--keep", type=Path, help="folder that gets the jobs' outputs (default: they are deleted)")
    args = parser.parse_args(arguments)
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    prompts = [("questions", one.turns[0]) for one in read_questions(_QUESTIONS)[: args.rows]]
    if args.then:
        prompts += [("then", one.turns[0]) for one in read_questions(args.then[0])[: int(args.then[1])]]
    lines = [json.dumps({"subject": subject, "prompt": prompt}) + "\n" for subject, prompt in prompts] * args.passes
    if len(lines) < _TENTHS:
        raise SystemExit(f"error: {len(lines)} rows have no tenths: give more --rows")
    settings = {arm: settings_of(arm, args.head, args.share) for arm in args.arms}
    shared = [
        "--engine.max_num_seqs",
        str(args.slots),
        "--engine.max_model_len",
        "512",
        "--engine.num_draft_tokens",
        args.nodes,
    ]
    shared += ["--sampling.max_new_tokens", str(args.max_new_tokens), *(["--model", args.model] if args.model else [])]
    variables = {"RAY_ADDRESS": "local"} | ({"CXX": "no-compiler"} if args.model_code else {})
    runs: list[JobRun] = []
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "in.jsonl"
        source.write_text("".join(lines), encoding="utf-8")
        for turn in range(args.rounds):
            for arm in args.arms:
                output = (args.keep or Path(name)) / f"{arm}-{turn}"
                runs.append(run_job(arm, source, output, settings[arm] + shared, variables))
                print(
                    f"{arm}: {runs[-1].wall_seconds:.1f} s, β {runs[-1].beta_by_tenth[-1]:.2f} at the end", flush=True
                )
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = shlex.join(["python", "-m", "benchmarks.generation_jobs.learning", *given])
    record = {
        "environment": environment(load_base(args.model or EMBEDDED_BASE), command),
        "rows": len(lines),
        "slots": args.slots,
        "max_new_tokens": args.max_new_tokens,
        "model_code": args.model_code,
        "same_tokens": len({run.tokens_digest for run in runs}) == 1,
        "runs": [asdict(run) for run in runs],
    }
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / LEARNING_FILE, record)
    write_table(args.output)


if __name__ == "__main__":
    main()
