"""Ray actor that trains a draft head on rows from engines and publishes its versions, for a job or an endpoint.

`exchange` and `report` answer at once with the state of the training thread. Rows come as references to the object
store; the oldest are dropped if training falls behind. If the process ends, Ray restarts the actor, which resumes from
the state saved with the last version.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors import SafetensorError

from drafter.errors import LoadError, one_line
from drafter.methods.learning.drafter import LEARNT_MEMBERS, found_start
from drafter.methods.learning.learner import STATE_FILE, HeadVersion, Learner, LearnerProgress
from drafter.methods.learning.payoff import Interval, chosen_share, gain_by_beta, gain_by_choice, lead_by_choice
from drafter.methods.learning.rows import RowSample
from drafter.target.loading import load_base
from pipeline.learning.config import LearnerSpec
from pipeline.learning.feed import Answer, EngineBeat, EngineBeats
from pipeline.learning.record import read_record
from pipeline.output.folder import put_head
from pipeline.progress.board import LearnerState, LearningReport
from pipeline.progress.prometheus import learner_metrics

_SLICE_SECONDS = 0.5  # of training between two looks for new rows
_INTERVAL_SECONDS = 3.0  # between two decisions to train or to rest
_BUSY = 0.8  # minimum share of an interval with decoding for it to count as a measurement of speed
_SAVE_SECONDS = 30.0  # between writes of the record, which is also written with each version
_FETCH_SECONDS = 5.0
_JOIN_SECONDS = 0.2
_BATCHES = 8  # of rows that wait for the learner at most; beyond, the oldest are dropped


class LearnerActor:
    """Trains a head in a thread."""

    def __init__(self, spec: LearnerSpec) -> None:
        self._spec = spec
        self._record = read_record(spec.output).restarted(shares=spec.config.shares)
        self._report = self._record.report("starting", "it begins")
        self._lock = threading.Lock()
        self._batches: deque[ray.ObjectRef[Any]] = deque(maxlen=_BATCHES)
        self._dropped = 0
        self._beats = EngineBeats()
        self._answer = Answer(wants_rows=True)
        self._tokens_left: float | None = None
        self._closing, self._loading = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)
        self._thread.start()

    def exchange(self, engine: str, beat: EngineBeat, rows: Sequence[ray.ObjectRef[Any]]) -> Answer:
        with self._lock:
            self._beats.enter(engine, beat, time.monotonic())
            self._dropped += max(len(self._batches) + len(rows) - _BATCHES, 0)
            self._batches.extend(rows)
            return self._answer

    def report(self, tokens_left: float | None) -> LearningReport:
        """Return the state. `tokens_left` are still to be generated: None while unknown, infinite for an endpoint."""
        with self._lock:
            self._tokens_left = tokens_left
            return self._report

    def close(self) -> LearningReport:
        """Stop, write the record and return the final state, without waiting for a model that is being loaded."""
        self._closing.set()
        while self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)
            if self._loading.is_set():
                self._save_record()
                break
        return self._report

    def _run(self) -> None:
        try:
            if self._spec.config.yields:
                os.nice(19)  # of this thread alone, on Linux: calls are still answered
            torch.set_num_threads(self._spec.config.threads)
            self._learn()
        except Exception as error:  # whatever it is: the job goes on without
            traceback.print_exc()
            with self._lock:
                reason = f"it has had an error: {one_line(error)}"
                self._report = replace(self._report, state="ended", reason=reason)
                self._answer = replace(self._answer, wants_rows=False)
                self._batches.clear()

    def _wait_until_it_may_pay(self) -> None:
        """Rest until learning is expected to pay, as even loading the model takes time from engines."""
        begun = time.monotonic()
        while not self._record.course.learns and not self._closing.wait(_SLICE_SECONDS):
            now = time.monotonic()
            if now - begun >= _INTERVAL_SECONDS:
                self._end_interval(now - begun, worked=False, drafts=False)
                begun = now
                self._tell(LearnerProgress())

    def _learn(self) -> None:
        if self._spec.config.must_pay and not self._has_published():
            self._wait_until_it_may_pay()
        if self._closing.is_set():
            self._save_record()
            return
        self._loading.set()
        with self._lock:
            self._report = replace(self._report, state="starting", reason="it loads the model")
        with tempfile.TemporaryDirectory(prefix="drafter-learner-") as folder:
            learner, drafts = self._load(folder)
        self._loading.clear()
        if learner.version is not None:
            if learner.version.number not in [one.number for one in self._record.versions]:
                self._record.published(learner.version, time.time())  # its process ended before that was written
            self._announce(learner.version)
        if not self._spec.config.must_pay:
            self._record.decide(0.0, must_pay=False)
        progress = learner.progress()
        begun = saved = time.monotonic()
        with self._lock:
            self._beats.take(begun)  # decoding during loading belongs to no interval
        self._tell(progress)
        metrics = learner_metrics(self._spec.run, self._report)
        worked = False
        while not self._closing.is_set():
            self._take_rows(learner)
            if self._record.course.learns:
                progress = learner.work(_SLICE_SECONDS)
                worked = worked or not progress.idle
                self._enter(learner, progress)
            if progress.idle or not self._record.course.learns:
                self._closing.wait(_SLICE_SECONDS)
            now = time.monotonic()
            if now - begun >= _INTERVAL_SECONDS:
                self._end_interval(now - begun, worked, drafts)
                begun, worked = now, False
            self._tell(progress)
            metrics.show(self._report)
            if now - saved >= _SAVE_SECONDS:
                self._save_record()
                saved = now
        self._save_record()

    def _has_published(self) -> bool:
        """Return whether an earlier process in this submission has published, perhaps unheard by engines."""
        return self._spec.beginning.saved is None and self._spec.output.learner_state.exists

    def _load(self, folder: str) -> tuple[Learner, bool]:
        """Return the learner, and whether the job's initial head can draft; `folder` is for temporary copies only."""
        spec = self._spec
        spec.output.root.make_folder()  # an endpoint's may not be there yet
        base = load_base(spec.model, dtype=spec.dtype, device=spec.device, trust_remote_code=spec.trust_remote_code)
        start = found_start(spec.beginning.here(folder), base)
        drafts = found_start(spec.beginning.start, base).drafts
        if spec.output.learner_state.exists:
            try:
                spec.output.learner_state.copy_to(Path(folder) / STATE_FILE)
                return Learner.resume(base, start, folder, spec.config.training), drafts
            except (OSError, LoadError) as error:
                print(f"the learner begins without its state: {one_line(error)}", file=sys.stderr, flush=True)
        return Learner(base, start, spec.config.training), drafts

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

    def _enter(self, learner: Learner, progress: LearnerProgress) -> None:
        if progress.evaluation is not None:
            self._record.evaluated(progress.evaluation)
        if progress.version is not None:
            self._record.published(progress.version, time.time())
            self._save(learner)  # first: a learner that begins again must not give its number to another version
            self._announce(progress.version)

    def _announce(self, version: HeadVersion) -> None:
        weights = (ray.put(version.weights),)
        with self._lock:
            self._answer = replace(self._answer, number=version.number, weights=weights)

    def _end_interval(self, seconds: float, worked: bool, drafts: bool) -> None:
        record = self._record
        with self._lock:
            done = self._beats.take(time.monotonic())
            left = self._tokens_left
        if not record.versions:
            gain = 1.0
        elif drafts:
            gain = 1.0 + (record.gain - 1.0) * chosen_share(done.choices, LEARNT_MEMBERS)
        elif done.choices:
            gain = gain_by_choice(done.choices, LEARNT_MEMBERS)
        else:
            gain = gain_by_beta(record.balance.beta, record.beta_before)
        if left == math.inf:  # an endpoint's load varies, with or without a learner
            seconds = min(done.busy, seconds)
        full = done.busy >= _BUSY * seconds
        lead = lead_by_choice(done.choices, LEARNT_MEMBERS)
        record.decoded(Interval(seconds, done.tokens, done.row_steps, worked, gain, lead, full), time.time())
        if left is not None:
            record.decide(left, must_pay=self._spec.config.must_pay)

    def _tell(self, progress: LearnerProgress) -> None:
        record = self._record
        course = record.course
        state: LearnerState = "learning" if course.learns else "measuring" if course.rest_beta is None else "resting"
        report = record.report(state, course.reason, **{name: getattr(progress, name) for name in _TOLD})
        with self._lock:
            self._report = replace(report, dropped=self._dropped)
            self._answer = replace(self._answer, wants_rows=course.learns or course.rest_beta is None)

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
        self._save_record()

    def _save_record(self) -> None:
        try:
            self._spec.output.learning_file.write_text(self._record.as_json())
        except OSError as error:
            print(f"the learner's record cannot be written: {one_line(error)}", file=sys.stderr, flush=True)


_TOLD = ("steps", "seconds", "loss", "rows", "held_out", "nbytes", "discarded")
"""Fields that a report copies from the learner's progress."""
