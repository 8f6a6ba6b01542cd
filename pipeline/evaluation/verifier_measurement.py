"""Requests decoded under several verifiers, by an actor; the driver scores what comes and says what to try next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from drafter.base.loading import load_base, load_tokenizer
from drafter.drafters.registry import load_drafter, useful_nodes
from drafter.engine.engine_config import EngineConfig
from drafter.evaluation.environment import environment
from drafter.evaluation.leniency.verifier_runs import VerifierRun, VerifierTrials
from drafter.requests import Request
from drafter.verifiers.verifier_settings import VerifierSettings


class VerifierMeasurement:
    """Holds the base for as long as it lives. Call `load`, then `begin`, then `run` for each verifier.

    Args:
        model: Hub id or folder of the base.
        loading: How it is loaded: further arguments of `load_base`.
        threads: CPU threads.
    """

    def __init__(self, model: str, loading: Mapping[str, Any], threads: int) -> None:
        self._model, self._loading, self._threads = model, loading, threads
        self._trials: VerifierTrials | None = None

    def load(self, command: str) -> dict[str, Any]:
        """Load the base, and return where this is.

        Args:
            command: The command line, for the record.

        Raises:
            LoadError: It cannot be loaded.
        """
        torch.set_num_threads(self._threads)
        self._base = load_base(self._model, **self._loading)
        trusted = bool(self._loading["trust_remote_code"])
        self._tokenizer = load_tokenizer(self._model, trust_remote_code=trusted)
        return environment(self._base, command)

    def begin(self, drafter: str, engine: Mapping[str, Any], requests: Sequence[Request], rounds: int) -> int:
        """Take up requests, and return how many draft tokens a path has at most.

        Args:
            drafter: Name of the drafter.
            engine: The engine's settings; see `EngineSettings`.
            requests: What to decode.
            rounds: How often everything is timed.

        Raises:
            LoadError: The drafter cannot be loaded.
        """
        self._trials = None  # the engine before gives its memory back
        base, config = self._base, EngineConfig(**engine)
        nodes = useful_nodes(base.device) if config.nodes == "auto" else config.nodes
        self._trials = VerifierTrials(
            base, self._tokenizer, lambda: load_drafter(drafter, base, nodes), requests, config, rounds
        )
        return self._trials.depth

    def run(self, settings: VerifierSettings) -> VerifierRun:
        """Return what comes of the requests under a verifier.

        Raises:
            LoadError: The verifier does not fit the base or the drafter.
            RequestError: It does not take the requests' settings.
        """
        assert self._trials is not None
        return self._trials.run(settings)
