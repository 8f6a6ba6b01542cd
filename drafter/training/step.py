"""Forward of a training step: target model and head as one module, so that both can be sharded together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafter.heads.contract import DraftHead
from drafter.heads.losses import DraftBatch, hard_labels
from drafter.target.forward import LM_HEAD_INPUT
from drafter.target.model import BaseModel
from drafter.training.settings import TrainingSettings
from drafter.training.targets import teacher_labels


class TrainingStep(nn.Module):
    """Computes the loss of a head on a batch. The frozen target model computes hidden states that the batch lacks.

    Only the head's parameters are trained. It must be on the target model's device.
    """

    def __init__(self, base: BaseModel, head: DraftHead, settings: TrainingSettings) -> None:
        super().__init__()
        self.base_model: nn.Module = base.model
        self.head = head
        self._base, self._settings = base, settings

    def forward(self, batch: DraftBatch) -> tuple[Tensor, Tensor]:
        """Return the loss's total and weight, scalars (see `LossSum`), of a batch on the target model's device."""
        settings, base, head = self._settings, self._base, self.head
        layers = training_layers(head, settings)
        with torch.autocast(base.device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
            if batch.hidden is None:
                hidden = base_hidden_states(base, batch.tokens, layers)
            else:
                hidden = batch.hidden.to(base.dtype)
            parts = hidden.chunk(len(layers), -1)
            labels = hard_labels(batch.targets)
            if settings.teacher:
                last = parts[layers.index(LM_HEAD_INPUT)]
                labels = teacher_labels(base, head, batch, last, settings.teacher, settings.teacher_temperature)
            if layers != head.hidden_layers:
                hidden = torch.cat(parts[: len(head.hidden_layers)], -1)
            loss = head(base, batch, hidden, labels)
        return loss.total, loss.weight


def training_layers(head: DraftHead, settings: TrainingSettings) -> tuple[int, ...]:
    """Return the hidden layers that a training step reads: the head's, and with a teacher the LM head's input."""
    layers = head.hidden_layers
    return (*layers, LM_HEAD_INPUT) if settings.teacher and LM_HEAD_INPUT not in layers else layers


@torch.no_grad()
def base_hidden_states(base: BaseModel, tokens: Tensor, layers: tuple[int, ...] = (LM_HEAD_INPUT,)) -> Tensor:
    """Return the target model's hidden states `[B, L, K · d]` of right-padded tokens `[B, L]`; see
    `DraftSpec.hidden_layers`.
    """
    base.layers.watch(layers)
    last = base.decoder(input_ids=tokens, use_cache=False).last_hidden_state
    return base.layers.take(layers, last, base.device)
