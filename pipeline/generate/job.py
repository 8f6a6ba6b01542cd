"""The generation job: the input is staged as parts, and missing parts are tokenised, generated and committed."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset
import ray

from drafter.errors import one_line, printable, without_secrets
from pipeline.cluster.cluster_watch import ClusterWatch
from pipeline.cluster.model_copies import model_name
from pipeline.cluster.ray_cluster import (
    HELPER_CPUS,
    ActorResources,
    Cluster,
    connect,
    nodes_ahead,
    quiet_ray_data,
    share_out,
    start_beside_driver,
    takes,
)
from pipeline.command_line import failure_line, say
from pipeline.engines.ledger import Ledger, LedgerCounts, SavedRow, read_unfinished, write_unfinished
from pipeline.engines.models import engine_spec
from pipeline.errors import InputError, JobError
from pipeline.generate.checks import LEARNING, SPECULATION, Job, checked_job
from pipeline.generate.config import GenerateConfig
from pipeline.generate.resuming import dry_run, grow, is_damaged, is_finished, keep_finished, reopen
from pipeline.generate.staging import StagingPlan, rows_per_part, stage
from pipeline.generate.user_functions import PartCalls
from pipeline.io.files import partials
from pipeline.io.parts import Part, StagedInput, StagedParts
from pipeline.output.batch_results import BatchRun, batch_bytes, write_batch
from pipeline.output.columns import OutputColumn, RunTraits, columns_type, wanted_columns
from pipeline.output.folder import OutputFolder, take_output
from pipeline.output.lease import Lease
from pipeline.output.part_files import commit_part, foreign_files, unify_types
from pipeline.output.result import job_result
from pipeline.output.summary import (
    OutputTotals,
    count_rows,
    parquet_dataset,
    read_totals,
    speculation_record,
    summarise,
)
from pipeline.progress.board import PartReport, Progress, StatusBoard, Tally
from pipeline.progress.prometheus import job_metrics
from pipeline.progress.watch import ProgressWatch, Pulse, StatusFile, display
from pipeline.settings import SAMPLING_COLUMN
from pipeline.stopping import Stopping

if TYPE_CHECKING:  # torch takes seconds to import: no check waits for it
    from pipeline.learning.config import LearnerSpec

_DRAIN_PULSE_SECONDS = 0.2
_SAVE_SECONDS = 60
_TELL_SECONDS = 1.0
_SHOWN = 3
_PART_BYTES = 1 << 20  # of the input: rows of 8 KB, more than most have
_AT_START = 128  # engines to ask for at the start, where `resources.max_actors` does not say how many


@dataclass(frozen=True)
class Work:
    """The work of a submission. `learner` trains a head that learns; None without learning."""

    staged: StagedInput
    missing: list[Part]
    resources: ActorResources
    learner: LearnerSpec | None = None

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.missing)

    @property
    def most_engines(self) -> int:
        """Most engines: one without a part would only hold its node."""
        most = min(self.resources.max_actors or len(self.missing), len(self.missing))
        return max(most, self.resources.min_actors)

    @property
    def engines_at_start(self) -> int:
        """Engines to ask for at the start: all that the job may have, or many where nothing says how many."""
        unlimited = self.resources.max_actors is None
        return min(self.most_engines, max(_AT_START, self.resources.min_actors)) if unlimited else self.most_engines


def generate(config: GenerateConfig) -> None:
    """Run a job to its end, with all of its rows in the output, and print a summary.

    Raises:
        InputError: The configuration, the input, the models or the output cannot be used.
        JobError: The job failed on the way.
        JobStopped: The job was told to stop.
    """
    job = checked_job(config)
    if config.dry_run:
        print(f"dry run: {dry_run(job)}", flush=True)
        return
    output = job.output
    stopping = Stopping()
    lease = Lease(output.lease, lost=lambda by: stopping.stop(f"{by} works on the output now"))
    if is_finished(job):
        if lease.is_left or partials(output.root):  # of a driver that was killed at its very end
            with lease:
                output.delete_temporary()
        output.drop_temporary()
        rows, errors = _rows_and_errors(output)
        found = f"of {rows + errors:,} rows {rows:,} are finished and {errors:,} failed"
        print(f"nothing is left to do: {found}; they are in {without_secrets(config.output)}", flush=True)
        return
    with stopping, lease, StatusFile(output.status_file) as status:
        if take_output(config.output, output, job.meaning):
            job.save_run("running")
        last, totals = _finish(job, stopping, status)
    said = (job.engine_facts()[SPECULATION] or {}).get("sentences", ())
    print(summarise(output, totals, last.tokens, last.rows, last.seconds, said), flush=True)


def _rows_and_errors(output: OutputFolder) -> tuple[int, int]:
    return count_rows(parquet_dataset(output.data)), count_rows(parquet_dataset(output.errors))


def _finish(job: Job, stopping: Stopping, status: StatusFile) -> tuple[Progress, OutputTotals]:
    # The caller holds the lease.
    output, last = job.output, Progress()
    staged = reopen(job)
    if staged is None or staged.source != job.source or staged.without(output.committed()) or is_damaged(job, staged):
        staged, last = _stage_and_generate(job, staged, stopping, status)
    if job.config.on_part is not None:
        PartCalls(job.config.on_part, job.config.output, output).end()
    if job.config.rollout is not None:
        unify_types(output)
    rows, errors = _rows_and_errors(output)
    if rows + errors != staged.rows:
        foreign = ", ".join(map(printable, foreign_files(output, staged.parts)[:_SHOWN]))
        raise JobError(
            f"output {job.config.output} has {rows} finished and {errors} failed rows instead of {staged.rows} in all"
            + (f", and files that are no part of it: take {foreign} away" if foreign else "")
        )
    # Some reports may have been lost, so the files tell how many rows there are.
    before = staged.rows - last.rows
    status.show(replace(last, total=staged.rows, before=before, errors=errors - last.errors_before))
    if job.prompts.kind == "openai":
        write_batch(output, staged, _batch_run(job, staged))
    output.delete_temporary()
    output.drop_temporary()
    output.unfinished.delete()
    output.told.filesystem.delete_dir_contents(output.told.path, missing_dir_ok=True)
    totals, most = read_totals(output), job.config.stop_after_valid
    if most is not None and totals.valid.valid < most:
        say(f"{totals.valid.valid} of {most} valid rows: the input has no more")
    result = job_result(totals.valid, errors, status.submissions, job.config.cost.per_gpu_hour)
    facts = job.engine_facts() | {"result": result}
    if last.choices:
        facts[SPECULATION] = speculation_record(last.choices)
    if last.learning is not None:
        facts[LEARNING] = asdict(last.learning)
    output.describe()
    job.save_run("finished", rows=staged.rows, batch_bytes=batch_bytes(output), **facts)
    return last, totals


def _stage_and_generate(
    job: Job, staged: StagedInput | None, stopping: Stopping, status: StatusFile
) -> tuple[StagedInput, Progress]:
    job.save_run("running", **job.engine_facts())
    cluster = connect()
    stopping.take_over()
    learner = None
    with ClusterWatch(own_cluster=not cluster.may_grow, last_line=partial(_note_loss, status)):
        if job.config.learning.enabled:
            from pipeline.learning.job_learner import beside_learner

            cluster, learner = beside_learner(job.config.learning, cluster), _learner(job)
        resources = share_out(job.config.resources, cluster, ranks=job.config.engine.tensor_parallel_size)
        status.takes(resources)
        with nodes_ahead(resources.gpus, _engines_ahead(job, resources, cluster)):
            staged = _stage(job, staged)
        work = Work(staged, staged.without(job.output.committed()), resources, learner)
        if not work.missing:
            return staged, Progress()
        job.note_drafter()
        return _generate_missing(job, work, stopping, status)


def _note_loss(status: StatusFile, why: str) -> str:
    error = JobError(why)
    status.end(error)
    return failure_line(error)


def _engines_ahead(job: Job, resources: ActorResources, cluster: Cluster) -> int:
    # Engines to ask for before the input is staged, which may take minutes, as a node does: fewer than it has parts.
    if not (cluster.may_grow and resources.gpus and resources.max_actors):
        return 0
    return min(resources.max_actors, sum(file.size for file in job.listing.files) // _PART_BYTES)


def _stage(job: Job, before: StagedInput | None) -> StagedInput:
    # The input is staged if it is not yet, is damaged, or has changed.
    source = job.source
    rows = job.config.writing.rows_per_file or rows_per_part(job.listing, job.config.reading)
    plan = StagingPlan(job.output.staged, job.config.reading, job.prompts, rows, source, images=job.staged_images)
    if before is None:
        staged = stage(job.listing, plan)
        staged.save()
        return staged
    if before.source != source:
        staged = stage(job.listing, replace(plan, revision=before.revision + 1))
        grow(job, before, staged, _columns_of(job, staged.row_type))
        return staged
    if is_damaged(job, before):
        return stage(job.listing, replace(plan, rows_per_part=before.rows_per_part, revision=before.revision), before)
    return before


def _run_traits(job: Job, row_type: pa.StructType) -> RunTraits:
    config = job.config
    rows_have_settings = job.prompts.kind == "openai" or row_type.get_field_index(SAMPLING_COLUMN) >= 0
    return RunTraits(
        config.sampling,
        rows_have_settings,
        config.drafter,
        learning=config.learning.enabled,
        images=job.images is not None,
        reasons=job.reasons,
        program=config.rollout is not None,
    )


def _columns_of(job: Job, row_type: pa.StructType) -> tuple[OutputColumn, ...]:
    # Those that the job's engines have made; see `wanted_columns`.
    lossless = job.engine_facts()["lossless"] is not False
    return wanted_columns(replace(_run_traits(job, row_type), lossless=lossless))


def _batch_run(job: Job, staged: StagedInput) -> BatchRun:
    made = [column.name for column in _columns_of(job, staged.row_type)]
    trusted, images = job.config.loading.trust_remote_code, None if job.images is None else job.images.limits.images
    return BatchRun(made, job.config.sampling, job.config.model, trusted, images)


def _generate_missing(job: Job, work: Work, stopping: Stopping, status: StatusFile) -> tuple[StagedInput, Progress]:
    quiet_ray_data()
    missing = {part.name for part in work.missing}
    unfinished = [row for row in read_unfinished(job.output) if row.part in missing]
    base = job.engine_facts()["base_fingerprint"]
    most = job.config.stop_after_valid
    wanted = None if most is None else most - read_totals(job.output).valid.valid
    ledger = start_beside_driver(Ledger, unfinished, base, wanted)
    tally = _tally(job, work, unfinished)
    left = tally.total - tally.before
    say(f"{left} of {tally.total} rows to generate; an engine takes {takes(work.resources)}")
    board = start_beside_driver(StatusBoard)
    viewers = [display(), status, job_metrics(without_secrets(job.config.output))]
    learner = None
    if work.learner is not None:
        from pipeline.learning.job_learner import JobLearner

        learner = JobLearner(work.learner)
    look = None if learner is None else learner.look
    watch = ProgressWatch(board, tally, partial(_note_facts, job), viewers, look)
    try:
        with watch, _telling(job, ledger), stopping.draining(partial(_drain, ledger, job.config.limits.drain_seconds)):
            staged = _stream_or_end(job, work, board, ledger, None if learner is None else learner.name)
            tally.total = staged.rows
        counts: LedgerCounts = ray.get(ledger.counts.remote())
        if counts.engine_deaths:
            say(
                f"{counts.engine_deaths} times an engine's process ended and was replaced; "
                f"{counts.rows_again} rows were generated again"
            )
    except Exception as error:
        raise _explained(error, watch.last) from error
    finally:
        _keep_unfinished(job, ledger)  # first: the learner may outlast the time given to a stop
        if learner is not None:
            watch.last = replace(watch.last, learning=learner.close())
    return staged, watch.last


@contextmanager
def _telling(job: Job, ledger: Any) -> Iterator[None]:
    # In a thread of its own: a function that takes long delays no engine.
    if job.config.on_part is None:
        yield
        return
    calls, number = PartCalls(job.config.on_part, job.config.output, job.output), 0
    before = sorted(job.output.data.parquets())

    def look() -> None:
        nonlocal number
        calls.look(before)
        try:
            names = ray.get(ledger.committed.remote(number), timeout=_TELL_SECONDS)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return  # parts that are missed are told of at the end
        calls.look(names)
        number += len(names)

    with Pulse(_TELL_SECONDS, look):
        yield


def _stream_or_end(job: Job, work: Work, board: Any, ledger: Any, learner: str | None) -> StagedInput:
    # It returns the input whose rows are all in the output: the whole, or what was enough.
    try:
        if not ray.get(ledger.counts.remote()).enough:
            _stream(job, work, board, ledger, learner)
            return work.staged
    except Exception:
        if not ray.get(ledger.counts.remote()).enough:
            raise
    gc.collect()  # Ray Data leaves the engines of a stage that has raised an error to the garbage collector
    say(f"{job.config.stop_after_valid} rows are valid, as many as are wanted: others are left out")
    columns, saved = _columns_of(job, work.staged.row_type), ray.get(ledger.save.remote())
    for part, done in _done_by_part(saved).items():  # the engines ended before they could report their last rows
        ray.get(board.put.remote("part", done, part))
    return keep_finished(job, work.staged, saved, columns)


def _stream(job: Job, work: Work, board: Any, ledger: Any, learner: str | None) -> None:
    # A row of the Ray dataset is a part. `learner` names a `LearnerActor`.
    # Late, because they import torch, which no check waits for.
    from pipeline.engines.engine_actor import EngineActor, engine_stage
    from pipeline.engines.shared_texts import OtherTexts
    from pipeline.generate.rollout import MOST_CALLS, PROGRAM_SECONDS, Rollout, to_programs
    from pipeline.generate.row_requests import settings_of, to_requests

    config, resources, settings = job.config, work.resources, settings_of(job)
    traits, rollout = _run_traits(job, work.staged.row_type), None
    if config.rollout is not None:
        added = columns_type(wanted_columns(replace(traits, lossless=False))).names
        taken = {"request_id", *added, *work.staged.row_type.names}
        seconds = config.limits.row_seconds or PROGRAM_SECONDS
        rollout = Rollout(config.rollout, settings, seconds, frozenset(taken - {"valid"}))
    engine = {
        "spec": engine_spec(
            config.model,
            config.drafter,
            config.loading,
            config.engine,
            queue=None if rollout is None else MOST_CALLS,
            threads=resources.threads,
            verifier=config.verifier,
            learning=None if work.learner is None else work.learner.beginning,
            folder=job.folder,
        ),
        "limits": config.limits,
        "traits": traits,
        "ledger": ledger,
        "progress": board,
        "run": without_secrets(config.output),
        "commit": partial(commit_part, job.output),
        "others": OtherTexts(job.output.data, shared=work.most_engines > 1),
        "learner": learner,
        "rollout": rollout,
    }
    longest = max(part.rows for part in work.missing)
    # Large parts first: what is left for the end, when engines run empty, is short.
    parts = sorted(work.missing, key=lambda part: part.nbytes, reverse=True)
    staged = ray.data.read_datasource(
        StagedParts(work.staged, parts), override_num_blocks=len(parts), num_cpus=HELPER_CPUS
    )
    requests = staged.map_batches(
        to_requests if rollout is None else to_programs,
        batch_format="pyarrow",
        fn_kwargs={"settings": settings},
        num_cpus=HELPER_CPUS,
    )
    # Ray replaces an engine's process and gives it its parts again, without end: the ledger knows when to give up.
    engines = (resources.min_actors, work.most_engines)
    stage = {"rows": longest, "batch_size": 1, "at_start": work.engines_at_start}
    engine_stage(requests, EngineActor, engine, engines, resources, **stage).materialize()


def _learner(job: Job) -> LearnerSpec:
    from pipeline.learning.config import learner_spec

    config = job.config
    run, model = without_secrets(config.output), config.model or model_name(None)
    return learner_spec(config.learning, job.output, run, model, config.loading)


def _explained(error: Exception, last: Progress) -> Exception:
    if last.failure is not None:
        return InputError(last.failure)
    cause = getattr(error, "cause", None) or error
    why = str(cause) if isinstance(cause, JobError) else f"{type(cause).__name__}: {one_line(cause)}"
    return JobError(f"{why}: {last.crash}" if last.crash else why)


def _note_facts(job: Job, now: Progress) -> None:
    if now.facts is not None:  # as soon as they are known, because training on the rows relies on them
        job.save_run("running", **job.engine_facts() | asdict(now.facts))


def _tally(job: Job, work: Work, unfinished: Sequence[SavedRow]) -> Tally:
    # Rows that are done: those of committed parts, and by part those that engines will report again.
    kept = _done_by_part(unfinished)
    rows = work.staged.rows - work.rows + sum(part.rows for part in kept.values())
    uncommitted, errors = {part.name for part in work.missing}, sum(part.errors for part in kept.values())
    files = [info.path for name, info in job.output.errors.parquets().items() if name not in uncommitted]
    if files:
        errors += count_rows(pyarrow.dataset.dataset(files, filesystem=job.output.root.filesystem, format="parquet"))
    return Tally(work.staged.rows, rows, errors, kept)


def _done_by_part(rows: Iterable[SavedRow]) -> dict[str, PartReport]:
    found: dict[str, PartReport] = {}
    for row in rows:
        done = PartReport()
        if row.generated is not None:
            done = PartReport(1, 0, row.generated["num_output_tokens"], row.generated["num_decode_steps"])
        elif row.problem is not None:
            done = PartReport(1, 1)
        found[row.part] = found.get(row.part, PartReport()).plus(done)
    return found


def _drain(ledger: Any, seconds: float) -> None:
    # Rows inside engines are finished, and complete parts committed.
    say("stopping: rows that have begun are finished first")
    deadline = time.monotonic() + seconds
    ray.get(ledger.drain.remote())
    while time.monotonic() < deadline:
        counts: LedgerCounts = ray.get(ledger.counts.remote())
        if not counts.inside and not counts.uncommitted:
            break
        time.sleep(_DRAIN_PULSE_SECONDS)


def _keep_unfinished(job: Job, ledger: Any) -> None:
    try:
        write_unfinished(job.output, ray.get(ledger.save.remote(), timeout=_SAVE_SECONDS))
    except (ray.exceptions.RayError, OSError) as error:
        say(f"finished rows of unfinished parts are lost: {one_line(error)}")
