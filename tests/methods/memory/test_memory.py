"""`memory` drafts from all texts, or from a text's own alone, and changes no token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drafter.drafters.contract import Drafter, Loan, PlainDecoding
from drafter.drafters.merged import MergedDrafter
from drafter.drafters.registry import load_drafter
from drafter.methods.memory.drafter import NOTHING, Matches, MemoryDrafter, Trust, vote
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import from_nodes
from tests.support.models import engine_of, finish, run_engine, tokens_of
from tests.support.trees import check_slice_contract, nodes


def test_matches_vote_and_share_their_beginnings() -> None:
    paths = np.array([[[5, 6, 7], [5, 8, NOTHING], [9, 6, 7]]], np.int64)
    matches = Matches(np.array([[3, 2, 2]]), paths, np.zeros((1, 3), np.int64))
    candidates = vote(matches, np.log(np.full((1, 8), 0.5)))
    tokens, parents, depths, log_probs = (torch.from_numpy(part) for part in candidates)
    tree = from_nodes(torch.tensor([1]), tokens, parents, depths, log_probs, 7)
    # Weights 8, 4 and 4; each token is right half of the time.
    expected = {(5,): 12 / 16 / 2, (9,): 4 / 16 / 2, (5, 6): 8 / 16 / 4, (5, 8): 4 / 16 / 4, (5, 6, 7): 8 / 16 / 8}
    expected |= {(9, 6): 4 / 16 / 4}
    assert nodes(tree, 0, 3) == pytest.approx(expected)
    check_slice_contract(tree)


def test_trust_follows_what_came_true() -> None:
    trust = Trust(4)
    for _ in range(1000):
        trust.learn(2, [7, 8, 9], [7, 3])  # a match of two is right, and then one of three is wrong
        trust.learn(0, [7], [7])  # no match
        trust.learn(4, [NOTHING], [7])  # nothing was drafted
    shares = np.exp(trust.log_shares())
    assert shares[2] > 0.99 > 0.01 > shares[3]
    assert shares[4] == 0.5


def requests(count: int, temperature: float = 0.0) -> list[Request]:
    """Requests of which every fourth has the same prompt."""
    prompts = [[5 + row % 4, 6, 7, 8, 9, 10 + row % 4] * 3 for row in range(count)]
    return [
        Request(prompt, SamplingParams(12 + row % 5, temperature=temperature, seed=row % 2, ignore_eos=True), str(row))
        for row, prompt in enumerate(prompts)
    ]


def test_rows_learn_from_each_other_unless_they_are_isolated(tiny_base: BaseModel) -> None:
    asked = requests(16)

    def accepted(isolated: bool) -> int:
        found = run_engine(tiny_base, MemoryDrafter(7, isolated=isolated), asked, max_num_seqs=2, num_draft_tokens=7)
        return sum(one.counts.num_accepted_draft_tokens for one in found)

    together, apart = accepted(isolated=False), accepted(isolated=True)
    assert together > 1.3 * apart


def test_isolated_rows_are_drafted_as_if_they_were_alone(tiny_base: BaseModel) -> None:
    """What others have said shows in nothing: not in the number of steps, and not in what was drafted."""
    first, second = requests(2)
    alone = run_engine(tiny_base, MemoryDrafter(7, isolated=True), [second], max_num_seqs=1, num_draft_tokens=7)[
        0
    ].counts
    drafter = MemoryDrafter(7, isolated=True)
    assert run_engine(tiny_base, drafter, [first, first, second], max_num_seqs=1, num_draft_tokens=7)[2].counts == alone


def accepted_of(base: BaseModel, drafter: Drafter, asked: list[Request]) -> int:
    return sum(
        one.counts.num_accepted_draft_tokens
        for one in run_engine(base, drafter, asked, max_num_seqs=1, num_draft_tokens=7)
    )


class ToldDrafter(MergedDrafter):
    """Is told of texts when it opens, as by another thread before the first step."""

    def __init__(self, told: list[list[int]], member: Drafter) -> None:
        super().__init__(member, PlainDecoding())
        self._texts = told

    def open(self, loan: Loan) -> None:
        super().open(loan)
        (self.memory,) = (one for one in self.drafters if isinstance(one, MemoryDrafter))
        self.memory.remember(self._texts)


def test_texts_from_elsewhere_are_drafted_from_and_change_no_token(tiny_base: BaseModel) -> None:
    asked = requests(1)
    (plain,) = run_engine(tiny_base, PlainDecoding(), asked)
    told = [[*asked[0].prompt_ids, *plain.token_ids], [3] * 5]
    drafter = ToldDrafter(told, MemoryDrafter(7))
    (found,) = run_engine(tiny_base, drafter, asked, num_draft_tokens=7)
    assert found.token_ids == plain.token_ids
    assert found.counts.num_accepted_draft_tokens > accepted_of(tiny_base, MemoryDrafter(7), asked)
    # What the last steps have added is entered with the next one.
    entered = drafter.memory.memory.tokens - len(told[0]) - len(told[1]) - len(asked[0].prompt_ids)
    assert 0 <= entered <= len(plain.token_ids)
    assert drafter.memory.memory.room > 0


def test_isolated_rows_are_told_of_no_others(tiny_base: BaseModel) -> None:
    asked = requests(1)
    (plain,) = run_engine(tiny_base, PlainDecoding(), asked)
    told = ToldDrafter([[*asked[0].prompt_ids, *plain.token_ids]], MemoryDrafter(7, isolated=True))
    assert accepted_of(tiny_base, told, asked) == accepted_of(tiny_base, MemoryDrafter(7, isolated=True), asked)
    assert told.memory.memory.room == 0


def test_the_engine_says_how_much_is_remembered(tiny_base: BaseModel) -> None:
    drafter = MemoryDrafter(7, capacity=1000)
    engine = engine_of(tiny_base, drafter, max_num_seqs=2, num_draft_tokens=7)
    assert (engine.state().memory_tokens, engine.state().memory_bytes) == (0, drafter.memory.nbytes)
    engine.submit(Request([5, 6, 7], SamplingParams(4, ignore_eos=True)))
    finish(engine)
    assert 3 <= engine.state().memory_tokens <= 7


def test_memory_by_name(tiny_base: BaseModel) -> None:
    drafter = load_drafter("memory+ngram", tiny_base, 6, isolated=True)
    expected = run_engine(tiny_base, PlainDecoding(), requests(4), max_num_seqs=2)
    found = run_engine(tiny_base, drafter, requests(4), max_num_seqs=2, num_draft_tokens=6)
    assert tokens_of(found) == tokens_of(expected)
