"""Models and settings of an engine's process."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drafter.acceptance.settings import VerifierSettings
from drafter.engine.config import EngineConfig
from drafter.errors import LoadError, one_line
from pipeline.learning.config import Beginning

if TYPE_CHECKING:
    from drafter.llm import SpeculativeLM
    from drafter.methods.learning.settings import StartingHead


@dataclass(frozen=True)
class EngineSpec:
    """Models and settings of an engine.

    Args:
        model: Hub id or folder; None is the embedded target model.
        learning: Initial state of a head that learns from the rows; None without learning.
    """

    model: str | None
    drafter: str
    loading: dict[str, Any]
    config: EngineConfig
    threads: int
    isolated: bool = False
    verifier: VerifierSettings = field(default_factory=VerifierSettings)
    learning: Beginning | None = None

    def load(self, on_stage: Callable[[str], None] | None = None) -> SpeculativeLM:
        """Load the models and start the engine; see `SpeculativeLM.from_pretrained` for `on_stage`.

        Raises:
            LoadError: The models cannot be loaded.
        """
        import torch  # late, as in `_load`: a driver makes the specification, and loads nothing

        torch.set_num_threads(self.threads)
        if self.learning is None:
            return self._load(None, on_stage)
        with tempfile.TemporaryDirectory(prefix="drafter-head-") as folder:
            start = self.learning.here(folder)
            try:
                return self._load(start, on_stage)
            except LoadError as error:
                if start == self.learning.start:
                    raise
                print(f"the head that was learnt is left out: {one_line(error)}", file=sys.stderr, flush=True)
                return self._load(self.learning.start, on_stage)

    def _load(self, start: StartingHead | None, on_stage: Callable[[str], None] | None) -> SpeculativeLM:
        from drafter.llm import SpeculativeLM
        from drafter.methods.learning.drafter import Learning

        drafter = self.drafter
        if start is not None and start.folder is not None and drafter != "auto":
            drafter = start.folder  # the head alone, by where this process has it
        return SpeculativeLM.from_pretrained(
            self.model,
            drafter,
            config=self.config,
            isolated=self.isolated,
            verifier=self.verifier,
            learning=None if start is None else Learning(start),
            on_stage=on_stage,
            **self.loading,
        )
