"""What verifiers gain and cost, of runs that come from a worker one after another. Runs on the driver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from drafter.evaluation.leniency.kept_utility import VerifierFigures
from drafter.evaluation.leniency.verifier_runs import VerifierRun
from pipeline.compare.scorers import Scorer, scores_of


def scored_runs(
    found: Iterable[dict[str, Any] | VerifierRun], rows: Sequence[Mapping[str, Any]], scorer: Scorer
) -> Iterator[dict[str, Any] | VerifierFigures]:
    """Yield what `measure_verifiers` yields, with figures in the place of runs.

    Args:
        found: What it yields; the first of its verifiers is exact.
        rows: What was asked, in the order of the requests; see `scores_of`.
        scorer: Says what an answer is worth.

    Raises:
        InputError: The scorer cannot score an answer.
    """
    exact: list[float] | None = None
    for item in found:
        if not isinstance(item, VerifierRun):
            yield item
            continue
        scores = scores_of(rows, item.token_ids, item.texts, scorer)
        exact = scores if exact is None else exact
        yield VerifierFigures.of(item, exact, scores)
