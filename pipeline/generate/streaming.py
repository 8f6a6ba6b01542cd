"""The streaming pipeline: staged parts are read, tokenised, generated and committed concurrently."""

from __future__ import annotations

import math
from dataclasses import asdict
from datetime import datetime
from typing import Any

import pyarrow as pa
import ray

from pipeline.cluster.ray_cluster import HELPER_CPUS
from pipeline.engines.engine_spec import EngineSpec
from pipeline.engines.feeder import fed
from pipeline.engines.models import model_name
from pipeline.engines.shared_texts import OtherTexts
from pipeline.generate.job_context import JobContext, Work
from pipeline.generate.row_requests import PromptSettings
from pipeline.generate.tokenising import to_requests
from pipeline.output.columns import RunTraits
from pipeline.output.part_files import PartsDatasink
from pipeline.staging.staging import StagedParts


class EngineProcess:
    """An `EngineActor`, with its arguments, whose process alone imports the engine: that takes ten seconds."""

    def __init__(self, **arguments: Any) -> None:
        from pipeline.engines.engine_actor import EngineActor

        self._actor = EngineActor(**arguments)

    def __call__(self, block: pa.Table) -> pa.Table:
        return self._actor(block)


def stream(job: JobContext, work: Work, board: Any, ledger: Any, learner: str | None = None) -> None:
    """Generate and commit the missing parts. A row of the Ray dataset is a part.

    Args:
        learner: Name of the `LearnerActor`, which may start later; None without learning.
    """
    # Large parts first: what is left for the end, when engines run empty, is short.
    parts = sorted(work.missing, key=lambda part: part.nbytes, reverse=True)
    read = ray.data.read_datasource(
        StagedParts(work.staged, parts), override_num_blocks=len(parts), num_cpus=HELPER_CPUS
    )
    requests = read.map_batches(
        to_requests,
        batch_format="pyarrow",
        fn_kwargs={"settings": prompt_settings(job)},
        num_cpus=HELPER_CPUS,
    )
    # Ray replaces an engine's process and gives it its parts again, without end: the ledger knows when to give up.
    generated = requests.map_batches(
        EngineProcess,
        batch_size=1,
        batch_format="pyarrow",
        compute=engine_pool(
            work.resources.min_actors,
            most_engines(work),
            job.config.engine.max_num_seqs,
            max(part.rows for part in work.missing),
        ),
        num_cpus=work.resources.cpus,
        num_gpus=work.resources.gpus,
        fn_constructor_kwargs={
            "spec": engine_spec(job, work),
            "limits": job.config.limits,
            "traits": run_traits(job, work.staged.row_type),
            "ledger": ledger,
            "progress": board,
            "run": job.config.output,
            "others": OtherTexts(job.output.data, shared=most_engines(work) > 1),
            "learner": learner,
        },
    )
    generated.write_datasink(PartsDatasink(job.output, ledger.commit.remote), ray_remote_args={"num_cpus": HELPER_CPUS})


def prompt_settings(job: JobContext) -> PromptSettings:
    config, date = job.config, job.meaning["reading"]["date"]
    return PromptSettings(
        model_name(config.model),
        config.loading.trust_remote_code,
        job.prompts,
        config.reading,
        config.sampling,
        config.engine.longest,
        None if date is None else datetime.fromisoformat(date),
    )


def engine_spec(job: JobContext, work: Work) -> EngineSpec:
    config = job.config
    engine = fed(config.engine)
    loading, threads = asdict(config.loading), work.resources.threads
    return EngineSpec(
        config.model,
        config.drafter,
        loading,
        engine,
        threads,
        verifier=config.verifier,
        learning=work.beginning,
    )


def run_traits(job: JobContext, row_type: pa.StructType) -> RunTraits:
    has_column = row_type.get_field_index(job.config.reading.sampling_column) >= 0
    rows_have_settings = job.prompts.kind == "openai" or has_column
    config = job.config
    return RunTraits(
        config.sampling, config.writing, rows_have_settings, config.drafter, learning=config.learning.enabled
    )


def most_engines(work: Work) -> int:
    """Return the most engines: one without a part would only hold its node."""
    most = min(work.resources.max_actors or len(work.missing), len(work.missing))
    return max(most, work.resources.min_actors)


def engine_pool(fewest: int, most: int, slots: int, rows: int) -> ray.data.ActorPoolStrategy:
    """Return the number of engines, and of parts of up to `rows` rows that each has at once."""
    # While one part's last rows are decoded, rows of the next ones must fill the other slots.
    calls = 2 + math.ceil(slots / rows)
    return ray.data.ActorPoolStrategy(
        min_size=fewest,
        max_size=most,
        enable_true_multi_threading=True,
        max_concurrent_calls_per_actor=calls,
        # Ray adds actors when more than 1.75 calls wait for each that can run.
        max_tasks_in_flight_per_actor=2 * calls if most > fewest else calls + 1,
    )
