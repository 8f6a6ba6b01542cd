"""A CTC head's label model that reads the LM head once a draft, for all frames, and not once for each level of a tree.

Labels move a frame state within the span of the joint network's output weights `O` `[d, R]`: the state is `s + O·a`,
where `a` `[R]` are the network's activations. The norm takes its mean away and divides by its deviation `σ`; with the
norm's weights `γ` and bias `β`, the LM head `W` and `c(x) = γ ⊙ (x − mean x)` the logits are

    (W·c(s) + W·c(O)·a) / σ + W·β

in exact arithmetic. `W·c(s)` needs no labels, and `W·c(O)` no text: its `[R, V]` numbers are computed once. So a level
reads R numbers a token instead of d.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.heads.ctc.ctc_frames import CTCFrames
from drafter.heads.ctc.frame_lattice import FrameLattice

_SMALLER = 2
"""So many times as small as the LM head the factor must be, or reading the frames' logits again makes up for it."""


@dataclass(frozen=True)
class LabelFactor:
    """What the LM head makes of the joint network's output weights.

    Args:
        logits: `[R + 1, V]`: `(W·c(O))ᵀ`, then `W·β`.
    """

    logits: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, head: CTCFrames, base: BaseModel) -> LabelFactor:
        """Compute it of the present weights."""
        spans = _centred(head, head.joint_spans.T)
        return cls(head.output(base).lm_head(torch.cat([spans, head.norm.bias[None]])))


def is_factored(head: CTCFrames, base: BaseModel) -> bool:
    """Whether the logits can be factored, and a level then reads less."""
    spans = head.joint_spans
    return head.output(base).lm_head_bias is None and _SMALLER * (spans.shape[1] + 1) <= len(spans)


class FactoredLattice(FrameLattice):
    """`LabelModel` that gives what `FrameLattice` gives, but for rounding.

    It is for a search that extends all paths of a level: they come by row, as many of each row.

    Args:
        head: A head with a label context, whose LM head has no bias.
        base: Lends its embedding and LM head.
        states: `[B, F, d]` frame states.
        recent: `[B, c]` last tokens of each text, the pending token last.
        factor: Of the head.
    """

    def __init__(self, head: CTCFrames, base: BaseModel, states: Tensor, recent: Tensor, factor: LabelFactor) -> None:
        super().__init__(head, base, states, recent)
        self._factor = factor
        self._frame_logits = head.output(base).lm_head(_centred(head, states))

    def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `LabelModel.score`."""
        head, frames = self._head, stop - first
        told, activations = head.joint_activations(
            self._states[rows, first:stop], self._terms(first, stop, rows, state)
        )
        scale = (told.float().var(-1, correction=0, keepdim=True) + head.norm.eps).rsqrt().to(told)
        known = torch.cat([*(layer * scale for layer in activations), torch.ones_like(scale)], -1)
        # A row's paths share its frames: each of them takes, of the frames' logits, those of its own frame.
        own = torch.eye(frames, device=scale.device, dtype=scale.dtype) * scale
        logits = (known.flatten(0, 1) @ self._factor.logits).unflatten(0, (len(self._states), -1))
        logits.baddbmm_(own.view(*logits.shape[:2], frames), self._frame_logits[:, first:stop])
        shares = logits.view(len(rows), frames, -1).softmax(-1, dtype=torch.float32)
        return shares, head.blank(head.norm(told))[..., 0].float().sigmoid()


def _centred(head: CTCFrames, states: Tensor) -> Tensor:
    """`c(x)` of states `[..., d]`."""
    return head.norm.weight * (states - states.mean(-1, keepdim=True))
