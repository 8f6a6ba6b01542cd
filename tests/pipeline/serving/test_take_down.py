"""An endpoint that is stopped takes down nothing but itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from ray import serve

from pipeline.cluster.local_cluster import free_ports
from pipeline.serving.job import take_down


class Nothing:
    """A deployment that costs nothing."""


@pytest.fixture
def applications(local_ray: None) -> Iterator[None]:
    """Ray Serve with the endpoint's application and another."""
    serve.start(http_options={"port": free_ports(1)[0]}, proxy_location="Disabled")
    for name in ("drafter", "other"):
        deployment = serve.deployment(Nothing, name=name, ray_actor_options={"num_cpus": 0})
        serve.run(deployment.bind(), name=name, route_prefix=f"/{name}", logging_config={"log_level": "ERROR"})
    yield
    serve.shutdown()


@pytest.mark.slow  # it starts Ray Serve
def test_other_applications_stay(applications: None) -> None:
    for _ in range(2):  # the second time there is nothing to take down
        take_down(threading.Event())
        running = {name: one.status for name, one in serve.status().applications.items()}
        assert running == {"other": "RUNNING"}
