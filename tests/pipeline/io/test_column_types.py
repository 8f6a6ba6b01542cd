"""Columns whose types differ come together."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.io.column_types import conform_struct, free_name, infer_column, unify_fields

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
