"""OpenAI's own client uses files and batches as at OpenAI, over a real socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
from openai import APIStatusError, BadRequestError, ConflictError, InternalServerError, NotFoundError, OpenAI
from openai.types import Batch

from drafter import EngineConfig, SpeculativeLM
from pipeline.batches.config import BatchesConfig
from pipeline.serving.config import LimitsConfig
from pipeline.serving.keys import ENVIRONMENT, read_keys
from pipeline.serving.replica import Answers
from tests.pipeline.serving.conftest import NAME
from tests.support.calling import with_tools
from tests.support.local_endpoint import served
from tests.support.waiting import PATIENCE, wait_until

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
TEXT = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
FILE_BYTES = 2_000_000


@pytest.fixture(scope="module")
def calling(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model that calls tools."""
    return with_tools(model, tmp_path_factory.mktemp("calling"), tokens=True)


@pytest.fixture(scope="module")
def lm(calling: Path) -> Iterator[SpeculativeLM]:
    config = EngineConfig(max_num_seqs=4, num_draft_tokens=8)
    with SpeculativeLM.from_pretrained(calling, "ngram", config=config) as lm:
        yield lm


@pytest.fixture(scope="module")
def plain(calling: Path) -> Iterator[SpeculativeLM]:
    """The model without a drafter: what every answer must equal."""
    with SpeculativeLM.from_pretrained(calling, "none", config=EngineConfig(max_num_seqs=4)) as lm:
        yield lm


