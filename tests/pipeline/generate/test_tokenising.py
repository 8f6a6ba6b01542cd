"""Rows become token ids and settings, through the chat template where there is one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafter import SpeculativeLM
from drafter.requests import SamplingParams, sample_seed
from drafter.text.tokenizers import load_tokenizer
from pipeline.generate.prompts import PromptSettings
from pipeline.generate.row_requests import make_requests
from pipeline.io.listing import BATCH, PromptSource
from pipeline.io.parts import PROBLEM_TYPE
from pipeline.openai.requests import parse_completion
from pipeline.serving.handles import Call
from pipeline.serving.replica import Answers
from pipeline.settings import ReadingConfig
from tests.support.waiting import PATIENCE

DEFAULTS = SamplingParams(temperature=0.7, seed=3)


def requests(model: Path, rows: list[dict[str, Any]], source: PromptSource, **reading: Any) -> list[dict[str, Any]]:
    table = pa.table(
        {
            "request_id": pa.array([str(index) for index in range(len(rows))]),
            "seed_name": pa.array([str(index) for index in range(len(rows))]),
            "asked": pa.array([json.dumps(row) for row in rows]),
            "row": pa.array(rows),
            "problem": pa.nulls(len(rows), PROBLEM_TYPE),
        }
    )
    settings = PromptSettings(str(model), False, source, ReadingConfig(**reading), DEFAULTS, max_length=200)
    made: list[dict[str, Any]] = make_requests(table, settings).to_pylist()
    return made


def test_prompts_go_through_the_template_where_there_is_one(model: Path, tmp_path: Path) -> None:
    source = PromptSource("prompt")
    rows = [{"prompt": "how many"}]
    bare = requests(model, rows, source, chat=False)[0]["prompt_ids"]
    chat = requests(model, rows, source)[0]["prompt_ids"]
    user, end, assistant = 2, 0, 3
    assert chat == [user, *bare, end, assistant]
    messages = [{"messages": [{"role": "user", "content": "how many"}]}]
    assert requests(model, messages, PromptSource("messages", "messages"))[0]["prompt_ids"] == chat


def test_what_stands_beside_messages_goes_to_the_template(model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.name }} {% endfor %}{% for document in documents or [] %}"
        "{{ document.text }} {% endfor %}{% for message in messages %}{{ message.content }} {% endfor %}"
        "{% if thinking %}friend{% endif %}{% if add_generation_prompt %}be{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)

    def prompts(*rows: dict[str, Any], **reading: Any) -> list[str]:
        made = requests(tmp_path, list(rows), PromptSource("messages", "messages"), **reading)
        return [tokenizer.decode(row["prompt_ids"]) if row["prompt_ids"] else row["problem"]["message"] for row in made]

    user, answered = {"role": "user", "content": "how many"}, {"role": "assistant", "content": "apples"}
    row: dict[str, Any] = {"messages": [user], "tools": [{"name": "pens"}], "documents": '[{"text": "she"}]'}
    thinks, wrong = {"chat_template_kwargs": {"thinking": True}}, {"chat_template_kwargs": {"thinkin": True}}
    assert prompts(row, row | thinks, {"messages": [user, answered]}) == [
        "pens she how many be",
        "pens she how many friendbe",
        "how many apples",
    ]
    every = {"chat_template_kwargs": {"thinking": True, "add_generation_prompt": False}}
    assert prompts(row, row | {"chat_template_kwargs": {"thinking": False}}, **every) == [
        "pens she how many friend",
        "pens she how many ",
    ]
    (refused,) = prompts(row | wrong)
    assert "it reads no thinkin, which would have no effect" in refused
    (text,) = requests(tmp_path, [{"prompt": "how many"}], PromptSource("prompt"), **every)
    assert tokenizer.decode(text["prompt_ids"]) == "how many friend"
    body = {
        "model": "m",
        "messages": [user],
        "tools": [{"type": "function", "function": {"name": "pens"}, "name": "pens"}],
    }
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": json.dumps(body), "sample": 0}
    (batch,) = requests(tmp_path, [line], PromptSource("body", "openai"), **every)
    assert tokenizer.decode(batch["prompt_ids"]) == "pens how many friend"


@pytest.mark.parametrize("chat", [False, True])
def test_a_row_on_which_the_tokeniser_panics_is_a_problem_of_its_own(tmp_path: Path, chat: bool) -> None:
    made = Tokenizer(models.BPE(vocab={"a": 0, "c": 1, "h": 2, "i": 3}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")  # its search gives up on some texts
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    rows = [{"prompt": text} for text in ("hi", "a" * 40 + "c", "ac")]
    found = requests(tmp_path, rows, PromptSource("prompt"), chat=chat)
    assert [row["prompt_ids"] for row in found] == [[2, 3], None, [0, 1]]
    assert [row["problem"] and row["problem"]["type"] for row in found] == [None, "BadPrompt", None]
    assert "the tokenizer of the model fails on this text" in found[1]["problem"]["message"]


def test_rows_that_cannot_be_requests_keep_their_place(model: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": '[{"role": "user", "content": "a"}]', "sampling": None},
        {"messages": '[{"role": "forbidden", "content": "a"}]', "sampling": None},
        {"messages": '[{"role": "user", "content": "a"}]', "sampling": '{"top_k": -1}'},
        {"messages": "", "sampling": None},
    ]
    made = requests(model, rows, PromptSource("messages", "messages"))
    assert [row["request_id"] for row in made] == ["0", "1", "2", "3"]
    assert [row["problem"] and row["problem"]["type"] for row in made] == [
        None,
        "BadPrompt",
        "BadSampling",
        "BadPrompt",
    ]
    assert [row["prompt_ids"] is None for row in made] == [False, True, True, True]
    assert "no such role" in made[1]["problem"]["message"]


def test_a_prompt_that_no_engine_takes_does_not_travel_to_one(model: Path) -> None:
    long, short = requests(model, [{"prompt": "x" * 200}, {"prompt": "x" * 199}], PromptSource("prompt"), chat=False)
    assert long["prompt_ids"] is None
    assert long["problem"]["type"] == "Refused"
    assert "the prompt has 200 tokens, but prompt and output together may have 200" in long["problem"]["message"]
    assert (len(short["prompt_ids"]), short["problem"]) == (199, None)


def test_a_text_that_cannot_be_short_enough_is_not_even_tokenised(model: Path) -> None:
    part = {"type": "text", "text": "A" * 1_000_000}
    rows = [{"messages": json.dumps([{"role": "user", "content": [part]}])}]
    (made,) = requests(model, rows, PromptSource("messages", "messages"))
    assert made["problem"]["type"] == "Refused"
    assert "characters" in made["problem"]["message"]


def test_choices_have_the_same_seeds_in_a_batch_file_as_at_the_endpoint(model: Path, plain: SpeculativeLM) -> None:
    body = {"model": "m", "prompt": ["how many", "does she"], "n": 2, "seed": 5}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": json.dumps(body)}
    made = requests(model, [{**line, "sample": sample} for sample in range(4)], BATCH)
    call = Call(parse_completion(body), speculation=False)
    asked = Answers(plain, "replica", seconds=PATIENCE)._requests(call)
    assert [row["prompt_ids"] for row in made] == [list(one.prompt_ids) for one in asked]
    seeds = [json.loads(row["sampling"])["seed"] for row in made]
    assert seeds == [one.sampling.seed for one in asked] == [5, sample_seed(5, 1)] * 2


def test_sampling_survives_its_trip_as_json() -> None:
    sampling = SamplingParams(temperature=0.3, top_k=4, stop=("a", "b"), seed=2**63 - 1, ignore_eos=True)
    assert SamplingParams(**json.loads(json.dumps(dataclasses.asdict(sampling)))) == sampling


def test_what_a_message_says_is_text_unless_the_run_says_otherwise(model: Path) -> None:
    rows = [{"prompt": text} for text in ("how many", "how<|end|>many", "<|user|>")]
    user, end, assistant = 2, 0, 3
    for found, ids in (([], {}), ([end, user], {"special_tokens": True})):
        made = [row["prompt_ids"] for row in requests(model, rows, PromptSource("prompt"), **ids)]
        inside = [token for row in made for token in row[1:-2] if token in (user, end, assistant)]
        assert inside == found
        assert all((row[0], *row[-2:]) == (user, end, assistant) for row in made)
    # A prompt that goes through no template is taken as it is.
    (bare,) = requests(model, rows[1:2], PromptSource("prompt"), chat=False)
    assert end in bare["prompt_ids"]


def test_a_row_that_cannot_be_text_costs_no_other(tmp_path: Path) -> None:
    """The tokeniser knows whole words only."""
    words = {word: place for place, word in enumerate(["<unk>", "<|end|>", "how", "many"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }} <|end|> {% endfor %}"
    wrapped.save_pretrained(tmp_path)
    rows = [{"prompt": text} for text in ("how many", "how <|end|> many", "many")]
    first, refused, last = requests(tmp_path, rows, PromptSource("prompt"))
    assert (first["prompt_ids"], last["prompt_ids"]) == ([2, 3, 1], [3, 1])
    assert (refused["prompt_ids"], refused["sampling"]) == (None, None)
    assert refused["problem"]["type"] == "BadPrompt"
    assert "a message has the text of a special token of the model ('<|end|>')" in refused["problem"]["message"]
