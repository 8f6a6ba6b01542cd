"""The generation job on the cluster, told in order: stage, generate, write, sum up."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pyarrow.dataset
import ray

from drafter.engine import EngineConfig
from pipeline.cluster import HELPER_CPUS, ActorResources, connect, quiet_ray_data, share_out
from pipeline.config import GenerateConfig
from pipeline.display import display
from pipeline.engine_actor import EngineActor, EngineSpec
from pipeline.errors import InputError, JobError, one_line
from pipeline.manifest import read_run, save_run
from pipeline.metrics import JobMetrics
from pipeline.output import OutputFolder
from pipeline.progress import Progress, ProgressBoard, ProgressWatch, Tally
from pipeline.prompts import PromptSettings, make_requests, model_name
from pipeline.reading import InputListing, PromptSource
from pipeline.staging import Part, StagedInput, StagedParts, stage
from pipeline.status import StatusFile
from pipeline.summary import summarise
from pipeline.writing import PartsDatasink


def run(
    config: GenerateConfig, listing: InputListing, source: PromptSource, output: OutputFolder, meant: dict[str, Any]
) -> None:
    """Stage what is not staged, generate what is not generated, and say what came of it.

    Raises:
        InputError: The input, the models or the output cannot be used.
        JobError: The job failed on the way.
    """
    staged = StagedInput.load(output.staged)
    if staged is None and output.committed():
        raise InputError(f"output {config.output} has results but no list of their rows (_staged): choose another")
    last = Progress()
    if staged is None or missing_parts(staged, output) or read_run(output.run_file)["state"] != "finished":
        with StatusFile(output.status_file) as status:
            last = complete(config, listing, source, output, meant, staged, status)
    print(summarise(output, last.tokens, last.rows, last.seconds), flush=True)


def complete(
    config: GenerateConfig,
    listing: InputListing,
    source: PromptSource,
    output: OutputFolder,
    meant: dict[str, Any],
    staged: StagedInput | None,
    status: StatusFile,
) -> Progress:
    """Do what there is to do, and say in the output that it is done; `run` tells the rest."""
    if staged is None or missing_parts(staged, output):
        save_run(output.run_file, config.as_dict(), meant, state="running")
        may_grow = connect()
        resources = share_out(config.resources, may_grow=may_grow)
        status.takes(resources)
        if staged is None:
            staged = stage(listing, output.staged, config.reading, source, config.writing.rows_per_file)
        last = execute(config, source, output, staged, resources, partial(note_base, config, output, meant), status)
        # Reports may have got lost; the files know.
        last = replace(last, errors=count_errors(output, []) - last.errors_before)
    else:
        last = Progress("finished", staged.rows, staged.rows, count_errors(output, []))
    status.show(last)
    output.delete_temporary()
    base = read_run(output.run_file).get("base_fingerprint")
    save_run(output.run_file, config.as_dict(), meant, state="finished", rows=staged.rows, base_fingerprint=base)
    return last


def note_base(config: GenerateConfig, output: OutputFolder, meant: dict[str, Any], now: Progress) -> None:
    """Remember whose results these are as soon as it is known: who trains on them must be sure."""
    save_run(output.run_file, config.as_dict(), meant, state="running", base_fingerprint=now.fingerprint)


def missing_parts(staged: StagedInput, output: OutputFolder) -> list[Part]:
    """The parts that are not in the output yet."""
    committed = output.committed()
    return [part for part in staged.parts if part.name not in committed]


def execute(
    config: GenerateConfig,
    source: PromptSource,
    output: OutputFolder,
    staged: StagedInput,
    resources: ActorResources,
    on_start: Callable[[Progress], None],
    status: StatusFile,
) -> Progress:
    """Generate what is missing, and show how far it is; `on_start` is called when the first engine is ready.

    Raises:
        InputError: The models cannot be loaded.
        JobError: The execution failed.
    """
    missing = missing_parts(staged, output)
    left = sum(part.rows for part in missing)
    print(f"{left} of {staged.rows} rows to generate", file=sys.stderr, flush=True)
    quiet_ray_data()
    tally = Tally(staged.rows, staged.rows - left, count_errors(output, missing))
    board = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(ProgressBoard).remote()
    watch = ProgressWatch(board, tally, on_start, [display(), status, JobMetrics(config.output)])
    try:
        with watch:
            stream(config, source, output, staged, missing, resources, board)
    except Exception as error:
        if watch.last.failure is not None:
            raise InputError(watch.last.failure) from error
        if watch.last.crash is not None:
            raise JobError(f"an engine's process ended again and again: {watch.last.crash}") from error
        cause = getattr(error, "cause", None) or error
        raise JobError(f"{type(cause).__name__}: {one_line(cause)}") from error
    return watch.last


def count_errors(output: OutputFolder, missing: Sequence[Part]) -> int:
    """Rows that could not be generated, but for those of parts that are not committed."""
    uncommitted = {f"{part.name}.parquet" for part in missing}
    paths = [info.path for info in output.errors.children() if info.path.rpartition("/")[2] not in uncommitted]
    if not paths:
        return 0
    filesystem = output.root.filesystem
    return int(pyarrow.dataset.dataset(paths, filesystem=filesystem, format="parquet").count_rows())


def stream(
    config: GenerateConfig,
    source: PromptSource,
    output: OutputFolder,
    staged: StagedInput,
    missing: list[Part],
    resources: ActorResources,
    board: Any,
) -> None:
    """The streaming execution: staged parts → requests (CPU tasks) → engines (actors) → committed parts."""
    settings = PromptSettings(
        model_name(config.model), config.loading.trust_remote_code, source, config.reading, config.sampling
    )
    longest = max(part.rows for part in missing)
    # While one part's last rows are decoded, those of the next ones must fill the other slots.
    calls = 2 + math.ceil(config.engine.slots / longest)
    engine = EngineConfig(**asdict(config.engine), max_queue=calls * longest)
    spec = EngineSpec(config.model, config.drafter, asdict(config.loading), engine, math.ceil(resources.cpus))
    pool = ray.data.ActorPoolStrategy(
        min_size=resources.min_actors,
        max_size=resources.max_actors,
        enable_true_multi_threading=True,
        max_concurrent_calls_per_actor=calls,
        # Ray adds actors when more than 1.75 calls wait for each that can run.
        max_tasks_in_flight_per_actor=2 * calls if resources.max_actors > resources.min_actors else calls + 1,
    )
    dataset = ray.data.read_datasource(
        StagedParts(staged, missing), override_num_blocks=len(missing), num_cpus=HELPER_CPUS
    )
    dataset = dataset.map_batches(
        make_requests,
        batch_size=None,
        batch_format="pyarrow",
        fn_kwargs={"settings": settings},
        num_cpus=HELPER_CPUS,
    )
    # `map_batches` asks for a batch size beside GPUs, and would then cut parts to it; a call takes a part as it is.
    dataset = dataset.map_batches_internal(
        EngineActor,
        batch_size=None,
        batch_format="pyarrow",
        compute=pool,
        num_cpus=resources.cpus,
        num_gpus=resources.gpus,
        fn_constructor_kwargs={"spec": spec, "progress": board, "run": config.output},
        max_task_retries=config.resources.max_task_retries,
    )
    dataset.write_datasink(PartsDatasink(output), ray_remote_args={"num_cpus": HELPER_CPUS})
