from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafter.methods.pad.method import PivotFeatures
from recipes.pad.training import is_pivot, roc_area, train_classifier


def test_a_pivot_takes_more_than_a_tenth_of_the_utility() -> None:
    assert is_pivot(0.44, 0.5)
    assert not is_pivot(0.46, 0.5)
    assert not is_pivot(0.9, 1.0)
    assert not is_pivot(0.0, 0.0)


def test_a_classifier_learns_what_the_hidden_state_says_and_is_the_same_each_time() -> None:
    random = torch.Generator().manual_seed(0)
    hidden = 10 * torch.randn(400, 6, generator=random) + 5
    pivots = hidden[:, 2] > 5
    features = PivotFeatures(hidden, torch.rand(400, generator=random), torch.rand(400, generator=random))
    found = [train_classifier(features, pivots, epochs=15) for _ in range(2)]
    said = [one.log_pivot(features) for one in found]
    torch.testing.assert_close(said[0], said[1], rtol=0, atol=0)
    area = roc_area(said[0], pivots)
    assert area is not None
    assert area > 0.97


def test_the_area_of_four_tokens() -> None:
    scores = torch.tensor([0.9, 0.6, 0.6, 0.1])
    assert roc_area(scores, torch.tensor([True, False, True, False])) == pytest.approx(3.5 / 4)
    assert roc_area(scores, torch.tensor([True] * 4)) is None


@given(st.lists(st.tuples(st.sampled_from([0.1, 0.4, 0.5, 0.9]), st.booleans()), min_size=2, max_size=12))
def test_the_area_is_how_often_a_pivot_is_above_a_harmless_token(tokens: list[tuple[float, bool]]) -> None:
    pivots, harmless = ([p for p, kind in tokens if kind == wanted] for wanted in (True, False))
    scores, kinds = zip(*tokens, strict=True)
    found = roc_area(torch.tensor(scores), torch.tensor(kinds))
    if not pivots or not harmless:
        assert found is None
        return
    above = sum((a > b) + (a == b) / 2 for a in pivots for b in harmless)
    assert found == pytest.approx(above / (len(pivots) * len(harmless)))
