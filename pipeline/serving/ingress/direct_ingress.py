"""Ray Serve's direct ingress, for a cluster that is started for the endpoint alone: the ingress listens on the port.

A proxy in front of it would cost each request some milliseconds. On a cluster that is there already its owner decides:
see `docs/serve.md`.
"""

from __future__ import annotations

import ipaddress
from typing import Any

import ray

from pipeline.cluster.ports import LOOPBACK
from pipeline.serving.ingress.connections import Connections


def short_ways(port: int) -> dict[str, str]:
    """Return environment variables that have the ingress listen on `port`, with no proxy in front of it.

    They must be set before Ray is started and Ray Serve is imported. Serve's own proxy then needs another port.
    """
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


def keep_to_this_machine() -> None:
    """Have Ray (2.60) keep this replica's port for other replicas to the loopback address, where its node has that.

    The port asks for the token, but listens on all addresses. Each replica's constructor calls this, before Ray
    opens it.
    """
    from ray.serve._private import replica

    if not ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback:
        return
    add_port = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", LOOPBACK))


def before_listening(connections: Connections) -> None:
    """Change how Ray (2.60) has this process listen, which it has no settings for.

    An ingress may share its port: for a minute the kernel keeps the connections of one that has died, and Ray would
    think that another program has the port, and would not try it again. And connections have a budget.

    Args:
        connections: Those that will be open.
    """
    from ray.serve._private import replica

    listen = replica.start_asgi_http_server

    async def listen_with_limits(*args: Any, **kwargs: Any) -> Any:
        task, server = await listen(*args, **kwargs | {"enable_so_reuseport": True})
        # The task has not begun: what it finds here is what it goes by.
        server.config.http = connections.protocol()
        server.config.ws = "none"
        return task, server

    replica.start_asgi_http_server = listen_with_limits
