"""The loss of each algorithm. A new one is one function and one line in `OBJECTIVES`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drafter.base_model import BaseModel
from drafter.ctc.loss import LossSum, ctc_loss, lattice_prefix_loss, prefix_loss
from drafter.drafters.ctc import CTCHead, recent_tokens
from drafter.pretrained import DraftHead
from drafter.training.targets import DraftBatch


@torch.no_grad()
def base_hidden_states(base: BaseModel, tokens: Tensor) -> Tensor:
    """The base's last hidden states `[B, L, d]` of `tokens` `[B, L]`, padded on the right: the LM head's input."""
    return base.decoder(input_ids=tokens, use_cache=False).last_hidden_state  # type: ignore[no-any-return]


def draft_loss(head: DraftHead, base: BaseModel, batch: DraftBatch) -> LossSum:
    """The loss of one step; the hidden states are computed on the fly by the frozen base.

    Args:
        head: In training mode, on the base's device.
        base: The base that said the targets.
        batch: On the base's device.
    """
    return OBJECTIVES[head.algorithm](head, base, batch, base_hidden_states(base, batch.tokens))


def ctc_objective(head: CTCHead, base: BaseModel, batch: DraftBatch, hidden: Tensor) -> LossSum:
    """CTC, prefix or lattice loss, as the head's configuration says. `hidden` is `[B, L, d]`."""
    config = head.config
    states = head.frames_at(base.embed(batch.tokens), hidden, batch.anchors).flatten(0, 1)
    real = batch.lengths.flatten() > 0
    states, lengths = states[real], batch.lengths.flatten()[real]
    targets = batch.targets.flatten(0, 1)[real]
    if config.label_context:
        recent = recent_tokens(batch.tokens, batch.anchors, config.label_context).flatten(0, 1)[real]
        emit, blank = _lattice_columns(head, base, states, torch.cat([recent, targets], 1))
        return lattice_prefix_loss(emit, blank, lengths, config.num_frames, config.depth_decay)
    log_probs = head.log_probs(states, base.lm_head)
    if config.loss == "ctc":
        return ctc_loss(log_probs, targets, lengths)[0]
    return prefix_loss(log_probs, targets, lengths, config.depth_decay)


def _lattice_columns(head: CTCHead, base: BaseModel, states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[N, U, B]` of each label and of the blank, of frame states `[N, T, d]`.

    `labels` `[N, c + U]` are the tokens around the anchor: `c` up to the pending one, then the targets.
    """
    config = head.config
    depth = labels.shape[1] - config.label_context
    frame = torch.arange(depth)[:, None] + torch.arange(config.band)
    known = base.embed(labels).unfold(1, config.label_context, 1)[:, :depth].transpose(2, 3)
    states = head.with_labels(states[:, frame.clamp_max(config.num_frames - 1)], known[:, :, None])
    log_probs = head.log_probs(states, base.lm_head)
    label = labels[:, config.label_context :, None, None].expand(-1, -1, config.band, -1)
    return log_probs.gather(3, label)[..., 0], log_probs[..., -1]


OBJECTIVES: dict[str, Callable[[Any, BaseModel, DraftBatch, Tensor], LossSum]] = {"ctc": ctc_objective}
"""Loss by algorithm: `(head, base, batch, hidden)` → `LossSum`."""
