"""Label model of a CTC head's frames: what each frame emits after a path."""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.heads.ctc.ctc_frames import CTCFrames


class FrameLattice:
    """`LabelModel` that computes with the head as it is. The state of a path is its last `c` tokens, in the base's ids.

    Args:
        head: A head with a label context.
        base: Lends its embedding and LM head.
        states: `[B, F, d]` frame states.
        recent: `[B, c]` last tokens of each text, the pending token last.
    """

    def __init__(self, head: CTCFrames, base: BaseModel, states: Tensor, recent: Tensor) -> None:
        self._head, self._base, self._recent = head, base, recent
        self._states, self._frame_terms = states, head.joint_frames(states)

    def start(self) -> Tensor:
        """Return the last tokens of the text."""
        return self._recent

    def extend(self, state: Tensor, tokens: Tensor) -> Tensor:
        """See `LabelModel.extend`."""
        return shifted(state, self._head.base_tokens(tokens))

    def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `LabelModel.score`."""
        head = self._head
        terms = self._frame_terms[rows, first:stop] + head.label_terms(self._base, state)[:, None]
        states = head.norm(head.joint(self._states[rows, first:stop], terms))
        shares = head.output(self._base).lm_head(states).float().softmax(-1)
        return shares, head.blank(states)[..., 0].float().sigmoid()


def shifted(state: Tensor, tokens: Tensor) -> Tensor:
    """Return last labels `[M, c]` in which one of `tokens` `[M]`, as the newest, takes the place of the oldest."""
    return torch.cat([state[:, 1:], tokens[:, None]], 1)
