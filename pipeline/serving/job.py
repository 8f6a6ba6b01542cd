"""Entry of the endpoint: checks, start, and shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ray.exceptions import RayTaskError

from drafter.acceptance.contract import make_verifier
from drafter.errors import LoadError, one_line
from drafter.requests import sampling_defaults
from drafter.text.tokenizers import load_tokenizer
from pipeline.cluster.cluster_watch import ClusterWatch
from pipeline.cluster.model_copies import model_name
from pipeline.cluster.ray_cluster import connect, free_ports, will_start
from pipeline.command_line import say
from pipeline.engines.models import adapter_fingerprint, generation_settings, head_fingerprints, model_fingerprint
from pipeline.errors import InputError, JobError
from pipeline.io.files import local_path, locate, make_folders
from pipeline.output.folder import RUN_FILE
from pipeline.serving.config import EVERYBODY, NOBODY, ServeConfig
from pipeline.serving.keys import ENVIRONMENT, read_agreement, read_keys, settle
from pipeline.stopping import in_thread

_NAME = "drafter"
_POLL_SECONDS = 0.2
_ASK_SECONDS = 5.0
_MARGIN_SECONDS = 60.0  # time for taking the endpoint down beside what open requests may take
_AT_ONCE_SECONDS = 10.0  # time for an end in good order after a second signal


def serve_until_signal(config: ServeConfig) -> None:
    """Serve until SIGINT or SIGTERM, then let open requests end and take the application down.

    If the cluster is lost, the process ends with exit code 1.

    Raises:
        InputError: The configuration, the keys or the models cannot be used.
        JobError: The server cannot be started, or taken down.
    """
    config = replace(config, keys=settle(config.keys, config.keys_file, loopback=config.loopback))
    config = _with_local_files(config)
    own_cluster = will_start()
    if own_cluster:  # the ingress will run here, with the same keys: report a mistake in them at once
        read_agreement(config.learning, read_keys(config.keys_file, config.keys))
    say(f"looking at the model {config.model or 'embedded'}")
    check_models(config)
    watch = _start(config, own_cluster=own_cluster)
    print(f"serving {config.served_name} at http://{config.host}:{config.port}", flush=True)
    if config.keys != "required":
        unless = "" if own_cluster else f", unless the cluster's machines have {ENVIRONMENT}"
        hint = f"everybody may ask{unless}: set --keys_file or {ENVIRONMENT} to ask for keys"
        print(hint, file=sys.stderr, flush=True)
    if config.learning.enabled:
        agreed = config.learning.agreed
        clients = "all clients" if agreed == EVERYBODY else f"clients whose keys are in {agreed}"
        hint = f"a head learns from the requests of {clients}, and is kept in {config.learning.folder}"
        print(hint, file=sys.stderr)
    stop, at_once = threading.Event(), threading.Event()

    def on_signal(*_: object) -> None:
        if stop.is_set():
            watch.end_in(_AT_ONCE_SECONDS, "error: ended at once: the endpoint could not be taken down in good order")
            at_once.set()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):  # not before Ray has set its own
        signal.signal(number, on_signal)
    while not stop.wait(_POLL_SECONDS):  # the system may give a signal to another thread, which does not wake this one
        pass
    print("stopping: open requests may end; a second signal ends them", file=sys.stderr, flush=True)
    watch.end_in(
        config.limits.seconds + _MARGIN_SECONDS, "error: the endpoint could not be taken down: Ray does not answer"
    )
    try:
        in_thread(lambda: take_down(at_once)).result()
    except Exception as error:  # Ray raises bare ones
        raise JobError(f"the endpoint cannot be taken down: {one_line(error)}") from error
    watch.close()


def _with_local_files(config: ServeConfig) -> ServeConfig:
    """Return the configuration with absolute paths of what the ingress uses, which runs in another folder."""
    keys, learning = config.keys_file, config.learning
    if learning.agreed not in (EVERYBODY, NOBODY):
        learning = replace(learning, agreed=local_path(learning.agreed))
    batches = config.batches
    if batches.folder is not None:
        batches = replace(batches, folder=str(Path(batches.folder).expanduser().absolute()))
    keys_file = None if keys is None else local_path(keys)
    return replace(config, keys_file=keys_file, learning=learning, batches=batches)


def _start(config: ServeConfig, *, own_cluster: bool) -> ClusterWatch:
    """Start the endpoint, and wait until it answers; return what watches its cluster."""
    proxy_port = config.port
    if own_cluster:
        _check_port(config)
        os.environ.update(_direct_ingress(config.port))
        proxy_port = next(port for port in free_ports(2) if port != config.port)
    cluster = connect()
    watch = ClusterWatch(own_cluster=own_cluster, last_line="error: {}: start again".format)
    from ray import serve  # which reads the environment as it is imported

    from pipeline.serving.application import application

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        serve.start(http_options={"host": config.host, "port": proxy_port})
        _check_address(config.host, proxy_port)
        say("starting the replicas, which load the model and time steps")
        serve.run(application(config, cluster, loopback=config.loopback), name=_NAME, route_prefix="/", blocking=False)
    except InputError:
        watch.close()
        raise
    except Exception as error:  # Ray raises bare ones
        refusal = re.search(r"(?:InputError|LoadError): (.+)", f"{error}\n{_deployment_messages()}")
        take_down(threading.Event())
        watch.close()
        if refusal:
            raise InputError(refusal[1]) from error
        own = error.cause if isinstance(error, RayTaskError) else error  # without the traceback of Ray Serve's process
        raise JobError(f"the endpoint cannot be started: {one_line(own)}") from error
    return watch


def _direct_ingress(port: int) -> dict[str, str]:
    """Environment variables by which the ingress itself listens on `port`; Ray Serve's proxy then needs another one."""
    return {
        # Ingress and replicas talk to each other directly, without a thread between them.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(port + 1),  # exclusive
        # A new ingress gets the port at once, even if the old one hangs: there is no proxy that has to notice first.
        "RAY_SERVE_PORT_QUARANTINE_S": "0",
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    }


