"""Settings of batches."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.command_line import at_least
from pipeline.errors import InputError


@dataclass(frozen=True)
class BatchesConfig:
    """OpenAI's files and batches; see `docs/batches.md`.

    Args:
        folder: Folder for clients' files and the state of batches: of one endpoint at a time, and the same on every
            machine that the ingress may run on. Without one there are no such routes.
        file_bytes: Largest file, in bytes.
        files: Files that a key may have, the results of its batches included.
        lines: Requests in the file of a batch.
        unfinished: Batches of a key that have not ended.
    """

    folder: str | None = None
    file_bytes: int = 100 << 20
    files: int = 1000
    lines: int = 50_000
    unfinished: int = 100

    def __post_init__(self) -> None:
        if self.folder is not None and (not self.folder.strip() or "://" in self.folder):
            raise InputError(f"batches.folder must be a folder of a file system, not {self.folder!r}")
        for name in ("file_bytes", "files", "lines", "unfinished"):
            at_least(f"batches.{name}", getattr(self, name), 1)
