"""The proxy that stands before an endpoint keeps from it what never becomes a request."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx2
import pytest
import yaml

from pipeline.cluster.ray_cluster import free_ports
from pipeline.serving.config import LimitsConfig
from tests.deploy.manifests import load
from tests.support.local_endpoint import served
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE, wait_until

FRONT = ROOT / "deploy" / "front"
CONFIG = (FRONT / "nginx.conf").read_text(encoding="utf-8")


def test_the_manifest_runs_the_configuration() -> None:
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((FRONT / "kubernetes.yaml").read_text(encoding="utf-8")))
    deployment, service = documents
    (port,) = service["spec"]["ports"]
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert pod["metadata"]["labels"] == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert f"listen {port['targetPort']};" in CONFIG
    assert {"containerPort": port["targetPort"], "name": "http"} in container["ports"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert container["command"][:3] == ["nginx", "-c", f"{mounts['configuration']}/nginx.conf"]
    written = re.findall(r"(?:_temp_path|pid) (\S+?)/\w+(?:\.pid)?;", CONFIG)
    assert set(written) == {mounts["temporary"]}


def test_it_stands_before_the_endpoint_of_the_other_manifest_with_its_limits() -> None:
    endpoint, _ = load(ROOT / "deploy" / "kuberay" / "serve.yaml")
    assert f"server {endpoint['metadata']['name']}-serve-svc:8000;" in CONFIG
    limits = LimitsConfig()
    assert limits.body_bytes == 1 << 20
    assert "client_max_body_size 1m;" in CONFIG
    assert f"proxy_read_timeout {limits.seconds:g}s;" in CONFIG


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of nginx before an endpoint that has no models, with short times."""
    if (nginx := shutil.which("nginx")) is None:
        pytest.skip("there is no nginx here")
    folder = tmp_path_factory.mktemp("front")
    (port,) = free_ports(1)
    with served({}, limits=LimitsConfig(connections=100)) as address:
        text = CONFIG.replace("endpoint-serve-svc:8000", address.removeprefix("http://"))
        text = text.replace("listen 8080", f"listen 127.0.0.1:{port}").replace("/tmp/", f"{folder}/")
        text = re.sub(r"(client_\w+_timeout) 10s", r"\1 1s", text).replace("conn clients 64", "conn clients 2000")
        (folder / "nginx.conf").write_text(text, encoding="utf-8")
        command = [nginx, "-e", "stderr", "-p", str(folder), "-c", "nginx.conf", "-g", "daemon off;"]
        process = subprocess.Popen(command, cwd=Path("/"))
        try:
            wait_until(lambda: process.poll() is not None or listens(port), "nginx")
            assert process.poll() is None
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(PATIENCE)


def listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_half_sent_requests_do_not_reach_the_endpoint(front: str) -> None:
    assert httpx2.get(f"{front}/health", timeout=PATIENCE).json() == {
        "status": "ok",
        "replicas": {},
        "connections": ANY,
    }
    host, port = front.removeprefix("http://").split(":")
    with ExitStack() as opened:
        half = [opened.enter_context(socket.create_connection((host, int(port)))) for _ in range(400)]
        for place, connection in enumerate(half):
            connection.settimeout(PATIENCE)
            ending = b"" if place % 2 else b"\r\n{"
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n" + ending)
        assert httpx2.get(f"{front}/health", timeout=PATIENCE).status_code == 200
        for connection in half:
            with suppress(ConnectionResetError):
                while connection.recv(1000):  # until nginx gives it up
                    pass
