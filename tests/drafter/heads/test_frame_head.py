from __future__ import annotations

import pytest
import torch

from drafter.heads.config import Tree
from drafter.heads.frame_head import FrameHead, last_tokens
from drafter.target_model.model import BaseModel
from tests.support.heads import DEPTH, make_head


def test_the_last_tokens_end_with_the_anchor() -> None:
    tokens = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
    assert last_tokens(tokens, torch.tensor([[3, 2], [2, 1]]), 2).tolist() == [
        [[12, 13], [11, 12]],
        [[21, 22], [20, 21]],
    ]


def test_before_the_text_the_first_token_stands_in() -> None:
    assert last_tokens(torch.tensor([[10, 11, 12]]), torch.tensor([[1, 0]]), 3).tolist() == [
        [[10, 10, 11], [10, 10, 10]]
    ]


@pytest.mark.parametrize(
    ("kind", "size", "tree", "count"),
    [
        ("ctc", 3, "exact", None),  # any frame may say any label
        ("ctc, cross-entropy", 3, "exact", 2),
        ("ctc, cross-entropy", 50, "exact", DEPTH),
        ("ctc, cross-entropy", 3, "static", None),
        ("context 1", 3, "exact", 3),  # the second level's band of two begins at the second frame
        ("context 1", 50, "exact", 5),
        ("context 2", 4, "exact", 5),
        ("context 4", 3, "exact", 2),
        ("medusa", 2, "exact", 1),
        ("medusa", 2, "static", None),
        ("hydra", 3, "exact", None),
    ],
)
def test_only_frames_that_a_tree_can_be_made_of(
    tiny_base: BaseModel, kind: str, size: int, tree: Tree, count: int | None
) -> None:
    head = make_head(tiny_base, kind)
    assert isinstance(head, FrameHead)
    assert head.frames_for(size, tree) == count
