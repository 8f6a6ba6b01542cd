"""The deployment that clients reach. It imports no model code, so that it starts soon and takes little memory."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from pipeline.errors import InputError
from pipeline.serving.config import LimitsConfig, ServingLearning, read_agreement
from pipeline.serving.http.app import create_app
from pipeline.serving.http.connections import Connections
from pipeline.serving.http.handles import Engines, LearnerHandle, before_listening, keep_to_this_machine
from pipeline.serving.http.keys import KeyRule, read_keys


@serve.ingress()
class Ingress:
    """Speaks HTTP; holds no model.

    The keys are read here, in the process that checks them, from its own environment and disk: another machine may
    build the application, and may have no keys.

    Args:
        engines: Handles of the replicas, by the name of their model.
        keys_file: File of keys on this machine; None for no file.
        rule: Whether clients need a key.
        limits: What clients may ask for.
        loopback: Whether Ray Serve listens on a loopback address.
        learning: Whose requests a head may learn from.
        learner: Handle of its keeper; None where no head learns.

    Raises:
        InputError: The keys cannot be used, or a key is needed and there is none.
    """

    def __init__(
        self,
        engines: Mapping[str, DeploymentHandle],
        keys_file: str | None,
        rule: KeyRule,
        limits: LimitsConfig,
        *,
        loopback: bool,
        learning: ServingLearning,
        learner: DeploymentHandle | None,
    ):
        try:
            digests = read_keys(keys_file, rule)
            agreement = read_agreement(learning, digests)
        except InputError as error:
            raise InputError(f"{error} (the ingress runs on {socket.gethostname()})") from None
        self._connections = Connections(limits, digests)
        self._app = create_app(
            Engines(engines),
            self._connections,
            loopback=loopback,
            agreement=agreement,
            learner=None if learner is None else LearnerHandle(learner),
        )
        before_listening(self._connections)
        keep_to_this_machine()

    def end(self) -> None:
        """Stop waiting for clients that do not read, because the endpoint is shutting down."""
        self._connections.end()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app
