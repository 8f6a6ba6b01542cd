"""The rows of a job and those of a stage of Ray Data have one prompt, or one error."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.data.block import BlockAccessor

from drafter.images.opening import ImageLimits
from drafter.prompt import Prompt
from drafter.requests import SamplingParams
from pipeline.dataset.prompt_stage import add_prompts, make_prompts, take_prompts
from pipeline.generate.prompts import PromptSettings, encoder_of
from pipeline.generate.row_images import ImageReading, folders_of
from pipeline.generate.row_requests import make_requests
from pipeline.io.listing import PromptSource
from pipeline.io.prompts import read_prompts
from pipeline.settings import ReadingConfig, RowImagesConfig
from tests.support.images import picture
from tests.support.staging import read_parts, staged_input

LONGEST = 120


def png(seed: int) -> bytes:
    stream = BytesIO()
    picture(seed, 40, 30).save(stream, "PNG")
    return stream.getvalue()


RED = png(1)
URI = f"data:image/png;base64,{base64.b64encode(RED).decode()}"
TEXT, PLACE = {"type": "text", "text": "What?"}, {"type": "image"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an image in `in/`, and of one that is not there."""
    root = tmp_path_factory.mktemp("images")
    (root / "in").mkdir()
    (root / "in" / "blue.png").write_bytes(png(2))
    (root / "out.png").write_bytes(RED)
    return root


def images(root: str) -> tuple[list[Any], list[Any]]:
    """Images of a row that can be read, and others."""
    one, two = {"bytes": RED, "path": None}, {"bytes": None, "path": f"{root}/in/blue.png"}
    wrong: list[dict[str, Any]] = [
        {"bytes": None, "path": f"{root}/in/../out.png"},
        {"bytes": None, "path": f"{root}/in/gone.png"},
        {"bytes": None, "path": "s3://bucket/a.png?endpoint_override=127.0.0.1"},
        {"bytes": None, "path": "http://a.test/a.png"},
        {"bytes": RED[:-40], "path": None},
    ]
    return [None, [], [one], [two], [one, two]], [[one] * 3, [None], *([broken, two] for broken in wrong)]


def said(kind: str) -> tuple[list[Any], list[Any]]:
    """Prompts that go with any number of images, and others."""
    long = "a" * 4 * LONGEST
    if kind == "prompt":
        return ["What?", "Who?"], [None, " ", "Is <image> red?", "<image><image>", long]
    url = {"type": "image_url", "image_url": {"url": URI}}
    half = {"type": "text", "text": "\ud83d"}
    contents: list[Any] = ["<image>", long, [PLACE, TEXT], [url, TEXT], [TEXT, PLACE, url], [{"type": "sound"}]]
    contents += ["\ud83d", [url, half]]
    others = [json.dumps([{"role": "user", "content": one}]) for one in contents]
    return [json.dumps([{"role": "user", "content": one}]) for one in ("What?", [TEXT])], [
        *others,
        "[]",
        "[",
        " ",
        None,
    ]


def prompts_of_job(table: pa.Table, kind: str, asks: PromptSettings, folder: Path) -> list[Prompt | str]:
    pyarrow.parquet.write_table(table, folder / "in" / "rows.parquet")
    column = asks.source.images_column
    reading: dict[str, Any] = {
        f"{'messages' if kind == 'messages' else 'prompt'}_column": kind,
        "images_column": column,
    }
    staged = staged_input(folder / "in" / "rows.parquet", folder / "staged", 100, asks.images, **reading)
    (rows,) = read_parts(staged)
    requests = make_requests(rows, asks)
    problems = [problem and problem["message"] for problem in requests["problem"].to_pylist()]
    found = zip(read_prompts(requests), problems, strict=True)
    return [problem if prompt is None else prompt for prompt, problem in found]


def assert_alike(job: list[Prompt | str], stage: list[Prompt | str]) -> None:
    assert job == stage
    for one, other in zip(job, stage, strict=True):
        if isinstance(one, Prompt) and isinstance(other, Prompt):
            assert one.inputs.keys() == other.inputs.keys()
            assert all(np.array_equal(one.inputs[name], other.inputs[name]) for name in one.inputs)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(["messages", "prompt"]), sees=st.booleans())
