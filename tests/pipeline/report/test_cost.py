from __future__ import annotations

from typing import Any

import pytest

from pipeline.output.result import Cost, cost_of


def submission(**facts: Any) -> dict[str, Any]:
    known = {"rows": 10, "tokens": 3300, "seconds": 5.0, "device": "a GPU", "gpu_seconds": 20.0, "cpu_seconds": 40.0}
    return {**known, **facts}


def test_cost_is_of_all_submissions_or_not_known() -> None:
    two = [submission(), submission(rows=12, seconds=1.0, gpu_seconds=4.0)]
    cost = cost_of(two, rows=20, tokens=6000)  # two rows were done twice: they are paid for
    assert cost == Cost("GPU-seconds", 24.0, 6.0, 6600, 6000, ("a GPU",))
    assert cost.tokens_per_second == pytest.approx(1100.0)  # of all that was generated in these seconds
    assert cost.per_thousand == pytest.approx(4.0)
    on_cpu = cost_of([submission(gpu_seconds=0.0)], rows=10, tokens=1000)
    assert isinstance(on_cpu, Cost)
    assert (on_cpu.unit, on_cpu.per_thousand) == ("CPU-seconds", 40.0)
    for given_, rows, tokens, why in (
        ([], 10, 5, "missing"),
        ([submission()], 11, 5, "status.json has only 10 of the 11 rows"),
        ([submission()], 10, 0, "no token"),
        ([submission(gpu_seconds=0.0, cpu_seconds=0.0)], 10, 5, "does not say how long"),
    ):
        said = cost_of(given_, rows, tokens)
        assert isinstance(said, str)
        assert why in said
