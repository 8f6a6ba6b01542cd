"""Prompts of rows and of calls: as a chat template or the model's processor writes them, and their tokens.

A worker does it, which imports no model code: that takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from drafter.errors import PromptTooLongError, RequestError, shown
from drafter.half_characters import parsed_json, refuse_half_characters
from drafter.images.messages import has_images
from drafter.prompt import Prompt
from drafter.prompt_kinds import is_tokens, plain
from drafter.requests import SamplingParams
from drafter.text.chat import Chat, encode_chats, render_chat
from drafter.text.conversation import Conversation
from drafter.text.tokenizers import (
    load_tokenizer,
    longest_token,
    refuse_endless,
    refuse_long,
    tokenise_each,
)
from pipeline.cluster.model_copies import model_name
from pipeline.errors import RowError, UnavailableError
from pipeline.generate.row_images import IMAGES, ImageReading, images_of, row_sources, with_marks, with_places
from pipeline.io.listing import PromptSource
from pipeline.io.reading import UnreadableValueError
from pipeline.openai.requests import SEES_NOTHING
from pipeline.openai.requests import Prompt as AskedPrompt
from pipeline.settings import TEMPLATE_COLUMNS, ReadingConfig

if TYPE_CHECKING:
    from drafter.images.processor import ImageProcessor

MESSAGES, TEXT, IDS = "messages", "prompt", "prompt_token_ids"
PROMPTS = (MESSAGES, TEXT, IDS)
"""Columns that have the prompt of a call, or of a row of a dataset; the first that there is counts."""
_TOKENS = 2**31  # more than any vocabulary has; ids below it fit the columns in which prompts travel
Written = str | Chat | Prompt
"""A text, a chat as its template writes it, or what needs no tokeniser any more."""


@dataclass(frozen=True)
class PromptSettings:
    """Settings of `to_requests`.

    Args:
        max_length: Most tokens of prompt and output together that any engine of the run takes.
        images: How images are read; None where the target model sees none.
        now: The time that chat templates see, the same for all rows of an output whenever they are generated.
    """

    tokenizer: str
    trust_remote_code: bool
    source: PromptSource
    reading: ReadingConfig
    sampling: SamplingParams
    max_length: int
    now: datetime | None = None
    images: ImageReading | None = None


@dataclass(frozen=True)
class Encoder:
    """A target model's tokeniser, and its processor of images if it sees."""

    tokenizer: Any
    processor: ImageProcessor | None = None


@lru_cache(maxsize=2)
def encoder_of(name: str, trust_remote_code: bool, sees: bool) -> Encoder:
    """Return the encoder of a target model, loaded once in a process."""
    name = model_name(name)
    if sees:
        from drafter.images.processor import load_processor  # late, as it imports transformers' models

        processor = load_processor(name, trust_remote_code=trust_remote_code)
        assert processor is not None
        return Encoder(processor.tokenizer, processor)
    return Encoder(load_tokenizer(name, trust_remote_code=trust_remote_code))


# Of a row whose prompt is in a column that the job has found.


def row_prompt(
    row: Mapping[str, Any], images: Sequence[tuple[Any, str | None]], settings: PromptSettings, encoder: Encoder
) -> Written:
    """Return the prompt of a row, in a job or a stage of Ray Data, as its template or its processor writes it.

    Args:
        row: The columns that its prompt is made of. Messages have places for the images.
        images: The source of each image, and its identity if it is known.

    Raises:
        RowError: There is none, or it cannot be read.
    """
    if images and encoder.processor is None:
        raise RowError("BadPrompt", SEES_NOTHING)
    return written(_prompt_of(row, settings, encoder, len(images)), images, settings, encoder)


def written(
    prompt: AskedPrompt, images: Sequence[tuple[Any, str | None]], settings: PromptSettings, encoder: Encoder
) -> Written:
    """Return a prompt as it goes to the tokeniser, or `RowError`; see `row_prompt`."""
    if isinstance(prompt, list):
        return Prompt(prompt)
    if isinstance(prompt, str) and not images:
        return prompt
    every = settings.reading.chat_template_kwargs or {}
    try:
        asked: Conversation | str = prompt
        if isinstance(prompt, Conversation):
            asked = replace(prompt, chat_template_kwargs={**every, **(prompt.chat_template_kwargs or {})})
        if isinstance(asked, Conversation) and not images:
            return render_chat(encoder.tokenizer, asked, settings.now)
        assert encoder.processor is not None
        assert settings.images is not None
        given = [settings.images.given(*one) for one in images]
        encode = partial(encoder.processor.encode, special_tokens=settings.reading.special_tokens, now=settings.now)
        return encode(asked, given, limits=settings.images.limits, max_length=settings.max_length)
    except PromptTooLongError as error:
        raise RowError("Refused", str(error)) from error
    except UnavailableError as error:
        raise RowError("ImageUnavailable", str(error)) from error
    except RequestError as error:
        raise RowError("BadPrompt", str(error)) from error


def _prompt_of(row: Mapping[str, Any], settings: PromptSettings, encoder: Encoder, images: int) -> AskedPrompt:
    chat, column, tokenizer = settings.reading.chat, settings.source.column, encoder.tokenizer
    value = row.get(column)
    if settings.source.kind == "messages":
        if encoder.processor is None and has_images(_from_json(value, column)):
            raise RowError("BadPrompt", SEES_NOTHING)
        return row_conversation(row, column)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise RowError("BadPrompt", f"column {column!r} is empty")
    if not isinstance(value, str):
        raise RowError("BadPrompt", f"column {column!r} must be a text, not {shown(value)}")
    through_template = tokenizer.chat_template is not None if chat is None else chat
    if images and encoder.processor is not None:
        mark: str = encoder.processor.processor.image_token
        return Conversation(with_places(value, images)) if through_template else with_marks(value, images, mark)
    return Conversation([{"role": "user", "content": value}]) if through_template else value


