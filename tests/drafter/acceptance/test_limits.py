"""Tokens that may not be chosen: the rule of one request, and the words that it tokenises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from drafter.acceptance.limits import Limits, LimitTable, bad_word_tokens
from drafter.embedded import EMBEDDED_BASE
from drafter.errors import RequestError
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from tests.support.models import EOS, AdversarialDrafter, OracleDrafter, SpellingTokenizer, random_prompts, run_engine


def limits_of(**settings: Any) -> Limits:
    found = Limits.of(SamplingParams(**settings), [EOS], SpellingTokenizer())
    assert found is not None
    return found


def test_the_rule() -> None:
    assert Limits.of(SamplingParams(logit_bias={5: 1.0}), [EOS], SpellingTokenizer()) is None
    early = limits_of(min_tokens=2, stop_token_ids=[7], ignore_eos=True)
    assert [early.permits(one) for one in ([EOS], [7], [6], [6, 7], [6, 6, 7], [6, 6, EOS])] == [
        False, False, True, False, True, True,
    ]  # fmt: skip
    only = limits_of(allowed_token_ids=[5, EOS])
    assert [only.permits([one]) for one in (EOS, 4, 5)] == [True, False, True]
    words = limits_of(bad_words=["3", "1 2"])
    assert [words.permits(one) for one in ([3], [1], [1, 2], [2], [1, 1, 2], [1, 5, 2])] == [
        False, True, False, True, False, True,
    ]  # fmt: skip


def test_words_are_tokenised_with_and_without_a_space() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_BASE)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    assert (len(ids("the")), len(ids(" the"))) == (2, 1)
    assert bad_word_tokens(tokenizer, ("the", " the", "the")) == (ids("the"), ids(" the"))
    assert ids(" !")[1:] == ids("!")
    assert bad_word_tokens(tokenizer, ("!",)) == (ids("!"),)  # the space is a token of its own
    with pytest.raises(RequestError, match=r"bad_words may have words of 1 to 32 tokens, and 'xq xq.* has 81"):
        bad_word_tokens(tokenizer, ("xq " * 40,))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"min_tokens": -1}, "min_tokens must be an integer of at least 0, not -1"),
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens 9 is more than max_new_tokens 8"),
        ({"bad_words": 5}, "bad_words must be a list of non-empty strings, not 5"),
        ({"bad_words": ["a", ""]}, "bad_words must be a list of non-empty strings"),
        ({"bad_words": ["a"] * 1025}, "bad_words may have up to 1024 strings, not 1025"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids must be a list of token ids"),
    ],
)
def test_settings_that_cannot_be_used(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        SamplingParams(**settings)


def test_no_first_token_or_one_outside_the_vocabulary_is_refused(tiny_base: BaseModel) -> None:
    for settings, complaint in (
        ({"allowed_token_ids": [5, 97]}, "allowed_token_ids has token 97, outside the vocabulary of 97"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "forbid all of allowed_token_ids: no token is left"),
        ({"max_new_tokens": None, "min_tokens": 300}, "min_tokens 300 is more than max_new_tokens 256"),
    ):
        with pytest.raises(RequestError, match=complaint):
            run_engine(tiny_base, OracleDrafter([]), [Request([5, 6], SamplingParams(**settings))])


@pytest.mark.parametrize("drafts", [0, 10])
def test_a_dead_end_is_an_error_of_its_row(tiny_base: BaseModel, drafts: int) -> None:
    stuck = SamplingParams(9, allowed_token_ids=(5, 6), bad_words=("5 5", "5 6", "6 6", "6 5"))
    free = SamplingParams(9)
    for temperature in (0.0, 1.0):
        rows = [
            Request([7, 8, 9], one) for one in (free, SamplingParams(**{**vars(stuck), "temperature": temperature}))
        ]
        expected = run_engine(tiny_base, AdversarialDrafter(seed=1), rows[:1])[0].token_ids
        with pytest.raises(RequestError, match="no token is left to choose after 1 generated ones"):
            run_engine(tiny_base, AdversarialDrafter(seed=1), rows[1:], num_draft_tokens=drafts)
        with pytest.raises(RequestError, match="no token is left"):
            run_engine(tiny_base, AdversarialDrafter(seed=1), [rows[1], rows[0]], num_draft_tokens=drafts)
        assert run_engine(tiny_base, AdversarialDrafter(seed=1), rows[:1])[0].token_ids == expected


def test_what_is_generated_obeys(tiny_base: BaseModel) -> None:
    prompts = random_prompts(6, seed=2)
    free = run_engine(tiny_base, OracleDrafter([]), [Request(one, SamplingParams(20)) for one in prompts])
    for prompt, one in zip(prompts, free, strict=True):
        first, second, *_ = [*one.token_ids, EOS, EOS]
        (found,) = run_engine(
            tiny_base,
            AdversarialDrafter(seed=3),
            [Request(prompt, SamplingParams(20, min_tokens=20, bad_words=(f"{first} {second}",)))],
            num_draft_tokens=8,
        )
        assert len(found.token_ids) == 20
        assert EOS not in found.token_ids
        pairs = set(zip(found.token_ids, found.token_ids[1:], strict=False))
        assert (first, second) not in pairs


def test_a_slot_keeps_nothing_of_the_request_before() -> None:
    table, slots = LimitTable(2, torch.device("cpu")), torch.tensor([0, 1])

    def forbidden() -> list[list[int]]:
        found = table.forbidden(slots, torch.tensor([0, 0]), torch.full((2, table.words.shape[2] - 1), -1), 6)
        return [row.nonzero()[:, 0].tolist() for row in found]

    assert forbidden() == [[], []]
    table.set(0, Limits(frozenset([1, 2, 3]), frozenset([3]), 1, ((2,), (4, 1))), 6)
    assert forbidden() == [[0, 2, 3, 4, 5], []]
    table.set(1, Limits(bad_words=((5,), (4, 3, 2))), 6)
    assert forbidden() == [[0, 2, 3, 4, 5], [5]]
    table.set(0, Limits(early=frozenset([1, 9]), min_tokens=1, bad_words=((2, 7), (3,))), 6)  # 7 and 9 cannot come
    assert forbidden() == [[1, 3], [5]]
    table.move(1, 0)
    table.set(1, None, 6)
    assert forbidden() == [[5], []]
    table.set(0, Limits(early=frozenset([1]), min_tokens=10**30), 6)  # more than an integer of the device has
    assert forbidden() == [[1], []]
