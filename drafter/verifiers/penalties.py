"""Penalties on tokens that have come before: what counts at a node is the row's text and the way down the tree to it.

So a node's penalties are those of plain decoding after the same tokens, whatever else is in the tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class History:
    """The tokens before each node's choice.

    Args:
        tokens: `[B, L]` the rows' tokens; entries past `lengths` are not looked at.
        lengths: `[B]` committed tokens of each row, those before the tree.
        tree_tokens: `[B, N]` the trees' tokens; `PAD_TOKEN` is no token.
        depths: `[B, N]` of the trees.
        ancestors: `[B, N, N]` of the trees.
    """

    tokens: Tensor
    lengths: Tensor
    tree_tokens: Tensor
    depths: Tensor
    ancestors: Tensor

    def counts(self, since: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
        """How often tokens came before each node's choice, from position `since` `[B]` of the rows on.

        Only the tree's own tokens can have come more often than in the row's text. So the counts of all V tokens are
        needed once a row, and never for each node.

        Returns:
            `[B, V]` float64, in the row's text; and `[B, N, N]` float64, where entry `[b, i, j]` is how often the token
            of node `j` came before the choice at node `i`.
        """
        position = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        counted = (position >= since[:, None]) & (position < self.lengths[:, None])
        in_text = counted.new_zeros(len(counted), vocabulary, dtype=torch.float64)
        in_text = in_text.scatter_add_(1, self.tokens, counted.double())
        own = self.tree_tokens.clamp_min(0)
        real = (self.tree_tokens >= 0) & (self.lengths[:, None] + self.depths >= since[:, None])
        same = own[:, :, None] == own[:, None]
        on_path = (self.ancestors & real[:, None]).double() @ same.double()
        return in_text, in_text.gather(1, own)[:, None] + on_path


def penalise(
    scores: Tensor,
    history: History,
    prompt_lengths: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Scores `[B, N, V]` after three penalties, in this order.

    *Repetition* (Keskar et al. 2019, CTRL): scores of tokens of prompt and output are divided where positive and
    multiplied where negative. *Frequency* and *presence* (OpenAI): a token that the output has `c > 0` times loses
    `c · frequency + presence`.

    Args:
        scores: `[B, N, V]` float64.
        history: What came before.
        prompt_lengths: `[B]`; the output begins there.
        repetition: `[B]`, 1 for none.
        frequency: `[B]`, 0 for none.
        presence: `[B]`, 0 for none.
    """
    vocabulary = scores.shape[-1]
    seen = history.counts(torch.zeros_like(prompt_lengths), vocabulary)
    said = history.counts(prompt_lengths, vocabulary)
    repetition, frequency, presence = (setting[:, None, None] for setting in (repetition, frequency, presence))

    def penalised(scores: Tensor, seen: Tensor, said: Tensor) -> Tensor:
        repeated = torch.where(scores < 0, scores * repetition, scores / repetition)
        return torch.where(seen > 0, repeated, scores) - (frequency * said + presence * (said > 0))

    columns = history.tree_tokens.clamp_min(0)[:, None].expand_as(seen[1])
    own = penalised(scores.gather(2, columns), seen[1], said[1])
    # Columns of the same token hold the same number, so it does not matter which of them is written last.
    return penalised(scores, seen[0][:, None], said[0][:, None]).scatter(2, columns, own)
