from __future__ import annotations

import pytest

from pipeline.output.result import job_result
from pipeline.output.summary import ValidSums
from tests.pipeline.report.test_cost import submission

SUMS = ValidSums(valid=15, others=3, valid_tokens=5000, other_tokens=1000)


def test_rows_and_tokens_count_once_and_time_as_often_as_it_passed() -> None:
    """The second submission made two rows again."""
    two = [submission(engine_tokens=3400), submission(rows=12, seconds=1.0, gpu_seconds=3580.0, engine_tokens=3300)]
    found = job_result(SUMS, 2, two, per_gpu_hour=2.5)
    assert found["rows"] == {"valid": 15, "invalid": 3, "failed": 2}
    assert found["tokens"] == {"valid": 5000, "invalid": 1000, "failed": 700}
    assert (found["seconds"], found["valid_tokens_per_second"]) == (6.0, pytest.approx(833.3))
    assert (found["gpu_hours"], found["cost"]) == (1.0, 2.5)


def test_what_is_not_known_is_none() -> None:
    lost = job_result(SUMS, 2, [submission()], per_gpu_hour=2.5)  # status.json has ten of twenty rows
    assert lost["tokens"] == {"valid": 5000, "invalid": 1000, "failed": None}
    assert {lost[name] for name in ("seconds", "valid_tokens_per_second", "gpu_hours", "cpu_hours", "cost")} == {None}
    earlier = job_result(SUMS, 2, [submission(), submission()], per_gpu_hour=None)  # of a release that counted less
    assert (earlier["tokens"]["failed"], earlier["cost"]) == (None, None)
    assert earlier["gpu_hours"] == pytest.approx(40 / 3600)
    assert job_result(SUMS, 2, [submission(rows=20, gpu_seconds=0.0)], per_gpu_hour=2.5)["cost"] is None
