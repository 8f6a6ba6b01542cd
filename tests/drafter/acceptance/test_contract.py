"""The exact verifier."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from drafter import devices
from drafter.acceptance.choices import RowSampling, SamplingMode, SamplingTable, are_sound, likeliest
from drafter.acceptance.contract import ExactVerifier, Verified, descend, walk
from drafter.requests import SamplingParams
from drafter.tree.token_tree import PAD_TOKEN, TokenTree
from tests.support.properties import examples


def tree_of(tokens: list[int], parents: list[int]) -> TokenTree:
    depths = [0]
    for i in range(1, len(parents)):
        depths.append(depths[parents[i]] + 1)
    row = torch.tensor([tokens])
    return TokenTree(row, torch.tensor([parents]), torch.tensor([depths]), -torch.tensor([depths]).float())


def without_twins(tokens: list[int], parents: list[int]) -> list[int]:
    """Tokens of which padding takes the place where an earlier child of the same parent has the same one."""
    seen: set[tuple[int, int]] = set()
    kept = tokens[:1]
    for pair in list(zip(parents, tokens, strict=True))[1:]:
        kept.append(PAD_TOKEN if pair in seen else pair[1])
        seen.add(pair)
    return kept


def random_trees(rows: int, nodes: int, vocabulary: int, seed: int) -> TokenTree:
    draw = random.Random(seed)
    trees = []
    for _ in range(rows):
        parents = [0] + [draw.randrange(node) for node in range(1, nodes)]
        trees.append(tree_of(without_twins([draw.randrange(vocabulary) for _ in parents], parents), parents))
    return TokenTree(*(torch.cat([vars(tree)[name] for tree in trees]) for name in vars(trees[0])))


@pytest.fixture(params=["on the host", "at once"])
def walks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to walk: that of a CPU, and that of a GPU."""
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: request.param == "at once")


both_ways = pytest.mark.usefixtures("walks")


@both_ways
def test_walk_follows_the_base() -> None:
    tree = tree_of([7, 3, 5, 4], [0, 0, 0, 2])
    step = walk(tree, torch.tensor([[5, 1, 4, 9]]), tree.ancestors(), depth=2)
    assert step.path.tolist() == [[0, 2, 3]]
    assert step.tokens.tolist() == [[5, 4, 9]]
    assert step.count.tolist() == [2]


@both_ways
def test_walk_stops_where_no_child_carries_the_choice() -> None:
    tree = tree_of([7, 3, 5, 4], [0, 0, 0, 2])
    step = walk(tree, torch.tensor([[6, 1, 4, 9]]), tree.ancestors(), depth=2)
    assert step.count.tolist() == [0]
    assert step.tokens[0, 0].item() == 6


@both_ways
def test_a_right_token_below_a_wrong_parent_is_not_accepted() -> None:
    tree = tree_of([7, 3, 4], [0, 0, 1])
    step = walk(tree, torch.tensor([[5, 4, 9]]), tree.ancestors(), depth=2)
    assert step.count.tolist() == [0]


@both_ways
def test_padding_and_duplicates_change_nothing() -> None:
    tree = tree_of([7, 5, 5, 4, PAD_TOKEN], [0, 0, 0, 2, 0])
    step = walk(tree, torch.tensor([[5, 4, 4, 9, 5]]), tree.ancestors(), depth=2)
    assert step.count.tolist() == [2]
    assert step.tokens.tolist() == [[5, 4, 9]]


