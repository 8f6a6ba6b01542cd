"""The Serve application: an ingress that speaks HTTP, and replicas with an engine each.

`build` is what a file for `serve deploy` imports; see `examples/serve.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from drafter.engine.engine_config import EngineConfig
from pipeline.cluster.ray_cluster import connect
from pipeline.cluster.resources_config import ResourcesConfig
from pipeline.cluster.shares import HELPER_CPUS, ActorResources, Cluster, share_out
from pipeline.engines.engine_spec import EngineSpec
from pipeline.serving.direct_ingress import share_port
from pipeline.serving.engines import Engines
from pipeline.serving.http_app import create_app
from pipeline.serving.keys import read_keys
from pipeline.serving.replica import EngineReplica
from pipeline.serving.serve_config import ApplicationConfig, LimitsConfig, parse_application

PLAIN = "plain"
"""What the name of the model without a drafter ends in."""
_INGRESS_REQUESTS = 10_000
"""The ingress takes what comes: what is too much is refused where it is known, in OpenAI's words."""
_HEALTH_SECONDS = 2.0


@serve.ingress()
class Ingress:
    """Speaks HTTP; holds no model.

    Args:
        engines: Handles of the replicas, by the name of their model.
        digests: Of the bearer keys.
        limits: What clients may ask for.
    """

    def __init__(self, engines: Mapping[str, DeploymentHandle], digests: tuple[bytes, ...], limits: LimitsConfig):
        self._parts = Engines(engines), digests, limits
        share_port()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(*self._parts)


def build(args: dict[str, Any]) -> serve.Application:
    """The application that the `args` of a file for Ray Serve ask for; see `ApplicationConfig`.

    Raises:
        InputError: They cannot be used.
    """
    return application(parse_application(args), connect())


def application(config: ApplicationConfig, cluster: Cluster) -> serve.Application:
    """The application, its replicas cut to the cluster's size.

    Args:
        config: What is served.
        cluster: Where it is to run.

    Raises:
        InputError: The keys cannot be read, or the cluster is too small.
    """
    drafters = {config.served_name: config.drafter}
    if config.plain:
        drafters[f"{config.served_name}-{PLAIN}"] = "none"
    replicas = config.replicas
    least, most = len(drafters) * replicas.min, len(drafters) * (replicas.max or replicas.min)
    wanted = ResourcesConfig(least, most, replicas.gpus, replicas.cpus)
    share = share_out(wanted, cluster, what="replicas", settings="replicas.{}")
    engines = {
        name: _engines(config, drafter, "Engine" if place == 0 else "Plain", share)
        for place, (name, drafter) in enumerate(drafters.items())
    }
    deployment = serve.deployment(
        Ingress,
        name="Ingress",
        max_ongoing_requests=_INGRESS_REQUESTS,
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=config.limits.seconds,
        ray_actor_options={"num_cpus": HELPER_CPUS},
    )
    return deployment.bind(engines, read_keys(config.keys_file), config.limits)


def _engines(config: ApplicationConfig, drafter: str, name: str, share: ActorResources) -> serve.Application:
    """The deployment of one model."""
    limits, replicas, slots = config.limits, config.replicas, config.engine.slots
    most = replicas.max or replicas.min
    scaled: dict[str, Any] = {"num_replicas": replicas.min}
    if most > replicas.min:
        scaled = {
            "autoscaling_config": {
                "min_replicas": replicas.min,
                "max_replicas": most,
                "target_ongoing_requests": slots,
            }
        }
    # A text is a request of the engine, so one call may be several.
    engine = EngineConfig(**asdict(config.engine), max_queue=limits.queue + limits.choices)
    spec = EngineSpec(config.model, drafter, asdict(config.loading), engine, threads=1)
    deployment = serve.deployment(
        EngineReplica,
        name=name,
        max_ongoing_requests=slots + limits.queue,
        max_queued_requests=limits.queue,
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=limits.seconds,
        ray_actor_options={"num_cpus": share.cpus, "num_gpus": share.gpus},
        **scaled,
    )
    return deployment.bind(spec, limits.seconds)
