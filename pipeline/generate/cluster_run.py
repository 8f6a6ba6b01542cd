"""The generation job on the cluster, told in order: stage, generate, write, sum up."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pyarrow.dataset
import ray
from pyarrow import fs

from drafter.base.loading import load_tokenizer
from drafter.engine.engine_config import EngineConfig
from drafter.errors import one_line
from pipeline.cluster.ray_cluster import HELPER_CPUS, ActorResources, beside_driver, connect, quiet_ray_data, share_out
from pipeline.engines.engine_actor import EngineActor, EngineSpec
from pipeline.engines.feeder import places
from pipeline.engines.ledger import Ledger, LedgerCounts, SavedRow
from pipeline.errors import InputError, JobError, JobStopped
from pipeline.generate.generate_config import GenerateConfig
from pipeline.generate.row_requests import PromptSettings, make_requests, model_name
from pipeline.generate.staged_input import Part, StagedInput, StagedParts, stage
from pipeline.generate.stopping import Stopping, StopRequestedError
from pipeline.io.reading import InputListing, PromptSource
from pipeline.output.compaction import compact
from pipeline.output.lease import Lease
from pipeline.output.openai_batch_results import write_batch
from pipeline.output.output_folder import OutputFolder
from pipeline.output.part_files import PartsDatasink
from pipeline.output.run_manifest import read_run, save_run
from pipeline.output.summary import count_rows, read_totals, summarise
from pipeline.output.unfinished_rows import delete_unfinished, read_unfinished, write_unfinished
from pipeline.progress.board import PartReport, Progress, ProgressBoard, ProgressWatch, Tally
from pipeline.progress.display import display
from pipeline.progress.prometheus import JobMetrics
from pipeline.progress.status_file import StatusFile

_DRAIN_PULSE_SECONDS = 0.2


def run(
    config: GenerateConfig, listing: InputListing, source: PromptSource, output: OutputFolder, meant: dict[str, Any]
) -> None:
    """Stage what is not staged, generate what is not generated, and say what came of it.

    Raises:
        InputError: The input, the models or the output cannot be used.
        JobError: The job failed on the way.
        JobStopped: It was told to stop.
    """
    last = Progress()
    stopping = Stopping()
    try:
        if not finished(output):
            lease = Lease(output.lease, lost=lambda by: stopping.stop(f"{by} works on the output now"))
            with stopping, lease, StatusFile(output.status_file) as status:
                last = finish(config, listing, source, output, meant, stopping, status)
    except StopRequestedError as stop:
        raise JobStopped(str(stop)) from None
    print(summarise(output, read_totals(output), last.tokens, last.rows, last.seconds), flush=True)


def finished(output: OutputFolder) -> bool:
    """Whether an earlier submission came to the end, and nothing was taken away since."""
    if output.run_file.type != fs.FileType.File or read_run(output.run_file)["state"] != "finished":
        return False
    staged = StagedInput.load(output.staged)
    return staged is not None and not missing_parts(staged, output)


def finish(
    config: GenerateConfig,
    listing: InputListing,
    source: PromptSource,
    output: OutputFolder,
    meant: dict[str, Any],
    stopping: Stopping,
    status: StatusFile,
) -> Progress:
    """Do what is still to be done, as the only submission at work; leave nothing but the results.

    Raises:
        InputError: The input or the models cannot be used.
        JobError: The execution failed.
    """
    output.delete_temporary()
    staged = StagedInput.load(output.staged)
    if staged is None and output.committed():
        raise InputError(f"output {config.output} has results but no list of their rows (_staged): choose another")
    last = Progress()
    missing = [] if staged is None else missing_parts(staged, output)
    if staged is None or missing:
        base = read_run(output.run_file).get("base_fingerprint")
        save_run(output.run_file, config.as_dict(), meant, state="running", base_fingerprint=base)
        cluster = connect()
        stopping.take_over()
        resources = share_out(config.resources, cluster)
        status.takes(resources)
        if staged is None:
            staged = stage(listing, output.staged, config.reading, source, config.writing.rows_per_file)
            missing = list(staged.parts)
        on_start = partial(note_base, config, output, meant)
        last = execute(config, source, output, staged, missing, resources, stopping, on_start, status)
    compact(output, None if config.writing.compact_mb is None else int(config.writing.compact_mb * 2**20))
    rows, errors = count_rows(output)
    if rows + errors != staged.rows:
        found = f"{rows} rows and {errors} errors"
        raise JobError(f"output {config.output} has {found} instead of {staged.rows} in all: choose another output")
    # Reports may have got lost on the way; the files know.
    before = staged.rows - last.rows
    status.show(replace(last, total=staged.rows, before=before, errors=errors - last.errors_before))
    if source.kind == "openai":
        write_batch(output, staged, partial(load_tokenizer, model_name(config.model)))
    facts = {"rows": staged.rows, "base_fingerprint": read_run(output.run_file).get("base_fingerprint")}
    output.delete_temporary()
    delete_unfinished(output)
    save_run(output.run_file, config.as_dict(), meant, state="finished", **facts)
    return last


def note_base(config: GenerateConfig, output: OutputFolder, meant: dict[str, Any], now: Progress) -> None:
    """Remember whose results these are as soon as it is known: who trains on them must be sure."""
    save_run(output.run_file, config.as_dict(), meant, state="running", base_fingerprint=now.fingerprint)


def missing_parts(staged: StagedInput, output: OutputFolder) -> list[Part]:
    """The parts that are not in the output yet."""
    committed = output.committed()
    return [part for part in staged.parts if part.name not in committed]


def unwanted_columns(config: GenerateConfig, source: PromptSource, staged: StagedInput) -> list[str]:
    """Optional columns that were not asked for, and cannot be by any row."""
    rows_may_ask = source.kind == "openai" or staged.row_type.get_field_index(config.reading.sampling_column) >= 0
    wanted = {
        "logprobs": config.sampling.logprobs is not None or rows_may_ask,
        "per_step_accepted": config.writing.per_step_accepted,
    }
    return [name for name, is_wanted in wanted.items() if not is_wanted]


def execute(
    config: GenerateConfig,
    source: PromptSource,
    output: OutputFolder,
    staged: StagedInput,
    missing: list[Part],
    resources: ActorResources,
    stopping: Stopping,
    on_start: Callable[[Progress], None],
    status: StatusFile,
) -> Progress:
    """Generate what is missing, and show how far it is; `on_start` is called when the first engine is ready.

    Raises:
        InputError: The models cannot be loaded.
        JobError: The execution failed.
    """
    left = sum(part.rows for part in missing)
    print(f"{left} of {staged.rows} rows to generate", file=sys.stderr, flush=True)
    quiet_ray_data()
    actor = {"num_cpus": 0, "scheduling_strategy": beside_driver(), "max_restarts": -1, "max_task_retries": -1}
    board = ray.remote(**actor)(ProgressBoard).remote()
    base = read_run(output.run_file).get("base_fingerprint")
    unfinished = [row for row in read_unfinished(output) if row.part in {part.name for part in missing}]
    ledger = ray.remote(**actor)(Ledger).remote(config.limits.row_attempts, unfinished, base)
    kept = kept_rows(unfinished)
    rows_before = staged.rows - left + sum(part.rows for part in kept.values())
    errors_before = count_errors(output, missing) + sum(part.errors for part in kept.values())
    tally = Tally(staged.rows, rows_before, errors_before, kept)
    progress = ProgressWatch(board, tally, on_start, [display(), status, JobMetrics(config.output)])
    try:
        with progress, stopping.draining(partial(drain, ledger, config.limits.drain_seconds)):
            stream(config, source, output, staged, missing, resources, board, ledger)
        counts: LedgerCounts = ray.get(ledger.counts.remote())
        if counts.engine_deaths:
            deaths = f"{counts.engine_deaths} times an engine's process ended and was replaced"
            print(f"{deaths}; {counts.rows_again} rows were generated again", file=sys.stderr, flush=True)
    except Exception as error:
        if progress.last.failure is not None:
            raise InputError(progress.last.failure) from error
        cause = getattr(error, "cause", None) or error
        why = str(cause) if isinstance(cause, JobError) else f"{type(cause).__name__}: {one_line(cause)}"
        raise JobError(f"{why}: {progress.last.crash}" if progress.last.crash else why) from error
    finally:
        keep_unfinished(output, ledger)
    return progress.last


def kept_rows(unfinished: Sequence[SavedRow]) -> dict[str, PartReport]:
    """What earlier submissions have done of parts that are not committed; engines will report it again."""
    kept: dict[str, PartReport] = {}
    for row in unfinished:
        done = PartReport()
        if row.generated is not None:
            done = PartReport(1, 0, row.generated["num_output_tokens"], row.generated["num_decode_steps"])
        elif row.problem is not None:
            done = PartReport(1, 1)
        kept[row.part] = kept.get(row.part, PartReport()).plus(done)
    return kept


def count_errors(output: OutputFolder, missing: Sequence[Part]) -> int:
    """Rows that could not be generated, but for those of parts that are not committed."""
    uncommitted = {f"{part.name}.parquet" for part in missing}
    paths = [info.path for info in output.errors.children() if info.path.rpartition("/")[2] not in uncommitted]
    if not paths:
        return 0
    filesystem = output.root.filesystem
    return int(pyarrow.dataset.dataset(paths, filesystem=filesystem, format="parquet").count_rows())


def drain(ledger: Any, seconds: float) -> None:
    """Let no more rows begin, and wait until those that have are finished, and finished parts committed."""
    print("stopping: rows that have begun are finished first", file=sys.stderr, flush=True)
    deadline = time.monotonic() + seconds
    ray.get(ledger.drain.remote())
    while time.monotonic() < deadline:
        counts: LedgerCounts = ray.get(ledger.counts.remote())
        if not counts.inside and not counts.uncommitted:
            break
        time.sleep(_DRAIN_PULSE_SECONDS)


def keep_unfinished(output: OutputFolder, ledger: Any) -> None:
    """Save the finished rows of unfinished parts for the next submission."""
    try:
        write_unfinished(output, ray.get(ledger.save.remote(), timeout=60))
    except (ray.exceptions.RayError, OSError) as error:
        print(f"finished rows of unfinished parts are lost: {one_line(error)}", file=sys.stderr, flush=True)


def stream(
    config: GenerateConfig,
    source: PromptSource,
    output: OutputFolder,
    staged: StagedInput,
    missing: list[Part],
    resources: ActorResources,
    board: Any,
    ledger: Any,
) -> None:
    """The streaming execution: staged parts → requests (CPU tasks) → engines (actors) → committed parts."""
    settings = PromptSettings(
        model_name(config.model), config.loading.trust_remote_code, source, config.reading, config.sampling
    )
    longest = max(part.rows for part in missing)
    # While one part's last rows are decoded, those of the next ones must fill the other slots.
    calls = 2 + math.ceil(config.engine.slots / longest)
    engine = EngineConfig(**asdict(config.engine), max_queue=places(config.engine.slots))
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
    # The longest first: what is left for the end, when engines run empty, is short.
    missing = sorted(missing, key=lambda part: part.nbytes, reverse=True)
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
    # Ray replaces an engine's process, and gives it its parts again, without end: the ledger knows when to give up.
    # `map_batches` asks for a batch size beside GPUs, and would then cut parts to it; a call takes a part as it is.
    dataset = dataset.map_batches_internal(
        EngineActor,
        batch_size=None,
        batch_format="pyarrow",
        compute=pool,
        num_cpus=resources.cpus,
        num_gpus=resources.gpus,
        fn_constructor_kwargs={
            "spec": spec,
            "limits": config.limits,
            "ledger": ledger,
            "progress": board,
            "run": config.output,
        },
    )
    sink = PartsDatasink(output, unwanted_columns(config, source, staged), ledger.commit.remote)
    dataset.write_datasink(sink, ray_remote_args={"num_cpus": HELPER_CPUS})
