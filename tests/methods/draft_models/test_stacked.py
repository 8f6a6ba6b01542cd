"""A stack passes on the best nodes under its upper model, and never changes a token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec
from drafter.drafters.model_drafter import ModelDrafter
from drafter.methods.cacheback.drafter import CachebackDrafter
from drafter.methods.draft_models.drafter import StackedDrafter, reprice
from drafter.requests import Request, SamplingParams
from drafter.tree.token_tree import TokenTree, root_only
from tests.support.models import VOCABULARY, AdversarialDrafter, base_of, random_prompts, run_engine
from tests.support.properties import examples
from tests.support.trees import FORK, check_slice_contract, nodes


def test_nodes_are_priced_anew_cut_and_extended() -> None:
    """After 7 the model says 5, and 3 in one of four cases; after 5 it says 1, not 4; after 3 it says 3."""
    probabilities = torch.zeros(1, 4, 8)
    probabilities[0, 0, [3, 5]] = torch.tensor([0.25, 0.75])
    probabilities[0, 1, [3, 2]] = torch.tensor([0.8, 0.2])
    probabilities[0, 2, [1, 4]] = torch.tensor([0.9, 0.1])
    probabilities[0, 3, [6, 0]] = torch.tensor([0.6, 0.4])
    tree = reprice(FORK, probabilities.log(), own=1, depth=3, size=7)
    check_slice_contract(tree)
    expected = {(5,): 0.75, (5, 1): 0.675, (3,): 0.25, (3, 3): 0.2, (5, 4): 0.075, (5, 4, 6): 0.045}
    assert nodes(tree, 0, 3) == pytest.approx(expected)
    assert nodes(reprice(FORK, probabilities.log(), own=1, depth=2, size=3), 0, 3).keys() == {(5,), (5, 1)}


@examples(60)
@given(st.integers(0, 1 << 30), st.integers(1, 5), st.integers(2, 30))
def test_a_priced_tree_is_a_tree(seed: int, own: int, size: int) -> None:
    """Of trees full of duplicates, padding and repeats."""
    torch.manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (3, 12))
    context = DraftContext(tokens, None, torch.tensor([4, 9, 11]), [4, 9, 11])
    tree = AdversarialDrafter(seed).propose(context, Ask(9))
    log_probs = (torch.randn(3, 10, VOCABULARY) * 5).log_softmax(-1)
    priced = reprice(tree, log_probs, own, 6, size)
    check_slice_contract(priced)
    for row in range(3):
        found = nodes(priced, row, 6)
        drawn = nodes(tree, row, 6)
        paths = {(), *drawn}
        for path, probability in found.items():
            assert path[:-1] in paths  # at most one token more than was drafted
            assert 0 < probability <= 1.0


class Nothing(Drafter):
    """Has nothing to propose."""

    spec = DraftSpec(4, 4)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        root = root_only(context.pending)
        padding = torch.nn.functional.pad
        return TokenTree(
            padding(root.tokens, (0, ask.nodes), value=-1),
            padding(root.parents, (0, ask.nodes)),
            padding(root.depths, (0, ask.nodes), value=1),
            padding(root.log_probs, (0, ask.nodes), value=-torch.inf),
        )


def test_a_model_continues_where_the_lower_drafter_has_nothing() -> None:
    base = base_of("llama")
    requests = [Request(prompt, SamplingParams(12, ignore_eos=True)) for prompt in random_prompts(3, seed=2)]
    for one in run_engine(base, StackedDrafter(Nothing(), base, base, 4), requests, max_num_seqs=2, num_draft_tokens=4):
        assert one.counts.acceptance_histogram == [0, 6]


def test_a_stack_of_models_can_be_part_of_a_graph() -> None:
    base = base_of("llama")
    assert StackedDrafter(ModelDrafter(base_of("llama", 1), base, 8), base, base, 4).spec.graph_safe
    assert not StackedDrafter(CachebackDrafter(8), base, base, 4).spec.graph_safe


def test_what_the_model_does_not_believe_the_base_does_not_see() -> None:
    """The upper model is the base itself, so all that is accepted of greedy text comes first in its trees."""
    base, other = base_of("llama"), base_of("llama", 1)
    requests = [Request(prompt, SamplingParams(20, ignore_eos=True)) for prompt in random_prompts(5, seed=2)]
    alone = run_engine(base, CachebackDrafter(2), requests, max_num_seqs=3, num_draft_tokens=2)
    above = run_engine(
        base, StackedDrafter(CachebackDrafter(4), base, base, 2), requests, max_num_seqs=3, num_draft_tokens=2
    )
    wrong = run_engine(
        base, StackedDrafter(CachebackDrafter(4), other, base, 2), requests, max_num_seqs=3, num_draft_tokens=2
    )
    steps = [sum(one.counts.num_decode_steps for one in found) for found in (alone, above, wrong)]
    assert steps[1] <= 50 < min(steps[0], steps[2])
