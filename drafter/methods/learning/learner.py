"""Learns from rows as they arrive, in short slices, and publishes versions of the head that improve.

β is measured on rows whose prompts are never trained on; a version must beat the previous one on the same rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafter.errors import LoadError, TrainingError, first_line
from drafter.heads.checkpoint import save_head
from drafter.heads.config import write_whole
from drafter.heads.contract import DraftHead
from drafter.heads.losses import DraftBatch
from drafter.methods.learning.drafter import LEARNT, load_start, load_weights, version_of, weights_of
from drafter.methods.learning.rows import LearningRows, RowSample, micro_batches
from drafter.methods.learning.settings import LearnerSettings, StartingHead
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import LM_HEAD_INPUT
from drafter.training.loop import TorchOptimiser, TrainingStep
from drafter.training.settings import TrainingSettings
from drafter.training.targets import Walks, anchor_draws, draft_batch, walked_batches

_TOKENS = 8192  # tokens of a micro-batch, padding included
_TEXTS_AT_ONCE = 2  # held-out texts measured per unit of work
STATE_FILE = "learner.safetensors"
"""A learner's state: one file, so that its replacement is atomic; the header holds all that is not a tensor."""
_FACTS = "learner"


def rest_after(seconds: float, share: float) -> float:
    """Return the seconds to rest after so many seconds of work, so that work takes `share` of the time."""
    return seconds * (1.0 / share - 1.0)


@dataclass(frozen=True)
class HeadVersion:
    """Weights of a head that beat the version before; can be pickled."""

    number: int  # counts up from 1; engines begin with 0
    weights: dict[str, Tensor]  # of `DraftHead.state_dict()`, in fp32, on the CPU
    beta: float  # by the simulated walk over held-out rows
    beta_before: float  # of the previous version; 1.0 without one
    provenance: dict[str, Any] = field(default_factory=dict)  # JSON; becomes `Provenance.training` of a head's folder


@dataclass
class LearnerProgress:
    """The learner's state. `steps`, `seconds` and `discarded` are those of all its processes."""

    number: int = 0  # of the newest version
    steps: int = 0
    seconds: float = 0.0  # of work
    discarded: int = 0  # candidates given up because the loss was not finite
    loss: float | None = None  # of the newest step, in nats; None before the first
    rows: int = 0  # training rows in memory
    held_out: int = 0
    nbytes: int = 0  # of both
    beta: float | None = None  # of the weights that were measured last; None before
    version: HeadVersion | None = None  # published in the last slice of work
    idle: bool = True  # it waits for rows


