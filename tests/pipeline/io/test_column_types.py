"""Columns whose types differ come together without a change of any value, or become text."""

from __future__ import annotations

import io
import json
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from pipeline.errors import InputError
from pipeline.io.column_types import conform, free_name, infer_column, python_values, seen_types, stored_type, unify
from pipeline.io.reading import without_nulls


def together(*columns: pa.Array, json_objects: bool = False) -> list[Any]:
    """Values of columns of several files, brought to one type."""
    seen = [one for n, column in enumerate(columns) for one in seen_types(pa.table({"x": column}), f"{n}.parquet")]
    kind = unify(seen, json_objects=json_objects).field("x").type
    return [value for column in columns for value in conform(column, kind).to_pylist()]


@pytest.mark.parametrize(
    ("name", "theirs", "free"),
    [("x", ["x"], "x"), ("text", ["text"], "input_text"), ("text", ["text", "input_text"], "input_input_text")],
)
def test_input_columns_give_way(name: str, theirs: list[str], free: str) -> None:
    assert free_name(name, {"text", "seed"}, theirs) == free


def nested(levels: int, value: Any = 1) -> Any:
    """An object in an object, and a list in every second one."""
    for level in range(levels):
        value = {"x": value} if level % 2 else [value]
    return value


@pytest.mark.parametrize(
    "values",
    [
        [{}, None, {}],
        [[{}], [], None],
        [{"a": 1, "b": {}}],
        [nested(58)],
        [nested(150)],
    ],
    ids=["always {}", "lists of {}", "a field that is always {}", "58 levels", "150 levels"],
)
def test_what_parquet_cannot_hold_is_text(values: list[Any]) -> None:
    column = infer_column(values)
    stored = conform(column, stored_type(column.type))
    assert stored.type == pa.string()
    assert [text and json.loads(text) for text in stored.to_pylist()] == values


@pytest.mark.parametrize(
    "values",
    [[{"a": None}], [[]], [nested(48)], [{"a": {"b": 1}}, {"a": {"b": None}}], [1.5], ["x"], [None], [[1, 0.5]]],
)
def test_what_parquet_can_hold_stays_as_it_is(values: list[Any]) -> None:
    column = infer_column(values)
    assert stored_type(column.type) == column.type
    file = io.BytesIO()
    pa.parquet.write_table(pa.table({"row": pa.StructArray.from_arrays([column], names=["x"])}), file)
    assert pa.parquet.read_table(file)["row"].to_pylist() == [{"x": value} for value in values]


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        (
            [{"city": "Paris", "days": 3}, {"unit": "C"}, {}],
            [
                {"city": "Paris", "days": 3, "unit": None},
                {"city": None, "days": None, "unit": "C"},
                {"city": None, "days": None, "unit": None},
            ],
        ),
        ([{"days": 3}, {"days": 2.5}], ['{"days": 3}', '{"days": 2.5}']),
        ([{"a": 1, "b": 2}, {"b": 2, "a": 1}], ['{"a": 1, "b": 2}', '{"b": 2, "a": 1}']),
        (
            [[{"type": "text"}], [{"type": "image", "url": "u"}]],
            [[{"type": "text", "url": None}], [{"type": "image", "url": "u"}]],
        ),
        ([{"content": "x"}, {"content": ["x"]}], ['{"content": "x"}', '{"content": ["x"]}']),
        ([2**53 + 1, 0.5], ["9007199254740993", "0.5"]),
        ([2**53, 0.5], [float(2**53), 0.5]),
        ([2**64, 1], ["18446744073709551616", "1"]),
        ([True, 1], ["true", "1"]),
        (["one", 1, [1], None], ["one", "1", "[1]", None]),
        ([{"a": 1}, {"a": None}, None], [{"a": 1}, {"a": None}, None]),
        ([[1], [], None, [0.5]], [[1.0], [], None, [0.5]]),
    ],
)
def test_values_of_json_keep_what_they_are(values: list[Any], kept: list[Any]) -> None:
    """In one chunk of rows, and in one for each row."""
    assert infer_column(values).to_pylist() == kept
    assert together(*(infer_column([value]) for value in values), json_objects=True) == kept


def test_objects_with_different_fields_are_together_in_the_order_of_each() -> None:
    call = {"id": "a1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    chats = [
        [{"role": "user", "content": "x"}],
        [{"role": "user", "name": "Ann", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}],
        [{"role": "tool", "tool_call_id": "a1", "content": "3"}],
    ]
    for found in (
        infer_column(chats).to_pylist(),
        together(*(infer_column([chat]) for chat in chats), json_objects=True),
    ):
        assert [json.dumps(without_nulls(chat)) for chat in found] == [
            json.dumps(without_nulls(chat)) for chat in chats
        ]
    many = [{f"k{n}": 1} for n in range(101)]
    assert infer_column(many[:100]).type.num_fields == 100
    assert infer_column(many).to_pylist()[-1] == '{"k100": 1}'


