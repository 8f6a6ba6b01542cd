"""The upload of a file as a form of `multipart/form-data` (RFC 7578), written to disk as it comes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from email.message import Message

from pipeline.openai.errors import OpenAIError, bad_request

_MOST_FIELDS, _MOST_FIELD_BYTES, _MOST_HEADER_BYTES = 16, 4 << 10, 16 << 10
_PIECE = 1 << 20  # bytes that are written to disk at once
_DISPOSITION = re.compile(r"^content-disposition:\s*form-data\s*(;.*)$", re.IGNORECASE | re.MULTILINE)
_NAME = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"')

Write = Callable[[bytes], object]


@dataclass
class Form:
    """The fields of a form that are texts, and the name of the file that it has sent."""

    fields: dict[str, str] = field(default_factory=dict)
    file_name: str | None = None


def boundary_of(content_type: str) -> bytes:
    """Return the boundary that a `Content-Type` header names; raises `OpenAIError` (415) for another kind of body."""
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary or len(boundary) > 70:
        message = "The Content-Type must be multipart/form-data with a boundary, as clients send a file."
        raise OpenAIError(415, message, code="unsupported_media_type")
    return boundary.encode("latin-1", "replace")


async def read_form(chunks: AsyncIterator[bytes], boundary: bytes, write: Write) -> Form:
    """Read a form with one file, whose bytes go to `write`, in another thread.

    Raises:
        OpenAIError: It is not such a form, or ends before its last boundary.
        OSError: What `write` raises.
    """
    form, parts = Form(), _Parts(chunks, b"\r\n--" + boundary)
    await parts.skip_preamble()
    while (header := await parts.next_header()) is not None:
        if len(form.fields) >= _MOST_FIELDS:
            raise bad_request(f"A form may have up to {_MOST_FIELDS} fields.", None, "invalid_form")
        name, file_name = _names(header)
        if file_name is None:
            value = b"".join([piece async for piece in parts.content(_MOST_FIELD_BYTES)])
            form.fields[name] = value.decode("utf-8", "replace")
        elif name != "file" or form.file_name is not None:
            raise bad_request("A form must have one file, in its field 'file'.", name, "invalid_form")
        else:
            form.file_name, held = file_name, bytearray()
            async for piece in parts.content():
                held += piece
                if len(held) >= _PIECE:
                    await asyncio.to_thread(write, bytes(held))
                    held.clear()
            await asyncio.to_thread(write, bytes(held))
    return form


def _names(header: bytes) -> tuple[str, str | None]:
    """Return the names of a part's field and of its file; None for a text."""
    said = _DISPOSITION.search(header.decode("utf-8", "replace").replace("\r\n", "\n"))
    found = dict(_NAME.findall(said[1])) if said else {}
    if "name" not in found:
        raise bad_request("A part of the form has no name.", None, "invalid_form")
    return found["name"], found.get("filename")


class _Parts:
    """Cuts chunks of bytes at a delimiter, which may lie across two of them."""

    def __init__(self, chunks: AsyncIterator[bytes], delimiter: bytes) -> None:
        self._chunks, self._delimiter = chunks, delimiter
        self._buffer = bytearray(b"\r\n")  # the first delimiter may stand at the beginning, without a line's end

    async def skip_preamble(self) -> None:
        async for _ in self.content(_MOST_HEADER_BYTES):
            pass

    async def next_header(self) -> bytes | None:
        """Return the header of the part behind a delimiter; None behind the last one."""
        while len(self._buffer) < 2:
            await self._more()
        if self._buffer.startswith(b"--"):
            async for _ in self._chunks:  # an epilogue: the connection goes on behind it
                pass
            return None
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > _MOST_HEADER_BYTES:
                raise bad_request("The header of a part of the form is too long.", None, "invalid_form")
            await self._more()
        header = bytes(self._buffer[2:end])
        del self._buffer[: end + 2]  # the line's end that is left begins the delimiter of an empty part
        return header

    async def content(self, most: int | None = None) -> AsyncIterator[bytes]:
        """Yield the bytes up to the next delimiter, and pass that; `most` of them are allowed."""
        size, unread_line_end = 0, 2
        while True:
            end = self._buffer.find(self._delimiter)
            stop = max(len(self._buffer) - len(self._delimiter) + 1, 0) if end < 0 else end
            piece = bytes(self._buffer[:stop])
            del self._buffer[: stop if end < 0 else end + len(self._delimiter)]
            skipped = min(unread_line_end, len(piece))
            piece, unread_line_end = piece[skipped:], unread_line_end - skipped
            size += len(piece)
            if most is not None and size > most:
                raise bad_request("A field of the form is too long.", None, "invalid_form")
            if piece:
                yield piece
            if end >= 0:
                return
            await self._more()

    async def _more(self) -> None:
        chunk = await anext(self._chunks, None)
        if chunk is None:
            raise bad_request("The upload ended before the last boundary of its form.", None, "incomplete_upload")
        self._buffer += chunk
