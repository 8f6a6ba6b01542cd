"""The argument on paper about large jobs: its arithmetic."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.generation_jobs.scale import Costs, on_paper, tables


def test_a_job_on_paper() -> None:
    costs = Costs(**{field.name: 1.0 for field in dataclasses.fields(Costs)})
    costs = dataclasses.replace(costs, driver_seconds=0.05, results_bytes=3 * 2**20, requests_bytes=2**20)
    job = on_paper(costs, rows=10_000_000, gpus=100, rate=5.0)
    assert job["parts"] == 78_125
    assert job["hours"] == pytest.approx(10_000_000 / 500 / 3600)
    assert job["parts_a_second"] == pytest.approx(500 / 128)
    assert job["driver_share_of_a_core"] == pytest.approx(0.05 * 500 / 128)
    assert job["object_store_mib"] == pytest.approx(600 * 4)
    assert job["resubmission_seconds"] == pytest.approx(2 * 78_125)
    page = tables({"costs": dataclasses.asdict(costs), "on_paper": job})
    assert "| parts | 78,125 |" in page
    assert "| driver seconds | 0.05 |" in page
