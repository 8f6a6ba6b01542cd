"""A job's learner as its driver sees it: started, asked what it does, and ended. Nothing that it does fails the job."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import ray

from drafter.errors import one_line
from pipeline.cluster.shares import Cluster, Node
from pipeline.errors import InputError
from pipeline.learning.learner_actor import LearnerActor
from pipeline.learning.learner_spec import LearnerSpec
from pipeline.learning.learning_config import LearningConfig
from pipeline.progress.job_progress import Progress
from pipeline.progress.reports import LearningReport

_MOST_RESTARTS = 10
_LAST_WORD_SECONDS = 30.0


def learner_threads(config: LearningConfig) -> int:
    """Return the CPU threads of a learner."""
    return max(1, math.ceil(config.cpus))


def beside_learner(config: LearningConfig, cluster: Cluster) -> Cluster:
    """Return what a learner leaves of a cluster to engines.

    Raises:
        InputError: No machine has what the learner is to have, and there will be no others.
    """
    if not config.enabled or not (config.cpus or config.gpus):
        return cluster
    nodes = list(cluster.nodes)
    for place, node in enumerate(nodes):
        if node.cpus >= config.cpus and node.gpus >= config.gpus:
            nodes[place] = Node(node.cpus - config.cpus, node.gpus - config.gpus)
            return Cluster(tuple(nodes), cluster.may_grow)
    if cluster.may_grow:
        return cluster
    raise InputError(
        f"no machine has {config.cpus:g} CPU cores and {config.gpus:g} GPUs for the learner: lower learning.cpus or "
        "learning.gpus"
    )


class JobLearner:
    """Starts a job's learner.

    Args:
        spec: What it loads.
        config: What of the cluster it takes.

    Attributes:
        actor: A `LearnerActor`, for engines.
        last: What it said last.
    """

    def __init__(self, spec: LearnerSpec, config: LearningConfig) -> None:
        options = {"num_cpus": config.cpus, "num_gpus": config.gpus, "max_restarts": _MOST_RESTARTS}
        self.actor = ray.remote(**options)(LearnerActor).remote(spec)
        self.last = LearningReport()
        self._call: Any = None
        self._answered = False
        self._said = "starting"

    def look(self, now: Progress) -> Progress:
        """Return the job's progress with what the learner does; called now and then, and never waits."""
        try:
            if self._call is not None and ray.wait([self._call], timeout=0)[0]:
                call, self._call = self._call, None
                self._hear(call)
            if self._call is None and self.last.state != "ended":
                self._call = self.actor.report.remote(tokens_left(now))
        except ray.exceptions.RayError as error:  # the cluster is in trouble: that is for others to say
            _print(f"it cannot be asked: {one_line(error)}")
        return replace(now, learning=self.last)

    def close(self) -> LearningReport:
        """End the learner, and return what it has done; its files are in the output."""
        try:
            if self._answered and self.last.state != "ended":
                self._hear(self.actor.close.remote(), _LAST_WORD_SECONDS)
            ray.kill(self.actor)
        except Exception as error:  # whatever it is, the end of a job does not depend on it
            _print(f"it could not be ended: {one_line(error)}")
        return self.last

    def _hear(self, call: Any, patience: float | None = None) -> None:
        try:
            report: LearningReport = ray.get(call, timeout=patience)
        except ray.exceptions.ActorUnavailableError:
            return  # Ray starts it again
        except ray.exceptions.GetTimeoutError:
            return
        except ray.exceptions.RayError as error:
            if isinstance(error, ray.exceptions.ActorDiedError):
                reason = f"its process has ended too often: {one_line(error)}"
                self._say(replace(self.last, state="ended", reason=reason))
            return
        self._answered = True
        self._say(report)

    def _say(self, report: LearningReport) -> None:
        """Print what is new."""
        before, self.last = self.last, report
        if report.version is not None and report.version != before.version:
            beta = "" if report.published_beta is None else f", β {report.published_beta:.2f} on rows held out"
            _print(f"version {report.version} of the head after {report.steps:,} steps{beta}")
        if report.state != self._said and report.state not in ("starting", "measuring"):
            self._said = report.state
            _print(f"{report.state}: {report.reason}")


def tokens_left(now: Progress) -> float | None:
    """Return about how many tokens a job is still to generate; None before its first rows."""
    finished = now.rows - now.errors
    if now.total is None or finished <= 0 or not now.tokens:
        return None
    return (now.total - now.done) * now.tokens / finished


def _print(line: str) -> None:
    print(f"learner: {line}", file=sys.stderr, flush=True)