@both_ways
@examples(100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_walk_equals_a_descent_by_hand(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    parents = [0] + [data.draw(st.integers(0, i - 1)) for i in range(1, count)]
    tokens = without_twins([data.draw(st.integers(0, 2)) for _ in range(count)], parents)
    choices = [data.draw(st.integers(0, 2)) for _ in range(count)]
    tree = tree_of(tokens, parents)
    depth = int(tree.depths.max())
    step = walk(tree, torch.tensor([choices]), tree.ancestors(depth), depth)

    node, path = 0, [0]
    while True:
        child = next(
            (i for i in range(1, count) if i != node and parents[i] == node and tokens[i] == choices[node]), None
        )
        if child is None:
            break
        node = child
        path.append(node)
    accepted = len(path) - 1
    assert step.count.tolist() == [accepted]
    assert step.path[0, : accepted + 1].tolist() == path
    assert step.tokens[0, : accepted + 1].tolist() == [choices[i] for i in path]


@pytest.mark.parametrize("asynchronous", [False, True])
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 4), nodes=st.integers(1, 9))
def test_a_descent_goes_where_the_walk_goes(
    asynchronous: bool, seed: int, rows: int, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it chooses nowhere else where the host may look."""
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: asynchronous)
    tree = random_trees(rows, nodes, 3, seed)
    choices = torch.randint(0, 3, (rows, tree.size), generator=torch.Generator().manual_seed(seed + 1))
    depth = int(tree.depths.max())
    asked = []

    def choose(of_rows: torch.Tensor, at_nodes: torch.Tensor) -> torch.Tensor:
        asked.append(len(of_rows))
        return choices[of_rows, at_nodes]

    walked, descended = walk(tree, choices, tree.ancestors(), depth), descend(tree, choose, depth)
    assert torch.equal(descended.count, walked.count)
    reached = torch.arange(depth + 1) <= walked.count[:, None]
    assert torch.equal(torch.where(reached, descended.path, 0), walked.path)
    assert torch.equal(descended.tokens[reached], walked.tokens[reached])
    assert sum(asked) == (rows * (depth + 1) if asynchronous else int((walked.count + 1).sum()))


def test_a_descent_leaves_zeros_past_its_end() -> None:
    tree = tree_of([7, 3, 5, 4], [0, 0, 0, 2])
    choices = torch.tensor([[3, 1, 4, 9]])
    step = descend(tree, lambda rows, nodes: choices[rows, nodes], depth=2)
    assert (step.path.tolist(), step.count.tolist(), step.tokens[0, :2].tolist()) == ([[0, 1, 0]], [1], [3, 1])


class LargestDoubles(TorchDispatchMode):
    """Notes how many numbers the largest float64 tensor has."""

    most = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple) else (made,):
            if isinstance(one, torch.Tensor) and one.dtype == torch.float64:
                self.most = max(self.most, one.numel())
        return made


def test_sampling_never_holds_the_scores_of_all_nodes() -> None:
    rows, nodes, vocabulary = 3, 16, 500
    params = [
        SamplingParams(temperature=0.7, top_p=0.9, top_k=40, presence_penalty=0.5, logit_bias={3: 1.0}, seed=row)
        for row in range(rows)
    ]
    table = SamplingTable.empty(rows, torch.device("cpu"))
    for row, one in enumerate(params):
        table.set(row, one, 1)
    tree = random_trees(rows, nodes, 3, seed=1)
    depth = int(tree.depths.max())
    logits = torch.randn(rows, nodes, vocabulary, generator=torch.Generator().manual_seed(0))
    verified = Verified(tree, tree.ancestors(depth), depth, logits, torch.zeros(rows, nodes, 1))
    tokens, lengths = torch.zeros(rows, 4, dtype=torch.long), torch.full((rows,), 3)
    with LargestDoubles() as noted:  # type: ignore[no-untyped-call]
        ExactVerifier().accept(verified, RowSampling(table, slice(0, rows), SamplingMode.of(params), tokens, lengths))
    assert noted.most == rows * vocabulary


DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_of_the_largest_is_the_likeliest(dtype: torch.dtype) -> None:
    logits = torch.tensor([[[1.0, 3.0, 3.0], [-1.0, -2.0, -math.inf]], [[0.0, 0.0, 0.0], [1.0, 2.0, 4.0]]], dtype=dtype)
    assert likeliest(logits).tolist() == [[1, 0], [0, 2]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_number_that_is_none_spoils_its_row_alone(dtype: torch.dtype) -> None:
    for spoilt in (math.nan, math.inf):
        logits = torch.zeros(3, 2, 5, dtype=dtype)
        logits[1, 1, 3] = spoilt
        assert are_sound(logits).tolist() == found_sound(logits) == [True, False, True]
        assert likeliest(logits)[1, 1] == 3
    logits = torch.zeros(1, 2, 5, dtype=dtype)
    logits[0, :, 1:] = -math.inf  # a token that never comes
    assert are_sound(logits).tolist() == found_sound(logits) == [True]


def found_sound(logits: torch.Tensor) -> list[bool]:
    """Return the soundness that a greedy acceptance reports of logits `[B, 2, V]`."""
    rows = len(logits)
    zeros = torch.zeros(rows, 2, dtype=torch.long)
    tree = TokenTree(zeros, zeros, zeros, zeros.float())
    table, lengths = SamplingTable.empty(rows, logits.device), torch.ones(rows, dtype=torch.long)
    sampling = RowSampling(table, slice(0, rows), SamplingMode.of([]), tree.tokens, lengths)
    accepted = ExactVerifier().accept(Verified(tree, tree.ancestors(), 1, logits, logits), sampling)
    assert accepted.sound is not None
    return list(accepted.sound.tolist())


def test_logits_need_not_lie_side_by_side() -> None:
    logits = torch.randn(6, 4, 40, generator=torch.Generator().manual_seed(0))
    part = logits[1:5, :, 3::2]
    assert torch.equal(likeliest(part), part.argmax(-1))
