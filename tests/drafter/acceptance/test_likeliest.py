""""""

from __future__ import annotations

import math

import pytest
import torch

from drafter.acceptance.contract import are_sound, likeliest

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_of_the_largest_is_the_likeliest(dtype: torch.dtype) -> None:
    logits = torch.tensor([[[1.0, 3.0, 3.0], [-1.0, -2.0, -math.inf]], [[0.0, 0.0, 0.0], [1.0, 2.0, 4.0]]], dtype=dtype)
    assert likeliest(logits).tolist() == [[1, 0], [0, 2]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_number_that_is_none_spoils_its_row_alone(dtype: torch.dtype) -> None:
    for spoilt in (math.nan, math.inf):
        logits = torch.zeros(3, 2, 5, dtype=dtype)
        logits[1, 1, 3] = spoilt
        assert are_sound(logits).tolist() == [True, False, True]
        assert likeliest(logits)[1, 1] == 3
    logits = torch.zeros(1, 2, 5, dtype=dtype)
    logits[0, :, 1:] = -math.inf  # a token that never comes
    assert are_sound(logits).tolist() == [True]


def test_logits_need_not_lie_side_by_side() -> None:
    logits = torch.randn(6, 4, 40, generator=torch.Generator().manual_seed(0))
    part = logits[1:5, :, 3::2]
    assert torch.equal(likeliest(part), part.argmax(-1))
