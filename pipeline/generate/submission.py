"""One submission of a generation job: runs the pipeline, handles stops and errors, and completes the output."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pyarrow.dataset
import ray
from pyarrow import fs

from drafter.errors import one_line
from drafter.text.tokenizers import load_tokenizer
from pipeline.cluster.ray_cluster import beside_driver, connect, quiet_ray_data, share_out, takes
from pipeline.engines.ledger import Ledger, LedgerCounts, SavedRow, delete_unfinished, read_unfinished, write_unfinished
from pipeline.engines.models import model_name
from pipeline.errors import InputError, JobError
from pipeline.generate.growing import delete_strays, grow
from pipeline.generate.job_context import LEARNING, SPECULATION, JobContext, Work
from pipeline.generate.streaming import run_traits, stream
from pipeline.io.files import partials
from pipeline.learning.job_learner import JobLearner, beside_learner
from pipeline.learning.learner_spec import Beginning, beginning, learner_spec
from pipeline.output.batch_results import write_batch
from pipeline.output.columns import wanted_columns
from pipeline.output.compaction import compact
from pipeline.output.folder import OutputFolder
from pipeline.output.lease import Lease
from pipeline.output.part_files import discard_torn, is_whole
from pipeline.output.run_file import read_run, take_output
from pipeline.output.summary import count_rows, read_totals, speculation_record, summarise
from pipeline.progress.board import PartReport, Progress, StatusBoard, Tally
from pipeline.progress.prometheus import JobMetrics
from pipeline.progress.watch import ProgressWatch, StatusFile, display
from pipeline.staging.staging import STAGED_FORMAT, Part, StagedInput, StagingPlan, mend_list, stage
from pipeline.stopping import Stopping

_DRAIN_PULSE_SECONDS = 0.2
_SAVE_SECONDS = 60


def generate_missing(job: JobContext, work: Work, stopping: Stopping, status: StatusFile) -> Progress:
    """Generate the missing parts, show progress, and return the final progress.

    Raises:
        InputError: The models cannot be loaded.
        JobError: The pipeline failed.
    """
    wanted = f"an engine takes {takes(work.resources)}"
    print(f"{work.rows} of {work.staged.rows} rows to generate; {wanted}", file=sys.stderr, flush=True)
    quiet_ray_data()
    missing = {part.name for part in work.missing}
    unfinished = [row for row in read_unfinished(job.output) if row.part in missing]
    base = job.engine_facts()["base_fingerprint"]
    ledger = _start_beside_driver(Ledger, job.config.limits.row_attempts, unfinished, base)
    board = _start_beside_driver(StatusBoard)
    viewers = [display(), status, JobMetrics(job.config.output)]
    learner = None if work.beginning is None else _start_learner(job, work.beginning)
    look = None if learner is None else learner.look
    watch = ProgressWatch(board, _tally(job.output, work, unfinished), partial(note_facts, job), viewers, look)
    try:
        with watch, stopping.draining(partial(drain, ledger, job.config.limits.drain_seconds)):
            stream(job, work, board, ledger, None if learner is None else learner.name)
        counts: LedgerCounts = ray.get(ledger.counts.remote())
        if counts.engine_deaths:
            deaths = f"{counts.engine_deaths} times an engine's process ended and was replaced"
            print(f"{deaths}; {counts.rows_again} rows were generated again", file=sys.stderr, flush=True)
    except Exception as error:
        raise _explained(error, watch.last) from error
    finally:
        keep_unfinished(job.output, ledger)  # first: the learner may outlast the time given to a stop
        if learner is not None:
            watch.last = replace(watch.last, learning=learner.close())
    return watch.last


def _start_learner(job: JobContext, begins: Beginning) -> JobLearner:
    config, loading = job.config, job.config.loading
    spec = learner_spec(
        config.learning,
        begins,
        job.output,
        config.output,
        model=model_name(config.model),
        dtype=loading.dtype,
        trust_remote_code=loading.trust_remote_code,
    )
    return JobLearner(spec, config.learning)


def _start_beside_driver(actor: type, *arguments: Any) -> Any:
    """Start an actor without a core on the driver's node, the one node that a job cannot outlive."""
    options = {"num_cpus": 0, "scheduling_strategy": beside_driver(), "max_restarts": -1, "max_task_retries": -1}
    return ray.remote(**options)(actor).remote(*arguments)


