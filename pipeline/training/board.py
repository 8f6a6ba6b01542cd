"""Progress of a training run: workers report to one small actor, and the driver prints it."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray
from safetensors import SafetensorError

from drafter.errors import LoadError, TrainingError, one_line
from pipeline.errors import InputError
from pipeline.progress.watch import Pulse

if TYPE_CHECKING:
    from pipeline.training.metrics import Record

_POLL_SECONDS = 0.5


class TrainingBoard:
    """Collects lines to show and the reason why a run cannot go on."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._refusal: tuple[bool, str] | None = None

    def show(self, line: str) -> None:
        self._lines.append(line)

    def take(self) -> list[str]:
        """Return and remove the lines."""
        lines, self._lines = self._lines, []
        return lines

    def refuse(self, of_input: bool, message: str) -> None:
        """Record that a retry would not help; `of_input` if the configuration or the data is at fault."""
        self._refusal = self._refusal or (of_input, message)

    def refusal(self) -> tuple[bool, str] | None:
        """Return the first refusal, as `refuse` took it; None if there is none."""
        return self._refusal


@contextmanager
def refusals(board: Any) -> Iterator[None]:
    """Report errors that a retry would repeat. Ray Train takes them for crashes and restarts the worker."""
    try:
        yield
    except (InputError, LoadError, TrainingError) as error:
        ray.get(board.refuse.remote(True, one_line(error)))
        raise
    except (OSError, SafetensorError) as error:
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            ray.get(board.refuse.remote(False, f"the disk is full ({one_line(error, 200)}): make room"))
        raise


class TrainingDisplay:
    """Prints the lines of a `TrainingBoard` actor to stderr until the end of a `with` block."""

    def __init__(self, board: Any) -> None:
        self._board = board
        self._pulse = Pulse(_POLL_SECONDS, self._show)

    def __enter__(self) -> TrainingDisplay:
        self._pulse.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pulse.end()

    def _show(self) -> None:
        try:
            lines = ray.get(self._board.take.remote(), timeout=10)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return  # The board died with its node, or the cluster is busy. Training goes on all the same.
        for line in lines:
            print(line, file=sys.stderr, flush=True)


def progress_line(record: Record, steps: int) -> str:
    """Format a logged step or an evaluation for the user; `steps` is the length of the whole run."""
    place = f"step {record['step']:>{len(str(steps))}}/{steps}"
    if "beta" in record:
        betas = ", ".join(f"{beta:.3f} at {nodes}" for nodes, beta in record["beta"].items())
        return f"{place}  held-out β {betas} draft nodes"
    return f"{place}  loss {record['loss']:.4f}, {record['tokens_per_second']:,.0f} tokens/s"
