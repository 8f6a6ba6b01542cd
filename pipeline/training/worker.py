"""A training worker: loads, resumes from the last checkpoint, trains, evaluates, saves."""

from __future__ import annotations

import errno
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from pyarrow import fs
from ray.train import Checkpoint, CheckpointUploadMode
from ray.train.collective import broadcast_from_rank_zero
from safetensors import SafetensorError
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.summary import scalar
from torch import Tensor

from drafter.errors import LoadError, TrainingError, one_line
from drafter.heads.checkpoint import head_to_train, new_head
from drafter.heads.contract import DraftHead, Provenance
from drafter.images.loading import Eyes
from drafter.images.processor import ImageProcessor
from drafter.prompt import Prompt
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.training.loop import StepDone, TrainingStep, train, training_layers
from drafter.training.targets import simulated_beta
from pipeline.errors import InputError
from pipeline.progress.board import Kind, Mail
from pipeline.progress.watch import fetch
from pipeline.training.config import TrainConfig
from pipeline.training.folder import (
    Record,
    SavedRun,
    TrainingFolder,
    checkpoint_name,
    restore,
    upload,
    write_checkpoint,
)
from pipeline.training.sharded_optimiser import ShardedOptimiser, head_of
from pipeline.training.steps import BatchFeed, TextReader, store_hidden
from pipeline.training.texts import StagedTexts

_FLUSH_SECONDS = 5.0
_ASK_SECONDS = 1.0


@dataclass(frozen=True)
class WorkerTask:
    """The driver's task for each worker of a job."""

    config: TrainConfig
    model: str
    base_fingerprint: str  # of the target model that generated the texts
    folder: TrainingFolder
    staged: StagedTexts
    provenance: dict[str, Any]  # stored with the head
    board: Any  # a `StatusBoard` actor
    threads: int


def train_worker(loop_config: dict[str, Any]) -> None:
    """Train as `loop_config["task"]`, a `WorkerTask`, says."""
    task: WorkerTask = loop_config["task"]
    if _is_told(task.board, "refusal"):
        return  # Ray Train has restarted the worker after an error that would come again.
    try:
        with refusals(task.board):
            run(task)
    except Exception:
        # After an error Ray Train restarts the worker, which takes long, for the same refusal. Other workers need the
        # error, because they wait for this one.
        if ray.train.get_context().get_world_size() > 1 or not _is_told(task.board, "refusal"):
            raise


@contextmanager
def refusals(board: Any) -> Iterator[None]:
    """Report errors that a retry would repeat, with whether the configuration or the data is at fault.

    Ray Train takes them for crashes and restarts the worker.
    """
    try:
        yield
    except (InputError, LoadError, TrainingError) as error:
        ray.get(board.put.remote("refusal", (True, one_line(error))))
        raise
    except (OSError, SafetensorError) as error:
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            message = f"the disk is full ({one_line(error, 200)}): make room"
            ray.get(board.put.remote("refusal", (False, message)))
        raise


def _is_told(board: Any, kind: Kind) -> bool:
    return kind in fetch(board, Mail("", 0)).first


class StopSign:
    """Whether the driver wants training to stop: the first worker asks the board, and tells the others."""

    def __init__(self, board: Any, rank: int, workers: int, device: torch.device) -> None:
        self._board, self._rank, self._workers, self._device = board, rank, workers, device
        self._asked = -math.inf

    def is_up(self) -> bool:
        """Return the same on all workers, which call this together after a step."""
        stop = False
        if self._rank == 0 and time.monotonic() - self._asked >= _ASK_SECONDS:
            stop, self._asked = _is_told(self._board, "stop"), time.monotonic()
        if self._workers == 1:
            return stop
        told = torch.tensor([stop], dtype=torch.uint8, device=self._device)
        torch.distributed.broadcast(told, 0)
        return bool(told)


