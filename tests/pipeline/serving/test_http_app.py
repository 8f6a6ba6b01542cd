"""What is no good request is refused in OpenAI's shape, whatever it is."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest

from drafter import EngineConfig, SpeculativeLM
from pipeline.batches.config import BatchesConfig
from pipeline.serving.config import LimitsConfig
from pipeline.serving.keys import ENVIRONMENT, read_keys
from pipeline.serving.replica import Answers
from tests.pipeline.serving.conftest import NAME
from tests.support.local_endpoint import served
from tests.support.waiting import PATIENCE

HTTP = httpx2.Client(timeout=PATIENCE, limits=httpx2.Limits(max_keepalive_connections=0))
CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "how many"}], "max_tokens": 3}


def error_of(response: httpx2.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert not any(word in response.text for word in ("Traceback", "pydantic", "site-packages", "drafter."))
    return error


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/../etc/passwd", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/nobody", 404),
        ("POST", "/v1/embeddings", 404),
    ],
)
def test_wrong_addresses_and_methods(local: str, method: str, path: str, status: int) -> None:
    response = HTTP.request(method, local + path)
    assert response.status_code == status
    error = error_of(response)
    if path == "/nowhere":
        assert "OpenAI's API is at /v1" in error["message"]
    if path == "/v1/embeddings":
        assert error["message"].startswith("'/v1/embeddings' is not supported: there are /v1/chat/completions, ")
    assert (status == 405) == ("allow" in response.headers)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/models", "/health", "/metrics", "/", "/nowhere"])
def test_a_request_for_another_host_is_refused(local: str, path: str) -> None:
    """As a web page makes it whose name resolves to this machine."""
    response = HTTP.post(local + path, json=GOOD, headers={"Host": "evil.example:8000"})
    assert response.status_code == 421
    assert (
        'localhost, 127.0.0.1 or [::1], with or without a port, not "evil.example:8000"'
        in error_of(response)["message"]
    )
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "[::1]:8000", "127.0.0.1"])
def test_this_machine_has_several_names(local: str, host: str) -> None:
    assert HTTP.post(local + CHAT, json=GOOD, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "kind", [None, "", "text/plain", "text/plain; charset=application/json", "multipart/form-data"]
)
def test_a_body_must_say_that_it_is_json(local: str, kind: str | None) -> None:
    """A web page may post anything else without asking."""
    body = json.dumps(GOOD).encode()
    headers = {} if kind is None else {"Content-Type": kind}
    response = HTTP.post(local + CHAT, content=body, headers=headers)
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_media_type"
    good = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert HTTP.post(local + CHAT, content=body, headers=good).status_code == 200


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"not json", "application/json", 400),
        (b'{"model": "\xff"}', "application/json", 400),
        (b'{"messages":' + b"[" * 50_000, "application/json", 400),
        (b'{"messages":' + b'[{"content":' * 400 + b"1" + b"}]" * 400 + b"}", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"null", "application/json", 400),
        (b"{}", "application/json", 400),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', "application/json", 400),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "seed": 1e999}', "application/json", 400),
        (b"model=tiny", "application/x-www-form-urlencoded", 415),
        (b"x" * (1 << 20), "application/json", 400),
        (b"x" * ((1 << 20) + 1), "application/json", 413),
        (b"x" * (12 << 20), "application/json", 413),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_bodies(local: str, body: bytes, kind: str, status: int) -> None:
    response = HTTP.post(local + CHAT, content=body, headers={"Content-Type": kind})
    assert response.status_code == status
    error_of(response)


def test_a_body_without_an_end_is_cut_off(local: str) -> None:
    host, port = local.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked"
        connection.sendall(f"{head}\r\n\r\n".encode())
        piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        with pytest.raises(OSError, match=r"reset|pipe"):
            connection.sendall(piece * 600)


def test_the_server_is_well_afterwards(local: str) -> None:
    assert HTTP.post(local + CHAT, json=GOOD).status_code == 200
    told = HTTP.get(f"{local}/health").json()
    assert (told["status"], told["replicas"], told["connections"]["unread"]) == ("ok", {NAME: 1}, 0)


def test_metrics(local: str) -> None:
    assert HTTP.post(local + CHAT, json=GOOD).status_code == 200
    page = HTTP.get(f"{local}/metrics").text
    label = f'{{model="{NAME}",replica="replica"}}'
    assert f"drafter_slots{label} 4.0\n" in page
    assert f"drafter_requests_waiting{label} 0.0\n" in page
    for name in (
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "mean_acceptance_length",
        "queue_seconds",
    ):
        assert f"# TYPE drafter_{name} histogram\n" in page
        [count] = [line.split()[1] for line in page.splitlines() if line.startswith(f"drafter_{name}_count")]
        assert float(count) >= 1


def test_keys(plain: SpeculativeLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "right,mine operator")
    with served({NAME: Answers(plain, "replica", seconds=PATIENCE)}, read_keys(None, "required")) as address:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic right"}):
            for path in (CHAT, "/v1/completions"):
                response = HTTP.post(address + path, json=GOOD, headers=headers)
                assert response.status_code == 401
                assert error_of(response)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
            for path in ("/v1/models", f"/v1/models/{NAME}", "/metrics"):
                assert HTTP.get(address + path, headers=headers).status_code == 401
        right = {"Authorization": "Bearer right"}
        assert HTTP.post(address + CHAT, json=GOOD, headers=right).status_code == 200
        refused = HTTP.get(f"{address}/metrics", headers=right)
        assert (refused.status_code, error_of(refused)["code"]) == (403, "not_an_operator")
        assert HTTP.get(f"{address}/metrics", headers={"Authorization": "Bearer mine"}).status_code == 200
        for path in ("/health", "/", "/page.js", "/openapi.json"):
            assert HTTP.get(address + path).status_code == 200


@pytest.mark.parametrize("prompt", ["Tom has", ["Tom", "Ann"], [5, 6], [[5, 6], [7]]])
def test_the_document_has_each_kind_of_prompt(local: str, prompt: Any) -> None:
    body = {"model": NAME, "prompt": prompt, "max_tokens": 1}
    assert HTTP.post(f"{local}/v1/completions", json=body).status_code == 200
    asked = HTTP.get(f"{local}/openapi.json").json()["paths"]["/v1/completions"]["post"]["requestBody"]
    jsonschema.validate(body, asked["content"]["application/json"]["schema"])


@pytest.mark.slow
def test_the_document_is_true(plain: SpeculativeLM, tmp_path: Path) -> None:
    """Schemathesis makes requests from the OpenAPI document, right and wrong ones, and holds the answers against it."""
    config = EngineConfig(max_num_seqs=4, max_model_len=64)
    with (
        SpeculativeLM(plain.base, plain.engine.drafter, plain.tokenizer, config) as lm,
        served(
            {NAME: Answers(lm, "replica", seconds=PATIENCE)},
            limits=LimitsConfig(choices=2),
            batches=BatchesConfig(str(tmp_path / "batches")),
        ) as address,
    ):
        command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{address}/openapi.json"]
        settings = ["--max-examples", "30", "--seed", "1", "--request-timeout", str(PATIENCE), "--no-color"]
        # What fits neither the model's context nor its vocabulary is not in the document.
        settings += ["--exclude-checks", "positive_data_acceptance"]
        found = subprocess.run([*command, *settings], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert found.returncode == 0, found.stdout