def take_down(at_once: threading.Event) -> None:
    """Take the endpoint's application down, and wait until its requests have ended or `at_once` is set.

    Ray Serve keeps running: a cluster may have applications of others, and the endpoint's own ends with this process.
    """
    from ray import serve

    application = serve.status().applications.get(_NAME)
    if application is not None:
        if application.status == "RUNNING":
            # Ray Serve's handle client reports an error if its loop ends before the process.
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, daemon=True).start()
            try:
                asyncio.run_coroutine_threadsafe(_cut_unread(), loop).result()
            except Exception as error:  # Ray raises bare ones
                message = f"clients that do not read their answers may be waited for: {one_line(error)}"
                print(message, file=sys.stderr, flush=True)
        serve.delete(_NAME, _blocking=False)  # blocking deletion would give up after a minute
    while _NAME in serve.status().applications and not at_once.wait(_POLL_SECONDS):
        pass


async def _cut_unread() -> None:
    """Tell the ingress to stop waiting for clients that do not read."""
    from ray import serve

    # With the endpoint's settings of Ray Serve a handle works only in an event loop.
    await asyncio.wait_for(serve.get_deployment_handle("Ingress", _NAME).end.remote(), _ASK_SECONDS)


def _deployment_messages() -> str:
    """Ray Serve's messages on the endpoint's deployments; that of a failed one has its traceback."""
    from ray import serve

    with suppress(Exception):  # there may be no application yet, and the error of the start is what counts
        application = serve.status().applications[_NAME]
        return "\n".join(deployment.message for deployment in application.deployments.values())
    return ""


def _check_port(config: ServeConfig) -> None:
    try:
        socket.create_server((config.host, config.port)).close()
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{config.host}:{config.port} cannot be listened on: {reason}; choose another port") from error


def _check_address(host: str, port: int) -> None:
    """Check that Ray Serve listens here: if it ran before, it keeps its own address, perhaps a public one."""
    from ray.serve.context import _get_global_client

    options = _get_global_client().http_config
    if (options.host, options.port) != (host, port):
        raise InputError(
            f"Ray Serve runs on this cluster already, and listens on {options.host}:{options.port}: "
            "set --host and --port to these, or end it with `serve shutdown`"
        )


def check_models(config: ServeConfig) -> None:
    """Check the models as far as possible without loading them.

    Raises `InputError` if they cannot be used, or the folder of a head that learns cannot be written to.
    """
    name, learning = model_name(config.model), config.learning
    if config.batches.folder is not None:
        folder = locate(config.batches.folder)
        make_folders(folder, [folder], folder, "batches.folder")
    model_fingerprint(name)
    if config.loading.adapter is not None:
        adapter_fingerprint(config.loading.adapter)
    head_fingerprints(config.model, config.drafter)
    if learning.enabled and learning.folder is not None:
        if learning.given_head is not None:
            head_fingerprints(config.model, learning.given_head)
        folder = locate(learning.folder)
        if (folder / RUN_FILE).exists:
            raise InputError(
                f"learning.folder {learning.folder} is the output of a job, and its head would be replaced: give a "
                "folder of this endpoint's own, and that head as learning.head"
            )
        make_folders(folder, [folder], folder, "learning.folder")
    try:
        make_verifier(config.verifier)
        load_tokenizer(name, trust_remote_code=config.loading.trust_remote_code)
        settings = generation_settings(name) if config.loading.generation_config == "auto" else {}
        temperature = sampling_defaults(settings, name, drawn=True).temperature
    except LoadError as error:
        raise InputError(str(error)) from error
    say(f"a request without a temperature is sampled at {temperature:g} (jobs and Python decode greedily by default)")
