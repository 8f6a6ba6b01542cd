""""""

from __future__ import annotations

import json
import re

from drafter import Generation
from drafter.requests import Timing
from drafter.statistics import DecodeCounts, EngineState
from pipeline.progress.board import LearningReport
from pipeline.progress.prometheus import learner_families
from pipeline.serving.handles import metrics_page
from pipeline.serving.replica_metrics import ReplicaMetrics
from tests.support.paths import ROOT


def a_page() -> str:
    metrics = ReplicaMetrics()
    metrics.failed("RequestTimeoutError")
    counts = DecodeCounts(9, 3, 3, 12, 6, [0, 0, 3])
    metrics.finished(Generation("", [1] * 9, "", "stop", 4, counts, timing=Timing(0.01, 0.03, 0.19)))
    state = EngineState(
        active=3,
        waiting=2,
        slots=8,
        steps=5,
        row_steps=11,
        output_tokens=40,
        draft_tokens=60,
        accepted_tokens=30,
        prefilled_tokens=20,
        shared_tokens=4,
        preemptions=0,
        stage_seconds={"verify": 1.5},
        memory_tokens=50,
        memory_bytes=600,
        drafter_version=2,
    )
    return metrics_page(
        [
            *(({"model": "m", "replica": name}, metrics.snapshot(name, state).families) for name in ("a", "b")),
            ({"model": "m"}, learner_families(LearningReport(version=3, beta=2.5, published_beta=2.25, loss=1.5))),
        ]
    ).decode()


def test_every_panel_asks_for_metrics_that_there_are() -> None:
    there = set(re.findall(r"^(drafter_\w+)[ {]", a_page(), re.MULTILINE))
    dashboard = json.loads((ROOT / "deploy" / "dashboards" / "serving.json").read_text(encoding="utf-8"))
    asked = {name for panel in dashboard["panels"] for target in panel["targets"] for name in names(target["expr"])}
    assert asked
    assert asked <= there


def names(expression: str) -> list[str]:
    return re.findall(r"drafter_\w+", expression)


def test_replicas_stand_side_by_side() -> None:
    page = a_page()
    assert page.count("# TYPE drafter_slots gauge\n") == 1
    for replica in ("a", "b"):
        label = f'model="m",replica="{replica}"'
        assert f"drafter_slots_active{{{label}}} 3.0\n" in page
        assert f"drafter_requests_waiting{{{label}}} 2.0\n" in page
        assert f"drafter_memory_tokens{{{label}}} 50.0\n" in page
        assert f"drafter_memory_bytes{{{label}}} 600.0\n" in page
        assert f"drafter_mean_acceptance_length_sum{{{label}}} 3.0\n" in page
        assert f"drafter_time_to_first_token_seconds_sum{{{label}}} 0.03\n" in page
        assert f"drafter_time_per_output_token_seconds_sum{{{label}}} 0.02\n" in page
        assert f'drafter_request_failures_total{{error="RequestTimeoutError",{label}}} 1.0\n' in page


def test_the_documentation_names_every_metric() -> None:
    text = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    families = set(re.findall(r"^# TYPE (drafter_\w+)", a_page(), re.MULTILINE))
    ingress = {"drafter_connections", "drafter_connections_unread", "drafter_connections_cut_total"}
    assert families | ingress == set(re.findall(r"`(drafter_\w+)`", text))
