"""Generation stages in pipelines of Ray Data: rows complete, tokens those of the engine, whatever dies."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray.data

from drafter import SamplingParams, SpeculativeLM
from pipeline.dataset.processor import ProcessorConfig, build_processor
from pipeline.errors import InputError
from tests.support.faults import FragileEngine
from tests.support.waiting import wait_until

SMALL: dict[str, Any] = {"drafter": "ngram", "cpus": 1, "engine_kwargs": {"max_num_seqs": 4, "num_draft_tokens": 3}}


def chat_of(row: dict[str, Any]) -> dict[str, Any]:
    settings = {"max_new_tokens": 4} if row["n"] == 1 else {}
    return {**row, "messages": [{"role": "user", "content": row["question"]}], "sampling_params": settings}


@pytest.mark.usefixtures("local_ray")
def test_answers_are_judged_in_one_pipeline(model: Path) -> None:
    """Two stages with a filter between them; what cannot be generated is a row with an error."""
    questions = [f"how many apples {'and pens ' * (n % 3)}{n}" for n in range(20)]
    table = pa.table({"n": range(20), "question": [*questions[:-1], None], "when": pa.array([2**62] * 20)})
    answer = build_processor(
        ProcessorConfig(str(model), batch_size=6, sampling_params={"max_new_tokens": 12}, **SMALL), chat_of
    )
    judge = build_processor(
        ProcessorConfig(str(model), batch_size=8, sampling_params={"max_new_tokens": 2}, **SMALL),
        lambda row: {"n": row["n"], "answer": row["text"], "prompt": f"{row['text']} so"},
        lambda row: {"n": row["n"], "answer": row["answer"], "verdict": row["text"]},
    )
    answered = answer(ray.data.from_arrow(table)).materialize()
    rows = sorted(answered.take_all(), key=lambda row: row["n"])
    assert [row["n"] for row in rows] == list(range(20))
    assert {row["when"] for row in rows} == {2**62}
    assert "message 1 has no content" in rows[-1]["__inference_error__"]
    assert rows[-1]["text"] is None
    assert not any(row["__inference_error__"] for row in rows[:-1])

    judged = {row["n"]: row for row in judge(answered.filter(lambda row: not row["__inference_error__"])).take_all()}
    with SpeculativeLM.from_pretrained(model, "none") as lm:
        alone = [SamplingParams(max_new_tokens=4 if n == 1 else 12) for n in range(19)]
        expected = lm.chat(questions[:-1], alone)
        verdicts = lm.generate([f"{one.text} so" for one in expected], max_new_tokens=2)
    assert [row["token_ids"] for row in rows[:-1]] == [one.token_ids for one in expected]
    assert [judged[n]["verdict"] for n in range(19)] == [one.text for one in verdicts]


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_an_engine_that_dies_is_replaced_and_costs_no_row(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pipeline.dataset.processor.EngineSpec", partial(FragileEngine, notes=tmp_path, step_seconds=0.02)
    )

    def entered() -> int:
        file = tmp_path / "entered"
        return len(file.read_text().split()) if file.exists() else 0

    def kill() -> None:
        wait_until(lambda: entered() > 30, "rows in the engine")
        (note,) = tmp_path.glob("*.pid")
        os.kill(int(note.stem), signal.SIGKILL)

    config = ProcessorConfig(
        str(model), batch_size=8, sampling_params={"max_new_tokens": 12, "temperature": 0.8}, **SMALL
    )
    rows = [{"id": f"r{n}", "prompt": f"how many {'apples ' * (n % 3)}"} for n in range(80)]
    killer = threading.Thread(target=kill)
    killer.start()
    found = build_processor(config)(ray.data.from_items(rows)).take_all()
    killer.join()
    assert sorted(row["id"] for row in found) == sorted(row["id"] for row in rows)
    assert len(list(tmp_path.glob("*.pid"))) == 2
    again = build_processor(config)(ray.data.from_items(rows[::-1])).take_all()
    tokens = [{row["id"]: row["token_ids"] for row in some} for some in (found, again)]
    assert tokens[0] == tokens[1]  # a row's seed follows from its id
    assert len({tuple(one) for one in tokens[0].values()}) > 3  # equal prompts have seeds of their own


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine_kwargs": {"slots": 4}}, "engine_kwargs: unknown setting slots; there are max_num_seqs"),
        ({"sampling_params": {"max_tokens": 4}}, "sampling_params: unknown setting max_tokens: use max_new_tokens"),
        ({"engine_kwargs": {"max_num_seqs": 0}}, "engine_kwargs: max_num_seqs must be at least 1"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params: temperature must be at least 0"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, not 0"),
    ],
)
def test_mistakes_are_told_before_anything_runs(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ProcessorConfig(**settings)
