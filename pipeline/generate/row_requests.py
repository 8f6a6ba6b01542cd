"""Rows become requests: prompt, chat template, tokens, sampling settings and seed.

A worker does it, which imports no model code: that takes seconds.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from drafter.errors import PromptTooLongError, RequestError, shown, unknown_setting
from drafter.images.messages import has_images
from drafter.many import is_tokens, plain
from drafter.prompt import Prompt as ReadPrompt
from drafter.requests import SEEDS, SamplingParams, hashed_seed, sample_seed
from drafter.text.chat import Chat, encode_chats, render_chat
from drafter.text.conversation import Conversation
from drafter.text.tokenizers import (
    load_tokenizer,
    longest_token,
    refuse_endless,
    refuse_half_characters,
    refuse_long,
    tokenise,
)
from pipeline.cluster.model_copies import model_name
from pipeline.engines.models import longest_request
from pipeline.errors import RowError
from pipeline.generate.checks import Job
from pipeline.generate.row_images import (
    IMAGES,
    ImageReading,
    images_key,
    images_of,
    row_sources,
    staged_images,
    with_marks,
    with_places,
)
from pipeline.generate.staging import SAMPLE_COLUMN, SEED_COLUMN
from pipeline.io.column_types import whole
from pipeline.io.listing import PromptSource
from pipeline.io.parts import pack, unpack, with_problems
from pipeline.io.prompts import prompt_columns
from pipeline.io.reading import UnreadableValueError
from pipeline.openai.batch import parse_line
from pipeline.openai.errors import OpenAIError
from pipeline.openai.requests import SEES_NOTHING, ParsedRequest, Prompt
from pipeline.settings import SAMPLING_COLUMN, TEMPLATE_COLUMNS, ReadingConfig

if TYPE_CHECKING:
    from drafter.images.processor import ImageProcessor

_INTEGER = re.compile(r"-?[0-9]{1,20}")
_EXACT_FLOATS = 2**53  # integers below are exact as floats

MESSAGES, TEXT, IDS = "messages", "prompt", "prompt_token_ids"
PROMPTS = (MESSAGES, TEXT, IDS)
"""Columns that have a row's prompt; the first that there is counts."""


def row_sampling(
    defaults: SamplingParams, seed_name: str, row: dict[str, Any], column: str, sample: int = 0
) -> SamplingParams:
    """Return a row's settings: the run's, overridden by its `seed` column and then by `column`.

    Args:
        seed_name: What the seed follows from if the row has none.
        sample: Index of the sample among the row's samples.

    Raises:
        RowError: The row's settings are not an object, have an unknown name, or an invalid value.
    """
    own = _own_settings(row.get(column), column)
    own_seed = own.get("seed", _column_seed(row.get(SEED_COLUMN)))
    own["seed"] = hashed_seed(defaults.seed, seed_name) if own_seed is None else own_seed
    try:
        sampling = dataclasses.replace(defaults, **own)
    except (RequestError, TypeError) as error:
        raise RowError("BadSampling", str(error)) from error
    if sampling.seed >= SEEDS:
        raise RowError("BadSampling", f"seed must be less than 2**63, not {shown(sampling.seed)}")
    return sampling if own_seed is None else dataclasses.replace(sampling, seed=sample_seed(own_seed, sample))


