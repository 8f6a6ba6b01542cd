"""Chats with images over a socket: answers are those of the model in Python, and hostile images cost their request."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, OpenAI
from PIL import Image

from drafter import SpeculativeLM
from drafter.errors import RequestError
from pipeline.batches.config import BatchesConfig
from pipeline.serving import images as serving_images
from pipeline.serving.config import LimitsConfig
from pipeline.serving.replica import Answers
from pipeline.settings import ImagesConfig
from tests.pipeline.serving.test_batches import begin, ended, lines, results
from tests.support.images import picture
from tests.support.local_endpoint import served
from tests.support.waiting import PATIENCE

NAME, HOST = "seeing", "pictures.test"
LIMITS = ImagesConfig(hosts=[HOST], bytes=1 << 20, pixels=1_000_000, most=2)
RED = picture(1, 40, 30)


@pytest.fixture(scope="module")
def lm(seeing: Path) -> Iterator[SpeculativeLM]:
    with SpeculativeLM.from_pretrained(seeing, "ngram", max_num_seqs=4, num_draft_tokens=3) as lm:
        yield lm


@pytest.fixture(scope="module")
def address(lm: SpeculativeLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    answers = Answers(lm, "replica", PATIENCE, images=LIMITS)
    batches = BatchesConfig(str(tmp_path_factory.mktemp("batches")))
    with served({NAME: answers}, limits=LimitsConfig(body_bytes=4 << 20), batches=batches) as found:
        yield found


@pytest.fixture
def client(address: str) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    stream = BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def data_uri(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def messages(*urls: str, text: str = "What?") -> list[Any]:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def answer(client: OpenAI, said: list[Any], **more: Any) -> str:
    made = client.chat.completions.create(model=NAME, messages=said, max_tokens=12, temperature=0, **more)
    return str(made.choices[0].message.content)


def test_lines_of_batches_have_images_too(client: OpenAI) -> None:
    said = [messages(data_uri(file_of(one))) for one in (RED, picture(2, 30, 40))] + [messages("data:,no image")]
    asked = {"model": NAME, "max_tokens": 12, "temperature": 0}
    client.with_options(max_retries=9).files.list()  # the folder is taken soon after the start
    batch = ended(client, begin(client, lines([{"messages": one, **asked} for one in said])))
    found = [one["response"]["body"]["choices"][0]["message"] for one in results(client, batch.output_file_id)]
    assert [one["content"] for one in found] == [answer(client, one) for one in said[:2]]
    assert [one["response"]["status_code"] for one in results(client, batch.error_file_id)] == [400]


def test_answers_are_those_of_python(client: OpenAI, lm: SpeculativeLM) -> None:
    place = {"type": "image"}
    for pictures in ([RED], [RED, picture(2, 30, 40)], []):
        prompt = [{"role": "user", "content": [*[place] * len(pictures), {"type": "text", "text": "What?"}]}]
        (wanted,) = lm.generate([lm.encode(prompt, images=pictures)], max_new_tokens=12, temperature=0)
        said = messages(*(data_uri(file_of(one)) for one in pictures))
        assert answer(client, said) == wanted.text
        chunks = client.chat.completions.create(model=NAME, messages=said, max_tokens=12, temperature=0, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == wanted.text


def test_images_are_fetched_from_listed_hosts(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fetch(address: str, most: int, hosts: Any) -> bytes:
        asked.append((address, most, hosts))
        if "gone" in address:
            raise RequestError("its host answers with status 404")
        return file_of(RED)

    monkeypatch.setattr(serving_images, "fetch_web", fetch)  # which has tests of its own: no host can be reached here
    url = f"https://{HOST}/red.png"
    assert answer(client, messages(url)) == answer(client, messages(data_uri(file_of(RED))))
    assert asked == [(url, LIMITS.bytes, [HOST])]
    with pytest.raises(APIStatusError, match=r"gone\.png': its host answers with status 404"):
        answer(client, messages(f"https://{HOST}/gone.png"))


BITMAP = file_of(RED, "BMP")
HOSTILE = {
    "bomb": (data_uri(BITMAP[:18] + struct.pack("<II", 30_000, 30_000) + BITMAP[26:]), "1,000,000 pixels, the limit"),
    "large": (data_uri(file_of(Image.new("RGB", (1200, 900)))), "1,200 × 900 pixels"),
    "long": (data_uri(bytes((1 << 20) + 1)), "1,048,576 bytes, the limit"),
    "torn": (data_uri(file_of(RED)[:-60]), "it is damaged"),
    "type": (data_uri(b"%PDF-1.7"), "not one of PNG, JPEG"),
    "drawing": (data_uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "SVG"),
    "base64": ("data:image/png;base64,????", "not base64"),
    "inside": ("http://127.0.0.1/a.png", "not among"),
    "metadata": ("http://169.254.169.254/latest/meta-data", "not among"),
    "file": ("file:///etc/passwd", "data: URI"),
    "path": ("/etc/passwd", "data: URI"),
}


def test_a_hostile_image_is_an_error_and_others_are_served(client: OpenAI) -> None:
    good = messages(data_uri(file_of(RED)))
    wanted = answer(client, good)

    def refused(url: str) -> str:
        with pytest.raises(APIStatusError) as caught:
            answer(client, messages(url))
        assert caught.value.status_code == 400
        return str(caught.value)

    with ThreadPoolExecutor(4) as threads:
        found = {name: threads.submit(refused, url) for name, (url, _) in HOSTILE.items()}
        others = [threads.submit(answer, client, good) for _ in range(3)]
        for name, (_, why) in HOSTILE.items():
            assert why in found[name].result(), name
        assert [one.result() for one in others] == [wanted] * 3
    with pytest.raises(APIStatusError, match="up to 2 images"):
        answer(client, messages(*[data_uri(file_of(RED))] * 3))
    with pytest.raises(APIStatusError) as caught:
        answer(client, messages("data:image/png;base64," + "A" * (6 << 20)))
    assert caught.value.status_code == 413


def test_a_model_of_text_refuses_images(local: str) -> None:
    client = OpenAI(base_url=f"{local}/v1", api_key="none", max_retries=0)
    with pytest.raises(APIStatusError, match="takes text alone"):
        client.chat.completions.create(model="tiny", messages=messages(data_uri(file_of(RED))))


def test_what_is_made_of_a_clients_images_is_bounded(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_images, "_HELD", 1)  # byte: one request at a time
    good = messages(data_uri(file_of(RED)))
    wanted = answer(client, good)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: answer(client, good), range(4))) == [wanted] * 4
    with pytest.raises(APIStatusError):  # once a prompt was made
        answer(client, good, extra_body={"structured_outputs": {"regex": "("}})
    assert answer(client, good) == wanted
