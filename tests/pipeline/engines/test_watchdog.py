"""A step that hangs is noticed, and one that does not is not."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from pipeline.engines.engine_actor import watch
from tests.support.waiting import PATIENCE


@dataclass
class Engine:
    idle: bool = True
    last_step: float = field(default_factory=time.monotonic)


def test_only_an_engine_that_is_busy_and_stands_still_is_stuck() -> None:
    idle, busy = Engine(), Engine(idle=False)
    calls: list[str] = []
    ended = threading.Event()
    watch(idle, 0.01, lambda: calls.append("idle"))
    busy.last_step = time.monotonic() + 0.3  # steps come until then
    watch(busy, 0.01, ended.set)
    assert ended.wait(PATIENCE)
    assert time.monotonic() > busy.last_step
    assert calls == []
