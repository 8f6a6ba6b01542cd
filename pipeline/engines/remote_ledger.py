"""The ledger, as an engine's process sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from pipeline.engines.ledger import RowKey, RowOutcome


class RemoteLedger:
    """Calls the `Ledger` actor in the name of this process's engine and waits for its answers.

    Args:
        actor: A `Ledger` actor.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        # A process that replaces a dead one has the same actor id.
        self._engine = ray.get_runtime_context().get_actor_id()

    def arrive(self) -> bool:
        """See `Ledger.arrive`."""
        return bool(ray.get(self._actor.arrive.remote(self._engine)))

    def loaded(self, base: str) -> str:
        """See `Ledger.loaded`."""
        return str(ray.get(self._actor.loaded.remote(base)))

    def has_loaded(self) -> bool:
        """See `Ledger.has_loaded`."""
        return bool(ray.get(self._actor.has_loaded.remote()))

    def open_part(self, part: str, wanted: int) -> tuple[dict[str, RowOutcome], dict[str, int]]:
        """See `Ledger.open_part`."""
        outcomes, deaths = ray.get(self._actor.open_part.remote(part, wanted))
        return outcomes, deaths

    def exchange(self, left: Mapping[RowKey, RowOutcome], entering: list[RowKey]) -> bool:
        """See `Ledger.exchange`."""
        return bool(ray.get(self._actor.exchange.remote(self._engine, left, entering)))
