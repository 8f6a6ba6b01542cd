"""What a step tells the host: packed on the device into as few tensors as can be, and unpacked where it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter.requests import TokenLogprob
from drafter.tree.token_tree import TokenTree
from drafter.verifiers.contract import Accepted
from drafter.verifiers.path_logprobs import PathLogprobs

_NOT_FINITE = -1
"""Stands for a token that was chosen from logits which are not numbers."""


@dataclass(frozen=True)
class RowOutcomes:
    """A step's outcome of B rows, for the host.

    Args:
        tokens: The tokens each row got: accepted draft tokens and the bonus token, as far as the base's logits are
            finite.
        finite: Whether they are all the tokens that the row was to get.
        accepted: Draft tokens among them.
        drafted: Draft nodes that were verified in each row.
        log_probs: `[B, N]` float64 log prefix probabilities of the draft nodes, -inf in padding; N may be 0.
        on_path: `[B, N]` bool: whether a draft node was accepted.
    """

    tokens: list[list[int]]
    finite: list[bool]
    accepted: list[int]
    drafted: list[int]
    log_probs: npt.NDArray[np.float64]
    on_path: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of one step, packed.

    Args:
        packed: `[B, 2 + 2 (D + 1)]` int64: accepted draft tokens, draft nodes, path and tokens of each row; the token
            alone, `[B, 1]`, where nothing was drafted.
        log_probs: `[B, N]` of the draft nodes.
        logprobs: Log-probabilities of emitted tokens, of the rows that want them; None if none do.
    """

    packed: Tensor
    log_probs: Tensor
    logprobs: PathLogprobs | None

    @staticmethod
    def pack(tree: TokenTree, accepted: Accepted, finite: Tensor, logprobs: PathLogprobs | None) -> StepOutcome:
        """Pack what came of `tree` `[B, N]`, on the device.

        Args:
            tree: The trees.
            accepted: The paths.
            finite: `[B, N]` bool: whether each node's logits are finite.
            logprobs: As in the class.
        """
        sound = finite if tree.size == 1 else finite.gather(1, accepted.path)
        tokens = torch.where(sound, accepted.tokens, _NOT_FINITE)
        if tree.size == 1:
            return StepOutcome(tokens, tree.log_probs[:, 1:], logprobs)
        drafted = (tree.tokens[:, 1:] >= 0).sum(dim=1, keepdim=True)
        packed = torch.cat([accepted.count[:, None], drafted, accepted.path, tokens], dim=1)
        return StepOutcome(packed, tree.log_probs[:, 1:], logprobs)

    def to_host(self, rows: int) -> StepOutcome:
        """The first `rows` rows on the host, once what is queued on the device is done."""
        return StepOutcome(
            self.packed[:rows].to("cpu", non_blocking=True),
            self.log_probs[:rows].to("cpu", non_blocking=True),
            None if self.logprobs is None else self.logprobs.to_host(),
        )

    def unpack(self) -> RowOutcomes:
        """Read the outcome; it must be on the host."""
        packed = self.packed.numpy()
        rows, width = packed.shape
        if width == 1:
            said = packed.tolist()
            counts, drafted = [0] * rows, [0] * rows
            on_path = np.zeros((rows, 0), dtype=np.bool_)
        else:
            count, nodes, path, tokens = np.split(packed, [1, 2, 2 + (width - 2) // 2], axis=1)
            said, counts, drafted = tokens.tolist(), count[:, 0].tolist(), nodes[:, 0].tolist()
            on_path = np.zeros((rows, 1 + self.log_probs.shape[1]), dtype=np.bool_)
            np.put_along_axis(on_path, path, True, axis=1)
            on_path = on_path[:, 1:]
        given = [row[: count + 1] for row, count in zip(said, counts, strict=True)]
        finite = [_NOT_FINITE not in row for row in given]
        given = [row if sound else row[: row.index(_NOT_FINITE)] for row, sound in zip(given, finite, strict=True)]
        accepted = [min(count, len(row)) for count, row in zip(counts, given, strict=True)]
        return RowOutcomes(given, finite, accepted, drafted, self.log_probs.numpy().astype(np.float64), on_path)

    def read_logprobs(self, wanted: Mapping[int, int], tokens: list[list[int]]) -> dict[int, list[TokenLogprob]]:
        """Log-probabilities of the rows that want them; it must be on the host.

        Args:
            wanted: Row → of how many of the most probable tokens, in the order in which they were asked for.
            tokens: What each row got.
        """
        if self.logprobs is None:
            return {}
        read = self.logprobs.read([tokens[row] for row in wanted], list(wanted.values()))
        return dict(zip(wanted, read, strict=True))
