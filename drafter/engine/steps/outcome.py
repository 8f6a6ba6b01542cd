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
        tokens: The tokens each row got: accepted draft tokens and the bonus token; none if it is not sound.
        sound: Whether each row's logits are finite.
        accepted: Draft tokens among the tokens.
        drafted: Draft nodes that were verified in each row.
        log_probs: `[B, N]` float64 log prefix probabilities of the draft nodes, -inf in padding; N may be 0.
        on_path: `[B, N]` bool: whether a draft node was accepted.
        lenient: Places of each row's tokens that the base would not have chosen.
    """

    tokens: list[list[int]]
    sound: list[bool]
    accepted: list[int]
    drafted: list[int]
    log_probs: npt.NDArray[np.float64]
    on_path: npt.NDArray[np.bool_]
    lenient: list[list[int]]


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of one step, packed.

    Args:
        packed: `[B, 2 + 2 (D + 1)]` int64: accepted draft tokens, draft nodes, path and tokens of each row; the token
            alone, `[B, 1]`, where nothing was drafted.
        log_probs: `[B, N]` of the draft nodes.
        logprobs: Log-probabilities of emitted tokens, of the rows that want them; None if none do.
        lenient: `[B, D + 1]` bool: which tokens the base would not have chosen; None where none can be.
    """

    packed: Tensor
    log_probs: Tensor
    logprobs: PathLogprobs | None
    lenient: Tensor | None = None

    @staticmethod
    def pack(tree: TokenTree, accepted: Accepted, sound: Tensor, logprobs: PathLogprobs | None) -> StepOutcome:
        """Pack what came of `tree` `[B, N]`, on the device.

        Args:
            tree: The trees.
            accepted: The paths.
            sound: `[B]` bool: whether all of a row's logits are finite.
            logprobs: As in the class.
        """
        tokens = torch.where(sound[:, None], accepted.tokens, _NOT_FINITE)
        if tree.size == 1:
            return StepOutcome(tokens, tree.log_probs[:, 1:], logprobs)
        drafted = (tree.tokens[:, 1:] >= 0).sum(dim=1, keepdim=True)
        packed = torch.cat([accepted.count[:, None], drafted, accepted.path, tokens], dim=1)
        return StepOutcome(packed, tree.log_probs[:, 1:], logprobs, accepted.lenient)

    def to_host(self, rows: int) -> StepOutcome:
        """The first `rows` rows on the host, once what is queued on the device is done."""
        return StepOutcome(
            self.packed[:rows].to("cpu", non_blocking=True),
            self.log_probs[:rows].to("cpu", non_blocking=True),
            None if self.logprobs is None else self.logprobs.to_host(),
            None if self.lenient is None else self.lenient[:rows].to("cpu", non_blocking=True),
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
        sound = [row[0] != _NOT_FINITE for row in said]
        given = [row[: count + 1] if is_sound else [] for row, count, is_sound in zip(said, counts, sound, strict=True)]
        accepted = [count if is_sound else 0 for count, is_sound in zip(counts, sound, strict=True)]
        lenient: list[list[int]] = [[] for _ in given]
        if self.lenient is not None:
            for row, place in zip(*(index.tolist() for index in self.lenient.numpy().nonzero()), strict=True):
                if sound[row]:
                    lenient[row].append(place)
        log_probs = self.log_probs.numpy().astype(np.float64)
        return RowOutcomes(given, sound, accepted, drafted, log_probs, on_path, lenient)

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
