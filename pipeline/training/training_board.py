"""How a run goes: the first worker reports to one small actor, the driver shows it."""

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
from pipeline.progress.pulse import Pulse

if TYPE_CHECKING:  # it imports torch, which the board's own process has no use for
    from pipeline.training.metrics_log import Record

_POLL_SECONDS = 0.5


class TrainingBoard:
    """Collects what there is to show, and why a run cannot go on."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._refusal: tuple[bool, str] | None = None

    def show(self, line: str) -> None:
        """Something for the person who waits."""
        self._lines.append(line)

    def take(self) -> list[str]:
        """What was not shown yet."""
        lines, self._lines = self._lines, []
        return lines

    def refuse(self, of_input: bool, message: str) -> None:
        """The run cannot go on, and trying again would not help: the configuration is at fault, or the disk."""
        self._refusal = self._refusal or (of_input, message)

    def refusal(self) -> tuple[bool, str] | None:
        """Why the run cannot go on."""
        return self._refusal


@contextmanager
def refusals(board: Any) -> Iterator[None]:
    """Tell a board of errors that would come again: Ray Train takes them for crashes, and begins anew."""
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
    """Shows a board on stderr until the end of a `with` block.

    Args:
        board: A `TrainingBoard` actor.
    """

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
            return  # the board died with its node, or the cluster is busy: training goes on unseen
        for line in lines:
            print(line, file=sys.stderr, flush=True)


def progress_line(record: Record, steps: int) -> str:
    """A record for the person who waits.

    Args:
        record: Of a logged step or of an evaluation.
        steps: All of the run.
    """
    place = f"step {record['step']:>{len(str(steps))}}/{steps}"
    if "beta" in record:
        betas = ", ".join(f"{beta:.3f} at {nodes}" for nodes, beta in record["beta"].items())
        return f"{place}  held-out β {betas} draft nodes"
    return f"{place}  loss {record['loss']:.4f}, {record['tokens_per_second']:,.0f} tokens/s"