def row_conversation(row: Mapping[str, Any], column: str) -> Conversation:
    """Return what a row asks of the chat template; `RowError` if it cannot be read.

    Its messages, and the columns beside them, are lists and objects, or JSON texts of these.
    """
    messages = _from_json(row.get(column), column)
    if messages is None or messages == []:
        raise RowError("BadPrompt", f"column {column!r} has no messages")
    if not isinstance(messages, list):
        raise RowError(
            "BadPrompt", f"column {column!r} must be a list of messages with role and content, not {shown(messages)}"
        )
    try:
        return Conversation(messages, **{name: _from_json(row.get(name), name) for name in TEMPLATE_COLUMNS})
    except RequestError as error:
        raise RowError("BadPrompt", str(error)) from error


def _from_json(value: Any, column: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parsed_json(value) if value.strip() else None
    except RequestError as error:
        raise RowError("BadPrompt", f"column {column!r}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise RowError("BadPrompt", f"column {column!r} is not JSON, but {shown(value)}: {error}") from error


# Of a call, and of a row of a dataset, whose columns have fixed names.


def of_kind(settings: PromptSettings, kind: str) -> PromptSettings:
    """Return settings for prompts in the column `kind`, one of `PROMPTS`."""
    return replace(settings, source=PromptSource(kind, "messages" if kind == MESSAGES else "text"))


def call_prompt(asked: Mapping[str, Any], settings: PromptSettings, encoder: Encoder) -> Prompt:
    """Return the prompt of one call: `prompt` are messages, token ids or a text, beside it are `images` and the like.

    Raises:
        RowError: There is none, or it cannot be read.
        RequestError: The same, of its images.
    """
    prompt = plain(asked[TEXT])
    kind = IDS if is_tokens(prompt) else MESSAGES if isinstance(prompt, list) else TEXT
    settings = of_kind(settings, kind)
    ((_, found),) = read_prompts({0: written_call({**asked, kind: prompt}, settings, encoder)}, settings, encoder)
    if isinstance(found, RowError):
        raise found
    return found


def written_call(row: Mapping[str, Any], settings: PromptSettings, encoder: Encoder) -> Written:
    """Return the prompt of a row with a column of them and one of `images`, before its texts are token ids.

    Raises as `call_prompt`.
    """
    for name, value in row.items():
        if isinstance(value, UnreadableValueError):
            raise RowError("BadPrompt", f"column {name!r} cannot be read: {value}")
    images, row = images_of(row[IMAGES]), {name: value for name, value in row.items() if name != IMAGES}
    refuse_half_characters(row)
    if settings.source.column == IDS:
        return _token_ids(plain(row[IDS]), images)
    if encoder.processor is not None:
        assert settings.images is not None
        images = row_sources(row, settings.source, images)
        settings.images.refuse_many(len(images))
    return row_prompt(row, [(one, None) for one in images], settings, encoder)


def _token_ids(ids: Any, images: Sequence[Any]) -> Prompt:
    if ids is None:
        raise RowError("BadPrompt", f"column {IDS!r} is empty")
    if images:
        raise RowError("BadPrompt", f"column {IDS!r} has no places for images: give {MESSAGES} or a {TEXT}")
    if not is_tokens(ids):
        raise RowError("BadPrompt", f"column {IDS!r} must be a list of token ids, not {shown(ids)}")
    if strange := [int(token) for token in ids if not 0 <= token < _TOKENS]:
        raise RowError("BadPrompt", f"column {IDS!r} has {shown(strange[0])}, which is no token's id")
    return Prompt([int(token) for token in ids])


# Tokens.


def read_prompts(
    prompts: Mapping[int, Written], settings: PromptSettings, encoder: Encoder
) -> Iterator[tuple[int, Prompt | RowError]]:
    """Yield each prompt in tokens, by its row's place, or why there is none. Texts are tokenised together."""
    tokenizer = encoder.tokenizer
    known: dict[int, Prompt] = {}
    texts: dict[int, str] = {}
    chats: dict[int, Chat] = {}
    for index, prompt in prompts.items():
        if isinstance(prompt, Prompt):
            known[index] = prompt
            continue
        try:
            text = prompt.text if isinstance(prompt, Chat) else prompt
            refuse_endless(text, settings.max_length, longest_token(tokenizer))
        except RequestError as error:
            yield index, RowError("Refused", str(error))
            continue
        if isinstance(prompt, Chat):
            chats[index] = prompt
        else:
            texts[index] = prompt
    of_texts = tokenise_each(tokenizer, list(texts.values()))
    of_chats = encode_chats(tokenizer, list(chats.values()), special_tokens=settings.reading.special_tokens)
    for index, found in chain(known.items(), zip(texts, of_texts, strict=True), zip(chats, of_chats, strict=True)):
        if isinstance(found, RequestError):
            yield index, RowError("BadPrompt", str(found))
            continue
        made = found if isinstance(found, Prompt) else Prompt(found)
        try:  # the numbers of a long prompt would travel on, only to be refused by an engine
            refuse_long(len(made.ids), settings.max_length)
        except RequestError as error:
            yield index, RowError("Refused", str(error))
        else:
            yield index, made
