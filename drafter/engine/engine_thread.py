"""The thread in which an engine decodes for others."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from contextlib import suppress

from drafter.engine.engine import Engine
from drafter.errors import EngineError


class EngineThread:
    """Steps an engine whenever it has requests, until it is closed, or left with nothing to do.

    Whoever submits requests holds this object, and this object does not hold them. So a model whose last reference
    goes can `leave`: its requests end, and then thread and engine are gone.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._process = engine, os.getpid()
        self._closing = self._left = False
        self._calls = queue.SimpleQueue[None]()  # its `put` may interrupt itself, as a garbage collection does
        self._thread = threading.Thread(target=self._run, name="drafter-engine", daemon=True)
        self._thread.start()
        engine.wake = self.wake
        atexit.register(self.close)  # at exit Python kills daemon threads; inside a step that crashes

    @property
    def forked(self) -> bool:
        """True in a forked child, which has the object but not the thread."""
        return os.getpid() != self._process

    def wake(self) -> None:
        """Look for requests."""
        self._calls.put(None)

    def leave(self) -> None:
        """End once all requests have ended; from any thread, without waiting."""
        self._left = True
        self._calls.put(None)

    def close(self) -> None:
        """End after the step under way, and wait for it; unfinished requests end with an error."""
        if self.forked:
            return
        self._closing = True
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while not (self._closing or (self._left and self._engine.idle)):
                if self._engine.idle:
                    with suppress(queue.Empty):
                        self._calls.get(timeout=self._engine.scheduler.parked_seconds(time.monotonic()))
                else:
                    self._engine.step()
        except BaseException as error:  # whatever it is, also a tokeniser's panic, it must reach the waiting requests
            self._engine.fail(error)
        else:
            self._engine.fail(EngineError("the engine is closed: load the model again"))
        finally:
            atexit.unregister(self.close)
