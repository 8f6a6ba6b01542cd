"""The generation job's entry, and what is checked before a cluster or a model is touched."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.command_line import run_job
from pipeline.errors import InputError
from pipeline.generate.generate_config import GenerateConfig, parse_config
from pipeline.io.reading import PromptSource, find_prompts, list_input
from pipeline.output.run_manifest import folder_fingerprint, meaning, model_fingerprint, open_output


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that a command line asks for; see `run_job`. All rows are in the output when it returns 0."""
    return run_job(lambda given: generate(parse_config(given)), arguments)


def generate(config: GenerateConfig) -> None:
    """Run a job to its end.

    Raises:
        InputError: The configuration or the input cannot be used.
        JobError: The job failed on the way.
    """
    # Everything that can be checked without a cluster or a model comes first.
    reading = config.reading
    listing = list_input(config.input, reading.format, reading.split, reading.subset)
    source = find_prompts(listing, config.reading)
    if source.kind == "openai":
        check_batch(config)
    model = check_model(config, source)
    meant = meaning(config, listing, model, check_drafter(config.model, config.drafter))
    output = open_output(config, meant)
    print(config.as_yaml(), end="", file=sys.stderr, flush=True)
    from pipeline.generate.cluster_run import run  # Ray takes seconds to import, too

    run(config, listing, source, output, meant)


def check_batch(config: GenerateConfig) -> None:
    """Refuse settings that the requests of an OpenAI batch have themselves.

    Raises:
        InputError: Such a setting.
    """
    reading = config.reading
    given = {
        "reading.prompt_column": reading.prompt_column is not None,
        "reading.messages_column": reading.messages_column is not None,
        "reading.id_column": reading.id_column is not None,
        "reading.chat": reading.chat is not None,
        "reading.samples": reading.samples > 1,
        "sampling.temperature": config.sampling.temperature > 0,
    }
    for name, is_set in given.items():
        if is_set:
            raise InputError(
                f"input {config.input} is an OpenAI batch, whose requests say it themselves: leave out {name}"
            )


def check_model(config: GenerateConfig, source: PromptSource) -> str:
    """Read the base's configuration and tokeniser, and return what tells it from others.

    Raises:
        InputError: There is no such model, or it has no chat template where one is needed.
    """
    from drafter.base.loading import load_tokenizer  # torch takes seconds to import: the checks before it do not wait
    from drafter.errors import LoadError
    from pipeline.generate.row_requests import model_name

    name = model_name(config.model)
    fingerprint = model_fingerprint(name)
    try:
        tokenizer = load_tokenizer(name, trust_remote_code=config.loading.trust_remote_code)
    except LoadError as error:
        raise InputError(str(error)) from error
    if (source.kind == "messages" or config.reading.chat) and tokenizer.chat_template is None:
        raise InputError(f"model {name} has no chat template: give text prompts, with reading.chat false")
    return fingerprint


def check_drafter(model: str | None, drafter: str) -> dict[str, str]:
    """Fingerprints of the draft heads in folders, the embedded ones included, that `drafter` names for `model`.

    Raises:
        InputError: A path with no head.
    """
    from drafter.embedded import EMBEDDED_HEADS

    if drafter == "auto" and model is None:
        drafter = "ctc"
    found = {}
    for name in [drafter] if Path(drafter).exists() else drafter.split("+"):
        embedded = EMBEDDED_HEADS / name
        folder = embedded if embedded.is_dir() else Path(name).expanduser()
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                raise InputError(f"drafter {name} is not a draft head's folder: it has no config.json")
            found[name] = folder_fingerprint(folder)
        elif folder.exists() or name.startswith(("/", "./", "../", "~")):
            raise InputError(f"drafter {name} is not a folder with a draft head")
    return found
