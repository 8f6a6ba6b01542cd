"""The recipe's command: `python -m recipes.paper run --config FILE --output DIR`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence

import yaml

from drafter.evaluation.questions import QuestionError, check_batches, read_questions
from pipeline.command_line import run_job
from pipeline.errors import InputError
from recipes.paper.chain import alone, cluster_for, needs_cluster, run_chain, submitter, write_whole
from recipes.paper.paper_config import PaperConfig, in_repository, parse_config
from recipes.paper.stage_jobs import Places, evaluation_of, stages

_DESCRIPTION = """\
The paper's table for one base, from prompts to β and γ of every head, as a chain of jobs on a Ray cluster.

  run       everything that is not done, ending with the table; the same command goes on where it was interrupted
  estimate  GPU hours of each stage, by formula; nothing is run
  table     the table of what is measured so far, once more

The chain's own jobs, which `run` submits: base, openings, prompts.

  python -m recipes.paper run --config recipes/paper/smollm2.yaml --output build/paper-smollm2
  python -m recipes.paper estimate --config recipes/paper/vicuna-7b.yaml --output build/paper-vicuna-7b"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what a command line asks for, and return the exit code; see `run_job`."""
    return run_job(_run, arguments)


def _run(arguments: Sequence[str] | None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(f"usage: python -m recipes.paper COMMAND --config FILE --output DIR [settings]\n\n{_DESCRIPTION}")
        return
    if given[0] not in _COMMANDS:
        raise InputError(f"there is no command {given[0]!r}: give one of {', '.join(_COMMANDS)}")
    config = parse_config(given[1:], f"recipes.paper {given[0]}", _DESCRIPTION)
    _COMMANDS[given[0]](config)


def run(config: PaperConfig) -> None:
    """Run the chain, and write and print the table.

    Raises:
        InputError: The configuration or an input cannot be used, or another run works on the output.
        JobError: A job failed.
    """
    config = dataclasses.replace(config, base=config.base.located())
    places = Places(config.folder)
    jobs = stages(config)
    measured = evaluation_of(config)
    plan = measured.plan()
    for name, file in measured.files.items():  # hours before they are measured
        try:
            questions = read_questions(in_repository(file), measured.questions_per_file)
            check_batches(name, questions, plan.samples, plan.batches)
        except QuestionError as error:
            raise InputError(f"evaluation.input: {error}") from error
    with alone(places):
        values = {**dataclasses.asdict(config), "output": str(config.folder)}
        write_whole(places.run, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        if needs_cluster(jobs, places):
            with cluster_for(config, places) as environment:
                run_chain(jobs, places, submitter(config, places, environment))
        table(config)


def table(config: PaperConfig) -> None:
    """Write and print the table.

    Raises:
        InputError: Nothing is measured yet.
    """
    from drafter.evaluation.results import RESULTS_FILE
    from recipes.paper.paper_table import write_table
    from recipes.paper.published_figures import published_for

    places = Places(config.folder)
    if not (places.evaluation / RESULTS_FILE).exists():
        raise InputError(f"there is no {places.evaluation / RESULTS_FILE}: run the chain first")
    heads = {str(places.head(name)): name for name in config.heads}
    file = places.folder / "table.md"
    page = write_table(places.evaluation, heads, config.base.name, published_for(config.base.name), file)
    print(f"{page}\nwritten:  {file}", flush=True)


def _estimate(config: PaperConfig) -> None:
    from recipes.paper.gpu_hours import estimate, estimate_table

    stages(config)  # finds the mistakes of settings that no formula reads
    print(estimate_table(estimate(config)), flush=True)


def _base(config: PaperConfig) -> None:
    from recipes.paper.base_folder import prepare_base

    prepare_base(config.base, Places(config.folder).base)


def _openings(config: PaperConfig) -> None:
    from recipes.paper.distillation_prompts import write_openings

    places = Places(config.folder)
    write_openings(config.prompts.written, places.base, places.openings)


def _prompts(config: PaperConfig) -> None:
    from recipes.paper.distillation_prompts import write_prompts

    places = Places(config.folder)
    write_prompts(config.prompts, evaluation_of(config).files, places.questions, places.prompts)


_COMMANDS: dict[str, Callable[[PaperConfig], None]] = {
    "run": run,
    "estimate": _estimate,
    "table": table,
    "base": _base,
    "openings": _openings,
    "prompts": _prompts,
}


if __name__ == "__main__":
    sys.exit(main())
