"""Which cluster a job joins."""

from __future__ import annotations

import socket

import pytest

from pipeline.cluster.ray_cluster import cluster_here


def test_an_address_where_nobody_answers_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray leaves the address of its last cluster in a file, however that ended."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("pipeline.cluster.ray_cluster.find_bootstrap_address", lambda folder: address)
        assert cluster_here()
    assert not cluster_here()
    monkeypatch.setattr("pipeline.cluster.ray_cluster.find_bootstrap_address", lambda folder: None)
    assert not cluster_here()