def _explained(error: Exception, last: Progress) -> Exception:
    """Return the error to raise for a failed pipeline: unloadable models are a mistake in the input."""
    if last.failure is not None:
        return InputError(last.failure)
    cause = getattr(error, "cause", None) or error
    why = str(cause) if isinstance(cause, JobError) else f"{type(cause).__name__}: {one_line(cause)}"
    return JobError(f"{why}: {last.crash}" if last.crash else why)


def note_facts(job: JobContext, now: Progress) -> None:
    """Write the engines' facts to `run.json` as soon as they are known, because training on the rows relies on them."""
    if now.facts is not None:
        job.save_run("running", **job.engine_facts() | asdict(now.facts))


def _tally(output: OutputFolder, work: Work, unfinished: Sequence[SavedRow]) -> Tally:
    kept = kept_rows(unfinished)
    rows = work.staged.rows - work.rows + sum(part.rows for part in kept.values())
    errors = count_errors(output, work.missing) + sum(part.errors for part in kept.values())
    return Tally(work.staged.rows, rows, errors, kept)


def kept_rows(unfinished: Sequence[SavedRow]) -> dict[str, PartReport]:
    """Count by part the rows that earlier submissions finished; engines will report them again."""
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
    """Count the rows in `errors/`, without those of uncommitted parts."""
    uncommitted = {f"{part.name}.parquet" for part in missing}
    paths = [info.path for info in output.errors.children() if info.path.rpartition("/")[2] not in uncommitted]
    if not paths:
        return 0
    filesystem = output.root.filesystem
    return int(pyarrow.dataset.dataset(paths, filesystem=filesystem, format="parquet").count_rows())


def drain(ledger: Any, seconds: float) -> None:
    """Stop admitting rows, and wait until rows inside engines are finished and complete parts committed."""
    print("stopping: rows that have begun are finished first", file=sys.stderr, flush=True)
    deadline = time.monotonic() + seconds
    ray.get(ledger.drain.remote())
    while time.monotonic() < deadline:
        counts: LedgerCounts = ray.get(ledger.counts.remote())
        if not counts.inside and not counts.uncommitted:
            break
        time.sleep(_DRAIN_PULSE_SECONDS)


def keep_unfinished(output: OutputFolder, ledger: Any) -> None:
    """Save the finished rows of uncommitted parts for the next submission."""
    try:
        write_unfinished(output, ray.get(ledger.save.remote(), timeout=_SAVE_SECONDS))
    except (ray.exceptions.RayError, OSError) as error:
        print(f"finished rows of unfinished parts are lost: {one_line(error)}", file=sys.stderr, flush=True)


def run(job: JobContext) -> None:
    """Complete a job and print a summary of its output.

    Raises:
        InputError: The input, the models or the output cannot be used.
        JobError: The job failed on the way.
        JobStopped: It was told to stop.
    """
    last = Progress()
    stopping = Stopping()
    lease = Lease(job.output.lease, lost=lambda by: stopping.stop(f"{by} works on the output now"))
    if is_finished(job):
        if lease.is_left or partials(job.output.root):  # of a driver that was killed at its very end
            with lease:
                job.output.delete_temporary()
        rows, errors = count_rows(job.output)
        found = f"of {rows + errors:,} rows {rows:,} are finished and {errors:,} failed"
        print(f"nothing is left to do: {found}; they are in {job.config.output}", flush=True)
        return
    with stopping, lease, StatusFile(job.output.status_file) as status:
        if take_output(job.config.output, job.output, job.meaning):
            job.save_run("running")
        last = finish(job, stopping, status)
    said = (job.engine_facts()[SPECULATION] or {}).get("sentences", ())
    print(summarise(job.output, read_totals(job.output), last.tokens, last.rows, last.seconds, said), flush=True)


def is_finished(job: JobContext) -> bool:
    """Return whether the output is complete and intact, and the input unchanged since."""
    output = job.output
    if output.run_file.type != fs.FileType.File:
        return False
    run = read_run(output.run_file)
    if run["state"] != "finished" or run.get("batch_bytes") != batch_bytes(output):
        return False
    staged = StagedInput.load(output.staged)
    return staged is not None and staged.source == job.source and is_whole(output, staged.parts)


def batch_bytes(output: OutputFolder) -> dict[str, int]:
    """Return the sizes of an OpenAI batch's answer files, by name; none for other jobs."""
    return {place.name: place.info.size for place in output.batch_files if place.type == fs.FileType.File}


