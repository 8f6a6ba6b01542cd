from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch

from drafter.drafters.contract import Ask
from drafter.engine.sequence import Sequence
from drafter.engine.shadows import Shadows
from drafter.tree.token_tree import PAD_TOKEN, TokenTree

# The root 9 has the children 4 and 5; 4 has 6, and 6 has 7. The last node is padding.
TOKENS, PARENTS = [9, 4, 5, 6, 7, PAD_TOKEN], [0, 0, 0, 1, 3, 0]


@dataclass
class Text:
    output: list[int] = field(default_factory=list)
    ended: bool = False


def test_a_draft_is_scored_once_all_of_its_rows_have_left_it() -> None:
    texts, shadows = [Text([1]), Text([1, 2])], Shadows()
    rows = torch.tensor([TOKENS, TOKENS]), torch.tensor([PARENTS, PARENTS])
    tree = TokenTree(*rows, torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 6))
    shadows.add(cast("list[Sequence]", texts), Ask(5, member=2), tree, [0, 0])
    texts[0].output += [5]
    texts[1].output += [4]
    assert shadows.scored() == ()
    texts[1].output += [6]
    texts[1].ended = True
    (trees,) = shadows.scored()
    assert (trees.member, trees.drafted.tolist()) == (2, [4, 4])
    assert trees.accepted.tolist() == [[False, True, False, False, False], [True, False, True, False, False]]
    assert shadows.scored() == ()
