"""Columns whose types differ come together."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.io.column_types import (
    conform,
    conform_struct,
    free_name,
    infer_column,
    known_type,
    stored_type,
    unify_fields,
    unify_types,
)

values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.lists(st.integers())
)


@given(st.lists(st.lists(st.fixed_dictionaries({"x": values}), min_size=1, max_size=4), min_size=1, max_size=4))
def test_no_mixture_of_types_loses_a_row_or_a_null(chunks: list[list[dict[str, Any]]]) -> None:
    rows = [
        pa.StructArray.from_arrays([infer_column([row["x"] for row in chunk])], names=["x"])  # as the reader does
        for chunk in chunks
    ]
    target = pa.struct(unify_fields(list(one.type) for one in rows))
    for before in rows:
        after = conform_struct(before, target)
        assert after.type == target
        assert [row["x"] is None for row in after.to_pylist()] == [row["x"] is None for row in before.to_pylist()]


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
    "values", [[{"a": None}], [[]], [nested(48)], [{"a": {"b": 1}}, {"a": {}}], [1.5], ["x"], [None]]
)
def test_what_parquet_can_hold_stays_as_it_is(values: list[Any]) -> None:
    column = infer_column(values)
    assert stored_type(column.type) == known_type(column.type) == column.type
    file = io.BytesIO()
    pa.parquet.write_table(pa.table({"row": pa.StructArray.from_arrays([column], names=["x"])}), file)
    assert pa.parquet.read_table(file)["row"].to_pylist() == [{"x": value} for value in column.to_pylist()]


def test_an_object_without_fields_in_one_part_takes_the_fields_of_another() -> None:
    """Each part is stored by itself; that one is text there does not make the column text."""
    parts: list[list[Any]] = [[{}, None], [{"a": 1, "tags": []}], [None]]
    columns = [infer_column(values) for values in parts]
    stored = [conform(column, stored_type(column.type)) for column in columns]
    target = stored_type(unify_types([known_type(column.type) for column in columns]))
    assert [conform(one, target).to_pylist() for one in stored] == [
        [{"a": None, "tags": None}, None],
        [{"a": 1, "tags": []}],
        [None],
    ]


def test_dates_that_json_does_not_tell_make_the_column_text() -> None:
    kind = pa.struct([("at", pa.timestamp("us")), ("none", pa.struct([]))])
    assert stored_type(kind) == known_type(kind) == pa.string()


@pytest.mark.parametrize(
    ("one", "other", "unified"),
    [
        (pa.array([2**60 + 1]), pa.array([0.5]), [float(2**60), 0.5]),
        (pa.array([2**64 - 1], pa.uint64()), pa.array([-1]), ["18446744073709551615", "-1"]),
        (pa.array([[2**60 + 1]]), pa.array([[0.5]]), [[float(2**60)], [0.5]]),
    ],
)
def test_numbers_that_differ_in_kind_stop_no_job(one: pa.Array, other: pa.Array, unified: list[Any]) -> None:
    target = unify_types([one.type, other.type])
    assert [conform(column, target)[0].as_py() for column in (one, other)] == unified


_YEAR_1 = datetime(1, 1, 1)


@pytest.mark.parametrize("wrap", [lambda kind: kind, pa.list_, lambda kind: pa.struct([("at", kind)])])
def test_times_that_no_type_holds_become_text(wrap: Callable[[pa.DataType], pa.DataType]) -> None:
    """Nanoseconds reach back to 1677 only, and microseconds to the year 1."""
    kinds = [wrap(pa.timestamp("us")), wrap(pa.timestamp("ns"))]
    values: list[Any] = [_YEAR_1, datetime(2026, 1, 1)]
    if pa.types.is_list(kinds[0]):
        values = [[value] for value in values]
    if pa.types.is_struct(kinds[0]):
        values = [{"at": value} for value in values]
    columns = [pa.array([value], kind) for value, kind in zip(values, kinds, strict=True)]
    target = unify_types(kinds)
    for column, day in zip(columns, ("0001-01-01", "2026-01-01"), strict=True):
        assert day in conform(column, target)[0].as_py()


def test_times_of_coarse_units_stay_times() -> None:
    assert unify_types([pa.timestamp("ms"), pa.timestamp("us")]) == pa.timestamp("us")
    assert unify_types([pa.timestamp("ns"), pa.null()]) == pa.timestamp("ns")
