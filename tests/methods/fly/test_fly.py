from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafter.acceptance.choices import RowSampling, SamplingMode, SamplingTable
from drafter.acceptance.contract import Accepted, Verified
from drafter.acceptance.lenient import shannon_entropy
from drafter.drafters.contract import PlainDecoding
from drafter.errors import LoadError, RequestError
from drafter.methods.fly.method import FlyVerifier, leading_entropy
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree
from tests.drafter.acceptance.test_contract import tree_of
from tests.support.models import EOS, AdversarialDrafter, OracleDrafter, random_prompts, run_engine, tokens_of
from tests.support.properties import examples

VOCABULARY = 12
WRONG = 11
"""A token that the base never chooses."""


def greedy(rows: int) -> RowSampling:
    table = SamplingTable.empty(rows, torch.device("cpu"))
    tokens, lengths = torch.zeros(rows, 4, dtype=torch.long), torch.ones(rows, dtype=torch.long)
    return RowSampling(table, slice(0, rows), SamplingMode.of([SamplingParams()]), tokens, lengths)


def said(tree: TokenTree, choices: list[int], entropies: list[float]) -> Verified:
    """A base that chooses these tokens, each with this entropy or, where it is 0, with certainty."""
    logits = torch.full((1, tree.size, VOCABULARY), -1e4)
    for node, (choice, entropy) in enumerate(zip(choices, entropies, strict=True)):
        logits[0, node, choice] = 0
        if entropy:
            other = (choice + 1) % VOCABULARY
            logits[0, node, other] = math.log(second_of(entropy) / (1 - second_of(entropy)))
    depth = int(tree.depths.max())
    return Verified(tree, tree.ancestors(), depth, logits, torch.zeros(1, tree.size, 0))


def second_of(entropy: float) -> float:
    """The smaller probability of two that have this entropy."""
    low, high = 0.0, 0.5
    for _ in range(60):
        mid = (low + high) / 2
        if -mid * math.log(mid) - (1 - mid) * math.log(1 - mid) < entropy:
            low = mid
        else:
            high = mid
    return low


def chain_of(matches: list[bool]) -> tuple[TokenTree, list[int]]:
    """A chain of drafts that are, or are not, what the base chooses at their parents; and the base's choices."""
    choices = [place % 5 for place in range(len(matches) + 1)]
    drafts = [choice if right else WRONG for choice, right in zip(choices, matches, strict=False)]
    return tree_of([9, *drafts], [0, *range(len(matches))]), choices


def accepted_of(matches: list[bool], entropies: list[float], verifier: FlyVerifier) -> Accepted:
    tree, choices = chain_of(matches)
    return verifier.accept(said(tree, choices, entropies), greedy(1))


def by_the_paper(matches: list[bool], entropies: list[float], theta: float, window: int) -> int:
    """How many drafts of a chain are accepted, place by place as in the paper and its code."""
    count, drafts = 0, len(matches)
    for place, right in enumerate(matches):
        if not right:
            if entropies[place] < theta or place >= drafts - window:
                break
            if not all(matches[place + 1 : place + window]):
                break
        count += 1
    return count


YES, NO = True, False


@pytest.mark.parametrize(
    ("matches", "accepted", "lenient"),
    [
        ([YES, YES, YES, YES], 4, []),
        ([NO, YES, YES, YES], 4, [0]),  # two matches follow, and one draft more
        ([NO, YES, NO, YES], 0, []),  # a second mismatch in the window
        ([YES, NO, YES, YES], 1, []),  # the last three places are strict
        ([YES, NO, YES, YES, YES], 5, [1]),
        ([NO, YES, YES, NO], 3, [0]),  # behind the window a mismatch is one by itself
        ([NO, YES, YES, NO, YES, YES, YES], 7, [0, 3]),
        ([NO, NO, YES, YES, YES], 0, []),
        ([YES, YES, YES, NO], 3, []),
    ],
)
def test_patterns_of_mismatches_in_a_window_of_three(matches: list[bool], accepted: int, lenient: list[int]) -> None:
    step = accepted_of(matches, [0.5] * (len(matches) + 1), FlyVerifier(theta=0.3, window=3))
    assert step.count.tolist() == [accepted]
    assert step.lenient is not None
    assert step.lenient[0].nonzero()[:, 0].tolist() == lenient
    tree, choices = chain_of(matches)
    assert step.tokens[0, : accepted + 1].tolist() == [*tree.tokens[0, 1 : accepted + 1].tolist(), choices[accepted]]


