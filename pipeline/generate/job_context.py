"""What the steps of a generation job share."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from drafter.requests import DRAW
from drafter.verifiers.verifier_settings import VerifierSettings
from pipeline.cluster.shares import ActorResources
from pipeline.generate.generate_config import GenerateConfig
from pipeline.io.fingerprints import input_fingerprints
from pipeline.io.listing import InputListing
from pipeline.io.prompt_source import PromptSource
from pipeline.output.output_folder import OutputFolder
from pipeline.output.run_file import read_run, save_run
from pipeline.progress.reports import EngineFacts
from pipeline.staging.staged_input import Part, StagedInput

if TYPE_CHECKING:  # it imports torch, which checks do without
    from pipeline.learning.learner_spec import Beginning

LEARNING = "learning"
"""In `run.json`: what a head has learnt from the rows, what that has cost and what it has saved."""
SPECULATION = "speculation"
"""In `run.json`: what drafting was worth, what was chosen and why; see `speculation_record`."""


@dataclass(frozen=True)
class JobContext:
    """A generation job, checked and ready to run.

    Args:
        config: Its configuration.
        listing: The files of its input.
        prompts: Where the prompts are in them.
        output: Where its results go.
        meaning: All that decides what its results are; see `job_meaning`.
    """

    config: GenerateConfig
    listing: InputListing
    prompts: PromptSource
    output: OutputFolder
    meaning: dict[str, Any]

    def save_run(self, state: Literal["running", "finished"], **facts: Any) -> None:
        """Write `run.json`."""
        save_run(self.output.run_file, self.config.as_dict(), self.meaning, state=state, **facts)

    def engine_facts(self) -> dict[str, Any]:
        """Read from `run.json` what the engines decode with; all None before an engine has reported it."""
        run = read_run(self.output.run_file)
        names = [*(field.name for field in dataclasses.fields(EngineFacts)), SPECULATION]
        names += [LEARNING] if self.config.learning.enabled else []
        return {name: run.get(name) for name in names}


@dataclass(frozen=True)
class Work:
    """What a submission has to generate, and with what.

    Args:
        staged: The staged input.
        missing: Its parts that are not in the output yet.
        resources: What engines take of the cluster.
        beginning: What a head begins with that learns from the rows; None where none does.
    """

    staged: StagedInput
    missing: list[Part]
    resources: ActorResources
    beginning: Beginning | None = None

    @property
    def rows(self) -> int:
        """Rows of the missing parts."""
        return sum(part.rows for part in self.missing)


def job_meaning(
    config: GenerateConfig, listing: InputListing, prompts: PromptSource, base: str, heads: dict[str, str]
) -> dict[str, Any]:
    """Return all that decides which rows come out and what is in them; not how many machines or rows at once.

    Args:
        config: The job's configuration.
        listing: Its input.
        prompts: Where the prompts are in it.
        base: Fingerprint of the base model.
        heads: Fingerprints of draft heads, and of a verifier's classifier, by name.

    Raises:
        InputError: A file of the input cannot be read.
    """
    draws = config.sampling.temperature > 0 or prompts.own_sampling
    return {
        "input": input_fingerprints(listing),
        "reading": asdict(config.reading),
        "model": base,
        "dtype": config.loading.dtype,
        "drafter": config.drafter,
        "heads": heads,
        "sampling": config.as_dict()["sampling"],
        "max_length": config.engine.max_length,
        "per_step_accepted": config.writing.per_step_accepted,
        **({"learning": True} if config.learning.enabled else {}),  # a column more
        **({"draw": DRAW} if draws else {}),
        **({} if config.verifier == VerifierSettings() else {"verifier": asdict(config.verifier)}),
    }
