"""Staged rows become requests: their prompts, sampling settings and seeds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

import pyarrow as pa

from drafter.errors import RequestError, shown, unknown_setting
from drafter.prompt import Prompt
from drafter.requests import SamplingParams, hashed_seed, sample_seed
from pipeline.cluster.model_copies import model_name
from pipeline.engines.models import longest_request
from pipeline.errors import RowError
from pipeline.generate.checks import Job
from pipeline.generate.prompts import Encoder, PromptSettings, Written, encoder_of, read_prompts, row_prompt, written
from pipeline.generate.row_images import IMAGES, images_key, staged_images
from pipeline.generate.staging import SAMPLE_COLUMN, SEED_COLUMN
from pipeline.io.column_types import whole
from pipeline.io.parts import pack, unpack, with_problems
from pipeline.io.prompts import prompt_columns
from pipeline.openai.batch import parse_line
from pipeline.openai.errors import OpenAIError
from pipeline.openai.requests import refuse_images
from pipeline.settings import SAMPLING_COLUMN

_INTEGER = re.compile(r"-?[0-9]{1,20}")
_EXACT_FLOATS = 2**53  # integers below are exact as floats


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
        sampling = replace(defaults, **own)
    except (RequestError, TypeError) as error:
        raise RowError("BadSampling", str(error)) from error
    return sampling if own_seed is None else replace(sampling, seed=sample_seed(own_seed, sample))


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


def to_requests(block: pa.Table, settings: PromptSettings) -> pa.Table:
    return pack((part, make_requests(rows, settings)) for part, rows in unpack(block))


def make_requests(rows: pa.Table, settings: PromptSettings) -> pa.Table:
    """Replace `seed_name`, `asked` and `images` of staged rows by `PROMPT_COLUMNS` and `sampling` (`SamplingParams`).

    The latter are JSON. Rows without a valid request get a `problem` and nulls instead.
    """
    encoder = encoder_of(settings.tokenizer, settings.trust_remote_code, settings.images is not None)
    problems = rows["problem"].to_pylist()
    prompts: dict[int, Written] = {}
    samplings: dict[int, str] = {}
    structs = whole(rows["row"])
    for index, name, asked, sample in asked_of(rows, settings):
        images = _images(rows, structs, index, settings.source.images_column)
        try:
            prompt, sampling = _row_request(name, asked, settings, encoder, sample, images)
        except RowError as error:
            problems[index] = vars(error.problem)
        else:
            prompts[index], samplings[index] = prompt, json.dumps(asdict(sampling))
    read: dict[int, Prompt] = {}
    for index, found in read_prompts(prompts, settings, encoder):
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


def asked_of(rows: pa.Table, settings: PromptSettings) -> Iterator[tuple[int, str, dict[str, Any], int]]:
    """Yield the index, the seed's name, what is asked for and the sample number of staged rows without a problem."""
    samples = [0] * rows.num_rows
    if settings.source.kind == "openai" or settings.reading.samples > 1:
        structs = whole(rows["row"])
        samples = structs.field(structs.type.get_field_index(SAMPLE_COLUMN)).to_pylist()
    columns = (rows[name].to_pylist() for name in ("problem", "seed_name", "asked"))
    for index, (problem, name, asked, sample) in enumerate(zip(*columns, samples, strict=True)):
        if problem is None:
            yield index, name, json.loads(asked), sample


def _images(rows: pa.Table, structs: pa.StructArray, index: int, column: str | None) -> list[Any]:
    """Return the sources of the images of a staged row."""
    addresses = rows[IMAGES][index].as_py() if IMAGES in rows.column_names else None
    if not addresses or None not in addresses or column is None:
        return addresses or []
    return staged_images(addresses, structs.field(structs.type.get_field_index(column))[index].as_py())


def _row_request(
    seed_name: str, row: dict[str, Any], settings: PromptSettings, encoder: Encoder, sample: int, images: Sequence[Any]
) -> tuple[Written, SamplingParams]:
    if settings.source.kind == "openai":
        return _batch_request(seed_name, row, settings, encoder, sample)
    identities = row.pop(images_key(settings.source), [])
    sampling = row_sampling(settings.sampling, seed_name, row, SAMPLING_COLUMN, sample)
    return row_prompt(row, list(zip(images, identities, strict=True)), settings, encoder), sampling


def _batch_request(
    seed_name: str, line: dict[str, Any], settings: PromptSettings, encoder: Encoder, sample: int
) -> tuple[Written, SamplingParams]:
    try:
        asked = parse_line(line).for_model(encoder.tokenizer)
        sampling = asked.sampling(settings.sampling)
        refuse_images(len(asked.images), None if settings.images is None else settings.images.limits.images)
    except (OpenAIError, RequestError) as error:
        raise RowError("BadRequest", str(error)) from error
    own_seed = asked.settings.get("seed")
    seed = hashed_seed(settings.sampling.seed, seed_name) if own_seed is None else asked.seed_of(sample, own_seed)
    images = [(one, one) for one in asked.images]  # they have nothing else to be checked by than their addresses
    return written(asked.prompts[sample // asked.n], images, settings, encoder), replace(sampling, seed=seed)
