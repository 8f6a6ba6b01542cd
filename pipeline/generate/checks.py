"""A generation job: what determines its results, and all checks that need neither a cluster nor a loaded model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drafter.acceptance.settings import VerifierSettings
from drafter.errors import LoadError, RequestError
from drafter.requests import DRAW, described, sampling_defaults
from pipeline.cluster.model_copies import model_name
from pipeline.command_line import say
from pipeline.engines.models import (
    adapter_fingerprint,
    file_fingerprint,
    generation_settings,
    head_fingerprints,
    model_fingerprint,
    verifier_fingerprints,
)
from pipeline.errors import InputError
from pipeline.generate.config import GenerateConfig
from pipeline.generate.row_images import ImageReading, changed_images, image_reading, seeing_processor
from pipeline.generate.user_functions import function_file, rollout_function, user_function
from pipeline.io.files import local_path, locate
from pipeline.io.listing import InputListing, PromptSource, find_prompts, input_fingerprints, list_input, taken_as_input
from pipeline.io.parts import StagedInput
from pipeline.output.folder import NAMED_BY, OutputFolder, check_output, mend_run, read_run, save_run
from pipeline.progress.board import EngineFacts
from pipeline.settings import SAMPLING_COLUMN

if TYPE_CHECKING:  # torch takes seconds to import
    from drafter.images.processor import ImageProcessor

LEARNING, SPECULATION, DRAFTERS = "learning", "speculation", "drafters"
"""Keys in `run.json`: the last report of a head that learns from the rows; `speculation_record`; the drafter
of each submission that generated, and the fingerprints of its heads by name.
"""


@dataclass(frozen=True)
class Job:
    """A generation job, checked and ready to run; see `job_meaning`, and `input_source` for `source`."""

    config: GenerateConfig
    listing: InputListing
    prompts: PromptSource
    output: OutputFolder
    meaning: dict[str, Any]
    heads: dict[str, str]
    source: dict[str, Any]
    images: ImageReading | None = None  # of a target model that sees
    reasons: bool = False  # the target model may reason before its answer
    folder: str = field(default_factory=os.getcwd)  # now: a node that joins on this machine may replace it

    def save_run(self, state: Literal["running", "finished"], **facts: Any) -> None:
        facts |= {"input": self.source["files"], NAMED_BY: self.prompts.id_column}
        save_run(self.output.run_file, self.config.as_dict(), self.meaning, state=state, **facts)

    @property
    def staged_images(self) -> ImageReading | None:
        """How images of rows are found as these are staged; programs find theirs themselves."""
        return None if self.prompts.kind == "program" else self.images

    @property
    def several(self) -> bool:
        """True if an input row may become several, named `ID#0`, `ID#1`, …."""
        return self.prompts.kind == "openai" or self.config.reading.samples > 1

    def draws(self, columns: Collection[str]) -> bool:
        """Return whether tokens of an input with these columns may depend on rows' seeds.

        Settings of their own may begin below the first rows, from which the job's meaning follows.
        """
        return "draw" in self.meaning or SAMPLING_COLUMN in columns

    def engine_facts(self) -> dict[str, Any]:
        """Read the engines' facts from `run.json`; all None before an engine has reported."""
        run = read_run(self.output.run_file)
        names = [*(field.name for field in dataclasses.fields(EngineFacts)), SPECULATION, DRAFTERS]
        names += [LEARNING] if self.config.learning.enabled else []
        return {name: run.get(name) for name in names}

    def note_drafter(self) -> None:
        """Record the current drafter in `run.json`: rows have only its name."""
        facts = self.engine_facts()
        before: list[Any] = facts[DRAFTERS] or []
        mine = {"drafter": self.config.drafter, "heads": self.heads}
        self.save_run("running", **facts | {DRAFTERS: before if mine in before else [*before, mine]})


def checked_job(config: GenerateConfig) -> Job:
    """Check a job, or raise `InputError`. Its output's folder is created, or opened if a submission has begun it."""
    say(f"checking {config.input} and the model")
    if config.model is not None and "://" not in config.model:  # absolute: other jobs read it in run.json
        config = replace(config, model=model_name(config.model))
    if (adapter := config.loading.adapter) is not None:
        config = replace(config, loading=replace(config.loading, adapter=local_path(adapter)))
    if config.images.folders:
        folders = [local_path(one) for one in config.images.folders]
        config = replace(config, images=replace(config.images, folders=folders))
    reading = config.reading
    listing = list_input(config.input, reading.format, reading.split, reading.subset)
    if config.rollout is not None:
        _check_rollout(config, config.rollout)
    if config.on_part is not None:
        user_function("on_part", config.on_part)
    prompts = find_prompts(listing, reading, programs=config.rollout is not None)
    if prompts.kind == "openai":
        _refuse_settings_of_requests(config)
    if "://" not in config.input:
        config = replace(config, input=str(Path(config.input).expanduser().absolute()))
    base = model_fingerprint(model_name(config.model))
    drawn = prompts.kind == "openai"
    config = with_model_defaults(config, drawn=drawn)
    temperature = config.sampling.temperature
    how = f"sampled at temperature {temperature:g}" if temperature else "chosen greedily (temperature 0)"
    say(f"tokens are {how}{', unless a request says otherwise' if drawn else ''}")
    processor = _processor(config)
    reads_clock, reasons = _check_tokenizer(config, prompts, processor)
    images = None if processor is None else image_reading(processor, config.images, config.input)
    check_verifier(config)
    _check_structured_outputs(config)
    heads = head_fingerprints(config.model, config.drafter) | verifier_fingerprints(config.verifier)
    if config.learning.enabled and (given := config.learning.given_head) is not None:
        heads |= head_fingerprints(config.model, given)
    date = output_date(config) if reads_clock else None
    meaning = job_meaning(config, prompts, base, heads, date)
    if images is None:
        del meaning["images"]
    if config.loading.adapter is not None:
        meaning["loading"]["adapter"] = adapter_fingerprint(config.loading.adapter)
    output = open_output(config, meaning, batch=prompts.kind == "openai")
    of_rows = None if images is None or config.rollout is not None else _images_source(output, images)
    source = input_source(config, listing, of_rows)
    return Job(config, listing, prompts, output, meaning, heads, source, images, reasons)


