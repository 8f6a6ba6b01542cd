"""A replica: what Ray Serve starts, asks, and replaces when it is ill."""

from __future__ import annotations

import math
from dataclasses import replace

import ray
from ray import serve

from pipeline.engines.engine_spec import EngineSpec
from pipeline.learning.learning_feed import LearningFeed
from pipeline.serving.ingress.direct_ingress import keep_to_this_machine
from pipeline.serving.replica.answers import Answers
from pipeline.serving.replica.learner_keeper import find_own_learner


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
