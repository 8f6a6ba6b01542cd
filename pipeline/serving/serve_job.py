"""The endpoint's entry: what is checked before a cluster is touched, and the server's life."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from drafter.base.loading import load_tokenizer
from drafter.errors import LoadError, one_line
from pipeline.cluster.ports import free_ports
from pipeline.cluster.ray_cluster import connect, will_start
from pipeline.command_line import run_job
from pipeline.engines.named_models import head_fingerprints, model_fingerprint, model_name
from pipeline.errors import InputError, JobError
from pipeline.serving.direct_ingress import short_ways
from pipeline.serving.keys import ENVIRONMENT, read_keys
from pipeline.serving.serve_config import ServeConfig, parse_config

_NAME = "drafter"


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve what a command line asks for until a signal; see `run_job` for what it returns."""
    return run_job(lambda given: serve_until_signal(parse_config(given)), arguments)


def serve_until_signal(config: ServeConfig) -> None:
    """Serve until SIGINT or SIGTERM, then let open requests end and take the application down.

    Raises:
        InputError: The configuration or the models cannot be used.
        JobError: The server cannot be started.
    """
    keys = read_keys(config.keys_file)
    check_models(config)
    proxy_port = config.port
    if will_start():
        check_port(config)
        os.environ.update(short_ways(config.port))
        proxy_port = next(port for port in free_ports(2) if port != config.port)
    cluster = connect()
    from ray import serve  # which reads the environment as it is imported

    from pipeline.serving.application import application

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        serve.start(http_options={"host": config.host, "port": proxy_port})
        serve.run(application(config, cluster), name=_NAME, route_prefix="/", blocking=False)
    except InputError:
        raise
    except Exception as error:  # Ray raises bare ones, with the replicas' own errors somewhere in the text
        serve.shutdown()
        if refusal := re.search(r"LoadError: (.+)", str(error)):
            raise InputError(refusal[1]) from error
        raise JobError(f"the endpoint cannot be started: {one_line(error)}") from error
    print(f"serving {config.served_name} at http://{config.host}:{config.port}", flush=True)
    if not keys:
        print(f"everybody may ask: set --keys_file or {ENVIRONMENT} to ask for keys", file=sys.stderr, flush=True)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # not before Ray has set its own
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    print("stopping: open requests may end", file=sys.stderr, flush=True)
    serve.shutdown()


def check_port(config: ServeConfig) -> None:
    """Check that the address can be listened on.

    Raises:
        InputError: It cannot.
    """
    try:
        socket.create_server((config.host, config.port)).close()
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{config.host}:{config.port} cannot be listened on: {reason}; choose another port") from error


def check_models(config: ServeConfig) -> None:
    """Check what can be checked of the models without loading them.

    Raises:
        InputError: They are not there, or are not models.
    """
    name = model_name(config.model)
    model_fingerprint(name)
    head_fingerprints(config.model, config.drafter)
    try:
        load_tokenizer(name, trust_remote_code=config.loading.trust_remote_code)
    except LoadError as error:
        raise InputError(str(error)) from error
