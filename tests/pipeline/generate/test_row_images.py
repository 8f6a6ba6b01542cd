"""Images of rows, from any input to the arrays that the model takes."""

from __future__ import annotations

import base64
import json
import os
import re
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from drafter.errors import RequestError
from drafter.images.opening import ImageLimits
from drafter.images.processor import ImageProcessor
from drafter.prompt import Prompt, Span
from drafter.requests import SamplingParams
from pipeline.errors import UnavailableError
from pipeline.generate.prompts import PromptSettings
from pipeline.generate.row_images import ImageReading, changed_images, folders_of, images_of
from pipeline.generate.row_requests import make_requests
from pipeline.generate.staging import StagingPlan, stage_files, told_apart
from pipeline.io.column_types import unify
from pipeline.io.files import locate
from pipeline.io.listing import BATCH, PromptSource, list_input
from pipeline.io.parts import StagedInput, pack, unpack
from pipeline.io.prompts import prompt_columns, read_prompts
from pipeline.settings import ReadingConfig, RowImagesConfig
from tests.pipeline.conftest import write_jsonl
from tests.support.images import asked, picture, processor_of
from tests.support.staging import read_parts, staged_input

LIMITS = ImageLimits(bytes=1 << 20, pixels=100_000, images=3)
TEXT, CHAT = (PromptSource(*kind, images_column="picture") for kind in (("prompt", "text"), ("messages", "messages")))
RED, BLUE = picture(1, 40, 30), picture(2, 30, 40)


