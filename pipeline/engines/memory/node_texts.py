"""What the engines of a node have said lately: an actor beside them, from which each takes what the others said.

Nothing but drafts depends on it. Where it dies, what was in it is forgotten, and an engine that asks makes another one.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drafter.drafters.text_queue import Text

_KEPT_TOKENS = 1 << 18
"""Far more than the engines of a node say between two looks."""


@dataclass(frozen=True)
class Seen:
    """How far an engine has looked.

    Args:
        life: Name of the process that it has looked in.
        number: Number of the next text.
    """

    life: str
    number: int


class NodeTexts:
    """Keeps what engines have said, the newest of it; a Ray actor, but nothing in it needs Ray.

    Args:
        capacity: Tokens that are kept.
    """

    def __init__(self, capacity: int = _KEPT_TOKENS) -> None:
        self._capacity, self._life = capacity, uuid.uuid4().hex
        self._kept: deque[tuple[int, str, Text]] = deque()
        self._tokens = self._said = 0

    def exchange(self, engine: str, said: Sequence[Text], seen: Seen | None) -> tuple[list[Text], Seen]:
        """Keep what an engine has said, and return what the others have said since it looked last.

        Args:
            engine: Its name.
            said: What it has said since then.
            seen: What the last call returned; an engine that has not looked yet gets nothing.
        """
        first = seen.number if seen is not None and seen.life == self._life else self._said
        others = [text for number, who, text in self._kept if number >= first and who != engine]
        for text in said:
            self._kept.append((self._said, engine, text))
            self._said += 1
            self._tokens += len(text)
        while self._tokens > self._capacity:
            self._tokens -= len(self._kept.popleft()[2])
        return others, Seen(self._life, self._said)


def texts_of_node(run: str) -> Any:
    """Return the `NodeTexts` actor of this node and job; it is made where there is none.

    Args:
        run: The job's name: its output.
    """
    node = ray.get_runtime_context().get_node_id()
    name = f"texts-{hashlib.sha256(run.encode()).hexdigest()[:16]}-{node}"
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"num_cpus": 0, "name": name, "get_if_exists": True, "scheduling_strategy": here}
    return ray.remote(**options)(NodeTexts).remote()
