"""A learner from its owner's side: its specification, its process, its reports and metrics."""

from __future__ import annotations

import json
import sys
import tempfile
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from ray.util.metrics import Counter, Gauge
from safetensors import SafetensorError, safe_open

from drafter.errors import one_line
from drafter.methods.learning.payoff import hopes
from drafter.methods.learning.settings import SHIPPED_OR_NEW, StartingHead
from pipeline.cluster.shares import Cluster, Node
from pipeline.errors import InputError
from pipeline.io.files import Location
from pipeline.learning.config import NEW, SHIPPED, LearningConfig
from pipeline.learning.record import read_record
from pipeline.output.folder import HEAD_CONFIG, OutputFolder
from pipeline.progress.board import LearningReport, Progress
from pipeline.progress.prometheus import begin

_MOST_RESTARTS = 10
_LAST_WORD_SECONDS = 30.0
_MEASURED_SECONDS = 9.0
"""Shortest measurement of the row rate that predicts the job's duration."""
_HEAD_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Beginning:
    """The initial head, the same for all engines and the learner of a job.

    `saved` is the folder of the head trained by an earlier submission; None if there is none.
    """

    start: StartingHead
    saved: Location | None = None

    def here(self, folder: str) -> StartingHead:
        """Return this process's initial head: a saved one, copied into a local `folder`, or `start`."""
        if self.saved is None:
            return self.start
        try:
            fetch_head(self.saved, Path(folder))
        except OSError as error:  # it costs drafts, and not the job
            print(f"{self.saved.path} cannot be read: {one_line(error)}", file=sys.stderr, flush=True)
            return self.start
        return replace(self.start, folder=folder, copied_from=self.saved.path)


@dataclass(frozen=True)
class LearnerSpec:
    """Models and settings of a learner's process.

    Args:
        run: The name in metrics: a job's output, or an endpoint's model name.
    """

    config: LearningConfig
    beginning: Beginning
    output: OutputFolder
    run: str
    model: str
    dtype: str
    trust_remote_code: bool

    @property
    def device(self) -> str:
        """As in `load_base`. A GPU that is not its own belongs to engines, which count on all of its memory."""
        return "auto" if self.config.gpus else "cpu"


def beginning(config: LearningConfig, output: OutputFolder) -> Beginning:
    """Return the initial head of a submission or an endpoint: the output's, if an earlier one has trained it."""
    folder = {SHIPPED: SHIPPED_OR_NEW, NEW: None}.get(config.head, config.head)
    start = StartingHead(folder, config.algorithm, seed=config.training.seed)
    return Beginning(start, output.head if _is_whole(output.head) else None)


def fetch_head(folder: Location, here: Path) -> None:
    """Copy a head's folder to this machine; raise `OSError` if it cannot be read."""
    for name in (HEAD_CONFIG, _HEAD_WEIGHTS):
        (folder / name).copy_to(here / name)


def put_head(here: Path, folder: Location) -> None:
    """Copy a head's folder from this machine to the output, or raise `OSError`; each file appears complete."""
    folder.make_folder()
    for name in (_HEAD_WEIGHTS, HEAD_CONFIG):  # without a config.json there is no head yet
        (folder / name).copy_from(here / name)


def _is_whole(folder: Location) -> bool:
    """Return whether there is a readable head. A damaged one costs its training, not the job."""
    if not any(info.base_name == HEAD_CONFIG for info in folder.children()):
        return False
    try:
        with tempfile.TemporaryDirectory() as name:
            here = Path(name)
            fetch_head(folder, here)
            config: Any = json.loads((here / HEAD_CONFIG).read_text(encoding="utf-8"))
            with safe_open(here / _HEAD_WEIGHTS, framework="numpy") as file:
                return isinstance(config, dict) and bool(file.keys())
    except (OSError, ValueError, SafetensorError) as error:
        print(f"the head in {folder.path} is damaged, and learnt anew: {one_line(error)}", file=sys.stderr, flush=True)
        return False


def find_learner(name: str) -> Any | None:
    """Return the `LearnerActor` of this name in the namespace; None if there is none."""
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


class WatchedLearner:
    """Starts and polls a learner.

    Attributes:
        last: The latest report.

    Raises:
        ValueError: There is another actor of the name.
    """

    def __init__(self, spec: LearnerSpec, name: str) -> None:
        # Late, because most drivers start no learner, and it imports torch.
        from pipeline.learning.learner_actor import LearnerActor

        config = spec.config
        options = {"num_cpus": config.cpus, "num_gpus": config.gpus, "max_restarts": _MOST_RESTARTS, "name": name}
        self._actor = ray.remote(**options)(LearnerActor).remote(spec)
        self.last = LearningReport()
        self._call: Any = None
        self._answered = False
        self._said = "starting"

    def ask(self, tokens_left: float | None) -> LearningReport:
        """Return the latest report, and request the next one; never blocks. See `LearnerActor.report`."""
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
        if report.state != self._said and report.state not in ("starting", "measuring"):
            self._said = report.state
            tell(f"{report.state}: {report.reason}")


def tell(line: str) -> None:
    print(f"learner: {line}", file=sys.stderr, flush=True)


