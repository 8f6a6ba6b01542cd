"""The routes of OpenAI's files and batches."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from openai.types import Batch, FileDeleted, FileObject
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, JSONResponse, Response

from drafter.errors import one_line
from pipeline.batches.records import ENDED, BatchRecord, FileRecord, new_id, page
from pipeline.batches.runner import Batches
from pipeline.batches.uploads import boundary_of, read_form
from pipeline.openai.errors import OpenAIError, bad_request, can_only_be, invalid, missing, not_supported, parse_json
from pipeline.serving.answering import PARSERS
from pipeline.serving.connections import FILES, Connections
from pipeline.serving.openapi import FORM, NEW_BATCH, BatchList, FileList, described
from pipeline.serving.request_checks import read_body

_BODY_BYTES = 64 << 10  # of the request that begins a batch
_MOST_METADATA, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512  # OpenAI's
_WINDOW = re.compile(r"([1-9]\d{0,3})([hd])")
_SECONDS = {"h": 3600, "d": 24 * 3600}
_LONGEST_WINDOW = 30 * 24 * 3600


def add_batches(app: FastAPI, batches: Batches, keyed: list[Any], connections: Connections) -> None:
    """Add the routes to an application; `keyed` checks a request's key."""
    keys = connections.keys

    def owner(request: Request) -> str:
        batches.check_ready()
        return keys.client(request.headers.get("authorization"))

    @app.post(FILES, dependencies=keyed, **described(FileObject, 400, 401, 408, 413, 415, 429, 503, 507, body=FORM))
    async def upload(request: Request) -> Response:
        """Upload a file, as a form with the fields `purpose` (batch) and `file`."""
        whose = owner(request)
        if "origin" in request.headers:  # a web page may post a form to any address, this machine's own among them
            raise OpenAIError(403, "A web page may not upload files.", code="wrong_origin")
        if len(batches.files.of(whose)) >= batches.config.files:
            message = f"You have {batches.config.files} files, which is the most: delete some."
            raise OpenAIError(400, message, code="too_many_files")
        return JSONResponse((await _receive(request, batches, whose)).public())

    @app.get(FILES, dependencies=keyed, **described(FileList, 400, 401, 503))
    async def list_files(request: Request) -> Response:
        """List the files of the key."""
        found = batches.files.of(owner(request))
        purpose = request.query_params.get("purpose")
        found = [one for one in found if purpose in (None, one.purpose)]
        return _page(request, found, FileRecord.public, most=10_000, usual=10_000)

    @app.get(FILES + "/{file_id}", dependencies=keyed, **described(FileObject, 401, 404, 503))
    async def retrieve_file(request: Request, file_id: str) -> Response:
        """Describe a file."""
        return JSONResponse(batches.files.find(owner(request), file_id).public())

    @app.get(FILES + "/{file_id}/content", dependencies=keyed, **described(None, 401, 404, 503))
    async def file_content(request: Request, file_id: str) -> Response:
        """Give a file's content."""
        found = batches.files.find(owner(request), file_id)
        return FileResponse(batches.files.content(found.id), media_type="application/octet-stream")

    @app.delete(FILES + "/{file_id}", dependencies=keyed, **described(FileDeleted, 401, 404, 503))
    async def delete_file(request: Request, file_id: str) -> Response:
        """Delete a file. A batch that has begun with it goes on."""
        found = batches.files.find(owner(request), file_id)
        await asyncio.to_thread(batches.files.forget, found)
        return JSONResponse({"id": found.id, "object": "file", "deleted": True})

    @app.post(
        "/v1/batches",
        dependencies=keyed,
        **described(Batch, 400, 401, 404, 408, 413, 415, 429, 503, 507, body=NEW_BATCH),
    )
    async def create_batch(request: Request) -> Response:
        """Begin a batch."""
        whose = owner(request)
        record = _new_batch(parse_json(await read_body(request, _BODY_BYTES)), batches, whose)
        unfinished = [one for one in batches.records.of(whose) if one.status not in ENDED]
        if len(unfinished) >= batches.config.unfinished:
            message = f"{len(unfinished)} of your batches have not ended, which is the most: wait for one."
            raise OpenAIError(429, message, code="rate_limit_exceeded")
        await _on_disk(batches.create(record))
        return JSONResponse(batches.described(record))

    @app.get("/v1/batches", dependencies=keyed, **described(BatchList, 400, 401, 503))
    async def list_batches(request: Request) -> Response:
        """List the batches of the key, the newest first."""
        return _page(request, batches.records.of(owner(request)), batches.described, most=100, usual=20)

    @app.get("/v1/batches/{batch_id}", dependencies=keyed, **described(Batch, 401, 404, 503))
    async def retrieve_batch(request: Request, batch_id: str) -> Response:
        """Describe a batch."""
        return JSONResponse(batches.described(batches.records.find(owner(request), batch_id)))

    @app.post("/v1/batches/{batch_id}/cancel", dependencies=keyed, **described(Batch, 401, 404, 409, 503, 507))
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        """Cancel a batch: what has been answered is delivered."""
        record = batches.records.find(owner(request), batch_id)
        return JSONResponse(batches.described(await _on_disk(batches.cancel(record))))


