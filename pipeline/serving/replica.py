"""A replica: what Ray Serve starts, asks, and replaces when it is ill."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import ray
from ray import serve

from pipeline.engines.engine_spec import EngineSpec
from pipeline.learning.config import LearningConfig
from pipeline.learning.feed import LearningFeed
from pipeline.learning.job_learner import WatchedLearner, find_learner
from pipeline.learning.learner_spec import LearnerSpec
from pipeline.progress.board import LearningReport
from pipeline.progress.watch import Pulse
from pipeline.serving.answers import Answers
from pipeline.serving.http.handles import keep_to_this_machine


class EngineReplica(Answers):
    """One engine in a process of its own.

    Ray Serve calls `check_health` now and then, and replaces a replica where it raises.

    Args:
        spec: What to load; the engine gets as many threads as the replica has cores.
        seconds: How long a request may take.
        special_tokens: Whether the text of a special token in a message is that token.
    """

    def __init__(self, spec: EngineSpec, seconds: float, *, special_tokens: bool) -> None:
        keep_to_this_machine()
        cores = ray.get_runtime_context().get_assigned_resources().get("CPU", 1.0)
        lm = replace(spec, threads=math.ceil(cores)).load()
        name = serve.get_replica_context().replica_id.unique_id
        super().__init__(lm, name, seconds, special_tokens=special_tokens)
        if spec.learning is not None:
            LearningFeed(lm, find_own_learner).start()


# ---- Keeps the endpoint's learner: what Ray Serve starts, asks, and replaces when it has ended.

_ASK_SECONDS = 1.0
_NAME_SECONDS = 0.2
_TRIES = 150


def find_own_learner() -> Any | None:
    """Return the learner of the application that this replica belongs to; None while there is none."""
    return find_learner(_name())


class LearnerKeeper:
    """Starts the learner, and says what it does.

    Args:
        spec: What it loads.
        config: What of the cluster it takes.
    """

    def __init__(self, spec: LearnerSpec, config: LearningConfig) -> None:
        keep_to_this_machine()
        self._learner = _only_learner(spec, config)
        self._pulse = Pulse(_ASK_SECONDS, self._ask)
        self._pulse.start()

    def report(self) -> LearningReport:
        """Return what the learner does."""
        return self._learner.last

    def _ask(self) -> None:
        self._learner.ask(math.inf)  # nobody knows how much will be asked of an endpoint

    def __del__(self) -> None:
        """End the learner in good order; Ray Serve calls this as the endpoint is taken down."""
        if hasattr(self, "_pulse"):
            self._pulse.end()
            self._learner.close()


def _only_learner(spec: LearnerSpec, config: LearningConfig) -> WatchedLearner:
    """Start a learner, and end the one that an update of the endpoint leaves: two must not write to one folder."""
    for _ in range(_TRIES):
        try:
            return WatchedLearner(spec, config, _name())
        except ValueError:
            if (other := find_own_learner()) is not None:
                ray.kill(other)
            time.sleep(_NAME_SECONDS)
    raise RuntimeError(f"the learner before this one has not ended in {_TRIES * _NAME_SECONDS:g} s")


def _name() -> str:
    return f"{serve.get_replica_context().app_name}-learner"
