"""A row depends on itself alone: among others it asks for what it asks for by itself, and its columns say the same."""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.requests import SamplingParams
from pipeline.errors import InputError, RowError
from pipeline.generate.row_requests import row_sampling
from pipeline.io.reading import without_nulls
from pipeline.openai.batch import parse_line
from pipeline.openai.errors import OpenAIError, parse_json
from pipeline.openai.requests import parse_chat, parse_completion
from tests.support.properties import examples
from tests.support.staging import staged_table


@contextmanager
def folder() -> Iterator[Path]:
    """A new folder; a fixture would be one for all examples."""
    with tempfile.TemporaryDirectory() as path:
        (Path(path) / "in").mkdir()
        yield Path(path)


def staged_rows(place: Path, **reading: Any) -> list[dict[str, Any]]:
    """Rows as they are staged: `asked` as the job reads it, the columns, and the problem."""
    tables = staged_table(place / "in", place / "staged", **reading)
    return [
        {**row, "asked": None if row["asked"] is None else json.loads(row["asked"])}
        for table in tables
        for row in table.to_pylist()
    ]


# JSON lines

numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=3)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
json_rows = st.fixed_dictionaries(
    {"messages": anything},
    optional={"seed": anything, "sampling": anything, "meta": anything, "number": numbers, "list": st.lists(numbers)},
)


def says_the_same(cell: Any, own: Any) -> bool:
    """Whether a column has a row's value, as it is or as JSON.

    A whole number outside of objects may be a float, and an object have nulls for fields of other rows.
    """
    if isinstance(cell, str) and not isinstance(own, str):
        cell = json.loads(cell)
    if isinstance(cell, list) and isinstance(own, list):
        return len(cell) == len(own) and all(map(says_the_same, cell, own))
    if isinstance(cell, float) and type(own) is int:
        return cell == own
    return json.dumps(without_nulls(cell)) == json.dumps(without_nulls(own))


two_or_more = st.lists(json_rows, min_size=2, max_size=6)


@given(two_or_more, st.integers(1, 4))
@examples(400)
def test_a_row_of_json_among_others(rows: list[dict[str, Any]], rows_per_part: int) -> None:
    with folder() as place:
        for number, some in enumerate((rows[::2], rows[1::2])):
            lines = "".join(json.dumps(row) + "\n" for row in some)
            (place / "in" / f"{number}.jsonl").write_text(lines)
        found = staged_rows(place, messages_column="messages", rows_per_part=rows_per_part)
    for row, staged in zip([*rows[::2], *rows[1::2]], found, strict=True):
        own = {name: row[name] for name in ("messages", "seed", "sampling") if row.get(name) is not None}
        if isinstance(own.get("sampling"), bool | int | float | list | dict):
            own["sampling"] = json.dumps(own["sampling"], ensure_ascii=False)
        assert json.dumps(staged["asked"], sort_keys=True) == json.dumps(own, sort_keys=True)
        for name, cell in staged["row"].items():
            assert says_the_same(cell, row.get(name)), (name, cell, row.get(name))


# Tables

integers = st.integers(-(2**63), 2**63 - 1)


def of(kind: pa.DataType, values: st.SearchStrategy[Any], stored: pa.DataType | None = None) -> Any:
    """Columns of a type, drawn as its values or, if Python cannot hold these, as those of another type."""

    def column(drawn: list[Any]) -> pa.Array:
        made = pa.array(drawn, kind if stored is None else stored)
        return made if stored is None else made.view(kind)

    return st.lists(st.none() | values, min_size=3, max_size=3).map(column)


def encoded(kind: pa.DataType, plain: pa.DataType, values: st.SearchStrategy[Any]) -> Any:
    """Columns in an encoding, each with the same column in its plain type."""
    return st.lists(st.none() | values, min_size=3, max_size=3).map(lambda v: (pa.array(v, kind), pa.array(v, plain)))