class RunRecorder:
    """Writes metrics, progress lines and the best head so far, on the first worker.

    The whole file of metrics is written every few seconds, so no line is truncated or doubled. A resumed run begins
    with the `records` of its checkpoint. The weights of `head` may be partitioned; only its kind and configuration are
    read. All methods raise `OSError` if a file cannot be written, for instance because the disk is full.
    """

    def __init__(self, task: WorkerTask, head: DraftHead, base: BaseModel, records: Sequence[Record]) -> None:
        self._task, self._head, self._base = task, head, base
        self._tokens, self._since = 0, time.monotonic()
        self.records: list[Record] = []
        events = task.folder.events
        events.filesystem.delete_dir_contents(events.path, missing_dir_ok=True)
        # TensorBoard follows a growing file. Where files cannot be appended to, a local file grows and is copied.
        self._grows = isinstance(events.filesystem, fs.LocalFileSystem)
        self._scratch = Path(events.path if self._grows else tempfile.mkdtemp())
        # A full disk silently ends the thread of tensorboardX's SummaryWriter. This writer has no thread.
        self._events = EventsWriter(str(self._scratch / "events"))
        for record in records:
            self._add(record)
        self.flush()

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

    def evaluated(self, step: int, beta: Mapping[int, float], weights: dict[str, Tensor]) -> None:
        """Record an evaluation, β by number of draft tokens, and save the head if its β is the highest so far."""
        self._record({"step": step, "beta": {str(nodes): one for nodes, one in beta.items()}, "time": time.time()})
        history = [{"step": one["step"], "beta": one["beta"]} for one in self.records if "beta" in one]
        scores = [one["beta"][str(self._task.config.training.chosen_by)] for one in history]
        if scores[-1] >= max(scores):
            whole = head_of(self._head, weights)
            training = {**self._task.provenance, "history": history}
            whole.provenance = Provenance(self._base.name, self._base.fingerprint, training)
            self._task.folder.save_head(whole)
        self.flush()
        # Evaluations do not count in the tokens per second.
        self._since = time.monotonic()

    def flush(self) -> None:
        folder = self._task.folder
        folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        self._events.flush()
        if not self._grows:
            for file in self._scratch.iterdir():
                (folder.events / file.name).copy_from(file)
        self._written = time.monotonic()

    def _record(self, record: Record) -> None:
        self._add(record)
        if time.monotonic() - self._written >= _FLUSH_SECONDS:
            self.flush()
        steps = self._task.config.training.steps
        place = f"step {record['step']:>{len(str(steps))}}/{steps}"
        if "beta" in record:
            betas = ", ".join(f"{beta:.3f} at {nodes}" for nodes, beta in record["beta"].items())
            line = f"{place}  held-out β {betas} draft nodes"
        else:
            line = f"{place}  loss {record['loss']:.4f}, {record['tokens_per_second']:,.0f} tokens/s"
        self._task.board.put.remote("line", line)

    def _add(self, record: Record) -> None:
        self.records.append(record)
        values = {f"beta/{nodes}": one for nodes, one in record.get("beta", {}).items()}
        values |= {name: value for name, value in record.items() if name not in ("step", "time", "beta")}
        for name, value in values.items():
            self._events.write_event(Event(wall_time=record["time"], step=record["step"], summary=scalar(name, value)))


