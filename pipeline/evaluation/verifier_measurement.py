"""Requests decoded under several verifiers, on a worker; the driver scores what comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from drafter.base.loading import load_base, load_tokenizer
from drafter.drafters.registry import load_drafter, useful_nodes
from drafter.engine.engine_config import EngineConfig
from drafter.evaluation.environment import environment
from drafter.evaluation.leniency.verifier_runs import VerifierRun, verifier_runs
from drafter.requests import Request
from drafter.verifiers.verifier_settings import VerifierSettings


def measure_verifiers(
    model: str,
    drafter: str,
    loading: Mapping[str, Any],
    engine: Mapping[str, Any],
    requests: Sequence[Request],
    verifiers: Sequence[VerifierSettings],
    rounds: int,
    command: str,
    threads: int,
) -> Iterator[dict[str, Any] | VerifierRun]:
    """Load the models; yield where this is, and then what comes of the requests under each verifier.

    Args:
        model: Hub id or folder of the base.
        drafter: Name of the drafter.
        loading: How they are loaded: further arguments of `load_base`.
        engine: The engine's settings; see `EngineSettings`.
        requests: What to decode.
        verifiers: The verifiers' settings.
        rounds: How often everything is timed.
        command: The command line, for the record.
        threads: CPU threads.

    Raises:
        LoadError: A model cannot be loaded, or a verifier does not fit it.
        RequestError: A verifier does not take the requests' settings.
    """
    torch.set_num_threads(threads)
    base = load_base(model, **loading)
    tokenizer = load_tokenizer(model, trust_remote_code=bool(loading["trust_remote_code"]))
    yield environment(base, command)
    config = EngineConfig(**engine)
    nodes = useful_nodes(base.device) if config.nodes == "auto" else config.nodes
    yield from verifier_runs(
        base, tokenizer, lambda: load_drafter(drafter, base, nodes), requests, verifiers, config, rounds
    )