def beside_learner(config: LearningConfig, cluster: Cluster) -> Cluster:
    """Return the part of a cluster left for engines.

    Raises:
        InputError: No machine has the learner's resources, and the cluster cannot grow.
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
    """The learner of a generation job.

    Even starting its process takes seconds of a core. If it has no core of its own and must pay, it starts only when
    the rest of the job is long enough.

    Attributes:
        name: Actor name for engines.
    """

    def __init__(self, spec: LearnerSpec) -> None:
        self.name = f"learner-{uuid.uuid4().hex}"
        self._spec = spec
        self._learner: WatchedLearner | None = None
        self._report = read_record(spec.output).report("starting", "nothing has been decoded yet")
        self._first: Progress | None = None
        self._waits = spec.config.must_pay and spec.config.yields
        if not self._waits:
            self._start()

    def look(self, now: Progress) -> Progress:
        """Return the job's progress with the learner's report; never blocks."""
        if self._learner is None:
            self._may_start(now)
        return replace(now, learning=self._report if self._learner is None else self._learner.ask(tokens_left(now)))

    def close(self) -> LearningReport:
        if self._learner is None:
            tell(f"not begun: {self._report.reason}")
            return self._report
        return self._learner.close()

    def _may_start(self, now: Progress) -> None:
        if not self._waits:
            self._start()
            return
        if not now.rows:
            return
        if now.rows >= now.slots and (self._first is None or now.rows < self._first.rows):
            self._first = now  # restart the measurement if rows were lost with an engine
        seconds = None if self._first is None else seconds_left(self._first, now)
        if seconds is None:
            self._rest("too few rows are done to tell how long the job takes")
        elif seconds:
            course = hopes(seconds)
            self._rest(course.reason)
            if course.learns:
                self._start()

    def _rest(self, reason: str) -> None:
        self._report = replace(self._report, state="resting", reason=reason)

    def _start(self) -> None:
        """Start the learner. An error does not fail the job: the next look tries again."""
        try:
            self._learner = WatchedLearner(self._spec, self.name)
        except Exception as error:  # whatever it is
            self._rest(f"it cannot be started for now: {one_line(error)}")


def seconds_left(first: Progress, now: Progress) -> float | None:
    """Estimate a job's remaining seconds from the rate of its rows; None while too few are done.

    `first` is the progress after one full batch: those rows are slower, as engines start one by one.
    """
    seconds, rows = now.seconds - first.seconds, now.rows - first.rows
    if now.total is None or rows < max(now.slots, 1) or seconds < _MEASURED_SECONDS:
        return None
    return (now.total - now.done) * seconds / rows


def tokens_left(now: Progress) -> float | None:
    """Estimate the tokens still to be generated; None before the first rows."""
    finished = now.rows - now.errors
    if now.total is None or finished <= 0 or not now.tokens:
        return None
    return (now.total - now.done) * now.tokens / finished


# Metrics for Prometheus; see `progress/prometheus.py`. Their descriptions must be ASCII.

_GAUGES = {
    "version": "Number of the newest version of the head that learns.",
    "beta": "Tokens per forward of the target model on held-out rows, with what the learner has learnt by now.",
    "published_beta": "Tokens per forward of the target model on held-out rows, with the newest version.",
    "loss": "Loss of the learner's newest step, in nats.",
    "rows": "Rows that the learner can learn from.",
    "bytes": "Bytes of the rows that the learner has.",
    "active": "1 while the learner works, 0 while it rests.",
    "taken_seconds": "Seconds by which learning has made decoding longer.",
    "saved_seconds": "Seconds by which what was learnt has made decoding shorter.",
}
_COUNTERS = {
    "steps": "Optimiser steps of the learner.",
    "seconds": "Seconds that the learner has worked.",
    "discarded": "Versions given up because their loss was not finite.",
    "dropped": "Batches of rows that the learner did not get to.",
}


class LearnerMetrics:
    """Exports a learner's state.

    Args:
        begun: The initial report. Earlier processes have exported its counts.
    """

    def __init__(self, run: str, begun: LearningReport) -> None:
        self._tags = {"run": run}
        self._gauges = {name: Gauge(f"drafter_learner_{name}", what, ("run",)) for name, what in _GAUGES.items()}
        self._counters = {name: Counter(f"drafter_learner_{name}", what, ("run",)) for name, what in _COUNTERS.items()}
        self._published = _sums(begun)
        for counter in self._counters.values():
            begin(counter, self._tags)

    def publish(self, now: LearningReport) -> None:
        """Export the present state, and counts since the last call."""
        for name, value in _values(now).items():
            self._gauges[name].set(value, self._tags)  # None is not set
        for name, value in _sums(now).items():
            if (new := value - self._published[name]) > 0:
                self._counters[name].inc(new, self._tags)
                self._published[name] = value


def learner_families(now: LearningReport) -> list[Metric]:
    """Return the same metrics for a page that does not come from Ray; unknown values have no sample."""
    gauges, counters = _values(now), _sums(now)
    return [
        *(GaugeMetricFamily(f"drafter_learner_{name}", what, gauges[name]) for name, what in _GAUGES.items()),
        *(CounterMetricFamily(f"drafter_learner_{name}", what, counters[name]) for name, what in _COUNTERS.items()),
    ]


def _values(now: LearningReport) -> dict[str, float | None]:
    return {
        "version": now.version,
        "beta": now.beta,
        "published_beta": now.published_beta,
        "loss": now.loss,
        "rows": now.rows,
        "bytes": now.nbytes,
        "active": float(now.state == "learning"),
        "taken_seconds": now.taken_seconds,
        "saved_seconds": now.saved_seconds,
    }


def _sums(now: LearningReport) -> dict[str, float]:
    return {"steps": now.steps, "seconds": now.seconds, "discarded": now.discarded, "dropped": now.dropped}
