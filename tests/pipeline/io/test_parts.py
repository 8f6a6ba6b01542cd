"""A part stays whole on its way through Ray Data, whatever is asked for batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from pipeline.generate.staging import StagingPlan, stage_files
from pipeline.io.column_types import unify
from pipeline.io.files import locate
from pipeline.io.listing import PromptSource, list_input
from pipeline.io.parts import StagedInput, StagedParts, pack, problem_column, unpack
from pipeline.settings import ReadingConfig
from tests.pipeline.conftest import write_jsonl
from tests.support.parts import BAD_PROMPT


def rows_of(values: list[int | None]) -> pa.Table:
    return pa.table(
        {
            "request_id": [str(index) for index in range(len(values))],
            "row": pa.array([{"a.b": value, "prompt": "x"} for value in values]),
            "problem": problem_column([BAD_PROMPT if value is None else None for value in values]),
        }
    )


@given(st.dictionaries(st.text(min_size=1), st.lists(st.none() | st.integers(0, 9), min_size=1), min_size=1))
def test_parts_come_out_as_they_went_in(parts: dict[str, list[int | None]]) -> None:
    row_type = pa.struct([("a.b", pa.int64()), ("prompt", pa.string())])
    tables = {name: rows_of(values) for name, values in parts.items()}
    tables = {name: rows.set_column(1, "row", rows["row"].cast(row_type)) for name, rows in tables.items()}
    block = pack(tables.items())
    assert block.num_rows == len(parts)
    assert dict(unpack(block)) == tables


class Calls:
    """Notes the rows of each call's parts."""

    def __call__(self, block: pa.Table) -> pa.Table:
        parts = list(unpack(block))
        return pack((part, rows.append_column("call", pa.array([len(parts)] * len(rows)))) for part, rows in parts)


@pytest.mark.slow
def test_a_call_takes_one_part_however_many_rows_it_has(local_ray: None, tmp_path: Path) -> None:
    """Parts of 40 and of 3 rows, larger than Ray's blocks: a batch size of 1 is one part, and none is cut or merged."""
    for name, count in (("a", 43), ("b", 43)):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {n}"} for n in range(count)])
    plan = StagingPlan(locate(str(tmp_path)), ReadingConfig(), PromptSource("prompt"), rows_per_part=40)
    staged_parts: list[Any] = []
    for name in ("a", "b"):
        parts, seen = stage_files(list_input(str(tmp_path / f"{name}.jsonl")), name, plan)
        staged_parts += parts
    staged = StagedInput(plan.folder, tuple(staged_parts), unify(seen, json_objects=True))
    context = ray.data.DataContext.get_current()
    before, context.target_max_block_size = context.target_max_block_size, 100
    try:
        read = ray.data.read_datasource(StagedParts(staged, staged_parts), override_num_blocks=len(staged_parts))
        pool = ray.data.ActorPoolStrategy(size=1)
        done = read.map_batches(Calls, batch_size=1, batch_format="pyarrow", compute=pool, num_cpus=0.5)
        blocks = list(done.iter_batches(batch_size=None, batch_format="pyarrow"))
    finally:
        context.target_max_block_size = before
    found = {part: rows for block in blocks for part, rows in unpack(block)}
    assert {part: len(rows) for part, rows in found.items()} == {
        "a-000000": 40,
        "a-000001": 3,
        "b-000000": 40,
        "b-000001": 3,
    }
    assert all(rows["call"].unique().to_pylist() == [1] for rows in found.values())
    assert found["a-000001"]["request_id"].to_pylist() == ["a.jsonl:41", "a.jsonl:42", "a.jsonl:43"]