class Learner:
    """Trains a head. Not thread-safe. No engine may run on the same `base` object meanwhile.

    `version` is the newest one; None before the first. Raises `LoadError` if the head cannot be loaded.
    """

    def __init__(self, base: BaseModel, start: StartingHead, settings: LearnerSettings | None = None) -> None:
        self._base, self._start, self._settings = base, start, settings or LearnerSettings()
        self._tried = load_start(start, base)  # measured in the target model's dtype, as engines draft
        self._head = deepcopy(self._tried).float().requires_grad_(True).train()
        if self._head.vocabulary is not None:
            self._head.vocabulary.borrow(base)  # these rows stay in the target model's dtype
        self._training = AveragedTraining(base, self._head, self._settings)
        self._rows = LearningRows(self._settings)
        self._progress = LearnerProgress(version_of(self._head))
        self._good = weights_of(self._head)
        self.version: HeadVersion | None = None
        self._since = 0  # steps since the last measurement
        self._measuring: Iterator[None] | None = None

    def add(self, samples: Sequence[RowSample]) -> None:
        """Take rows. Without room, the oldest and the most used ones are dropped."""
        for sample in samples:
            self._rows.add(sample)

    def work(self, seconds: float) -> LearnerProgress:
        """Work for about `seconds`; at least one unit of work if there is any."""
        now, begun, before = self._progress, time.monotonic(), self._progress.seconds
        now.version, now.idle = None, False
        while not now.idle:
            now.idle = not self._unit()
            spent = time.monotonic() - begun
            now.seconds = before + spent
            if spent >= seconds:
                break
        return self.progress()

    def progress(self) -> LearnerProgress:
        rows = self._rows
        return replace(self._progress, rows=len(rows), held_out=len(rows.held_out), nbytes=rows.nbytes)

    def _unit(self) -> bool:
        try:
            if self._measuring is None and self._since >= self._settings.evaluate_every:
                self._since = 0
                if len(self._rows.held_out) >= self._settings.least_held_out:
                    self._measuring = self._measure()
            if self._measuring is None:
                return self._learn()
            if next(self._measuring, True):  # it yields None until it ends
                self._measuring = None
        except TrainingError:
            self._measuring = None
            self._since = 0
            self._progress.discarded += 1
            self._training.restart(self._good)
        return True

    def _learn(self) -> bool:
        """Take an optimiser step; False if there are too few rows. Raises `TrainingError` if the loss is not finite."""
        settings = self._settings
        if len(self._rows) < settings.texts_per_step:
            return False
        texts = self._rows.take(settings.texts_per_step)
        depth, parts, done = self._head.config.depth, [], 0
        for part in micro_batches(texts, _TOKENS):
            draws = anchor_draws(settings.seed, self._progress.steps, range(done, done + len(part)))
            parts.append(draft_batch(part, depth, settings.anchors_per_text, draws).to(self._base.device))
            done += len(part)
        self._progress.loss = self._training.step(parts)
        self._progress.steps += 1
        self._since += 1
        return True

    def _measure(self) -> Iterator[None]:
        """Compare averaged with published weights on held-out rows, a batch per `yield`; publish better ones."""
        texts, settings, steps = self._rows.held_out, self._settings, self._progress.steps
        weights = self._training.averaged()
        if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
            raise TrainingError(f"step {steps}: a weight is not finite; lower the learning rate")
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
        self._progress.beta = candidate
        if candidate >= settings.least_gain * published:
            self._publish(weights, candidate, published, len(texts))

    def _publish(self, weights: dict[str, Tensor], beta: float, before: float, held_out: int) -> None:
        now = self._progress
        now.number += 1
        provenance: dict[str, Any] = {
            "version": now.number,
            "started_from": self._start.copied_from or self._start.folder,
            "rows": self._rows.seen,
            "tokens": self._rows.tokens,
            "steps": now.steps,
            "seconds": round(now.seconds, 1),
            "held_out_rows": held_out,
            "nodes": self._settings.num_draft_tokens,
            "beta": round(beta, 4),
            "beta_before": round(before, 4),
            "torch": torch.__version__,
        }
        self.version = HeadVersion(now.number, weights, beta, before, provenance)
        now.version, self._good = self.version, weights

    def save_head(self, folder: str | Path) -> None:
        """Write the newest version as a head folder, which `--drafter` takes; raise `ValueError` if there is none."""
        if self.version is None:
            raise ValueError("nothing has been published yet: there is no head to save")
        head = deepcopy(self._tried).float()
        load_weights(head, self.version.weights)
        assert head.provenance is not None
        learnt = {LEARNT: self.version.provenance}
        head.provenance = replace(head.provenance, training={**head.provenance.training, **learnt})
        save_head(head, folder)

    def save(self, folder: str | Path) -> None:
        """Write the state, without rows, for `resume`. Atomically replaces an earlier one."""
        now, version = self._progress, self.version
        facts = {
            "totals": {name: getattr(now, name) for name in ("number", "steps", "seconds", "discarded")},
            "training_steps": self._training.steps,
            "rows": self._rows.seen,
            "tokens": self._rows.tokens,
            "first": self._rows.first,
            "version": None if version is None else {k: v for k, v in vars(version).items() if k != "weights"},
        }
        tensors = self._training.tensors() | {f"good/{name}": tensor for name, tensor in self._good.items()}
        file = Path(folder) / STATE_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        own = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        write_whole(file, lambda new: save_file(own, new, metadata={_FACTS: json.dumps(facts)}))

    @classmethod
    def resume(
        cls, base: BaseModel, start: StartingHead, folder: str | Path, settings: LearnerSettings | None = None
    ) -> Learner:
        """Return a learner that continues from a saved state; raise `LoadError` if there is no state of this head."""
        learner = cls(base, start, settings)
        tensors, facts = _read_state(Path(folder))
        good = _under("good/", tensors)
        try:
            totals, version = LearnerProgress(**facts["totals"]), facts["version"]
            learner._training.load(tensors, facts["training_steps"], totals.discarded)
            # The head's folder is newer than the state if a process died between the two writes.
            learner._progress = replace(totals, number=max(totals.number, learner._progress.number))
            rows = learner._rows
            rows.seen, rows.tokens, rows.first = facts["rows"], facts["tokens"], facts["first"]
            learner._good = good
            learner.version = None if version is None else HeadVersion(weights=good, **version)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise LoadError(
                f"the learner's state in {folder} is not of this head: begin without it, or with the head it was of"
            ) from error
        return learner


