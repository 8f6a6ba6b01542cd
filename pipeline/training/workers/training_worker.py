"""One training worker's life: load, go on from the last checkpoint, train, evaluate, save."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ray.train
import ray.train.torch
import torch

from drafter.base.causal_lm import BaseModel
from drafter.base.loading import load_base
from drafter.heads.contract import DraftHead, Provenance
from drafter.heads.draft_batch import DraftBatch
from drafter.heads.registry import new_head
from drafter.training.simulated_walk import simulated_beta
from drafter.training.targets import anchor_draws, draft_batch
from drafter.training.train_loop import StepDone, train
from drafter.training.training_step import TrainingStep
from pipeline.errors import InputError
from pipeline.training.metrics_log import MetricsLog, Record
from pipeline.training.texts.hidden_store import store_hidden
from pipeline.training.texts.step_stream import Share, StepTexts, stream_steps
from pipeline.training.training_board import progress_line
from pipeline.training.workers.checkpoints import SavedRun, report, restore
from pipeline.training.workers.sharded_optimiser import ShardedOptimiser, head_of
from pipeline.training.workers.training_state import TrainingState
from pipeline.training.workers.worker_task import WorkerTask


def run(task: WorkerTask) -> None:
    """Train from the last checkpoint to the last step.

    Raises:
        InputError: The texts are of another base.
        LoadError: The base or the head cannot be made.
        TrainingError: The loss is not finite any more.
        OSError: The disk is full, say.
    """
    torch.set_num_threads(task.threads)
    context = ray.train.get_context()
    config, settings = task.config, task.config.training
    # Ray would name a GPU that is only counted.
    device = ray.train.torch.get_device() if torch.cuda.is_available() else torch.device("cpu")
    base = load_task_base(task, device)
    rank, workers = context.get_world_rank(), context.get_world_size()
    if config.texts.store_hidden:
        store_hidden(base, task.staged, settings, rank, workers, lambda line: task.board.show.remote(line))
    saved = restore(task.folder.checkpoints)
    torch.manual_seed(settings.seed)
    head = new_head(config.algorithm, base, config.head)
    if saved is not None:
        head.load_state_dict(saved.state.weights)
    step_of = TrainingStep(base, head, settings)
    optimiser = ShardedOptimiser(step_of, settings, config.sharding, saved.state if saved else None)
    held_out = task.staged.held_out()

    def evaluate() -> dict[int, float]:
        # All workers do the same: the others would only wait, and ZeRO-3 needs them.
        with torch.autocast(device.type, base.dtype, enabled=base.dtype != torch.float32):
            return optimiser.run(lambda: simulated_beta(head, base, held_out))

    mine = Share(rank, workers, config.sharding.micro_batches, config.texts.store_hidden)
    feed = Feed(task, head.config.depth, device, stream_steps(task.staged, settings, mine, optimiser.steps))
    evaluations = list(saved.evaluations) if saved else []
    scribe = Scribe(task, head, base, optimiser.steps) if rank == 0 else None
    for done in train(optimiser, feed.batches(), settings, evaluate, optimiser.steps):
        if done.beta is not None:
            evaluations.append({"step": done.step, "beta": {str(nodes): beta for nodes, beta in done.beta.items()}})
        last = done.step == settings.steps
        checkpoint = last or done.step % config.checkpoint_every == 0
        # Gathering is a collective operation.
        state = optimiser.state() if checkpoint or done.beta is not None else None
        if scribe is not None:
            scribe.log(done, feed.tokens)
            if done.beta is not None and state is not None:
                scribe.evaluated(evaluations, state)
        if checkpoint:
            assert state is not None
            to_save = None
            if scribe is not None:
                scribe.metrics.flush()  # a run that goes on from here does not take these steps again
                to_save = SavedRun(state, evaluations)
            report(to_save, done.step, task.folder.checkpoints, task.board)


def load_task_base(task: WorkerTask, device: torch.device) -> BaseModel:
    """The base; where it is to be shared out, on the CPU first: it may not fit on one device.

    Raises:
        InputError: It is not the one that said the texts.
        LoadError: It cannot be loaded.
    """
    config = task.config
    half = config.training.precision == "bf16" and device.type != "cpu"
    base = load_base(
        task.model,
        dtype=torch.bfloat16 if half else torch.float32,
        device="cpu" if config.sharding.zero_stage == 3 else device,
        trust_remote_code=config.trust_remote_code,
    )
    if base.fingerprint != task.base_fingerprint:
        raise InputError(
            f"data was made by another base (fingerprint {task.base_fingerprint}) than {base.name} "
            f"({base.fingerprint}): a head learns from what its own base says; distil with this one"
        )
    return base


@dataclass
class Feed:
    """A worker's batches, made of its texts as they come.

    Args:
        task: Says how many anchors a text gives.
        depth: Targets an anchor.
        device: Where batches go.
        steps: The texts.
        tokens: In the steps so far, of all workers.
    """

    task: WorkerTask
    depth: int
    device: torch.device
    steps: Iterator[StepTexts]
    tokens: int = field(default=0, init=False)

    def batches(self) -> Iterator[list[DraftBatch]]:
        """The micro-batches of each step."""
        settings = self.task.config.training
        for one in self.steps:
            self.tokens += one.tokens
            yield [
                draft_batch(
                    micro.texts,
                    self.depth,
                    settings.anchors_per_text,
                    anchor_draws(settings.seed, one.step, micro.places),
                ).to(self.device)
                for micro in one.micro_batches
            ]


class Scribe:
    """Writes down what the first worker sees: metrics, and the head whenever it is the best so far.

    Args:
        task: Says where to.
        head: Its kind and configuration; its weights may be shared out.
        base: Its base.
        done: Steps taken before.
    """

    def __init__(self, task: WorkerTask, head: DraftHead, base: BaseModel, done: int) -> None:
        self.metrics = MetricsLog(task.folder, done)
        self._task, self._head = task, head
        self._base_name, self._base_fingerprint = base.name, task.base_fingerprint
        self._tokens, self._since = 0, time.monotonic()

    def log(self, done: StepDone, tokens: int) -> None:
        """A step was taken; `tokens` were read so far."""
        config = self._task.config
        if done.step % config.log_every == 0 or done.step == config.training.steps:
            now = time.monotonic()
            rate = (tokens - self._tokens) / (now - self._since)
            self._tokens, self._since = tokens, now
            update = done.update
            self._record(
                {
                    "step": done.step,
                    "loss": update.loss,
                    "learning_rate": update.learning_rate,
                    "gradient_norm": update.gradient_norm,
                    "tokens_per_second": round(rate, 1),
                    "time": time.time(),
                }
            )

    def evaluated(self, evaluations: list[dict[str, Any]], state: TrainingState) -> None:
        """β was measured: keep the head if it is the best so far."""
        latest = evaluations[-1]
        self._record({**latest, "time": time.time()})
        chosen_by = str(self._task.config.training.chosen_by)
        if latest["beta"][chosen_by] >= max(one["beta"][chosen_by] for one in evaluations):
            training = {**self._task.provenance, "history": evaluations}
            whole = head_of(self._head, state.weights)
            whole.provenance = Provenance(self._base_name, self._base_fingerprint, training)
            self._task.folder.save_head(whole)
        self.metrics.flush()
        self._since = time.monotonic()  # the rate is of training alone

    def _record(self, record: Record) -> None:
        self.metrics.add(record)
        self._task.board.show.remote(progress_line(record, self._task.config.training.steps))
