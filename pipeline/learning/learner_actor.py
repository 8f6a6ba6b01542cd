"""Ray actor that trains a draft head on rows from engines and publishes its versions, for a job or an endpoint.

`exchange` and `report` answer at once with the state of the training thread. Rows come as references to the object
store; the oldest are dropped if training falls behind. If the process ends, Ray restarts the actor, which resumes from
the state saved with the last version.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors import SafetensorError

from drafter.errors import LoadError, one_line
from drafter.methods.learning.drafter import found_start
from drafter.methods.learning.learner import STATE_FILE, HeadVersion, Learner, LearnerProgress, rest_after
from drafter.methods.learning.rows import RowSample
from drafter.target_model.loading import load_base
from pipeline.cluster.model_copies import model_name
from pipeline.io.files import partials_of
from pipeline.learning.config import LearnerSpec
from pipeline.learning.feed import Answer
from pipeline.output.folder import put_head
from pipeline.progress.board import LearningReport
from pipeline.progress.prometheus import learner_metrics

_SLICE_SECONDS = 0.5  # of training between two looks for new rows
_FETCH_SECONDS = 5.0
_JOIN_SECONDS = 0.2
_BATCHES = 8  # of rows that wait for the learner at most; beyond, the oldest are dropped


class LearnerActor:
    """Trains a head in a thread."""

    def __init__(self, spec: LearnerSpec) -> None:
        self._spec = spec
        self._report = LearningReport()
        self._lock = threading.Lock()
        self._batches: deque[ray.ObjectRef[Any]] = deque(maxlen=_BATCHES)
        self._dropped = 0
        self._answer = Answer(wants_rows=True)
        self._closing, self._loading = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)
        self._thread.start()

    def exchange(self, rows: Sequence[ray.ObjectRef[Any]]) -> Answer:
        with self._lock:
            self._dropped += max(len(self._batches) + len(rows) - _BATCHES, 0)
            self._batches.extend(rows)
            return self._answer

    def report(self) -> LearningReport:
        with self._lock:
            return self._report

    def close(self) -> LearningReport:
        """Stop, and return the final state, without waiting for a model that is being loaded."""
        self._closing.set()
        while self._thread.is_alive() and not self._loading.is_set():
            self._thread.join(_JOIN_SECONDS)
        return self._report

    def _run(self) -> None:
        try:
            if not self._spec.config.gpus:
                os.nice(19)  # of this thread alone, on Linux: calls are still answered
            torch.set_num_threads(1)
            self._learn()
        except Exception as error:  # whatever it is: the job goes on without
            traceback.print_exc()
            with self._lock:
                reason = f"it has had an error: {one_line(error)}"
                self._report = replace(self._report, state="ended", reason=reason)
                self._answer = replace(self._answer, wants_rows=False)
                self._batches.clear()

    def _learn(self) -> None:
        self._loading.set()
        with self._lock:
            self._report = replace(self._report, reason="it loads the model")
        with tempfile.TemporaryDirectory(prefix="drafter-learner-") as folder:
            learner = self._load(folder)
        self._loading.clear()
        if learner.version is not None:
            self._announce(learner.version)
        share, works_at = self._spec.config.share, time.monotonic()
        progress = learner.progress()
        self._tell(learner, progress)
        metrics = learner_metrics(self._spec.run, self._report)
        while not self._closing.is_set():
            self._take_rows(learner)
            if time.monotonic() >= works_at:
                before, progress = progress.seconds, learner.work(_SLICE_SECONDS)
                works_at = time.monotonic() + rest_after(progress.seconds - before, share)
                if progress.version is not None:
                    self._save(learner)  # first: a learner that begins again must not give its number to another one
                    self._announce(progress.version)
            else:
                progress = learner.progress()
            self._tell(learner, progress)
            metrics.show(self._report)
            pause = _SLICE_SECONDS if progress.idle else min(works_at - time.monotonic(), _SLICE_SECONDS)
            self._closing.wait(max(pause, 0.0))

    def _load(self, folder: str) -> Learner:
        """Return the learner; `folder` is for temporary copies only."""
        spec = self._spec
        spec.output.root.make_folder()  # an endpoint's may not be there yet
        for partial in partials_of(spec.output.learner_state):  # of a learner that was killed
            partial.delete()
        loading = asdict(replace(spec.loading, device=spec.device, device_map=None))
        base = load_base(model_name(spec.model), **loading)
        start = found_start(spec.beginning.here(folder), base)
        if spec.output.learner_state.exists:
            try:
                spec.output.learner_state.copy_to(Path(folder) / STATE_FILE)
                return Learner.resume(base, start, folder, spec.training)
            except (OSError, LoadError) as error:
                print(f"the learner begins without its state: {one_line(error)}", file=sys.stderr, flush=True)
        return Learner(base, start, spec.training)

    def _take_rows(self, learner: Learner) -> None:
        with self._lock:
            batches = list(self._batches)
            self._batches.clear()
        for batch in batches:
            try:
                rows: list[RowSample] = ray.get(batch, timeout=_FETCH_SECONDS)
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                continue
            learner.add(rows)

    def _announce(self, version: HeadVersion) -> None:
        weights = (ray.put(version.weights),)
        with self._lock:
            self._answer = replace(self._answer, number=version.number, weights=weights)

    def _tell(self, learner: Learner, progress: LearnerProgress) -> None:
        version = learner.version
        with self._lock:
            self._report = LearningReport(
                "learning",
                f"it trains for {self._spec.config.share:.0%} of the time",
                version=None if version is None else version.number,
                published_beta=None if version is None else version.beta,
                dropped=self._dropped,
                **{name: getattr(progress, name) for name in _TOLD},
            )

    def _save(self, learner: Learner) -> None:
        output = self._spec.output
        try:
            with tempfile.TemporaryDirectory(prefix="drafter-learner-", ignore_cleanup_errors=True) as name:
                folder = Path(name)
                learner.save(folder)
                output.learner_state.copy_from(folder / STATE_FILE)
                learner.save_head(folder / "head")
                put_head(folder / "head", output.head)
        except (OSError, SafetensorError) as error:  # such as a full disk: engines get the version all the same
            print(f"the head cannot be written: {one_line(error)}", file=sys.stderr, flush=True)


_TOLD = ("beta", "steps", "seconds", "loss", "rows", "held_out", "nbytes", "discarded")
"""Fields that a report copies from the learner's progress."""
