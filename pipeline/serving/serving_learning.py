"""The endpoint's settings `learning.*`: those of a job, whose text may be learnt from, and where the head is kept."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import InputError
from pipeline.learning.learning_config import LearningConfig

NOBODY, EVERYBODY = "none", "all"


@dataclass(frozen=True)
class ServingLearning(LearningConfig):
    """A draft head that learns from the requests of clients who agreed to that.

    Args:
        agreed: Whose requests are learnt from: `none`; `all`, where every client has agreed; or a file with the keys of
            those who have, one on each line, to be found where the ingress runs.
        folder: Where the head and all that learning needs to go on is kept: a folder of this endpoint's own, or a URI,
            that the same place is behind on every machine.
    """

    agreed: str = NOBODY
    folder: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("agreed", "folder"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise InputError(f"learning.{name} is empty")
        if not self.enabled:
            return
        if self.agreed == NOBODY:
            raise InputError(
                "learning is enabled, but nobody has agreed to be learnt from: set learning.agreed to a file with the "
                "keys of those who have, or to all"
            )
        if self.folder is None:
            raise InputError("learning is enabled, but there is no folder for the head: set learning.folder")
