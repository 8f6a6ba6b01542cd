"""Reports as an engine makes them."""

from __future__ import annotations

from drafter.statistics import EngineState
from pipeline.progress.board import EngineFacts, EngineReport


def engine(seconds: float = 1.0, active: int = 3) -> EngineReport:
    state = EngineState(active, 2, 4, 0, 0, 0, 0, 0, 0, 0, 0, stage_seconds={})
    return EngineReport(seconds, "a GPU", EngineFacts("f00", "float32", "exact", True), state)