def _own_settings(value: Any, column: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise RowError("BadSampling", f"column {column!r} is not JSON: {error}") from error
    if value is not None and not isinstance(value, dict):
        raise RowError("BadSampling", f"column {column!r} must be an object of sampling settings, not {shown(value)}")
    own = {name: _plain_setting(setting) for name, setting in (value or {}).items() if setting is not None}
    if problem := unknown_setting(sorted(own), SamplingParams):
        raise RowError("BadSampling", f"column {column!r}: {problem}")
    return own


def _plain_setting(setting: Any) -> Any:
    # As in JSON: a table has null entries, which are other rows' keys, and whole floats for integers.
    if isinstance(setting, dict):
        return {name: value for name, value in setting.items() if value is not None}
    return _integer_if_whole(setting)


def _integer_if_whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_FLOATS else value


def _column_seed(value: Any) -> Any:
    # It is text in a CSV, and a float where pandas found missing values.
    if isinstance(value, str):
        return int(value) if _INTEGER.fullmatch(value) else value or None
    return _integer_if_whole(value)


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


def settings_of(job: Job) -> PromptSettings:
    """Return the settings by which a job makes requests of its rows."""
    config, date = job.config, job.meaning["reading"]["date"]
    name, trusted = model_name(config.model), config.loading.trust_remote_code
    return PromptSettings(
        config.model or name,  # by which each machine finds its own copy
        trusted,
        job.prompts,
        config.reading,
        config.sampling,
        longest_request(name, config.engine.longest, trust_remote_code=trusted),
        None if date is None else datetime.fromisoformat(date),
        job.images,
    )


Rendered = str | list[int] | Chat | ReadPrompt
"""A text, a chat as its template writes it, or what needs no tokeniser any more."""


def _row_request(
    seed_name: str, row: dict[str, Any], settings: PromptSettings, encoder: Encoder, sample: int, images: Sequence[Any]
) -> tuple[Rendered, SamplingParams]:
    identities: list[str] = row.pop(images_key(settings.source), [])
    if settings.source.kind == "openai":
        request, prompt, sampling = _batch_request(seed_name, row, settings.sampling, encoder.tokenizer, sample)
        identities = _identities(request.images, settings.images)
        return _written(prompt, list(zip(request.images, identities, strict=True)), settings, encoder), sampling
    sampling = row_sampling(settings.sampling, seed_name, row, SAMPLING_COLUMN, sample)
    return row_prompt(row, list(zip(images, identities, strict=True)), settings, encoder), sampling


def row_prompt(
    row: Mapping[str, Any], images: Sequence[tuple[Any, str | None]], settings: PromptSettings, encoder: Encoder
) -> Rendered:
    """Return the prompt of a row, in a job or a stage of Ray Data, as its template or its processor writes it.

    Args:
        row: The columns that its prompt is made of. Messages have places for the images.
        images: The source of each image, and its identity if it is known.

    Raises:
        RowError: There is none, or it cannot be read.
    """
    if images and encoder.processor is None:
        raise RowError("BadPrompt", SEES_NOTHING)
    return _written(_prompt_of(row, settings, encoder, len(images)), images, settings, encoder)


def _written(
    prompt: Prompt, images: Sequence[tuple[Any, str | None]], settings: PromptSettings, encoder: Encoder
) -> Rendered:
    if isinstance(prompt, list) or (isinstance(prompt, str) and not images):
        return prompt
    every = settings.reading.chat_template_kwargs or {}
    try:
        asked: Conversation | str = prompt
        if isinstance(prompt, Conversation):
            asked = dataclasses.replace(prompt, chat_template_kwargs={**every, **(prompt.chat_template_kwargs or {})})
        if isinstance(asked, Conversation) and not images:
            return render_chat(encoder.tokenizer, asked, settings.now)
        assert encoder.processor is not None
        assert settings.images is not None
        given = [settings.images.given(*one) for one in images]
        encode = partial(encoder.processor.encode, special_tokens=settings.reading.special_tokens, now=settings.now)
        return encode(asked, given, limits=settings.images.limits, max_length=settings.max_length)
    except PromptTooLongError as error:
        raise RowError("Refused", str(error)) from error
    except RequestError as error:
        raise RowError("BadPrompt", str(error)) from error


def _identities(images: Sequence[str], reading: ImageReading | None) -> list[str]:
    """Return the identities of a request's images, which have nothing else to be checked by than their addresses.

    Raises:
        RowError: The target model sees no images, or there are too many.
    """
    if images and reading is None:
        raise RowError("BadRequest", SEES_NOTHING)
    try:
        if reading is not None:
            reading.refuse_many(len(images))
    except RequestError as error:
        raise RowError("BadRequest", str(error)) from error
    return list(images)


def _prompt_of(row: Mapping[str, Any], settings: PromptSettings, encoder: Encoder, images: int) -> Prompt:
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


def _batch_request(
    seed_name: str, line: dict[str, Any], defaults: SamplingParams, tokenizer: Any, sample: int
) -> tuple[ParsedRequest, Prompt, SamplingParams]:
    try:
        asked = parse_line(line).for_model(tokenizer)
        sampling = asked.sampling(defaults)
    except OpenAIError as error:
        raise RowError("BadRequest", error.message) from error
    own_seed = asked.settings.get("seed")
    seed = hashed_seed(defaults.seed, seed_name) if own_seed is None else sample_seed(own_seed, sample)
    return asked, asked.prompts[sample // asked.n], dataclasses.replace(sampling, seed=seed)


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
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise RowError("BadPrompt", f"column {column!r} is not JSON, but {shown(value)}: {error}") from error


# Tokens.


def to_requests(block: pa.Table, settings: PromptSettings) -> pa.Table:
    return pack((part, make_requests(rows, settings)) for part, rows in unpack(block))


def make_requests(rows: pa.Table, settings: PromptSettings) -> pa.Table:
    """Replace `seed_name`, `asked` and `images` of staged rows by `PROMPT_COLUMNS` and `sampling` (`SamplingParams`).

    The latter are JSON. Rows without a valid request get a `problem` and nulls instead.
    """
    encoder = encoder_of(settings.tokenizer, settings.trust_remote_code, settings.images is not None)
    tokenizer = encoder.tokenizer
    problems = rows["problem"].to_pylist()
    prompts: dict[int, Rendered] = {}
    samplings: dict[int, str] = {}
    samples, structs = [0] * rows.num_rows, whole(rows["row"])
    if settings.source.kind == "openai" or settings.reading.samples > 1:
        samples = structs.field(structs.type.get_field_index(SAMPLE_COLUMN)).to_pylist()
    columns = (rows["seed_name"].to_pylist(), rows["asked"].to_pylist(), samples)
    for index, (name, asked, sample) in enumerate(zip(*columns, strict=True)):
        if problems[index] is not None:
            continue
        images = _images(rows, structs, index, settings.source.images_column)
        try:
            prompt, sampling = _row_request(name, json.loads(asked), settings, encoder, sample, images)
        except RowError as error:
            problems[index] = vars(error.problem)
        else:
            prompts[index], samplings[index] = prompt, json.dumps(dataclasses.asdict(sampling))
    read: dict[int, ReadPrompt] = {}
    for index, found in read_prompts(prompts, settings, tokenizer):
        if isinstance(found, RowError):
            problems[index] = vars(found.problem)
        else:
            read[index] = found
    numbers = range(len(problems))
    used = [name for name in ("seed_name", "asked", IMAGES) if name in rows.column_names]
    rows = with_problems(rows, problems).drop_columns(used)
    for name, column in prompt_columns(map(read.get, numbers), images=settings.images is not None).items():
        rows = rows.append_column(name, column)
    texts = [samplings[index] if index in read else None for index in numbers]
    return rows.append_column("sampling", pa.array(texts, pa.string()))


def _images(rows: pa.Table, structs: pa.StructArray, index: int, column: str | None) -> list[Any]:
    """Return the sources of the images of a staged row."""
    addresses = rows[IMAGES][index].as_py() if IMAGES in rows.column_names else None
    if not addresses or None not in addresses or column is None:
        return addresses or []
    return staged_images(addresses, structs.field(structs.type.get_field_index(column))[index].as_py())


def read_prompts(
    prompts: Mapping[int, Rendered], settings: PromptSettings, tokenizer: Any
) -> Iterator[tuple[int, ReadPrompt | RowError]]:
    """Yield each prompt in tokens, by its row's place, or why there is none."""
    fitting: dict[int, Rendered] = {}
    for index, prompt in prompts.items():
        text = prompt.text if isinstance(prompt, Chat) else prompt
        try:
            if isinstance(text, str):
                refuse_endless(text, settings.max_length, longest_token(tokenizer))
        except RequestError as error:
            yield index, RowError("Refused", str(error))
        else:
            fitting[index] = prompt
    for index, found in _tokenise(fitting, tokenizer, special_tokens=settings.reading.special_tokens):
        if isinstance(found, RequestError):
            yield index, RowError("BadPrompt", str(found))
            continue
        made = found if isinstance(found, ReadPrompt) else ReadPrompt(found)
        try:  # the numbers of a long prompt would travel on, only to be refused by an engine
            refuse_long(len(made.ids), settings.max_length)
        except RequestError as error:
            yield index, RowError("Refused", str(error))
        else:
            yield index, made


def _tokenise(
    prompts: dict[int, Rendered], tokenizer: Any, *, special_tokens: bool
) -> Iterator[tuple[int, list[int] | ReadPrompt | RequestError]]:
    # Texts are tokenised together, in parallel.
    texts = {index: prompt for index, prompt in prompts.items() if isinstance(prompt, str)}
    chats = {index: prompt for index, prompt in prompts.items() if isinstance(prompt, Chat)}
    yield from ((index, prompt) for index, prompt in prompts.items() if isinstance(prompt, list | ReadPrompt))
    yield from zip(texts, _encode_texts(tokenizer, list(texts.values())), strict=True)
    yield from zip(chats, encode_chats(tokenizer, list(chats.values()), special_tokens=special_tokens), strict=True)


def _encode_texts(tokenizer: Any, texts: list[str]) -> list[list[int] | RequestError]:
    if not texts:
        return []
    try:
        return list(tokenise(tokenizer, texts)["input_ids"])
    except RequestError as error:
        return [error] if len(texts) == 1 else [one for text in texts for one in _encode_texts(tokenizer, [text])]


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


def call_prompt(asked: Mapping[str, Any], settings: PromptSettings, encoder: Encoder) -> ReadPrompt:
    """Return the prompt of one call: `prompt` are messages, token ids or a text, beside it are `images` and the like.

    Raises:
        RowError: There is none, or it cannot be read.
        RequestError: The same, of its images.
    """
    prompt = plain(asked[TEXT])
    kind = IDS if is_tokens(prompt) else MESSAGES if isinstance(prompt, list) else TEXT
    source = PromptSource(kind, "messages" if kind == MESSAGES else "text")
    settings = replace(settings, source=source)
    written = written_call({**asked, kind: prompt}, settings, encoder)
    ((_, found),) = read_prompts({0: written}, settings, encoder.tokenizer)
    if isinstance(found, RowError):
        raise found
    return found


def written_call(row: dict[str, Any], settings: PromptSettings, encoder: Encoder) -> Rendered:
    """Return the prompt of a row with one column of them, before its texts are token ids; `RowError` if it has none."""
    for name, value in row.items():
        if isinstance(value, UnreadableValueError):
            raise RowError("BadPrompt", f"column {name!r} cannot be read: {value}")
    refuse_half_characters({name: value for name, value in row.items() if name != IMAGES})
    images, kind = images_of(row.pop(IMAGES)), settings.source.column
    if kind == IDS:
        return _token_ids(row, images)
    if encoder.processor is not None:
        assert settings.images is not None
        images = row_sources(row, settings.source, images)
        settings.images.refuse_many(len(images))
    return row_prompt(row, [(one, None) for one in images], settings, encoder)


def _token_ids(row: Mapping[str, Any], images: Sequence[Any]) -> list[int]:
    ids = row[IDS]
    if ids is None:
        raise RowError("BadPrompt", f"column {IDS!r} is empty")
    if images:
        raise RowError("BadPrompt", f"column {IDS!r} has no places for images: give {MESSAGES} or a {TEXT}")
    if not is_tokens(ids):
        raise RowError("BadPrompt", f"column {IDS!r} must be a list of token ids, not {shown(ids)}")
    return [int(token) for token in ids]
