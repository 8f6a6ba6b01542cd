"""The measurement: all contenders of a batch size take turns, in an order that rotates from round to round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Protocol

from benchmarks.peers.cells import Cell, Failure, same_tokens, without_end
from benchmarks.peers.contenders import REFERENCE, Contender
from benchmarks.peers.environments import PeerError
from benchmarks.peers.workers.protocol import Done, Work

_WARM_UP = 16
"""New tokens of each prompt before anything is timed, since some work is done when it is first needed."""


class Running(Protocol):
    """A contender's process."""

    versions: dict[str, str]

    def decode(self, work: Work) -> Done:
        """Decode some work, or raise a `PeerError`."""

    def close(self) -> None:
        """End the process."""


Start = Callable[[Contender, int], Running]
"""Starts a contender for a batch size, or raises a `PeerError`."""


@dataclass(frozen=True)
class Measured:
    """What came of a batch size.

    Args:
        cells: Those of the contenders that did not fail.
        failures: The others.
        versions: Versions of the packages that matter, by contender.
    """

    cells: list[Cell] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)


def measure(
    contenders: Sequence[Contender],
    start: Start,
    works: Mapping[str, Work],
    batch: int,
    rounds: int,
    ends: Collection[int],
) -> Measured:
    """Measure all contenders at one batch size.

    Args:
        contenders: Who is measured, the reference among them.
        start: Starts one.
        works: The prompts of each context.
        batch: The batch size.
        rounds: Turns of each contender.
        ends: Tokens that end a text.

    Raises:
        PeerError: The reference fails.
    """
    found, cells = Measured(), []
    with ExitStack() as stack:
        running: dict[str, Running] = {}

        def fail(contender: Contender, error: PeerError) -> None:
            if contender == REFERENCE:
                raise error
            running.pop(contender.name, None)
            found.failures.append(Failure(contender.name, batch, str(error)))

        for contender in contenders:
            try:
                process = start(contender, batch)
                stack.callback(process.close)
                for work in works.values():
                    process.decode(replace(work, max_new_tokens=min(work.max_new_tokens, _WARM_UP)))
            except PeerError as error:
                fail(contender, error)
            else:
                running[contender.name] = process
                found.versions[contender.name] = process.versions
        for turn in range(rounds):
            shift = turn % len(contenders)
            for context, work in works.items():
                done = {}
                for contender in (*contenders[shift:], *contenders[:shift]):
                    try:
                        if contender.name in running:
                            done[contender.name] = running[contender.name].decode(work)
                    except PeerError as error:
                        fail(contender, error)
                cells += cells_of(done, context, batch, turn, ends)
    found.cells.extend(cell for cell in cells if cell.contender in running)
    return found


def cells_of(done: Mapping[str, Done], context: str, batch: int, turn: int, ends: Collection[int]) -> list[Cell]:
    """Return the cells of a round at one context: the answers of each contender, and of the reference."""
    texts = {name: [without_end(tokens, ends) for tokens in one.tokens] for name, one in done.items()}
    reference = texts[REFERENCE.name]
    return [
        Cell(
            name,
            context,
            batch,
            turn,
            one.seconds,
            sum(map(len, texts[name])),
            same_tokens(texts[name], reference),
            sum(map(len, reference)),
            one.peak_bytes,
            one.steps,
        )
        for name, one in done.items()
    ]
