"""Latencies of steps by rows and draft tokens: measured on this machine at start, and kept in the cache folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drafter.budget.contract import SHADOW_ROWS, Floats
from drafter.native.build import cache_folder

logger = logging.getLogger(__name__)

NODE_COUNTS = (0, 1, 2, 3, 4, 5, 7, 9, 11, 15, 23, 31, 47, 63)
"""Draft tokens a step may verify: few enough to measure, and a CUDA graph each. On a CPU a step takes hardly longer
than reading the weights up to about eight nodes of all rows together: four rows can afford one draft token each. Larger
trees have, with their root, a round number of nodes: MKL takes nearly one and a half times as long for 17 rows of a
matrix as for 16. A matrix unit has 16 rows, which the three parts of 5 nodes fill, and those of 10 twice."""
_PLAIN_RUN = 10
"""Plain steps that are timed in a run: the first ones find little of the target model in a processor's caches."""
_LONG = 0.3
"""Seconds from which a step is timed again only if there is time: its warm-up is a small part of it."""


@dataclass(frozen=True)
class LatencyTable:
    """Measured seconds of a step's parts, interpolated between the measured batch sizes."""

    batches: Floats  # `[K]` rows, rising
    nodes: tuple[int, ...]  # `[M]` draft tokens, rising from 0
    verify: Floats  # `[K, M]` seconds of the step without drafting
    draft: Floats  # `[members, K, M]` seconds of drafting so many tokens
    sure: bool = True  # measured just now, with nothing else on the machine; if not, steps tell better what they take

    def at(self, rows: int) -> Latencies:
        """Return the latencies of steps of `rows` rows."""
        return Latencies(
            self._interpolated(rows, self.verify),
            self._interpolated(rows, self.draft),
            self._interpolated(min(rows, SHADOW_ROWS), self.draft),
        )

    def changed(self, plain: float, full: float) -> LatencyTable:
        """Return the table of a time when plain steps and those with the largest trees take so many times as long.

        Both are of one row. Steps between them change in between, and those of more nodes as the larger of the two.
        """
        nodes = np.log(self.batches[:, None] * (1 + np.array(self.nodes)))
        change = np.interp(nodes, [0.0, np.log(1 + self.nodes[-1])], [plain, full])
        return dataclasses.replace(self, verify=self.verify * change)

    def _interpolated(self, rows: int, seconds: Floats) -> Floats:
        """Interpolate seconds `[…, K, M]` to `[…, M]` at so many rows."""
        places = np.arange(len(self.batches))
        place = float(np.interp(rows, self.batches, places))
        below, above = int(place), min(int(place) + 1, len(places) - 1)
        found: Floats = seconds[..., below, :] + (place - below) * (seconds[..., above, :] - seconds[..., below, :])
        return found


@dataclass(frozen=True)
class Latencies:
    """Seconds of steps of one number of rows; see `LatencyTable`."""

    verify: Floats  # `[M]` seconds of a step without its drafting
    draft: Floats  # `[members, M]` seconds of drafting
    shadow: Floats  # `[members, M]` seconds of a shadow draft


def measure_latency(
    probe: Callable[[int, int], tuple[float, float]],
    batches: Sequence[int],
    counts: Sequence[int],
    depth: int,
    rounds: int = 5,
    seconds: float = 3.0,
) -> LatencyTable:
    """Time steps of every shape that may pay.

    Every round takes every shape once, and the least time counts: what else runs on the machine can only add to it, and
    rarely adds to the same shape each time. A shape's first step warms up. Trees that cost more plain steps than they
    can have tokens are not timed but taken to cost as much a node as the largest that is.

    Args:
        probe: Does a step of so many rows and draft tokens; its seconds of drafting, and of the rest.
        batches: Rows, rising.
        counts: Draft tokens, rising from 0.
        depth: Draft tokens that a row may get at most.
        seconds: After this time no further round begins, and no long step is timed again.
    """
    times = np.full((2, len(batches), len(counts)), np.inf)
    begun = time.monotonic()
    for turn in range(rounds):
        for i, rows in enumerate(batches):
            for k, nodes in enumerate(counts):
                if not turn and sum(first := probe(rows, nodes)) > _LONG:
                    times[:, i, k] = first
                is_long = _LONG < times[:, i, k].sum() < np.inf
                if not is_long or time.monotonic() - begun < seconds:
                    # Drafting steps are timed singly: it leaves little of the model in a processor's caches.
                    for _ in range(1 if nodes or is_long else _PLAIN_RUN):
                        times[:, i, k] = np.minimum(times[:, i, k], probe(rows, nodes))
                if times[:, i, k].sum() > (1 + min(nodes, depth)) * times[:, i, 0].sum():
                    break
        if time.monotonic() - begun > seconds:
            break
    for row in times.reshape(-1, len(counts)):
        end = int(np.isfinite(row).sum())  # extrapolate to the larger trees
        row[end:] = row[end - 1] * (1 + np.array(counts[end:])) / (1 + counts[end - 1])
    # Less work takes no longer; where it seemed to, something else was running.
    for axis in (1, 2):
        np.flip(times, axis)[:] = np.minimum.accumulate(np.flip(times, axis), axis)
    return LatencyTable(np.array(batches, dtype=np.float64), tuple(counts), times[1], times[:1])


def batch_sizes(slots: int) -> Sequence[int]:
    """Batch sizes to measure: powers of four up to `slots`, and `slots`."""
    sizes = [1]
    while sizes[-1] < slots:
        sizes.append(min(4 * sizes[-1], slots))
    return sizes


def load_costs(subject: Mapping[str, Any]) -> tuple[LatencyTable, tuple[float, float]] | None:
    """Return the table kept for a subject, which is all that step times follow from, and its samples; None for none."""
    try:
        record = json.loads(_file(subject).read_text(encoding="utf-8"))
        plain, full = map(float, record["samples"])
        if not (plain > 0 and full > 0):
            raise ValueError("steps take no time")
        return (_table(record["table"]), (plain, full)) if record["subject"] == _as_text(subject) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:  # a damaged file counts as none
        logger.debug("kept step times cannot be read: %s", error)
        return None


def save_costs(subject: Mapping[str, Any], table: LatencyTable, samples: tuple[float, float]) -> None:
    """Keep the table of a subject; where the cache folder cannot be written to, the next start measures again.

    `samples` are seconds of two steps when it was measured, by which a later start corrects it; see `changed`.
    """
    file = _file(subject)
    record = {"subject": _as_text(subject), "table": dataclasses.asdict(table), "samples": samples}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / file.name
            made.write_text(_as_text(record), encoding="utf-8")
            os.replace(made, file)  # engines that start together may all write
    except OSError as error:
        logger.debug("step times cannot be kept: %s", error)


def _file(subject: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(_as_text(subject).encode()).hexdigest()[:16]
    return cache_folder() / "costs" / f"{digest}.json"


def _as_text(value: Any) -> str:
    return json.dumps(
        value, sort_keys=True, default=lambda one: one.tolist() if isinstance(one, np.ndarray) else str(one)
    )


def _table(record: dict[str, Any]) -> LatencyTable:
    arrays = {name: np.array(record[name], dtype=np.float64) for name in ("batches", "verify", "draft")}
    return LatencyTable(**{**record, **arrays, "nodes": tuple(record["nodes"])})