def _read_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(folder / STATE_FILE, framework="pt") as file:
            facts = json.loads(file.metadata()[_FACTS])
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118 - it is no mapping
    except FileNotFoundError as error:
        raise LoadError(f"no learner's state in {folder}: it has no {STATE_FILE}") from error
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise LoadError(f"the learner's state in {folder} is damaged: {first_line(error)}") from error


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class AveragedTraining:
    """Trains a head, in training mode and fp32, with AdamW at a constant rate, and averages its weights (EMA)."""

    def __init__(self, base: BaseModel, head: DraftHead, settings: LearnerSettings) -> None:
        self._base, self._head, self._settings = base, head, settings
        self._restarts = 0
        self._begin()

    def _begin(self) -> None:
        wanted = self._settings
        settings = TrainingSettings(
            steps=1,
            texts_per_step=wanted.texts_per_step,
            anchors_per_text=wanted.anchors_per_text,
            learning_rate=wanted.learning_rate / 2**self._restarts,
            warmup_steps=wanted.warmup_steps,
            final_learning_rate=1.0,
            teacher=wanted.teacher if LM_HEAD_INPUT in self._head.hidden_layers else 0,
            precision="fp32" if self._base.dtype == torch.float32 else "bf16",
            seed=wanted.seed,
        )
        self._optimiser = TorchOptimiser(TrainingStep(self._base, self._head, settings), settings)
        self._average = {name: value.detach().clone() for name, value in self._head.named_parameters()}

    def step(self, parts: Sequence[DraftBatch]) -> float:
        """Take an optimiser step over micro-batches; return its loss. See `TorchOptimiser.update`."""
        loss = self._optimiser.update(parts).loss
        steps = self._optimiser.steps
        # Early steps weigh more: the initial weights should fade fast.
        newest = 1.0 - min(self._settings.averaging, (1.0 + steps) / (10.0 + steps))
        with torch.no_grad():
            for name, value in self._head.named_parameters():
                self._average[name].lerp_(value, newest)
        return loss

    def averaged(self) -> dict[str, Tensor]:
        return weights_of(self._head) | {name: value.to("cpu", copy=True) for name, value in self._average.items()}

    def restart(self, weights: Mapping[str, Tensor]) -> None:
        """Continue from other weights with a fresh optimiser at half the rate, after a loss that was not finite."""
        self._restarts += 1
        load_weights(self._head, weights)
        self._begin()

    def tensors(self) -> dict[str, Tensor]:
        found = {f"weights/{name}": tensor for name, tensor in weights_of(self._head).items()}
        found |= {f"average/{name}": tensor.to("cpu", copy=True) for name, tensor in self._average.items()}
        for place, moments in self._optimiser.state_dict()["adamw"]["state"].items():
            found |= {f"adamw/{place}/{name}": value.to("cpu", copy=True) for name, value in moments.items()}
        return found

    @property
    def steps(self) -> int:
        """Optimiser steps since the last restart."""
        return self._optimiser.steps

    def load(self, tensors: Mapping[str, Tensor], steps: int, restarts: int) -> None:
        """Restore what `tensors` returned; raise KeyError, ValueError or RuntimeError if it is of another head."""
        self._restarts = restarts
        self._head.load_state_dict(_under("weights/", tensors))
        self._begin()
        for name, average in self._average.items():
            average.copy_(tensors[f"average/{name}"])
        moments: dict[int, dict[str, Tensor]] = {}
        for key, tensor in _under("adamw/", tensors).items():
            place, _, name = key.partition("/")
            moments.setdefault(int(place), {})[name] = tensor
        adamw: dict[str, Any] = self._optimiser.state_dict()["adamw"]
        self._optimiser.load_state_dict({"adamw": {**adamw, "state": moments}, "steps": steps})
