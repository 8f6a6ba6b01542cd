"""Requests of different salts share no prefix, so that none can guess another's prompt, and share slots fairly."""

from __future__ import annotations

from collections import Counter

import pytest

from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.handle import Handle
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from tests.support.heads import make_head
from tests.support.models import SpellingTokenizer, finish, plainly, random_prompts, tokens_of

DIGITS = range(10, 20)  # their tokens
BEFORE = list(range(20, 40))  # the prompt up to the secret, which both know
SECRET = [19, 14, 15, 18, 10, 17, 13, 10]


def engine_of(base: BaseModel, slots: int, kept: int = 16) -> Engine:
    drafter = make_head(base, "ctc").drafter(base, 4)
    config = EngineConfig(max_num_seqs=slots, num_draft_tokens=4, kept_rows=kept)
    return Engine(base, drafter, SpellingTokenizer(), config)


class Attack:
    """Guesses at the prompt of a request that is under way, by what the engine counts; see `guess`."""

    def __init__(self, base: BaseModel, victim: str, attacker: str, secret: list[int] = SECRET, kept: int = 16) -> None:
        self._engine, self._victim, self._attacker = engine_of(base, 2, kept), victim, attacker
        self._secret = secret
        self._other: Handle | None = None

    def counted(self, known: list[int], digit: int) -> tuple[int, int]:
        """Ask for one token after a guess; return how many tokens of its prompt were copied and read."""
        if self._other is None or self._other.future.done():
            settings = SamplingParams(max_new_tokens=90, ignore_eos=True)
            self._other = self._engine.submit(
                Request([*BEFORE, *self._secret, 41], settings, salt=self._victim), stream=True
            )
            self._engine.step()
        before = self._engine.state()
        guess = Request([*BEFORE, *known, digit, 42], SamplingParams(max_new_tokens=1), salt=self._attacker)
        asked = self._engine.submit(guess)
        while not asked.future.done():
            self._engine.step()
        after = self._engine.state()
        return after.shared_tokens - before.shared_tokens, after.prefilled_tokens - before.prefilled_tokens

    def guess(self) -> list[int]:
        """Return the digits found one by one, as far as one differs from the others."""
        found: list[int] = []
        for _ in SECRET:
            counts = {digit: self.counted(found, digit) for digit in DIGITS}
            rare = [digit for digit, one in counts.items() if Counter(counts.values())[one] == 1]
            if len(rare) != 1:
                break
            found += rare
        return found


def test_a_prompt_of_the_same_salt_can_be_guessed(tiny_base: BaseModel) -> None:
    assert Attack(tiny_base, "key", "key", kept=0).guess() == SECRET  # what a guess leaves hides the next one's count


@pytest.mark.parametrize(("victim", "attacker"), [("one", "two"), ("one", ""), ("", "one")])
def test_a_prompt_of_another_salt_shows_in_nothing(tiny_base: BaseModel, victim: str, attacker: str) -> None:
    """Neither while that is decoded nor when it has ended: all is as it would be with another prompt there."""
    attacks = [Attack(tiny_base, victim, attacker, secret) for secret in (SECRET, SECRET[::-1])]
    for place in range(len(SECRET)):  # even with all digits before it right
        for digit in DIGITS:
            first, second = (attack.counted(SECRET[:place], digit) for attack in attacks)
            assert first == second


def test_those_that_enter_together_share_within_their_salt(tiny_base: BaseModel) -> None:
    engine = engine_of(tiny_base, 4)
    for salt in ("one", "two", "one", "two"):
        engine.submit(Request([*BEFORE, 5, 6], SamplingParams(max_new_tokens=9), salt=salt))
    engine.step()
    state = engine.state()
    assert (state.shared_tokens, state.prefilled_tokens) == (2 * 21, 2 * 21)


def many(count: int, salt: str, new_tokens: int) -> list[Request]:
    return [
        Request(prompt, SamplingParams(new_tokens, temperature=1.0, seed=row, ignore_eos=True), salt=salt)
        for row, prompt in enumerate(random_prompts(count, seed=len(salt)))
    ]


def test_one_salt_alone_has_all_slots_and_gives_others_their_share_at_once(tiny_base: BaseModel) -> None:
    engine = engine_of(tiny_base, 6)

    def held() -> Counter[str]:
        return Counter(one.salt for one in engine.scheduler.in_slots)

    requests = [*many(20, "greedy", 40), *many(5, "small", 8), *many(1, "late", 8)]
    handles = [engine.submit(request) for request in requests[:20]]
    engine.step()
    assert held() == {"greedy": 6}
    handles += [engine.submit(request) for request in requests[20:25]]
    for _ in range(3):
        engine.step()
    assert held() == {"greedy": 3, "small": 3}
    handles.append(engine.submit(requests[25]))
    engine.step()
    assert held() == {"greedy": 3, "small": 2, "late": 1} or held() == {"greedy": 2, "small": 3, "late": 1}
    while not all(handle.future.done() for handle in handles[20:]):
        engine.step()
    assert sum(handle.future.done() for handle in handles[:20]) < 6
    finish(engine)
    alone = plainly(tiny_base, requests)
    assert [handle.result(0).token_ids for handle in handles] == tokens_of(alone)


@pytest.mark.parametrize(("salt", "read_at_once"), [("greedy", 5 * 59), ("small", 32)])
def test_long_prompts_of_one_salt_do_not_hold_up_another(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch, salt: str, read_at_once: int
) -> None:
    monkeypatch.setattr("drafter.engine.scheduler.CHUNK", 32)
    engine = engine_of(tiny_base, 8)
    engine.submit(Request([5], SamplingParams(max_new_tokens=60, ignore_eos=True), salt=salt))
    engine.step()
    for first in range(5):
        engine.submit(Request([first + 3, *range(30, 89)], SamplingParams(max_new_tokens=1), salt="greedy"))
    engine.step()
    assert engine.state().prefilled_tokens == read_at_once


def test_without_salts_none_is_preempted(tiny_base: BaseModel) -> None:
    engine = engine_of(tiny_base, 2)
    for request in many(9, "", 8):
        engine.submit(request)
    finish(engine)
    assert engine.state().preemptions == 0


def test_a_donor_that_ends_while_a_strangers_prompt_is_read_has_given_what_it_has(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafter.engine.scheduler.CHUNK", 8)
    engine, shared = engine_of(tiny_base, 4), [*BEFORE, *SECRET]
    first = engine.submit(Request([*shared, 41], SamplingParams(8, ignore_eos=True), salt="one"), stream=True)
    while not first.future.done() and not engine.state().active:
        engine.step()
    stranger = engine.submit(Request([*range(10, 40)] * 4, SamplingParams(3, ignore_eos=True), salt="two"))
    engine.step()
    again = Request([*shared, 42], SamplingParams(8, ignore_eos=True), salt="one")
    second = engine.submit(again)
    while not first.future.done():
        engine.step()
    assert not stranger.future.done()
    finish(engine)
    assert engine.state().shared_tokens == len(shared)
    (alone,) = plainly(tiny_base, [again])
    assert second.result(0).token_ids == alone.token_ids
