"""The streaming pipeline under supervision: it is watched, stopped in good order, and its failures are explained."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pyarrow.dataset
import ray

from drafter.errors import one_line
from pipeline.cluster.ray_cluster import beside_driver, quiet_ray_data, takes
from pipeline.engines.ledger import Ledger, LedgerCounts, SavedRow
from pipeline.engines.named_models import model_name
from pipeline.engines.unfinished_rows import read_unfinished, write_unfinished
from pipeline.errors import InputError, JobError
from pipeline.generate.job_context import JobContext, Work
from pipeline.generate.streaming import stream
from pipeline.learning.job_learner import JobLearner
from pipeline.learning.learner_spec import Beginning, learner_spec
from pipeline.output.output_folder import OutputFolder
from pipeline.progress.board import ProgressBoard
from pipeline.progress.display import display
from pipeline.progress.job_progress import Progress
from pipeline.progress.prometheus import JobMetrics
from pipeline.progress.reports import PartReport
from pipeline.progress.status_file import StatusFile
from pipeline.progress.tally import Tally
from pipeline.progress.watch import ProgressWatch
from pipeline.staging.staged_input import Part
from pipeline.stopping import Stopping

_DRAIN_PULSE_SECONDS = 0.2
_SAVE_SECONDS = 60


def generate_missing(job: JobContext, work: Work, stopping: Stopping, status: StatusFile) -> Progress:
    """Generate the missing parts, show how far the job is, and return how far it has come.

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
    board = _start_beside_driver(ProgressBoard)
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
        keep_unfinished(job.output, ledger)  # first: whoever wants the job to stop may not wait for the learner
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
    """Start an actor that needs no core, on the node that a job cannot lose and go on."""
    options = {"num_cpus": 0, "scheduling_strategy": beside_driver(), "max_restarts": -1, "max_task_retries": -1}
    return ray.remote(**options)(actor).remote(*arguments)


def _explained(error: Exception, last: Progress) -> Exception:
    """Return what to raise for a failure of the pipeline: models that cannot be loaded are the input's fault."""
    if last.failure is not None:
        return InputError(last.failure)
    cause = getattr(error, "cause", None) or error
    why = str(cause) if isinstance(cause, JobError) else f"{type(cause).__name__}: {one_line(cause)}"
    return JobError(f"{why}: {last.crash}" if last.crash else why)


def note_facts(job: JobContext, now: Progress) -> None:
    """Write to `run.json` what the engines decode with, as soon as it is known: who trains on the rows relies on it."""
    if now.facts is not None:
        job.save_run("running", **job.engine_facts() | asdict(now.facts))


def _tally(output: OutputFolder, work: Work, unfinished: Sequence[SavedRow]) -> Tally:
    """Begin a tally with what earlier submissions have done."""
    kept = kept_rows(unfinished)
    rows = work.staged.rows - work.rows + sum(part.rows for part in kept.values())
    errors = count_errors(output, work.missing) + sum(part.errors for part in kept.values())
    return Tally(work.staged.rows, rows, errors, kept)


def kept_rows(unfinished: Sequence[SavedRow]) -> dict[str, PartReport]:
    """Add up by part the rows that earlier submissions finished; engines will report these again."""
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
    """Count the rows in `errors/`, without those of parts that are not committed."""
    uncommitted = {f"{part.name}.parquet" for part in missing}
    paths = [info.path for info in output.errors.children() if info.path.rpartition("/")[2] not in uncommitted]
    if not paths:
        return 0
    filesystem = output.root.filesystem
    return int(pyarrow.dataset.dataset(paths, filesystem=filesystem, format="parquet").count_rows())


def drain(ledger: Any, seconds: float) -> None:
    """Let no more rows enter engines; wait until rows inside are finished and complete parts are committed."""
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
        write_unfinished(output, ray.get(ledger.save.remote(), timeout=_SAVE_SECONDS))
    except (ray.exceptions.RayError, OSError) as error:
        print(f"finished rows of unfinished parts are lost: {one_line(error)}", file=sys.stderr, flush=True)
