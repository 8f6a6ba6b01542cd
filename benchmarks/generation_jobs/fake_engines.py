"""Engines that sleep in place of computing, for measurements of what a fleet costs beside its GPUs.

Everything around them is the job's own: `EngineActor` with its feeder, reports, metrics and commits. Only the model is
missing: a row's tokens are the same for all rows, and come after a while.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import torch

from drafter.engine.handle import Handle
from drafter.requests import Generation, Request
from drafter.statistics import DecodeCounts, EngineState
from pipeline.engines.engine_actor import EngineActor
from pipeline.engines.ledger import RemoteLedger
from pipeline.engines.models import EngineSpec

_SPREAD = 0.5  # of a row's seconds, by which they differ, so that engines do not march in step


class FakeEngine:
    """Takes requests, decodes `slots` of them at once, and returns the same text for each.

    Args:
        row_seconds: Mean seconds of a row in its slot.
        tokens: Tokens of a row.
        on_row: Called before the first row decodes.
        hurries: Ends rows at once from when it first returns True.
    """

    def __init__(
        self,
        slots: int,
        row_seconds: float,
        tokens: int,
        on_row: Callable[[], None] = lambda: None,
        hurries: Callable[[], bool] = lambda: False,
    ) -> None:
        self._slots, self._row_seconds, self._tokens = slots, row_seconds, tokens
        self._on_row, self._hurries = on_row, hurries
        self._waiting: list[Handle] = []
        self._active: list[tuple[float, int, Handle]] = []  # a heap by the time of their end
        self._number = self._steps = 0
        self._changed = threading.Condition()
        self.verifier = SimpleNamespace(name="exact", lossless=True, settings={})
        self.drafter = SimpleNamespace(memory=SimpleNamespace(room=0))
        self.idle, self.last_step = True, 0.0  # for the watchdog, which has nothing to fear here
        threading.Thread(target=self._run, name="fake-engine", daemon=True).start()

    def submit(self, request: Request) -> Handle:
        handle = Handle(request, stream=False)
        with self._changed:
            self._waiting.append(handle)
            self._changed.notify()
        return handle

    def state(self) -> EngineState:
        with self._changed:
            active, waiting = len(self._active), len(self._waiting)
        return EngineState(active, waiting, self._slots, self._steps, self._steps, 0, 0, 0, 0, 0, 0, {})

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                while self._waiting and len(self._active) < self._slots:
                    if not self._number:
                        self._on_row()
                    self._number += 1
                    seconds = self._row_seconds * random.uniform(1 - _SPREAD, 1 + _SPREAD)
                    heapq.heappush(self._active, (now + seconds, self._number, self._waiting.pop(0)))
                if not self._active or (self._active[0][0] > now and not self._hurries()):
                    # A second at most, to hear of a hurry.
                    self._changed.wait(min(self._active[0][0] - now, 1.0) if self._active else None)
                    continue
                _, _, handle = heapq.heappop(self._active)
            self._steps += self._tokens
            handle.future.set_result(self._generation(handle.request))

    def _generation(self, request: Request) -> Generation:
        tokens, counts = list(range(self._tokens)), DecodeCounts(self._tokens, self._tokens)
        return Generation(request.request_id, tokens, "word " * self._tokens, "length", len(request.prompt_ids), counts)


@dataclass(frozen=True)
class FakeSpec(EngineSpec):
    """What an engine's process loads: nothing, for `start_seconds`.

    Args:
        marks: Folder where an engine leaves a file when its first row decodes, with the time in seconds since 1970.
        engines: Engines of the job. Rows end at once when so many marks are there; by default never.
        hosted: Engines of one process; see `EngineHost`.
        slots: Slots of each of them.
    """

    start_seconds: float = 0.0
    row_seconds: float = 1.0
    tokens: int = 256
    marks: Path = Path()
    engines: int | None = None
    hosted: int = 1
    slots: int = 4

    def load(self, on_stage: Callable[[str], None] | None = None) -> Any:
        """See `EngineSpec.load`; the result has what an `EngineActor` uses of a `SpeculativeLM`."""
        time.sleep(self.start_seconds)
        engine = FakeEngine(self.slots, self.row_seconds, self.tokens, self._mark, self._all_there)
        base = SimpleNamespace(fingerprint="fake", weights="float32", device=torch.device("cpu"))
        return SimpleNamespace(engine=engine, base=base, submit=engine.submit)

    def _mark(self) -> None:
        (self.marks / uuid.uuid4().hex).write_text(str(time.time()), encoding="utf-8")

    def _all_there(self) -> bool:
        return self.engines is not None and len(list(self.marks.iterdir())) >= self.engines


@dataclass
class _HostedLedger(RemoteLedger):
    """The ledger's client of one of several engines in a process, each of which has a name of its own."""

    _actor: Any
    _engine: str = field(default_factory=lambda: uuid.uuid4().hex)


class EngineHost:
    """Several whole `EngineActor` in one process, where a process for each would not fit into memory.

    A call goes to the engine with the fewest calls. Each makes its own calls to board and ledger. The spec's slots
    are those of all together, from which the job concludes how many calls the process takes.
    """

    def __init__(self, **arguments: Any) -> None:
        patch("pipeline.engines.engine_actor.RemoteLedger", _HostedLedger).start()  # for as long as the process lives
        spec: FakeSpec = arguments["spec"]
        own = replace(spec, config=replace(spec.config, max_num_seqs=spec.slots))
        self._engines = [EngineActor(**{**arguments, "spec": own}) for _ in range(spec.hosted)]
        self._calls = [0] * len(self._engines)
        self._lock = threading.Lock()

    def __call__(self, block: pa.Table) -> pa.Table:
        """See `EngineActor`."""
        with self._lock:
            place = self._calls.index(min(self._calls))
            self._calls[place] += 1
        try:
            return self._engines[place](block)
        finally:
            with self._lock:
                self._calls[place] -= 1
