"""Training without an end: AdamW at one rate, and the average of the weights that it passes through.

A falling learning rate makes the last weights of a run good, but nobody knows when a run that follows a job is at its
last step. The moving average of the weights does about the same at every step (Polyak and Juditsky 1992).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.base.hidden_states import LM_HEAD_INPUT
from drafter.heads.contract import DraftHead
from drafter.heads.draft_batch import DraftBatch
from drafter.learning.learner_settings import LearnerSettings
from drafter.learning.weights import load_weights, weights_of
from drafter.training.optimiser import TorchOptimiser
from drafter.training.settings import TrainingSettings
from drafter.training.training_step import TrainingStep


class AveragedTraining:
    """Trains a head.

    Args:
        base: The frozen base.
        head: The head in training mode and in fp32, on the base's device.
        settings: Of the learner.

    Attributes:
        learning_rate: Of AdamW; it is halved by each `restart`.
    """

    def __init__(self, base: BaseModel, head: DraftHead, settings: LearnerSettings) -> None:
        self._base, self._head, self._settings = base, head, settings
        self.learning_rate = settings.learning_rate
        self._begin()

    def _begin(self) -> None:
        settings = training_settings(self._settings, self._head, self._base, self.learning_rate)
        self._optimiser = TorchOptimiser(TrainingStep(self._base, self._head, settings), settings)
        self._average = {name: value.detach().clone() for name, value in self._head.named_parameters()}

    def step(self, parts: Sequence[DraftBatch]) -> float:
        """Take a step, and return its loss.

        Args:
            parts: Its micro-batches, on the base's device.

        Raises:
            TrainingError: The loss or its gradient is not finite. Nothing has changed.
        """
        loss = self._optimiser.update(parts).loss
        steps = self._optimiser.steps
        # At first the past says nothing.
        newest = 1.0 - min(self._settings.averaging, (1.0 + steps) / (10.0 + steps))
        with torch.no_grad():
            for name, value in self._head.named_parameters():
                self._average[name].lerp_(value, newest)
        return loss

    def averaged(self) -> dict[str, Tensor]:
        """Return the averaged weights, as `weights_of` does."""
        return weights_of(self._head) | {name: value.to("cpu", copy=True) for name, value in self._average.items()}

    def restart(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from other weights, with nothing known of gradients, and half as fast: the last try has failed."""
        self.learning_rate /= 2
        load_weights(self._head, weights)
        self._begin()

    # ---- to be gone on with in another process

    def tensors(self) -> dict[str, Tensor]:
        """Return all that a step changes, on the CPU, by names of its own."""
        found = {f"weights/{name}": tensor for name, tensor in weights_of(self._head).items()}
        found |= {f"average/{name}": tensor.to("cpu", copy=True) for name, tensor in self._average.items()}
        for place, moments in self._optimiser.state_dict()["adamw"]["state"].items():
            found |= {f"adamw/{place}/{name}": value.to("cpu", copy=True) for name, value in moments.items()}
        return found

    @property
    def steps(self) -> int:
        """Steps since the last restart."""
        return self._optimiser.steps

    def load(self, tensors: Mapping[str, Tensor], steps: int, learning_rate: float) -> None:
        """Set what `tensors` has returned.

        Raises:
            KeyError, ValueError, RuntimeError: It is not of this head.
        """
        groups: dict[str, dict[str, Tensor]] = {"weights": {}, "average": {}}
        moments: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            group, _, name = key.partition("/")
            if group == "adamw":
                place, _, name = name.partition("/")
                moments.setdefault(int(place), {})[name] = tensor
            else:
                groups[group][name] = tensor
        self.learning_rate = learning_rate
        self._head.load_state_dict(groups["weights"])
        self._begin()
        for name, average in self._average.items():
            average.copy_(groups["average"][name])
        adamw: dict[str, Any] = self._optimiser.state_dict()["adamw"]
        self._optimiser.load_state_dict({"adamw": {**adamw, "state": moments}, "steps": steps})


def training_settings(
    settings: LearnerSettings, head: DraftHead, base: BaseModel, learning_rate: float
) -> TrainingSettings:
    """Return a learner's settings as those of a training run whose learning rate never falls."""
    return TrainingSettings(
        steps=1,
        texts_per_step=settings.texts_per_step,
        anchors_per_text=settings.anchors_per_text,
        learning_rate=learning_rate,
        warmup_steps=settings.warmup_steps,
        final_learning_rate=1.0,
        teacher=settings.teacher if LM_HEAD_INPUT in head.hidden_layers else 0,
        precision="fp32" if base.dtype == torch.float32 else "bf16",
        seed=settings.seed,
    )
