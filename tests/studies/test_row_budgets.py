from __future__ import annotations

import numpy as np
import pytest

from studies.row_budgets import Cell, most_probable


def test_the_most_probable_draft_tokens_of_a_batch_are_counted() -> None:
    log_probs = np.log(np.array([[0.9, 0.8], [0.5, 0.1]], np.float32))
    accepted = np.array([[True, False], [True, True]])
    assert [most_probable(log_probs, accepted, count) for count in range(5)] == [0, 1, 1, 2, 3]


def test_more_tokens_do_not_pay_where_drafting_them_costs_more() -> None:
    cell = Cell(4, 3, 10, each=0.5, shared=0.65, plain_ms=8.0, verify_ms=9.0, draft_ms=1.0, wide_draft_ms=2.0)
    assert cell.gain == pytest.approx(1.0)
    assert cell.speedup == pytest.approx(1.2)
