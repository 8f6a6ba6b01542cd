"""Questions to evaluate on, and their prompts, which are the same for every decoder.

A line of a file is a JSON object with `turns`, the list of the user's messages, as in MT-bench; with `prompt` or
`messages`, as `drafter generate` reads them; or with `question`, as in GSM8K. BFCL's `question` are lists of messages,
and its `function` the schemas of what may be called. It may have `question_id` (`task_id`, `id`) and `category`. Other
keys, such as the right answer, are for scoring.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter.drafters.contract import PlainDecoding
from drafter.engine.engine import Engine
from drafter.errors import RequestError
from drafter.evaluation.decoders import decode_all, room_for
from drafter.half_characters import refuse_half_characters
from drafter.images.messages import has_images
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from drafter.text.chat import encode_chat, joined_texts
from drafter.text.conversation import are_objects

_KEYS = ("turns", "prompt", "messages", "question")  # keys of the question's text, in order of precedence
_NAMES = ("question_id", "task_id", "id")


class QuestionError(ValueError):
    """A question file or a question cannot be used. The message says which one, what is wrong and what to do."""


@dataclass(frozen=True)
class Question:
    """One conversation: the user's messages, at least one. The target model answers after each.

    `name` is its `question_id` or its line, `category` empty if it has none.
    """

    name: str
    category: str
    turns: tuple[str, ...]


def read_questions(file: str | Path, limit: int | None = None) -> list[Question]:
    """Read JSON lines, packed by gzip if the name ends so; at most `limit` questions, spread evenly over the file, so
    that every category keeps its share.

    Raises `QuestionError` if the file cannot be read, has no question, or has a line that is not a question.
    """
    try:
        content = Path(file).expanduser().read_bytes()
        lines = (gzip.decompress(content) if str(file).endswith(".gz") else content).decode("utf-8-sig").split("\n")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise QuestionError(f"question file {file} cannot be read: {reason}") from error
    except UnicodeDecodeError as error:
        raise QuestionError(f"question file {file} is not UTF-8 text: give JSON lines") from error
    questions = [_question(file, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not questions:
        raise QuestionError(f"question file {file} is empty: give one JSON object per line, with a prompt")
    return spread(questions, limit)


def spread(questions: list[Question], limit: int | None) -> list[Question]:
    """Return at most `limit` questions, spread evenly."""
    if limit is None or limit >= len(questions):
        return questions
    return [questions[index * len(questions) // limit] for index in range(limit)]


def check_batches(name: str, questions: Sequence[Question], samples: int, batches: Sequence[int]) -> None:
    """Raise `QuestionError` if there are too few prompts, one per turn and sample, to fill the largest batch."""
    prompts, batch = samples * sum(len(question.turns) for question in questions), max(batches)
    if prompts < batch:
        raise QuestionError(
            f"questions {name}: {prompts} prompts do not fill a batch of {batch}: take more, or smaller batches"
        )


def _question(file: str | Path, number: int, line: str) -> Question:
    where = f"question file {file}, line {number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise QuestionError(f"{where}: not JSON: give a file of JSON lines ({error})") from error
    found = next((key for key in _KEYS if isinstance(row, dict) and key in row), None)
    if found is None:
        raise QuestionError(f"{where}: it must be an object with one of {', '.join(_KEYS)}")
    turns: Any = _turns_of(row[found], where) if found == "messages" else row[found]
    if found == "question" and isinstance(turns, list):
        turns = _turns_with_functions(turns, row.get("function"), where)
    elif found in ("prompt", "question"):
        turns = [turns]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise QuestionError(f"{where}: its {found} must hold texts, at least one, none empty")
    category = row.get("category") or ""
    if not isinstance(category, str):
        raise QuestionError(f"{where}: category must be a text, not {category!r}")
    name = next((str(row[key]) for key in _NAMES if row.get(key) is not None), f"line {number}")
    try:
        refuse_half_characters([name, category, *turns], "it")
    except RequestError as error:
        raise QuestionError(f"{where}: {error}") from error
    return Question(name, category, tuple(turns))


def _turns_with_functions(turns: list[Any], functions: Any, where: str) -> list[str]:
    """Return the turns of BFCL's layout, each a list of messages, as texts; the functions stand before the first.

    A turn without a message only adds a function there, which this leaves out.
    """
    try:
        texts = ["\n\n".join(message["content"] for message in messages) for messages in turns if messages]
    except (KeyError, TypeError) as error:
        raise QuestionError(f"{where}: its question must be a text, or a list of turns of {{role, content}}") from error
    if texts and functions:
        asked = "Answer with a call of one of these functions, as JSON:"
        texts[0] = f"{asked}\n{json.dumps(functions, ensure_ascii=False)}\n\n{texts[0]}"
    return texts


def _turns_of(messages: Any, where: str) -> list[Any]:
    """Return the user's messages of a chat; the target model's own answers replace the assistant's."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise QuestionError(f"{where}: its messages must be a list of {{role, content}}")
    if others := [one.get("role") for one in messages if one.get("role") not in ("user", "assistant")]:
        raise QuestionError(f"{where}: a message of the role {others[0]!r} is not evaluated: leave it out")
    if has_images(messages):
        raise QuestionError(
            f"{where}: its messages have an image, which is not evaluated: compare what drafter generate says of its "
            "speed with the drafter, and with none"
        )
    contents = [one.get("content") for one in messages if one["role"] == "user"]
    return [joined_texts(one) if are_objects(one) else one for one in contents]


