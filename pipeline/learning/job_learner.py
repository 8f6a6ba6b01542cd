"""A learner's process from its owner's side: starting, polling and ending it."""

from __future__ import annotations

import sys
import uuid
from dataclasses import replace
from typing import Any

import ray

from drafter.errors import one_line
from pipeline.cluster.ray_cluster import Cluster, Node
from pipeline.errors import InputError
from pipeline.learning.config import LearnerSpec, LearningConfig
from pipeline.progress.board import LearningReport, Progress

_MOST_RESTARTS = 10
_LAST_WORD_SECONDS = 30.0


def find_learner(name: str) -> Any | None:
    """Return the `LearnerActor` of this name in the namespace; None if there is none."""
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


class WatchedLearner:
    """Starts and polls a learner, whose latest report is `last`; raises `ValueError` if the name is taken."""

    def __init__(self, spec: LearnerSpec, name: str) -> None:
        # Late, because most drivers start no learner, and it imports torch.
        from pipeline.learning.learner_actor import LearnerActor

        options = {"num_cpus": 0, "num_gpus": spec.config.gpus, "max_restarts": _MOST_RESTARTS, "name": name}
        self._actor = ray.remote(**options)(LearnerActor).remote(spec)
        self.last = LearningReport()
        self._call: Any = None
        self._answered = False
        self._said = "starting"

    def ask(self) -> LearningReport:
        """Return the latest report, and request the next one; never blocks."""
        try:
            if self._call is not None and ray.wait([self._call], timeout=0)[0]:
                call, self._call = self._call, None
                self._hear(call)
            if self._call is None and self.last.state != "ended":
                self._call = self._actor.report.remote()
        except ray.exceptions.RayError as error:  # the cluster is in trouble: that is for others to say
            tell(f"it cannot be asked: {one_line(error)}")
        return self.last

    def close(self) -> LearningReport:
        """End the learner, and return its final report. Its files are written by then."""
        try:
            if self._answered and self.last.state != "ended":
                self._hear(self._actor.close.remote(), _LAST_WORD_SECONDS)
            ray.kill(self._actor)
        except Exception as error:  # its end must not fail the job
            tell(f"it could not be ended: {one_line(error)}")
        return self.last

    def _hear(self, call: Any, patience: float | None = None) -> None:
        try:
            report: LearningReport = ray.get(call, timeout=patience)
        except ray.exceptions.ActorDiedError as error:
            reason = f"its process has ended too often: {one_line(error)}"
            self._say(replace(self.last, state="ended", reason=reason))
            return
        except ray.exceptions.RayError:  # a timeout, or Ray starts it again
            return
        self._answered = True
        self._say(report)

    def _say(self, report: LearningReport) -> None:
        before, self.last = self.last, report
        if report.version is not None and report.version != before.version:
            length = report.published_beta
            measured = "" if length is None else f", {length:.2f} tokens a step on rows held out"
            tell(f"version {report.version} of the head after {report.steps:,} steps{measured}")
        if report.state != self._said and report.state != "starting":
            self._said = report.state
            tell(f"{report.state}: {report.reason}")


def tell(line: str) -> None:
    print(f"learner: {line}", file=sys.stderr, flush=True)


def beside_learner(config: LearningConfig, cluster: Cluster) -> Cluster:
    """Return the part of a cluster left for engines; raise `InputError` if the learner finds no GPU."""
    if not config.enabled or not config.gpus:
        return cluster
    nodes = list(cluster.nodes)
    for place, node in enumerate(nodes):
        if node.gpus >= config.gpus:
            nodes[place] = Node(node.cpus, node.gpus - config.gpus)
            return Cluster(tuple(nodes), cluster.may_grow)
    if cluster.may_grow:
        return cluster
    raise InputError(f"no machine has {config.gpus:g} GPUs for the learner: lower learning.gpus")


class JobLearner:
    """The learner of a generation job, which engines find by `name`."""

    def __init__(self, spec: LearnerSpec) -> None:
        self.name = f"learner-{uuid.uuid4().hex}"
        self._spec = spec
        self._learner: WatchedLearner | None = None
        self._report = LearningReport()
        self._start()

    def look(self, now: Progress) -> Progress:
        """Return the job's progress with the learner's report; never blocks."""
        if self._learner is None:
            self._start()
        return replace(now, learning=self._report if self._learner is None else self._learner.ask())

    def close(self) -> LearningReport:
        return self._report if self._learner is None else self._learner.close()

    def _start(self) -> None:
        """Start the learner. An error does not fail the job: the next look tries again."""
        try:
            self._learner = WatchedLearner(self._spec, self.name)
        except Exception as error:  # whatever it is
            self._report = replace(self._report, reason=f"it cannot be started for now: {one_line(error)}")
