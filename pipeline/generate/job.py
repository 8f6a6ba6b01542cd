"""Entry of the generation job, with all checks that need neither a cluster nor a loaded model."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import datetime
from typing import Any

from pyarrow import fs

from drafter.errors import LoadError
from drafter.requests import described, sampling_defaults
from pipeline.engines.models import (
    classifier_fingerprints,
    generation_settings,
    head_fingerprints,
    model_fingerprint,
    model_name,
)
from pipeline.errors import InputError
from pipeline.generate.config import GenerateConfig
from pipeline.generate.job_context import JobContext, input_source, job_meaning
from pipeline.io.files import locate
from pipeline.io.listing import list_input
from pipeline.io.prompt_source import PromptSource, find_prompts
from pipeline.learning.config import NEW, SHIPPED
from pipeline.output.folder import OutputFolder
from pipeline.output.run_file import check_output, mend_run, read_run, save_run


def generate(config: GenerateConfig) -> None:
    """Run a job to its end, with all of its rows in the output.

    Raises:
        InputError: The configuration or the input cannot be used.
        JobError: The job failed on the way.
        JobStopped: The job was told to stop.
    """
    print(f"checking {config.input} and the model", file=sys.stderr, flush=True)
    reading = config.reading
    listing = list_input(config.input, reading.format, reading.split, reading.subset)
    prompts = find_prompts(listing, reading)
    if prompts.kind == "openai":
        refuse_settings_of_requests(config)
    base = model_fingerprint(model_name(config.model))
    config = with_model_defaults(config, drawn=prompts.kind == "openai")
    reads_clock = check_tokenizer(config, prompts)
    check_verifier(config)
    heads = head_fingerprints(config.model, config.drafter) | classifier_fingerprints(config.verifier)
    if config.learning.enabled and config.learning.head not in (SHIPPED, NEW):
        heads |= head_fingerprints(config.model, config.learning.head)
    date = output_date(config) if reads_clock else None
    meaning = job_meaning(config, prompts, base, heads, date)
    output = open_output(config, meaning)
    job = JobContext(config, listing, prompts, output, meaning, heads, input_source(config, listing))
    if config.dry_run:
        from pipeline.generate.growing import dry_run

        print(f"dry run: {dry_run(job)}", flush=True)
        return
    from pipeline.generate.submission import run  # Ray takes seconds to import: no check waits for it

    run(job)


def with_model_defaults(config: GenerateConfig, *, drawn: bool) -> GenerateConfig:
    """Fill unset sampling settings from the model's own.

    Args:
        drawn: Whether rows are sampled by default, as OpenAI's requests are.

    Raises:
        InputError: The model's settings cannot be read or are not supported.
    """
    name, settings = model_name(config.model), {}
    if config.loading.generation_config == "auto":
        settings = generation_settings(name)
    try:
        defaults = sampling_defaults(settings, name, drawn=drawn)
    except LoadError as error:
        raise InputError(str(error)) from error
    if line := described(settings, name):
        print(line, file=sys.stderr, flush=True)
    return replace(config, sampling=config.sampling.over(defaults))


def refuse_settings_of_requests(config: GenerateConfig) -> None:
    """Refuse settings that the requests of an OpenAI batch bring themselves.

    Raises:
        InputError: Such a setting is given.
    """
    reading = config.reading
    given = {
        "reading.prompt_column": reading.prompt_column is not None,
        "reading.messages_column": reading.messages_column is not None,
        "reading.id_column": reading.id_column is not None,
        "reading.chat": reading.chat is not None,
        "reading.samples": reading.samples > 1,
        "sampling.temperature": config.sampling.temperature is not None,
    }
    for name, is_set in given.items():
        if is_set:
            raise InputError(
                f"input {config.input} is an OpenAI batch, whose requests say it themselves: leave out {name}"
            )


def check_tokenizer(config: GenerateConfig, prompts: PromptSource) -> bool:
    """Check that the tokeniser loads and has a chat template where one is needed.

    Returns:
        Whether a chat template in use reads the clock.

    Raises:
        InputError: It does not.
    """
    from drafter.errors import LoadError
    from drafter.text.chat import reads_clock
    from drafter.text.tokenizers import load_tokenizer  # torch takes seconds to import: no check before waits for it

    name = model_name(config.model)
    try:
        tokenizer = load_tokenizer(name, trust_remote_code=config.loading.trust_remote_code)
    except LoadError as error:
        raise InputError(str(error)) from error
    if (prompts.kind == "messages" or config.reading.chat) and tokenizer.chat_template is None:
        raise InputError(f"model {name} has no chat template: give text prompts, with reading.chat false")
    return reads_clock(tokenizer) and (prompts.kind != "text" or config.reading.chat is not False)


def output_date(config: GenerateConfig) -> str:
    """Return the time that chat templates see: `reading.date`, or the time at which the output was begun."""
    if config.reading.date is not None:
        return datetime.fromisoformat(config.reading.date).isoformat(timespec="seconds")
    output = OutputFolder(locate(config.output))
    if output.run_file.exists and output.has_results():
        try:
            date = read_run(output.run_file)["meaning"]["reading"]["date"]
        except (ValueError, KeyError, TypeError):  # `check_output` says what is wrong with it
            date = None
        if isinstance(date, str):
            return date
    return datetime.now().isoformat(timespec="seconds")


def check_verifier(config: GenerateConfig) -> None:
    """Check that the verifier exists and supports the sampling settings.

    Raises:
        InputError: It does not.
    """
    from drafter.acceptance.settings import make_verifier
    from drafter.errors import LoadError, RequestError

    try:
        make_verifier(config.verifier).refuse(config.sampling)
    except (LoadError, RequestError) as error:
        raise InputError(str(error)) from error


def open_output(config: GenerateConfig, meaning: dict[str, Any]) -> OutputFolder:
    """Create the output's folder, or open that of an earlier submission of the same job.

    Raises:
        InputError: It holds something else or another job's results, or cannot be written to.
    """
    output = OutputFolder(locate(config.output))
    source = locate(config.input)
    if f"{output.root.path}/".startswith(f"{source.path}/") and source.filesystem.equals(output.root.filesystem):
        raise InputError(f"output {config.output} lies in the input: results would become input")
    check_output(config.output, output, meaning)
    if config.dry_run:
        return output
    output.create()
    if output.run_file.type == fs.FileType.File:
        mend_run(output.run_file)
    else:
        save_run(output.run_file, config.as_dict(), meaning, state="running")
    return output
