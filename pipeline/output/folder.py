"""Layout of a job's output folder."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pyarrow import fs

from pipeline.errors import InputError
from pipeline.io.files import Location, delete_twice, make_folders, partials, read_either
from pipeline.staging.staging import STAGED_LIST

RUN_FILE = "run.json"
"""Configuration, versions and state, in every job's output."""
LEASE_FILE = "_lease.json"
"""The lease of the submission that works on an output."""
STATUS_FILE = "status.json"
"""Progress of a generation job, in its output."""
HEAD_CONFIG = "config.json"
"""Configuration of a draft head, in its folder."""


@dataclass(frozen=True)
class CompactionPlan:
    """Plan of merging parts' files, by the name of the merged file; all names are without suffixes."""

    data: dict[str, list[str]]
    errors: dict[str, list[str]]


@dataclass(frozen=True)
class OutputFolder:
    """A job's output folder."""

    root: Location

    @property
    def data(self) -> Location:
        return self.root / "data"

    @property
    def errors(self) -> Location:
        return self.root / "errors"

    @property
    def staged(self) -> Location:
        return self.root / "_staged"

    @property
    def temporary(self) -> Location:
        return self.root / "_temporary"

    @property
    def unfinished(self) -> Location:
        """Finished rows of uncommitted parts, left by a submission that was stopped."""
        return self.root / "_unfinished.parquet"

    @property
    def lease(self) -> Location:
        return self.root / LEASE_FILE

    @property
    def compaction_file(self) -> Location:
        return self.root / "_compaction.json"

    @property
    def run_file(self) -> Location:
        return self.root / RUN_FILE

    @property
    def status_file(self) -> Location:
        return self.root / STATUS_FILE

    @property
    def head(self) -> Location:
        """The newest version of a head that learns from the rows: a head's folder."""
        return self.root / "head"

    @property
    def learner_state(self) -> Location:
        """State for resuming a learner."""
        return self.root / "_learner.safetensors"

    @property
    def learning_file(self) -> Location:
        """A learner's record."""
        return self.root / "learning.json"

    @property
    def batch_output(self) -> Location:
        """Answers to the requests of an OpenAI batch, one a line."""
        return self.root / "batch_output.jsonl"

    @property
    def batch_errors(self) -> Location:
        """Unanswered requests of an OpenAI batch with the reasons, one a line."""
        return self.root / "batch_errors.jsonl"

    @property
    def batch_files(self) -> tuple[Location, Location]:
        return self.batch_output, self.batch_errors

    def create(self) -> None:
        """Make the folders.

        Raises:
            InputError: They cannot be made or written to.
        """
        make_folders(self.root, [self.data, self.errors, self.temporary], self.temporary)

    def delete_temporary(self) -> None:
        """Delete partially written files of earlier submissions. The caller must hold the lease."""
        self.temporary.filesystem.delete_dir_contents(self.temporary.path, missing_dir_ok=True)
        for folder in (self.root, self.data, self.errors, self.staged, self.head):
            for partial in partials(folder):
                if not partial.name.startswith(LEASE_FILE):  # which the lease itself writes, and cleans up
                    partial.delete()

    def has_results(self) -> bool:
        """Return whether there are generated rows to keep: of a committed part, or of a stopped submission."""
        return bool(self.committed()) or self.unfinished.type == fs.FileType.File

    def forget_job(self) -> None:
        """Delete the remains of a job without results, except `run.json`. The caller must hold the lease."""
        self.staged.empty(first=STAGED_LIST)
        self.errors.filesystem.delete_dir_contents(self.errors.path, missing_dir_ok=True)
        self.head.empty(first=HEAD_CONFIG)
        for file in (self.learner_state, self.learning_file):
            file.delete()

    def compaction(self) -> CompactionPlan | None:
        """Read the plan of compaction; None if there is none.

        Raises:
            InputError: The plan is damaged, and so is its copy.
        """
        try:
            return read_either(self.compaction_file, lambda text: CompactionPlan(**json.loads(text)))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise InputError(f"{error}, and so is its copy: choose another output") from error

    def forget_compaction(self) -> None:
        delete_twice(self.compaction_file)

    def committed(self) -> set[str]:
        paths = (info.path.rpartition("/")[2] for info in self.data.children())
        names = {name.removesuffix(".parquet") for name in paths if name.endswith(".parquet")}
        plan = self.compaction()
        merges = {} if plan is None else plan.data
        return names.difference(merges).union(*(merges[merged] for merged in names.intersection(merges)))