def _check_rollout(config: GenerateConfig, function: str) -> None:
    rollout_function(function)
    reading = config.reading
    given = {name: getattr(reading, name) for name in ("prompt_column", "messages_column", "images_column")}
    for name, value in given.items():
        if value is not None:
            raise InputError(f"rollout {function} makes its prompts itself, of its row: leave out reading.{name}")
    if reading.format == "openai":
        raise InputError(f"rollout {function} takes rows, not the requests of a batch: leave out reading.format")


def with_model_defaults(config: GenerateConfig, *, drawn: bool) -> GenerateConfig:
    """Fill unset sampling settings from the model's own, or raise `InputError`; `drawn` rows are sampled by default."""
    name = model_name(config.model)
    settings = generation_settings(name) if config.loading.generation_config == "auto" else {}
    try:
        defaults = sampling_defaults(settings, name, drawn=drawn)
    except LoadError as error:
        raise InputError(str(error)) from error
    if line := described(settings, name):
        say(line)
    return replace(config, sampling=config.sampling.over(defaults))


def _refuse_settings_of_requests(config: GenerateConfig) -> None:
    reading = config.reading
    given = {
        "reading.prompt_column": reading.prompt_column is not None,
        "reading.messages_column": reading.messages_column is not None,
        "reading.id_column": reading.id_column is not None,
        "reading.images_column": reading.images_column is not None,
        "reading.chat": reading.chat is not None,
        "reading.samples": reading.samples > 1,
        "sampling.temperature": config.sampling.temperature is not None,
        "stop_after_valid": config.stop_after_valid is not None,
    }
    if found := [name for name, is_set in given.items() if is_set]:
        said = "whose requests say it themselves"
        raise InputError(f"input {config.input} is an OpenAI batch, {said}: leave out {found[0]}")


def _processor(config: GenerateConfig) -> ImageProcessor | None:
    """Return the processor of a target model that sees; None for one of text alone."""
    name = model_name(config.model)
    found = seeing_processor(name, trust_remote_code=config.loading.trust_remote_code)
    if found is None and config.reading.images_column is not None:
        raise InputError(f"reading.images_column is set, and model {name} sees no images: leave it out")
    return found


def _check_tokenizer(
    config: GenerateConfig, prompts: PromptSource, processor: ImageProcessor | None
) -> tuple[bool, bool]:
    # It returns whether the chat template reads the clock, and whether the model may reason.
    from drafter.text.chat import reads_clock, refuse_unread
    from drafter.text.conversation import Conversation
    from drafter.text.reasoning import Reasoning
    from drafter.text.tokenizers import load_tokenizer  # torch takes seconds to import: no check before waits for it

    name = model_name(config.model)
    try:
        settings = {"trust_remote_code": config.loading.trust_remote_code}
        tokenizer = load_tokenizer(name, **settings) if processor is None else processor.tokenizer
    except LoadError as error:
        raise InputError(str(error)) from error
    if (prompts.kind == "messages" or config.reading.chat) and tokenizer.chat_template is None:
        raise InputError(f"model {name} has no chat template: give text prompts, with reading.chat false")
    if every := config.reading.chat_template_kwargs:
        if prompts.kind == "text" and config.reading.chat is False:
            raise InputError(
                "reading.chat_template_kwargs is for chats, and reading.chat is false: leave out one of them"
            )
        try:
            asked = Conversation([{"role": "user", "content": ""}], chat_template_kwargs=every)
            refuse_unread(tokenizer, tokenizer.get_chat_template(), asked)
        except ValueError as error:
            raise InputError(f"reading.chat_template_kwargs, for the chat template of {name}: {error}") from error
    clock = reads_clock(tokenizer) and (prompts.kind != "text" or config.reading.chat is not False)
    return clock, Reasoning.of(tokenizer) is not None


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
    """Raise `InputError` unless the verifier exists and supports the sampling settings."""
    from drafter.acceptance.contract import make_verifier

    try:
        make_verifier(config.verifier).refuse(config.sampling)
    except (LoadError, RequestError) as error:
        raise InputError(str(error)) from error


