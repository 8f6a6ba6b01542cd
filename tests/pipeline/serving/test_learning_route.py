"""What the learner does, as clients with a key are told, and as Prometheus is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import httpx2
import pytest

from pipeline.progress.board import LearningReport
from pipeline.serving.app import create_app
from pipeline.serving.config import LimitsConfig
from pipeline.serving.connections import Connections
from pipeline.serving.handles import Snapshot
from tests.support.local_endpoint import LocalEngines, listening

REPORT = LearningReport("ended", "it has had an error", version=4, beta=2.5, published_beta=2.25, steps=90)


class Learner:
    """A learner that says what it is told to; None is one that does not answer."""

    said: LearningReport | None = REPORT

    async def report(self) -> LearningReport | None:
        return self.said


class Replica:
    """A replica without metrics of its own."""

    def snapshot(self) -> Snapshot:
        return Snapshot("replica", [])


@pytest.fixture
def learner() -> Learner:
    return Learner()


@pytest.fixture
def api(learner: Learner) -> Iterator[httpx2.Client]:
    connections, engines = Connections(LimitsConfig()), LocalEngines({"tiny": cast(Any, Replica())})
    app = create_app(engines, connections, loopback=True, learner=learner.report)
    with listening(app, connections) as address, httpx2.Client(base_url=address) as client:
        yield client


def test_the_learner_is_seen_in_its_route_and_in_the_metrics(api: httpx2.Client, learner: Learner) -> None:
    told = api.get("/learning").json()
    assert LearningReport(**told) == REPORT
    page = api.get("/metrics").text
    assert 'drafter_learner_version{model="tiny"} 4.0\n' in page
    assert 'drafter_learner_steps_total{model="tiny"} 90.0\n' in page
    assert 'drafter_learner_active{model="tiny"} 0.0\n' in page
    assert "drafter_learner_loss{" not in page  # nobody knows it
    schema = api.get("/openapi.json").json()
    assert "/learning" in schema["paths"]
    assert set(told) == set(schema["components"]["schemas"]["LearningReport"]["properties"])

    learner.said = None
    assert api.get("/learning").status_code == 503
    answer = api.get("/metrics")
    assert answer.status_code == 200
    assert "drafter_learner" not in answer.text


def test_without_a_learner_there_is_no_route() -> None:
    connections = Connections(LimitsConfig())
    with listening(create_app(LocalEngines({}), connections, loopback=True), connections) as address:
        assert httpx2.get(f"{address}/learning").status_code == 404