def test_a_row_has_one_prompt_or_one_error(
    root: Path, seeing: Path, model: Path, data: st.DataObject, kind: str, sees: bool
) -> None:
    good, others = said(kind)
    seen, unseen = images(str(root)) if sees else ([None], [None])
    # One fault a row: which of two is told is not said.
    row = st.tuples(*map(st.sampled_from, (good, unseen))) | st.tuples(*map(st.sampled_from, (good + others, seen)))
    rows = data.draw(st.lists(row, min_size=8, max_size=16))
    count, beside = len(rows), [images for _, images in rows]
    columns = {kind: pa.array([prompt for prompt, _ in rows], pa.string())}
    of_images = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    table = pa.table({"id": [str(n) for n in range(count)], **columns, "images": pa.array(beside, of_images)})
    limits = ImageLimits(1 << 20, 100_000, 2)
    read = ImageReading(limits, *folders_of(RowImagesConfig(), str(root / "in"))) if sees else None
    name = str(seeing) if sees else str(model)
    source = PromptSource(kind, "messages" if kind == "messages" else "text", images_column="images" if sees else None)
    asks = PromptSettings(name, False, source, ReadingConfig(chat=False), SamplingParams(), LONGEST, images=read)
    stage = make_prompts(table, asks, encoder_of(name, False, sees))
    assert_alike(prompts_of_job(table, kind, asks, root), list(stage))
    if sees:
        block, handed_on = take_prompts(add_prompts(table, asks))
        assert block == table
        assert handed_on is not None
        assert_alike(list(handed_on), list(stage))


@pytest.mark.parametrize("sees", [False, True])
def test_half_a_character_in_messages_as_text_is_an_error_of_its_row(
    root: Path, seeing: Path, model: Path, sees: bool
) -> None:
    name, half = str(seeing) if sees else str(model), {"type": "text", "text": "\ud83d"}
    url = {"type": "image_url", "image_url": {"url": URI}}
    contents: list[Any] = ["What?", "\ud83d", [half, url] if sees else [half]]
    table = pa.table({"messages": [json.dumps([{"role": "user", "content": one}]) for one in contents]})
    read = ImageReading(ImageLimits(1 << 20, 100_000, 2)) if sees else None
    source = PromptSource("messages", "messages")
    asks = PromptSettings(name, False, source, ReadingConfig(chat=False), SamplingParams(), LONGEST, images=read)
    stage = make_prompts(table, asks, encoder_of(name, False, sees))
    assert isinstance(stage[0], Prompt)
    assert list(stage[1:]) == ["column 'messages': it has half a character: an unpaired surrogate"] * 2
    assert_alike(prompts_of_job(table, "messages", asks, root), list(stage))


@pytest.mark.parametrize("sees", [False, True])
def test_numbers_that_are_no_ids_are_errors_of_their_rows(seeing: Path, model: Path, sees: bool) -> None:
    table = pa.table({"prompt_token_ids": [[5, 6], [5, 2**31], [-1], [5, 2**31 - 1], [2**62]]})
    name, read = str(seeing) if sees else str(model), ImageReading(ImageLimits(1 << 20, 100_000, 2)) if sees else None
    source = PromptSource("prompt_token_ids")
    asks = PromptSettings(name, False, source, ReadingConfig(chat=False), SamplingParams(), LONGEST, images=read)
    stage = make_prompts(table, asks, encoder_of(name, False, sees))
    assert stage[::3] == [Prompt([5, 6]), Prompt([5, 2**31 - 1])]
    for place, strange in ((1, 2**31), (2, -1), (4, 2**62)):
        assert stage[place] == f"column 'prompt_token_ids' has {strange}, which is no token's id"
    if sees:
        _, handed_on = take_prompts(add_prompts(table, asks))
        assert handed_on is not None
        assert_alike(list(handed_on), list(stage))


@pytest.mark.parametrize(
    ("column", "prompt"),
    [("messages", [{"role": "user", "content": [TEXT]}]), ("prompt_token_ids", [5, 6])],
)
def test_arrays_of_numpy_are_the_lists_that_they_were(model: Path, column: str, prompt: list[Any]) -> None:
    """In Ray's own format of batches, which are made arrays at any depth."""
    table = pa.table({column: [prompt]})
    batch = BlockAccessor.for_block(table).to_batch_format("numpy")
    block = BlockAccessor.for_block(BlockAccessor.batch_to_block(batch)).to_arrow()
    assert block.schema != table.schema
    asks = PromptSettings(
        str(model), False, PromptSource(column, "messages"), ReadingConfig(chat=False), SamplingParams(), LONGEST
    )
    (made,), (plain,) = (make_prompts(one, asks, encoder_of(str(model), False, False)) for one in (block, table))
    assert made == plain
    assert isinstance(made, Prompt)


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        ("prompt", "What?", "text alone"),
        ("messages", json.dumps([{"role": "user", "content": "What?"}]), "text alone"),
        ("prompt_token_ids", [5, 6, 7], "no places for images"),
    ],
)
def test_no_row_with_images_is_answered_blind(model: Path, column: str, value: Any, why: str) -> None:
    """By a model of text, or by one whose processor cannot be loaded."""
    table = pa.table({column: [value] * 3, "images": pa.array([[RED], [], None], pa.list_(pa.binary()))})
    asks = PromptSettings(str(model), False, PromptSource(column), ReadingConfig(chat=False), SamplingParams(), LONGEST)
    broken, *others = make_prompts(table, asks, encoder_of(str(model), False, False))
    assert isinstance(broken, str)
    assert why in broken
    assert all(isinstance(one, Prompt) for one in others)
