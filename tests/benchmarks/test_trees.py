from __future__ import annotations

from pathlib import Path

from benchmarks.trees import TABLE_FILE, comparisons, main
from drafter.evaluation.results import Results


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
