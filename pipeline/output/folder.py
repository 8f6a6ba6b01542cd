"""The folder of a job's results: which file is where, and which parts it holds."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pyarrow import fs

from pipeline.errors import InputError
from pipeline.io.files import Location, delete_twice, make_folders, partials, read_either
from pipeline.staging.staging import STAGED_LIST

RUN_FILE = "run.json"
"""Says what was run, in every job's output."""
LEASE_FILE = "_lease.json"
"""Says which submission works on an output."""
STATUS_FILE = "status.json"
"""Says how far a generation job is, in its output."""
HEAD_CONFIG = "config.json"
"""Says in a head's folder what the head is."""


@dataclass(frozen=True)
class CompactionPlan:
    """Which parts' files become one, by the name of the merged file; all names are without suffixes.

    Args:
        data: Files in `data/`.
        errors: Files in `errors/`.
    """

    data: dict[str, list[str]]
    errors: dict[str, list[str]]


@dataclass(frozen=True)
class OutputFolder:
    """Where everything that belongs to a job is.

    Args:
        root: The output that was asked for.
    """

    root: Location

    @property
    def data(self) -> Location:
        """Parquet files of finished rows."""
        return self.root / "data"

    @property
    def errors(self) -> Location:
        """Parquet files of rows that could not be generated."""
        return self.root / "errors"

    @property
    def staged(self) -> Location:
        """The staged input."""
        return self.root / "_staged"

    @property
    def temporary(self) -> Location:
        """Files that are being written."""
        return self.root / "_temporary"

    @property
    def unfinished(self) -> Location:
        """Finished rows of parts that are not committed, left by a submission that was stopped."""
        return self.root / "_unfinished.parquet"

    @property
    def lease(self) -> Location:
        """Says which submission works on the output."""
        return self.root / LEASE_FILE

    @property
    def compaction_file(self) -> Location:
        """Says which parts' files become one."""
        return self.root / "_compaction.json"

    @property
    def run_file(self) -> Location:
        """Says what was run."""
        return self.root / RUN_FILE

    @property
    def status_file(self) -> Location:
        """Says how far the job is."""
        return self.root / STATUS_FILE

    @property
    def head(self) -> Location:
        """The newest version of a head that learns from the rows: a head's folder."""
        return self.root / "head"

    @property
    def learner_state(self) -> Location:
        """What else a learner needs to go on."""
        return self.root / "_learner.safetensors"

    @property
    def learning_file(self) -> Location:
        """Says what a learner has done, and what that has brought."""
        return self.root / "learning.json"

    @property
    def batch_output(self) -> Location:
        """Answers to the requests of an OpenAI batch, one a line."""
        return self.root / "batch_output.jsonl"

    @property
    def batch_errors(self) -> Location:
        """Requests of an OpenAI batch that were not answered, and why, one a line."""
        return self.root / "batch_errors.jsonl"

    @property
    def batch_files(self) -> tuple[Location, Location]:
        """The two files that answer an OpenAI batch."""
        return self.batch_output, self.batch_errors

    def create(self) -> None:
        """Make the folders.

        Raises:
            InputError: They cannot be made or written to.
        """
        make_folders(self.root, [self.data, self.errors, self.temporary], self.temporary)

    def delete_temporary(self) -> None:
        """Delete what earlier submissions were writing when they ended; only the holder of the lease may do so."""
        self.temporary.filesystem.delete_dir_contents(self.temporary.path, missing_dir_ok=True)
        for folder in (self.root, self.data, self.errors, self.staged, self.head):
            for partial in partials(folder):
                if not partial.name.startswith(LEASE_FILE):  # which the lease itself writes, and cleans up
                    partial.delete()

    def has_results(self) -> bool:
        """Return whether any row has been generated that is kept: of a committed part, or left by who was stopped."""
        return bool(self.committed()) or self.unfinished.type == fs.FileType.File

    def forget_job(self) -> None:
        """Delete what a job without results has left, but `run.json`; only the holder of the lease may do so."""
        self.staged.empty(first=STAGED_LIST)
        self.errors.filesystem.delete_dir_contents(self.errors.path, missing_dir_ok=True)
        self.head.empty(first=HEAD_CONFIG)
        for file in (self.learner_state, self.learning_file):
            file.delete()

    def compaction(self) -> CompactionPlan | None:
        """Read which parts' files become one; None where none do.

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
        """Delete the plan, once the files that it is of are gone."""
        delete_twice(self.compaction_file)

    def committed(self) -> set[str]:
        """Return the names of the parts that are in the output."""
        paths = (info.path.rpartition("/")[2] for info in self.data.children())
        names = {name.removesuffix(".parquet") for name in paths if name.endswith(".parquet")}
        plan = self.compaction()
        merges = {} if plan is None else plan.data
        return names.difference(merges).union(*(merges[merged] for merged in names.intersection(merges)))
