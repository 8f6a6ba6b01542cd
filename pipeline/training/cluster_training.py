"""Runs the training job on the cluster: stages the texts, trains, plots the metrics, prints a summary."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from pyarrow import fs
from ray.train import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer

from drafter.errors import one_line
from pipeline.cluster.ray_cluster import ActorResources, Cluster, connect, quiet_ray_data, share_out
from pipeline.command_line import say
from pipeline.errors import InputError, JobError, JobStopped
from pipeline.output.lease import Lease
from pipeline.output.run_file import read_run, save_run, take_output, versions
from pipeline.settings import ResourcesConfig
from pipeline.stopping import Stopping, StopRequestedError
from pipeline.training.board import TrainingBoard, TrainingDisplay
from pipeline.training.checkpoints import go_back, tidy
from pipeline.training.config import TrainConfig, WorkersConfig
from pipeline.training.folder import TrainingFolder
from pipeline.training.metrics import Record, plot_run, read_metrics
from pipeline.training.texts import DistilledTexts, StagedTexts, stage_texts
from pipeline.training.worker import WorkerTask
from pipeline.training.worker_entry import train_worker

_CHECKPOINTS_KEPT = 2


@dataclass(frozen=True)
class Texts:
    """The distilled texts of a job.

    Args:
        held_out: Texts for β; None if they are some of `data`.
        base_fingerprints: Fingerprints of the target model that generated the texts; see `same_base`.
    """

    data: Sequence[DistilledTexts]
    held_out: DistilledTexts | None
    base_fingerprints: tuple[str, ...]
    vocab_size: int


def run(config: TrainConfig, model: str, texts: Texts, folder: TrainingFolder, meant: dict[str, Any]) -> None:
    """Stage the texts unless an earlier submission did, train from the last checkpoint, and print a summary.

    Args:
        meant: See `pipeline.training.job.meaning`.

    Raises:
        InputError: The texts, the target model, the head or the cluster cannot be used.
        JobError: The job failed on the way.
        JobStopped: It was told to stop.
    """
    stopping = Stopping()
    try:
        if not finished(folder):
            lease = Lease(folder.lease, lost=lambda by: stopping.stop(f"{by} works on the output now"))
            with stopping, lease:
                finish(config, model, texts, folder, meant, stopping)
    except StopRequestedError as stop:
        raise JobStopped(str(stop)) from None
    print(summarise(folder, config), flush=True)


def finish(
    config: TrainConfig,
    model: str,
    texts: Texts,
    folder: TrainingFolder,
    meant: dict[str, Any],
    stopping: Stopping,
) -> None:
    """Do what earlier submissions left undone, and repair what is damaged. The caller holds the lease.

    Raises:
        InputError: The texts, the target model, the head or the cluster cannot be used.
        JobError: The job failed on the way.
    """
    facts: dict[str, Any] = {"base_fingerprints": list(texts.base_fingerprints)}
    take_output(config.output, folder, meant)
    save_run(folder.run_file, config.as_dict(), meant, state="running", **facts)
    resources = share_workers(config.workers, connect())
    stopping.take_over()
    quiet_ray_data()
    staged = StagedTexts.load(folder.staged)
    if staged is None:
        say("staging the texts")
        settings = config.training
        staged = stage_texts(
            texts.data,
            texts.held_out,
            folder.staged,
            config.texts,
            texts.vocab_size,
            settings.texts_per_step,
            settings.seed,
        )
    say("starting the workers, which load the model")
    prepare_checkpoints(folder, str(config.training.chosen_by))
    execute(config, model, texts.base_fingerprints, folder, staged, resources)
    draw(folder)
    facts |= {"texts": asdict(staged.counts), "products": folder.products()}
    save_run(folder.run_file, config.as_dict(), meant, state="finished", **facts)


def finished(folder: TrainingFolder) -> bool:
    """Return whether an earlier submission finished the job and its files are whole."""
    if folder.run_file.type != fs.FileType.File:
        return False
    run = read_run(folder.run_file)
    if run["state"] != "finished":
        return False
    found = folder.products()
    torn = [name for name, size in run["products"].items() if found.get(name) != size]
    if torn:
        print(f"what is not whole is made again: {', '.join(torn)}", file=sys.stderr, flush=True)
    return not torn


def prepare_checkpoints(folder: TrainingFolder, chosen_by: str) -> None:
    """Keep only the checkpoints to resume from."""
    tidy(folder.checkpoints, _CHECKPOINTS_KEPT)
    if not folder.has_head():
        best = go_back(folder.checkpoints, chosen_by)
        if best is not None:
            print(f"{folder.head.path} is damaged: step {best}, which it is of, is taken again", file=sys.stderr)


def share_workers(config: WorkersConfig, cluster: Cluster) -> ActorResources:
    """Divide the cluster among the workers.

    Raises:
        InputError: The cluster is too small for the fewest workers, and will not grow.
    """
    wanted = ResourcesConfig(config.fewest, config.most, config.gpus, config.cpus)
    return share_out(wanted, cluster, what="workers", settings="workers.{} or workers.number")


def execute(
    config: TrainConfig,
    model: str,
    base_fingerprints: tuple[str, ...],
    folder: TrainingFolder,
    staged: StagedTexts,
    resources: ActorResources,
) -> None:
    """Train, and show the progress.

    Raises:
        InputError: The target model or the head cannot be used.
        JobError: Training failed, or cannot go on.
    """
    board = ray.remote(num_cpus=0)(TrainingBoard).remote()
    provenance: dict[str, Any] = {
        "recipe": "jobs.train",
        "data": asdict(staged.counts),
        "settings": asdict(config.training),
        "versions": versions("deepspeed"),
    }
    if size := config.draft_vocab_size:
        share = round(staged.coverage(size), 4)
        provenance["draft_vocabulary"] = {"tokens": size, "coverage": share}
        print(f"draft vocabulary: {size:,} tokens, {share:.2%} of those in the answers", file=sys.stderr, flush=True)
    task = WorkerTask(
        config=config,
        model=model,
        base_fingerprints=base_fingerprints,
        folder=folder,
        staged=staged,
        provenance=provenance,
        board=board,
        threads=resources.threads,
    )
    failure: Exception | None = None
    with TrainingDisplay(board):
        try:
            _trainer(task, resources).fit()
        except TrainingFailedError as error:
            failure = error
        except SystemExit as error:  # Ray Train turns an interrupt into this.
            raise KeyboardInterrupt from error
    if refusal := ray.get(board.refusal.remote()):
        of_input, message = refusal
        raise (InputError if of_input else JobError)(message) from failure
    if failure is not None:
        raise JobError(_reason(failure)) from failure


def _trainer(task: WorkerTask, resources: ActorResources) -> TorchTrainer:
    config, folder = task.config, task.folder
    return TorchTrainer(
        train_worker,
        train_loop_config={"task": task},
        torch_config=TorchConfig(backend="nccl" if have_cuda(resources) else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=config.workers.number,
            use_gpu=resources.gpus > 0,
            resources_per_worker={"CPU": resources.cpus, "GPU": resources.gpus},
        ),
        run_config=RunConfig(
            name=folder.checkpoints.name,
            storage_path=folder.root.path,
            storage_filesystem=folder.root.filesystem,
            failure_config=FailureConfig(max_failures=config.workers.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=_CHECKPOINTS_KEPT),
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )


def have_cuda(resources: ActorResources) -> bool:
    """Return whether the workers' GPUs exist. Clusters for tests only count them."""
    if not resources.gpus:
        return False
    return bool(ray.get(ray.remote(num_cpus=0, num_gpus=resources.gpus)(torch.cuda.is_available).remote()))


