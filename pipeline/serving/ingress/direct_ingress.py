"""Ray Serve's direct ingress, on a cluster that is started for the endpoint alone: it listens on the port itself.

A proxy before it would cost each request some milliseconds. On a cluster that is there already, this is its owner's to
decide: see `docs/serve.md`.
"""

from __future__ import annotations

from typing import Any


def short_ways(port: int) -> dict[str, str]:
    """Environment variables for the ingress to listen on `port`, with no proxy before it.

    They must be there before Ray is started and Ray Serve is imported. Serve's own proxy then needs another port.
    """
    return {
        # Parts talk to each other directly, and without threads between them.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(port + 1),  # which is the first that is not used
        # An ingress that is replaced has its port back at once, even if it hangs, and waits for no proxy to notice.
        "RAY_SERVE_PORT_QUARANTINE_S": "0",
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    }


def share_port() -> None:
    """In an ingress, before it listens: let it have the port of one that has just died.

    For a minute, the kernel keeps the connections of one that died. Ray (2.60) would take the port for another
    program's then, and not try it again.
    """
    from ray.serve._private import replica

    listen = replica.start_asgi_http_server

    def listen_again(*args: Any, **kwargs: Any) -> Any:
        return listen(*args, **kwargs | {"enable_so_reuseport": True})

    replica.start_asgi_http_server = listen_again
