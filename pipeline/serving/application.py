"""The Ray Serve application; a file for `serve deploy` imports `build`, see `examples/serve.yaml`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ray import serve

from drafter.acceptance.settings import VerifierSettings
from pipeline.cluster.model_copies import model_name
from pipeline.cluster.ray_cluster import HELPER_CPUS, ActorResources, Cluster, connect, share_out
from pipeline.engines.models import engine_spec
from pipeline.io.files import locate
from pipeline.learning.config import LearnerSpec, learner_spec
from pipeline.learning.job_learner import beside_learner
from pipeline.output.folder import OutputFolder
from pipeline.serving.app import Ingress
from pipeline.serving.config import ApplicationConfig, parse_application
from pipeline.serving.keys import settle
from pipeline.serving.replica import EngineReplica, LearnerKeeper
from pipeline.settings import ResourcesConfig

PLAIN = "plain"
"""Suffix of the name of a model that is served without a drafter."""
_UNLIMITED_REQUESTS = 10_000
"""Practically unlimited: engines refuse excess requests themselves, by client; Ray Serve's queues know no clients."""
_HEALTH_SECONDS = 2.0
_LINES = 1.25
"""Lines of batches on their way, for each slot: a row that ends leaves its slot to one that waits already."""


def build(args: dict[str, Any]) -> serve.Application:
    """Return the application that the `args` of a file for Ray Serve ask for; see `ApplicationConfig`.

    Such a file may have Serve listen on any address, so that a key is needed unless `keys` is `none`.

    Raises:
        InputError: The `args` cannot be used.
    """
    config = parse_application(args)
    config = replace(config, keys=settle(config.keys, config.keys_file, loopback=False))
    return application(config, connect(), loopback=False)


def application(config: ApplicationConfig, cluster: Cluster, *, loopback: bool) -> serve.Application:
    """Return the application, with replicas sized to the cluster.

    Args:
        config: Settings; `keys` as `settle` returned it.
        loopback: Whether Ray Serve listens on a loopback address.

    Raises:
        InputError: The cluster is too small.
    """
    drafters = {config.served_name: config.drafter}
    if config.plain:
        drafters[f"{config.served_name}-{PLAIN}"] = "none"
    replicas = config.replicas
    least, most = len(drafters) * replicas.min, len(drafters) * (replicas.max or replicas.min)
    wanted = ResourcesConfig(least, most, replicas.gpus, replicas.cpus)
    ranks, free = config.engine.tensor_parallel_size, beside_learner(config.learning, cluster)
    share = share_out(wanted, free, ranks=ranks, what="replicas", settings="replicas.{}")
    learns = _learner_spec(config)
    engines = {
        name: _engines(config, drafter, "Engine" if place == 0 else "Plain", share, learns if place == 0 else None)
        for place, (name, drafter) in enumerate(drafters.items())
    }
    keeper = _deployment(LearnerKeeper, "Learner", {"num_cpus": 0}, num_replicas=1)
    ingress = _deployment(
        Ingress,
        "Ingress",
        {"num_cpus": HELPER_CPUS},
        max_ongoing_requests=_UNLIMITED_REQUESTS,
        graceful_shutdown_timeout_s=config.limits.seconds,
    )
    return ingress.bind(
        engines,
        config.keys_file,
        config.keys,
        config.limits,
        loopback=loopback,
        edge=config.edge,
        learning=config.learning,
        learner=None if learns is None else keeper.bind(learns),
        batches=config.batches,
        lines_at_once=math.ceil(_LINES * most * config.engine.max_num_seqs),
    )


def _learner_spec(config: ApplicationConfig) -> LearnerSpec | None:
    learning = config.learning
    if not learning.enabled or learning.folder is None:
        return None
    output = OutputFolder(locate(learning.folder))
    name, model = config.served_name, model_name(config.model)
    return learner_spec(learning, output, name, model, config.loading)


def _deployment(kind: type, name: str, resources: dict[str, float], **options: Any) -> serve.Deployment:
    return serve.deployment(
        kind, name=name, health_check_period_s=_HEALTH_SECONDS, ray_actor_options=resources, **options
    )


def _engines(
    config: ApplicationConfig, drafter: str, name: str, share: ActorResources, learns: LearnerSpec | None = None
) -> serve.Application:
    limits, replicas, slots = config.limits, config.replicas, config.engine.max_num_seqs
    most = replicas.max or replicas.min
    scaled: dict[str, Any] = {"num_replicas": replicas.min}
    if most > replicas.min:
        bounds = {"min_replicas": replicas.min, "max_replicas": most}
        scaled = {"autoscaling_config": {**bounds, "target_ongoing_requests": slots}}
    verifier = config.verifier if drafter == config.drafter else VerifierSettings()  # the plain one is exact
    begins = None if learns is None else learns.beginning
    spec = engine_spec(
        config.model,
        drafter,
        config.loading,
        config.engine,
        queue=limits.queue + limits.choices,  # each text of a call is a request, so the last that fits may be `choices`
        isolated=config.isolation,
        verifier=verifier,
        learning=begins,
        brought=config.edge.draft_tokens if config.edge.sessions else 0,
    )
    engines = _deployment(
        EngineReplica,
        name,
        {"num_cpus": share.cpus, "num_gpus": share.gpus},
        max_ongoing_requests=_UNLIMITED_REQUESTS,
        graceful_shutdown_timeout_s=limits.seconds,
        **scaled,
    )
    return engines.bind(spec, limits.seconds, config.edge, config.images, special_tokens=config.special_tokens)
