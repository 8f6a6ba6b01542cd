"""`build_processor`: a dataset in, the same rows with generated texts out, lazily."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

import pyarrow as pa
import ray
import ray.data

from drafter.acceptance.settings import VerifierSettings
from drafter.engine.config import EngineSettings
from drafter.errors import RequestError, one_line, unknown_setting
from drafter.half_characters import refuse_half_characters
from drafter.prompt import Prompt
from drafter.requests import Generation, Request, SamplingParams, naming_mistakes
from drafter.text.reasoning import Reasoning
from pipeline.cluster.model_copies import model_name
from pipeline.cluster.ray_cluster import HELPER_CPUS, Cluster, connect, share_out
from pipeline.dataset.prompt_stage import Made, add_prompts, make_prompts, prompt_kind, row_of, take_prompts
from pipeline.engines.engine_actor import EngineProcess, engine_stage
from pipeline.engines.ledger import Ledger
from pipeline.engines.models import EngineSpec, engine_spec, longest_request
from pipeline.errors import InputError, RowError
from pipeline.generate.prompts import PROMPTS, TEXT, Encoder, PromptSettings
from pipeline.generate.row_images import PROMPTS_BYTES, image_reading, seeing_processor
from pipeline.generate.row_requests import row_sampling
from pipeline.generate.staging import refuse_schema_of_table
from pipeline.io.listing import PromptSource
from pipeline.io.reading import Chunk, UnreadableValueError
from pipeline.output.columns import RunTraits, column_values, columns_type, wanted_columns
from pipeline.settings import LimitsConfig, LoadingConfig, ReadingConfig, ResourcesConfig, RowImagesConfig

RowFunction = Callable[[dict[str, Any]], dict[str, Any]]
Settings = TypeVar("Settings")

ERROR_COLUMN = "__inference_error__"
"""Why a row has no text; an empty string where it has one."""
_SETTINGS = "sampling_params"
_NAMES = ("request_id", "id")  # columns that tell rows apart: the seed of a row follows from the first that there is
_PLAIN = RunTraits(SamplingParams(), False)  # the traits of which every stage has the columns
_READ = frozenset([*_NAMES, _SETTINGS, "seed"])


@naming_mistakes(InputError)
@dataclass(frozen=True)
class ProcessorConfig:
    """Settings of a generation stage.

    Args:
        model: Hub id, folder or GGUF file of the target model; None is the embedded demonstration model.
        drafter: As in `drafter generate`.
        engine_kwargs: Fields of `EngineSettings`, such as `{"max_num_seqs": 32}`.
        sampling_params: Fields of `SamplingParams`, for rows without their own.
        loading: Fields of `LoadingConfig`.
        verifier: Fields of `VerifierSettings`; by default the output is that of plain decoding.
        limits: Fields of `LimitsConfig`.
        images: Fields of `RowImagesConfig`, for a target model that sees. Rows name files in `folders` only.
        output_prefix: Begins the names of all columns that the stage adds, but for `__inference_error__`.
        batch_size: Rows that an engine is given together, the unit of retries. Several batches are in an engine at
            once, so none waits for another's longest row.
        concurrency: Engines: a number, or the fewest and the most.
        cpus: CPU cores of an engine. By default it decodes with as many as in `drafter generate`, and Ray counts fewer,
            so that two stages and the other tasks of a pipeline have room on one machine.
        gpus: GPUs of an engine, a fraction allowed; by default 1 where there are GPUs.

    Raises:
        InputError: A setting is unknown or cannot be used.
    """

    model: str | None = None
    drafter: str = "auto"
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    loading: Mapping[str, Any] = field(default_factory=dict)
    verifier: Mapping[str, Any] | VerifierSettings = field(default_factory=VerifierSettings)
    limits: Mapping[str, Any] = field(default_factory=dict)
    images: Mapping[str, Any] = field(default_factory=dict)
    output_prefix: str = ""
    batch_size: int = 32
    concurrency: int | Sequence[int] = 1
    cpus: float | None = None
    gpus: float | None = None

    def __post_init__(self) -> None:
        self.engine_spec(threads=1)
        self.row_settings()
        self.image_settings()
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise InputError(f"batch_size must be an integer of at least 1, not {self.batch_size!r}")
        if [int, int] != [*map(type, self.engines)] or not 1 <= self.engines[0] <= self.engines[1]:
            wanted = "a number of engines of at least 1, or the fewest and the most"
            raise InputError(f"concurrency must be {wanted}, not {self.concurrency!r}")

    @property
    def engines(self) -> tuple[int, int]:
        """The fewest engines and the most."""
        given = self.concurrency
        return tuple(given) if isinstance(given, list | tuple) else (given, given)  # a list in a configuration's file

    def engine_spec(self, threads: int) -> EngineSpec:
        engine = _made("engine_kwargs", EngineSettings, self.engine_kwargs)
        loading = _made("loading", LoadingConfig, self.loading)
        verifier = self.verifier
        if not isinstance(verifier, VerifierSettings):
            verifier = _made("verifier", VerifierSettings, verifier)
        return engine_spec(self.model, self.drafter, loading, engine, threads=threads, verifier=verifier)

    def row_settings(self) -> tuple[SamplingParams, LimitsConfig]:
        sampling = _made("sampling_params", SamplingParams, self.sampling_params)
        return sampling, _made("limits", LimitsConfig, self.limits)

    def image_settings(self) -> RowImagesConfig:
        return _made("images", RowImagesConfig, self.images)


def _made(name: str, kind: type[Settings], given: Mapping[str, Any]) -> Settings:
    if problem := unknown_setting(given, kind):
        raise InputError(f"{name}: {problem}")
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: {error}") from error


class Answers(EngineProcess):
    """Generates for blocks of rows; several blocks are in the engine at once."""

    def __init__(
        self, spec: EngineSpec, limits: LimitsConfig, ledger: Any, prompts: PromptSettings, prefix: str = ""
    ) -> None:
        self._prompts, self._prefix, sampling = prompts, prefix, prompts.sampling
        super().__init__(spec, limits, ledger)
        if self.failure is None:
            lossless = self._lm.engine.verifier.lossless
            sees = self._lm.base.sight is not None
            reasons = Reasoning.of(self._lm.tokenizer) is not None
            self._traits = RunTraits(sampling, True, spec.drafter, lossless=lossless, images=sees, reasons=reasons)
            self._columns = wanted_columns(self._traits)

    def __call__(self, block: pa.Table) -> pa.Table:
        """Return the block with the columns of `pipeline.output.columns` and `__inference_error__`.

        Raises:
            LoadError: The models could not be loaded.
            InputError: The dataset has none of the columns of a prompt, or one that would be replaced.
            JobError: The engine's process ends again and again.
        """
        if self.failure is not None:
            raise self.failure
        kind = prompt_kind(block.column_names)
        block, made = take_prompts(block)
        if kind is None and not block.num_rows:  # an empty block may have no columns at all
            return block
        if kind is None:
            raise InputError(f"rows need a column {', '.join(PROMPTS[:-1])} or {PROMPTS[-1]}: make it in preprocess")
        added = columns_type([one for one in self._columns if self._prefix + one.name != kind])
        refuse_replaced(block.column_names, added.names, self._prefix)
        if made is None:
            made = make_prompts(block, self._prompts, Encoder(self._lm.tokenizer))
        requests, problems = self._requests(block, made)
        # A task that is tried again has the same id, and finds the rows that the engine before had finished.
        part = ray.get_runtime_context().get_task_id()
        outcomes = self._outcomes(part, {one.request_id: one for one in requests.values()}, lambda _: None)
        self._ledger.commit(part)
        found = [outcomes.get(requests[place].request_id) if place in requests else None for place in range(len(block))]
        for place, one in enumerate(found):
            if one is not None and one.problem is not None:
                problems[place] = one.problem["message"]
        generated = pa.array([None if one is None else one.generated for one in found], added)
        if not self._prefix and "seed" in block.column_names:
            block = block.drop_columns(["seed"])
        for column, values in zip(added, generated.flatten(), strict=True):  # null where the row is
            block = block.append_column(self._prefix + column.name, values)
        errors = [problems.get(place, "") for place in range(len(block))]
        return block.append_column(ERROR_COLUMN, pa.array(errors, pa.string()))

    def _requests(self, block: pa.Table, made: Made) -> tuple[dict[int, Request], dict[int, str]]:
        """Return requests and errors by the rows' places."""
        chunk = Chunk(block, list(range(len(block))))
        columns = {name: chunk.values(name) for name in block.column_names if name in _READ}
        requests, problems = {}, {}
        prompts = Counter[str]()
        for place, prompt in enumerate(made):
            row = row_of(columns, place)
            try:
                if isinstance(prompt, str):
                    raise RowError("BadPrompt", prompt)
                for name, value in row.items():
                    if isinstance(value, UnreadableValueError):
                        raise RowError("BadRow", f"column {name!r} cannot be read: {value}")
                refuse_half_characters(row)
                refuse_schema_of_table(row.get(_SETTINGS), _SETTINGS)
                name = self._name(row, prompt, prompts)
                sampling = row_sampling(self._prompts.sampling, name, row, _SETTINGS)
                requests[place] = Request(prompt, sampling, f"{place}:{name}", self._row_seconds)
            except (RowError, RequestError) as error:
                problems[place] = one_line(error)
        return requests, problems

    @staticmethod
    def _name(row: Mapping[str, Any], asked: Prompt, prompts: Counter[str]) -> str:
        """Return what a row's seed follows from: its name, or its prompt and the number of such rows in `prompts`."""
        given = next((row[name] for name in _NAMES if row.get(name) is not None), None)
        if given is not None:
            return str(given)
        content = json.dumps(asked.ids).encode() + b"".join(span.digest for span in asked.spans)
        prompt = hashlib.blake2b(content, digest_size=8).hexdigest()
        prompts[prompt] += 1
        return f"{prompt}+{prompts[prompt] - 1}"

    def _finished(self, generation: Generation, request: Request) -> dict[str, Any]:
        return column_values(generation, request, self._traits, self._columns)


