from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.trees import TABLE_FILE, comparisons, main, sign_test
from drafter.evaluation.results import Results


@pytest.mark.parametrize(
    ("successes", "trials", "probability"), [(0, 4, 0.125), (4, 4, 0.125), (2, 4, 1.0), (1, 8, 18 / 256), (0, 0, 1.0)]
)
def test_a_sign_test_is_two_sided(successes: int, trials: int, probability: float) -> None:
    assert sign_test(successes, trials) == pytest.approx(probability)


def test_a_tree_is_measured_beside_the_chain_of_the_same_head(tmp_path: Path) -> None:
    given = "--draft-tokens 3 --batches 1 --temperatures 0 --kinds arithmetic --prompts 2 --rounds 1 --max-new-tokens 8"
    main(["--output", str(tmp_path), *given.split()])
    results = Results.load(tmp_path)
    assert {cell.differing_tokens for cell in results.cells} == {0}
    found, together = comparisons(results.cells)[0.0, 1]
    assert [one.arm.tree for one in (*found.trees, *found.chains, *found.plain)] == ["exact", "chain", None]
    assert (found.kind, together.kind, found.ratios) == ("arithmetic", "all", together.ratios)
    assert len(found.ratios) == 2
    assert "| arithmetic | 3 |" in (tmp_path / TABLE_FILE).read_text()
