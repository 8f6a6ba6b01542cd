"""The thread in which an engine decodes for others."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from torch import Tensor

from drafter.engine.engine import Engine
from drafter.errors import EngineError

_PATIENCE = 10.0  # seconds for which a step may go on once it is known that it will fail


class EngineThread:
    """Steps an engine whenever it has requests, until it is closed, or left with nothing to do.

    Whoever submits requests holds this object, and this object does not hold them. So a model whose last reference
    goes can `leave`: its requests end, and then thread and engine are gone.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._process = engine, os.getpid()
        self._closing = self._left = self._stuck = False
        # Its `put` may interrupt itself, as a garbage collection does.
        self._calls = queue.SimpleQueue[Callable[[], None] | None]()
        self._thread = threading.Thread(target=self._run, name="drafter-engine", daemon=True)
        self._thread.start()
        engine.wake = self.wake
        if engine.base.others is not None:
            engine.base.others.on_end(partial(_end, weakref.ref(self)))
        atexit.register(self.close)  # at exit Python kills daemon threads; inside a step that crashes

    @property
    def forked(self) -> bool:
        """True in a forked child, which has the object but not the thread."""
        return os.getpid() != self._process

    def refuse_fork(self) -> None:
        """Raise `EngineError` in a forked child, which would wait for ever."""
        if self.forked:
            raise EngineError(
                "the model was loaded in another process, of which this one is a fork: load it in this process, or "
                "start processes by spawn"
            )

    def wake(self) -> None:
        """Look for requests."""
        self._calls.put(None)

    def update_weights(self, weights: Sequence[tuple[Tensor, Tensor]]) -> int:
        """Replace the target model's weights between two steps, and return their version; see `_update`.

        Raises:
            EngineError: Requests are under way, or the engine has failed or is closed.
        """
        self.refuse_fork()
        done = Future[int]()

        def work() -> None:
            try:
                done.set_result(_update(self._engine, weights))
            except BaseException as error:  # the caller's, whatever it is
                done.set_exception(error)

        self._calls.put(work)
        if self._engine.failure is not None:  # the thread may have ended before; if not, it takes what has been put
            raise self._engine.failure
        return done.result()

    def leave(self) -> None:
        """End once all requests have ended; from any thread, without waiting."""
        self._left = True
        self._calls.put(None)

    def fail(self, error: EngineError) -> None:
        """End all requests with an error that another thread has noticed, also if the step under way never ends."""

        def work() -> None:
            raise error

        self._calls.put(work)
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            self._stuck = True
            self._engine.fail(error)

    def close(self) -> None:
        """End after the step under way, and wait for it; unfinished requests end with an error."""
        if self.forked or self._stuck:
            return
        self._closing = True
        self._calls.put(None)
        self._thread.join()
        if self._engine.base.others is not None:
            self._engine.base.others.close()

    def _run(self) -> None:
        try:
            while not (self._closing or (self._left and self._engine.idle)):
                idle = self._engine.idle
                with suppress(queue.Empty):
                    seconds = self._engine.scheduler.parked_seconds(time.monotonic()) if idle else None
                    if (work := self._calls.get(idle, seconds)) is not None:
                        work()
                if not idle:
                    self._engine.step()
        except BaseException as error:  # whatever it is, also a tokeniser's panic, it must reach the waiting requests
            self._engine.fail(error)
        else:
            self._engine.fail(EngineError("the engine is closed: load the model again"))
        finally:
            while not self._calls.empty():
                if (work := self._calls.get()) is not None:
                    with suppress(EngineError):  # of `fail`; others find that the engine has failed
                        work()
            atexit.unregister(self.close)


def _end(thread: weakref.ref[EngineThread], error: EngineError) -> None:
    if (there := thread()) is not None:
        there.fail(error)


def _update(engine: Engine, weights: Sequence[tuple[Tensor, Tensor]]) -> int:
    """Replace weights by those that `match_weights` has paired, and drop or make again all that depends on old ones.

    If that fails half-way, so does the engine: some weights are new, and others old.
    """
    if engine.failure is not None:
        raise engine.failure
    scheduler = engine.scheduler
    try:
        if not engine.idle:
            engine.step()  # after which requests that were cancelled have ended
        waiting = len(scheduler.waiting) + len(scheduler.background)
        count = len(scheduler.in_slots) + len(scheduler.parked) + waiting
        if not count:
            scheduler.kept.clear()
            engine.base.update_weights(weights)
    except BaseException as error:
        engine.fail(error)
        raise
    if count:
        raise EngineError(
            f"{count} requests are under way, and each is decoded by one version of the weights: wait for their "
            "results, or cancel them, and update the weights then"
        )
    return engine.base.weights_version