def _beside_others(cpus: float, cluster: Cluster) -> float:
    """Return the cores that Ray counts for an engine.

    Two of a node's share leave two cores to the pipeline's other tasks, which take a whole one each: on the smallest
    machine one is needed to read, and one for Ray's filter of rows with a checkpoint.
    """
    smallest = min((node.cpus for node in cluster.nodes if node.cpus >= 1), default=math.inf)
    return max(cpus * (1 - 2 / smallest) / 2, 0.0)


def refuse_replaced(there: Collection[str], added: Collection[str], prefix: str) -> None:
    """Raise `InputError` for a dataset with a column of the name of one that the stage adds."""
    if taken := {ERROR_COLUMN, *(prefix + one for one in added)} & set(there) - ({"seed"} if not prefix else set()):
        raise InputError(f"column {min(taken)} would be replaced: set output_prefix, or rename it in preprocess")


def _prompt_settings(config: ProcessorConfig, now: datetime) -> PromptSettings:
    """Return how prompts are made: as in a job whose texts are continued as they are."""
    loading, name = _made("loading", LoadingConfig, config.loading), model_name(config.model)
    trust = loading.trust_remote_code
    processor = seeing_processor(name, trust_remote_code=trust)
    images = None if processor is None else image_reading(processor, config.image_settings())
    longest = longest_request(name, config.engine_spec(threads=1).config.longest, trust_remote_code=trust)
    reading, sampling = ReadingConfig(chat=False), config.row_settings()[0]
    return PromptSettings(name, trust, PromptSource(TEXT), reading, sampling, longest, now, images)