def png(image: Image.Image) -> bytes:
    stream = BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def data_uri(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


@pytest.fixture(scope="module")
def processor() -> ImageProcessor:
    """That of `seeing`, in this process."""
    return processor_of("llava")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "in" / "pictures"
    folder.mkdir(parents=True)
    (folder / "red.png").write_bytes(png(RED))
    (folder / "blue.png").write_bytes(png(BLUE))
    (folder / "same as red.png").write_bytes(png(RED))
    (folder / "torn.png").write_bytes(png(RED)[:-60])
    return folder


def reading_of(source: Path, prompt_bytes: int = 0) -> ImageReading:
    return ImageReading(LIMITS, *folders_of(RowImagesConfig(), str(source)), prompt_bytes=prompt_bytes)


def made(
    source: Path, model: Path, folder: Path, prompts: PromptSource = TEXT, **reading: Any
) -> tuple[list[dict[str, Any]], list[Prompt | None]]:
    """Rows of an input as they are staged, and their prompts as an engine gets them."""
    settings, listing = ReadingConfig(**reading), list_input(str(source))
    images = reading_of(source)
    plan = StagingPlan(locate(str(folder)), settings, prompts, 100, images=images)
    plan.folder.make_folder()
    parts, seen = stage_files(listing, "00000", plan)
    input_ = StagedInput(plan.folder, tuple(parts), unify(seen, json_objects=listing.of_json))
    staged = pa.concat_tables(read_parts(told_apart(input_, plan)))
    asks = PromptSettings(str(model), False, prompts, settings, SamplingParams(), 200, images=images)
    ((_, requests),) = unpack(pack([("part", make_requests(staged, asks))]))
    rows = staged.drop_columns(["problem"]).append_column("problem", requests["problem"]).to_pylist()
    return rows, read_prompts(requests)


def assert_same(found: Prompt | None, wanted: Prompt) -> None:
    assert found is not None
    assert found == wanted
    assert found.inputs.keys() == wanted.inputs.keys()
    for name, values in wanted.inputs.items():
        np.testing.assert_array_equal(found.inputs[name], values)
        assert found.inputs[name].dtype == values.dtype


def test_a_column_of_images_is_read_in_all_forms(
    seeing: Path, processor: ImageProcessor, pictures: Path, tmp_path: Path
) -> None:
    one, both = [RED], [RED, BLUE]
    rows: list[tuple[Any, list[Image.Image]]] = [
        ("pictures/red.png", one),
        (str(pictures / "red.png"), one),
        (f"file://{pictures}/red.png", one),
        (data_uri(RED), one),
        (["pictures/red.png", "pictures/blue.png"], both),
        ([], []),
        (None, []),
        (np.asarray(RED).tolist(), one),
        ([np.asarray(RED).tolist(), np.asarray(BLUE).tolist()], both),
        ({"path": "pictures/red.png"}, one),
    ]
    source = write_jsonl(tmp_path / "in" / "rows.jsonl", [{"prompt": "What?", "picture": value} for value, _ in rows])
    staged, prompts = made(source, seeing, tmp_path / "staged")
    assert [row["problem"] for row in staged] == [None] * len(rows)
    for prompt, (_, images) in zip(prompts, rows, strict=True):
        assert_same(prompt, processor.encode(asked("What?", len(images)), images))
    # The seed follows from the images, wherever they are: their pixels as JSON are another file than the PNG.
    seeds = [row["seed_name"].partition("+")[0] for row in staged]
    assert seeds[0] == seeds[1] == seeds[2] == seeds[3] == seeds[9]
    assert len({seeds[0], seeds[4], seeds[5]}) == 3


@pytest.mark.parametrize("made", [np.asarray, np.ndarray.tolist])
def test_pixels_are_one_image_or_several(made: Any) -> None:
    colours, channels, grey = np.asarray(RED), np.asarray(RED).transpose(2, 0, 1), np.asarray(RED.convert("L"))
    for pixels in (colours, grey, channels):  # of which the last is refused as it is opened
        assert len(images_of(made(pixels))) == 1
    several = images_of(made(np.stack([colours] * 2)))
    assert [np.array_equal(one, colours) for one in several] == [True, True]
    assert images_of([colours, grey])[1] is grey
    empty: list[Any] = [None, "", [], np.array([])]
    assert [images_of(value) for value in empty] == [[]] * 4


def test_images_in_tables_stay_there(seeing: Path, processor: ImageProcessor, pictures: Path, tmp_path: Path) -> None:
    feature = [
        {"bytes": png(RED), "path": None},
        {"bytes": None, "path": "pictures/red.png"},
        {"bytes": png(BLUE), "path": "gone.png"},
        None,
    ]
    tables: dict[str, tuple[list[Any], list[list[Image.Image]]]] = {
        "feature": (feature, [[RED], [RED], [BLUE], []]),
        "bytes": ([png(RED), png(BLUE), None], [[RED], [BLUE], []]),
        "several": ([feature[:3], [], None], [[RED, RED, BLUE], [], []]),
        "pixels": ([np.asarray(RED).tolist(), np.asarray(BLUE).tolist()], [[RED], [BLUE]]),
    }
    for name, (values, images) in tables.items():
        source = tmp_path / "in" / f"{name}.parquet"
        pa.parquet.write_table(pa.table({"picture": values, "prompt": ["What?"] * len(values)}), source)
        staged, prompts = made(source, seeing, tmp_path / name)
        assert [row["problem"] for row in staged] == [None] * len(values)
        for prompt, some in zip(prompts, images, strict=True):
            assert_same(prompt, processor.encode(asked("What?", len(some)), some))
        if name == "bytes":
            assert staged[0]["images"] == [None]
            assert staged[0]["row"]["picture"] == png(RED)


def test_an_empty_cell_of_a_csv_is_no_image(
    seeing: Path, processor: ImageProcessor, pictures: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in" / "rows.csv"
    source.write_text("prompt,picture\nWhat?,\nWhat?,pictures/red.png\n")
    _, (without, with_one) = made(source, seeing, tmp_path / "staged")
    assert_same(without, processor.encode(asked("What?", 0), []))
    assert_same(with_one, processor.encode(asked("What?"), [RED]))


def test_images_stand_in_messages(seeing: Path, processor: ImageProcessor, pictures: Path, tmp_path: Path) -> None:
    def user(*parts: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [*parts]}]

    text, place = {"type": "text", "text": "What?"}, {"type": "image"}
    rows: list[dict[str, Any]] = [
        {"messages": user({"type": "image_url", "image_url": {"url": data_uri(RED)}}, text)},
        {"messages": user(text, {"type": "image", "path": "pictures/blue.png"})},
        {"messages": user(place, {"type": "image", "url": data_uri(BLUE)}, text), "picture": "pictures/red.png"},
        {"messages": user(text), "picture": ["pictures/red.png"]},
        {"messages": user(text)},
        {"messages": json.dumps(user({"type": "image", "path": "pictures/red.png"}, text))},
    ]
    wanted = [
        (user(place, text), [RED]),
        (user(text, place), [BLUE]),
        (user(place, place, text), [RED, BLUE]),
        (user(place, text), [RED]),
        (user(text), []),
        (user(place, text), [RED]),
    ]
    for kind in ("jsonl", "parquet"):
        source = tmp_path / "in" / f"rows.{kind}"
        if kind == "jsonl":
            write_jsonl(source, rows)
        else:
            several = [row | {"picture": [one] if isinstance(one := row.get("picture"), str) else one} for row in rows]
            pa.parquet.write_table(pa.Table.from_pylist(several[:5]), source)
        staged, prompts = made(source, seeing, tmp_path / kind, CHAT)
        assert [row["problem"] for row in staged] == [None] * len(staged)
        for prompt, (messages, images) in zip(prompts, wanted, strict=False):
            assert_same(prompt, processor.encode(messages, images))
        assert data_uri(RED) not in staged[0]["asked"]  # a digest in its place
        assert staged[0]["seed_name"] == staged[3]["seed_name"].partition("+")[0]


def test_a_broken_image_costs_its_row_alone(seeing: Path, pictures: Path, tmp_path: Path) -> None:
    wrong = {
        "pictures/gone.png": "'.*gone.png': there is no such file",
        "pictures/torn.png": "'.*torn.png': it is damaged",
        "pictures": "no such file",
        "data:image/png;base64,AAAA": "data: URI: it is not one of PNG",
        "http://pictures.test/a.png": "host 'pictures.test' is not among",
        "data:text/html;base64,AAAA": "'text/html'",
        "pictures/\0.png": "'.*0.png': it cannot be read: .*null",
        data_uri(Image.new("L", (1, 300))): "1 × 300 pixels, and may be 200 times as long",
        data_uri(Image.new("L", (400, 300))): "120,000 pixels|400 × 300 pixels, and 100,000",
        "../out.png": "'.*out.png': it is not in the input's folder",
    }
    rows: list[Any] = [
        *({"prompt": "What?", "picture": one} for one in wrong),
        {"prompt": "What?", "picture": [data_uri(RED)] * 4},
    ]
    rows += [
        {"prompt": "", "picture": "pictures/red.png"},
        {"prompt": "What?", "picture": [None]},
        {"prompt": "What?", "picture": 7},
    ]
    rows += [{"prompt": "What?", "picture": "pictures/red.png"}]
    source = write_jsonl(tmp_path / "in" / "rows.jsonl", rows)
    staged, prompts = made(source, seeing, tmp_path / "staged")
    problems = [row["problem"] for row in staged]
    whys = [*wrong.values(), "4 images, and up to 3", "is empty", "must be a path", "must be a path"]
    assert problems[-1] is None
    assert prompts[-1] is not None
    for problem, prompt, why in zip(problems, prompts, whys, strict=False):
        assert prompt is None
        assert problem["type"] == "BadPrompt"
        assert re.search(why, problem["message"]), problem["message"]


def test_an_image_that_changes_meanwhile_is_an_error(seeing: Path, pictures: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in" / "rows.jsonl", [{"prompt": "What?", "picture": "pictures/red.png"}])
    settings = ReadingConfig(images_column="picture")
    reading = reading_of(source)
    staged = staged_input(source, tmp_path / "staged", 3, reading, images_column="picture")
    (part,) = read_parts(staged)
    assert changed_images(staged, reading) is None
    (pictures / "red.png").write_bytes(png(BLUE))
    asks = PromptSettings(str(seeing), False, TEXT, settings, SamplingParams(), 200, images=reading)
    (row,) = make_requests(part, asks).to_pylist()
    assert "has changed since" in row["problem"]["message"]
    assert row["problem"]["type"] == "ImageUnavailable"
    assert changed_images(staged, reading) is not None
    (pictures / "red.png").unlink()
    (row,) = make_requests(part, asks).to_pylist()
    assert row["problem"]["type"] == "ImageUnavailable"


def test_what_a_host_does_not_give_may_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise OSError

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    address, reading = "https://a.test/a.png", ImageReading(LIMITS, hosts=("a.test",))
    with pytest.raises(UnavailableError, match=r"a\.png.*: the host 'a\.test' is not known"):
        reading.given(address, address)
    with pytest.raises(RequestError, match="not among those") as refused:
        replace(reading, hosts=()).given(address, address)
    assert not isinstance(refused.value, UnavailableError)


@pytest.mark.parametrize("change", ["replaced", "same size and time", "gone", "there at last", "allowed at last"])
def test_images_that_rows_name_are_known_by_their_files(pictures: Path, tmp_path: Path, change: str) -> None:
    names = ["pictures/red.png", "pictures/late.png", "../out.png", data_uri(RED), "https://a.test/a.png"]
    source = write_jsonl(tmp_path / "in" / "rows.jsonl", [{"prompt": "What?", "picture": one} for one in names])
    reading, file = reading_of(source), pictures / "red.png"
    (tmp_path / "out.png").write_bytes(png(RED))
    staged = staged_input(source, tmp_path / "staged", 3, reading, images_column="picture")
    assert changed_images(staged, reading) is None
    if change == "gone":
        file.unlink()
    elif change == "allowed at last":
        allowed = RowImagesConfig(folders=[str(tmp_path)])
        reading = ImageReading(LIMITS, *folders_of(allowed, str(source)))
    elif change == "there at last":
        (pictures / "late.png").write_bytes(png(BLUE))
    else:
        before = file.stat()
        file.write_bytes(png(RED)[:-1] + b"x" if change == "same size and time" else png(BLUE))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns if change == "same size and time" else 1))
    assert changed_images(staged, reading) is not None


