"""A form is read the same wherever its bytes are cut, and what is no form is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.batches.uploads import Form, boundary_of, read_form
from pipeline.openai.errors import OpenAIError

PURPOSE = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
FILE = b'Content-Disposition: form-data; name="file"; filename="%s"\r\nContent-Type: application/jsonl\r\n\r\n%s'


def form_of(*parts: bytes, boundary: bytes = b"b0", end: bytes = b"--\r\n") -> bytes:
    return b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + boundary + end


def read(body: bytes, cuts: list[int] | None = None, boundary: bytes = b"b0") -> tuple[Form, bytes]:
    written = bytearray()

    async def chunks() -> AsyncIterator[bytes]:
        places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts or ())})
        for start, stop in pairwise(places):
            yield body[start:stop]

    form = asyncio.run(read_form(chunks(), boundary, written.extend))
    return form, bytes(written)


@given(
    content=st.lists(st.sampled_from([b"\r\n", b"--b0", b"\r\n--b", b"-", b"a", b"\n", b"{}\n"]), max_size=12).map(
        b"".join
    ),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    file_first=st.booleans(),
)
def test_bytes_come_out_as_they_went_in(content: bytes, cuts: list[int], file_first: bool) -> None:
    if b"\r\n--b0" in b"\r\n" + content:
        return
    parts = [PURPOSE, FILE % ("lines äé.jsonl".encode(), content)]
    form, written = read(b"a preamble\r\n" + form_of(*parts[:: -1 if file_first else 1]) + b"an epilogue", cuts)
    assert written == content
    assert form == Form({"purpose": "batch"}, "lines äé.jsonl")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "incomplete_upload"),
        (form_of(PURPOSE, FILE % (b"a", b"{}"), end=b""), "incomplete_upload"),
        (form_of(PURPOSE, FILE % (b"a", b"{}"))[:-30], "incomplete_upload"),
        (form_of(b"Content-Disposition: form-data\r\n\r\nx"), "invalid_form"),
        (form_of(b"\r\n\r\nx"), "invalid_form"),
        (form_of(*[PURPOSE.replace(b"purpose", b"p%d" % number) for number in range(20)]), "invalid_form"),
        (form_of(PURPOSE + b"x" * 5000), "invalid_form"),
        (form_of(b"X: " + b"x" * 20_000 + b"\r\n" + PURPOSE), "invalid_form"),
        (form_of(FILE % (b"a", b"{}"), FILE % (b"b", b"{}")), "invalid_form"),
        (form_of((FILE % (b"a", b"{}")).replace(b'"file"', b'"other"')), "invalid_form"),
    ],
)
def test_what_is_no_such_form_is_refused(body: bytes, code: str) -> None:
    with pytest.raises(OpenAIError) as refusal:
        read(body, [*range(0, len(body), 7)])
    assert (refusal.value.status, refusal.value.code) == (400, code)


@pytest.mark.parametrize(
    "kind", ["", "application/json", "multipart/form-data", f"multipart/form-data; boundary={'b' * 71}"]
)
def test_the_kind_of_body_is_said(kind: str) -> None:
    with pytest.raises(OpenAIError) as refusal:
        boundary_of(kind)
    assert refusal.value.status == 415
    assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"