def test_a_certain_base_is_not_contradicted() -> None:
    matches = [NO, YES, YES, YES]
    assert accepted_of(matches, [0.2, *[0.6] * 4], FlyVerifier(0.3, 3)).count.tolist() == [0]
    assert accepted_of(matches, [0.4, *[0.0] * 4], FlyVerifier(0.3, 3)).count.tolist() == [4]


@examples(60)
@given(
    chain=st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.2, 0.4, 0.6])), min_size=1, max_size=9),
    theta=st.sampled_from([0.0, 0.3, 0.5, math.inf]),
    window=st.integers(1, 4),
)
def test_a_chain_is_accepted_as_the_paper_says(chain: list[tuple[bool, float]], theta: float, window: int) -> None:
    matches, entropies = [right for right, _ in chain], [*(value for _, value in chain), 0.0]
    step = accepted_of(matches, entropies, FlyVerifier(theta, window))
    assert step.count.tolist() == [by_the_paper(matches, entropies, theta, window)]


def test_a_mismatch_on_a_tree_needs_one_path_that_goes_on() -> None:
    """Below the mismatch at node 1 one branch ends at once, and the other has a match and one draft more."""
    tree = tree_of([9, WRONG, 3, 4, 5], [0, 0, 1, 1, 3])
    base = said(tree, [0, 4, 0, 0, 8], [0.5] * 5)
    step = FlyVerifier(0.3, 2).accept(base, greedy(1))
    assert step.tokens[0, :3].tolist() == [WRONG, 4, 0]
    assert FlyVerifier(0.3, 3).accept(base, greedy(1)).count.tolist() == [0]


def test_entropy_is_of_the_three_likeliest_tokens_and_not_scaled_up() -> None:
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    expected = -sum(p * math.log(p) for p in (0.4, 0.3, 0.2))
    assert leading_entropy(probabilities.log()).item() == pytest.approx(expected)
    assert shannon_entropy(torch.tensor([[0.0, -torch.inf]])).item() == 0


def test_an_infinite_threshold_gives_the_tokens_of_plain_decoding(tiny_base: BaseModel) -> None:
    requests = [Request([5, 6, 7 + row], SamplingParams(20, ignore_eos=True)) for row in range(4)]
    expected = run_engine(tiny_base, PlainDecoding(), requests)
    found = run_engine(
        tiny_base, AdversarialDrafter(1), requests, verifier=FlyVerifier(math.inf, 2), num_draft_tokens=8
    )
    assert tokens_of(found) == tokens_of(expected)
    assert all(not one.lossless and one.verifier == "fly" and not one.lenient for one in found)


def test_what_it_does_not_define_is_refused(tiny_base: BaseModel) -> None:
    with pytest.raises(RequestError, match=r"fly decodes greedily, and temperature is 0\.7: set it to 0"):
        run_engine(
            tiny_base,
            AdversarialDrafter(1),
            [Request([5], SamplingParams(temperature=0.7))],
            verifier=FlyVerifier(0, 2),
        )
    with pytest.raises(LoadError, match="fly looks 6 draft tokens ahead, and this drafter drafts only 5"):
        run_engine(tiny_base, AdversarialDrafter(1), [], verifier=FlyVerifier())
    with pytest.raises(ValueError, match="theta must be at least 0, not -1"):
        FlyVerifier(theta=-1)
    with pytest.raises(ValueError, match="window must be at least 1, not 0"):
        FlyVerifier(window=0)


def test_a_lenient_verifier_takes_no_forbidden_token(tiny_base: BaseModel) -> None:
    """Every mismatch is uncertain enough, and each token is drafted; yet the forbidden ones do not come."""
    prompt = random_prompts(1, seed=2)[0]
    (free,) = run_engine(tiny_base, OracleDrafter([]), [Request(prompt, SamplingParams(24, ignore_eos=True))])
    text = [*prompt, *free.token_ids]
    words = tuple(str(token) for token in set(free.token_ids[:6]) - {EOS})
    (found,) = run_engine(
        tiny_base,
        OracleDrafter([text]),
        [Request(prompt, SamplingParams(24, ignore_eos=True, bad_words=words))],
        FlyVerifier(theta=0.0, window=1),
        num_draft_tokens=6,
    )
    assert not {str(token) for token in found.token_ids} & set(words)
