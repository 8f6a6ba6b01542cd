"""The forward of a training step: base and head as one module, so that both can be sharded together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafter.base.causal_lm import BaseModel
from drafter.heads.contract import DraftHead
from drafter.heads.draft_batch import DraftBatch
from drafter.heads.losses import hard_labels
from drafter.training.settings import TrainingSettings
from drafter.training.teacher import teacher_labels


class TrainingStep(nn.Module):
    """Computes the loss of a head on a batch. The frozen base computes hidden states that the batch lacks.

    Args:
        base: The frozen base.
        head: The head, on the base's device. Only its parameters are trained.
        settings: Give the labels and the precision.
    """

    def __init__(self, base: BaseModel, head: DraftHead, settings: TrainingSettings) -> None:
        super().__init__()
        self.base_model: nn.Module = base.model
        self.head = head
        self._base, self._settings = base, settings

    def forward(self, batch: DraftBatch) -> tuple[Tensor, Tensor]:
        """Return the loss's total and weight, scalars (see `LossSum`), of a batch on the base's device."""
        settings, base = self._settings, self._base
        with torch.autocast(base.device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
            hidden = base_hidden_states(base, batch.tokens) if batch.hidden is None else batch.hidden.to(base.dtype)
            labels = hard_labels(batch.targets)
            if settings.teacher:
                labels = teacher_labels(base, self.head, batch, hidden, settings.teacher, settings.teacher_temperature)
            loss = self.head(base, batch, hidden, labels)
        return loss.total, loss.weight


@torch.no_grad()
def base_hidden_states(base: BaseModel, tokens: Tensor) -> Tensor:
    """Return the base's last hidden states `[B, L, d]`, the LM head's input, of right-padded tokens `[B, L]`."""
    return base.decoder(input_ids=tokens, use_cache=False).last_hidden_state  # type: ignore[no-any-return]
