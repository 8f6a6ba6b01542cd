"""Tells an engine's drafter what other processes have decoded, in threads of its own.

At first these are the rows in the job's output, from earlier submissions and other nodes. From then on they are those
that the node's other engines finish. The engine waits for none of this, and whatever fails costs drafts only.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from drafter.drafters.contract import Drafter
from drafter.drafters.text_queue import TextQueue
from drafter.requests import Generation, Request
from pipeline.engines.memory.earlier_texts import earlier_texts
from pipeline.engines.memory.node_texts import Seen, texts_of_node
from pipeline.io.files import Location
from pipeline.progress.pulse import Pulse

_PULSE_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_UNTOLD_TOKENS = 1 << 16
"""Tokens that wait to be told to the other engines; older ones are dropped."""


@dataclass(frozen=True)
class OtherTexts:
    """What an engine can learn from beside its own rows.

    Args:
        data: The folder of the job's finished rows; None to read none.
        shared: Whether there may be other engines of the job on its node.
    """

    data: Location | None
    shared: bool


class MemoryFeed:
    """Feeds a drafter.

    Args:
        drafter: Of an engine that has been made.
        others: What there is to learn from.
        run: The job's name.
        connect: Returns an actor handle for a job's name.
    """

    def __init__(
        self, drafter: Drafter, others: OtherTexts, run: str, connect: Callable[[str], Any] = texts_of_node
    ) -> None:
        self._drafter, self._others, self._run, self._connect = drafter, others, run, connect
        self._name = uuid.uuid4().hex
        self._said = TextQueue(_UNTOLD_TOKENS)
        self._actor: Any = None
        self._seen: Seen | None = None
        self._pulse = Pulse(_PULSE_SECONDS, self.exchange)

    def start(self) -> None:
        """Begin, if there is something to learn from and the drafter has use for it."""
        if self._drafter.memory.room:
            threading.Thread(target=self.refill, name="refill", daemon=True).start()
            if self._others.shared:
                self._pulse.start()

    def finished(self, generation: Generation, request: Request) -> None:
        """Let the node's other engines know of a row that has just finished."""
        if self._others.shared and self._drafter.memory.room:
            self._said.put([[*request.prompt_ids, *generation.token_ids]])

    def refill(self) -> None:
        """Remember the rows that the output has already."""
        if self._others.data is not None:
            self._drafter.remember(earlier_texts(self._others.data, self._drafter.memory.room))

    def exchange(self) -> None:
        """Tell what has been said here, and remember what has been said by others; nothing where nobody answers."""
        try:
            if self._actor is None:
                self._actor = self._connect(self._run)
            said = self._said.take(_UNTOLD_TOKENS)
            call = self._actor.exchange.remote(self._name, said, self._seen)
            texts, self._seen = ray.get(call, timeout=_ANSWER_SECONDS)
        except ray.exceptions.GetTimeoutError:
            return  # it is still being started, or has much to do; without this handle Ray would end it
        except (ray.exceptions.RayError, ValueError):  # it has died, or is being made by another engine
            self._actor = None
            return
        if texts:
            self._drafter.remember(texts)
