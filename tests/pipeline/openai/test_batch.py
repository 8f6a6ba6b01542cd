"""OpenAI's batch files, in and out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from drafter import Generation, SamplingParams, SpeculativeLM
from drafter.requests import TokenLogprob, hashed_seed, sample_seed
from drafter.statistics import DecodeCounts
from drafter.text.tokenizers import load_tokenizer
from pipeline.errors import InputError
from pipeline.io.listing import BATCH, PromptSource, find_prompts, list_input
from pipeline.openai.answers import token_text
from pipeline.openai.batch import answer_line, parse_line
from pipeline.openai.errors import OpenAIError, to_json
from pipeline.output.batch_results import BatchRun, _error_line
from pipeline.settings import ReadingConfig
from tests.pipeline.conftest import Run, write_jsonl
from tests.support.calling import with_tools

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "how many apples"}]


def line(custom_id: Any, url: str = CHAT, **body: Any) -> dict[str, Any]:
    prompt = {"messages": HELLO} if url == CHAT else {"prompt": "how many"}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "gpt-4o", **prompt, **body}}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


RECORD = {
    "type": "object",
    "properties": {"fruit": {"enum": ["apple", "pear"]}, "ripe": {"type": "boolean"}},
    "required": ["fruit", "ripe"],
    "additionalProperties": False,
}


def by_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "fruit", "schema": schema, "strict": True}}


BATCH_LINES: list[Any] = [
    line("greedy", temperature=0, max_tokens=6),
    line("sampled", n=3, seed=5, max_completion_tokens=5, logprobs=True, top_logprobs=2),
    line("unseeded", n=2),
    line("documents", documents=[{"text": "f"}]),
    line("texts", COMPLETION, prompt=["how many", "does she"], n=2, temperature=0, max_tokens=4, logprobs=1),
    line("tokens", COMPLETION, prompt=[7, 8, 9], temperature=0, stop="a"),
    line("long", messages=[{"role": "user", "content": "x " * 400}]),
    line("partly", COMPLETION, prompt=["how many", "x " * 400], temperature=0),
    "{broken",
    {"method": "POST", "url": CHAT, "body": {}},
    line(7),
    line(""),
    {"custom_id": "url", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}},
    {"custom_id": "bodyless", "method": "POST", "url": CHAT},
    line("record", temperature=0, max_tokens=60, response_format=by_schema(RECORD)),
    line("unclear", response_format=by_schema({"type": "object", "unevaluatedProperties": False})),
    line("parts", temperature=0, messages=[{"role": "user", "content": [{"type": "text", "text": "how many apples"}]}]),
]


def test_a_batch_is_answered_as_openai_answers(run: Run, plain: SpeculativeLM, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "batch.jsonl", BATCH_LINES)
    done = run(source, "--writing.rows_per_file", 4, "--sampling.seed", 3)
    assert done.code == 0, done.stderr
    output, errors = (read_lines(done.folder / name) for name in ("batch_output.jsonl", "batch_errors.jsonl"))

    # Every line is answered or explained, in the order of the input.
    assert [one["custom_id"] for one in output] == [
        "greedy",
        "sampled",
        "unseeded",
        "texts",
        "tokens",
        "record",
        "parts",
    ]
    assert [one["custom_id"] for one in errors] == [
        "documents",
        "long",
        "partly",
        None,
        None,
        None,
        None,
        "url",
        "bodyless",
        "unclear",
    ]
    assert len({one["id"] for one in output + errors}) == len(BATCH_LINES)
    answers = {one["custom_id"]: one["response"]["body"] for one in output}
    assert all(one["response"]["status_code"] == 200 and one["error"] is None for one in output)

    # Token for token what the engine gives.
    chat = ChatCompletion.model_validate(answers["greedy"], strict=True)
    alone = plain.generate([HELLO], max_new_tokens=6)[0]
    assert chat.choices[0].message.content == alone.text
    assert chat.choices[0].finish_reason == alone.finish_reason
    assert chat.model == "gpt-4o"
    assert chat.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (alone.num_prompt_tokens, len(alone.token_ids))
    rows = {row["request_id"]: row for row in done.rows}
    details = chat.usage.completion_tokens_details
    assert details is not None
    row = rows["greedy#0"]
    rejected = row["num_draft_tokens"] - row["num_accepted_draft_tokens"]
    assert details.accepted_prediction_tokens == row["num_accepted_draft_tokens"]
    assert details.rejected_prediction_tokens == rejected

    # OpenAI's default temperature, a seed for each choice, and log-probabilities.
    chat = ChatCompletion.model_validate(answers["sampled"], strict=True)
    for index, choice in enumerate(chat.choices):
        settings = SamplingParams(5, temperature=1, seed=sample_seed(5, index), logprobs=2)
        alone = plain.generate([HELLO], settings)[0]
        assert choice.message.content == alone.text
        assert rows[f"sampled#{index}"]["seed"] == settings.seed
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert alone.logprobs is not None
        told = choice.logprobs.content
        assert [one.logprob for one in told] == pytest.approx([one.logprob for one in alone.logprobs], abs=1e-4)
        assert [len(one.top_logprobs) for one in told] == [2] * len(told)
        texts = [token_text(plain.tokenizer, one.token_id) for one in alone.logprobs]
        assert [bytes(one.bytes or ()) for one in told] == [text.encode(errors="surrogateescape") for text in texts]
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == alone.num_prompt_tokens
    assert rows["unseeded#1"]["seed"] == hashed_seed(3, "unseeded#1")
    # The run's limit where the request has none.
    assert all(rows[f"unseeded#{n}"]["num_output_tokens"] <= 12 for n in range(2))

    # Text completions: no chat template; the prompts' choices one after the other.
    completion = Completion.model_validate(answers["texts"], strict=True)
    texts = [plain.generate(prompt, max_new_tokens=4)[0].text for prompt in ("how many", "does she")]
    assert [choice.text for choice in completion.choices] == [texts[0], texts[0], texts[1], texts[1]]
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is not None and choice.logprobs.top_logprobs for choice in completion.choices)
    tokens = Completion.model_validate(answers["tokens"], strict=True)
    assert tokens.usage is not None
    assert tokens.usage.prompt_tokens == 3
    assert rows["tokens#0"]["prompt_token_ids"] == [7, 8, 9]
    assert answers["parts"]["choices"][0]["message"]["content"] == plain.generate([HELLO], max_new_tokens=12)[0].text

    record = json.loads(answers["record"]["choices"][0]["message"]["content"])
    assert record in [{"fruit": fruit, "ripe": ripe} for fruit in ("apple", "pear") for ripe in (True, False)]

    # Errors in OpenAI's shape, by name.
    failed = {one["custom_id"]: one for one in errors}
    refused = failed["documents"]["response"]
    assert refused["status_code"] == 400
    assert refused["body"]["error"]["type"] == "invalid_request_error"
    assert "it reads no documents, which would have no effect" in refused["body"]["error"]["message"]
    assert "tokens" in failed["long"]["response"]["body"]["error"]["message"]
    assert "tokens" in failed["partly"]["response"]["body"]["error"]["message"]
    unclear = failed["unclear"]["response"]
    assert (unclear["status_code"], unclear["body"]["error"]["param"]) == (400, "response_format")
    assert "unevaluatedProperties" in unclear["body"]["error"]["message"]
    assert failed["url"]["response"]["body"]["error"]["param"] == "url"
    assert failed["bodyless"]["response"]["body"]["error"]["param"] == "body"
    nameless = [one["error"] for one in errors if one["custom_id"] is None]
    assert [error["message"].split(": ")[0] for error in nameless] == [f"batch.jsonl:{n}" for n in (9, 10, 11, 12)]
    assert all(one["response"] is None for one in errors if one["custom_id"] is None)

    # Submitted again, it writes nothing; what is lost is written again, the same to the byte.
    before = (done.folder / "batch_output.jsonl").read_bytes()
    (done.folder / "batch_output.jsonl").unlink()
    state = json.loads((done.folder / "run.json").read_text())
    (done.folder / "run.json").write_text(json.dumps({**state, "state": "running"}))
    again = run(source, "--sampling.seed", 3)
    assert again.code == 0, again.stderr
    assert (done.folder / "batch_output.jsonl").read_bytes() == before
    stamp = (done.folder / "batch_output.jsonl").stat().st_mtime_ns
    assert run(source, "--sampling.seed", 3).code == 0
    assert (done.folder / "batch_output.jsonl").stat().st_mtime_ns == stamp


def test_twin_custom_ids_are_refused_with_their_lines(run: Run, tmp_path: Path) -> None:
    lines = [line("a"), line("b", n=2), line("a", n=3), line("c"), line("b", n=2)]
    done = run(write_jsonl(tmp_path / "batch.jsonl", lines))
    assert done.code == 2
    assert "'custom_id' does not name rows: 2 ids" in done.error
    assert "'a': batch.jsonl:1, batch.jsonl:3" in done.error
    assert "'b': batch.jsonl:2, batch.jsonl:5" in done.error


@pytest.mark.parametrize(
    "setting", [("reading.samples", 2), ("sampling.temperature", 0.5), ("reading.chat", "true")], ids=lambda one: one[0]
)
def test_settings_that_requests_have_themselves(refused: Run, tmp_path: Path, setting: tuple[str, Any]) -> None:
    done = refused(write_jsonl(tmp_path / "batch.jsonl", [line("a")]), f"--{setting[0]}", setting[1])
    assert done.code == 2
    assert f"leave out {setting[0]}" in done.error


def test_how_a_batch_is_known(tmp_path: Path) -> None:
    def source(lines: list[Any], **settings: Any) -> PromptSource:
        reading = ReadingConfig(**settings)
        return find_prompts(list_input(str(write_jsonl(tmp_path / "a.jsonl", lines)), reading.format), reading)

    assert source([line("a")]) == BATCH
    assert source(["{broken", line("a")]) == BATCH
    assert source(["{broken"], format="openai") == BATCH
    row = {**line("a"), "prompt": "x"}
    assert source([row], prompt_column="prompt") == PromptSource("prompt")
    assert source([row], format="jsonl") == PromptSource("prompt")
    with pytest.raises(InputError, match="no column 'prompt'"):
        source([{"custom_id": "a", "prompts": "x"}])


def test_a_batch_of_a_model_that_reasons_with_tools_and_records(run: Run, model: Path, tmp_path: Path) -> None:
    function = {"name": "pick", "parameters": RECORD, "strict": True}
    tools: dict[str, Any] = {"tools": [{"type": "function", "function": function}], "max_tokens": 300}
    lines = [
        line("required", **tools, tool_choice="required", parallel_tool_calls=False, n=2),
        line("free", **tools, tool_choice="none"),
        line("other", **tools, tool_choice={"type": "function", "function": {"name": "drop"}}),
        line("record", response_format={"type": "json_object", "schema": RECORD}, max_tokens=300, n=2),
    ]
    base = with_tools(model, tmp_path / "calling", tokens=True, reasons=True, special=True)
    end = load_tokenizer(base).get_vocab()["</think>"]
    for one in lines:
        one["body"]["logit_bias"] = {str(end): 5}
    done = run(write_jsonl(tmp_path / "batch.jsonl", lines), base=base)
    assert done.code == 0, done.stderr
    required, free, record = read_lines(done.folder / "batch_output.jsonl")
    rows = {row["request_id"]: row for row in done.rows}
    for index, choice in enumerate(record["response"]["body"]["choices"]):
        message, row = choice["message"], rows[f"record#{index}"]
        assert set(json.loads(message["content"])) == {"fruit", "ripe"}
        assert (message["content"], message.get("reasoning_content", "")) == (row["text"], row["reasoning_content"])
    assert any(row["reasoning_content"] for row in done.rows)
    chat = ChatCompletion.model_validate(required["response"]["body"], strict=True)
    assert [choice.finish_reason for choice in chat.choices] == ["tool_calls", "tool_calls"]
    for choice in chat.choices:
        assert choice.message.content is None
        [call] = choice.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "pick"
        assert set(json.loads(call.function.arguments)) == {"fruit", "ripe"}
    assert "tool_calls" not in free["response"]["body"]["choices"][0]["message"]
    [refused] = read_lines(done.folder / "batch_errors.jsonl")
    assert refused["response"]["body"]["error"]["param"] == "tool_choice"
    before = (done.folder / "batch_output.jsonl").read_bytes()
    run(tmp_path / "batch.jsonl", base=base)
    assert (done.folder / "batch_output.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"method": "GET"}, "method"),
        ({"method": None}, "method"),
        ({"url": None}, "url"),
        ({"url": "/v1/responses"}, "url"),
        ({"url": COMPLETION}, "prompt"),
        ({"body": "[1]"}, None),
        ({"body": "{"}, None),
        ({"body": '{"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 1e999}}}]}'}, None),
        ({"body": json.dumps({"model": "m", "messages": HELLO, "stream": True})}, "stream"),
        ({"body": json.dumps({"model": "m", "messages": HELLO, "return_token_ids": True})}, "return_token_ids"),
        ({"body": json.dumps({"model": "m", "messages": HELLO, "prompt_logprobs": 0})}, "prompt_logprobs"),
    ],
)
def test_lines_that_are_no_requests(changes: dict[str, Any], param: str | None) -> None:
    with pytest.raises(OpenAIError) as caught:
        parse_line({**line("a"), "body": json.dumps({"model": "m"}), **changes})
    assert caught.value.param == param


@pytest.mark.parametrize("url", [CHAT, COMPLETION])
def test_an_answer_without_numbers_is_an_error(url: str) -> None:
    bodies = {
        CHAT: {"model": "m", "messages": HELLO, "logprobs": True},
        COMPLETION: {"model": "m", "prompt": "x", "logprobs": 0},
    }
    asked = {"custom_id": "a", "method": "POST", "url": url, "body": json.dumps(bodies[url])}
    for number, status in ((-0.5, 200), (-math.inf, 200), (math.nan, 500)):
        made = Generation("a#0", [1], "x", "stop", 3, DecodeCounts(), [TokenLogprob(1, number, ())])
        answer = answer_line(parse_line(asked), "a", [made], 7, str)
        assert answer["response"]["status_code"] == status
        assert set(answer) == {"id", "custom_id", "response", "error"}
        to_json(answer)
        if status == 500:
            assert answer["response"]["body"]["error"]["code"] == "not_finite"


def test_an_answer_that_was_made_leniently_says_so() -> None:
    asked = {"custom_id": "a", "method": "POST", "url": CHAT, "body": json.dumps({"model": "m", "messages": HELLO})}
    made = [Generation(f"a#{n}", [1, 2], "x", "stop", 3, DecodeCounts()) for n in range(2)]
    request = parse_line(asked)
    assert "lossless" not in answer_line(request, "a", made, 7, str)["response"]["body"]
    made[1] = replace(made[1], verifier="fly", lossless=False, lenient=[1])
    body = answer_line(request, "a", made, 7, str)["response"]["body"]
    assert (body["lossless"], body["verifier"], body["lenient_tokens"]) == (False, "fly", 1)


def test_the_example_is_a_batch() -> None:
    listing = list_input("examples/openai-batch.jsonl")
    assert find_prompts(listing, ReadingConfig()) == BATCH
    lines = read_lines(Path("examples/openai-batch.jsonl"))
    assert [parse_line({**one, "body": json.dumps(one["body"])}).choices for one in lines] == [1, 2, 2]


@pytest.mark.parametrize(
    ("given", "kind", "code"),
    [
        ("{", "BadRow", "invalid_json_line"),
        ('{"custom_id": 5}', "BadRow", "invalid_json_line"),
        ('{"custom_id": "a"}', "BadRow", "invalid_json_line"),
        ('{"custom_id": "a"}', "TimedOut", "request_timeout"),
        ('{"custom_id": "a"}', "EngineDied", "server_error"),
    ],
)
def test_an_error_line_has_a_code_of_openais(given: str, kind: str, code: str) -> None:
    row = {"request_id": "in.jsonl:3#0", "input": given, "error_type": kind, "message": "why"}
    error = _error_line(row, 7, BatchRun((), SamplingParams(), None))["error"]
    assert error["code"] == code
    assert error["message"].endswith("why")
