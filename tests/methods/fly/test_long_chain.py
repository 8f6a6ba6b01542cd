from __future__ import annotations

import pytest
import torch

from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec, PlainDecoding
from drafter.drafters.names import leaf_names, merged_names
from drafter.drafters.registry import load_drafter
from drafter.errors import LoadError
from drafter.methods.fly.method import FlyVerifier, LongChainDrafter, likeliest_path
from drafter.methods.ngram.drafter import NgramDrafter
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree, from_nodes, root_only
from tests.drafter.acceptance.test_contract import tree_of
from tests.support.models import AdversarialDrafter, run_engine, tokens_of


class Saying(Drafter):
    """Says the same tokens each time; nothing where there are none."""

    def __init__(self, *said: int) -> None:
        self.spec, self.said = DraftSpec(4, 4), said

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        if not self.said:
            return root_only(context.pending)
        tokens = torch.tensor([self.said]).expand(len(context.tokens), -1)
        place = torch.arange(len(self.said))
        probs = -(place + 1.0).expand(len(context.tokens), -1)
        return from_nodes(context.pending, tokens, (place - 1).expand_as(tokens), place + 1, probs, ask.nodes + 1)


def context_of(*texts: list[int]) -> DraftContext:
    lengths = [len(text) - 1 for text in texts]
    tokens = torch.zeros(len(texts), 40, dtype=torch.long)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    return DraftContext(tokens, None, torch.tensor(lengths), lengths)


def chains(tree: TokenTree) -> list[list[int]]:
    assert (tree.parents[:, 1:] == torch.where(tree.tokens[:, 1:] >= 0, torch.arange(tree.size - 1), 0)).all()
    assert (tree.log_probs.diff(dim=1).nan_to_num(0) <= 0).all()
    return [[token for token in row if token >= 0] for row in tree.tokens[:, 1:].tolist()]


def test_ngrams_go_on_where_the_drafter_ends() -> None:
    """After 3 4 the drafter says 7 8, and 7 8 was followed by 5 6 1 2 before."""
    context = context_of([7, 8, 5, 6, 1, 2, 3, 4], [7, 8, 9, 3, 4])
    tree = LongChainDrafter(Saying(7, 8), 6).propose(context, Ask(6))
    assert chains(tree) == [[7, 8, 5, 6, 1, 2], [7, 8, 9, 3, 4, 7]]
    shorter = LongChainDrafter(Saying(7, 8), 6).propose(context, Ask(3))
    assert chains(shorter) == [[7, 8, 5], [7, 8, 9]]


def test_a_text_that_goes_round_in_circles_is_followed_beyond_its_end() -> None:
    assert chains(LongChainDrafter(Saying(), 10).propose(context_of([1, 2, 3, 1, 2, 3]), Ask(10))) == [
        [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]
    ]


def test_without_a_match_the_chain_is_the_drafters_and_without_either_there_is_a_root() -> None:
    context = context_of([1, 2, 3])
    assert chains(LongChainDrafter(Saying(7, 8), 9).propose(context, Ask(9))) == [[7, 8]]
    assert chains(LongChainDrafter(Saying(), 9).propose(context, Ask(9))) == [[]]


def test_the_likeliest_path_takes_first_children() -> None:
    tree = tree_of([9, 3, 4, 5, 6], [0, 0, 0, 2, 1])
    tokens, log_probs = likeliest_path(tree, 4)
    assert tokens.tolist() == [[3, 6, -1, -1]]
    assert log_probs[0].isfinite().tolist() == [True, True, False, False]


def test_tokens_are_exact_and_chains_are_long_enough_for_fly(tiny_base: BaseModel) -> None:
    requests = [Request([5, 6, 7 + row, 5, 6], SamplingParams(24, ignore_eos=True)) for row in range(4)]
    expected = tokens_of(run_engine(tiny_base, PlainDecoding(), requests))
    for lower in (NgramDrafter(4), AdversarialDrafter(2)):
        found = run_engine(tiny_base, LongChainDrafter(lower, 15), requests, num_draft_tokens=15, max_num_seqs=3)
        assert tokens_of(found) == expected
    lenient = run_engine(
        tiny_base,
        LongChainDrafter(NgramDrafter(4), 15),
        requests,
        verifier=FlyVerifier(0.0, 6),
        num_draft_tokens=15,
        max_num_seqs=3,
    )
    assert all(one.verifier == "fly" for one in lenient)


def test_it_has_a_name(tiny_base: BaseModel) -> None:
    drafter = load_drafter("long:20:ngram", tiny_base, 8)
    assert (drafter.spec.max_nodes, drafter.spec.max_depth) == (20, 20)
    assert leaf_names("long:15:org/head") == ["org/head"]
    assert merged_names("long:15:ctc+memory") == ["long:15:ctc", "memory"]
    for name in ("long:ngram", "long:0:ngram", "long:15:", "long:many:ngram"):
        with pytest.raises(LoadError, match="use long:N:DRAFTER, such as long:15:ngram"):
            load_drafter(name, tiny_base, 8)
    with pytest.raises(LoadError, match="cannot be part of another"):
        load_drafter("long:15:auto", tiny_base, 8)
