"""What a manifest has, as Kubernetes and KubeRay would read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.paths import ROOT

MANIFESTS = sorted((ROOT / "deploy" / "kuberay").glob("*.yaml"))
Document = dict[str, Any]


def load(path: Path) -> tuple[Document, Document]:
    """The Ray resource of a manifest, and its NetworkPolicy."""
    resource, policy = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return resource, policy


def ray_cluster(resource: Document) -> Document:
    spec: Document = resource["spec"]
    return dict(spec.get("rayClusterSpec") or spec["rayClusterConfig"])


def pod_templates(resource: Document) -> Iterator[Document]:
    """The head's, then the workers'."""
    cluster = ray_cluster(resource)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group["template"]


def environment(container: Document, secrets: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """Environment variables of a container; a pod whose secret is missing does not start, unless it is optional.

    Args:
        container: Of a pod template.
        secrets: Values by the Secret's name and key.
    """
    found = {}
    for entry in container.get("env", ()):
        if "value" in entry:
            found[entry["name"]] = entry["value"]
            continue
        reference = entry["valueFrom"]["secretKeyRef"]
        value = secrets.get((reference["name"], reference["key"]))
        if value is not None:
            found[entry["name"]] = value
        elif not reference.get("optional"):
            raise LookupError(f"the pod does not start: there is no Secret {reference['name']}/{reference['key']}")
    return found


def admitted(policy: Document, labels: Mapping[str, str], port: int, *, same_namespace: bool = True) -> bool:
    """Whether a NetworkPolicy lets a pod with these labels connect to a port of the pods it protects."""

    def matches(peer: Document) -> bool:
        namespace = peer.get("namespaceSelector")
        if namespace is None and not same_namespace:
            return False
        assert namespace in (None, {})  # other selectors are not read here
        return set(peer["podSelector"]["matchLabels"].items()) <= set(labels.items())

    return any(
        ("from" not in rule or any(map(matches, rule["from"])))
        and ("ports" not in rule or any(one["port"] == port for one in rule["ports"]))
        for rule in policy["spec"]["ingress"]
    )
