"""The stages `openings` and `prompts`: what the base writes questions from, and which prompts it answers.

That an instruct model writes its own prompts is Magpie (Xu et al. 2024, arXiv 2406.08464); see `recipes/smollm2`. No
question that heads are measured on becomes a prompt, and none that is nearly the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import yaml

from drafter.errors import one_line
from drafter.evaluation.questions import QuestionError, read_questions
from drafter.text.tokenizers import load_tokenizer
from pipeline.errors import InputError
from pipeline.io.files import locate
from recipes.paper.paper_config import PromptFile, PromptsConfig, in_repository
from recipes.smollm2.magpie import Repeats, choose, opening
from recipes.smollm2.rounds import HERE as SMOLLM2
from recipes.smollm2.rounds import generated, prompt_rows


def write_openings(count: int, base: Path, file: Path) -> None:
    """Write where the base writes a question each, named by its number, from which its seed follows.

    Args:
        count: How many.
        base: The base's folder.
        file: Where they go.

    Raises:
        InputError: The file is of another run.
    """
    tokenizer = load_tokenizer(base)
    systems = yaml.safe_load((SMOLLM2 / "openings.yaml").read_text(encoding="utf-8"))
    openings = [beginning(tokenizer, system) for system in systems]
    _write(file, ({"number": number, "prompt": openings[number % len(openings)]} for number in range(count)))


def beginning(tokenizer: Any, system: str | None) -> str:
    """Return the chat template's text up to where the user's message begins, as a text prompt has it.

    A text prompt is given the tokens that begin a text, so the template's own are left out. A space at the end goes,
    too: with most tokenisers it is a part of the word that follows.

    Args:
        tokenizer: Has the chat template.
        system: The system message; None leaves it to the template.
    """
    text = opening(tokenizer, system).rstrip(" ")
    first = tokenizer("")["input_ids"]
    return text.removeprefix(tokenizer.decode(first)) if first else text


def write_prompts(config: PromptsConfig, measured: Mapping[str, str], questions: Path, file: Path) -> None:
    """Choose the prompts: those questions of the base that are of use, and those of the files.

    Args:
        config: Says which.
        measured: Files of questions that heads are measured on, by name.
        questions: What the base wrote, as `drafter generate` leaves it; not read if it wrote nothing.
        file: Where they go, each with its temperature.

    Raises:
        InputError: A file cannot be used, no prompt is left, or the file is of another run.
    """
    known = measured_turns(measured)
    written = choose(generated(questions), known) if config.written else []
    repeats = Repeats()
    for text in known:
        repeats.add(text)
    sources = [("written", text) for text in written]
    for one in config.files:
        sources += [(one.path, text) for text in read_prompts(one) if not repeats.has(text)]
    if not sources:
        raise InputError("no prompt is left: none of the questions that the base wrote is of use; name prompts.files")
    _write(file, prompt_rows(sources))
    print(f"{len(sources)} prompts, {len(written)} of them written by the base", flush=True)


def measured_turns(files: Mapping[str, str]) -> list[str]:
    """Return what is said in the questions that heads are measured on.

    Raises:
        InputError: A file cannot be used.
    """
    try:
        return [turn for file in files.values() for one in read_questions(in_repository(file)) for turn in one.turns]
    except QuestionError as error:
        raise InputError(str(error)) from error


def read_prompts(file: PromptFile) -> list[str]:
    """Return the prompts of a file.

    Raises:
        InputError: It cannot be read, or a line has no such text.
    """
    try:
        with pyarrow.input_stream(str(in_repository(file.path))) as packed:  # it unpacks what is compressed
            text = packed.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompts.files: {file.path} cannot be read: {one_line(error)}") from error
    prompts: list[str] = []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        if len(prompts) == file.rows:
            break
        try:
            text = json.loads(line)[file.column]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"prompts.files: {file.path}, line {number} has no {file.column!r}") from error
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"prompts.files: {file.path}, line {number}: {file.column!r} is not a text")
        prompts.append(text)
    return prompts


def _write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a file of JSON lines, which appears when it is complete; one that is there must be the same.

    Raises:
        InputError: It is another one.
    """
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if file.exists():
        if file.read_text(encoding="utf-8") != text:
            raise InputError(f"{file} was made with other settings: choose another output")
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    locate(str(file)).write_text(text)
