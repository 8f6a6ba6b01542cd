"""What an engine's process loads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from drafter.engine.engine_config import EngineConfig
from drafter.llm import SpeculativeLM
from drafter.verifiers.verifier_settings import VerifierSettings


@dataclass(frozen=True)
class EngineSpec:
    """What an actor loads.

    Args:
        model: Hub id or folder; None is the embedded base.
        drafter: As in `SpeculativeLM.from_pretrained`.
        loading: Further arguments of `SpeculativeLM.from_pretrained`.
        config: The engine's sizes.
        threads: CPU threads: the actor's share of the machine.
        isolated: Whether no request may be drafted from another one's text.
        verifier: Which draft tokens become output.
    """

    model: str | None
    drafter: str
    loading: dict[str, Any]
    config: EngineConfig
    threads: int
    isolated: bool = False
    verifier: VerifierSettings = field(default_factory=VerifierSettings)

    def load(self) -> SpeculativeLM:
        """Load the models and start the engine.

        Raises:
            LoadError: The models cannot be loaded.
        """
        torch.set_num_threads(self.threads)
        return SpeculativeLM.from_pretrained(
            self.model,
            self.drafter,
            config=self.config,
            isolated=self.isolated,
            verifier=self.verifier,
            **self.loading,
        )
