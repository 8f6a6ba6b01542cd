"""What verifiers gain and cost: an actor decodes, and the driver scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drafter.evaluation.leniency.kept_utility import VerifierFigures
from drafter.evaluation.leniency.setting_grid import EXACT
from drafter.evaluation.leniency.verifier_runs import VerifierRun
from drafter.verifiers.verifier_settings import VerifierSettings
from pipeline.compare.scorers import Scorer, scores_of
from pipeline.evaluation.measuring_actor import Ask


class ScoredVerifiers:
    """Measures verifiers on requests that a `VerifierMeasurement` has taken up. Exact decoding is measured at once.

    Args:
        ask: Asks the measurement.
        rows: What was asked, in the order of the requests; see `scores_of`.
        scorer: Says what an answer is worth.

    Attributes:
        exact: The figures of exact decoding.

    Raises:
        InputError: The scorer cannot score an answer.
        JobError: The measurement failed.
    """

    def __init__(self, ask: Ask, rows: Sequence[Mapping[str, Any]], scorer: Scorer) -> None:
        self._ask, self._rows, self._scorer = ask, rows, scorer
        run, self._exact = self._run(EXACT)
        self.exact = VerifierFigures.of(run, self._exact, self._exact)

    def measure(self, settings: VerifierSettings) -> VerifierFigures:
        """Return the figures of a verifier.

        Raises:
            InputError: The verifier does not fit, or the scorer cannot score an answer.
            JobError: The measurement failed.
        """
        run, scores = self._run(settings)
        return VerifierFigures.of(run, self._exact, scores)

    def _run(self, settings: VerifierSettings) -> tuple[VerifierRun, list[float]]:
        run: VerifierRun = self._ask("run", settings)
        return run, scores_of(self._rows, run.token_ids, run.texts, self._scorer)
