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
        self._states = states
        self._frame_terms: Tensor = head.joint_frames(states)

    def start(self) -> Tensor:
        """Return the last tokens of the text."""
        return self._recent

    def extend(self, state: Tensor, tokens: Tensor) -> Tensor:
        """See `LabelModel.extend`."""
        return shifted(state, self._head.base_tokens(tokens))

    def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `LabelModel.score`."""
        head = self._head
        states = head.norm(head.joint(self._states[rows, first:stop], self._terms(first, stop, rows, state)))
        shares = head.output(self._base).lm_head(states).softmax(-1, dtype=torch.float32)
        return shares, head.blank(states)[..., 0].float().sigmoid()

    def _terms(self, first: int, stop: int, rows: Tensor, state: Tensor) -> Tensor:
        """First layer of the joint network before its activation, `[M, stop - first, joint_size]`."""
        return self._frame_terms[rows, first:stop] + self._head.label_terms(self._base, state)[:, None]


def shifted(state: Tensor, tokens: Tensor) -> Tensor:
    """Return last labels `[M, c]` in which one of `tokens` `[M]`, as the newest, takes the place of the oldest."""
    return torch.cat([state[:, 1:], tokens[:, None]], 1)
