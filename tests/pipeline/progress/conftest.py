"""Reports as an engine makes them."""

from __future__ import annotations

from drafter.statistics import EngineState
from pipeline.progress.board import EngineFacts, EngineReport


def engine(seconds: float = 1.0, active: int = 3) -> EngineReport:
    counts = ("steps", "row_steps", "output_tokens", "draft_tokens", "accepted_tokens", "prefilled_tokens")
    zeros = dict.fromkeys((*counts, "shared_tokens", "preemptions"), 0)
    state = EngineState(active=active, waiting=2, slots=4, stage_seconds={}, **zeros)
    return EngineReport(seconds, "a GPU", EngineFacts("f00", "exact", True), state)
