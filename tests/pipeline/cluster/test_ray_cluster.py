"""The cluster that a job joins, and how it is divided among actors."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ray.util import placement_group_table

from pipeline.cluster.ray_cluster import ActorResources, Cluster, Node, cluster_here, free_ports, nodes_ahead, share_out
from pipeline.errors import InputError
from pipeline.settings import ResourcesConfig
from tests.support.waiting import wait_until

HEAD = Node(0, 0)


def test_an_address_where_nobody_answers_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray leaves the address of its last cluster in a file, however that ended."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("pipeline.cluster.ray_cluster.find_bootstrap_address", lambda folder: address)
        assert cluster_here()
    assert not cluster_here()
    monkeypatch.setattr("pipeline.cluster.ray_cluster.find_bootstrap_address", lambda folder: None)
    assert not cluster_here()


def test_free_ports_are_taken_neither_by_a_server_nor_by_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.cluster.ray_cluster._SERVER_PORTS", range(20_000, 20_050))
    found = free_ports(3)
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii").split())
    assert len(set(found)) == 3
    assert not set(found) & set(range(first, last + 1))
    with ExitStack() as stack:
        for port in found:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        assert not set(found) & set(free_ports(40))


@pytest.mark.parametrize(
    ("nodes", "may_grow", "wanted", "expected"),
    [
        # One machine: all GPUs, or all cores but what reading and writing need.
        ([Node(8, 2)], False, ResourcesConfig(), ActorResources(1.0, 1.0, 1, 2)),
        ([Node(8, 2)], False, ResourcesConfig(gpus_per_actor=0.5), ActorResources(1.0, 0.5, 1, 4)),
        ([Node(8, 2)], False, ResourcesConfig(gpus_per_actor=0), ActorResources(7.5, 0.0, 1, 1)),
        ([Node(2, 0)], False, ResourcesConfig(), ActorResources(1.5, 0.0, 1, 1)),
        ([Node(8, 0)], False, ResourcesConfig(max_actors=3), ActorResources(2.5, 0.0, 1, 3)),
        # A cluster: as many as fit, each within a node.
        ([HEAD, Node(4, 1), Node(4, 1)], True, ResourcesConfig(), ActorResources(1.0, 1.0, 1, None)),
        ([HEAD, Node(4, 0), Node(2, 0)], True, ResourcesConfig(), ActorResources(1.5, 0.0, 1, None)),
        ([HEAD, Node(4, 0), Node(4, 0)], True, ResourcesConfig(min_actors=4), ActorResources(1.75, 0.0, 4, None)),
        # Few cores beside a GPU: what reads and writes must find some, too.
        ([HEAD, Node(1, 1)], True, ResourcesConfig(), ActorResources(0.5, 1.0, 1, None)),
        ([HEAD, Node(4, 4)], True, ResourcesConfig(), ActorResources(0.875, 1.0, 1, None)),
        # However many are asked for: no node is so full of engines that nothing else can run.
        ([Node(2, 0)], False, ResourcesConfig(cpus_per_actor=2), ActorResources(1.75, 0.0, 1, 1)),
        ([HEAD, Node(2, 0), Node(4, 0)], True, ResourcesConfig(cpus_per_actor=1), ActorResources(0.875, 0.0, 1, None)),
        ([HEAD, Node(8, 8)], True, ResourcesConfig(cpus_per_actor=1), ActorResources(0.96875, 1.0, 1, None)),
        # Nothing can run yet: nodes with GPUs are to come.
        ([HEAD], True, ResourcesConfig(), ActorResources(1.0, 1.0, 1, None)),
        ([HEAD], True, ResourcesConfig(gpus_per_actor=2, max_actors=8), ActorResources(1.0, 2.0, 1, 8)),
        ([HEAD], True, ResourcesConfig(gpus_per_actor=0), ActorResources(1.0, 0.0, 1, None)),
        ([Node(8, 0)], True, ResourcesConfig(gpus_per_actor=1), ActorResources(1.0, 1.0, 1, None)),
    ],
)
def test_shares(nodes: list[Node], may_grow: bool, wanted: ResourcesConfig, expected: ActorResources) -> None:
    assert share_out(wanted, Cluster(tuple(nodes), may_grow)) == expected


def test_each_process_of_an_engine_takes_a_gpu() -> None:
    two = Cluster((Node(8, 4),), may_grow=False)
    assert share_out(ResourcesConfig(), two, ranks=2) == ActorResources(2.0, 2.0, 1, 2)
    assert share_out(ResourcesConfig(gpus_per_actor=0), two, ranks=2) == ActorResources(7.5, 0.0, 1, 1)
    assert share_out(ResourcesConfig(), Cluster((HEAD,), may_grow=True), ranks=4).gpus == 4
    with pytest.raises(InputError, match="takes as many GPUs, and each of the engines is to have 1: leave"):
        share_out(ResourcesConfig(gpus_per_actor=1), two, ranks=2)


@pytest.mark.parametrize(
    ("node", "wanted", "message"),
    [
        (
            Node(2, 0),
            ResourcesConfig(gpus_per_actor=1),
            "1 × 1 GPUs for the engines are more than the 0 of",
        ),
        (Node(8, 1), ResourcesConfig(gpus_per_actor=0.5, min_actors=3), "3 × 0.5 GPUs"),
        (Node(2, 0), ResourcesConfig(cpus_per_actor=3), "lower resources.cpus_per_actor or resources.min_actors"),
    ],
)
def test_one_machine_has_what_it_has(node: Node, wanted: ResourcesConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        share_out(wanted, Cluster((node,), may_grow=False))


def test_who_waits_for_a_node_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    share_out(ResourcesConfig(gpus_per_actor=2), Cluster((HEAD, Node(8, 1), Node(8, 1)), may_grow=True))
    assert "no node has 1 CPU cores and 2 GPUs for one of the engines yet" in capsys.readouterr().err
    share_out(ResourcesConfig(gpus_per_actor=2), Cluster((HEAD, Node(8, 2)), may_grow=True))
    assert not capsys.readouterr().err


def test_threads_are_whole() -> None:
    assert [ActorResources(cpus, 1.0, 1, 1).threads for cpus in (0.0, 0.5, 1.0, 7.5)] == [1, 1, 1, 8]


def test_nodes_are_asked_for_as_long_as_the_input_is_staged(local_ray: None) -> None:
    """Ray starts a node for a placement group that has no place yet."""

    def waiting() -> list[Any]:
        return [one for one in placement_group_table().values() if one["state"] == "PENDING"]

    with nodes_ahead(0.5, 3):
        wait_until(lambda: len(waiting()) == 3, "three places are wanted")
        assert [one["bundles"] for one in waiting()] == [{0: {"GPU": 0.5}}] * 3
    wait_until(lambda: not waiting(), "none is wanted any more")
