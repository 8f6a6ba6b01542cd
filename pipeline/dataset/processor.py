"""`build_processor`: a dataset in, the same rows with generated texts out, lazily."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import ray
import ray.data

from drafter.acceptance.settings import VerifierSettings
from drafter.engine.config import EngineSettings
from drafter.requests import SamplingParams
from pipeline.cluster.ray_cluster import connect, share_out
from pipeline.dataset.answers import Answers, AnswerSettings
from pipeline.engines.engine_spec import EngineSpec
from pipeline.engines.feeder import fed
from pipeline.engines.ledger import Ledger
from pipeline.errors import InputError
from pipeline.generate.config import LoadingConfig
from pipeline.generate.streaming import engine_pool
from pipeline.settings import LimitsConfig, ResourcesConfig

RowFunction = Callable[[dict[str, Any]], dict[str, Any]]
Settings = TypeVar("Settings")


@dataclass(frozen=True)
class ProcessorConfig:
    """Settings of a generation stage.

    Args:
        model: Hub id or folder of the target model; None is the embedded demonstration model.
        drafter: What drafts, as in `jobs.generate`.
        engine_kwargs: Fields of `EngineSettings`, such as `{"max_num_seqs": 32}`.
        sampling_params: Fields of `SamplingParams`, for rows without their own.
        loading: How models are loaded: fields of `LoadingConfig`.
        verifier: Which draft tokens become output; by default those that plain decoding would give.
        limits: Limits of rows and steps: fields of `LimitsConfig`.
        batch_size: Rows that an engine is given together, the unit of retries. Several batches are in an engine at
            once, so none waits for another's longest row.
        concurrency: Engines: a number, or the fewest and the most.
        cpus: CPU cores of an engine; by default as in `jobs.generate`.
        gpus: GPUs of an engine, a fraction allowed; by default 1 where there are GPUs.

    Raises:
        InputError: A setting is unknown or cannot be used.
    """

    model: str | None = None
    drafter: str = "auto"
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    loading: Mapping[str, Any] = field(default_factory=dict)
    verifier: VerifierSettings = field(default_factory=VerifierSettings)
    limits: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 32
    concurrency: int | tuple[int, int] = 1
    cpus: float | None = None
    gpus: float | None = None

    def __post_init__(self) -> None:
        self.engine_spec(threads=1)
        self.answer_settings()
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise InputError(f"batch_size must be an integer of at least 1, not {self.batch_size!r}")

    @property
    def engines(self) -> tuple[int, int]:
        """The fewest engines and the most."""
        return self.concurrency if isinstance(self.concurrency, tuple) else (self.concurrency, self.concurrency)

    def engine_spec(self, threads: int) -> EngineSpec:
        engine = _made("engine_kwargs", EngineSettings, self.engine_kwargs)
        loading = asdict(_made("loading", LoadingConfig, self.loading))
        return EngineSpec(self.model, self.drafter, loading, fed(engine), threads, verifier=self.verifier)

    def answer_settings(self) -> AnswerSettings:
        sampling = _made("sampling_params", SamplingParams, self.sampling_params)
        return AnswerSettings(sampling, _made("limits", LimitsConfig, self.limits))


def _made(name: str, kind: type[Settings], given: Mapping[str, Any]) -> Settings:
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        why = re.sub(r".*__init__\(\) got an unexpected keyword argument", "unknown setting", str(error))
        raise InputError(f"{name}: {why}") from error


class Processor:
    """A generation stage; calling it with a dataset adds the stage. Made by `build_processor`."""

    def __init__(
        self, config: ProcessorConfig, preprocess: RowFunction | None, postprocess: RowFunction | None
    ) -> None:
        self._config, self._preprocess, self._postprocess = config, preprocess, postprocess

    def __call__(self, dataset: ray.data.Dataset) -> ray.data.Dataset:
        """Return the dataset with the stage added. Nothing runs before the result is read.

        Raises:
            InputError: The cluster has not the resources of an engine.
        """
        config = self._config
        fewest, most = config.engines
        wanted = ResourcesConfig(fewest, most, config.gpus, config.cpus)
        shares = share_out(wanted, connect(), settings="the processor's {}")
        spec, settings = config.engine_spec(shares.threads), config.answer_settings()
        if self._preprocess is not None:
            dataset = dataset.map(self._preprocess)
        found = dataset.repartition(target_num_rows_per_block=config.batch_size).map_batches(
            Answers,
            batch_size=None,
            batch_format="pyarrow",
            compute=engine_pool(fewest, most, spec.config.max_num_seqs, config.batch_size),
            num_cpus=shares.cpus,
            num_gpus=shares.gpus,
            fn_constructor_kwargs={
                "spec": spec,
                "settings": settings,
                "ledger": ray.remote(Ledger).options(num_cpus=0).remote(settings.limits.row_attempts),
            },
        )
        return found if self._postprocess is None else found.map(self._postprocess)


def build_processor(
    config: ProcessorConfig, preprocess: RowFunction | None = None, postprocess: RowFunction | None = None
) -> Processor:
    """Return a generation stage.

    Args:
        preprocess: Makes of a row one with a prompt: `messages` (chat messages), `prompt` (a text, continued as it is)
            or `prompt_token_ids`; and, if it has settings of its own, `sampling_params` (a dict) or `seed`.
        postprocess: Makes of a row with its answer what is wanted.
    """
    return Processor(config, preprocess, postprocess)
