"""Entry of the job that trains a classifier for `pad`, a chain of resumable steps.

The target model answers the prompts exactly; rejected draft tokens are recorded; texts are continued with and without
each of them; the continuations are scored; a classifier is trained; held-out prompts are decoded under `pad`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafter.errors import one_line
from pipeline.engines.models import file_fingerprint, head_fingerprints, model_fingerprint, model_name
from pipeline.errors import InputError
from pipeline.generate.job import generate
from pipeline.io.listing import input_fingerprints, list_input
from pipeline.output.folder import check_output, save_run
from pipeline.pad.config import PivotsConfig, PivotsFolder
from pipeline.report.scorers import make_scorer, scorer_file


def pivots(config: PivotsConfig, command: str) -> None:
    """Run a job to its end; `command` is kept for the record.

    Raises `InputError` for a mistake in the configuration or the input, `JobError` if the job failed on the way, and
    `JobStopped` if it was told to stop.
    """
    scorer, folder = make_scorer(config.scorer, config.target), PivotsFolder(Path(config.output).expanduser())
    meaning = job_meaning(config)
    check_output(config.output, folder, meaning)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output {folder.path} cannot be used: {one_line(error)}") from error
    if folder.is_finished:
        print(f"{folder.results} is there: the job has finished", flush=True)
        return
    save_run(folder.run_file, asdict(config), meaning, state="running", command=command)
    generate(config.answers(str(folder.answers)))
    # Torch and Ray take seconds to import: report mistakes in the configuration before.
    from pipeline.pad.steps import PivotSteps

    steps = PivotSteps(config, folder, scorer)
    if not folder.tokens.is_file():
        steps.find_tokens()
    if not folder.requests.is_file():
        steps.write_requests()
    generate(config.continuations(str(folder.requests), str(folder.continuations)))
    labels, base = steps.label()
    results, plots = steps.learn(labels, base, command)
    save_run(folder.run_file, asdict(config), meaning, state="finished", command=command)
    print(results)
    files = [folder.labels, folder.verifier, folder.results, *plots]
    print("written:  " + ", ".join(map(str, files)), flush=True)


def job_meaning(config: PivotsConfig) -> dict[str, Any]:
    """Return all that decides the labels; raise `InputError` if the input or a model is not there."""
    file, reading, answers = scorer_file(config.scorer), config.reading, config.answers("answers").as_dict()
    listing = list_input(config.input, reading.format, reading.split, reading.subset)
    return {
        "input": input_fingerprints(listing),
        "model": model_fingerprint(model_name(config.model)),
        "drafter": config.drafter,
        "heads": head_fingerprints(config.model, config.drafter),
        "dtype": config.loading.dtype,
        "reading": answers["reading"],
        "sampling": answers["sampling"],
        "max_length": config.engine.max_model_len,
        "scorer": config.scorer if file is None else file_fingerprint(file),
        "target": config.target,
        "tokens_per_prompt": config.tokens_per_prompt,
        "rollouts": config.rollouts,
        "temperature": config.temperature,
        "held_out": config.held_out,
    }
