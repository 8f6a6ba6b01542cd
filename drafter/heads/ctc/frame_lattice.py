"""What the frames of a CTC head say after a path: the label models of its lattice search.

`FrameLattice` asks the head as it is. `PreparedLattices` computes the same of weights that change no more, on a CPU:
there a search is many small operations, and what one takes to be called counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.base.causal_lm import BaseModel
from drafter.base.executors.prepacked import product_of

if TYPE_CHECKING:
    from drafter.heads.ctc.ctc_head import CTCHead

_TABLE_ENTRIES = 1 << 24
"""Tables of up to this many numbers replace a product, which takes as long as its weights take to be read."""


class _LastTokens:
    """Of a `LabelModel`, the state: a path's last `c` tokens, from those of the text `[B, c]` on."""

    def __init__(self, recent: Tensor) -> None:
        self._recent = recent

    def start(self) -> Tensor:
        return self._recent

    def extend(self, state: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat([state[:, 1:], tokens[:, None]], 1)


class FrameLattice(_LastTokens):
    """`LabelModel` of a head's frames `[B, F, d]`.

    Args:
        head: With a label context.
        base: Lends its embedding and LM head.
        states: `[B, F, d]`.
        recent: `[B, c]` last tokens of the text, the pending one last.
    """

    def __init__(self, head: CTCHead, base: BaseModel, states: Tensor, recent: Tensor) -> None:
        super().__init__(recent)
        self._head, self._base = head, base
        self._states, self._joint = states, head.joint_frames(states)

    def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        head = self._head
        joint = self._joint[rows, first:stop] + label_terms(head, self._base, state)[:, None]
        states = head.norm(head.joint(self._states[rows, first:stop], joint))
        return self._base.lm_head(states), head.blank(states)[..., 0].float().sigmoid()


def label_terms(head: CTCHead, base: BaseModel, labels: Tensor) -> Tensor:
    """What the last labels `[M, c]`, newest last, add to the joint's first layer: `[M, joint_size]`."""
    return head.joint_labels(head.label_norm(base.embed(labels)).flatten(1))  # type: ignore[no-any-return]


class PreparedLattices:
    """Makes label models of frames on a CPU, a frame at a time; see `FrameLattice`.

    What a label adds to the joint is looked up where a table of it is small.
    """

    def __init__(self, head: CTCHead, base: BaseModel) -> None:
        config = head.config
        small = config.label_context * config.vocab_size * config.joint_size <= _TABLE_ENTRIES
        self.label_terms = _looked_up(head, base) if small else lambda labels: label_terms(head, base, labels)
        self.joint_frames, self.joint_out = product_of(head.joint_frames), product_of(head.joint_out)
        self.joint_layers = []
        for layer in head.joint_layers:
            norm, inner, _, out = layer.children()
            assert isinstance(norm, nn.LayerNorm)
            self.joint_layers.append((norm.weight, norm.bias, product_of(inner), product_of(out)))
        self.norm = (head.norm.weight, head.norm.bias)
        self.blank = (head.blank.weight, head.blank.bias)
        self.lm_head = base.prepared_lm_head()

    def __call__(self, states: Tensor, recent: Tensor) -> _PreparedLattice:
        """Of frame states `[B, F, d]`, behind the last tokens `[B, c]`."""
        return _PreparedLattice(self, states, recent)


class _PreparedLattice(_LastTokens):
    """`LabelModel` that `PreparedLattices` makes."""

    def __init__(self, prepared: PreparedLattices, states: Tensor, recent: Tensor) -> None:
        super().__init__(recent)
        self._prepared = prepared
        self._states, self._joint = states, prepared.joint_frames(states)

    def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        assert stop == first + 1
        prepared, width = self._prepared, (self._states.shape[2],)
        joint = self._joint[:, first].index_select(0, rows) + prepared.label_terms(state)
        states = self._states[:, first].index_select(0, rows)
        states += prepared.joint_out(F.silu(joint, inplace=True))
        for weight, bias, inner, out in prepared.joint_layers:
            states += out(F.silu(inner(torch.layer_norm(states, width, weight, bias)), inplace=True))
        states = torch.layer_norm(states, width, *prepared.norm)
        return prepared.lm_head(states)[:, None], F.linear(states, *prepared.blank).float().sigmoid()


@torch.no_grad()
def _looked_up(head: CTCHead, base: BaseModel) -> Callable[[Tensor], Tensor]:
    """`label_terms` by a table of what each token adds as each of the last labels, `[c · V, joint_size]`."""
    config = head.config
    labels = head.label_norm(base.embed(torch.arange(config.vocab_size)))
    weights = head.joint_labels.weight.unflatten(1, (config.label_context, config.hidden_size))
    table = torch.cat([labels @ weights[:, place].T for place in range(config.label_context)])
    offsets = torch.arange(config.label_context) * config.vocab_size

    def terms(last: Tensor) -> Tensor:
        # Without what `F.embedding_bag` asks of its arguments, which takes longer than the sum.
        bags = torch.arange(0, last.numel(), config.label_context)
        return torch.embedding_bag(table, (last + offsets).flatten(), bags, False, 0)[0]

    return terms