def test_a_text_without_a_template_has_marks(
    seeing: Path, processor: ImageProcessor, pictures: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": text, "picture": "pictures/red.png"} for text in ("What?", "Is <image> red?")]
    source = write_jsonl(tmp_path / "in" / "rows.jsonl", rows)
    _, prompts = made(source, seeing, tmp_path / "staged", chat=False)
    for prompt, text in zip(prompts, ("<image>What?", "Is <image> red?"), strict=True):
        assert_same(prompt, processor.encode(text, [RED]))


def test_lines_of_a_batch_have_images(seeing: Path, processor: ImageProcessor, pictures: Path, tmp_path: Path) -> None:
    def line(name: str, url: str) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": url, "detail": "high"}}, {"type": "text", "text": "What?"}]
        body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
        return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}

    urls = [data_uri(RED), data_uri(BLUE), "pictures/red.png", f"file://{pictures}/red.png", "https://a.test/a.png"]
    source = write_jsonl(tmp_path / "in" / "rows.jsonl", [line(str(n), url) for n, url in enumerate(urls)])
    staged, prompts = made(source, seeing, tmp_path / "staged", BATCH)
    for prompt, image in zip(prompts[:2], (RED, BLUE), strict=True):
        assert_same(prompt, processor.encode(asked("What?"), [image]))
    assert prompts[2:] == [None] * 3
    messages = [row["problem"]["message"] for row in staged[2:]]
    assert ["image_url.url' " in one or "image_url.url':" in one for one in messages[:2]] == [True, True]
    assert "not among" in messages[2]


