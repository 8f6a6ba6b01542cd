"""Training of a head without an end, and transfer of its weights and the learner's state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafter.errors import LoadError, first_line
from drafter.heads.contract import DraftHead
from drafter.heads.losses import DraftBatch
from drafter.methods.learning.settings import LearnerSettings
from drafter.target.forward import LM_HEAD_INPUT
from drafter.target.model import BaseModel
from drafter.training.loop import TorchOptimiser, TrainingStep
from drafter.training.settings import TrainingSettings


def weights_of(head: DraftHead) -> dict[str, Tensor]:
    """Return a copy of a head's weights on the CPU; floats in fp32."""
    return {
        name: tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in head.state_dict().items()
    }


@torch.no_grad()
def load_weights(head: DraftHead, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a head, keeping its dtype and device."""
    for name, tensor in head.state_dict().items():
        tensor.copy_(weights[name])


def check_weights(
    weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], tokens: Tensor | None, what: str
) -> None:
    """Check weights that are about to replace a head's.

    Args:
        weights: By name.
        shapes: Of the head's weights, by name.
        tokens: `[K]` the head's draft vocabulary, which never changes; None if it drafts all tokens.
        what: Subject of the error message.

    Raises:
        LoadError: A tensor is missing, unknown, misshapen or not finite, or the draft vocabulary is another.
    """
    if names := sorted(shapes.keys() ^ weights.keys()):
        raise LoadError(f"{what} is of another shape than the one that drafts: tensor {names[0]!r}")
    for name, tensor in weights.items():
        if tensor.shape != shapes[name]:
            raise LoadError(f"{what}: tensor {name!r} has shape {list(tensor.shape)}, not {list(shapes[name])}")
        if not bool(torch.isfinite(tensor).all()):
            raise LoadError(f"{what}: tensor {name!r} holds values that are not finite")
    if tokens is not None and not torch.equal(weights["vocabulary.tokens"].cpu(), tokens):
        raise LoadError(f"{what} has another draft vocabulary than the one that drafts")


# A learner's state is one file, so that its replacement is atomic: the header holds all that is not a tensor.

STATE_FILE = "learner.safetensors"
_FACTS = "learner"


def write_learner(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write CPU tensors and JSON-serialisable facts, atomically replacing an earlier state."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{STATE_FILE}.tmp"
    own = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(own, temporary, metadata={_FACTS: json.dumps(dict(facts))})
    temporary.replace(folder / STATE_FILE)


def read_learner(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the facts of a state.

    Raises:
        LoadError: There is none, or it is damaged.
    """
    try:
        with safe_open(folder / STATE_FILE, framework="pt") as file:
            facts = json.loads(file.metadata()[_FACTS])
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118 - it is no mapping
    except FileNotFoundError as error:
        raise LoadError(f"no learner's state in {folder}: it has no {STATE_FILE}") from error
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise LoadError(f"the learner's state in {folder} is damaged: {first_line(error)}") from error


class AveragedTraining:
    """Trains a head, in training mode and fp32, with AdamW at a constant rate, and averages its weights (EMA).

    Attributes:
        learning_rate: Of AdamW; each `restart` halves it.
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
        """Take an optimiser step over micro-batches on the target model's device; return its loss.

        Raises:
            TrainingError: The loss or its gradient is not finite. Nothing has changed.
        """
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
        self.learning_rate /= 2
        load_weights(self._head, weights)
        self._begin()

    def tensors(self) -> dict[str, Tensor]:
        """Return the training state on the CPU, for `load`."""
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
        """Restore what `tensors` returned.

        Raises:
            KeyError, ValueError, RuntimeError: It is of another head.
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
    """Return a learner's settings as those of a training run with a constant learning rate."""
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
