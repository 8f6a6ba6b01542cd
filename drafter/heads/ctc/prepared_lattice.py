"""`FrameLattice` for decoding on a CPU: the same label model, computed from weights that no longer change.

A search on a CPU is many small operations, and the time to call each of them counts. benchmarks/results/searches has
what this saves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.base.causal_lm import BaseModel
from drafter.base.executors.prepacked import product_of
from drafter.heads.ctc.ctc_frames import CTCFrames
from drafter.heads.ctc.frame_lattice import LastTokens

_TABLE_ENTRIES = 1 << 24
"""Largest table of label terms, in numbers. A larger one would take more memory than the product saves time."""


class PreparedLattices:
    """Makes the label models of a head's frames, scoring one frame at a time.

    The label terms are looked up where a table of them is small; see `CTCFrames.label_terms`.

    Args:
        head: A head with a label context, on a CPU.
        base: Lends its embedding and LM head.
    """

    def __init__(self, head: CTCFrames, base: BaseModel) -> None:
        config = head.config
        small = config.label_context * config.vocab_size * config.joint_size <= _TABLE_ENTRIES
        self.label_terms = _looked_up(head, base) if small else lambda labels: head.label_terms(base, labels)
        self.joint_frames, self.joint_out = product_of(head.joint_frames), product_of(head.joint_out)
        self.joint_layers = []
        for layer in head.joint_layers:
            norm, inner, _, out = layer.children()
            assert isinstance(norm, nn.LayerNorm)
            self.joint_layers.append((norm.weight, norm.bias, product_of(inner), product_of(out)))
        self.norm = (head.norm.weight, head.norm.bias)
        self.blank = (head.blank.weight, head.blank.bias)
        self.lm_head, self.base_tokens = head.output(base).prepared_lm_head(), head.base_tokens

    def __call__(self, states: Tensor, recent: Tensor) -> _PreparedLattice:
        """Return the label model of frame states `[B, F, d]` after the last tokens `[B, c]` of each text."""
        return _PreparedLattice(self, states, recent)


class _PreparedLattice(LastTokens):
    """`LabelModel` that `PreparedLattices` makes."""

    def __init__(self, prepared: PreparedLattices, states: Tensor, recent: Tensor) -> None:
        super().__init__(recent, prepared.base_tokens)
        self._prepared = prepared
        self._states, self._frame_terms = states, prepared.joint_frames(states)

    def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        assert stop == first + 1
        prepared, width = self._prepared, (self._states.shape[2],)
        terms = self._frame_terms[:, first].index_select(0, rows) + prepared.label_terms(state)
        states = self._states[:, first].index_select(0, rows)
        states += prepared.joint_out(F.silu(terms, inplace=True))
        for weight, bias, inner, out in prepared.joint_layers:
            states += out(F.silu(inner(torch.layer_norm(states, width, weight, bias)), inplace=True))
        states = torch.layer_norm(states, width, *prepared.norm)
        return prepared.lm_head(states)[:, None], F.linear(states, *prepared.blank).float().sigmoid()


@torch.no_grad()
def _looked_up(head: CTCFrames, base: BaseModel) -> Callable[[Tensor], Tensor]:
    """Return `label_terms` as sums of rows of a table `[c · V, joint_size]`: one row for each place and token."""
    config = head.config
    labels = head.label_norm(base.embed(torch.arange(config.vocab_size)))
    weights = head.joint_labels.weight.unflatten(1, (config.label_context, config.hidden_size))
    table = torch.cat([labels @ weights[:, place].T for place in range(config.label_context)])
    offsets = torch.arange(config.label_context) * config.vocab_size

    def terms(last: Tensor) -> Tensor:
        bags = torch.arange(0, last.numel(), config.label_context)
        # `F.embedding_bag` calls this after checks that take longer than the sum itself.
        return torch.embedding_bag(table, (last + offsets).flatten(), bags, False, 0)[0]

    return terms