@pytest.fixture
def address(lm: SpeculativeLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server with the keys `ann` and `ben`."""
    monkeypatch.setenv(ENVIRONMENT, "ann,ben")
    config = BatchesConfig(str(tmp_path / "batches"), file_bytes=FILE_BYTES, files=4, lines=600, unfinished=2)
    limits = LimitsConfig(choices=2, body_bytes=8000)
    answers = {NAME: Answers(lm, "replica", seconds=PATIENCE)}
    with served(answers, read_keys(None, "required"), limits, batches=config) as address:
        wait_until(lambda: get(address, "/v1/files").status_code == 200, "the batches are there")
        yield address


def get(address: str, path: str, key: str = "ann") -> httpx2.Response:
    return httpx2.get(address + path, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE)


def client(address: str, key: str = "ann") -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=PATIENCE)


def chat(content: Any = "how many", **settings: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": NAME, "messages": messages, "max_tokens": 8, "temperature": 0} | settings


def lines(bodies: list[Any], url: str = CHAT) -> list[dict[str, Any]]:
    return [
        {"custom_id": f"row {place}", "method": "POST", "url": url, "body": body} for place, body in enumerate(bodies)
    ]


def begin(api: OpenAI, rows: list[Any], endpoint: Any = CHAT, **settings: Any) -> Batch:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    file = api.files.create(file=("rows.jsonl", text.encode()), purpose="batch")
    return api.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **settings)


def ended(api: OpenAI, batch: Batch) -> Batch:
    def found() -> Batch | None:
        now = api.batches.retrieve(batch.id)
        return now if now.status in ENDED else None

    return wait_until(found, "the batch ends")


def results(api: OpenAI, name: str | None) -> list[dict[str, Any]]:
    return [] if name is None else [json.loads(line) for line in api.files.content(name).text.splitlines()]


TOOL = {"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["one", "two"]}}}
GOOD: list[dict[str, Any]] = [
    chat(),
    chat("how many apples", temperature=0.9, seed=3),
    chat(n=2, seed=5, temperature=1),
    chat(logprobs=True, top_logprobs=2),
    chat([{"type": "text", "text": "how many pens"}]),
    chat(response_format=SCHEMA),
    chat(tools=[TOOL], tool_choice="required", max_tokens=60),
    chat(tools=[TOOL]),
    chat(speculation=True),
]
BAD: list[tuple[dict[str, Any], int]] = [
    (chat(stream=True), 400),
    (chat(n=3), 400),
    (chat(temperature=9), 400),
    (chat("a" * 7000), 400),  # too many tokens for the model
    (chat("a" * 8000), 413),
    (chat(model="nobody"), 404),
    (chat(nonsense=1), 400),
    (chat(messages=[]), 400),
    (chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}}), 400),
    (chat([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}]), 400),
    (chat(logit_bias={"99999": 1}), 400),
]
CHANGING = ("id", "created", "speculation")


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    """A body without what is another one each time: its name and times, and the names of calls."""
    kept = {name: value for name, value in body.items() if name not in CHANGING}
    kept["usage"] = {name: value for name, value in kept.get("usage", {}).items() if name != "prompt_tokens_details"}
    for choice in kept.get("choices", ()):
        for call in choice["message"].get("tool_calls") or ():
            del call["id"]
    return kept


def test_each_line_gets_what_a_live_request_gets(address: str) -> None:
    api = client(address)
    rows = lines([*GOOD, *(body for body, _ in BAD)])
    batch = begin(api, rows, metadata={"purpose": "a test"})
    assert (batch.status, batch.object, batch.endpoint) == ("validating", "batch", CHAT)
    done = ended(api, batch)
    assert (done.status, done.metadata, done.errors) == ("completed", {"purpose": "a test"}, None)
    assert done.request_counts is not None
    assert vars(done.request_counts) == {"total": 20, "completed": 9, "failed": 11}
    times = [done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at]
    assert times == sorted(times)  # type: ignore[type-var]
    assert done.expires_at == done.created_at + 24 * 3600
    answers, errors = results(api, done.output_file_id), results(api, done.error_file_id)
    assert [one["custom_id"] for one in answers] == [f"row {place}" for place in range(len(GOOD))]
    assert [one["response"]["status_code"] for one in errors] == [status for _, status in BAD]
    assert len({one["id"] for one in [*answers, *errors]}) == len(rows)
    headers = {"Authorization": "Bearer ann"}
    for body, line in zip([*GOOD, *(body for body, _ in BAD)], [*answers, *errors], strict=True):
        live = httpx2.post(address + CHAT, json=body, headers=headers, timeout=PATIENCE)
        if body.get("stream"):
            continue
        assert line["response"]["status_code"] == live.status_code
        assert comparable(line["response"]["body"]) == comparable(live.json()), body
    prompt = sum(one["response"]["body"]["usage"]["prompt_tokens"] for one in answers)
    output = sum(one["response"]["body"]["usage"]["completion_tokens"] for one in answers)
    assert done.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == (
        prompt,
        output,
        prompt + output,
    )
    found = api.files.retrieve(done.output_file_id or "")
    assert (found.purpose, found.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert found.bytes == len(api.files.content(found.id).content)


def test_text_completions_are_a_batch_too(address: str, plain: SpeculativeLM) -> None:
    api = client(address)
    prompts = ["how many", "pens and apples"]
    body = {"model": NAME, "max_tokens": 9, "temperature": 0}
    rows = lines([*({"prompt": one, **body} for one in prompts), {"prompt": prompts, "echo": True, **body}], TEXT)
    done = ended(api, begin(api, rows, TEXT))
    wanted = [one.text for one in plain.generate(prompts, max_new_tokens=9)]
    found = [
        [choice["text"] for choice in one["response"]["body"]["choices"]] for one in results(api, done.output_file_id)
    ]
    assert found == [[wanted[0]], [wanted[1]], [prompt + text for prompt, text in zip(prompts, wanted, strict=True)]]


def test_a_file_that_is_no_input_fails_with_its_lines(address: str) -> None:
    api = client(address)
    good, again, other = lines([chat()] * 3)
    done = ended(api, begin(api, [good, "{", again | {"custom_id": "row 0"}, other | {"url": TEXT}, other]))
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    assert done.failed_at is not None
    assert done.errors is not None
    problems = [(one.line, one.code, one.param) for one in done.errors.data or []]
    assert problems == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "url_mismatch", "url"),
    ]


def test_files_and_batches_belong_to_their_key(address: str) -> None:
    ann, ben = client(address), client(address, "ben")
    batch = begin(ann, lines([chat()]))
    done = ended(ann, batch)
    assert not ben.files.list().data
    assert not ben.batches.list().data
    for ask in (
        lambda: ben.files.retrieve(batch.input_file_id),
        lambda: ben.files.content(done.output_file_id or ""),
        lambda: ben.files.delete(batch.input_file_id),
        lambda: ben.batches.retrieve(batch.id),
        lambda: ben.batches.cancel(batch.id),
        lambda: ben.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
        lambda: ann.files.retrieve("file-.."),
    ):
        with pytest.raises(NotFoundError, match=r"No such File object|No batch found with id"):
            ask()
    assert [one.id for one in ann.files.list(purpose="batch")] == [batch.input_file_id]
    assert get(address, "/v1/files", "wrong").status_code == 401
    assert get(address, "/v1/batches", "wrong").status_code == 401


def test_lists_have_pages(address: str) -> None:
    api = client(address)
    files = [api.files.create(file=(f"{place}", b"{}"), purpose="batch").id for place in range(4)]
    assert [one.id for one in api.files.list(limit=3)] == files[::-1]
    assert [one.id for one in api.files.list(limit=3, order="asc")] == files
    page = api.files.list(limit=3)
    assert (len(page.data), page.has_more) == (3, True)
    with pytest.raises(BadRequestError, match="You have 4 files, which is the most"):
        api.files.create(file=("5", b"{}"), purpose="batch")
    assert api.files.delete(files[0]).deleted
    with pytest.raises(NotFoundError):
        api.files.content(files[0])
    batches = []
    for name in files[1:]:
        batches.append(api.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h"))
        assert ended(api, batches[-1]).status == "failed"
    assert [one.id for one in api.batches.list(limit=2)] == [one.id for one in batches[::-1]]
    for path in ("/v1/batches?limit=0", "/v1/batches?limit=101", "/v1/batches?limit=x", "/v1/files?order=up"):
        assert get(address, path).status_code == 400


def test_a_batch_can_be_cancelled(address: str, lm: SpeculativeLM) -> None:
    api = client(address)
    long = [chat(max_tokens=150, logit_bias={"0": -100})] * 60
    batch = begin(api, lines(long))
    second = begin(api, lines(long))
    with pytest.raises(APIStatusError, match="2 of your batches have not ended") as refusal:
        begin(api, lines(long))
    assert refusal.value.status_code == 429
    assert api.batches.cancel(second.id).status in ("cancelling", "cancelled")
    wait_until(lambda: (api.batches.retrieve(batch.id).request_counts or batch).completed, "some lines are answered")  # type: ignore[union-attr]
    api.batches.cancel(batch.id)
    done = ended(api, batch)
    assert done.request_counts is not None
    assert (done.status, done.request_counts.total, done.error_file_id) == ("cancelled", 60, None)
    assert len(results(api, done.output_file_id)) == done.request_counts.completed > 0
    with pytest.raises(ConflictError, match="Cannot cancel a batch with status 'cancelled'"):
        api.batches.cancel(batch.id)
    ended(api, second)
    wait_until(lambda: not lm.engine.state().active + lm.engine.state().waiting, "no row of them is left")


def test_what_cannot_be_a_file_or_a_batch_is_refused(address: str) -> None:
    api = client(address)
    file = api.files.create(file=("rows", b"{}"), purpose="batch").id
    upload: Any = api.files.create
    create: Any = api.batches.create
    good = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"endpoint": "/v1/embeddings"}, "'endpoint' can only"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"a": "b" * 600}}, "metadata"),
        ({"extra_body": {"x": 1}}, "'x' is not"),
        ({"input_file_id": 5}, "input_file_id"),
    ]
    for changed, message in wrong:
        with pytest.raises(BadRequestError, match=message):
            create(**good | changed)
    wrong = [
        ({"purpose": "fine-tune"}, "'purpose' can only be batch"),
        ({"expires_after": {"anchor": "created_at", "seconds": 9000}}, "expires_after"),
    ]
    for changed, message in wrong:
        with pytest.raises(BadRequestError, match=message):
            upload(**{"file": ("a", b""), "purpose": "batch"} | changed)
    with pytest.raises(APIStatusError, match=f"The file is larger than {FILE_BYTES} bytes") as refusal:
        upload(file=("a", b"x" * (FILE_BYTES + 1)), purpose="batch")
    assert refusal.value.status_code == 413
    upload(file=("a", b"x" * FILE_BYTES), purpose="batch")
    headers = {"Authorization": "Bearer ann", "Origin": "http://evil.example"}
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": b"{}"}}
    assert httpx2.post(f"{address}/v1/files", headers=headers, **form, timeout=PATIENCE).status_code == 403
    assert [one.filename for one in api.files.list()] == ["a", "rows"]


def test_an_upload_that_is_torn_or_finds_no_room_leaves_nothing(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = client(address)
    host, port = address.removeprefix("http://").split(":")
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer ann\r\nContent-Length: 5000\r\n"
        'Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\nContent-Disposition: form-data; name="file"; '
        'filename="a"\r\n\r\n{}'
    )
    folder = tmp_path / "batches" / "files"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode())
        wait_until(lambda: any(folder.iterdir()), "the upload has begun")
    wait_until(lambda: not any(folder.iterdir()), "nothing is left of it")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.batches.records.sync", full)
        with pytest.raises(
            InternalServerError, match=r"The server's disk does not take it: .*No space left"
        ) as refusal:
            api.files.create(file=("rows", b"{}"), purpose="batch")
        assert refusal.value.status_code == 507
    assert not any(folder.iterdir())
    file = api.files.create(file=("rows", b"{}"), purpose="batch")
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.io.files.os.fsync", full)
        with pytest.raises(InternalServerError, match="No space left"):
            api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert not api.batches.list().data
    assert api.files.content(file.id).text == "{}"


def test_a_live_request_does_not_wait_for_a_batch(address: str, lm: SpeculativeLM) -> None:
    """It is decoded while all of the batch's rows rest; that no step is theirs in between is the engine's test."""
    api = client(address)
    batch = begin(
        api, lines([chat(max_tokens=150, logit_bias={"0": -100}, temperature=1, seed=row) for row in range(40)])
    )
    wait_until(lambda: lm.engine.state().active == 4, "all slots are taken")
    live = api.chat.completions.create(**chat(max_tokens=5, logit_bias={"0": -100}))
    assert live.usage is not None
    assert live.usage.completion_tokens == 5
    counts = api.batches.retrieve(batch.id).request_counts
    assert counts is not None
    assert counts.completed < 40
    done = ended(api, batch)
    assert done.request_counts is not None
    assert done.request_counts.completed == 40


def test_without_a_folder_there_are_no_such_routes(local: str) -> None:
    response = httpx2.get(f"{local}/v1/batches", timeout=PATIENCE)
    assert response.status_code == 404
    assert "with batches.folder /v1/files and /v1/batches" in response.json()["error"]["message"]


@pytest.mark.slow
def test_five_hundred_lines_with_every_kind_of_fault(address: str, plain: SpeculativeLM) -> None:
    api = client(address)
    bodies = [
        BAD[row % len(BAD)][0]
        if row % 3 == 0
        else chat(f"how many {row % 7} pens", seed=row, temperature=0.7 * (row % 2))
        for row in range(500)
    ]
    done = ended(api, begin(api, lines(bodies)))
    answers, errors = results(api, done.output_file_id), results(api, done.error_file_id)
    places = {one["custom_id"] for one in [*answers, *errors]}
    assert len(answers) + len(errors) == len(places) == 500
    assert [one["response"]["status_code"] for one in errors] == [BAD[row % len(BAD)][1] for row in range(0, 500, 3)]
    kept = [row for row in range(500) if row % 3]
    wanted = plain.chat(
        [f"how many {row % 7} pens" for row in kept],
        [{"seed": row, "temperature": 0.7 * (row % 2), "max_new_tokens": 8} for row in kept],
    )
    assert [one["response"]["body"]["choices"][0]["message"]["content"] for one in answers] == [
        one.text for one in wanted
    ]
