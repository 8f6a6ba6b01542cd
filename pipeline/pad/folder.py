"""The output folder of the job that trains a classifier for `pad`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drafter.errors import one_line
from pipeline.errors import InputError
from pipeline.io.files import Location, locate
from pipeline.output.folder import RUN_FILE


@dataclass(frozen=True)
class PivotsFolder:
    """Locations of a job's files under `path`, which is on a local disk or one that all machines share."""

    path: Path

    @property
    def root(self) -> Location:
        return locate(str(self.path))

    @property
    def run_file(self) -> Location:
        return self.root / RUN_FILE

    @property
    def answers(self) -> Path:
        """Output of the generation job that answers the prompts exactly."""
        return self.path / "answers"

    @property
    def tokens(self) -> Path:
        """Rejected tokens of the answers; a row of `REJECTION_TYPE` for each."""
        return self.path / "rejected.parquet"

    @property
    def requests(self) -> Path:
        """OpenAI batch of the texts to continue."""
        return self.path / "continuations.jsonl"

    @property
    def continuations(self) -> Path:
        """Output of the generation job that continues them."""
        return self.path / "continuations"

    @property
    def labels(self) -> Path:
        """Rejected tokens with their effect on answers."""
        return self.path / "labels.parquet"

    @property
    def verifier(self) -> Path:
        return self.path / "verifier"

    @property
    def results(self) -> Path:
        """Results as JSON."""
        return self.path / "pivots.json"

    def create(self) -> None:
        """Create the folder.

        Raises:
            InputError: It cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"output {self.path} cannot be used: {one_line(error)}") from error

    def has_results(self) -> bool:
        """Return whether rejected tokens have been found; all later results derive from them."""
        return self.tokens.is_file()

    def forget_job(self) -> None:
        """Delete nothing: there may only be the answers' job, which checks its owner itself."""
