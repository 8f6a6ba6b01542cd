"""`make demo`, `demo-offline`, `demo-hybrid`: the main job twice on the same questions, plainly and with speculation.

Both runs are `drafter generate` on one local Ray, with the same settings but for the drafter. Each loads its models in
a process of its own before its clock starts. Their outputs are compared token by token.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch

from drafter.evaluation.environment import surroundings, without_folders
from drafter.statistics import DecodeCounts, mean_acceptance_length, speculated_share
from pipeline.cluster.model_copies import model_name
from pipeline.command_line import run_job
from pipeline.generate.checks import SPECULATION
from pipeline.generate.config import parse_config
from pipeline.generate.job import generate
from pipeline.output.folder import read_status
from pipeline.output.result import cost_of, times_as_fast
from pipeline.output.summary import histogram_lines, read_totals
from pipeline.report.compare import compare_rows
from pipeline.report.config import parse_report
from pipeline.report.outputs import open_output, read_run_of, rows_of
from pipeline.report.page import Example, make_examples, report
from recipes.smollm2.__main__ import cache_folder
from recipes.smollm2.fetch import fetch, is_fetched

SUMMARY = "summary.json"
SCREEN = "screen.txt"
"""What the end of the demonstration printed, without colours: README shows it."""
REPORT = "report.html"
PLAIN, SPECULATIVE = "plain", "speculative"
_FETCHED = "demo"
_CONFIGS = {
    _FETCHED: "examples/smollm2.yaml",
    "demo-offline": "examples/demo.yaml",
    "demo-hybrid": "examples/hybrid.yaml",
}
"""Settings of both runs, by the name of the demonstration."""
_ANSWERS, _SHOWN = 3, 160
"""Answers that are printed, and how many characters of each."""
_GAIN = 1.2
"""Where speculation is less than so many times as fast as plain decoding, the text says why that may be."""
_BUSY = 2.0
"""Processes a core that want to run, the demonstration's own included, from which on a machine is called busy."""
_ACCEPTED, _QUESTION, _END = "\033[32m", "\033[1m", "\033[0m"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration, and return the exit code; see `run_job`."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--offline", action="store_const", dest="name", const="demo-offline", help="the embedded model")
    which.add_argument("--hybrid", action="store_const", dest="name", const="demo-hybrid", help="the embedded hybrid")
    parser.set_defaults(name=_FETCHED)
    name = parser.parse_args(arguments).name
    return run_job(lambda _: demonstrate(name), None, resumes=False)


def demonstrate(name: str) -> None:
    """Generate twice, compare, and print what came of it; run from the repository's root.

    Args:
        name: Which demonstration; its output goes to a folder of this name.

    Raises:
        InputError: The model cannot be used.
        JobError: A run failed on the way.
        JobStopped: It was told to stop.
    """
    output, settings = Path("build") / name, ["--config", _CONFIGS[name]]
    if name == _FETCHED:
        settings += ["--model", str(_fetched_model())]
    shutil.rmtree(output, ignore_errors=True)  # or the jobs would find their work done
    run_twice(output, settings)
    summary, counts, answers = read_runs(output, "python -m examples.demo")
    show(output, summary, counts, answers)


def run_twice(output: Path, settings: Sequence[str]) -> None:
    """Generate by plain decoding and then with speculation, and write the report.

    Args:
        output: The folder of both runs and of the report.
        settings: Command line of both jobs, without the output.
    """
    plain, speculative = (str(output / run) for run in (PLAIN, SPECULATIVE))
    _say("first run: plain decoding")
    with contextlib.redirect_stdout(io.StringIO()):  # what a job's own summary says is said below, of both
        generate(parse_config([*settings, "--output", plain, "--drafter", "none"]))
        _say("second run: with speculation")
        generate(parse_config([*settings, "--output", speculative]))
        report(parse_report([speculative, "--against", plain, "--page", str(output / REPORT)]))


