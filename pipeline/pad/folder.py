"""The output folder of the job that makes a classifier for `pad`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drafter.errors import one_line
from pipeline.errors import InputError
from pipeline.io.files import Location, locate
from pipeline.output.folder import RUN_FILE


@dataclass(frozen=True)
class PivotsFolder:
    """Where everything is.

    Args:
        path: The output that was asked for, on a local disk or one that all machines share.
    """

    path: Path

    @property
    def root(self) -> Location:
        """The output."""
        return locate(str(self.path))

    @property
    def run_file(self) -> Location:
        """What the job is, and whether it has finished."""
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
        """The texts that are continued: an OpenAI batch."""
        return self.path / "continuations.jsonl"

    @property
    def continuations(self) -> Path:
        """Output of the generation job that continues them."""
        return self.path / "continuations"

    @property
    def labels(self) -> Path:
        """What each rejected token does to answers."""
        return self.path / "labels.parquet"

    @property
    def verifier(self) -> Path:
        """The classifier."""
        return self.path / "verifier"

    @property
    def results(self) -> Path:
        """What was found, as JSON."""
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
        """Return whether rejected tokens have been found: all that comes after is made of them."""
        return self.tokens.is_file()

    def forget_job(self) -> None:
        """Delete nothing: what there may be is the answers' job, which knows whose it is."""