small = st.integers(-100, 100)
texts = st.text(max_size=3)
plain_columns = st.one_of(
    of(pa.int64(), integers),
    of(pa.uint8(), st.integers(0, 255)),
    of(pa.float32(), st.floats(width=32, allow_nan=False)),
    of(pa.float16(), st.floats(width=16, allow_nan=False)),
    of(pa.bool_(), st.booleans()),
    of(pa.string(), st.binary(max_size=3), pa.binary()),  # which need not be UTF-8
    of(pa.large_string(), texts),
    of(pa.binary(), st.binary(max_size=3)),
    of(pa.timestamp("us", "Europe/Berlin"), integers, pa.int64()),  # to the year 294247, and back
    of(pa.timestamp("ns"), integers, pa.int64()),
    of(pa.timestamp("ms"), integers, pa.int64()),
    of(pa.date32(), st.integers(-(2**31), 2**31 - 1), pa.int32()),
    of(pa.duration("us"), integers, pa.int64()),
    of(pa.time64("us"), st.integers(0, 86_399_999_999), pa.int64()),
    of(pa.decimal128(38, 2), st.decimals(-(10**30), 10**30, places=2)),
    of(pa.decimal256(60, 0), st.integers(-(10**50), 10**50)),
    of(pa.list_(pa.int64()), st.lists(integers, max_size=2)),
    of(pa.list_(pa.float32(), 2), st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2)),
    of(pa.struct([("a", pa.int64()), ("b.c", pa.string())]), st.fixed_dictionaries({"a": small, "b.c": texts})),
    of(pa.map_(pa.string(), pa.int64()), st.dictionaries(texts, integers, max_size=2).map(lambda m: list(m.items()))),
    of(pa.null(), st.none()),
    of(pa.uuid(), st.uuids().map(lambda one: one.bytes)),
    of(pa.json_(), st.just('{"a": 1}')),
    st.lists(small, min_size=3, max_size=3).map(
        lambda v: pa.ExtensionArray.from_storage(pa.bool8(), pa.array(v, pa.int8()))
    ),
    st.lists(st.floats(width=32, allow_nan=False), min_size=6, max_size=6).map(
        lambda v: pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.float32(), (2,)), pa.FixedSizeListArray.from_arrays(pa.array(v, pa.float32()), 2)
        )
    ),
)
encoded_columns = st.one_of(
    encoded(pa.dictionary(pa.int8(), pa.string()), pa.string(), texts),
    encoded(pa.string_view(), pa.string(), texts),
    encoded(pa.binary_view(), pa.binary(), st.binary(max_size=20)),
    encoded(pa.list_view(pa.string_view()), pa.list_(pa.string()), st.lists(texts, max_size=2)),
    encoded(pa.large_list_view(pa.int64()), pa.large_list(pa.int64()), st.lists(integers, max_size=2)),
    encoded(
        pa.struct([("a", pa.dictionary(pa.int8(), pa.string()))]),
        pa.struct([("a", pa.string())]),
        st.fixed_dictionaries({"a": texts}),
    ),
    encoded(
        pa.list_(pa.struct([("a", pa.dictionary(pa.int8(), pa.string()))])),
        pa.list_(pa.struct([("a", pa.string())])),
        st.lists(st.none() | st.fixed_dictionaries({"a": texts}), max_size=2),
    ),
)
columns = plain_columns.map(lambda column: (column, column)) | encoded_columns


def write_table(table: pa.Table, path: Path) -> None:
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path)
        return
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def check_table(drawn: tuple[pa.Array, pa.Array], suffix: str, rows_per_part: int) -> None:
    column, plain = drawn
    with folder() as place:
        write_table(pa.table({"prompt": ["a", "b", "c"], "x": column}), place / "in" / f"a{suffix}")
        parts = staged_table(place / "in", place / "staged", rows_per_part)
    found = pa.concat_arrays([pa.Table.from_struct_array(rows["row"])["x"].combine_chunks() for rows in parts])
    assert found.type == plain.type
    assert found.equals(plain)
    assert [json.loads(asked)["prompt"] for rows in parts for asked in rows["asked"].to_pylist()] == ["a", "b", "c"]


@given(columns, st.sampled_from([".parquet", ".arrow"]), st.integers(1, 3))
@examples(500)
def test_a_column_of_a_table_passes_through(drawn: tuple[pa.Array, pa.Array], suffix: str, rows_per_part: int) -> None:
    check_table(drawn, suffix, rows_per_part)


@pytest.mark.parametrize("nested", [lambda kind: kind, pa.list_])
def test_nulls_above_an_empty_dictionary(nested: Callable[[pa.DataType], pa.DataType]) -> None:
    """Arrow's own builder refers to its first entry, which is not there."""
    rows = [None, None, None] if nested is not pa.list_ else [[None], [], None]
    kinds = [nested(pa.struct([("a", kind)])) for kind in (pa.dictionary(pa.int8(), pa.string()), pa.string())]
    check_table((pa.array(rows, kinds[0]), pa.array(rows, kinds[1])), ".arrow", 2)


