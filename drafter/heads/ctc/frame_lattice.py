"""Label model of a CTC head's frames: what each frame emits after a path."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.heads.ctc.ctc_frames import CTCFrames


class LastTokens:
    """Half of a `LabelModel`: the state of a path is its last `c` tokens, in the base's ids.

    Args:
        recent: `[B, c]` last tokens of each text, the pending token last.
        base_tokens: From draft ids to tokens; the text may have tokens that are never drafted.
    """

    def __init__(self, recent: Tensor, base_tokens: Callable[[Tensor], Tensor]) -> None:
        self._recent, self._base_tokens = recent, base_tokens

    def start(self) -> Tensor:
        """Return the last tokens of the text."""
        return self._recent

    def extend(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Let the newest token take the place of the oldest."""
        return torch.cat([state[:, 1:], self._base_tokens(tokens)[:, None]], 1)


class FrameLattice(LastTokens):
    """`LabelModel` that computes with the head as it is.

    Args:
        head: A head with a label context.
        base: Lends its embedding and LM head.
        states: `[B, F, d]` frame states.
        recent: `[B, c]` last tokens of each text, the pending token last.
    """

    def __init__(self, head: CTCFrames, base: BaseModel, states: Tensor, recent: Tensor) -> None:
        super().__init__(recent, head.base_tokens)
        self._head, self._base = head, base
        self._states, self._frame_terms = states, head.joint_frames(states)

    def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `LabelModel.score`."""
        head = self._head
        terms = self._frame_terms[rows, first:stop] + head.label_terms(self._base, state)[:, None]
        states = head.norm(head.joint(self._states[rows, first:stop], terms))
        return head.output(self._base).lm_head(states), head.blank(states)[..., 0].float().sigmoid()
