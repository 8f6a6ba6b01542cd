"""Which prompts the base answers, and where it writes questions of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from tokenizers.processors import TemplateProcessing

from drafter.embedded import EMBEDDED_BASE
from drafter.text.tokenizers import load_tokenizer
from pipeline.errors import InputError
from recipes.paper.distillation_prompts import beginning, measured_turns, read_prompts, write_openings, write_prompts
from recipes.paper.paper_config import PromptFile, PromptsConfig

MEASURED = {"chat": "data/chat-prompts/questions.jsonl", "gsm8k": "data/gsm8k/test.jsonl"}


def write_written(folder: Path, texts: list[str]) -> Path:
    """What the base is said to have written, the last first, as a job may."""
    rows = [
        {"number": str(n), "text": text, "finish_reason": "stop", "num_output_tokens": 9}
        for n, text in enumerate(texts)
    ]
    (folder / "data").mkdir(parents=True)
    pa.parquet.write_table(pa.Table.from_pylist(rows[::-1]), folder / "data" / "part.parquet")
    return folder


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_nothing_that_is_measured_becomes_a_prompt(tmp_path: Path) -> None:
    measured = measured_turns(MEASURED)
    assert len(measured) == 80 + 1000
    written = write_written(tmp_path / "q", [measured[0], "What is the capital of France?", "zxq zxq zxq zxq"])
    (tmp_path / "more.jsonl").write_text(
        "".join(json.dumps({"said": text}) + "\n" for text in (measured[100], "How do\u2028I bake a cake?", "left out"))
    )
    config = PromptsConfig(3, [PromptFile(str(tmp_path / "more.jsonl"), "said", 2)])
    write_prompts(config, MEASURED, written, tmp_path / "prompts.jsonl")
    assert [row["prompt"] for row in read(tmp_path / "prompts.jsonl")] == [
        "What is the capital of France?",
        "How do\u2028I bake a cake?",
    ]


def test_a_third_of_the_prompts_is_sampled_and_a_file_is_made_once(tmp_path: Path) -> None:
    config = PromptsConfig(0, [PromptFile("data/gsm8k/train.jsonl.gz", "question", 6)])
    write_prompts(config, MEASURED, tmp_path, tmp_path / "prompts.jsonl")
    rows = read(tmp_path / "prompts.jsonl")
    assert [row["sampling"]["temperature"] for row in rows] == [0.0, 0.0, 0.7, 0.0, 0.0, 0.7]
    before = (tmp_path / "prompts.jsonl").stat().st_mtime_ns
    write_prompts(config, MEASURED, tmp_path, tmp_path / "prompts.jsonl")
    assert (tmp_path / "prompts.jsonl").stat().st_mtime_ns == before
    other = PromptsConfig(0, [PromptFile("data/gsm8k/train.jsonl.gz", "question", 7)])
    with pytest.raises(InputError, match="was made with other settings: choose another output"):
        write_prompts(other, MEASURED, tmp_path, tmp_path / "prompts.jsonl")


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    with pytest.raises(InputError, match=r"prompts.jsonl cannot be read"):
        read_prompts(PromptFile(str(file), "prompt"))
    for line, message in (("[1]", "line 2 has no 'prompt'"), ('{"prompt": ""}', "line 2: 'prompt' is not a text")):
        file.write_text(f'{{"prompt": "a"}}\n{line}\n')
        with pytest.raises(InputError, match=message):
            read_prompts(PromptFile(str(file), "prompt"))
    written = write_written(tmp_path / "q", ["zxq zxq"])
    with pytest.raises(InputError, match="no prompt is left"):
        write_prompts(PromptsConfig(1), MEASURED, written, tmp_path / "made.jsonl")
    with pytest.raises(InputError, match=r"question file .*nowhere\.jsonl cannot be read"):
        measured_turns({"mt-bench": "nowhere.jsonl"})


def beginning_with_a_token() -> Any:
    """A tokeniser that begins every text with a token, as Llama's does."""
    tokenizer = load_tokenizer(EMBEDDED_BASE)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    first = ("<s>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[first])
    tokenizer.chat_template = "{{ bos_token }}Be kind. USER: {{ messages[-1]['content'] }} ASSISTANT:"
    return tokenizer


def test_an_opening_ends_where_a_user_begins(tmp_path: Path) -> None:
    assert beginning(beginning_with_a_token(), None) == "Be kind. USER:"
    write_openings(14, EMBEDDED_BASE, tmp_path / "openings.jsonl")
    rows = read(tmp_path / "openings.jsonl")
    assert [row["number"] for row in rows] == list(range(14))
    assert rows[0]["prompt"] == "<|user|>"
    assert rows[1]["prompt"].startswith("<|system|>The user asks an AI assistant for help with programming.<|end|>")
    assert rows[1]["prompt"].endswith("<|user|>")