def test_a_model_of_text_refuses_images(model: Path, tmp_path: Path) -> None:
    parts = [{"type": "image_url", "image_url": {"url": data_uri(RED)}}]
    source = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": parts}]}])
    (part,) = read_parts(staged_input(source, tmp_path / "staged"))
    asks = PromptSettings(
        str(model), False, PromptSource("messages", "messages"), ReadingConfig(), SamplingParams(), 200
    )
    (row,) = make_requests(part, asks).to_pylist()
    assert "takes text alone" in row["problem"]["message"]


def test_parts_are_small_where_images_become_large(pictures: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "What?", "picture": "pictures/red.png" if n < 8 else None} for n in range(20)]
    source = write_jsonl(tmp_path / "in" / "rows.jsonl", rows)
    staged = staged_input(source, tmp_path / "staged", 12, reading_of(source, 64 << 20), images_column="picture")
    assert [part.rows for part in staged.parts] == [3, 3, 12, 2]


def test_prompts_pass_through_columns() -> None:
    arrays = {"pixel_values": np.arange(12, dtype=np.float32).reshape(1, 3, 4), "sizes": np.array([[3, 4]])}
    bare = [Prompt([1, 2]), None]
    assert prompt_columns(bare, images=False).keys() == {"prompt_ids"}
    seen = Prompt([5, 6, 7], (Span(1, 3, b"\x00\xff"),), arrays)
    for columns in (prompt_columns(bare, images=False), prompt_columns([*bare, seen], images=True)):
        ((_, rows),) = unpack(pack([("part", pa.table(columns))]))
        assert read_prompts(rows)[:2] == bare
    assert_same(read_prompts(rows)[2], seen)