@pytest.mark.slow
@given(plain_columns, plain_columns)
@examples(400)
def test_columns_of_two_files_change_no_value_or_are_refused(one: pa.Array, other: pa.Array) -> None:
    with folder() as place:
        for name, column in (("a", one), ("b", other)):
            write_table(pa.table({"prompt": ["a", "b", "c"], "x": column}), place / "in" / f"{name}.arrow")
        try:
            parts = staged_table(place / "in", place / "staged", 2)
        except InputError as refusal:
            assert "and no type holds both" in str(refusal)  # noqa: PT017 - either is right, and which depends on both
            return
    found = pa.concat_arrays([pa.Table.from_struct_array(rows["row"])["x"].combine_chunks() for rows in parts])
    # Taken, not sliced: Arrow casts the values of lists outside of a slice, too.
    for column, kept in ((one, found.take(pa.array([0, 1, 2]))), (other, found.take(pa.array([3, 4, 5])))):
        assert kept.is_null().equals(column.is_null())
        became_text = pa.types.is_string(found.type) and not pa.types.is_string(column.type)
        if not (became_text or pa.types.is_struct(column.type) or pa.types.is_null(column.type)):
            assert kept.cast(column.type).equals(column)


def test_rows_of_csv_stay_text(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "seed": "7", "x": "007"}, {"prompt": "two\nlines", "seed": "", "x": '"1.0"'}]
    (tmp_path / "in").mkdir()
    with (tmp_path / "in" / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "seed", "x"])
        writer.writeheader()
        writer.writerows(rows)
    found = staged_rows(tmp_path)
    assert [row["row"] for row in found] == rows
    assert [row["asked"] for row in found] == [{"prompt": row["prompt"], "seed": row["seed"]} for row in rows]


# A row's own settings

sampling_rows = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "top_k": st.integers(0, 9),
        "max_new_tokens": st.integers(1, 9),
        "stop": st.lists(st.text(min_size=1, max_size=3), max_size=2),
        "seed": st.integers(0, 2**63 - 1),
        "logit_bias": st.dictionaries(st.integers(0, 99).map(str), st.floats(-9, 9), min_size=1, max_size=3),
        "logprobs": st.integers(0, 3),
        "ignore_eos": st.booleans(),
    },
)


@given(st.lists(sampling_rows, min_size=1, max_size=5), st.booleans())
@examples(30)
def test_own_settings_in_a_table_are_those_of_the_row(rows: list[dict[str, Any]], as_maps: bool) -> None:
    """pyarrow makes one struct of all rows' settings, in which what a row has not is null; or keys are a map's."""
    sampling = pa.array([{"seed": None, **row} for row in rows])
    if as_maps:
        names = [field.name for field in sampling.type]
        biases = [
            None if "logit_bias" not in row else [(int(k), v) for k, v in row["logit_bias"].items()] for row in rows
        ]
        fields = [
            pa.array(biases, pa.map_(pa.int32(), pa.float64())) if n == "logit_bias" else sampling.field(n)
            for n in names
        ]
        sampling = pa.StructArray.from_arrays(fields, names)
    with folder() as place:
        write_table(pa.table({"prompt": ["x"] * len(rows), "sampling": sampling}), place / "in" / "a.parquet")
        found = staged_rows(place)
    for own, staged in zip(rows, found, strict=True):
        assert staged["problem"] is None
        read = row_sampling(SamplingParams(), "x", staged["asked"], "sampling")
        assert read == row_sampling(SamplingParams(), "x", {"sampling": own}, "sampling")


def test_settings_that_are_all_a_map(tmp_path: Path) -> None:
    settings_column = pa.array(
        [[("temperature", 0.5), ("top_k", None)], [("top_k", 3.0)]], pa.map_(pa.string(), pa.float64())
    )
    (tmp_path / "in").mkdir()
    write_table(pa.table({"prompt": ["x", "y"], "sampling": settings_column}), tmp_path / "in" / "a.parquet")
    first, second = (row_sampling(SamplingParams(), "x", row["asked"], "sampling") for row in staged_rows(tmp_path))
    unset = SamplingParams()
    assert (first.temperature, first.top_k) == (0.5, unset.top_k)
    assert (second.temperature, second.top_k) == (unset.temperature, 3)


