"""A learner's process as its owner sees it: started, asked what it does, and ended. Whatever it does is only said."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import ray

from drafter.errors import one_line
from pipeline.learning.learner_actor import LearnerActor
from pipeline.learning.learner_spec import LearnerSpec
from pipeline.learning.learning_config import LearningConfig
from pipeline.progress.reports import LearningReport

_MOST_RESTARTS = 10
_LAST_WORD_SECONDS = 30.0


def find_learner(name: str) -> Any | None:
    """Return the `LearnerActor` of this name in the namespace; None while there is none."""
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


class WatchedLearner:
    """Starts a learner.

    Args:
        spec: What it loads.
        config: What of the cluster it takes.
        name: By which other processes of the namespace find it; see `find_learner`.

    Attributes:
        last: What it said last.

    Raises:
        ValueError: There is another actor of the name.
    """

    def __init__(self, spec: LearnerSpec, config: LearningConfig, name: str) -> None:
        options = {"num_cpus": config.cpus, "num_gpus": config.gpus, "max_restarts": _MOST_RESTARTS, "name": name}
        self._actor = ray.remote(**options)(LearnerActor).remote(spec)
        self.last = LearningReport()
        self._call: Any = None
        self._answered = False
        self._said = "starting"

    def ask(self, tokens_left: float | None) -> LearningReport:
        """Return what the learner said last, and ask it again; called now and then, and never waits.

        Args:
            tokens_left: As in `LearnerActor.report`.
        """
        try:
            if self._call is not None and ray.wait([self._call], timeout=0)[0]:
                call, self._call = self._call, None
                self._hear(call)
            if self._call is None and self.last.state != "ended":
                self._call = self._actor.report.remote(tokens_left)
        except ray.exceptions.RayError as error:  # the cluster is in trouble: that is for others to say
            tell(f"it cannot be asked: {one_line(error)}")
        return self.last

    def close(self) -> LearningReport:
        """End the learner, and return what it has done; its files are where they belong."""
        try:
            if self._answered and self.last.state != "ended":
                self._hear(self._actor.close.remote(), _LAST_WORD_SECONDS)
            ray.kill(self._actor)
        except Exception as error:  # whatever it is, nobody's end depends on it
            tell(f"it could not be ended: {one_line(error)}")
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
            length = report.published_beta
            measured = "" if length is None else f", {length:.2f} tokens a step on rows held out"
            tell(f"version {report.version} of the head after {report.steps:,} steps{measured}")
        if report.state != self._said and report.state not in ("starting", "measuring"):
            self._said = report.state
            tell(f"{report.state}: {report.reason}")


def tell(line: str) -> None:
    """Print a line about the learner."""
    print(f"learner: {line}", file=sys.stderr, flush=True)
