"""What a row asks for: its prompt, through the chat template where there is one, and its settings."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from drafter.errors import RequestError, shown
from drafter.requests import SamplingParams
from drafter.text.chat import Chat, render_chat
from pipeline.errors import RowError
from pipeline.generate.row_sampling import row_sampling, row_seed
from pipeline.io.prompt_source import PromptSource
from pipeline.io.reading_config import ReadingConfig
from pipeline.openai.api_error import OpenAIError
from pipeline.openai.batch import parse_line
from pipeline.openai.parsed_request import is_messages
from pipeline.staging.samples import sample_seed


@dataclass(frozen=True)
class PromptSettings:
    """How rows become requests.

    Args:
        tokenizer: Hub id or folder.
        trust_remote_code: Run code that comes with the tokeniser.
        source: Where a row's prompt is.
        reading: Whether prompts are chats, and where a row's own settings are.
        sampling: The run's settings; a row's own override them.
        max_length: Tokens that no engine of the run takes more of, prompt and output together.
        now: What the clock shows chat templates: the same for all rows of an output, whenever they are generated.
    """

    tokenizer: str
    trust_remote_code: bool
    source: PromptSource
    reading: ReadingConfig
    sampling: SamplingParams
    max_length: int
    now: datetime | None = None


@dataclass(frozen=True)
class RowRequest:
    """What a row asks for.

    Args:
        prompt: A text or a chat to tokenise, or token ids.
        sampling: The row's settings.
    """

    prompt: str | Chat | list[int]
    sampling: SamplingParams


def row_request(
    request_id: str, row: dict[str, Any], settings: PromptSettings, tokenizer: Any, sample: int = 0
) -> RowRequest:
    """Return what a row asks for.

    Args:
        request_id: The row's name.
        row: Its columns that the job reads.
        settings: How rows become requests.
        tokenizer: Has the chat template.
        sample: Which of the row's texts this is.

    Raises:
        RowError: There is no prompt, the chat template does not take it, or the row's settings cannot be used.
    """
    if settings.source.kind == "openai":
        return _batch_request(request_id, row, settings, tokenizer, sample)
    reading, column = settings.reading, settings.source.column
    sampling = row_sampling(settings.sampling, request_id, row, reading.sampling_column, sample)
    value = row.get(column)
    if settings.source.kind == "messages":
        return RowRequest(_chat(row_messages(value, column), tokenizer, settings.now), sampling)
    if not isinstance(value, str) or not value.strip():
        raise RowError("BadPrompt", f"column {column!r} is empty")
    if tokenizer.chat_template is None if reading.chat is None else not reading.chat:
        return RowRequest(value, sampling)
    return RowRequest(_chat([{"role": "user", "content": value}], tokenizer, settings.now), sampling)


def _batch_request(
    request_id: str, line: dict[str, Any], settings: PromptSettings, tokenizer: Any, sample: int
) -> RowRequest:
    """Return what a row of an OpenAI batch asks for: one of the choices of its line."""
    defaults = settings.sampling
    try:
        asked = parse_line(line)
        sampling = asked.sampling(defaults)
    except OpenAIError as error:
        raise RowError("BadRequest", error.message) from error
    own_seed = asked.settings.get("seed")
    seed = row_seed(defaults.seed, request_id) if own_seed is None else sample_seed(own_seed, sample)
    sampling = dataclasses.replace(sampling, seed=seed)
    prompt = asked.prompts[sample // asked.n]
    if is_messages(prompt):
        return RowRequest(_chat(prompt, tokenizer, settings.now), sampling)
    return RowRequest(prompt, sampling)


def row_messages(value: Any, column: str) -> list[dict[str, Any]]:
    """Read a row's chat messages; fields that are null are left out.

    Args:
        value: What the row has in the column: a list of {role, content}, or that list as JSON text.
        column: The column's name, for messages.

    Raises:
        RowError: The value is neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError("BadPrompt", f"column {column!r} is not JSON, but {shown(value)}: {error}") from error
    if value is None or value == []:
        raise RowError("BadPrompt", f"column {column!r} has no messages")
    if not isinstance(value, list):
        raise RowError(
            "BadPrompt", f"column {column!r} must be a list of messages with role and content, not {shown(value)}"
        )
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise RowError(
                "BadPrompt", f"message {number} must be an object with role and content, not {shown(message)}"
            )
    messages = [{name: field for name, field in message.items() if field is not None} for message in value]
    for number, message in enumerate(messages, start=1):
        for name in ("role", "content"):
            if name not in message:
                raise RowError("BadPrompt", f"message {number} has no {name}")
        if not isinstance(role := message["role"], str):
            raise RowError("BadPrompt", f"role of message {number} must be text, not {shown(role)}")
        if not _is_content(content := message["content"]):
            what = "text or a list of typed parts"
            raise RowError("BadPrompt", f"content of message {number} must be {what}, not {shown(content)}")
    return messages


def _is_content(value: Any) -> bool:
    """Whether a chat template may know what to do with a message's content."""
    if isinstance(value, list):
        return all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in value)
    return isinstance(value, str)


def _chat(messages: list[dict[str, Any]], tokenizer: Any, now: datetime | None) -> Chat:
    try:
        return render_chat(tokenizer, messages, now)
    except RequestError as error:
        raise RowError("BadPrompt", str(error)) from error
