"""Log-probabilities of generated tokens from the target model's logits before penalties, bias and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.acceptance.contract import Accepted
from drafter.devices import send
from drafter.requests import TokenLogprob


@dataclass(frozen=True)
class PathLogprobs:
    """Log-probabilities along the paths of R rows, on the device. Entries past an accepted path are undefined.

    Args:
        chosen: `[R, D + 1]` float32, of the choice at each node of the path.
        top_tokens: `[R, D + 1, K]` the most probable tokens there, descending.
        top: `[R, D + 1, K]` float32, of those.
    """

    chosen: Tensor
    top_tokens: Tensor
    top: Tensor

    def to_host(self) -> PathLogprobs:
        """Copy to the host; valid once queued work is done."""
        return PathLogprobs(*(tensor.to("cpu", non_blocking=True) for tensor in vars(self).values()))

    def read(self, tokens: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[TokenLogprob]]:
        """Return log-probabilities of each row's `tokens`, at most D + 1, and of its `counts` ≤ K best; tensors on the
        host.
        """
        rows = zip(tokens, counts, self.chosen.tolist(), self.top_tokens.tolist(), self.top.tolist(), strict=True)
        return [
            [
                TokenLogprob(token, logprob, tuple(zip(best[:count], values[:count], strict=True)))
                for token, logprob, best, values in zip(row, chosen, top_tokens, top, strict=False)
            ]
            for row, count, chosen, top_tokens, top in rows
        ]


def path_logprobs(logits: Tensor, accepted: Accepted, rows: Sequence[int], count: int) -> PathLogprobs:
    """Return the log-softmax in fp32 of `logits` `[B, N, V]` at the accepted nodes of `rows`, with the `count` best."""
    row = send(torch.tensor(rows), logits.device)
    on_path = logits[row[:, None], accepted.path[row]].float()
    normaliser = on_path.logsumexp(-1, keepdim=True)
    top, top_tokens = on_path.topk(min(count, on_path.shape[-1]))
    chosen = on_path.gather(2, accepted.tokens[row][..., None]) - normaliser
    return PathLogprobs(chosen[..., 0], top_tokens, top - normaliser)
