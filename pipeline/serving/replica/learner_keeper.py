"""Keeps the endpoint's learner: what Ray Serve starts, asks, and replaces when it has ended.

The learner itself is a Ray actor of its own beside it, the same as a job's, which replicas find by its name. It ends
with its keeper, so that it lives as long as the endpoint, whoever started that.
"""

from __future__ import annotations

import math
import time
from typing import Any

import ray
from ray import serve

from pipeline.learning.learner_spec import LearnerSpec
from pipeline.learning.learning_config import LearningConfig
from pipeline.learning.watched_learner import WatchedLearner, find_learner
from pipeline.progress.pulse import Pulse
from pipeline.progress.reports import LearningReport
from pipeline.serving.ingress.direct_ingress import keep_to_this_machine

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