def _check_structured_outputs(config: GenerateConfig) -> None:
    from drafter.acceptance.guide import FirstGuides
    from drafter.text.tokenizers import load_tokenizer

    if (asked := config.sampling.structured_outputs) is None:
        return
    tokenizer = load_tokenizer(model_name(config.model), trust_remote_code=config.loading.trust_remote_code)
    try:
        FirstGuides(tokenizer, len(tokenizer), {tokenizer.eos_token_id} - {None}).guide(asked, ())
    except RequestError as error:
        raise InputError(f"sampling.{error}") from error


def open_output(config: GenerateConfig, meaning: dict[str, Any], *, batch: bool = False) -> OutputFolder:
    """Create the output's folder, or open that of the same job; raise `InputError` if it cannot be used.

    `batch` says that the job answers an OpenAI batch.
    """
    output = OutputFolder(locate(config.output))
    if (taken := taken_as_input(config.input, output.root, output.visible(batch=batch))) is not None:
        raise InputError(
            f"output {config.output} lies in the input {config.input}, which takes in files such as its {taken}: "
            "results would become input; choose an output elsewhere, or give less as input"
        )
    check_output(config.output, output, meaning)
    if config.dry_run:
        return output
    output.create()
    if output.run_file.exists:
        mend_run(output.run_file)
    else:
        save_run(output.run_file, config.as_dict(), meaning, state="running")
    return output


# What determines the results.

SETTINGS: dict[str, Literal["bound", "rows", "free"]] = {
    "input": "rows",
    "output": "free",
    "model": "bound",
    "drafter": "free",
    "verifier": "bound",
    "learning": "free",
    "learning.enabled": "bound",
    "reading": "bound",
    "reading.format": "rows",
    "reading.split": "rows",
    "reading.subset": "rows",
    "reading.skip": "rows",
    "reading.limit": "rows",
    "images": "bound",
    "images.folders": "rows",
    "loading": "free",
    "loading.dtype": "bound",
    "loading.adapter": "bound",
    "loading.dequantize": "bound",
    "sampling": "bound",
    "engine": "free",
    "engine.max_model_len": "bound",
    "resources": "free",
    "limits": "free",
    "writing": "free",
    "rollout": "bound",
    "stop_after_valid": "rows",
    "on_part": "free",
    "cost": "free",
    "dry_run": "free",
}
"""Rules for changing a setting of an output in a later submission, by the longest matching name; docs/operations.md
explains.

`bound`: it determines a row's results, or a column. `rows`: it selects the rows; finished ones are kept.
`free`: no token depends on it, and nothing else that lasts.
"""


def _images_source(output: OutputFolder, images: ImageReading) -> str | None:
    """Return what an output's rows were staged with, or another one where an image that they name has changed."""
    staged = StagedInput.load(output.staged)
    return None if staged is None else changed_images(staged, images) or (staged.source or {}).get("images")


def input_source(config: GenerateConfig, listing: InputListing, images: str | None = None) -> dict[str, Any]:
    """Return the identity of a job's rows, or raise `InputError`: the files' fingerprints, and the selection.

    `images` is what differs once an image that rows name has changed.
    """
    most = config.stop_after_valid
    return {
        "files": input_fingerprints(listing),
        **({} if images is None else {"images": images}),
        **({} if most is None else {"stop_after_valid": most}),
        **{name: getattr(config.reading, name) for name in ("format", "skip", "limit")},
    }


def job_meaning(
    config: GenerateConfig, prompts: PromptSource, base: str, heads: dict[str, str], date: str | None = None
) -> dict[str, Any]:
    """Return everything that determines a row's results: bound settings, and the model's fingerprint.

    Args:
        heads: Fingerprints of draft heads, and of a verifier's classifier, by name.
        date: Time for chat templates; None where none reads it.
    """
    meaning: dict[str, Any] = _bound(config.as_dict())
    meaning["model"] = base
    meaning["reading"]["date"] = date
    if not config.loading.dequantize:  # outputs of earlier versions do not name it
        del meaning["loading"]["dequantize"]
    if config.rollout is not None:
        file = function_file(config.rollout)
        meaning["rollout"] = {"function": config.rollout, "file": file and file_fingerprint(file)}
    # With an exact verifier the tokens do not depend on the drafter. A lenient one accepts some of its proposals, and a
    # head that learns resumes from its saved weights.
    if config.verifier != VerifierSettings() or config.learning.enabled:
        meaning |= {"drafter": config.drafter, "heads": heads}
    if config.sampling.over().temperature > 0 or prompts.own_sampling:
        meaning["draw"] = DRAW
    return meaning


def _bound(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= {name: inner} if (inner := _bound(value, f"{prefix}{name}.")) else {}
        elif _rule(f"{prefix}{name}") == "bound":
            found[name] = value
    return found


def _rule(setting: str) -> str:
    return SETTINGS.get(setting) or _rule(setting.rpartition(".")[0])
