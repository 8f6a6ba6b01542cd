from __future__ import annotations

import math

import pytest
import torch

from drafter.acceptance.choices import RowSampling, SamplingMode, SamplingTable
from drafter.acceptance.contract import Verified, Verifier
from drafter.drafters.contract import PlainDecoding
from drafter.methods.typical.verifier import TypicalVerifier
from drafter.requests import Generation, Request, SamplingParams
from drafter.target_model.model import BaseModel
from tests.drafter.acceptance.test_contract import tree_of
from tests.support.models import AdversarialDrafter, run_engine, tokens_of


def is_accepted(probabilities: list[float], token: int, settings: SamplingParams, verifier: Verifier) -> bool:
    """Whether a draft of `token`, which the row does not draw, is accepted."""
    table = SamplingTable.empty(1, torch.device("cpu"))
    logits = torch.tensor([[probabilities, probabilities]]).log()
    tree = tree_of([0, token], [0, 0])
    for seed in range(50):
        params = SamplingParams(**{**vars(settings), "seed": seed})
        table.set(0, params, 1)
        mode = SamplingMode.of([params])
        sampling = RowSampling(table, slice(0, 1), mode, torch.zeros(1, 4).long(), torch.ones(1).long())
        step = verifier.accept(Verified(tree, tree.ancestors(), 1, logits, torch.zeros(1, 2, 0)), sampling)
        assert step.lenient is not None
        if step.count.item() == 0:
            return False
        if step.lenient[0, 0]:
            return True
    raise AssertionError("it was drawn each time")


def entropy(probabilities: list[float]) -> float:
    return -sum(p * math.log(p) for p in probabilities if p)


DRAWN = SamplingParams(temperature=1.0)


def test_the_threshold_is_the_published_one() -> None:
    sharp = [0.96, 0.03, 0.01]  # an entropy of 0.19: the threshold is 0.09 e^-0.19 = 0.075
    flat = [0.4, 0.35, 0.25]
    assert 0.09 * math.exp(-entropy(sharp)) > 0.03
    assert not is_accepted(sharp, 1, DRAWN, TypicalVerifier())
    assert is_accepted(flat, 2, DRAWN, TypicalVerifier())
    # ε is the lower bound where δ asks for more.
    assert not is_accepted(flat, 2, DRAWN, TypicalVerifier(epsilon=0.3, delta=math.inf))
    assert is_accepted(flat, 1, DRAWN, TypicalVerifier(epsilon=0.3, delta=math.inf))


def test_the_distribution_is_the_one_that_the_row_draws_from() -> None:
    flat = [0.4, 0.35, 0.25]
    assert not is_accepted(flat, 2, SamplingParams(temperature=1.0, top_k=2), TypicalVerifier())
    assert not is_accepted(flat, 2, SamplingParams(temperature=1.0, logit_bias={2: -100.0}), TypicalVerifier())
    assert not is_accepted(flat, 2, SamplingParams(temperature=0.1), TypicalVerifier())


def test_greedy_rows_are_decoded_exactly() -> None:
    assert not is_accepted([0.4, 0.35, 0.25], 1, SamplingParams(), TypicalVerifier())


def generated(base: BaseModel, verifier: Verifier | None) -> list[Generation]:
    requests = [
        Request([5, 6, 7 + row], SamplingParams(20, temperature=row % 2, seed=row, ignore_eos=True)) for row in range(6)
    ]
    drafter = AdversarialDrafter(1) if verifier else PlainDecoding()
    return run_engine(base, drafter, requests, verifier=verifier, num_draft_tokens=8, max_num_seqs=3)


def test_the_limit_is_exact_and_below_it_leniency_is_marked(tiny_base: BaseModel) -> None:
    expected = tokens_of(generated(tiny_base, None))
    assert tokens_of(generated(tiny_base, TypicalVerifier(1, math.inf))) == expected
    found = generated(tiny_base, TypicalVerifier(0, 0))  # accepts every draft of a row that draws
    assert tokens_of(found[::2]) == expected[::2]
    assert not any(one.lenient for one in found[::2])
    for one in found[1::2]:
        assert one.lenient
        assert one.lenient == sorted(set(one.lenient))
        assert one.lenient[-1] < len(one.token_ids)
        assert len(one.lenient) <= one.counts.num_accepted_draft_tokens


def test_what_is_not_a_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"epsilon must be between 0 and 1, not 1.5"):
        TypicalVerifier(epsilon=1.5)
    with pytest.raises(ValueError, match="delta must be at least 0, not nan"):
        TypicalVerifier(delta=math.nan)
