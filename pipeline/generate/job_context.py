"""Context shared by the stages of a generation job."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from drafter.acceptance.settings import VerifierSettings
from drafter.requests import DRAW
from pipeline.cluster.ray_cluster import ActorResources
from pipeline.generate.config import GenerateConfig
from pipeline.io.listing import InputListing, input_fingerprints
from pipeline.io.prompt_source import PromptSource
from pipeline.output.folder import OutputFolder
from pipeline.output.run_file import read_run, save_run
from pipeline.progress.board import EngineFacts
from pipeline.staging.staging import Part, StagedInput

if TYPE_CHECKING:  # it imports torch, which checks do without
    from pipeline.learning.learner_spec import Beginning

LEARNING = "learning"
"""Key in `run.json`: results, costs and savings of a head that learns from the rows."""
SPECULATION = "speculation"
"""Key in `run.json`: the gain from drafting and the choices made; see `speculation_record`."""
DRAFTERS = "drafters"
"""Key in `run.json`: the drafter of each submission that generated, and the fingerprints of its heads, by name."""


@dataclass(frozen=True)
class JobContext:
    """A generation job, checked and ready to run.

    Args:
        meaning: Everything that determines its results; see `job_meaning`.
        source: See `input_source`.
    """

    config: GenerateConfig
    listing: InputListing
    prompts: PromptSource
    output: OutputFolder
    meaning: dict[str, Any]
    heads: dict[str, str]
    source: dict[str, Any]

    def save_run(self, state: Literal["running", "finished"], **facts: Any) -> None:
        facts["input"] = self.source["files"]
        save_run(self.output.run_file, self.config.as_dict(), self.meaning, state=state, **facts)

    @property
    def several(self) -> bool:
        """True if an input row may become several, named `ID#0`, `ID#1`, …."""
        return self.prompts.kind == "openai" or self.config.reading.samples > 1

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


@dataclass(frozen=True)
class Work:
    """The work of a submission.

    Args:
        beginning: Initial state of a head that learns from the rows; None without learning.
    """

    staged: StagedInput
    missing: list[Part]
    resources: ActorResources
    beginning: Beginning | None = None

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.missing)


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
    "loading": "free",
    "loading.dtype": "bound",
    "sampling": "bound",
    "engine": "free",
    "engine.max_model_len": "bound",
    "resources": "free",
    "limits": "free",
    "writing": "free",
    "writing.per_step_accepted": "bound",
    "dry_run": "free",
}
"""Whether a later submission of an output may change a setting, by the longest matching name; docs/operations.md
explains.

`bound`: it determines a row's results, or a column. `rows`: it selects the rows; finished ones are kept, see `growing`.
`free`: no token depends on it, and nothing else that lasts.
"""


def is_bound(setting: str) -> bool:
    """Return whether all submissions of an output must have the same value of a setting, such as `sampling.top_k`."""
    names = [setting.rsplit(".", count)[0] for count in range(setting.count(".") + 1)]
    return SETTINGS[next(name for name in names if name in SETTINGS)] == "bound"


def input_source(config: GenerateConfig, listing: InputListing) -> dict[str, Any]:
    """Return the identity of a job's rows: fingerprints of the files, and the selection of rows.

    Raises:
        InputError: A file of the input cannot be read.
    """
    reading = config.reading
    return {
        "files": input_fingerprints(listing),
        **{name: getattr(reading, name) for name in ("format", "skip", "limit")},
    }


def job_meaning(
    config: GenerateConfig,
    prompts: PromptSource,
    base: str,
    heads: dict[str, str],
    date: str | None = None,
) -> dict[str, Any]:
    """Return everything that determines a row's results: bound settings, and the model's fingerprint.

    Args:
        heads: Fingerprints of draft heads, and of a verifier's classifier, by name.
        date: Time for chat templates; None where none reads it.
    """
    meaning: dict[str, Any] = _bound(config.as_dict())
    meaning["model"] = base
    meaning["reading"]["date"] = date
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
        elif is_bound(f"{prefix}{name}"):
            found[name] = value
    return found