async def _receive(request: Request, batches: Batches, owner: str) -> FileRecord:
    """Write an upload to disk; nothing is left of one that fails."""
    boundary = boundary_of(request.headers.get("content-type", ""))
    now, limit, size = batches.clock(), batches.config.file_bytes, 0
    name = new_id("file-", now)
    folder = batches.files.folder(name)
    try:
        await asyncio.to_thread(folder.mkdir)
        with batches.files.content(name).open("wb") as stream:

            def write(piece: bytes) -> None:
                nonlocal size
                size += len(piece)
                if size > limit:
                    raise OpenAIError(413, f"The file is larger than {limit} bytes.", code="request_too_large")
                stream.write(piece)

            form = await read_form(request.stream(), boundary, write)
            await asyncio.to_thread(stream.flush)
        record = FileRecord(name, owner, _usable(form.fields, form.file_name), "batch", size, int(now))
        await asyncio.to_thread(batches.files.keep, record)
    except BaseException as error:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if isinstance(error, ClientDisconnect):
            raise OpenAIError(408, "The file has not come.", code="timeout") from error
        if isinstance(error, OSError):
            raise _no_room(error) from error
        raise
    return record


def _usable(fields: dict[str, str], file_name: str | None) -> str:
    """Return the name of an uploaded file, if the form is one that is understood."""
    for name in fields:
        if name != "purpose":
            raise not_supported(name)
    if file_name is None:
        raise missing("file")
    if "purpose" not in fields:
        raise missing("purpose")
    if fields["purpose"] != "batch":
        raise can_only_be("purpose", "batch", fields["purpose"])
    return file_name[:255]


def _new_batch(body: Any, batches: Batches, owner: str) -> BatchRecord:
    if not isinstance(body, dict):
        raise bad_request("The body of the request is not a JSON object.", None, "invalid_type")
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name not in ("input_file_id", "endpoint", "completion_window", "metadata"):
            raise not_supported(name[:100])
    for name in ("input_file_id", "endpoint", "completion_window"):
        if name not in given:
            raise missing(name)
        if not isinstance(given[name], str):
            raise invalid(name, "be text", given[name])
    if given["endpoint"] not in PARSERS:
        raise can_only_be("endpoint", " or ".join(PARSERS), given["endpoint"])
    window = _WINDOW.fullmatch(given["completion_window"])
    seconds = int(window[1]) * _SECONDS[window[2]] if window else 0
    if not 0 < seconds <= _LONGEST_WINDOW:
        must = "be a number of hours or days up to 30 days, such as 24h"
        raise invalid("completion_window", must, given["completion_window"], "invalid_value")
    file = batches.files.find(owner, given["input_file_id"])
    if file.purpose != "batch":
        raise bad_request("The input file must have the purpose 'batch'.", "input_file_id", "invalid_value")
    now = batches.clock()
    return BatchRecord(
        new_id("batch_", now),
        owner,
        given["endpoint"],
        file.id,
        given["completion_window"],
        int(now),
        int(now) + seconds,
        metadata=_metadata(given.get("metadata")),
    )


def _metadata(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    fits = (
        isinstance(given, dict)
        and len(given) <= _MOST_METADATA
        and all(isinstance(v, str) and len(v) <= _LONGEST_VALUE and len(k) <= _LONGEST_KEY for k, v in given.items())
    )
    if not fits:
        most = f"{_MOST_METADATA} texts of {_LONGEST_VALUE} characters"
        must = f"be an object of up to {most}, under names of {_LONGEST_KEY}"
        raise invalid("metadata", must, given)
    return dict(given)


def _page(
    request: Request, records: list[Any], public: Callable[[Any], dict[str, Any]], *, most: int, usual: int
) -> Response:
    asked = request.query_params
    limit = asked.get("limit", str(usual))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise invalid("limit", f"be a number of 1 to {most}", limit, "invalid_value")
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise can_only_be("order", "asc or desc", order)
    found, more = page(records, limit=int(limit), after=asked.get("after"), newest_first=order == "desc")
    ends = {"first_id": found[0].id, "last_id": found[-1].id} if found else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": [public(one) for one in found], **ends, "has_more": more})


async def _on_disk(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except OSError as error:
        raise _no_room(error) from error


def _no_room(error: OSError) -> OpenAIError:
    return OpenAIError(507, f"The server's disk does not take it: {one_line(error)}.", code="insufficient_storage")
