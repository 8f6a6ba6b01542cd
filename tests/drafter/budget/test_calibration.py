from __future__ import annotations

import numpy as np
import pytest

from drafter.budget.calibration import Calibration


def test_calibration_follows_what_is_accepted() -> None:
    calibration = Calibration()
    log_probs = np.log(np.full((1, 8), 0.5))
    assert calibration.probability(log_probs) == pytest.approx(0.5)
    for _ in range(100):
        calibration.observe(log_probs, np.array([[True] * 2 + [False] * 6]))
    assert calibration.probability(log_probs) == pytest.approx(0.25, abs=0.02)
    assert calibration.probability(np.array([-np.inf])).tolist() == [0.0]
