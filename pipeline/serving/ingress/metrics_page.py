"""The metrics of all replicas as one page for Prometheus, which any ingress can give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric


def metrics_page(snapshots: Sequence[tuple[dict[str, str], Sequence[Metric]]]) -> bytes:
    """Return the metrics of replicas, and of a learner, in Prometheus's text format.

    Args:
        snapshots: What each says, with the labels that tell it from others.
    """
    registry = CollectorRegistry()
    registry.register(_Merged(snapshots))
    return generate_latest(registry)


class _Merged:
    """Collects one family of each name, with the samples of all replicas."""

    def __init__(self, snapshots: Sequence[tuple[dict[str, str], Sequence[Metric]]]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for labels, families in self._snapshots:
            for family in families:
                into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                into.samples += [
                    sample._replace(labels=sample.labels | labels)
                    for sample in family.samples
                    # The library adds when each counter was made: of no use, and as many samples again.
                    if not sample.name.endswith("_created")
                ]
        yield from merged.values()
