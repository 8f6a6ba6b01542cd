"""Learns from rows as they arrive, in short slices, and publishes versions of the head that improve.

A slice is a few optimiser steps or measurements of held-out rows, so a learner can run between engines' steps or alone.
β is measured on rows whose prompts are never trained on; a version must beat the previous one on the same rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter.errors import LoadError, TrainingError
from drafter.heads.checkpoint import save_head
from drafter.heads.contract import DraftHead
from drafter.methods.learning.contract import HeadVersion, RowSample
from drafter.methods.learning.drafter import LEARNT, load_start, version_of
from drafter.methods.learning.payoff import Evaluation
from drafter.methods.learning.rows import LearningRows, micro_batches
from drafter.methods.learning.settings import LearnerSettings, StartingHead
from drafter.methods.learning.training import AveragedTraining, load_weights, read_learner, weights_of, write_learner
from drafter.target.model import BaseModel
from drafter.training.targets import Walks, anchor_draws, draft_batch, walked_batches

_TOKENS = 8192
"""Tokens of a micro-batch, padding included."""
_TEXTS_AT_ONCE = 2
"""Held-out texts measured per unit of work."""
_OVER = object()


@dataclass(frozen=True)
class Progress:
    """The learner's state; evaluation and version are those of the last slice of work.

    Args:
        seconds: Working time so far.
        loss: Of the newest step, in nats; None before the first.
        rows: Training rows in memory.
        nbytes: Of training and held-out rows.
        discarded: Candidates given up because the loss was not finite.
        idle: It waits for rows.
    """

    steps: int
    seconds: float
    loss: float | None
    rows: int
    held_out: int
    nbytes: int
    discarded: int
    evaluation: Evaluation | None
    version: HeadVersion | None
    idle: bool


@dataclass(frozen=True)
class _Totals:
    """Totals over all processes of the learner."""

    number: int
    steps: int = 0
    seconds: float = 0.0
    discarded: int = 0


class Learner:
    """Trains a head. Not thread-safe. No engine may run on the same `base` object meanwhile.

    Attributes:
        version: The newest version; None before the first.

    Raises:
        LoadError: The head cannot be loaded.
    """

    def __init__(self, base: BaseModel, start: StartingHead, settings: LearnerSettings | None = None) -> None:
        self._base, self._start, self._settings = base, start, settings or LearnerSettings()
        self._tried = load_start(start, base)  # measured in the target model's dtype, as engines draft
        self._head = _trainable(deepcopy(self._tried), base)
        self._training = AveragedTraining(base, self._head, self._settings)
        self._rows = LearningRows(self._settings)
        self._totals = _Totals(version_of(self._head))
        self._good = weights_of(self._head)
        self.version: HeadVersion | None = None
        self._loss: float | None = None
        self._since = 0  # steps since the last measurement
        self._measuring: Iterator[None] | None = None
        self._evaluation: Evaluation | None = None
        self._published: HeadVersion | None = None
        self._idle = True

    def add(self, samples: Sequence[RowSample]) -> None:
        """Take rows. Without room, those of least rank are dropped."""
        for sample in samples:
            self._rows.add(sample)

    def work(self, seconds: float) -> Progress:
        """Work for about `seconds`; at least one unit of work if there is any."""
        begun, before, idle = time.monotonic(), self._totals.seconds, False
        self._evaluation = self._published = None
        while not idle:
            idle = not self._unit()
            spent = time.monotonic() - begun
            self._totals = replace(self._totals, seconds=before + spent)
            if spent >= seconds:
                break
        self._idle = idle
        return self.progress()

    def progress(self) -> Progress:
        totals, rows = self._totals, self._rows
        return Progress(
            totals.steps,
            totals.seconds,
            self._loss,
            len(rows),
            len(rows.held_out),
            rows.nbytes,
            totals.discarded,
            self._evaluation,
            self._published,
            self._idle,
        )

    def _unit(self) -> bool:
        try:
            if self._measuring is None and self._since >= self._settings.evaluate_every:
                self._since = 0
                if len(self._rows.held_out) >= self._settings.least_held_out:
                    self._measuring = self._measure()
            if self._measuring is None:
                return self._learn()
            if next(self._measuring, _OVER) is _OVER:
                self._measuring = None
            return True
        except TrainingError:
            self._measuring = None
            self._since = 0
            self._totals = replace(self._totals, discarded=self._totals.discarded + 1)
            self._training.restart(self._good)
            return True

    def _learn(self) -> bool:
        """Take an optimiser step; False if there are too few rows. Raises `TrainingError` if the loss is not finite."""
        settings = self._settings
        if len(self._rows) < settings.texts_per_step:
            return False
        texts = self._rows.take(settings.texts_per_step)
        depth, step, parts, done = self._head.config.depth, self._totals.steps, [], 0
        for part in micro_batches(texts, _TOKENS):
            draws = anchor_draws(settings.seed, step, range(done, done + len(part)))
            parts.append(draft_batch(part, depth, settings.anchors_per_text, draws).to(self._base.device))
            done += len(part)
        self._loss = self._training.step(parts)
        self._totals = replace(self._totals, steps=step + 1)
        self._since += 1
        return True

    def _measure(self) -> Iterator[None]:
        """Compare averaged with published weights on held-out rows, a batch per `yield`; publish better ones."""
        texts, settings, totals = self._rows.held_out, self._settings, self._totals
        weights = self._training.averaged()
        if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
            raise TrainingError(f"step {totals.steps}: a weight is not finite; lower the learning rate")
        betas = []
        drafted = self._start.drafts or self.version is not None
        for some in [weights, *([self._good] if drafted else [])]:
            load_weights(self._tried, some)
            walks = Walks({settings.num_draft_tokens: 0})
            for batch in walked_batches(texts, self._head.config.depth, _TEXTS_AT_ONCE):
                walks.add(self._tried, self._base, batch)
                yield
            betas.append(walks.beta[settings.num_draft_tokens])
        candidate, published = betas if drafted else (betas[0], 1.0)
        better = candidate >= settings.least_gain * published
        self._evaluation = Evaluation(self._totals.seconds, totals.steps, len(texts), candidate, published, better)
        if better:
            self._publish(weights, self._evaluation)

    def _publish(self, weights: dict[str, Tensor], found: Evaluation) -> None:
        number = self._totals.number + 1
        self._totals = replace(self._totals, number=number)
        provenance: dict[str, Any] = {
            "version": number,
            "started_from": self._start.copied_from or self._start.folder,
            "rows": self._rows.seen,
            "tokens": self._rows.tokens,
            "steps": found.steps,
            "seconds": round(found.seconds, 1),
            "held_out_rows": found.rows,
            "nodes": self._settings.num_draft_tokens,
            "beta": round(found.candidate, 4),
            "beta_before": round(found.published, 4),
            "torch": torch.__version__,
        }
        self.version = self._published = HeadVersion(number, weights, found.candidate, found.published, provenance)
        self._good = weights

    def save_head(self, folder: str | Path) -> None:
        """Write the newest version as a head folder, which `--drafter` takes. Replaces an earlier one.

        Raises:
            ValueError: There is no version yet.
        """
        if self.version is None:
            raise ValueError("nothing has been published yet: there is no head to save")
        head = deepcopy(self._tried).float()
        load_weights(head, self.version.weights)
        assert head.provenance is not None
        learnt = {LEARNT: self.version.provenance}
        head.provenance = replace(head.provenance, training={**head.provenance.training, **learnt})
        save_head(head, folder)

    def save(self, folder: str | Path) -> None:
        """Write the state, without rows, for `resume`. Replaces an earlier one."""
        tensors = self._training.tensors() | {f"good/{name}": tensor for name, tensor in self._good.items()}
        facts = {
            "totals": vars(self._totals),
            "training_steps": self._training.steps,
            "learning_rate": self._training.learning_rate,
            "rows": self._rows.seen,
            "tokens": self._rows.tokens,
            "first": self._rows.first,
            "version": None if self.version is None else _without_weights(self.version),
        }
        write_learner(Path(folder), tensors, facts)

    @classmethod
    def resume(
        cls, base: BaseModel, start: StartingHead, folder: str | Path, settings: LearnerSettings | None = None
    ) -> Learner:
        """Return a learner that continues from a saved state, without rows.

        Raises:
            LoadError: The folder has no state, or it is damaged or of another head.
        """
        learner = cls(base, start, settings)
        tensors, facts = read_learner(Path(folder))
        good = {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith("good/")}
        rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("good/")}
        try:
            learner._training.load(rest, facts["training_steps"], facts["learning_rate"])
            totals, version = _Totals(**facts["totals"]), facts["version"]
            # The head's folder is newer than the state if a process died between the two writes.
            learner._totals = replace(totals, number=max(totals.number, learner._totals.number))
            rows = learner._rows
            rows.seen, rows.tokens, rows.first = facts["rows"], facts["tokens"], facts["first"]
            learner._good = good
            learner.version = None if version is None else HeadVersion(weights=good, **version)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise LoadError(
                f"the learner's state in {folder} is not of this head: begin without it, or with the head it was of"
            ) from error
        return learner


def _without_weights(version: HeadVersion) -> dict[str, Any]:
    return {name: value for name, value in vars(version).items() if name != "weights"}


def _trainable(head: DraftHead, base: BaseModel) -> DraftHead:
    head.float().requires_grad_(True).train()
    if head.vocabulary is not None:
        head.vocabulary.borrow(base)  # these rows stay in the target model's dtype
    return head
