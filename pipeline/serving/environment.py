"""What Ray Serve reads from the environment of a cluster that this project starts for the endpoint alone.

On a cluster that is there already, this is its owner's to decide: see `docs/serve.md`.
"""

from __future__ import annotations


def short_ways(port: int) -> dict[str, str]:
    """Settings for the ingress to listen on `port` itself, with no proxy before it.

    They must be there before Ray is started and Ray Serve is imported. Serve's own proxy then needs another port.
    """
    return {
        # Parts talk to each other directly, and without threads between them.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(port + 1),  # which is the first that is not used
        # An ingress that is replaced has its port back at once, and waits for no proxy to notice that it ends.
        "RAY_SERVE_PORT_QUARANTINE_S": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    }
