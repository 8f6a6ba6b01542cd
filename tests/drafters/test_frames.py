from __future__ import annotations

import torch

from drafter.drafters.frames import last_tokens


def test_the_last_tokens_end_with_the_anchor() -> None:
    tokens = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
    assert last_tokens(tokens, torch.tensor([[3, 2], [2, 1]]), 2).tolist() == [
        [[12, 13], [11, 12]],
        [[21, 22], [20, 21]],
    ]


def test_before_the_text_the_first_token_stands_in() -> None:
    assert last_tokens(torch.tensor([[10, 11, 12]]), torch.tensor([[1, 0]]), 3).tolist() == [
        [[10, 10, 11], [10, 10, 10]]
    ]