def run(task: WorkerTask) -> None:
    """Train from the last checkpoint to the last step.

    Raises `InputError` if another target model generated the texts, `LoadError` if the target model or the head cannot
    be made, `TrainingError` if the loss is not finite, and `OSError` if a file cannot be written.
    """
    torch.set_num_threads(task.threads)
    context = ray.train.get_context()
    config, settings = task.config, task.config.training
    # Ray names a GPU even where GPUs are only counted.
    device = ray.train.torch.get_device() if torch.cuda.is_available() else torch.device("cpu")
    base, processor = load_task_base(task, device)
    rank, workers = context.get_world_rank(), context.get_world_size()
    show = partial(task.board.put.remote, "line")
    saved = restore(task.folder.checkpoints, rank == 0, broadcast_from_rank_zero, show)
    if rank == 0 and saved is not None:
        show(f"going on after step {saved.steps} of {settings.steps}, whose checkpoint is the newest")
    torch.manual_seed(settings.seed)
    if config.start is not None:
        head = head_to_train(config.start, base)
    else:
        counts = task.staged.token_counts() if config.draft_vocab_size else None
        head = new_head(config.algorithm, base, config.head, counts)
    reader = TextReader(base, processor, settings, training_layers(head, settings))
    if config.texts.store_hidden:
        store_hidden(reader, task.staged, settings, rank, workers, show)
    elif config.sharding.zero_stage == 3 and sees(base, task.staged):
        raise InputError(
            "input has texts with images, and sharding.zero_stage 3 partitions what looks at them: "
            "set texts.store_hidden, or a lower stage"
        )
    held_out = reader.held_out(task.staged, head)
    if saved is not None:
        head.load_state_dict(saved.weights)
    step_of = TrainingStep(base, head, settings)
    optimiser = ShardedOptimiser(step_of, settings, config.sharding, saved)

    def evaluate() -> dict[int, float]:
        # Every worker evaluates: the others would only wait, and ZeRO-3 needs them to gather weights.
        with torch.autocast(device.type, base.dtype, enabled=base.dtype != torch.float32):
            return optimiser.run(lambda: simulated_beta(head, base, held_out))

    known: dict[str, Any] = {}
    if config.start is not None:
        assert head.provenance is not None
        known["start"] = dict(head.provenance.training)
    if rank == 0 and head.vocabulary is not None:
        size, share = len(head.vocabulary.tokens), round(task.staged.coverage(head.vocabulary.tokens), 4)
        known["draft_vocabulary"] = {"tokens": size, "coverage": share}
        show(f"draft vocabulary: {size:,} tokens, {share:.2%} of those in the answers")
    task = replace(task, provenance={**task.provenance, **known})
    feed = BatchFeed(task.staged, config, reader, head.config.depth, device, rank, workers)
    recorder = RunRecorder(task, head, base, saved.records if saved else []) if rank == 0 else None
    sign = StopSign(task.board, rank, workers, device)
    if config.start is not None and saved is None:  # what it loses at first has to be made up for
        beta, begun = evaluate(), optimiser.weights()
        if recorder is not None:
            recorder.evaluated(0, beta, begun)
    task.board.put.remote("begun", True, str(rank))
    for done in train(optimiser, feed.batches(optimiser.steps), settings, evaluate, optimiser.steps):
        stop = sign.is_up()
        checkpoint = stop or done.step == settings.steps or done.step % config.checkpoint_every == 0
        # All workers take part in gathering the state.
        state = optimiser.state() if checkpoint or done.beta is not None else None
        if recorder is not None:
            recorder.log(done, feed.tokens)
            if done.beta is not None and state is not None:
                recorder.evaluated(done.step, done.beta, state.weights)
        if checkpoint:
            assert state is not None
            to_save = None
            if recorder is not None:
                recorder.flush()
                to_save = replace(state, records=recorder.records)
            report(to_save, done.step, task, CheckpointUploadMode.SYNC if stop else CheckpointUploadMode.ASYNC)
        if stop:
            if rank == 0:
                ray.get(show(f"step {done.step} is saved"))  # Ray Train ends the process next
            return


def report(saved: SavedRun | None, step: int, task: WorkerTask, mode: CheckpointUploadMode) -> None:
    """Give a checkpoint to Ray Train, which uploads it: by ASYNC while training goes on. Every worker calls this.

    `saved` is None on all workers but the first.
    """

    def keep(made: Checkpoint, name: str) -> Checkpoint:
        with refusals(task.board):
            return upload(Path(made.path), task.folder.checkpoints / name)

    checkpoint = None
    if saved is not None:
        local = Path(tempfile.mkdtemp(prefix="checkpoint-"))
        write_checkpoint(saved, local)
        checkpoint = Checkpoint.from_directory(local)
    ray.train.report(
        {"step": step},
        checkpoint,
        checkpoint_dir_name=checkpoint_name(step),
        checkpoint_upload_mode=mode,
        delete_local_checkpoint_after_upload=True,
        checkpoint_upload_fn=keep,
    )


def sees(base: BaseModel, staged: StagedTexts) -> bool:
    """Return whether some texts have images, or all are read as those that have."""
    return staged.counts.with_images > 0 or (base.sight is not None and base.sight.reads(Prompt([0])))


def load_task_base(task: WorkerTask, device: torch.device) -> tuple[BaseModel, ImageProcessor | None]:
    """Load the target model, and its processor if it sees.

    With ZeRO-3 the model goes to the CPU first, because it may not fit on one device.

    Raises `InputError` if it did not generate the texts, and `LoadError` if it cannot be loaded.
    """
    config = task.config
    half = config.training.precision == "bf16" and device.type != "cpu"
    eyes = Eyes()
    base = load_base(
        task.model,
        dtype=torch.bfloat16 if half else torch.float32,
        device="cpu" if config.sharding.zero_stage == 3 else device,
        trust_remote_code=config.trust_remote_code,
        eyes=eyes,
    )
    if task.base_fingerprint != base.fingerprint:
        raise InputError(
            f"input was made by another target model (fingerprint {task.base_fingerprint}) than {base.name} "
            f"({base.fingerprint}): a head learns from its own target model's answers; distil with this target model"
        )
    return base, eyes.processor
