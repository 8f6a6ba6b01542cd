"""Penalties on tokens that have come before: what counts at a node is the row's text and the way down the tree to it.

So a node's penalties are those of plain decoding after the same tokens, whatever else is in the tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.tree.token_tree import TokenTree


class History:
    """The tokens before each choice in the trees of B rows.

    Args:
        tokens: `[B, L]` the rows' tokens; entries past `lengths` are not looked at.
        lengths: `[B]` committed tokens of each row, those before the tree.
        prompt_lengths: `[B]`; the output begins there.
        tree: `[B, N]`.
        ancestors: `[B, N, N]` of the trees.
        vocabulary: V.
    """

    def __init__(
        self,
        tokens: Tensor,
        lengths: Tensor,
        prompt_lengths: Tensor,
        tree: TokenTree,
        ancestors: Tensor,
        vocabulary: int,
    ) -> None:
        position = torch.arange(tokens.shape[1], device=tokens.device)
        in_text = position < lengths[:, None]
        in_output = in_text & (position >= prompt_lengths[:, None])
        self._seen, self._said = (_occurrences(tokens, counted, vocabulary) for counted in (in_text, in_output))
        self._real = tree.tokens >= 0
        # The root may be the prompt's last token.
        self._is_output = self._real & (lengths[:, None] + tree.depths >= prompt_lengths[:, None])
        self._own = tree.tokens.clamp_min(0)
        self._ancestors = ancestors

    def before(self, rows: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Return how often each token came before the choice at a node.

        Args:
            rows: `[R]` rows.
            nodes: `[R]` a node of each.

        Returns:
            `[R, V]` float64, in prompt and output; and the same in the output alone.
        """
        own, path = self._own[rows], self._ancestors[rows, nodes]
        seen = self._seen[rows].scatter_add_(1, own, (path & self._real[rows]).double())
        said = self._said[rows].scatter_add_(1, own, (path & self._is_output[rows]).double())
        return seen, said


def _occurrences(tokens: Tensor, counted: Tensor, vocabulary: int) -> Tensor:
    """Return how often each token is at a counted place, `[B, V]` float64.

    Args:
        tokens: `[B, L]`.
        counted: `[B, L]` bool.
        vocabulary: V.
    """
    found = counted.new_zeros(len(tokens), vocabulary, dtype=torch.float64)
    return found.scatter_add_(1, tokens, counted.double())


def penalise(
    scores: Tensor, seen: Tensor, said: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Return scores `[R, V]` after three penalties, in this order.

    *Repetition* (Keskar et al. 2019, CTRL): scores of tokens of prompt and output are divided where positive and
    multiplied where negative. *Frequency* and *presence* (OpenAI): a token that the output has `c > 0` times loses
    `c · frequency + presence`.

    Args:
        scores: `[R, V]` float64.
        seen: `[R, V]` how often each token is in prompt and output.
        said: `[R, V]` how often it is in the output.
        repetition: `[R]`, 1 for none.
        frequency: `[R]`, 0 for none.
        presence: `[R]`, 0 for none.
    """
    repetition, frequency, presence = (setting[:, None] for setting in (repetition, frequency, presence))
    repeated = torch.where(scores < 0, scores * repetition, scores / repetition)
    return torch.where(seen > 0, repeated, scores) - (frequency * said + presence * (said > 0))
