"""What is measured, and what follows from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.peers.contenders import Contender


@dataclass(frozen=True)
class Cell:
    """One contender in one round, with prompts of one context and at one batch size.

    Args:
        contender: Its name.
        context: `short` or `long` prompts.
        batch: Prompts decoded together at most.
        round: Number of the round, from 0.
        seconds: Seconds for all prompts, prefills included.
        tokens: New tokens, without those that end a text.
        same: Those of the reference's tokens that this one has at the same place, too.
        reference: Number of the reference's tokens.
        peak_bytes: Most memory that the process had resident meanwhile.
        steps: Steps that gave the tokens, over all prompts; None if the contender does not tell.
    """

    contender: str
    context: str
    batch: int
    round: int
    seconds: float
    tokens: int
    same: int
    reference: int
    peak_bytes: int
    steps: int | None = None

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Failure:
    """A contender that is left out of a batch size's tables.

    Args:
        contender: Its name.
        batch: The batch size.
        reason: What went wrong.
    """

    contender: str
    batch: int
    reason: str


@dataclass(frozen=True)
class Standing:
    """How fast a contender is: medians over the rounds, of ratios within a round.

    Args:
        rate: Tokens per second.
        to_plain: Its rate, relative to the fastest peer's that decodes plainly; None where there is no such peer.
        to_best: The same to the fastest peer.
        same: Share of the reference's tokens that it has, too.
        peak_bytes: Most resident memory of all rounds.
        per_step: Its tokens in a step of a row, the acceptance length; None if it does not tell.
    """

    rate: float
    to_plain: float | None
    to_best: float | None
    same: float
    peak_bytes: int
    per_step: float | None = None


def without_end(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """Return tokens up to the first that ends a text, without it. Some engines tell that token, others do not."""
    return list(tokens[: next((place for place, token in enumerate(tokens) if token in ends), len(tokens))])


def same_tokens(texts: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> int:
    """Return how many tokens of the reference's texts are the same at the same place in these."""
    return sum(a == b for text, other in zip(texts, reference, strict=True) for a, b in zip(text, other, strict=False))


def standings(cells: Sequence[Cell], about: Mapping[str, Contender]) -> dict[str, Standing]:
    """Return how contenders stand, of the cells of one context and batch size.

    Args:
        cells: The same rounds of each contender.
        about: Contenders by name.
    """
    by_name: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.round):
        by_name.setdefault(cell.contender, []).append(cell)
    peers = [name for name in by_name if about[name].is_peer]

    def rate(name: str) -> float:
        return median(cell.rate for cell in by_name[name])

    def relative(name: str, others: Sequence[str]) -> float | None:
        if not others:
            return None
        best = by_name[max(others, key=rate)]
        return median(one.rate / other.rate for one, other in zip(by_name[name], best, strict=True))

    return {
        name: Standing(
            rate(name),
            relative(name, [one for one in peers if about[one].is_plain]),
            relative(name, peers),
            sum(cell.same for cell in some) / max(1, sum(cell.reference for cell in some)),
            max(cell.peak_bytes for cell in some),
            _per_step(some),
        )
        for name, some in by_name.items()
    }


def _per_step(cells: Sequence[Cell]) -> float | None:
    steps = [cell.steps for cell in cells if cell.steps]
    return sum(cell.tokens for cell in cells) / sum(steps) if len(steps) == len(cells) else None
