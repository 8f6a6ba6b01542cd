"""The state of an output under a grammar."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafter.acceptance.choices import bits
from drafter.acceptance.guide import Guide, PutOff
from drafter.embedded import EMBEDDED_BASE
from drafter.methods.grammar.compiling import MOST_FORCED
from drafter.methods.grammar.grammars import Grammars
from drafter.methods.grammar.spelling import Spelling
from drafter.structured_outputs import StructuredOutputs
from drafter.text.tokenizers import load_tokenizer
from tests.support.properties import examples

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer"},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
RECORD = '{"name": "x y", "count": -12, "kind": "b"}'


@cache
def tokenizer() -> Any:
    return load_tokenizer(str(EMBEDDED_BASE))


def vocabulary() -> int:
    return len(tokenizer())


def eos() -> int:
    return int(tokenizer().eos_token_id)


@cache
def shared() -> Grammars:
    return Grammars(tokenizer(), vocabulary(), [eos()])


def guide_of(**asked: Any) -> Guide:
    return shared().guide(StructuredOutputs(**asked), [5])


def allowed(guide: Guide) -> set[int]:
    mask = torch.full(((vocabulary() + 31) // 32,), 7, dtype=torch.int32)
    guide.fill(mask)
    return set(bits(mask[None], vocabulary())[0].nonzero()[:, 0].tolist())


def encoded(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)  # type: ignore[no-any-return]


def test_a_record_is_followed_to_its_end_and_no_further() -> None:
    guide = guide_of(json=SCHEMA)
    for token in encoded(RECORD):
        assert token in allowed(guide)
        assert not guide.consume(eos())
        assert guide.consume(token)
    assert (list(guide.forced()), allowed(guide)) == ([eos()], {eos()})
    assert not guide.consume(encoded("x")[0])
    assert guide.consume(eos())
    assert (list(guide.forced()), guide.consume(eos())) == ([], False)


def test_what_is_taken_back_may_come_again() -> None:
    guide = guide_of(json=SCHEMA)
    states = []
    for token in [*encoded(RECORD), eos()]:
        states.append((list(guide.forced()), allowed(guide)))
        assert guide.consume(token)
    for count in (1, 2, 5, len(states) - 8):
        guide.rewind(count)
        gone, states = states[-count:], states[:-count]
        assert (list(guide.forced()), allowed(guide)) == gone[0]
    assert states == []


@examples(30)
@given(st.randoms(use_true_random=False), st.sampled_from(["json", "regex", "choice", "grammar"]))
def test_masks_tokens_and_forced_runs_agree(random: Any, kind: str) -> None:
    """Along a random text, what is consumed is what the mask has, and what is forced may follow."""
    asked = {
        "json": SCHEMA,
        "regex": r"[a-c]{2,5}(\.[0-9]+)?",
        "choice": ["yes", "no", "yes, of course"],
        "grammar": 'start: "[" (word ("," word)*)? "]"\nword: /[a-z]{1,3}/',
    }
    guide = guide_of(**{kind: asked[kind]})
    for _ in range(20):
        mask = allowed(guide)
        for token in random.sample(range(vocabulary()), 20):
            consumed = guide.consume(token)
            # A mask also leaves out other tokenisations of what is forced.
            assert consumed or token not in mask
            guide.rewind(int(consumed))
        run = list(guide.forced())
        assert not run or mask == {run[0]}
        taken = 0
        for token in run:
            assert token in allowed(guide)
            taken += guide.consume(token)
        assert taken == len(run)
        guide.rewind(taken)
        token = random.choice(sorted(mask))
        assert guide.consume(token)
        if token == eos():
            break


def test_a_forced_run_gets_shorter_as_it_comes() -> None:
    guide = guide_of(json=SCHEMA)
    run = list(guide.forced())
    assert tokenizer().decode(run) == '{"name": "'
    for place, token in enumerate(run):
        assert list(guide.forced())[: len(run) - place] == run[place:]
        assert guide.consume(token)


LONG = "The quick brown fox. " * 190  # several times as long as what is tokenised at a time


@examples(10)
@given(st.randoms(use_true_random=False), st.sampled_from(["a record", "a long text", "long texts"]))
def test_what_may_follow_depends_on_nothing_but_the_output(random: Any, kind: str) -> None:
    """Not on what else has been asked, consumed and taken back: a draft tree must change nothing."""
    asked = {
        "a record": StructuredOutputs(json=SCHEMA),
        "a long text": StructuredOutputs(regex=f"[ab]{LONG}[0-9]"),
        "long texts": StructuredOutputs(choice=(LONG + "x", "b", LONG[:300] + "y")),
    }[kind]
    grammars = shared()
    guide, output = grammars.guide(asked, []), list[int]()
    for _ in range(6):
        for _ in range(random.choice([1, 5, 300])):  # on, to the end of runs and beyond
            if guide.ended:
                break
            token = next(iter(guide.forced()), None)
            token = random.choice(sorted(allowed(guide))) if token is None else token
            assert guide.consume(token)
            output.append(token)
        guide.rewind(int(guide.consume(random.randrange(vocabulary()))))
        back = random.randrange(len(output) + 1) if random.random() < 0.3 else random.randrange(min(4, len(output) + 1))
        guide.rewind(back)
        output = output[: len(output) - back]
        plain = grammars.guide(asked, [], "another one's")
        assert all(plain.consume(token) for token in output)
        assert (list(guide.forced()), allowed(guide)) == (list(plain.forced()), allowed(plain))
        assert (guide.ended, guide.problem) == (plain.ended, None)


def test_a_forced_text_is_tokenised_once_however_many_drafts_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = StructuredOutputs(choice=(LONG,))
    guide = shared().guide(asked, [])
    tokenised: list[int] = []
    call = Spelling.__call__

    def counted(self: Spelling, text: str) -> list[int]:
        tokenised.append(len(text))
        return call(self, text)

    monkeypatch.setattr(Spelling, "__call__", counted)
    steps = 0
    while not guide.ended:
        run = list(guide.forced())[:8]
        drafted = [guide.consume(token) for token in run]
        allowed(guide)
        guide.rewind(sum(drafted))
        assert guide.consume(min(allowed(guide)))
        steps += 1
    assert steps > 300
    assert len(tokenised) < steps / 10
    assert sum(min(one, 1000) for one in tokenised) < 10 * len(LONG)


def test_more_than_may_be_forced_at_once_ends_that_output_alone() -> None:
    """So far into it that a trial does not see it."""
    guide = guide_of(regex=f"[0-9]{{20}}(y|z{'x' * (MOST_FORCED + 1)})")
    assert all(guide.consume(token) for token in encoded("1") * 20)
    (long,), (short,) = encoded("z"), encoded("y")
    for _ in range(2):
        assert guide.consume(long)
        assert (list(guide.forced()), allowed(guide)) == ([], set())
        assert "leaves no choice for more than 16,384 bytes" in str(guide.problem)
        guide.rewind(1)
        assert guide.problem is None
    assert guide.consume(short)
    assert guide.consume(eos())


@pytest.mark.parametrize("asked", [{"json": SCHEMA}, {"json_object": True}, {"choice": ["a", "b"]}])
def test_guides_of_one_grammar_are_apart(asked: dict[str, Any]) -> None:
    grammars = Grammars(tokenizer(), vocabulary(), [eos()])
    first, second = (grammars.guide(StructuredOutputs(**asked), [5]) for _ in range(2))
    before = allowed(second)
    assert first.consume(min(allowed(first)))
    assert allowed(second) == before


def test_masks_that_are_put_off_are_those_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made one by one, or by llguidance's threads where they are many; what numbers forbid comes after it."""
    words, texts = (
        (vocabulary() + 31) // 32,
        ['{"name": "x', '{"name": "y z", "count": -1', '{"name": "q", "count": 7, ', "{"],
    )
    for many in (1, 1000):
        monkeypatch.setattr("drafter.methods.grammar.guide._MANY", many)
        found, expected, later = torch.zeros(2 * len(texts), words, dtype=torch.int32), [], PutOff()
        for place, text in enumerate(texts):
            guide = guide_of(json=SCHEMA)
            for token in encoded(text):
                assert guide.consume(token)
            expected.append(allowed(guide))
            guide.fill(found[2 * place], later)
            (token, *_) = expected[-1]
            assert guide.consume(token)
            expected.append(allowed(guide))
            guide.fill(found[2 * place + 1], later)
            guide.rewind(1)
        later.do()
        assert [set(row.nonzero()[:, 0].tolist()) for row in bits(found, vocabulary())] == expected
