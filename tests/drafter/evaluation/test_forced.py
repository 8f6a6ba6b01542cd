"""Forced acceptance: as many draft tokens are accepted as asked for, and no token changes."""

from __future__ import annotations

import pytest

from drafter.drafters.merged import ChoosingDrafter
from drafter.drafters.registry import load_drafter
from drafter.errors import LoadError
from drafter.evaluation.forced import ForcedAcceptance, with_accepted
from drafter.evaluation.results import Plan, figures
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import PAD_TOKEN
from tests.drafter.evaluation.test_measurement import evaluate

# 0 → 1 → 3, 0 → 2 → 4, and padding
TOKENS, PARENTS, DEPTHS = [7, 10, 11, 12, 13, PAD_TOKEN], [0, 0, 0, 1, 2, 0], [0, 1, 1, 2, 2, 1]


@pytest.mark.parametrize(
    ("text", "wanted", "found"),
    [
        ([20, 21, 22], 0, [7, 10, 11, 12, 13, PAD_TOKEN]),
        ([20, 21, 22], 1, [7, 20, 11, 12, 13, PAD_TOKEN]),
        ([20, 21, 22], 2, [7, 20, 11, 21, 13, PAD_TOKEN]),
        ([20, 21, 22], 9, [7, 20, 11, 21, 13, PAD_TOKEN]),
        ([20], 2, [7, 20, 11, 12, 13, PAD_TOKEN]),
        # What the drafter had right, and is not to be accepted, becomes wrong.
        ([11, 13], 0, [7, 10, 0, 12, 0, PAD_TOKEN]),
        ([0, 13], 0, [7, 10, 11, 12, 0, PAD_TOKEN]),
        ([11, 13], 1, [7, 11, 0, 12, 0, PAD_TOKEN]),
    ],
)
def test_a_tree_has_as_many_right_tokens_as_wanted(text: list[int], wanted: int, found: list[int]) -> None:
    assert with_accepted(TOKENS, PARENTS, DEPTHS, text, wanted) == found


@pytest.mark.parametrize("forced", [1.0, 1.75])
def test_steps_yield_what_is_forced_and_plain_decodings_tokens(tiny_base: BaseModel, forced: float) -> None:
    plan = Plan(
        *(("cacheback",), ("exact",), (4,), (2,), (0.8,)),
        max_new_tokens=24,
        acceptance=forced,
    )
    results, _ = evaluate(tiny_base, plan)
    plain, drafted = figures([cell for cell in results.cells if cell.questions == "sums"])
    assert (drafted.cell.tokens, drafted.cell.differing_tokens) == (plain.cell.tokens, 0)
    assert plain.beta == 1.0
    assert drafted.beta is not None
    # It has no tree where it knows nothing of a text yet.
    assert 1.0 <= drafted.beta <= forced + 0.01
    assert (drafted.beta > 1.1) == (forced > 1)
    assert drafted.cell.arm.method == f"cacheback, FORCED to β {forced:g}"


def test_a_drafter_that_chooses_cannot_be_forced(tiny_base: BaseModel) -> None:
    drafter = ChoosingDrafter({name: load_drafter(name, tiny_base, 4) for name in ("ngram", "cacheback")})
    with pytest.raises(LoadError, match="cannot be forced upon a drafter that chooses"):
        ForcedAcceptance(drafter, {}, 2.0)