SECONDS = pa.array([1, None], pa.timestamp("ms"))


@pytest.mark.parametrize(
    ("one", "other", "kept"),
    [
        (pa.array([1344800117571260417]), pa.array([0.5]), ["1344800117571260417", "0.5"]),
        (pa.array([7]), pa.array([0.5]), [7.0, 0.5]),
        (pa.array([2**31 - 1], pa.int32()), pa.array([0.5], pa.float32()), [float(2**31 - 1), 0.5]),
        (pa.array([2**64 - 1], pa.uint64()), pa.array([-1]), ["18446744073709551615", "-1"]),
        (pa.array([2**32 - 1], pa.uint32()), pa.array([-1], pa.int8()), [2**32 - 1, -1]),
        (pa.array([[2**60 + 1]]), pa.array([[0.5]]), ["[1152921504606846977]", "[0.5]"]),
        (pa.array([{"a": 1}]), pa.array([{"a": 0.5, "b": "x"}]), [{"a": 1.0, "b": None}, {"a": 0.5, "b": "x"}]),
        (pa.array([Decimal("1.10")]), pa.array([Decimal("1.123")]), [Decimal("1.10"), Decimal("1.123")]),
        (pa.array([Decimal("1.10")]), pa.array([0.5]), ["1.10", "0.5"]),
        (pa.array([True]), pa.array([2]), ["true", "2"]),
        (pa.array(["x"]), pa.array(["y"], pa.large_string()), ["x", "y"]),
        (pa.array(["x"]), pa.array([1]), ["x", "1"]),
        (pa.array(["x"], pa.json_()), pa.array(["y"]), ["x", "y"]),
        (pa.array([date(2026, 1, 1)]), pa.array(["x"]), ["2026-01-01", "x"]),
        (
            SECONDS,
            pa.array([1], pa.timestamp("us")),
            [datetime(1970, 1, 1, 0, 0, 0, 1000), None, datetime(1970, 1, 1, 0, 0, 0, 1)],
        ),
        (
            pa.array([datetime(1, 1, 1)], pa.timestamp("us")),
            pa.array([1], pa.timestamp("ns")),
            ["0001-01-01 00:00:00", "1970-01-01 00:00:00.000000001"],
        ),
        (pa.nulls(1), pa.array([b"x"]), [None, b"x"]),
    ],
)
def test_types_of_two_files_keep_every_value(one: pa.Array, other: pa.Array, kept: list[Any]) -> None:
    assert [
        str(value) if isinstance(kept[0], str) and value is not None else value for value in together(one, other)
    ] == kept


def test_times_in_other_zones_become_text() -> None:
    utc, berlin = (pa.array([0], pa.timestamp("us", zone)) for zone in ("UTC", "Europe/Berlin"))
    assert together(utc, berlin) == ["1970-01-01 00:00:00+00:00", "1970-01-01 01:00:00+01:00"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array(["x"]), pa.array([b"x"])),
        (pa.array([b"xx"], pa.binary(2)), pa.array([1])),
        (pa.nulls(1, pa.uuid()), pa.array(["x"])),
    ],
)
def test_what_text_cannot_tell_is_refused_with_both_files(one: pa.Array, other: pa.Array) -> None:
    with pytest.raises(InputError) as refusal:
        together(one, other)
    assert str(refusal.value) == (
        f"column 'x' holds {one.type} in 0.parquet and {other.type} in 1.parquet, and no type holds both: "
        "convert one of them, or leave the column out"
    )


def test_too_many_columns_are_refused() -> None:
    seen = seen_types(pa.table({f"c{n}": [1] for n in range(10_001)}), "a.jsonl")
    with pytest.raises(InputError, match=r"a\.jsonl has more than 10000 different columns: put what differs"):
        unify(seen, json_objects=True)


def test_a_value_that_python_cannot_hold_is_text_where_python_is_asked() -> None:
    beyond = pa.array([2**62, 0, None]).view(pa.timestamp("us", "UTC"))
    first, epoch, none = python_values(beyond)
    assert first == f"{2**62} us since 1970"
    assert (str(epoch), none) == ("1970-01-01 00:00:00+00:00", None)
    texts = pa.array([b"caf\xe9", b"x"]).view(pa.string())
    assert python_values(texts) == ["caf\ufffd", "x"]
    nested = pa.ListArray.from_arrays([0, 1, 2], pa.StructArray.from_arrays([texts], ["content"]))
    assert python_values(nested) == [[{"content": "caf\ufffd"}], [{"content": "x"}]]


def test_lists_of_nulls_in_a_struct_that_gets_a_field_are_whole() -> None:
    column = pa.array([{"b": [None, None]}], pa.struct([("b", pa.list_(pa.null()))]))
    target = pa.struct([("a", pa.string()), ("b", pa.list_(pa.null()))])
    found = conform(column, target)
    found.validate(full=True)
    assert found.to_pylist() == [{"a": None, "b": [None, None]}]