def build_processor(
    config: ProcessorConfig, preprocess: RowFunction | None = None, postprocess: RowFunction | None = None
) -> Callable[[ray.data.Dataset], ray.data.Dataset]:
    """Return a generation stage: a function that adds it to a dataset, and raises `InputError` without resources.

    Nothing runs before the result is read.

    Args:
        preprocess: Makes of a row one with a prompt: `messages` (chat messages, beside which `tools`, `documents` and
            `chat_template_kwargs` go to the chat template, and `images` have places in them), `prompt` (a text,
            continued as it is) or `prompt_token_ids`; and, if it has settings of its own, `sampling_params` (a dict)
            or `seed`.
        postprocess: Makes the final row of a row with its answer.
    """

    def processor(dataset: ray.data.Dataset) -> ray.data.Dataset:
        fewest, most = config.engines
        cluster = connect()
        wanted = ResourcesConfig(fewest, most, config.gpus, config.cpus)
        ranks = config.engine_spec(threads=1).config.tensor_parallel_size
        shares = share_out(wanted, cluster, ranks=ranks, settings="the processor's {}")
        spec, limits = config.engine_spec(shares.threads), config.row_settings()[1]
        if config.cpus is None:
            shares = replace(shares, cpus=_beside_others(shares.cpus, cluster))
        if preprocess is not None:
            dataset = dataset.map(preprocess)
        elif (there := dataset.columns(fetch_if_missing=False)) is not None:
            kind = prompt_kind(there)
            certain = [one.name for one in wanted_columns(_PLAIN) if config.output_prefix + one.name != kind]
            refuse_replaced(there, certain, config.output_prefix)
        prompts, rows = _prompt_settings(config, datetime.now()), config.batch_size  # one time for all, as in a job
        if prompts.images is not None:
            rows = max(1, min(rows, PROMPTS_BYTES // prompts.images.prompt_bytes))
        engine = {
            "spec": spec,
            "limits": limits,
            "ledger": ray.remote(Ledger).options(num_cpus=0).remote(),
            "prompts": prompts,
            "prefix": config.output_prefix,
        }
        blocks = dataset.repartition(target_num_rows_per_block=rows)
        if prompts.images is not None:
            settings = {"batch_format": "pyarrow", "num_cpus": HELPER_CPUS, "batch_size": None}
            blocks = blocks.map_batches(add_prompts, fn_kwargs={"settings": prompts}, **settings)
        found = engine_stage(blocks, Answers, engine, config.engines, shares, rows=rows)
        return found if postprocess is None else found.map(postprocess)

    return processor