def test_chats_in_a_table_lack_what_is_null(tmp_path: Path) -> None:
    """A part of an image beside it must not give a part of text an address."""
    chats: list[Any] = [
        [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image", "url": "u"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "n"}],
    ]
    (tmp_path / "in").mkdir()
    write_table(pa.table({"messages": chats}), tmp_path / "in" / "a.parquet")
    assert [row["asked"] for row in staged_rows(tmp_path)] == [{"messages": chat} for chat in chats]


# What cannot be read costs its row


def test_a_prompt_that_is_not_utf8_costs_its_row(tmp_path: Path) -> None:
    prompts = pa.array([b"good", b"caf\xe9", b"good too"]).view(pa.string())
    (tmp_path / "in").mkdir()
    write_table(pa.table({"prompt": prompts, "other": prompts}), tmp_path / "in" / "a.parquet")
    (rows,) = staged_table(tmp_path / "in", tmp_path / "staged")
    first, second, third = rows["problem"].to_pylist()
    assert (first, third) == (None, None)
    assert second["type"] == "BadPrompt"
    assert second["message"] == "column 'prompt' cannot be read: it is not UTF-8: byte 4 is 0xe9"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_settings_without_end_cost_their_row(kind: str, tmp_path: Path) -> None:
    biases = {str(token): 1.0 for token in range(100_000)}
    (tmp_path / "in").mkdir()
    if kind == "jsonl":
        rows = [{"prompt": "x", "sampling": {"logit_bias": biases}}, {"prompt": "y", "sampling": {"top_k": 1}}]
        (tmp_path / "in" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        maps = pa.array([list(biases.items()), None], pa.map_(pa.string(), pa.float64()))
        sampling = pa.StructArray.from_arrays([maps, pa.array([None, 1])], ["logit_bias", "top_k"])
        write_table(pa.table({"prompt": ["x", "y"], "sampling": sampling}), tmp_path / "in" / "a.parquet")
    long, good = staged_rows(tmp_path)
    assert long["problem"]["type"] == "BadSampling"
    assert "up to 1 MiB are read" in long["problem"]["message"]
    assert good["problem"] is None
    assert row_sampling(SamplingParams(), "y", good["asked"], "sampling").top_k == 1


# Lines of a batch

bodies = st.fixed_dictionaries(
    {"model": st.just("m")},
    optional={
        "messages": anything | st.just([{"role": "user", "content": "hello"}]),
        "prompt": anything,
        "max_tokens": numbers | st.sampled_from([2.0, 2, 0, -1, "2", None]),
        "temperature": numbers | st.floats(0, 2),
        "n": st.sampled_from([1, 2, 2.0, 1.5, True]),
        "stop": anything,
        "seed": numbers,
        "logit_bias": anything | st.dictionaries(st.integers(0, 9).map(str), st.floats(-200, 200)),
        "metadata": anything,
    },
)
batch_lines = st.fixed_dictionaries(
    {
        "method": st.just("POST") | anything,
        "url": st.sampled_from(["/v1/chat/completions", "/v1/completions"]) | anything,
        "body": bodies | anything,
    }
)


def answer_to(line: dict[str, Any]) -> Any:
    """What the endpoint makes of a body that is sent to it."""
    body = parse_json(json.dumps(line["body"]).encode())
    return parse_chat(body) if line["url"] == "/v1/chat/completions" else parse_completion(body)


@given(st.lists(batch_lines, min_size=1, max_size=4))
@examples(400)
def test_a_line_of_a_batch_is_read_as_the_endpoint_reads_its_body(lines: list[dict[str, Any]]) -> None:
    with folder() as place:
        text = "".join(json.dumps({"custom_id": str(n), **line}) + "\n" for n, line in enumerate(lines))
        (place / "in" / "a.jsonl").write_text(text)
        found = {row["request_id"].rpartition("#")[0]: row for row in staged_rows(place, format="openai")}
    assert len(found) == len(lines)
    for number, line in enumerate(lines):
        staged = found[str(number)]
        if line["method"] != "POST" or line["url"] not in ("/v1/chat/completions", "/v1/completions"):
            assert staged["problem"]["type"] == "BadRequest"
        elif isinstance(line["body"], dict):
            try:
                expected = answer_to(line)
            except OpenAIError as error:
                assert staged["problem"]["message"] == error.message  # noqa: PT017 - both must say the same
            else:
                assert parse_line(staged["asked"]) == expected


def test_a_whole_number_in_a_body_may_be_a_float() -> None:
    chat = {"method": "POST", "url": "/v1/chat/completions"}
    body = '{"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2.0}'
    assert parse_line({**chat, "body": body}).settings["max_new_tokens"] == 2


def test_settings_of_rows_that_are_wrong_are_refused_by_row() -> None:
    with pytest.raises(RowError, match=r"top_k must be an integer of at least 0, not 1\.5"):
        row_sampling(SamplingParams(), "x", {"sampling": {"top_k": 1.5}}, "sampling")
