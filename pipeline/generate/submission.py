"""One submission of a generation job: it does what earlier ones have left, and completes the output."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

from pyarrow import fs

from drafter.base.loading import load_tokenizer
from pipeline.cluster.ray_cluster import connect
from pipeline.cluster.shares import share_out
from pipeline.engines.named_models import model_name
from pipeline.engines.unfinished_rows import delete_unfinished
from pipeline.errors import InputError, JobError, JobStopped
from pipeline.generate.growing import delete_strays, grow
from pipeline.generate.job_context import LEARNING, SPECULATION, JobContext, Work
from pipeline.generate.streaming import run_traits
from pipeline.generate.supervision import generate_missing
from pipeline.io.files import partials
from pipeline.learning.job_learner import beside_learner
from pipeline.learning.learner_spec import beginning
from pipeline.output.compaction import compact
from pipeline.output.lease import Lease
from pipeline.output.openai_batch_results import write_batch
from pipeline.output.output_columns import wanted_columns
from pipeline.output.output_folder import OutputFolder
from pipeline.output.run_file import read_run
from pipeline.output.same_job import take_output
from pipeline.output.summary import count_rows, read_totals, speculation_record, summarise
from pipeline.output.whole_parts import discard_torn, is_whole
from pipeline.progress.job_progress import Progress
from pipeline.progress.status_file import StatusFile
from pipeline.staging.stage_files import StagingPlan
from pipeline.staging.stage_input import stage
from pipeline.staging.staged_input import STAGED_FORMAT, Part, StagedInput, mend_list
from pipeline.stopping import Stopping, StopRequestedError


def run(job: JobContext) -> None:
    """Do what is still to be done, and print what the output holds.

    Raises:
        InputError: The input, the models or the output cannot be used.
        JobError: The job failed on the way.
        JobStopped: It was told to stop.
    """
    last = Progress()
    stopping = Stopping()
    lease = Lease(job.output.lease, lost=lambda by: stopping.stop(f"{by} works on the output now"))
    try:
        if is_finished(job):
            if lease.is_left or partials(job.output.root):  # of a driver that was killed at its very end
                with lease:
                    job.output.delete_temporary()
            rows, errors = count_rows(job.output)
            print(f"nothing is left to do: {rows:,} rows and {errors:,} errors are in {job.config.output}", flush=True)
            return
        with stopping, lease, StatusFile(job.output.status_file) as status:
            if take_output(job.config.output, job.output, job.meaning):
                job.save_run("running")
            last = finish(job, stopping, status)
    except StopRequestedError as stop:
        raise JobStopped(str(stop)) from None
    said = (job.engine_facts()[SPECULATION] or {}).get("sentences", ())
    print(summarise(job.output, read_totals(job.output), last.tokens, last.rows, last.seconds, said), flush=True)


def is_finished(job: JobContext) -> bool:
    """Return whether an earlier submission completed the output, and neither it nor the input has changed since."""
    output = job.output
    if output.run_file.type != fs.FileType.File:
        return False
    run = read_run(output.run_file)
    if run["state"] != "finished" or run.get("batch_bytes") != batch_bytes(output):
        return False
    staged = StagedInput.load(output.staged)
    return staged is not None and staged.source == job.source and is_whole(output, staged.parts)


def batch_bytes(output: OutputFolder) -> dict[str, int]:
    """Return the sizes of the files that answer an OpenAI batch, by name; other jobs have none of them."""
    return {place.name: place.info.size for place in output.batch_files if place.type == fs.FileType.File}


def finish(job: JobContext, stopping: Stopping, status: StatusFile) -> Progress:
    """Stage and generate what is missing, and complete the output; for the submission that holds the lease.

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
        found = f"{rows} rows and {errors} errors"
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
    """Return the parts whose staged rows are still to be read: those to generate, and all for a batch's answers."""
    return list(staged.parts) if job.prompts.kind == "openai" else staged.without(job.output.committed())


def is_damaged(job: JobContext, staged: StagedInput) -> bool:
    """Return whether staged rows that are still to be read cannot be."""
    return bool(staged.damaged(needed(job, staged)))


def stage_as_it_is(job: JobContext, before: StagedInput | None) -> StagedInput:
    """Stage the input, unless that is done: for the first time, again where it is damaged, or anew if it has changed.

    Args:
        job: The job.
        before: What is staged.

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
    """Join the cluster, stage the input if that is not done, and generate the parts that are missing.

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
