"""What the first worker writes during a run: metrics, progress lines, and the best head so far."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from drafter.base.causal_lm import BaseModel
from drafter.heads.contract import DraftHead, Provenance
from drafter.training.train_loop import StepDone
from pipeline.training.metrics_log import MetricsLog, Record
from pipeline.training.training_board import progress_line
from pipeline.training.workers.sharded_optimiser import head_of
from pipeline.training.workers.training_state import TrainingState
from pipeline.training.workers.worker_task import WorkerTask


class RunRecorder:
    """Records steps and evaluations.

    Args:
        task: Names the folder and the board.
        head: The head in training. Its kind and configuration are read; its weights may be partitioned.
        base: The head's base.
        records: Metrics of the steps that were taken before.
    """

    def __init__(self, task: WorkerTask, head: DraftHead, base: BaseModel, records: Sequence[Record]) -> None:
        self.metrics = MetricsLog(task.folder, records)
        self._task, self._head = task, head
        self._base_name, self._base_fingerprint = base.name, base.fingerprint
        self._tokens, self._since = 0, time.monotonic()

    def log(self, done: StepDone, tokens: int) -> None:
        """Record a step if it is due.

        Args:
            done: The step.
            tokens: Tokens of all workers' texts since the run or its resumption began.
        """
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
        """Record an evaluation, and save the head if its β is the highest so far.

        Args:
            step: Number of steps taken.
            beta: Held-out β by number of draft nodes.
            state: The run after that step.
        """
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
