"""Reasoning before a record."""

from __future__ import annotations

import pytest
import torch

from drafter.acceptance.choices import bits
from drafter.acceptance.guide import Guide
from drafter.methods.grammar.guide import AfterReasoning
from drafter.text.reasoning import Reasoning
from tests.support.guides import RuleGuide

BEGIN, END, EOS, SPACE, VOCABULARY = 63, 64, 2, 9, 70


class Tokenizer:
    def get_vocab(self) -> dict[str, int]:
        return {"<think>": BEGIN, "</think>": END, "a": 5}

    def decode(self, ids: list[int]) -> str:
        return "".join("\n" if one == SPACE else "a" for one in ids)


REASONING = Reasoning.of(Tokenizer())
ALL = set(range(VOCABULARY))


def guide_after(prompt: list[int]) -> Guide:
    """5 and 6, and the end."""
    inner = RuleGuide(lambda output: [[5], [6], [EOS]][len(output)], VOCABULARY, EOS)
    assert REASONING is not None
    inside = REASONING.begun(prompt, Tokenizer())
    return inner if inside is False else AfterReasoning(inner, REASONING, [EOS], inside=inside is True)


def allowed(guide: Guide) -> set[int]:
    mask = torch.zeros(3, dtype=torch.int32)
    guide.fill(mask)
    return set(bits(mask[None], VOCABULARY)[0].nonzero()[:, 0].tolist())


def test_a_model_without_such_tokens_does_not_reason() -> None:
    class Plain(Tokenizer):
        def get_vocab(self) -> dict[str, int]:
            return {"a": 5, "<think>": 7}

    assert Reasoning.of(Plain()) is None


def test_where_the_prompt_has_begun_it_the_record_waits_for_its_end() -> None:
    guide = guide_after([5, BEGIN, 5])
    assert (allowed(guide), list(guide.forced())) == (ALL - {EOS}, [])
    assert [guide.consume(token) for token in (6, EOS, 8, END)] == [True, False, True, True]
    assert (allowed(guide), list(guide.forced())) == ({5}, [5, 6, EOS])
    assert [guide.consume(token) for token in (6, 5, 6, EOS)] == [False, True, True, True]


def test_where_it_is_switched_off_the_record_comes_at_once() -> None:
    for prompt in ([5, BEGIN, END], [5, BEGIN, SPACE, END, SPACE]):
        assert allowed(guide_after(prompt)) == {5}


@pytest.mark.parametrize("prompt", [[5], [BEGIN, 8, END, 5, SPACE]], ids=["a first turn", "a later one"])
def test_the_model_may_begin_with_it_or_with_the_record(prompt: list[int]) -> None:
    guide = guide_after(prompt)
    assert (allowed(guide), list(guide.forced())) == ({5, BEGIN}, [])
    assert guide.consume(BEGIN)
    assert allowed(guide) == ALL - {EOS}
    guide.rewind(1)
    assert guide.consume(5)
    assert not guide.consume(BEGIN)
    assert allowed(guide) == {6}


def test_it_is_taken_back_token_by_token() -> None:
    """Its end may lie inside a draft, and the record's beginning, too."""
    guide = guide_after([5])
    draft, states = [BEGIN, 8, END, 5, 6, EOS], []
    for token in draft:
        states.append((allowed(guide), list(guide.forced())))
        assert guide.consume(token)
    for count in (1, 3, 2):
        guide.rewind(count)
        gone, states = states[-count:], states[:-count]
        assert (allowed(guide), list(guide.forced())) == gone[0]