def _reason(failure: Exception) -> str:
    causes = getattr(failure, "worker_failures", None) or {0: getattr(failure, "controller_failure", failure)}
    rank, cause = next(iter(causes.items()))
    cause = getattr(cause, "_base_exc", cause)
    return f"worker {rank} ended again and again: {type(cause).__name__}: {one_line(cause)}"


def draw(folder: TrainingFolder) -> None:
    """Plot the run's metrics."""
    with tempfile.TemporaryDirectory() as name:
        picture = Path(name) / "training.png"
        plot_run(read_metrics(folder.metrics), picture)
        folder.plot.copy_from(picture)


def summarise(folder: TrainingFolder, config: TrainConfig) -> str:
    """Return the job's summary for the user, from the written metrics."""
    records = read_metrics(folder.metrics)
    chosen_by = str(config.training.chosen_by)
    evaluated = [record for record in records if "beta" in record]
    best = max(evaluated, key=lambda record: (record["beta"][chosen_by], record["step"]))
    last: Record = next(record for record in reversed(records) if "loss" in record)
    return "\n".join(
        [
            f"steps       {last['step']:,}, last loss {last['loss']:.3f}",
            f"β           {', '.join(f'{beta:.2f} at {nodes}' for nodes, beta in best['beta'].items())} draft nodes, "
            f"simulated on held-out texts at step {best['step']:,}, the best of {len(evaluated)} by {chosen_by} nodes",
            f"head        {folder.head.path}",
            f"metrics     {folder.metrics.path}, {folder.plot.path}, {folder.events.path}",
            f"run         {folder.run_file.path}",
        ]
    )
