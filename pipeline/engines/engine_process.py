"""The class of an engine's process, as a driver names it. The process alone imports the engine."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


class EngineProcess:
    """An `EngineActor`, with its arguments. A driver would spend ten seconds on its imports and use none of them."""

    def __init__(self, **arguments: Any) -> None:
        from pipeline.engines.engine_actor import EngineActor

        self._actor = EngineActor(**arguments)

    def __call__(self, block: pa.Table) -> pa.Table:
        return self._actor(block)
