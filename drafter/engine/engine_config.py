"""How much an engine does at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EngineConfig:
    """How much the engine does at once.

    Args:
        slots: Requests decoded together.
        max_length: Prompt and output tokens a slot can hold; None is the base's own limit, at most 2,048.
        max_queue: Requests that may wait for a slot.
        nodes: Draft nodes verified a step; `auto` adapts to what pays on this machine.
        compile: Compile the base's forward with torch.compile: a minute or two at start, less where it was done
            before, for steps of fewer operations.
    """

    slots: int = 16
    max_length: int | None = None
    max_queue: int = 1024
    nodes: int | Literal["auto"] = "auto"
    compile: bool = False

    def __post_init__(self) -> None:
        for name, value in (("slots", self.slots), ("max_queue", self.max_queue), ("max_length", self.max_length)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        if self.nodes != "auto" and (isinstance(self.nodes, bool) or not isinstance(self.nodes, int) or self.nodes < 0):
            raise ValueError(f"nodes must be 'auto' or an integer of at least 0, not {self.nodes!r}")
