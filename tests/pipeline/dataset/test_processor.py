"""Generation stages in pipelines of Ray Data: rows complete, tokens those of the engine, whatever dies."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import ray.data
from ray.data.checkpoint import CheckpointConfig
from ray.data.extensions import ArrowPythonObjectArray

from drafter import SamplingParams, SpeculativeLM
from drafter.errors import RequestError
from drafter.prompt import Prompt
from drafter.text.conversation import Conversation
from pipeline.dataset.processor import Answers, ProcessorConfig, build_processor, refuse_replaced
from pipeline.dataset.prompt_stage import make_prompts
from pipeline.engines.ledger import RowOutcome
from pipeline.errors import InputError
from pipeline.generate.prompts import Encoder, PromptSettings
from pipeline.io.listing import PromptSource
from pipeline.output.columns import COLUMNS
from pipeline.settings import ReadingConfig
from tests.pipeline.conftest import Run, read_rows, write_jsonl
from tests.support.faults import FragileEngine
from tests.support.images import picture
from tests.support.waiting import wait_until

SMALL: dict[str, Any] = {"drafter": "ngram", "engine_kwargs": {"max_num_seqs": 4, "num_draft_tokens": 3}}


def chat_of(row: dict[str, Any]) -> dict[str, Any]:
    settings = {"max_new_tokens": 4} if row["n"] == 1 else {}
    return {**row, "messages": [{"role": "user", "content": row["question"]}], "sampling_params": settings}


def fragile(monkeypatch: pytest.MonkeyPatch, notes: Path) -> None:
    """Have engines note in a folder which process they are, and which rows enter them."""
    monkeypatch.setattr("pipeline.engines.models.EngineSpec", partial(FragileEngine, notes=notes, step_seconds=0.02))


def entered(notes: Path) -> list[str]:
    file = notes / "entered"
    return file.read_text().split() if file.exists() else []


def written(folder: Path) -> list[dict[str, Any]]:
    return [row for file in folder.glob("*.parquet") for row in read_rows(file)]


@pytest.mark.usefixtures("local_ray")
def test_answers_are_judged_in_one_pipeline(model: Path, plain: SpeculativeLM) -> None:
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
    asked = ray.data.from_arrow(table)
    rows = sorted(answer(asked).take_all(), key=lambda row: row["n"])
    assert [row["n"] for row in rows] == list(range(20))
    assert {row["when"] for row in rows} == {2**62}
    assert "message 1 has no content" in rows[-1]["__inference_error__"]
    assert rows[-1]["text"] is None
    assert not any(row["__inference_error__"] for row in rows[:-1])

    assert "lossless" not in rows[0]

    # Both stages have their engines at once, and there are two cores.
    good = answer(asked).filter(lambda row: not row["__inference_error__"])
    judged = {row["n"]: row for row in judge(good).take_all()}
    alone = [SamplingParams(max_new_tokens=4 if n == 1 else 12) for n in range(19)]
    expected = plain.chat(questions[:-1], alone)
    verdicts = plain.generate([f"{one.text} so" for one in expected], max_new_tokens=2)
    assert [row["token_ids"] for row in rows[:-1]] == [one.token_ids for one in expected]
    assert [judged[n]["verdict"] for n in range(19)] == [one.text for one in verdicts]


NOW = datetime(2024, 2, 3)


def prompt_settings(model: Path | str) -> PromptSettings:
    reading = ReadingConfig(chat=False)
    return PromptSettings(str(model), False, PromptSource("prompt"), reading, SamplingParams(), 100, NOW)


def test_a_chat_has_nothing_of_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Data keeps messages as structs, in which each row has the fields of all; and there is one date for all."""
    asked: list[tuple[Any, datetime]] = []

    def render(tokenizer: Any, prompt: Any, now: datetime) -> Prompt:
        asked.append((replace(prompt, chat_template_kwargs=prompt.chat_template_kwargs or None), now))
        return Prompt([1])

    monkeypatch.setattr("pipeline.generate.prompts.render_chat", render)

    def chat(arguments: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": "", "tool_calls": [{"arguments": arguments}]}]

    chats = [chat({"city": "Paris", "days": 3}), chat({"unit": "C"})]
    make_prompts(pa.table({"messages": chats}), prompt_settings(""), Encoder(None))
    assert asked == [(Conversation(one), NOW) for one in chats]
    beside: dict[str, Any] = {
        "tools": [{"name": "add"}],
        "documents": [{"text": "a"}],
        "chat_template_kwargs": {"thinking": False},
    }
    columns = {name: [value] for name, value in {"messages": chats[0], **beside}.items()}
    make_prompts(pa.table(columns), prompt_settings(""), Encoder(None))
    assert asked[2:] == [(Conversation(chats[0], **beside), NOW)]


def made_stage(monkeypatch: pytest.MonkeyPatch, plain: SpeculativeLM, prefix: str = "") -> Answers:
    """A stage in this process, whose engine answers each prompt with its number of tokens."""
    made = Answers.__new__(Answers)
    stage: Any = made
    stage.failure, stage._lm, stage._row_seconds = None, plain, None
    stage._prompts, stage._prefix = prompt_settings(plain.base.name), prefix
    stage._columns = [one for one in COLUMNS if one.name in ("text", "prompt_token_ids")]
    stage._ledger = SimpleNamespace(commit=lambda part: None)

    def outcomes(part: str, requests: dict[str, Any], report: Any) -> dict[str, RowOutcome]:
        rows = {
            name: {"text": f"{len(one.prompt_ids)}", "prompt_token_ids": one.prompt_ids}
            for name, one in requests.items()
        }
        return {name: RowOutcome(generated=row) for name, row in rows.items()}

    stage._outcomes = outcomes
    context = SimpleNamespace(get_task_id=lambda: "part")
    monkeypatch.setattr("pipeline.dataset.processor.ray.get_runtime_context", lambda: context)
    return made


def test_token_ids_are_prompts(monkeypatch: pytest.MonkeyPatch, plain: SpeculativeLM) -> None:
    stage = made_stage(monkeypatch, plain)
    done = stage(pa.table({"prompt_token_ids": [[5, 6, 7], [5], None, [5]]}))
    assert done.column_names == ["prompt_token_ids", "text", "__inference_error__"]
    assert done["text"].to_pylist() == ["3", "1", None, "1"]
    assert done["__inference_error__"].to_pylist() == ["", "", "column 'prompt_token_ids' is empty", ""]


def test_a_column_of_a_taken_name_is_refused_or_kept(monkeypatch: pytest.MonkeyPatch, plain: SpeculativeLM) -> None:
    """Before anything runs, where the columns of a dataset are known."""
    table = pa.table({"prompt_token_ids": [[5, 6, 7]], "text": ["mine"], "seed": [3]})
    with pytest.raises(InputError, match="column text would be replaced: set output_prefix"):
        made_stage(monkeypatch, plain)(table)
    (row,) = made_stage(monkeypatch, plain, "our_")(table).to_pylist()
    same = {"prompt_token_ids": [5, 6, 7], "text": "mine", "seed": 3}
    assert row == {**same, "our_text": "3", "our_prompt_token_ids": [5, 6, 7], "__inference_error__": ""}
    there = ["prompt_token_ids", "our_text", "seed"]
    refuse_replaced(there, ["text"], "")
    with pytest.raises(InputError, match="column our_text"):
        refuse_replaced(there, ["text"], "our_")


@pytest.mark.usefixtures("local_ray")
def test_a_taken_name_is_told_at_the_start(model: Path) -> None:
    stage = build_processor(ProcessorConfig(str(model), **SMALL))
    with pytest.raises(InputError, match="column text would be replaced"):
        stage(ray.data.from_items([{"prompt": "how many", "text": "mine"}]))


def test_a_prompt_that_is_not_unicode_is_an_error_of_its_row(
    monkeypatch: pytest.MonkeyPatch, plain: SpeculativeLM
) -> None:
    stage = made_stage(monkeypatch, plain)
    bad = pa.array([b"caf\xe9", b"how many", None]).view(pa.string())
    done = stage(pa.table({"prompt": bad}))
    assert done["__inference_error__"].to_pylist() == [
        "column 'prompt' cannot be read: it is not UTF-8: byte 4 is 0xe9",
        "",
        "column 'prompt' is empty",
    ]
    block = stage(pa.table({"prompt": pa.array([b"how many", b"caf\xe9"])}))
    assert all("must be a text" in one for one in block["__inference_error__"].to_pylist())
    # Ray Data keeps what Arrow cannot hold as pickled objects.
    halves = ArrowPythonObjectArray.from_objects(["how many", "\ud83d", "does she"])
    done = stage(pa.table({"prompt": halves}))
    half = "the prompt has half a character: an unpaired surrogate"
    assert done["__inference_error__"].to_pylist() == ["", half, ""]
    with pytest.raises(RequestError, match=half):
        plain.encode([{"role": "user", "content": "\ud83d"}])


def test_equal_prompts_of_a_batch_have_seeds_of_their_own_wherever_they_stand(plain: SpeculativeLM) -> None:
    stage: Any = Answers.__new__(Answers)
    stage._prompts, stage._row_seconds = prompt_settings(plain.base.name), None

    def seeds(*prompts: str, **more: Any) -> list[int]:
        table = pa.table({"prompt": prompts, **more})
        requests, _ = stage._requests(table, [Prompt(plain.encode(one)) for one in prompts])
        return [requests[place].sampling.seed for place in range(len(prompts))]

    first, second, other = seeds("how", "how", "many")
    assert len({first, second, other}) == 3
    assert seeds("many", "how", "how") == [other, first, second]
    nan = float("nan")  # of pandas, where a row has no value
    assert seeds("how", "how", "many", id=[nan, nan, nan], seed=[nan, nan, 7.0]) == [first, second, 7]
    table = pa.table({"messages": ['[{"role": "user", "content": "how"}]'], "tools": [nan], "images": [nan]})
    (made,) = make_prompts(table, stage._prompts, Encoder(plain.tokenizer))
    assert isinstance(made, Prompt)


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_an_engine_that_dies_is_replaced_and_costs_no_row(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows and tokens that are written are those of the job."""
    fragile(monkeypatch, tmp_path)

    def kill() -> None:
        wait_until(lambda: len(entered(tmp_path)) > 30, "rows in the engine")
        (note,) = tmp_path.glob("*.pid")
        os.kill(int(note.stem), signal.SIGKILL)

    config = ProcessorConfig(
        str(model), batch_size=8, sampling_params={"max_new_tokens": 12, "temperature": 0.8}, **SMALL
    )
    rows = [{"id": f"r{n}", "prompt": f"how many {'apples ' * (n % 3)}"} for n in range(80)]
    killer = threading.Thread(target=kill)
    killer.start()
    build_processor(config)(ray.data.from_items(rows)).write_parquet(str(tmp_path / "answers"))
    killer.join()
    found = written(tmp_path / "answers")
    assert sorted(row["id"] for row in found) == sorted(row["id"] for row in rows)
    assert len(list(tmp_path.glob("*.pid"))) == 2
    job = run(write_jsonl(tmp_path / "in.jsonl", rows[::-1]), "--reading.chat", "false", "--sampling.temperature", 0.8)
    tokens = {row["id"]: row["token_ids"] for row in found}
    assert tokens == {row["request_id"]: row["token_ids"] for row in job.rows}  # a row's seed follows from its id
    assert len({tuple(one) for one in tokens.values()}) > 3  # equal prompts have seeds of their own


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_rays_checkpoints_resume_a_pipeline(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"r{n:02}" for n in range(60)]
    ray.data.from_items([{"id": name, "prompt": f"how many {name}"} for name in names]).write_parquet(
        str(tmp_path / "in")
    )
    checkpoints = CheckpointConfig("id", str(tmp_path / "done"), delete_checkpoint_on_success=False)
    monkeypatch.setattr(ray.data.DataContext.get_current(), "checkpoint_config", checkpoints)
    answer = build_processor(ProcessorConfig(str(model), batch_size=5, sampling_params={"max_new_tokens": 4}, **SMALL))

    def pipeline(notes: Path, refused: str | None) -> None:
        notes.mkdir()
        fragile(monkeypatch, notes)

        def use(row: dict[str, Any]) -> dict[str, Any]:
            if row["id"] == refused:
                raise ValueError("the pipeline stops here")
            return row

        answer(ray.data.read_parquet(str(tmp_path / "in"))).map(use).write_parquet(str(tmp_path / "out"))

    with pytest.raises(ray.exceptions.RayTaskError, match="the pipeline stops here"):
        pipeline(tmp_path / "first", refused="r59")
    before = written(tmp_path / "out")
    pipeline(tmp_path / "second", refused=None)
    assert sorted(row["id"] for row in written(tmp_path / "out")) == names
    again = [name.partition(":")[2] for name in entered(tmp_path / "second")]
    assert 0 < len(before) < 60
    assert sorted(again) == sorted(set(names) - {row["id"] for row in before})


@pytest.mark.usefixtures("local_ray")
def test_rows_of_a_lenient_verifier_are_marked_as_in_a_job(model: Path) -> None:
    config = ProcessorConfig(
        str(model), verifier={"name": "typical"}, sampling_params={"max_new_tokens": 8, "temperature": 1.0}, **SMALL
    )
    rows = build_processor(config)(ray.data.from_items([{"prompt": "how many apples"}] * 3)).take_all()
    assert {(row["lossless"], row["verifier"]) for row in rows} == {(False, "typical")}
    assert all(row["num_lenient_tokens"] == len(row["lenient_positions"]) for row in rows)


@pytest.mark.usefixtures("local_ray")
def test_rows_are_records(model: Path) -> None:
    """By the schema of the stage, or what a row asks for itself; a schema that cannot be used is its row's error."""
    fruit, nothing = (
        {"type": "object", "properties": {"a": one}, "required": ["a"], "additionalProperties": False}
        for one in ({"enum": ["apples", "pens"]}, {"const": None})
    )
    own: list[Any] = [
        {},
        {"structured_outputs": {"json": json.dumps(nothing)}},
        {"structured_outputs": {"choice": ["how", "many"]}},
        {"structured_outputs": {"regex": "("}},
        {"max_new_tokens": 2},
    ]
    config = ProcessorConfig(
        str(model),
        sampling_params={"max_new_tokens": 40, "structured_outputs": {"json": fruit}},
        **SMALL,
    )
    asked = ray.data.from_items([{"n": n, "prompt": "how many"} for n in range(len(own))])
    answer = build_processor(config, lambda row: {**row, "sampling_params": own[row["n"]]})
    rows = sorted(answer(asked).take_all(), key=lambda row: row["n"])
    assert json.loads(rows[0]["text"])["a"] in ("apples", "pens")
    assert rows[1]["text"] == '{"a": null}'
    assert rows[2]["text"] in ("how", "many")
    assert [row["valid"] for row in rows] == [True, True, True, None, False]
    assert "structured_outputs.regex" in rows[3]["__inference_error__"]
    assert [bool(row["__inference_error__"]) for row in rows] == [False, False, False, True, False]
    assert all(row["num_forced_tokens"] == len(row["forced_positions"]) > 0 for row in rows[:2])


def test_a_schema_of_a_table_is_text() -> None:
    """As a struct it would have the keys of other rows' schemas, and lose its own nulls."""
    stage: Any = Answers.__new__(Answers)
    stage._prompts, stage._row_seconds = prompt_settings(""), None
    asked = [{"structured_outputs": {"json": one}} for one in ({"const": None}, {"type": "integer", "minimum": 3})]
    for settings in (pa.array([*asked, None]), ArrowPythonObjectArray.from_objects([*asked, {}])):
        table = pa.table({"prompt": ["a", "a", "a"], "sampling_params": settings})
        requests, problems = stage._requests(table, [Prompt([1])] * len(table))
        assert list(requests) == [2]
        assert all("structured_outputs.json as JSON text" in problems[place] for place in range(2))
    text = {"structured_outputs": {"json": '{"const": null}'}}
    requests, problems = stage._requests(pa.table({"prompt": ["a"], "sampling_params": [text]}), [Prompt([1])])
    assert problems == {}
    assert requests[0].sampling.structured_outputs.json == '{"const":null}'


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling_params": {"structured_outputs": {"json": "{"}}}, "sampling_params: structured_outputs.json is not"),
        ({"engine_kwargs": {"slots": 4}}, "engine_kwargs: unknown setting slots; there are max_num_seqs"),
        ({"sampling_params": {"max_tokens": 4}}, "sampling_params: unknown setting max_tokens: use max_new_tokens"),
        ({"engine_kwargs": {"max_num_seqs": 0}}, "engine_kwargs: max_num_seqs must be at least 1"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params: temperature must be at least 0"),
        ({"verifier": {"settings": {}, "nam": 2}}, "verifier: unknown setting nam: use name"),
        ({"model_source": "x"}, "unknown setting model_source: use model"),
        ({"rollout": "programs:f"}, "unknown setting rollout: not supported: drafter generate runs programs"),
        ({"should_continue_on_error": True}, "unknown setting should_continue_on_error: not supported: a row that"),
        (
            {"sampling_params": {"tools": []}},
            "sampling_params: unknown setting tools: it is an argument of chat",
        ),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, not 0"),
        ({"concurrency": 0}, "concurrency must be a number of engines of at least 1, or .*, not 0"),
        ({"concurrency": "2"}, "concurrency must be a number of engines of at least 1, or the fewest and the most"),
        ({"concurrency": (2, 1)}, r"the fewest and the most, not \(2, 1\)"),
        ({"concurrency": [1, 2, 3]}, "the fewest and the most"),
        ({"images": {"folders": "./"}}, "images: images.folders must be a list, not './'"),
    ],
)
def test_mistakes_are_told_before_anything_runs(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ProcessorConfig(**settings)


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_messages_have_images(seeing: Path, tmp_path: Path) -> None:
    """In messages or beside them, in several forms; what cannot be opened is a row with an error."""
    red, blue = picture(1, 40, 30), picture(2, 30, 40)
    red.save(tmp_path / "red.png")
    blue.save(tmp_path / "blue.png")
    content, path = (tmp_path / "blue.png").read_bytes(), str(tmp_path / "red.png")
    place, text = {"type": "image"}, {"type": "text", "text": "What?"}
    uri = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    images: list[Any] = [[path], [content], [path, content], [], [f"{tmp_path}/gone.png"], None]
    rows = [{"n": n, "pictures": one, "url": uri if one is None else None} for n, one in enumerate(images)]

    def chat(row: dict[str, Any]) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": row["url"]}}, text] if row["url"] else [text]
        return {**row, "messages": [{"role": "user", "content": parts}], "images": row["pictures"]}

    settings: dict[str, Any] = {
        "batch_size": 3,
        "sampling_params": {"max_new_tokens": 8},
        "images": {"folders": [str(tmp_path)]},
    }
    answer = build_processor(ProcessorConfig(str(seeing), **settings, **SMALL), chat)
    found = sorted(answer(ray.data.from_items(rows)).take_all(), key=lambda row: row["n"])
    with SpeculativeLM.from_pretrained(seeing, "none") as lm:
        opened = [[red], [blue], [red, blue], [], None, [blue]]
        for row, some in zip(found, opened, strict=True):
            if some is None:
                assert "gone.png': there is no such file" in row["__inference_error__"]
                continue
            assert row["__inference_error__"] == ""
            prompt = lm.encode([{"role": "user", "content": [*[place] * len(some), text]}], images=some)
            assert row["token_ids"] == lm.generate([prompt], max_new_tokens=8)[0].token_ids
            assert len(row["prompt_images"]) == len(some)
    assert not any(name.startswith("__prompt") for name in found[0])