def finish(job: JobContext, stopping: Stopping, status: StatusFile) -> Progress:
    """Stage and generate missing rows, and complete the output. The caller must hold the lease.

    Raises:
        InputError: The input or the models cannot be used.
        JobError: The job failed on the way.
    """
    output = job.output
    output.delete_temporary()
    staged = StagedInput.load(output.staged)
    if staged is None and output.committed():
        raise InputError(f"output {job.config.output} has results but no list of their rows (_staged): choose another")
    if staged is not None:
        mend_list(output.staged)
        delete_strays(output, staged)
        discard_torn(output, staged.parts)
        if staged.format != STAGED_FORMAT and staged.without(output.committed()):
            if output.has_results():
                raise InputError(
                    f"output {job.config.output} was begun by an earlier release, which staged its input otherwise: "
                    "go on with that release, or choose another output"
                )
            staged = None  # nothing is lost by staging the input again
    if staged is not None and staged.source != job.source and not output.has_results():
        output.forget_job()
        staged = None
    last = Progress()
    if staged is None or staged.source != job.source or staged.without(output.committed()) or is_damaged(job, staged):
        staged, last = stage_and_generate(job, staged, stopping, status)
    compact_mb = job.config.writing.compact_mb
    compact(output, None if compact_mb is None else int(compact_mb * 2**20))
    rows, errors = count_rows(output)
    if rows + errors != staged.rows:
        found = f"{rows} finished and {errors} failed rows"
        raise JobError(f"output {job.config.output} has {found} instead of {staged.rows} in all: choose another output")
    # Some reports may have been lost, so the files tell how many rows there are.
    before = staged.rows - last.rows
    status.show(replace(last, total=staged.rows, before=before, errors=errors - last.errors_before))
    if job.prompts.kind == "openai":
        write_batch(output, staged, partial(load_tokenizer, model_name(job.config.model)))
    output.delete_temporary()
    delete_unfinished(output)
    facts = job.engine_facts()
    if last.choices:
        facts[SPECULATION] = speculation_record(last.choices)
    if last.learning is not None:
        facts[LEARNING] = asdict(last.learning)
    job.save_run("finished", rows=staged.rows, batch_bytes=batch_bytes(output), **facts)
    return last


def needed(job: JobContext, staged: StagedInput) -> list[Part]:
    """Return the parts whose staged rows are still needed: those to generate, or all for an OpenAI batch's answers."""
    return list(staged.parts) if job.prompts.kind == "openai" else staged.without(job.output.committed())


def is_damaged(job: JobContext, staged: StagedInput) -> bool:
    return bool(staged.damaged(needed(job, staged)))


def stage_as_it_is(job: JobContext, before: StagedInput | None) -> StagedInput:
    """Stage the input if it is not staged, is damaged, or has changed.

    Raises:
        InputError: The input cannot be used, or the output has no result for any of its rows.
        JobError: The staged input cannot be written.
    """
    rows, source = job.config.writing.rows_per_file, job.source
    plan = StagingPlan(job.output.staged, job.config.reading, job.prompts, rows, source)
    if before is None:
        staged = stage(job.listing, plan)
        staged.save()
        return staged
    if before.source != source:
        staged = stage(job.listing, replace(plan, revision=before.revision + 1))
        traits = run_traits(job, staged.row_type)
        columns = wanted_columns(replace(traits, lossless=job.engine_facts()["lossless"] is not False))
        grow(job, before, staged, columns)
        return staged
    if is_damaged(job, before):
        return stage(job.listing, replace(plan, rows_per_part=before.rows_per_part, revision=before.revision), before)
    return before


def stage_and_generate(
    job: JobContext, staged: StagedInput | None, stopping: Stopping, status: StatusFile
) -> tuple[StagedInput, Progress]:
    """Join the cluster, stage the input and generate the missing parts.

    Raises:
        InputError: The input or the models cannot be used, or the cluster is too small.
        JobError: The job failed on the way.
    """
    config = job.config
    job.save_run("running", **job.engine_facts())
    cluster = connect()
    stopping.take_over()
    resources = share_out(config.resources, beside_learner(config.learning, cluster))
    status.takes(resources)
    staged = stage_as_it_is(job, staged)
    learns = beginning(config.learning, job.output) if config.learning.enabled else None
    work = Work(staged, staged.without(job.output.committed()), resources, learns)
    if not work.missing:
        return staged, Progress()
    job.note_drafter()
    return staged, generate_missing(job, work, stopping, status)