@dataclass(frozen=True)
class Prompt:
    """One turn of a conversation, and the tokens of plain decoding's answer; `question` is the question's number."""

    request: Request
    category: str
    answer: list[int]
    question: int


def prompts_of(
    base: BaseModel,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    temperature: float,
    max_new_tokens: int,
    slots: int,
) -> list[Prompt]:
    """Return every turn of every question with plain decoding's answer, all first turns first.

    `slots` conversations are decoded together. Raises `QuestionError` if a prompt and its answer exceed the target
    model's positions, or the chat template refuses it.
    """
    histories: list[list[dict[str, str]]] = [[] for _ in questions]
    numbers = {question: number for number, question in enumerate(dict.fromkeys(questions))}  # equal ones are samples
    prompts: list[Prompt] = []
    for turn in range(max(len(question.turns) for question in questions)):
        asked = [pair for pair in zip(questions, histories, strict=True) if turn < len(pair[0].turns)]
        requests: list[Request] = []
        for question, history in asked:
            where = f"question {question.name}, turn {turn + 1}"
            history.append({"role": "user", "content": question.turns[turn]})
            try:
                ids = encode(tokenizer, history)
            except RequestError as error:
                raise QuestionError(f"{where}: {error}") from error
            if base.max_positions is not None and len(ids) + max_new_tokens > base.max_positions:
                raise QuestionError(
                    f"{where}: {len(ids)} tokens of prompt and {max_new_tokens} of answer are more than the model's "
                    f"{base.max_positions} positions: lower max_new_tokens, or leave the question out"
                )
            sampling = SamplingParams(max_new_tokens, temperature, seed=len(prompts) + len(requests))
            requests.append(Request(ids, sampling))
        engine = Engine(base, PlainDecoding(), tokenizer, room_for(requests, slots))
        made = decode_all(engine, requests).generations
        for (question, history), request, generation in zip(asked, requests, made, strict=True):
            history.append({"role": "assistant", "content": generation.text})
            prompts.append(Prompt(request, question.category, generation.token_ids, numbers[question]))
    return prompts


def encode(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Return the token ids of a conversation up to the assistant's next answer.

    Without a chat template the messages' texts are joined by empty lines. Raises `RequestError` if that fails.
    """
    if tokenizer.chat_template is None:
        return list(tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"])
    return encode_chat(tokenizer, messages)
