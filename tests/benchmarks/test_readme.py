from __future__ import annotations

from benchmarks.readme import README, filled


def test_the_figures_of_readme_are_those_of_the_committed_results() -> None:
    text = README.read_text(encoding="utf-8")
    assert filled(text) == text
