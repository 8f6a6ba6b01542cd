"""A training worker: loads, resumes from the last checkpoint, trains, evaluates, saves."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray.train
import ray.train.torch
import torch
from ray.train.collective import broadcast_from_rank_zero

from drafter.heads.checkpoint import new_head
from drafter.heads.contract import DraftHead, Provenance
from drafter.heads.losses import DraftBatch
from drafter.target.loading import load_base
from drafter.target.model import BaseModel
from drafter.training.loop import StepDone, TrainingStep, train, training_layers
from drafter.training.targets import anchor_draws, draft_batch, simulated_beta
from pipeline.errors import InputError
from pipeline.training.board import progress_line
from pipeline.training.checkpoints import SavedRun, TrainingState, report, restore
from pipeline.training.config import TrainConfig
from pipeline.training.folder import TrainingFolder
from pipeline.training.hidden_store import store_hidden
from pipeline.training.metrics import MetricsLog, Record
from pipeline.training.sharded_optimiser import ShardedOptimiser, head_of
from pipeline.training.steps import Share, StepTexts, stream_steps
from pipeline.training.texts import StagedTexts


@dataclass(frozen=True)
class WorkerTask:
    """The driver's task for each worker of a job.

    Args:
        base_fingerprints: Fingerprints of the target model that generated the texts; see `same_base`.
        provenance: Training record that is stored with the head.
        board: A `TrainingBoard` actor.
    """

    config: TrainConfig
    model: str
    base_fingerprints: tuple[str, ...]
    folder: TrainingFolder
    staged: StagedTexts
    provenance: dict[str, Any]
    board: Any
    threads: int


# Output of the first worker.


class RunRecorder:
    """Writes metrics, progress lines and the best head so far, on the first worker.

    The weights of `head` may be partitioned; only its kind and configuration are read.
    """

    def __init__(self, task: WorkerTask, head: DraftHead, base: BaseModel, records: Sequence[Record]) -> None:
        self.metrics = MetricsLog(task.folder, records)
        self._task, self._head = task, head
        self._base_name, self._base_fingerprint = base.name, base.fingerprint
        self._tokens, self._since = 0, time.monotonic()

    def log(self, done: StepDone, tokens: int) -> None:
        """Record a step if it is due; `tokens` are those of all workers since the run started or resumed."""
        config = self._task.config
        if done.step % config.log_every and done.step != config.training.steps:
            return
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

    def evaluated(self, step: int, beta: Mapping[int, float], state: TrainingState) -> None:
        """Record an evaluation, β by number of draft tokens, and save the head if its β is the highest so far."""
        self._record({"step": step, "beta": {str(nodes): one for nodes, one in beta.items()}, "time": time.time()})
        evaluations = [
            {"step": record["step"], "beta": record["beta"]} for record in self.metrics.records if "beta" in record
        ]
        chosen_by = str(self._task.config.training.chosen_by)
        if evaluations[-1]["beta"][chosen_by] >= max(one["beta"][chosen_by] for one in evaluations):
            training = {**self._task.provenance, "history": evaluations}
            whole = head_of(self._head, state.weights)
            whole.provenance = Provenance(self._base_name, self._base_fingerprint, training)
            self._task.folder.save_head(whole)
        self.metrics.flush()
        # Evaluations do not count in the tokens per second.
        self._since = time.monotonic()

    def _record(self, record: Record) -> None:
        self.metrics.add(record)
        self._task.board.show.remote(progress_line(record, self._task.config.training.steps))


def run(task: WorkerTask) -> None:
    """Train from the last checkpoint to the last step.

    Raises:
        InputError: Another target model generated the texts.
        LoadError: The target model or the head cannot be made.
        TrainingError: The loss is not finite.
        OSError: A file cannot be written, for instance because the disk is full.
    """
    torch.set_num_threads(task.threads)
    context = ray.train.get_context()
    config, settings = task.config, task.config.training
    # Ray names a GPU even where GPUs are only counted.
    device = ray.train.torch.get_device() if torch.cuda.is_available() else torch.device("cpu")
    base = load_task_base(task, device)
    rank, workers = context.get_world_rank(), context.get_world_size()
    show = task.board.show.remote
    saved = restore(task.folder.checkpoints, rank == 0, broadcast_from_rank_zero, show)
    torch.manual_seed(settings.seed)
    counts = task.staged.token_counts() if config.draft_vocab_size else None
    head = new_head(config.algorithm, base, config.head, counts)
    if config.texts.store_hidden:
        store_hidden(base, task.staged, settings, training_layers(head, settings), rank, workers, show)
    if saved is not None:
        head.load_state_dict(saved.state.weights)
    step_of = TrainingStep(base, head, settings)
    optimiser = ShardedOptimiser(step_of, settings, config.sharding, saved.state if saved else None)
    held_out = task.staged.held_out()

    def evaluate() -> dict[int, float]:
        # Every worker evaluates: the others would only wait, and ZeRO-3 needs them to gather weights.
        with torch.autocast(device.type, base.dtype, enabled=base.dtype != torch.float32):
            return optimiser.run(lambda: simulated_beta(head, base, held_out))

    share = Share(rank, workers, config.sharding.micro_batches, config.texts.store_hidden)
    feed = BatchFeed(task, head.config.depth, device, stream_steps(task.staged, settings, share, optimiser.steps))
    recorder = RunRecorder(task, head, base, saved.records if saved else []) if rank == 0 else None
    for done in train(optimiser, feed.batches(), settings, evaluate, optimiser.steps):
        checkpoint = done.step == settings.steps or done.step % config.checkpoint_every == 0
        # All workers take part in gathering the state.
        state = optimiser.state() if checkpoint or done.beta is not None else None
        if recorder is not None:
            recorder.log(done, feed.tokens)
            if done.beta is not None and state is not None:
                recorder.evaluated(done.step, done.beta, state)
        if checkpoint:
            assert state is not None
            to_save = None
            if recorder is not None:
                recorder.metrics.flush()
                to_save = SavedRun(state, recorder.metrics.records)
            report(to_save, done.step, task.folder.checkpoints, task.board)


def load_task_base(task: WorkerTask, device: torch.device) -> BaseModel:
    """Load the target model. With ZeRO-3 it goes to the CPU first, because it may not fit on one device.

    Raises:
        InputError: It did not generate the texts.
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
    for one in task.base_fingerprints:
        if not base.has_fingerprint(one):
            raise InputError(
                f"data was made by another target model (fingerprint {one}) than {base.name} ({base.fingerprint}): "
                "a head learns from its own target model's answers; distil with this target model"
            )
    return base


@dataclass
class BatchFeed:
    """Makes a worker's batches from its texts as they arrive; `tokens` counts those of all workers so far."""

    task: WorkerTask
    depth: int
    device: torch.device
    steps: Iterator[StepTexts]
    tokens: int = field(default=0, init=False)

    def batches(self) -> Iterator[list[DraftBatch]]:
        """Yield the micro-batches of each step."""
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
