"""Ray Serve deployments that wrap one engine, and the endpoint's learner."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import ray
from ray import serve

from pipeline.engines.models import EngineSpec
from pipeline.learning.config import LearnerSpec
from pipeline.learning.feed import LearningFeed
from pipeline.learning.job_learner import WatchedLearner, find_learner
from pipeline.progress.board import LearningReport
from pipeline.progress.watch import Pulse
from pipeline.serving.answers import Answers
from pipeline.serving.http.handles import keep_to_this_machine


class EngineReplica(Answers):
    """One engine in a process of its own, with as many threads as the replica has cores.

    Ray Serve calls `check_health` periodically, and replaces a replica where it raises.

    Args:
        seconds: Longest time of a request.
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


# The endpoint's learner.

_ASK_SECONDS = 1.0
_NAME_SECONDS = 0.2
_TRIES = 150


def find_own_learner() -> Any | None:
    """Return the learner of the application that this replica belongs to; None while there is none."""
    return find_learner(_name())


class LearnerKeeper:
    """Ray Serve deployment that starts the learner and reports on it."""

    def __init__(self, spec: LearnerSpec) -> None:
        keep_to_this_machine()
        self._learner = _only_learner(spec)
        self._pulse = Pulse(_ASK_SECONDS, self._ask)
        self._pulse.start()

    def report(self) -> LearningReport:
        return self._learner.last

    def _ask(self) -> None:
        self._learner.ask(math.inf)  # the amount of work ahead is unknown

    def __del__(self) -> None:
        """End the learner in good order; Ray Serve calls this as the endpoint is taken down."""
        if hasattr(self, "_pulse"):
            self._pulse.end()
            self._learner.close()


def _only_learner(spec: LearnerSpec) -> WatchedLearner:
    """Start a learner, and end one that an update of the endpoint left: two must not write to one folder."""
    for _ in range(_TRIES):
        try:
            return WatchedLearner(spec, _name())
        except ValueError:
            if (other := find_own_learner()) is not None:
                ray.kill(other)
            time.sleep(_NAME_SECONDS)
    raise RuntimeError(f"the learner before this one has not ended in {_TRIES * _NAME_SECONDS:g} s")


def _name() -> str:
    return f"{serve.get_replica_context().app_name}-learner"
