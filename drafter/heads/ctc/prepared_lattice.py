"""`FrameLattice` for decoding on a CPU: the same label model, computed from weights that no longer change.

A search on a CPU is many small operations, and the time to call each of them counts. benchmarks/results/searches has
what this saves.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.base.causal_lm import BaseModel
from drafter.base.executors.prepacked import product_of
from drafter.heads.ctc.ctc_frames import CTCFrames
from drafter.heads.ctc.frame_lattice import shifted
from drafter.heads.ctc.native_joint import NativeJoint

_TABLE_ENTRIES = 1 << 24
"""Largest table of label terms, in numbers. A larger one would take more memory than the product saves time."""


class _Labels(Protocol):
    """The last labels of paths, and what they add to the joint network; see `CTCFrames.label_terms`."""

    def start(self, recent: Tensor) -> Tensor:
        """Return the state `[B, c]` of texts with the last tokens `recent` `[B, c]`."""

    def extend(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Return the state of paths that are each one of `tokens` `[M]`, which are draft ids, longer."""

    def terms(self, state: Tensor) -> Tensor:
        """Return `[M, joint_size]`."""


class PreparedLattices:
    """Makes the label models of a head's frames, scoring one frame at a time.

    The label terms are looked up where a table of them is small.

    Args:
        head: A head with a label context, in fp32 on a CPU.
        base: Lends its embedding and LM head.

    Raises:
        BuildError: The native library cannot be compiled here.
    """

    def __init__(self, head: CTCFrames, base: BaseModel) -> None:
        config, output = head.config, head.output(base)
        small = config.label_context * len(output.lm_head_weight) * config.joint_size <= _TABLE_ENTRIES
        self.labels: _Labels = _LookedUp(head, base) if small else _Computed(head, base)
        self.joint_frames = product_of(head.joint_frames)
        self.joint = NativeJoint(head, output)

    def __call__(self, states: Tensor, recent: Tensor) -> _PreparedLattice:
        """Return the label model of frame states `[B, F, d]` after the last tokens `[B, c]` of each text."""
        return _PreparedLattice(self, states, recent)


class _PreparedLattice:
    """`LabelModel` that `PreparedLattices` makes."""

    def __init__(self, prepared: PreparedLattices, states: Tensor, recent: Tensor) -> None:
        self._prepared, self._recent = prepared, recent
        self._states, self._frame_terms = states, prepared.joint_frames(states)

    def start(self) -> Tensor:
        return self._prepared.labels.start(self._recent)

    def extend(self, state: Tensor, tokens: Tensor) -> Tensor:
        return self._prepared.labels.extend(state, tokens)

    def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        assert stop == first + 1
        terms = self._prepared.labels.terms(state)
        shares, blanks = self._prepared.joint.emissions(first, self._states, self._frame_terms, rows, terms)
        return shares[:, None], blanks[:, None]


class _Computed:
    """`_Labels` whose state is tokens of the base."""

    def __init__(self, head: CTCFrames, base: BaseModel) -> None:
        self._head, self._base = head, base

    def start(self, recent: Tensor) -> Tensor:
        return recent

    def extend(self, state: Tensor, tokens: Tensor) -> Tensor:
        return shifted(state, self._head.base_tokens(tokens))

    def terms(self, state: Tensor) -> Tensor:
        return self._head.label_terms(self._base, state)


class _LookedUp:
    """`_Labels` from a table with a row for each place and token. A state is sums of its rows.

    With a draft vocabulary the table has rows for its tokens only. A text may have any tokens, so each search adds rows
    for the last tokens of its texts behind them.
    """

    @torch.no_grad()
    def __init__(self, head: CTCFrames, base: BaseModel) -> None:
        self._head, self._base = head, base
        self._places = head.config.label_context
        # [joint_size, c, d]
        self._weights = head.joint_labels.weight.unflatten(1, (self._places, -1))
        self._drafted = len(head.output(base).lm_head_weight)
        self._hold(self._terms(head.base_tokens(torch.arange(self._drafted))))

    def start(self, recent: Tensor) -> Tensor:
        if self._head.vocabulary is None:
            return recent
        first, count = self._drafted, recent.numel()
        if (missing := first + count - self._table.shape[1]) > 0:
            with torch.inference_mode(False):
                self._hold(F.pad(self._table, (0, 0, 0, missing)))
        self._table[:, first : first + count] = self._terms(recent.flatten())
        return torch.arange(first, first + count).view(recent.shape)

    def extend(self, state: Tensor, tokens: Tensor) -> Tensor:
        return shifted(state, tokens)

    def terms(self, state: Tensor) -> Tensor:
        bags = torch.arange(0, state.numel(), self._places)
        # `F.embedding_bag` calls this after checks that take longer than the sum itself.
        return torch.embedding_bag(self._rows, (state + self._offsets).flatten(), bags, False, 0)[0]

    def _terms(self, tokens: Tensor) -> Tensor:
        """Return what each token adds at each place, `[c, N, joint_size]`."""
        labels = self._head.label_norm(self._base.embed(tokens))
        return torch.stack([labels @ self._weights[:, place].T for place in range(self._places)])

    def _hold(self, table: Tensor) -> None:
        """Take a table `[c, N, joint_size]`."""
        self._table, self._rows = table, table.flatten(0, 1)
        self._offsets = torch.arange(self._places) * table.shape[1]