def show(
    output: Path,
    summary: dict[str, Any],
    counts: DecodeCounts,
    answers: Sequence[Example],
    more: Sequence[str] = (),
    settings: str = "",
) -> None:
    """Write the summary and what the runs have shown, and print the latter, with `more` lines before its end.

    `settings` are those that the next command needs beside the model.
    """
    (output / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    end = [*more, *closing(output, summary["model"], settings)]
    print("\n".join([*screen(summary, counts, answers, colour=in_colour(sys.stdout)), *end]), flush=True)
    plain_text = [*screen(summary, counts, answers, colour=False), *end]
    (output / SCREEN).write_text("\n".join(plain_text) + "\n", encoding="utf-8")


def _fetched_model() -> Path:
    """Return the folder of SmolLM2-135M-Instruct; it is fetched only if the cache was emptied after the set-up."""
    folder = cache_folder()
    if not is_fetched(folder):
        fetch(folder)
    return folder


def read_runs(output: Path, command: str) -> tuple[dict[str, Any], DecodeCounts, list[Example]]:
    """Read the outputs of both runs.

    Args:
        output: The folder that has them.
        command: The command of the demonstration.

    Returns:
        What goes into `summary.json`, sums of the counts of the run with speculation, and its first answers in steps.

    Raises:
        InputError: An output cannot be read.
    """
    plain, speculative = (open_output(str(output / run)) for run in (PLAIN, SPECULATIVE))
    columns = ("request_id", "token_ids")
    compared = compare_rows(rows_of(plain, columns), rows_of(speculative, columns), None, 0)
    totals = [read_totals(run) for run in (plain, speculative)]
    costs = [
        cost_of(read_status(run.status_file)["submissions"], found.rows + found.errors, found.counts.num_output_tokens)
        for run, found in zip((plain, speculative), totals, strict=True)
    ]
    rates = [0.0 if isinstance(cost, str) else round(cost.tokens_per_second or 0.0, 1) for cost in costs]
    counts = totals[1].counts
    run = read_run_of(speculative)
    config, chosen = run["config"], run.get(SPECULATION) or {}
    answers, _ = make_examples(list(islice(rows_of(speculative, None), _ANSWERS)), model_name(config["model"]))
    record = surroundings(torch.device("cpu"), command)
    summary = {
        "rows": compared.rows,
        "rows_differing": compared.differing + compared.only_first + compared.only_second,
        "plain_tokens_per_second": rates[0],
        "tokens_per_second": rates[1],
        "speedup": round(times_as_fast(costs[1], costs[0]) or 0.0, 3),
        "acceptance_length": round(mean_acceptance_length(counts), 3),
        "speculated_share": round(speculated_share(counts), 3),
        "choice": chosen.get("sentences", []),
        "model": None if config["model"] is None else without_folders(config["model"]),
        "drafter": config["drafter"],
        "draft_nodes": config["engine"]["num_draft_tokens"],
        "rows_at_a_time": config["engine"]["max_num_seqs"],
        "load_average": round(os.getloadavg()[0], 1),
        **{name: record[name] for name in ("date", "commit", "hardware", "versions")},
    }
    return summary, counts, answers


def screen(summary: dict[str, Any], counts: DecodeCounts, answers: Sequence[Example], *, colour: bool) -> list[str]:
    """Return what the runs have shown, in lines.

    Args:
        summary: See `read_runs`.
        counts: Likewise.
        answers: Answers to show.
        colour: Whether accepted draft tokens are green; otherwise they are in brackets.
    """
    mark = "in green" if colour else "in [brackets]"
    lines = ["", f"Some answers; draft tokens that the model accepted are {mark}."]
    for answer in answers:
        question = str(answer.row.get("prompt") or answer.row.get("question"))
        lines += ["", f"{_QUESTION}{question}{_END}" if colour else f"> {question}", answer_text(answer, colour=colour)]
    plain, rate, rows = summary["plain_tokens_per_second"], summary["tokens_per_second"], summary["rows"]
    return [
        *lines,
        "",
        *histogram_lines(counts),
        "",
        f"{'':27}plain decoding   speculation",
        f"{'tokens/s':27}{plain:>14,.1f}{rate:>14,.1f}   {summary['speedup']:.2f} times as fast",
        f"{'tokens a step':27}{1:>14.2f}{summary['acceptance_length']:>14.2f}",
        f"{'rows whose tokens differ':27}{'':14}{summary['rows_differing']:>14,} of {rows:,}",
        "",
        f"Rows at a time: {summary['rows_at_a_time']}. Draft tokens: {summary['draft_nodes']} a step, by the drafter "
        f"{summary['drafter']}.",
        *judgement(summary),
        "",
    ]


def judgement(summary: dict[str, Any]) -> list[str]:
    """Return sentences on what the engine chose and why, and on what is not as speculation promises."""
    share, load, cores = summary["speculated_share"], summary["load_average"], summary["hardware"]["cores"]
    said = list(summary["choice"])
    if summary["rows_differing"]:
        said.append("Rows differ, which must not be in fp32: please report it, with summary.json.")
    if share < 0.5 and summary["model"] is None:
        said.append(
            "That is because the embedded model's weights lie in the processor's caches, where a draft token costs "
            "nearly what a plain step costs. Larger models are read from memory, once for all draft tokens of a step."
        )
    slower = summary["speedup"] < 1
    gain = "Speculation was slower than plain decoding." if slower else "Speculation gained little."
    if summary["speedup"] < _GAIN and load > _BUSY * cores:
        said.append(
            f"{gain} The machine is busy: {load:g} processes on average want its {cores} cores. "
            "Both rates depend on these: run it again when the machine is quiet."
        )
    elif summary["speedup"] < _GAIN and share >= 0.5:
        said.append(f"{gain} On this machine, draft tokens cost about what they save, or more.")
    return said


def answer_text(answer: Example, *, colour: bool) -> str:
    """Return an answer's beginning with the accepted draft tokens of each step marked."""
    before, after = (_ACCEPTED, _END) if colour else ("[", "]")
    length = len(answer.row["text"])  # without the end-of-sequence token
    left, text = min(length, _SHOWN), ""
    for step in answer.steps:
        drafted = step.drafted[:left]
        own = step.own[: left - len(drafted)]
        left -= len(drafted) + len(own)
        text += f"{before}{drafted}{after}{own}" if drafted else own
    return text + " …" * (length > _SHOWN)


def closing(output: Path, model: str | None, settings: str = "") -> list[str]:
    """Return where everything is, and what to type next."""
    drafter = Path(sys.executable).with_name("drafter")
    command = drafter.relative_to(Path.cwd()) if drafter.is_relative_to(Path.cwd()) else drafter
    if model is not None and Path(model).is_relative_to(Path.home()):
        model = f"~/{Path(model).relative_to(Path.home())}"  # the shell puts it back
    return [
        f"rows        {output / SPECULATIVE}/data (Parquet), and plainly decoded {output / PLAIN}/data",
        f"report      {output / REPORT}",
        f"figures     {output / SUMMARY}",
        "",
        "Next, a file of your own (JSONL, Parquet or CSV with a column `prompt`, or lines of text; docs/dataset.md):",
        f"  {command} generate --input FILE --output results" + (f" --model {model}" if model else "") + settings,
    ]


def in_colour(stream: TextIO) -> bool:
    """Return whether to write colours: only on a terminal, and not where NO_COLOR is set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
