"""The generation job on the cluster, told in order: stage, generate, write, sum up."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import ray

from drafter.engine import EngineConfig
from pipeline.cluster import HELPER_CPUS, ActorResources, connect, quiet_ray_data, share_out
from pipeline.config import GenerateConfig
from pipeline.engine_actor import EngineActor, EngineSpec
from pipeline.errors import InputError, JobError, one_line
from pipeline.manifest import read_run, save_run
from pipeline.output import OutputFolder
from pipeline.progress import ProgressBoard, ProgressDisplay, Snapshot
from pipeline.prompts import PromptSettings, make_requests, model_name
from pipeline.reading import InputListing, PromptSource
from pipeline.staging import Part, StagedInput, StagedParts, stage
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
    last = Snapshot()
    if staged is None or missing_parts(staged, output):
        save_run(output.run_file, config.as_dict(), meant, state="running")
        resources = share_out(config.resources, connect())
        if staged is None:
            staged = stage(listing, output.staged, config.reading, source, config.writing.rows_per_file)
        last = execute(config, source, output, staged, resources, partial(note_base, config, output, meant))
    run_so_far = read_run(output.run_file)
    if run_so_far["state"] != "finished":
        output.delete_temporary()
        facts = {"rows": staged.rows, "base_fingerprint": run_so_far.get("base_fingerprint")}
        save_run(output.run_file, config.as_dict(), meant, state="finished", **facts)
    print(summarise(output, last.tokens, last.rows, last.seconds), flush=True)


def note_base(config: GenerateConfig, output: OutputFolder, meant: dict[str, Any], now: Snapshot) -> None:
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
    on_start: Callable[[Snapshot], None],
) -> Snapshot:
    """Generate what is missing, and show how far it is; `on_start` is called when the first engine is ready.

    Raises:
        InputError: The models cannot be loaded.
        JobError: The execution failed.
    """
    missing = missing_parts(staged, output)
    left = sum(part.rows for part in missing)
    print(f"{left} of {staged.rows} rows to generate", file=sys.stderr, flush=True)
    quiet_ray_data()
    board = ray.remote(num_cpus=0)(ProgressBoard).remote()
    display = ProgressDisplay(board, staged.rows, staged.rows - left, on_start)
    try:
        with display:
            stream(config, source, output, staged, missing, resources, board)
    except Exception as error:
        if display.last.failure is not None:
            raise InputError(display.last.failure) from error
        if display.last.crash is not None:
            raise JobError(f"an engine's process ended again and again: {display.last.crash}") from error
        cause = getattr(error, "cause", None) or error
        raise JobError(f"{type(cause).__name__}: {one_line(cause)}") from error
    return display.last


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
    spec = EngineSpec(config.model, config.drafter, asdict(config.loading), engine, resources.threads)
    # An engine without a part would only hold its node.
    most = max(min(resources.max_actors or len(missing), len(missing)), resources.min_actors)
    pool = ray.data.ActorPoolStrategy(
        min_size=resources.min_actors,
        max_size=most,
        enable_true_multi_threading=True,
        max_concurrent_calls_per_actor=calls,
        # Ray adds actors when more than 1.75 calls wait for each that can run.
        max_tasks_in_flight_per_actor=2 * calls if most > resources.min_actors else calls + 1,
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
        fn_constructor_kwargs={"spec": spec, "progress": board},
        max_task_retries=config.resources.max_task_retries,
    )
    dataset.write_datasink(PartsDatasink(output), ray_remote_args={"num_cpus": HELPER_CPUS})
